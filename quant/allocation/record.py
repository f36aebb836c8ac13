"""An `AllocationRecord` holds what an allocation decided and how well it predicted the result.

The sensitivity table that it started from is `quant.calibration.sensitivity.table.Sensitivity`; `report.json` holds the
two under "allocation" and "sensitivity". `kl` means KL(base‖model) in nats, of next tokens or of classes, or 1 − cosine
of the embeddings for an encoder; `unit` says which.

Bits are counted over all weights that the allocator may choose a format for, those that it left in 16 bit included;
codes, block scales, global scales and pads count, and embeddings, norms and output heads do not.
"""

from __future__ import annotations

from dataclasses import dataclass

from quant.errors import counted
from quant.recipes.json_data import JsonData


@dataclass(frozen=True)
class Budget(JsonData):
    """What was asked for.

    Attributes:
        kind: `bits`, `bytes` (from --fit), `seconds` (from --latency), `kl` or `perplexity`.
        value: bits per weight, bytes of weights, seconds, nats, or the relative increase of perplexity.
    """

    kind: str
    value: float


@dataclass(frozen=True)
class Chosen(JsonData):
    """The allocation that the plan holds.

    Attributes:
        bits: bits per weight.
        kl_predicted: sum of the scores.
        kl_measured: measured with all groups quantized together.
        bytes: of the weights that were allocated.
        memory: bytes of those, of all other weights, and of the KV cache where --fit counted one.
        seconds: of a decode step by the target's kernel times; None where there are none.
        timing: where those are from, such as "h100, roofline".
    """

    bits: float
    kl_predicted: float
    kl_measured: float
    bytes: int
    memory: int | None = None
    seconds: float | None = None
    timing: str | None = None


@dataclass(frozen=True)
class CurvePoint(JsonData):
    """The best allocation at one size by the scores; measured where the loop came past it."""

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
    """One turn of the loop: an allocation that was quantized for real and measured.

    Attributes:
        bits: bits per weight.
        predicted: the KL that was expected before measuring.
        measured: the KL that was found.
        changed: layers whose format differs from the round before; empty for the first.
    """

    bits: float
    predicted: float
    measured: float
    changed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verified(JsonData):
    """The loss of the chosen allocation on rows of a text that took no part in choosing it.

    Attributes:
        text: its name.
        rows: how many.
        loss: in the unit of the budget: KL, or the relative increase of perplexity.
        interval: low and high end of the interval of 95 % around it, Student's over rows; None for one row.
    """

    text: str
    rows: int
    loss: float
    interval: tuple[float, ...] | None = None


@dataclass(frozen=True)
class AllocationRecord(JsonData):
    """The whole story of one allocation.

    Attributes:
        budget: what was asked for.
        chosen: what came out.
        curve: predicted Pareto curve, by rising bits.
        uniform: the single formats beside it.
        rounds: in the order in which they were measured.
        seconds: time of the loop, scoring not included.
        unit: what `kl` means here.
        verified: the loss on each text where it was limited; the worst one counts.
    """

    budget: Budget
    chosen: Chosen
    curve: tuple[CurvePoint, ...]
    uniform: tuple[Uniform, ...]
    rounds: tuple[Round, ...]
    seconds: float
    unit: str = "nats: KL(base‖model) of the next token"
    verified: tuple[Verified, ...] = ()

    @property
    def worst(self) -> Verified | None:
        """The text with the largest loss; None where none was verified."""
        return max(self.verified, key=lambda each: each.loss, default=None)

    def warnings(self) -> list[str]:
        """What to know before relying on the limit: one sentence if it does not hold on the rows that verify it."""
        worst = self.worst
        if worst is None or worst.loss <= self.budget.value:
            return []
        percent = self.budget.kind == "perplexity"
        loss, limit = (f"{100 * x:.3g}%" if percent else f"{x:.4g}" for x in (worst.loss, self.budget.value))
        what, option = ("perplexity rises by", "--max-ppl-increase") if percent else ("the loss is", "--max-kl")
        return [
            f"{option} {limit} holds on the rows that formats were chosen on, and not on those kept to verify it: "
            f"{what} {loss} on {counted(worst.rows, 'row')} of {worst.text}; give a lower limit, or more rows"
        ]
