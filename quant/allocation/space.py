"""A `Space` holds what an allocation may choose from: groups, formats, constraints, and the memory that is fixed.

Everything that can be refused is refused here, before anything is measured: a format that no layer can take, a
runtime that has none of them, a constraint that leaves a group without a choice, a budget below the smallest model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch import nn

from quant.allocation.goal import Constraint, Goal
from quant.calibration.sensitivity.candidates import KEPT, Candidate
from quant.calibration.sensitivity.costs import Timing, group_bytes, kv_cache_bytes, memory_of
from quant.calibration.sensitivity.knapsack import Infeasible, Problem, smallest
from quant.calibration.sensitivity.table import Sensitivity
from quant.errors import UserError, megabytes
from quant.plan.make import make_plan
from quant.recipes.layer_kind import LayerKind
from quant.recipes.plan import LayerPlan, Plan, groups_of
from quant.recipes.recipe import KEEP, Recipe
from quant.recipes.targets import TARGETS, Target, get_target

Run = Callable[[nn.Module], Any]


@dataclass(frozen=True, eq=False)
class Space:
    """The choices: groups, formats, what is allowed, what it takes, and what is fixed around it."""

    base: Plan
    groups: dict[str, list[LayerPlan]]
    candidates: dict[str, Candidate]
    allowed: dict[str, list[Candidate]]
    unplanned_bytes: int
    cache_bytes: int
    fixed_bytes: int
    fixed_seconds: float
    timing: Timing | None
    batch: int

    @classmethod
    def of(
        cls,
        model: nn.Module,
        candidates: Sequence[Candidate],
        goal: Goal,
        solver: str,
        include: Sequence[str],
        exclude: Sequence[str],
        constraints: Sequence[Constraint],
        kv_cache: str | None,
        run: Run | None,
        provenance: Mapping[str, Any] | None,
    ) -> Space:
        """The choices for `model`; arguments as in `allocate`."""
        runtimes = [get_target(name) for name in goal.target if name in TARGETS]
        plans: dict[str, Plan] = {}
        refused: UserError | None = None
        for candidate in (c for c in candidates if c.weight is not None):
            try:
                plan = make_plan(
                    model, _recipe_of(candidate, solver, kv_cache), include=include, exclude=exclude, run=run,
                    provenance=dict(provenance or {}),
                )  # fmt: skip
                plans[candidate.name] = _without_convs(plan)
            except UserError as error:
                refused = error
        if not plans:
            raise refused or UserError("no formats to choose from")
        base = next(iter(plans.values()))
        chosen = {layer.name for plan in plans.values() for layer in plan.quantized}
        groups = groups_of([layer for layer in base.layers if layer.name in chosen])
        by_name = {c.name: c for c in candidates}
        mixed = len(plans) > 1
        allowed = {
            group: [c for c in candidates if all(_fits(c, m, plans.get(c.name), runtimes, mixed) for m in members)]
            for group, members in groups.items()
        }
        for runtime in runtimes:
            _check_runtime(runtime, allowed, candidates)
        for constraint in constraints:
            _constrain(constraint, groups, allowed, by_name)
        rest = [layer for layer in base.layers if layer.name not in chosen]
        planned = {id(p) for layer in base.layers for p in _parameters_of(model, layer)}
        unplanned = sum(t.nbytes for t in _tensors(model) if id(t) not in planned)
        cache = kv_cache_bytes(getattr(model, "config", None), goal.context, goal.batch, base.kv_cache)
        fixed = sum(layer.nbytes for layer in rest) + unplanned + cache
        timing = goal.timing
        seconds = timing.read(_bytes_read(rest) + cache) if timing is not None else 0.0
        return cls(base, groups, by_name, allowed, unplanned, cache, fixed, seconds, timing, goal.batch)

    def problem(self, scores: Sensitivity | None = None) -> Problem:
        """As the solver takes it; before there are scores, with none, which is enough to check budgets."""
        names = tuple(self.candidates)
        shape = (len(self.groups), len(names))
        loss = np.full(shape, np.inf)
        tables = {"bytes": np.zeros(shape)} | ({"seconds": np.zeros(shape)} if self.timing is not None else {})
        for i, (group, members) in enumerate(self.groups.items()):
            for candidate in self.allowed[group]:
                j = names.index(candidate.name)
                loss[i, j] = scores.by_name[group].scores[candidate.name] if scores is not None else 0.0
                tables["bytes"][i, j] = group_bytes(members, candidate)
                if self.timing is not None:
                    tables["seconds"][i, j] = sum(self.timing.linear(candidate.applied(m), self.batch) for m in members)
        return Problem(tuple(self.groups), names, loss, tables)

    @property
    def numel(self) -> int:
        """Weights that formats are chosen for."""
        return sum(layer.numel for members in self.groups.values() for layer in members)

    def named(self, choice: np.ndarray) -> dict[str, str]:
        """A choice by names."""
        names = list(self.candidates)
        return {group: names[j] for group, j in zip(self.groups, choice, strict=True)}

    def bytes(self, choice: np.ndarray) -> int:
        """Bytes of the weights that formats are chosen for."""
        return sum(
            self.candidates[name].applied(layer).nbytes
            for group, name in self.named(choice).items()
            for layer in self.groups[group]
        )

    def bits(self, choice: np.ndarray) -> float:
        """Effective bits per weight."""
        return 8 * self.bytes(choice) / self.numel

    def seconds(self, choice: np.ndarray, problem: Problem) -> float | None:
        """Of a decode step, what is fixed included; None without kernel times."""
        return None if self.timing is None else problem.total("seconds", choice) + self.fixed_seconds

    @property
    def timing_name(self) -> str | None:
        """Whose kernel times they are, and whether they were measured."""
        if self.timing is None:
            return None
        return f"{self.timing.name}, {'measured' if self.timing.measured else 'roofline'}"

    def limits(self, goal: Goal) -> dict[str, float]:
        """The budgets as limits on what the groups take.

        Raises:
            Infeasible: what is fixed alone is over the budget.
        """
        limits: dict[str, float] = {}
        if goal.bits is not None:
            limits["bytes"] = math.floor(goal.bits * self.numel / 8 + 1e-6)
        if goal.fit is not None:
            limits["bytes"] = min(limits.get("bytes", math.inf), math.floor(goal.fit) - self.fixed_bytes)
        if goal.latency is not None:
            limits["seconds"] = goal.latency - self.fixed_seconds
        return limits

    def explain(self, goal: Goal, problem: Problem) -> None:
        """Raises Infeasible in the user's terms where a budget cannot be kept."""
        least = smallest(problem, "bytes")
        if goal.bits is not None and 8 * least / self.numel > goal.bits + 1e-9:
            raise Infeasible(
                f"--bits {goal.bits:g}: the smallest feasible value with these formats is "
                f"{math.ceil(8e4 * least / self.numel) / 1e4:.4f}"
            )
        if goal.fit is not None and least + self.fixed_bytes > goal.fit:
            raise Infeasible(
                f"--fit {megabytes(goal.fit)}: the smallest feasible value is {least + self.fixed_bytes:,.0f} bytes "
                f"({megabytes(least + self.fixed_bytes)}), of which {megabytes(self.cache_bytes)} are the KV cache "
                f"(context {goal.context}, batch {goal.batch}) and "
                f"{megabytes(self.fixed_bytes - self.cache_bytes)} weights that stay in 16 bit"
            )
        if goal.latency is not None:
            quickest = smallest(problem, "seconds") + self.fixed_seconds
            if quickest > goal.latency:
                raise Infeasible(
                    f"--latency {1e3 * goal.latency:g} ms: the smallest feasible value is {1e3 * quickest:.4g} ms"
                )

    def plan(
        self, choice: np.ndarray, problem: Problem, scores: Sensitivity, goal: Goal, corrected: Mapping[str, str]
    ) -> Plan:
        """The plan of a choice, with a reason for every layer."""
        layers = []
        ranks = {g.name: i for i, g in enumerate(sorted(scores.groups, key=lambda g: -max(g.scores.values())), 1)}
        for group, name in self.named(choice).items():
            candidate, entry = self.candidates[name], scores.by_name[group]
            reason = _reason(entry, name, ranks[group], len(ranks))
            if group in corrected:
                reason += f"; {corrected[group]}"
            for layer in self.groups[group]:
                new = candidate.applied(layer)
                layers.append(replace(new, reason=reason, score=entry.scores[name], cost=new.nbytes))
        plan = self.base.replace_layers(layers)
        note = {
            "method": scores.method, "formats": list(scores.formats), "goal": _goal_fields(goal),
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
    """A choice as a key of dictionaries."""
    return tuple(int(j) for j in choice)


def _reason(entry: Any, name: str, rank: int, count: int) -> str:
    """Why a group got its format, in one sentence."""
    own = f"{name if name != KEPT.name else '16 bit'} at {entry.bits[name]:.2f} bits, score {entry.scores[name]:.3g}"
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


def _goal_fields(goal: Goal) -> dict[str, Any]:
    fields = {k: v for k, v in dataclasses.asdict(goal).items() if v not in (None, ())}
    return {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}


def _without_convs(plan: Plan) -> Plan:
    """The plan with its convolutions in 16 bit; UserError if nothing else is quantized."""
    reason = (
        "convolution: scores and searches are for linear layers; without a budget, it is quantized as its format says"
    )
    convs = [layer for layer in plan.quantized if layer.kind == LayerKind.CONV]
    plan = plan.replace_layers(replace(layer, weight=None, activation=None, reason=reason) for layer in convs)
    if convs and not plan.quantized:
        raise UserError(
            "formats are chosen for linear layers, and this model has convolutions alone: quantize it in one format, "
            "such as --format int8, without a budget"
        )
    return plan


def _recipe_of(candidate: Candidate, solver: str, kv_cache: str | None) -> Recipe:
    assert candidate.weight is not None
    activation = candidate.activation.name if candidate.activation else KEEP
    return Recipe(candidate.name, candidate.weight.name, activation, solver, kv_cache=kv_cache or KEEP)


def _fits(candidate: Candidate, layer: LayerPlan, plan: Plan | None, runtimes: Sequence[Target], mixed: bool) -> bool:
    """Whether a layer can take a candidate: its recipe's plan quantizes the layer, and every runtime has the result."""
    planned = candidate.weight is None or (plan is not None and plan.by_name[layer.name].weight is not None)
    planned = planned and (layer.kind == LayerKind.LINEAR or not candidate.rank)
    return planned and not any(runtime.problems(candidate.applied(layer), mixed=mixed) for runtime in runtimes)


def _bytes_read(fixed: Sequence[LayerPlan]) -> int:
    """Bytes of layers with a fixed format that a decoding step reads; of an embedding, only a row a token."""
    heads = (2 * layer.numel for layer in fixed if layer.kind == LayerKind.HEAD and layer.tied_to is not None)
    return sum(layer.nbytes for layer in fixed if layer.kind != LayerKind.EMBEDDING) + sum(heads)


def _check_runtime(
    runtime: Target, allowed: Mapping[str, Sequence[Candidate]], candidates: Sequence[Candidate]
) -> None:
    if any(c.weight is not None for choices in allowed.values() for c in choices):
        return
    asked = ", ".join(c.name for c in candidates if c.weight is not None)
    has = ", ".join(dict.fromkeys(map(str, runtime.pairs)))
    raise UserError(f"{runtime.name} runs none of {asked} for this model's layers; it has {has}")


def _constrain(
    constraint: Constraint,
    groups: Mapping[str, Sequence[LayerPlan]],
    allowed: dict[str, list[Candidate]],
    candidates: Mapping[str, Candidate],
) -> None:
    option = f"--{constraint.kind.replace('_', '-')} {constraint.match}={constraint.format}"
    if constraint.format not in candidates:
        raise UserError(f"{option}: {constraint.format!r} is none of the formats {', '.join(candidates)}")
    meant = [g for g, members in groups.items() if any(fnmatchcase(m.name, constraint.match) for m in members)]
    if not meant:
        raise UserError(f"{option}: no layer that a format is chosen for matches {constraint.match!r}")
    wanted = candidates[constraint.format]
    for group in meant:
        least = group_bytes(groups[group], wanted)
        left = [
            candidate
            for candidate in allowed[group]
            if {
                "pin": candidate.name == wanted.name,
                "forbid": candidate.name != wanted.name,
                "at_least": group_bytes(groups[group], candidate) >= least,
            }[constraint.kind]
        ]
        if not left:
            has = ", ".join(c.name for c in allowed[group]) or "none"
            raise UserError(f"{option}: {group} cannot take any such format; it can take {has}")
        allowed[group] = left


def _parameters_of(model: nn.Module, layer: LayerPlan) -> list[torch.Tensor]:
    if layer.kind.is_named_by_parameter:
        return [model.get_parameter(layer.name)]
    weight = getattr(model.get_submodule(layer.name), "weight", None)
    return [weight] if isinstance(weight, torch.Tensor) else []


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    return list({id(t): t for t in (*model.parameters(), *model.buffers())}.values())
