"""`export_onnx` writes an ONNX file from a quantized model in four steps.

    torch.export            the module as a graph; a quantized linear is one `quant::` op in it, attention another
    torch.onnx.export       every op becomes ONNX nodes, ours by `ops`
    this file               packed codes get their 4-bit types, dimensions their names, linears their layers' names
    onnxscript optimizer    constants are folded, equal nodes merged (q, k and v share one quantized input)

Weights are not copied: initializers point at the module's buffers until they are written, and above `EXTERNAL_BYTES`
they go to a second file, tensor by tensor. Nodes of a linear are tagged with its layer's name and its output is called
`<layer>.output`, so that the file itself says which nodes to compare with which layer (`verify`); an attention is
tagged with its module's name. The file's metadata holds the plan's digest.
"""

from __future__ import annotations

import ast
import contextlib
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quant.calibration.kv_cache import AttentionScales
from quant.export.onnx_graph import limits
from quant.export.onnx_graph.decoder import (
    ATTENTIONS,
    Attention,
    Graph,
    GraphInput,
    attending,
    cache_inputs,
    cache_names,
    is_decoder,
    kv_scales_of,
    model_inputs,
    operand_scales,
)
from quant.export.onnx_graph.ops import translations
from quant.export.onnx_graph.opsets import OPSET
from quant.export.onnx_graph.shapes import Input, parse_profile
from quant.formats.atomic import put_file, temporary_directory
from quant.kernels.linear.quantized_module import restore_layout
from quant.recipes.plan import Plan

EXTERNAL_BYTES = 256 << 20
"""From this size on weights go to a file of their own; protobuf ends at 2 GiB."""
CACHES = ("none", "out", "in")
"""The KV cache of a graph: none; keys and values as outputs of prefill; as inputs and outputs of one decoding step."""
PLAN_KEY = "blockscale.plan"
LAYER_KEY = "blockscale.layer"
_PLAIN_LINEARS = (
    "torch.ops.aten.linear.default", "torch.ops.aten.addmm.default", "torch.ops.aten.convolution.default",
    "torch.ops.aten.conv1d.default", "torch.ops.aten.conv2d.default", "torch.ops.aten.conv3d.default",
)  # fmt: skip
# `Graph` holds the model as its attribute `model`, and parameters have that before their names.
_PREFIX = "model."


def export_onnx(
    model: nn.Module,
    path: str | Path,
    *,
    shapes: str | Sequence[str] | None = None,
    inputs: Mapping[str, GraphInput] | None = None,
    attention: str = "native",
    attention_scales: Mapping[str, AttentionScales] | None = None,
    cache: str = "none",
    plan: Plan | None = None,
) -> Path:
    """Writes `model` as an ONNX file that TensorRT builds into low-precision kernels, and returns the path.

    Args:
        model: quantized or not; a transformers model needs nothing else. It is not changed.
        path: of the file; weights of a big model go to `<path>.data`.
        shapes: ranges of the dynamic dimensions, as `--shapes` takes them, or several of them; None sets no limits.
        inputs: examples of a module's positional inputs by name, for modules that are not transformers models.
        attention: "native" for TensorRT's fused FP8 attention, "plugin" for ours, "none" for 16 bit.
        attention_scales: from `collect_attention_scales`; required if the plan has attention in FP8.
        cache: one of `CACHES`.
        plan: of the model; says whether attention and KV cache are in FP8, and its digest is written.

    Raises:
        ValueError: a layer, format, shape or option that cannot be exported; the message names it and the way out.
            Nothing is written.
    """
    path = Path(path)
    if attention not in ATTENTIONS:
        raise ValueError(f"unknown attention {attention!r}; known: {', '.join(ATTENTIONS)}")
    if cache not in CACHES:
        raise ValueError(f"unknown cache {cache!r}; known: {', '.join(CACHES)}")
    limits.check_model(model)
    if inputs is not None:
        if cache != "none":
            raise ValueError("decode and cache are for transformers models, which name their inputs themselves")
        if plan is not None and plan.attention is not None and attention != "none":
            raise ValueError(f"{plan.attention} attention is exported from transformers models; pass attention='none'")
        with _quiet():
            # Copies, because torch.export takes one tensor under two names for one input.
            exported = _trace(model, tuple(x.example.clone() for x in inputs.values()), inputs, shapes)
            program = _translate(exported, inputs, None, "")
    else:
        with _quiet():
            program = _transformers_program(model, shapes, attention, attention_scales, cache, plan)
    if plan is not None:
        program.metadata_props[PLAN_KEY] = plan.digest()
    return _save(program, path)


