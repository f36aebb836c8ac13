"""Allocation: which format every layer gets, decided by scores, checked by measurement.

    score      what each group would cost in each format                        `calibration.sensitivity_scores`
    solve      the best choice within the budget by those scores                `calibration.allocate`
    measure    quantize with that choice, all groups together: the joint KL
    correct    one backward pass *at the quantized model* says what each change would gain there; the best few are
               made, measured again, and kept if they did gain
    report     predicted beside measured

Scores are guesses that add up. They leave out that errors of different groups can cancel or amplify each other, and
that a large error is not a large small one. So a limit on the loss is never taken from the sum: `--max-kl` searches
for the budget at which the *measured* loss stays just below it, and every plan ends with a measured figure.

The loop measures on a model whose layers change format at a word (`calibration.trial`), with the codes and scales
that quantizing gives. Where the solver works from data (GPTQ, AWQ), layers depend on each other; the loop then runs
with `mse` in its place, and its outcome is quantized with the real solver, measured, and corrected.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from quant import api
from quant.allocation_record import AllocationRecord, Budget, Chosen, CurvePoint, Round, Uniform
from quant.calibration.allocate import SCORE, Infeasible, Near, Problem, pareto, smallest, solve
from quant.calibration.candidates import KEPT, Candidate, groups_of, parse_candidates
from quant.calibration.costs import Timing, get_timing, kv_cache_bytes, memory_of
from quant.calibration.divergence import Divergence, NextToken, divergence_of
from quant.calibration.sensitivity import Sensitivity
from quant.calibration.sensitivity_scores import TokenProducts, observed, score_groups
from quant.calibration.solver import get_pipeline
from quant.calibration.trial import Trial, measure_amax, prepared
from quant.errors import UserError
from quant.planning import make_plan
from quant.recipes.plan import LayerPlan, Plan
from quant.recipes.recipe import Recipe
from quant.recipes.targets import TARGETS, get_target

FORMATS = ("nvfp4", "fp8")
_STAND_IN = "mse"

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Goal:
    """What is asked for: budgets hold together; at most one limit on the loss.

    Attributes:
        bits: per weight, over all weights that formats are chosen for, every scale and pad counted.
        fit: bytes for all weights and the KV cache of `context` × `batch` tokens.
        context: tokens a sequence.
        batch: sequences.
        latency: seconds of one decoding step with that cache, on the GPU or table that `target` names.
        target: runtimes (their formats alone are offered) and at most one GPU or table of kernel times.
        max_kl: largest measured KL(base‖model); 1 − cosine for a model without a vocabulary.
        max_ppl_increase: largest relative increase of perplexity.
    """

    bits: float | None = None
    fit: float | None = None
    context: int = 4096
    batch: int = 1
    latency: float | None = None
    target: tuple[str, ...] = ()
    max_kl: float | None = None
    max_ppl_increase: float | None = None

    def __post_init__(self) -> None:
        if self.max_kl is not None and self.max_ppl_increase is not None:
            raise UserError("give one limit on the loss: --max-kl or --max-ppl-increase")
        if not self.has_limit and self.bits is None and self.fit is None and self.latency is None:
            raise UserError("nothing to allocate for: give --bits, --fit, --latency, --max-kl or --max-ppl-increase")
        if self.latency is not None and self.timing is None:
            raise UserError("--latency needs the GPU or a table of kernel times: --target h100, or --target FILE.json")

    @property
    def has_limit(self) -> bool:
        """Whether the loss is limited, and the size is what is minimized."""
        return self.max_kl is not None or self.max_ppl_increase is not None

    @property
    def timing(self) -> Timing | None:
        """Kernel times of the target."""
        names = [name for name in self.target if name not in TARGETS]
        if len(names) > 1:
            raise UserError(f"more than one GPU among the targets: {', '.join(names)}")
        return get_timing(names[0]) if names else None

    @property
    def budget(self) -> Budget:
        """For the record: the limit on the loss if there is one, else the first budget."""
        named = (
            ("kl", self.max_kl), ("perplexity", self.max_ppl_increase), ("bits", self.bits), ("bytes", self.fit),
            ("seconds", self.latency),
        )  # fmt: skip
        return next(Budget(kind, value) for kind, value in named if value is not None)


@dataclass(frozen=True)
class Constraint:
    """What a user says of the groups that a glob matches.

    Attributes:
        kind: `pin` (this format and no other), `forbid` (not this one) or `at_least` (no fewer bits than this one).
        match: glob over layer names; a group is meant if any of its members is.
        format: a candidate's name, or `keep`.
    """

    kind: str
    match: str
    format: str

    @classmethod
    def parse(cls, kind: str, text: str) -> Constraint:
        """From `GLOB=FORMAT`."""
        match, separator, format_ = text.rpartition("=")
        if not separator or not match or not format_:
            raise UserError(f"--{kind.replace('_', '-')} {text!r}: write it as GLOB=FORMAT, such as '*.down_proj=fp8'")
        return cls(kind, match, format_)


@dataclass(frozen=True, eq=False)
class Allocation:
    """What `allocate` gives."""

    plan: Plan
    record: AllocationRecord
    sensitivity: Sensitivity


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        score_rows: rows that scores and gains are taken on.
        check_rows: rows that the joint loss is measured on.
        rounds: turns of the correcting loop.
        solves: quantizations with a solver that works from data.
        points: of the Pareto curve.
    """

    score_rows: int = 8
    check_rows: int = 8
    rounds: int = 4
    solves: int = 3
    points: int = 17


