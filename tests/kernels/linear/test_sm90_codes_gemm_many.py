"""Hopper's kernel for many tokens is compiled and read without a GPU, and its values are tested on one."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from index_arithmetic import run_in_torch

pytest.importorskip("triton", reason="comes with a CUDA build of torch, or: pip install triton")

import triton
import triton.language as tl
from assembler import assemble

from quant.formats.format import E2M1, FORMATS
from quant.formats.tensor import BlockScaledTensor, quantize
from quant.kernels.base.hardware import current
from quant.kernels.base.portable_dependent_launch import start_next, wait_for_previous
from quant.kernels.base.ptx import CompiledKernel
from quant.kernels.base.weight_layout import prepack
from quant.kernels.linear import dispatch, sm90_codes_gemm_many
from quant.kernels.linear.portable_grouped_gemm import route
from quant.kernels.linear.sm90_gemm_pipeline import fetches_of, turns_of
from quant.kernels.linear.tiles import PREFILL_UNITS, deal, prefill_tiles
from quant.recipes.gpus import GPUS

BEST = tuple((*size, prefill_tiles(*size, GPUS["h100"]).groups) for size in PREFILL_UNITS)
SIZES = (*BEST, (128, 1, 1), (64, 1, 1), (192, 1, 1))


@pytest.mark.parametrize(
    ("size", "split", "experts"),
    [
        ((128, 2, 1), True, 0),
        ((144, 1, 2), True, 0),
        ((16, 1, 2), False, 32),
        # What these add, one of the three has: sizes of tiles, and experts.
        *(
            pytest.param(size, True, 0, marks=pytest.mark.slow)
            for size in ((160, 2, 1), (96, 1, 2), (192, 1, 2), (256, 1, 2))
        ),
        pytest.param((64, 2, 1), False, 0, marks=pytest.mark.slow),
        pytest.param((128, 2, 1), False, 128, marks=pytest.mark.slow),
        pytest.param((32, 2, 1), False, 32, marks=pytest.mark.slow),
    ],
)
def test_weights_go_from_registers_into_wgmma(
    compile_matmul: Callable[..., CompiledKernel], size: tuple[int, int, int], split: bool, experts: int
) -> None:
    from triton.experimental.gluon import language as gl

    block_m, halves, groups = size
    # Experts with few columns and few tokens each have two programs on an SM.
    tiles = prefill_tiles(block_m, halves, GPUS["h100"], groups=groups, resident=2 if block_m == 16 else 1)
    wide = 1 << tiles.block_m.bit_length() - 1
    tail = tiles.block_m - wide

    def tile_of(rows: int, columns: int) -> str:
        layout = gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)
        return f"tensordesc<bf16[{rows}, {columns}],{layout!r}>"

    types = {"y_map": tile_of(wide, 128 // groups), "offsets": "*i32"}
    types |= {"x_tail_map": tile_of(tail or wide, 64), "y_tail_map": tile_of(tail or wide, 128 // groups)}
    constants = sm90_codes_gemm_many.constants_of(
        tiles, "words", experts=experts, split=split, has_bias=split or experts == 32
    )
    most = sm90_codes_gemm_many.max_registers(tiles)
    options = {"num_warps": 8 // groups} | ({"maxnreg": most} if most else {})
    kernel = compile_matmul(
        sm90_codes_gemm_many.sm90_codes_gemm_many, wide, tiles.depth, types, {"constants": constants}, options
    )
    products = re.findall(
        r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.bf16\.bf16\s+\{[^}]*\},\s*(\S)", kernel.ptx
    )
    assert all(operand == "{" for _, operand in products)
    each = groups * tiles.depth * tiles.halves * 4
    assert Counter(int(tokens) for tokens, _ in products) == {size: each for size in (wide, tail) if size}
    # A product is in flight while the next operand is decoded; y leaves by TMA.
    assert groups == 2 or f"wgmma.wait_group.sync.aligned {2 if tail else 1};" in kernel.ptx
    assert "cp.async.bulk.tensor.2d.global.shared" in kernel.ptx
    assert kernel.shared + 1024 <= (228 << 10) // tiles.resident
    # The kernel before may write x and the offsets of experts: threads read memory when it has ended, and until then
    # weights alone are fetched, where they do not depend on offsets.
    early = run_before_wait(kernel.ptx)
    assert any("launch_dependents" in line for line in early)
    assert not any("ld.global" in line for line in early)
    assert any("cp.async.bulk.tensor" in line for line in early) is (experts == 0)
    # The assembler of Triton 3.9 (13.4) spills 8 words of experts' tiles of 128 tokens, that of 3.6 none.
    assert assemble(kernel).spilled <= (32 if experts == 128 else 0)


def run_before_wait(ptx: str) -> list[str]:
    """The instructions that a thread may run from the kernel's entry on without passing `griddepcontrol.wait`."""
    lines = [line.strip() for line in ptx[ptx.index(".entry") :].splitlines()]
    labels = {line.partition(":")[0]: i for i, line in enumerate(lines) if re.match(r"\$\w+:", line)}
    starts, seen, found = [0], set(), []
    while starts:
        at = starts.pop()
        while at not in seen and at < len(lines):
            seen.add(at)
            line = lines[at]
            if "griddepcontrol.wait" in line:
                break
            found.append(line)
            # A branch, or a line of a table of them: `@%p1 bra $L__BB0_2;` and `$L__BB0_3,`.
            starts += [labels[name] for name in re.findall(r"\$\w+", line) if name in labels]
            if re.match(r"(bra|ret|exit|brx)\b", line):
                break
            at += 1
    return found


