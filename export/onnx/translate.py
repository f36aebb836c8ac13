"""`translate` makes an ONNX model of a traced graph, op by op, and names its nodes.

torch.onnx.export runs with our translations of quantized linears and convolutions. Packed codes get their 4-bit types,
dimensions their names, linears and attentions their layers' names; the onnxscript optimizer folds and merges.

    weight        DequantizeLinear(codes, scale) in the block shape of the format, then Transpose
    activation    QuantizeLinear, DequantizeLinear                     static scale: fp8
                  trt::TRT_FP4DynamicQuantize, two DequantizeLinear    nvfp4: block scales found at run time
                  trt::TRT_MXFP8DynamicQuantize, and back              mxfp8
                  divided by its scale, then as static                 fp8_token, int8_token
    linear        MatMul(activation, weight), Add(bias)
    convolution   Conv or ConvTranspose(activation, weight, bias), the weight dequantized in its own shape

TensorRT turns these patterns into GEMMs in the low precision; other nodes for the same arithmetic run in half
precision. Details that matter to the pattern and to the numbers:

- Scales stay float32 and the result is rounded once to the dtype of x, as in the PyTorch op, by a Cast after the last
  DequantizeLinear: onnxruntime has no DequantizeLinear from float32 scales to a 16-bit `output_dtype`. INT4 is fused
  only if its scales have the dtype of x; solvers choose them representable in it.
- A scale per token between DequantizeLinear and MatMul would make the GEMM run in half precision. But a scale of a row
  of x is one of a row of the output: x / s is rounded with a constant power of two as its scale, and s multiplies the
  output. The constant keeps codes below 1, so that FP16 sums stay as small as with x itself. The inputs of a
  convolution have one scale for each sample, and the same holds there.
- Codes and scales are the buffers of the module, byte for byte. Packed 4-bit codes are bytes in PyTorch and typed
  FLOAT4E2M1 or INT4 in ONNX with the same bytes (even index in the low nibble).
"""

import ast
import contextlib
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from quant.base.errors import option, unlogged
from quant.base.json_files import json_text
from quant.export.onnx import limits
from quant.export.onnx.attention_nodes import attention_translations
from quant.export.onnx.decoder_graph import GraphInput
from quant.export.onnx.expert_nodes import translated
from quant.export.onnx.onnxruntime_graph import for_onnxruntime
from quant.export.onnx.opsets import (
    FLOAT,
    FLOAT8E4M3FN,
    OPSET,
    TRT_DOMAIN,
    element_type,
    narrowed,
    opset,
    register_schemas,
    round_trip,
    widened,
)
from quant.formats.format import E2M1, E4M3, E8M0, FORMATS, INT4, INT8, WEIGHT_FORMATS, Format

# Static scales of the codes of inputs that are scaled by token: the largest code times these is just below 1.
_TOKEN_STEP = {E4M3: 2.0**-9, INT8: 2.0**-7}


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


def _linear(packed: dict[Any, int]) -> Callable[..., Any]:
    def translate(
        x: Any, codes: Any, scale: Any, global_scale: Any, bias: Any, input_scale: Any, weight_format: str,
        activation: str,
    ) -> Any:  # fmt: skip
        op, dtype, format = opset(), x.dtype, WEIGHT_FORMATS[weight_format]
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
    op, trt = opset(), opset(TRT_DOMAIN)
    rows, columns = format.block
    if format.global_scale:
        step = op.DequantizeLinear(scale, op.Cast(global_scale, to=FLOAT))
        return op.Cast(op.DequantizeLinear(codes, step, axis=1, block_size=columns), to=int(dtype))
    if format.scale is E8M0:
        return trt.TRT_MXFP8DequantizeLinear(codes, scale, axis=1, block_size=columns, output_dtype=int(dtype))
    if format.element in (INT4, INT8) and columns > 1:
        scale = scale if int(dtype) == FLOAT else op.Cast(scale, to=int(dtype))
        return op.DequantizeLinear(codes, scale, axis=1, block_size=columns)
    if rows > 1 and list(scale.shape) == [1, 1]:  # TensorRT refuses a scale of one block, and takes a number
        return narrowed(op.DequantizeLinear(codes, op.Squeeze(scale)), dtype)
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
    op, trt = opset(), opset(TRT_DOMAIN)
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
    return round_trip(format, op.Mul(op.Div(wide, scale), step), step, x.dtype), op.Div(scale, step)


