"""A `Report` holds the results of a run: each layer's format and error, the sizes, and the measured loss.

`quant.report.summary` prints it, and `quant.report.render` makes its HTML page.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quant.base.json_files import JsonData, typed
from quant.base.json_files import read_json, write_json
from quant.calibration.allocation.record import AllocationRecord
from quant.calibration.layer_result import LayerResult
from quant.calibration.sensitivity.costs import kv_cache_bytes
from quant.calibration.sensitivity.table import Sensitivity
from quant.evaluation.evaluation import Evaluation
from quant.evaluation.examples import Examples
from quant.evaluation.fingerprint import Fingerprint
from quant.recipes.plan import Plan

SCHEMA_VERSION = 1
# Fields that `to_dict` leaves out if they are None, so that the report of a plain run stays short.
_PARTS = ("sensitivity", "allocation", "receipt", "kv_cache", "distillation", "fingerprint", "examples")


@dataclass(frozen=True)
class LayerReceipt(JsonData):
    """The relative deviation of one layer at each stage of an export; None for stages that were not run.

    Attributes:
        name: the layer's name in the plan.
        fake_quant: the layer in PyTorch, from the textbook in float64.
        checkpoint: the weight in the checkpoint's files, from the layer's.
        onnx: the layer's nodes in the graph, from the layer.
        engine: the weight in the engine, from the layer's.
        passed: whether every stage is within its tolerance.
    """

    name: str
    fake_quant: float | None
    checkpoint: float | None
    onnx: float | None
    engine: float | None
    passed: bool


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
    def from_dict(cls, fields: Mapping[str, Any]) -> Receipt:
        """Makes a receipt from the fields of its file, which has further ones; either list may be missing.

        Raises:
            ValueError: an unknown or a missing field of a layer, or no verdict.
        """
        # A receipt file has further fields, which the page does not show.
        whole = typed(dict[str, Any], fields, "receipt")
        own = {key: value for key, value in whole.items() if key in ("layers", "audit", "passed")}
        return super().from_dict({"layers": (), "audit": (), **own})


@dataclass(frozen=True)
class KVCache(JsonData):
    """The size of the KV cache of a served model.

    Attributes:
        nbytes: over all layers, in the plan's format.
        context: number of tokens in a sequence.
        batch: number of sequences.
    """

    nbytes: int
    context: int
    batch: int

    @property
    def tokens(self) -> int:
        """Number of tokens of all sequences together."""
        return self.context * self.batch


@dataclass(frozen=True)
class Distillation(JsonData):
    """The training of a quantized model on its teacher's outputs, and its figures before.

    Attributes:
        start: the quantized checkpoint that training began with.
        teacher: name of the teacher, as the user gave it.
        data: the training text.
        steps: number of optimizer steps.
        batch, seqlen: rows a step, and tokens a row.
        rate: peak learning rate.
        scales: "frozen" or "learned".
        losses: mean loss of each tenth of the steps.
        before: figures of the start on the evaluation texts, where there are any.
        train: "weights", those that are quantized; or "norms", the weights of norms alone.
    """

    start: str
    teacher: str
    data: str
    steps: int
    batch: int
    seqlen: int
    rate: float
    scales: str
    losses: tuple[float, ...]
    before: Evaluation | None = None
    train: str = "weights"


@dataclass
class Report(JsonData):
    """The results of a run.

    Attributes:
        model: name of the model, as the user gave it.
        layers: one result for each layer of the plan, in model order.
        bytes_before: bytes of all weights as they were.
        bytes_after: bytes of all weights now.
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
        fingerprint: fingerprint of the quantized model's logits, where it was evaluated; `quant verify` compares it.
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
    def from_dict(cls, fields: Mapping[str, Any]) -> Report:
        """Makes a report from the fields that `to_dict` returned.

        Raises:
            ValueError: another schema version, an unknown or a missing field.
        """
        whole = typed(dict[str, Any], fields, "report")
        if (version := whole.pop("schema_version", None)) != SCHEMA_VERSION:
            raise ValueError(f"report schema_version is {version!r}; this release reads {SCHEMA_VERSION}")
        return super().from_dict(whole)

    def save(self, path: str | Path) -> None:
        """Writes the report as JSON."""
        write_json(path, self.to_dict(), ensure_ascii=False)

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """Reads a report file.

        Raises:
            ValueError: not JSON, or not a valid report; the message names the file.
        """
        return read_json(path, "a valid report", cls.from_dict)


def kv_cache_of(config: Any, plan: Plan) -> KVCache | None:
    """Returns the KV cache at the context and batch of the plan's allocation, or else of one sequence of 4,096 tokens.

    Args:
        config: a transformers config, or None.
        plan: names the format of the cache.

    Returns:
        None for a model without a cache.
    """
    # The context of the budget, so that the page shows the memory that was budgeted.
    goal = plan.provenance.get("allocation", {}).get("goal", {})
    context, batch = goal.get("context", 4096), goal.get("batch", 1)
    nbytes = kv_cache_bytes(config, context, batch, plan.kv_cache)
    return KVCache(nbytes, context, batch) if nbytes else None


def peak_rss() -> int | None:
    """Returns the peak resident memory of this process in bytes; None where the system does not report it."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS counts bytes, Linux KiB.
    return peak if sys.platform == "darwin" else peak * 1024
