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
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from quant.kernels.base.sm90_gluon import reinterpret

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
    """Returns a thread's four words and two scales of tile `d` of a slot: int32 [32 · warps, 4] and [32 · warps, 2].

    `words` is [panels, depth, 128, 4] and `scales` [panels, depth, 32, 2]; a warpgroup has one panel, from `first` on.
    Thread (warp, g, q) reads 16 bytes, word s of which has the codes of

        rows 16·warp + 2·g + b, columns 16·s + 8·a + 2·q + h      a, b, h = 0, 1

    and the scales of its two rows, which the four threads of g share. Reshapes and conversions move nothing between
    threads; Triton checks that (`assert_trivial`).
    """
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
