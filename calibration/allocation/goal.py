"""A `Goal` holds the budgets and limits of an allocation, and an `AllocationRecord` its decision and measurements.

`report.json` holds the record under "allocation" and the sensitivity table that it started from under "sensitivity".
`kl` means KL(base‖model) in nats, of next tokens or of classes, or 1 − cosine of the embeddings for an encoder; `unit`
says which. Bits are counted over all weights that the allocator may choose a format for, including weights that it left
in 16 bit; codes, scales and pads count, and embeddings, norms and output heads do not.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Self, TypedDict

import torch
from torch import nn

from quant.base.errors import UserError, counted, option
from quant.base.json_files import JsonData
from quant.calibration.sensitivity.costs import Timing, get_timing
from quant.calibration.sensitivity.table import KEPT
from quant.formats.format import is_16bit
from quant.recipes.targets import TARGETS


class BudgetKind(StrEnum):
    """The quantity that a budget limits, and the unit of its value."""

    BITS = "bits"  # per weight
    BYTES = "bytes"  # of weights and KV cache, from --fit
    SECONDS = "seconds"  # of a decoding step, from --latency
    KL = "kl"  # nats, from --max-kl
    PERPLEXITY = "perplexity"  # relative increase, from --max-ppl-increase
    TASK = "task"  # right answers over the original's, from --min-task


@dataclass(frozen=True)
class Budget(JsonData):
    """The limit that the user set."""

    kind: BudgetKind
    value: float

    @property
    def limit(self) -> float:
        """The loss that a limit allows, in its own unit; of a task, the share of right answers that may be lost."""
        return 1 - self.value if self.kind == BudgetKind.TASK else self.value


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
        worst, limit = self.worst, self.budget.limit
        if worst is None:
            return []
        if self.budget.kind == BudgetKind.TASK:
            high = math.inf if worst.interval is None else worst.interval[1]
            if high <= limit:
                return []
            state = "holds" if worst.loss <= limit else "does not hold"
            return [
                f"{option('min_task', f'{worst.text}>={self.budget.value:g}')} {state} on "
                f"{counted(worst.rows, 'question')} kept to verify it: {1 - worst.loss:.3f} of the right answers are "
                f"left, and the interval of 95% reaches down to {1 - high:.3f}, so that they cannot tell; give more"
            ]
        if worst.loss <= limit:
            return []
        # Limits on perplexity are relative and shown in percent, those on KL in nats.
        percent = self.budget.kind == BudgetKind.PERPLEXITY
        loss, allowed = (f"{100 * x:.3g}%" if percent else f"{x:.4g}" for x in (worst.loss, limit))
        statement = "perplexity rises by" if percent else "the loss is"
        limited = option("max_ppl_increase" if percent else "max_kl", allowed)
        return [
            f"{limited} holds on the rows that formats were chosen on, and not on those kept to verify it: "
            f"{statement} {loss} on {counted(worst.rows, 'row')} of {worst.text}; give a lower limit, or more rows"
        ]


_LIMITS = ("max_kl", "max_ppl_increase", "min_task")


@dataclass(frozen=True)
class Goal:
    """The budgets of an allocation, which hold together, and at most one limit on the loss.

    Attributes:
        bits: per weight, over all weights that formats are chosen for, every scale and pad counted.
        fit: bytes for all weights and the KV cache of `context` × `batch` tokens.
        context: tokens a sequence.
        batch: sequences.
        latency: seconds of one decoding step with that cache, on the GPU or table that `target` names.
        target: runtimes (only their formats are offered) and at most one GPU or table of kernel times.
        power: watts of the GPU's power mode, by which `latency` is counted; None for its full clock.
        max_kl: largest measured KL(base‖model); of classes for a classifier, 1 − cosine for an encoder, the relative
            error of the prediction for a denoiser.
        max_ppl_increase: largest relative increase of perplexity.
        min_task: least share of the original's right answers, to the questions of `HeldOut.task`.
    """

    bits: float | None = None
    fit: float | None = None
    context: int = 4096
    batch: int = 1
    latency: float | None = None
    target: tuple[str, ...] = ()
    power: float | None = None
    max_kl: float | None = None
    max_ppl_increase: float | None = None
    min_task: float | None = None

    def __post_init__(self) -> None:
        # Two limits would need two searches: the smallest model for one may break the other.
        if sum(limit is not None for limit in (self.max_kl, self.max_ppl_increase, self.min_task)) > 1:
            raise UserError(f"give one limit on the loss: {', '.join(map(option, _LIMITS))}")
        if self.min_task is not None and not 0 < self.min_task < 1:
            raise UserError(f"{option('min_task', f'{self.min_task:g}')}: give a share of the original's, such as 0.97")
        if not self.has_limit and self.bits is None and self.fit is None and self.latency is None:
            raise UserError(
                f"nothing to allocate for: give {option('bits')}, {option('fit')}, {option('latency')}, "
                f"{', '.join(map(option, _LIMITS[:-1]))} or {option(_LIMITS[-1])}"
            )
        for name in ("bits", "fit", "latency", "max_kl", "max_ppl_increase"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UserError(f"{option(name, f'{value:g}')}: give a finite number above zero")
        if self.bits is not None and self.bits > 16:
            raise UserError(f"{option('bits', f'{self.bits:g}')}: a weight that is not quantized has 16; give fewer")
        timing = self.timing  # also without --latency: an unknown target is refused here
        if self.latency is not None and timing is None:
            raise UserError(
                f"{option('latency')} needs the GPU or a table of kernel times: {option('target', 'h100')}, or "
                f"{option('target', 'FILE.json')}"
            )

    @property
    def has_limit(self) -> bool:
        """Whether the loss is limited and the size minimized; otherwise the size is limited and the loss minimized."""
        return any(getattr(self, limit) is not None for limit in _LIMITS)

    @property
    def timing(self) -> Timing | None:
        """Kernel times of the target."""
        # `--target` takes runtimes, GPUs and tables of kernel times alike; runtimes have no times.
        names = [name for name in self.target if name not in TARGETS]
        if len(names) > 1:
            raise UserError(f"more than one GPU among the targets: {', '.join(names)}")
        if self.power is not None and (not names or names[0].endswith(".json")):
            raise UserError(f"{option('power', f'{self.power:g}W')} needs a GPU: {option('target', 'orin')}")
        try:
            return get_timing(names[0], self.power) if names else None
        except ValueError as error:
            raise UserError(f"{error}; or give a table of kernel times, FILE.json") from None

    @property
    def budget(self) -> Budget:
        """The limit on the loss if there is one, else the first budget, for the record."""
        # A limit on the loss comes first: with one, budgets are side conditions.
        named = (
            (BudgetKind.KL, self.max_kl), (BudgetKind.PERPLEXITY, self.max_ppl_increase),
            (BudgetKind.TASK, self.min_task),
            (BudgetKind.BITS, self.bits), (BudgetKind.BYTES, self.fit), (BudgetKind.SECONDS, self.latency),
        )  # fmt: skip
        return next(Budget(kind, value) for kind, value in named if value is not None)


class ConstraintKind(StrEnum):
    """How a constraint relates a group's format to the format that it names."""

    PIN = "pin"  # this one and no other
    FORBID = "forbid"  # any but this one
    AT_LEAST = "at_least"  # no fewer bits than this one

    @property
    def option(self) -> str:
        """The option of `quantize` that makes such constraints."""
        return f"--{self.replace('_', '-')}"


