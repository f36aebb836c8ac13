"""`plan_for` makes the plan of a request from its recipe, or takes the plan that it names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from quant.base.errors import UserError, listed, option
from quant.base.extras import versions
from quant.calibration.inputs import call_on_first_row
from quant.calibration.texts.mixture import lacks_data
from quant.calibration.texts.sources import named_inputs
from quant.export.checkpoint.carry_over import head_weights
from quant.export.checkpoint.files.names import stored_names
from quant.models.open_model import Source
from quant.models.prediction_heads import attach_head_layer, plan_heads
from quant.recipes import solver_names
from quant.recipes.blocks import stored_dtype
from quant.recipes.layers import LayerKind
from quant.recipes.plan import Plan
from quant.recipes.plan_check import refuse
from quant.recipes.plan_edit import set_guard_and_observer
from quant.recipes.plan_make import make_plan
from quant.recipes.recipe import Recipe, matched
from quant.run.request import PlanFile, Request

# Prediction heads in a run: some models have heads for multi-token prediction, which transformers does not run.
#
# Their weights lie in the files of the model and in none of its modules, so no calibration data reaches them. A glob of
# `--include` that matches nothing else adds them to the plan (docs/sources.md). Runs of all other models pass by here.


@dataclass(frozen=True)
class Globs:
    """The globs of a request for the model's own layers, and the prediction heads that other globs include."""

    include: list[str]
    exclude: list[str]
    heads: dict[str, torch.Tensor]


def split_globs(request: Request, source: Source) -> Globs:
    """Tells globs for prediction heads from those for the model's layers.

    A glob of --include that matches only heads adds them, and leaves the choice among the model's own layers as it is.
    One of --exclude keeps heads in 16 bit too.
    """
    globs = (request.include, request.exclude)
    include, exclude = ([each] if isinstance(each, str) else list(each) for each in globs)
    if source.model is None or source.directory is None or not include:
        return Globs(include, exclude, {})
    names = [layer.name for layer in source.layers]
    for_heads = [glob for glob in include if not matched(glob, names)]
    if not for_heads:
        return Globs(include, exclude, {})
    # Name by name, an exact name is still a glob, which may match other heads too: only all names tell them apart.
    weights = head_weights(source.model, source.directory, lambda name: bool(matched(for_heads, (name,))))
    heads = matched(for_heads, weights)
    # A glob that matches nothing at all goes on to `make_plan`, which refuses it.
    include = [glob for glob in include if glob not in for_heads or not matched(glob, heads)]
    excluded = matched(exclude, heads)
    exclude = [glob for glob in exclude if matched(glob, names) or not matched(glob, heads)]
    return Globs(include, exclude, {name: weights[name] for name in heads if name not in excluded})


def refuse_heads(request: Request, source: Source) -> None:
    """Raises UserError where an allocation is to choose formats for prediction heads, whose losses nothing measures."""
    if heads := split_globs(request, source).heads:
        raise UserError(
            f"{request.spell('include')} {next(iter(heads))}: transformers does not run this prediction head, so no "
            "allocation can measure it; choose a format for the model instead of a budget, or leave the glob out"
        )


def with_heads(plan: Plan, source: Source, weights: Mapping[str, torch.Tensor]) -> Plan:
    """Returns `plan` with the layers of prediction heads, which get modules in the model."""
    if not weights:
        return plan
    layers = plan_heads(plan, weights, stored_names(source.module))
    if not layers:
        raise UserError(
            f"{listed(weights, 3)}: the last block of {type(source.module).__name__} has no quantized layer in the "
            "same place and of the same shape, so a prediction head's layers stay in 16 bit; leave that "
            f"{option('include')} out"
        )
    for layer in layers:
        attach_head_layer(source.module, layer.name, _as_model(source.module, weights[layer.name]))
    return replace(plan, layers=(*plan.layers, *layers))


def attach_planned_heads(source: Source, plan: Plan) -> None:
    """Attaches modules for the layers of prediction heads that a plan quantizes."""
    if source.model is None or source.directory is None:
        return
    names = {layer.name for layer in source.layers}
    planned = {layer.name for layer in plan.quantized if layer.kind == LayerKind.LINEAR} - names
    if planned:
        for name, weight in head_weights(source.model, source.directory, planned.__contains__).items():
            attach_head_layer(source.model, name, _as_model(source.model, weight))


def _as_model(model: nn.Module, weight: torch.Tensor) -> torch.Tensor:
    """Returns a weight on the device of the model: a dry run's is on meta."""
    parameter = next(model.parameters())
    return weight.to(parameter.device, stored_dtype(model))


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
        effort=solver_names.DEFAULT_EFFORT if request.effort is None else request.effort,
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
