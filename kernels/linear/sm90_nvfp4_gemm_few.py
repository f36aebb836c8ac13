"""With few tokens this Gluon kernel multiplies by prepacked NVFP4 on Hopper, y = x · Wᵀ, as fast as W can be read.

    one warp fetches                                shared memory, `stages` deep          4 · panels warps multiply
    x     [block_m, 64 · depth] BF16     ──TMA──▶   ┌ x ┬ words ┬ scales ┐  ──wgmma, right operand─────────────▶ acc
    words [panels, depth, 512] int32     ──TMA──▶   ├───┼───────┼────────┤  ──16 bytes a thread──▶ decode ──▶    +=
    scales                               ──TMA──▶   └───┴───────┴────────┘     BF16 in registers, left operand

The tensor cores compute yᵀ = W · xᵀ, so that rows of W fill the 64 rows of a wgmma, and tokens are its columns. A warp
owns 16 rows of W, a warpgroup a panel of 64. With 8 tokens a tile, mma.sync replaces wgmma, so that a warp does not
wait for the other three of its warpgroup. `sm90_gemm_pipeline.py` draws the ring and says who waits for whom.

Words are read from shared memory by the thread that multiplies them (`kernels/base/weight_layout.py` put them in that
order), so that decoding needs no exchange: 3 instructions a weight in all, where reading at 3 TB/s leaves time for 5.5.
A tile is decoded while the tensor cores work on the one before it.

A unit of work is `depth` tiles of 64 columns of K for 64 · panels rows of W and block_m tokens. The units of the whole
product, ordered by output tile, are dealt out evenly to programs that stay on their SM ("stream-K"):

    output tiles   │ 0, `steps` units │ 1                │ 2                │ 3                │
    programs       │ 0             │ 1             │ 2             │ 3             │ 4            │

Here programs 0 and 1 share tile 0, programs 1 and 2 tile 1.

So no last wave leaves SMs idle, and the fetching warp is at the next tile before the sum of this one is stored. A
program that has only a part of a tile's units leaves its float32 sum in `sums`, in one of two buffers: one for a tile
that it begins, one for a tile that an earlier program began. A counter for each tile identifies the last program to
arrive, which adds the sums in the order of the programs. Results are the same in every run, and no program waits.

With `overlap`, a program starts while the previous kernel still runs ("programmatic dependent launch"): it fetches its
first words, and waits for that kernel before it reads x or writes. So a kernel that lets its successor start early must
not write weights; this kernel and the kernels with `kernels/base/portable_dependent_launch.py` do not.

Tails: TMA reads zeros beyond the ends, and zeros multiply whatever the other side holds.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quant.formats.tensor import BlockScaledTensor
from quant.kernels.base.launch import CachedLaunch, arrival_counters
from quant.kernels.base.sm90_gluon import async_load, barrier, matrix_fields, prepacked_fields
from quant.kernels.linear.sm90_decode import DECODED, decode
from quant.kernels.linear.sm90_gemm_pipeline import (
    Output,
    advance,
    halve,
    let_next_kernel_start,
    load_words,
    ring_barriers,
    slot_before,
    store_sum,
    wait_for_previous_kernel,
    weight_rings,
)
from quant.kernels.linear.tiles import GluonTiles, Launch

ALONE = gl.constexpr(8)
"""Tokens of a tile up to which each warp multiplies by itself (mma.sync), and waits for no other warp."""


@dataclass(frozen=True)
class Constants:
    """The compile-time properties of a launch."""

    has_bias: bool  # whether a bias is added
    stages: int  # stages, depth: slots of the ring, and tiles of 64 columns of a slot
    depth: int
    split: bool  # whether programs share a tile
    overlap: bool  # whether the kernel starts before the previous one has ended


class TensorMaps(NamedTuple):
    """Tensor maps of x, words and scales."""

    x: gl.tensor
    words: gl.tensor
    scales: gl.tensor


class Rings(NamedTuple):
    """The ring in shared memory: its tensors, in the shape of their writer or their reader, and its barriers."""

    x: gl.shared_memory_descriptor
    words: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class Work(NamedTuple):
    """The product: tokens, units of an output tile, tiles of 64 columns, units of all output tiles."""

    M: gl.tensor
    steps: gl.tensor
    tiles_k: gl.tensor
    units: gl.tensor


class Partial(NamedTuple):
    """Sums of parts of tiles, float32, two buffers a program; counters of arrivals by tile, zero between calls."""

    sums: gl.tensor
    counters: gl.tensor


@gluon.jit
def _span(units):
    """Returns this program's units [begin, end): the first `longer` programs have one more than `each`."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    each = units // programs
    longer = units % programs
    begin = program * each + gl.minimum(program, longer)
    return begin, begin + each + (program < longer).to(gl.int32), each, longer


