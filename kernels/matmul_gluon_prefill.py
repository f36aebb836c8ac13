"""NVFP4 weight-only matmul for many tokens on Hopper: at the rate of a 16-bit product, with W never written in 16 bit.

    one warp fetches, `stages` deep              8 warps multiply: one or two `halves` of 128 rows of W
    x      [block_m, 64 · depth]  BF16  ──TMA──▶ ──wgmma, right operand─────────────────────────▶ acc[half] ──▶ y
    words  [panels, depth, 512]   int32 ──TMA──▶ ──16 bytes a thread──▶ decode ──left operand──▶  +=
    scales                              ──TMA──▶

`kernels/matmul_gluon.py` says how words become operands. Here a tile is tall: 256 rows of W by 128 tokens. Bytes decide
that. A step of 64 columns takes 1024 clocks of the tensor cores; W is cheap to fetch in four bits (9 KB) where x in
sixteen is not (16 KB), so that this tile asks the L2 cache for 25 KB a step, and one of 128 × 256 in 16 bit for 48.
Decoded values never touch shared memory, of whose bandwidth the right operand takes half.

Programs stay on their SM, one each, and take every so many-th tile, in an order that lets those of one moment share x
and W in L2. A tile goes to y through shared memory, by TMA, while the next one is multiplied. Where there are at most
half as many tiles as SMs, all are cut along K into equal shares: a program leaves the float32 sum of its share in
`partial`, and when all have done so, adds up one piece of a tile. They are all on the GPU at that time, for there are
no more than SMs; two streams of different priority that both launch such products could each hold the SMs that the
other waits for, and must not. The order of every sum is fixed: results are the same in every run.

Experts: x is sorted by expert, and a tile is 128 rows of one of them. How many tiles there are is known only on the
GPU, where each program counts them; all are dealt out whole.

Gluon has no interpreter: tests/kernels/test_matmul_gluon_prefill.py reads the PTX and repeats the dealing in Python;
values are tested on a GPU.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quant.formats.tensor import BlockScaledTensor
from quant.kernels.hardware import Hardware, current
from quant.kernels.matmul import arrival_counters
from quant.kernels.matmul_gluon import (
    _LET_NEXT_START,
    _WAIT_FOR_KERNEL,
    _advance,
    _barrier,
    _before,
    _order,
    _program_of,
    _put,
    _span,
    _store,
    descriptors,
)
from quant.kernels.nvfp4_gluon import DECODED, decode
from quant.kernels.tiles import PrefillTiles, prefill_tiles

_ACROSS = gl.constexpr(16)
_FETCHER_REGISTERS = gl.constexpr(40)


@gluon.jit
def _groups(offsets, experts, block_m: gl.constexpr, width: gl.constexpr):
    """By expert: first row, row after its last, tiles of it and of those before."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    index = gl.arange(0, width, layout)
    start = gl.load(offsets + index, mask=index < experts, other=0)
    stop = gl.load(offsets + index + 1, mask=index < experts, other=0)
    tiles = gl.cdiv(stop - start, block_m)
    return index, start, stop, tiles, gl.associative_scan(tiles, 0, _plus)


@gluon.jit
def _plus(a, b):
    return a + b


@gluon.jit
def _whole_tiles(full, tiles_n, offsets, experts, block_m: gl.constexpr, width: gl.constexpr):
    """How many tiles are dealt out whole: known to the host, or counted by expert."""
    if width > 0:
        _, _, _, tiles, _ = _groups(offsets, experts, block_m, width)
        full = gl.sum(tiles, 0) * tiles_n
    return full


