"""One ONNX translation for each `quant::` op: what quantized layers and attention are in an ONNX file.

    weight        DequantizeLinear(codes, scale) in the block shape of the format, then Transpose
    activation    QuantizeLinear, DequantizeLinear                     static scale: fp8
                  trt::TRT_FP4DynamicQuantize, two DequantizeLinear    nvfp4: block scales found at run time
                  trt::TRT_MXFP8DynamicQuantize, and back              mxfp8
                  divided by its scale, then as static                 fp8_token, int8_token
    linear        MatMul(activation, weight), Add(bias)
    attention     Attention, spelled out in FP32; in FP8 trt::TRT_QuantizedAttention over QuantizeLinear and
                  DequantizeLinear of q, k and v, or the node of our own plugin over their codes

These are the patterns that TensorRT turns into GEMMs in the low precision; written any other way, the same arithmetic
runs in half precision. Three details matter to both the pattern and the numbers:

- Scales stay float32 and the result is rounded once to the dtype of x, as in the PyTorch op: by `output_dtype` where
  TensorRT takes it, by a Cast after the last DequantizeLinear for NVFP4, where it does not. INT4 is fused only if its
  scales have the dtype of x; solvers choose them representable in it.
- A scale a token cannot stand between DequantizeLinear and MatMul, or the GEMM runs in half precision. But a scale of
  a row of x is one of a row of the output: x / s is rounded with a constant power of two as its scale, and s
  multiplies what comes out. The constant keeps codes below 1, so that FP16 sums stay as small as with x itself.
- Codes and scales are the buffers of the module, byte for byte. Packed 4-bit codes are bytes in PyTorch and typed
  FLOAT4E2M1 or INT4 in ONNX with the same bytes (even index in the low nibble).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from quant.export import plugin
from quant.formats.format import FORMATS, Format
from quant.formats.number import E2M1, E4M3, E8M0, INT4, INT8
from quant.formats.tensor import fake_quantize
from quant.kernels.attention_reference import attention_reference

OPSET = 23
TRT_DOMAIN = "trt"
# Static scales of the codes of inputs that are scaled by token: the largest code times these is just below 1.
_TOKEN_STEP = {E4M3: 2.0**-9, INT8: 2.0**-7}
_FLOAT, _E4M3 = 1, 17  # TensorProto.FLOAT and .FLOAT8E4M3FN

Translation = Callable[..., Any]


def translations(packed: dict[Any, int]) -> dict[Any, Translation]:
    """ONNX translations by PyTorch op, for `torch.onnx.export(custom_translation_table=...)`.

    Args:
        packed: filled while the graph is translated: ONNX type of each value that holds packed 4-bit codes.
    """
    register_schemas()
    linears = {
        getattr(torch.ops.quant, f"linear_{format.name}").default: _linear(format, packed)
        for format in FORMATS.values()
        if format.element in (E4M3, E2M1, INT4, INT8) and not (format.element is E2M1 and format.scale is E8M0)
    }
    return {
        **linears,
        torch.ops.quant.onnx_attention.default: _attention,
        torch.ops.quant.onnx_cache_write.default: _cache_write,
        torch.ops.quant.onnx_cache_read.default: _cache_read,
    }


def _linear(format: Format, packed: dict[Any, int]) -> Translation:
    def translate(
        x: Any, codes: Any, scale: Any, global_scale: Any, bias: Any, input_scale: Any, activation: str
    ) -> Any:
        op, dtype = _opset(), x.dtype
        if format.element.bits == 4:
            packed[codes] = _element_type(format)
        weight = op.Transpose(_weight(format, codes, scale, global_scale, dtype), perm=[1, 0])
        after = None
        if activation:
            x, after = _activation(FORMATS[activation], x, input_scale)
        y = op.MatMul(x, weight)
        if after is not None:
            y = op.Cast(op.Mul(op.Cast(y, to=_FLOAT), after), to=int(dtype))
        return y if bias is None else op.Add(y, bias)

    return translate


def _weight(format: Format, codes: Any, scale: Any, global_scale: Any, dtype: Any) -> Any:
    """The dequantized weight `[out, in]` in `dtype`."""
    op, trt = _opset(), _trt_opset()
    rows, columns = format.block
    if format.global_scale:
        step = op.DequantizeLinear(scale, op.Cast(global_scale, to=_FLOAT))
        return op.Cast(op.DequantizeLinear(codes, step, axis=1, block_size=columns), to=int(dtype))
    if format.scale is E8M0:
        return trt.TRT_MXFP8DequantizeLinear(codes, scale, axis=1, block_size=columns, output_dtype=int(dtype))
    if format.element is INT4:
        scale = scale if int(dtype) == _FLOAT else op.Cast(scale, to=int(dtype))
        return op.DequantizeLinear(codes, scale, axis=1, block_size=columns)
    if rows > 1:
        return trt.TRT_BlockDequantize(codes, scale, block_shape=[rows, columns], output_dtype=int(dtype))
    if format.block == (0, 0):
        return op.DequantizeLinear(codes, op.Squeeze(scale), output_dtype=int(dtype))
    return op.DequantizeLinear(codes, op.Squeeze(scale, [1]), axis=0, output_dtype=int(dtype))


def _activation(format: Format, x: Any, input_scale: Any) -> tuple[Any, Any]:
    """`x` rounded to `format`, and what the output is to be multiplied by, if anything."""
    op, trt = _opset(), _trt_opset()
    block = format.block[1]
    if format.global_scale:
        codes, scale = trt.TRT_FP4DynamicQuantize(
            x, input_scale, axis=-1, block_size=block, scale_type=_E4M3, _outputs=2
        )
        step = op.DequantizeLinear(scale, input_scale)
        return op.Cast(op.DequantizeLinear(codes, step, axis=-1, block_size=block), to=int(x.dtype)), None
    if format.scale is E8M0:
        codes, scale = trt.TRT_MXFP8DynamicQuantize(x, axis=-1, block_size=block, output_dtype=_E4M3, _outputs=2)
        return trt.TRT_MXFP8DequantizeLinear(codes, scale, axis=-1, block_size=block, output_dtype=int(x.dtype)), None
    if format.block == (0, 0):
        return _round_trip(format, x, input_scale, x.dtype), None
    wide = op.Cast(x, to=_FLOAT)
    amax = op.ReduceMax(op.Abs(wide), [-1], keepdims=1)
    scale = op.Div(amax, op.Constant(value_float=format.element.max))
    scale = op.Where(op.Greater(scale, op.Constant(value_float=0.0)), scale, op.Constant(value_float=1.0))
    step = op.Constant(value_float=_TOKEN_STEP[format.element])
    small = op.Mul(op.Div(wide, scale), step)
    return _round_trip(format, small, step, x.dtype), op.Div(scale, step)


def _round_trip(format: Format, x: Any, scale: Any, dtype: Any) -> Any:
    op = _opset()
    codes = op.QuantizeLinear(x, scale, output_dtype=_element_type(format))
    return op.DequantizeLinear(codes, scale, output_dtype=int(dtype))


def _element_type(format: Format) -> int:
    import onnx_ir

    types = {E2M1: "FLOAT4E2M1", E4M3: "FLOAT8E4M3FN", INT4: "INT4", INT8: "INT8"}
    return int(onnx_ir.DataType[types[format.element]])


# Attention and the KV cache


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
    scales: Sequence[float],
    kind: str,
) -> torch.Tensor:
    """The attention that an exported graph holds as one op; runs in PyTorch, too.

    Args:
        q: `[batch, heads, seq_q, dim]`.
        k, v: `[batch, kv_heads, seq_kv, dim]`.
        mask: bool `[batch, 1, seq_q, seq_kv]`, True where a query sees a key; None for all.
        scale: multiplies q·k.
        causal: query i sees keys up to i.
        scales: of q, k, v and the probabilities for FP8; empty for 16 bit.
        kind: "native" or "plugin".
    """
    return torch.ops.quant.onnx_attention(q, k, v, mask, scale, causal, list(scales), kind)


def _attention_body(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
    scales: list[float],
    kind: str,
) -> torch.Tensor:
    if scales and kind == "plugin":
        q8, k8, v8 = (_to_e4m3(x, s) for x, s in zip((q, k, v), scales, strict=False))
        operands = torch.tensor(scales[:3])
        return attention_reference(q8, k8, v8, operands, causal=causal, softmax_scale=scale, dtype=q.dtype)[0]
    dtype = q.dtype
    if scales:
        fp8 = FORMATS["fp8"]
        q, k, v = (fake_quantize(x, fp8, scale=torch.tensor(s)) for x, s in zip((q, k, v), scales, strict=False))
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1).float(), v.repeat_interleave(repeat, 1).float()
    scores = q.float() @ k.mT * scale
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    p = scores.softmax(-1)
    if scales:
        p = fake_quantize(p, FORMATS["fp8"], scale=torch.tensor(scales[3]))
    return (p @ v).to(dtype)


def _to_e4m3(x: torch.Tensor, scale: float) -> torch.Tensor:
    return (x.float() / scale).clamp(-E4M3.max, E4M3.max).to(torch.float8_e4m3fn)


def _attention(
    q: Any, k: Any, v: Any, mask: Any, scale: float, causal: bool, scales: Sequence[float], kind: str
) -> Any:
    op = _opset()
    if not scales and int(q.dtype) == _FLOAT:
        return _spelled_attention(q, k, v, mask, scale, causal)
    if not scales:
        y, *_ = op.Attention(q, k, v, mask, scale=scale, is_causal=int(causal))
        return y
    if kind == "plugin":
        codes = [
            op.QuantizeLinear(x, op.Constant(value_float=s), output_dtype=_E4M3)
            for x, s in zip((q, k, v), scales, strict=False)
        ]
        return _plugin_opset().QuantFp8Attention(
            *codes,
            op.Constant(value_floats=list(scales[:3])),
            causal=int(causal),
            softmax_scale=scale,
            output_type=int(q.dtype),
            plugin_version=plugin.VERSION,
            plugin_namespace=plugin.NAMESPACE,
        )
    rounded = [
        _round_trip(FORMATS["fp8"], x, op.Constant(value_float=s), x.dtype)
        for x, s in zip((q, k, v), scales, strict=False)
    ]
    return _trt_opset().TRT_QuantizedAttention(
        *rounded,
        mask,
        op.Constant(value_float=scales[3]),
        scale=scale,
        is_causal=int(causal),
        normalization_quantize_to_type=_E4M3,
    )


def _spelled_attention(q: Any, k: Any, v: Any, mask: Any, scale: float, causal: bool) -> Any:
    """Attention in FP32, spelled out: TensorRT has no fused kernel for it, and refuses the op where it has none."""
    op = _opset()
    heads, kv_heads, dim = q.shape[1], k.shape[1], q.shape[3]
    # [batch, kv_heads, query heads of each, tokens, dim]: keys and values are broadcast and not repeated.
    grouped = op.Reshape(q, op.Constant(value_ints=[0, kv_heads, heads // kv_heads, -1, dim]))
    two = op.Constant(value_ints=[2])
    scores = op.MatMul(grouped, op.Transpose(op.Unsqueeze(k, two), perm=[0, 1, 2, 4, 3]))
    scores = op.Mul(scores, op.Constant(value_float=scale))
    lowest = op.Constant(value_float=-math.inf)
    if causal:
        zero, one = op.Constant(value_int=0), op.Constant(value_int=1)
        rows, columns = (op.Range(zero, op.Squeeze(op.Shape(x, start=2, end=3)), one) for x in (q, k))
        seen = op.GreaterOrEqual(op.Unsqueeze(rows, op.Constant(value_ints=[1])), columns)
        scores = op.Where(seen, scores, lowest)
    if mask is not None:
        scores = op.Where(op.Unsqueeze(mask, two), scores, lowest)
    out = op.MatMul(op.Softmax(scores, axis=-1), op.Unsqueeze(v, two))
    return op.Reshape(out, op.Constant(value_ints=[0, heads, -1, dim]))


def _cache_write(x: Any, scale: float) -> Any:
    op = _opset()
    return op.QuantizeLinear(x, op.Constant(value_float=scale), output_dtype=_E4M3)


def _cache_read(codes: Any, scale: float, like: Any) -> Any:
    op = _opset()
    return op.DequantizeLinear(codes, op.Constant(value_float=scale), output_dtype=int(like.dtype))


def _register_ops() -> None:
    define, impl, fake = torch.library.define, torch.library.impl, torch.library.register_fake
    name = "quant::onnx_attention"
    define(
        name,
        "(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale, bool causal, float[] scales, str kind) -> Tensor",
    )
    impl(name, "default", _attention_body)
    fake(name, lambda q, *rest: torch.empty_like(q))
    name = "quant::onnx_cache_write"
    define(name, "(Tensor x, float scale) -> Tensor")
    impl(name, "default", _to_e4m3)
    fake(name, lambda x, scale: torch.empty_like(x, dtype=torch.float8_e4m3fn))
    name = "quant::onnx_cache_read"
    define(name, "(Tensor codes, float scale, Tensor like) -> Tensor")
    impl(name, "default", lambda codes, scale, like: (codes.float() * scale).to(like.dtype))
    fake(name, lambda codes, scale, like: torch.empty_like(codes, dtype=like.dtype))


_register_ops()


# Opsets


@functools.cache
def _opset() -> Any:
    from onnxscript import opset23

    return opset23


@functools.cache
def _trt_opset() -> Any:
    from onnxscript.values import Opset

    return Opset(TRT_DOMAIN, 1)


@functools.cache
def _plugin_opset() -> Any:
    from onnxscript.values import Opset

    return Opset(plugin.DOMAIN, 1)


@functools.cache
def register_schemas() -> None:
    """Tells onnx the operators of TensorRT's domain and ours, without which exporter and checker refuse them."""
    from onnx import TensorProto
    from onnx.defs import OpSchema, register_schema

    kind, parameter, option = OpSchema.AttrType, OpSchema.FormalParameter, OpSchema.FormalParameterOption
    fp4, fp8, byte, float32 = "tensor(float4e2m1)", "tensor(float8e4m3fn)", "tensor(uint8)", "tensor(float)"

    def register(
        name: str,
        inputs: dict[str, str],
        outputs: dict[str, str],
        attributes: dict[str, Any],
        infer: Callable[[Any], None],
        domain: str = TRT_DOMAIN,
    ) -> None:
        def parameters(given: dict[str, str]) -> list[Any]:
            return [
                parameter(
                    key.removesuffix("?"), value, param_option=option.Optional if key.endswith("?") else option.Single
                )
                for key, value in given.items()
            ]

        schema = OpSchema(
            name,
            domain,
            1,
            inputs=parameters(inputs),
            outputs=parameters(outputs),
            type_constraints=[("T", [float32, "tensor(float16)", "tensor(bfloat16)"], "precision of the layer")],
            attributes=[OpSchema.Attribute(key, value, "", required=False) for key, value in attributes.items()],
        )
        schema.set_type_and_shape_inference_function(infer)
        register_schema(schema)

    def like_input(attribute: str | None) -> Callable[[Any], None]:
        """One output, of the shape of the first input and of the type that an attribute names, or the input's."""

        def infer(context: Any) -> None:
            type = context.get_input_type(0)
            if attribute is not None:
                type.tensor_type.elem_type = context.get_attribute(attribute).i
            context.set_output_type(0, type)

        return infer

    def codes_and_scales(codes: int, scale: int) -> Callable[[Any], None]:
        """Codes of the shape of the first input, and a scale for each block of its last axis."""

        def infer(context: Any) -> None:
            type = context.get_input_type(0)
            type.tensor_type.elem_type = codes
            context.set_output_type(0, type)
            type.tensor_type.elem_type = scale
            if type.tensor_type.HasField("shape"):
                last = type.tensor_type.shape.dim[-1]
                last.dim_value = last.dim_value // context.get_attribute("block_size").i
            context.set_output_type(1, type)

        return infer

    blocks = {"axis": kind.INT, "block_size": kind.INT}
    output = {"output_dtype": kind.INT}
    register(
        "TRT_FP4DynamicQuantize",
        {"x": "T", "global_scale": float32},
        {"codes": fp4, "scale": fp8},
        {**blocks, "scale_type": kind.INT},
        codes_and_scales(TensorProto.FLOAT4E2M1, TensorProto.FLOAT8E4M3FN),
    )
    register(
        "TRT_MXFP8DynamicQuantize",
        {"x": "T"},
        {"codes": fp8, "scale": byte},
        {**blocks, **output},
        codes_and_scales(TensorProto.FLOAT8E4M3FN, TensorProto.UINT8),
    )
    wide = like_input("output_dtype")
    register("TRT_MXFP8DequantizeLinear", {"codes": fp8, "scale": byte}, {"x": "T"}, {**blocks, **output}, wide)
    register(
        "TRT_BlockDequantize",
        {"codes": fp8, "scale": float32},
        {"x": "T"},
        {"block_shape": kind.INTS, **output},
        wide,
    )
    register(
        "TRT_QuantizedAttention",
        {"q": "T", "k": "T", "v": "T", "mask?": "tensor(bool)", "normalization_quantize_scale": float32},
        {"y": "T"},
        {"scale": kind.FLOAT, "is_causal": kind.INT, "normalization_quantize_to_type": kind.INT},
        like_input(None),
    )
    register(
        "QuantFp8Attention",
        {"q": fp8, "k": fp8, "v": fp8, "scales": float32},
        {"out": "T"},
        {
            "causal": kind.INT,
            "softmax_scale": kind.FLOAT,
            "output_type": kind.INT,
            "plugin_version": kind.STRING,
            "plugin_namespace": kind.STRING,
        },
        like_input("output_type"),
        plugin.DOMAIN,
    )
