"""These kernels quantize attention's operands to the values that `quant.kernels.attention.quantize_qkv` defines.

    grid: (blocks of 128 tokens, heads of Q, then of K, then of V, sequences)

    Q, K   two halves [128, dim / 2] ─▶ rope ─▶ − mean ─▶ signs, H (a dot, exact products) ─▶ amax ─▶ codes, a row each
    V      [128, dim], its rows taken in the order of `order_of_keys` ─▶ amax ─▶ codes, transposed in shared memory

A program reads its tile once and writes it once. Given scales are read; otherwise each tile makes its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quant.kernels.attention.attention_operands import (
    SCALE_BLOCK,
    AttentionInputs,
    QuantizedParts,
    Scales,
    scale_blocks,
)
from quant.kernels.base.portable_small_floats import amax_of, finite_or_nan, larger
from quant.kernels.rounding.hadamard import hadamard_block, sign_matrices

_INTEGERS = (
    "heads", "kv_heads", "tokens_q", "tokens_kv", "blocks_q", "blocks_kv", "cos_batch",
    "q_batch", "q_head", "q_token", "k_batch", "k_head", "k_token", "v_batch", "v_head", "v_token",
)  # fmt: skip
_MEAN_ROWS = 1024


@triton.jit
def order_of_keys(position):
    """Returns the key at each position of a laid-out V: of 16, pairs 0 4, 1 5, 2 6, 3 7 are neighbours."""
    return position // 16 * 16 + position % 4 // 2 * 8 + position % 16 // 4 * 2 + position % 2


@triton.jit
def _halves(x, token_stride, row, inside, cos, sin, half: tl.constexpr, width: tl.constexpr, rope: tl.constexpr):
    """Loads both halves of rows of a head, after the rotary embedding. `cos`, `sin`: of token 0."""
    d = tl.arange(0, width)
    mask = inside[:, None] & (d < half)[None, :]
    at = row.to(tl.int64)[:, None] * token_stride + d[None, :]
    # Rotary embedding pairs column d with d + dim / 2, so both halves are in one thread.
    x1 = tl.load(x + at, mask=mask, other=0.0)
    x2 = tl.load(x + at + half, mask=mask, other=0.0)
    if rope:
        angle = row[:, None] * (2 * half) + d[None, :]
        c = tl.load(cos + angle, mask=mask, other=0.0).to(tl.float32)
        s = tl.load(sin + angle, mask=mask, other=0.0).to(tl.float32)
        f1 = x1.to(tl.float32)
        f2 = x2.to(tl.float32)
        x1 = (f1 * c - f2 * s).to(x1.dtype)
        x2 = (f2 * c + f1 * s).to(x2.dtype)
    return x1, x2


@triton.jit
def _step(amax, scale, at_head, at_block, static: tl.constexpr, measure: tl.constexpr):
    """Returns 1 / scale of a tile: of the given scale, or of the tile's own, which is written."""
    if static:
        step = tl.load(scale + at_head)
    else:
        step = larger(finite_or_nan(tl.div_rn(amax, 448.0)), 1e-30)
        tl.store(scale + at_block, amax if measure else step)
    return tl.div_rn(1.0, step)


@triton.jit
def _codes(x, inverse, static: tl.constexpr):
    # A tile's own scale says that it holds infinity; a given one does not.
    return ((finite_or_nan(x) if static else x) * inverse).to(tl.float8e4nv)  # saturates


