"""This Gluon kernel multiplies by prepacked NVFP4 on Hopper, y = x · Wᵀ, as fast as W can be read or multiplied.

    one warp fetches                                shared memory, `stages` deep          4 · panels warps multiply
    x     [block_m, 64 · depth] BF16     ──TMA──▶   ┌ x ┬ words ┬ scales ┐  ──wgmma, right operand─────────────▶ acc
    words [panels, depth, 512] int32     ──TMA──▶   ├───┼───────┼────────┤  ──16 bytes a thread──▶ decode ──▶    +=
    scales                               ──TMA──▶   └───┴───────┴────────┘     BF16 in registers, left operand

With 8 tokens a tile, mma.sync replaces wgmma, so that a warp does not wait for the other three of its warpgroup.

Words are read from shared memory by the thread that multiplies them (`kernels/layout.py` put them in that order), so
that decoding needs no exchange: 3 instructions a weight in all, where reading at 3 TB/s leaves time for 5.5. A tile is
decoded while the tensor cores work on the one before it.

A unit of work is `depth` tiles of 64 columns of K for 64 · panels rows of W and block_m tokens. The units of the whole
product, ordered by output tile, are dealt out evenly to programs that stay on their SM ("stream-K"), so
there is no last wave of half-empty SMs, and the fetching warp is at the next tile before the sum of this one is
stored. A program that has only a part of a tile's units leaves its float32 sum in `partial`; the last program to
arrive adds the sums in order. Results are the same in every run.

With `overlap`, a program starts while the previous kernel still runs ("programmatic dependent launch"): it fetches its
first words, and waits for that kernel before it reads x or writes. So a kernel that lets its successor start early must
not write weights; this kernel and those with `kernels/portable/dependent_launch.py` do not.

Tails: TMA reads zeros beyond the ends, and zeros multiply whatever the other side holds. Gluon has no interpreter:
tests/kernels/test_layout.py repeats the arithmetic in PyTorch, tests/kernels/hopper/test_sm90_nvfp4_gemm_few.py reads
the PTX, and the values are tested on a GPU.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quant.formats.tensor import BlockScaledTensor
from quant.kernels.counters import arrival_counters
from quant.kernels.hopper.sm90_decode_nvfp4 import DECODED, decode
from quant.kernels.launch_cache import Repeated
from quant.kernels.tiles import GluonTiles, Launch

# Triton 3.6 calls it thread_barrier.
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


_WAIT_FOR_KERNEL = gl.constexpr("griddepcontrol.wait; // $0")
ALONE = gl.constexpr(8)
"""Tokens of a tile up to which each warp multiplies by itself (mma.sync), and waits for no other warp."""

_LET_NEXT_START = gl.constexpr("griddepcontrol.launch_dependents; // $0")


@gluon.jit
def _order(instruction: gl.constexpr):
    gl.inline_asm_elementwise(instruction, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _span(units):
    """This program's units: the first `rest` programs have one more than `each`."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    each = units // programs
    rest = units % programs
    begin = program * each + gl.minimum(program, rest)
    return begin, begin + each + (program < rest).to(gl.int32), each, rest


