"""`QuantConv` is a convolution of one, two or three dimensions, plain or transposed, with a quantized weight.

    quant::conv(x, codes, scale, bias?, input_scale?, weight_format, activation, stride, padding, dilation,
                transposed, output_padding, groups) -> y

Formats see the weight as the matrix `[out, in / groups · kernel]`, with one row for each output channel, and so does a
checkpoint. The module keeps the codes in the shape of the original parameter, as exporters and TensorRT require them:
`[out, in / groups, kernel…]`, and `[in, out / groups, kernel…]` of a transposed convolution.

A format with one scale for each token takes one scale for each sample of the batch here: windows overlap, so that no
smaller part of an input could have a scale that is a factor of its outputs.

No kernel here multiplies in eight bits: the input is rounded, the weight dequantized, and torch convolves them in the
dtype of the input. The engines that are built from an exported file do multiply in eight bits.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from quant.formats.format import FORMATS, INPUT_FORMATS, Format
from quant.formats.tensor import BlockScaledTensor, round_activation
from quant.kernels.base.custom_ops import below_autograd, first_order, register
from quant.kernels.linear.oracle import dense_view
from quant.kernels.linear.quantized_module import QuantizedModule

CONV = "quant::conv"
_GEOMETRY = (
    "in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "transposed",
    "output_padding", "padding_mode", "_reversed_padding_repeated_twice",
)  # fmt: skip


def conv_matrix(weight: Tensor, groups: int, transposed: bool) -> Tensor:
    """Returns a convolution's parameter or codes as `[out, in / groups · kernel]`, a view unless transposed."""
    if transposed:
        # [in, out / groups, kernel…] → [groups, in / groups, out / groups, …] → [out, in / groups, …]
        weight = weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
    return weight.flatten(1)


