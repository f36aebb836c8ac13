"""With many tokens this kernel multiplies by a quantized weight on Hopper at the rate of a 16-bit matmul.

W stays in codes, prepacked 4-bit words or codes as a checkpoint stores them, and is decoded on its way to wgmma:

    one warp fetches, `stages` deep              8 warps multiply: one or two `halves` of 128 rows of W
    x      [block_m, 64 · depth]  BF16  ──TMA──▶ ──wgmma, right operand─────────────────────────▶ acc[half] ──▶ y
    words  [panels, depth, 512]   int32 ──TMA──▶ ──16 bytes a thread──▶ decode ──left operand──▶  +=
    scales                              ──TMA──▶

`sm90_gemm_pipeline.py` draws the ring and says who waits for whom; `sm90_nvfp4_gemm_few.py` describes how words become
operands. A tile of yᵀ is 256 rows of W by 128 tokens or 128 by 256, and these are its owners:

      tokens  0            wide   block_m               0                      256
    rows    0 ┌──────────────┬─────┐                   0 ┌───────────────────────┐
              │ half 0, warps 0–7  │                     │ group 0, its warps 0–3│
          128 ├──────────────┼─────┤                  64 ├───────────────────────┤
              │ half 1, warps 0–7  │                     │ group 1, its warps 0–3│
          256 └──────────────┴─────┘                 128 └───────────────────────┘
              one group, two halves                      two groups, one half each

A step of 64 columns takes 1024 clocks of the tensor cores either way. W is cheap to fetch in four bits (4.5 KB for 128
rows) and x in sixteen is not (16 KB for 128 tokens). So the tall tile reads 25 KB a step from the L2 cache and the wide
tile 37, where a 16-bit matmul reads 48; the wide tile decodes half as much. Decoded values never touch shared memory,
of whose bandwidth the right operand takes half. Other widths, a power of two or the sum of two (80, 144, 160), exist so
that the tiles of more shapes divide evenly among the SMs: a `wide` accumulator and its `tail`.

A product whose left operand is in registers stalls its warps until the tensor cores have taken nearly all of it. With
one group, 8 warps share a barrier and decode while a product of each half runs. With two `groups` of 4 warps, which
share only the barriers of the slots, one decodes while the other multiplies, and while the end of its own product runs
(sums of 256 tokens leave no registers for that). This helps where products take as long as decoding: with 128 tokens
it is hardly better than one group. With fewer tokens, words are read before the previous product starts (`early`),
and slots are deeper, which spreads the work that is done once a slot.

Each program stays on its SM and takes every n-th tile, in an order in which tiles computed at one time share x and W
in L2. A tile goes to y through shared memory, by TMA, while the next one is multiplied. The tiles of the last round
are cut along K where that gives every SM some work (`tiles.deal`):

    turn 0             program p computes part p % parts of tile `whole` + p // parts, and leaves its float32 sum
    turns 1, 2, …      whole tiles p, p + programs, …
    at its end         it adds up pieces part, part + parts, … of the tile of turn 0: 32 tokens by 128 rows each

The order of every sum is fixed, so results are the same in every run.

No program waits long for another, because each of two streams could hold the SMs that the other needs. After `LOOKS`
polls a program stops waiting, and the last program to arrive adds up its pieces. A tile's counter holds both facts and
is updated atomically: how many parts have arrived, and one bit for each program that has stopped waiting. So either
the owner of a piece sees all parts, or the last part sees that the owner has gone.

Codes in the checkpoint's order (`STORED_FORMATS`) can take the place of words; `sm90_decode.py` decodes
them. They take more bytes and more instructions than words, so wide tiles are best from fewer tokens on.

With experts, x is sorted by expert, and a tile is 128 rows of one expert, whose weights, scales and bias follow the
previous expert's. The number of tiles is known only on the GPU, where each program counts them from the offsets of
experts; all are dealt out whole. The kernel before may write these offsets, so with experts nothing is fetched ahead.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor
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

from quant.formats.format import Format
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.base.hardware import current
from quant.kernels.base.launch import BoundedTable, CachedLaunch, arrival_counters
from quant.kernels.base.sm90_gluon import async_load, async_store, barrier, fields_of, matrix_fields, prepacked_fields
from quant.kernels.base.weight_layout import is_prepacked
from quant.kernels.linear.sm90_decode import (
    DECODED,
    DECODED_E4M3,
    code_pairs,
    codes_descriptor,
    codes_operand,
    decode,
    decode_to_e4m3,
    load_scales,
    scale_rows,
    scales_of_matrix,
    tile_bytes,
    whole_scale,
)
from quant.kernels.linear.sm90_gemm_pipeline import (
    Output,
    Work,
    advance,
    fetches_of,
    halve,
    let_next_kernel_start,
    load_words,
    locate,
    ring_barriers,
    rows_of_weight,
    slot_before,
    store_sum,
    times_row_scales,
    turns_of,
    wait_for_previous_kernel,
    weight_rings,
    whole_tiles,
)
from quant.kernels.linear.tiles import PrefillTiles, deal, prefill_tiles, takes_stored
from quant.recipes.gpus import Hardware

# A tile that is cut, [rows of W, block_m], is added up in pieces: all rows of a half by 32 tokens (16 with a tail of
# 16), piece by piece % parts. See the module docstring on who adds which.
# The counter of a tile that is cut: arrivals in the low half, above them a bit for each program that stopped waiting.
ARRIVAL_BITS = gl.constexpr(16)
ARRIVALS = gl.constexpr((1 << 16) - 1)


class Partial(NamedTuple):
    """Sums of the parts of tiles, float32; the counters of these tiles, zero between calls; `LOOKS`."""

    sums: gl.tensor
    counters: gl.tensor
    looks: gl.tensor


@gluon.constexpr_function
def piece_size(tail):
    """Returns the number of tokens in a piece of a tile, which programs that share it add up."""
    return 16 if tail == 16 else 32


@gluon.jit
def leave_pieces(acc, buffer, piece: gl.constexpr):
    """Writes a sum in pieces of some tokens; neighbouring threads write neighbouring 16 bytes."""
    # The order inside a piece is (8 tokens, warp, g, q | b, pair): the last two are the four values of a thread.
    rows: gl.constexpr = acc.shape[0]
    columns: gl.constexpr = acc.shape[1]
    if columns > piece:
        low, high = halve(acc)
        leave_pieces(low, buffer, piece)
        leave_pieces(high, buffer + rows * (columns // 2), piece)
    else:
        # warp, b, g | 8 tokens, q, pair: a thread holds b and pair, so no register moves.
        flat = acc.reshape([rows // 16, 2, 8, columns // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5])
        flat = flat.reshape([rows * columns // 4, 4])
        layout: gl.constexpr = flat.type.layout
        i = gl.arange(0, rows * columns // 4, gl.SliceLayout(1, layout))
        j = gl.arange(0, 4, gl.SliceLayout(0, layout))
        gl.store(buffer + (i[:, None] * 4 + j[None, :]), flat)


@gluon.jit
def _piece_sum(
    sums, lowest, parts, piece, scale, row_scale, out, n, m, groups: gl.constexpr, rows: gl.constexpr,
    columns: gl.constexpr, tile_size: gl.constexpr, constants: gl.constexpr,
):  # fmt: skip
    """Adds the sums of programs from `lowest` on for a piece `[rows, columns]` of their tile, and stores it."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [gl.num_warps(), 1], [1, 0])
    size: gl.constexpr = rows * columns
    i = gl.arange(0, size // 4, gl.SliceLayout(1, layout))
    j = gl.arange(0, 4, gl.SliceLayout(0, layout))
    inside = piece * size + (i[:, None] * 4 + j[None, :])
    total = gl.zeros((size // 4, 4), gl.float32, layout)
    # Four reads under way at once: each takes half a microsecond.
    for first in range(0, parts, 4):
        for part in gl.static_range(4):
            buffer = sums + (lowest + (first + part) * groups).to(gl.int64) * tile_size
            # Bypass L1, which is not coherent with the writes of other programs.
            mask = (inside >= 0) & (first + part < parts)
            total += gl.load(buffer + inside, mask=mask, other=0.0, cache_modifier=".cg")
    # Back to rows (warp, b, g) and tokens, the inverse of `leave_pieces`.
    total = total.reshape([columns // 8, rows // 16, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5]).reshape([rows, columns])
    form: gl.constexpr = constants.form
    total = times_row_scales(total, row_scale, n, out.N, False, form)
    store_sum(total, scale, out, n, m, constants.has_bias)


@gluon.jit
def reduce_pieces(
    partial, left, scale, row_scale, out, work, whole, group: gl.constexpr, rows: gl.constexpr, constants: gl.constexpr
):
    """Adds up this program's pieces of the tile that it shares, and the pieces that other programs left to it."""
    # `left` has a bit for each program that had stopped waiting when this one, the last, left its sum.
    program = gl.program_id(0)
    parts = work.parts
    if program < work.cut * parts:
        groups: gl.constexpr = constants.groups
        halves: gl.constexpr = constants.halves
        block_m: gl.constexpr = constants.block_m
        size: gl.constexpr = piece_size(constants.tail)
        across: gl.constexpr = block_m // size
        tile = program // parts
        part = program - tile * parts
        counter = partial.counters + (tile * groups + group)
        looks = partial.looks
        # Poll with an atomic addition of zero, which reads L2.
        arrivals = gl.atomic_add(counter, 0, sem="acquire")
        while ((arrivals & ARRIVALS) < parts) & (looks > 0):
            arrivals = gl.atomic_add(counter, 0, sem="acquire")
            looks -= 1
        # From here on the last part to arrive sees that this program has stopped waiting.
        mine = 1 << (part + ARRIVAL_BITS)
        arrivals = gl.atomic_add(counter, mine, sem="acq_rel")
        # The last program to get here leaves the counter as the next launch needs it, zero.
        if arrivals + mine == parts + ((1 << parts) - 1 << ARRIVAL_BITS):
            gl.store(counter, 0)
        # All parts had arrived when the bit was set: the pieces are this program's to add up.
        todo = left | gl.where((arrivals & ARRIVALS) == parts, 1 << part, 0)
        n, _, m, _ = locate(whole + tile, work, constants)
        for piece in range(halves * across):
            if (todo >> (piece % parts)) & 1 != 0:
                half = piece // across
                lowest = (program - part) * groups + group
                _piece_sum(partial.sums, lowest, parts, piece, scale, row_scale, out,
                           ((n * groups + group) * halves + half) * rows, m + (piece - half * across) * size,
                           groups, rows, size, halves * rows * block_m, constants)  # fmt: skip


_REGISTERS = gl.constexpr(232)
_FETCHER_REGISTERS = gl.constexpr(40)
# More than exist: Triton then moves no registers, and all threads keep the number that the launch gave them.
_UNMOVED_REGISTERS = gl.constexpr(256)
_WORDS = gl.constexpr("words")
LOOKS = 64  # polls for the parts of its tile after which a program leaves its pieces to the last program to arrive


@dataclass(frozen=True)
class Constants:
    """The compile-time properties of a launch."""

    # The operands of neighbouring products must come from different places in the program, or ptxas gives them the same
    # registers, and the later is written while the earlier is still read: so a slot of one tile of one half is written
    # out twice (`unroll`).

    form: str  # a format whose codes are in the order of a checkpoint, or "words"
    groups: int  # of warps that multiply, which share only the barriers of the slots
    halves: int  # runs of 128 rows of W in a tile; a group has its share of each
    wide: int  # tokens of the two accumulators of a half; the tail may be 0
    tail: int
    stages: int  # slots of the ring
    depth: int  # tiles of 64 columns of a slot
    unroll: int  # slots that a turn of the loop takes
    ahead: int  # products under way while the next operand is decoded
    early: bool  # whether the next words are read before a product is started
    width: int  # a power of two of at least the number of experts; 0 without experts
    split: bool  # whether tiles are cut along K
    overlap: bool  # whether the kernel starts before the previous one has ended
    has_bias: bool
    in_e4m3: bool = False  # whether x is in E4M3 with a scale a token, and words are decoded to E4M3

    @property
    def block_m(self) -> int:
        """Tokens of a tile."""
        return self.wide + self.tail


class TensorMaps(NamedTuple):
    """Tensor maps of x, for both accumulators, of words or codes, and of the scales of words."""

    x: gl.tensor
    x_tail: gl.tensor
    words: gl.tensor
    scales: gl.tensor


class Rings(NamedTuple):
    """The ring in shared memory: its tensors, in the shape of their writer or their reader, and its barriers."""

    x: gl.shared_memory_descriptor
    x_tail: gl.shared_memory_descriptor
    words: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class Staging(NamedTuple):
    """A tile of y in shared memory, `[halves · groups, tokens, rows]`, and the tensor maps by which it goes to y."""

    y: gl.shared_memory_descriptor
    y_tail: gl.shared_memory_descriptor
    map: gl.tensor
    tail_map: gl.tensor


class Scales(NamedTuple):
    """Global scale of words; block scales of codes, and their number in a row of blocks."""

    global_scale: gl.tensor
    block_scale: gl.tensor
    stride: gl.tensor


@gluon.jit
def _fetch_w(maps, rings, slot, panel, k, tiles_k, panels: gl.constexpr, constants: gl.constexpr):
    """Fetches the words and scales of `depth` tiles of each panel, or codes of all rows of the tile of y."""
    depth: gl.constexpr = constants.depth
    full = rings.full.index(slot)
    if constants.form == _WORDS:
        for p in gl.static_range(panels):
            row = (panel + p) * tiles_k + k * depth
            async_load(maps.words, [row * 2, 0], full, rings.words.index(slot * panels + p))
            async_load(maps.scales, [row, 0], full, rings.scales.index(slot * panels + p))
    else:
        for d in gl.static_range(depth):
            # In pairs of codes; a box is 64 columns of all rows of the tile, even rows before odd ones.
            column = (k * depth + d) * 32
            async_load(maps.words, [0, panel * 32, column], full, rings.words.index(slot * depth + d))


@gluon.jit
def _fetch_x(maps, rings, slot, m, k, constants: gl.constexpr):
    wide: gl.constexpr = constants.wide
    depth: gl.constexpr = constants.depth
    full = rings.full.index(slot)
    for d in gl.static_range(depth):
        column = (k * depth + d) * 64
        async_load(maps.x, [m, column], full, rings.x.index(slot * depth + d))
        if constants.tail:
            async_load(maps.x_tail, [m + wide, column], full, rings.x_tail.index(slot * depth + d))


@gluon.jit
def _produce(maps, rings, work, panels: gl.constexpr, constants: gl.constexpr):
    """The fetching warp: fills slot after slot with this program's turns, each as soon as its readers are done."""
    stages: gl.constexpr = constants.stages
    depth: gl.constexpr = constants.depth
    unroll: gl.constexpr = constants.unroll
    split: gl.constexpr = constants.split
    form: gl.constexpr = constants.form
    block_m: gl.constexpr = constants.block_m
    # A tile of 64 columns: x of each token, and for each panel 2,048 bytes of words and 256 of scales, or codes.
    x_bytes: gl.constexpr = 64 if constants.in_e4m3 else 128
    nbytes: gl.constexpr = depth * (block_m * x_bytes + panels * (2304 if form == _WORDS else tile_bytes(form)))
    if constants.overlap:
        let_next_kernel_start()
        # The kernel before may write the offsets of experts, which say how many tiles there are and of which weights.
        if constants.width > 0:
            wait_for_previous_kernel()
    whole = whole_tiles(work, constants)
    turn, end = turns_of(whole, work.cut, work.parts)
    slot = turn * 0
    phase = slot + 1
    # The slots of the first turn that are filled before the loop.
    head = slot + 0
    if constants.overlap and constants.width == 0:  # noqa: SIM102 -- the compiler decides this one
        # The first stages: the weight at once, x when the kernel that writes it has ended.
        if turn < end:
            tile, start, count = fetches_of(turn, whole, work.steps, work.parts, unroll, split)
            n, _, m, _ = locate(tile, work, constants)
            head = gl.minimum(count, stages)
            for i in range(head):
                mbarrier.expect(rings.full.index(i), nbytes)
                _fetch_w(maps, rings, i, n * panels, start + i, work.tiles_k, panels, constants)
            wait_for_previous_kernel()
            for i in range(head):
                _fetch_x(maps, rings, i, m, start + i, constants)
                slot, phase = advance(slot, phase, stages)
    while turn < end:
        tile, start, count = fetches_of(turn, whole, work.steps, work.parts, unroll, split)
        n, expert, m, _ = locate(tile, work, constants)
        # Experts follow one another as one tall matrix.
        panel = expert * (work.N // 64) + n * panels
        for i in range(head, count):
            mbarrier.wait(rings.empty.index(slot), phase)
            mbarrier.expect(rings.full.index(slot), nbytes)
            _fetch_x(maps, rings, slot, m, start + i, constants)
            _fetch_w(maps, rings, slot, panel, start + i, work.tiles_k, panels, constants)
            slot, phase = advance(slot, phase, stages)
        head = slot * 0
        turn += 1


@gluon.jit
def _decoded(word, scale, constants: gl.constexpr, layout: gl.constexpr):
    """Returns words as left operand, in the dtype of x."""
    if constants.in_e4m3:
        return gl.convert_layout(decode_to_e4m3(word, scale, gl.num_warps()), layout, assert_trivial=True)
    else:
        return gl.convert_layout(decode(word, scale, gl.num_warps()), layout, assert_trivial=True)


@gluon.jit
def _times_token_scales(acc, scale, m, M):
    """Returns a sum of E4M3 rows times their scales, float32 `[M]`."""
    token = m + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    return acc * gl.load(scale + token, mask=token < M, other=0.0)[None, :]


@gluon.jit
def _weights(
    rings, block_scales, slot, panel: gl.constexpr, d: gl.constexpr, constants: gl.constexpr, layout: gl.constexpr
):
    """Returns 64 columns of the rows of one half, from panel `panel` of a slot on, as left operand."""
    depth: gl.constexpr = constants.depth
    warps: gl.constexpr = gl.num_warps()
    if constants.form == _WORDS:
        word, scale = load_words(rings.words.index(slot), rings.scales.index(slot), panel, d, warps)
        return _decoded(word, scale, constants, layout)
    else:
        form: gl.constexpr = constants.form
        return codes_operand(rings.words.index(slot * depth + d), block_scales, panel * 64, form, warps, layout)


@gluon.jit
def _scale_of_matrix(scales, expert, constants: gl.constexpr):
    form: gl.constexpr = constants.form
    if form == _WORDS:
        decoded: gl.constexpr = DECODED_E4M3 if constants.in_e4m3 else DECODED
        return gl.load(scales.global_scale + expert).to(gl.float32) * decoded
    elif whole_scale(form):
        return gl.load(scales.block_scale + expert)
    else:
        return 1.0


@gluon.jit
def _stage(acc, scale, row_scale, out, tile, n, constants: gl.constexpr):
    """accᵀ · scale + bias in BF16 to shared memory, `[tokens, rows]`."""
    form: gl.constexpr = constants.form
    acc = times_row_scales(rows_of_weight(acc * scale), row_scale, n, out.N, True, form)
    if constants.has_bias:
        n = n + gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
        acc += gl.load(out.bias + n, mask=n < out.N, other=0.0).to(gl.float32)[:, None]
    tile.permute((1, 0)).store(acc.to(gl.bfloat16))


@gluon.jit
def _send(
    low, low_tail, high, high_tail, scale, row_scale, staging, out, n, m, first: gl.constexpr, constants: gl.constexpr
):
    """A whole tile to y, by TMA, which goes on while the next tile is multiplied."""
    rows: gl.constexpr = low.shape[0]
    wide: gl.constexpr = low.shape[1]
    halves: gl.constexpr = constants.halves
    # TMA has read the tile before: its place is free.
    tma.store_wait(0)
    barrier()
    _stage(low, scale, row_scale, out, staging.y.index(first), n, constants)
    if constants.tail:
        _stage(low_tail, scale, row_scale, out, staging.y_tail.index(first), n, constants)
    if halves == 2:
        _stage(high, scale, row_scale, out, staging.y.index(first + 1), n + rows, constants)
        if constants.tail:
            _stage(high_tail, scale, row_scale, out, staging.y_tail.index(first + 1), n + rows, constants)
    # The threads' writes become visible to TMA, then one thread starts the copies.
    fence_async_shared()
    barrier()
    for half in gl.static_range(halves):
        async_store(staging.map, [m, n + half * rows], staging.y.index(first + half))
        if constants.tail:
            async_store(staging.tail_map, [m + wide, n + half * rows], staging.y_tail.index(first + half))


@gluon.jit
def _wait_for_products(low, low_tail, high, high_tail, under_way: gl.constexpr, constants: gl.constexpr):
    """Waits until no more than `under_way` products of the tile's halves are under way."""
    if constants.halves == 2 and constants.tail > 0:
        low, low_tail, high, high_tail = warpgroup_mma_wait(2 * under_way, deps=[low, low_tail, high, high_tail])
    elif constants.halves == 2:
        low, high = warpgroup_mma_wait(under_way, deps=[low, high])
    elif constants.tail > 0:
        low, low_tail = warpgroup_mma_wait(2 * under_way, deps=[low, low_tail])
    else:
        low = warpgroup_mma_wait(under_way, deps=[low])
    return low, low_tail, high, high_tail


@gluon.jit
def _multiply(a, rings, index, acc, acc_tail, tail_operand: gl.constexpr, tail: gl.constexpr):
    """Starts the products of `a` by the tokens at `index` of the rings."""
    acc = warpgroup_mma(a, rings.x.index(index).permute((1, 0)), acc, is_async=True)
    if tail:
        a = gl.convert_layout(a, tail_operand, assert_trivial=True)
        acc_tail = warpgroup_mma(a, rings.x_tail.index(index).permute((1, 0)), acc_tail, is_async=True)
    return acc, acc_tail


@gluon.jit
def _consume(rings, staging, scales, out, partial, work, constants: gl.constexpr, group: gl.constexpr):
    """The multiplying warps of one group: tile after tile, each sent to y, or left as a part for `reduce_pieces`."""
    stages: gl.constexpr = constants.stages
    depth: gl.constexpr = constants.depth
    groups: gl.constexpr = constants.groups
    halves: gl.constexpr = constants.halves
    wide: gl.constexpr = constants.wide
    tail: gl.constexpr = constants.tail
    block_m: gl.constexpr = constants.block_m
    unroll: gl.constexpr = constants.unroll
    ahead: gl.constexpr = constants.ahead
    early: gl.constexpr = constants.early
    split: gl.constexpr = constants.split
    form: gl.constexpr = constants.form
    warps: gl.constexpr = gl.num_warps()
    rows: gl.constexpr = 16 * warps
    panels: gl.constexpr = warps // 4
    # wgmma: 64 rows a warpgroup, `wide` tokens, 32 bytes of K; a warp holds 16 rows.
    depth_k: gl.constexpr = 32 if constants.in_e4m3 else 16
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, wide, depth_k])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=layout, k_width=depth_k // 8)
    tail_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, tail if tail else wide, depth_k])
    tail_operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=tail_layout, k_width=depth_k // 8)
    N = out.N
    parts = work.parts
    block_scale = scales.block_scale
    bias = out.bias
    if constants.overlap:
        wait_for_previous_kernel()
    whole = whole_tiles(work, constants)
    turn, end = turns_of(whole, work.cut, parts)
    slot = turn * 0
    phase = turn * 0
    abandoned = turn * 0
    while turn < end:
        tile, start, count = fetches_of(turn, whole, work.steps, parts, unroll, split)
        n, expert, m, last = locate(tile, work, constants)
        n = (n * groups + group) * (halves * rows)
        if constants.width > 0:
            if form != _WORDS:
                block_scale = scales.block_scale + expert.to(gl.int64) * scales_of_matrix(N, scales.stride, form)
            if constants.has_bias:
                bias = out.bias + expert * N
        # Sums of the lower and the upper half. Unused maps repeat used ones; the code that reads them is not compiled.
        low = gl.zeros((rows, wide), gl.float32, layout)
        high = low
        low_tail = low
        if tail:
            low_tail = gl.zeros((rows, tail), gl.float32, tail_layout)
        high_tail = low_tail
        # Block scales come from L2, and not through the ring, so they are loaded a step ahead.
        rows_low = scale_rows(block_scale, scales.stride, n, N, form, warps)
        next_low = load_scales(rows_low, scales.stride, start * depth, form)
        next_high = next_low
        if halves == 2:
            rows_high = scale_rows(block_scale, scales.stride, n + rows, N, form, warps)
            next_high = load_scales(rows_high, scales.stride, start * depth, form)
        if early:
            mbarrier.wait(rings.full.index(slot), phase)
            word, word_scales = load_words(rings.words.index(slot), rings.scales.index(slot), group, 0, warps)
        for step in range(0, count, unroll):
            for u in gl.static_range(unroll):
                if early:
                    next_slot, next_phase = advance(slot, phase, stages)
                else:
                    mbarrier.wait(rings.full.index(slot), phase)
                # Products of the slot: for each tile of 64 columns, one of each half.
                for i in gl.static_range(depth * halves):
                    index = slot * depth + i // halves
                    if i % halves == 0:
                        scales_low, scales_high = next_low, next_high
                        k = (start + step + u) * depth + i // halves + 1
                        next_low = load_scales(rows_low, scales.stride, k, form)
                        if halves == 2:
                            next_high = load_scales(rows_high, scales.stride, k, form)
                    if early:
                        a = _decoded(word, word_scales, constants, operand)
                        # Read the next words before this product holds up their warps.
                        following = slot
                        if i + 1 == depth:
                            mbarrier.wait(rings.full.index(next_slot), next_phase, pred=step + u + 1 < count)
                            following = next_slot
                        word, word_scales = load_words(
                            rings.words.index(following), rings.scales.index(following), group, (i + 1) % depth, warps
                        )
                    else:
                        a = _weights(rings, scales_low if i % halves == 0 else scales_high, slot,
                                     (group * halves + i % halves) * panels, i // halves, constants,
                                     operand)  # fmt: skip
                    if i % halves == 0:
                        low, low_tail = _multiply(a, rings, index, low, low_tail, tail_operand, tail)
                    else:
                        high, high_tail = _multiply(a, rings, index, high, high_tail, tail_operand, tail)
                    low, low_tail, high, high_tail = _wait_for_products(
                        low, low_tail, high, high_tail, ahead, constants
                    )
                    if ahead == 1 and i == 0:
                        # The last product of the slot before has now read its operands.
                        mbarrier.arrive(rings.empty.index(slot_before(slot, stages)), count=1, pred=step + u > 0)
                if ahead == 0:
                    # No product is under way: the slot's operands have been read.
                    mbarrier.arrive(rings.empty.index(slot), count=1)
                slot, phase = advance(slot, phase, stages)
        if ahead == 1:
            low, low_tail, high, high_tail = _wait_for_products(low, low_tail, high, high_tail, 0, constants)
            mbarrier.arrive(rings.empty.index(slot_before(slot, stages)), count=1)
        if constants.in_e4m3:
            # In place of block scales, which words have in the ring.
            low = _times_token_scales(low, block_scale, m, out.M)
            if tail:
                low_tail = _times_token_scales(low_tail, block_scale, m + wide, out.M)
            if halves == 2:
                high = _times_token_scales(high, block_scale, m, out.M)
                if tail:
                    high_tail = _times_token_scales(high_tail, block_scale, m + wide, out.M)
        if split and turn == 0:
            buffer = partial.sums + (gl.program_id(0) * groups + group).to(gl.int64) * (halves * rows * block_m)
            size: gl.constexpr = piece_size(tail)
            leave_pieces(low, buffer, size)
            if tail:
                leave_pieces(low_tail, buffer + rows * wide, size)
            if halves == 2:
                leave_pieces(high, buffer + rows * block_m, size)
                if tail:
                    leave_pieces(high_tail, buffer + rows * (block_m + wide), size)
            # All threads have written before one of them counts this part as arrived.
            barrier()
            arrivals = gl.atomic_add(partial.counters + (gl.program_id(0) // parts * groups + group), 1, sem="acq_rel")
            # Only the last part looks at the bits; for all others an owner still decides.
            abandoned = gl.where((arrivals & ARRIVALS) == parts - 1, arrivals >> ARRIVAL_BITS, 0)
        else:
            scale = _scale_of_matrix(scales, expert, constants)
            if constants.width > 0:
                if m + block_m > last:
                    # Rows of other experts follow, which TMA would overwrite.
                    part = Output(bias, out.y, last, N)
                    low = times_row_scales(low, block_scale, n, N, False, form)
                    store_sum(low, scale, part, n, m, constants.has_bias)
                    if halves == 2:
                        barrier()
                        high = times_row_scales(high, block_scale, n + rows, N, False, form)
                        store_sum(high, scale, part, n + rows, m, constants.has_bias)
                else:
                    part = Output(bias, out.y, out.M, N)
                    _send(low, low_tail, high, high_tail, scale, block_scale, staging, part, n, m, group * halves,
                          constants)  # fmt: skip
            else:
                _send(low, low_tail, high, high_tail, scale, block_scale, staging, out, n, m, group * halves, constants)
        turn += 1
    # Shared memory must not be given back while TMA reads it.
    tma.store_wait(0)
    if split:
        scale = _scale_of_matrix(scales, 0, constants)
        reduce_pieces(partial, abandoned, scale, block_scale, out, work, whole, group, rows, constants)


@gluon.jit
def _consume_as(arguments, group: gl.constexpr):
    _consume(*arguments, group)


@gluon.jit
def _start(consumed, produced, constants: gl.constexpr):
    # Of two groups, ptxas takes registers that are moved for too few where a product is under way over the end of a
    # turn.
    if constants.groups == 2:
        gl.warp_specialize(
            [(_consume_as, (consumed, 0)), (_consume_as, (consumed, 1)), (_produce, produced)],
            [4, 1],
            [_UNMOVED_REGISTERS, _UNMOVED_REGISTERS] if constants.ahead else [_REGISTERS, _FETCHER_REGISTERS],
        )
    else:
        gl.warp_specialize([(_consume_as, (consumed, 0)), (_produce, produced)], [1], [_FETCHER_REGISTERS])


@gluon.jit(
    do_not_specialize=[
        "scale_stride", "experts", "M", "whole", "cut", "parts", "looks", "steps", "tiles_m", "tiles_n", "tiles_k"
    ]
)  # fmt: skip
def sm90_codes_gemm_many(
    x_map, x_tail_map, w_map, s_map, y_map, y_tail_map, global_scale, block_scale, scale_stride, bias, y, sums,
    counters, offsets, experts, M, N, whole, cut, parts, looks, steps, tiles_m, tiles_n, tiles_k,
    constants: gl.constexpr,
):  # fmt: skip
    """Grid: at most one program for each SM. See the module docstring, and `Work` for the integers."""
    # With `constants.width`, rows of x belong to experts and begin at `offsets`.
    stages: gl.constexpr = constants.stages
    depth: gl.constexpr = constants.depth
    groups: gl.constexpr = constants.groups
    halves: gl.constexpr = constants.halves
    wide: gl.constexpr = constants.wide
    tail: gl.constexpr = constants.tail
    panels: gl.constexpr = 2 * halves
    rows: gl.constexpr = 16 * gl.num_warps()
    x_ring = gl.allocate_shared_memory(x_map.dtype, [stages * depth, wide, 64], x_map.layout)
    if constants.form == _WORDS:
        w_ring, s_ring, words, scales = weight_rings(w_map, s_map, stages, panels, depth)
    else:
        w_ring = gl.allocate_shared_memory(w_map.dtype, [stages * depth, 2, 32 * panels, 32], w_map.layout)
        s_ring, words, scales = w_ring, w_ring, w_ring
    y_tile = gl.allocate_shared_memory(gl.bfloat16, [halves * groups, wide, rows], y_map.layout)
    x_tail = x_ring
    y_tail = y_tile
    if tail:
        x_tail = gl.allocate_shared_memory(x_map.dtype, [stages * depth, tail, 64], x_tail_map.layout)
        y_tail = gl.allocate_shared_memory(gl.bfloat16, [halves * groups, tail, rows], y_tail_map.layout)
    full, empty = ring_barriers(stages, groups)
    work = Work(offsets, experts, M, N, whole, cut, parts, steps, tiles_m, tiles_n, tiles_k)
    _start(
        (Rings(x_ring, x_tail, words, scales, full, empty), Staging(y_tile, y_tail, y_map, y_tail_map),
         Scales(global_scale, block_scale, scale_stride), Output(bias, y, M, N), Partial(sums, counters, looks), work,
         constants),
        (TensorMaps(x_map, x_tail_map, w_map, s_map), Rings(x_ring, x_tail, w_ring, s_ring, full, empty), work, panels,
         constants),
        constants,
    )  # fmt: skip


_grouped = BoundedTable[Callable[..., Tensor]](1 << 10)
"""Launches over experts by the shapes, dtypes and devices of their arguments. None of them holds a tensor."""


def grouped_gemm_many(x: Tensor, weight: BlockScaledTensor, offsets: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes `grouped_gemm.grouped_codes_gemm` for BF16 rows, and weights that `takes_experts`."""
    if not len(x):
        return x.new_empty(0, weight.shape[1])
    # Every layer of a model has the same shapes. Preparing a launch takes the host as long as the GPU computes for.
    key = (x.shape, x.device, weight.format.name, weight.codes.dtype, weight.scale.dtype, weight.shape, bias is None)
    launch = _grouped.get(key)
    if launch is None:
        format = None if is_prepacked(weight) else weight.format
        experts, rows, columns = weight.shape
        tiles = grouped_tiles(len(x), experts, (rows, columns), current(x.device.index or 0), format)
        launch = _grouped[key] = prepare_gemm_many(x, weight, bias, tiles, experts)
    return launch(x, weight, bias, offsets=offsets)


def takes_experts(weight: BlockScaledTensor, hardware: Hardware) -> bool:
    """Returns whether `grouped_gemm_many` multiplies a weight `[experts, out, in]`: prepacked, or codes of 8 bits."""
    if is_prepacked(weight):
        return True
    rows, columns = weight.shape[1:]
    # An expert's first row begins a panel of 64 rows.
    return (
        weight.format.element.bits == 8
        and rows % 64 == 0
        and takes_stored(weight.format, (rows, columns), hardware)
        and weight.codes.data_ptr() % 16 == 0
    )


def prepare_gemm_many(
    x: Tensor, weight: BlockScaledTensor, bias: Tensor | None, tiles: PrefillTiles, experts: int = 0
) -> Callable[..., Tensor]:
    """Returns a function that computes `x @ weight.T + bias` in BF16 for arguments like these, which have been checked.

    Everything is decided here that does not depend on the values of the arguments.

    Args:
        x: `[tokens, in]`, BF16, rows contiguous and 16-byte aligned; or, with prepacked NVFP4, E4M3 in the order of
            `sm90_e4m3_rows.py`, and then the function takes the scales of the tokens too.
        weight: prepacked, or in one of `STORED_FORMATS` and 16-byte aligned, `[out, in]`; with experts prepacked
            or of 8 bits, `[experts, out, in]`.
        bias: `[out]` or `[experts, out]`, or None.
        experts: their number; 0 for one matrix. With experts the function takes `offsets` too, int32 `[experts + 1]`,
            the first row of each expert.
    """
    (M, K), N = x.shape, weight.shape[-2]
    if not M:
        return lambda x, weight, bias: x.new_empty(0, N)
    # Tiles along tokens and along rows of W, and units of each along K.
    rows, block_m, depth = 128 * tiles.halves, tiles.block_m, tiles.depth
    tiles_m, tiles_n, steps = triton.cdiv(M, block_m), triton.cdiv(N, rows), triton.cdiv(K, tiles.step)
    if not experts:
        most = min(tiles.programs, current(x.device.index or 0).sms)
        programs, whole, cut, parts = deal(tiles_m * tiles_n, most, steps)
    else:
        # Only the GPU knows the number of tiles: one program for each SM, no tile is cut.
        programs, whole, cut, parts = tiles.programs, 0, 0, 1
    constants = constants_of(
        tiles, "words" if is_prepacked(weight) else weight.format.name, experts=experts, split=cut > 0,
        has_bias=bias is not None, in_e4m3=x.dtype is torch.float8_e4m3fn,
    )  # fmt: skip
    form, wide, tail = constants.form, constants.wide, constants.tail
    x_fields = matrix_fields(x, wide, 64)
    if form == "words":
        w_fields, s_fields = prepacked_fields(weight, depth)
    else:
        pairs = code_pairs(weight).dtype
        scale_type = torch.int16 if weight.format.scale.bits == 8 else weight.scale.dtype
        w_fields = s_fields = fields_of(codes_descriptor(weight, rows))
    y, across = x.new_empty(M, N, dtype=torch.bfloat16), 128 // tiles.groups
    y_fields = matrix_fields(y, wide, across)
    x_tail, y_tail = (matrix_fields(x, tail, 64), matrix_fields(y, tail, across)) if tail else (x_fields, y_fields)
    options = {
        "constants": constants,
        "num_warps": 8 // tiles.groups,
        "maxnreg": max_registers(tiles),
        "launch_pdl": tiles.overlap,
    }
    launch, counter_count = CachedLaunch(sm90_codes_gemm_many, (programs,), options), tiles.groups * cut

    def run(
        x: Tensor,
        weight: BlockScaledTensor,
        bias: Tensor | None,
        x_scale: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> Tensor:
        y = x.new_empty(M, N, dtype=torch.bfloat16)
        sums = counters = y
        if cut:
            sums = torch.empty(cut * parts * rows * block_m, dtype=torch.float32, device=x.device)
            counters = arrival_counters(x, counter_count)
        words, scales = weight.codes, weight.scale
        block_scale = scales if x_scale is None else x_scale
        if form != "words":
            words = scales = words.view(pairs)
            block_scale = weight.scale.view(scale_type)
        maps = []
        tensors = (x_fields, x), (x_tail, x), (w_fields, words), (s_fields, scales), (y_fields, y), (y_tail, y)
        for fields, tensor in tensors:
            maps.append(object.__new__(TensorDescriptor))
            vars(maps[-1]).update(fields, base=tensor)
        maps[0].strides = maps[1].strides = [x.stride(0), 1]
        launch(
            *maps, y if weight.global_scale is None else weight.global_scale, block_scale, block_scale.shape[-1],
            x if bias is None else bias, y, sums, counters, y if offsets is None else offsets, experts or 1, M, N,
            whole, cut, parts, LOOKS, steps, tiles_m, tiles_n, K // 64,
        )  # fmt: skip
        return y

    return run


def max_registers(tiles: PrefillTiles) -> int | None:
    """Returns the most registers of a thread: an SM has 65,536 for 12 warps of each program. None: ptxas chooses."""
    if tiles.resident > 1:
        return 65536 // (384 * tiles.resident) // 8 * 8
    return None if tiles.groups == 2 and tiles.ahead else 168


def constants_of(
    tiles: PrefillTiles, form: str, *, experts: int, split: bool, has_bias: bool, in_e4m3: bool = False
) -> Constants:
    """Returns the constants of a launch; `experts` is their number, or 0. See `Constants`."""
    wide = 1 << tiles.block_m.bit_length() - 1
    return Constants(
        form, tiles.groups, tiles.halves, wide, tiles.block_m - wide, tiles.stages, tiles.depth, tiles.unroll,
        tiles.ahead, tiles.early, triton.next_power_of_2(max(experts, 32)) if experts else 0, split, tiles.overlap,
        has_bias, in_e4m3,
    )  # fmt: skip


def grouped_tiles(
    tokens: int, experts: int, shape: tuple[int, int], hardware: Hardware, format: Format | None = None
) -> PrefillTiles:
    """Returns a tile for half as much again as an expert gets on average, as tall as leaves one for every SM."""
    # An expert with more tokens than that gets one more tile, which is rare. `shape` is the shape of one expert's
    # weight, and `format` the format of codes in the order of a checkpoint.
    # With the smallest tile of words, two groups of warps decode in turn. If W has few columns, the ends of tiles take
    # a good part of the time: a second program on each SM multiplies meanwhile.
    block_m = next(size for size in (16, 32, 64, 128) if 2 * size >= 3 * tokens / experts or size == 128)
    rows, columns = shape
    reached = min(tokens, experts)
    if block_m == 16 and format is None:
        resident = 2 if columns <= 2048 and reached * triton.cdiv(rows, 128) >= 2 * hardware.sms else 1
        return prefill_tiles(block_m, 1, hardware, groups=2, resident=resident)
    enough = reached * triton.cdiv(rows, 256) >= hardware.sms
    return prefill_tiles(block_m, 2 if enough and format is None else 1, hardware, format, groups=1)
