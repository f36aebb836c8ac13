"""Quantizers, interpreted, give the codes of the oracle."""

import re

import pytest
import torch

pytest.importorskip("triton", reason="comes with a CUDA build of torch, or: pip install triton")

import triton
import triton.language as tl
from assembler import assemble
from interpreter import interpreted

from quant.formats.format import E2M1, E8M0, FORMATS, INPUT_FORMATS, Format
from quant.formats.rounding import encode
from quant.formats.tensor import fake_quantize, quantize
from quant.kernels.base.portable_small_floats import encode_e2m1, quotient_to_code, reciprocal
from quant.kernels.base.ptx import compile_kernel
from quant.kernels.rounding import portable_casts
from quant.kernels.rounding.portable_casts import nvfp4_rows_to_codes_kernel

STATIC = torch.tensor(0.02)


def rows(tokens: int = 5, columns: int = 384, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Rows of very different sizes, one that is zero for a while, one with a value near nothing."""
    x = torch.randn(tokens, columns) * torch.randn(tokens, columns).exp()
    x[1, :128], x[2, 0] = 0, 1e-30
    return x.to(dtype)


def second_level(format: Format) -> dict[str, torch.Tensor]:
    if format.block == (0, 0):
        return {"scale": STATIC}
    return {"global_scale": STATIC} if format.global_scale else {}


@triton.jit
def _encode(x, out, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(out + i, encode_e2m1(tl.load(x + i)).to(tl.uint8))


def test_e2m1_codes_on_and_around_every_tie() -> None:
    grid = E2M1.grid()
    ties = (grid[1:] + grid[:-1]) / 2
    near = torch.cat([grid, ties, torch.nextafter(ties, torch.tensor(0.0)), torch.nextafter(ties, torch.tensor(9.0))])
    x = torch.cat([near, torch.tensor([1e-38, 1e-3, 7.0, 1e30, torch.inf]), torch.rand(2048) * 7])
    x = torch.cat([x, -x])
    padded = torch.zeros(8192)
    padded[: len(x)] = x
    out = torch.empty(8192, dtype=torch.uint8)
    with interpreted():
        _encode[(1,)](padded, out, 8192)
    assert torch.equal(out, encode(padded, E2M1))


@pytest.mark.parametrize("format", portable_casts.FORMATS_OUT)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("static", [False, True])
def test_codes_are_those_of_the_oracle(format: str, dtype: torch.dtype, static: bool) -> None:
    form, x = INPUT_FORMATS[format], rows(dtype=dtype)
    options = second_level(form) if static else {}
    with interpreted():
        quantized = portable_casts.quantize(x, form, **options)
    assert torch.equal(quantized.dequantize(), fake_quantize(x.float(), form, **options))
    assert quantized.codes.shape == form.codes_shape(x.shape)
    if form.block != (0, 0):
        assert quantized.scale.shape == form.scale_shape(x.shape)


def test_e8m0_scales_at_both_ends() -> None:
    """Blocks whose ideal scale is a power of two, just above one, zero, and below the smallest."""
    amax = torch.tensor([448.0, 449.0, 896.0, 0.0, 448 * 2.0**-126, 448 * 2.0**-127, 1e-38, 3e38])
    x = torch.zeros(len(amax), 32)
    x[:, 3] = amax
    x = x.bfloat16()
    with interpreted():
        quantized = portable_casts.quantize(x, FORMATS["mxfp8"])
    assert torch.equal(quantized.scale[:, 0], encode(x[:, 3].float() / 448, E8M0))


@pytest.mark.parametrize("name", ["fp8_token", "int8_token"])
def test_rows_of_any_size_have_correctly_rounded_quotients(name: str) -> None:
    x = torch.randn(6, 512) * torch.tensor([1e-37, 3e-21, 1e-19, 1.0, 1e30, 1e37])[:, None]
    x = x.to(torch.bfloat16)
    with interpreted():
        found = portable_casts.quantize(x, FORMATS[name])
    expected = quantize(x.float(), FORMATS[name])
    assert torch.equal(found.scale.view(-1), expected.scale.view(-1))
    assert torch.equal(found.codes.view(torch.uint8), expected.codes.view(torch.uint8))


@triton.jit
def _divide(x, step, out, n: tl.constexpr):
    i = tl.arange(0, n)
    divisor = tl.load(step + i)
    tl.store(out + i, quotient_to_code(tl.load(x + i), divisor, reciprocal(divisor)))


@pytest.mark.parametrize("tie", [0.25, 0.75, 1.25, 2.5, 3.5, 5.0, 1.3125, 15 / 16, 126.5])
def test_quotients_beside_a_tie_are_on_its_side(tie: float) -> None:
    """Of the numbers of 11 bits, the two beside a tie of E2M1, E4M3 or INT8, for steps of many mantissas."""
    count = 1 << 16
    step = torch.cat([torch.arange(1 << 23, (1 << 23) + count // 4), torch.arange((1 << 24) - count // 4, 1 << 24)])
    step = torch.cat([step, torch.randint(1 << 23, 1 << 24, (count // 2,))]).double()
    unit = torch.exp2((step * tie).log2().floor() - 10)
    for x in ((step * tie / unit).floor() * unit, ((step * tie / unit).floor() + 1) * unit):
        out = torch.empty(count)
        with interpreted():
            _divide[(1,)](x.float(), step.float(), out, count)
        expected = (x / step).float()
        assert torch.equal((out - tie).sign(), (expected - tie).sign())


def test_rows_that_begin_anywhere() -> None:
    """Pairs of BF16 are read as words, so rows at odd places are copied first."""
    wide = torch.randn(6, 1043).bfloat16()
    form, options = FORMATS["nvfp4"], second_level(FORMATS["nvfp4"])
    for x in (wide[:, 3:515], wide[:, 4:516], wide[::2, 2:514], wide.flatten()[1:3073].view(6, 512)):
        with interpreted():
            quantized = portable_casts.quantize(x, form, **options)
        assert torch.equal(quantized.dequantize(), fake_quantize(x.float(), form, **options))


@pytest.mark.parametrize("arch", [90, 120])
def test_ptx_of_nvfp4(arch: int) -> None:
    """16 bytes at a time, nothing but the 256 scales through shared memory, no register spilled."""
    signature = {"x": "*bf16", "codes": "*u8", "scale": "*fp8e4nv", "global_scale": "*fp32", "K": "i32"}
    constants = {
        "largest": 6.0, "flat": True, "width": 4096, "whole": True, "four_or_six": False,
        "x_stride": 4096,
    }  # fmt: skip
    compiled = compile_kernel(nvfp4_rows_to_codes_kernel, signature, constants, arch=arch, num_warps=4, num_stages=1)
    assert compiled.shared == 256
    assert len(re.findall(r"ld\.global\.v4\.b32", compiled.ptx)) == 4
    assert "shfl.sync" not in compiled.ptx
    assert assemble(compiled).spilled == 0


def test_mistakes_name_the_argument() -> None:
    x = rows()
    with pytest.raises(ValueError, match=r"x \[5, 384\] to int4: no such kernel; activation formats: nvfp4"):
        portable_casts.quantize(x, FORMATS["int4"])
    with pytest.raises(ValueError, match=r"x is torch\.float32, expected float16 or bfloat16"):
        portable_casts.quantize(x.float(), FORMATS["mxfp8"])
    with pytest.raises(ValueError, match="last axis must be a multiple of 32"):
        portable_casts.quantize(x[:, :200], FORMATS["mxfp8"])
    with pytest.raises(ValueError, match=r"global_scale is \[2\] torch\.float32, expected one floating-point number"):
        portable_casts.quantize(x, FORMATS["nvfp4"], global_scale=torch.ones(2))
    with pytest.raises(ValueError, match="scale is on meta, x on cpu"):
        portable_casts.quantize(x, FORMATS["fp8"], scale=torch.ones((), device="meta"))
    with pytest.raises(ValueError, match="fp8_token measures its own"):
        portable_casts.quantize(x, FORMATS["fp8_token"], scale=STATIC)
    with pytest.raises(ValueError, match="mxfp8 has no global scale"):
        portable_casts.quantize(x, FORMATS["mxfp8"], global_scale=STATIC)
