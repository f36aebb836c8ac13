"""FP8 attention in plain PyTorch: the oracle of the kernel, and what runs where the kernel cannot.

    S = (Q·q_scale)(K·k_scale)ᵀ · softmax_scale
    P = 2⁸ · exp(S − row max)              at most 256, so that E4M3 (up to 448) holds it
    O = e4m3(P) (V·v_scale) / Σ P          the sum is over P as it was before it was rounded

The factor 2⁸ moves the small probabilities out of E4M3's subnormals and cancels in the division. The kernels round P
against the largest score they have met so far, or one up to 2³ above or 2^3.75 below it, the oracle against the
largest of the row; between the two, the values that are rounded differ by a common factor, so the errors are equal in
size and not in sign.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch

P_SCALE_LOG2 = 8
"""Log2 of the factor on the probabilities before they become E4M3."""

SCALE_BLOCK = 128
"""Rows (tokens of one head) that share a block scale."""

_SCORES = 1 << 24


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    softmax_scale: float | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    compute: torch.dtype = torch.float32,
    round_p: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `quant.kernels.attention.forward.attention` computes, with every option, in plain PyTorch.

    Args:
        q, k, v, q_scale, k_scale, v_scale, causal, window, softcap, softmax_scale, cu_seqlens_q, cu_seqlens_k: as
            there; operands of any floating dtype.
        dtype: of the output.
        compute: dtype of everything in between; float64 for a comparison to trust.
        round_p: whether the probabilities are rounded to the dtype of v, as in the kernels.

    Returns:
        The output and the log-sum-exp of the scores, `[batch, heads, seq_q]` in `compute`. A query that sees no key
        gives zeros and −inf.
    """
    query = _dequantized(q, q_scale, cu_seqlens_q, compute)
    query = query * (1 / math.sqrt(q.shape[3]) if softmax_scale is None else softmax_scale)
    key = _dequantized(k, k_scale, cu_seqlens_k, compute)
    value = _dequantized(v, v_scale, cu_seqlens_k, compute)
    rounded_to = v.dtype if round_p and v.dtype.itemsize < 4 else None
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:3], -math.inf, dtype=compute, device=q.device)
    for rows, keys in _sequences(q.shape[2], k.shape[2], cu_seqlens_q, cu_seqlens_k):
        part = query[:, :, rows].unflatten(1, (k.shape[1], -1)), key[:, :, None, keys], value[:, :, None, keys]
        for piece, (values, sums) in _in_pieces(*part, causal, window, softcap, rounded_to):
            here = slice(rows.start + piece.start, rows.start + piece.stop)
            out[:, :, here], lse[:, :, here] = values.flatten(1, 2).to(dtype), sums.flatten(1, 2)
    return out, lse