@triton.jit
def _value_block(
    v, token_stride, out, scale, at_head, blocks, first_block, block, start, length, tokens,
    dim: tl.constexpr, width: tl.constexpr, rows: tl.constexpr, static: tl.constexpr, laid_out: tl.constexpr,
    measure: tl.constexpr,
):  # fmt: skip
    """A block of one head of V."""
    position = block * rows + tl.arange(0, rows)
    row = order_of_keys(position) if laid_out else position
    d = tl.arange(0, width)
    inside = (row < length)[:, None] & (d < dim)[None, :]
    x = tl.load(v + (start + row).to(tl.int64)[:, None] * token_stride + d[None, :], mask=inside, other=0.0)
    # One scale for the whole block of 128 tokens.
    amax = amax_of(amax_of(x.to(tl.float32), 1), 0)
    inverse = _step(amax, scale, at_head, at_head * blocks + first_block + block, static, measure)
    if not measure:
        codes = _codes(x.to(tl.float32), inverse, static)
        if laid_out:
            # [dim, keys]: FP8 operands of wgmma must be contiguous along the sum, which runs over keys.
            at = (at_head * dim + d)[:, None] * (blocks * rows) + (first_block * rows + position)[None, :]
            tl.store(out + at, tl.trans(codes), mask=(d < dim)[:, None])
        else:
            tl.store(out + (at_head * tokens + start + row)[:, None] * dim + d[None, :], codes, mask=inside)


@triton.jit
def _row_block(
    x, token_stride, cos, sin, mean, turns, out, scale, shift, at_head, blocks, first_block, block, start, length,
    tokens,
    is_query: tl.constexpr, dim: tl.constexpr, width: tl.constexpr, rows: tl.constexpr, rope: tl.constexpr,
    smooth: tl.constexpr, hadamard: tl.constexpr, root: tl.constexpr, static: tl.constexpr, measure: tl.constexpr,
):  # fmt: skip
    """A block of one head of Q or K."""
    half: tl.constexpr = dim // 2
    row = block * rows + tl.arange(0, rows)
    inside = row < length
    d = tl.arange(0, width)
    x1, x2 = _halves(x, token_stride, start + row, inside, cos, sin, half, width, rope)
    if smooth:
        m1 = tl.load(mean + d, mask=d < half, other=0.0)[None, :]
        m2 = tl.load(mean + d + half, mask=d < half, other=0.0)[None, :]
        f1 = x1.to(tl.float32)
        f2 = x2.to(tl.float32)
        # Q · (K − mean)ᵀ lacks Q · mean, the same for every key of a row: the shift of its scores.
        if is_query:
            if not measure:
                tl.store(shift + at_head * tokens + start + row, tl.sum(f1 * m1 + f2 * m2, 1), mask=inside)
        else:
            x1 = tl.where(inside[:, None], f1 - m1, 0.0).to(x1.dtype)
            x2 = tl.where(inside[:, None], f2 - m2, 0.0).to(x2.dtype)
    if hadamard:
        at = d[:, None] * width + d[None, :]
        # H of twice the size is [[H, H], [H, −H]]. Products with ±1 are exact in the tensor cores.
        u1 = tl.dot(x1, tl.load(turns + at))
        u2 = tl.dot(x2, tl.load(turns + width * width + at))
        y1 = (u1 + u2) * root
        y2 = (u1 - u2) * root
    else:
        y1 = x1.to(tl.float32)
        y2 = x2.to(tl.float32)
    amax = amax_of(tl.ravel(larger(tl.abs(y1), tl.abs(y2))), 0)
    inverse = _step(amax, scale, at_head, at_head * blocks + first_block + block, static, measure)
    if not measure:
        at = (at_head * tokens + start + row)[:, None] * dim + d[None, :]
        mask = inside[:, None] & (d < half)[None, :]
        tl.store(out + at, _codes(y1, inverse, static), mask=mask)
        tl.store(out + at + half, _codes(y2, inverse, static), mask=mask)


