"""TensorRT's own ONNX operators in numpy, so that exported files can be run and checked without TensorRT.

`onnx.reference` runs every standard operator, number formats included; here are those of the domains `trt` and
`quant`. They are written from the definition of each operator and share no code with the PyTorch ops, whose twins they
are: rounding is that of `ml_dtypes`. A scale of a block is chosen by our `max` rule (see `quant.formats.scaling`);
which way TensorRT rounds amax / 6 into a scale that is a tie is not documented.

MatMul is redefined, too: half-precision products are summed in float32 and rounded once, as PyTorch and tensor cores
do; numpy would do so as well for FP16, but slowly.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np

from quant.export.onnx_graph.opsets import register_schemas

_E4M3_MAX, _E2M1_MAX = np.float32(448), np.float32(6)


def evaluator(model: Any) -> Any:
    """An `onnx.reference.ReferenceEvaluator` of a model, or of the file at a path, that knows these operators."""
    from onnx.reference import ReferenceEvaluator

    register_schemas()
    return ReferenceEvaluator(str(model) if isinstance(model, Path) else model, new_ops=list(operators()))


def quantize_nvfp4(x: np.ndarray, global_scale: np.ndarray, block: int = 16) -> tuple[np.ndarray, np.ndarray]:
    """E2M1 codes and E4M3 block scales along the last axis.

    Args:
        x: `[..., n]`, n a multiple of `block`.
        global_scale: float32 scalar, static.
        block: elements a scale.

    Returns:
        float4_e2m1fn `[..., n]`, float8_e4m3fn `[..., n / block]`.
    """
    import ml_dtypes

    blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, block)
    amax = np.abs(blocks).max(-1)
    smallest = np.float32(2.0**-9)
    scale = np.clip(amax / (_E2M1_MAX * global_scale), smallest, _E4M3_MAX).astype(ml_dtypes.float8_e4m3fn)
    step = scale.astype(np.float32) * global_scale
    codes = np.clip(blocks / step[..., None], -_E2M1_MAX, _E2M1_MAX).astype(ml_dtypes.float4_e2m1fn)
    return codes.reshape(x.shape), scale


def quantize_mxfp8(x: np.ndarray, block: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """E4M3 codes and E8M0 block scales (their exponents, uint8) along the last axis; exponents are rounded up."""
    import ml_dtypes

    blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, block)
    mantissa, exponent = np.frexp(np.abs(blocks).max(-1) / _E4M3_MAX)
    exponent = np.where(mantissa == 0, -127, exponent - (mantissa == 0.5))
    exponent = np.clip(exponent, -127, 127)
    codes = np.clip(blocks / np.ldexp(np.float32(1), exponent)[..., None], -_E4M3_MAX, _E4M3_MAX)
    return codes.reshape(x.shape).astype(ml_dtypes.float8_e4m3fn), (exponent + 127).astype(np.uint8)


def dequantize_blocks(codes: np.ndarray, scale: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """`codes` times its scales, one a block of the last two axes; float32."""
    rows, columns = codes.shape[-2:]
    wide = np.repeat(np.repeat(scale.astype(np.float32), block[0], -2), block[1], -1)
    return codes.astype(np.float32) * wide[..., :rows, :columns]


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
    import ml_dtypes

    return np.clip(x, -_E4M3_MAX, _E4M3_MAX).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)


@functools.cache
def operators() -> tuple[type, ...]:
    """The operators as classes that `onnx.reference` takes; made late, because onnx is optional."""
    from onnx.helper import tensor_dtype_to_np_dtype
    from onnx.reference.op_run import OpRun

    class TRT_FP4DynamicQuantize(OpRun):  # noqa: N801  (named as the operator is)
        op_domain = "trt"

        def _run(self, x, global_scale, axis=-1, block_size=16, scale_type=None):
            return quantize_nvfp4(x, global_scale, block_size)

    class TRT_MXFP8DynamicQuantize(OpRun):  # noqa: N801
        op_domain = "trt"

        def _run(self, x, axis=-1, block_size=32, output_dtype=None):
            return quantize_mxfp8(x, block_size)

    class TRT_MXFP8DequantizeLinear(OpRun):  # noqa: N801
        op_domain = "trt"

        def _run(self, codes, scale, axis=-1, block_size=32, output_dtype=None):
            values = np.ldexp(np.float32(1), scale.astype(np.int32) - 127)
            return (dequantize_blocks(codes, values, (1, block_size)).astype(tensor_dtype_to_np_dtype(output_dtype)),)

    class TRT_BlockDequantize(OpRun):  # noqa: N801
        op_domain = "trt"

        def _run(self, codes, scale, block_shape=None, output_dtype=None):
            return (dequantize_blocks(codes, scale, tuple(block_shape)).astype(tensor_dtype_to_np_dtype(output_dtype)),)

    class TRT_QuantizedAttention(OpRun):  # noqa: N801
        op_domain = "trt"

        def _run(self, q, k, v, mask, p_scale, scale=None, is_causal=0, normalization_quantize_to_type=None):
            scale = q.shape[-1] ** -0.5 if scale is None else scale
            return (quantized_attention(q, k, v, mask, p_scale, scale, bool(is_causal)).astype(q.dtype),)

    class QuantFp8Attention(OpRun):
        op_domain = "quant"

        def _run(
            self,
            q,
            k,
            v,
            scales,
            causal=0,
            softmax_scale=0.0,
            output_type=16,
            plugin_version=None,
            plugin_namespace=None,
        ):
            scale = np.prod(scales[:2]) * (softmax_scale or q.shape[-1] ** -0.5)
            p = _probabilities(q, k, None, scale, bool(causal))
            # The kernel holds exp(s - max) · 2^8 in E4M3 and divides by the sum of what was not rounded.
            top = np.float32(256) / p.max(-1, keepdims=True)
            out = _round_e4m3(p * top) / top @ (_repeated(v, q) * scales[2])
            return (out.astype(tensor_dtype_to_np_dtype(output_type)),)

    class MatMul(OpRun):
        op_domain = ""

        def _run(self, a, b):
            return (np.matmul(a.astype(np.float32), b.astype(np.float32)).astype(a.dtype),)

    return (
        TRT_FP4DynamicQuantize,
        TRT_MXFP8DynamicQuantize,
        TRT_MXFP8DequantizeLinear,
        TRT_BlockDequantize,
        TRT_QuantizedAttention,
        QuantFp8Attention,
        MatMul,
    )
