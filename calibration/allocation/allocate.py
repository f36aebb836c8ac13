"""`allocate` chooses a format for every layer: scores decide, and measurements check and correct the choice.

    score      the loss that each group would cause in each format              `calibration.sensitivity.scores`
    solve      the best choice within the budget by those scores                `calibration.sensitivity.knapsack`
    measure    the joint loss of that choice, with all groups quantized together
    correct    one backward pass at the quantized model gives the gain of each change there; the best few are made,
               measured again, and kept if they did gain
    search     changes and exchanges near that, each measured, until none helps `quant.calibration.allocation.measure_choices`,
    or in a
               model that the plan's solver has solved `quant.calibration.allocation.real_solver`

Scores are estimates that add up. They ignore that errors of different groups cancel or amplify each other, and that the
loss does not grow in proportion to the error. So a limit on the loss is never checked by the sum: `--max-kl` searches
for the budget at which the *measured* loss stays just below it, and every plan ends with a measured figure. It is
measured on one part of the text, and in the end on another that took no part
(`quant.calibration.allocation.measure_choices`).

A mix of formats is only chosen if it beats every single format: each one that the budget has room for is measured for
all groups as well, and the best one wins.

The loop measures on a model whose layers can be switched between formats at run time, with the codes and scales that
quantizing gives. The result of a solver that works from data (GPTQ, AWQ) depends on the layers before: scores and loop
then use its result for each group by itself (`calibration.sensitivity.group_solutions`), and the choice is quantized
for real, measured, and corrected.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar, Unpack

import torch
from torch import nn

from quant.base.errors import UserError, option
from quant.base.listener import Progress
from quant.calibration.allocation.curve import Loop, MeasuredChoice
from quant.calibration.allocation.goal import (
    DEFAULT_FORMATS,
    AllocationRecord,
    Chosen,
    Constraint,
    ConstraintKind,
    CurvePoint,
    Goal,
    OptionArguments,
    Options,
    RunModel,
    Uniform,
    Verified,
)
from quant.calibration.allocation.measure_choices import Bench, Counts, HeldOut
from quant.calibration.allocation.real_solver import RealSolver, better_where_solved, rows_where_solved
from quant.calibration.allocation.space import Space
from quant.calibration.evaluating import evaluating, prepared
from quant.calibration.layer_result import Quantized
from quant.calibration.placement import Device, device_of
from quant.calibration.sensitivity.costs import group_bytes, kv_cache_bytes
from quant.calibration.sensitivity.divergence import divergence_of
from quant.calibration.sensitivity.group_solutions import solve_each_group
from quant.calibration.sensitivity.knapsack import SCORE
from quant.calibration.sensitivity.scores import Scoring, score_groups
from quant.calibration.sensitivity.switchable_model import SwitchableModel, measure_amax
from quant.calibration.sensitivity.table import Candidate, Sensitivity, parse_candidates
from quant.calibration.session import Session
from quant.calibration.solvers.registry import get_pipeline
from quant.formats.tensor import moved
from quant.kernels.linear.install import calling_encoder_layers
from quant.recipes.blocks import stored_dtype
from quant.recipes.layers import LayerKind
from quant.recipes.module_replacement import as_linears
from quant.recipes.plan import LayerPlan, Plan, groups_of
from quant.recipes.plan_make import make_plan
from quant.recipes.recipe import KEEP, Recipe, matched
from quant.recipes.targets import TARGETS, Target, get_target

# `make_space` finds the formats that each fusion group of a model may take.
#
# Everything that can be refused is refused here, before anything is measured: a format that no layer can take, a
# runtime that has none of them, a constraint that leaves a group without a choice.


def make_space(model: nn.Module, goal: Goal, options: Options) -> Space:
    """Returns the choices that an allocation has for `model`."""
    candidates = parse_candidates(options.formats)
    runtimes = [get_target(name) for name in goal.target if name in TARGETS]
    plans = _plan_each(model, candidates, options)
    # Layers, kinds and groups are the same in all plans; only formats differ.
    base = next(iter(plans.values()))
    # A layer is open to choice if at least one format can quantize it; others keep 16 bit and count as fixed.
    quantized = {layer.name for plan in plans.values() for layer in plan.quantized}
    groups = groups_of([layer for layer in base.layers if layer.name in quantized])
    by_name = {c.name: c for c in candidates}
    # Some runtimes take each format by itself but not several in one checkpoint.
    mixed = len(plans) > 1
    allowed = {
        group: [c for c in candidates if all(_fits(c, m, plans.get(c.name), runtimes, mixed) for m in members)]
        for group, members in groups.items()
    }
    for runtime in runtimes:
        _check_runtime(runtime, allowed, candidates)
    for constraint in options.constraints:
        _constrain(constraint, matched(constraint.match, base.by_name), groups, allowed, by_name)
    fixed_layers = [layer for layer in base.layers if layer.name not in quantized]
    # By identity, since tied weights are one tensor under several names.
    planned = {id(p) for layer in base.layers for p in _parameters_of(model, layer)}
    unplanned_bytes = sum(t.nbytes for t in _tensors(model) if id(t) not in planned)
    cache_bytes = kv_cache_bytes(getattr(model, "config", None), goal.context, goal.batch, base.kv_cache)
    timing = goal.timing
    return Space(
        base=base,
        groups=groups,
        candidates=by_name,
        allowed=allowed,
        unplanned_bytes=unplanned_bytes,
        cache_bytes=cache_bytes,
        fixed_bytes=sum(layer.nbytes for layer in fixed_layers) + unplanned_bytes + cache_bytes,
        fixed_seconds=timing.read(_bytes_read(fixed_layers) + cache_bytes) if timing is not None else 0.0,
        timing=timing,
        batch=goal.batch,
    )


def _plan_each(model: nn.Module, candidates: Sequence[Candidate], options: Options) -> dict[str, Plan]:
    """Returns the plan of each candidate for all layers, by its name; candidates that no layer can take are left out."""
    plans: dict[str, Plan] = {}
    refusal: UserError | None = None
    for candidate in (c for c in candidates if c.weight is not None):
        recipe = _recipe_of(candidate, options.solver, options.kv_cache)
        try:
            plan = make_plan(model, recipe, include=options.include, exclude=options.exclude, run=options.run)
            plan = replace(plan, provenance={**(options.provenance or {}), **plan.provenance})
            plans[candidate.name] = _without_convs(plan)
        except UserError as error:
            refusal = error
    if not plans:
        raise refusal or UserError("no formats to choose from")
    return plans


def _without_convs(plan: Plan) -> Plan:
    """Returns the plan with its convolutions in 16 bit; UserError if nothing else is quantized."""
    reason = (
        "convolution: scores and searches are for linear layers; without a budget, it is quantized as its format says"
    )
    convs = [layer for layer in plan.quantized if layer.kind == LayerKind.CONV]
    plan = plan.replace_layers(replace(layer, weight=None, activation=None, reason=reason) for layer in convs)
    if convs and not plan.quantized:
        raise UserError(
            "formats are chosen for linear layers, and this model has only convolutions: quantize it in one format, "
            f"such as {option('format', 'int8')}, without a budget"
        )
    return plan


def _recipe_of(candidate: Candidate, solver: str, kv_cache: str | None) -> Recipe:
    activation = candidate.activation.name if candidate.activation else KEEP
    return Recipe(candidate.name, candidate.weight_format.name, activation, solver, kv_cache=kv_cache or KEEP)


def _fits(candidate: Candidate, layer: LayerPlan, plan: Plan | None, runtimes: Sequence[Target], mixed: bool) -> bool:
    """Returns whether a layer can take a candidate: its plan quantizes the layer, and every runtime runs it."""
    planned = candidate.weight is None or (plan is not None and plan.by_name[layer.name].weight is not None)
    # Branches are made for plain linear layers only.
    planned = planned and (layer.kind == LayerKind.LINEAR or not candidate.rank)
    return planned and not any(runtime.problems(candidate.applied(layer), mixed=mixed) for runtime in runtimes)


def _bytes_read(fixed: Sequence[LayerPlan]) -> int:
    """Returns the bytes of layers with a fixed format that a decoding step reads.

    Of an embedding, only a row a token.
    """
    # A head that is tied to an embedding has no bytes of its own in the plan, but each step reads it in 16 bit.
    heads = (2 * layer.numel for layer in fixed if layer.kind == LayerKind.HEAD and layer.tied_to is not None)
    return sum(layer.nbytes for layer in fixed if layer.kind != LayerKind.EMBEDDING) + sum(heads)


def _check_runtime(
    runtime: Target, allowed: Mapping[str, Sequence[Candidate]], candidates: Sequence[Candidate]
) -> None:
    if any(c.weight is not None for choices in allowed.values() for c in choices):
        return
    requested = ", ".join(c.name for c in candidates if c.weight is not None)
    has = ", ".join(dict.fromkeys(map(str, runtime.pairs)))
    raise UserError(f"{runtime.name} runs none of {requested} for this model's layers; it has {has}")


def _constrain(
    constraint: Constraint,
    names: Collection[str],
    groups: Mapping[str, Sequence[LayerPlan]],
    allowed: dict[str, list[Candidate]],
    candidates: Mapping[str, Candidate],
) -> None:
    """Removes the formats from `allowed` that a constraint rules out for the layers of these names."""
    option = f"{constraint.kind.option} {constraint.match}={constraint.format}"
    if constraint.format not in candidates:
        raise UserError(f"{option}: {constraint.format!r} is none of the formats {', '.join(candidates)}")
    meant = [group for group, members in groups.items() if any(layer.name in names for layer in members)]
    if not meant:
        raise UserError(f"{option}: no layer that a format is chosen for matches {constraint.match!r}")
    named = candidates[constraint.format]
    for group in meant:
        # "At least" compares bytes, which count scales: 4-bit formats differ by the size of their blocks.
        least = group_bytes(groups[group], named)
        remaining = [
            candidate
            for candidate in allowed[group]
            if {
                ConstraintKind.PIN: candidate.name == named.name,
                ConstraintKind.FORBID: candidate.name != named.name,
                ConstraintKind.AT_LEAST: group_bytes(groups[group], candidate) >= least,
            }[constraint.kind]
        ]
        if not remaining:
            has = ", ".join(c.name for c in allowed[group]) or "none"
            raise UserError(f"{option}: {group} cannot take any such format; it can take {has}")
        allowed[group] = remaining


def _parameters_of(model: nn.Module, layer: LayerPlan) -> list[torch.Tensor]:
    if layer.kind.is_named_by_parameter:
        return [model.get_parameter(layer.name)]
    weight = getattr(model.get_submodule(layer.name), "weight", None)
    return [weight] if isinstance(weight, torch.Tensor) else []


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    return list({id(t): t for t in (*model.parameters(), *model.buffers())}.values())


# Rounds switchable layers where the plan's solver works from data.
_STAND_IN = "mse"
_EFFORT = Counts()
_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(frozen=True, eq=False)
class Allocation:
    """The result of `allocate`.

    Attributes:
        plan: a format, a reason and a score for every layer.
        record: predictions and measurements that led to it.
        sensitivity: the scores it started from.
        quantized: a copy of the model that is quantized by the plan, if measuring needed one.
    """

    plan: Plan
    record: AllocationRecord
    sensitivity: Sensitivity
    quantized: Quantized | None = None


def _on_linears(work: Callable[Concatenate[nn.Module, _P], _R]) -> Callable[Concatenate[nn.Module, _P], _R]:
    """Returns `work` on a model in evaluation mode that calls linear layers, `Conv1D` modules among them."""

    @functools.wraps(work)
    def wrapped(model: nn.Module, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with evaluating(model), as_linears(model), calling_encoder_layers(model):
            return work(model, *args, **kwargs)

    return wrapped


@_on_linears
def allocate(
    model: nn.Module,
    rows: torch.Tensor,
    goal: Goal,
    *,
    held_out: HeldOut | None = None,
    effort: Counts = _EFFORT,
    device: Device = None,
    progress: Progress | None = None,
    **options: Unpack[OptionArguments],
) -> Allocation:
    """Decides a format for every layer; the model is as before afterwards.

    Args:
        model: called as `model(rows)`.
        rows: calibration token ids, int64 `[rows, seqlen]`. Ranges of inputs are measured on all of them, scores on
            the first `effort.score_rows`, the joint loss of budgets on those that follow, and the local search on
            those after them. For a limit on the loss without `held_out`, half of the rows are held out first.
        goal: budgets and limits.
        held_out: rows on which a limit on the loss must hold, and the rows that verify it.
        effort: the number of measurements.
        device: the device where the model runs and is solved; its weights are copied there as they are needed. By
            default where it is.
        progress: a function that is called as `progress(stage, done, total)`.
        options: formats, solver, include, exclude, constraints, kv_cache, run, provenance, method, dtype, seed and
            path, see `quant.calibration.allocation.goal.Options`.

    Raises:
        Infeasible: no choice keeps the budgets; the message names the smallest feasible value.
        UserError: an unknown format, or a target that runs none of them.
        NotFinite: a score or a loss is NaN or infinite; the group and its format, or the row and token are named.
    """
    started = time.perf_counter()
    settings = Options(**options)
    session = Session.on(device, progress=progress, seed=settings.seed).for_model(model)
    rows = rows.to(device_of(model))
    if goal.has_limit and held_out is None:
        rows, held_out = HeldOut.from_calibration(rows)
    texts = _divided(rows, held_out, effort)
    space = make_space(model, goal, settings)
    # Infeasible budgets are refused before the model runs for the first time.
    space.explain(goal, space.problem())
    scored = _scored(model, space, rows, texts.scored, settings, session)
    loop = _loop(model, space, scored, texts, goal, effort, session)
    layers, device = (each for members in space.groups.values() for each in members), loop.bench.searched.device
    rows_solved = rows_where_solved(layers, space.candidates.values(), goal, settings.solver, len(rows), effort, device)
    decision = _decided(loop, searches=not rows_solved)
    # So far groups were rounded by a stand-in or solved one by one. The plan's solver decides in the end.
    if scored.is_estimate:
        real = RealSolver(model, loop, rows, settings.dtype, session)
        if rows_solved:
            decision = replace(decision, best=better_where_solved(real, decision.best, rows_solved))
        decision = _solved(decision, real)
    seconds = time.perf_counter() - started - scored.seconds
    return _allocation(decision, loop, seconds)


class _Scored(NamedTuple):
    """The scores of all groups, and the model whose layers can be switched between the scored formats."""

    scores: Sensitivity
    switchable: SwitchableModel
    is_estimate: bool
    seconds: float


def _scored(
    model: nn.Module, space: Space, rows: torch.Tensor, scored_rows: torch.Tensor, options: Options, session: Session
) -> _Scored:
    """Scores each group in each format; ranges of inputs are measured on all rows, and scores on `scored_rows`."""
    amax = measure_amax(model, space.groups, space.candidates, rows, session)
    scoring = _scoring(model, space, rows, options, session)
    started = time.perf_counter()
    scores = score_groups(
        model, space.groups, space.allowed, scored_rows, scoring, session, amax=amax, path=options.path
    )
    # Not `scores.seconds`, which of a table from a file is the time of an earlier run.
    seconds = time.perf_counter() - started
    switchable = SwitchableModel(
        model, space.groups, space.candidates, amax, scoring.solver, stored_dtype(model), scoring.solutions,
        session=session, dtype=options.dtype,
    )  # fmt: skip
    is_estimate = scoring.solver != options.solver or bool(scoring.solutions)
    return _Scored(scores, switchable, is_estimate, seconds)


def _loop(
    model: nn.Module, space: Space, scored: _Scored, texts: _Texts, goal: Goal, effort: Counts, session: Session
) -> Loop:
    """Returns the loop that measures and corrects choices by these scores."""
    divergence = divergence_of(model, texts.scored)
    # The switchable model runs on the session's device: the rows follow it once, instead of at each measurement.
    texts = moved(texts, session.device or device_of(model))
    bench = Bench(
        scored.switchable, space, divergence, *texts, session, by_perplexity=goal.by_perplexity,
        expected=len(space.candidates) + effort.rounds + (5 if goal.has_limit else 0)
        + effort.probes(texts.searched.device),
    )  # fmt: skip
    return Loop(space.problem(scored.scores), space, scored.scores, bench, goal, effort)


@dataclass(frozen=True, eq=False)
class _Decision:
    """The best choice, and what the report compares it with."""

    best: MeasuredChoice
    uniform: tuple[Uniform, ...]
    verified: tuple[Verified, ...]
    curve: tuple[CurvePoint, ...]
    quantized: Quantized | None = None


def _decided(loop: Loop, *, searches: bool) -> _Decision:
    """Returns the decision by losses of the switchable model; `searches` measures single changes of it, too."""
    # Layers are switchable only inside; afterwards the model has its own modules again.
    with loop.bench.switchable.ready():
        best = loop.run(searches=searches)
        # Single formats are measured for the report even where the budget has no room for them.
        uniform = loop.bench.uniform(loop.problem)
        return _Decision(best, uniform, loop.bench.verified(best.choice), loop.curve())


def _solved(decision: _Decision, real: RealSolver) -> _Decision:
    """Returns the decision by losses of models that the plan's own solver has solved."""
    has_limit = real.loop.goal.has_limit
    best, quantized = (real.within_loss if has_limit else real.within_budget)(decision.best)
    # Single formats that were solved for real are compared by their real loss.
    uniform = tuple(replace(each, kl=real.uniform.get(each.name, each.kl)) for each in decision.uniform)
    verified = real.verified(quantized)
    quantized = replace(quantized, plan=_with_verified(quantized.plan, verified))
    return _Decision(best, uniform, verified, decision.curve, quantized)


