"""Layers in training take the place of quantized ones, from weights that round to the quantized layers' codes.

`install_training_layers` makes a `QATLinear` of each `QuantLinear`, and so on. Where the model was in 16 bit before,
the layer in training has the original's parameter, so that an optimizer made before trains it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from quant.base.errors import UserError
from quant.calibration.solvers.lowrank import residual_weight
from quant.calibration.solvers.rotation import rotate_weight
from quant.formats.rounding import round_to
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.linear.conv import ConvGeometry, QuantConv, conv_matrix, conv_parameter
from quant.kernels.linear.embedding import QuantEmbedding
from quant.kernels.linear.expert_modules import ExpertStack, QuantExperts
from quant.kernels.linear.ops import autocast_dtype
from quant.kernels.linear.quant_linear import QuantLinear, RunTimeParts
from quant.kernels.training.input_rounding import round_input
from quant.kernels.training.weight_rounding import weight_steps
from quant.recipes.module_replacement import take_over
from quant.recipes.plan import LayerPlan, Plan, groups_by_input
from quant.training.rounding.fusion import Fusion
from quant.training.rounding.input_range import watch_input
from quant.training.rounding.rounded_weight import RoundedWeight, decoded_scale

# Layers in training hold a weight in full precision, and multiply by the values that it will have when packed.
#
# `QATLinear`, `QATConv`, `QATExperts` and `QATEmbedding` take the places of `QuantLinear` and the other quantized
# layers, with the same formats, input scale, rotation, branch and bias. Their forward is the reference arithmetic of
# the packed layer with the rounding of weight and input as differentiable ops (`kernels/training/`). They share
# `rounded_weight.py`.


class QATLinear(RoundedWeight, nn.Linear):  # type: ignore[misc]
    """A linear layer in training.

    Args:
        weight: `[out, in]`.
        packed: the quantized layer that it starts from.
        bias: `[out]`, or None; the packed layer's, or the original layer's own parameter.
        scales, stored: see `RoundedWeight`.
    """

    def __init__(
        self, weight: nn.Parameter, packed: QuantLinear, bias: nn.Parameter | None, scales: str, stored: torch.dtype
    ) -> None:
        super().__init__(weight, packed.quantized_weight, scales, stored, packed.dtype)
        self.out_features, self.in_features = weight.shape
        self.register_parameter("bias", bias)
        self.activation_format, self.hadamard = packed.activation_format, packed.hadamard
        for name in ("input_scale", "pre_scale", "lowrank_down", "lowrank_up"):
            self.register_buffer(name, getattr(packed, name))

    @property
    def parts(self) -> RunTimeParts:
        """The run-time work in addition to the matmul."""
        lowrank = None if self.lowrank_down is None else (self.lowrank_down, self.lowrank_up)
        return RunTimeParts(self.pre_scale, self.hadamard, lowrank)  # type: ignore[arg-type]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Maps `[..., in]` to `[..., out]`, as the packed layer computes it."""
        x = input
        self.remember_dtype()
        parts, common = self.parts, self.fusion.common(self, x)
        if common.rounded is None:
            common.seen = parts.input(x)
            common.rounded = common.seen.to(_computed_dtype(x))
            if self.activation_format is not None:
                watch_input([self, *(each for each in common.members if each is not self)], common.rounded)
                common.rounded = round_input(common.rounded, self.activation_format, self.input_scale)
        # y = Q(W) · Q(H (x · s)) + bias + U (D · H (x · s)), with the factor s, the rotation H and the branch U D.
        if common.scales is None or not self.measures_level:
            common.scales = self.current_scales()
        rounded = common.rounded
        bias = None if self.bias is None else self.bias.to(rounded.dtype)
        y = functional.linear(rounded, self._round(self.matrix, rounded.dtype, *common.scales), bias)
        branch = parts.branch(common.seen)  # type: ignore[arg-type]
        return y if branch is None else y + branch

    def packed(self) -> QuantLinear:
        """Returns the packed layer."""
        return QuantLinear(
            self.packed_weight(), self.bias, self.activation_format, self.input_scale,
            dtype=self.dtype, **vars(self.parts),
        )  # fmt: skip


