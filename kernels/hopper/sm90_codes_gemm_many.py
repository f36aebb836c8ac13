"""This kernel multiplies many tokens by a quantized weight on Hopper at the rate of a 16-bit matmul; W stays in codes.

    one warp fetches, `stages` deep              8 warps multiply: one or two `halves` of 128 rows of W
    x      [block_m, 64 · depth]  BF16  ──TMA──▶ ──wgmma, right operand─────────────────────────▶ acc[half] ──▶ y
    words  [panels, depth, 512]   int32 ──TMA──▶ ──16 bytes a thread──▶ decode ──left operand──▶  +=
    scales                              ──TMA──▶

`kernels/hopper/sm90_nvfp4_gemm_few.py` describes how words become operands. Tiles are 256 rows of W by 128 tokens, or
128 by 256: a step of 64 columns takes 1024 clocks of the tensor cores either way. W is cheap to fetch in four bits
(4.5 KB for 128 rows) and x in sixteen is not (16 KB for 128 tokens). So the tall tile asks the L2 cache for 25 KB a
step and the wide tile for 37, where a 16-bit matmul asks for 48; the wide tile decodes half as much. Decoded values
never touch shared memory, of whose bandwidth the right operand takes half. Other widths, a power of two or the sum of
two (80, 144, 160), exist so that the tiles of more shapes divide evenly among the SMs: a `wide` accumulator and its
`tail`.

A product whose left operand is in registers stalls its warps until the tensor cores have taken nearly all of it. With
one group, 8 warps share a barrier and decode while a product of each half runs. With two `groups` of 4 warps, which
share only the barriers of the slots, one decodes while the other multiplies, and while the end of its own product runs
(sums of 256 tokens leave no registers for that). This helps where products take as long as decoding: with 128 tokens
it is hardly better than one group. With fewer tokens, words are read before the previous product starts (`early`),
and slots are deeper, which spreads the work that is done once a slot.

Each program stays on its SM and takes every n-th tile, in an order in which tiles computed at one time share x and W
in L2. A tile goes to y through shared memory, by TMA, while the next one is multiplied. The tiles of the last round
are cut along K where that gives every SM some work (`tiles.deal`): each program computes a part of one before its
whole tiles, leaves the float32 sum in `partial`, and at its end adds up some pieces of that tile. The order of every
sum is fixed, so results are the same in every run.

No program waits long for another, because each of two streams could hold the SMs that the other needs. After `LOOKS`
polls a program stops waiting, and the last program to arrive adds up its pieces. A tile's counter holds both facts and
is updated atomically: how many parts have arrived, and one bit for each program that has stopped waiting. So either
the owner of a piece sees all parts, or the last part sees that the owner has gone.

Codes in the checkpoint's order (`tiles.STORED_FORMATS`) can take the place of words; `sm90_decode_codes.py` decodes
them. They take more bytes and more instructions than words, so wide tiles are best from fewer tokens on.

With experts, x is sorted by expert, and a tile is 128 rows of one expert. The number of tiles is known only on the GPU,
where each program counts them; all are dealt out whole.

Gluon has no interpreter: tests/kernels/hopper/test_sm90_codes_gemm_many.py reads the PTX and runs the index arithmetic
in PyTorch; values are tested on a GPU.
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
from quant.kernels.counters import arrival_counters
from quant.kernels.hardware import Hardware, current
from quant.kernels.hopper.sm90_decode_codes import (
    code_pairs,
    codes_descriptor,
    codes_operand,
    load_scales,
    scale_rows,
    scales_by_row,
    stored_scales,
    tile_bytes,
    whole_scale,
)
from quant.kernels.hopper.sm90_decode_nvfp4 import DECODED, decode
from quant.kernels.hopper.sm90_nvfp4_gemm_few import (
    _LET_NEXT_START,
    _WAIT_FOR_KERNEL,
    _advance,
    _barrier,
    _before,
    _halve,
    _order,
    _ring_barriers,
    _store,
    _weight_rings,
    descriptors,
    fields_of,
    tile_fields,
)
from quant.kernels.launch_cache import Repeated
from quant.kernels.layout import is_prepacked
from quant.kernels.tiles import Launch, PrefillTiles, deal, prefill_tiles

_ACROSS = gl.constexpr(16)
_REGISTERS = gl.constexpr(232)
_FETCHER_REGISTERS = gl.constexpr(40)
# More than exist: Triton then moves no registers, and all threads keep the number that the launch gave them.
_UNMOVED_REGISTERS = gl.constexpr(256)
_ARRIVAL_BITS = gl.constexpr(16)
_ARRIVALS = gl.constexpr((1 << 16) - 1)
_WORDS = gl.constexpr("words")
LOOKS = 64
"""Polls for the parts of its tile after which a program leaves its pieces to the last program to arrive."""


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
def _turns(full, cut, parts):
    """First and end of this program's turns: turn 0 is a part of a tile that is cut, each later one a whole tile."""
    program = gl.program_id(0)
    whole = gl.cdiv(gl.maximum(full - program, 0), gl.num_programs(0))
    return (program >= cut * parts).to(gl.int32), 1 + whole


