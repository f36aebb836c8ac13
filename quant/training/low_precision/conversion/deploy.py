"""`convert_trained` packs a model that was trained in low precision, with the codes and scales of its training.

No data is read: see `packed.py`. The packed model computes what the model in eval mode computed, bit for bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from quant.export.checkpoint.pretrained import attach
from quant.base.errors import UserError, counted
from quant.kernels.linear.install import install_weight, mark_quantized, use_expert_modules
from quant.export.checkpoint.files.write_tensors import plan_of_model
from quant.formats.tensor import BlockScaledTensor
from quant.recipes.callers_model import refuse_partial_layer, unwrapped
from quant.recipes.plan_make import make_plan
from quant.recipes.plan import Plan
from quant.training.low_precision.conversion import from_low_precision_training
from quant.training.low_precision.fused_experts_training import LowPrecisionStack, trained_layers
from quant.training.low_precision.low_precision_linear import LowPrecisionLinear
from quant.training.low_precision.packed import deployed_input, input_scale, packed_weight, stored_format


def convert_trained(model: nn.Module) -> Plan:
    """Packs the layers of a model in low-precision training; changes the model in place.

    A model in eval mode has the packed model's outputs, bit for bit, so this changes no loss that was evaluated. After
    DDP, a static input scale comes from the inputs of the rank that converts.

    Args:
        model: as `to_low_precision_training` left it, after training. Wrappers (DDP, torch.compile) are looked through.

    Returns:
        The plan, for `quant.save` and every exporter.

    Raises:
        UserError: no layer trains in low precision, layers follow several recipes, a weight is sharded or not finite,
            adapters are on layers, or no step has recorded the inputs of a layer that needs a static scale.
    """
    model = unwrapped(model, "convert_trained")
    layers = trained_layers(model)
    _check(layers)
    recipe = next(iter(layers.values())).low_precision.recipe
    preset = stored_format(recipe).name
    # Everything that can fail comes before the first change.
    weights = {name: _packed(layer) for name, layer in layers.items()}
    scales = {name: _input_scale(layer) for name, layer in layers.items()}
    _warn_of_unreached_experts(layers)
    # Planning runs the model on a stand-in input, for which plain layers will do.
    from_low_precision_training(model)
    # The same plan as at conversion, when the layers were chosen and grouped by it.
    plan = make_plan(model, preset, include=list(layers), solver="rtn")
    reason = f"codes and scales of training in {recipe.name}"
    plan = plan.replace_layers(replace(layer, reason=reason) for layer in plan.quantized)
    for layer in plan.quantized:
        install_weight(model, layer, weights[layer.name], scales[layer.name])
    use_expert_modules(model, plan)
    mark_quantized(model)
    plan = plan_of_model(model, plan)
    attach(model, plan)
    return plan


def _check(layers: Mapping[str, LowPrecisionLinear | LowPrecisionStack]) -> None:
    if not layers:
        raise UserError("no layer of the model trains in low precision: call quant.to_low_precision_training first")
    recipes = {layer.low_precision.recipe for layer in layers.values()}
    if len(recipes) > 1:
        names = ", ".join(sorted(recipe.name for recipe in recipes))
        raise UserError(f"the layers of the model train in several recipes ({names}), and a model is packed from one")
    for name, layer in layers.items():
        reload = "load it and the state_dict of the report into a model converted in the same way, and pack that"
        refuse_partial_layer(name, layer.weight, "quant.convert_trained", reload)
        if layer.weight.is_meta:
            raise UserError(f"{name}: its weight is on the meta device and has no values; load them first")
        if isinstance(layer, LowPrecisionLinear) and "weight" not in layer._parameters:
            raise UserError(
                f"{name}: its weight is computed from other parameters (pruning, a parametrization); make it a "
                "parameter first, with torch.nn.utils.prune.remove or parametrize.remove_parametrizations"
            )


def _warn_of_unreached_experts(layers: Mapping[str, LowPrecisionLinear | LowPrecisionStack]) -> None:
    states = {name: layer.low_precision for name, layer in layers.items()}
    activation = deployed_input(next(iter(states.values())).recipe)
    if activation is None or not activation.is_static:
        return
    names = [name for name, s in states.items() if all(each.low_precision.amax["x"].is_empty for each in s.group)]
    if names:
        warnings.warn(
            f"{names[0]}: the router sent this expert no token in training; its static input scale is that of the "
            f"largest input of its siblings ({counted(len(names), 'such layer')})",
            stacklevel=3,
        )


def _packed(layer: LowPrecisionLinear | LowPrecisionStack) -> BlockScaledTensor:
    return layer.packed() if isinstance(layer, LowPrecisionStack) else packed_weight(layer.weight, layer.low_precision)


def _input_scale(layer: LowPrecisionLinear | LowPrecisionStack) -> torch.Tensor | None:
    scale = input_scale(layer.low_precision, layer.weight.dtype)
    return None if scale is None else scale.to(layer.weight.device)
