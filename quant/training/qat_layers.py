"""Layers in training take the place of quantized ones, from weights that round to the quantized layers' codes.

`install_training_layers` makes a `QATLinear` of each `QuantLinear`, and so on. Where the model was in 16 bit before,
the layer in training has the original's parameter, so that an optimizer made before trains it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quant.base.errors import UserError
from quant.kernels.linear.conv import QuantConv, conv_matrix, conv_parameter
from quant.kernels.linear.embedding import QuantEmbedding
from quant.kernels.linear.expert_modules import QuantExperts
from quant.kernels.linear.quant_linear import QuantLinear, RunTimeParts
from quant.recipes.module_hooks import take_over
from quant.recipes.plan import LayerPlan, Plan, groups_by_input
from quant.training.initial_weights import before_rounding, starting_weight
from quant.training.modules import QATConv, QATEmbedding, QATExperts, QATLinear
from quant.training.rounding.fusion import Fusion
from quant.training.rounding.rounded_weight import RoundedWeight

Packed = QuantLinear | QuantConv | QuantExperts | QuantEmbedding
"""The quantized layers."""


@dataclass(frozen=True)
class Start:
    """The tensors of a model, by layer, from before it was quantized; a model that came quantized has none of its own.

    Attributes:
        weights: parameters of the layers' weights.
        biases: parameters of their biases, or None.
        rounded: the values that were rounded to the layers' codes, float32 `[..., out, in]`, where they are known.
    """

    weights: dict[str, nn.Parameter]
    biases: dict[str, nn.Parameter | None]
    rounded: dict[str, torch.Tensor]

    @classmethod
    def of_original(cls, model: nn.Module, plan: Plan) -> Start:
        """Returns the weights and biases of a model in 16 bit, whose solvers will report the values that they round."""
        weights = {layer.name: model.get_parameter(layer.tensor_name) for layer in plan.quantized}
        owners = {layer.name: model.get_submodule(layer.tensor_name.rpartition(".")[0]) for layer in plan.quantized}
        return cls(weights, {name: getattr(owner, "bias", None) for name, owner in owners.items()}, {})


def weights_before_rounding(model: nn.Module, plan: Plan, original: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the values that were rounded to a quantized model's codes, by layer, where the original has them."""
    parameters = dict(original.named_parameters())
    rounded = {}
    with torch.no_grad():
        for layer in plan.quantized:
            packed: Any = model.get_submodule(layer.name)
            parameter = parameters.get(layer.tensor_name)
            if parameter is None or parameter.is_meta or not parameter.is_floating_point():
                continue
            weight = _matrix(layer, packed, parameter.detach())
            if weight.shape != packed.quantized_weight.shape:
                continue
            parts = packed.parts if isinstance(packed, QuantLinear) else RunTimeParts()
            values = before_rounding(packed.quantized_weight, parts, weight)
            if values is not None:
                rounded[layer.name] = values
    return rounded


def install_training_layers(
    model: nn.Module, plan: Plan, start: Start, scales: str | None, stored: torch.dtype, dtype: torch.dtype | None
) -> None:
    """Puts layers in training in the place of the quantized ones; takes the values out of `start.rounded`.

    Args:
        model: quantized by `plan`.
        plan: the plan that names the layers.
        start: weights from before quantization.
        scales: one of `SCALES`; None recomputes the scales of `rtn`, and freezes others.
        stored: dtype of the checkpoint.
        dtype: the dtype of the weights in training; None keeps the model's.

    Raises:
        UserError: a layer would not start as the quantized one; no layer has been replaced.
    """
    parameters = {id(parameter) for parameter in model.parameters()}
    installed: dict[str, RoundedWeight] = {}
    for layer in plan.quantized:
        packed: Any = model.get_submodule(layer.name)
        original = start.weights.get(layer.name)
        scale_mode = scales or ("recomputed" if layer.solver == "rtn" and original is not None else "frozen")
        weight_dtype = dtype or (stored if original is None else original.dtype)
        values = _initial_values(layer, packed, start, scale_mode, weight_dtype)
        # Another layer has a parameter that is in the model still, and keeps it as it is.
        is_free = original is not None and id(original) not in parameters
        if original is None or not is_free or not _is_trained_whole(layer, packed, original):
            weight = nn.Parameter(values.contiguous())
        else:
            weight = original
            # The Parameter stays the same object: an optimizer that was made before holds it, and goes on training it.
            if weight.dtype != values.dtype:
                weight.grad = None  # of the dtype that it had
            weight.data = values
        installed[layer.name] = _in_training(packed, weight, start.biases.get(layer.name), scale_mode, stored)
    for members in groups_by_input(plan.quantized):
        _share([installed[member.name] for member in members])
    for layer in plan.quantized:
        _check_start(layer, model.get_submodule(layer.name), installed[layer.name])
    # All checks come first: where a layer is refused, none has been replaced.
    for name, module in installed.items():
        put_layer(model, name, module)


