"""Attention for Hopper, in Gluon: warp-specialised, persistent, FP8 or 16 bit.

One producer warp copies tiles into shared memory (TMA); each of two or three consumer warpgroups owns 64 queries:

    producer     Q ─▶ [groups · 64, dim]      K, V ─▶ `stages` tiles of `block_kv` keys each, full and empty barriers
    consumer i   S = Q_i Kᵀ                   wgmma, FP32 in registers
                 P = 2^(S · scale − m + 8)    m: largest score of the row so far
                 O = O · decay + P V          wgmma, P from registers

Order of a step: P V of the tile before is issued, then the maximum of this tile's scores is found, then the scores of
the next tile are issued, and while they are computed the exponentials of this one are taken: tensor cores and CUDA
cores both have work throughout. Keys pass from the last to the first, so that the tiles that a mask crosses come
first and the long loop has none (a window has some at its end, too).

P leaves the first wgmma in the accumulator's layout, of which a thread holds 2 neighbours of every 8 columns; FP8
operands want 4 of every 16. The columns of P are therefore taken in another order, which costs nothing, and V's keys
are stored in that order: `lay_out_v` writes V as `[dim, keys]`, for FP8 operands of wgmma must be K-major. 16-bit
operands need neither.

Programs stay, one on each SM, and take tiles of queries from a counter, the producer a tile ahead of the consumers;
causal tiles go from long to short, which leaves little to wait for at the end. Heads are taken in groups whose K and V
fit the L2 cache.

Gluon has no interpreter: the PTX is compiled on any machine by `tests/kernels/test_attention_gluon.py`; the values
are tested on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from quant.kernels.attention_reference import SCALE_BLOCK

SCALE_ROWS = gl.constexpr(SCALE_BLOCK)
_RESIDENT = 24 << 20  # bytes of K and V that stay in the L2 cache


@dataclass(frozen=True)
class HopperTiles:
    """How the kernel is cut: warpgroups of 64 queries, keys of a tile, tiles under way, registers of a consumer."""

    groups: int
    block_kv: int
    stages: int
    registers: int = 240


_TILES = {
    (64, 1): HopperTiles(2, 128, 4),
    (128, 1): HopperTiles(2, 128, 3),
    (256, 1): HopperTiles(2, 64, 4),
    (64, 2): HopperTiles(2, 128, 2),
    (128, 2): HopperTiles(2, 128, 2),
    (256, 2): HopperTiles(2, 64, 2),
}
"""By head dimension, to the next power of two, and bytes of an element."""


def _constant(function: Callable[[Any], Any]) -> Any:
    """A property that compiled code sees as a constant."""
    return property(lambda self: gl.constexpr(function(self)))


@dataclass(frozen=True)
class Kind:
    """What a launch is compiled for; a constant of every function below."""

    tiles: HopperTiles
    dim: int
    fp8: bool
    causal: bool
    windowed: bool
    capped: bool
    packed: bool
    with_lse: bool

    groups = _constant(lambda self: self.tiles.groups)
    block_q = _constant(lambda self: 64 * self.tiles.groups)
    block_kv = _constant(lambda self: self.tiles.block_kv)
    stages = _constant(lambda self: self.tiles.stages)
    width = _constant(lambda self: 1 << (self.dim - 1).bit_length())
    scores = _constant(lambda self: self.product(self.tiles.block_kv))
    output = _constant(lambda self: self.product(1 << (self.dim - 1).bit_length()))
    left = _constant(lambda self: gl.DotOperandLayout(0, self.output.value, 4 if self.fp8 else 2))
    row = _constant(lambda self: gl.SliceLayout(1, self.scores.value))
    column = _constant(lambda self: gl.SliceLayout(0, self.scores.value))
    output_row = _constant(lambda self: gl.SliceLayout(1, self.output.value))
    output_column = _constant(lambda self: gl.SliceLayout(0, self.output.value))

    def product(self, columns: int) -> gl.NVMMADistributedLayout:
        """Layout of 64 rows that a wgmma leaves in a warpgroup."""
        shape = [16, columns, 32 if self.fp8 else 16]
        return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=shape)


@gluon.jit
def _tile(index, places, kind: gl.constexpr):
    """Where tile `index` lies: block, head, batch, sequence's first query and key, lengths, first scale blocks."""
    cu_q, cu_kv, heads, seq_q, seq_kv, blocks, group = places
    within = index % (group * blocks)
    block = within // group
    if kind.causal:
        block = blocks - 1 - block
    item = index // (group * blocks) * group + within % group
    head = item % heads
    batch = item // heads
    start_q = 0
    start_kv = 0
    scale_q = 0
    scale_kv = 0
    sequence = batch
    if kind.packed:
        start_q = gl.load(cu_q + sequence)
        start_kv = gl.load(cu_kv + sequence)
        seq_q = gl.load(cu_q + sequence + 1) - start_q
        seq_kv = gl.load(cu_kv + sequence + 1) - start_kv
        scale_q = start_q // SCALE_ROWS + sequence
        scale_kv = start_kv // SCALE_ROWS + sequence
        batch = 0
    return block, head, batch, start_q, start_kv, seq_q, seq_kv, scale_q, scale_kv


