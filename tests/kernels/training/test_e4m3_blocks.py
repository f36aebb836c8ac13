"""The kernel that rounds blocks to E4M3 under powers of two, interpreted, gives the values of `round_operand`."""

import pytest
import torch

pytest.importorskip("triton", reason="comes with a CUDA build of torch, or: pip install triton")

from assembler import assemble
from interpreter import interpreted

from quant.formats.format import FORMATS
from quant.kernels.base.ptx import compile_kernel
from quant.kernels.training.portable_grouped_fp8 import e4m3_blocks_kernel, round_e4m3_blocks, tile_of
from quant.training.low_precision.backends import takes_recipe
from quant.training.low_precision.operands import round_operand
from quant.training.low_precision.training_recipe import RECIPES

BLOCKS = {"fp8_group": (1, 128), "fp8_block": (128, 128), "mxfp8": (1, 32)}


def matrix(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of very different sizes, a block of zeros, and numbers that are subnormal in E4M3."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, columns, generator=generator) * torch.randn(rows, 1, generator=generator).mul(4).exp()
    x[0, :128], x[1, 1] = 0, 1e9
    x[2, :4] = torch.tensor([448.0, -450.0, 1.0, 2.0**-9])
    return x.to(dtype)


def expected(x: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales."""
    recipe = RECIPES["mxfp8" if name == "mxfp8" else "fp8_block"]
    assert takes_recipe(recipe)
    operand = round_operand(x, FORMATS[name], recipe)
    # A block of zeros has any scale: the oracle's is 1, or the least, by its format.
    return operand.values, operand.scale


@pytest.mark.parametrize("casts", [True, False])
@pytest.mark.parametrize("name", BLOCKS)
def test_values_are_those_of_the_oracle(name: str, casts: bool) -> None:
    height, width = BLOCKS[name]
    for dtype in (torch.float32, torch.bfloat16):
        for x in (matrix(37, 144, dtype), matrix(144, 37, dtype).t()):
            for transposed in (False, True):
                blocks = (width, height) if transposed else (height, width)
                oracle = [m.t() if transposed else m for m in expected(x.t() if transposed else x, name)]
                with interpreted():
                    values, scale = round_e4m3_blocks(x, *blocks, torch.float32, casts)
                    narrow, _ = round_e4m3_blocks(x, *blocks, torch.bfloat16, casts)
                assert values.is_contiguous() and torch.equal(values, oracle[0]) and torch.equal(narrow.float(), values)
                assert scale.shape == oracle[1].shape and bool(((scale == oracle[1]) | (oracle[1] == 1)).all())
                for got, reference in zip((values, scale), torch.ops.quant.e4m3_blocks(x, *blocks, dtype), strict=True):
                    assert torch.equal(got, reference.float())


def test_numbers_that_are_not_finite_spoil_their_block_alone() -> None:
    x = torch.ones(64, 256)
    x[3, 5], x[7, 200] = torch.nan, torch.inf
    with interpreted():
        values, scale = round_e4m3_blocks(x, 1, 128, torch.bfloat16)
    assert values[3, :128].isnan().all() and values[7, 128:].isnan().all()
    assert int(values.isnan().sum()) == 256 and scale.isnan().nonzero().tolist() == [[3, 0], [7, 1]]
    reference = torch.ops.quant.e4m3_blocks(x, 1, 128, torch.bfloat16)
    assert torch.equal(reference[0].isnan(), values.isnan()) and torch.equal(reference[1].isnan(), scale.isnan())


def test_the_op_is_what_compilers_are_told() -> None:
    torch.library.opcheck(torch.ops.quant.e4m3_blocks.default, (torch.randn(16, 32).t(), 1, 32, torch.bfloat16))


@pytest.mark.parametrize("arch", [90, 120])
@pytest.mark.parametrize("block", [(1, 128), (128, 1), (128, 128)], ids=str)
def test_compiles_without_scratch_memory(block: tuple[int, int], arch: int) -> None:
    pointers = {"x": "*bf16", "out": "*bf16", "scales": "*fp32"}
    sizes = dict.fromkeys(("R", "C", "row_stride", "column_stride"), "i32")
    tile = tile_of(*block)
    warps = tile.pop("num_warps")
    constants = {"height": block[0], "width": block[1], "casts": True, **tile}
    compiled = compile_kernel(e4m3_blocks_kernel, pointers | sizes, constants, arch=arch, num_warps=warps, num_stages=1)
    assert assemble(compiled).spilled == 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", BLOCKS)
def test_on_a_gpu_values_are_those_of_the_oracle(name: str) -> None:
    for height, width in (BLOCKS[name], BLOCKS[name][::-1]):
        for dtype in (torch.float32, torch.bfloat16):
            for x in (matrix(300, 528, dtype), matrix(528, 300, dtype).t()):
                on_gpu = torch.ops.quant.e4m3_blocks(x.cuda(), height, width, torch.bfloat16)
                reference = torch.ops.quant.e4m3_blocks(x, height, width, torch.bfloat16)
                assert all(torch.equal(got.cpu(), r) for got, r in zip(on_gpu, reference, strict=True))
