"""Exported graphs use the operators of ONNX, those of TensorRT's domain `trt`, and that of our attention plugin.

ONNX's exporter and checker refuse operators that they do not know. `register_schemas` describes the last two kinds to
them: inputs, outputs, attributes, and how shapes and types follow.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from quant.formats.format import Format
from quant.formats.number import E2M1, E4M3, INT4, INT8

OPSET = 23
TRT_DOMAIN = "trt"
PLUGIN, PLUGIN_DOMAIN, PLUGIN_VERSION = "QuantFp8Attention", "quant", "1"
"""Op type, domain (and namespace in TensorRT) and version of our plugin; `quant.export.engine.plugin` describes it."""
FLOAT, FLOAT8E4M3FN = 1, 17  # TensorProto's numbers


@functools.cache
def opset() -> Any:
    """ONNX's operators."""
    from onnxscript import opset23

    return opset23


@functools.cache
def trt_opset() -> Any:
    """Those of TensorRT's domain."""
    from onnxscript.values import Opset

    return Opset(TRT_DOMAIN, 1)


@functools.cache
def plugin_opset() -> Any:
    """Ours."""
    from onnxscript.values import Opset

    return Opset(PLUGIN_DOMAIN, 1)


def round_trip(format: Format, x: Any, scale: Any, dtype: Any) -> Any:
    """`x` rounded to `format` with a static scale, in `dtype` again: what TensorRT takes for a quantized operand."""
    op = opset()
    codes = op.QuantizeLinear(x, scale, output_dtype=element_type(format))
    return op.DequantizeLinear(codes, scale, output_dtype=int(dtype))


def element_type(format: Format) -> int:
    """ONNX's number of the type of a format's codes."""
    import onnx_ir

    types = {E2M1: "FLOAT4E2M1", E4M3: "FLOAT8E4M3FN", INT4: "INT4", INT8: "INT8"}
    return int(onnx_ir.DataType[types[format.element]])


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
        PLUGIN,
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
        PLUGIN_DOMAIN,
    )
