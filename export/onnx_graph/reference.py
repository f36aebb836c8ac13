"""TensorRT's ONNX operators in numpy, by which exported layers are checked without TensorRT.

`onnx.reference` runs every standard operator. These are written from the definition of each operator and share no code
with the PyTorch ops that they are compared with; `ml_dtypes` rounds. Block scales follow our `max` rule (see
`quant.formats.scaling`): TensorRT does not document how it rounds ties of amax / 6.

MatMul and convolutions are redefined too: half-precision products are summed in float32 and rounded once, as in
PyTorch and on tensor cores; numpy would do the same for FP16, but slowly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from quant.export.onnx.opsets import TRT_DOMAIN, register_schemas

_E4M3_MAX, _E2M1_MAX = np.float32(448), np.float32(6)


def evaluator(model: Any, more: Sequence[type] = ()) -> Any:
    """Returns an `onnx.reference.ReferenceEvaluator` of a model that knows these operators, and `more`."""
    from onnx.reference import ReferenceEvaluator

    register_schemas()
    return ReferenceEvaluator(model, new_ops=[*operators(), *more])


def quantize_nvfp4(x: np.ndarray, global_scale: np.ndarray, block: int = 16) -> tuple[np.ndarray, np.ndarray]:
    """Returns E2M1 codes `[..., n]` and E4M3 block scales `[..., n / block]` along the last axis.

    `n` is a multiple of `block`.

    `global_scale` is a static float32 scalar.
    """
    import ml_dtypes

    blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, block)
    amax = np.abs(blocks).max(-1)
    smallest = np.float32(2.0**-9)  # E4M3's smallest number: a scale of zero would lose the block
    # Two rounding steps: the block scale to E4M3, then each element with that scale.
    scale = np.clip(amax / (_E2M1_MAX * global_scale), smallest, _E4M3_MAX).astype(ml_dtypes.float8_e4m3fn)
    step = scale.astype(np.float32) * global_scale
    codes: np.ndarray = np.clip(blocks / step[..., None], -_E2M1_MAX, _E2M1_MAX).astype(ml_dtypes.float4_e2m1fn)
    return codes.reshape(x.shape), scale


def quantize_mxfp8(x: np.ndarray, block: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Returns E4M3 codes and E8M0 block scales (their exponents, uint8) along the last axis.

    Exponents are rounded up.
    """
    import ml_dtypes

    blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, block)
    # frexp gives m · 2^e with m in [0.5, 1). The next power of two is 2^e, or the number itself where m is 0.5.
    mantissa, exponent = np.frexp(np.abs(blocks).max(-1) / _E4M3_MAX)
    exponent = np.where(mantissa == 0, -127, exponent - (mantissa == 0.5))
    exponent = np.clip(exponent, -127, 127)
    codes = np.clip(blocks / np.ldexp(np.float32(1), exponent)[..., None], -_E4M3_MAX, _E4M3_MAX)
    return codes.reshape(x.shape).astype(ml_dtypes.float8_e4m3fn), (exponent + 127).astype(np.uint8)


def dequantize_blocks(codes: np.ndarray, scale: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Returns `codes` times its scales, one a block of the last two axes; float32."""
    rows, columns = codes.shape[-2:]
    wide = np.repeat(np.repeat(scale.astype(np.float32), block[0], -2), block[1], -1)
    values: np.ndarray = codes.astype(np.float32) * wide[..., :rows, :columns]
    return values


@functools.cache
def operators() -> tuple[type, ...]:
    """Returns the operators as classes that `onnx.reference` takes.

    Built on the first call, because onnx is optional.
    """
    from onnx.helper import tensor_dtype_to_np_dtype
    from onnx.reference.ops.op_conv import Conv
    from onnx.reference.ops.op_conv_transpose import ConvTranspose

    def expand(codes: np.ndarray, scale: np.ndarray, block: tuple[int, int], dtype: int) -> tuple[np.ndarray]:
        return (dequantize_blocks(codes, scale, block).astype(tensor_dtype_to_np_dtype(dtype)),)

    def expand_mxfp8(codes: Any, scale: Any, *, block_size: int, output_dtype: int, **_: Any) -> tuple[np.ndarray]:
        return expand(codes, np.ldexp(np.float32(1), scale.astype(np.int32) - 127), (1, block_size), output_dtype)

    return (
        operator("TRT_FP4DynamicQuantize", lambda x, s, *, block_size, **_: quantize_nvfp4(x, s, block_size)),
        operator("TRT_MXFP8DynamicQuantize", lambda x, *, block_size, **_: quantize_mxfp8(x, block_size)),
        operator("TRT_MXFP8DequantizeLinear", expand_mxfp8),
        operator(
            "TRT_BlockDequantize",
            lambda codes, scale, *, block_shape, output_dtype: expand(codes, scale, tuple(block_shape), output_dtype),
        ),
        operator(
            "MatMul", lambda a, b: (np.matmul(a.astype(np.float32), b.astype(np.float32)).astype(a.dtype),), domain=""
        ),
        _wide(Conv),
        _wide(ConvTranspose),
    )


def _wide(base: Any) -> type:
    """Returns an operator of `onnx.reference` that computes in float32 and rounds once to its input's dtype."""

    def run(self: Any, *inputs: Any, **attributes: Any) -> tuple[np.ndarray, ...]:
        wide = [None if x is None else x.astype(np.float32) for x in inputs]
        return tuple(y.astype(inputs[0].dtype) for y in base._run(self, *wide, **attributes))

    return type(base.__name__, (base,), {"op_domain": "", "_run": run})


def operator(name: str, run: Callable[..., tuple[np.ndarray, ...]], domain: str = TRT_DOMAIN) -> type:
    """Returns an operator for `onnx.reference`: inputs are positional arguments of `run`, attributes keywords."""
    from onnx.reference.op_run import OpRun

    return type(name, (OpRun,), {"op_domain": domain, "_run": staticmethod(run)})
