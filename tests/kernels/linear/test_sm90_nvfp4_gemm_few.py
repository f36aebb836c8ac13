"""The Hopper kernel for few tokens is compiled without a GPU: W goes from registers into wgmma, nothing spills.

test_layout.py repeats its decoding in PyTorch; test_codes_gemm_gpu.py compares its values with float64 on a GPU.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from index_arithmetic import run_in_torch

pytest.importorskip("triton", reason="comes with a CUDA build of torch, or: pip install triton")

from assembler import assemble

from quant.kernels.base.ptx import CompiledKernel
from quant.kernels.linear import sm90_nvfp4_gemm_few
from quant.kernels.linear.tiles import GluonTiles, candidates, gluon_tiles, guess
from quant.recipes.gpus import GPUS


@pytest.mark.parametrize(
    ("block_m", "warps", "resident", "depth", "split", "has_bias"),
    [
        (8, 8, 2, 4, True, True),
        (8, 8, 3, 2, True, False),
        (16, 4, 3, 2, True, True),
        (64, 16, 1, 2, True, True),
        (128, 8, 1, 2, True, False),
        (256, 8, 1, 2, False, False),
    ],
)
def test_weights_go_from_registers_into_wgmma(
    compile_matmul: Callable[..., CompiledKernel],
    block_m: int,
    warps: int,
    resident: int,
    depth: int,
    split: bool,
    has_bias: bool,
) -> None:
    tiles = gluon_tiles(block_m, warps, resident, GPUS["h100"], depth)
    options = {"num_warps": warps, **sm90_nvfp4_gemm_few.registers(tiles)}
    constants: dict[str, Any] = {"fetcher_registers": options.pop("fetcher_registers")}
    constants["constants"] = sm90_nvfp4_gemm_few.Constants(has_bias, tiles.stages, depth, split, overlap=split)
    kernel = compile_matmul(sm90_nvfp4_gemm_few.sm90_nvfp4_gemm_few, block_m, depth, {}, constants, options)
    products = re.findall(
        r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.bf16\.bf16\s+\{[^}]*\},\s*(\S)", kernel.ptx
    )
    if block_m > 8:
        assert products and all(width == str(block_m) and left == "{" for width, left in products)
        # A product is in flight while the next operand is decoded.
        assert "wgmma.wait_group.sync.aligned 1;" in kernel.ptx
        assert gives_back_the_slot_before(kernel.ptx)
    else:
        assert not products and kernel.ptx.count("mma.sync.aligned.m16n8k16") == 4 * depth
    assert "cp.async.bulk.tensor.2d" in kernel.ptx and "ld.shared.v4" in kernel.ptx
    assert ("griddepcontrol.wait" in kernel.ptx) is split
    assert kernel.shared * resident <= 227 << 10
    assert assemble(kernel).spilled == 0


def gives_back_the_slot_before(ptx: str) -> bool:
    """Whether the barrier that frees a slot is found anew in each step. Hoisted out of the loop, it frees but one."""
    lines = ptx.splitlines()
    wait = next(i for i, line in enumerate(lines) if "mbarrier.try_wait" in line)
    arrive = next(i for i, line in enumerate(lines) if i > wait and "mbarrier.arrive.shared" in line)
    register = re.search(r"\[(%r\d+)\]", lines[arrive])
    assert register is not None
    defined = max(i for i, line in enumerate(lines[:arrive]) if re.search(rf"\t{register[1]},", line))
    return wait < defined < arrive


@pytest.mark.parametrize("shape", [(28672, 4096), (4096, 14336), (4096, 4096), (64, 128), (11008, 4096), (576, 1536)])
@pytest.mark.parametrize("tokens", [1, 2, 8, 16, 33, 64, 200])
def test_a_guess_is_always_a_launch_that_the_kernel_takes(shape: tuple[int, int], tokens: int) -> None:
    from quant.formats.format import FORMATS

    first = guess(FORMATS["nvfp4"], tokens, shape, GPUS["h100"], prepacked=True)
    for choice in (first, *candidates(FORMATS["nvfp4"], tokens, shape, GPUS["h100"], prepacked=True)):
        if isinstance(choice, GluonTiles):
            assert choice.stages >= 2 and choice.warps in (4, 8, 16)
            assert choice.resident * 32 * (choice.warps + 4) <= 2048
            slot = choice.depth * (choice.block_m * 128 + choice.warps // 4 * 2304)
            assert choice.resident * (slot * choice.stages + 1024) <= 227 << 10


@pytest.mark.parametrize(("units", "programs"), [(1, 1), (7, 3), (14336, 132), (14300, 264), (132, 132)])
def test_every_unit_belongs_to_one_program_which_is_found_again(units: int, programs: int) -> None:
    begin, end, each, rest = run_in_torch(sm90_nvfp4_gemm_few._span, programs)(units)
    dealt = [(unit, program) for program in range(programs) for unit in range(int(begin[program]), int(end[program]))]
    assert [unit for unit, _ in dealt] == list(range(units))
    assert int((end - begin).max() - (end - begin).min()) <= 1
    found = run_in_torch(sm90_nvfp4_gemm_few._program_of, programs)(torch.arange(units), each, rest)
    assert found.tolist() == [program for _, program in dealt]