def conv_parameter(matrix: Tensor, shape: Sequence[int], groups: int, transposed: bool) -> Tensor:
    """Undoes `conv_matrix`, for a parameter of `shape`."""
    if not transposed:
        return matrix.view(shape)
    inputs, outputs, *kernel = shape
    return matrix.view(groups, outputs, inputs // groups, *kernel).transpose(1, 2).reshape(shape)


def weight_of_conv(conv: nn.Module) -> Tensor:
    """Returns the weight of an unquantized convolution as the matrix that formats see."""
    assert isinstance(conv, nn.modules.conv._ConvNd)
    return conv_matrix(conv.weight.detach(), conv.groups, conv.transposed)


class ConvGeometry:
    """Sizes and paddings of a convolution, and its forward around the product, which a subclass gives as `convolve`."""

    in_channels: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    groups: int
    transposed: bool
    padding_mode: str
    _reversed_padding_repeated_twice: list[int]
    _output_padding = nn.modules.conv._ConvTransposeNd._output_padding

    def take_geometry(self, conv: nn.Module | Self) -> None:
        """Takes the sizes and paddings of `conv`."""
        for name in _GEOMETRY:
            setattr(self, name, getattr(conv, name, None))

    def convolve(self, x: Tensor, output_padding: Sequence[int]) -> Tensor:
        """Returns the product with an input `[batch, in, size…]` that `padded` gave."""
        raise NotImplementedError

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Maps `[batch, in, size…]` to `[batch, out, size…]`, in the dtype of `input`; the batch may be left out."""
        # `output_size` is a transposed convolution's, as `nn.ConvTranspose2d` takes it.
        x, dims = input, len(self.kernel_size)
        # torch's own modules take an input without a batch, too.
        if x.dim() == dims + 1:
            return self.forward(x[None], output_size)[0]
        output_padding: Sequence[int] = self.output_padding
        if output_size is not None:
            geometry = (self.stride, self.padding, self.kernel_size, dims, self.dilation)
            output_padding = self._output_padding(x, output_size, *geometry)  # type: ignore[misc, arg-type]
        return self.convolve(self.padded(x), output_padding)

    def padded(self, x: Tensor) -> Tensor:
        """Returns the input with the padding that the op does not do, which pads both sides with as many zeros."""
        if self.op_padding is self.padding:
            return x
        mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
        return nn.functional.pad(x, self._reversed_padding_repeated_twice, mode=mode)

    @property
    def op_padding(self) -> tuple[int, ...]:
        """Zeros that the op adds on both sides of each axis."""
        if isinstance(self.padding, str) or self.padding_mode != "zeros":
            return (0,) * len(self.kernel_size)
        return self.padding


class QuantConv(ConvGeometry, QuantizedModule):
    """A convolution with a quantized weight `[out, in / groups · kernel]`."""

    # `conv`, which it replaces, gives the geometry, the bias, and the dtype of `weight` for code that reads it. The
    # input is rounded to `activation`, under a static `input_scale` where the format has one.

    has_kernel_layout = False
    bias: nn.Parameter | None

    def __init__(
        self, weight: BlockScaledTensor, conv: nn.Module, activation: Format | None, input_scale: Tensor | None
    ) -> None:
        assert isinstance(conv, nn.modules.conv._ConvNd)
        codes = conv_parameter(weight.codes, conv.weight.shape, conv.groups, conv.transposed)
        super().__init__(replace(weight, codes=codes.contiguous()), activation, input_scale, conv.weight.dtype)
        self.take_geometry(conv)
        bias = None if conv.bias is None else nn.Parameter(conv.bias.detach(), requires_grad=False)
        self.register_parameter("bias", bias)

    @property
    def stored_weight(self) -> BlockScaledTensor:
        """The weight `[out, in / groups · kernel]`."""
        codes = conv_matrix(self.codes, self.groups, self.transposed)
        return BlockScaledTensor(codes, self.scale, self.weight_format, self.weight_shape)

    @property
    def weight(self) -> Tensor:
        """The parameter of the original convolution, dequantized again for each access."""
        return self.weight_in(self.dtype).clone()

    def weight_in(self, dtype: torch.dtype) -> Tensor:
        """Returns `weight` in another dtype, rounded to it once."""
        return _dense(self.codes, self.scale, self.weight_format.name, self.groups, self.transposed, dtype)

    def convolve(self, x: Tensor, output_padding: Sequence[int]) -> Tensor:
        activation = self.activation_format
        return torch.ops.quant.conv.default(
            x, self.codes, self.scale, self.bias, self.input_scale, self.weight_format.name,
            "" if activation is None else activation.name, self.stride, self.op_padding, self.dilation,
            self.transposed, output_padding, self.groups,
        )  # fmt: skip

    def extra_repr(self) -> str:
        kernel = "×".join(map(str, self.kernel_size))
        return f"{super().extra_repr()}, kernel={kernel}, stride={self.stride}, groups={self.groups}"


def round_samples(x: Tensor, format: Format, input_scale: Tensor | None) -> Tensor:
    """Returns the input of a convolution, `[batch, in, size…]`, rounded: each sample is one row of the format."""
    return round_activation(x.flatten(1), format, input_scale).view(x.shape)


def _dense(codes: Tensor, scale: Tensor, format: str, groups: int, transposed: bool, dtype: torch.dtype) -> Tensor:
    matrix = conv_matrix(codes, groups, transposed)
    weight = BlockScaledTensor(matrix, scale, FORMATS[format], tuple(matrix.shape))
    return conv_parameter(dense_view(weight, codes, dtype), codes.shape, groups, transposed)


def _convolve(
    x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, input_scale: Tensor | None, weight_format: str,
    activation: str, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], transposed: bool,
    output_padding: Sequence[int], groups: int,
) -> Tensor:  # fmt: skip
    if activation:
        # One row for each sample: see the module docstring on scales of windows that overlap.
        x = round_samples(x.contiguous(), INPUT_FORMATS[activation], input_scale)
    weight = _dense(codes, scale, weight_format, groups, transposed, x.dtype)
    return torch.convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)


class _Conv(torch.autograd.Function):
    """`quant::conv` where the input or the bias needs a gradient, which passes straight through the rounding."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, *args: Any) -> Tensor:
        x, codes, scale, _, _, ctx.weight_format, _, *ctx.geometry = args
        ctx.shape = x.shape
        ctx.save_for_backward(codes, scale)
        return below_autograd(torch.ops.quant.conv.default, keyset, *args)

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        codes, scale = ctx.saved_tensors
        for_x = for_bias = None
        if ctx.needs_input_grad[1]:
            of_x = torch.ops.quant.conv_input_gradient
            for_x = of_x(gradient, codes, scale, ctx.shape, ctx.weight_format, *ctx.geometry)
        if ctx.needs_input_grad[4]:
            for_bias = gradient.sum([0, *range(2, gradient.dim())])
        return None, for_x, None, None, for_bias, *[None] * 9


def _gradient_of_input(gradient: Tensor, weight: Tensor, shape: Sequence[int], *geometry: Any) -> Tensor:
    x = gradient.new_empty(1).expand(shape)  # only its shape is read
    backward = torch.ops.aten.convolution_backward
    return backward(gradient, x, weight, None, *geometry, [True, False, False])[0]


register(
    f"{CONV}_input_gradient",
    "(Tensor gradient, Tensor codes, Tensor scale, SymInt[] shape, str weight_format, int[] stride, SymInt[] padding, "
    "int[] dilation, bool transposed, SymInt[] output_padding, int groups) -> Tensor",
    lambda gradient, codes, scale, shape, weight_format, *geometry: _gradient_of_input(
        gradient, codes.new_empty(codes.shape, dtype=gradient.dtype), shape, *geometry
    ),
    default=lambda gradient, codes, scale, shape, weight_format, *geometry: _gradient_of_input(
        gradient, _dense(codes, scale, weight_format, geometry[5], geometry[3], gradient.dtype), shape, *geometry
    ),
)
register(
    CONV,
    "(Tensor x, Tensor codes, Tensor scale, Tensor? bias, Tensor? input_scale, str weight_format, str activation, "
    "int[] stride, SymInt[] padding, int[] dilation, bool transposed, SymInt[] output_padding, int groups) -> Tensor",
    lambda x, codes, scale, bias, *options: torch.convolution(
        x.contiguous() if options[2] else x, codes.new_empty(codes.shape, dtype=x.dtype), bias, *options[3:]
    ),
    default=_convolve,
    autograd=_Conv,
    gradients_of=(0, 3),
)
