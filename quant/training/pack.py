"""`pack` makes quantized modules of the layers that a model was trained with, with the codes and scales of training.

No data is read and nothing is measured again: the packed model computes what the model in eval mode computed.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from quant.base.errors import UserError, counted, warn
from quant.export.checkpoint.files.write_tensors import plan_of_model
from quant.export.checkpoint.pretrained import attach
from quant.kernels.linear.install import install_weight, mark_quantized, use_expert_modules
from quant.recipes.callers_model import unwrapped
from quant.recipes.plan import Plan
from quant.training.low_precision.conversion import plan_of_recipes, to_plain_layers
from quant.training.low_precision.fused_experts_training import LowPrecisionStack, trained_layers
from quant.training.low_precision.low_precision_linear import LowPrecisionLinear
from quant.training.low_precision.nonfinite import GradientWatch
from quant.training.low_precision.state import deployed_input, input_scale, packed_weight
from quant.training.qat_layers import put_layer
from quant.training.rounded_weight import PLAN, RoundedWeight

_MANY = 1e-3  # the share of clipped inputs from which `pack` warns


def pack(model: nn.Module) -> Plan:
    """Packs a model that was trained by `prepare_qat` or `to_low_precision_training`; changes it in place.

    Its layers become quantized ones, such as `QuantLinear`. The packed model's outputs equal those of the trained model
    in eval mode, bit for bit where both run the reference arithmetic, so this changes no loss that was evaluated. It
    saves, exports and runs as any quantized model does.

    Static input scales of low-precision training come from the inputs of all ranks, as of the last optimizer's step.

    Args:
        model: the model after training. Wrappers (DDP, torch.compile) are looked through.

    Returns:
        The plan, for `quant.save` and every exporter.

    Raises:
        UserError: the model is not in training, a weight is sharded or no longer
            finite, adapters are on layers, or no step has recorded the inputs of a layer that needs a static scale.
    """
    model = unwrapped(model, "pack")
    rounded = {name: module for name, module in model.named_modules() if isinstance(module, RoundedWeight)}
    layers = trained_layers(model)
    if rounded and hasattr(model, PLAN):
        plan = _pack_rounded(model, rounded)
    elif layers:
        plan = _pack_low_precision(model, layers)
    else:
        raise UserError(
            "the model is not in training: call quant.prepare_qat or quant.to_low_precision_training, and train it "
            "first; quant.quantize packs a model without training"
        )
    plan = plan_of_model(model, plan)
    attach(model, plan)
    # What is measured under accelerate's autocast is not the saved model.
    if "_original_forward" in vars(model) and "forward" in vars(model):
        dtype = next(model.parameters()).dtype
        warn(
            "accelerate runs this model under autocast, as Trainer(bf16=True) asks for, and its eval_loss was measured "
            f"so; the saved model computes in {str(dtype).removeprefix('torch.')}, the dtype of its parameters. To "
            "measure that one, take autocast off: accelerate.utils.extract_model_from_parallel(model, "
            "keep_fp32_wrapper=False)",
        )
    return plan


def _pack_rounded(model: nn.Module, layers: Mapping[str, RoundedWeight]) -> Plan:
    """Packs the layers of `prepare_qat`; returns the plan that they were prepared by."""
    for name, module in layers.items():
        _refuse_partial(name, module.weight, "it into a model prepared in the same way, and pack that")
        for key, parameter in module.named_parameters(recurse=False):
            if not bool(parameter.isfinite().all()):
                raise UserError(f"{name}: training made NaN or infinity of its {key}; lower the learning rate")
    _warn_of_clipped_inputs(layers)
    # All of them before any is installed: scales that are shared depend on the others' weights.
    packed = {name: module.packed() for name, module in layers.items()}  # type: ignore[operator]
    for name, new in packed.items():
        put_layer(model, name, new)
    plan: Plan = getattr(model, PLAN)
    delattr(model, PLAN)
    GradientWatch.end(model)
    return plan


def _warn_of_clipped_inputs(layers: Mapping[str, RoundedWeight]) -> None:
    """Warns of layers whose inputs left the range of their static input scale while they trained."""
    clipped = sorted(((module.inputs.share, name) for name, module in layers.items()), reverse=True)
    many = [name for share, name in clipped if share > _MANY]
    if many:
        share, name = clipped[0]
        also = f" ({counted(len(many) - 1, 'other layer')} above {_MANY:.1%} too)" if len(many) > 1 else ""
        warn(
            f"{name}: {share:.1%} of its inputs in training were beyond the range of its static input scale, and were "
            f"clipped{also}; prepare_qat(track_inputs=100) has the scales follow the first 100 passes",
        )
    followers = [m.inputs for m in layers.values() if m.inputs.follows and m.input_scale is not None]
    if followers and not any(inputs.passes for inputs in followers):
        warn(
            f"track_inputs={followers[0].follows}: no static input scale has followed an input, because the model was "
            "not trained in this process, or compiled; compile it after the first passes",
        )


def _pack_low_precision(model: nn.Module, layers: Mapping[str, LowPrecisionLinear | LowPrecisionStack]) -> Plan:
    """Packs the layers of `to_low_precision_training`; returns the plan of their recipe."""
    recipes = {name: layer.low_precision.recipe for name, layer in layers.items()}
    # Everything that can fail comes before the first change.
    weights, scales = {}, {}
    for name, layer in layers.items():
        reload = "it and the state_dict of the report into a model converted in the same way, and pack that"
        _refuse_partial(name, layer.weight, reload)
        if layer.weight.is_meta:
            raise UserError(f"{name}: its weight is on the meta device and has no values; load them first")
        if isinstance(layer, LowPrecisionLinear) and "weight" not in layer._parameters:
            raise UserError(
                f"{name}: its weight is computed from other parameters (pruning, a parametrization); make it a "
                "parameter first, with torch.nn.utils.prune.remove or parametrize.remove_parametrizations"
            )
    for name, layer in layers.items():
        state = layer.low_precision
        weights[name] = layer.packed() if isinstance(layer, LowPrecisionStack) else packed_weight(layer.weight, state)
        scale = input_scale(state, layer.weight.dtype)
        scales[name] = None if scale is None else scale.to(layer.weight.device)
    _warn_of_unreached_experts(layers)
    # Planning runs the model on a stand-in input, for which plain layers will do. It gives the same plan as at
    # conversion, when the layers were chosen and grouped by it.
    to_plain_layers(model)
    plan = plan_of_recipes(model, recipes)
    reasons = {name: f"codes and scales of training in {recipe.name}" for name, recipe in recipes.items()}
    plan = plan.replace_layers(replace(layer, reason=reasons[layer.name]) for layer in plan.quantized)
    for planned in plan.quantized:
        install_weight(model, planned, weights[planned.name], scales[planned.name])
    use_expert_modules(model, plan)
    mark_quantized(model)
    return plan


def _warn_of_unreached_experts(layers: Mapping[str, LowPrecisionLinear | LowPrecisionStack]) -> None:
    names = []
    for name, layer in layers.items():
        state, activation = layer.low_precision, deployed_input(layer.low_precision.recipe)
        is_static = activation is not None and activation.is_static
        names += [name] * (is_static and all(each.low_precision.amax["x"].is_empty for each in state.group))
    if names:
        warn(
            f"{names[0]}: the router sent this expert no token in training; its static input scale is that of the "
            f"largest input of its siblings ({counted(len(names), 'such layer')})",
        )


def _refuse_partial(name: str, weight: torch.Tensor, reload: str) -> None:
    """Raises UserError where packing a trained layer would lose its adapter, or pack one process's shard of it.

    The message ends with the user's next step with the gathered state: to load what `reload` says.
    """
    # PEFT keeps the module that it wraps under this name. Packing a layer in it would lose the adapter.
    if "base_layer" in name.split("."):
        raise UserError(
            f"{name}: an adapter is on this layer; merge it first, and pack what that returns: "
            "quant.pack(model.merge_and_unload())"
        )
    # Only a DTensor has this method; FSDP2 shards parameters as DTensors.
    if hasattr(weight, "full_tensor"):
        raise UserError(
            f"{name}: its weight is sharded (FSDP); gather the state with torch.distributed.checkpoint.state_dict."
            f"get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)), load {reload}"
        )
