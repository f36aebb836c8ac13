"""Layers in training hold a weight in full precision, and multiply by the values that it will have when packed.

`QATLinear`, `QATConv`, `QATExperts` and `QATEmbedding` take the places of `QuantLinear` and the other quantized
layers, with the same formats, input scale, rotation, branch and bias. Their forward is the reference arithmetic of
the packed layer with the rounding of weight and input as differentiable ops (`kernels/training/`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from quant.kernels.base.custom_ops import autocast_dtype
from quant.kernels.linear.conv import ConvGeometry, QuantConv, conv_matrix, conv_parameter
from quant.kernels.linear.embedding import QuantEmbedding
from quant.kernels.linear.experts import ExpertStack, QuantExperts
from quant.kernels.linear.quant_linear import QuantLinear, RunTimeParts
from quant.kernels.training.fake_rounding import round_input
from quant.recipes.module_replacement import take_over
from quant.training.rounded_weight import RoundedWeight, watch_input


class QATLinear(RoundedWeight, nn.Linear):  # type: ignore[misc]
    """A linear layer in training, from the quantized one; for `scales` and `stored` see `RoundedWeight`."""

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
        options = {"dtype": self.dtype, **vars(self.parts)}
        return QuantLinear(self.packed_weight(), self.bias, self.activation_format, self.input_scale, **options)


class QATConv(RoundedWeight, ConvGeometry, nn.modules.conv._ConvNd):  # type: ignore[misc]
    """A convolution in training, with `weight` in the shape of the original one."""

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
        conv = QuantConv(self.packed_weight(), self, self.activation_format, self.input_scale)
        conv.dtype = self.dtype
        return conv


class QATExperts(RoundedWeight, ExpertStack):
    """The weights `[experts, out, in]` of one projection in training."""

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
        scale: Any = self.input_scale
        return QuantExperts(self.packed_weight(), self.activation_format, scale, self.dtype, self.stacking)


class QATEmbedding(RoundedWeight):
    """An embedding in training."""

    def __init__(self, weight: nn.Parameter, packed: QuantEmbedding, scales: str, stored: torch.dtype) -> None:
        super().__init__(weight, packed.quantized_weight, scales, stored, packed.dtype)
        self.num_embeddings, self.embedding_dim = weight.shape
        self.padding_idx = packed.padding_idx

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Maps `[...]` to `[..., dim]`."""
        self.remember_dtype()
        return functional.embedding(input, self.rounded(self.dtype), self.padding_idx)

    def packed(self) -> QuantEmbedding:
        return QuantEmbedding(self.packed_weight(), self.dtype, self.padding_idx)


def _computed_dtype(x: torch.Tensor) -> torch.dtype:
    """Returns the dtype in which `quant::linear` multiplies `x`: autocast's where it is on."""
    return x.dtype if x.dtype is torch.float64 else autocast_dtype(x) or x.dtype


Packed = QuantLinear | QuantConv | QuantExperts | QuantEmbedding
"""The quantized layers."""


def put_layer(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replaces a layer of a model, whose hooks, mode and users' attributes the new one has."""
    parent, _, last = name.rpartition(".")
    old = model.get_submodule(name)
    take_over(module, old)
    module.train(old.training)
    setattr(model.get_submodule(parent), last, module)
