"""The operators of exported graphs: ONNX's own, TensorRT's of the domain `trt`, and our attention plugins.

ONNX's exporter and checker refuse operators that they do not know. `register_schemas` describes the last two kinds to
them: inputs, outputs, attributes, and how shapes and types follow. Operators of onnxruntime are checked where it loads
the file.
"""

import functools
from collections.abc import Callable
from typing import Any

from quant.formats.format import Format

OPSET = 23
SERVING_OPSET = 24
"""The first opset with TensorScatter, which writes into a KV cache."""
RUNTIMES = ("onnxruntime", "tensorrt")
"""Runtimes that an ONNX file can be written for."""
ORT_DOMAIN, INTEGER_PRODUCT = "com.microsoft", "MatMulIntegerToFloat"
"""Domain of onnxruntime's own operators, and its product of codes with scales."""
GROUPED_ATTENTION = "GroupedAttention"
"""Op type of attention over a KV cache that `onnxruntime_graph` replaces, in the domain of our plug-ins."""
TRT_DOMAIN = "trt"
PLUGIN, PLUGIN_DOMAIN, PLUGIN_VERSION = "QuantFp8Attention", "quant", "1"
"""Op type, domain (namespace in TensorRT) and version of our plugin; `quant.export.tensorrt.plugin` describes it."""
CACHE_PLUGIN = "QuantCacheAttention"
"""Op type of our plugin for a KV cache in FP8 or NVFP4; `quant.export.tensorrt.cache_plugin` describes it."""
# Numbers of `TensorProto.DataType`.
FLOAT, INT32, BOOL, FLOAT8E4M3FN = 1, 6, 9, 17


@functools.cache
def opset(domain: str = "", version: int = 1) -> Any:
    """Returns ONNX's operators of `OPSET`, or operators that onnxscript has no module for."""
    from onnxscript import opset23, values

    return opset23 if (domain, version) == ("", 1) else values.Opset(domain, version)


def round_trip(format: Format, x: Any, scale: Any, dtype: Any) -> Any:
    """Returns a float32 `x` rounded to `format` with a static scale: TensorRT's pattern of a quantized operand.

    onnxruntime moves QuantizeLinear and DequantizeLinear across reshapes, and makes an invalid graph of them where x
    or the result has another dtype than the scale; casts stop it.
    """
    op = opset()
    codes = op.QuantizeLinear(x, scale, output_dtype=element_type(format))
    return narrowed(op.DequantizeLinear(codes, scale), dtype)


def narrowed(x: Any, dtype: Any) -> Any:
    """Returns a float32 value in `dtype`."""
    return x if int(dtype) == FLOAT else opset().Cast(x, to=int(dtype))


def widened(x: Any) -> Any:
    """Returns an input of an operator in float32."""
    return x if int(x.dtype) == FLOAT else opset().Cast(x, to=FLOAT)


def element_type(format: Format) -> int:
    """Returns ONNX's number of the type of a format's codes."""
    import onnx_ir

    types = {"e2m1": "FLOAT4E2M1", "e4m3": "FLOAT8E4M3FN", "int4": "INT4", "int8": "INT8"}
    return int(onnx_ir.DataType[types[format.element.name]])


def _parameters(text: str) -> list[Any]:
    """Returns `x:T mask?:bool caches*:C` as names and types of inputs or outputs.

    `?` marks an optional one, and `*` any number of them, which may have different types.
    """
    from onnx.defs import OpSchema

    option, parameters = OpSchema.FormalParameterOption, []
    options = {"?": option.Optional, "*": option.Variadic}
    for name, _, type in (part.partition(":") for part in text.split()):
        needed = options.get(name[-1], option.Single)
        type = type if type in ("T", "C", "K", "W") else f"tensor({type})"
        single = needed is not option.Variadic
        parameters.append(OpSchema.FormalParameter(name.rstrip("?*"), type, param_option=needed, is_homogeneous=single))
    return parameters


