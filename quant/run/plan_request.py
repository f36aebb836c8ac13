"""`plan_for` makes the plan of a request from its recipe, or takes the plan that it names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from quant.calibration.inputs import call_on_first_row
from quant.calibration.texts.sources import named_inputs
from quant.base.extras import versions
from quant.models.open_model import Source
from quant.recipes.plan_check import refuse
from quant.calibration.texts.data_needs import lacks_data
from quant.recipes.plan_edit import set_guard_and_observer
from quant.recipes.plan_make import make_plan
from quant.recipes import effort
from quant.recipes.plan import Plan
from quant.recipes.recipe import Recipe
from quant.run.head_globs import attach_planned_heads, split_globs, with_heads
from quant.run.request import PlanFile, Request


def plan_for(request: Request, source: Source) -> Plan:
    """Returns the plan that a request's recipe makes for a model, or the plan that the request names."""
    recipe = request.chosen_recipe
    plan = _recipe_plan(request, source, recipe) if isinstance(recipe, Recipe) else _named_plan(request, source, recipe)
    return set_guard_and_observer(plan, request.guard, request.observer)


def _named_plan(request: Request, source: Source, file: PlanFile) -> Plan:
    """Returns the plan that the user wrote or chose, after its layers are found in the model."""
    plan, problems = file
    attach_planned_heads(source, plan)
    if request.is_in_memory:
        return plan  # solving checks that it fits
    refuse(plan, problems, source.layers)
    return replace(plan, provenance={**plan.provenance, **_origin(source)})


def _recipe_plan(request: Request, source: Source, recipe: Recipe) -> Plan:
    """Returns the plan that a recipe makes for the model, with the origin of both in its provenance."""
    globs = split_globs(request, source)
    plan = make_plan(
        source.shapes if source.model is None else source.model,
        recipe,
        include=globs.include,
        exclude=globs.exclude,
        solver=request.solver,
        effort=effort.DEFAULT if request.effort is None else request.effort,
        lm_head=request.lm_head,
        run=example_run(request, source),
    )
    plan = with_heads(plan, source, globs.heads)
    origin = provenance(request, source, recipe=recipe.name) or {}
    # Records of the plan itself win over the request's.
    plan = replace(plan, provenance={**origin, **plan.provenance})
    if source.model is None:
        # Nothing can run a bare state dict, so inputs cannot be measured and the plan says so.
        plan = plan.replace_layers(
            replace(layer, activation=None, reason=f"{layer.reason}; weight only: a bare state dict cannot be run")
            for layer in plan.quantized
            if layer.activation is not None
        )
    if not request.is_in_memory and lacks_data(plan):
        plan = replace(plan, provenance={**plan.provenance, "calibration": request.calibration_rows.label})
    return plan


def example_run(request: Request, source: Source) -> Callable[[nn.Module], Any] | None:
    """Calls the model on one input, to find its fusion groups; None where token ids do."""
    if request.run is not None:
        return request.run
    if request.is_in_memory:
        data = request.data
        # Token ids need no example: `make_plan` runs every model on two ids by itself.
        return call_on_first_row(data) if data is not None and data.is_floating_point() else None
    inputs = named_inputs(source, replace(request.calibration_rows, samples=1))
    return None if inputs is None else call_on_first_row(inputs)


def provenance(request: Request, source: Source, **more: str) -> dict[str, Any] | None:
    """Returns the origin of a plan, as it is written into it; a module in memory has none."""
    if request.is_in_memory:
        return None
    command = {"command": request.command, "seed": request.seed, "versions": versions()}
    return {"model": source.name, **_origin(source), **more, **command}


def _origin(source: Source) -> dict[str, str]:
    """Returns the commit of the model that a plan was made for, and the format of files that hold it quantized."""
    origin = {"revision": source.revision, "source_format": source.quantization}
    return {key: value for key, value in origin.items() if value is not None}
