"""`allocate` chooses a format for every layer: scores decide, and measurements check and correct the choice.

    score      the loss that each group would cause in each format              `calibration.sensitivity.scores`
    solve      the best choice within the budget by those scores                `calibration.sensitivity.knapsack`
    measure    the joint loss of that choice, with all groups quantized together
    correct    one backward pass at the quantized model gives the gain of each change there; the best few are made,
               measured again, and kept if they did gain
    search     changes and exchanges near that, each measured, until none helps `quant.allocation.search`

Scores are estimates that add up. They ignore that errors of different groups cancel or amplify each other, and that the
loss of a large error is not a multiple of a small one's. So a limit on the loss is never checked by the sum: `--max-kl`
searches for the budget at which the *measured* loss stays just below it, and every plan ends with a measured figure.
It is measured on one part of the text, and in the end on another that took no part (`quant.allocation.held_out`).

A mix is worth its place only if it beats no mix: each format for all groups that the budget has room for is measured
as well, and the best one wins.

The loop measures on a model whose layers can be switched between formats at run time, with the codes and scales that
quantizing gives. The result of a solver that works from data (GPTQ, AWQ) depends on the layers before: scores and loop
then use what it gives for each group alone (`calibration.sensitivity.group_solutions`), and the choice is quantized for
real, measured, and corrected.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from torch import nn

from quant.allocation.bench import Bench, Effort
from quant.allocation.goal import Constraint, Goal
from quant.allocation.held_out import HeldOut
from quant.allocation.loop import Loop
from quant.allocation.real_solver import RealSolver
from quant.allocation.record import AllocationRecord, Chosen, Verified
from quant.allocation.space import Run, Space
from quant.calibration.blocks import stored_dtype
from quant.calibration.conv1d import as_linears
from quant.calibration.evaluating import prepared
from quant.calibration.placement import Device, device_of, elsewhere, find_device
from quant.calibration.progress import Progress, reporter
from quant.calibration.sensitivity.candidates import parse_candidates
from quant.calibration.sensitivity.divergence import divergence_of
from quant.calibration.sensitivity.group_solutions import GroupSolution, Key, solve_each_group
from quant.calibration.sensitivity.knapsack import SCORE
from quant.calibration.sensitivity.scores import score_groups
from quant.calibration.sensitivity.switchable_model import SwitchableModel, measure_amax
from quant.calibration.sensitivity.table import Sensitivity
from quant.calibration.solvers.solver import get_pipeline
from quant.execution.solve import Quantized
from quant.recipes.plan import Plan

FORMATS = ("nvfp4", "fp8")
_STAND_IN = "mse"
_EFFORT = Effort()
_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(frozen=True, eq=False)
class Allocation:
    """What `allocate` gives.

    Attributes:
        plan: a format, a reason and a score for every layer.
        record: how it came about.
        sensitivity: the scores it started from.
        quantized: a copy of the model that is quantized by the plan, where measuring took one.
    """

    plan: Plan
    record: AllocationRecord
    sensitivity: Sensitivity
    quantized: Quantized | None = None


def _on_linears(work: Callable[Concatenate[nn.Module, _P], _R]) -> Callable[Concatenate[nn.Module, _P], _R]:
    """`work` on a model whose `Conv1D` modules are linear layers meanwhile."""

    @functools.wraps(work)
    def wrapped(model: nn.Module, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with as_linears(model):
            return work(model, *args, **kwargs)

    return wrapped


@_on_linears
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
    held_out: HeldOut | None = None,
    effort: Effort = _EFFORT,
    dtype: torch.dtype | None = torch.float32,
    seed: int = 0,
    path: Path | None = None,
    run: Run | None = None,
    provenance: Mapping[str, Any] | None = None,
    device: Device = None,
    progress: Progress | None = None,
) -> Allocation:
    """Decides a format for every layer; the model is as before afterwards.

    Args:
        model: called as `model(rows)`.
        rows: calibration token ids, int64 `[rows, seqlen]`. Ranges of inputs are measured on all of them, scores on
            the first `effort.score_rows`, the joint loss of budgets on those that follow, and the local search on
            those after them. For a limit on the loss without `held_out`, half of the rows are held out first.
        goal: budgets and limits.
        formats: what may be chosen beside 16 bit; see `calibration.sensitivity.candidates`.
        method: of the scores, see `calibration.sensitivity.scores`.
        solver: that the plan will name.
        include, exclude, run: as in `quantize`.
        constraints: per glob.
        kv_cache: format of the KV cache, or None for 16 bit.
        held_out: rows on which a limit on the loss must hold, and those that verify it.
        effort: how much is measured.
        dtype: what 16-bit tensors are widened to while measuring; None leaves them.
        seed: of what `fisher` draws.
        path: where the sensitivity table is kept.
        provenance: recorded in the plan.
        device: where the model runs and is solved; its weights are copied there as they are needed. By default where
            it is.
        progress: called as `progress(stage, done, total)`.

    Raises:
        Infeasible: no choice keeps the budgets; the message says the smallest feasible value.
        UserError: an unknown format, or a target that runs none of them.
        NotFinite: a score or a loss is NaN or infinite; the group and its format, or the row and token are named.
    """
    started = time.perf_counter()
    there = _away(model, device)
    home = device_of(model)
    rows = rows.to(home)
    if goal.has_limit and held_out is None:
        rows, held_out = HeldOut.from_calibration(rows)
    space = Space.of(
        model, parse_candidates(formats), goal, solver, include, exclude, constraints, kv_cache, run, provenance
    )
    space.explain(goal, space.problem())
    amax = measure_amax(model, space.groups, space.candidates, rows, reporter(progress, "calibrate"), there)
    scored = rows[: effort.score_rows]
    stand_in, solutions = _solutions(model, space, rows, solver, dtype, there, progress)
    scores = score_groups(
        model, space.groups, space.allowed, scored, method=method, solver=stand_in, solutions=solutions, dtype=dtype,
        seed=seed, amax=amax, path=path, device=there, progress=progress,
    )  # fmt: skip
    started += scores.seconds
    rest = rows[effort.score_rows :]
    if held_out is None:
        check, rest = rest[: effort.check_rows], rest[effort.check_rows :]
        held_out = HeldOut.without_verification(check if len(check) else scored)
    searched = rest[: effort.search_rows] if len(rest) else scored
    problem = space.problem(scores)
    switchable = SwitchableModel(
        model, space.groups, space.candidates, amax, stand_in, stored_dtype(model), solutions, device=there, dtype=dtype
    )
    scored, searched = (text.to(there or home) for text in (scored, searched))
    held_out = held_out.to(there or home)
    expected = len(space.candidates) + effort.rounds + (5 if goal.has_limit else 0) + effort.probes(there or home)
    bench = Bench(
        switchable, space, divergence_of(model, rows), scored, held_out, searched, progress, expected,
        by_perplexity=goal.by_perplexity,
    )  # fmt: skip
    loop = Loop(problem, space, bench, goal, effort)
    with switchable.ready():
        found = loop.run()
        uniform = bench.uniform(problem)
        curve = loop.curve()
        verified = bench.verified(found.choice)

    def plan_of(choice: np.ndarray) -> Plan:
        return space.plan(choice, problem, scores, goal, loop.corrected)

    quantized = None
    if stand_in != solver or solutions:
        real = RealSolver(model, loop, plan_of, rows, dtype, there, progress)
        found, quantized = real.within_loss(found) if goal.has_limit else real.within_budget(found)
        uniform = tuple(replace(each, kl=real.uniform.get(each.name, each.kl)) for each in uniform)
        verified = real.verified(quantized)
    plan = _with_verified(plan_of(found.choice), verified)
    if quantized is not None:
        quantized = replace(quantized, plan=_with_verified(quantized.plan, verified))
    record = AllocationRecord(
        budget=goal.budget,
        chosen=Chosen(
            bits=space.bits(found.choice),
            kl_predicted=problem.total(SCORE, found.choice),
            kl_measured=found.measured,
            bytes=space.bytes(found.choice),
            memory=space.bytes(found.choice) + space.fixed_bytes,
            seconds=space.seconds(found.choice, problem),
            timing=space.timing_name,
        ),
        curve=curve,
        uniform=uniform,
        rounds=tuple(loop.rounds),
        seconds=time.perf_counter() - started,
        unit=bench.divergence.unit,
        verified=verified,
    )
    return Allocation(plan, record, scores, quantized)


@_on_linears
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
    run: Run | None = None,
    device: Device = None,
    progress: Progress | None = None,
) -> Sensitivity:
    """What each fusion group would lose in each format; arguments as in `allocate`, `rows` all used."""
    space = Space.of(model, parse_candidates(formats), Goal(bits=16.0), solver, include, exclude, (), None, run, None)
    there = _away(model, device)
    rows = rows.to(device_of(model))
    stand_in, solutions = _solutions(model, space, rows, solver, dtype, there, progress)
    return score_groups(
        model, space.groups, space.allowed, rows, method=method, solver=stand_in, solutions=solutions, dtype=dtype,
        seed=seed, path=path, device=there, progress=progress,
    )  # fmt: skip


@_on_linears
def check_feasible(
    model: nn.Module,
    goal: Goal,
    *,
    formats: str | Sequence[str] = FORMATS,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    constraints: Sequence[Constraint] = (),
    kv_cache: str | None = None,
    run: Run | None = None,
) -> None:
    """Refuses what `allocate` would refuse, from shapes alone, for those who have no rows yet; arguments as there.

    Raises:
        Infeasible, UserError: as `allocate`.
    """
    candidates = parse_candidates(formats)
    space = Space.of(model, candidates, goal, "rtn", include, exclude, constraints, kv_cache, run, None)
    space.explain(goal, space.problem())


def _away(model: nn.Module, device: Device) -> torch.device | None:
    """The device that `device` names where the model is on another; else None."""
    there = find_device(device)
    return there if elsewhere(model, there) else None


def _solutions(
    model: nn.Module,
    space: Space,
    rows: torch.Tensor,
    solver: str,
    dtype: torch.dtype | None,
    device: torch.device | None,
    progress: Progress | None,
) -> tuple[str, dict[Key, GroupSolution]]:
    """The solver that a switchable model rounds with, and what takes data: a solver that does, or branches."""
    needs_data = get_pipeline(solver).needs_data
    stand_in = _STAND_IN if needs_data else solver
    if not needs_data and not any(candidate.rank for candidate in space.candidates.values()):
        return stand_in, {}
    stored = stored_dtype(model)
    report = reporter(progress, "alone")
    home = device_of(model)
    with prepared(model, dtype, device):
        rows = rows.to(device)
        return stand_in, solve_each_group(model, space.groups, space.allowed, rows, solver, stored, report, home)


def _with_verified(plan: Plan, verified: Sequence[Verified]) -> Plan:
    """A plan that says what its allocation measured on text kept to verify it."""
    if not verified:
        return plan
    note = {**plan.provenance["allocation"], "verified": [each.to_dict() for each in verified]}
    return replace(plan, provenance={**plan.provenance, "allocation": note})
