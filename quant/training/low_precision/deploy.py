"""`convert_trained` packs a model that was trained in low precision, with the codes and scales of its training.

Nothing is measured again: a weight gets the codes that its last forward product multiplied by, and a static input scale
is that of the largest input of the last steps. A 16×16 scale of NVFP4 training is stored once for each of its 16 rows,
and is then an ordinary NVFP4 tensor.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from quant.calibration.blocks import stored_dtype
from quant.calibration.statistics import static_input_scale
from quant.checkpoints.pretrained import attach
from quant.errors import UserError
from quant.execution.install import install_weight, mark_quantized
from quant.export.checkpoint.write import plan_of_model
from quant.formats.format import FORMATS, Format
from quant.formats.packing import pack
from quant.formats.rounding import encode
from quant.formats.tensor import BlockScaledTensor
from quant.plan.make import make_plan
from quant.recipes.plan import LayerPlan, Plan
from quant.training.low_precision.convert import from_low_precision_training
from quant.training.low_precision.linear import LowPrecisionLinear
from quant.training.low_precision.operands import Operand, round_operand

PRESETS = {
    "fp8_delayed": "fp8",
    "fp8_tensorwise": "fp8",
    "fp8_rowwise": "fp8_channel",
    "fp8_rowwise_wgrad_bf16": "fp8_channel",
    "fp8_block": "fp8_block",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
}
"""The preset whose formats a recipe trains for, by the recipe's name."""


def convert_trained(model: nn.Module) -> Plan:
    """Packs the layers of a model in low-precision training; changes the model in place.

    Args:
        model: as `to_low_precision_training` left it, after training.

    Returns:
        The plan, for `quant.save` and every exporter.

    Raises:
        UserError: no layer trains in low precision, the recipe fits no preset, a weight is not finite, or no step has
            recorded the inputs of a layer that needs a static scale.
    """
    layers = {n: m for n, m in model.named_modules() if isinstance(m, LowPrecisionLinear)}
    if not layers:
        raise UserError("no layer of the model trains in low precision: call quant.to_low_precision_training first")
    recipe = next(iter(layers.values())).low_precision.recipe
    if recipe.name not in PRESETS:
        raise UserError(f"recipe {recipe.name!r} trains for no preset; known: {', '.join(PRESETS)}")
    weights = {name: trained_weight(name, layer) for name, layer in layers.items()}
    inputs = {name: layer.low_precision.amax["x"].amax for name, layer in layers.items()}
    dtype = stored_dtype(model)
    from_low_precision_training(model)
    plan = make_plan(model, PRESETS[recipe.name], include=list(layers), solver="rtn")
    reason = f"codes and scales of training in {recipe.name}"
    plan = plan.replace_layers(replace(layer, reason=reason) for layer in plan.quantized)
    scales = {layer.name: _input_scale(layer, inputs, plan, dtype) for layer in plan.quantized}
    for layer in plan.quantized:
        install_weight(model, layer, weights[layer.name], scales[layer.name])
    mark_quantized(model)
    plan = plan_of_model(model, plan)
    attach(model, plan)
    return plan


def trained_weight(name: str, layer: LowPrecisionLinear) -> BlockScaledTensor:
    """The codes and scales that the layer's forward product multiplies by.

    Raises:
        UserError: the weight holds NaN or infinity.
    """
    recipe = layer.low_precision.recipe
    assert recipe.weight is not None
    weight = layer.weight.detach()
    if not bool(weight.isfinite().all()):
        raise UserError(f"{name}: training made NaN or infinity of its weight; lower the learning rate")
    rounded = round_operand(weight, recipe.weight, recipe, amax=layer.low_precision.amax["w"].amax)
    return _packed(rounded, _stored_format(recipe.weight), tuple(weight.shape))


def _stored_format(format: Format) -> Format:
    """The format in which checkpoints store weights of a training format."""
    if format.global_scale:
        return FORMATS["nvfp4"]
    return FORMATS["fp8_channel"] if format.per_row else format


def _packed(operand: Operand, format: Format, shape: tuple[int, ...]) -> BlockScaledTensor:
    codes = encode(operand.elements, format.element)
    codes = pack(codes, format.element.bits) if format.element.bits in (4, 6) else codes
    height = operand.format.block[0]
    scale = operand.scale
    if height > 1 and format.block[0] == 1:  # a square's scale, once for each of its rows
        scale = scale.repeat_interleave(height, 0)[: shape[0]]
    stored = encode(scale.contiguous(), format.scale) if not format.scale.is_wide else scale.contiguous()
    return BlockScaledTensor(codes, stored, format, shape, operand.factor if format.global_scale else None)


def _input_scale(
    layer: LayerPlan, inputs: dict[str, torch.Tensor | None], plan: Plan, dtype: torch.dtype
) -> torch.Tensor | None:
    """The static scale of a layer's input; layers that read one input share the largest of theirs."""
    if layer.activation is None or not layer.activation.is_static:
        return None
    group = [other for other in plan.quantized if layer.group is not None and other.group == layer.group] or [layer]
    recorded = [amax for member in group if (amax := inputs[member.name]) is not None]
    if not recorded:
        raise UserError(
            f"{layer.name}: no training step has recorded its input, whose static scale {layer.activation} needs; run "
            "a few steps, or forward passes, before converting"
        )
    return static_input_scale(torch.stack(recorded).amax(), layer.activation, dtype, layer.name)
