"""`allocate` chooses a format for every layer: scores decide, and measurements check and correct the choice.

    score      the loss that each group would cause in each format              `calibration.sensitivity.scores`
    solve      the best choice within the budget by those scores                `calibration.sensitivity.knapsack`
    measure    the joint loss of that choice, with all groups quantized together
    search     for a budget, single changes near that, each measured, until none helps (`measure_choices.Search`), or in
               a model that the plan's solver has solved (`RealSolver`)

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

There `RealSolver` solves the whole model, because such a solver fits a layer to the quantized layers before it: for a
budget once, and once more for a single format that may be better than the mix; for a limit on the loss until it is
kept.
"""

import copy
import functools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Concatenate, ParamSpec, TypeVar, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from quant.base.errors import UserError, option
from quant.base.listener import Progress
from quant.base.torch_modes import in_own_modes
from quant.calibration.allocation.goal import (
    AllocationRecord,
    BudgetKind,
    Chosen,
    Constraint,
    ConstraintKind,
    Goal,
    OptionArguments,
    Options,
    Round,
    Space,
    Verified,
    key_of,
)
from quant.calibration.allocation.measure_choices import Bench, Counts, HeldOut, Loop, MeasuredChoice, Search
from quant.calibration.evaluating import evaluating, prepared
from quant.calibration.layer_result import Quantized
from quant.calibration.sensitivity.costs import group_bytes, mixed_cache_bytes
from quant.calibration.sensitivity.divergence import Divergence, NotFinite, divergence_of
from quant.calibration.sensitivity.group_solutions import GroupSolution, Key, solve_each_group
from quant.calibration.sensitivity.knapsack import SCORE, Infeasible, KnapsackProblem, solve
from quant.calibration.sensitivity.scores import Scoring, score_groups
from quant.calibration.sensitivity.switchable_model import CachedRun, SwitchableModel, measure_amax
from quant.calibration.sensitivity.table import Candidate, Sensitivity, parse_candidates
from quant.calibration.session import Device, Session, device_of
from quant.calibration.solvers.registry import get_pipeline
from quant.calibration.walk.solve import check_values, solve_plan
from quant.formats.tensor import moved
from quant.kernels.linear.install import calling_encoder_layers
from quant.kernels.linear.quant_linear import QuantLinear
from quant.recipes.blocks import as_linears, stored_dtype
from quant.recipes.layers import LayerKind
from quant.recipes.plan import LayerPlan, Plan, groups_of
from quant.recipes.plan_make import BY_CHOICE, make_plan
from quant.recipes.recipe import KEEP, Recipe, matched, near_glob
from quant.recipes.targets import TARGETS, Target


def make_space(model: nn.Module, goal: Goal, options: Options) -> Space:
    """Returns the choices that an allocation has for `model`."""
    candidates = parse_candidates(options.formats)
    runtimes = [TARGETS[name] for name in goal.target if name in TARGETS]
    plans = _plan_each(model, candidates, options)
    # Layers, kinds and groups are the same in all plans; only formats differ.
    base = next(iter(plans.values()))
    # A layer is open to choice if at least one format can quantize it; others keep 16 bit and count as fixed.
    heads = [m for m in base.quantized if m.kind == LayerKind.HEAD and m.weight_format.gguf]
    quantized = {m.name for plan in plans.values() for m in plan.quantized} - {m.name for m in heads}
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
    bytes_read = sum(layer.nbytes for layer in fixed_layers if layer.kind != LayerKind.EMBEDDING)
    bytes_read += cache_bytes + sum(2 * m.numel for m in fixed_layers if m.kind == LayerKind.HEAD and m.tied_to)
    return Space(
        base=base,
        groups=groups,
        heads=heads,
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
        recipe = Recipe(
            candidate.name + BY_CHOICE, str(candidate.weight), activation, options.solver, kv_cache=kv_cache
        )
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
    reason = "convolution: scores and searches are for linear layers; without a budget it takes a format"
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
        near = near_glob(constraint.match, [layer.name for members in groups.values() for layer in members])
        raise UserError(f"{option}: no layer that a format is chosen for matches {constraint.match!r}{near}")
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
            try:
                return work(model, *args, **kwargs)
            except NotFinite:
                for name, tensor in model.named_parameters():
                    check_values(name, tensor.detach(), is_buffer=False)
                raise

    return wrapped


@in_own_modes
@_on_linears
def allocate(
    model: nn.Module, rows: Tensor, goal: Goal, *, held_out: HeldOut | None = None, counts: Counts = _COUNTS,
    device: Device = None, progress: Progress | None = None, **options: Unpack[OptionArguments],
) -> Allocation:  # fmt: skip
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
        bits=space.bits(best.choice), kl_predicted=loop.problem.total(SCORE, best.choice), kl_measured=best.measured,
        bytes=space.bytes(best.choice), memory=space.bytes(best.choice) + space.fixed_bytes,
        seconds=space.seconds(best.choice, loop.problem), timing=space.timing_name,
    )  # fmt: skip
    seconds = time.perf_counter() - started - seconds_to_score
    record = AllocationRecord(
        goal.budget, chosen, curve, uniform, tuple(loop.rounds), seconds, bench.divergence.unit, verified
    )
    return Allocation(_with_verified(loop.plan(best.choice), verified), record, loop.scores, quantized)


