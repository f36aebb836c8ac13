"""One pass quantizes Q, K and V for FP8 attention and lays them out as the attention kernel reads them.

    operands = quantize_attention(q, k, v, hadamard=True)
    out = operands.attend(causal=True)

Each block of 128 tokens of a head has its scale, amax / 448, unless scales are given or one per head or per tensor is
requested. Three optional steps come first, in this order:

    rope        x · cos + rotate_half(x) · sin, rounded to the dtype of x as models round it
    smooth_k    K − mean of K over the sequence: it shifts all scores of a query alike, which softmax ignores
    hadamard    Q and K times a random-sign Hadamard matrix: scores stay, outliers spread over the head

On Hopper V comes out transposed, keys in the order of `attention_operands.lay_out_v`. On a CPU, PyTorch computes the
same values, to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, Unpack, overload

import torch

from quant.base.errors import known_names
from quant.formats.format import E4M3
from quant.formats.scaling import finite_or_nan
from quant.kernels.attention.attention_operands import (
    DIMS,
    AttentionInputs,
    AttentionOptions,
    MaskKeywords,
    QuantizedParts,
    Scales,
    block_of_rows,
    check_devices,
    check_heads,
    check_sequences,
    lay_out_v,
    scale_of_rows,
    sequence_of_rows,
)
from quant.kernels.attention.forward import attention
from quant.kernels.base import hardware
from quant.kernels.base.hardware import is_on_hopper
from quant.kernels.rounding.hadamard import random_sign_rotation

GRANULARITIES = ("block", "head", "tensor")


@dataclass(frozen=True, eq=False)
class AttentionOperands:
    """The operands of FP8 attention.

    Attributes:
        q: E4M3 `[batch, heads, seq_q, dim]`.
        k: E4M3 `[batch, kv_heads, seq_kv, dim]`.
        v: V, shaped as k, or laid out `[batch, kv_heads, dim, keys]`.
        options: scales, packed sequences, and whether v is laid out.
        score_shift: the amount by which smoothing K lowered each query's scores, before the softmax scale, float32
            `[batch, heads, seq_q]`; None where K was not smoothed.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    options: AttentionOptions
    score_shift: torch.Tensor | None = None

    @overload
    def attend(self, *, return_lse: Literal[False] = False, **keywords: Unpack[MaskKeywords]) -> torch.Tensor: ...
    @overload
    def attend(
        self, *, return_lse: Literal[True], **keywords: Unpack[MaskKeywords]
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def attend(
        self, *, return_lse: bool = False, **keywords: Unpack[MaskKeywords]
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Returns `attention` over these operands, with the log-sum-exp of the scores before K was smoothed."""
        options = self.options._replace(**keywords)
        if options.softcap is not None and self.score_shift is not None:
            raise ValueError(
                "attention with a soft cap: smoothing K shifts the scores, and a cap is no longer the same; "
                "quantize with smooth_k=False"
            )
        if not return_lse:
            return attention(self.q, self.k, self.v, **options._asdict())
        out, lse = attention(self.q, self.k, self.v, return_lse=True, **options._asdict())
        if self.score_shift is not None:
            lse = lse + self.score_shift * options.scale_of(self.q.shape[3])
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
    """Returns E4M3 operands of attention.

    Args:
        q: `[batch, heads, seq_q, dim]`, BF16 or FP16; any strides whose last is 1.
        k, v: `[batch, kv_heads, seq_kv, dim]`.
        granularity: "block", "head" or "tensor": the values that share a scale. Only blocks are one pass.
        scales: the scales of q, k and v, from a calibration, float32 `[]`, `[1]` or `[batch, heads]`; None measures.
        rope: cos and sin, `[tokens, dim]` or `[batch, tokens, dim]`, the second half repeating the first: the rotary
            embedding of queries and keys, which then are equally many. None takes q and k as they are.
        smooth_k: whether to subtract the mean from K.
        hadamard: whether to rotate Q and K.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q: fields of `AttentionOptions`.
        max_seqlen_k: length of the longest packed sequence of keys; None reads it.
        laid_out: whether V is transposed for Hopper's kernel; None is yes on Hopper.

    Raises:
        ValueError: operands that do not fit, or that no kernel takes.
    """
    where = f"FP8 attention q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    check_heads(where, q, k, v, DIMS)
    check_sequences(where, q, k, cu_seqlens_q, cu_seqlens_k)
    check_devices(where, q, k, v, *(rope or ()))
    _check(where, q, k, v, granularity, rope)
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        max_seqlen_q = int(cu_seqlens_q.diff().max()) if max_seqlen_q is None else max_seqlen_q
        max_seqlen_k = int(cu_seqlens_k.diff().max()) if max_seqlen_k is None else max_seqlen_k
    options = AttentionOptions(
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q,
        v_laid_out=is_on_hopper(q) if laid_out is None else laid_out,
    )  # fmt: skip
    work = AttentionInputs(q, k, v, rope, hadamard, max_seqlen_k, options)
    if q.is_cuda and not hardware.lacks_e4m3(q):
        from quant.kernels.attention.portable_fp8_operands import key_means, measure, quantize_qkv
    else:
        key_means, measure, quantize_qkv = _key_means, _measure, _quantize
    # Smoothing: softmax(q (k − mean)ᵀ) = softmax(q kᵀ), since q · mean is the same for all keys of a query.
    if smooth_k:
        work = replace(work, mean=key_means(work))
    # Scales over more than a block need a pass of their own before anything can be rounded.
    if scales is None and granularity != "block":
        # amax is [batch, heads, blocks].
        axes = (2,) if granularity == "head" else (0, 1, 2)
        q_amax, k_amax, v_amax = (_scale_of(amax.amax(axes)) for amax in measure(work))
        scales = q_amax, k_amax, v_amax
    (q, k, v), (q_scale, k_scale, v_scale), shift = quantize_qkv(work, scales)
    options = options._replace(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    return AttentionOperands(q, k, v, options, shift)


def _check(
    where: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    granularity: str,
    rope: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"{where}: {q.dtype}, {k.dtype}, {v.dtype}; expected all bfloat16 or all float16")
    if granularity not in GRANULARITIES:
        raise ValueError(f"{where}: granularity {granularity!r}; {known_names(granularity, GRANULARITIES)}")
    if rope is not None:
        fits = ((q.shape[2], q.shape[3]), (1, q.shape[2], q.shape[3]), (q.shape[0], q.shape[2], q.shape[3]))
        if q.shape[2] != k.shape[2] or any(tuple(part.shape) not in fits for part in rope):
            shapes = f"{list(rope[0].shape)} and {list(rope[1].shape)}"
            raise ValueError(
                f"{where}: rope {shapes}; expected cos and sin [tokens, dim] or [batch, tokens, dim] for as many "
                "queries as keys; embed q and k before where they differ"
            )


def _rotated_by_position(x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
    """Applies RoPE in float32, and rounds once."""
    if rope is None:
        return x
    half = x.shape[-1] // 2
    # The halves of cos and sin are equal, so one is enough; the rotation is computed in float32, as models do.
    cos, sin = (part[..., :half].float() for part in rope)
    if cos.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    x1, x2 = x[..., :half].float(), x[..., half:].float()
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1).to(x.dtype)


def _key_means(work: AttentionInputs) -> torch.Tensor:
    key = _rotated_by_position(work.k, work.rope).float()
    if work.options.cu_seqlens_k is None:
        return key.mean(2)
    # Packed sequences: a mean for each; `max(1, …)` for sequences without tokens.
    return torch.stack([key[0, :, a:b].sum(1) / max(1, b - a) for a, b in pairwise(work.options.cu_seqlens_k.tolist())])


def _prepared(work: AttentionInputs) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Returns Q, K and V in float32 right before they are rounded, and the shift of the scores."""
    q, k = (_rotated_by_position(x, work.rope) for x in (work.q, work.k))
    shift = None
    if work.mean is not None:
        of_key = _mean_of_rows(work.mean, k, work.options.cu_seqlens_k)
        of_query = _mean_of_rows(work.mean.repeat_interleave(q.shape[1] // k.shape[1], 1), q, work.options.cu_seqlens_q)
        # q · mean: the log-sum-exp of the original scores is larger by it.
        shift = (q.float() * of_query).sum(-1)
        k = (k.float() - of_key).to(k.dtype)
    rows = [random_sign_rotation(x) if work.hadamard else x.float() for x in (q, k)]
    return [*rows, work.v.float()], shift


def _mean_of_rows(mean: torch.Tensor, x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """Returns means `[sequences, heads, dim]` for each row of x, or something that broadcasts to it."""
    if cu_seqlens is None:
        return mean[:, :, None]
    return mean[sequence_of_rows(cu_seqlens, torch.arange(x.shape[2], device=x.device))].transpose(0, 1)[None]


def _scale_of(amax: torch.Tensor) -> torch.Tensor:
    """Returns a scale, the smallest for zeros: V's would otherwise outweigh the others' in Hopper's kernel."""
    return finite_or_nan(amax / E4M3.max).clamp_min(1e-30)


def _amax_of_blocks(x: torch.Tensor, blocks: int, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    amax = torch.zeros(*x.shape[:2], blocks, device=x.device, dtype=torch.float32)
    index = block_of_rows(cu_seqlens, torch.arange(x.shape[2], device=x.device)).expand(x.shape[:3])
    return amax.scatter_reduce_(2, index, x.abs().amax(-1), "amax")


def _measure(work: AttentionInputs) -> list[torch.Tensor]:
    """Returns the largest magnitude of each block of Q, K and V."""
    cu = (work.options.cu_seqlens_q, work.options.cu_seqlens_k, work.options.cu_seqlens_k)
    return [_amax_of_blocks(x, work.blocks(x), c) for x, c in zip(_prepared(work)[0], cu, strict=True)]


def _quantize(work: AttentionInputs, scales: Scales | None) -> QuantizedParts:
    prepared, shift = _prepared(work)
    codes, steps = [], []
    for index, x in enumerate(prepared):
        cu = work.options.cu_seqlens_q if index == 0 else work.options.cu_seqlens_k
        if scales is None:
            step = _scale_of(_amax_of_blocks(x, work.blocks(x), cu))
        else:
            x, step = finite_or_nan(x), scales[index]
        # The reciprocal first, as the kernel does: x / s may round to another code.
        scaled = x * (1 / scale_of_rows(step, x.shape, cu))
        codes.append(scaled.clamp(-E4M3.max, E4M3.max).to(torch.float8_e4m3fn))
        steps.append(step)
    if work.options.v_laid_out:
        codes[2] = lay_out_v(codes[2], work.options.cu_seqlens_k)
    return codes, steps, shift
