"""A `Report` holds the results of a run: each layer's format and error, the sizes, and the measured loss.

`quant.report.summary` prints it, and `quant.report.render` makes its HTML page. A checkpoint has both as files.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from quant.base.atomic import write_atomically
from quant.base.errors import UserError, listed, option
from quant.base.json_files import JsonData, read_json, typed, write_json
from quant.base.processor import peak_rss
from quant.calibration.allocation.goal import AllocationRecord
from quant.calibration.attention_names import text_config
from quant.calibration.layer_result import LayerResult
from quant.calibration.sensitivity.costs import mixed_cache_bytes
from quant.calibration.sensitivity.table import Sensitivity
from quant.evaluation.evaluation import Evaluation, Examples, Fingerprint
from quant.export.checkpoint.files.tensor_file import sha256_of
from quant.kernels.attention.kv_pages import HEAD_DIMS
from quant.models.files import companion_files
from quant.models.gguf_architectures import head_dim
from quant.recipes.plan import PLAN_FILE, Plan

SCHEMA_VERSION = 1
# Fields that `to_dict` leaves out if they are None, so that the report of a plain run stays short.
_PARTS = ("sensitivity", "allocation", "receipt", "kv_cache", "distillation", "fingerprint", "examples")


@dataclass(frozen=True)
class LayerReceipt(JsonData):
    """The relative deviation of one layer at each stage of an export; None for stages that were not run."""

    name: str
    fake_quant: float | None  # the layer in PyTorch, from the textbook in float64
    checkpoint: float | None  # the weight in the checkpoint's files, from the layer's
    onnx: float | None  # the layer's nodes in the graph, from the layer
    engine: float | None  # the weight in the engine, from the layer's
    passed: bool  # whether every stage is within its tolerance


@dataclass(frozen=True)
class Audit(JsonData):
    """The format in which the engine should run a layer, and the one in which it does."""

    name: str
    planned: str
    found: str
    passed: bool


@dataclass(frozen=True)
class Receipt(JsonData):
    """The check of an export against the model; `passed` is the verdict on all of it."""

    layers: tuple[LayerReceipt, ...]
    audit: tuple[Audit, ...]
    passed: bool

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """Makes a receipt from the fields of its file, where either list may be missing; ValueError for wrong ones."""
        # The file has further fields, which the page does not show.
        whole = typed(dict[str, Any], fields, "receipt")
        own = {key: value for key, value in whole.items() if key in ("layers", "audit", "passed")}
        return super().from_dict({"layers": (), "audit": (), **own})


@dataclass(frozen=True)
class KVCache(JsonData):
    """The size of the KV cache of a served model."""

    nbytes: int  # over all layers, in the plan's format
    context: int  # tokens in a sequence
    batch: int  # sequences
    width: int = 0  # values of a head, where our kernels hold none of that width


@dataclass(frozen=True)
class Distillation(JsonData):
    """The training of a quantized model on its teacher's outputs, and its figures before."""

    start: str  # the quantized checkpoint that training began with
    teacher: str
    data: str
    steps: int  # of the optimizer
    batch: int  # rows a step
    seqlen: int
    rate: float  # peak learning rate
    scales: str  # "frozen" or "learned"
    losses: tuple[float, ...]  # mean of each tenth of the steps
    before: Evaluation | None = None  # the start on the evaluation texts
    train: str = "weights"  # those that are quantized; or "norms", the weights of norms alone


