"""`RealSolver` quantizes a choice of formats with a solver that works from data, measures it, and chooses again.

Such a solver (GPTQ, AWQ) fits a layer to the quantized layers before it, so groups influence each other. The loop of an
allocation only knows the loss that the solver leaves in each group by itself. Here the whole model is solved: for a
budget once, and once more for a single format that may be better than the mix; for a limit on the loss until it is
kept.
"""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import nn

from quant.calibration.allocation.curve import Loop, MeasuredChoice
from quant.calibration.allocation.goal import BudgetKind, Goal, Round, Verified
from quant.calibration.allocation.measure_choices import Counts, Search
from quant.calibration.allocation.space import key_of
from quant.calibration.evaluating import prepared
from quant.calibration.layer_result import Quantized
from quant.calibration.placement import device_of
from quant.calibration.sensitivity.divergence import Divergence, divergence_of
from quant.calibration.sensitivity.group_solutions import GroupSolution, Key
from quant.calibration.sensitivity.knapsack import Infeasible, KnapsackProblem, solve
from quant.calibration.sensitivity.switchable_model import CachedRun
from quant.calibration.sensitivity.table import Candidate
from quant.calibration.session import Session
from quant.calibration.solvers.registry import get_pipeline
from quant.calibration.walk.solve import solve_plan
from quant.kernels.linear.quant_linear import QuantLinear
from quant.recipes.layers import LayerKind
from quant.recipes.plan import LayerPlan

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
    rows: torch.Tensor  # calibration rows, int64 `[rows, seqlen]`
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
        """Gives a divergence that runs a quantized copy."""
        few = next(iter(self.loop.bench.held_out.check.values()))
        divergence = divergence_of(quantized.model, few.to(device_of(quantized.model)))
        with prepared(quantized.model, self.dtype, self.session):
            yield divergence


_SOLVER = "gptq_plain"
_LEAST_ROWS = 4


def rows_where_solved(
    layers: Iterable[LayerPlan],
    candidates: Iterable[Candidate],
    goal: Goal,
    solver: str,
    rows: int,
    counts: Counts,
    device: torch.device,
) -> int:
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


def _solutions(real: RealSolver, choice: np.ndarray, rows: torch.Tensor) -> dict[Key, GroupSolution]:
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