LAYER_KEY = "blockscale.layer"
MODULE_KEY = "blockscale.module"
"""The module that a node was traced in; nodes of a layer have `LAYER_KEY` too."""
UNREACHED_KEY = "blockscale.unreached"
"""Key in the file's metadata; its value is a JSON list of the quantized layers on which no output depends."""
_WHOLE_MODULES = tuple(f"torch.ops.quant.onnx_{name}" for name in ("attention", "fp8_cache", "nvfp4_cache", "experts"))
_PLAIN_LINEARS = (
    "torch.ops.aten.linear.default", "torch.ops.aten.addmm.default", "torch.ops.aten.convolution.default",
    "torch.ops.aten.conv1d.default", "torch.ops.aten.conv2d.default", "torch.ops.aten.conv3d.default",
)  # fmt: skip


def translate(
    exported: torch.export.ExportedProgram, inputs: Mapping[str, GraphInput], outputs: list[str] | None, prefix: str,
    model: nn.Module, opset: int = OPSET, runtime: str = "tensorrt",
) -> Any:  # fmt: skip
    """Returns the ONNX model of a graph, as an `onnx_ir.Model`.

    `inputs` name dimensions; `outputs` are names, or None for torch's; `prefix` is what names in the graph have before
    those of the modules of `model`, whose layers that the graph lacks are named in the file's metadata; `runtime` is
    one of `RUNTIMES`.
    """
    from onnxscript import optimizer

    register_schemas()
    packed: dict[Any, int] = {}  # filled by the translations: values of packed 4-bit codes, and their ONNX types
    ops = torch.ops.quant
    table = {ops.linear.default: _linear(packed), ops.conv.default: _conv, **attention_translations(runtime)}
    table[ops.onnx_experts.default] = translated
    try:
        program = torch.onnx.export(
            exported, dynamo=True, opset_version=opset, optimize=False, custom_translation_table=table,
            input_names=list(inputs), output_names=outputs, verbose=False,
        )  # fmt: skip
    except torch.onnx.OnnxExporterError as error:
        raise ValueError(_untranslated(error, type(model).__name__)) from error
    assert program is not None
    graph = program.model
    _type_packed(packed)
    _name_layers(graph, prefix)
    if limits.narrowest_dtype(model) is not torch.bfloat16:
        _widen_bfloat16(graph.graph)
    dtypes = {value.name: value.dtype for value in graph.graph.initializers.values()}
    with _comparing_ops_first():
        optimizer.optimize(graph)
    _restore_dtypes(graph, dtypes)
    if runtime == "onnxruntime":
        for_onnxruntime(graph)
    _name_dims(graph, inputs)
    _clean(graph)
    unreached = limits.unreached_layers(exported, model, prefix)
    if unreached:
        graph.metadata_props[UNREACHED_KEY] = json_text(unreached)
    return graph


def _untranslated(error: BaseException, model: str) -> str:
    """Returns the line on an op that torch.onnx does not translate, which is somewhere in the causes of its error."""
    op, innermost = "an op", error
    while innermost.__cause__ is not None:
        innermost = innermost.__cause__
        if named := re.search(r"target=torch\.ops\.([\w.]+)", str(innermost)):
            op = named[1]
    reason = " ".join(str(innermost).split())[:200]
    return (
        f"{model}: torch.onnx cannot translate {op} ({reason}); a package of AOTInductor runs all of PyTorch "
        f"({option('to', 'aoti')})"
    )


