"""NVFP4 weights and rows in E4M3 meet on Hopper's FP8 tensor cores: compiled without a GPU, values tested on one."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="comes with a CUDA build of torch, or: pip install triton")

from assembler import assemble
from interpreter import interpreted

from quant.formats.format import FORMATS
from quant.formats.tensor import fake_quantize, quantize
from quant.kernels.base.hardware import current
from quant.kernels.base.ptx import CompiledKernel
from quant.kernels.base.weight_layout import prepack
from quant.kernels.linear import sm90_codes_gemm_many
from quant.kernels.linear.sm90_e4m3_rows import multiply_in_e4m3, rows_to_e4m3
from quant.kernels.linear.tiles import prefill_tiles
from quant.recipes.gpus import GPUS

SIZES = ((256, 1), (192, 1), (144, 1), (128, 1), (128, 2), (64, 1))


def columns_in_order(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The values of rows in E4M3, with their columns as in x."""
    value = codes.double() * scale.double()[:, None]
    return value.unflatten(1, (-1, 4, 2, 2)).transpose(2, 3).flatten(1)


@pytest.mark.parametrize("columns", [64, 192, 256])
def test_rows_are_those_of_the_format_in_another_order(columns: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, columns).bfloat16()
    with interpreted():
        codes, scale = rows_to_e4m3(x)
    values = columns_in_order(codes, scale)
    assert torch.equal(values.float(), fake_quantize(x.float(), FORMATS["fp8_token"]))


@pytest.mark.parametrize(
    "size", [pytest.param(size, marks=[] if size == (144, 1) else pytest.mark.slow) for size in SIZES]
)
def test_words_go_from_registers_into_wgmma_as_e4m3(
    compile_matmul: Callable[..., CompiledKernel], size: tuple[int, int]
) -> None:
    from triton.experimental.gluon import language as gl

    tiles = prefill_tiles(*size, GPUS["h100"], x_bytes=1)
    wide = 1 << tiles.block_m.bit_length() - 1
    tail = tiles.block_m - wide

    def tile_of(name: str, dtype: object, rows: int, columns: int) -> str:
        layout = gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)
        return f"tensordesc<{name}[{rows}, {columns}],{layout!r}>"

    x, y = ("fp8e4nv", gl.float8e4nv), ("bf16", gl.bfloat16)
    across = 128 // tiles.groups
    types = {"x_map": tile_of(*x, wide, 64), "x_tail_map": tile_of(*x, tail or wide, 64), "block_scale": "*fp32"}
    types |= {"y_map": tile_of(*y, wide, across), "y_tail_map": tile_of(*y, tail or wide, across), "offsets": "*i32"}
    constants = sm90_codes_gemm_many.constants_of(tiles, "words", experts=0, split=True, has_bias=True, in_e4m3=True)
    most = sm90_codes_gemm_many.max_registers(tiles)
    options = {"num_warps": 8 // tiles.groups} | ({"maxnreg": most} if most else {})
    kernel = compile_matmul(
        sm90_codes_gemm_many.sm90_codes_gemm_many, wide, tiles.depth, types, {"constants": constants}, options
    )
    products = re.findall(
        r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k32\.f32\.e4m3\.e4m3\s+\{[^}]*\},\s*(\S)", kernel.ptx
    )
    # The left operand is in registers, and a tile of 64 columns takes two products.
    assert all(operand == "{" for _, operand in products)
    assert {int(tokens) for tokens, _ in products} == {size for size in (wide, tail) if size}
    assert kernel.shared <= 227 << 10
    assert assemble(kernel).spilled <= 8


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [64, 128, 192, 256, 320, 512, 1600, 2880, 4096, 14336, 28672])
def test_rows_are_those_of_the_format_on_a_gpu(columns: int) -> None:
    """By columns, as the compiler gives a thread one word or many."""
    x = torch.randn(37, columns, device="cuda", dtype=torch.bfloat16)
    values = columns_in_order(*rows_to_e4m3(x))
    assert torch.equal(values.float(), fake_quantize(x.float(), FORMATS["fp8_token"]))


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES)
def test_agrees_with_float64_on_a_gpu(size: tuple[int, int]) -> None:
    """Whole tiles and cut ones, ends of all axes, against the rounded operands."""
    if not current().has_wgmma:
        pytest.skip("the prepacked layout is Hopper's")
    torch.manual_seed(0)
    for rows, columns, tokens in ((448, 1600, 333), (192, 576, 130), (64, 128, 5), (448, 4096, 2000)):
        weight = quantize(torch.randn(rows, columns, device="cuda"), FORMATS["nvfp4"])
        assert weight.global_scale is not None
        # Without the global scale values are exact, so that ties are rounded to even.
        plain = replace(weight, global_scale=torch.ones_like(weight.global_scale)).dequantize()
        rounded = (plain / 8).to(torch.float8_e4m3fn).double() * 8 * weight.global_scale.double()
        x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
        bias = torch.randn(rows, device="cuda", dtype=torch.bfloat16)
        y = multiply_in_e4m3(x, prepack(weight), bias, prefill_tiles(*size, current(), x_bytes=1))
        exact = columns_in_order(*rows_to_e4m3(x)) @ rounded.T + bias.double()
        # FP8 products keep 14 bits of their sums.
        assert float((y.double() - exact).norm() / exact.norm()) < 2**-8
