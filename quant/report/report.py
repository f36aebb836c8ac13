"""The report says what was done to each layer, what it saved and what it cost, as data and in the terminal.

Its HTML page is made by `quant.report.render`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quant.allocation.record import AllocationRecord, Verified
from quant.calibration.sensitivity.costs import kv_cache_bytes
from quant.calibration.sensitivity.table import Sensitivity
from quant.errors import counted, megabytes
from quant.evaluation.fingerprint import Fingerprint
from quant.evaluation.record import Evaluation
from quant.execution.layer_result import LayerResult
from quant.formats.atomic import write_atomically
from quant.formats.json_files import read_json
from quant.recipes.json_data import JsonData, typed
from quant.recipes.json_text import json_text
from quant.recipes.plan import Plan

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA_VERSION = 1
_PARTS = ("sensitivity", "allocation", "receipt", "kv_cache", "distillation", "fingerprint")


@dataclass(frozen=True)
class LayerReceipt(JsonData):
    """How far one layer is, relatively, from what it should be at each stage of an export; None where it was not run.

    Attributes:
        name: as in the plan.
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
    """What the engine was planned to run a layer in, and what was found in it."""

    name: str
    planned: str
    found: str
    passed: bool


@dataclass(frozen=True)
class Receipt(JsonData):
    """The proof that an export does what the model does; `passed` speaks for all of it."""

    layers: tuple[LayerReceipt, ...]
    audit: tuple[Audit, ...]
    passed: bool

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Receipt:
        """From a receipt file, which holds more than this; either list may be missing.

        Raises:
            ValueError: an unknown or a missing field of a layer, or no verdict.
        """
        whole = typed(dict[str, Any], fields, "receipt")
        own = {key: value for key, value in whole.items() if key in ("layers", "audit", "passed")}
        return super().from_dict({"layers": (), "audit": (), **own})


@dataclass(frozen=True)
class KVCache(JsonData):
    """What the KV cache takes while the model serves.

    Attributes:
        nbytes: over all layers, in the plan's format.
        context: tokens a sequence.
        batch: sequences.
    """

    nbytes: int
    context: int
    batch: int

    @property
    def tokens(self) -> int:
        """Of all sequences."""
        return self.context * self.batch