@triton.jit(do_not_specialize=_INTEGERS)
def qkv_to_fp8_kernel(
    q, k, v, cos, sin, mean, turns, q_out, k_out, v_out, q_scale, k_scale, v_scale, shift, cu_q, cu_kv,
    heads, kv_heads, tokens_q, tokens_kv, blocks_q, blocks_kv, cos_batch,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token,
    dim: tl.constexpr, width: tl.constexpr, rows: tl.constexpr, rope: tl.constexpr, smooth: tl.constexpr,
    hadamard: tl.constexpr, root: tl.constexpr, packed: tl.constexpr, static: tl.constexpr, laid_out: tl.constexpr,
    measure: tl.constexpr,
):  # fmt: skip
    """One block of one head; `turns` is H with the signs of each half, and `root` its normalization."""
    # Heads are numbered through: first Q's, then K's, then V's. Strides are in units of eight elements, which lets
    # the compiler know that rows are aligned to 16 bytes.
    block = tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    is_query = head < heads
    is_value = head >= heads + kv_heads
    tokens = tl.where(is_query, tokens_q, tokens_kv)
    blocks = tl.where(is_query, blocks_q, blocks_kv)
    batch = sequence.to(tl.int64)
    start = 0
    first_block = 0
    length = tokens
    if packed:
        batch = tl.full([], 0, tl.int64)
        cu = cu_kv
        if is_query:
            cu = cu_q
        start = tl.load(cu + sequence)
        length = tl.load(cu + sequence + 1) - start
        # Every sequence begins a block of its own: at most one more than its tokens fill.
        first_block = start // rows + sequence
    if block * rows >= length:
        return
    if is_value:
        kv_head = head - heads - kv_heads
        at_head = batch * kv_heads + kv_head
        _value_block(
            v + (batch * v_batch + kv_head * v_head) * 8, v_token * 8, v_out, v_scale, at_head, blocks, first_block,
            block, start, length, tokens, dim, 2 * width, rows, static, laid_out, measure,
        )  # fmt: skip
    elif is_query:
        _row_block(
            q + (batch * q_batch + head * q_head) * 8, q_token * 8,
            cos + batch * cos_batch * 8, sin + batch * cos_batch * 8,
            mean + (sequence * kv_heads + head // (heads // kv_heads)) * dim, turns, q_out, q_scale, shift,
            batch * heads + head, blocks, first_block, block, start, length, tokens,
            True, dim, width, rows, rope, smooth, hadamard, root, static, measure,
        )  # fmt: skip
    else:
        key_head = head - heads
        _row_block(
            k + (batch * k_batch + key_head * k_head) * 8, k_token * 8,
            cos + batch * cos_batch * 8, sin + batch * cos_batch * 8,
            mean + (sequence * kv_heads + key_head) * dim, turns, k_out, k_scale, shift,
            batch * kv_heads + key_head, blocks, first_block, block, start, length, tokens,
            False, dim, width, rows, rope, smooth, hadamard, root, static, measure,
        )  # fmt: skip


@triton.jit(do_not_specialize=["kv_heads", "tokens", "cos_batch", "batch_stride", "head_stride", "token_stride"])
def key_sum_kernel(
    k, cos, sin, total, cu, kv_heads, tokens, cos_batch, batch_stride, head_stride, token_stride,
    dim: tl.constexpr, width: tl.constexpr, rows: tl.constexpr, span: tl.constexpr, rope: tl.constexpr,
    packed: tl.constexpr,
):  # fmt: skip
    """Sums of the keys over `span` tokens; grid: (spans, KV heads, sequences)."""
    half: tl.constexpr = dim // 2
    part = tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    start = 0
    length = tokens
    batch = sequence.to(tl.int64)
    if packed:
        start = tl.load(cu + sequence)
        length = tl.load(cu + sequence + 1) - start
        batch = tl.full([], 0, tl.int64)
    d = tl.arange(0, width)
    sum1 = tl.zeros([width], tl.float32)
    sum2 = tl.zeros([width], tl.float32)
    # Sums in FP32 over `span` tokens; PyTorch adds the parts, always in the same order.
    for first in tl.range(part * span, tl.minimum((part + 1) * span, length), rows):
        row = first + tl.arange(0, rows)
        x1, x2 = _halves(
            k + (batch * batch_stride + head * head_stride) * 8, token_stride * 8, start + row, row < length,
            cos + batch * cos_batch * 8, sin + batch * cos_batch * 8, half, width, rope,
        )  # fmt: skip
        sum1 += tl.sum(x1.to(tl.float32), 0)
        sum2 += tl.sum(x2.to(tl.float32), 0)
    at = ((part * tl.num_programs(2) + sequence) * kv_heads + head) * dim + d
    tl.store(total + at, sum1, mask=d < half)
    tl.store(total + at + half, sum2, mask=d < half)


@triton.jit
def fp8_lay_out_v_kernel(
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
        # A packed sequence begins at a multiple of the scale block, where its scales begin.
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
    """Returns V as the FP8 kernel reads it.

    Args:
        v: E4M3 `[batch, kv_heads, tokens, dim]`, contiguous.
        cu_seqlens: the seqlens of packed sequences: each then starts at a multiple of 128, where its scale blocks
            start.
        longest: tokens of the longest of them; None is all tokens.

    Returns:
        E4M3 `[batch, kv_heads, dim, keys]`, keys padded with zeros to blocks of 128 and ordered by `order_of_keys`.
    """
    batch, heads, tokens, dim = v.shape
    sequences = 1 if cu_seqlens is None else len(cu_seqlens) - 1
    padded = scale_blocks(tokens, None if cu_seqlens is None else sequences) * SCALE_BLOCK
    make = torch.empty if cu_seqlens is None else torch.zeros
    out = make(batch, heads, dim, padded, dtype=torch.uint8, device=v.device)
    grid = (triton.cdiv(longest or tokens, SCALE_BLOCK), batch * heads, sequences)
    fp8_lay_out_v_kernel[grid](
        v.view(torch.uint8), cu_seqlens, out, tokens, padded, packed=cu_seqlens is not None, dim=dim,
        width=triton.next_power_of_2(dim), block=SCALE_BLOCK, num_warps=4,
    )  # fmt: skip
    return out.view(v.dtype)


@triton.jit(do_not_specialize=["tokens"])
def fp8_blocks_decode_kernel(codes, scale, out, tokens, dim: tl.constexpr, width: tl.constexpr, rows: tl.constexpr):
    """One block of tokens of one head; grid: (blocks, heads · batch)."""
    block = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    row = block * rows + tl.arange(0, rows)
    d = tl.arange(0, width)
    inside = (row < tokens)[:, None] & (d < dim)[None, :]
    at = (head * tokens + row)[:, None] * dim + d[None, :]
    step = tl.load(scale + head * tl.num_programs(0) + block)
    values = tl.load(codes + at, mask=inside).to(tl.float32) * step
    tl.store(out + at, values.to(out.dtype.element_ty), mask=inside)


def decode_blocks(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the values of E4M3 `[batch, heads, tokens, dim]`, contiguous, with a scale for 128 tokens of a head."""
    batch, heads, tokens, dim = codes.shape
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    fp8_blocks_decode_kernel[scale_blocks(tokens), batch * heads](
        codes, scale.contiguous(), out, tokens, dim=dim, width=triton.next_power_of_2(dim), rows=SCALE_BLOCK,
        num_warps=8,
    )  # fmt: skip
    return out


def quantize_qkv(work: AttentionInputs, scales: Scales | None) -> QuantizedParts:
    """Returns the codes and scales of Q, K and V, and the shift of the scores."""
    q, k, v = work.q, work.k, work.v
    padded = (*v.shape[:2], v.shape[3], work.blocks(v) * SCALE_BLOCK)
    codes = [
        torch.empty(shape, dtype=torch.float8_e4m3fn, device=q.device)
        for shape in (q.shape, k.shape, padded if work.options.v_laid_out else v.shape)
    ]
    steps = _new_scales(work) if scales is None else [_per_head(s, x) for s, x in zip(scales, (q, k, v), strict=True)]
    shift = None if work.mean is None else torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    _launch(work, codes, steps, shift, static=scales is not None, measure=False)
    return codes, steps if scales is None else scales, shift


def measure(work: AttentionInputs) -> list[torch.Tensor]:
    """Returns the largest magnitude of each block of Q, K and V."""
    amax = _new_scales(work)
    _launch(work, [work.q, work.k, work.v], amax, None, static=False, measure=True)
    return amax


def key_means(work: AttentionInputs) -> torch.Tensor:
    """Returns the mean of K over each sequence, `[sequences, kv_heads, dim]`."""
    k = _aligned(work.k)
    sequences = work.sequences or k.shape[0]
    longest = k.shape[2] if work.max_seqlen_k is None else work.max_seqlen_k
    parts = max(1, triton.cdiv(longest, _MEAN_ROWS))
    total = torch.empty(parts, sequences, k.shape[1], k.shape[3], dtype=torch.float32, device=k.device)
    cos, sin, cos_batch = _rope_of(work)
    key_sum_kernel[parts, k.shape[1], sequences](
        k, cos, sin, total, work.options.cu_seqlens_k, k.shape[1], k.shape[2], cos_batch, *_eighths(k),
        dim=k.shape[3], width=triton.next_power_of_2(k.shape[3] // 2), rows=64, span=_MEAN_ROWS,
        rope=work.rope is not None, packed=work.options.cu_seqlens_k is not None,
    )  # fmt: skip
    if work.options.cu_seqlens_k is None:
        return total.sum(0) / k.shape[2]
    return total.sum(0) / work.options.cu_seqlens_k.diff().clamp_min(1)[:, None, None]


def _new_scales(work: AttentionInputs) -> list[torch.Tensor]:
    # Packed sequences leave some blocks without tokens, which only a maximum over all blocks reads.
    make = torch.empty if work.sequences is None else torch.zeros
    tensors = (work.q, work.k, work.v)
    return [make(*x.shape[:2], work.blocks(x), dtype=torch.float32, device=x.device) for x in tensors]


def _per_head(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (scale if scale.dim() == 2 else scale.reshape(1, 1)).expand(x.shape[:2]).contiguous()


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Returns `x` so that the kernel reads rows in pieces of 16 bytes."""
    fits = x.stride(3) == 1 and all(n % 8 == 0 for n in x.stride()[:3]) and x.data_ptr() % 16 == 0
    return x if fits else x.contiguous()


def _eighths(x: torch.Tensor) -> list[int]:
    """Returns strides of batch, head and token in units of eight elements, which shows the compiler their alignment."""
    return [n // 8 for n in x.stride()[:3]]


def _rope_of(work: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Returns cos and sin, and the eighths of elements from one batch entry to the next."""
    if work.rope is None:
        return work.k, work.k, 0
    cos, sin = (part.contiguous() for part in work.rope)
    return cos, sin, cos[0].numel() // 8 if cos.dim() == 3 and cos.shape[0] > 1 else 0


def _launch(
    work: AttentionInputs,
    codes: list[torch.Tensor],
    scales: list[torch.Tensor],
    shift: torch.Tensor | None,
    *,
    static: bool,
    measure: bool,
) -> None:
    q, k, v = (_aligned(x) for x in (work.q, work.k, work.v))
    options, dim = work.options, q.shape[3]
    half = dim // 2
    width = triton.next_power_of_2(half)
    longest = max(options.max_seqlen_q or q.shape[2], work.max_seqlen_k or k.shape[2])
    grid = (triton.cdiv(longest, SCALE_BLOCK), q.shape[1] + 2 * k.shape[1], work.sequences or q.shape[0])
    cos, sin, cos_batch = _rope_of(work)
    spare = scales[0]
    turns = sign_matrices(q) if work.hadamard else q
    qkv_to_fp8_kernel[grid](
        q, k, v, cos, sin, spare if work.mean is None else work.mean.contiguous(), turns, *codes,
        *scales, spare if shift is None else shift, options.cu_seqlens_q, options.cu_seqlens_k,
        q.shape[1], k.shape[1], q.shape[2], k.shape[2], work.blocks(q), work.blocks(k), cos_batch,
        *_eighths(q), *_eighths(k), *_eighths(v),
        dim=dim, width=width, rows=SCALE_BLOCK, rope=work.rope is not None, smooth=work.mean is not None,
        hadamard=work.hadamard, root=(2 * hadamard_block(half)) ** -0.5, packed=options.cu_seqlens_q is not None,
        static=static, laid_out=options.v_laid_out, measure=measure, num_warps=8,
        enable_fp_fusion=False,  # the oracle rounds every product
        maxnreg=128 if dim <= 128 else None,  # two programs on an SM
    )  # fmt: skip
