"""Attention for Hopper, in Gluon: warp-specialised, persistent, FP8 or 16 bit.

One producer warp copies tiles into shared memory (TMA); each of two or three consumer warpgroups owns 64 queries:

    producer     Q ─▶ [groups · 64, dim]      K, V ─▶ `stages` tiles of `block_kv` keys each, full and empty barriers
    consumer i   S = Q_i Kᵀ                   wgmma, FP32 in registers
                 P = 2^(S · scale − m + 8)    m: largest score of the row so far
                 O = O · decay + P V          wgmma, P from registers

Order of a step: scores of tile j are issued, then P V of the tile before; while the tensor cores do the latter, the
CUDA cores take the softmax of the former. Keys pass from the last to the first, so that the tiles that a mask
crosses come first and the long loop has none (a window has some at its end, too).

P leaves the first wgmma in the accumulator's layout, of which a thread holds 2 neighbours of every 8 columns; FP8
operands want 4 of every 16. The columns of P are therefore taken in another order, which costs nothing, and V's keys
are stored in that order: `lay_out_v` writes V as `[dim, keys]`, for FP8 operands of wgmma must be K-major. 16-bit
operands need neither.

Programs stay, one on each SM, and take tiles of queries in turn. Causal tiles go from long to short, and every other
round in reverse, which evens out what each program gets: 0.999 of the ideal for 16 heads of 16k tokens. Without a mask
heads are taken in groups whose K and V fit the L2 cache.

Gluon has no interpreter: the PTX is compiled on any machine by `tests/kernels/test_attention_gluon.py`; the values
are tested on a GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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

from quant.kernels.attention_quantize_triton import order_of_keys
from quant.kernels.attention_reference import SCALE_BLOCK

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
    (256, 1): HopperTiles(2, 128, 2),
    (64, 2): HopperTiles(2, 128, 2),
    (128, 2): HopperTiles(2, 128, 2),
    (256, 2): HopperTiles(2, 64, 2),
}
"""By head dimension, to the next power of two, and bytes of an element."""

_THREE_GROUPS = HopperTiles(3, 128, 4, 160)
"""FP8 heads of 64 without a window, a cap, packing or a log-sum-exp: there a third warpgroup finds its registers."""


@gluon.jit
def _tile(index, places, scale_block: gl.constexpr, causal: gl.constexpr, packed: gl.constexpr):
    """Where tile `index` lies: block, head, batch, sequence's first query and key, lengths, first scale blocks."""
    cu_q, cu_kv, heads, seq_q, seq_kv, blocks, group = places
    within = index % (group * blocks)
    block = within // group
    if causal:
        block = blocks - 1 - block
    item = index // (group * blocks) * group + within % group
    head = item % heads
    batch = item // heads
    start_q = 0
    start_kv = 0
    scale_q = 0
    scale_kv = 0
    sequence = batch
    if packed:
        start_q = gl.load(cu_q + sequence)
        start_kv = gl.load(cu_kv + sequence)
        seq_q = gl.load(cu_q + sequence + 1) - start_q
        seq_kv = gl.load(cu_kv + sequence + 1) - start_kv
        scale_q = start_q // scale_block + sequence
        scale_kv = start_kv // scale_block + sequence
        batch = 0
    return block, head, batch, start_q, start_kv, seq_q, seq_kv, scale_q, scale_kv


