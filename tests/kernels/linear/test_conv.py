"""`QuantConv` equals torch's convolution, in float64, of an input and a weight that `ml_dtypes` and numpy round."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

from quant.formats.format import FORMATS
from quant.formats.tensor import BlockScaledTensor, quantize
from quant.kernels.linear.conv import QuantConv, conv_matrix, conv_parameter, weight_of_conv

CONVS: dict[str, tuple[type[nn.Module], dict[str, Any], tuple[int, ...]]] = {
    "1d": (nn.Conv1d, {"kernel_size": 3, "stride": 2, "padding": 2, "dilation": 2}, (2, 6, 19)),
    "2d": (nn.Conv2d, {"kernel_size": (3, 5), "stride": (2, 1), "padding": (1, 0)}, (2, 6, 9, 11)),
    "3d": (nn.Conv3d, {"kernel_size": 2, "padding": 1, "bias": False}, (2, 6, 4, 5, 3)),
    "groups": (nn.Conv2d, {"kernel_size": 3, "groups": 2}, (2, 6, 7, 7)),
    "depthwise": (nn.Conv1d, {"kernel_size": 4, "groups": 2, "out_channels": 6, "padding": 3}, (2, 6, 9)),
    "same": (nn.Conv2d, {"kernel_size": 4, "padding": "same"}, (2, 6, 7, 5)),
    "valid": (nn.Conv2d, {"kernel_size": 3, "padding": "valid"}, (2, 6, 7, 5)),
    "circular": (nn.Conv2d, {"kernel_size": 3, "padding": 1, "padding_mode": "circular"}, (2, 6, 7, 5)),
    "reflect": (nn.Conv1d, {"kernel_size": 3, "padding": 2, "padding_mode": "reflect"}, (2, 6, 7)),
    "transposed 1d": (nn.ConvTranspose1d, {"kernel_size": 4, "stride": 3, "padding": 1}, (2, 6, 7)),
    "transposed 2d": (nn.ConvTranspose2d, {"kernel_size": 3, "stride": 2, "output_padding": 1}, (2, 6, 5, 4)),
    "transposed 3d": (nn.ConvTranspose3d, {"kernel_size": 2, "stride": 2, "bias": False}, (2, 6, 3, 2, 4)),
    "transposed groups": (nn.ConvTranspose2d, {"kernel_size": 3, "groups": 2, "dilation": 2}, (2, 6, 5, 4)),
    "one sample": (nn.Conv2d, {"kernel_size": 3}, (6, 7, 7)),
    "one sample transposed": (nn.ConvTranspose2d, {"kernel_size": 3, "stride": 2}, (6, 7, 7)),
}
PAIRS = [
    ("int8", None),
    ("int8", "int8_token"),
    ("int8", "int8_tensor"),
    ("fp8_channel", "fp8_token"),
    ("fp8_channel", "fp8"),
    ("fp8", "fp8"),
]


def make(case: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    cls, options, shape = CONVS[case]
    conv = cls(**{"in_channels": 6, "out_channels": 8, **options})
    with torch.no_grad():
        conv.weight.mul_(torch.logspace(-3, 1, conv.weight.numel()).view_as(conv.weight))  # type: ignore[operator]
    return conv.to(dtype), torch.randn(shape).to(dtype)


def quantized(conv: nn.Module, format: str, activation: str | None, scale: torch.Tensor | None = None) -> QuantConv:
    weight = quantize(weight_of_conv(conv), FORMATS[format])
    return QuantConv(weight, conv, FORMATS[activation] if activation else None, scale)


def rounded(x: np.ndarray, format: str, axes: tuple[int, ...], scale: float | None = None) -> np.ndarray:
    """Float32 `x` rounded with one scale over `axes`, in float64."""
    largest, x = (127 if "int8" in format else 448), x.astype(np.float32)
    step = np.abs(x).max(axes, keepdims=True) / np.float32(largest) if scale is None else np.float32(scale)
    if "int8" in format:
        # Beyond a calibrated range lies -128, too.
        codes = np.clip(np.round(x / step), -127 - (scale is not None), 127)
    else:
        codes = np.clip(x / step, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return codes.astype(np.float64) * step.astype(np.float64)


def expected(conv: Any, x: torch.Tensor, format: str, activation: str | None, scale: float | None) -> torch.Tensor:
    """The convolution in float64, its weight rounded in the parameter's own shape."""
    weight = conv.weight.detach().float().numpy()
    if format == "fp8":
        values = rounded(weight, format, tuple(range(weight.ndim)))
    elif not conv.transposed:
        values = rounded(weight, format, tuple(range(1, weight.ndim)))
    else:  # output channels are those of axis 1, in each group of axis 0
        parts = np.split(weight, conv.groups)
        values = np.concatenate([rounded(part, format, (0, *range(2, weight.ndim))) for part in parts])
    if activation is not None:
        one = x.dim() == len(conv.kernel_size) + 1
        axes = tuple(range(0 if one else 1, x.dim()))
        x = torch.from_numpy(rounded(x.float().numpy(), activation, axes, scale))
    twin = type(conv).__new__(type(conv))
    twin.__dict__ = dict(conv.__dict__)
    twin._parameters = {
        "weight": nn.Parameter(torch.from_numpy(values)),
        "bias": None if conv.bias is None else nn.Parameter(conv.bias.detach().double()),
    }
    with torch.no_grad():
        out: torch.Tensor = twin(x.double())
    return out