def allocate(
    model: nn.Module,
    rows: torch.Tensor,
    goal: Goal,
    *,
    formats: str | Sequence[str] = FORMATS,
    method: str = "fisher",
    solver: str = "rtn",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    constraints: Sequence[Constraint] = (),
    kv_cache: str | None = None,
    check: torch.Tensor | None = None,
    effort: Effort = Effort(),
    dtype: torch.dtype | None = torch.float32,
    seed: int = 0,
    path: Path | None = None,
    run: Callable[[nn.Module], Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Allocation:
    """Decides a format for every layer; the model is as before afterwards.

    Args:
        model: called as `model(rows)`.
        rows: calibration token ids, int64 `[rows, seqlen]`. Ranges of inputs are measured on all of them, scores on
            the first `effort.score_rows`, the joint loss of budgets on those that follow.
        goal: budgets and limits.
        formats: what may be chosen beside 16 bit; see `calibration.candidates`.
        method: of the scores, see `calibration.sensitivity_scores`.
        solver: that the plan will name.
        include, exclude, run: as in `quantize`.
        constraints: per glob.
        kv_cache: format of the KV cache, or None for 16 bit.
        check: rows on which a limit on the loss must hold; by default calibration rows after those for scores.
        effort: how much is measured.
        dtype: what 16-bit tensors are widened to while measuring; None leaves them.
        seed: of what `fisher` draws.
        path: where the sensitivity table is kept.
        provenance: recorded in the plan.
        progress: called as `progress(stage, done, total)`.

    Raises:
        Infeasible: no choice keeps the budgets; the message says the smallest feasible value.
        UserError: an unknown format, or a target that runs none of them.
    """
    started = time.perf_counter()
    home = next(model.parameters()).device
    rows, check = rows.to(home), None if check is None else check.to(home)
    space = _Space.of(
        model, parse_candidates(formats), goal, solver, include, exclude, constraints, kv_cache, run, provenance
    )
    with prepared(model, None):
        report = (lambda done, total: progress("calibrate", done, total)) if progress else None
        amax = measure_amax(model, space.groups, space.candidates, rows, report)
    scored = rows[: effort.score_rows]
    stand_in = _STAND_IN if get_pipeline(solver).needs_data else solver
    scores = score_groups(
        model, space.groups, space.allowed, scored, method=method, solver=stand_in, dtype=dtype, seed=seed,
        amax=amax, path=path, progress=progress,
    )  # fmt: skip
    started += scores.seconds
    if check is None:
        check = rows[effort.score_rows :][: effort.check_rows]
        check = check if len(check) else scored
    stored = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    problem = space.problem(scores)
    trial = Trial(model, space.groups, space.candidates, amax, stand_in, stored)
    bench = Bench(trial, space, divergence_of(model), scored, check, progress)
    loop = Loop(problem, space, bench, goal, effort)
    with prepared(model, dtype), trial:
        found = loop.run()
        uniform = bench.uniform(problem)
        curve = loop.curve()
    if stand_in != solver:
        found = _with_real_solver(model, loop, found, rows, dtype, progress)
    record = AllocationRecord(
        budget=goal.budget,
        chosen=Chosen(
            bits=space.bits(found.choice),
            kl_predicted=problem.total(SCORE, found.choice),
            kl_measured=found.measured,
            bytes=space.bytes(found.choice),
        ),
        curve=curve,
        uniform=uniform,
        rounds=tuple(loop.rounds),
        seconds=time.perf_counter() - started,
        unit=bench.divergence.unit,
    )
    return Allocation(space.plan(found.choice, problem, scores, goal, loop), record, scores)


def allocate_for_api(
    model: nn.Module,
    data: torch.Tensor,
    recipe: Any,
    bits: float | None,
    max_kl: float | None,
    *,
    formats: str | Sequence[str] | None,
    solver: str | None,
    **options: Any,
) -> Plan:
    """The plan for `quant.quantize(model, bits=…)`; `recipe` must have been left at its default."""
    if recipe != "nvfp4":
        raise UserError(f"recipe {recipe!r} fixes the formats that a budget would choose; name those with formats=")
    goal = Goal(bits=bits, max_kl=max_kl)
    return allocate(model, data, goal, formats=formats or FORMATS, solver=solver or "rtn", **options).plan


def score(
    model: nn.Module,
    rows: torch.Tensor,
    *,
    formats: str | Sequence[str] = FORMATS,
    method: str = "fisher",
    solver: str = "rtn",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    dtype: torch.dtype | None = torch.float32,
    seed: int = 0,
    path: Path | None = None,
    run: Callable[[nn.Module], Any] | None = None,
    progress: Progress | None = None,
) -> Sensitivity:
    """What each fusion group would lose in each format; arguments as in `allocate`, `rows` all used."""
    space = _Space.of(model, parse_candidates(formats), Goal(bits=16.0), solver, include, exclude, (), None, run, None)
    rows = rows.to(next(model.parameters()).device)
    return score_groups(
        model, space.groups, space.allowed, rows, method=method, solver=solver, dtype=dtype, seed=seed, path=path,
        progress=progress,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Space:
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
        run: Callable[[nn.Module], Any] | None,
        provenance: Mapping[str, Any] | None,
    ) -> _Space:
        runtimes = [get_target(name) for name in goal.target if name in TARGETS]
        plans: dict[str, Plan] = {}
        refused: UserError | None = None
        for candidate in candidates:
            if candidate.weight is None:
                continue
            activation = candidate.activation.name if candidate.activation else "keep"
            recipe = Recipe(candidate.name, candidate.weight.name, activation, solver, kv_cache=kv_cache or "keep")
            try:
                plans[candidate.name] = make_plan(
                    model, recipe, include=include, exclude=exclude, run=run, provenance=dict(provenance or {})
                )
            except UserError as error:
                refused = error
        if not plans:
            raise refused or UserError("no formats to choose from")
        base = next(iter(plans.values()))
        chosen = {layer.name for plan in plans.values() for layer in plan.quantized}
        groups = groups_of([layer for layer in base.layers if layer.name in chosen])
        by_name = {c.name: c for c in candidates}
        allowed: dict[str, list[Candidate]] = {}
        for group, members in groups.items():
            fits = [
                c for c in candidates
                if c.weight is None or (c.name in plans and all(plans[c.name].by_name[m.name].weight for m in members))
            ]  # fmt: skip
            for runtime in runtimes:
                fits = [c for c in fits if not any(runtime.problems(c.applied(m)) for m in members)]
            allowed[group] = fits
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
        seconds = 0.0
        if timing is not None:
            # A look-up reads one row of an embedding a token; everything else is read whole at every step.
            read = [layer.nbytes for layer in rest if layer.kind != "embedding"]
            heads = [2 * layer.numel for layer in rest if layer.kind == "head" and layer.tied_to is not None]
            seconds = timing.read(sum(read) + sum(heads) + cache)
        return cls(base, groups, by_name, allowed, unplanned, cache, fixed, seconds, timing, goal.batch)

    def problem(self, scores: Sensitivity) -> Problem:
        """As the solver takes it."""
        names = tuple(self.candidates)
        shape = (len(self.groups), len(names))
        loss = np.full(shape, np.inf)
        tables = {"bytes": np.zeros(shape)} | ({"seconds": np.zeros(shape)} if self.timing is not None else {})
        for i, (group, members) in enumerate(self.groups.items()):
            for candidate in self.allowed[group]:
                j = names.index(candidate.name)
                loss[i, j] = scores.by_name[group].scores[candidate.name]
                tables["bytes"][i, j] = scores.by_name[group].bytes[candidate.name]
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
                f"--fit {goal.fit / 1e9:.3f} GB: the smallest feasible value is "
                f"{(least + self.fixed_bytes) / 1e9:.3f} GB, of which {self.fixed_bytes / 1e9:.3f} GB are the KV cache "
                f"(context {goal.context}, batch {goal.batch}) and weights that stay in 16 bit"
            )
        if goal.latency is not None:
            quickest = smallest(problem, "seconds") + self.fixed_seconds
            if quickest > goal.latency:
                raise Infeasible(
                    f"--latency {1e3 * goal.latency:g} ms: the smallest feasible value is {1e3 * quickest:.4g} ms"
                )

    def bare_plan(self, choice: np.ndarray) -> Plan:
        """The formats of a choice, without reasons."""
        return self.base.replace_layers(
            self.candidates[name].applied(layer)
            for group, name in self.named(choice).items()
            for layer in self.groups[group]
        )

    def plan(self, choice: np.ndarray, problem: Problem, scores: Sensitivity, goal: Goal, loop: Loop) -> Plan:
        """The plan of a choice, with a reason for every layer."""
        layers = []
        ranks = {g.name: i for i, g in enumerate(sorted(scores.groups, key=lambda g: -max(g.scores.values())), 1)}
        for group, name in self.named(choice).items():
            candidate, entry = self.candidates[name], scores.by_name[group]
            reason = _reason(entry, name, ranks[group], len(ranks))
            if group in loop.corrected:
                reason += f"; {loop.corrected[group]}"
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
            note["seconds"] = problem.total("seconds", choice) + self.fixed_seconds
            note["timing"] = f"{self.timing.name}, {'measured' if self.timing.measured else 'roofline'}"
        target = next((name for name in goal.target if name in TARGETS), None) or (goal.target or (None,))[0]
        return replace(plan, target=target, provenance={**plan.provenance, "allocation": note})


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


def _check_runtime(runtime: Any, allowed: Mapping[str, Sequence[Candidate]], candidates: Sequence[Candidate]) -> None:
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
        least = sum(wanted.applied(m).nbytes for m in groups[group])
        keep = {
            "pin": lambda c: c.name == wanted.name,
            "forbid": lambda c: c.name != wanted.name,
            "at_least": lambda c, g=group, n=least: sum(c.applied(m).nbytes for m in groups[g]) >= n,
        }[constraint.kind]
        left = [c for c in allowed[group] if keep(c)]
        if not left:
            has = ", ".join(c.name for c in allowed[group]) or "none"
            raise UserError(f"{option}: {group} cannot take any such format; it can take {has}")
        allowed[group] = left


def _parameters_of(model: nn.Module, layer: LayerPlan) -> list[torch.Tensor]:
    if layer.kind == "experts":
        return [model.get_parameter(layer.name)]
    weight = getattr(model.get_submodule(layer.name), "weight", None)
    return [weight] if isinstance(weight, torch.Tensor) else []


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    return list({id(t): t for t in (*model.parameters(), *model.buffers())}.values())


@dataclass(eq=False)
class Bench:
    """Measures the joint loss of choices, each once.

    Attributes:
        trial: entered.
        space: the choices.
        divergence: what is measured.
        scored: rows for gains.
        check: rows for the loss.
        progress: as in `allocate`.
    """

    trial: Trial
    space: _Space
    divergence: Divergence
    scored: torch.Tensor
    check: torch.Tensor
    progress: Progress | None = None
    references: dict[str, list[Any]] = field(default_factory=dict)
    losses: dict[tuple[int, ...], float] = field(default_factory=dict)
    nlls: dict[tuple[int, ...], float] = field(default_factory=dict)

    def loss(self, choice: np.ndarray) -> float:
        """Mean divergence on the check rows."""
        key = tuple(int(j) for j in choice)
        if key not in self.losses:
            references = self._references("check", self.check)
            self.trial.set(self.space.named(choice))
            total = sum(
                self.divergence.measure(rows, reference)
                for rows, reference in zip(self.check.split(1), references, strict=True)
            )
            self.trial.forget_inputs()
            self.losses[key] = max(total, 0.0) / self.divergence.count(self.check)
            self._tick()
        return self.losses[key]

    def perplexity_increase(self, choice: np.ndarray) -> float:
        """Relative increase of perplexity on the check rows.

        Raises:
            UserError: the model has no next tokens.
        """
        if not isinstance(self.divergence, NextToken):
            raise UserError("--max-ppl-increase needs a causal language model; use --max-kl, here 1 − cosine")
        return math.exp(self._nll(choice) - self._nll(None)) - 1

    def _nll(self, choice: np.ndarray | None) -> float:
        assert isinstance(self.divergence, NextToken)
        key = () if choice is None else tuple(int(j) for j in choice)
        if key not in self.nlls:
            self.trial.set({} if choice is None else self.space.named(choice))
            total = sum(self.divergence.nll(rows) for rows in self.check.split(1))
            self.trial.forget_inputs()
            self.nlls[key] = total / self.divergence.count(self.check)
            self._tick()
        return self.nlls[key]

    def gains(self, choice: np.ndarray, problem: Problem) -> np.ndarray:
        """What changing one group alone would add to the loss of a choice, `[G, F]`; one backward pass a row.

        To first order by the gradient at the quantized model, which sees how errors add up; to second order by the
        scores, of which the change takes one away and brings another.
        """
        references = self._references("scored", self.scored)
        sums = np.zeros(problem.scores.shape)
        names = list(self.space.candidates)
        self.trial.set(self.space.named(choice))
        for place, rows in enumerate(self.scored.split(1)):
            products = TokenProducts(self.trial, self.space.allowed)
            with observed(self.trial, products.observe, rows.numel()):
                self.divergence.descend(rows, references[place])
            for i, group in enumerate(problem.groups):
                for name, value in products.sums().get(group, {}).items():
                    sums[i, names.index(name)] += value
        self._tick()
        sums /= self.divergence.count(self.scored)
        own = problem.scores[np.arange(len(choice)), choice][:, None]
        table = sums + problem.scores + own
        table[np.arange(len(choice)), choice] = 0.0
        return np.where(problem.allowed, table, np.inf)

    def uniform(self, problem: Problem) -> tuple[Uniform, ...]:
        """Each format for every group that may take it, the best allowed one for others."""
        found = []
        for j, name in enumerate(problem.candidates):
            if not problem.allowed[:, j].any() or name == KEPT.name:
                continue
            choice = np.where(problem.allowed[:, j], j, problem.scores.argmin(axis=1))
            found.append(Uniform(name, self.space.bits(choice), self.loss(choice)))
        return tuple(found)

    def _references(self, name: str, rows: torch.Tensor) -> list[Any]:
        if name not in self.references:
            self.trial.set({})
            self.references[name] = [self.divergence.reference(part) for part in rows.split(1)]
        return self.references[name]

    def _tick(self) -> None:
        if self.progress is not None:
            done = len(self.losses) + len(self.nlls)
            self.progress("verify", done, done)


@dataclass(frozen=True, eq=False)
class _Found:
    choice: np.ndarray
    measured: float


@dataclass(eq=False)
class Loop:
    """Solve, measure, correct.

    Attributes:
        problem: by the scores.
        rounds: what was measured, in order.
        corrected: what measuring changed, by group, for the reasons.
        scale: measured loss of the real solver over that of its stand-in; 1 without one.
    """

    problem: Problem
    space: _Space
    bench: Bench
    goal: Goal
    effort: Effort
    rounds: list[Round] = field(default_factory=list)
    corrected: dict[str, str] = field(default_factory=dict)
    scale: float = 1.0
    last: np.ndarray | None = None

    def run(self) -> _Found:
        """The choice, and what it measures.

        Raises:
            Infeasible: the budgets cannot be kept, or not together with the limit on the loss.
        """
        self.space.explain(self.goal, self.problem)
        found = self._within_loss() if self.goal.has_limit else self._within_budget()
        return self._correct(found)

    def curve(self) -> tuple[CurvePoint, ...]:
        """Predicted Pareto curve with what was measured on it, by rising bits."""
        points = {tuple(map(int, c)): c for c in pareto(self.problem, "bytes", self.effort.points)}
        found = [
            CurvePoint(self.space.bits(c), self.problem.total(SCORE, c), self.bench.losses.get(key))
            for key, c in points.items()
        ]
        return tuple(sorted(found, key=lambda p: p.bits))

    def _within_budget(self) -> _Found:
        choice = solve(self.problem, self.space.limits(self.goal))
        return _Found(choice, self._note(choice, self.problem.total(SCORE, choice)))

    def _within_loss(self) -> _Found:
        """The smallest model on the curve of the scores whose measured loss is within the limit, by bisection.

        The curve is walked by its one parameter, the sum of scores that is allowed. It starts at the limit itself,
        which is where it would end if scores were exact, and each measurement rescales the next guess.
        """
        budgets = self.space.limits(self.goal)
        least = self.problem.total(SCORE, solve(self.problem, budgets))
        good: np.ndarray | None = None
        low, high = least, math.inf  # sums of scores that are known to keep the limit, and to break it
        allowance = max(self._limit_as_loss(), least)
        for _ in range(10):
            choice = self._smallest_within(allowance, budgets)
            predicted = self.problem.total(SCORE, choice)
            ratio = self._ratio(choice, predicted)
            if ratio <= 1:
                good, low = choice, max(allowance, low)
                if not self._can_shrink(choice):
                    break
            else:
                high = predicted
                if predicted <= least * (1 + 1e-9) + 1e-15:
                    break
            if good is not None and high < math.inf and self._is_close(good, high, budgets):
                break
            allowance = self._next(allowance, ratio, low, high)
        if good is None:
            raise Infeasible(
                f"{self._limit_text()}: even the least lossy choice within the budgets measures {ratio:.3g} times that"
            )
        return _Found(good, self.bench.loss(good))

    def _next(self, allowance: float, ratio: float, low: float, high: float) -> float:
        """The next sum of scores to try: rescaled by what was measured, or halfway where that leads nowhere."""
        guess = allowance / max(ratio, 0.05) if ratio != 1 else 1.02 * allowance
        if high == math.inf:
            return guess
        margin = 0.02 * (high - low)
        return guess if low + margin < guess < high - margin else (low + high) / 2

    def _smallest_within(self, allowance: float, budgets: Mapping[str, float]) -> np.ndarray:
        limits = {SCORE: allowance * (1 + 1e-9) + 1e-15, **budgets}
        return solve(self.problem, limits, minimize="bytes")

    def _can_shrink(self, choice: np.ndarray) -> bool:
        return self.space.bytes(choice) > smallest(self.problem, "bytes")

    def _is_close(self, good: np.ndarray, high: float, budgets: Mapping[str, float]) -> bool:
        """Whether the smallest choice that may still keep the limit would save less than 0.3 % more."""
        try:
            next_one = self._smallest_within(high * (1 - 1e-6), budgets)
        except Infeasible:
            return True
        return self.space.bytes(good) - self.space.bytes(next_one) < 0.003 * self.space.bytes(good)

    def _limit_as_loss(self) -> float:
        if self.goal.max_kl is not None:
            return self.goal.max_kl / self.scale
        # ΔNLL and KL are of one size for a calibrated model: the expectation of one is the other.
        return math.log1p(self.goal.max_ppl_increase or 0.0) / self.scale

    def _limit_text(self) -> str:
        if self.goal.max_kl is not None:
            return f"--max-kl {self.goal.max_kl:g}"
        return f"--max-ppl-increase {100 * (self.goal.max_ppl_increase or 0.0):g}%"

    def _ratio(self, choice: np.ndarray, predicted: float) -> float:
        """What a choice measures as a fraction of the limit."""
        measured = self._note(choice, predicted)
        if self.goal.max_kl is not None:
            return measured * self.scale / self.goal.max_kl
        assert self.goal.max_ppl_increase is not None
        return self.bench.perplexity_increase(choice) * self.scale / self.goal.max_ppl_increase

    def _note(self, choice: np.ndarray, predicted: float) -> float:
        measured = self.bench.loss(choice)
        before = self.last
        groups = self.problem.groups
        changed = [] if before is None else [g for g, a, b in zip(groups, before, choice, strict=True) if a != b]
        layers = tuple(layer.name for group in changed for layer in self.space.groups[group])
        self.rounds.append(Round(self.space.bits(choice), predicted, measured, layers))
        self.last = choice
        return measured

    def _correct(self, found: _Found) -> _Found:
        """Changes the groups with the best gain at the quantized model, a few at a time, while that does gain."""
        changes = max(len(self.problem.groups) // 24, 2)
        gains: np.ndarray | None = None
        for _ in range(self.effort.rounds):
            if gains is None:
                gains = self.bench.gains(found.choice, self.problem)
            choice, predicted = self._step(found, gains, changes)
            if choice is None or np.array_equal(choice, found.choice):
                break
            ratio = self._ratio(choice, predicted) if self.goal.has_limit else 0.0
            measured = self.bench.loss(choice) if self.goal.has_limit else self._note(choice, predicted)
            better = (
                self.space.bytes(choice) < self.space.bytes(found.choice)
                if self.goal.has_limit
                else measured < found.measured
            )
            if ratio <= 1 and better:
                self._explain(found, choice, measured)
                found, gains = _Found(choice, measured), None
            else:
                changes //= 2
                if changes == 0:
                    break
        return found

    def _step(self, found: _Found, gains: np.ndarray, changes: int) -> tuple[np.ndarray | None, float]:
        """The best choice near the present one by its gains, and the loss that they promise."""
        near = Near(found.choice, changes)
        # Gains are differences and may be negative; the solver is indifferent to that.
        local = Problem(self.problem.groups, self.problem.candidates, gains, self.problem.costs)
        limits = self.space.limits(self.goal)
        try:
            if not self.goal.has_limit:
                choice = solve(local, limits, near=near)
            else:
                slack = max(self._limit_as_loss() - found.measured, 0.0)
                if self.goal.max_kl is None:
                    slack = 0.0
                choice = solve(local, {SCORE: 0.9 * slack, **limits}, minimize="bytes", near=near)
        except Infeasible:
            return None, math.nan
        return choice, found.measured + local.total(SCORE, choice)

    def _explain(self, found: _Found, choice: np.ndarray, measured: float) -> None:
        names = self.problem.candidates
        for group, old, new in zip(self.problem.groups, found.choice, choice, strict=True):
            if old != new:
                self.corrected[group] = (
                    f"changed from {names[old]} after measuring: joint loss {found.measured:.4g} → {measured:.4g}"
                )


def _with_real_solver(
    model: nn.Module,
    loop: Loop,
    found: _Found,
    rows: torch.Tensor,
    dtype: torch.dtype | None,
    progress: Progress | None,
) -> _Found:
    """Quantizes a copy with the solver that the plan names, measures it, and searches again while a limit is missed.

    What is learned is one number: how much of the stand-in's loss the real solver leaves. Budgets of size need one
    turn, limits on the loss a few.
    """
    space, goal = loop.space, loop.goal
    best: _Found | None = None
    for _ in range(loop.effort.solves):
        measured = _measure_real(model, space.bare_plan(found.choice), rows, loop.bench, dtype, progress)
        loop.rounds.append(Round(space.bits(found.choice), found.measured * loop.scale, measured))
        if goal.max_kl is None:
            return _Found(found.choice, measured)
        if measured <= goal.max_kl and (best is None or space.bytes(found.choice) < space.bytes(best.choice)):
            best = _Found(found.choice, measured)
        loop.scale = measured / found.measured if found.measured else 1.0
        with prepared(model, dtype), loop.bench.trial:
            found = loop.run()
        if best is not None and space.bytes(found.choice) > 0.995 * space.bytes(best.choice):
            break
    if best is None:
        raise Infeasible(
            f"--max-kl {goal.max_kl:g}: not reached after {loop.effort.solves} quantizations; allow a little more"
        )
    return best


def _measure_real(
    model: nn.Module,
    plan: Plan,
    rows: torch.Tensor,
    bench: Bench,
    dtype: torch.dtype | None,
    progress: Progress | None,
) -> float:
    """The joint loss of a quantized copy of `model`."""
    quantized = copy.deepcopy(model)
    api.quantize(quantized, plan, rows, progress=progress)
    divergence = divergence_of(quantized)
    with prepared(quantized, dtype):
        total = sum(
            divergence.measure(part, reference)
            for part, reference in zip(bench.check.split(1), bench.references["check"], strict=True)
        )
    return max(total, 0.0) / divergence.count(bench.check)
