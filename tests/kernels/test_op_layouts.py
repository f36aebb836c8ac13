"""Fake ops have the shapes, dtypes and strides of real ones, for inputs of any layout: compiled code relies on it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quant.kernels.training.fake_rounding
import quant.kernels.training.grouped_fp8
from quant.formats.format import FORMATS, INPUT_FORMATS
from quant.formats.tensor import quantize
from quant.kernels.linear.conv import QuantConv, weight_of_conv

ops = torch.ops.quant


def layouts(rows: int, columns: int, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    yield "contiguous", torch.randn(2, rows, columns, dtype=dtype)
    yield "transposed", torch.randn(2, columns, rows, dtype=dtype).transpose(1, 2)
    yield "expanded", torch.randn(1, 1, columns, dtype=dtype).expand(2, rows, columns)
    yield "sliced", torch.randn(2, rows, columns + 3, dtype=dtype)[..., 1:-2]


def check(op: Callable[..., Any], *arguments: Any) -> None:
    torch.library.opcheck(op, arguments, test_utils="test_faketensor")


def quantized(kind: type[nn.Conv2d], activation: str | None) -> QuantConv:
    module = kind(8, 16, 3, stride=2)
    weight = quantize(weight_of_conv(module), FORMATS["fp8_channel"])
    return QuantConv(weight, module, INPUT_FORMATS[activation] if activation else None, None)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8", "fp8_group", "int8_token", "fp8"])
@pytest.mark.parametrize("columns", [64, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounded_inputs(format: str, columns: int, dtype: torch.dtype) -> None:
    for _, x in layouts(3, columns, dtype):
        check(ops.round_input.default, x, None, format)
        scale = torch.tensor(0.01) if INPUT_FORMATS[format].is_static else None
        if scale is not None or columns % 32 == 0:
            short = scale if format != "fp8_group" else None
            if format in ("nvfp4", "mxfp8", "fp8"):
                check(ops.round_input_gradient.default, torch.randn_like(x), x, x.clone(), short, format)


def test_gradients_of_weights() -> None:
    weight = torch.randn(64, 96)
    for gradient in (torch.randn(64, 96), torch.randn(96, 64).t()):
        scale = torch.full((64, 6), 0.3)
        check(ops.round_weight_gradient.default, gradient, weight, scale, torch.tensor(1.0), "nvfp4")
        check(ops.round_scale_gradient.default, gradient, weight, scale, torch.tensor(1.0), "nvfp4")


def test_blocks_of_e4m3() -> None:
    for x in (torch.randn(40, 50), torch.randn(50, 40).t()):
        check(ops.e4m3_blocks.default, x, 32, 32, torch.float32)


@pytest.mark.parametrize("activation", [None, "fp8_token"])
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_convolutions_of_channels_last(kind: type[nn.Conv2d], activation: str | None) -> None:
    conv = quantized(kind, activation)
    for x in (torch.randn(2, 8, 7, 7), torch.randn(2, 8, 7, 7).to(memory_format=torch.channels_last)):
        check(
            ops.conv.default, x, conv.codes, conv.scale, conv.bias, None, "fp8_channel", activation or "", conv.stride,
            conv.op_padding, conv.dilation, conv.transposed, conv.output_padding, conv.groups,
        )  # fmt: skip


@pytest.mark.parametrize("activation", [None, "fp8_token"])
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_compiled_convolutions_have_the_gradients_of_eager_ones(kind: type[nn.Conv2d], activation: str | None) -> None:
    conv = quantized(kind, activation)
    conv.bias.requires_grad_()
    dense = kind(8, 16, 3, stride=2)
    dense.load_state_dict({"weight": conv.weight, "bias": conv.bias})
    for layout in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(2, 8, 7, 7).to(memory_format=layout).requires_grad_()
        gradients = torch.autograd.grad(conv(x).square().sum(), (x, conv.bias))
        compiled = torch.compile(lambda x: conv(x).square().sum(), backend="aot_eager")
        for own, of_compiled in zip(gradients, torch.autograd.grad(compiled(x), (x, conv.bias)), strict=True):
            torch.testing.assert_close(of_compiled, own)
        if activation is None:
            expected = torch.autograd.grad(dense(x).square().sum(), (x, dense.bias))
            torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-4)


def test_compiled_rounding_equals_eager() -> None:
    def loss(x: Tensor) -> Tensor:
        rounded = quant.kernels.training.fake_rounding.round_input(x.t() * 1.0, INPUT_FORMATS["mxfp8"], None)
        return (rounded * torch.arange(33.0)).sum()

    x = torch.randn(33, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(loss(x), x)
    (compiled,) = torch.autograd.grad(torch.compile(loss, backend="aot_eager")(x), x)
    assert torch.equal(compiled, expected)


def test_an_expert_without_rows_has_scales_of_one() -> None:
    x, ends = torch.randn(128, 40), torch.tensor([64, 64, 128], dtype=torch.int32)
    codes, scale = ops.e4m3_columns(x, ends, False, None)
    assert (scale[1] == 1).all()
    for begin, end, own in ((0, 64, scale[0]), (64, 128, scale[2])):
        error = codes[:, begin:end].float() * own[:, None] - x[begin:end].t()
        assert (error.abs() <= x[begin:end].t().abs() / 16 + own[:, None] * 2**-10).all()
    codes, scale = ops.e4m3_columns(x[:0], ends * 0, False, None)
    assert codes.shape == (40, 0) and (scale == 1).all()


def test_each_op_is_defined_once() -> None:
    # vLLM's plug-in and training may be in one process, and PyTorch refuses a second definition.
    package, names = Path(quant.__file__).parents[1], []
    for room in ("calibration", "export", "kernels", "quant"):
        for file in sorted((package / room).rglob("*.py")):
            text = file.read_text(encoding="utf-8")
            names += re.findall(r'(?:register|library\.define)\(\s*"(quant::\w+)"', text)
    assert len(names) > 30 and sorted(names) == sorted(set(names))