def make_loop(
    model: nn.Module, space: Space, rows: Tensor, held_out: HeldOut | None, goal: Goal, counts: Counts,
    options: Options, session: Session,
) -> tuple[Loop, Scoring, float]:  # fmt: skip
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
    rows: Tensor,
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


def _scoring(model: nn.Module, space: Space, rows: Tensor, options: Options, session: Session) -> Scoring:
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
    if not verified:
        return plan
    note = {**plan.provenance["allocation"], "verified": [each.to_dict() for each in verified]}
    return replace(plan, provenance={**plan.provenance, "allocation": note})


# The loss of groups solved one by one only estimates the loss of the solved model: a single format whose estimate is
# worse than the estimate of the mix by less than this factor is solved too.
_CLOSE = 1.25


@dataclass(eq=False)
class RealSolver:
    """Quantizes copies of the model with the solver that the plan names, and measures them.

    Groups influence each other there, unlike in separate solutions of each group. The loop learns one number from a
    copy: its loss divided by the loss of layers solved one by one.
    """

    model: nn.Module
    loop: Loop
    rows: Tensor  # calibration rows, int64 `[rows, seqlen]`
    dtype: torch.dtype | None
    session: Session
    uniform: dict[str, float] = field(default_factory=dict)  # measured losses of single formats, by format

    def within_budget(self, estimated: MeasuredChoice) -> tuple[MeasuredChoice, Quantized]:
        """Returns the choice, or one format for all groups if its measured loss is smaller."""
        loop = self.loop
        quantized = self._quantized(estimated.choice)
        best = MeasuredChoice(estimated.choice, self._measured(quantized, estimated))
        for name, choice in loop.uniform_within_budgets().items():
            # Measured before, by `Bench.uniform`.
            alone = loop.bench.losses[key_of(choice)]
            if np.array_equal(choice, estimated.choice) or alone > _CLOSE * estimated.measured:
                continue
            rival = self._quantized(choice)
            self.uniform[name] = measured = self._measured(rival, MeasuredChoice(choice, alone))
            if measured < best.measured:
                loop.note_uniform(name, best.measured, measured)
                best = MeasuredChoice(choice, measured)
                # The executed plan, with the reasons of the planned one.
                reasons = {layer.name: layer.reason for layer in loop.plan(choice).layers}
                layers = (replace(layer, reason=reasons[layer.name]) for layer in rival.plan.quantized)
                quantized = replace(rival, plan=rival.plan.replace_layers(layers))
        return best, quantized

    def within_loss(self, estimated: MeasuredChoice) -> tuple[MeasuredChoice, Quantized]:
        """Returns the smallest choice that keeps the limit, searched again while it is missed."""
        loop, limit = self.loop, self.loop.goal.budget.limit
        best: tuple[MeasuredChoice, Quantized] | None = None
        for _ in range(loop.counts.solves):
            quantized = self._quantized(estimated.choice)
            # The limited figure of groups solved one by one, as the loop measured it, and of the quantized copy.
            alone, limited = estimated.measured, self._measured(quantized, estimated)
            measured = limited
            if loop.bench.limited != BudgetKind.KL:
                alone = loop.bench.limited_loss(estimated.choice)
                with self._running(quantized) as divergence:
                    limited = loop.bench.limited_loss_of(divergence)
            smaller = best is None or loop.space.bytes(estimated.choice) < loop.space.bytes(best[0].choice)
            if limited <= limit and smaller:
                best = MeasuredChoice(estimated.choice, measured), quantized
            # The ratio corrects the loop's measurements of groups solved one by one; the next choice aims at limit /
            # scale.
            loop.scale = limited / alone if alone > 0 and limited > 0 else 1.0
            with loop.bench.switchable.ready():
                estimated = loop.run()
            # A further quantization must promise to save more than 0.5 %.
            if best is not None and loop.space.bytes(estimated.choice) > 0.995 * loop.space.bytes(best[0].choice):
                break
        if best is None:
            raise Infeasible(
                f"{loop.limit_text()}: not reached after {loop.counts.solves} quantizations; allow a little more"
            )
        return best

    def verified(self, quantized: Quantized) -> tuple[Verified, ...]:
        """Returns the loss of a quantized copy on the rows that verify, text by text."""
        with self._running(quantized) as divergence:
            return self.loop.bench.verified_of(divergence)

    def _quantized(self, choice: np.ndarray) -> Quantized:
        plan = self.loop.plan(choice)
        # The store of the run has the steps of another plan, so this one keeps none.
        session = Session(self.session.device, progress=self.session.progress)
        # A copy each time: solving replaces modules, and the original is still the reference of every divergence.
        return solve_plan(copy.deepcopy(self.model), plan, self.rows, session)

    def _measured(self, quantized: Quantized, estimated: MeasuredChoice) -> float:
        """Returns the joint loss of a quantized copy; the measurement is recorded as a round."""
        with self._running(quantized) as divergence:
            measured = self.loop.bench.loss_of(divergence)
        predicted = estimated.measured * self.loop.scale
        self.loop.rounds.append(Round(self.loop.space.bits(estimated.choice), predicted, measured))
        return measured

    @contextmanager
    def _running(self, quantized: Quantized) -> Iterator[Divergence]:
        few = next(iter(self.loop.bench.held_out.check.values()))
        divergence = divergence_of(quantized.model, few.to(device_of(quantized.model)))
        with prepared(quantized.model, self.dtype, self.session):
            yield divergence


