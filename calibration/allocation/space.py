"""A `Space` holds the choices of an allocation: its groups, the formats of each, and the memory that is fixed.

`explain` refuses a budget below the smallest model before anything is measured; `plan` turns a choice into a plan with
a reason for every layer.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from quant.base.errors import listed, megabytes, option
from quant.calibration.allocation.goal import Goal
from quant.calibration.sensitivity.costs import Timing, group_bytes, memory_of, mixed_cache_bytes
from quant.calibration.sensitivity.knapsack import Infeasible, KnapsackProblem, smallest
from quant.calibration.sensitivity.table import KEPT, Candidate, Sensitivity
from quant.formats.format import get_format
from quant.recipes.plan import LayerPlan, Plan
from quant.recipes.recipe import KEEP, presets
from quant.recipes.targets import TARGETS


@dataclass(frozen=True, eq=False)
class Space:
    """The choices of an allocation."""

    base: Plan
    groups: dict[str, list[LayerPlan]]
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
            self, base=base, cache_bytes=self.cache_bytes + more, fixed_bytes=self.fixed_bytes + more,
            fixed_seconds=self.fixed_seconds + (self.timing.read(more) if self.timing is not None else 0.0),
        )  # fmt: skip

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
        """Number of weights that formats are chosen for."""
        return sum(layer.numel for members in self.groups.values() for layer in members)

    def named(self, choice: np.ndarray) -> dict[str, str]:
        """Returns the names of the formats of a choice, by group."""
        names = list(self.candidates)
        return {group: names[j] for group, j in zip(self.groups, choice, strict=True)}

    def bytes(self, choice: np.ndarray) -> int:
        """Returns the bytes of the weights that formats are chosen for."""
        return sum(
            self.candidates[name].applied(layer).nbytes
            for group, name in self.named(choice).items()
            for layer in self.groups[group]
        )

    def bits(self, choice: np.ndarray) -> float:
        """Returns effective bits per weight."""
        return 8 * self.bytes(choice) / self.numel

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
            limits["bytes"] = math.floor(goal.bits * self.numel / 8 + 1e-6)
        if goal.fit is not None:
            limits["bytes"] = min(limits.get("bytes", math.inf), math.floor(goal.fit) - self.fixed_bytes)
        if goal.latency is not None:
            limits["seconds"] = goal.latency - self.fixed_seconds
        return limits

    def explain(self, goal: Goal, problem: KnapsackProblem) -> None:
        """Raises Infeasible, in the words of the user, if a budget cannot be kept."""
        least = smallest(problem, "bytes")
        if goal.bits is not None and 8 * least / self.numel > goal.bits + 1e-9:
            bits = {name: get_format(p.weight).bits_per_weight() for name, p in presets().items() if p.weight != KEEP}
            # A hundredth more for rows that are padded.
            fewer = sorted((name for name in bits if bits[name] + 0.01 <= goal.bits), key=bits.__getitem__)
            way_out = f"no format has fewer than {min(bits.values()):g}"
            if fewer:
                way_out = f"{option('formats')} takes {listed(fewer, 4)} too"
            raise Infeasible(
                f"{option('bits', f'{goal.bits:g}')}: the smallest feasible value with these formats is "
                f"{math.ceil(8e4 * least / self.numel) / 1e4:.4f}; {way_out}"
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
        self,
        choice: np.ndarray,
        problem: KnapsackProblem,
        scores: Sensitivity,
        goal: Goal,
        corrected: Mapping[str, str],
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
    """Returns the reason for a group's format, in one sentence."""
    own = f"{name if name != KEPT.name else '16 bit'} at {entry.bits[name]:.2f} bits, score {entry.scores[name]:.3g}"
    # The reason names the nearest alternatives: the next smaller format, and the next larger one that loses less.
    smaller = [c for c in entry.bytes if entry.bytes[c] < entry.bytes[name]]
    larger = [c for c in entry.bytes if entry.bytes[c] > entry.bytes[name] and entry.scores[c] < entry.scores[name]]
    clauses = [f"allocated {own} (sensitivity rank {rank} of {count})"]
    if smaller:
        c = max(smaller, key=lambda c: entry.bytes[c])
        clauses.append(
            f"{c} would save {(entry.bytes[name] - entry.bytes[c]) / 1e3:,.0f} kB but score {entry.scores[c]:.3g}"
        )
    if larger:
        c = min(larger, key=lambda c: entry.bytes[c])
        gain = f"{entry.scores[name] - entry.scores[c]:.3g} for {(entry.bytes[c] - entry.bytes[name]) / 1e3:,.0f} kB"
        clauses.append(f"{c if c != KEPT.name else '16 bit'} would gain {gain}")
    return "; ".join(clauses)
