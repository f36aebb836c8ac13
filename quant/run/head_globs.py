"""Prediction heads in a run: some models have heads for multi-token prediction, which transformers does not run.

Their weights lie in the files of the model and in none of its modules, so no calibration data reaches them. A glob of
`--include` that matches nothing else adds them to the plan (docs/sources.md). Runs of all other models pass by here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from quant.recipes.blocks import stored_dtype
from quant.checkpoints.head_weights import head_weights
from quant.base.errors import UserError, listed
from quant.export.checkpoint.files.names import stored_names
from quant.models.open_model import Source
from quant.plan.head_plan import plan_heads
from quant.models.prediction_heads import attach_head_layer
from quant.recipes.layer_kind import LayerKind
from quant.recipes.plan import Plan
from quant.recipes.recipe import matched
from quant.run.request import Request


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
            "same place and of the same shape, so a prediction head's layers stay in 16 bit; leave that --include out"
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