@gluon.jit
def _place(
    tile, tiles_m, tiles_n, M, offsets, experts, block_m: gl.constexpr, width: gl.constexpr
):  # fmt: skip
    """Of a tile: its index along W, expert, first row of x, and the row after the last that is its own.

    `_ACROSS` tiles of tokens lie side by side, then come the next rows of W; of experts, all of W for each of theirs.
    """
    if width > 0:
        part = tile // tiles_n
        n = tile - part * tiles_n
        index, start, stop, tiles, upto = _groups(offsets, experts, block_m, width)
        expert = gl.sum((upto <= part).to(gl.int32), 0)
        mine = index == expert
        m = gl.sum(gl.where(mine, start + (part - upto + tiles) * block_m, 0), 0)
        M = gl.sum(gl.where(mine, stop, 0), 0)
    else:
        expert = tile * 0
        first = tile // (_ACROSS * tiles_n) * _ACROSS
        inside = tile - first * tiles_n
        across = gl.minimum(tiles_m - first, _ACROSS)
        n = inside // across
        m = (first + inside - n * across) * block_m
    return n, expert, m, M


@gluon.jit
def _work(full, steps, units):
    """What this program does: first unit of its share, units of it, and units in all."""
    begin, end, each, rest = _span(units)
    whole = gl.cdiv(gl.maximum(full - gl.program_id(0), 0), gl.num_programs(0))
    return begin, end - begin, end - begin + whole * steps, each, rest


