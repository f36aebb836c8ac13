"""The work of Hopper's matmul for many tokens is dealt out here: which program computes which tile, or part of one.

    tiles 0 … whole − 1         whole tiles: program p takes p, p + programs, p + 2 · programs, …       turns 1, 2, …
    tiles whole … whole + cut   cut along K: `parts` programs share each, one part for a program        turn 0

Programs stay on their SM. The functions are arithmetic on integers, which the fetching warp and the multiplying warps
compute alike, so that they agree without waiting for each other.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_ACROSS = gl.constexpr(16)


class Work(NamedTuple):
    """How the product is dealt out.

    Attributes:
        offsets, experts: first row of x of each expert, and how many experts there are.
        M, N: tokens, rows of W.
        whole: tiles that are dealt out whole; with experts, each program counts them.
        cut, parts: tiles after these, and the programs of each.
        steps: units of a tile; a unit is `unroll` slots.
        tiles_m, tiles_n, tiles_k: tiles along tokens and along rows of W, and tiles of 64 columns.
    """

    offsets: gl.tensor
    experts: gl.tensor
    M: gl.tensor
    N: gl.tensor
    whole: gl.tensor
    cut: gl.tensor
    parts: gl.tensor
    steps: gl.tensor
    tiles_m: gl.tensor
    tiles_n: gl.tensor
    tiles_k: gl.tensor


@gluon.jit
def expert_groups(offsets, experts, block_m: gl.constexpr, width: gl.constexpr):
    """Returns for each expert: first row, row after its last, tiles of it, and tiles up to its last one."""
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
def whole_tiles(work, constants: gl.constexpr):
    """Returns how many tiles are dealt out whole: known to the host, or counted by expert."""
    width: gl.constexpr = constants.width
    whole = work.whole
    # The fetching warp and each group count for themselves, and agree: nobody waits for the number.
    if width > 0:
        block_m: gl.constexpr = constants.block_m
        _, _, _, tiles, _ = expert_groups(work.offsets, work.experts, block_m, width)
        whole = gl.sum(tiles, 0) * work.tiles_n
    return whole


@gluon.jit
def locate(tile, work, constants: gl.constexpr):
    """Returns a tile's index along W, its expert, its first row of x, and the end of the rows it may write.

    `_ACROSS` tiles of tokens lie side by side, then come the next rows of W:

        tokens  0   1   …  15 │ 16  …            so that the programs at work at one time share 16 tiles of x and a
        W  0    0   1      15 │ 16 · tiles_n      few tiles of W in L2
           1   16  17      31 │

    With experts, all rows of W come first for each tile of tokens.
    """
    block_m: gl.constexpr = constants.block_m
    width: gl.constexpr = constants.width
    if width > 0:
        # `upto` grows with the expert: as many experts end before this tile of tokens as its own index.
        part = tile // work.tiles_n
        n = tile - part * work.tiles_n
        index, start, stop, tiles, upto = expert_groups(work.offsets, work.experts, block_m, width)
        expert = gl.sum((upto <= part).to(gl.int32), 0)
        mine = index == expert
        m = gl.sum(gl.where(mine, start + (part - upto + tiles) * block_m, 0), 0)
        last = gl.sum(gl.where(mine, stop, 0), 0)
    else:
        expert = tile * 0
        first = tile // (_ACROSS * work.tiles_n) * _ACROSS
        inside = tile - first * work.tiles_n
        across = gl.minimum(work.tiles_m - first, _ACROSS)
        n = inside // across
        m = (first + inside - n * across) * block_m
        last = work.M
    return n, expert, m, last


@gluon.jit
def turns_of(whole, cut, parts):
    """Returns the range of this program's turns: turn 0 is a part of a cut tile, each later one a whole tile."""
    program = gl.program_id(0)
    count = gl.cdiv(gl.maximum(whole - program, 0), gl.num_programs(0))
    return (program >= cut * parts).to(gl.int32), 1 + count


@gluon.jit
def fetches_of(turn, whole, steps, parts, unroll: gl.constexpr, split: gl.constexpr):
    """Returns the tile of a turn, and which of its slots: first of them, and how many; a unit has `unroll` of them."""
    program = gl.program_id(0)
    tile = program + (turn - 1) * gl.num_programs(0)
    start = turn * 0
    count = start + steps
    if split:
        shared = turn == 0
        part = program % parts
        tile = gl.where(shared, whole + program // parts, tile)
        start = gl.where(shared, steps * part // parts, 0)
        count = gl.where(shared, steps * (part + 1) // parts - start, steps)
    return tile, start * unroll, count * unroll