def _allocation(decision: _Decision, loop: Loop, seconds: float) -> Allocation:
    """Returns the allocation of a decision, with its plan and record."""
    record = AllocationRecord(
        loop.goal.budget, _chosen(decision.best, loop), decision.curve, decision.uniform, tuple(loop.rounds), seconds,
        loop.bench.divergence.unit, decision.verified,
    )  # fmt: skip
    plan = _with_verified(loop.plan(decision.best.choice), decision.verified)
    return Allocation(plan, record, loop.scores, decision.quantized)


@_on_linears
def score(
    model: nn.Module,
    rows: torch.Tensor,
    *,
    device: Device = None,
    progress: Progress | None = None,
    **options: Unpack[OptionArguments],
) -> Sensitivity:
    """Scores each fusion group in each format; arguments as in `allocate`, `rows` all used."""
    settings = Options(**options)
    space = make_space(model, Goal(bits=16.0), settings)
    session = Session.on(device, progress=progress, seed=settings.seed).for_model(model)
    rows = rows.to(device_of(model))
    scoring = _scoring(model, space, rows, settings, session)
    return score_groups(model, space.groups, space.allowed, rows, scoring, session, path=settings.path)


@_on_linears
def check_feasible(
    model: nn.Module,
    goal: Goal,
    *,
    formats: str | Sequence[str] = DEFAULT_FORMATS,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    constraints: Sequence[Constraint] = (),
    kv_cache: str | None = None,
    run: RunModel | None = None,
) -> None:
    """Refuses goals that `allocate` would refuse, from shapes alone, before there are rows; with the same arguments."""
    # No rows and no scores yet: the knapsack of `space.problem()` has only costs.
    options = Options(
        formats=formats, include=include, exclude=exclude, constraints=constraints, kv_cache=kv_cache, run=run
    )
    space = make_space(model, goal, options)
    space.explain(goal, space.problem())


