"""The two Hopper matmuls share this ring: one warp fills its slots by TMA, the multiplying warps read them.

A slot holds `depth` tiles of 64 columns of K, for one tile of y; a panel is 64 rows of W:

    x       [depth, block_m, 64]     BF16, swizzled over 128 bytes: the right operand of wgmma reads it in place
    words   [panels, depth, 128, 4]  int32, eight codes each, in the order of `kernels/base/weight_layout.py`
    scales  [panels, depth, 32, 2]   int32, the four scale bytes of a row

Every slot has two barriers. Neither side waits for anything else:

    fetching warp     wait empty ──▶ expect bytes on full ──▶ TMA of x, words, scales ──▶ next slot
                         ▲                    │ the last byte completes full
    multiplying warps    │                    ▼
                      arrive on empty ◀── wgmma has read ◀── decode words ◀── wait full

A barrier has a phase, which flips each time the barrier completes, and a wait names the phase that must be over. The
readers begin with phase 0. The fetching warp begins with phase 1, which counts as over on a new barrier, so that its
first `stages` waits return at once.

With many tokens, programs stay on their SM, and tiles are dealt out by arithmetic on integers, which the fetching warp
and the multiplying warps compute alike, so that they agree without waiting for each other:

    tiles 0 … whole − 1         whole tiles: program p takes p, p + programs, p + 2 · programs, …       turns 1, 2, …
    tiles whole … whole + cut   cut along K: `parts` programs share each, one part for a program        turn 0

Both turn their sums, yᵀ in registers, into rows of y: acc [rows of W, tokens] ──▶ · scale, + bias ──▶ BF16 ──▶ y. A
product leaves thread (warp, g, q) rows 16·warp + 8·b + g of the sum, b = 0, 1, at two neighbouring tokens of every 8.
The weight was decoded so that these are rows 16·warp + 2·g + b of W: a thread holds two neighbours of a row of y, and
writes them as one word.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from quant.kernels.base.sm90_gluon import barrier, reinterpret
from quant.kernels.linear.sm90_decode import scales_by_row

_ACROSS = gl.constexpr(16)


class Work(NamedTuple):
    """How the product is dealt out."""

    offsets: gl.tensor  # offsets, experts: first row of x of each expert, and how many experts there are
    experts: gl.tensor
    M: gl.tensor  # M, N: tokens, rows of W
    N: gl.tensor
    whole: gl.tensor  # tiles that are dealt out whole; with experts, each program counts them
    cut: gl.tensor  # cut, parts: tiles after these, and the programs of each
    parts: gl.tensor
    steps: gl.tensor  # units of a tile; a unit is `unroll` slots
    tiles_m: gl.tensor  # tiles_m, tiles_n, tiles_k: tiles along tokens and along rows of W, and tiles of 64 columns
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
    """Returns a tile's index along W, its expert, its first row of x, and the end of the rows it may write."""
    # `_ACROSS` tiles of tokens lie side by side, then come the next rows of W:
    #
    #     tokens  0   1   …  15 │ 16  …            so that the programs at work at one time share 16 tiles of x and a
    #     W  0    0   1      15 │ 16 · tiles_n      few tiles of W in L2
    #        1   16  17      31 │
    #
    # With experts, all rows of W come first for each tile of tokens.
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


class Output(NamedTuple):
    """Where sums go: y `[M, N]` and bias `[N]`, pointers to BF16; without a bias, any pointer."""

    bias: gl.tensor
    y: gl.tensor
    M: gl.tensor
    N: gl.tensor


@gluon.jit
def halve(tile):
    """Splits [rows, 2 m] into its left and its right [rows, m]: other registers of the same threads."""
    rows: gl.constexpr = tile.shape[0]
    half: gl.constexpr = tile.shape[1] // 2
    return tile.reshape([rows, 2, half]).permute([0, 2, 1]).split()


