"""The second stage decides the plan of a run: it follows from a recipe, or is chosen for a budget."""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

from torch import nn

from quant.export.checkpoint.trial_load import check_experts
from quant.run.announcements import announce_effort
from quant.export.checkpoint.files.compressed_tensors import check_plan
from quant.export.checkpoint.files.names import stored_names
from quant.calibration.texts.data_needs import NoTextError, lacks_data, with_data
from quant.recipes.recipe import Recipe
from quant.run.decide_budget import for_budget
from quant.run.job import Decision, Job
from quant.run.plan_request import plan_for


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