@gluon.jit
def _program_of(unit, each, longer):
    """Returns the inverse of `_span`."""
    boundary = longer * (each + 1)
    return gl.where(unit < boundary, unit // (each + 1), longer + (unit - boundary) // each)


@gluon.jit
def _fetch_w(maps, rings, slot, tile, k, tiles_m, tiles_k, panels: gl.constexpr):
    # Tiles of tokens come first, then the next rows of W: neighbouring programs share W in L2.
    panel = tile // tiles_m * panels
    full = rings.full.index(slot)
    for p in gl.static_range(panels):
        # In rows of 256 words, two for a tile of 64 × 64; a panel's tiles along K follow one another in memory.
        row = (panel + p) * tiles_k + k
        async_load(maps.words, [row * 2, 0], full, rings.words.index(slot * panels + p))
        async_load(maps.scales, [row, 0], full, rings.scales.index(slot * panels + p))


@gluon.jit
def _fetch_x(maps, rings, slot, tile, k, tiles_m, depth: gl.constexpr):
    m = tile % tiles_m * maps.x.block_type.shape[0]
    full = rings.full.index(slot)
    for d in gl.static_range(depth):
        async_load(maps.x, [m, (k + d) * 64], full, rings.x.index(slot * depth + d))


@gluon.jit
def _next_unit(tile, k, steps, depth: gl.constexpr):
    k += depth
    over = k >= steps * depth
    return gl.where(over, tile + 1, tile), gl.where(over, 0, k)


@gluon.jit
def _produce(maps, rings, work, panels: gl.constexpr, constants: gl.constexpr):
    """The fetching warp: fills slot after slot with this program's units, each as soon as its readers are done."""
    stages: gl.constexpr = constants.stages
    depth: gl.constexpr = constants.depth
    block_m: gl.constexpr = maps.x.block_type.shape[0]
    # A tile of 64 columns: 128 bytes for each token, and for each panel 2,048 of words and 256 of scales.
    nbytes: gl.constexpr = depth * (block_m * 128 + panels * 2304)
    begin, end, _, _ = _span(work.units)
    tiles_m = gl.cdiv(work.M, block_m)
    tile = begin // work.steps
    k = (begin - tile * work.steps) * depth
    # Integers made of other integers: a loop carries tensors, and a literal would be a constant.
    slot = begin * 0
    phase = slot + 1
    if constants.overlap:
        let_next_kernel_start()
        # The first stages: the weight at once, x when the kernel that writes it has ended.
        head = gl.minimum(end, begin + stages)
        # Slots are new, so nothing waits for readers here; x arrives on the same barrier as its words.
        w_tile = tile + 0
        w_k = k + 0
        for unit in range(begin, head):
            mbarrier.expect(rings.full.index(unit - begin), nbytes)
            _fetch_w(maps, rings, unit - begin, w_tile, w_k, tiles_m, work.tiles_k, panels)
            w_tile, w_k = _next_unit(w_tile, w_k, work.steps, depth)
        wait_for_previous_kernel()
        for unit in range(begin, head):
            _fetch_x(maps, rings, unit - begin, tile, k, tiles_m, depth)
            tile, k = _next_unit(tile, k, work.steps, depth)
            slot, phase = advance(slot, phase, stages)
        begin = head
    for _ in range(begin, end):
        mbarrier.wait(rings.empty.index(slot), phase)
        mbarrier.expect(rings.full.index(slot), nbytes)
        _fetch_w(maps, rings, slot, tile, k, tiles_m, work.tiles_k, panels)
        _fetch_x(maps, rings, slot, tile, k, tiles_m, depth)
        tile, k = _next_unit(tile, k, work.steps, depth)
        slot, phase = advance(slot, phase, stages)


@gluon.jit
def _leave_sum(acc, buffer):
    """Writes a sum to where `_collect` finds it, 64 tokens at a time."""
    rows: gl.constexpr = acc.shape[0]
    width: gl.constexpr = acc.shape[1]
    if width > 64:
        low, high = halve(acc)
        _leave_sum(low, buffer)
        _leave_sum(high, buffer + rows * (width // 2))
    else:
        # In the order of the registers, rows not yet as in W: `_collect` reads with the same layout.
        layout: gl.constexpr = acc.type.layout
        n = gl.arange(0, rows, gl.SliceLayout(1, layout))
        m = gl.arange(0, width, gl.SliceLayout(0, layout))
        gl.store(buffer + (n[:, None] * width + m[None, :]), acc)


@gluon.jit
def _collect(
    sums, lowest, highest, first, scale, out, n, m, has_bias: gl.constexpr, layout: gl.constexpr,
    rows: gl.constexpr, block_m: gl.constexpr, width: gl.constexpr,
):  # fmt: skip
    """Adds the sums of programs `lowest` to `highest` for `width` tokens from `first` on, and stores them."""
    if width > 64:
        _collect(sums, lowest, highest, first, scale, out, n, m, has_bias, layout, rows, block_m, width // 2)
        first += width // 2
        _collect(sums, lowest, highest, first, scale, out, n, m, has_bias, layout, rows, block_m, width // 2)
    else:
        row = gl.arange(0, rows, gl.SliceLayout(1, layout))
        column = gl.arange(0, width, gl.SliceLayout(0, layout))
        inside = first * rows + row[:, None] * width + column[None, :]
        total = gl.zeros((rows, width), gl.float32, layout)
        # As many reads under way at once as there are registers for: each takes half a microsecond.
        at_once: gl.constexpr = 64 // width
        for group in range(lowest, highest + 1, at_once):
            for j in gl.static_range(at_once):
                program = group + j
                # The first of them began the tile: its second buffer.
                buffer = 2 * program + (program == lowest).to(gl.int32)
                mask = (inside >= 0) & (program <= highest)
                # Bypass L1, which is not coherent with the writes of other programs.
                total += gl.load(
                    sums + buffer.to(gl.int64) * (rows * block_m) + inside, mask=mask, other=0.0, cache_modifier=".cg"
                )
        store_sum(total, scale, out, n, m + first, has_bias)


@gluon.constexpr_function
def _layout_of(block_m, warps, width):
    if block_m <= ALONE:
        return gl.NVMMADistributedLayout([2, 0], [warps, 1], [16, 8])
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, width, 16])


@gluon.jit
def _multiply_units(rings, slot, phase, count, block_m: gl.constexpr, layout: gl.constexpr, constants: gl.constexpr):
    """Returns the product of the next `count` units, float32 [rows, block_m], and the slot and phase behind them."""
    stages: gl.constexpr = constants.stages
    depth: gl.constexpr = constants.depth
    warps: gl.constexpr = gl.num_warps()
    alone: gl.constexpr = layout.version[0] == 2
    left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=layout, k_width=2)
    right: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=layout, k_width=2)
    acc = gl.zeros((16 * warps, block_m), gl.float32, layout)
    # At the top of the loop the last product of the slot before may still be reading that slot.
    for step in range(count):
        mbarrier.wait(rings.full.index(slot), phase)
        for d in gl.static_range(depth):
            word, scale = load_words(rings.words.index(slot), rings.scales.index(slot), 0, d, warps)
            a = gl.convert_layout(decode(word, scale, warps), left, assert_trivial=True)
            b = rings.x.index(slot * depth + d).permute((1, 0))
            if alone:
                acc = mma_v2(a, b.load(right), acc)
            else:
                acc = warpgroup_mma(a, b, acc, is_async=True)
                # The product before this one has read its operands; this one goes on while the next are decoded.
                acc = warpgroup_mma_wait(1, deps=[acc])
                if d == 0:
                    mbarrier.arrive(rings.empty.index(slot_before(slot, stages)), count=1, pred=step > 0)
        if alone:
            # mma.sync has read its operands when it returns.
            mbarrier.arrive(rings.empty.index(slot), count=1)
        slot, phase = advance(slot, phase, stages)
    if not alone:
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(rings.empty.index(slot_before(slot, stages)), count=1)
    return acc, slot, phase


@gluon.jit
def _consume(rings, global_scale, out, partial, work, block_m: gl.constexpr, constants: gl.constexpr):
    """The multiplying warps: sum after sum, each stored, or left for the last program of its tile."""
    warps: gl.constexpr = gl.num_warps()
    rows: gl.constexpr = 16 * warps
    width: gl.constexpr = block_m if block_m < 64 else 64
    layout: gl.constexpr = _layout_of(block_m, warps, block_m)
    narrow: gl.constexpr = _layout_of(block_m, warps, width)
    steps = work.steps
    begin, end, each, longer = _span(work.units)
    tiles_m = gl.cdiv(out.M, block_m)
    # The global scale is a part of the weight, which no overlapped kernel writes.
    scale = gl.load(global_scale).to(gl.float32) * DECODED
    if constants.overlap:
        wait_for_previous_kernel()
    unit = begin
    slot = begin * 0
    phase = begin * 0
    # One turn for each tile of which this program has units: the first and the last may be parts.
    while unit < end:
        tile = unit // steps
        start = unit - tile * steps
        count = gl.minimum(steps - start, end - unit)
        acc, slot, phase = _multiply_units(rings, slot, phase, count, block_m, layout, constants)
        unit += count
        n = tile // tiles_m * rows
        m = tile % tiles_m * block_m
        if constants.split and count < steps:
            buffer = 2 * gl.program_id(0) + (start == 0).to(gl.int32)
            _leave_sum(acc, partial.sums + buffer.to(gl.int64) * (rows * block_m))
            lowest = _program_of(tile * steps, each, longer)
            highest = _program_of(tile * steps + steps - 1, each, longer)
            # All threads have written before one of them counts this program as arrived.
            barrier()
            if gl.atomic_add(partial.counters + tile, 1, sem="acq_rel") == highest - lowest:
                _collect(partial.sums, lowest, highest, 0, scale, out, n, m, constants.has_bias, narrow,
                         rows, block_m, block_m)  # fmt: skip
                # Ready for the next launch, which may reuse the counters.
                gl.store(partial.counters + tile, 0)
        else:
            store_sum(acc, scale, out, n, m, constants.has_bias)


@gluon.jit(do_not_specialize=["M", "steps", "tiles_k", "units"])
def sm90_nvfp4_gemm_few(
    x_map, w_map, s_map, global_scale, bias, y, sums, counters, M, N, steps, tiles_k, units,
    constants: gl.constexpr, fetcher_registers: gl.constexpr,
):  # fmt: skip
    """Grid: programs that stay on their SM. See the module docstring; `steps` units make an output tile."""
    stages: gl.constexpr = constants.stages
    depth: gl.constexpr = constants.depth
    panels: gl.constexpr = gl.num_warps() // 4
    block_m: gl.constexpr = x_map.block_type.shape[0]
    x_ring = gl.allocate_shared_memory(gl.bfloat16, [stages * depth, block_m, 64], x_map.layout)
    w_ring, s_ring, words, scales = weight_rings(w_map, s_map, stages, panels, depth)
    full, empty = ring_barriers(stages, 1)
    work = Work(M, steps, tiles_k, units)
    gl.warp_specialize(
        [
            (_consume, (Rings(x_ring, words, scales, full, empty), global_scale, Output(bias, y, M, N),
                        Partial(sums, counters), work, block_m, constants)),
            (_produce, (TensorMaps(x_map, w_map, s_map), Rings(x_ring, w_ring, s_ring, full, empty), work, panels,
                        constants)),
        ],
        [1],
        [fetcher_registers],
    )  # fmt: skip


def prepare_gemm_few(x: Tensor, weight: BlockScaledTensor, bias: Tensor | None, tiles: GluonTiles) -> Launch:
    """Returns a function that computes `x @ weight.T + bias` for arguments like these, which have been checked."""
    # Everything is decided here that does not depend on the values of the arguments: x `[tokens, in]`, BF16, rows
    # contiguous and 16-byte aligned; a weight of prepacked NVFP4.
    (M, K), N = x.shape, weight.shape[0]
    if not M:
        return lambda x, weight, bias: x.new_empty(0, N)
    rows, block_m, depth = 16 * tiles.warps, tiles.block_m, tiles.depth
    count, steps = triton.cdiv(N, rows) * triton.cdiv(M, block_m), triton.cdiv(K // 64, depth)
    # No more than the longest span needs: spans that are alike begin and end with output tiles more often.
    units = count * steps
    programs = triton.cdiv(units, triton.cdiv(units, min(tiles.programs, units)))
    split = units % (programs * steps) != 0
    x_fields, (w_fields, s_fields) = matrix_fields(x, block_m, 64), prepacked_fields(weight, depth)
    constants = {
        "constants": Constants(bias is not None, tiles.stages, depth, split, tiles.overlap),
        **registers(tiles),
        "num_warps": tiles.warps,
        "launch_pdl": tiles.overlap,
    }
    launch = CachedLaunch(sm90_nvfp4_gemm_few, (programs,), constants)

    def run(x: Tensor, weight: BlockScaledTensor, bias: Tensor | None) -> Tensor:
        y = x.new_empty(M, N)
        sums = counters = y
        if split:
            sums = torch.empty(2 * programs * rows * block_m, dtype=torch.float32, device=x.device)
            counters = arrival_counters(x, count)
        maps = []
        for fields, tensor in ((x_fields, x), (w_fields, weight.codes), (s_fields, weight.scale)):
            maps.append(object.__new__(TensorDescriptor))
            vars(maps[-1]).update(fields, base=tensor)
        maps[0].strides = [x.stride(0), 1]
        launch(*maps, weight.global_scale, x if bias is None else bias, y, sums, counters, M, N, steps, K // 64, units)
        return y

    return run


def registers(tiles: GluonTiles) -> dict[str, int]:
    """Returns how many registers a thread gets, so that `tiles.resident` programs fit on an SM."""
    # Triton adds three idle warps to the fetcher. Registers that the fetching warps do not need go to the warps that
    # multiply.
    threads = 32 * (tiles.warps + 4) * tiles.resident
    return {"maxnreg": min((1 << 16) // threads // 8 * 8, 248), "fetcher_registers": 24 if threads > 1024 else 40}