def _transformers_program(
    model: nn.Module,
    shapes: str | Sequence[str] | None,
    attention: str,
    attention_scales: Mapping[str, AttentionScales] | None,
    cache: str,
    plan: Plan | None,
) -> Any:
    """The ONNX model of a transformers model, as an `onnx_ir.Model`; arguments as for `export_onnx`."""
    if not hasattr(model, "main_input_name"):
        raise ValueError(f"{type(model).__name__} is no transformers model; pass inputs= with an example of each input")
    if cache != "none" and not is_decoder(model):
        raise ValueError(f"{type(model).__name__} does not generate text, so it has no KV cache to export")
    inputs = model_inputs(model, decode=cache == "in")
    scales: Mapping[str, Sequence[float]] = {}
    if plan is not None and plan.attention is not None and attention != "none":
        if not attention_scales:
            raise ValueError(
                f"the plan has attention in {plan.attention}, and no scales were given; pass attention_scales from "
                "collect_attention_scales (--calib TEXT on the command line), or attention 'none'"
            )
        scales = operand_scales(attention_scales)
    function = Attention(
        names={module: name for name, module in model.named_modules()},
        kind=attention,
        scales=scales,
        kv_scales=kv_scales_of(model) if cache != "none" and plan is not None and plan.kv_cache else {},
        window=0,
    )
    graph = Graph(model, function, cache=cache != "none")
    with attending(model, function, masked="attention_mask" in inputs):
        past = cache_inputs(graph, inputs) if cache == "in" else {}
        function.window = _longest({**inputs, **past}, shapes)
        arguments = ({name: x.example for name, x in inputs.items()}, [x.example for x in past.values()])
        exported = _trace(graph, arguments, {**inputs, **past}, shapes, split=len(inputs))
    outputs = function.outputs + (cache_names("new", len(function.new) // 2) if graph.cache else [])
    return _translate(exported, {**inputs, **past}, outputs, _PREFIX)


def dimension_ranges(
    inputs: Mapping[str, GraphInput], shapes: str | Sequence[str] | None
) -> dict[str, tuple[int, int]]:
    """Smallest and largest value of each dynamic dimension that `shapes` limits."""
    ranges: dict[str, tuple[int, int]] = {}
    parsed_inputs = [Input(name, x.dims) for name, x in inputs.items()]
    for text in [shapes] if isinstance(shapes, str) else shapes or ():
        for name, (lows, _, highs) in parse_profile(text, parsed_inputs, {}).items():
            for dim, low, high in zip(inputs[name].dims, lows, highs, strict=True):
                if isinstance(dim, str):
                    before = ranges.get(dim, (low, high))
                    ranges[dim] = min(before[0], low), max(before[1], high)
    return ranges


def _longest(inputs: Mapping[str, GraphInput], shapes: str | Sequence[str] | None) -> int | None:
    """The largest number of tokens that attention sees, None without a limit."""
    ranges = dimension_ranges(inputs, shapes)
    if "past" in ranges:
        return ranges["past"][1] + 1
    return ranges.get("sequence", (0, None))[1]


def _trace(
    module: nn.Module,
    arguments: tuple[Any, ...],
    inputs: Mapping[str, GraphInput],
    shapes: str | Sequence[str] | None,
    split: int | None = None,
) -> torch.export.ExportedProgram:
    """The module as a graph over named dimensions.

    Args:
        module: to be traced.
        arguments: examples of its positional arguments.
        inputs: of the graph, for the names of dimensions.
        shapes: limits of the named dimensions.
        split: how many inputs a `Graph` takes as a dict; it takes the rest, its KV cache, as a list.
    """
    config = getattr(getattr(module, "model", None), "config", None)
    ranges = dimension_ranges(inputs, shapes)
    longest = {"sequence": getattr(config, "max_position_embeddings", None)}
    names = {dim for x in inputs.values() for dim in x.dims if isinstance(dim, str)}
    # torch.export takes sizes of 0 and 1 for constants, so examples have at least two of everything.
    sizes = {
        dim: size
        for x in inputs.values()
        for dim, size in zip(x.dims, x.example.shape, strict=True)
        if isinstance(dim, str)
    }
    # A dimension without a limit in `shapes` ends where the model's positions end, if it is the sequence.
    highest = {name: ranges.get(name, (0, longest.get(name)))[1] for name in names}
    dims = {
        name: torch.export.Dim(name, max=None if high is None else max(high, sizes[name]))
        for name, high in sorted(highest.items())
    }
    axes = {
        name: {axis: dims[dim] for axis, dim in enumerate(x.dims) if isinstance(dim, str)} for name, x in inputs.items()
    }
    dynamic: Any = tuple(axes.values())
    if split is not None:
        dynamic = (dict(list(axes.items())[:split]), list(axes.values())[split:])
    restore_layout(module)
    try:
        with torch.no_grad():
            exported = torch.export.export(module, arguments, dynamic_shapes=dynamic, strict=False)
    except torch._dynamo.exc.UserError as error:
        text = " ".join(str(error).split())
        raise ValueError(f"{type(module).__name__} fixes a dimension that is to be dynamic: {text[:400]}") from error
    limits.check_graph(exported)
    return exported


def _translate(
    exported: torch.export.ExportedProgram,
    inputs: Mapping[str, GraphInput],
    outputs: list[str] | None,
    prefix: str,
) -> Any:
    """The ONNX model of a graph, as an `onnx_ir.Model`."""
    from onnxscript import optimizer

    # Filled by the translations: values of packed 4-bit codes, and their ONNX types.
    packed: dict[Any, int] = {}
    program = torch.onnx.export(
        exported,
        dynamo=True,
        opset_version=OPSET,
        optimize=False,
        custom_translation_table=translations(packed),
        input_names=list(inputs),
        output_names=outputs,
        verbose=False,
    )
    assert program is not None
    model = program.model
    _type_packed(packed)
    _name_layers(model, prefix)
    optimizer.optimize(model)
    _name_dims(model, inputs)
    _clean(model)
    return model


def _type_packed(packed: Mapping[Any, int]) -> None:
    """Bytes of two codes become tensors of 4-bit numbers over the same memory."""
    import onnx_ir as ir

    for value, kind in packed.items():
        # uint8 [out, in / 2]  ->  INT4 or FLOAT4E2M1 [out, in], the same bytes
        codes = value.const_value.raw.detach().contiguous()
        shape = (*codes.shape[:-1], codes.shape[-1] * 2)
        value.const_value = ir.PackedTensor(codes.numpy(), ir.DataType(kind), shape=shape, name=value.name)
        value.dtype = ir.DataType(kind)
        value.shape = ir.Shape(shape)


def _name_layers(model: Any, prefix: str) -> None:
    """Initializers get the module's own names; nodes of linears and attentions are marked with their layer's name.

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
        if "torch.ops.quant.linear.default" in source or "torch.ops.quant.conv.default" in source:
            groups.setdefault(source, []).append(node)
        elif "torch.ops.quant.onnx_attention" in source or any(op in source for op in _PLAIN_LINEARS):
            # The modules that the op was called in, outermost first, and then the op itself.
            *_, module, _ = ast.literal_eval(node.metadata_props["pkg.torch.onnx.name_scopes"])
            plain.append((module.removeprefix(prefix), node))
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
    """Dimensions get the names that `inputs` give them, in every value and in sums of them."""
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
    """The layer that a node of an exported file belongs to; empty for other nodes."""
    return next((entry.value for entry in node.metadata_props if entry.key == LAYER_KEY), "")


def _clean(model: Any) -> None:
    """Removes the exporter's metadata, such as stack traces with paths of this machine."""
    for value in [*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values()]:
        value.metadata_props.clear()
    for node in model.graph:
        layer = node.metadata_props.get(LAYER_KEY)
        node.metadata_props.clear()
        if layer is not None:
            node.metadata_props[LAYER_KEY] = layer
        for value in node.outputs:
            value.metadata_props.clear()


def _save(model: Any, path: Path) -> Path:
    """Writes the file, and above `EXTERNAL_BYTES` a second one of its weights; both or neither."""
    import onnx_ir as ir

    size = sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)
    with temporary_directory(path) as temporary:
        # The data file is put first (reverse order of names), so that a graph never stands without its weights.
        external = f"{path.name}.data" if size > EXTERNAL_BYTES else None
        ir.save(model, temporary / path.name, external_data=external)
        for file in sorted(temporary.iterdir(), reverse=True):
            put_file(file, path.parent / file.name)
        if external is None:
            (path.parent / f"{path.name}.data").unlink(missing_ok=True)
    return path


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
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
