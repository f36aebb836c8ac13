"""Attention runs on any GPU as FlashAttention's forward pass, in Triton with plain pointer loads.

One program computes `block_q` rows of one head. Its Q tile stays on chip; K and V pass in tiles of `block_kv` keys,
and the softmax is updated as they pass (m: largest score so far, l: sum so far):

            keys  0 ─────────────── full ───── end          q : [batch, heads,    seq_q,  dim]
         ┌───────────────────────────┬──────────┐           k, v: [batch, kv_heads, seq_kv, dim]
    rows │  loop without a mask      │ masked   │ block_q
         └───────────────────────────┴──────────┘
    S = Q Kᵀ · log2(e) · scales         FP8 dot, FP32
    m' = max(m, rowmax S);  P = 2^(S − m' + 8)
    l = l · 2^(m − m') + Σ P;  O = O · 2^(m − m') + e4m3(P) V

Only tiles that the causal diagonal or the end of the keys crosses are masked. A causal launch starts the blocks with
the most work first, so that short ones fill the tail. Head h reads KV head h // (heads / kv_heads).

`fp8_dense_attention` takes its arguments in the order that TensorRT fixes for kernels inside an engine: inputs,
integers, outputs. It assumes nothing about the integers, so that one compiled kernel serves every shape; floats are
compile-time constants, because an engine cannot pass them. `dense_attention_with_options` is the kernel of `attention`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quant.kernels.attention.attention_operands import SCALE_BLOCK, AttentionOptions, tiles_for
from quant.kernels.base import hardware


@triton.jit
def _attend(
    output, row_max, row_sum, q, k_head, v_head, start, last, seq_kv, log2_scale, softcap, window,
    masked: tl.constexpr, causal: tl.constexpr, windowed: tl.constexpr, capped: tl.constexpr, dim: tl.constexpr,
    width: tl.constexpr, block_kv: tl.constexpr,
):  # fmt: skip
    """Adds one tile of keys. `last` is the last causal key of each row, `width` the power of two above `dim`."""
    key = start + tl.arange(0, block_kv)
    d = tl.arange(0, width)
    k_tile = k_head + key[None, :] * dim + d[:, None]
    v_tile = v_head + key[:, None] * dim + d[None, :]
    if masked and width != dim:
        k = tl.load(k_tile, mask=(key < seq_kv)[None, :] & (d < dim)[:, None], other=0.0)
        v = tl.load(v_tile, mask=(key < seq_kv)[:, None] & (d < dim)[None, :], other=0.0)
    elif masked:
        k = tl.load(k_tile, mask=key[None, :] < seq_kv, other=0.0)
        v = tl.load(v_tile, mask=key[:, None] < seq_kv, other=0.0)
    elif width != dim:
        k = tl.load(k_tile, mask=d[:, None] < dim, other=0.0)
        v = tl.load(v_tile, mask=d[None, :] < dim, other=0.0)
    else:
        k = tl.load(k_tile)
        v = tl.load(v_tile)
    # Exponents of two: e^s = 2^(s · log2 e), and 2^x is one instruction.
    scores = tl.dot(q, k) * log2_scale
    if capped:
        # cap · tanh(s / cap) with s in units of log2(e); tanh(x) = 1 − 2 / (e^2x + 1).
        scores = softcap * (1.0 - 2.0 / (tl.math.exp2(scores * (2.8853900817779268 / softcap)) + 1.0))
    if masked:
        visible = key[None, :] < seq_kv
        if causal:
            visible = visible & (key[None, :] <= last[:, None])
        if windowed:
            visible = visible & (key[None, :] > last[:, None] - window)
            if not causal:
                visible = visible & (key[None, :] < last[:, None] + window)
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    # A row without a visible key so far has no maximum: without this, −inf − (−inf) would be NaN.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max) if masked else new_max
    # 2^8 lifts P to where E4M3, whose largest value is 448, has the most codes; the quotient O / l drops it again.
    p = tl.math.exp2(scores - (shift - 8.0)[:, None])
    decay = tl.math.exp2(row_max - shift)
    row_sum = row_sum * decay + tl.sum(p, 1)
    # Hopper's FP8 sums are truncated (`sm90_dense_attention`): one for each tile. Elsewhere the compiler joins the two.
    output = output * decay[:, None] + tl.dot(p.to(v.dtype), v)
    return output, new_max, row_sum


@triton.jit
def fp8_dense_attention(
    q, k, v, scales, heads, kv_heads, seq_q, seq_kv, out, softmax_scale: tl.constexpr, causal: tl.constexpr,
    dim: tl.constexpr, block_q: tl.constexpr, block_kv: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of queries, heads, batch)."""
    block = tl.program_id(0)
    if causal:
        block = tl.num_programs(0) - 1 - block
    head = tl.program_id(1)
    batch = tl.program_id(2)
    row = block * block_q + tl.arange(0, block_q)
    d = tl.arange(0, dim)
    # Offsets of heads in 64 bits; inside a head 32 suffice.
    first_row = (batch * heads + head).to(tl.int64) * seq_q
    first_key = (batch * kv_heads + head // (heads // kv_heads)).to(tl.int64) * seq_kv
    k_head = k + first_key * dim
    v_head = v + first_key * dim
    tile = first_row * dim + row[:, None] * dim + d[None, :]
    inside = row < seq_q
    q_tile = tl.load(q + tile, mask=inside[:, None], other=0.0)
    log2_scale = tl.load(scales) * tl.load(scales + 1) * (softmax_scale * 1.4426950408889634)

    # The last query sees the last key; `full` keys are seen by every row of the tile.
    last = row + (seq_kv - seq_q)
    end = seq_kv
    full = seq_kv
    if causal:
        end = tl.minimum(seq_kv, (block + 1) * block_q + (seq_kv - seq_q))
        full = tl.maximum(tl.minimum(seq_kv, block * block_q + (seq_kv - seq_q) + 1), 0)
    full = full // block_kv * block_kv

    output = tl.zeros([block_q, dim], tl.float32)
    row_max = tl.full([block_q], float("-inf"), tl.float32)
    row_sum = tl.zeros([block_q], tl.float32)
    for start in tl.range(0, full, block_kv):
        output, row_max, row_sum = _attend(
            output, row_max, row_sum, q_tile, k_head, v_head, start, last, seq_kv, log2_scale,
            0.0, 0, False, causal, False, False, dim, dim, block_kv,
        )  # fmt: skip
    for start in tl.range(full, end, block_kv):
        output, row_max, row_sum = _attend(
            output, row_max, row_sum, q_tile, k_head, v_head, start, last, seq_kv, log2_scale,
            0.0, 0, True, causal, False, False, dim, dim, block_kv,
        )  # fmt: skip

    seen = row_sum != 0
    output = output * (tl.load(scales + 2) / tl.where(seen, row_sum, 1.0))[:, None]
    tl.store(out + tile, output.to(out.dtype.element_ty), mask=inside[:, None])


_INTEGERS = (
    "heads", "kv_heads", "tokens_q", "tokens_kv", "seq_q", "seq_kv", "window",
    "q_batch", "q_head", "q_block", "k_batch", "k_head", "k_block", "v_batch", "v_head", "v_block",
)  # fmt: skip


@triton.jit(do_not_specialize=_INTEGERS)
def dense_attention_with_options(
    q, k, v, q_scale, k_scale, v_scale, cu_q, cu_kv,
    heads, kv_heads, tokens_q, tokens_kv, seq_q, seq_kv, window,
    q_batch, q_head, q_block, k_batch, k_head, k_block, v_batch, v_head, v_block,
    softmax_scale, softcap, out, lse,
    causal: tl.constexpr, windowed: tl.constexpr, capped: tl.constexpr, scale_block: tl.constexpr,
    dim: tl.constexpr, width: tl.constexpr, block_q: tl.constexpr, block_kv: tl.constexpr,
):  # fmt: skip
    """The same loop with every option; grid: (blocks of queries, heads, sequences)."""
    # Scales have strides along batch, head and block of `scale_block` rows; a stride of 0 repeats one. They are None
    # for operands in 16 bit. Packed sequences start at `cu_q` and `cu_kv`; None is a batch of sequences of one length.
    # A tile lies in one scale block. K's scale multiplies the scores. The output is kept in units of V's current scale
    # and rescaled where that changes.
    block = tl.program_id(0)
    if causal:
        block = tl.num_programs(0) - 1 - block
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    kv_head = head // (heads // kv_heads)
    batch = sequence
    start_q = 0
    start_kv = 0
    first_block_q = 0
    first_block_kv = 0
    if cu_q is not None:
        batch = 0
        start_q = tl.load(cu_q + sequence)
        seq_q = tl.load(cu_q + sequence + 1) - start_q
        first_block_q = start_q // scale_block + sequence
        start_kv = tl.load(cu_kv + sequence)
        seq_kv = tl.load(cu_kv + sequence + 1) - start_kv
        first_block_kv = start_kv // scale_block + sequence
    # The grid is as long as the longest sequence.
    if block * block_q >= seq_q:
        return
    row = block * block_q + tl.arange(0, block_q)
    d = tl.arange(0, width)
    first_row = (batch * heads + head).to(tl.int64) * tokens_q + start_q
    first_key = (batch * kv_heads + kv_head).to(tl.int64) * tokens_kv + start_kv
    k_head_data = k + first_key * dim
    v_head_data = v + first_key * dim
    tile = first_row * dim + row[:, None] * dim + d[None, :]
    inside = row < seq_q
    inside_tile = inside[:, None] & (d < dim)[None, :]
    q_tile = tl.load(q + tile, mask=inside_tile, other=0.0)
    log2_scale = softmax_scale * 1.4426950408889634
    if q_scale is not None:
        q_scale += batch.to(tl.int64) * q_batch + head * q_head
        k_scale += batch.to(tl.int64) * k_batch + kv_head * k_head + first_block_kv * k_block
        v_scale += batch.to(tl.int64) * v_batch + kv_head * v_head + first_block_kv * v_block
        log2_scale *= tl.load(q_scale + (first_block_q + block * block_q // scale_block) * q_block)

    last = row + (seq_kv - seq_q)
    first_last = block * block_q + (seq_kv - seq_q)  # the last causal key of the tile's first row
    begin = 0
    end = seq_kv
    full_begin = 0
    full_end = seq_kv
    if causal:
        end = tl.minimum(end, first_last + block_q)
        full_end = tl.minimum(full_end, first_last + 1)
    if windowed:
        # The first row sees the oldest keys; the last row decides which tiles are seen whole.
        begin = tl.maximum(first_last - window + 1, 0) // block_kv * block_kv
        full_begin = tl.maximum(first_last + block_q - window, 0)
        if not causal:
            end = tl.minimum(end, first_last + block_q + window - 1)
            full_end = tl.minimum(full_end, first_last + window)
    full_begin = (full_begin + block_kv - 1) // block_kv * block_kv
    full_end = tl.maximum(full_end, 0) // block_kv * block_kv

    output = tl.zeros([block_q, width], tl.float32)
    row_max = tl.full([block_q], float("-inf"), tl.float32)
    row_sum = tl.zeros([block_q], tl.float32)
    # O is kept in units of V's current scale: rescaled where the scale changes, multiplied by it at the end.
    v_unit = 1.0
    if q_scale is not None:
        v_unit = tl.load(v_scale + begin // scale_block * v_block)
    # Three loops over tiles of keys: masked by the window, seen whole by every row, masked by the diagonal or the end.
    for part in tl.static_range(3):
        low = begin
        high = end
        if part == 0:
            high = tl.minimum(full_begin, end)
        elif part == 1:
            low = full_begin
            high = full_end
        else:
            low = tl.maximum(full_begin, full_end)
        if part > 0 or windowed:
            for start in tl.range(low, high, block_kv):
                factor = log2_scale
                if q_scale is not None:
                    factor = log2_scale * tl.load(k_scale + start // scale_block * k_block)
                    unit = tl.load(v_scale + start // scale_block * v_block)
                    # Between blocks of one scale this is a product with 1.
                    output = output * (v_unit / unit)
                    v_unit = unit
                output, row_max, row_sum = _attend(
                    output, row_max, row_sum, q_tile, k_head_data, v_head_data, start, last, seq_kv, factor,
                    softcap * 1.4426950408889634, window, part != 1, causal, windowed, capped, dim, width, block_kv,
                )  # fmt: skip

    seen = row_sum != 0
    output = output * (v_unit / tl.where(seen, row_sum, 1.0))[:, None]
    tl.store(out + tile, output.to(out.dtype.element_ty), mask=inside_tile)
    if lse is not None:
        value = (row_max - 8.0 + tl.math.log2(tl.where(seen, row_sum, 1.0))) * 0.6931471805599453
        tl.store(lse + first_row + row, tl.where(seen, value, float("-inf")), mask=inside)


def attend_fp8(
    q: Tensor, k: Tensor, v: Tensor, scales: Tensor, out: Tensor, causal: bool, softmax_scale: float, *,
    arch: int | None = None, in_graph: bool = False,
) -> None:  # fmt: skip
    """Runs `fp8_dense_attention` on dense operands; `arch` chooses the tiles, by default their GPU's."""
    # With `in_graph`, the launch is a node that `torch.compile` and AOTInductor see and compile into their output.
    batch, heads, seq_q, dim = q.shape
    tiles = tiles_for(dim, hardware.current(q.device.index or 0).arch if arch is None else arch)
    kernel = torch.library.wrap_triton(fp8_dense_attention) if in_graph else fp8_dense_attention
    if in_graph or out.numel():
        kernel[triton.cdiv(seq_q, tiles.block_q), heads, batch](
            q, k, v, scales, heads, k.shape[1], seq_q, k.shape[2], out,
            softmax_scale=softmax_scale, causal=causal, dim=dim, **vars(tiles), enable_fp_fusion=True,
        )  # fmt: skip


def attend(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, options: AttentionOptions, arch: int | None = None
) -> None:
    """Runs `dense_attention_with_options` on E4M3 with scales, or BF16 or FP16 without; v is not laid out."""
    # Scales are `[batch, heads, blocks]`, expanded as needed. `arch` chooses the tiles, by default those of the GPU.
    if not out.numel():
        return
    batch, heads, tokens_q, dim = q.shape
    kv_heads, tokens_kv = k.shape[1:3]
    tiles = tiles_for(dim, hardware.current(q.device.index or 0).arch if arch is None else arch, q.dtype.itemsize)
    grid = (triton.cdiv(options.max_seqlen_q, tiles.block_q), heads, options.sequences(batch))
    dense_attention_with_options[grid](
        q, k, v, options.q_scale, options.k_scale, options.v_scale, options.cu_seqlens_q, options.cu_seqlens_k,
        heads, kv_heads, tokens_q, tokens_kv, tokens_q, tokens_kv, options.reach, *options.strides,
        options.softmax_scale, options.softcap or 0.0, out, lse,
        causal=options.causal, windowed=options.window is not None, capped=options.softcap is not None,
        scale_block=SCALE_BLOCK, dim=dim, width=triton.next_power_of_2(dim), **vars(tiles), enable_fp_fusion=True,
    )  # fmt: skip
