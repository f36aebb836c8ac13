"""`translate` makes an ONNX model of a traced graph, op by op, and names its nodes.

torch.onnx.export runs with our translations. Packed codes get their 4-bit types, dimensions their names, linears and
attentions their layers' names; the onnxscript optimizer folds and merges.
"""

from __future__ import annotations

import ast
import contextlib
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from quant.export.onnx import limits
from quant.export.onnx.decoder_graph import GraphInput
from quant.export.onnx_graph.ops import translations
from quant.export.onnx.opsets import OPSET
from quant.recipes.json_text import json_text

LAYER_KEY = "blockscale.layer"
MODULE_KEY = "blockscale.module"
"""The module that a node was traced in; nodes of a layer have `LAYER_KEY` too."""
UNREACHED_KEY = "blockscale.unreached"
"""Key in the file's metadata; its value is a JSON list of the quantized layers on which no output depends."""
_ATTENTIONS = tuple(f"torch.ops.quant.onnx_{name}" for name in ("attention", "fp8_cache", "nvfp4_cache"))
_PLAIN_LINEARS = (
    "torch.ops.aten.linear.default", "torch.ops.aten.addmm.default", "torch.ops.aten.convolution.default",
    "torch.ops.aten.conv1d.default", "torch.ops.aten.conv2d.default", "torch.ops.aten.conv3d.default",
)  # fmt: skip


def translate(
    exported: torch.export.ExportedProgram,
    inputs: Mapping[str, GraphInput],
    outputs: list[str] | None,
    prefix: str,
    model: nn.Module,
    opset: int = OPSET,
) -> Any:
    """Returns the ONNX model of a graph, as an `onnx_ir.Model`.

    Args:
        exported: the graph, as `trace` returns it.
        inputs: the inputs of the graph, for the names of dimensions.
        outputs: names of the outputs; None leaves torch's.
        prefix: what names in the graph have before those of the model's modules.
        model: the traced model; its layers that the graph lacks are named in the file's metadata.
        opset: the version of ONNX's operators.
    """
    from onnxscript import optimizer

    # Filled by the translations: values of packed 4-bit codes, and their ONNX types.
    packed: dict[Any, int] = {}
    program = torch.onnx.export(
        exported,
        dynamo=True,
        opset_version=opset,
        optimize=False,
        custom_translation_table=translations(packed),
        input_names=list(inputs),
        output_names=outputs,
        verbose=False,
    )
    assert program is not None
    graph = program.model
    _type_packed(packed)
    _name_layers(graph, prefix)
    dtypes = {value.name: value.dtype for value in graph.graph.initializers.values()}
    with _comparing_ops_first():
        optimizer.optimize(graph)
    _restore_dtypes(graph, dtypes)
    _name_dims(graph, inputs)
    _clean(graph)
    unreached = limits.unreached_layers(exported, model, prefix)
    if unreached:
        graph.metadata_props[UNREACHED_KEY] = json_text(unreached)
    return graph


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
        value.const_value = ir.PackedTensor(codes.numpy(), ir.DataType(kind), shape=shape, name=value.name)
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
        elif any(op in source for op in (*_ATTENTIONS, *_PLAIN_LINEARS)):
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
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
