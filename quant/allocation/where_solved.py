"""`better_where_solved` chooses formats for a budget by measuring in a model that the solver has solved as a whole.

A solver such as GPTQ lets each layer make up for errors of the layers before it. Solved one by one, groups show errors
that the whole model no longer has, of queries and keys above all, and a choice by these gains little more than one at
random. So the whole model is solved once, in the smallest formats, and the loss of every single change is measured
there:

    solve      all groups in their smallest format, without the correction of the residual stream, which fits one
               choice of formats exactly and misleads once another is measured
    measure    the joint loss with one group in another format, on rows that this solution was not made from
    choose     the best choice within the budget by these differences, if it measures better there than the present one
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch

from quant.calibration.allocation.measure_choices import Effort
from quant.calibration.allocation.goal import Goal
from quant.calibration.allocation.curve import MeasuredChoice
from quant.calibration.allocation.real_solver import RealSolver
from quant.calibration.allocation.search import Search
from quant.calibration.sensitivity.baseline import Baseline
from quant.calibration.sensitivity.candidates import Candidate
from quant.calibration.sensitivity.group_solutions import GroupSolution, Key
from quant.calibration.sensitivity.knapsack import Infeasible, KnapsackProblem, solve
from quant.calibration.session import Session
from quant.calibration.solvers.gptq import Gptq
from quant.calibration.solvers.registry import get_pipeline
from quant.calibration.walk.solve import solve_plan
from quant.kernels.linear.quant_linear import QuantLinear
from quant.recipes.layer_kind import LayerKind
from quant.recipes.plan import LayerPlan

_SOLVER = "gptq_plain"
_LEAST_ROWS = 4


def rows_where_solved(
    layers: Iterable[LayerPlan],
    candidates: Iterable[Candidate],
    goal: Goal,
    solver: str,
    rows: int,
    effort: Effort,
    device: torch.device,
) -> int:
    """Returns the number of rows on which `better_where_solved` measures each change; 0 where it does not apply.

    It applies to budgets, where the effort measures changes at all, as it does on a GPU: this takes hundreds of
    measurements. Linear layers are replaced one by one, so that the solver may do nothing but round: scales and
    rotations are partly in the modules before.

    Args:
        layers: the layers that formats are chosen for.
        candidates: the formats to choose from.
        goal: the budgets or limits.
        solver: the solver of the plan.
        rows: the number of calibration rows.
        effort: the numbers of measurements and of rows to measure on.
        device: the device where the model runs.
    """
    pipeline = get_pipeline(solver)
    applies = (
        not goal.has_limit
        and effort.probes(device) > 0
        and isinstance(pipeline.rounding, Gptq)
        and not pipeline.transforms
        and not pipeline.reshapes
        and not any(candidate.rank for candidate in candidates)
        and all(layer.kind == LayerKind.LINEAR for layer in layers)
    )
    # A quarter of few rows; the others solve.
    measured = min(effort.solved_rows, rows // 4)
    return measured if applies and measured >= _LEAST_ROWS else 0


def better_where_solved(real: RealSolver, present: MeasuredChoice, rows: int) -> MeasuredChoice:
    """Returns a choice that measures better in a solved model, or `present` if there is none.

    Args:
        real: the solver of the plan, with the model, the calibration rows and the budget.
        present: a choice within the budget.
        rows: the number of rows to measure on; the solver works from the others.
    """
    loop, bench, space = real.loop, real.loop.bench, real.loop.space
    # Every n-th row is measured on, as rows of a mixture are of many kinds in turn.
    every = len(real.rows) // rows
    is_measured = torch.arange(len(real.rows), device=real.rows.device) % every == 0
    problem, limits = loop.problem, space.limits(loop.goal)
    base = np.where(problem.allowed, problem.costs["bytes"], np.inf).argmin(axis=1)
    solutions = _solutions(real, base, real.rows[~is_measured])
    with bench.switchable.solved_by(solutions), bench.switchable.ready():
        device = bench.searched.device
        baseline = Baseline(bench.switchable, bench.divergence, real.rows[is_measured].to(device))
        search = Search(problem, limits, baseline, space.named, loop.effort.probes(device), bench.probe)
        gains = KnapsackProblem(problem.groups, problem.candidates, search.gains(base), problem.costs)
        try:
            choice = solve(gains, limits)
        except Infeasible:  # too few changes were measured to keep a limit on the time
            return present
        before, after = (baseline.loss(space.named(each)) for each in (present.choice, choice))
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
