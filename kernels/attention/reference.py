"""Attention in plain PyTorch is the oracle of the kernels, and runs where no kernel does.

    S = (Q·q_scale)(K·k_scale)ᵀ · softmax_scale
    P = 2⁸ · exp(S − row max)              at most 256, so that E4M3 (up to 448) holds it
    O = e4m3(P) (V·v_scale) / Σ P          the sum is over P before rounding

The factor 2⁸ moves small probabilities out of E4M3's subnormals and cancels in the division. The kernels round P
against the largest score so far, or a reference up to 2³ above or 2^3.75 below it, and the oracle against the largest
score of the row. So the rounded values of the two differ by a common factor: their errors have the same size, but not
the same sign.
"""

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Unpack

import torch
from torch import Tensor

from quant.kernels.attention.attention_operands import AttentionKeywords, AttentionOptions, scale_of_rows

P_SCALE_LOG2 = 8  # log2 of the factor on the probabilities before they become E4M3

_SCORES = 1 << 24  # scores that are held at a time

_Piece = tuple[slice, tuple[Tensor, Tensor]]


def reference(
    q: Tensor, k: Tensor, v: Tensor, *, compute: torch.dtype = torch.float32, round_p: bool = True,
    **keywords: Unpack[AttentionKeywords],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns `quant.kernels.attention.forward.attention` with every option, and its log-sum-exp, in plain PyTorch.

    Args:
        q, k, v: operands of any floating dtype; v is not laid out.
        compute: dtype of everything in between, and of the log-sum-exp; float64 for a comparison to trust.
        round_p: whether the probabilities are rounded to the dtype of v, as in the kernels.
    """
    options = AttentionOptions(**keywords)
    # The factor of the scores is applied to the queries: fewer multiplications than on scores.
    query = _dequantized(q, options.q_scale, options.cu_seqlens_q, compute) * options.scale_of(q.shape[3])
    key = _dequantized(k, options.k_scale, options.cu_seqlens_k, compute)
    value = _dequantized(v, options.v_scale, options.cu_seqlens_k, compute)
    rounded_to = v.dtype if round_p and v.dtype.itemsize < 4 else None
    out = torch.zeros(q.shape, dtype=options.dtype or torch.bfloat16, device=q.device)
    lse = torch.full(q.shape[:3], -math.inf, dtype=compute, device=q.device)
    sequences = [[slice(0, q.shape[2])], [slice(0, k.shape[2])]]
    if options.cu_seqlens_q is not None and options.cu_seqlens_k is not None:
        packed = (options.cu_seqlens_q, options.cu_seqlens_k)
        sequences = [[slice(a, b) for a, b in pairwise(cu.tolist())] for cu in packed]
    for rows, keys in zip(*sequences, strict=True):
        # [batch, kv_heads, group, queries, dim] by [batch, kv_heads, 1, keys, dim]
        part = query[:, :, rows].unflatten(1, (k.shape[1], -1)), key[:, :, None, keys], value[:, :, None, keys]
        for piece, (values, sums) in _in_pieces(*part, options, rounded_to, False):
            queries = slice(rows.start + piece.start, rows.start + piece.stop)
            out[:, :, queries], lse[:, :, queries] = values.flatten(1, 2).to(out.dtype), sums.flatten(1, 2)
    return out, lse


def fp8_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, scales: Tensor, *, causal: bool = False, softmax_scale: float | None = None,
    dtype: torch.dtype = torch.bfloat16, whole: bool = False,
) -> Tensor:  # fmt: skip
    """Returns `quant.kernels.attention.forward.fp8_attention` in plain PyTorch, for the same arguments."""
    # `whole` takes all queries at once, as a graph of dynamic size needs it; otherwise memory is bounded.
    options = AttentionOptions(causal=causal, softmax_scale=softmax_scale)
    q_scale, k_scale, v_scale = scales.float().unbind()
    scale = q_scale * k_scale * options.scale_of(q.shape[3])
    query = q.float().unflatten(1, (k.shape[1], -1)) * scale
    pieces = _in_pieces(query, k.float()[:, :, None], v.float()[:, :, None], options, torch.float8_e4m3fn, whole)
    return torch.cat([(values * v_scale).to(dtype) for _, (values, _) in pieces], -2).flatten(1, 2)


def _dequantized(x: Tensor, scale: Tensor | None, cu_seqlens: Tensor | None, compute: torch.dtype) -> Tensor:
    return x.to(compute) if scale is None else x.to(compute) * scale_of_rows(scale.to(compute), x.shape, cu_seqlens)


def _in_pieces(
    query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, rounded_to: torch.dtype | None, whole: bool
) -> Iterator[_Piece]:
    """Yields the attention and log-sum-exp of one sequence, as many queries at a time as memory allows, or all."""
    seq_q, seq_kv = query.shape[-2], key.shape[-2]
    pieces = [slice(None)]
    if not whole:
        rows = max(1, _SCORES // max(1, math.prod(query.shape[:-2]) * seq_kv))
        starts = range(0, max(seq_q, 1) if seq_kv else 0, rows)
        pieces = [slice(start, min(start + rows, seq_q)) for start in starts]
    for piece in pieces:
        scores = query[..., piece, :] @ key.mT
        if options.softcap:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        if options.causal or options.window is not None:
            position = torch.arange(seq_q, device=query.device)[piece] + seq_kv - seq_q
            ahead = torch.arange(seq_kv, device=query.device) - position[:, None]
            visible = ahead <= 0 if options.causal else torch.ones_like(ahead, dtype=torch.bool)
            if options.window is not None:
                visible = visible & (ahead.abs() < options.window)
            scores = scores.masked_fill(~visible, -math.inf)
        top = scores.amax(-1, keepdim=True)
        # A query that sees no key has a maximum of −inf, and −inf − −inf would be NaN.
        shift = torch.where(top == -math.inf, 0.0, top)
        p = torch.exp(scores - shift) * 2.0**P_SCALE_LOG2
        total = p.sum(-1, keepdim=True)
        rounded = p if rounded_to is None else p.to(rounded_to).to(p.dtype)
        out = torch.where(total == 0, 0.0, (rounded @ value) / total)
        yield piece, (out, (shift + total.log() - P_SCALE_LOG2 * math.log(2)).squeeze(-1))
