"""Quantizes Q, K and V for FP8 attention, and lays them out as the attention kernel reads them, in one pass.

    operands = quantize_attention(q, k, v, hadamard=True)
    out = operands.attend(causal=True)

Each block of 128 tokens of a head has its scale, amax / 448, unless scales are given or one per head or per tensor
is asked for. Before that, all optional and in this order:

    rope        x · cos + rotate_half(x) · sin, rounded to the dtype of x as models round it
    smooth_k    K − mean of K over the sequence: it shifts all scores of a query alike, which softmax ignores
    hadamard    Q and K times a random-sign Hadamard matrix: scores stay, outliers spread over the head

The Hadamard rotation acts on pairs of halves, so that it and the rotary embedding see the same two registers:

    [u1 u2] = [x1·s1 · H   x2·s2 · H],    y = [u1 + u2   u1 − u2] / √n

with H block-diagonal where half the head dimension is no power of two. Q and K get the same signs.

On Hopper V comes out transposed, keys in the order of `attention_reference.lay_out_v`. Where there is no kernel,
PyTorch does the same, to the bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, overload

import torch

from quant.kernels.attention.forward import DIMS, attention, is_hopper, scale_blocks
from quant.kernels.attention_reference import SCALE_BLOCK, block_starts, lay_out_v
from quant.kernels.hadamard import hadamard_block, hadamard_transform

GRANULARITIES = ("block", "head", "tensor")
E4M3_MAX = 448.0

Scales = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, eq=False)
class AttentionOperands:
    """What FP8 attention reads.

    Attributes:
        q: E4M3 `[batch, heads, seq_q, dim]`.
        k: E4M3 `[batch, kv_heads, seq_kv, dim]`.
        v: as k, or laid out `[batch, kv_heads, dim, keys]`.
        q_scale, k_scale, v_scale: as `attention` takes them.
        v_laid_out: whether v is laid out.
        score_shift: what smoothing K took from each query's scores, before the softmax scale, float32
            `[batch, heads, seq_q]`; None where K was not smoothed.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q: of packed sequences.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_scale: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor
    v_laid_out: bool = False
    score_shift: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    max_seqlen_q: int | None = None

    @overload
    def attend(
        self,
        *,
        causal: bool = False,
        window: int | None = None,
        softcap: float | None = None,
        softmax_scale: float | None = None,
        return_lse: Literal[False] = False,
        dtype: torch.dtype = torch.bfloat16,
    ) -> torch.Tensor: ...
    @overload
    def attend(
        self,
        *,
        causal: bool = False,
        window: int | None = None,
        softcap: float | None = None,
        softmax_scale: float | None = None,
        return_lse: Literal[True],
        dtype: torch.dtype = torch.bfloat16,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def attend(
        self,
        *,
        causal: bool = False,
        window: int | None = None,
        softcap: float | None = None,
        softmax_scale: float | None = None,
        return_lse: bool = False,
        dtype: torch.dtype = torch.bfloat16,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """`attention` over these operands; the log-sum-exp is that of the scores before K was smoothed."""
        if softcap is not None and self.score_shift is not None:
            raise ValueError(
                "attention with a soft cap: smoothing K shifts the scores, and a cap is no longer the same; "
                "quantize with smooth_k=False"
            )
        given: dict[str, Any] = {
            "q_scale": self.q_scale,
            "k_scale": self.k_scale,
            "v_scale": self.v_scale,
            "v_laid_out": self.v_laid_out,
            "causal": causal,
            "window": window,
            "softcap": softcap,
            "softmax_scale": softmax_scale,
            "cu_seqlens_q": self.cu_seqlens_q,
            "cu_seqlens_k": self.cu_seqlens_k,
            "max_seqlen_q": self.max_seqlen_q,
            "dtype": dtype,
        }
        if not return_lse:
            return attention(self.q, self.k, self.v, **given)
        out, lse = attention(self.q, self.k, self.v, return_lse=True, **given)
        if self.score_shift is not None:
            lse = lse + self.score_shift * (1 / math.sqrt(self.q.shape[3]) if softmax_scale is None else softmax_scale)
        return out, lse


def quantize_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    granularity: str = "block",
    scales: Scales | None = None,
    rope: tuple[torch.Tensor, torch.Tensor] | None = None,
    smooth_k: bool = False,
    hadamard: bool = False,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    laid_out: bool | None = None,
) -> AttentionOperands:
    """E4M3 operands of attention.

    Args:
        q: `[batch, heads, seq_q, dim]`, BF16 or FP16; any strides whose last is 1.
        k, v: `[batch, kv_heads, seq_kv, dim]`.
        granularity: "block", "head" or "tensor": what shares a scale. Only blocks are one pass.
        scales: of q, k and v, from a calibration, float32 `[]`, `[1]` or `[batch, heads]`; None measures.
        rope: cos and sin, `[tokens, dim]` or `[batch, tokens, dim]`, the second half repeating the first: the rotary
            embedding of queries and keys, which then are equally many. None takes q and k as they are.
        smooth_k: whether to take the mean from K.
        hadamard: whether to rotate Q and K.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q: as `attention` takes them.
        max_seqlen_k: length of the longest packed sequence of keys; None reads it.
        laid_out: whether V is transposed for Hopper's kernel; None is yes on Hopper.

    Raises:
        ValueError: operands that do not fit, or that no kernel takes.
    """
    where = f"FP8 attention q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    _check(where, q, k, v, granularity, rope, cu_seqlens_q, cu_seqlens_k)
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        max_seqlen_q = int(cu_seqlens_q.diff().max()) if max_seqlen_q is None else max_seqlen_q
        max_seqlen_k = int(cu_seqlens_k.diff().max()) if max_seqlen_k is None else max_seqlen_k
    work = _Work(
        q, k, v, rope, hadamard, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        is_hopper(q.device) if laid_out is None else laid_out,
    )  # fmt: skip
    on_gpu = q.is_cuda
    if on_gpu:
        from quant.kernels.portable.attention_quantize import key_means, measure, quantize
    else:
        key_means, measure, quantize = _key_means, _measure, _quantize
    if smooth_k:
        work = replace(work, mean=key_means(work))
    if scales is None and granularity != "block":
        blocks = measure(work)
        axes = (2,) if granularity == "head" else (0, 1, 2)
        scales = tuple(amax.amax(axes).div(E4M3_MAX).clamp_min(1e-30) for amax in blocks)  # type: ignore[assignment]
    return quantize(work, scales)


@dataclass(frozen=True, eq=False)
class _Work:
    """The arguments, checked."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    rope: tuple[torch.Tensor, torch.Tensor] | None
    hadamard: bool
    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    laid_out: bool
    mean: torch.Tensor | None = None  # of K, float32 [sequences, kv_heads, dim]

    @property
    def sequences(self) -> int | None:
        """How many are packed; None where none are."""
        return None if self.cu_seqlens_q is None else len(self.cu_seqlens_q) - 1

    def blocks(self, x: torch.Tensor) -> int:
        """Scale blocks along the tokens of `x`."""
        return scale_blocks(x.shape[2], self.sequences)


@lru_cache(maxsize=32)
def signs(dim: int, device: torch.device) -> torch.Tensor:
    """The random signs of the rotation, float32 `[dim]`: the same for every model."""
    generator = torch.Generator().manual_seed(dim)
    return (torch.randint(0, 2, (dim,), generator=generator) * 2 - 1).float().to(device)


@lru_cache(maxsize=32)
def sign_matrices(dim: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The rotation of either half as the kernel multiplies by it: 1 and −1, padded with zeros, `[2, width, width]`."""
    half = dim // 2
    block = hadamard_block(half)
    width = 1 << (half - 1).bit_length()
    out = torch.zeros(2, width, width, dtype=dtype)
    signed = signs(dim, torch.device("cpu")).view(2, half, 1) * hadamard_transform(torch.eye(half), block)
    out[:, :half, :half] = signed.mul(block**0.5).round()
    return out.to(device)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """The random-sign Hadamard rotation of Q and K in float32; orthonormal. See the module docstring."""
    half = x.shape[-1] // 2
    signed = x.float() * signs(x.shape[-1], x.device)
    block = hadamard_block(half)
    u1, u2 = (hadamard_transform(part, block) for part in (signed[..., :half], signed[..., half:]))
    return torch.cat([u1 + u2, u1 - u2], -1) * 0.5**0.5


def _rotated_by_position(x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """RoPE in float32, rounded once."""
    half = x.shape[-1] // 2
    cos, sin = (part[..., :half].float() for part in rope)
    if cos.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    x1, x2 = x[..., :half].float(), x[..., half:].float()
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1).to(x.dtype)


def _places(cu_seqlens: torch.Tensor | None, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequence and scale block of each token."""
    row = torch.arange(x.shape[2], device=x.device)
    if cu_seqlens is None:
        return torch.zeros_like(row), row // SCALE_BLOCK
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True)
    return sequence, block_starts(cu_seqlens)[sequence] + (row - cu_seqlens[sequence]) // SCALE_BLOCK


def _key_means(work: _Work) -> torch.Tensor:
    key = work.k if work.rope is None else _rotated_by_position(work.k, work.rope)
    if work.cu_seqlens_k is None:
        return key.float().mean(2)
    bounds = work.cu_seqlens_k.tolist()
    parts = [key[0, :, a:b].float().sum(1) / max(1, b - a) for a, b in pairwise(bounds)]
    return torch.stack(parts)


def _prepared(work: _Work) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Q, K and V in float32 as they are rounded, and the shift of the scores."""
    q, k = (x if work.rope is None else _rotated_by_position(x, work.rope) for x in (work.q, work.k))
    shift = None
    if work.mean is not None:
        mean_of_key, mean_of_query = work.mean, work.mean.repeat_interleave(q.shape[1] // k.shape[1], 1)
        if work.cu_seqlens_k is None:
            mean_of_key, mean_of_query = mean_of_key[:, :, None], mean_of_query[:, :, None]
        else:
            assert work.cu_seqlens_q is not None
            mean_of_key = mean_of_key[_places(work.cu_seqlens_k, k)[0]].transpose(0, 1)[None]
            mean_of_query = mean_of_query[_places(work.cu_seqlens_q, q)[0]].transpose(0, 1)[None]
        shift = (q.float() * mean_of_query).sum(-1)
        k = (k.float() - mean_of_key).to(k.dtype)
    rows = [rotate(x) if work.hadamard else x.float() for x in (q, k)]
    return [*rows, work.v.float()], shift


def _amax_of_blocks(x: torch.Tensor, blocks: int, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    amax = torch.zeros(*x.shape[:2], blocks, device=x.device)
    index = _places(cu_seqlens, x)[1].expand(x.shape[:3])
    return amax.scatter_reduce_(2, index, x.abs().amax(-1), "amax")


def _measure(work: _Work) -> list[torch.Tensor]:
    """The largest magnitude of each block of Q, K and V."""
    cu = (work.cu_seqlens_q, work.cu_seqlens_k, work.cu_seqlens_k)
    return [_amax_of_blocks(x, work.blocks(x), c) for x, c in zip(_prepared(work)[0], cu, strict=True)]


def _quantize(work: _Work, scales: Scales | None) -> AttentionOperands:
    prepared, shift = _prepared(work)
    codes, steps = [], []
    for index, x in enumerate(prepared):
        cu = work.cu_seqlens_q if index == 0 else work.cu_seqlens_k
        if scales is None:
            # Zeros get the smallest scale: as V's they would otherwise outweigh the others' in Hopper's kernel.
            step = (_amax_of_blocks(x, work.blocks(x), cu) / E4M3_MAX).clamp_min(1e-30)
            of_row = step[:, :, _places(cu, x)[1], None]
        else:
            step = scales[index]
            of_row = step[:, :, None, None] if step.dim() == 2 else step.reshape(1, 1, 1, 1)
        codes.append((x * (1 / of_row)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn))
        steps.append(step)
    q, k, v = codes
    if work.laid_out:
        v = lay_out_v(v, work.cu_seqlens_k)
    return AttentionOperands(
        q, k, v, steps[0], steps[1], steps[2], work.laid_out, shift, work.cu_seqlens_q, work.cu_seqlens_k,
        work.max_seqlen_q,
    )  # fmt: skip


def _check(
    where: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    granularity: str,
    rope: tuple[torch.Tensor, torch.Tensor] | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
) -> None:
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape or q.shape[::3] != k.shape[::3]:
        raise ValueError(f"{where}: expected q [batch, heads, seq_q, dim] and k, v [batch, kv_heads, seq_kv, dim]")
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(f"{where}: {k.shape[1]} KV heads do not divide {q.shape[1]} heads")
    if not k.shape[2]:
        raise ValueError(f"{where}: there are no keys to attend to")
    if q.shape[3] not in DIMS:
        raise ValueError(f"{where}: head dimension {q.shape[3]}; the kernel takes {', '.join(map(str, DIMS))}")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"{where}: {q.dtype}, {k.dtype}, {v.dtype}; expected all bfloat16 or all float16")
    if granularity not in GRANULARITIES:
        raise ValueError(f"{where}: granularity {granularity!r}; known: {', '.join(GRANULARITIES)}")
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        raise ValueError(f"{where}: cu_seqlens_q and cu_seqlens_k belong together; one is missing")
    if cu_seqlens_q is not None and q.shape[0] != 1:
        raise ValueError(f"{where}: packed sequences (cu_seqlens) lie in one batch entry, not in {q.shape[0]}")
    if len({x.device for x in (q, k, v, *(rope or ()))}) > 1:
        raise ValueError(f"{where}: on different devices ({q.device}, {k.device}, {v.device})")
    if rope is not None:
        fits = ((q.shape[2], q.shape[3]), (1, q.shape[2], q.shape[3]), (q.shape[0], q.shape[2], q.shape[3]))
        if q.shape[2] != k.shape[2] or any(tuple(part.shape) not in fits for part in rope):
            shapes = f"{list(rope[0].shape)} and {list(rope[1].shape)}"
            raise ValueError(
                f"{where}: rope {shapes}; expected cos and sin [tokens, dim] or [batch, tokens, dim] for as many "
                "queries as keys; embed q and k before where they differ"
            )