@gluon.jit
def _bounds(
    first, seq_q, seq_kv, window,
    block_q: gl.constexpr, block_kv: gl.constexpr, causal: gl.constexpr, windowed: gl.constexpr,
):  # fmt: skip
    """Tiles of keys that queries [first, first + block_q) see: from, whole from, whole to, to."""
    place = first + seq_kv - seq_q  # the key at which the first query stands
    begin = 0
    whole_begin = 0
    whole_end = seq_kv
    end = seq_kv
    if causal:
        end = gl.minimum(end, place + block_q)
        whole_end = gl.minimum(whole_end, place + 1)
    if windowed:
        begin = gl.maximum(place - window + 1, 0)
        whole_begin = gl.maximum(place + block_q - window, 0)
        if not causal:
            end = gl.minimum(end, place + block_q + window - 1)
            whole_end = gl.minimum(whole_end, place + window)
    begin = begin // block_kv
    end = gl.maximum((end + block_kv - 1) // block_kv, begin)
    if first >= seq_q:
        end = begin
    whole_begin = gl.minimum((whole_begin + block_kv - 1) // block_kv, end)
    whole_end = gl.maximum(gl.maximum(whole_end, 0) // block_kv, whole_begin)
    return begin, whole_begin, gl.minimum(whole_end, end), end


@gluon.jit
def _round(step, programs):
    """Index of a program's tile in its round: odd rounds go backwards."""
    program = gl.program_id(0)
    if step % 2 == 1:
        program = programs - 1 - program
    return step * programs + program


@gluon.jit
def _produce(
    q_tensor, k_tensor, v_tensor, buffers, barriers, places, tokens, window, total,
    groups: gl.constexpr, dim: gl.constexpr, block_kv: gl.constexpr, stages: gl.constexpr, scale_block: gl.constexpr,
    causal: gl.constexpr, windowed: gl.constexpr, packed: gl.constexpr, fp8: gl.constexpr,
):  # fmt: skip
    q_buffer, k_buffer, v_buffer = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    tokens_q, tokens_kv, tokens_v, heads, ratio = tokens
    block_q: gl.constexpr = 64 * groups
    programs = gl.num_programs(0)
    count = 0
    queries = 0
    for step in range(0, (total + programs - 1) // programs):
        index = _round(step, programs)
        if index < total:
            block, head, batch, start_q, start_kv, seq_q, seq_kv, _scale_q, scale_kv = _tile(
                index, places, scale_block, causal, packed
            )
            begin, _whole_begin, _whole_end, end = _bounds(
                block * block_q, seq_q, seq_kv, window, block_q, block_kv, causal, windowed
            )
            if end > begin:
                mbarrier.wait(q_empty, (queries & 1) ^ 1)
                mbarrier.expect(q_full, groups * q_tensor.block_type.nbytes)
                row = (batch * heads + head) * tokens_q + start_q + block * block_q
                for i in gl.static_range(groups):
                    tma.async_copy_global_to_shared(q_tensor, [row + 64 * i, 0], q_full, q_buffer.index(i))
                kv_head = batch * (heads // ratio) + head // ratio
                for i in range(0, end - begin):
                    tile = end - 1 - i
                    slot = count % stages
                    phase = (count // stages) & 1
                    mbarrier.wait(k_empty.index(slot), phase ^ 1)
                    mbarrier.expect(k_full.index(slot), k_tensor.block_type.nbytes)
                    key = start_kv + tile * block_kv
                    tma.async_copy_global_to_shared(
                        k_tensor, [kv_head * tokens_kv + key, 0], k_full.index(slot), k_buffer.index(slot)
                    )
                    mbarrier.wait(v_empty.index(slot), phase ^ 1)
                    mbarrier.expect(v_full.index(slot), v_tensor.block_type.nbytes)
                    if fp8:
                        column = scale_kv * scale_block + tile * block_kv
                        tma.async_copy_global_to_shared(
                            v_tensor, [kv_head * dim, column], v_full.index(slot), v_buffer.index(slot)
                        )
                    else:
                        tma.async_copy_global_to_shared(
                            v_tensor, [kv_head * tokens_v + key, 0], v_full.index(slot), v_buffer.index(slot)
                        )
                    count += 1
                queries += 1


@gluon.jit
def _softmax(
    scores, row_max, row_sum, factor, cap, key, place, seq_kv, window,
    masked: gl.constexpr, causal: gl.constexpr, windowed: gl.constexpr, capped: gl.constexpr,
):  # fmt: skip
    """P of a tile, and the running maximum, sum and decay of the rows. `factor` is positive."""
    if capped:
        scores = cap - (2.0 * cap) / (gl.exp2(scores * (factor * (2.8853900817779268 / cap))) + 1.0)
        factor = 1.0
    if masked:
        visible = key[None, :] < seq_kv
        if causal:
            visible = visible & (key[None, :] <= place[:, None])
        if windowed:
            visible = visible & (key[None, :] > place[:, None] - window)
            if not causal:
                visible = visible & (key[None, :] < place[:, None] + window)
        scores = gl.where(visible, scores, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(scores, 1) * factor)
    p = gl.exp2(scores * factor - (new_max - 8.0)[:, None])
    decay = gl.exp2(row_max - new_max)
    return p, new_max, row_sum * decay + gl.sum(p, 1), decay


@gluon.jit
def _left(p, layout: gl.constexpr, rows: gl.constexpr, keys: gl.constexpr, dtype: gl.constexpr, fp8: gl.constexpr):
    """P as the left operand of P V, where it is."""
    p = p.to(dtype)
    if fp8:
        p = p.reshape([rows, keys // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([rows, keys])
    return gl.convert_layout(p, layout, assert_trivial=True)


@gluon.jit
def _value(buffer, fp8: gl.constexpr):
    return buffer.permute((1, 0)) if fp8 else buffer


@gluon.jit
def _steps(
    low, high, end, count, output, p, row_max, row_sum, decay, v_unit, q_tile, buffers, barriers, scales,
    log2_scale, cap, place, seq_kv, window,
    masked: gl.constexpr, block_kv: gl.constexpr, stages: gl.constexpr, scale_block: gl.constexpr,
    causal: gl.constexpr, windowed: gl.constexpr, capped: gl.constexpr, fp8: gl.constexpr, score_layout: gl.constexpr,
    output_layout: gl.constexpr, left_layout: gl.constexpr,
):  # fmt: skip
    """Takes tiles low ≤ i < high in, counted from the last; P V of tile i − 1 is done in step i."""
    k_buffer, v_buffer = buffers
    k_full, k_empty, v_full, v_empty = barriers
    k_scale, v_scale, k_block, v_block = scales
    zeros = gl.zeros([64, block_kv], gl.float32, score_layout)
    columns = gl.arange(0, block_kv, gl.SliceLayout(0, score_layout))
    for i in range(low, high):
        slot = (count + i) % stages
        phase = ((count + i) // stages) & 1
        before = (count + i - 1) % stages
        phase_before = ((count + i - 1) // stages) & 1
        first = (end - 1 - i) * block_kv
        factor = log2_scale
        if fp8:
            factor = log2_scale * gl.load(k_scale + first // scale_block * k_block)
            unit = gl.load(v_scale + first // scale_block * v_block)
        left = _left(p, left_layout, 64, block_kv, v_buffer.dtype, fp8)
        mbarrier.wait(k_full.index(slot), phase)
        pending = warpgroup_mma(q_tile, k_buffer.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
        output = output * gl.convert_layout(decay, gl.SliceLayout(1, output_layout))[:, None]
        mbarrier.wait(v_full.index(before), phase_before)
        pending_output = warpgroup_mma(left, _value(v_buffer.index(before), fp8), output, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[pending])
        mbarrier.arrive(k_empty.index(slot), count=1)
        p, row_max, row_sum, decay = _softmax(
            scores, row_max, row_sum, factor, cap, first + columns, place, seq_kv, window,
            masked, causal, windowed, capped,
        )  # fmt: skip
        if fp8:
            decay = decay * (v_unit / unit)
            v_unit = unit
        output = warpgroup_mma_wait(0, deps=[pending_output])
        mbarrier.arrive(v_empty.index(before), count=1)
    return output, p, row_max, row_sum, decay, v_unit


@gluon.jit
def _consume(
    out, lse, scales, strides, buffers, barriers, places, tokens, window, total, log2_scale, cap,
    warpgroup: gl.constexpr, groups: gl.constexpr, dim: gl.constexpr, width: gl.constexpr, block_kv: gl.constexpr,
    stages: gl.constexpr, scale_block: gl.constexpr, causal: gl.constexpr, windowed: gl.constexpr,
    capped: gl.constexpr, packed: gl.constexpr, fp8: gl.constexpr, with_lse: gl.constexpr,
):  # fmt: skip
    q_buffer, k_buffer, v_buffer = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    tokens_q, _tokens_kv, _tokens_v, heads, ratio = tokens
    q_scale, k_scale, v_scale = scales
    q_batch, q_head, q_block, k_batch, k_head, k_block, v_batch, v_head, v_block = strides
    block_q: gl.constexpr = 64 * groups
    instruction_k: gl.constexpr = 32 if fp8 else 16
    score_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, block_kv, instruction_k]
    )
    output_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, width, instruction_k]
    )
    left_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=output_layout, k_width=4 if fp8 else 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    programs = gl.num_programs(0)
    q_tile = q_buffer.index(warpgroup)
    zeros = gl.zeros([64, block_kv], gl.float32, score_layout)
    columns = gl.arange(0, block_kv, gl.SliceLayout(0, score_layout))
    count = 0
    queries = 0
    for step in range(0, (total + programs - 1) // programs):
        index = _round(step, programs)
        if index < total:
            block, head, batch, start_q, _start_kv, seq_q, seq_kv, scale_q, scale_kv = _tile(
                index, places, scale_block, causal, packed
            )
            begin, whole_begin, whole_end, end = _bounds(
                block * block_q, seq_q, seq_kv, window, block_q, block_kv, causal, windowed
            )
            first_row = block * block_q + warpgroup * 64
            first_token = (batch * heads + head).to(gl.int64) * tokens_q + start_q
            if end > begin:
                factor = log2_scale
                v_unit = 1.0
                if fp8:
                    kv_head = head // ratio
                    q_at = q_scale + batch.to(gl.int64) * q_batch + head * q_head
                    k_at = k_scale + batch.to(gl.int64) * k_batch + kv_head * k_head + scale_kv * k_block
                    v_at = v_scale + batch.to(gl.int64) * v_batch + kv_head * v_head + scale_kv * v_block
                    last_scale = (gl.maximum(seq_q, 1) - 1) // scale_block
                    row_scale = gl.minimum(first_row // scale_block, last_scale)
                    factor = log2_scale * gl.load(q_at + (scale_q + row_scale) * q_block)
                    last_block = (end - 1) * block_kv // scale_block
                    first_factor = factor * gl.load(k_at + last_block * k_block)
                    v_unit = gl.load(v_at + last_block * v_block)
                else:
                    k_at = k_scale
                    v_at = v_scale
                    first_factor = log2_scale
                row_max = gl.full([64], -1e30, gl.float32, row_layout)
                row_sum = gl.full([64], 0.0, gl.float32, row_layout)
                output = gl.zeros([64, width], gl.float32, output_layout)
                place = first_row + seq_kv - seq_q + gl.arange(0, 64, row_layout)

                mbarrier.wait(q_full, queries & 1)
                mbarrier.wait(k_full.index(count % stages), (count // stages) & 1)
                pending = warpgroup_mma(
                    q_tile, k_buffer.index(count % stages).permute((1, 0)), zeros, use_acc=False, is_async=True
                )
                scores = warpgroup_mma_wait(0, deps=[pending])
                mbarrier.arrive(k_empty.index(count % stages), count=1)
                p, row_max, row_sum, decay = _softmax(
                    scores, row_max, row_sum, first_factor, cap, (end - 1) * block_kv + columns, place, seq_kv,
                    window, True, causal, windowed, capped,
                )  # fmt: skip
                tiles = end - begin
                masked_first = gl.maximum(end - whole_end, 1)
                masked_last = tiles
                if windowed:
                    masked_last = gl.maximum(end - whole_begin, masked_first)
                for part in gl.static_range(3):
                    low = 1
                    high = masked_first
                    if part == 1:
                        low = masked_first
                        high = masked_last
                    if part == 2:
                        low = masked_last
                        high = tiles
                    if part < 2 or windowed:
                        output, p, row_max, row_sum, decay, v_unit = _steps(
                            low, high, end, count, output, p, row_max, row_sum, decay, v_unit, q_tile,
                            (k_buffer, v_buffer), (k_full, k_empty, v_full, v_empty), (k_at, v_at, k_block, v_block),
                            factor, cap, place, seq_kv, window,
                            part != 1, block_kv, stages, scale_block, causal, windowed, capped, fp8,
                            score_layout, output_layout, left_layout,
                        )  # fmt: skip
                mbarrier.arrive(q_empty, count=1)
                last = (count + tiles - 1) % stages
                left = _left(p, left_layout, 64, block_kv, v_buffer.dtype, fp8)
                output = output * gl.convert_layout(decay, gl.SliceLayout(1, output_layout))[:, None]
                mbarrier.wait(v_full.index(last), ((count + tiles - 1) // stages) & 1)
                pending_output = warpgroup_mma(left, _value(v_buffer.index(last), fp8), output, is_async=True)
                output = warpgroup_mma_wait(0, deps=[pending_output])
                mbarrier.arrive(v_empty.index(last), count=1)
                count += tiles
                queries += 1
                _finish(
                    out, lse, output, row_max, row_sum, v_unit, first_token, first_row, seq_q,
                    dim, width, output_layout, with_lse,
                )  # fmt: skip
            else:
                _finish(
                    out, lse, gl.zeros([64, width], gl.float32, output_layout),
                    gl.full([64], 0.0, gl.float32, row_layout), gl.full([64], 0.0, gl.float32, row_layout), 1.0,
                    first_token, first_row, seq_q, dim, width, output_layout, with_lse,
                )  # fmt: skip


@gluon.jit
def _finish(
    out, lse, output, row_max, row_sum, v_unit, first_token, first_row, seq_q,
    dim: gl.constexpr, width: gl.constexpr, output_layout: gl.constexpr, with_lse: gl.constexpr,
):  # fmt: skip
    """Divides by the sum and writes; a row that saw no key has the sum 0."""
    seen = row_sum > 0
    total = gl.where(seen, row_sum, 1.0)
    output = output * gl.convert_layout(v_unit / total, gl.SliceLayout(1, output_layout))[:, None]
    row = first_row + gl.arange(0, 64, gl.SliceLayout(1, output_layout))
    d = gl.arange(0, width, gl.SliceLayout(0, output_layout))
    inside = (row < seq_q)[:, None]
    if width != dim:
        inside = inside & (d < dim)[None, :]
    at = (first_token + row)[:, None] * dim + d[None, :]
    gl.store(out + at, output.to(out.dtype.element_ty), mask=inside)
    if with_lse:
        row_of_score = first_row + gl.arange(0, 64, row_max.type.layout)
        value = (row_max - 8.0 + gl.log2(total)) * 0.6931471805599453
        gl.store(lse + first_token + row_of_score, gl.where(seen, value, float("-inf")), mask=row_of_score < seq_q)


_INTEGERS = (
    "tokens_q", "tokens_kv", "tokens_v", "heads", "ratio", "seq_q", "seq_kv", "blocks", "group", "total", "window",
    "q_batch", "q_head", "q_block", "k_batch", "k_head", "k_block", "v_batch", "v_head", "v_block",
)  # fmt: skip


@gluon.jit(do_not_specialize=_INTEGERS)
def attention_hopper(
    q_tensor, k_tensor, v_tensor, out, lse, q_scale, k_scale, v_scale, cu_q, cu_kv,
    tokens_q, tokens_kv, tokens_v, heads, ratio, seq_q, seq_kv, blocks, group, total, window,
    q_batch, q_head, q_block, k_batch, k_head, k_block, v_batch, v_head, v_block, log2_scale, cap,
    groups: gl.constexpr, dim: gl.constexpr, width: gl.constexpr, block_kv: gl.constexpr, stages: gl.constexpr,
    scale_block: gl.constexpr, causal: gl.constexpr, windowed: gl.constexpr, capped: gl.constexpr,
    packed: gl.constexpr, fp8: gl.constexpr, with_lse: gl.constexpr, registers: gl.constexpr,
):  # fmt: skip
    """Grid: as many programs as stay on the GPU. See the module docstring."""
    q_shape: gl.constexpr = [groups] + q_tensor.block_type.shape  # noqa: RUF005
    q_buffer = gl.allocate_shared_memory(q_tensor.dtype, q_shape, q_tensor.layout)
    k_shape: gl.constexpr = [stages] + k_tensor.block_type.shape  # noqa: RUF005
    k_buffer = gl.allocate_shared_memory(k_tensor.dtype, k_shape, k_tensor.layout)
    v_shape: gl.constexpr = [stages] + v_tensor.block_type.shape  # noqa: RUF005
    v_buffer = gl.allocate_shared_memory(v_tensor.dtype, v_shape, v_tensor.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=groups)
    for i in gl.static_range(stages):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=groups)
        mbarrier.init(v_empty.index(i), count=groups)
    buffers = (q_buffer, k_buffer, v_buffer)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    places = (cu_q, cu_kv, heads, seq_q, seq_kv, blocks, group)
    tokens = (tokens_q, tokens_kv, tokens_v, heads, ratio)
    scales = (q_scale, k_scale, v_scale)
    strides = (q_batch, q_head, q_block, k_batch, k_head, k_block, v_batch, v_head, v_block)
    # Constants are spelled out: in a tuple that has a name they would become run-time values.
    if groups == 2:
        gl.warp_specialize(
            [
                (_consume, (
                    out, lse, scales, strides, buffers, barriers, places, tokens, window, total, log2_scale, cap,
                    0, groups, dim, width, block_kv, stages, scale_block,
                    causal, windowed, capped, packed, fp8, with_lse,
                )),
                (_consume, (
                    out, lse, scales, strides, buffers, barriers, places, tokens, window, total, log2_scale, cap,
                    1, groups, dim, width, block_kv, stages, scale_block,
                    causal, windowed, capped, packed, fp8, with_lse,
                )),
                (_produce, (
                    q_tensor, k_tensor, v_tensor, buffers, barriers, places, tokens, window, total,
                    groups, dim, block_kv, stages, scale_block, causal, windowed, packed, fp8,
                )),
            ],
            [4, 1], [registers, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (
                    out, lse, scales, strides, buffers, barriers, places, tokens, window, total, log2_scale, cap,
                    0, groups, dim, width, block_kv, stages, scale_block,
                    causal, windowed, capped, packed, fp8, with_lse,
                )),
                (_consume, (
                    out, lse, scales, strides, buffers, barriers, places, tokens, window, total, log2_scale, cap,
                    1, groups, dim, width, block_kv, stages, scale_block,
                    causal, windowed, capped, packed, fp8, with_lse,
                )),
                (_consume, (
                    out, lse, scales, strides, buffers, barriers, places, tokens, window, total, log2_scale, cap,
                    2, groups, dim, width, block_kv, stages, scale_block,
                    causal, windowed, capped, packed, fp8, with_lse,
                )),
                (_produce, (
                    q_tensor, k_tensor, v_tensor, buffers, barriers, places, tokens, window, total,
                    groups, dim, block_kv, stages, scale_block, causal, windowed, packed, fp8,
                )),
            ],
            [4, 4, 1], [registers, registers, 24],
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
    if tiles is None:
        plain = window is None and not softcap and cu_seqlens is None and lse is None
        tiles = _THREE_GROUPS if fp8 and width == 64 and plain else _TILES[width, q.dtype.itemsize]
    blocks = triton.cdiv(max_seqlen_q, 64 * tiles.groups)
    items = heads * (batch if cu_seqlens is None else len(cu_seqlens[0]) - 1)
    total = items * blocks
    # Causal tiles are dealt evenly only if they are dealt at once.
    group = items if causal else _heads_at_once(items, heads // kv_heads, 2 * tokens_kv * dim * q.dtype.itemsize)
    dtype = gl.float8e4nv if fp8 else gl.bfloat16 if q.dtype == torch.bfloat16 else gl.float16

    def tensor_map(x: torch.Tensor, rows: int, columns: int) -> object:
        layout = gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)
        return TensorDescriptor.from_tensor(x.view(-1, x.shape[-1]), [rows, columns], layout)

    v_tile = (width, tiles.block_kv) if fp8 else (tiles.block_kv, width)
    strides = [n for scale in scales for n in scale.stride()] if scales else [0] * 9
    programs = torch.cuda.get_device_properties(q.device).multi_processor_count
    attention_hopper[min(programs, total),](
        tensor_map(q, 64, width), tensor_map(k, tiles.block_kv, width), tensor_map(v, *v_tile), out, lse,
        *(scales or (out, out, out)), *(cu_seqlens or (None, None)),
        tokens_q, tokens_kv, v.shape[2], heads, heads // kv_heads, tokens_q, tokens_kv, blocks, group, total,
        window or 0, *strides, softmax_scale * math.log2(math.e), softcap * math.log2(math.e),
        groups=tiles.groups, dim=dim, width=width, block_kv=tiles.block_kv, stages=tiles.stages,
        scale_block=SCALE_BLOCK, causal=causal, windowed=window is not None, capped=softcap > 0,
        packed=cu_seqlens is not None, fp8=fp8, with_lse=lse is not None, registers=tiles.registers,
        num_warps=4, maxnreg=168 if tiles.groups == 2 else 128,
    )  # fmt: skip


def _heads_at_once(items: int, ratio: int, nbytes: int) -> int:
    """Heads that are worked on together: as many as share the L2 cache, whole groups of queries to a KV head."""
    fits = max(1, _RESIDENT // nbytes) * ratio
    return max(n for n in range(1, items + 1) if items % n == 0 and (n <= fits or n == 1))