def units_of(tiles: int, steps: int, sms: int) -> list[list[tuple[int, int, int]]]:
    """By program, the results of `turns_of` and `fetches_of`: (tile, first unit of it, how many units)."""
    programs, full, cut, parts = deal(tiles, sms, steps)
    first, end = run_in_torch(turns_of, programs)(full, cut, parts)
    found: list[list[tuple[int, int, int]]] = [[] for _ in range(programs)]
    for turn in range(int(end.max())):
        pieces = run_in_torch(fetches_of, programs)(torch.tensor(turn), full, steps, parts, 1, cut > 0)
        for program, piece in enumerate(zip(*(x.expand(programs).tolist() for x in pieces), strict=True)):
            if first[program] <= turn < end[program]:
                found[program].append(piece)
    return found


@pytest.mark.parametrize(
    ("tiles", "steps", "programs"),
    [(1, 1, 1), (3584, 32, 132), (448, 32, 132), (144, 112, 132), (128, 112, 132), (32, 32, 132), (7, 5, 3), (2, 9, 7)],
)
def test_every_unit_is_dealt_out_once_and_evenly(tiles: int, steps: int, programs: int) -> None:
    dealt = units_of(tiles, steps, programs)
    seen = Counter((tile, k) for parts in dealt for tile, start, count in parts for k in range(start, start + count))
    assert seen == {(tile, k): 1 for tile in range(tiles) for k in range(steps)}
    # Every program has work, and a part is worth the sum that it leaves behind.
    assert all(parts for parts in dealt)
    assert all(count >= min(steps, 4) for parts in dealt for *_, count in parts)
    loads = [sum(count for *_, count in parts) for parts in dealt]
    left = tiles % programs
    # No program has more than the others but a part of a tile, half of one at most where enough programs are free.
    assert max(loads) - min(loads) <= (-(-steps // 2) if 0 < 2 * left <= programs and steps >= 8 else steps)


def stacked(experts: int, rows: int, columns: int, format: str = "nvfp4") -> BlockScaledTensor:
    """Experts of very different sizes: one taken for another cannot go unseen."""
    sizes = torch.tensor([4.0 ** (e % 8) for e in range(experts)])[:, None, None]
    return quantize((torch.randn(experts, rows, columns) * sizes).to("cuda"), FORMATS[format])


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES)
def test_agrees_with_float64_on_a_gpu(size: tuple[int, int, int]) -> None:
    """Whole tiles and cut ones, ends of all axes; what memory held before does not show."""
    if not current().has_wgmma:
        pytest.skip("the prepacked layout is Hopper's")
    for rows, columns, tokens, programs in (
        (448, 1600, 333, 7),
        (192, 576, 130, 132),
        (64, 128, 5, 132),
        (1024, 2048, 2500, 33),
        (448, 4096, 2000, 9),
        (256, 2048, 257, 132),
    ):
        weight = quantize(torch.randn(rows, columns, device="cuda"), FORMATS["nvfp4"])
        packed, dense = prepack(weight), weight.dequantize(torch.float64)
        block_m, halves, groups = size
        choice = replace(prefill_tiles(block_m, halves, current(), groups=groups), programs=programs)
        x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
        bias = torch.randn(rows, device="cuda", dtype=torch.bfloat16)
        exact = x.double() @ dense.T + bias.double()
        bound = (x.double().abs() @ dense.abs().T) * 2**-13 + exact.abs() * 2**-8
        first = None
        for _ in range(3):
            torch.full((tokens, rows), float("nan"), device="cuda", dtype=torch.bfloat16)
            y = dispatch.multiply_with(x, packed, bias, choice)
            assert bool(((y.double() - exact).abs() <= bound).all())
            assert first is None or torch.equal(y, first)
            first = y


@pytest.mark.gpu
@pytest.mark.parametrize(("looks", "groups"), [(0, 1), (64, 1), (0, 2)])
def test_parts_of_a_tile_need_not_be_there_at_once(monkeypatch: pytest.MonkeyPatch, looks: int, groups: int) -> None:
    """Two streams, one of them more urgent, take the SMs from each other; patience changes no result."""
    if not current().has_wgmma:
        pytest.skip("the prepacked layout is Hopper's")
    monkeypatch.setattr(sm90_codes_gemm_many, "LOOKS", looks)
    x = torch.randn(256, 4096, device="cuda", dtype=torch.bfloat16)
    choice = prefill_tiles(128, 1, current(), groups=groups)
    weights = [quantize(torch.randn(4096, 4096, device="cuda"), FORMATS["nvfp4"]) for _ in range(2)]
    packed = [prepack(weight) for weight in weights]
    assert deal(32 * 2, current().sms, 32)[2:] == (64, current().sms // 64)
    first = [dispatch.multiply_with(x, weight, None, choice) for weight in packed]
    streams = [torch.cuda.Stream(priority=priority) for priority in (0, -1)]
    torch.cuda.synchronize()
    found: list[list[torch.Tensor]] = [[], []]
    for _ in range(100):
        for stream, weight, kept in zip(streams, packed, found, strict=True):
            with torch.cuda.stream(stream):
                kept.append(dispatch.multiply_with(x, weight, None, choice))
    torch.cuda.synchronize()
    for weight, expected, kept in zip(weights, first, found, strict=True):
        exact = x.double() @ weight.dequantize(torch.float64).T
        assert float((expected.double() - exact).norm() / exact.norm()) < 2**-8
        assert all(torch.equal(y, expected) for y in kept)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
def test_a_launch_over_experts_is_prepared_once_and_holds_no_tensor(
    format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another layer of the same shapes gets its own rows, weights, offsets and bias."""
    prepared, launches = [], []

    class Recorded:
        def __init__(self, *arguments: object) -> None:
            prepared.append(arguments)

        def __call__(self, *arguments: object) -> None:
            launches.append([getattr(of, "base", of) for of in arguments])

    monkeypatch.setattr(sm90_codes_gemm_many, "CachedLaunch", Recorded)
    monkeypatch.setattr(sm90_codes_gemm_many, "_grouped", {})
    monkeypatch.setattr(sm90_codes_gemm_many, "current", lambda index: GPUS["h100"])

    def memory(of: object) -> object:
        return of.data_ptr() if isinstance(of, torch.Tensor) else of

    layers = []
    for tokens in (20, 20, 36):
        weight = quantize(torch.randn(3, 128, 256), FORMATS[format])
        held = prepack(weight) if weight.format.element is E2M1 else weight
        x, bias = torch.randn(tokens, 256).bfloat16(), torch.randn(3, 128).bfloat16()
        offsets = torch.tensor([0, 5, 5, tokens], dtype=torch.int32)
        y = sm90_codes_gemm_many.grouped_gemm_many(x, held, offsets, bias)
        layers.append((x, held.codes, held.scale, bias, offsets, y))
    assert len(prepared) == 2
    for launch, layer in zip(launches, layers, strict=True):
        addresses = {memory(of) for of in launch if isinstance(of, torch.Tensor)}
        others = {memory(of) for other in layers if other is not layer for of in other}
        assert addresses >= {memory(of) for of in layer} and not addresses & others


@pytest.mark.gpu
@pytest.mark.parametrize(
    "counts", [(130, 0, 1, 257, 64), (0, 700, 3), (3, 0, 17, 1), (0, 0), (1, 1, 1, 1), (2,) * 100, (20,) * 100]
)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "fp8", "fp8_channel", "fp8_block", "mxfp8", "int8"])
def test_experts_agree_with_float64_on_a_gpu(format: str, counts: tuple[int, ...]) -> None:
    if not current().has_wgmma:
        pytest.skip("the prepacked layout is Hopper's")
    offsets = torch.tensor([0, *counts], device="cuda").cumsum(0).int()
    weight = stacked(len(counts), 320, 640, format)
    x = torch.randn(sum(counts) + 2, 640, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(len(counts), 320, device="cuda", dtype=torch.bfloat16) * 30
    held = prepack(weight) if weight.format.element is E2M1 else weight
    assert sm90_codes_gemm_many.takes_experts(held, current())
    y, biased = (sm90_codes_gemm_many.grouped_gemm_many(x, held, offsets, of) for of in (None, bias))
    # Products of a code and a float32 scale are rounded; the others are exact.
    unit = 2**-8 * 1.01 if format == "fp8_block" else 2**-13
    dense, bounds = weight.dequantize(torch.float64), offsets.tolist()
    for expert, (start, stop) in enumerate(pairwise(bounds)):
        rows = x[start:stop].double()
        exact, magnitude = rows @ dense[expert].T, rows.abs() @ dense[expert].abs().T
        for found, expected in ((y, exact), (biased, exact + bias[expert].double())):
            error = (found[start:stop].double() - expected).abs()
            assert bool((error <= magnitude * unit + expected.abs() * 2**-8).all())


@triton.jit
def slow_router_kernel(chosen, index, scratch, spins, count: tl.constexpr):
    """Lets the next kernel start, as vLLM's top-k does, and writes the experts of `count` slots much later."""
    start_next(True)
    wait_for_previous(True)
    slot = tl.arange(0, count)
    value = slot
    for _ in range(spins):
        value = value * 1664525 + 1013904223
    tl.store(scratch + slot, value)
    tl.store(index + slot, tl.load(chosen + slot))


@pytest.mark.gpu
def test_experts_wait_for_a_router_that_lets_the_next_kernel_start_on_a_gpu() -> None:
    if not current().has_wgmma:
        pytest.skip("the prepacked layout is Hopper's")
    weight = stacked(4, 256, 512, "nvfp4")
    held, dense = prepack(weight), weight.dequantize(torch.float64)
    x = torch.randn(1, 512, device="cuda", dtype=torch.bfloat16)
    index, scratch = torch.zeros(2, 1, 2, device="cuda", dtype=torch.int32)
    for expert in (0, 3, 1, 2) * 4:
        chosen = torch.tensor([[expert, (expert + 1) % 4]], device="cuda", dtype=torch.int32)
        slow_router_kernel[1,](chosen, index, scratch, 20000, count=2, launch_pdl=True, enable_fp_fusion=True)
        rows, offsets, places = route(x, index, 4)
        y = sm90_codes_gemm_many.grouped_gemm_many(rows, held, offsets)
        for own, row in zip(chosen[0].tolist(), places[0].tolist(), strict=True):
            expected, magnitude = x[0].double() @ dense[own].T, x[0].double().abs() @ dense[own].abs().T
            error = (y[row].double() - expected).abs()
            assert bool((error <= magnitude * 2**-13 * 1.01 + expected.abs() * 2**-8).all())