@gluon.jit
def _program_of(unit, each, rest):
    """The inverse of `_span`."""
    longer = rest * (each + 1)
    return gl.where(unit < longer, unit // (each + 1), rest + (unit - longer) // each)


@gluon.jit
def _fetch_w(w_desc, s_desc, w_ring, s_ring, bar, slot, tile, k, tiles_m, tiles_k, panels: gl.constexpr):
    panel = tile // tiles_m * panels
    for p in gl.static_range(panels):
        row = (panel + p) * tiles_k + k
        tma.async_copy_global_to_shared(w_desc, [row * 2, 0], bar, w_ring.index(slot * panels + p))
        tma.async_copy_global_to_shared(s_desc, [row, 0], bar, s_ring.index(slot * panels + p))


@gluon.jit
def _fetch_x(x_desc, x_ring, bar, slot, tile, k, tiles_m, depth: gl.constexpr):
    m = tile % tiles_m * x_desc.block_type.shape[0]
    for d in gl.static_range(depth):
        tma.async_copy_global_to_shared(x_desc, [m, (k + d) * 64], bar, x_ring.index(slot * depth + d))


@gluon.jit
def _advance(slot, phase, stages: gl.constexpr):
    slot += 1
    phase = gl.where(slot == stages, phase ^ 1, phase)
    return gl.where(slot == stages, 0, slot), phase


@gluon.jit
def _next_unit(tile, k, steps, depth: gl.constexpr):
    k += depth
    over = k >= steps * depth
    return gl.where(over, tile + 1, tile), gl.where(over, 0, k)


@gluon.jit
def _before(slot, stages: gl.constexpr):
    return gl.where(slot == 0, stages - 1, slot - 1)


@gluon.jit
def _produce(
    x_desc, w_desc, s_desc, x_ring, w_ring, s_ring, full, empty, M, steps, tiles_k, units,
    stages: gl.constexpr, depth: gl.constexpr, panels: gl.constexpr, overlap: gl.constexpr,
):  # fmt: skip
    block_m: gl.constexpr = x_desc.block_type.shape[0]
    nbytes: gl.constexpr = depth * (block_m * 128 + panels * 2304)
    begin, end, _, _ = _span(units)
    tiles_m = gl.cdiv(M, block_m)
    tile = begin // steps
    k = (begin - tile * steps) * depth
    slot = begin * 0
    phase = slot + 1
    if overlap:
        _order(_LET_NEXT_START)
        # The first stages: the weight at once, x when it is there.
        head = gl.minimum(end, begin + stages)
        w_tile = tile + 0
        w_k = k + 0
        for unit in range(begin, head):
            bar = full.index(unit - begin)
            mbarrier.expect(bar, nbytes)
            _fetch_w(w_desc, s_desc, w_ring, s_ring, bar, unit - begin, w_tile, w_k, tiles_m, tiles_k, panels)
            w_tile, w_k = _next_unit(w_tile, w_k, steps, depth)
        _order(_WAIT_FOR_KERNEL)
        for unit in range(begin, head):
            _fetch_x(x_desc, x_ring, full.index(unit - begin), unit - begin, tile, k, tiles_m, depth)
            tile, k = _next_unit(tile, k, steps, depth)
            slot, phase = _advance(slot, phase, stages)
        begin = head
    for _ in range(begin, end):
        mbarrier.wait(empty.index(slot), phase)
        bar = full.index(slot)
        mbarrier.expect(bar, nbytes)
        _fetch_w(w_desc, s_desc, w_ring, s_ring, bar, slot, tile, k, tiles_m, tiles_k, panels)
        _fetch_x(x_desc, x_ring, bar, slot, tile, k, tiles_m, depth)
        tile, k = _next_unit(tile, k, steps, depth)
        slot, phase = _advance(slot, phase, stages)


@gluon.jit
def _operand(words, scales, d: gl.constexpr, warps: gl.constexpr, layout: gl.constexpr):
    """Tile `d` of a slot, [panels, depth, 128, 4] and [panels, depth, 32, 2], as left operand [16 · warps, 64]."""
    panels: gl.constexpr = warps // 4
    words_layout: gl.constexpr = gl.BlockedLayout([1, 1, 1, 4], [1, 1, 32, 1], [panels, 1, 4, 1], [3, 2, 1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [warps, 1], [1, 0])
    word = words.slice(d, 1, dim=1).load(words_layout).reshape([32 * warps, 4])
    # Four neighbouring threads read the same scales.
    quads: gl.constexpr = gl.BlockedLayout([1, 1, 1, 1, 2], [1, 1, 8, 4, 1], [panels, 1, 4, 1, 1], [4, 3, 2, 1, 0])
    scales_layout: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [warps, 1], [1, 0])
    scale = scales.slice(d, 1, dim=1).load(gl.SliceLayout(3, quads)).expand_dims(3)
    scale, _ = gl.broadcast(scale, gl.zeros([panels, 1, 32, 4, 2], gl.int32, quads))
    scale = gl.convert_layout(scale.reshape([32 * warps, 2]), scales_layout, assert_trivial=True)
    value = decode(gl.convert_layout(word, flat, assert_trivial=True), scale, warps)
    return gl.convert_layout(value, layout, assert_trivial=True)


@gluon.jit
def _halve(tile):
    """[rows, 2 m] to its left and its right [rows, m]: other registers of the same threads."""
    rows: gl.constexpr = tile.shape[0]
    half: gl.constexpr = tile.shape[1] // 2
    return tile.reshape([rows, 2, half]).permute([0, 2, 1]).split()


@gluon.jit
def _store(acc, scale, bias, y, n, m, M, N, has_bias: gl.constexpr, gated: gl.constexpr = False):
    """y[m:, n:] = accᵀ · scale + bias; 64 tokens at a time, for lack of registers for more addresses."""
    rows: gl.constexpr = acc.shape[0]
    width: gl.constexpr = acc.shape[1]
    if width > 64:
        low, high = _halve(acc)
        _store(low, scale, bias, y, n, m, M, N, has_bias, gated)
        _barrier()
        _store(high, scale, bias, y, n, m + width // 2, M, N, has_bias, gated)
    elif gated:
        # Neighbouring rows of W, gate and up, are rows b of (warp, b, g), and in one thread.
        gate, up = gl.split((acc * scale).reshape([rows // 16, 2, 8, width]).permute([0, 2, 3, 1]))
        gate = gate.reshape([rows // 2, width]).to(gl.bfloat16).to(gl.float32)
        up = up.reshape([rows // 2, width]).to(gl.bfloat16).to(gl.float32)
        gate = (gate / (1.0 + gl.exp(-gate))).to(gl.bfloat16).to(gl.float32)
        _write(gate * up, y, n // 2, m, M, N // 2)
    else:
        acc = acc * scale
        # From the instruction's row order (warp, b, g) to that of W: a thread then holds two neighbours.
        acc = acc.reshape([rows // 16, 2, 8, width]).permute([0, 2, 1, 3]).reshape([rows, width])
        if has_bias:
            at = n + gl.arange(0, rows, gl.SliceLayout(1, acc.type.layout))
            acc += gl.load(bias + at, mask=at < N, other=0.0).to(gl.float32)[:, None]
        _write(acc, y, n, m, M, N)


@gluon.jit
def _write(value, y, n, m, M, N):
    """y[m:, n:] = valueᵀ, where it has rows and columns."""
    layout: gl.constexpr = value.type.layout
    n = n + gl.arange(0, value.shape[0], gl.SliceLayout(1, layout))
    m = m + gl.arange(0, value.shape[1], gl.SliceLayout(0, layout))
    mask = (m < M)[None, :] & (n < N)[:, None]
    gl.store(y + (m.to(gl.int64)[None, :] * N + n[:, None]), value.to(gl.bfloat16), mask=mask)


@gluon.jit
def _put(acc, place):
    """Writes a sum where `_add` finds it, 64 tokens at a time."""
    rows: gl.constexpr = acc.shape[0]
    width: gl.constexpr = acc.shape[1]
    if width > 64:
        low, high = _halve(acc)
        _put(low, place)
        _put(high, place + rows * (width // 2))
    else:
        layout: gl.constexpr = acc.type.layout
        n = gl.arange(0, rows, gl.SliceLayout(1, layout))
        m = gl.arange(0, width, gl.SliceLayout(0, layout))
        gl.store(place + (n[:, None] * width + m[None, :]), acc)


@gluon.jit
def _collect(
    partial, lowest, highest, first, scale, bias, y, n, m, M, N, has_bias: gl.constexpr, gated: gl.constexpr,
    like: gl.constexpr, rows: gl.constexpr, block_m: gl.constexpr, width: gl.constexpr,
):  # fmt: skip
    """Adds the partial sums of programs `lowest` to `highest` for `width` tokens from `first` on, and stores them."""
    if width > 64:
        _collect(partial, lowest, highest, first, scale, bias, y, n, m, M, N, has_bias, gated, like,
                 rows, block_m, width // 2)  # fmt: skip
        _collect(partial, lowest, highest, first + width // 2, scale, bias, y, n, m, M, N, has_bias, gated, like,
                 rows, block_m, width // 2)  # fmt: skip
    else:
        row = gl.arange(0, rows, gl.SliceLayout(1, like))
        column = gl.arange(0, width, gl.SliceLayout(0, like))
        inside = first * rows + row[:, None] * width + column[None, :]
        total = gl.zeros((rows, width), gl.float32, like)
        # As many reads under way at once as there are registers for: each takes half a microsecond.
        at_once: gl.constexpr = 64 // width
        for group in range(lowest, highest + 1, at_once):
            for j in gl.static_range(at_once):
                other = group + j
                place = 2 * other + (other == lowest).to(gl.int32)
                there = (inside >= 0) & (other <= highest)
                # Bypass L1, which is not coherent with the writes of other programs.
                total += gl.load(
                    partial + place.to(gl.int64) * (rows * block_m) + inside, mask=there, other=0.0,
                    cache_modifier=".cg",
                )  # fmt: skip
        _store(total, scale, bias, y, n, m + first, M, N, has_bias, gated)


@gluon.constexpr_function
def _layout_of(block_m, warps, width):
    """Where a sum of `width` tokens lies, of a tile of `block_m`."""
    if block_m <= ALONE:
        return gl.NVMMADistributedLayout([2, 0], [warps, 1], [16, 8])
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, width, 16])


@gluon.jit
def _sum(
    x_ring, words, scales, full, empty, slot, phase, count, stages: gl.constexpr, depth: gl.constexpr,
    block_m: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """The product of the next `count` units, float32 [rows, block_m], and the slot and phase behind them."""
    warps: gl.constexpr = gl.num_warps()
    alone: gl.constexpr = layout.version[0] == 2
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=layout, k_width=2)
    right: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=layout, k_width=2)
    acc = gl.zeros((16 * warps, block_m), gl.float32, layout)
    for step in range(count):
        mbarrier.wait(full.index(slot), phase)
        for d in gl.static_range(depth):
            a = _operand(words.index(slot), scales.index(slot), d, warps, operand)
            b = x_ring.index(slot * depth + d).permute((1, 0))
            if alone:
                acc = mma_v2(a, b.load(right), acc)
            else:
                acc = warpgroup_mma(a, b, acc, is_async=True)
                # The product before this one has read its operands; this one goes on while the next are decoded.
                acc = warpgroup_mma_wait(1, deps=[acc])
                if d == 0:
                    mbarrier.arrive(empty.index(_before(slot, stages)), count=1, pred=step > 0)
        if alone:
            mbarrier.arrive(empty.index(slot), count=1)
        slot, phase = _advance(slot, phase, stages)
    if not alone:
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(_before(slot, stages)), count=1)
    return acc, slot, phase


@gluon.jit
def _consume(
    x_ring, words, scales, full, empty, global_scale, bias, y, partial, counter, M, N, steps, units,
    stages: gl.constexpr, depth: gl.constexpr, block_m: gl.constexpr, split: gl.constexpr, has_bias: gl.constexpr,
    gated: gl.constexpr, overlap: gl.constexpr,
):  # fmt: skip
    warps: gl.constexpr = gl.num_warps()
    rows: gl.constexpr = 16 * warps
    width: gl.constexpr = block_m if block_m < 64 else 64
    layout: gl.constexpr = _layout_of(block_m, warps, block_m)
    narrow: gl.constexpr = _layout_of(block_m, warps, width)
    begin, end, each, rest = _span(units)
    tiles_m = gl.cdiv(M, block_m)
    scale = gl.load(global_scale).to(gl.float32) * DECODED
    if overlap:
        _order(_WAIT_FOR_KERNEL)
    unit = begin
    slot = begin * 0
    phase = begin * 0
    while unit < end:
        tile = unit // steps
        start = unit - tile * steps
        count = gl.minimum(steps - start, end - unit)
        acc, slot, phase = _sum(x_ring, words, scales, full, empty, slot, phase, count, stages, depth, block_m, layout)
        unit += count
        n = tile // tiles_m * rows
        m = tile % tiles_m * block_m
        if split and count < steps:
            # Two places a program: for a tile that it begins, and for one that an earlier program began.
            place = 2 * gl.program_id(0) + (start == 0).to(gl.int32)
            _put(acc, partial + place.to(gl.int64) * (rows * block_m))
            lowest = _program_of(tile * steps, each, rest)
            highest = _program_of(tile * steps + steps - 1, each, rest)
            _barrier()
            if gl.atomic_add(counter + tile, 1, sem="acq_rel") == highest - lowest:
                _collect(partial, lowest, highest, 0, scale, bias, y, n, m, M, N, has_bias, gated, narrow,
                         rows, block_m, block_m)  # fmt: skip
                gl.store(counter + tile, 0)
        else:
            _store(acc, scale, bias, y, n, m, M, N, has_bias, gated)


@gluon.jit
def _weight_rings(w_desc, s_desc, stages: gl.constexpr, panels: gl.constexpr, depth: gl.constexpr):
    """Where words and scales are fetched to, as TMA writes them and as threads read them."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    w_ring = gl.allocate_shared_memory(gl.int32, [stages * panels, 2 * depth, 256], w_desc.layout)
    s_ring = gl.allocate_shared_memory(gl.int32, [stages * panels, depth, 64], s_desc.layout)
    words = w_ring._reinterpret(gl.int32, [stages, panels, depth, 128, 4], plain)
    scales = s_ring._reinterpret(gl.int32, [stages, panels, depth, 32, 2], plain)
    return w_ring, s_ring, words, scales


@gluon.jit
def _ring_barriers(stages: gl.constexpr, readers: gl.constexpr):
    """By slot of a ring: that it is full, and that all its `readers` are done with it."""
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(stages):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=readers)
    return full, empty


@gluon.jit(do_not_specialize=["M", "steps", "tiles_k", "units"])
def sm90_nvfp4_gemm_few(
    x_desc, w_desc, s_desc, global_scale, bias, y, partial, counter, M, N, steps, tiles_k, units,
    has_bias: gl.constexpr, gated: gl.constexpr, stages: gl.constexpr, depth: gl.constexpr, split: gl.constexpr,
    overlap: gl.constexpr, fetcher_registers: gl.constexpr,
):  # fmt: skip
    """See the module docstring; `steps` units make an output tile, `split` is whether programs share one."""
    panels: gl.constexpr = gl.num_warps() // 4
    block_m: gl.constexpr = x_desc.block_type.shape[0]
    x_ring = gl.allocate_shared_memory(gl.bfloat16, [stages * depth, block_m, 64], x_desc.layout)
    w_ring, s_ring, words, scales = _weight_rings(w_desc, s_desc, stages, panels, depth)
    full, empty = _ring_barriers(stages, 1)
    gl.warp_specialize(
        [
            (_consume, (x_ring, words, scales, full, empty, global_scale, bias, y, partial, counter, M, N, steps,
                        units, stages, depth, block_m, split, has_bias, gated, overlap)),
            (_produce, (x_desc, w_desc, s_desc, x_ring, w_ring, s_ring, full, empty, M, steps, tiles_k, units,
                        stages, depth, panels, overlap)),
        ],
        [1],
        [fetcher_registers],
    )  # fmt: skip


def gemm_few(
    x: torch.Tensor, weight: BlockScaledTensor, bias: torch.Tensor | None, tiles: GluonTiles, *, gated: bool = False
) -> torch.Tensor:
    """`x @ weight.T + bias`, or `silu(gate) · up` of it; the arguments have been checked.

    Args:
        x: `[tokens, in]`, BF16, rows contiguous and 16-byte aligned.
        weight: prepacked NVFP4, `[out, in]`.
        bias: `[out]`, or None; None where `gated`.
        tiles: how to cut it up.
        gated: whether rows of gate and up alternate in the weight, and the result is `silu(gate) · up`.

    Returns:
        `[tokens, out]`, or `[tokens, out / 2]` where `gated`, BF16.
    """
    return prepare_gemm_few(x, weight, bias, tiles, gated=gated)(x, weight, bias)


def prepare_gemm_few(
    x: torch.Tensor, weight: BlockScaledTensor, bias: torch.Tensor | None, tiles: GluonTiles, *, gated: bool = False
) -> Launch:
    """`gemm_few` for arguments like these, with everything decided that does not depend on their values."""
    (M, K), N = x.shape, weight.shape[0]
    width = N // 2 if gated else N
    if not M:
        return lambda x, weight, bias: x.new_empty(0, width)
    rows, block_m, depth = 16 * tiles.warps, tiles.block_m, tiles.depth
    count, steps = triton.cdiv(N, rows) * triton.cdiv(M, block_m), triton.cdiv(K // 64, depth)
    # No more than the longest span needs: spans that are alike begin and end with output tiles more often.
    units = count * steps
    programs = triton.cdiv(units, triton.cdiv(units, min(tiles.programs, units)))
    split = units % (programs * steps) != 0
    x_fields, w_fields, s_fields = descriptors(x, weight, block_m, depth)
    constants = {
        "has_bias": bias is not None, "gated": gated, "stages": tiles.stages, "depth": depth, "split": split,
        "overlap": tiles.overlap, **registers(tiles), "num_warps": tiles.warps, "launch_pdl": tiles.overlap,
    }  # fmt: skip
    launch = Repeated(sm90_nvfp4_gemm_few, (programs,), constants)

    def run(x: torch.Tensor, weight: BlockScaledTensor, bias: torch.Tensor | None) -> torch.Tensor:
        y = x.new_empty(M, width)
        partial = counter = y
        if split:
            partial = torch.empty(2 * programs * rows * block_m, dtype=torch.float32, device=x.device)
            counter = arrival_counters(x, count)
        sides = []
        for fields, tensor in ((x_fields, x), (w_fields, weight.codes), (s_fields, weight.scale)):
            # Checked when it was prepared; the constructor takes as long as a launch.
            sides.append(object.__new__(TensorDescriptor))
            vars(sides[-1]).update(fields, base=tensor)
        sides[0].strides = [x.stride(0), 1]
        launch(
            *sides, weight.global_scale, x if bias is None else bias, y, partial, counter, M, N, steps, K // 64, units
        )
        return y

    return run


Fields = dict[str, object]


def descriptors(x: torch.Tensor, weight: BlockScaledTensor, block_m: int, depth: int) -> tuple[Fields, ...]:
    """Descriptors of x, words and scales by field: `block_m` rows by 64 columns, and `depth` tiles of the weight."""
    flat = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return (
        tile_fields(x, block_m, 64),
        fields_of(TensorDescriptor(weight.codes, [weight.codes.numel() // 256, 256], [256, 1], [2 * depth, 256], flat)),
        fields_of(TensorDescriptor(weight.scale, [weight.scale.numel() // 64, 64], [64, 1], [depth, 64], flat)),
    )


def tile_fields(matrix: torch.Tensor, rows: int, columns: int) -> Fields:
    """The fields of a descriptor of a matrix in BF16, of which so many rows and columns are fetched at once."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)
    return fields_of(TensorDescriptor(matrix, list(matrix.shape), [matrix.stride(0), 1], [rows, columns], layout))


def fields_of(descriptor: TensorDescriptor) -> Fields:
    """The fields of a descriptor that has checked them, without its tensor."""
    return {name: value for name, value in vars(descriptor).items() if name != "base"}


def registers(tiles: GluonTiles) -> dict[str, int]:
    """Registers a thread, so that `tiles.resident` programs fit on an SM; Triton adds three idle warps to the fetcher.

    Those that the fetching warps do not need go to the ones that multiply.
    """
    threads = 32 * (tiles.warps + 4) * tiles.resident
    return {"maxnreg": min((1 << 16) // threads // 8 * 8, 248), "fetcher_registers": 24 if threads > 1024 else 40}
