"""`plan_for` makes the plan of a request from its recipe, or takes the plan that it names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from quant.calibration.blocks import stored_dtype
from quant.calibration.inputs import call_on_first_row
from quant.checkpoints.head_weights import head_weights
from quant.errors import UserError, listed
from quant.execution.data import lacks_data
from quant.execution.sources import named_inputs
from quant.export.checkpoint.names import stored_names
from quant.extras import versions
from quant.models.open import Source
from quant.plan.check import refuse
from quant.plan.edit import set_guard_and_observer
from quant.plan.head_plan import plan_heads
from quant.plan.make import make_plan
from quant.plan.prediction_heads import attach_head_layer
from quant.recipes import effort
from quant.recipes.layer_kind import LayerKind
from quant.recipes.plan import Plan
from quant.recipes.recipe import Recipe
from quant.run.request import PlanFile, Request


def plan_for(request: Request, source: Source) -> Plan:
    """Returns the plan that a request's recipe makes for a model, or the plan that the request names."""
    recipe = request.chosen_recipe
    plan = _recipe_plan(request, source, recipe) if isinstance(recipe, Recipe) else _given_plan(request, source, recipe)
    return set_guard_and_observer(plan, request.guard, request.observer)


def _given_plan(request: Request, source: Source, file: PlanFile) -> Plan:
    plan, problems = file
    _attach_planned(source, plan)
    if request.is_in_memory:
        return plan  # solving checks that it fits
    refuse(plan, problems, source.layers)
    return replace(plan, provenance={**plan.provenance, **_origin(source)})


def _recipe_plan(request: Request, source: Source, recipe: Recipe) -> Plan:
    globs = _split_globs(request, source)
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
    plan = _with_heads(plan, source, globs.heads)
    origin = provenance(request, source, recipe=recipe.name) or {}
    # Records of the plan itself win over those of the request.
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


@dataclass(frozen=True)
class _Globs:
    """The globs of a request for the model's own layers, and the prediction heads that other globs include."""

    include: list[str]
    exclude: list[str]
    heads: dict[str, torch.Tensor]


def _split_globs(request: Request, source: Source) -> _Globs:
    """Tells globs for prediction heads from those for the model's layers.

    A glob of --include that matches only heads adds them, and leaves the choice among the model's own layers as it is.
    One of --exclude keeps heads in 16 bit too.
    """
    globs = (request.include, request.exclude)
    include, exclude = ([each] if isinstance(each, str) else list(each) for each in globs)
    if source.model is None or source.directory is None or not include:
        return _Globs(include, exclude, {})
    names = [layer.name for layer in source.layers]
    for_heads = [glob for glob in include if not _matched(glob, names)]
    if not for_heads:
        return _Globs(include, exclude, {})
    heads = head_weights(
        source.model, source.directory, lambda name: any(fnmatchcase(name, glob) for glob in for_heads)
    )
    # A glob that matches nothing at all goes on to `make_plan`, which refuses it.
    include = [glob for glob in include if glob not in for_heads or not _matched(glob, heads)]
    excluded = {name for glob in exclude for name in _matched(glob, heads)}
    exclude = [glob for glob in exclude if _matched(glob, names) or not _matched(glob, heads)]
    return _Globs(include, exclude, {name: weight for name, weight in heads.items() if name not in excluded})


def _matched(glob: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if fnmatchcase(name, glob)]


def refuse_heads(request: Request, source: Source) -> None:
    """Raises UserError where an allocation is to choose formats for prediction heads, whose losses nothing measures."""
    if heads := _split_globs(request, source).heads:
        raise UserError(
            f"{request.spell('include')} {next(iter(heads))}: transformers does not run this prediction head, so no "
            "allocation can measure it; choose a format for the model instead of a budget, or leave the glob out"
        )


def _with_heads(plan: Plan, source: Source, weights: Mapping[str, torch.Tensor]) -> Plan:
    """Returns `plan` with the layers of prediction heads, which get modules in the model."""
    if not weights:
        return plan
    layers = plan_heads(plan, weights, stored_names(source.module))
    if not layers:
        raise UserError(
            f"{listed(weights, 3)}: the last block of {type(source.module).__name__} has no quantized layer in the "
            "same place and of the same shape, so a prediction head's layers stay in 16 bit; leave that --include out"
        )
    for layer in layers:
        attach_head_layer(source.module, layer.name, _as_model(source.module, weights[layer.name]))
    return replace(plan, layers=(*plan.layers, *layers))


def _attach_planned(source: Source, plan: Plan) -> None:
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
