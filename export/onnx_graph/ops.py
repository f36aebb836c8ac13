"""Translates quantized linears and convolutions of each format to ONNX nodes (`attention` translates attention).

    weight        DequantizeLinear(codes, scale) in the block shape of the format, then Transpose
    activation    QuantizeLinear, DequantizeLinear                     static scale: fp8
                  trt::TRT_FP4DynamicQuantize, two DequantizeLinear    nvfp4: block scales found at run time
                  trt::TRT_MXFP8DynamicQuantize, and back              mxfp8
                  divided by its scale, then as static                 fp8_token, int8_token
    linear        MatMul(activation, weight), Add(bias)
    convolution   Conv or ConvTranspose(activation, weight, bias), the weight dequantized in its own shape

TensorRT turns these patterns into GEMMs in the low precision; other nodes for the same arithmetic run in half
precision. Three details matter to the pattern and to the numbers:

- Scales stay float32 and the result is rounded once to the dtype of x, as in the PyTorch op, by a Cast after the last
  DequantizeLinear: onnxruntime has no DequantizeLinear from float32 scales to a 16-bit `output_dtype`. INT4 is fused
  only if its scales have the dtype of x; solvers choose them representable in it.
- A scale per token between DequantizeLinear and MatMul would make the GEMM run in half precision. But a scale of a row
  of x is one of a row of the output: x / s is rounded with a constant power of two as its scale, and s multiplies the
  output. The constant keeps codes below 1, so that FP16 sums stay as small as with x itself.
- The inputs of a convolution have one scale for each sample in place of one for each token, and the same holds there.
- Codes and scales are the buffers of the module, byte for byte. Packed 4-bit codes are bytes in PyTorch and typed
  FLOAT4E2M1 or INT4 in ONNX with the same bytes (even index in the low nibble).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from quant.export.onnx.attention_nodes import attention_translations
from quant.export.onnx_graph.cache_attention import cache_translations
from quant.export.onnx.opsets import (
    FLOAT,
    FLOAT8E4M3FN,
    element_type,
    narrowed,
    opset,
    register_schemas,
    round_trip,
    trt_opset,
    widened,
)
from quant.formats.format import FORMATS, Format
from quant.formats.number import E2M1, E4M3, E8M0, INT4, INT8

# Static scales of the codes of inputs that are scaled by token: the largest code times these is just below 1.
_TOKEN_STEP = {E4M3: 2.0**-9, INT8: 2.0**-7}

Translation = Callable[..., Any]


class ConvCall(NamedTuple):
    """The arguments of `quant::conv`: tensors, or their values in a graph that is being translated."""

    x: Any
    codes: Any
    scale: Any
    bias: Any
    input_scale: Any
    weight_format: str
    activation: str
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int


def translations(packed: dict[Any, int]) -> dict[Any, Translation]:
    """Returns ONNX translations by PyTorch op, for `torch.onnx.export(custom_translation_table=...)`.

    `packed` is filled while the graph is translated: the ONNX type of each value that holds packed 4-bit codes.
    """
    register_schemas()
    return {
        torch.ops.quant.linear.default: _linear(packed),
        torch.ops.quant.conv.default: _conv,
        **attention_translations(),
        **cache_translations(),
    }


def _linear(packed: dict[Any, int]) -> Translation:
    def translate(
        x: Any,
        codes: Any,
        scale: Any,
        global_scale: Any,
        bias: Any,
        input_scale: Any,
        weight_format: str,
        activation: str,
    ) -> Any:
        op, dtype, format = opset(), x.dtype, FORMATS[weight_format]
        if format.element not in (E4M3, E2M1, INT4, INT8) or (format.element is E2M1 and format.scale is E8M0):
            raise ValueError(f"a linear in {format} has no ONNX translation")
        if format.element.bits == 4:
            packed[codes] = element_type(format)
        weight = op.Transpose(_weight(format, codes, scale, global_scale, dtype), perm=[1, 0])
        after = None
        if activation:
            x, after = _activation(FORMATS[activation], x, input_scale)
        y = op.MatMul(x, weight)
        # The factor of each token multiplies in float32, and the product is rounded once.
        if after is not None:
            y = op.Cast(op.Mul(op.Cast(y, to=FLOAT), after), to=int(dtype))
        return y if bias is None else op.Add(y, bias)

    return translate


def _conv(*arguments: Any) -> Any:
    # torch.onnx (2.11 on) calls a translation with the op's arguments by position.
    call = ConvCall(*arguments)
    op, x, dtype, format = opset(), call.x, call.x.dtype, FORMATS[call.weight_format]
    # The output channels are axis 1 of a transposed convolution's weight.
    weight = _dequantized(format, call.codes, call.scale, dtype, axis=1 if call.transposed else 0)
    after, dimensions = None, len(call.stride)
    if call.activation:
        x, after = _activation(FORMATS[call.activation], x, call.input_scale, list(range(1, dimensions + 2)))
    pads = [*call.padding, *call.padding]
    window = {"strides": call.stride, "pads": pads, "dilations": call.dilation, "group": call.groups}
    # A bias must not be multiplied by the scale of the input, and so is added after it.
    inside = call.bias if after is None else None
    if call.transposed:
        y = op.ConvTranspose(x, weight, inside, output_padding=call.output_padding, **window)
    else:
        y = op.Conv(x, weight, inside, **window)
    if after is None:
        return y
    y = op.Cast(op.Mul(op.Cast(y, to=FLOAT), after), to=int(dtype))
    return y if call.bias is None else op.Add(y, op.Unsqueeze(call.bias, list(range(1, dimensions + 1))))


def _weight(format: Format, codes: Any, scale: Any, global_scale: Any, dtype: Any) -> Any:
    """Returns the dequantized weight `[out, in]` in `dtype`."""
    # codes ─> DequantizeLinear ─> Cast                     NVFP4: the step is itself dequantized, in float32
    # scale ─> DequantizeLinear ─┘
    op, trt = opset(), trt_opset()
    rows, columns = format.block
    if format.global_scale:
        step = op.DequantizeLinear(scale, op.Cast(global_scale, to=FLOAT))
        return op.Cast(op.DequantizeLinear(codes, step, axis=1, block_size=columns), to=int(dtype))
    if format.scale is E8M0:
        return trt.TRT_MXFP8DequantizeLinear(codes, scale, axis=1, block_size=columns, output_dtype=int(dtype))
    if format.element is INT4:
        scale = scale if int(dtype) == FLOAT else op.Cast(scale, to=int(dtype))
        return op.DequantizeLinear(codes, scale, axis=1, block_size=columns)
    if rows > 1:
        return trt.TRT_BlockDequantize(codes, scale, block_shape=[rows, columns], output_dtype=int(dtype))
    return _dequantized(format, codes, scale, dtype, axis=0)


def _dequantized(format: Format, codes: Any, scale: Any, dtype: Any, axis: int) -> Any:
    """Returns weights with one scale, or one for each index of `axis`, in `dtype`."""
    op = opset()
    if format.per_tensor:
        wide = op.DequantizeLinear(codes, op.Squeeze(scale))
    else:
        wide = op.DequantizeLinear(codes, op.Squeeze(scale, [1]), axis=axis)
    return narrowed(wide, dtype)


def _activation(format: Format, x: Any, input_scale: Any, axes: Sequence[int] = (-1,)) -> tuple[Any, Any]:
    """Returns `x` rounded to `format`, and the factor of the output, if there is one: `axes` share it."""
    op, trt = opset(), trt_opset()
    block = format.block[1]
    if format.global_scale:
        if int(input_scale.dtype) != FLOAT:  # the exact inverse of a stored reciprocal
            input_scale = op.Cast(input_scale, to=FLOAT)
        codes, scale = trt.TRT_FP4DynamicQuantize(
            x, input_scale, axis=-1, block_size=block, scale_type=FLOAT8E4M3FN, _outputs=2
        )
        step = op.DequantizeLinear(scale, input_scale)
        return op.Cast(op.DequantizeLinear(codes, step, axis=-1, block_size=block), to=int(x.dtype)), None
    if format.scale is E8M0:
        codes, scale = trt.TRT_MXFP8DynamicQuantize(x, axis=-1, block_size=block, output_dtype=FLOAT8E4M3FN, _outputs=2)
        return trt.TRT_MXFP8DequantizeLinear(codes, scale, axis=-1, block_size=block, output_dtype=int(x.dtype)), None
    if format.per_tensor:
        return round_trip(format, widened(x), input_scale, x.dtype), None
    # A scale for each token: s = amax / max, or 1 for a token of zeros. The codes of x / s times the constant step are
    # rounded statically, and the MatMul's output is multiplied by s / step.
    wide = op.Cast(x, to=FLOAT)
    amax = op.ReduceMax(op.Abs(wide), list(axes), keepdims=1)
    scale = op.Div(amax, op.Constant(value_float=format.element.max))
    scale = op.Where(op.Greater(scale, op.Constant(value_float=0.0)), scale, op.Constant(value_float=1.0))
    step = op.Constant(value_float=_TOKEN_STEP[format.element])
    small = op.Mul(op.Div(wide, scale), step)
    return round_trip(format, small, step, x.dtype), op.Div(scale, step)