class _Texts(NamedTuple):
    """Rows of token ids by their use, int64 `[rows, seqlen]`, in the order in which `Bench` takes them."""

    scored: torch.Tensor
    held_out: HeldOut
    searched: torch.Tensor


def _divided(rows: torch.Tensor, held_out: HeldOut | None, effort: Counts) -> _Texts:
    """Returns calibration rows for scores, for the joint loss without `held_out`, and for the search, in this order.

    With too few rows, the later uses take the rows of the scores again.
    """
    scored, remaining = rows[: effort.score_rows], rows[effort.score_rows :]
    if held_out is None:
        # Rows that scores were not taken on, so that the joint loss is not measured where the choice was fitted.
        check, remaining = remaining[: effort.check_rows], remaining[effort.check_rows :]
        held_out = HeldOut.without_verification(check if len(check) else scored)
    searched = remaining[: effort.search_rows] if len(remaining) else scored
    return _Texts(scored, held_out, searched)


def _scoring(model: nn.Module, space: Space, rows: torch.Tensor, options: Options, session: Session) -> Scoring:
    """Returns how groups are scored: with the solver itself, or with a stand-in and solutions for each group from data.

    A switchable model rounds with a solver that needs no data. Groups are solved one by one for a solver that works
    from data, and for candidates with a branch.
    """
    needs_data = get_pipeline(options.solver).needs_data
    scoring = Scoring(options.method, _STAND_IN if needs_data else options.solver, dtype=options.dtype)
    if not needs_data and not any(candidate.rank for candidate in space.candidates.values()):
        return scoring
    # Taken before `prepared` widens the weights and moves them.
    stored, home = stored_dtype(model), device_of(model)
    with prepared(model, options.dtype, session):
        rows = rows.to(session.device)
        solutions = solve_each_group(model, space.groups, space.allowed, rows, options.solver, stored, session, home)
    return replace(scoring, solutions=solutions)


def _chosen(best: MeasuredChoice, loop: Loop) -> Chosen:
    """Returns the chosen allocation with its costs, for the record."""
    space, problem, formats = loop.space, loop.problem, best.choice
    return Chosen(
        bits=space.bits(formats),
        kl_predicted=problem.total(SCORE, formats),
        kl_measured=best.measured,
        bytes=space.bytes(formats),
        memory=space.bytes(formats) + space.fixed_bytes,
        seconds=space.seconds(formats, problem),
        timing=space.timing_name,
    )


def _with_verified(plan: Plan, verified: Sequence[Verified]) -> Plan:
    """Returns the plan with the losses on the text that verifies its allocation, in its provenance."""
    if not verified:
        return plan
    note = {**plan.provenance["allocation"], "verified": [each.to_dict() for each in verified]}
    return replace(plan, provenance={**plan.provenance, "allocation": note})