_SOLVER = "gptq_plain"
_LEAST_ROWS = 4


def rows_where_solved(
    layers: Iterable[LayerPlan], candidates: Iterable[Candidate], goal: Goal, solver: str, rows: int, counts: Counts,
    device: torch.device,
) -> int:  # fmt: skip
    """Returns the number of rows on which `better_where_solved` measures each change; 0 where it does not apply.

    It applies to budgets, where the counts measure changes at all, as it does on a GPU: this takes hundreds of
    measurements. Linear layers are replaced one by one, so that the solver may do nothing but round: scales and
    rotations are partly in the modules before.
    """
    pipeline = get_pipeline(solver)
    applies = (
        not goal.has_limit
        and counts.probes(device) > 0
        and pipeline.rounding.feeds_back
        and not pipeline.transforms
        and not pipeline.reshapes
        and not any(candidate.rank for candidate in candidates)
        and all(layer.kind == LayerKind.LINEAR for layer in layers)
    )
    # A quarter of few rows; the others solve.
    measured = min(counts.solved_rows, rows // 4)
    return measured if applies and measured >= _LEAST_ROWS else 0


def better_where_solved(real: RealSolver, present: MeasuredChoice, rows: int) -> MeasuredChoice:
    """Returns a choice that measures better in a solved model, or `present` if there is none.

    A solver such as GPTQ lets each layer make up for errors of the layers before it. Solved one by one, groups show
    errors that the whole model no longer has, of queries and keys above all, and a choice by these gains little more
    than one at random. So the whole model is solved once, and the loss of every single change is measured there:

        solve      all groups in their smallest format, without the correction of the residual stream, which fits one
                   choice of formats exactly and misleads once another is measured
        measure    the joint loss with one group in another format, on rows that this solution was not made from
        choose     the best choice within the budget by these differences, if it measures better there

    SmolLM2 at 4.8 bits has a KL of 0.0388 on three texts and 0.0878 on four languages instead of 0.0402 and 0.0932
    (docs/benchmarks.md).
    """
    loop, bench, space = real.loop, real.loop.bench, real.loop.space
    # Every n-th row is measured on, as rows of a mixture are of many kinds in turn.
    every = len(real.rows) // rows
    is_measured = torch.arange(len(real.rows), device=real.rows.device) % every == 0
    problem, limits = loop.problem, space.limits(loop.goal)
    base = np.where(problem.allowed, problem.costs["bytes"], np.inf).argmin(axis=1)
    solutions = _solutions(real, base, real.rows[~is_measured])
    with bench.switchable.formats.solved_by(solutions), bench.switchable.ready():
        device = bench.searched.device
        cached_run = CachedRun(bench.switchable, bench.divergence, real.rows[is_measured].to(device))
        search = Search(problem, limits, cached_run, space.named, loop.counts.probes(device), bench.count_probe)
        gains = KnapsackProblem(problem.groups, problem.candidates, search.gains(base), problem.costs)
        try:
            choice = solve(gains, limits)
        except Infeasible:  # too few changes were measured to keep a limit on the time
            return present
        before, after = (cached_run.loss(space.named(each)) for each in (present.choice, choice))
    if after >= before:
        return present
    with bench.switchable.ready():
        return loop.change(present, choice, before, after)


def _solutions(real: RealSolver, choice: np.ndarray, rows: Tensor) -> dict[Key, GroupSolution]:
    """Returns the groups of a choice as the plan's solver solves them in the whole model."""
    plan, space = real.loop.plan(choice), real.loop.space
    plan = plan.replace_layers(replace(layer, solver=_SOLVER) for layer in plan.quantized)
    model = solve_plan(copy.deepcopy(real.model), plan, rows, Session(real.session.device)).model
    solutions: dict[Key, GroupSolution] = {}
    for group, candidate in space.named(choice).items():
        layers = {member.name: model.get_submodule(member.name) for member in space.groups[group]}
        quantized = {name: layer for name, layer in layers.items() if isinstance(layer, QuantLinear)}
        if quantized:
            # Layers of a group share their input, and its scale.
            scale = next(iter(quantized.values())).input_scale
            weights = {name: layer.quantized_weight for name, layer in quantized.items()}
            solutions[group, candidate] = GroupSolution(weights, input_scale=scale)
    return solutions