@dataclass(frozen=True)
class Constraint:
    """A restriction on the formats of the groups that a glob matches."""

    kind: ConstraintKind
    match: str
    format: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", ConstraintKind(self.kind))

    @classmethod
    def parse(cls, kind: ConstraintKind, text: str) -> Self:
        """Parses `GLOB=FORMAT`."""
        # From the right: a glob may hold "=", a format may not.
        match, separator, format_ = text.rpartition("=")
        if not separator or not match or not format_:
            raise UserError(f"{kind.option} {text!r}: write it as GLOB=FORMAT, such as '*.down_proj=fp8'")
        return cls(kind, match, KEPT.name if is_16bit(format_) else format_)


DEFAULT_FORMATS = ("nvfp4", "fp8")
RunModel = Callable[[nn.Module], Any]


class OptionArguments(TypedDict, total=False):
    """The attributes of `Options` as keyword arguments of `allocate` and `score`."""

    formats: str | Sequence[str]
    solver: str
    include: Sequence[str]
    exclude: Sequence[str]
    constraints: Sequence[Constraint]
    kv_cache: str | None
    kv_mixes: Mapping[tuple[str, ...], float]
    run: RunModel | None
    provenance: Mapping[str, Any] | None
    method: str
    dtype: torch.dtype | None
    seed: int
    path: Path | None


@dataclass(frozen=True, eq=False)
class Options:
    """The settings of an allocation."""

    formats: str | Sequence[str] = DEFAULT_FORMATS
    solver: str = "rtn"
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    constraints: Sequence[Constraint] = ()
    kv_cache: str | None = None  # format of the KV cache, or None for 16 bit
    # formats of the cache by layer that may be chosen, with the loss of each; the first has the fewest bytes
    kv_mixes: Mapping[tuple[str, ...], float] = field(default_factory=dict)
    run: RunModel | None = None
    provenance: Mapping[str, Any] | None = None
    method: str = "fisher"
    # dtype to which 16-bit tensors are widened while measuring; None leaves them
    dtype: torch.dtype | None = torch.float32
    seed: int = 0
    path: Path | None = None  # file of the sensitivity table; None writes none