@dataclass(frozen=True)
class Distillation(JsonData):
    """How a quantized model was trained on what its teacher says, and what it was before.

    Attributes:
        start: the quantized checkpoint that training began with.
        teacher: as the user named it.
        data: the training text.
        steps: of the optimizer.
        batch, seqlen: rows a step, and tokens a row.
        rate: peak learning rate.
        scales: "frozen" or "learned".
        losses: mean loss of each tenth of the steps.
        before: figures of the start on the evaluation texts, where there are any.
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


@dataclass
class Report(JsonData):
    """All that a run has to tell.

    Attributes:
        model: what was quantized, as the user named it.
        layers: one result for each layer of the plan, in model order.
        bytes_before: bytes of all weights as they were.
        bytes_after: bytes of all weights now.
        effective_bits: bits per weight over the quantized layers.
        evaluation: measured figures, if the run measured any.
        plan_digest: `Plan.digest()` of the plan that was executed.
        command: command line that makes this again.
        versions: of the packages that took part.
        seconds: time by stage.
        peak_rss_bytes: peak memory of the process, where the system tells.
        device: what everything was computed on.
        files: SHA-256 by name of each file written.
        warnings: whatever a user should know before relying on the result.
        sensitivity: scores of every group in every format, where formats were allocated by them.
        allocation: what was asked for, predicted and measured, where formats were allocated.
        receipt: the layers compared at each stage of an export, where there was one.
        kv_cache: size of the KV cache, where the model has one and its config says.
        distillation: how the model was trained after it was quantized, where it was.
        fingerprint: of the quantized model's logits, where it was evaluated; `quant verify` compares.
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
    sensitivity: Sensitivity | None = None
    allocation: AllocationRecord | None = None
    receipt: Receipt | None = None
    kv_cache: KVCache | None = None
    distillation: Distillation | None = None
    fingerprint: Fingerprint | None = None

    @property
    def ratio(self) -> float:
        """How many times smaller the weights are."""
        return self.bytes_before / self.bytes_after if self.bytes_after else math.inf

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form, with a schema version; parts that a plain run lacks are left out."""
        fields = {key: value for key, value in super().to_dict().items() if value is not None or key not in _PARTS}
        return {"schema_version": SCHEMA_VERSION, **fields}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Report:
        """The inverse of `to_dict`.

        Raises:
            ValueError: another schema version, an unknown or a missing field.
        """
        whole = typed(dict[str, Any], fields, "report")
        if (version := whole.pop("schema_version", None)) != SCHEMA_VERSION:
            raise ValueError(f"report schema_version is {version!r}; this release reads {SCHEMA_VERSION}")
        return super().from_dict(whole)

    def save(self, path: str | Path) -> None:
        """Writes the report as JSON."""
        write_atomically(path, json_text(self.to_dict(), indent=1, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """Reads a report file.

        Raises:
            ValueError: not JSON, or not a valid report; the message names the file.
        """
        return read_json(path, "a valid report", cls.from_dict)


def kv_cache_of(config: Any, plan: Plan) -> KVCache | None:
    """The KV cache at the context and batch that the plan was allocated for, or else of one sequence of 4,096 tokens.

    Args:
        config: a transformers config, or None.
        plan: names the format of the cache.

    Returns:
        None for a model without a cache.
    """
    goal = plan.provenance.get("allocation", {}).get("goal", {})
    context, batch = goal.get("context", 4096), goal.get("batch", 1)
    nbytes = kv_cache_bytes(config, context, batch, plan.kv_cache)
    return KVCache(nbytes, context, batch) if nbytes else None


def peak_rss() -> int | None:
    """Peak resident memory of this process in bytes; None where the system does not tell."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def print_summary(report: Report, console: Console) -> None:
    """A short table for the terminal."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(report.model), show_header=False, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column()
    for label, value in summary(report):
        table.add_row(Text(label), Text(value))
    console.print(table)
    for warning in report.warnings:
        console.print(Text(f"warning: {warning}", style="yellow"))


def summary(report: Report) -> list[tuple[str, str]]:
    """The headline figures as pairs of label and text."""
    quantized = any(layer.format is not None for layer in report.layers)
    bits = f"{report.effective_bits:.3f} per quantized weight, scales counted" if quantized else "nothing is quantized"
    rows = [
        ("size", f"{megabytes(report.bytes_before)} → {megabytes(report.bytes_after)} ({_shrinking(report.ratio)})"),
        ("effective bits", bits),
    ]
    formats: dict[str, list[LayerResult]] = {}
    for layer in report.layers:
        formats.setdefault(layer.format or f"{layer.bits:g} bit", []).append(layer)
    for name, members in formats.items():
        snr = [layer.snr_db for layer in members if layer.snr_db is not None]
        error = f", SNR {min(snr):.1f} to {max(snr):.1f} dB" if snr else ""
        rows.append(
            (name, f"{counted(len(members), 'layer')}, {megabytes(sum(layer.nbytes for layer in members))}{error}")
        )
    if report.evaluation is not None:
        rows += _figures(report.evaluation.texts)
    if (trained := report.distillation) is not None:
        rows.append(("distilled", _distillation(trained, report.evaluation)))
    if (record := report.allocation) is not None:
        chosen, count = record.chosen, counted(len(record.rounds), "round")
        if chosen.bits == 16:
            text = "everything stays in 16 bit: the budget has room for it"
        else:
            text = (
                f"{chosen.bits:.3f} bits over all weights to choose for; loss {chosen.kl_predicted:.4g} predicted, "
                f"{chosen.kl_measured:.4g} measured after {count}"
            )
        rows.append(("allocation", text + _kept_budget(record)))
        rows += (
            [("verified", "\n".join(verified_text(record, each) for each in record.verified))]
            if record.verified
            else []
        )
    if (receipt := report.receipt) is not None:
        failed = sum(not layer.passed for layer in receipt.layers) + sum(not entry.passed for entry in receipt.audit)
        verdict = "passed" if receipt.passed else "FAILED"
        checks = counted(len(receipt.layers) + len(receipt.audit), "check")
        rows.append(("export receipt", f"{verdict}, {failed} of {checks} failed" if failed else f"{verdict}, {checks}"))
    if report.seconds:
        rows.append(("time", ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in report.seconds.items())))
    if report.peak_rss_bytes is not None:
        rows.append(("peak memory", megabytes(report.peak_rss_bytes)))
    return rows


def _figures(texts: Sequence[Evaluation]) -> list[tuple[str, str]]:
    """The figures, with a line for each text."""
    found = [("evaluated on", [str(each.text) for each in texts])] if len(texts) > 1 else []
    if texts[0].perplexity is not None:
        found.append(("perplexity", [_perplexity(each) for each in texts]))
    if texts[0].cosine is not None:
        lost = [f"{each.cosine:.5f}{interval_text(each, 5)}, 1 − cosine to those before" for each in texts]
        errors = ["" if each.error is None else f"; relative error {each.error:.2%}" for each in texts]
        found.append(("embeddings", [text + error for text, error in zip(lost, errors, strict=True)]))
    if texts[0].kl is not None:
        found.append(
            ("KL", [f"{each.kl:.4f} nats{interval_text(each)}, {each.tokens:,} {each.unit}" for each in texts])
        )
    if texts[0].top1 is not None:
        found.append(("top-1 agreement", [f"{100 * (each.top1 or 0):.1f}%" for each in texts]))
    return [(label, "\n".join(values)) for label, values in found]


def _distillation(trained: Distillation, now: Evaluation | None) -> str:
    """How it was trained, and KL before and after on each text."""
    lines = [f"{trained.steps} steps of {trained.batch} × {trained.seqlen} tokens, from {trained.start}"]
    for old, new in zip(trained.before.texts if trained.before else (), now.texts if now else (), strict=True):
        if old.kl is not None and new.kl is not None:
            lines.append(f"KL {old.kl:.4f} → {new.kl:.4f} ({new.kl / old.kl:.2f}×) on {new.text}")
    return "\n".join(lines)


def _perplexity(each: Evaluation) -> str:
    base, now = each.baseline_perplexity, each.perplexity
    if now is None:
        return "infinite"
    return f"{now:.2f}" + ("" if base is None else f", {base:.2f} before ({100 * (now / base - 1):+.1f}%)")


def interval_text(found: Evaluation, digits: int = 4) -> str:
    """The interval over rows (Student's t) in parentheses, after a blank; nothing where there is none."""
    if found.interval is None:
        return ""
    low, high = found.interval
    return f" (95% over {counted(found.rows or 0, 'row')}: {low:.{digits}f}–{high:.{digits}f})"


def _kept_budget(record: AllocationRecord) -> str:
    """What the choice takes of a budget of memory or time."""
    chosen, budget = record.chosen, record.budget
    if budget.kind == "seconds" and chosen.seconds is not None:
        return f"; {1e3 * chosen.seconds:.4g} of {1e3 * budget.value:g} ms a decode step ({chosen.timing})"
    if budget.kind == "bytes" and chosen.memory is not None:
        return f"; {megabytes(chosen.memory)} of {megabytes(budget.value)}, KV cache included"
    return ""


def verified_text(record: AllocationRecord, found: Verified) -> str:
    """What the chosen allocation measures on the rows of a text that verify it, in the unit of its limit."""
    percent = record.budget.kind == "perplexity"

    def text(value: float) -> str:
        return f"{100 * value:+.2f}%" if percent else f"{value:.4f}"

    interval = "" if found.interval is None else f", 95%: {text(found.interval[0])} to {text(found.interval[1])}"
    what = "perplexity" if percent else "loss"
    where = f"{counted(found.rows, 'row')} of {found.text} that took no part in the choice"
    return f"{what} {text(found.loss)} (limit {text(record.budget.value)}{interval}) on {where}"


def _shrinking(ratio: float) -> str:
    if 0.995 <= ratio < 1.005:
        return "as large as before"
    return f"{ratio:.2f}× smaller" if ratio > 1 else f"{1 / ratio:.2f}× larger"
