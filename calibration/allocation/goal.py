"""A `Goal` holds the budgets and limits of an allocation, and an `AllocationRecord` its decision and measurements.

`report.json` holds the record under "allocation" and the sensitivity table that it started from under "sensitivity".
`kl` means KL(base‖model) in nats, of next tokens or of classes, or 1 − cosine of the embeddings for an encoder; `unit`
says which. Bits are counted over all weights that the allocator may choose a format for, including weights that it left
in 16 bit; codes, scales and pads count, embeddings and norms do not, and output heads do in llama.cpp's formats alone.

A `Space` holds the choices of an allocation: its groups, the formats of each, and the memory that is fixed.

`explain` refuses a budget below the smallest model before anything is measured; `plan` turns a choice into a plan with
a reason for every layer.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Self, TypedDict

import numpy as np
import torch
from torch import nn

from quant.base.errors import UserError, counted, listed, megabytes, option
from quant.base.json_files import JsonData
from quant.calibration.sensitivity.costs import Timing, get_timing, group_bytes, memory_of, mixed_cache_bytes
from quant.calibration.sensitivity.knapsack import Infeasible, KnapsackProblem, smallest
from quant.calibration.sensitivity.table import KEPT, Candidate, Sensitivity
from quant.formats.format import get_format, is_16bit
from quant.recipes.plan import LayerPlan, Plan
from quant.recipes.recipe import KEEP, presets
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
            table = "" if isinstance(error, UserError) else "; or give a table of kernel times, FILE.json"
            raise UserError(f"{error}{table}") from None

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


@dataclass(frozen=True, eq=False)
class Space:
    """The choices of an allocation."""

    base: Plan
    groups: dict[str, list[LayerPlan]]
    heads: list[LayerPlan]  # output heads in a format of llama.cpp, which bits count
    candidates: dict[str, Candidate]  # formats by name
    allowed: dict[str, list[Candidate]]
    unplanned_bytes: int  # bytes of tensors that are in no plan: biases, position tables
    cache_bytes: int  # bytes of the KV cache
    fixed_bytes: int  # bytes of everything that no format is chosen for, both of the above included
    fixed_seconds: float  # time of a decode step to read those bytes; 0 without kernel times
    timing: Timing | None  # kernel times of the target, or None
    batch: int

    def with_cache(self, config: Any, goal: Goal, kv_layers: tuple[str, ...]) -> Self:
        """Returns the same choices beside a KV cache of other formats, which takes other bytes."""
        base = replace(self.base, kv_layers=kv_layers)
        more = mixed_cache_bytes(config, goal.context, goal.batch, base) - self.cache_bytes
        return replace(
            self,
            base=base,
            cache_bytes=self.cache_bytes + more,
            fixed_bytes=self.fixed_bytes + more,
            fixed_seconds=self.fixed_seconds + (self.timing.read(more) if self.timing is not None else 0.0),
        )

    def problem(self, scores: Sensitivity | None = None) -> KnapsackProblem:
        """Returns the knapsack problem; without scores all losses are zero, which is enough to check budgets."""
        names = tuple(self.candidates)
        shape = (len(self.groups), len(names))
        loss = np.full(shape, np.inf)  # infinite where a format is not allowed
        tables = {"bytes": np.zeros(shape)} | ({"seconds": np.zeros(shape)} if self.timing is not None else {})
        for i, (group, members) in enumerate(self.groups.items()):
            for candidate in self.allowed[group]:
                j = names.index(candidate.name)
                loss[i, j] = scores.by_name[group].scores[candidate.name] if scores is not None else 0.0
                tables["bytes"][i, j] = group_bytes(members, candidate)
                if self.timing is not None:
                    tables["seconds"][i, j] = sum(self.timing.linear(candidate.applied(m), self.batch) for m in members)
        return KnapsackProblem(tuple(self.groups), names, loss, tables)

    @property
    def numel(self) -> int:
        """Number of weights that bits count."""
        return sum(layer.numel for members in (*self.groups.values(), self.heads) for layer in members)

    def bits(self, choice: np.ndarray | float) -> float:
        """Returns effective bits per weight of a choice, or of one of so many bytes."""
        size = self.bytes(choice) if isinstance(choice, np.ndarray) else choice
        return 8 * (size + sum(head.nbytes for head in self.heads)) / self.numel

    def named(self, choice: np.ndarray) -> dict[str, str]:
        """Returns the names of the formats of a choice, by group."""
        names = list(self.candidates)
        return {group: names[j] for group, j in zip(self.groups, choice, strict=True)}

    def bytes(self, choice: np.ndarray) -> int:
        """Returns the bytes of the weights that formats are chosen for."""
        return sum(group_bytes(self.groups[group], self.candidates[name]) for group, name in self.named(choice).items())

    def seconds(self, choice: np.ndarray, problem: KnapsackProblem) -> float | None:
        """Returns the seconds of a decode step, fixed layers and cache included; None without kernel times."""
        return None if self.timing is None else problem.total("seconds", choice) + self.fixed_seconds

    @property
    def timing_name(self) -> str | None:
        """Source of the kernel times, and whether they were measured."""
        if self.timing is None:
            return None
        return f"{self.timing.name}, {'measured' if self.timing.measured else 'roofline'}"

    def limits(self, goal: Goal) -> dict[str, float]:
        """Returns the budgets as limits on the groups' costs by resource, less fixed bytes and seconds."""
        limits: dict[str, float] = {}
        if goal.bits is not None:
            # Whole bytes; 1e-6 makes up for bits that have no exact binary fraction, such as 4.8.
            limits["bytes"] = math.floor((goal.bits - self.bits(0)) * self.numel / 8 + 1e-6)
        if goal.fit is not None:
            limits["bytes"] = min(limits.get("bytes", math.inf), math.floor(goal.fit) - self.fixed_bytes)
        if goal.latency is not None:
            limits["seconds"] = goal.latency - self.fixed_seconds
        return limits

    def explain(self, goal: Goal, problem: KnapsackProblem) -> None:
        """Raises Infeasible, in the words of the user, if a budget cannot be kept."""
        least = smallest(problem, "bytes")
        if goal.bits is not None and self.bits(least) > goal.bits + 1e-9:
            bits = {name: get_format(p.weight).bits_per_weight() for name, p in presets().items() if p.weight != KEEP}
            # A hundredth more for rows that are padded.
            fewer = sorted((name for name in bits if bits[name] + 0.01 <= goal.bits), key=bits.__getitem__)
            way_out = f"no format has fewer than {min(bits.values()):g}"
            if any(c.weight and c.weight.bits_per_weight() + 0.01 <= goal.bits for c in self.candidates.values()):
                way_out = "what pins, targets and shapes leave to each layer has no fewer"
            elif fewer:
                way_out = f"{option('formats')} takes {listed(fewer, 4)} too"
            raise Infeasible(
                f"{option('bits', f'{goal.bits:g}')}: the smallest feasible value with these formats is "
                f"{math.ceil(1e4 * self.bits(least)) / 1e4:.4f}; {way_out}"
            )
        if goal.fit is not None and least + self.fixed_bytes > goal.fit:
            raise Infeasible(
                f"{option('fit', megabytes(goal.fit))}: the smallest feasible value is "
                f"{least + self.fixed_bytes:,.0f} bytes ({megabytes(least + self.fixed_bytes)}), of which "
                f"{megabytes(self.cache_bytes)} are the KV cache (context {goal.context}, batch {goal.batch}) and "
                f"{megabytes(self.fixed_bytes - self.cache_bytes)} weights that stay in 16 bit"
            )
        if goal.latency is not None:
            quickest = smallest(problem, "seconds") + self.fixed_seconds
            if quickest > goal.latency:
                # A thousandth more, so that four digits of it are feasible.
                raise Infeasible(
                    f"{option('latency', f'{1e3 * goal.latency:g}ms')}: the smallest feasible value is "
                    f"{1001 * quickest:.4g} ms"
                )

    def plan(
        self, choice: np.ndarray, problem: KnapsackProblem, scores: Sensitivity, goal: Goal, corrected: dict[str, str]
    ) -> Plan:
        """Returns the plan of a choice, with a reason for every layer."""
        layers = []
        # Rank 1 is the group that loses most in its worst format.
        ranks = {g.name: i for i, g in enumerate(sorted(scores.groups, key=lambda g: -max(g.scores.values())), 1)}
        for group, name in self.named(choice).items():
            candidate, entry = self.candidates[name], scores.by_name[group]
            reason = _reason(entry, name, ranks[group], len(ranks))
            if group in corrected:
                reason += f"; {corrected[group]}"
            for layer in self.groups[group]:
                new = candidate.applied(layer)
                layers.append(replace(new, reason=reason, score=entry.scores[name], cost=new.nbytes))
        # `base` has the fixed layers too, with the reasons of their kind.
        plan = self.base.replace_layers(layers)
        fields = {k: v for k, v in dataclasses.asdict(goal).items() if v not in (None, ())}
        fields = {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}
        note = {
            "method": scores.method, "formats": list(scores.formats), "goal": fields,
            "bits": self.bits(choice), "kv_cache_tokens": goal.context * goal.batch,
        }  # fmt: skip
        tokens = goal.context * goal.batch
        note["memory"] = vars(memory_of(plan, unplanned=self.unplanned_bytes, kv_cache=self.cache_bytes, tokens=tokens))
        if self.timing is not None:
            note["seconds"] = self.seconds(choice, problem)
            note["timing"] = self.timing_name
        target = next((name for name in goal.target if name in TARGETS), None) or (goal.target or (None,))[0]
        return replace(plan, target=target, provenance={**plan.provenance, "allocation": note})


