"""Tests of ONNX files share the relative error and, to run whole files, the attention operators in numpy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch

_E4M3_MAX = np.float32(448)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of what was expected, in float64."""
    difference = (found.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp_min(1e-30))


def quantized_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    mask: np.ndarray | None,
    p_scale: np.ndarray,
    scale: float,
    causal: bool,
) -> np.ndarray:
    """Attention whose probabilities are rounded to E4M3; float32.

    Args:
        q: `[batch, heads, seq_q, dim]`, rounded already.
        k, v: `[batch, kv_heads, seq_kv, dim]`, likewise.
        mask: bool, broadcastable to `[batch, heads, seq_q, seq_kv]`; None for all.
        p_scale: of the probabilities.
        scale: multiplies q·k.
        causal: query i sees keys up to i.
    """
    p = _probabilities(q, k, mask, scale, causal)
    rounded = _round_e4m3(p / np.float32(p_scale)) * np.float32(p_scale)
    return rounded @ _repeated(v, q)


def _probabilities(q: np.ndarray, k: np.ndarray, mask: np.ndarray | None, scale: float, causal: bool) -> np.ndarray:
    scores = q.astype(np.float32) @ _repeated(k, q).swapaxes(-1, -2) * np.float32(scale)
    if causal:
        scores = np.where(np.tri(*scores.shape[-2:]) > 0, scores, -np.inf)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def _repeated(x: np.ndarray, q: np.ndarray) -> np.ndarray:
    """KV heads repeated for the query heads that read them, float32."""
    return np.repeat(x.astype(np.float32), q.shape[1] // x.shape[1], 1)


def _round_e4m3(x: np.ndarray) -> np.ndarray:
    return np.clip(x, -_E4M3_MAX, _E4M3_MAX).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)


def _trt(q: Any, k: Any, v: Any, mask: Any, p_scale: Any, *, scale: float, is_causal: int, **_: Any) -> Any:
    return (quantized_attention(q, k, v, mask, p_scale, scale, bool(is_causal)).astype(q.dtype),)


def plugin_attention(
    q: Any, k: Any, v: Any, scales: Any, *, causal: int, softmax_scale: float, output_type: int, **_: Any
) -> Any:
    """The plugin QuantFp8Attention."""
    from onnx.helper import tensor_dtype_to_np_dtype

    scale = np.prod(scales[:2]) * (softmax_scale or q.shape[-1] ** -0.5)
    p = _probabilities(q, k, None, scale, bool(causal))
    # The kernel holds exp(s - max) · 2^8 in E4M3 and divides by the sum of what was not rounded.
    top = np.float32(256) / p.max(-1, keepdims=True)
    out = _round_e4m3(p * top) / top @ (_repeated(v, q) * scales[2])
    return (out.astype(tensor_dtype_to_np_dtype(output_type)),)


def attention_operators() -> list[type]:
    """Both, for `evaluator`."""
    from quant.export.onnx_graph.reference import operator

    return [
        operator("TRT_QuantizedAttention", _trt),
        operator("QuantFp8Attention", plugin_attention, domain="quant"),
    ]