@gluon.jit
def rows_of_weight(acc):
    """Returns a sum with its rows in the order of W, and not in the product's order (warp, b, g). No register moves."""
    rows: gl.constexpr = acc.shape[0]
    width: gl.constexpr = acc.shape[1]
    return acc.reshape([rows // 16, 2, 8, width]).permute([0, 2, 1, 3]).reshape([rows, width])


@gluon.jit
def times_row_scales(acc, row_scale, n, N, in_order: gl.constexpr, form: gl.constexpr):
    """Returns the channels' scales; `in_order` says that rows of the sum are in the order of W, not in (warp, b, g)."""
    if scales_by_row(form):
        i = gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
        n = n + (i if in_order else i // 16 * 16 + i % 8 * 2 + i // 8 % 2)
        acc *= gl.load(row_scale + n, mask=n < N, other=0.0)[:, None]
    return acc


@gluon.jit
def store_sum(acc, scale, out, n, m, has_bias: gl.constexpr):
    """y[m:, n:] = accᵀ · scale + bias; 64 tokens at a time, for lack of registers for more addresses."""
    rows: gl.constexpr = acc.shape[0]
    width: gl.constexpr = acc.shape[1]
    if width > 64:
        low, high = halve(acc)
        store_sum(low, scale, out, n, m, has_bias)
        barrier()
        store_sum(high, scale, out, n, m + width // 2, has_bias)
    else:
        acc = rows_of_weight(acc * scale)
        # Rows of W beyond the end were multiplied as zeros, and tokens beyond the end too: neither is stored.
        row = n + gl.arange(0, rows, gl.SliceLayout(1, acc.type.layout))
        if has_bias:
            acc += gl.load(out.bias + row, mask=row < out.N, other=0.0).to(gl.float32)[:, None]
        # The offset of a row of y may exceed 2^31.
        token = m + gl.arange(0, width, gl.SliceLayout(0, acc.type.layout))
        mask = (token < out.M)[None, :] & (row < out.N)[:, None]
        gl.store(out.y + (token.to(gl.int64)[None, :] * out.N + row[:, None]), acc.to(gl.bfloat16), mask=mask)


_LET_NEXT_START = gl.constexpr("griddepcontrol.launch_dependents; // $0")
_WAIT_FOR_PREVIOUS = gl.constexpr("griddepcontrol.wait; // $0")


@gluon.jit
def let_next_kernel_start():
    """Lets the next kernel start once every program of this one has reached this point."""
    gl.inline_asm_elementwise(_LET_NEXT_START, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_for_previous_kernel():
    """Waits until the previous kernel has ended and its writes are visible."""
    gl.inline_asm_elementwise(_WAIT_FOR_PREVIOUS, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def advance(slot, phase, stages: gl.constexpr):
    """Returns the next slot; the phase flips where the ring starts again."""
    slot += 1
    phase = gl.where(slot == stages, phase ^ 1, phase)
    return gl.where(slot == stages, 0, slot), phase


@gluon.jit
def slot_before(slot, stages: gl.constexpr):
    """Returns the slot that was read before this one."""
    return gl.where(slot == 0, stages - 1, slot - 1)


@gluon.jit
def ring_barriers(stages: gl.constexpr, readers: gl.constexpr):
    """Returns new barriers: `full` completes with the bytes of a slot, `empty` when all its `readers` have arrived."""
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(stages):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=readers)
    return full, empty


@gluon.jit
def weight_rings(w_map, s_map, stages: gl.constexpr, panels: gl.constexpr, depth: gl.constexpr):
    """Returns rings of words and of scales, twice: in the shape that TMA writes, and in the one that threads read."""
    # No swizzle: threads of a warp read 512 neighbouring bytes, which meet every bank equally often.
    linear: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    w_ring = gl.allocate_shared_memory(gl.int32, [stages * panels, 2 * depth, 256], w_map.layout)
    s_ring = gl.allocate_shared_memory(gl.int32, [stages * panels, depth, 64], s_map.layout)
    words = reinterpret(w_ring, gl.int32, [stages, panels, depth, 128, 4], linear)
    scales = reinterpret(s_ring, gl.int32, [stages, panels, depth, 32, 2], linear)
    return w_ring, s_ring, words, scales


@gluon.jit
def load_words(words, scales, first: gl.constexpr, d: gl.constexpr, warps: gl.constexpr):
    """Returns a thread's four words and two scales of tile `d` of a slot: int32 [32 · warps, 4] and [32 · warps, 2]."""
    # `words` is [panels, depth, 128, 4] and `scales` [panels, depth, 32, 2]; a warpgroup has one panel, from `first`
    # on. Thread (warp, g, q) reads 16 bytes, word s of which has the codes of
    #
    #     rows 16·warp + 2·g + b, columns 16·s + 8·a + 2·q + h      a, b, h = 0, 1
    #
    # and the scales of its two rows, which the four threads of g share. Reshapes and conversions move nothing between
    # threads; Triton checks that (`assert_trivial`).
    panels: gl.constexpr = warps // 4
    # [panel, tile, thread, word]: 16 bytes a thread, a warpgroup for each panel.
    words_layout: gl.constexpr = gl.BlockedLayout([1, 1, 1, 4], [1, 1, 32, 1], [panels, 1, 4, 1], [3, 2, 1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [warps, 1], [1, 0])
    word = words.slice(first, panels, dim=0).slice(d, 1, dim=1).load(words_layout).reshape([32 * warps, 4])
    # [panel, tile, warp and g, q, b]: the scales are loaded without q and repeated along it.
    quads: gl.constexpr = gl.BlockedLayout([1, 1, 1, 1, 2], [1, 1, 8, 4, 1], [panels, 1, 4, 1, 1], [4, 3, 2, 1, 0])
    scales_layout: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [warps, 1], [1, 0])
    scale = scales.slice(first, panels, dim=0).slice(d, 1, dim=1).load(gl.SliceLayout(3, quads)).expand_dims(3)
    scale, _ = gl.broadcast(scale, gl.zeros([panels, 1, 32, 4, 2], gl.int32, quads))
    scale = gl.convert_layout(scale.reshape([32 * warps, 2]), scales_layout, assert_trivial=True)
    return gl.convert_layout(word, flat, assert_trivial=True), scale