@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")
@pytest.mark.parametrize("case", CONVS)
@pytest.mark.parametrize(("format", "activation"), PAIRS)
def test_a_quantized_convolution_is_that_of_its_rounded_operands(
    case: str, format: str, activation: str | None
) -> None:
    conv, x = make(case)
    scale = {"fp8": 0.0071, "int8_tensor": 0.021}.get(activation or "")
    module = quantized(conv, format, activation, None if scale is None else torch.tensor(scale))
    with torch.no_grad():
        y = module(x)
    exact = expected(conv, x, format, activation, scale)
    assert y.shape == exact.shape and y.dtype == x.dtype
    assert torch.allclose(y.double(), exact, rtol=1e-5, atol=1e-5 * float(exact.abs().max()))


@pytest.mark.parametrize("case", ["2d", "transposed 2d"])
def test_half_precision_rounds_the_weight_and_the_output(case: str) -> None:
    conv, x = make(case, torch.bfloat16)
    y = quantized(conv, "fp8_channel", None)(x)
    exact = expected(conv, x, "fp8_channel", None, None)
    assert y.dtype is torch.bfloat16
    assert torch.allclose(y.double(), exact, rtol=0.02, atol=0.02 * float(exact.abs().max()))


@pytest.mark.parametrize("case", CONVS)
def test_matrices_of_parameters_and_back(case: str) -> None:
    conv: Any = make(case)[0]
    weight = conv.weight.detach()
    matrix = conv_matrix(weight, conv.groups, conv.transposed)
    assert matrix.shape == (conv.out_channels, weight.numel() // conv.out_channels)
    assert torch.equal(conv_parameter(matrix, weight.shape, conv.groups, conv.transposed), weight)
    for channel in range(conv.out_channels):  # a row holds what reaches its output channel, and nothing else
        only = torch.zeros_like(matrix)
        only[channel] = 1
        conv.weight.data = conv_parameter(only, weight.shape, conv.groups, conv.transposed)
        conv.bias = None
        out = conv(torch.ones(1, conv.in_channels, *[8] * len(conv.kernel_size)))
        assert out[0].flatten(1).any(1).nonzero().flatten().tolist() == [channel]


def test_output_sizes_of_a_transposed_convolution() -> None:
    conv, x = make("transposed 2d")
    conv.output_padding = (0, 0)  # type: ignore[assignment]
    module = quantized(conv, "int8", None)
    for size in ([11, 9], [12, 10]):
        exact = nn.functional.conv_transpose2d(
            x, module.weight, module.bias, 2, output_padding=(size[0] - 11, size[1] - 9)
        )
        assert torch.equal(module(x, output_size=size), exact)
    with pytest.raises(ValueError, match="output size"):
        module(x, output_size=[13, 9])


@pytest.mark.parametrize("case", ["2d", "transposed groups"])
def test_the_weight_of_a_quantized_convolution_reads_as_the_parameter_did(case: str) -> None:
    conv: Any = make(case)[0]
    module = quantized(conv, "int8", None)
    exact = quantize(weight_of_conv(conv), FORMATS["int8"]).dequantize()
    assert module.weight.shape == conv.weight.shape
    assert torch.equal(conv_matrix(module.weight, conv.groups, conv.transposed), exact)
    assert torch.equal(module.quantized_weight.dequantize(), exact)
    assert module.bfloat16().weight.dtype is torch.bfloat16 and module.codes.dtype is torch.int8


@pytest.mark.parametrize("case", ["2d", "transposed 2d"])
def test_dequantized_weights_are_kept_until_codes_or_scales_change(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    conv, x = make(case)
    module, made = quantized(conv, "int8", None), []
    dequantize = BlockScaledTensor.dequantize
    monkeypatch.setattr(BlockScaledTensor, "dequantize", lambda *args: made.append(args) or dequantize(*args))
    first = module(x)
    assert torch.equal(module(x), first) and len(made) == 1
    module.weight.zero_()  # a tensor of the caller's own
    assert torch.equal(module(x), first)
    for tensor in (module.codes, module.scale):
        before, count = module(x), len(made)
        tensor.view(-1)[1:] = 1
        changed = module(x)
        assert len(made) == count + 1 and not torch.equal(changed, before)
        values = module.quantized_weight.element_values() * module.scale
        plain = make(case)[0]
        plain.weight.data = conv_parameter(values, module.codes.shape, module.groups, module.transposed)  # type: ignore[union-attr]
        assert torch.allclose(changed, plain(x), atol=1e-5 * float(changed.abs().max()))


@pytest.mark.parametrize("case", ["2d", "same", "transposed 2d", "one sample"])
def test_gradients_pass_straight_through_the_rounding(case: str) -> None:
    conv, x = make(case)
    module, plain = quantized(conv, "int8", "int8_token"), make(case)[0]
    module.bias.requires_grad_()  # type: ignore[union-attr]
    plain.weight.data = module.weight  # type: ignore[union-attr]
    found = []
    for layer in (module, plain):
        given = x.clone().requires_grad_()
        out = layer(given)
        out.backward(torch.linspace(-1, 1, out.numel()).view_as(out))
        found.append((given.grad, layer.bias.grad))
    assert torch.allclose(found[0][0], found[1][0], atol=1e-6) and torch.allclose(found[0][1], found[1][1], atol=1e-4)


@pytest.mark.parametrize("case", ["2d", "reflect", "transposed 1d"])
def test_the_op_is_one_node_of_an_exported_graph(case: str) -> None:
    conv, x = make(case)
    module = quantized(conv, "fp8_channel", "fp8_token")
    batch = torch.export.Dim("batch")
    exported = torch.export.export(module, (x,), dynamic_shapes=({0: batch},))
    assert [n.target for n in exported.graph.nodes if "quant" in str(n.target)] == [torch.ops.quant.conv.default]
    more = torch.cat([x, x])
    assert torch.equal(exported.module()(more), module(more))
