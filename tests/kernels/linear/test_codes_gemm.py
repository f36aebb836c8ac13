"""The portable matmul, interpreted, is compared with float64: every code at every scale, odd shapes, split K."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="comes with a CUDA build of torch, or: pip install triton")

from assembler import assemble
from interpreter import interpreted
from slow_cases import quick_cases

from quant.formats.format import FORMATS, Format
from quant.formats.rounding import pack
from quant.formats.tensor import BlockScaledTensor, quantize
from quant.kernels.base.launch import arrival_counters
from quant.kernels.base.ptx import CompiledKernel
from quant.kernels.linear import portable_codes_gemm
from quant.kernels.linear.tiles import Tiles

TILES = {
    "plain": Tiles(16, 32, 128),
    "swap": Tiles(16, 64, 64, swap=True),
    "split": Tiles(16, 32, 64, splits=3),
    "split-swap": Tiles(32, 64, 32, splits=2, swap=True),
}


def codes_gemm(x: torch.Tensor, weight: BlockScaledTensor, bias: torch.Tensor | None, tiles: Tiles) -> torch.Tensor:
    return portable_codes_gemm.prepare_codes_gemm(x, weight, bias, tiles)(x, weight, bias)


def every_code_at_every_scale(format: Format) -> BlockScaledTensor:
    """`[scales, codes]`: row r has scale code r in all its blocks, column c the element code c."""
    count = 1 << format.element.bits
    columns = max(count, format.block[1])
    codes = torch.arange(columns).remainder(count).to(torch.uint8)
    element, scales = format.element.values()[codes.int()], format.scale.values()
    if format.element.bits > 6:
        codes = torch.where(element.isfinite(), codes, 0)  # NaN has no product to compare
    row_codes = torch.arange(len(scales))[scales.isfinite()].to(torch.uint8)
    rows = len(row_codes)
    stored = codes.expand(rows, -1).contiguous()
    if format.element.bits in (4, 6):
        stored = pack(stored, format.element.bits)
    else:
        assert format.element.torch_dtype is not None
        stored = stored.view(format.element.torch_dtype)
    scale = row_codes[:, None].expand(rows, columns // format.block[1]).contiguous()
    if format.scale.torch_dtype is not torch.uint8:
        scale = scale.view(format.scale.torch_dtype)
    second = torch.ones(()) if format.global_scale else None
    return BlockScaledTensor(stored, scale, format, (rows, columns), second)


CODED = [name for name, f in FORMATS.items() if not f.scale.is_wide]


@pytest.mark.parametrize("format", CODED)
def test_every_code_at_every_scale_dequantizes_exactly(format: str) -> None:
    weight = every_code_at_every_scale(FORMATS[format])
    for dtype in (torch.float32, torch.bfloat16):
        with interpreted():
            got = portable_codes_gemm.dequantize_codes(weight, dtype)
        # Equal as numbers: a negative zero may lose its sign.
        assert torch.equal(got, weight.dequantize(dtype))


@pytest.mark.parametrize(
    ("format", "tiles"),
    quick_cases(
        product(CODED, ("plain", "swap")),
        lambda format, tiles: CODED.index(format) % 2 == (tiles == "swap"),
    ),
)
def test_every_code_at_every_scale_multiplies_exactly(format: str, tiles: str) -> None:
    """By the identity: y is the weight, rounded as the oracle rounds it. Where that is infinite, 0 · inf spoils it."""
    weight = every_code_at_every_scale(FORMATS[format])
    finite = weight.dequantize(torch.bfloat16).isfinite().all(dim=1)
    weight = replace(
        weight, codes=weight.codes[finite], scale=weight.scale[finite], shape=(int(finite.sum()), weight.shape[1])
    )
    x = torch.eye(weight.shape[1], dtype=torch.bfloat16)
    with interpreted():
        y = codes_gemm(x, weight, None, TILES[tiles])
    assert torch.equal(y, weight.dequantize(torch.bfloat16).T)


def close_to_float64(y: torch.Tensor, x: torch.Tensor, weight: BlockScaledTensor, bias: torch.Tensor | None) -> None:
    """Each product carries one rounding of the weight, the sum those of float32, the result one more."""
    unit = torch.finfo(y.dtype).eps / 2
    dense = weight.dequantize(torch.float64)
    exact, magnitude = x.double() @ dense.T, x.double().abs() @ dense.abs().T
    if bias is not None:
        exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
    bound = magnitude * (unit + x.shape[-1] * 2.0**-23) + exact.abs() * 2 * unit + 1e-30
    assert y.shape == exact.shape
    assert bool(((y.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize(
    ("format", "tiles", "dtype"),
    quick_cases(
        product(FORMATS, TILES, (torch.bfloat16, torch.float16)),
        lambda format, tiles, dtype: (
            (list(FORMATS).index(format) + list(TILES).index(tiles)) % 2 == (dtype is torch.float16)
        ),
    ),
    ids=str,
)
def test_odd_shapes_against_float64(format: str, tiles: str, dtype: torch.dtype) -> None:
    """M, N and K are multiples of nothing; K ends in a short block and, for packed codes, in a half-used byte."""
    tokens, rows, columns = 5, 77, 203
    weight = quantize(torch.randn(rows, columns), FORMATS[format])
    x, bias = torch.randn(tokens, columns).to(dtype), torch.randn(rows).to(dtype)
    with interpreted():
        y = codes_gemm(x, weight, bias, TILES[tiles])
    close_to_float64(y, x, weight, bias)


def test_strided_rows_and_no_tokens() -> None:
    weight = quantize(torch.randn(40, 64), FORMATS["nvfp4"])
    wide = torch.randn(6, 200).bfloat16()
    with interpreted():
        y = codes_gemm(wide[::2, 8:72], weight, None, TILES["plain"])
        empty = codes_gemm(wide[:0, :64], weight, None, TILES["plain"])
    close_to_float64(y, wide[::2, 8:72], weight, None)
    assert empty.shape == (0, 40)


def test_nothing_is_written_outside_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result lies in the middle of a poisoned buffer; every element of it is written, and none beside it."""
    tokens, rows, guard = 5, 77, 512
    poison = torch.full((2 * guard + tokens * rows,), -12345.0, dtype=torch.bfloat16)
    weight, x = quantize(torch.randn(rows, 203), FORMATS["mxfp4"]), torch.randn(tokens, 203).bfloat16()
    inner = poison[guard : guard + tokens * rows].view(tokens, rows)
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor,
        "new_empty",
        lambda self, *shape, **options: inner if shape == (5, 77) else new_empty(self, *shape, **options),
    )
    for tiles in TILES.values():
        poison.fill_(-12345.0)
        with interpreted():
            y = codes_gemm(x, weight, None, tiles)
        close_to_float64(y, x, weight, None)
        assert bool((poison[:guard] == -12345).all()) and bool((poison[-guard:] == -12345).all())


