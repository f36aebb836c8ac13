"""`allocate` chooses a format for every layer: scores decide, and measurements check and correct the choice.

    score      the loss that each group would cause in each format              `calibration.sensitivity.scores`
    solve      the best choice within the budget by those scores                `calibration.sensitivity.knapsack`
    measure    the joint loss of that choice, with all groups quantized together
    search     for a budget, single changes near that, each measured, until none helps (`measure_choices.Search`), or in
               a model that the plan's solver has solved (`real_solver`)

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
for real, measured, and chosen again.

`make_space` refuses everything that can be refused before anything is measured: a format that no layer can take, a
runtime that has none of them, a constraint that leaves a group without a choice.
"""

import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Concatenate, ParamSpec, TypeVar, Unpack

import torch
from torch import nn

from quant.base.errors import UserError, option
from quant.base.listener import Progress
from quant.calibration.allocation.curve import Loop
from quant.calibration.allocation.goal import (
    AllocationRecord,
    BudgetKind,
    Chosen,
    Constraint,
    ConstraintKind,
    Goal,
    OptionArguments,
    Options,
    Verified,
)
from quant.calibration.allocation.measure_choices import Bench, Counts, HeldOut
from quant.calibration.allocation.real_solver import RealSolver, better_where_solved, rows_where_solved
from quant.calibration.allocation.space import Space
from quant.calibration.evaluating import evaluating, prepared
from quant.calibration.layer_result import Quantized
from quant.calibration.placement import Device, device_of
from quant.calibration.sensitivity.costs import group_bytes, mixed_cache_bytes
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
        if not any(c.weight is not None for choices in allowed.values() for c in choices):
            requested = ", ".join(c.name for c in candidates if c.weight is not None)
            has = ", ".join(dict.fromkeys(map(str, runtime.pairs)))
            raise UserError(f"{runtime.name} runs none of {requested} for this model's layers; it has {has}")
    for constraint in options.constraints:
        _constrain(constraint, matched(constraint.match, base.by_name), groups, allowed, by_name)
    fixed_layers = [layer for layer in base.layers if layer.name not in quantized]
    # By identity, since tied weights are one tensor under several names.
    planned = {id(model.get_parameter(layer.tensor_name)) for layer in base.layers}
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    unplanned_bytes = sum(t.nbytes for key, t in tensors.items() if key not in planned)
    base = replace(base, kv_layers=next(iter(options.kv_mixes), ()))
    cache_bytes = mixed_cache_bytes(getattr(model, "config", None), goal.context, goal.batch, base)
    timing = goal.timing
    # A decoding step reads a row of an embedding, and a head that is tied to it in 16 bit: it has no bytes in the plan.
    heads = [layer for layer in fixed_layers if layer.kind == LayerKind.HEAD and layer.tied_to is not None]
    bytes_read = sum(layer.nbytes for layer in fixed_layers if layer.kind != LayerKind.EMBEDDING)
    bytes_read += cache_bytes + sum(2 * layer.numel for layer in heads)
    return Space(
        base=base,
        groups=groups,
        candidates=by_name,
        allowed=allowed,
        unplanned_bytes=unplanned_bytes,
        cache_bytes=cache_bytes,
        fixed_bytes=sum(layer.nbytes for layer in fixed_layers) + unplanned_bytes + cache_bytes,
        fixed_seconds=timing.read(bytes_read) if timing is not None else 0.0,
        timing=timing,
        batch=goal.batch,
    )


def _plan_each(model: nn.Module, candidates: Sequence[Candidate], options: Options) -> dict[str, Plan]:
    """Returns the plan of each candidate for all layers, by its name; without candidates that no layer can take."""
    plans: dict[str, Plan] = {}
    refusal: UserError | None = None
    for candidate in (c for c in candidates if c.weight is not None):
        activation = candidate.activation.name if candidate.activation else KEEP
        kv_cache = options.kv_cache or KEEP
        recipe = Recipe(candidate.name, candidate.weight_format.name, activation, options.solver, kv_cache=kv_cache)
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


def _fits(candidate: Candidate, layer: LayerPlan, plan: Plan | None, runtimes: Sequence[Target], mixed: bool) -> bool:
    """Returns whether a layer can take a candidate: its plan quantizes the layer, and every runtime runs it."""
    planned = candidate.weight is None or (plan is not None and plan.by_name[layer.name].weight is not None)
    # Branches are made for plain linear layers only.
    planned = planned and (layer.kind == LayerKind.LINEAR or not candidate.rank)
    return planned and not any(runtime.problems(candidate.applied(layer), mixed=mixed) for runtime in runtimes)


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


