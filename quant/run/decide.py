"""The second stage decides the plan of a run: it follows from a recipe, or is chosen for a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import nn

from quant.base.errors import UserError, option
from quant.base.listener import SILENT
from quant.calibration.allocation.allocate import Allocation, allocate, check_feasible
from quant.calibration.allocation.goal import Goal
from quant.calibration.allocation.measure_choices import HeldOut
from quant.calibration.inputs import call_on_first_row
from quant.calibration.sensitivity.table import parse_candidates
from quant.calibration.solvers.registry import with_supported_solver
from quant.calibration.texts.mixture import NoTextError, lacks_data, with_calibration, with_data
from quant.calibration.texts.mixture import Record
from quant.calibration.texts.sources import as_rows
from quant.export.checkpoint.files.compressed_tensors import check_plan
from quant.export.checkpoint.files.names import stored_names
from quant.export.checkpoint.trial_load import check_experts, import_for_trial
from quant.recipes import solver_names
from quant.recipes.layers import LayerKind
from quant.recipes.plan import LayerPlan, Plan
from quant.recipes.plan_make import make_plan
from quant.recipes.recipe import KEEP, Recipe
from quant.recipes.solver_names import solver_of
from quant.run.announcements import announce_effort, announce_rounding_of_choice
from quant.run.data import announce_budget, calibration_data, evaluation_data
from quant.run.job import Decision, Job
from quant.run.plan_request import example_run, plan_for, provenance, refuse_heads
from quant.run.same_on_ranks import check_same

# A budget or a limit instead of a format: `for_budget` has an allocation choose the format of each fusion group.
#
# Candidates are measured rounded to nearest, and the chosen formats are solved like any other plan (docs/budgets.md).


def for_budget(job: Job, goal: Goal) -> Decision:
    """Chooses formats for a budget or a limit on the loss.

    Raises:
        Infeasible: no choice keeps the budget. This is known from shapes, before any text is written.
    """
    request, source = job.request, job.source
    if source.model is None:
        raise UserError(
            f"{request.model}: a bare state dict cannot be run, and an allocation measures; pass "
            f"{option('model_factory')}"
        )
    refuse_heads(request, source)
    choices: dict[str, Any] = {
        "include": request.include, "exclude": request.exclude, "kv_cache": request.kv_cache_format,
    }  # fmt: skip
    options = request.budget.options()
    # From shapes alone, before text is written and scores are measured, which takes minutes.
    check_feasible(
        job.model, goal, formats=options["formats"], constraints=options["constraints"],
        run=example_run(request, source), **choices,
    )  # fmt: skip
    # Everything that needs text comes after the checks of shapes above.
    # An allocation measures hundreds of choices, so it rounds to nearest unless an effort is requested. A better solver
    # lowers the loss of all choices alike, and the chosen formats are solved by it afterwards.
    solver = request.solver or solver_of(request.effort or 0, KEEP)
    takes_default = request.solver is None and request.effort is None and not goal.has_limit
    example = _example_plan(job, options["formats"], None if takes_default else solver)
    announce_budget(job, example, goal, parse_candidates(options["formats"]), solver)
    if takes_default:
        announce_rounding_of_choice(job.listener, example)
    with job.stages() as (staged, _):
        rows, records, held_out = _rows(staged, goal)
        if job.tries_loading:
            import_for_trial()  # the choice takes longer than solving, which may not be long enough to import it
        allocation = allocate(
            job.model,
            rows,
            goal,
            solver=solver,
            run=request.run or (call_on_first_row(rows) if rows.is_floating_point() else None),
            held_out=held_out,
            seed=request.seed,
            provenance=_provenance(job),
            device=staged.session.device,
            progress=staged.session.progress,
            **choices,
            **options,
        )
    job.seconds.update(score=allocation.sensitivity.seconds, allocate=allocation.record.seconds)
    # A limit is verified on the weights that were measured, so these are the weights of the plan.
    if takes_default:
        allocation = _with_default_solvers(allocation)
    # Ranks sum floating-point losses in the same order, so that this never differs but through a defect.
    check_same({"the plan that the budget chose": allocation.plan.digest()}, job.session)
    plan = allocation.plan if records is None else with_calibration(allocation.plan, records)
    return Decision(plan, rows, allocation=_in_place(allocation) if request.is_in_memory else allocation)


def _rows(job: Job, goal: Goal) -> tuple[torch.Tensor, list[Record] | None, HeldOut | None]:
    """Returns the rows that score and solve, records of rows that were read here, and held-out rows for a limit."""
    request = job.request
    held_out = None
    # Read here too where nothing is limited: a text that is missing or too short is refused before the choice.
    texts = evaluation_data(replace(job, listener=SILENT))
    if goal.has_limit and texts:
        held_out = HeldOut.halves({name: as_rows(job.model, rows, "a limit") for name, rows in texts.items()})
    data, records = request.data, None
    if data is None:
        globs: dict[str, Any] = {"include": request.include, "exclude": request.exclude}
        data, records = calibration_data(job, lambda: make_plan(job.model, "fp8", run=request.run, **globs))
    rows = as_rows(job.model, data, "a budget")
    if goal.has_limit and held_out is None:
        # A limit that is kept and verified on the solver's own rows would be kept by overfitting.
        rows, held_out = HeldOut.from_calibration(rows)
    return rows, records, held_out


def _example_plan(job: Job, formats: str | Sequence[str], solver: str | None) -> Plan:
    """Returns a plan of the first of `formats` for every layer, to tell the time; None for the default's solvers."""
    request, candidate = job.request, parse_candidates(formats)[0]
    plan = make_plan(job.model, "fp8", run=request.run, include=request.include, exclude=request.exclude)
    plan = plan.replace_layers(candidate.applied(layer) for layer in plan.quantized)
    if solver is None:
        return _by_default_solvers(plan)
    return plan.replace_layers(with_supported_solver(replace(layer, solver=solver)) for layer in plan.quantized)