def test_arrival_counters_are_left_at_zero() -> None:
    weight, x = quantize(torch.randn(70, 256), FORMATS["int4"]), torch.randn(3, 256).bfloat16()
    with interpreted():
        first = codes_gemm(x, weight, None, TILES["split"])
        assert not arrival_counters(x, 1).any()
        assert torch.equal(codes_gemm(x, weight, None, TILES["split"]), first)


# Compiled for GPUs that are not here

_POINTER = {"e2m1": "*u8", "e2m3": "*u8", "e3m2": "*u8", "int4": "*u8", "int8": "*i8"} | {
    "e4m3": "*fp8e4nv",
    "e5m2": "*fp8e5",
}


def compiled_for(kernel: Any, signature: dict[str, str], constants: dict[str, Any], arch: int, tiles: Tiles) -> Any:
    """As at run time for sizes and pointers that 16 divides."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    types = {name: signature.get(name, "constexpr") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in signature}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, types, constexprs=values, attrs=aligned)
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    result = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"enable_fp_fusion": True, **options})
    return CompiledKernel(kernel.__name__, result.asm["ptx"], arch, (), tiles.warps, result.metadata.shared)


TARGETS = [
    (90, Tiles(16, 64, 128, 4, True, 4, 3), "wgmma.mma_async"),
    (90, Tiles(128, 128, 64, 1, True, 8, 3), "wgmma.mma_async"),
    (120, Tiles(16, 64, 128, 4, False, 4, 3), "mma.sync"),
]


@pytest.mark.parametrize(
    ("format", "arch", "tiles", "instruction"),
    quick_cases(
        [
            (format, *target)
            for format in ("nvfp4", "mxfp4", "mxfp8", "fp8_block", "int4", "int4_g32")
            for target in TARGETS
        ],
        lambda format, arch, tiles, instruction: tiles.block_m == 128 or format == "nvfp4",
    ),
)
def test_compiles_to_tensor_core_instructions_without_spills(
    format: str, arch: int, tiles: Tiles, instruction: str
) -> None:
    form = FORMATS[format]
    scale = "*fp32" if form.scale.is_wide else "*fp8e4nv" if form.global_scale else "*u8"
    signature = {"x": "*bf16", "codes": _POINTER[form.element.name], "scale": scale, "global_scale": "*fp32"}
    signature |= {"bias": "*bf16", "y": "*bf16", "partial": "*fp32", "counter": "*i32"}
    sizes = ("M", "N", "K", "x_stride", "codes_stride", "scale_stride", "codes_width", "splits")
    signature |= dict.fromkeys(sizes, "i32")
    constants = portable_codes_gemm.format_constants(form) | {"has_global": form.global_scale, "has_bias": False}
    constants |= {"split": tiles.splits > 1, "swap": tiles.swap}
    constants |= {"block_m": tiles.block_m, "block_n": tiles.block_n, "block_k": tiles.block_k}
    compiled = compiled_for(portable_codes_gemm.codes_gemm_kernel, signature, constants, arch, tiles)
    assert instruction in compiled.ptx
    assert assemble(compiled).spilled == 0
