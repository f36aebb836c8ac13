"""Attention in training: the forward pass in FP8, the backward pass in 16 bit, as two custom ops.

    quant::fp8_attention_training(q, k, v, causal, window, softmax_scale) -> out, lse, codes and scales of q, k and v
    quant::fp8_attention_gradients(dout, out, lse, codes and scales, causal, window, softmax_scale) -> dq, dk, dv

The forward pass rounds Q, K and V to E4M3, a scale for 128 tokens of a head, and P as the kernel does. The backward
pass computes the gradients at the rounded operands, so the probabilities exp(s − lse) sum to 1 under the saved
log-sum-exp, and codes are kept where attention in 16 bit keeps BF16, half the bytes:

    P = exp(Q̂K̂ᵀ · softmax_scale − lse)      dV = Pᵀ dO      dP = dO V̂ᵀ      dS = P ∘ (dP − rowsum(dO ∘ O))
    dQ = dS K̂ · softmax_scale               dK = dSᵀ Q̂ · softmax_scale

A GPU takes these from cuDNN or from PyTorch's flash attention in BF16; other devices compute them as written.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from quant.kernels.attention.attention_operands import DIMS, quantize_blocks, scale_blocks, scale_of_rows
from quant.kernels.attention.forward import attention, quantize_attention
from quant.kernels.base.custom_ops import register, without_autocast
from quant.kernels.base.hardware import capability_of, lacks_e4m3

_Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def fp8_training_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None, softmax_scale: float
) -> Tensor:
    """Returns softmax(q kᵀ · softmax_scale) v in FP8, with gradients.

    Args:
        q: `[batch, heads, seq_q, dim]`, BF16, FP16 or FP32.
        k, v: `[batch, kv_heads, seq_kv, dim]`; `kv_heads` divides `heads`, and V's head dimension may be smaller.
        causal: query i sees the keys up to i + seq_kv − seq_q.
        window: keys that a query sees, its own included; None is no limit.
    """
    value_dim = v.shape[3]
    dim = max(q.shape[3], value_dim)
    if dim > DIMS[-1]:
        raise ValueError(f"head dimension {dim}: FP8 attention takes at most {DIMS[-1]}")
    # Zeros in added channels change no score and no scale; autograd cuts their gradients off.
    width = next(size for size in DIMS if size >= dim)
    q, k, v = (x if x.shape[3] == width else pad(x, (0, width - x.shape[3])) for x in (q, k, v))
    out: Tensor = _FP8Attention.apply(q, k, v, causal, window, softmax_scale)  # type: ignore[no-untyped-call]
    return out[..., :value_dim]


class _FP8Attention(torch.autograd.Function):
    """Attention over rounded operands, with the gradients of attention in 16 bit over the same operands."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, softmax_scale: float
    ) -> Tensor:
        ctx.options = causal, window, softmax_scale
        out, *saved = torch.ops.quant.fp8_attention_training(q, k, v, *ctx.options)
        ctx.save_for_backward(out, *saved)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        gradients = torch.ops.quant.fp8_attention_gradients(dout, *ctx.saved_tensors, *ctx.options)
        return (*gradients, None, None, None)


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, softmax_scale: float) -> _Saved:
    with without_autocast(q):
        scales: list[Tensor]
        # The quantizer takes 16 bit; operands of a float32 model are rounded once, too, from their own dtype.
        if q.dtype is torch.float32:
            (q8, q_scale), (k8, k_scale), (v8, v_scale) = map(quantize_blocks, (q, k, v))
            scales = [q_scale, k_scale, v_scale]
        else:
            operands = quantize_attention(q, k, v, laid_out=False)
            q8, k8, v8 = operands.q, operands.k, operands.v
            assert operands.options.scales is not None
            scales = list(operands.options.scales)
        q_scale, k_scale, v_scale = scales
        out, lse = attention(
            q8, k8, v8, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, causal=causal, window=window,
            softmax_scale=softmax_scale, dtype=q.dtype, return_lse=True,
        )  # fmt: skip
        q8, k8, v8, q_scale, k_scale, v_scale = (x.contiguous() for x in (q8, k8, v8, *scales))
        return out, lse.float(), q8, k8, v8, q_scale, k_scale, v_scale


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *_: object) -> _Saved:
    q8, k8, v8 = (x.new_empty(x.shape, dtype=torch.float8_e4m3fn) for x in (q, k, v))
    q_scale, k_scale, v_scale = (
        x.new_empty((x.shape[0], x.shape[1], scale_blocks(x.shape[2])), dtype=torch.float32) for x in (q, k, v)
    )
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32), q8, k8, v8, q_scale, k_scale, v_scale