# Rounds switchable layers where the plan's solver works from data.
_STAND_IN = "mse"
_COUNTS = Counts()
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
    counts: Counts = _COUNTS,
    device: Device = None,
    progress: Progress | None = None,
    **options: Unpack[OptionArguments],
) -> Allocation:
    """Decides a format for every layer; the model is as before afterwards.

    Args:
        model: called as `model(rows)`.
        rows: calibration token ids, int64 `[rows, seqlen]`. Ranges of inputs are measured on all of them, scores on
            the first `counts.score_rows`, the joint loss of budgets on those that follow, and the local search on
            those after them. For a limit on the loss without `held_out`, half of the rows are held out first.
        goal: budgets and limits.
        held_out: rows on which a limit on the loss must hold, and the rows that verify it.
        counts: the numbers of rows and measurements.
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
    space = make_space(model, goal, settings)
    # Infeasible budgets are refused before the model runs for the first time.
    space.explain(goal, space.problem())
    loop, scoring, seconds_to_score = make_loop(model, space, rows, held_out, goal, counts, settings, session)
    bench, layers = loop.bench, (each for members in space.groups.values() for each in members)
    rows_solved = rows_where_solved(
        layers, space.candidates.values(), goal, settings.solver, len(rows), counts, bench.searched.device
    )
    # Layers are switchable only inside; afterwards the model has its own modules again.
    with bench.switchable.ready():
        space = loop.choose_cache(getattr(model, "config", None), settings.kv_mixes)
        best = loop.run(searches=not rows_solved)
        # Single formats are measured for the report even where the budget has no room for them.
        uniform = bench.uniform(loop.problem)
        verified, curve = bench.verified(best.choice), loop.curve()
    quantized: Quantized | None = None
    # So far groups were rounded by a stand-in or solved one by one. The plan's solver decides in the end.
    if scoring.solver != settings.solver or scoring.solutions:
        real = RealSolver(model, loop, rows, settings.dtype, session)
        best = better_where_solved(real, best, rows_solved) if rows_solved else best
        best, quantized = (real.within_loss if goal.has_limit else real.within_budget)(best)
        # Single formats that were solved for real are compared by their real loss.
        uniform = tuple(replace(each, kl=real.uniform.get(each.name, each.kl)) for each in uniform)
        verified = real.verified(quantized)
        quantized = replace(quantized, plan=_with_verified(quantized.plan, verified))
    chosen = Chosen(
        bits=space.bits(best.choice),
        kl_predicted=loop.problem.total(SCORE, best.choice),
        kl_measured=best.measured,
        bytes=space.bytes(best.choice),
        memory=space.bytes(best.choice) + space.fixed_bytes,
        seconds=space.seconds(best.choice, loop.problem),
        timing=space.timing_name,
    )
    seconds = time.perf_counter() - started - seconds_to_score
    record = AllocationRecord(
        goal.budget, chosen, curve, uniform, tuple(loop.rounds), seconds, bench.divergence.unit, verified
    )
    return Allocation(_with_verified(loop.plan(best.choice), verified), record, loop.scores, quantized)


def make_loop(
    model: nn.Module,
    space: Space,
    rows: torch.Tensor,
    held_out: HeldOut | None,
    goal: Goal,
    counts: Counts,
    options: Options,
    session: Session,
) -> tuple[Loop, Scoring, float]:
    """Scores each group in each format; returns the loop that measures choices, the scoring, and its seconds."""
    # With too few rows, the later uses take the rows of the scores again.
    scored, remaining = rows[: counts.score_rows], rows[counts.score_rows :]
    if held_out is None:
        # Rows that scores were not taken on, so that the joint loss is not measured where the choice was fitted.
        check, remaining = remaining[: counts.check_rows], remaining[counts.check_rows :]
        held_out = HeldOut.without_verification(check if len(check) else scored)
    searched = remaining[: counts.search_rows] if len(remaining) else scored
    amax = measure_amax(model, space.groups, space.candidates, rows, session)
    scoring = _scoring(model, space, rows, options, session)
    started = time.perf_counter()
    scores = score_groups(model, space.groups, space.allowed, scored, scoring, session, amax=amax, path=options.path)
    # Not `scores.seconds`, which of a table from a file is the time of an earlier run.
    seconds = time.perf_counter() - started
    switchable = SwitchableModel(
        model, space.groups, space.candidates, amax, scoring.solver, stored_dtype(model), scoring.solutions,
        session=session, dtype=options.dtype,
    )  # fmt: skip
    # The switchable model runs on the session's device: the rows follow it once, instead of at each measurement.
    held_out, searched = moved((held_out, searched), session.device or device_of(model))
    bench = Bench(
        switchable, space, divergence_of(model, scored), held_out, searched, session,
        limited=goal.budget.kind if goal.has_limit else BudgetKind.KL, allowed=goal.budget.limit,
        expected=len(space.candidates) + (5 if goal.has_limit else counts.probes(searched.device)),
    )  # fmt: skip
    return Loop(space.problem(scores), space, scores, bench, goal, counts), scoring, seconds


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
def check_feasible(model: nn.Module, goal: Goal, **options: Unpack[OptionArguments]) -> None:
    """Refuses goals that `allocate` would refuse, from shapes alone, before there are rows; with the same arguments."""
    # No rows and no scores yet: the knapsack of `space.problem()` has only costs.
    space = make_space(model, goal, Options(**options))
    space.explain(goal, space.problem())


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


def _with_verified(plan: Plan, verified: Sequence[Verified]) -> Plan:
    """Returns the plan with the losses on the text that verifies its allocation, in its provenance."""
    if not verified:
        return plan
    note = {**plan.provenance["allocation"], "verified": [each.to_dict() for each in verified]}
    return replace(plan, provenance={**plan.provenance, "allocation": note})