@dataclass
class Report(JsonData):
    """The results of a run.

    Attributes:
        model: name of the model, as the user gave it.
        layers: one result for each layer of the plan, in model order.
        bytes_before: bytes of all weights as they were.
        bytes_after: bytes of all weights now; of a checkpoint, of all tensors in its weight files.
        effective_bits: bits per weight over the quantized layers.
        evaluation: measured figures, if the run measured any.
        plan_digest: `Plan.digest()` of the plan that was executed.
        command: command line that makes this again.
        versions: versions of the packages that took part.
        seconds: time by stage.
        peak_rss_bytes: peak memory of the process, where the system reports it.
        device: where the run computed.
        files: SHA-256 by name of each file written.
        warnings: warnings that a user should read before relying on the result.
        notes: effects of the run that are no faults, such as norms into which a solver folded scales.
        sensitivity: scores of every group in every format, where formats were allocated by them.
        allocation: the budget, predictions and measurements, where formats were allocated.
        receipt: the layers compared at each stage of an export, where there was one.
        kv_cache: size of the KV cache, where the model's config determines it.
        distillation: how the model was trained after it was quantized, where it was.
        fingerprint: fingerprint of the quantized model's logits, where it was evaluated; `quant check` compares it.
        examples: tokens and a text before and after, where a language model was evaluated.
    """

    model: str
    layers: list[LayerResult]
    bytes_before: int
    bytes_after: int
    effective_bits: float
    evaluation: Evaluation | None = None
    plan_digest: str = ""
    command: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    peak_rss_bytes: int | None = None
    device: str | None = None
    files: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    sensitivity: Sensitivity | None = None
    allocation: AllocationRecord | None = None
    receipt: Receipt | None = None
    kv_cache: KVCache | None = None
    distillation: Distillation | None = None
    fingerprint: Fingerprint | None = None
    examples: Examples | None = None

    @property
    def ratio(self) -> float:
        """How many times smaller the weights are."""
        return self.bytes_before / self.bytes_after if self.bytes_after else math.inf

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as JSON holds it, with a schema version; optional parts that are None are left out."""
        fields = {key: value for key, value in super().to_dict().items() if value is not None or key not in _PARTS}
        return {"schema_version": SCHEMA_VERSION, **fields}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """Undoes `to_dict`; ValueError for another schema version, an unknown or a missing field."""
        whole = typed(dict[str, Any], fields, "report")
        if (version := whole.pop("schema_version", None)) != SCHEMA_VERSION:
            raise ValueError(f"report schema_version is {version!r}; this release reads {SCHEMA_VERSION}")
        return super().from_dict(whole)

    def save(self, path: str | Path) -> None:
        """Writes the report as JSON."""
        write_json(path, self.to_dict(), ensure_ascii=False)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a report file; ValueError, which names it, for one that is not valid."""
        return read_json(path, "a valid report", cls.from_dict)

    def to_html(self, path: str | Path, plan: Plan | None = None) -> None:
        """Writes the report as one HTML page, which makes no request and works offline.

        Args:
            path: the file, which is replaced.
            plan: the plan that was executed, such as `Plan.load("DIR/plan.json")`; of layers that it lacks, the page
                shows the facts in the report.
        """
        from quant.report.render import render_html  # with Jinja2, which most commands do not need

        write_atomically(Path(path), render_html(self, Plan(()) if plan is None else plan))

    def complete(self, plan: Plan, directory: Path, hashes: Mapping[str, str]) -> None:
        """Writes the report of a checkpoint, as JSON and as HTML, before the directory appears under its name.

        `hashes` are the SHA-256 of each weight file, by name.
        """
        # Besides weights, what a server reads; README.md is for people, who edit it.
        names = ["config.json", *(str(file.relative_to(directory)) for file in companion_files(directory))]
        others = [name for name in names if Path(name).parent == Path() and (directory / name).is_file()]
        self.files = {**hashes, **{name: sha256_of(directory / name) for name in others if not name.endswith(".md")}}
        # Sizes on disk replace the plan's estimate, without the headers of the files: `plan show` counts none either.
        self.bytes_after = sum(_tensor_bytes(directory / name) for name in hashes)
        self.peak_rss_bytes = peak_rss()
        # `verify` reads report.json (hashes, plan digest, fingerprint), and so does the next training run that starts
        # here (`quant.training`). report.html is only for people.
        self.save(directory / "report.json")
        self.to_html(directory / "report.html", plan)


def rewrite(
    directory: Path, receipt: Mapping[str, Any] | None = None, *, out: Path | None = None, source: str = "the receipt"
) -> Path:
    """Writes the page of a checkpoint again, report.html in its directory or `out`; a receipt goes into its report.

    `source` is the receipt's name in the UserError for one that is invalid or of another plan.
    """
    report, plan = read_run(directory)
    if not os.access(directory, os.W_OK) and (out is None or receipt is not None):
        way_out = f"name another place with {option('out')}" if receipt is None else "copy the checkpoint, and use that"
        raise UserError(f"{directory} cannot be written to; {way_out}")
    if receipt is not None:
        try:
            report.receipt = Receipt.from_dict(receipt)
        except ValueError as error:
            raise UserError(f"{source}: not a receipt of `quant export`: {error}") from None
        # The digest identifies the plan; a receipt without one is checked by the names of its layers.
        strangers = [layer.name for layer in report.receipt.layers if layer.name not in plan.by_name]
        if receipt.get("plan") not in (None, plan.digest()) or strangers:
            raise UserError(f"{source}: the receipt of another plan than {directory / PLAN_FILE}")
        # Before the page, which is made of it and can be made again.
        report.save(directory / "report.json")
    page = out or directory / "report.html"
    report.to_html(page, plan)
    return page


def read_run(directory: Path) -> tuple[Report, Plan]:
    """Reads the report and the plan of a checkpoint that `quantize` wrote."""
    for name in ("report.json", PLAN_FILE):
        if not (directory / name).is_file():
            parts = listed(str(file.parent) for file in sorted(directory.glob(f"*/{name}")))
            way_out = f"pass one of its parts: {parts}" if parts else "pass a directory that `quantize --out` wrote"
            way_out = f"it is a file; pass its directory, {directory.parent}" if directory.is_file() else way_out
            raise UserError(f"{directory}: no {name}; {way_out}")
    return Report.load(directory / "report.json"), Plan.load(directory / PLAN_FILE)


def _tensor_bytes(file: Path) -> int:
    """Returns the bytes of all tensors in a safetensors file: its size without the header, whose length comes first."""
    with file.open("rb") as opened:
        return file.stat().st_size - 8 - int.from_bytes(opened.read(8), "little")


def kv_cache_of(config: Any, plan: Plan) -> KVCache | None:
    """Returns the KV cache at the context and batch of the plan's allocation, or else of one sequence of 4,096 tokens.

    None for a model without a cache; `config` is a transformers config, or None.
    """
    # The context of the budget, so that the page shows the memory that was budgeted.
    goal = plan.provenance.get("allocation", {}).get("goal", {})
    context, batch = goal.get("context", 4096), goal.get("batch", 1)
    nbytes = mixed_cache_bytes(config, context, batch, plan)
    if not nbytes:
        return None
    layers = getattr(text := text_config(config), "per_layer_config", None) or [text]
    widths = {head_dim(layer) for layer in layers if getattr(layer, "num_attention_heads", None)}
    return KVCache(nbytes, context, batch, max((x for x in widths if x not in HEAD_DIMS), default=0))