@gluon.jit
def _next_tile(done, begin, streamed, full, steps):
    """The tile that comes after `done` units, and which of its units: first of them, and how many."""
    shared = done < streamed
    inside = gl.where(shared, (begin + done) // steps, (done - streamed) // steps)
    start = gl.where(shared, begin + done - inside * steps, 0)
    tile = gl.where(shared, full + inside, gl.program_id(0) + inside * gl.num_programs(0))
    return tile, inside, start, gl.where(shared, gl.minimum(steps - start, streamed - done), steps)


@gluon.jit
def _fetch_w(w_desc, s_desc, w_ring, s_ring, bar, slot, panel, k, tiles_k, panels: gl.constexpr, depth: gl.constexpr):
    for p in gl.static_range(panels):
        row = (panel + p) * tiles_k + k * depth
        tma.async_copy_global_to_shared(w_desc, [row * 2, 0], bar, w_ring.index(slot * panels + p))
        tma.async_copy_global_to_shared(s_desc, [row, 0], bar, s_ring.index(slot * panels + p))


@gluon.jit
def _fetch_x(x_desc, x_ring, bar, slot, m, k, depth: gl.constexpr):
    for d in gl.static_range(depth):
        tma.async_copy_global_to_shared(x_desc, [m, (k * depth + d) * 64], bar, x_ring.index(slot * depth + d))


@gluon.jit
def _produce(
    x_desc, w_desc, s_desc, x_ring, w_ring, s_ring, ready, empty, offsets, experts, M, N, full, steps, units, tiles_m,
    tiles_n, tiles_k, stages: gl.constexpr, depth: gl.constexpr, panels: gl.constexpr, width: gl.constexpr,
    overlap: gl.constexpr,
):  # fmt: skip
    block_m: gl.constexpr = x_desc.block_type.shape[0]
    nbytes: gl.constexpr = depth * (block_m * 128 + panels * 2304)
    full = _whole_tiles(full, tiles_n, offsets, experts, block_m, width)
    begin, streamed, total, _, _ = _work(full, steps, units)
    done = begin * 0
    slot = begin * 0
    phase = slot + 1
    head = slot + 0
    if overlap:
        _order(_LET_NEXT_START)
        # The first stages: the weight at once, x when it is there.
        if total > 0:
            tile, _, start, count = _next_tile(done, begin, streamed, full, steps)
            n, expert, m, _ = _place(tile, tiles_m, tiles_n, M, offsets, experts, block_m, width)
            panel = expert * (N // 64) + n * panels
            head = gl.minimum(count, stages)
            for i in range(head):
                mbarrier.expect(ready.index(i), nbytes)
                _fetch_w(w_desc, s_desc, w_ring, s_ring, ready.index(i), i, panel, start + i, tiles_k, panels, depth)
            _order(_WAIT_FOR_KERNEL)
            for i in range(head):
                _fetch_x(x_desc, x_ring, ready.index(i), i, m, start + i, depth)
                slot, phase = _advance(slot, phase, stages)
    while done < total:
        tile, _, start, count = _next_tile(done, begin, streamed, full, steps)
        n, expert, m, _ = _place(tile, tiles_m, tiles_n, M, offsets, experts, block_m, width)
        panel = expert * (N // 64) + n * panels
        for i in range(head, count):
            mbarrier.wait(empty.index(slot), phase)
            bar = ready.index(slot)
            mbarrier.expect(bar, nbytes)
            _fetch_x(x_desc, x_ring, bar, slot, m, start + i, depth)
            _fetch_w(w_desc, s_desc, w_ring, s_ring, bar, slot, panel, start + i, tiles_k, panels, depth)
            slot, phase = _advance(slot, phase, stages)
        head = slot * 0
        done += count


@gluon.jit
def _operand(words, scales, first: gl.constexpr, d: gl.constexpr, warps: gl.constexpr, layout: gl.constexpr):
    """Tile `d` of a slot, [panels, depth, 128, 4] and [panels, depth, 32, 2], as left operand [16 · warps, 64]."""
    panels: gl.constexpr = warps // 4
    words_layout: gl.constexpr = gl.BlockedLayout([1, 1, 1, 4], [1, 1, 32, 1], [panels, 1, 4, 1], [3, 2, 1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [warps, 1], [1, 0])
    word = words.slice(first, panels, dim=0).slice(d, 1, dim=1).load(words_layout).reshape([32 * warps, 4])
    # Four neighbouring threads read the same scales.
    quads: gl.constexpr = gl.BlockedLayout([1, 1, 1, 1, 2], [1, 1, 8, 4, 1], [panels, 1, 4, 1, 1], [4, 3, 2, 1, 0])
    scales_layout: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [warps, 1], [1, 0])
    scale = scales.slice(first, panels, dim=0).slice(d, 1, dim=1).load(gl.SliceLayout(3, quads)).expand_dims(3)
    scale, _ = gl.broadcast(scale, gl.zeros([panels, 1, 32, 4, 2], gl.int32, quads))
    scale = gl.convert_layout(scale.reshape([32 * warps, 2]), scales_layout, assert_trivial=True)
    value = decode(gl.convert_layout(word, flat, assert_trivial=True), scale, warps)
    return gl.convert_layout(value, layout, assert_trivial=True)


@gluon.jit
def _stage(acc, scale, bias, y_tile, n, N, has_bias: gl.constexpr):
    """accᵀ · scale + bias in BF16 to shared memory, `[tokens, rows]`."""
    rows: gl.constexpr = acc.shape[0]
    block_m: gl.constexpr = acc.shape[1]
    # Rows of the instruction (warp, b, g) to those of W, so that two neighbours are in one thread.
    acc = (acc * scale).reshape([rows // 16, 2, 8, block_m]).permute([0, 2, 1, 3]).reshape([rows, block_m])
    if has_bias:
        n = n + gl.arange(0, rows, gl.SliceLayout(1, acc.type.layout))
        acc += gl.load(bias + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
    y_tile.permute((1, 0)).store(acc.to(gl.bfloat16))


@gluon.jit
def _send(low, high, scale, bias, y_desc, y_tile, n, m, N, halves: gl.constexpr, has_bias: gl.constexpr):
    """A whole tile to y; it is written while the next one is multiplied."""
    rows: gl.constexpr = low.shape[0]
    # The tile before has been read.
    tma.store_wait(0)
    _barrier()
    _stage(low, scale, bias, y_tile.index(0), n, N, has_bias)
    if halves == 2:
        _stage(high, scale, bias, y_tile.index(1), n + rows, N, has_bias)
    fence_async_shared()
    _barrier()
    for half in gl.static_range(halves):
        tma.async_copy_shared_to_global(y_desc, [m, n + half * rows], y_tile.index(half))


@gluon.jit
def _piece_sum(
    partial, lowest, highest, piece, scale, bias, y, n, m, M, N, has_bias: gl.constexpr, like: gl.constexpr,
    rows: gl.constexpr, width: gl.constexpr, tile_size: gl.constexpr,
):  # fmt: skip
    """Adds what programs `lowest` to `highest` left of a piece [rows, width] of a tile, and stores it."""
    row = gl.arange(0, rows, gl.SliceLayout(1, like))
    column = gl.arange(0, width, gl.SliceLayout(0, like))
    inside = piece * (rows * width) + row[:, None] * width + column[None, :]
    total = gl.zeros((rows, width), gl.float32, like)
    # Four reads under way at once: each takes half a microsecond.
    for group in range(lowest, highest + 1, 4):
        for j in gl.static_range(4):
            other = group + j
            place = partial + (2 * other + (other == lowest).to(gl.int32)).to(gl.int64) * tile_size
            # Past L1, which knows nothing of what other programs wrote.
            there = (inside >= 0) & (other <= highest)
            total += gl.load(place + inside, mask=there, other=0.0, cache_modifier=".cg")
    _store(total, scale, bias, y, n, m, M, N, has_bias)


@gluon.jit
def _consume(
    x_ring, words, scales, y_tile, y_desc, ready, empty, global_scale, bias, y, partial, counter, offsets, experts,
    M, N, full, steps, units, tiles_m, tiles_n, stages: gl.constexpr, depth: gl.constexpr, halves: gl.constexpr,
    block_m: gl.constexpr, width: gl.constexpr, has_bias: gl.constexpr, split: gl.constexpr, overlap: gl.constexpr,
):  # fmt: skip
    warps: gl.constexpr = gl.num_warps()
    rows: gl.constexpr = 16 * warps
    panels: gl.constexpr = warps // 4
    piece_m: gl.constexpr = block_m if block_m < 64 else 64
    across: gl.constexpr = block_m // piece_m
    pieces: gl.constexpr = halves * across
    tile_size: gl.constexpr = halves * rows * block_m
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, block_m, 16])
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, piece_m, 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=layout, k_width=2)
    full = _whole_tiles(full, tiles_n, offsets, experts, block_m, width)
    begin, streamed, total, each, rest = _work(full, steps, units)
    program, programs = gl.program_id(0), gl.num_programs(0)
    if overlap:
        _order(_WAIT_FOR_KERNEL)
    done = begin * 0
    slot = begin * 0
    phase = begin * 0
    while done < total:
        tile, inside, start, count = _next_tile(done, begin, streamed, full, steps)
        low = gl.zeros((rows, block_m), gl.float32, layout)
        high = low
        for step in range(count):
            mbarrier.wait(ready.index(slot), phase)
            for d in gl.static_range(depth):
                tokens = x_ring.index(slot * depth + d).permute((1, 0))
                a = _operand(words.index(slot), scales.index(slot), 0, d, warps, operand)
                low = warpgroup_mma(a, tokens, low, is_async=True)
                # The product before this one has read its operands; this one goes on while the next are decoded.
                if halves == 2:
                    low, high = warpgroup_mma_wait(1, deps=[low, high])
                else:
                    low = warpgroup_mma_wait(1, deps=[low])
                if d == 0:
                    mbarrier.arrive(empty.index(_before(slot, stages)), count=1, pred=step > 0)
                if halves == 2:
                    a = _operand(words.index(slot), scales.index(slot), panels, d, warps, operand)
                    high = warpgroup_mma(a, tokens, high, is_async=True)
                    low, high = warpgroup_mma_wait(1, deps=[low, high])
            slot, phase = _advance(slot, phase, stages)
        if halves == 2:
            low, high = warpgroup_mma_wait(0, deps=[low, high])
        else:
            low = warpgroup_mma_wait(0, deps=[low])
        mbarrier.arrive(empty.index(_before(slot, stages)), count=1)
        done += count
        n, expert, m, last = _place(tile, tiles_m, tiles_n, M, offsets, experts, block_m, width)
        n = n * (halves * rows)
        scale = gl.load(global_scale + expert).to(gl.float32) * DECODED
        if split and count < steps:
            # Two places a program: for a tile that it begins, and for one that an earlier program began.
            place = partial + (2 * program + (start == 0).to(gl.int32)).to(gl.int64) * tile_size
            _put(low, place)
            if halves == 2:
                _put(high, place + rows * block_m)
            _barrier()
            gl.atomic_add(counter + inside, 1, sem="release")
        elif width > 0:
            if m + block_m > last:
                # Rows of other experts follow.
                _store(low, scale, bias, y, n, m, last, N, has_bias)
                if halves == 2:
                    _barrier()
                    _store(high, scale, bias, y, n + rows, m, last, N, has_bias)
            else:
                _send(low, high, scale, bias, y_desc, y_tile, n, m, N, halves, has_bias)
        else:
            _send(low, high, scale, bias, y_desc, y_tile, n, m, N, halves, has_bias)
    tma.store_wait(0)
    if split:
        for piece in range(program, units // steps * pieces, programs):
            tile = piece // pieces
            piece = piece - tile * pieces
            lowest = _program_of(tile * steps, each, rest)
            highest = _program_of(tile * steps + steps - 1, each, rest)
            if highest > lowest:
                arrivals = gl.atomic_add(counter + tile, 0, sem="acquire")
                while arrivals < highest - lowest + 1:
                    arrivals = gl.atomic_add(counter + tile, 0, sem="acquire")
                n, _, m, _ = _place(full + tile, tiles_m, tiles_n, M, offsets, experts, block_m, width)
                half = piece // across
                n = n * (halves * rows) + half * rows
                m += (piece - half * across) * piece_m
                scale = gl.load(global_scale).to(gl.float32) * DECODED
                _piece_sum(partial, lowest, highest, piece, scale, bias, y, n, m, M, N, has_bias, narrow,
                           rows, piece_m, tile_size)  # fmt: skip
                # Whoever takes the last piece leaves the counter as it was found.
                if gl.atomic_add(counter + tile, 1, sem="relaxed") == highest - lowest + pieces:
                    gl.store(counter + tile, 0)


@gluon.jit(do_not_specialize=["experts", "M", "full", "steps", "units", "tiles_m", "tiles_n", "tiles_k"])
def prefill_kernel(
    x_desc, w_desc, s_desc, y_desc, global_scale, bias, y, partial, counter, offsets, experts, M, N, full, steps, units,
    tiles_m, tiles_n, tiles_k, has_bias: gl.constexpr, halves: gl.constexpr, stages: gl.constexpr,
    depth: gl.constexpr, width: gl.constexpr, split: gl.constexpr, overlap: gl.constexpr,
):  # fmt: skip
    """See the module docstring; `steps` units make a tile, `units` are those of the tiles that are cut.

    With `width`, a power of two from `experts` on, rows of x are those of experts, from `offsets` on.
    """
    panels: gl.constexpr = halves * gl.num_warps() // 4
    block_m: gl.constexpr = x_desc.block_type.shape[0]
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    x_ring = gl.allocate_shared_memory(gl.bfloat16, [stages * depth, block_m, 64], x_desc.layout)
    w_ring = gl.allocate_shared_memory(gl.int32, [stages * panels, 2 * depth, 256], w_desc.layout)
    s_ring = gl.allocate_shared_memory(gl.int32, [stages * panels, depth, 64], s_desc.layout)
    words = w_ring._reinterpret(gl.int32, [stages, panels, depth, 128, 4], plain)
    scales = s_ring._reinterpret(gl.int32, [stages, panels, depth, 32, 2], plain)
    y_tile = gl.allocate_shared_memory(gl.bfloat16, [halves, block_m, 16 * gl.num_warps()], y_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(stages):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    gl.warp_specialize(
        [
            (_consume, (x_ring, words, scales, y_tile, y_desc, ready, empty, global_scale, bias, y, partial, counter,
                        offsets, experts, M, N, full, steps, units, tiles_m, tiles_n, stages, depth, halves, block_m,
                        width, has_bias, split, overlap)),
            (_produce, (x_desc, w_desc, s_desc, x_ring, w_ring, s_ring, ready, empty, offsets, experts, M, N, full,
                        steps, units, tiles_m, tiles_n, tiles_k, stages, depth, panels, width, overlap)),
        ],
        [1],
        [_FETCHER_REGISTERS],
    )  # fmt: skip


def linear(x: torch.Tensor, weight: BlockScaledTensor, bias: torch.Tensor | None, tiles: PrefillTiles) -> torch.Tensor:
    """`x @ weight.T + bias`; the arguments have been checked.

    Args:
        x: `[tokens, in]`, BF16, rows contiguous and 16-byte aligned.
        weight: prepacked NVFP4, `[out, in]`.
        bias: `[out]`, or None.
        tiles: how to cut it up.

    Returns:
        `[tokens, out]`, BF16.
    """
    y = x.new_empty(len(x), weight.shape[0])
    if len(x):
        count = triton.cdiv(y.shape[1], 128 * tiles.halves) * triton.cdiv(len(x), tiles.block_m)
        # Parts of a tile wait for each other, so that all programs must be there at once.
        programs = min(tiles.programs, current(x.device.index or 0).sms)
        _launch(x, weight, bias, y, None, tiles, *deal(count, programs))
    return y


def grouped_linear(x: torch.Tensor, weight: BlockScaledTensor, offsets: torch.Tensor) -> torch.Tensor:
    """As `matmul_grouped.grouped_linear`, for BF16 rows and a prepacked weight `[experts, out, in]`."""
    y = x.new_empty(len(x), weight.shape[1])
    if len(x):
        tiles = grouped_tiles(len(x), len(offsets) - 1, y.shape[1], current(x.device.index or 0))
        _launch(x, weight, None, y, offsets, tiles, tiles.programs, 0)
    return y


def _launch(
    x: torch.Tensor,
    weight: BlockScaledTensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    offsets: torch.Tensor | None,
    tiles: PrefillTiles,
    programs: int,
    full: int,
) -> None:
    (M, K), N = x.shape, y.shape[1]
    rows, block_m, depth = 128 * tiles.halves, tiles.block_m, tiles.depth
    tiles_m, tiles_n, steps = triton.cdiv(M, block_m), triton.cdiv(N, rows), triton.cdiv(K // 64, depth)
    cut = 0 if offsets is not None else tiles_m * tiles_n - full
    partial = counter = y
    if cut:
        partial = torch.empty(2 * programs * rows * block_m, dtype=torch.float32, device=x.device)
        counter = arrival_counters(weight.codes, cut)
    y_layout = gl.NVMMASharedLayout.get_default_for([block_m, 128], gl.bfloat16)
    prefill_kernel[(programs,)](
        *descriptors(x, weight, block_m, depth),
        TensorDescriptor(y, [M, N], [N, 1], [block_m, 128], y_layout),
        weight.global_scale, x if bias is None else bias, y, partial, counter, y if offsets is None else offsets,
        1 if offsets is None else len(offsets) - 1, M, N, full, steps, cut * steps, tiles_m, tiles_n, K // 64,
        has_bias=bias is not None, halves=tiles.halves, stages=tiles.stages, depth=depth,
        width=0 if offsets is None else triton.next_power_of_2(max(len(offsets) - 1, 32)), split=cut > 0,
        overlap=tiles.overlap, num_warps=8, maxnreg=168, launch_pdl=tiles.overlap,
    )  # fmt: skip


def deal(tiles: int, programs: int) -> tuple[int, int]:
    """Programs, and how many of `tiles` are dealt out whole: all, or none, where each program gets a part of one.

    What a last, short round of whole tiles leaves idle costs less than cutting its tiles: on an H100, 28672 × 4096 by
    256 tokens took 91 us in two rounds, and 117 with the second cut.
    """
    parts = programs // tiles
    return (tiles * parts, 0) if parts > 1 else (min(tiles, programs), tiles)


def grouped_tiles(tokens: int, experts: int, rows: int, hardware: Hardware) -> PrefillTiles:
    """A tile for half as much again as an expert gets on average, as tall as leaves one for every SM.

    Few experts get much more than that, and those that do have one tile more.
    """
    block_m = next(size for size in (16, 32, 64, 128) if 2 * size >= 3 * tokens / experts or size == 128)
    enough = min(tokens, experts) * triton.cdiv(rows, 256) >= hardware.sms
    return prefill_tiles(block_m, 2 if enough else 1, hardware)