class QATConv(RoundedWeight, ConvGeometry, nn.modules.conv._ConvNd):  # type: ignore[misc]
    """A convolution in training; arguments are as in `QATLinear`, with `weight` in the shape of the original one."""

    def __init__(
        self, weight: nn.Parameter, packed: QuantConv, bias: nn.Parameter | None, scales: str, stored: torch.dtype
    ) -> None:
        super().__init__(weight, packed.stored_weight, scales, stored, packed.dtype)
        self.take_geometry(packed)
        self.register_parameter("bias", bias)
        self.activation_format = packed.activation_format
        self.register_buffer("input_scale", packed.input_scale)

    @property
    def matrix(self) -> torch.Tensor:
        """The weight `[out, in / groups · kernel]`."""
        return conv_matrix(self.trained_weight, self.groups, self.transposed)

    def convolve(self, x: torch.Tensor, output_padding: Sequence[int]) -> torch.Tensor:
        """Convolves as the packed layer does."""
        self.remember_dtype()
        x = x.to(_computed_dtype(x))
        if self.activation_format is not None:
            samples = x.contiguous().flatten(1)
            watch_input([self], samples)
            x = round_input(samples, self.activation_format, self.input_scale).view(x.shape)
        weight = conv_parameter(self.rounded(x.dtype), self.weight.shape, self.groups, self.transposed)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return torch.convolution(
            x, weight, bias, self.stride, self.op_padding, self.dilation, self.transposed, output_padding, self.groups
        )

    def packed(self) -> QuantConv:
        """Returns the packed convolution."""
        conv = QuantConv(self.packed_weight(), self, self.activation_format, self.input_scale)
        conv.dtype = self.dtype
        return conv


class QATExperts(RoundedWeight, ExpertStack):
    """The weights `[experts, out, in]` of one projection in training. Arguments are as in `QATLinear`."""

    runs_grouped = False

    def __init__(self, weight: nn.Parameter, packed: QuantExperts, scales: str, stored: torch.dtype) -> None:
        super().__init__(weight, packed.quantized_weight, scales, stored, packed.dtype)
        self.activation_format, self.stacking = packed.activation_format, packed.stacking
        self.register_buffer("input_scale", packed.input_scale)
        self._matrices: Sequence[torch.Tensor] | None = None

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Takes the experts apart once while open, so that their gradients are put together once."""
        self.remember_dtype()
        self._matrices = self.trained_weight.unbind(0)
        try:
            yield
        finally:
            self._matrices = None

    @property
    def multiplies_values(self) -> bool:
        """Whether inputs stay in 16 bit."""
        return self.activation_format is None

    def dense(self, index: int) -> torch.Tensor:
        """Returns the rounded values `[out, in]` of one expert."""
        return self._one(index, self.dtype)

    def product(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """Maps `[tokens, in]` to `[tokens, out]` through expert `index`."""
        operand = x.to(_computed_dtype(x))
        if self.activation_format is not None:
            watch_input([self], operand)
            operand = round_input(operand, self.activation_format, self.input_scale)
        return functional.linear(operand, self._one(index, operand.dtype))

    def _one(self, index: int, dtype: torch.dtype) -> torch.Tensor:
        self.remember_dtype()
        scale, second = self.current_scales()
        matrix = (self.trained_weight if self._matrices is None else self._matrices)[index]
        own = None if scale is None else scale[index]
        return self._round(matrix, dtype, own, None if second is None else second[index])

    def packed(self) -> QuantExperts:
        """Returns the packed experts."""
        scale: Any = self.input_scale
        return QuantExperts(self.packed_weight(), self.activation_format, scale, self.dtype, self.stacking)


class QATEmbedding(RoundedWeight):
    """An embedding in training. Arguments are as in `QATLinear`."""

    def __init__(self, weight: nn.Parameter, packed: QuantEmbedding, scales: str, stored: torch.dtype) -> None:
        super().__init__(weight, packed.quantized_weight, scales, stored, packed._dtype.dtype)
        self.num_embeddings, self.embedding_dim = weight.shape
        self.padding_idx = packed.padding_idx

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Maps `[...]` to `[..., dim]`."""
        self.remember_dtype()
        return functional.embedding(input, self.rounded(self.dtype), self.padding_idx)

    def packed(self) -> QuantEmbedding:
        """Returns the packed embedding."""
        return QuantEmbedding(self.packed_weight(), self.dtype, self.padding_idx)


def _computed_dtype(x: torch.Tensor) -> torch.dtype:
    """Returns the dtype in which `quant::linear` multiplies `x`: autocast's where it is on."""
    return x.dtype if x.dtype is torch.float64 else autocast_dtype(x) or x.dtype


