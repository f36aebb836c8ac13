"""An `AllocationRecord` holds the decision of an allocation, its predictions and its measurements.

The sensitivity table that it started from is `quant.calibration.sensitivity.table.Sensitivity`; `report.json` holds the
two under "allocation" and "sensitivity". `kl` means KL(base‖model) in nats, of next tokens or of classes, or 1 − cosine
of the embeddings for an encoder; `unit` says which.

Bits are counted over all weights that the allocator may choose a format for, including weights that it left in 16 bit;
codes, block scales, global scales and pads count, and embeddings, norms and output heads do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from quant.base.errors import counted
from quant.base.json_files import JsonData


class BudgetKind(StrEnum):
    """The quantity that a budget limits, and the unit of its value."""

    BITS = "bits"  # per weight
    BYTES = "bytes"  # of weights and KV cache, from --fit
    SECONDS = "seconds"  # of a decoding step, from --latency
    KL = "kl"  # nats, from --max-kl
    PERPLEXITY = "perplexity"  # relative increase, from --max-ppl-increase


@dataclass(frozen=True)
class Budget(JsonData):
    """The limit that the user set."""

    kind: BudgetKind
    value: float


@dataclass(frozen=True)
class Chosen(JsonData):
    """The allocation that the plan holds."""

    bits: float
    kl_predicted: float
    kl_measured: float
    bytes: int  # bytes of the weights that formats were chosen for
    memory: int | None = None  # bytes of these, of all other weights, and of the KV cache if --fit counted one
    seconds: float | None = None  # the seconds of a decode step by the target's kernel times; None without kernel times
    timing: str | None = None


@dataclass(frozen=True)
class CurvePoint(JsonData):
    """The best allocation at one size by the scores, with its measured loss if the loop measured it."""

    bits: float
    kl_predicted: float
    kl_measured: float | None = None


@dataclass(frozen=True)
class Uniform(JsonData):
    """One format for every group, measured."""

    name: str
    bits: float
    kl: float


@dataclass(frozen=True)
class Round(JsonData):
    """One turn of the loop: an allocation that was quantized for real and measured."""

    bits: float
    predicted: float
    measured: float
    changed: tuple[str, ...] = ()  # layers whose format differs from the round before; empty for the first


@dataclass(frozen=True)
class Verified(JsonData):
    """The loss of the chosen allocation on rows of a text that took no part in choosing it."""

    text: str
    rows: int
    loss: float
    # low and high end of the interval of 95 % around it, Student's over rows; None for one row
    interval: tuple[float, ...] | None = None


@dataclass(frozen=True)
class AllocationRecord(JsonData):
    """The decision, the predictions and the measurements of one allocation."""

    budget: Budget
    chosen: Chosen
    curve: tuple[CurvePoint, ...]
    uniform: tuple[Uniform, ...]
    rounds: tuple[Round, ...]
    seconds: float
    unit: str = "nats: KL(base‖model) of the next token"
    verified: tuple[Verified, ...] = ()
    measured_with: str = ""  # the solver of all measurements, where the plan names a better one; else empty

    @property
    def worst(self) -> Verified | None:
        """The text with the largest loss; None where none was verified."""
        return max(self.verified, key=lambda each: each.loss, default=None)

    def warnings(self) -> list[str]:
        """Returns a sentence if the limit does not hold on the rows that verify it."""
        worst = self.worst
        if worst is None or worst.loss <= self.budget.value:
            return []
        # Limits on perplexity are relative and shown in percent, those on KL in nats.
        percent = self.budget.kind == BudgetKind.PERPLEXITY
        loss, limit = (f"{100 * x:.3g}%" if percent else f"{x:.4g}" for x in (worst.loss, self.budget.value))
        statement, option = ("perplexity rises by", "--max-ppl-increase") if percent else ("the loss is", "--max-kl")
        return [
            f"{option} {limit} holds on the rows that formats were chosen on, and not on those kept to verify it: "
            f"{statement} {loss} on {counted(worst.rows, 'row')} of {worst.text}; give a lower limit, or more rows"
        ]