def put_layer(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replaces a layer of a model, whose hooks, mode and users' attributes the new one has."""
    parent, _, last = name.rpartition(".")
    old = model.get_submodule(name)
    take_over(module, old)
    module.train(old.training)
    setattr(model.get_submodule(parent), last, module)


def _initial_values(layer: LayerPlan, packed: Any, start: Start, scales: str, dtype: torch.dtype) -> torch.Tensor:
    """Returns the weight that training starts with, in the shape of the layer's parameter."""
    original = start.weights.get(layer.name)
    values = None if original is None else _matrix(layer, packed, original.detach())
    if scales != "recomputed" or original is not None:  # from a guess other scales might be measured
        # `pop`, because these are float32 copies: a whole model of them need not last until the last layer is made.
        values = start.rounded.pop(layer.name, values)
    with torch.no_grad():
        if scales == "recomputed" and values is not None:
            matrix = values.to(dtype)
        else:
            matrix = starting_weight(packed.quantized_weight, values, dtype)
    if isinstance(packed, QuantConv):
        return conv_parameter(matrix, packed.codes.shape, packed.groups, packed.transposed)
    return matrix


def _matrix(layer: LayerPlan, packed: Any, parameter: torch.Tensor) -> torch.Tensor:
    """Returns the matrices `[..., out, in]` of a parameter of the 16-bit model."""
    if isinstance(packed, QuantExperts):
        return packed.stacking.matrices(parameter)
    if isinstance(packed, QuantConv):
        return conv_matrix(parameter, packed.groups, packed.transposed)
    return parameter.t() if layer.transposed else parameter


def _is_trained_whole(layer: LayerPlan, packed: Any, parameter: nn.Parameter) -> bool:
    """Returns whether a parameter has the shape that is trained: a convolution's own, no transposed matrix."""
    matrix = _matrix(layer, packed, parameter.detach())
    is_same = matrix.shape == parameter.shape and matrix.stride() == parameter.stride()
    return is_same or isinstance(packed, QuantConv)


def _in_training(
    packed: Any, weight: nn.Parameter, bias: nn.Parameter | None, scales: str, stored: torch.dtype
) -> RoundedWeight:
    """Returns the layer in training that stands for a quantized one."""
    if isinstance(packed, QuantExperts):
        return QATExperts(weight, packed, scales, stored)
    if isinstance(packed, QuantEmbedding):
        return QATEmbedding(weight, packed, scales, stored)
    assert isinstance(packed, QuantLinear | QuantConv)
    if packed.bias is not None and bias is not None:
        bias.data = packed.bias.data
    elif packed.bias is not None:
        bias = nn.Parameter(packed.bias.detach())
    if isinstance(packed, QuantConv):
        return QATConv(weight, packed, bias, scales, stored)
    return QATLinear(weight, packed, bias, scales, stored)


def _share(members: Sequence[RoundedWeight]) -> None:
    """Makes fused layers share one global scale, or their only scale."""
    fusion = Fusion(members)
    for member in members:
        member.fusion = fusion
        if member is not members[0] and member.weight_format.per_tensor:
            # One parameter in one place: safetensors write no tensor under two names.
            member.range_shift = member.start_step = None


def _check_start(layer: LayerPlan, packed: Any, module: RoundedWeight) -> None:
    """Raises UserError where the layer would not start as the quantized one."""
    if torch.equal(module.packed_weight().dequantize(), packed.quantized_weight.dequantize()):
        return
    element = packed.weight_format.element
    if element.is_integer and bool((packed.quantized_weight.element_values() < element.min).any()):
        raise UserError(
            f"{layer.name}: holds the code {int(element.min) - 1}, as other toolkits write it, and training rounds to "
            f"±{int(element.max)}; start from the original model instead, or keep the layer in 16 bit"
        )
    way_out = "'frozen' or 'learned'" if module.scales == "recomputed" else "'frozen'"
    raise UserError(
        f"{layer.name}: scales={module.scales!r} does not give the scales that {layer.solver} chose, so training would "
        f"not start from this model; use scales={way_out}"
    )
