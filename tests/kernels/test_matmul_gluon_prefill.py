"""Hopper's kernel for many tokens: compiled and read without a GPU, its dealing in Python; its values on a GPU."""

import re
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

pytest.importorskip("triton", reason="comes with a CUDA build of torch, or: pip install triton")

from quant.formats.format import FORMATS
from quant.formats.tensor import BlockScaledTensor, quantize
from quant.kernels import dispatch, matmul_gluon_prefill
from quant.kernels.aot import CompiledKernel, assemble
from quant.kernels.grouped import grouped_linear
from quant.kernels.hardware import TARGETS, current
from quant.kernels.prepack import prepack
from quant.kernels.tiles import PrefillTiles, prefill_tiles

SIZES = ((128, 2), (128, 1), (64, 1), (32, 1))


@pytest.mark.parametrize(("size", "split", "width"), [((128, 2), True, 0), ((64, 2), False, 0), ((128, 2), False, 128)])
def test_weights_go_from_registers_into_wgmma(
    compile_matmul: Callable[..., CompiledKernel], size: tuple[int, int], split: bool, width: int
) -> None:
    from triton.experimental.gluon import language as gl

    tiles = prefill_tiles(*size, TARGETS["h100"])
    y_layout = gl.NVMMASharedLayout.get_default_for([tiles.block_m, 128], gl.bfloat16)
    types = {"y_desc": f"tensordesc<bf16[{tiles.block_m}, 128],{y_layout!r}>", "offsets": "*i32"}
    constants = {"has_bias": split, "halves": tiles.halves, "stages": tiles.stages, "depth": tiles.depth}
    constants |= {"width": width, "split": split, "overlap": True}
    options = {"num_warps": 8, "maxnreg": 168}
    kernel = compile_matmul(matmul_gluon_prefill.prefill_kernel, tiles.block_m, tiles.depth, types, constants, options)
    products = re.findall(
        r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.bf16\.bf16\s+\{[^}]*\},\s*(\S)", kernel.ptx
    )
    assert len(products) == tiles.depth * tiles.halves * 4
    assert all(found == (str(tiles.block_m), "{") for found in products)
    # A product is in flight while the next operand is decoded; y leaves by TMA.
    assert "wgmma.wait_group.sync.aligned 1;" in kernel.ptx
    assert "cp.async.bulk.tensor.2d.global.shared" in kernel.ptx
    assert kernel.shared <= 227 << 10
    assert assemble(kernel).spilled == 0


def units_of(tiles: int, steps: int, programs: int) -> list[list[tuple[int, int, int]]]:
    """By program, what `_next_tile` gives: (tile, first unit of it, how many units)."""
    programs, full = matmul_gluon_prefill.deal(tiles, programs)
    units = (tiles - full) * steps
    each, rest = divmod(units, programs)
    found = []
    for program in range(programs):
        begin = program * each + min(program, rest)
        streamed = each + (program < rest)
        total = streamed + max(-(-(full - program) // programs), 0) * steps
        done, parts = 0, []
        while done < total:
            shared = done < streamed
            inside = (begin + done) // steps if shared else (done - streamed) // steps
            start = begin + done - inside * steps if shared else 0
            count = min(steps - start, streamed - done) if shared else steps
            parts.append((full + inside if shared else program + inside * programs, start, count))
            done += count
        found.append(parts)
    return found


@pytest.mark.parametrize(
    ("tiles", "steps", "programs"),
    [(1, 1, 1), (3584, 32, 132), (448, 32, 132), (128, 112, 132), (32, 32, 132), (7, 5, 3)],
)
def test_every_unit_is_dealt_out_once_and_evenly(tiles: int, steps: int, programs: int) -> None:
    dealt = units_of(tiles, steps, programs)
    seen = Counter((tile, k) for parts in dealt for tile, start, count in parts for k in range(start, start + count))
    assert seen == {(tile, k): 1 for tile in range(tiles) for k in range(steps)}
    loads = [sum(count for *_, count in parts) for parts in dealt]
    # A unit more than others at most, or a whole tile, where tiles are not cut.
    assert max(loads) - min(loads) <= (1 if 2 * tiles <= programs else steps)
    # `partial` has two places a program: for a tile that it begins, and for one that an earlier program began.
    for parts in dealt:
        cut = [start == 0 for _, start, count in parts if count < steps]
        assert len(cut) == len(set(cut))


def stacked(experts: int, rows: int, columns: int) -> BlockScaledTensor:
    """Experts of very different sizes: one taken for another cannot go unseen."""
    sizes = torch.tensor([4.0 ** (e % 8) for e in range(experts)])[:, None, None]
    return quantize((torch.randn(experts, rows, columns) * sizes).to("cuda"), FORMATS["nvfp4"])


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES)
def test_agrees_with_float64_on_a_gpu(size: tuple[int, int]) -> None:
    """Whole tiles and cut ones, ends of all axes; what memory held before does not show."""
    if not current().has_wgmma:
        pytest.skip("the prepacked layout is Hopper's")
    for rows, columns, tokens, programs in (
        (448, 1600, 333, 7),
        (192, 576, 130, 132),
        (64, 128, 5, 132),
        (1024, 2048, 2500, 33),
    ):
        weight = quantize(torch.randn(rows, columns, device="cuda"), FORMATS["nvfp4"])
        packed, dense = prepack(weight), weight.dequantize(torch.float64)
        choice = PrefillTiles(*size, programs, stages=prefill_tiles(*size, current()).stages)
        x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
        bias = torch.randn(rows, device="cuda", dtype=torch.bfloat16)
        exact = x.double() @ dense.T + bias.double()
        bound = (x.double().abs() @ dense.abs().T) * 2**-13 + exact.abs() * 2**-8
        first = None
        for _ in range(3):
            torch.full((tokens, rows), float("nan"), device="cuda", dtype=torch.bfloat16)
            y = dispatch.run(x, packed, bias, choice)
            assert bool(((y.double() - exact).abs() <= bound).all())
            assert first is None or torch.equal(y, first)
            first = y


@pytest.mark.gpu
@pytest.mark.parametrize(
    "counts", [(130, 0, 1, 257, 64), (0, 700, 3), (3, 0, 17, 1), (0, 0), (1, 1, 1, 1), (20,) * 100]
)
def test_experts_agree_with_float64_on_a_gpu(counts: tuple[int, ...]) -> None:
    if not current().has_wgmma:
        pytest.skip("the prepacked layout is Hopper's")
    offsets = torch.tensor([0, *counts], device="cuda").cumsum(0).int()
    weight = stacked(len(counts), 320, 576)
    x = torch.randn(sum(counts) + 2, 576, device="cuda", dtype=torch.bfloat16)
    y = grouped_linear(x, prepack(weight), offsets)
    dense, bounds = weight.dequantize(torch.float64), offsets.tolist()
    for expert, (start, stop) in enumerate(pairwise(bounds)):
        rows = x[start:stop].double()
        exact, magnitude = rows @ dense[expert].T, rows.abs() @ dense[expert].abs().T
        assert bool(((y[start:stop].double() - exact).abs() <= magnitude * 2**-13 + exact.abs() * 2**-8).all())
