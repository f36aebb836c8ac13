"""FP8 attention in plain PyTorch: the oracle of the kernel, and what runs where the kernel cannot.

    S = (Q·q_scale)(K·k_scale)ᵀ · softmax_scale
    P = 2⁸ · exp(S − row max)              at most 256, so that E4M3 (up to 448) holds it
    O = e4m3(P) (V·v_scale) / Σ P          the sum is over P as it was before it was rounded

The factor 2⁸ moves the small probabilities out of E4M3's subnormals and cancels in the division. The kernel rounds P
against the largest score it has met so far, the oracle against the largest of the row; between the two, the values
that are rounded differ by a common factor, so the errors are equal in size and not in sign.
"""

from __future__ import annotations

import math

import torch

P_SCALE_LOG2 = 8
"""Log2 of the factor on the probabilities before they become E4M3."""

_SCORES = 1 << 24


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
        values_of_part, lse_of_part = _softmax_times(scores, values, round_p)
        out.append((values_of_part * v_scale).to(dtype))
        lse.append(lse_of_part)
    return torch.cat(out, -2).flatten(1, 2), torch.cat(lse, -1).flatten(1, 2)


def _softmax_times(scores: torch.Tensor, values: torch.Tensor, round_p: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scores) @ values, and the log-sum-exp of each row."""
    top = scores.amax(-1, keepdim=True)
    shift = torch.where(top == -math.inf, 0.0, top)
    p = torch.exp(scores - shift) * 2.0**P_SCALE_LOG2
    total = p.sum(-1, keepdim=True)
    rounded = p.to(torch.float8_e4m3fn).to(p.dtype) if round_p else p
    out = torch.where(total > 0, (rounded @ values) / total, 0.0)
    return out, (shift + total.log() - P_SCALE_LOG2 * math.log(2)).squeeze(-1)