@contextlib.contextmanager
def _comparing_ops_first() -> Iterator[None]:
    """Makes onnxscript compare a node's op with a pattern's first one before it goes through the whole graph.

    For a pattern of several outputs, onnxscript 0.7 sorts all nodes by op anew at each node, which takes half of the
    time that it takes to export a decoder of thirty blocks. The same nodes match; a node of another op never does.
    """
    from onnxscript.rewriter import _matcher

    plain = _matcher.SimplePatternMatcher.match

    def match(self: Any, model: Any, graph: Any, node: Any, **options: Any) -> Any:
        if not getattr(self.pattern, "has_single_output_node", True):
            first = self.pattern.output_nodes[0].op_identifier()
            if first is not None and first[:2] != (node.domain, node.op_type):
                return _matcher._basics.MatchResult().fail("the op is another")
        return plain(self, model, graph, node, **options)

    _matcher.SimplePatternMatcher.match = match
    try:
        yield
    finally:
        _matcher.SimplePatternMatcher.match = plain


def _widen_bfloat16(graph: Any) -> None:
    """Computes in float32 what a model in another dtype computes in BF16, and rounds each result: the same numbers.

    onnxruntime has no arithmetic in BF16 on a processor, and Falcon's ALiBi is made in it in models of every dtype.
    """
    import onnx_ir as ir

    float32, bfloat16 = ir.DataType.FLOAT, ir.DataType.BFLOAT16

    def cast(value: Any, dtype: Any, node: Any, *, before: bool) -> Any:
        added = ir.node("Cast", [value], {"to": dtype}, metadata_props=dict(node.metadata_props))
        added.outputs[0].dtype, added.outputs[0].shape = dtype, value.shape
        (graph.insert_before if before else graph.insert_after)(node, added)
        return added.outputs[0]

    for node in list(graph):
        narrow = [index for index, value in enumerate(node.inputs) if value is not None and value.dtype is bfloat16]
        if node.op_type == "Cast" or not narrow:
            continue
        for index in narrow:
            node.replace_input_with(index, cast(node.inputs[index], float32, node, before=True))
        for value in node.outputs:
            if value.dtype is bfloat16:
                value.dtype = float32
                rounded = cast(value, bfloat16, node, before=False)
                ir.convenience.replace_all_uses_with(value, rounded, replace_graph_outputs=True)
                rounded.producer().replace_input_with(0, value)
                value.name, rounded.name = rounded.name, value.name


def _restore_dtypes(model: Any, dtypes: Mapping[str, Any]) -> None:
    """Gives weights of convolutions the dtype of the model again.

    onnxscript 0.7 multiplies a BatchNorm into the convolution before it, and leaves a weight in BF16 and its new bias
    in FLOAT, which no runtime takes with an input in BF16.
    """
    import onnx_ir as ir

    for node in model.graph:
        if node.op_type not in ("Conv", "ConvTranspose"):
            continue
        dtype = dtypes.get(node.inputs[1].name)
        for value in node.inputs[1:]:
            if value is not None and value.const_value is not None and dtype not in (None, value.dtype):
                value.const_value = ir.tensor(value.const_value.numpy().astype(dtype.numpy()), dtype, name=value.name)
                value.dtype = dtype


def _type_packed(packed: Mapping[Any, int]) -> None:
    """Turns bytes of two codes into tensors of 4-bit numbers over the same memory."""
    import onnx_ir as ir

    for value, kind in packed.items():
        # uint8 [out, in / 2]  ->  INT4 or FLOAT4E2M1 [out, in], the same bytes
        codes = value.const_value.raw.detach().contiguous()
        shape = (*codes.shape[:-1], codes.shape[-1] * 2)
        value.const_value = ir.PackedTensor(codes.numpy().reshape(-1), ir.DataType(kind), shape=shape, name=value.name)
        value.dtype = ir.DataType(kind)
        value.shape = ir.Shape(shape)