def _register(
    name: str, inputs: str, outputs: str, attributes: str, infer: Callable[[Any], None], domain: str = TRT_DOMAIN
) -> None:
    """Registers an operator; `infer` sets the types of its outputs.

    The type `T` is the layer's precision, `C` of any operand of our plugin, `K` of the codes in its caches, and `W` of
    the weights of experts.
    """
    from onnx.defs import OpSchema, register_schema

    kinds = OpSchema.AttrType
    kind_of = {"block_shape": kinds.INTS, "scale": kinds.FLOAT, "softmax_scale": kinds.FLOAT, "gate": kinds.FLOATS}
    texts = ("format", "up_format", "down_format", "plugin_version", "plugin_namespace")
    kind_of |= dict.fromkeys(texts, kinds.STRING)  # all others are INT
    wide = [f"tensor({type})" for type in ("float", "float16", "bfloat16")]
    constraints = [("T", wide, "the layer's precision")]
    if ":C" in inputs:
        codes = ["tensor(float8e4m3fn)"]
        constraints += [("C", [*wide, *codes, "tensor(int32)"], "an operand"), ("K", codes, "codes of a cache")]
    if ":W" in inputs:
        numbers = [f"tensor({type})" for type in ("uint8", "int8", "float8e4m3fn")]
        constraints.append(("W", [*wide, *numbers], "weights of experts"))
    schema = OpSchema(
        name, domain, 1, inputs=_parameters(inputs), outputs=_parameters(outputs), type_constraints=constraints,
        attributes=[OpSchema.Attribute(n, kind_of.get(n, kinds.INT), "", required=False) for n in attributes.split()],
    )  # fmt: skip
    schema.set_type_and_shape_inference_function(infer)
    register_schema(schema)


def _like_input(attribute: str | None) -> Callable[[Any], None]:
    """Infers an output of the first input's shape; its type is named by an attribute, or is the input's."""

    def infer(context: Any) -> None:
        type = context.get_input_type(0)
        if attribute is not None:
            type.tensor_type.elem_type = context.get_attribute(attribute).i
        context.set_output_type(0, type)

    return infer


def _codes_and_scales(codes: int, scale: int) -> Callable[[Any], None]:
    """Returns the codes of the first input's shape, and a scale for each block of its last axis."""

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


def _like_query_and_caches(context: Any) -> None:
    """Makes the first output like q, and each further one like a cache; inputs are q, k, v, and then the caches."""
    context.set_output_type(0, context.get_input_type(0))
    for index in range(1, context.get_num_outputs()):
        context.set_output_type(index, context.get_input_type(2 + index))


@functools.cache
def register_schemas() -> None:
    """Describes the operators of TensorRT's domain and of our plugins to onnx."""
    from onnx import TensorProto

    # TensorRT's ONNX parser reads these names and attributes in the domain "trt".
    wide = _like_input("output_dtype")
    fp4 = _codes_and_scales(TensorProto.FLOAT4E2M1, TensorProto.FLOAT8E4M3FN)
    mxfp8 = _codes_and_scales(TensorProto.FLOAT8E4M3FN, TensorProto.UINT8)
    blocks, codes = "axis block_size", "codes:float8e4m3fn"
    nvfp4_outputs = "codes:float4e2m1 scale:float8e4m3fn"
    _register("TRT_FP4DynamicQuantize", "x:T global_scale:float", nvfp4_outputs, f"{blocks} scale_type", fp4)
    _register("TRT_MXFP8DynamicQuantize", "x:T", f"{codes} scale:uint8", f"{blocks} output_dtype", mxfp8)
    _register("TRT_MXFP8DequantizeLinear", f"{codes} scale:uint8", "x:T", f"{blocks} output_dtype", wide)
    _register("TRT_BlockDequantize", f"{codes} scale:float", "x:T", "block_shape output_dtype", wide)
    # `quant.export.onnx.expert_nodes` describes it.
    operands = "x:T index:int64 weight:T up:W up_scale?:float up_bias?:T down:W down_scale?:float down_bias?:T"
    _register(
        "Experts", operands, "y:T", "up_format down_format gate alternate transposed", _like_input(None), PLUGIN_DOMAIN
    )
    _register(
        GROUPED_ATTENTION, "q:T k:T v:T past_key:T past_value:T lengths:int64 sinks?:T", "y:T new_key:T new_value:T",
        "softmax_scale window", _like_query_and_caches, PLUGIN_DOMAIN,
    )  # fmt: skip
    _register(
        "TRT_QuantizedAttention", "q:T k:T v:T mask?:bool normalization_quantize_scale:float", "y:T",
        "scale is_causal normalization_quantize_to_type", _like_input(None),
    )  # fmt: skip
    _register(
        PLUGIN, "q:float8e4m3fn k:float8e4m3fn v:float8e4m3fn scales:float", "out:T",
        "causal softmax_scale output_type plugin_version plugin_namespace", _like_input("output_type"), PLUGIN_DOMAIN,
    )  # fmt: skip
    _register(
        CACHE_PLUGIN,
        # torch.onnx repeats an operand that stands before a variadic one.
        "operands*:C",
        "out:T k_cache:K v_cache:K k_blocks?:float8e4m3fn v_blocks?:float8e4m3fn",
        "softmax_scale format plugin_version plugin_namespace",
        _like_query_and_caches,
        PLUGIN_DOMAIN,
    )