def _by_default_solvers(plan: Plan) -> Plan:
    """Returns a plan with the solvers of the default effort."""
    experts = any(layer.kind == LayerKind.EXPERTS or ".experts." in layer.name for layer in plan.quantized)

    def solved(layer: LayerPlan) -> LayerPlan:
        activation = KEEP if layer.activation is None else layer.activation.name
        return with_supported_solver(replace(layer, solver=solver_of(solver_names.DEFAULT_EFFORT, activation, experts=experts)))

    return plan.replace_layers(map(solved, plan.quantized))


def _with_default_solvers(allocation: Allocation) -> Allocation:
    """Returns an allocation measured with rounding to nearest, with the default effort's solvers in its plan."""
    plan = _by_default_solvers(allocation.plan)
    if plan == allocation.plan:
        return allocation
    record = replace(allocation.record, measured_with=allocation.plan.quantized[0].solver)
    return replace(allocation, plan=plan, record=record, quantized=None)


def _provenance(job: Job) -> dict[str, Any] | None:
    origin = provenance(job.request, job.source)
    return None if origin is None else {**origin, "calibration": job.request.calibration_rows.label}


def _in_place(allocation: Allocation) -> Allocation:
    """Returns the allocation without its quantized copy, since the module itself is to be quantized."""
    return replace(allocation, quantized=None)


def decide(job: Job) -> Decision:
    """Returns the plan of a run. Where a checkpoint is to be written, its layout can hold the plan.

    Raises:
        ValueError: the plan does not fit the model, or the layout cannot hold one of its formats.
    """
    request, source = job.request, job.source
    if request.goal is not None:
        decision = for_budget(job, request.goal)
    else:
        is_made_here = isinstance(request.chosen_recipe, Recipe)
        decision = Decision(plan_for(request, source), request.data, may_lower_effort=is_made_here)
    if request.is_in_memory:
        return decision
    # Before data is read: a format that the layout cannot hold would only fail when files are written.
    check_plan(decision.plan)
    if request.dry_run:
        return _for_dry_run(job, decision)
    if source.model is None:
        announce_effort(job.listener, decision.plan)
        request.check_state_dict(decision.plan)
    elif not request.allow_missing:
        check_experts(decision.plan, stored_names(source.model))
    return decision


def _for_dry_run(job: Job, decision: Decision) -> Decision:
    """Returns the decision as a run would end with it, where no text can be had for this model.

    Raises:
        UserError: the plan needs data, none is named, and the model reads no tokens for which text could be written.
    """
    model, plan = job.source.model, decision.plan
    reads_tokens = model is None or any(isinstance(module, nn.Embedding) for module in model.modules())
    if reads_tokens or job.request.calib or not lacks_data(plan):
        return decision

    def refuse() -> NoReturn:
        raise NoTextError(plan, f"{type(model).__name__} has no embedding of token ids, so it writes no text")

    if not decision.may_lower_effort:
        refuse()
    return replace(decision, plan=with_data(plan, refuse)[0])
