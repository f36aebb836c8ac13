"""The packed form of a layer in low-precision training: codes and scales of its weight, static scale of its input.

Nothing is measured again: a weight gets the codes that its forward product multiplies by, and a static input scale
fits the largest input of the last steps. A 16×16 scale of NVFP4 training is stored once for each of its 16 rows, and
is then an ordinary NVFP4 tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quant.base.errors import UserError
from quant.calibration.statistics import static_input_scale
from quant.formats.format import FORMATS, Format
from quant.formats.rounding import pack
from quant.formats.rounding import encode
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.linear.quant_linear import QuantLinear
from quant.recipes.recipe import get_recipe
from quant.training.low_precision.operands import RoundedOperand, round_operand
from quant.training.low_precision.state import LowPrecision
from quant.training.low_precision.training_recipe import TrainingRecipe


def stored_format(recipe: TrainingRecipe) -> Format:
    """Returns the format in which checkpoints store the weights of a recipe; a preset of that name deploys them.

    Raises:
        UserError: the recipe leaves weights or inputs in 16 bit.
    """
    weight = recipe.weight
    if weight is None or recipe.input is None:
        raise UserError(
            f"recipe {recipe.name!r} leaves an operand of y in 16 bit, and so trains for no deployed format"
        )
    if weight.global_scale:
        return FORMATS["nvfp4"]
    return FORMATS["fp8_channel"] if weight.per_row else FORMATS[weight.name]


def deployed_input(recipe: TrainingRecipe) -> Format | None:
    """Returns the format to which the deployed layer rounds its input."""
    name = get_recipe(stored_format(recipe).name).activation
    return None if name is None else FORMATS[name]


@torch.no_grad()
def packed_weight(weight: torch.Tensor, state: LowPrecision, amax: torch.Tensor | None = None) -> BlockScaledTensor:
    """Returns the codes and scales that the layer's forward product multiplies by.

    Args:
        weight: `[out, in]`.
        state: of its layer.
        amax: largest magnitude that the whole weight is scaled by; None takes the layer's.

    Raises:
        UserError: the weight holds NaN or infinity.
    """
    recipe = state.recipe
    stored = stored_format(recipe)
    assert recipe.weight is not None
    if not bool(weight.isfinite().all()):
        raise UserError(f"{state.name}: training made NaN or infinity of its weight; lower the learning rate")
    if recipe.weight.is_static and amax is None:
        amax = state.weight_amax()
        if recipe.history:
            # Transformer Engine scales merged layers each by itself; deployed, they share a scale.
            recorded = [each.low_precision.amax["w"].largest(amax) for each in state.group]
            amax = torch.stack(recorded).amax()
    # FSDP2 may have shown the layer a BF16 copy: its values are the ones that were rounded in training.
    seen = weight.detach().to(state.weight_dtype or weight.dtype)
    return _packed(round_operand(seen, recipe.weight, recipe, amax=amax), stored, tuple(weight.shape))


def _packed(operand: RoundedOperand, format: Format, shape: tuple[int, ...]) -> BlockScaledTensor:
    # `elements` are on the grid already: encoding rounds nothing.
    codes = encode(operand.elements.contiguous(), format.element)
    codes = pack(codes, format.element.bits) if format.element.bits in (4, 6) else codes
    height = operand.format.block[0]
    scale = operand.scale
    if height > 1 and format.block[0] == 1:  # a square's scale, once for each of its rows
        scale = scale.repeat_interleave(height, 0)[: shape[0]]
    stored = encode(scale.contiguous(), format.scale) if not format.scale.is_wide else scale.contiguous()
    return BlockScaledTensor(codes, stored, format, shape, operand.factor if format.global_scale else None)


def input_scale(state: LowPrecision, dtype: torch.dtype) -> torch.Tensor | None:
    """Returns the static scale of the deployed layer's input; layers that are merged share the largest of theirs.

    An expert that no token has reached takes its siblings'.

    Args:
        state: of the layer.
        dtype: of its weight, in which some scales are stored.

    Raises:
        UserError: the deployed format needs a scale, and no training step has recorded an input.
    """
    activation = deployed_input(state.recipe)
    if activation is None or not activation.is_static:
        return None
    recorded = state.recorded_inputs()
    if not recorded:
        raise UserError(
            f"{state.name}: no training step has recorded its input, whose static scale {activation} needs; run a few "
            "steps in training mode first, or load the weights of a copy that holds averages (EMA) into the model that "
            "trained, and convert that"
        )
    return static_input_scale(torch.stack(recorded).amax(), activation, dtype)


def deployed_layer(layer: Any, state: LowPrecision, x: torch.Tensor) -> nn.Module:
    """Returns the layer as it will be deployed, made again where its weight or the recorded inputs have changed.

    Before the first step there is no static input scale. The input `x` then gives its own.
    """
    histories = [each.low_precision.amax["x"].values for each in state.group]
    # The deployed layer shares the bias's memory, so that only another tensor in its place matters.
    bias = None if layer.bias is None else (layer.bias.data_ptr(), layer.bias.dtype)
    key = (fingerprint(layer.weight, state), bias, *map(id, histories))
    if state.deployed is not None and state.deployed[0] == key:
        return state.deployed[1]  # type: ignore[no-any-return]
    activation = deployed_input(state.recipe)
    is_recorded = not all(each.low_precision.amax["x"].is_empty for each in state.group)
    if activation is None or not activation.is_static or state.recorded_inputs():
        scale = input_scale(state, layer.weight.dtype)
    else:
        scale = static_input_scale(x.abs().amax().float(), activation, layer.weight.dtype)
    weight = packed_weight(layer.weight, state)
    scale = None if scale is None else scale.to(layer.weight.device)
    packed = QuantLinear(weight, layer.bias, activation, scale, dtype=layer.weight.dtype)
    if is_recorded or scale is None:
        # The histories are held, so that no other tensor gets the id by which the next call compares them.
        state.deployed = key, packed, histories
    return packed


def fingerprint(weight: torch.Tensor, state: LowPrecision) -> tuple[object, ...]:
    """Returns facts that distinguish a weight from its earlier values.

    The version counter misses changes through `.data`, by which averaged weights are often put in and taken out, and
    changes by FSDP2, which gathers other values into the same memory. So the norm and a sample of values count too.
    """
    flat = weight.detach().flatten()
    facts = [torch.linalg.vector_norm(flat, dtype=torch.float32).reshape(1), flat[:: max(len(flat) // 256, 1)].float()]
    if state.recipe.weight is not None and state.recipe.weight.is_static:  # shared with other layers
        facts.append(state.weight_amax().flatten())
    return weight._version, weight.device, weight.dtype, *torch.cat(facts).tolist()