def _name_layers(model: Any, prefix: str) -> None:
    """Gives initializers the module's own names, and marks nodes of linears and attentions with their layer's name.

    Every node is marked with its module too, so that an engine says which norm or embedding a kernel computes.
    Linears in 16 bit are marked too: the audit has to find a layer that was planned in fewer bits and left as it was.
    """
    graph = model.graph
    for value in list(graph.initializers.values()):
        if prefix and value.name.startswith(prefix):
            old = value.name
            value.name = old.removeprefix(prefix)
            if old in graph.initializers:
                graph.initializers[value.name] = graph.initializers.pop(old)
    groups: dict[str, list[Any]] = {}
    plain: list[tuple[str, Any]] = []
    for node in graph:
        source = node.metadata_props.get("pkg.torch.onnx.fx_node", "")
        # The modules that the op was called in, outermost first, and then the op itself.
        scopes: list[str] = ast.literal_eval(node.metadata_props.get("pkg.torch.onnx.name_scopes", "[]"))
        module = scopes[-2].removeprefix(prefix) if len(scopes) > 1 else ""
        node.metadata_props[MODULE_KEY] = module
        if "torch.ops.quant.linear.default" in source or "torch.ops.quant.conv.default" in source:
            groups.setdefault(source, []).append(node)
        elif any(op in source for op in (*_WHOLE_MODULES, *_PLAIN_LINEARS)):
            plain.append((module, node))
    quantized = set()
    for nodes in groups.values():
        read = (value.name for node in nodes for value in node.inputs if value is not None)
        layer = next(name for name in read if name.endswith(".codes")).removesuffix(".codes")
        quantized.add(layer)
        for node in nodes:
            node.metadata_props[LAYER_KEY] = layer
        output = nodes[-1].outputs[0]
        if not output.is_graph_output():
            output.name = f"{layer}.output"
    for layer, node in plain:
        # The low-rank branch of a quantized layer has linears too, which are not the layer's GEMM.
        if layer not in quantized:
            node.metadata_props[LAYER_KEY] = layer


def _name_dims(model: Any, inputs: Mapping[str, GraphInput]) -> None:
    """Gives dimensions the names that `inputs` have for them, in every value and in sums of them."""
    import onnx_ir as ir

    names = {
        str(dim.value): name
        for value in model.graph.inputs
        for dim, name in zip(value.shape, inputs[value.name].dims, strict=True)
        if isinstance(dim, ir.SymbolicDim) and isinstance(name, str)
    }
    if not names:
        return
    symbol = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b")

    # torch calls dimensions s0, s1 and so on, and sums such as "s0 + 1" stay sums.
    def named(dim: Any) -> Any:
        if not isinstance(dim, ir.SymbolicDim) or dim.value is None:
            return dim
        return symbol.sub(lambda match: names[match[0]], str(dim.value))

    for value in [*model.graph.inputs, *(output for node in model.graph for output in node.outputs)]:
        if value.shape is not None:
            value.shape = ir.Shape([named(dim) for dim in value.shape])


def layer_of(node: Any) -> str:
    """Returns the layer that a node of an exported file belongs to; empty for other nodes."""
    return next((entry.value for entry in node.metadata_props if entry.key == LAYER_KEY), "")


def module_of(node: Any) -> str:
    """Returns the module that a node of an exported file was traced in; empty for nodes of the whole model."""
    return next((entry.value for entry in node.metadata_props if entry.key == MODULE_KEY), "")


def _clean(model: Any) -> None:
    """Removes the exporter's metadata, such as stack traces with paths of this machine."""
    for value in [*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values()]:
        value.metadata_props.clear()
    for node in model.graph:
        names = {key: node.metadata_props[key] for key in (LAYER_KEY, MODULE_KEY) if node.metadata_props.get(key)}
        node.metadata_props.clear()
        node.metadata_props.update(names)
        for value in node.outputs:
            value.metadata_props.clear()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences the exporter's notes on missing packages and its own deprecations."""
    with unlogged("torch.onnx", below=logging.ERROR), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