# A quantized model is trained from weights that round to its codes: training starts at exactly its loss.
#
# A code stands for an interval of weights, its cell. The values in the middle, which the codes decode to, are one
# start. Where the original weight is known, the nearest point of the cell is another start. It keeps the difference
# that rounding to nearest would have made anyway:
#
#     gptq chose 3.0 for a weight of 2.4 (in steps of its block)     cell [2.5, 3.5]    start 2.55
#     gptq chose 3.0 for a weight of 2.9                              cell [2.5, 3.5]    start 2.9
#
# For a checkpoint, rounding targets are recovered from the original model: its weights, rotated, with rows and columns
# scaled as solvers fold scales into them, less the branch. These scales are in no file; least squares finds them.
#
# Starts keep a twentieth of half a cell from its ends, so that rounding errors cannot carry them over.


_WITHIN = 0.95  # of half a cell
_UNRELATED = 0.35  # relative distance of weights that are not of one another; 4-bit rounding makes 0.08 to 0.2
_TURNS = 4


def starting_weight(packed: BlockScaledTensor, original: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Returns the weight to train: it rounds to the codes of `packed` under its scales.

    Args:
        packed: the quantized weight.
        original: the values that were rounded, of the same shape; None starts in the middle of each cell.
        dtype: the dtype of the result.
    """
    middle = packed.dequantize(torch.float32)
    if original is None:
        return middle.to(dtype)
    scale, element = decoded_scale(packed), packed.format.element
    second = None if packed.global_scale is None else packed.global_scale.float()
    step = weight_steps(scale, second, packed.format, torch.Size(packed.shape))
    codes, grid = packed.element_values(), element.grid().to(step.device)
    if -element.min > element.max:  # INT4, whose lowest value has no positive counterpart
        grid = torch.cat([grid, grid.new_tensor([-element.min])])
    # A code beyond the grid, which other toolkits write in INT8, has the cell of the last; its value is not changed.
    index = torch.searchsorted(grid, codes.abs().contiguous()).clamp(max=len(grid) - 1)
    gaps = (grid[1:] - grid[:-1]) * (_WITHIN / 2)
    # From zero a cell reaches as far down as up, and from the last value nowhere: values beyond it have no gradient.
    below = torch.cat([gaps[:1], gaps])[index]
    above = torch.cat([gaps, gaps.new_zeros(1)])[index] * (codes < element.max)
    sign = torch.where(codes < 0, -1.0, 1.0)
    steps = (original.float() / step * sign).clamp(codes.abs() - below, codes.abs() + above) * sign
    weight = (steps * step).to(dtype)
    # In a narrow dtype the start may have been rounded across the end of its cell.
    same = round_to(weight.float() / step, element) == codes
    return torch.where(same, weight, middle.to(dtype))


def before_rounding(packed: BlockScaledTensor, parts: RunTimeParts, original: torch.Tensor) -> torch.Tensor | None:
    """Returns the values that were rounded to `packed`, recovered from the original model's weight.

    Args:
        packed: the quantized weight.
        parts: the parts of its layer.
        original: the weight in the original model, of the same shape.

    Returns:
        float32; None where it came from another weight, as it does of models whose rotations were merged.
    """
    stored = packed.dequantize()
    residual = stored if parts.lowrank is None else residual_weight(stored, (parts.lowrank[0], -parts.lowrank[1]))
    turned = rotate_weight(original.to(stored.device, torch.float32), parts.hadamard)
    scaled = _scaled(turned, residual)
    if scaled is None:
        return None
    return scaled if parts.lowrank is None else residual_weight(scaled, parts.lowrank)


def _scaled(weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor | None:
    """Returns `weight` with rows and columns scaled to be nearest to `wanted`.

    Itself where that gains no more than chance.
    """

    def factor(matrix: torch.Tensor, dim: int) -> torch.Tensor:
        tiny = torch.finfo(torch.float32).tiny
        return (matrix * target).sum(dim, keepdim=True) / matrix.square().sum(dim, keepdim=True).clamp(min=tiny)

    # Alternating least squares on |target − rows · weight · columns|²: with one side fixed, the best factor of each row
    # or column is ⟨w, t⟩ / ⟨w, w⟩.
    rows, columns = torch.ones_like(weight[..., :1]), torch.ones_like(weight[..., :1, :])
    for _ in range(_TURNS):
        columns = factor(weight * rows, -2)
        rows = factor(weight * columns, -1)
    scaled = weight * rows * columns
    size = target.norm().clamp(min=torch.finfo(torch.float32).tiny)
    before, after = (float((each - target).norm() / size) for each in (weight, scaled))
    if not after <= _UNRELATED:  # NaN too
        return None
    # One factor a row and one a column fit about 1/in + 1/out of the squares of pure rounding noise; a gain below four
    # times that is not a scaling by a solver.
    chance = 4 * (1 / weight.shape[-1] + 1 / weight.shape[-2])
    return weight if before**2 <= after**2 * (1 + chance) else scaled


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