@gluon.jit
def _turn(turn, full, steps, parts, unroll: gl.constexpr, split: gl.constexpr):
    """Tile of a turn, and which of its fetches: first of them, and how many; a unit has `unroll` of them."""
    program = gl.program_id(0)
    tile = program + (turn - 1) * gl.num_programs(0)
    start = turn * 0
    count = start + steps
    if split:
        shared = turn == 0
        part = program % parts
        tile = gl.where(shared, full + program // parts, tile)
        start = gl.where(shared, steps * part // parts, 0)
        count = gl.where(shared, steps * (part + 1) // parts - start, steps)
    return tile, start * unroll, count * unroll


@gluon.jit
def _fetch_w(
    w_desc, s_desc, w_ring, s_ring, bar, slot, panel, k, tiles_k, panels: gl.constexpr, depth: gl.constexpr,
    form: gl.constexpr,
):  # fmt: skip
    if form == _WORDS:
        for p in gl.static_range(panels):
            row = (panel + p) * tiles_k + k * depth
            tma.async_copy_global_to_shared(w_desc, [row * 2, 0], bar, w_ring.index(slot * panels + p))
            tma.async_copy_global_to_shared(s_desc, [row, 0], bar, s_ring.index(slot * panels + p))
    else:
        for d in gl.static_range(depth):
            column = (k * depth + d) * 32
            tma.async_copy_global_to_shared(w_desc, [0, panel * 32, column], bar, w_ring.index(slot * depth + d))


@gluon.jit
def _fetch_x(
    x_desc, tail_desc, x_ring, tail_ring, bar, slot, m, k, depth: gl.constexpr, tail: gl.constexpr
):  # fmt: skip
    wide: gl.constexpr = x_desc.block_type.shape[0]
    for d in gl.static_range(depth):
        column = (k * depth + d) * 64
        tma.async_copy_global_to_shared(x_desc, [m, column], bar, x_ring.index(slot * depth + d))
        if tail:
            tma.async_copy_global_to_shared(tail_desc, [m + wide, column], bar, tail_ring.index(slot * depth + d))


@gluon.jit
def _produce(
    x_desc, tail_desc, w_desc, s_desc, x_ring, tail_ring, w_ring, s_ring, ready, empty, offsets, experts, M, N, full,
    cut, parts, steps, tiles_m, tiles_n, tiles_k, stages: gl.constexpr, depth: gl.constexpr, panels: gl.constexpr,
    tail: gl.constexpr, width: gl.constexpr, split: gl.constexpr, overlap: gl.constexpr,
    form: gl.constexpr, unroll: gl.constexpr,
):  # fmt: skip
    block_m: gl.constexpr = x_desc.block_type.shape[0] + tail
    nbytes: gl.constexpr = depth * (block_m * 128 + panels * (2304 if form == _WORDS else tile_bytes(form)))
    full = _whole_tiles(full, tiles_n, offsets, experts, block_m, width)
    turn, end = _turns(full, cut, parts)
    slot = turn * 0
    phase = slot + 1
    head = slot + 0
    if overlap:
        _order(_LET_NEXT_START)
        # The first stages: the weight at once, x when it is there.
        if turn < end:
            tile, start, count = _turn(turn, full, steps, parts, unroll, split)
            n, expert, m, _ = _place(tile, tiles_m, tiles_n, M, offsets, experts, block_m, width)
            panel = expert * (N // 64) + n * panels
            head = gl.minimum(count, stages)
            for i in range(head):
                mbarrier.expect(ready.index(i), nbytes)
                _fetch_w(w_desc, s_desc, w_ring, s_ring, ready.index(i), i, panel, start + i, tiles_k, panels, depth,
                         form)  # fmt: skip
            _order(_WAIT_FOR_KERNEL)
            for i in range(head):
                _fetch_x(x_desc, tail_desc, x_ring, tail_ring, ready.index(i), i, m, start + i, depth, tail)
                slot, phase = _advance(slot, phase, stages)
    while turn < end:
        tile, start, count = _turn(turn, full, steps, parts, unroll, split)
        n, expert, m, _ = _place(tile, tiles_m, tiles_n, M, offsets, experts, block_m, width)
        panel = expert * (N // 64) + n * panels
        for i in range(head, count):
            mbarrier.wait(empty.index(slot), phase)
            bar = ready.index(slot)
            mbarrier.expect(bar, nbytes)
            _fetch_x(x_desc, tail_desc, x_ring, tail_ring, bar, slot, m, start + i, depth, tail)
            _fetch_w(w_desc, s_desc, w_ring, s_ring, bar, slot, panel, start + i, tiles_k, panels, depth, form)
            slot, phase = _advance(slot, phase, stages)
        head = slot * 0
        turn += 1


@gluon.jit
def _load_words(words, scales, first: gl.constexpr, d: gl.constexpr, warps: gl.constexpr):
    """Of tile `d` of a slot, [panels, depth, 128, 4] and [panels, depth, 32, 2]: a thread's four words, two scales."""
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
    return gl.convert_layout(word, flat, assert_trivial=True), scale


@gluon.jit
def _weights(
    words, scales, held, slot, panel: gl.constexpr, d: gl.constexpr, depth: gl.constexpr, form: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """64 columns of the rows of one half, from panel `panel` of a slot on, as left operand."""
    warps: gl.constexpr = gl.num_warps()
    if form == _WORDS:
        word, scale = _load_words(words.index(slot), scales.index(slot), panel, d, warps)
        return gl.convert_layout(decode(word, scale, warps), layout, assert_trivial=True)
    else:
        return codes_operand(words.index(slot * depth + d), held, panel * 64, form, warps, layout)


@gluon.jit
def _whole_scale(global_scale, block_scale, expert, form: gl.constexpr):
    """The one factor of the whole matrix, applied to the finished sum."""
    if form == _WORDS:
        return gl.load(global_scale + expert).to(gl.float32) * DECODED
    elif whole_scale(form):
        return gl.load(block_scale)
    else:
        return 1.0


@gluon.jit
def _by_row(acc, row_scale, n, N, natural: gl.constexpr, form: gl.constexpr):
    """Channels' scales; `natural` says that rows of the sum are in the order of W, not in (warp, b, g)."""
    if scales_by_row(form):
        i = gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
        n = n + (i if natural else i // 16 * 16 + i % 8 * 2 + i // 8 % 2)
        acc *= gl.load(row_scale + n, mask=n < N, other=0.0)[:, None]
    return acc


@gluon.jit
def _stage(acc, scale, row_scale, bias, y_tile, n, N, has_bias: gl.constexpr, form: gl.constexpr):
    """accᵀ · scale + bias in BF16 to shared memory, `[tokens, rows]`."""
    rows: gl.constexpr = acc.shape[0]
    block_m: gl.constexpr = acc.shape[1]
    # From the instruction's row order (warp, b, g) to that of W: a thread then holds two neighbours.
    acc = (acc * scale).reshape([rows // 16, 2, 8, block_m]).permute([0, 2, 1, 3]).reshape([rows, block_m])
    acc = _by_row(acc, row_scale, n, N, True, form)
    if has_bias:
        n = n + gl.arange(0, rows, gl.SliceLayout(1, acc.type.layout))
        acc += gl.load(bias + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
    y_tile.permute((1, 0)).store(acc.to(gl.bfloat16))


@gluon.jit
def _send(
    low, low_tail, high, high_tail, scale, row_scale, bias, y_desc, tail_desc, y_tile, y_tail, n, m, N,
    first: gl.constexpr, halves: gl.constexpr, tail: gl.constexpr, has_bias: gl.constexpr, form: gl.constexpr,
):  # fmt: skip
    """A whole tile to y; it is written while the next one is multiplied."""
    rows: gl.constexpr = low.shape[0]
    wide: gl.constexpr = low.shape[1]
    # The tile before has been read.
    tma.store_wait(0)
    _barrier()
    _stage(low, scale, row_scale, bias, y_tile.index(first), n, N, has_bias, form)
    if tail:
        _stage(low_tail, scale, row_scale, bias, y_tail.index(first), n, N, has_bias, form)
    if halves == 2:
        _stage(high, scale, row_scale, bias, y_tile.index(first + 1), n + rows, N, has_bias, form)
        if tail:
            _stage(high_tail, scale, row_scale, bias, y_tail.index(first + 1), n + rows, N, has_bias, form)
    fence_async_shared()
    _barrier()
    for half in gl.static_range(halves):
        tma.async_copy_shared_to_global(y_desc, [m, n + half * rows], y_tile.index(first + half))
        if tail:
            tma.async_copy_shared_to_global(tail_desc, [m + wide, n + half * rows], y_tail.index(first + half))


@gluon.jit
def _pass(low, low_tail, high, high_tail, under_way: gl.constexpr, halves: gl.constexpr, tail: gl.constexpr):
    """Waits until so many products of a tile's halves are under way."""
    if halves == 2 and tail > 0:
        low, low_tail, high, high_tail = warpgroup_mma_wait(2 * under_way, deps=[low, low_tail, high, high_tail])
    elif halves == 2:
        low, high = warpgroup_mma_wait(under_way, deps=[low, high])
    elif tail > 0:
        low, low_tail = warpgroup_mma_wait(2 * under_way, deps=[low, low_tail])
    else:
        low = warpgroup_mma_wait(under_way, deps=[low])
    return low, low_tail, high, high_tail


@gluon.constexpr_function
def _piece_size(tail):
    """Tokens of a piece of a tile, which programs that share it add up."""
    return 16 if tail == 16 else 32


@gluon.jit
def _leave(acc, place, piece: gl.constexpr):
    """Writes a sum in pieces of so many tokens; neighbouring threads write neighbouring 16 bytes."""
    rows: gl.constexpr = acc.shape[0]
    columns: gl.constexpr = acc.shape[1]
    if columns > piece:
        low, high = _halve(acc)
        _leave(low, place, piece)
        _leave(high, place + rows * (columns // 2), piece)
    else:
        flat = acc.reshape([rows // 16, 2, 8, columns // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5])
        flat = flat.reshape([rows * columns // 4, 4])
        layout: gl.constexpr = flat.type.layout
        i = gl.arange(0, rows * columns // 4, gl.SliceLayout(1, layout))
        j = gl.arange(0, 4, gl.SliceLayout(0, layout))
        gl.store(place + (i[:, None] * 4 + j[None, :]), flat)


@gluon.jit
def _piece_sum(
    partial, lowest, parts, piece, scale, row_scale, bias, y, n, m, M, N, groups: gl.constexpr,
    has_bias: gl.constexpr, rows: gl.constexpr, columns: gl.constexpr, tile_size: gl.constexpr, form: gl.constexpr,
):  # fmt: skip
    """Adds the partial sums of programs from `lowest` on for a piece `[rows, columns]` of their tile, and stores it."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [gl.num_warps(), 1], [1, 0])
    size: gl.constexpr = rows * columns
    i = gl.arange(0, size // 4, gl.SliceLayout(1, layout))
    j = gl.arange(0, 4, gl.SliceLayout(0, layout))
    inside = piece * size + (i[:, None] * 4 + j[None, :])
    total = gl.zeros((size // 4, 4), gl.float32, layout)
    # Four reads under way at once: each takes half a microsecond.
    for first in range(0, parts, 4):
        for other in gl.static_range(4):
            place = partial + (lowest + (first + other) * groups).to(gl.int64) * tile_size
            # Bypass L1, which is not coherent with the writes of other programs.
            there = (inside >= 0) & (first + other < parts)
            total += gl.load(place + inside, mask=there, other=0.0, cache_modifier=".cg")
    total = total.reshape([columns // 8, rows // 16, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5]).reshape([rows, columns])
    total = _by_row(total, row_scale, n, N, False, form)
    _store(total, scale, bias, y, n, m, M, N, has_bias)


@gluon.jit
def _finish(
    partial, counter, abandoned, scale, row_scale, bias, y, full, cut, parts, looks, tiles_m, tiles_n, M, N, offsets,
    experts, group: gl.constexpr, groups: gl.constexpr, has_bias: gl.constexpr, halves: gl.constexpr,
    rows: gl.constexpr, block_m: gl.constexpr, tail: gl.constexpr, width: gl.constexpr, form: gl.constexpr,
):  # fmt: skip
    """Reduces this program's pieces of the tile that it shares, and the pieces that other programs left to it."""
    program = gl.program_id(0)
    if program < cut * parts:
        size: gl.constexpr = _piece_size(tail)
        across: gl.constexpr = block_m // size
        tile = program // parts
        part = program - tile * parts
        counter += tile * groups + group
        arrivals = gl.atomic_add(counter, 0, sem="acquire")
        while ((arrivals & _ARRIVALS) < parts) & (looks > 0):
            arrivals = gl.atomic_add(counter, 0, sem="acquire")
            looks -= 1
        mine = 1 << (part + _ARRIVAL_BITS)
        arrivals = gl.atomic_add(counter, mine, sem="acq_rel")
        # Whoever comes last leaves the counter as it was found.
        if arrivals + mine == parts + ((1 << parts) - 1 << _ARRIVAL_BITS):
            gl.store(counter, 0)
        todo = abandoned | gl.where((arrivals & _ARRIVALS) == parts, 1 << part, 0)
        n, _, m, _ = _place(full + tile, tiles_m, tiles_n, M, offsets, experts, block_m, width)
        for piece in range(halves * across):
            if (todo >> (piece % parts)) & 1 != 0:
                half = piece // across
                lowest = (program - part) * groups + group
                _piece_sum(partial, lowest, parts, piece, scale, row_scale, bias, y,
                           ((n * groups + group) * halves + half) * rows, m + (piece - half * across) * size, M, N,
                           groups, has_bias, rows, size, halves * rows * block_m, form)  # fmt: skip


@gluon.jit
def _multiply(a, x_ring, tail_ring, at, acc, acc_tail, tail_operand: gl.constexpr, tail: gl.constexpr):
    """Starts the products of `a` by the tokens at place `at` of the rings."""
    acc = warpgroup_mma(a, x_ring.index(at).permute((1, 0)), acc, is_async=True)
    if tail:
        a = gl.convert_layout(a, tail_operand, assert_trivial=True)
        acc_tail = warpgroup_mma(a, tail_ring.index(at).permute((1, 0)), acc_tail, is_async=True)
    return acc, acc_tail


@gluon.jit
def _consume(
    x_ring, tail_ring, words, scales, y_tile, y_tail, y_desc, y_tail_desc, ready, empty, global_scale, block_scale,
    scale_stride, bias, y, partial, counter, offsets, experts, M, N, full, cut, parts, looks, steps, tiles_m, tiles_n,
    groups: gl.constexpr, stages: gl.constexpr, depth: gl.constexpr, halves: gl.constexpr, wide: gl.constexpr,
    tail: gl.constexpr, width: gl.constexpr, has_bias: gl.constexpr, split: gl.constexpr, overlap: gl.constexpr,
    form: gl.constexpr, unroll: gl.constexpr, ahead: gl.constexpr, early: gl.constexpr,
    group: gl.constexpr,
):  # fmt: skip
    warps: gl.constexpr = gl.num_warps()
    rows: gl.constexpr = 16 * warps
    panels: gl.constexpr = warps // 4
    block_m: gl.constexpr = wide + tail
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, wide, 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=layout, k_width=2)
    tail_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, tail if tail else wide, 16])
    tail_operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=tail_layout, k_width=2)
    full = _whole_tiles(full, tiles_n, offsets, experts, block_m, width)
    turn, end = _turns(full, cut, parts)
    if overlap:
        _order(_WAIT_FOR_KERNEL)
    slot = turn * 0
    phase = turn * 0
    abandoned = turn * 0
    while turn < end:
        tile, start, count = _turn(turn, full, steps, parts, unroll, split)
        n, expert, m, last = _place(tile, tiles_m, tiles_n, M, offsets, experts, block_m, width)
        n = (n * groups + group) * (halves * rows)
        low = gl.zeros((rows, wide), gl.float32, layout)
        high = low
        low_tail = low
        if tail:
            low_tail = gl.zeros((rows, tail), gl.float32, tail_layout)
        high_tail = low_tail
        rows_low = scale_rows(block_scale, scale_stride, n, N, form, warps)
        held_low = load_scales(rows_low, scale_stride, start * depth, form)
        held_high = held_low
        if halves == 2:
            rows_high = scale_rows(block_scale, scale_stride, n + rows, N, form, warps)
            held_high = load_scales(rows_high, scale_stride, start * depth, form)
        if early:
            mbarrier.wait(ready.index(slot), phase)
            word, word_scales = _load_words(words.index(slot), scales.index(slot), group, 0, warps)
        for step in range(0, count, unroll):
            for u in gl.static_range(unroll):
                if early:
                    next_slot, next_phase = _advance(slot, phase, stages)
                else:
                    mbarrier.wait(ready.index(slot), phase)
                for i in gl.static_range(depth * halves):
                    at = slot * depth + i // halves
                    if i % halves == 0:
                        # A step ahead: block scales come from L2, and not through the ring.
                        now_low, now_high = held_low, held_high
                        k = (start + step + u) * depth + i // halves + 1
                        held_low = load_scales(rows_low, scale_stride, k, form)
                        if halves == 2:
                            held_high = load_scales(rows_high, scale_stride, k, form)
                    if early:
                        a = gl.convert_layout(decode(word, word_scales, warps), operand, assert_trivial=True)
                        # The next words, before this product holds up their warps.
                        following = slot
                        if i + 1 == depth:
                            mbarrier.wait(ready.index(next_slot), next_phase, pred=step + u + 1 < count)
                            following = next_slot
                        word, word_scales = _load_words(words.index(following), scales.index(following), group,
                                                        (i + 1) % depth, warps)  # fmt: skip
                    else:
                        a = _weights(words, scales, now_low if i % halves == 0 else now_high, slot,
                                     (group * halves + i % halves) * panels, i // halves, depth, form,
                                     operand)  # fmt: skip
                    if i % halves == 0:
                        low, low_tail = _multiply(a, x_ring, tail_ring, at, low, low_tail, tail_operand, tail)
                    else:
                        high, high_tail = _multiply(a, x_ring, tail_ring, at, high, high_tail, tail_operand, tail)
                    low, low_tail, high, high_tail = _pass(low, low_tail, high, high_tail, ahead, halves, tail)
                    if ahead == 1 and i == 0:
                        mbarrier.arrive(empty.index(_before(slot, stages)), count=1, pred=step + u > 0)
                if ahead == 0:
                    mbarrier.arrive(empty.index(slot), count=1)
                slot, phase = _advance(slot, phase, stages)
        if ahead == 1:
            low, low_tail, high, high_tail = _pass(low, low_tail, high, high_tail, 0, halves, tail)
            mbarrier.arrive(empty.index(_before(slot, stages)), count=1)
        if split and turn == 0:
            place = partial + (gl.program_id(0) * groups + group).to(gl.int64) * (halves * rows * block_m)
            size: gl.constexpr = _piece_size(tail)
            _leave(low, place, size)
            if tail:
                _leave(low_tail, place + rows * wide, size)
            if halves == 2:
                _leave(high, place + rows * block_m, size)
                if tail:
                    _leave(high_tail, place + rows * (block_m + wide), size)
            _barrier()
            arrivals = gl.atomic_add(counter + (gl.program_id(0) // parts * groups + group), 1, sem="acq_rel")
            abandoned = gl.where((arrivals & _ARRIVALS) == parts - 1, arrivals >> _ARRIVAL_BITS, 0)
        else:
            scale = _whole_scale(global_scale, block_scale, expert, form)
            if width > 0:
                if m + block_m > last:
                    # Rows of other experts follow.
                    _store(low, scale, bias, y, n, m, last, N, has_bias)
                    if halves == 2:
                        _barrier()
                        _store(high, scale, bias, y, n + rows, m, last, N, has_bias)
                else:
                    _send(low, low_tail, high, high_tail, scale, block_scale, bias, y_desc, y_tail_desc, y_tile,
                          y_tail, n, m, N, group * halves, halves, tail, has_bias, form)  # fmt: skip
            else:
                _send(low, low_tail, high, high_tail, scale, block_scale, bias, y_desc, y_tail_desc, y_tile,
                      y_tail, n, m, N, group * halves, halves, tail, has_bias, form)  # fmt: skip
        turn += 1
    tma.store_wait(0)
    if split:
        scale = _whole_scale(global_scale, block_scale, 0, form)
        _finish(partial, counter, abandoned, scale, block_scale, bias, y, full, cut, parts, looks, tiles_m, tiles_n,
                M, N, offsets, experts, group, groups, has_bias, halves, rows, block_m, tail, width, form)  # fmt: skip


@gluon.jit
def _group(arguments, group: gl.constexpr):
    _consume(*arguments, group)


@gluon.jit
def _start(consumed, produced, groups: gl.constexpr, ahead: gl.constexpr):
    """The warps that multiply, in `groups`, and the one that fetches; their arguments, constants among them.

    Of two groups, ptxas takes registers that are moved for too few where a product is under way over the end of a turn.
    """
    if groups == 2:
        gl.warp_specialize(
            [(_group, (consumed, 0)), (_group, (consumed, 1)), (_produce, produced)],
            [4, 1],
            [_UNMOVED_REGISTERS, _UNMOVED_REGISTERS] if ahead else [_REGISTERS, _FETCHER_REGISTERS],
        )
    else:
        gl.warp_specialize([(_group, (consumed, 0)), (_produce, produced)], [1], [_FETCHER_REGISTERS])


@gluon.jit(
    do_not_specialize=[
        "scale_stride", "experts", "M", "full", "cut", "parts", "looks", "steps", "tiles_m", "tiles_n", "tiles_k"
    ]
)  # fmt: skip
def sm90_codes_gemm_many(
    x_desc, x_tail_desc, w_desc, s_desc, y_desc, y_tail_desc, global_scale, block_scale, scale_stride, bias, y, partial,
    counter, offsets, experts, M, N, full, cut, parts, looks, steps, tiles_m, tiles_n, tiles_k, has_bias: gl.constexpr,
    groups: gl.constexpr, halves: gl.constexpr, tail: gl.constexpr, stages: gl.constexpr, depth: gl.constexpr,
    width: gl.constexpr, split: gl.constexpr, overlap: gl.constexpr, form: gl.constexpr, unroll: gl.constexpr,
    ahead: gl.constexpr, early: gl.constexpr,
):  # fmt: skip
    """See the module docstring; `steps` units make a tile; after `full` tiles, `cut` have `parts` programs each.

    `form` is a format whose codes are in the order of a checkpoint, or "words". The operands of neighbouring products
    must come from different places in the program, or ptxas gives them the same registers, and the later is written
    while the earlier is still read: a fetch of one tile of one half is therefore written out twice, as `unroll` says.
    `ahead` is how many products are under way while the next operand is decoded; `early`, whether its words are read
    before that product is started.

    With `width`, a power of two of at least `experts`, rows of x belong to experts and begin at `offsets`.
    """
    panels: gl.constexpr = 2 * halves
    rows: gl.constexpr = 16 * gl.num_warps()
    wide: gl.constexpr = x_desc.block_type.shape[0]
    x_ring = gl.allocate_shared_memory(gl.bfloat16, [stages * depth, wide, 64], x_desc.layout)
    if form == _WORDS:
        w_ring, s_ring, words, scales = _weight_rings(w_desc, s_desc, stages, panels, depth)
    else:
        w_ring = gl.allocate_shared_memory(w_desc.dtype, [stages * depth, 2, 32 * panels, 32], w_desc.layout)
        s_ring, words, scales = w_ring, w_ring, w_ring
    y_tile = gl.allocate_shared_memory(gl.bfloat16, [halves * groups, wide, rows], y_desc.layout)
    x_tail = x_ring
    y_tail = y_tile
    if tail:
        x_tail = gl.allocate_shared_memory(gl.bfloat16, [stages * depth, tail, 64], x_tail_desc.layout)
        y_tail = gl.allocate_shared_memory(gl.bfloat16, [halves * groups, tail, rows], y_tail_desc.layout)
    ready, empty = _ring_barriers(stages, groups)
    _start(
        (x_ring, x_tail, words, scales, y_tile, y_tail, y_desc, y_tail_desc, ready, empty, global_scale, block_scale,
         scale_stride, bias, y, partial, counter, offsets, experts, M, N, full, cut, parts, looks, steps, tiles_m,
         tiles_n, groups, stages, depth, halves, wide, tail, width, has_bias, split, overlap, form, unroll,
         ahead, early),
        (x_desc, x_tail_desc, w_desc, s_desc, x_ring, x_tail, w_ring, s_ring, ready, empty, offsets, experts, M, N,
         full, cut, parts, steps, tiles_m, tiles_n, tiles_k, stages, depth, panels, tail, width, split, overlap, form,
         unroll),
        groups, ahead,
    )  # fmt: skip


def gemm_many(
    x: torch.Tensor, weight: BlockScaledTensor, bias: torch.Tensor | None, tiles: PrefillTiles
) -> torch.Tensor:
    """`x @ weight.T + bias`; the arguments have been checked.

    Args:
        x: `[tokens, in]`, BF16, rows contiguous and 16-byte aligned.
        weight: prepacked, or in one of `tiles.STORED_FORMATS` and 16-byte aligned, `[out, in]`.
        bias: `[out]`, or None.
        tiles: how to cut it up.

    Returns:
        `[tokens, out]`, BF16.
    """
    return prepare_gemm_many(x, weight, bias, tiles)(x, weight, bias)


def grouped_gemm_many(x: torch.Tensor, weight: BlockScaledTensor, offsets: torch.Tensor) -> torch.Tensor:
    """As `grouped_gemm.grouped_codes_gemm`, for BF16 rows and a prepacked weight `[experts, out, in]`."""
    if not len(x):
        return x.new_empty(0, weight.shape[1])
    tiles = grouped_tiles(len(x), len(offsets) - 1, weight.shape[1], current(x.device.index or 0))
    return prepare_gemm_many(x, weight, None, tiles, offsets)(x, weight, None)


def prepare_gemm_many(
    x: torch.Tensor,
    weight: BlockScaledTensor,
    bias: torch.Tensor | None,
    tiles: PrefillTiles,
    offsets: torch.Tensor | None = None,
) -> Launch:
    """`gemm_many` for arguments like these, with everything decided that does not depend on their values.

    With `offsets`, int32 `[experts + 1]`, rows belong to experts, and the launch is for these offsets.
    """
    (M, K), N = x.shape, weight.shape[-2]
    if not M:
        return lambda x, weight, bias: x.new_empty(0, N)
    rows, block_m, depth = 128 * tiles.halves, tiles.block_m, tiles.depth
    tiles_m, tiles_n, steps = triton.cdiv(M, block_m), triton.cdiv(N, rows), triton.cdiv(K, tiles.step)
    if offsets is None:
        experts, most = 1, min(tiles.programs, current(x.device.index or 0).sms)
        programs, full, cut, parts = deal(tiles_m * tiles_n, most, steps)
    else:
        experts, programs, full, cut, parts = len(offsets) - 1, tiles.programs, 0, 0, 1
    wide = 1 << block_m.bit_length() - 1
    tail = block_m - wide
    form = "words" if is_prepacked(weight) else weight.format.name
    if form == "words":
        x_fields, w_fields, s_fields = descriptors(x, weight, wide, depth)
    else:
        pairs, scale_type = code_pairs(weight).dtype, stored_scales(weight).dtype
        x_fields, w_fields = tile_fields(x, wide, 64), fields_of(codes_descriptor(weight, rows))
        s_fields = w_fields
    y, across = x.new_empty(M, N), 128 // tiles.groups
    y_fields = tile_fields(y, wide, across)
    x_tail, y_tail = (tile_fields(x, tail, 64), tile_fields(y, tail, across)) if tail else (x_fields, y_fields)
    constants = {
        "has_bias": bias is not None, "groups": tiles.groups, "halves": tiles.halves, "tail": tail,
        "stages": tiles.stages, "depth": depth,
        "width": 0 if offsets is None else triton.next_power_of_2(max(experts, 32)), "split": cut > 0,
        "overlap": tiles.overlap, "form": form, "unroll": tiles.unroll, "ahead": tiles.ahead, "early": tiles.early,
        "num_warps": 8 // tiles.groups, "maxnreg": None if tiles.groups == 2 and tiles.ahead else 168,
        "launch_pdl": tiles.overlap,
    }  # fmt: skip
    launch, counters = Repeated(sm90_codes_gemm_many, (programs,), constants), tiles.groups * cut

    def run(x: torch.Tensor, weight: BlockScaledTensor, bias: torch.Tensor | None) -> torch.Tensor:
        y = x.new_empty(M, N)
        partial = counter = y
        if cut:
            partial = torch.empty(cut * parts * rows * block_m, dtype=torch.float32, device=x.device)
            counter = arrival_counters(x, counters)
        words, block_scale = weight.codes, weight.scale
        scales = block_scale
        if form != "words":
            words = scales = words.view(pairs)
            block_scale = block_scale.view(scale_type)
        sides = []
        parts_of = (x_fields, x), (x_tail, x), (w_fields, words), (s_fields, scales), (y_fields, y), (y_tail, y)
        for fields, tensor in parts_of:
            # Checked when it was prepared; the constructor takes as long as a launch.
            sides.append(object.__new__(TensorDescriptor))
            vars(sides[-1]).update(fields, base=tensor)
        sides[0].strides = sides[1].strides = [x.stride(0), 1]
        launch(
            *sides, y if weight.global_scale is None else weight.global_scale, block_scale, block_scale.shape[-1],
            x if bias is None else bias, y, partial, counter, y if offsets is None else offsets, experts, M, N, full,
            cut, parts, LOOKS, steps, tiles_m, tiles_n, K // 64,
        )  # fmt: skip
        return y

    return run


def grouped_tiles(tokens: int, experts: int, rows: int, hardware: Hardware) -> PrefillTiles:
    """A tile for half as much again as an expert gets on average, as tall as leaves one for every SM.

    An expert with more tokens than that gets one more tile, which is rare.
    """
    block_m = next(size for size in (16, 32, 64, 128) if 2 * size >= 3 * tokens / experts or size == 128)
    enough = min(tokens, experts) * triton.cdiv(rows, 256) >= hardware.sms
    return prefill_tiles(block_m, 2 if enough else 1, hardware, groups=1)