def key_of(choice: np.ndarray) -> tuple[int, ...]:
    """Returns a choice as a key of dictionaries."""
    return tuple(int(j) for j in choice)


def _reason(entry: Any, name: str, rank: int, count: int) -> str:
    own = f"{name if name != KEPT.name else '16 bit'} at {entry.bits[name]:.2f} bits, score {entry.scores[name]:.3g}"
    # The reason names the nearest alternatives: the next smaller format, and the next larger one that loses less.
    smaller = [c for c in entry.bytes if entry.bytes[c] < entry.bytes[name]]
    larger = [c for c in entry.bytes if entry.bytes[c] > entry.bytes[name] and entry.scores[c] < entry.scores[name]]
    clauses = [f"allocated {own} (sensitivity rank {rank} of {count})"]
    if smaller:
        c = max(smaller, key=lambda c: entry.bytes[c])
        saved = (entry.bytes[name] - entry.bytes[c]) / 1e3
        clauses.append(f"{c} would save {saved:,.0f} kB but score {entry.scores[c]:.3g}")
    if larger:
        c = min(larger, key=lambda c: entry.bytes[c])
        gain = f"{entry.scores[name] - entry.scores[c]:.3g} for {(entry.bytes[c] - entry.bytes[name]) / 1e3:,.0f} kB"
        clauses.append(f"{c if c != KEPT.name else '16 bit'} would gain {gain}")
    return "; ".join(clauses)
