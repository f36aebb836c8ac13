"""`allocate` chooses a format for every layer: scores decide, and measurements check and correct the choice.

    score      the loss that each group would cause in each format              `calibration.sensitivity.scores`
    solve      the best choice within the budget by those scores                `calibration.sensitivity.knapsack`
    measure    the joint loss of that choice, with all groups quantized together
    correct    one backward pass at the quantized model gives the gain of each change there; the best few are made,
               measured again, and kept if they did gain
    search     changes and exchanges near that, each measured, until none helps `quant.calibration.allocation.search`, or in a
               model that the plan's solver has solved `quant.allocation.where_solved`

Scores are estimates that add up. They ignore that errors of different groups cancel or amplify each other, and that the
loss does not grow in proportion to the error. So a limit on the loss is never checked by the sum: `--max-kl` searches
for the budget at which the *measured* loss stays just below it, and every plan ends with a measured figure. It is
measured on one part of the text, and in the end on another that took no part (`quant.allocation.held_out`).

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar, Unpack

import torch
from torch import nn

from quant.calibration.allocation.measure_choices import Bench, Effort
from quant.calibration.allocation.goal import Constraint, Goal
from quant.allocation.held_out import HeldOut
from quant.calibration.allocation.curve import Loop, MeasuredChoice
from quant.allocation.make_space import make_space
from quant.allocation.options import DEFAULT_FORMATS, OptionArguments, Options, RunModel
from quant.calibration.allocation.real_solver import RealSolver
from quant.calibration.allocation.record import AllocationRecord, Chosen, CurvePoint, Uniform, Verified
from quant.calibration.allocation.space import Space
from quant.allocation.where_solved import better_where_solved, rows_where_solved
from quant.recipes.blocks import stored_dtype
from quant.calibration.evaluating import evaluating, prepared
from quant.base.listener import Progress
from quant.calibration.placement import Device, device_of
from quant.calibration.sensitivity.divergence import divergence_of
from quant.calibration.sensitivity.group_solutions import solve_each_group
from quant.calibration.sensitivity.knapsack import SCORE
from quant.calibration.sensitivity.scores import Scoring, score_groups
from quant.calibration.sensitivity.switchable_model import SwitchableModel, measure_amax
from quant.calibration.sensitivity.table import Sensitivity
from quant.calibration.session import Session
from quant.calibration.solvers.registry import get_pipeline
from quant.execution.encoder_layers import calling_encoder_layers
from quant.calibration.layer_result import Quantized
from quant.formats.tensor import moved
from quant.plan.conv1d import as_linears
from quant.recipes.plan import Plan

# Rounds switchable layers where the plan's solver works from data.
_STAND_IN = "mse"
_EFFORT = Effort()
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
    effort: Effort = _EFFORT,
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
            path, see `quant.allocation.options.Options`.

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
    """The scores of all groups, and the model whose layers can be switched between the scored formats.

    Attributes:
        scores: the scores.
        switchable: the model.
        is_estimate: whether a stand-in rounds, or groups are solved one by one, instead of the plan's solver.
        seconds: the time that scoring took, which is 0 for a table from a file.
    """

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
    model: nn.Module, space: Space, scored: _Scored, texts: _Texts, goal: Goal, effort: Effort, session: Session
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
    """The best choice, and what the report compares it with.

    Attributes:
        best: the choice with its measured loss.
        uniform: single formats for all layers.
        verified: losses of the choice on text that nothing was chosen by.
        curve: the predicted Pareto curve.
        quantized: the model in this choice, if the plan's own solver has solved it.
    """

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
    """Refuses goals that `allocate` would refuse, from shapes alone, before there are rows; with the same arguments.

    Raises:
        Infeasible, UserError: as `allocate`.
    """
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


def _divided(rows: torch.Tensor, held_out: HeldOut | None, effort: Effort) -> _Texts:
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
