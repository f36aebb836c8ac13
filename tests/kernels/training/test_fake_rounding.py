"""The kernels that round weights in training, interpreted, give the oracle's values bit for bit, and its mask."""

import math
from itertools import product

import pytest
import torch

pytest.importorskip("triton", reason="comes with a CUDA build of torch, or: pip install triton")

from assembler import assemble
from interpreter import interpreted
from slow_cases import quick_cases

from quant.formats.format import FORMATS
from quant.formats.rounding import round_to
from quant.formats.tensor import quantize, round_activation, round_with_scale
from quant.kernels.base.ptx import compile_kernel
from quant.kernels.training import portable_fake_rounding
from quant.kernels.training.fake_rounding import measured_scale


def weight(rows: int = 37, columns: int = 320, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows of very different sizes, with a block of zeros and a value near nothing."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(rows, columns, generator=generator) * torch.randn(rows, 1, generator=generator).exp()
    w[1, :64], w[2, 0], w[3, 64:96] = 0, 1e-30, 3e-20
    return w.to(dtype)


def scales(w: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Block scale values and second level by which the oracle quantizes, float32."""
    quantized = quantize(w.float(), FORMATS[name])
    return measured_scale(w.float(), FORMATS[name], "max", quantized.global_scale, w.dtype), quantized.global_scale


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_values_under_given_scales_are_those_of_the_oracle(name: str, dtype: torch.dtype) -> None:
    format, w = FORMATS[name], weight(dtype=dtype)
    scale, second = scales(w, name)
    with interpreted():
        found = portable_fake_rounding.round_weight(w, format, torch.bfloat16, 0.75 * scale, second)
    assert torch.equal(found, round_with_scale(w, format, 0.75 * scale, second, torch.bfloat16))


@pytest.mark.parametrize("name", [n for n, f in FORMATS.items() if portable_fake_rounding.can_measure(f, (37, 320))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_measured_scales_are_those_of_the_oracle(name: str, dtype: torch.dtype) -> None:
    format, w = FORMATS[name], weight(dtype=dtype)
    expected = quantize(w, format)
    with interpreted():
        found = portable_fake_rounding.round_weight(w, format, torch.float32, None, expected.global_scale)
    assert torch.equal(found, expected.dequantize())


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp6", "mxfp8"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_inputs_are_rounded_as_the_oracle_rounds_them(name: str, dtype: torch.dtype) -> None:
    """Under a second level that most inputs exceed, too, and where an input is not finite."""
    format, x = FORMATS[name], weight(dtype=dtype)
    x[4, 5], x[5, 6] = torch.inf, torch.nan
    second = torch.tensor(5e-4) if format.global_scale else None
    with interpreted():
        found = portable_fake_rounding.round_weight(x, format, dtype, None, second)
    assert torch.equal(found.isnan(), (expected := round_activation(x, format, second)).isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("count", [1, 2048, 5000])
def test_gradients_of_inputs_pass_within_the_range(count: int) -> None:
    x, scale = torch.linspace(-9, 9, count).bfloat16(), torch.tensor(0.125)
    x[-1] = 6.0  # at the end of the range
    dy = torch.linspace(1, 2, count)
    with interpreted():
        found = portable_fake_rounding.within(dy, x, scale, 48.0)
    assert torch.equal(found, dy * (x.double().abs() <= 6.0))


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_gradients_of_inputs_are_those_of_an_explicit_graph(name: str, dtype: torch.dtype) -> None:
    """With ties, blocks of zeros and, under a second level, blocks beyond the range and below the smallest scale."""
    format, x = FORMATS[name], weight(dtype=dtype)
    x[6, 3], x[6, 5] = 4.0, -4.0
    second = torch.tensor(5e-4) if format.global_scale else None
    rounded = round_activation(x, format, second)
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    with interpreted():
        found = portable_fake_rounding.input_gradient(dy, x, rounded, format, second)
    leaf = x.double().requires_grad_()
    amax = leaf.unflatten(-1, (-1, format.block[1])).abs().amax(dim=-1, keepdim=True)
    low, high = (0.0, math.inf) if second is None else (6 * 2.0**-9 * 5e-4, 6 * 448 * 5e-4)
    follows = (amax > low) & (amax <= high)
    change = (rounded.double() - x.double()).unflatten(-1, (-1, format.block[1]))
    scaled = torch.where(follows, change / amax.detach().clamp(min=1e-300), 0) * (amax - amax.detach())
    given = (leaf.abs() <= high) * leaf + scaled.flatten(-2)
    (expected,) = torch.autograd.grad(given, leaf, dy.double())
    assert second is None or (bool((~follows).any()) and bool((leaf.abs() > high).any()))
    torch.testing.assert_close(found.double(), expected, rtol=2.0**-7 if dtype is torch.bfloat16 else 1e-5, atol=1e-5)


def test_ties_and_saturation() -> None:
    """Every value of the grid, every tie and its neighbours, and what is beyond."""
    for name in ("nvfp4", "mxfp6", "mxfp6_e3m2", "mxfp8", "mxfp8_e5m2", "int8", "int4"):
        format = FORMATS[name]
        grid = format.element.grid()
        ties = (grid[1:] + grid[:-1]) / 2
        near = [torch.nextafter(ties, torch.tensor(side)) for side in (0.0, torch.inf)]
        x = torch.cat([grid, ties, *near, torch.tensor([1e-38, 1e9, 7.5, 7.51, 8, 8.5])]) * 0.5
        x = torch.cat([x, -x])
        x = torch.nn.functional.pad(x, (0, -len(x) % 128))[None]
        scale = torch.full(format.scale_shape(x.shape), 0.5)
        with interpreted():
            found = portable_fake_rounding.round_weight(x, format, torch.float32, scale, None)
        assert torch.equal(found, round_with_scale(x, format, scale, None)), name


@pytest.mark.parametrize("name", ["nvfp4", "fp8_block", "int8", "int4", "fp8"])
def test_the_mask_passes_what_is_in_range(name: str) -> None:
    format, w = FORMATS[name], weight()
    scale, second = scales(w, name)
    scale *= 0.5
    dy = torch.randn(w.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    with interpreted():
        found = portable_fake_rounding.masked_gradient(dy, w, format, scale, second)
    rows, columns = format.block_shape(w.shape)
    step = scale.double() * (1.0 if second is None else second.double())
    step = step.repeat_interleave(rows, 0)[: len(w)].repeat_interleave(columns, 1)[:, : w.shape[1]]
    lowest = -8 if name == "int4" else -format.element.max
    inside = (w.double() >= lowest * step) & (w.double() <= format.element.max * step)
    assert 0 < int((~inside).sum()) < w.numel() / 2
    assert torch.equal(found, dy.float() * inside)


@pytest.mark.parametrize("name", [n for n, f in FORMATS.items() if portable_fake_rounding.can_sum(f, (37, 384))])
def test_gradients_of_scales_are_summed_over_their_blocks(name: str) -> None:
    """Against LSQ's formula in float64; a block in five is beyond its range."""
    format, w = FORMATS[name], weight(columns=384)
    scale, second = scales(w, name)
    scale = scale * torch.where(torch.arange(scale.numel()).view(scale.shape) % 5 == 0, 0.25, 1.0)
    dy = torch.randn(w.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    with interpreted():
        found = portable_fake_rounding.scale_gradient(dy, w, format, scale, second)
    columns, whole = format.block[1], 1.0 if second is None else float(second)
    step = (scale * whole).repeat_interleave(columns, 1)
    steps = w / step  # float32, so that ties fall as they do there
    lowest = -8 if name.startswith("int4") else -format.element.max
    inside = (w >= lowest * step) & (w <= format.element.max * step)
    slope = dy.double() * (round_to(steps, format.element).double() - torch.where(inside, steps, 0.0).double())
    expected = slope.unflatten(1, (-1, columns)).sum(2) * whole
    assert 0 < int((~inside).sum()) < w.numel() / 3 and found.shape == scale.shape
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("arch", "columns", "integer"),
    quick_cases(
        ((arch, *case) for arch in (89, 90, 120) for case in ((16, False), (128, True))),
        lambda arch, columns, integer: integer == (arch == 90),
    ),
)
def test_gradients_of_scales_compile_without_scratch_memory(arch: int, columns: int, integer: bool) -> None:
    pointers = {"gradient": "*bf16", "weight": "*fp32", "scale": "*fp32", "global_scale": "*fp32", "out": "*fp32"}
    sizes = dict.fromkeys(("N", "K", "dy_stride", "w_stride", "scale_stride"), "i32")
    constants = {"mantissa": 1, "lowest": 1.0, "top": 4.0, "integer": integer, "largest": 6.0, "least": -6.0, "rows": 1,
                 "columns": columns, "has_global": not integer, "block_n": 16, "block_k": 256}  # fmt: skip
    compiled = compile_kernel(
        portable_fake_rounding.slope_kernel, pointers | sizes, constants, arch=arch, num_warps=8, num_stages=1
    )
    assert assemble(compiled).spilled == 0


@pytest.mark.parametrize(
    ("arch", "columns", "has_scale"),
    quick_cases(
        ((arch, *case) for arch in (89, 90, 120) for case in ((16, True), (32, False))),
        lambda arch, columns, has_scale: has_scale == (arch == 90),
    ),
)
def test_gradients_of_inputs_compile_without_scratch_memory(arch: int, columns: int, has_scale: bool) -> None:
    pointers = {"gradient": "*bf16", "x": "*bf16", "rounded": "*bf16", "scale": "*fp32", "out": "*bf16"}
    sizes = dict.fromkeys(("N", "K", "dy_stride", "stride", "rounded_stride"), "i32")
    constants = {"least": 0.01171875, "most": 2688.0, "columns": columns, "has_scale": has_scale,
                 "block_n": 16, "block_k": 256}  # fmt: skip
    compiled = compile_kernel(
        portable_fake_rounding.input_kernel, pointers | sizes, constants, arch=arch, num_warps=8, num_stages=1
    )
    assert assemble(compiled).spilled == 0


@pytest.mark.parametrize(
    ("arch", "measured"),
    quick_cases(product((89, 90, 120), (True, False)), lambda arch, measured: measured == (arch == 90)),
)
def test_compiles_without_scratch_memory(arch: int, measured: bool) -> None:
    signature = {"weight": "*fp32", "scale": "*fp32", "global_scale": "*fp32", "out": "*bf16", "N": "i32", "K": "i32",
                 "w_stride": "i32", "scale_stride": "i32"}  # fmt: skip
    constants = {"mantissa": 1, "lowest": 1.0, "top": 4.0, "integer": False, "kind": "e4m3", "measured": measured,
                 "largest": 6.0, "least": -6.0, "rows": 1, "columns": 16, "has_global": True,
                 "block_n": 16, "block_k": 256}  # fmt: skip
    compiled = compile_kernel(
        portable_fake_rounding.round_kernel, signature, constants, arch=arch, num_warps=8, num_stages=1
    )
    assert assemble(compiled).spilled == 0