@gluon.jit
def _bounds(first, seq_q, seq_kv, window, kind: gl.constexpr):
    """Tiles of keys that queries [first, first + block_q) see: from, whole from, whole to, to."""
    place = first + seq_kv - seq_q  # the key at which the first query stands
    begin = 0
    whole_begin = 0
    whole_end = seq_kv
    end = seq_kv
    if kind.causal:
        end = gl.minimum(end, place + kind.block_q)
        whole_end = gl.minimum(whole_end, place + 1)
    if kind.windowed:
        begin = gl.maximum(place - window + 1, 0)
        whole_begin = gl.maximum(place + kind.block_q - window, 0)
        if not kind.causal:
            end = gl.minimum(end, place + kind.block_q + window - 1)
            whole_end = gl.minimum(whole_end, place + window)
    begin = begin // kind.block_kv
    end = gl.maximum((end + kind.block_kv - 1) // kind.block_kv, begin)
    if first >= seq_q:
        end = begin
    whole_begin = gl.minimum((whole_begin + kind.block_kv - 1) // kind.block_kv, end)
    whole_end = gl.maximum(gl.maximum(whole_end, 0) // kind.block_kv, whole_begin)
    return begin, whole_begin, gl.minimum(whole_end, end), end


@gluon.jit
def _produce(given, kind: gl.constexpr):
    """Copies what the consumers will want, as soon as there is room for it."""
    q_tensor, k_tensor, v_tensor, buffers, barriers, places, tokens, window, total, counter, ticket = given
    q_buffer, k_buffer, v_buffer = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty, ticket_full, ticket_empty = barriers
    tokens_q, tokens_kv, tokens_v, heads, ratio = tokens
    groups: gl.constexpr = kind.groups
    programs = gl.num_programs(0)
    count = 0
    queries = 0
    taken = 0
    index = gl.program_id(0)
    while index < total:
        following = gl.atomic_add(counter, 1, sem="relaxed") + programs
        block, head, batch, start_q, start_kv, seq_q, seq_kv, _, scale_kv = _tile(index, places, kind)
        begin, _, _, end = _bounds(block * kind.block_q, seq_q, seq_kv, window, kind)
        if end > begin:
            mbarrier.wait(q_empty, (queries & 1) ^ 1)
            mbarrier.expect(q_full, groups * q_tensor.block_type.nbytes)
            row = (batch * heads + head) * tokens_q + start_q + block * kind.block_q
            for i in gl.static_range(groups):
                tma.async_copy_global_to_shared(q_tensor, [row + 64 * i, 0], q_full, q_buffer.index(i))
            kv_head = batch * (heads // ratio) + head // ratio
            for i in range(0, end - begin):
                tile = end - 1 - i
                slot = count % kind.stages
                phase = (count // kind.stages) & 1
                mbarrier.wait(k_empty.index(slot), phase ^ 1)
                mbarrier.expect(k_full.index(slot), k_tensor.block_type.nbytes)
                key = start_kv + tile * kind.block_kv
                tma.async_copy_global_to_shared(
                    k_tensor, [kv_head * tokens_kv + key, 0], k_full.index(slot), k_buffer.index(slot)
                )
                mbarrier.wait(v_empty.index(slot), phase ^ 1)
                mbarrier.expect(v_full.index(slot), v_tensor.block_type.nbytes)
                if kind.fp8:
                    column = scale_kv * SCALE_ROWS + tile * kind.block_kv
                    tma.async_copy_global_to_shared(
                        v_tensor, [kv_head * kind.dim, column], v_full.index(slot), v_buffer.index(slot)
                    )
                else:
                    tma.async_copy_global_to_shared(
                        v_tensor, [kv_head * tokens_v + key, 0], v_full.index(slot), v_buffer.index(slot)
                    )
                count += 1
            queries += 1
        mbarrier.wait(ticket_empty, (taken & 1) ^ 1)
        ticket.store(gl.full([1], following, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
        mbarrier.arrive(ticket_full, count=1)
        index = following
        taken += 1


@gluon.jit
def _shift(scores, row_max, factor, cap, key, place, last, window, masked: gl.constexpr, kind: gl.constexpr):
    """Log2 of P of a tile, the running maximum and the decay of the rows.

    `factor` is positive; `place` and `last`: the key at which each row stands, and the last that it sees.
    """
    if kind.capped:
        scores = cap - (2.0 * cap) / (gl.exp2(scores * (factor * (2.8853900817779268 / cap))) + 1.0)
        factor = 1.0
    if masked:
        visible = key[None, :] <= last[:, None]
        if kind.windowed:
            visible = visible & (key[None, :] > place[:, None] - window)
        scores = gl.where(visible, scores, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(scores, 1) * factor)
    return scores * factor - (new_max - 8.0)[:, None], new_max, gl.exp2(row_max - new_max)


@gluon.jit
def _add_values(output, p, decay, v_buffer, slot, kind: gl.constexpr):
    """Issues output · decay + P V, P being rounded where it is."""
    p = p.to(v_buffer.dtype)
    if kind.fp8:
        keys: gl.constexpr = kind.block_kv
        p = p.reshape([64, keys // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([64, keys])
    left = gl.convert_layout(p, kind.left, assert_trivial=True)
    output = output * gl.convert_layout(decay, kind.output_row)[:, None]
    value = v_buffer.index(slot).permute((1, 0)) if kind.fp8 else v_buffer.index(slot)
    return warpgroup_mma(left, value, output, is_async=True)


@gluon.jit
def _scales_of(tile, log2_scale, scales, kind: gl.constexpr):
    """What scores of a tile are multiplied by, and the unit of its values."""
    factor = log2_scale
    unit = 1.0
    if kind.fp8:
        k_scale, v_scale, k_block, v_block = scales
        block = tile * kind.block_kv // SCALE_ROWS
        factor = log2_scale * gl.load(k_scale + block * k_block)
        unit = gl.load(v_scale + block * v_block)
    return factor, unit


@gluon.jit
def _steps(
    low, high, end, count, state, q_tile, buffers, barriers, scales, log2_scale, cap, place, last, window,
    masked: gl.constexpr, kind: gl.constexpr,
):  # fmt: skip
    """Takes tiles low ≤ i < high in, counted from the last one: neither the first that is taken nor the final one."""
    output, p, decay, scores, row_max, row_sum, factor, unit, v_unit = state
    k_buffer, v_buffer = buffers
    k_full, k_empty, v_full, v_empty = barriers
    keys: gl.constexpr = kind.block_kv
    zeros = gl.zeros([64, keys], gl.float32, kind.scores)
    columns = gl.arange(0, keys, kind.column)
    for i in range(low, high):
        before = (count + i - 1) % kind.stages
        here = (count + i) % kind.stages
        ahead = (count + i + 1) % kind.stages
        key = (end - 1 - i) * keys + columns
        pending_output = _add_values(output, p, decay, v_buffer, before, kind)
        shifted, row_max, decay = _shift(scores, row_max, factor, cap, key, place, last, window, masked, kind)
        mbarrier.wait(k_full.index(ahead), ((count + i + 1) // kind.stages) & 1)
        pending = warpgroup_mma(q_tile, k_buffer.index(ahead).permute((1, 0)), zeros, use_acc=False, is_async=True)
        # Early for its own sake, but the compiler issues nothing of what follows before the product above.
        mbarrier.wait(v_full.index(here), ((count + i) // kind.stages) & 1)
        p = gl.exp2(shifted)
        row_sum = row_sum * decay + gl.sum(p, 1)
        if kind.fp8:
            decay = decay * (v_unit / unit)
            v_unit = unit
            factor, unit = _scales_of(end - 2 - i, log2_scale, scales, kind)
        mbarrier.wait(v_full.index(here), ((count + i) // kind.stages) & 1)
        output = warpgroup_mma_wait(1, deps=[pending_output])
        scores = warpgroup_mma_wait(0, deps=[pending])
        mbarrier.arrive(v_empty.index(before), count=1)
        mbarrier.arrive(k_empty.index(ahead), count=1)
    return output, p, decay, scores, row_max, row_sum, factor, unit, v_unit


@gluon.jit
def _consume(given, warpgroup: gl.constexpr, kind: gl.constexpr):
    """Computes 64 of the queries of each tile."""
    out, lse, scales, strides, buffers, barriers, places, tokens, window, total, log2_scale, cap = given
    q_buffer, k_buffer, v_buffer = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty, ticket_full, ticket_empty = barriers
    tokens_q, _, _, heads, ratio = tokens
    q_scale, k_scale, v_scale, ticket = scales
    q_batch, q_head, q_block, k_batch, k_head, k_block, v_batch, v_head, v_block = strides
    width: gl.constexpr = kind.width
    q_tile = q_buffer.index(warpgroup)
    keys: gl.constexpr = kind.block_kv
    zeros = gl.zeros([64, keys], gl.float32, kind.scores)
    columns = gl.arange(0, keys, kind.column)
    count = 0
    queries = 0
    taken = 0
    index = gl.program_id(0)
    while index < total:
        block, head, batch, start_q, _, seq_q, seq_kv, scale_q, scale_kv = _tile(index, places, kind)
        begin, whole_begin, whole_end, end = _bounds(block * kind.block_q, seq_q, seq_kv, window, kind)
        first_row = block * kind.block_q + warpgroup * 64
        first_token = (batch * heads + head).to(gl.int64) * tokens_q + start_q
        row_max = gl.full([64], -1e30, gl.float32, kind.row)
        row_sum = gl.full([64], 0.0, gl.float32, kind.row)
        output = gl.zeros([64, width], gl.float32, kind.output)
        v_unit = 1.0
        if end > begin:
            k_at = k_scale
            v_at = v_scale
            factor = log2_scale
            if kind.fp8:
                kv_head = head // ratio
                q_at = q_scale + batch.to(gl.int64) * q_batch + head * q_head
                k_at = k_scale + batch.to(gl.int64) * k_batch + kv_head * k_head + scale_kv * k_block
                v_at = v_scale + batch.to(gl.int64) * v_batch + kv_head * v_head + scale_kv * v_block
                # A warpgroup may lie beyond the last query.
                row_block = gl.minimum(first_row, seq_q - 1) // SCALE_ROWS
                factor = log2_scale * gl.load(q_at + (scale_q + row_block) * q_block)
            per_tile = (k_at, v_at, k_block, v_block)
            first_factor, unit = _scales_of(end - 1, factor, per_tile, kind)
            v_unit = unit
            place = first_row + seq_kv - seq_q + gl.arange(0, 64, kind.row)
            last = gl.full([64], seq_kv - 1, gl.int32, kind.row)
            if kind.causal:
                last = gl.minimum(last, place)
            elif kind.windowed:
                last = gl.minimum(last, place + window - 1)

            final = end - begin - 1
            slot = count % kind.stages
            mbarrier.wait(q_full, queries & 1)
            mbarrier.wait(k_full.index(slot), (count // kind.stages) & 1)
            pending = warpgroup_mma(q_tile, k_buffer.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[pending])
            mbarrier.arrive(k_empty.index(slot), count=1)
            shifted, row_max, decay = _shift(
                scores, row_max, first_factor, cap, (end - 1) * keys + columns, place, last, window, True, kind
            )
            # Where there is no second tile, its scores are computed of what is there, and never used.
            ahead = (count + 1) % kind.stages
            mbarrier.wait(k_full.index(ahead), ((count + 1) // kind.stages) & 1, pred=final > 0)
            pending = warpgroup_mma(q_tile, k_buffer.index(ahead).permute((1, 0)), zeros, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(slot), (count // kind.stages) & 1)
            p = gl.exp2(shifted)
            row_sum = gl.sum(p, 1)
            second_factor, second_unit = _scales_of(gl.maximum(end - 2, begin), factor, per_tile, kind)
            scores = warpgroup_mma_wait(0, deps=[pending])
            mbarrier.arrive(k_empty.index(ahead), count=1, pred=final > 0)

            masked_first = gl.minimum(gl.maximum(end - whole_end, 1), final)
            masked_last = final
            if kind.windowed:
                masked_last = gl.minimum(gl.maximum(end - whole_begin, masked_first), final)
            state = (output, p, decay, scores, row_max, row_sum, second_factor, second_unit, v_unit)
            for part in gl.static_range(3):
                low = 1
                high = masked_first
                if part == 1:
                    low = masked_first
                    high = masked_last
                if part == 2:
                    low = masked_last
                    high = final
                if part < 2 or kind.windowed:
                    state = _steps(
                        low, high, end, count, state, q_tile, (k_buffer, v_buffer),
                        (k_full, k_empty, v_full, v_empty), per_tile, factor, cap, place, last, window,
                        part != 1, kind,
                    )  # fmt: skip
            output, p, decay, scores, row_max, row_sum, last_factor, last_unit, v_unit = state
            mbarrier.arrive(q_empty, count=1)
            if final > 0:
                slot = (count + final - 1) % kind.stages
                pending_output = _add_values(output, p, decay, v_buffer, slot, kind)
                shifted, row_max, decay = _shift(
                    scores, row_max, last_factor, cap, begin * keys + columns, place, last, window, True, kind
                )
                mbarrier.wait(v_full.index((count + final) % kind.stages), ((count + final) // kind.stages) & 1)
                p = gl.exp2(shifted)
                row_sum = row_sum * decay + gl.sum(p, 1)
                if kind.fp8:
                    decay = decay * (v_unit / last_unit)
                    v_unit = last_unit
                output = warpgroup_mma_wait(0, deps=[pending_output])
                mbarrier.arrive(v_empty.index(slot), count=1)
            slot = (count + final) % kind.stages
            pending_output = _add_values(output, p, decay, v_buffer, slot, kind)
            output = warpgroup_mma_wait(0, deps=[pending_output])
            mbarrier.arrive(v_empty.index(slot), count=1)
            count += final + 1
            queries += 1
        _finish(out, lse, output, row_max, row_sum, v_unit, first_token, first_row, seq_q, kind)
        mbarrier.wait(ticket_full, taken & 1)
        index = gl.max(ticket.load(gl.BlockedLayout([1], [32], [4], [0])), 0)
        mbarrier.arrive(ticket_empty, count=1)
        taken += 1


@gluon.jit
def _finish(out, lse, output, row_max, row_sum, v_unit, first_token, first_row, seq_q, kind: gl.constexpr):
    """Divides by the sum and writes; a row that saw no key has the sum 0."""
    seen = row_sum > 0
    total = gl.where(seen, row_sum, 1.0)
    output = output * gl.convert_layout(v_unit / total, kind.output_row)[:, None]
    row = first_row + gl.arange(0, 64, kind.output_row)
    d = gl.arange(0, kind.width, kind.output_column)
    inside = (row < seq_q)[:, None]
    if kind.width != kind.dim:
        inside = inside & (d < kind.dim)[None, :]
    at = (first_token + row)[:, None] * kind.dim + d[None, :]
    gl.store(out + at, output.to(out.dtype.element_ty), mask=inside)
    if kind.with_lse:
        row_of_score = first_row + gl.arange(0, 64, kind.row)
        value = (row_max - 8.0 + gl.log2(total)) * 0.6931471805599453
        gl.store(lse + first_token + row_of_score, gl.where(seen, value, float("-inf")), mask=row_of_score < seq_q)


_INTEGERS = (
    "tokens_q", "tokens_kv", "tokens_v", "heads", "ratio", "seq_q", "seq_kv", "blocks", "group", "total", "window",
    "q_batch", "q_head", "q_block", "k_batch", "k_head", "k_block", "v_batch", "v_head", "v_block",
)  # fmt: skip


@gluon.jit(do_not_specialize=_INTEGERS)
def attention_hopper(
    q_tensor, k_tensor, v_tensor, out, lse, q_scale, k_scale, v_scale, cu_q, cu_kv, counter,
    tokens_q, tokens_kv, tokens_v, heads, ratio, seq_q, seq_kv, blocks, group, total, window,
    q_batch, q_head, q_block, k_batch, k_head, k_block, v_batch, v_head, v_block, log2_scale, cap, kind: gl.constexpr,
):  # fmt: skip
    """Grid: as many programs as stay on the GPU. See the module docstring."""
    groups: gl.constexpr = kind.groups
    stages: gl.constexpr = kind.stages
    q_buffer = gl.allocate_shared_memory(q_tensor.dtype, [groups] + q_tensor.block_type.shape, q_tensor.layout)  # noqa: RUF005
    k_buffer = gl.allocate_shared_memory(k_tensor.dtype, [stages] + k_tensor.block_type.shape, k_tensor.layout)  # noqa: RUF005
    v_buffer = gl.allocate_shared_memory(v_tensor.dtype, [stages] + v_tensor.block_type.shape, v_tensor.layout)  # noqa: RUF005
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    ticket = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ticket_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ticket_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ticket_full, count=1)
    mbarrier.init(ticket_empty, count=groups)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=groups)
    for i in gl.static_range(stages):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=groups)
        mbarrier.init(v_empty.index(i), count=groups)
    buffers = (q_buffer, k_buffer, v_buffer)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty, ticket_full, ticket_empty)
    places = (cu_q, cu_kv, heads, seq_q, seq_kv, blocks, group)
    tokens = (tokens_q, tokens_kv, tokens_v, heads, ratio)
    scales = (q_scale, k_scale, v_scale, ticket)
    strides = (q_batch, q_head, q_block, k_batch, k_head, k_block, v_batch, v_head, v_block)
    given = (out, lse, scales, strides, buffers, barriers, places, tokens, window, total, log2_scale, cap)
    produce = (q_tensor, k_tensor, v_tensor, buffers, barriers, places, tokens, window, total, counter, ticket)
    if groups == 2:
        gl.warp_specialize(
            [(_consume, (given, 0, kind)), (_consume, (given, 1, kind)), (_produce, (produce, kind))],
            [4, 1], [kind.tiles.registers, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (given, 0, kind)),
                (_consume, (given, 1, kind)),
                (_consume, (given, 2, kind)),
                (_produce, (produce, kind)),
            ],
            [4, 4, 1], [kind.tiles.registers, kind.tiles.registers, 24],
        )  # fmt: skip


@triton.jit
def _lay_out_v_kernel(
    v, cu, out, tokens, padded, packed: tl.constexpr, dim: tl.constexpr, width: tl.constexpr, block: tl.constexpr
):
    """One block of keys of one head of one sequence; grid: (blocks of the longest, heads · batch, sequences)."""
    sequence = tl.program_id(2)
    first = tl.program_id(0) * block
    start = 0
    column = first
    length = tokens
    if packed:
        start = tl.load(cu + sequence)
        length = tl.load(cu + sequence + 1) - start
        column = (start // block + sequence) * block + first
    if first < length:
        position = tl.arange(0, block)
        key = first + order_of_keys(position)
        d = tl.arange(0, width)
        head = tl.program_id(1).to(tl.int64)
        inside = (key < length)[:, None] & (d < dim)[None, :]
        tile = tl.load(v + (head * tokens + start + key)[:, None] * dim + d[None, :], mask=inside, other=0.0)
        at = (head * dim + d)[:, None] * padded + (column + position)[None, :]
        tl.store(out + at, tl.trans(tile), mask=(d < dim)[:, None])


@triton.jit
def order_of_keys(position):
    """The key at each position of a laid-out V: of 16, pairs 0 4, 1 5, 2 6, 3 7 stand together."""
    return position // 16 * 16 + position % 4 // 2 * 8 + position % 16 // 4 * 2 + position % 2


def lay_out_v(v: torch.Tensor, cu_seqlens: torch.Tensor | None = None, longest: int | None = None) -> torch.Tensor:
    """V as the FP8 kernel reads it.

    Args:
        v: E4M3 `[batch, kv_heads, tokens, dim]`, contiguous.
        cu_seqlens: of packed sequences: each then starts at a multiple of 128, in the place of its scale blocks.
        longest: tokens of the longest of them; None is all tokens.

    Returns:
        E4M3 `[batch, kv_heads, dim, keys]`, keys padded with zeros to blocks of 128 and ordered by `order_of_keys`.
    """
    batch, heads, tokens, dim = v.shape
    sequences = 1 if cu_seqlens is None else len(cu_seqlens) - 1
    blocks = triton.cdiv(tokens, SCALE_BLOCK) if cu_seqlens is None else tokens // SCALE_BLOCK + sequences
    padded = blocks * SCALE_BLOCK
    make = torch.empty if cu_seqlens is None else torch.zeros
    out = make(batch, heads, dim, padded, dtype=torch.uint8, device=v.device)
    grid = (triton.cdiv(longest or tokens, SCALE_BLOCK), batch * heads, sequences)
    _lay_out_v_kernel[grid](
        v.view(torch.uint8), cu_seqlens, out, tokens, padded, packed=cu_seqlens is not None, dim=dim,
        width=triton.next_power_of_2(dim), block=SCALE_BLOCK, num_warps=4,
    )  # fmt: skip
    return out.view(v.dtype)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    causal: bool,
    window: int | None,
    softcap: float,
    softmax_scale: float,
    cu_seqlens: tuple[torch.Tensor, torch.Tensor] | None,
    max_seqlen_q: int,
    tiles: HopperTiles | None = None,
) -> None:
    """Runs the kernel on dense operands; as `attention_triton.attend`, but FP8's V is that of `lay_out_v`."""
    if not out.numel():
        return
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    batch, heads, tokens_q, dim = q.shape
    kv_heads, tokens_kv = k.shape[1:3]
    fp8 = scales is not None
    width = triton.next_power_of_2(dim)
    tiles = tiles or _TILES[width, q.dtype.itemsize]
    blocks = triton.cdiv(max_seqlen_q, 64 * tiles.groups)
    items = heads * (batch if cu_seqlens is None else len(cu_seqlens[0]) - 1)
    total = items * blocks
    group = _heads_at_once(items, heads // kv_heads, 2 * tokens_kv * dim * q.dtype.itemsize)
    dtype = gl.float8e4nv if fp8 else gl.bfloat16 if q.dtype == torch.bfloat16 else gl.float16

    def tensor_map(x: torch.Tensor, rows: int, columns: int) -> object:
        layout = gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)
        return TensorDescriptor.from_tensor(x.view(-1, x.shape[-1]), [rows, columns], layout)

    v_tile = (width, tiles.block_kv) if fp8 else (tiles.block_kv, width)
    strides = [n for scale in scales for n in scale.stride()] if scales else [0] * 9
    programs = torch.cuda.get_device_properties(q.device).multi_processor_count
    attention_hopper[min(programs, total),](
        tensor_map(q, 64, width), tensor_map(k, tiles.block_kv, width), tensor_map(v, *v_tile), out, lse,
        *(scales or (out, out, out)), *(cu_seqlens or (None, None)), torch.zeros(1, dtype=torch.int32, device=q.device),
        tokens_q, tokens_kv, v.shape[2], heads, heads // kv_heads, tokens_q, tokens_kv, blocks, group, total,
        window or 0, *strides, softmax_scale * math.log2(math.e), softcap * math.log2(math.e),
        Kind(tiles, dim, fp8, causal, window is not None, softcap > 0, cu_seqlens is not None, lse is not None),
        num_warps=4, maxnreg=168 if tiles.groups == 2 else 128,
    )  # fmt: skip


def _heads_at_once(items: int, ratio: int, nbytes: int) -> int:
    """Heads that are worked on together: as many as share the L2 cache, whole groups of queries to a KV head."""
    fits = max(1, _RESIDENT // nbytes) * ratio
    return max(n for n in range(1, items + 1) if items % n == 0 and (n <= fits or n == 1))
