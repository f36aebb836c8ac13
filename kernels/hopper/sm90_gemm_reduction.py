"""Programs that share a tile of Hopper's matmul for many tokens leave their sums here, and add them up piece by piece.

    tile [rows of W, block_m]    ┌─────────┬─────────┬─ … ─┐     a piece: all rows of a half by 32 tokens (16 with a
                                 │ piece 0 │ piece 1 │     │     tail of 16), which program piece % parts adds up
                                 └─────────┴─────────┴─ … ─┘

    every part    leave its float32 sum ──▶ count itself as arrived ──▶ compute its whole tiles ──▶ poll, a few times
    then          set its bit in the counter: all parts had arrived ──▶ add up its pieces
                                              some had not          ──▶ leave them to the last part to arrive

Every sum adds the parts in their order, so results are the same in every run.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quant.kernels.linear.sm90_gemm_epilogue import halve, store_sum, times_row_scales
from quant.kernels.linear.sm90_gemm_schedule import locate

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
    """Writes a sum in pieces of some tokens; neighbouring threads write neighbouring 16 bytes.

    The order inside a piece is (8 tokens, warp, g, q | b, pair): the last two are the four values of a thread.
    """
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
    partial, abandoned, scale, row_scale, out, work, whole, group: gl.constexpr, rows: gl.constexpr,
    constants: gl.constexpr,
):  # fmt: skip
    """Adds up this program's pieces of the tile that it shares, and the pieces that other programs left to it.

    `abandoned` has a bit for each program that had stopped waiting when this one, the last, left its sum.
    """
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
        todo = abandoned | gl.where((arrivals & ARRIVALS) == parts, 1 << part, 0)
        n, _, m, _ = locate(whole + tile, work, constants)
        for piece in range(halves * across):
            if (todo >> (piece % parts)) & 1 != 0:
                half = piece // across
                lowest = (program - part) * groups + group
                _piece_sum(partial.sums, lowest, parts, piece, scale, row_scale, out,
                           ((n * groups + group) * halves + half) * rows, m + (piece - half * across) * size,
                           groups, rows, size, halves * rows * block_m, constants)  # fmt: skip