def _gradients(
    dout: Tensor, out: Tensor, lse: Tensor, q8: Tensor, k8: Tensor, v8: Tensor, q_scale: Tensor, k_scale: Tensor,
    v_scale: Tensor, causal: bool, window: int | None, softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Computes the gradients as they are written, in float32: the oracle, and a CPU's way."""
    with without_autocast(dout):
        q, k, v = (
            codes.float() * scale_of_rows(scale, codes.shape, None)
            for codes, scale in ((q8, q_scale), (k8, k_scale), (v8, v_scale))
        )
        # Query heads of a KV head are one group: [batch, kv_heads, group, queries, dim].
        grouped, dy, y = (x.float().unflatten(1, (k.shape[1], -1)) for x in (q, dout, out))
        key, value = k[:, :, None], v[:, :, None]
        p = torch.exp(grouped @ key.mT * softmax_scale - lse.unflatten(1, (k.shape[1], -1))[..., None])
        ahead = torch.arange(k.shape[2], device=k.device) - torch.arange(q.shape[2], device=k.device)[:, None]
        ahead = ahead - (k.shape[2] - q.shape[2])
        hidden = ahead > 0 if causal else torch.zeros_like(ahead, dtype=torch.bool)
        p = p.masked_fill(hidden if window is None else hidden | (ahead.abs() >= window), 0.0)
        ds = p * (dy @ value.mT - (dy * y).sum(-1, keepdim=True)) * softmax_scale
        dq = (ds @ key).flatten(1, 2)
        dk, dv = ((x.mT @ rows).sum(2) for x, rows in ((ds, grouped), (p, dy)))
        return dq.to(out.dtype), dk.to(out.dtype), dv.to(out.dtype)


def _gradients_on_gpu(dout: Tensor, out: Tensor, lse: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """Computes the gradients by cuDNN's or PyTorch's flash attention, which take and give BF16 or FP16."""
    if capability_of(out) < (8, 0):  # before Ampere there is no flash attention
        return _gradients(dout, out, lse, *arguments)
    codes, scales, (causal, window, softmax_scale) = arguments[:3], arguments[3:6], arguments[6:]
    dtype = torch.bfloat16 if out.dtype is torch.float32 else out.dtype
    q, k, v = (_decoded(x, scale, dtype) for x, scale in zip(codes, scales, strict=True))
    dy, y, aten = dout.to(dtype), out.to(dtype), torch.ops.aten
    # cuDNN is faster on Hopper. Its causal mask begins at the first key, ours ends at the last: the same where queries
    # and keys are equally many.
    is_aligned = window is None and (not causal or q.shape[2] == k.shape[2])
    fits_cudnn = capability_of(q) >= (9, 0) and q.shape[2] > 1 and q.shape[3] <= 128
    if torch.backends.cuda.cudnn_sdp_enabled() and is_aligned and fits_cudnn:
        unused = torch.zeros((), dtype=torch.int64, device=out.device)  # the random state of dropout
        gradients = aten._scaled_dot_product_cudnn_attention_backward(
            dy.contiguous(), q, k, v, y, lse[..., None], unused, unused, None, None, None, q.shape[2], k.shape[2], 0.0,
            causal, scale=softmax_scale,
        )  # fmt: skip
    else:
        # Flash attention has the tokens before the heads. A window is counted without the query's own position.
        right = 0 if causal else (window or 1) - 1
        reach = {} if window is None else {"window_size_left": window - 1, "window_size_right": right}
        unused = torch.zeros(2, dtype=torch.uint64, device=out.device)  # the random state of dropout
        by_tokens = aten._flash_attention_backward(
            *(x.transpose(1, 2) for x in (dy, q, k, v, y)), lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0,
            causal, unused, unused[:0], scale=softmax_scale, **reach,
        )  # fmt: skip
        gradients = (x.transpose(1, 2) for x in by_tokens)
    return tuple(x.to(out.dtype).contiguous() for x in gradients)


def _decoded(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    if lacks_e4m3(codes):
        return (codes.float() * scale_of_rows(scale, codes.shape, None)).to(dtype)
    from quant.kernels.attention.portable_fp8_operands import decode_blocks

    with torch.cuda.device_of(codes):
        return decode_blocks(codes, scale, dtype)


register(
    "quant::fp8_attention_training",
    "(Tensor q, Tensor k, Tensor v, bool causal, SymInt? window, float softmax_scale) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_forward,
    default=_forward,
)
register(
    "quant::fp8_attention_gradients",
    "(Tensor dout, Tensor out, Tensor lse, Tensor q, Tensor k, Tensor v, Tensor q_scale, Tensor k_scale, "
    "Tensor v_scale, bool causal, SymInt? window, float softmax_scale) -> (Tensor, Tensor, Tensor)",
    lambda dout, out, lse, *codes: tuple(out.new_empty(x.shape) for x in codes[:3]),
    default=_gradients,
    cuda=_gradients_on_gpu,
)
