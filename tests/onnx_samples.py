"""Tests of ONNX files share the relative error and, to run whole files, the attention operators in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import nn

_E4M3_MAX = np.float32(448)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of what was expected, in float64."""
    difference = (found.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp_min(1e-30))


def onnxruntime_session(path: Path, optimized: Path) -> Any:
    """A session of one thread whose INT4 products do not round inputs; `optimized` gets the graph that it runs."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    options.optimized_model_filepath = str(optimized)
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


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


def cache_attention(q: Any, k: Any, v: Any, *operands: Any, softmax_scale: float, format: str, **_: Any) -> Any:
    """The plugin QuantCacheAttention: rounds k and v into copies of the caches, and attends in float32."""
    count = 2 if format == "fp8" else 4
    caches, (*scales, past, lengths) = [cache.copy() for cache in operands[:count]], operands[count:]
    out = np.zeros(q.shape, np.float32)
    for row, (begin, end) in enumerate(zip(past.tolist(), lengths.tolist(), strict=True)):
        decoded = []
        for part, (x, scale) in enumerate(zip((k, v), scales, strict=True)):
            written = _cache_codes(x[row].astype(np.float32), scale, format)
            for cache, codes in zip(caches[part::2], written, strict=True):
                cache[row, :, begin:end] = codes.view(cache.dtype)
            decoded.append(_decoded([cache[row, :, :end] for cache in caches[part::2]], scale))
        seen = np.arange(end) <= begin + np.arange(end - begin)[:, None]
        p = _probabilities(q[row : row + 1], decoded[0][None], seen, softmax_scale, False)
        out[row] = (p @ _repeated(decoded[1][None], q[row : row + 1]))[0]
    return (out.astype(q.dtype), *caches)


def _cache_codes(x: np.ndarray, scale: np.ndarray, format: str) -> list[np.ndarray]:
    """Codes, and NVFP4's block scales, of x `[kv_heads, tokens, dim]`.

    NVFP4's block scale is the code whose squared error is the smallest, of all that there are within a few codes of
    amax / 6; it is found in float64 here.
    """
    if format == "fp8":
        return [np.clip(x / scale[:, None, None], -_E4M3_MAX, _E4M3_MAX).astype(ml_dtypes.float8_e4m3fn)]
    e4m3 = ml_dtypes.float8_e4m3fn
    units = (x / scale[:, None, None]).reshape(*x.shape[:-1], -1, 16)
    first = np.clip(np.abs(units).max(-1) / 6, 2.0**-9, _E4M3_MAX).astype(e4m3).view(np.uint8).astype(np.int32)
    candidates = np.clip(first[..., None] + np.arange(-2, 6), 1, 126).astype(np.uint8).view(e4m3)
    steps = candidates.astype(np.float64)[..., None]
    codes = np.clip(units[..., None, :] / steps, -6, 6).astype(ml_dtypes.float4_e2m1fn)
    best = ((codes.astype(np.float64) * steps - units[..., None, :]) ** 2).sum(-1).argmin(-1)
    chosen = np.take_along_axis(codes, best[..., None, None], -2)[..., 0, :].reshape(x.shape)
    nibbles = chosen.view(np.uint8) & 15
    blocks = np.take_along_axis(candidates, best[..., None], -1)[..., 0]
    return [nibbles[..., ::2] | nibbles[..., 1::2] << 4, blocks]


def _decoded(caches: Sequence[np.ndarray], scale: np.ndarray) -> np.ndarray:
    """Values `[kv_heads, tokens, dim]`, float32."""
    if len(caches) == 1:
        return caches[0].astype(np.float32) * scale[:, None, None]
    codes, blocks = caches[0].view(np.uint8), caches[1].astype(np.float32) * scale[:, None, None]
    nibbles = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)
    values = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float32).reshape(*blocks.shape, 16)
    return (values * blocks[..., None]).reshape(nibbles.shape)


def attention_operators() -> list[type]:
    """Our plugins and TensorRT's attention, for `evaluator`."""
    from quant.export.onnx.compare_with_torch import operator

    return [
        operator("TRT_QuantizedAttention", _trt),
        operator("QuantFp8Attention", plugin_attention, domain="quant"),
        operator("QuantCacheAttention", cache_attention, domain="quant"),
    ]


def round_head(model: Any) -> None:
    """Gives a model the output head of a file for onnxruntime: codes of Q8_0, rounded here as llama.cpp's C does."""
    weight = model.get_output_embeddings().weight
    groups = weight.detach().float().reshape(-1, 32)
    scale = (groups.abs().amax(-1, keepdim=True) / 127).half().float()
    scale[scale == 0] = 1  # a padding token's
    rounded = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    rounded.weight.data = ((groups / scale).round() * scale).reshape(weight.shape).to(weight.dtype)
    model.set_output_embeddings(rounded)