def block_starts(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Index of the first scale block of each packed sequence.

    Counting from cu // 128 plus the number of the sequence leaves room for every sequence's blocks, whatever the
    lengths, and needs nothing but its own entry: tokens // 128 + sequences blocks in all.
    """
    return cu_seqlens[:-1] // SCALE_BLOCK + torch.arange(len(cu_seqlens) - 1, device=cu_seqlens.device)


def scale_of_rows(scale: torch.Tensor, shape: torch.Size, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """Scales per tensor, per head or per block, spread to `[batch, heads, rows, 1]` or something that broadcasts."""
    if scale.dim() < 2:
        return scale.reshape(1, -1, 1, 1)
    if scale.dim() == 2:
        return scale[:, :, None, None]
    row = torch.arange(shape[2], device=scale.device)
    if cu_seqlens is None:
        return scale[:, :, row // SCALE_BLOCK, None]
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True)
    block = block_starts(cu_seqlens)[sequence] + (row - cu_seqlens[sequence]) // SCALE_BLOCK
    return scale[:, :, block, None]


def lay_out_v(v: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
    """V as Hopper's FP8 kernel reads it: K-major, as FP8 operands must be, and keys in the order in which P is.

    An accumulator's thread holds 2 neighbours of every 8 columns, and a left operand's wants 4 of every 16. So of 16
    keys the order is 0 1 8 9, 2 3 10 11, 4 5 12 13, 6 7 14 15.

    Args:
        v: `[batch, kv_heads, tokens, dim]`.
        cu_seqlens: of packed sequences, each of which starts at the place of its scale blocks.

    Returns:
        `[batch, kv_heads, dim, keys]`, keys padded with zeros to whole blocks of 128.
    """
    return _padded(v, cu_seqlens).unflatten(2, (-1, 2, 4, 2)).transpose(3, 4).flatten(2, 5).mT.contiguous()


def restore_v(v: torch.Tensor, tokens: int, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
    """What `lay_out_v` was made of."""
    rows = v.mT.unflatten(2, (-1, 4, 2, 2)).transpose(3, 4).flatten(2, 5)
    return rows[:, :, _padded_rows(tokens, cu_seqlens, v.device)]


def _padded(v: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    sequences = 0 if cu_seqlens is None else len(cu_seqlens) - 1
    blocks = v.shape[2] // SCALE_BLOCK + sequences if sequences else -(-v.shape[2] // SCALE_BLOCK)
    out = torch.zeros(*v.shape[:2], blocks * SCALE_BLOCK, v.shape[3], dtype=v.dtype, device=v.device)
    out[:, :, _padded_rows(v.shape[2], cu_seqlens, v.device)] = v
    return out


def _padded_rows(tokens: int, cu_seqlens: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """Where each token is among whole blocks."""
    row = torch.arange(tokens, device=device)
    if cu_seqlens is None:
        return row
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True)
    return block_starts(cu_seqlens)[sequence] * SCALE_BLOCK + row - cu_seqlens[sequence]


def _dequantized(
    x: torch.Tensor, scale: torch.Tensor | None, cu_seqlens: torch.Tensor | None, compute: torch.dtype
) -> torch.Tensor:
    return x.to(compute) if scale is None else x.to(compute) * scale_of_rows(scale.to(compute), x.shape, cu_seqlens)


def _sequences(
    seq_q: int, seq_kv: int, cu_seqlens_q: torch.Tensor | None, cu_seqlens_k: torch.Tensor | None
) -> list[tuple[slice, slice]]:
    """Where the queries and the keys of each sequence are."""
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return [(slice(0, seq_q), slice(0, seq_kv))]
    bounds = [[slice(a, b) for a, b in pairwise(cu.tolist())] for cu in (cu_seqlens_q, cu_seqlens_k)]
    return list(zip(*bounds, strict=True))


def _in_pieces(query, key, value, causal, window, softcap, rounded_to):
    """Attention of one sequence, as many queries at a time as memory allows."""
    seq_q, seq_kv = query.shape[-2], key.shape[-2]
    rows = max(1, _SCORES // max(1, math.prod(query.shape[:-2]) * seq_kv))
    for start in range(0, seq_q if seq_kv else 0, rows):
        piece = slice(start, min(start + rows, seq_q))
        scores = query[..., piece, :] @ key.mT
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        visible = visible_keys(seq_q, seq_kv, causal, window, query.device)[piece]
        yield piece, _softmax_times(scores.masked_fill(~visible, -math.inf), value, rounded_to)


def visible_keys(seq_q: int, seq_kv: int, causal: bool, window: int | None, device: torch.device) -> torch.Tensor:
    """Which keys each query sees, bool `[seq_q, seq_kv]`; the last query stands at the last key."""
    ahead = torch.arange(seq_kv, device=device) - (torch.arange(seq_q, device=device) + seq_kv - seq_q)[:, None]
    visible = torch.ones_like(ahead, dtype=torch.bool)
    if causal:
        visible &= ahead <= 0
    if window is not None:
        visible &= ahead.abs() < window
    return visible


def attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scales: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    dtype: torch.dtype = torch.bfloat16,
    compute: torch.dtype = torch.float32,
    round_p: bool = True,
    rows: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over dequantized operands.

    Args:
        q: `[batch, heads, seq_q, dim]`, E4M3 or any floating dtype.
        k, v: `[batch, kv_heads, seq_kv, dim]`.
        scales: of q, k and v, float32 `[3]`.
        causal: query i sees the keys up to i + seq_kv − seq_q.
        softmax_scale: None is 1/√dim.
        dtype: of the output.
        compute: dtype of everything in between.
        round_p: whether the probabilities become E4M3, as in the kernel.
        rows: queries at a time; 0 takes all at once, as a graph of dynamic size must. None bounds the memory.

    Returns:
        The output `[batch, heads, seq_q, dim]` and the log-sum-exp of the scores `[batch, heads, seq_q]` in
        `compute`. A query that sees no key gives zeros and −inf.
    """
    batch, heads, seq_q, dim = q.shape
    kv_heads, seq_kv = k.shape[1:3]
    q_scale, k_scale, v_scale = scales.to(compute).unbind()
    scale = q_scale * k_scale * (1 / math.sqrt(dim) if softmax_scale is None else softmax_scale)
    grouped = q.to(compute).view(batch, kv_heads, heads // kv_heads, seq_q, dim) * scale
    keys, values = k.to(compute)[:, :, None], v.to(compute)[:, :, None]
    if rows is None:
        rows = max(1, _SCORES // max(1, batch * heads * seq_kv))
    chunks = [(0, grouped)]
    if rows:
        chunks = [(start, grouped[..., start : start + rows, :]) for start in range(0, seq_q, rows)] or chunks
    out, lse = [], []
    for start, part in chunks:
        scores = part @ keys.mT
        if causal:
            last = torch.arange(part.shape[-2], device=q.device) + (start + seq_kv - seq_q)
            scores = scores.masked_fill(torch.arange(seq_kv, device=q.device) > last[:, None], -math.inf)
        values_of_part, lse_of_part = _softmax_times(scores, values, torch.float8_e4m3fn if round_p else None)
        out.append((values_of_part * v_scale).to(dtype))
        lse.append(lse_of_part)
    return torch.cat(out, -2).flatten(1, 2), torch.cat(lse, -1).flatten(1, 2)


def _softmax_times(
    scores: torch.Tensor, values: torch.Tensor, rounded_to: torch.dtype | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scores) @ values, and the log-sum-exp of each row."""
    top = scores.amax(-1, keepdim=True)
    shift = torch.where(top == -math.inf, 0.0, top)
    p = torch.exp(scores - shift) * 2.0**P_SCALE_LOG2
    total = p.sum(-1, keepdim=True)
    rounded = p if rounded_to is None else p.to(rounded_to).to(p.dtype)
    out = torch.where(total > 0, (rounded @ values) / total, 0.0)
    return out, (shift + total.log() - P_SCALE_LOG2 * math.log(2)).squeeze(-1)
