"""Checks and prepares an ONNX graph before an engine is built from it.

    load_graph       the graph without its weights
    check_backend    refuses nodes that the library which builds the engine does not take
    check_graph      refuses graphs that TensorRT compiles wrongly, or that need hardware that the target lacks
    make_profiles    the ranges of shapes, as `onnx.dynamic_shapes` reads them, above the minimum of fused attention
    describe_graph   names nodes after their layers, by which the audit finds a layer in the engine, and says what the
                     engine's record holds of the graph

Each refusal names the layer and an alternative. The failing combinations were found by building them.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from quant.base.errors import option, require
from quant.export.onnx.dynamic_shapes import (
    FP8_ATTENTION_MINIMUM,
    Input,
    Shapes,
    as_profiles,
    check_sequence,
    graph_inputs,
    parse_profile,
)
from quant.export.onnx.limits import layer_problem
from quant.export.onnx.opsets import CACHE_PLUGIN, PLUGIN
from quant.export.onnx.serving import CAPACITY_KEY, IDS
from quant.export.onnx.translate import layer_of, module_of
from quant.recipes.gpus import Hardware
from quant.recipes.plan import Plan

# Op types that become one attention each.
ATTENTION = ("Attention", "TRT_QuantizedAttention", PLUGIN, CACHE_PLUGIN)
# Ops whose output has the shape of their first input.
_SAME_SHAPE = ("Cast", "DequantizeLinear", "Identity", "Mul", "QuantizeLinear")
_LONGEST_CHUNK = 512  # of a prompt, in the default profile
_SMALL_GROUP = 32  # of INT4 weights
_FEWEST_HEADS = 4  # of attention with a single query, in half precision
# What types need of the hardware, by what their names in ONNX, PyTorch and a format have in common.
_FEATURES = {"e2m1": "FP4", "e4m3": "FP8", "int4": "INT4", "bfloat16": "BF16"}


def load_graph(path: Path) -> Any:
    """Loads the ONNX model in a file, its external data left on disk; ValueError if the file holds none."""
    onnx = require("onnx", "onnx")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such ONNX file")
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf's own exception class, which is in no fixed module
        raise ValueError(f"{path}: not an ONNX file ({error})") from error
    if not model.graph.node:
        raise ValueError(f"{path}: not an ONNX file, or one without a graph")
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location" and not (path.parent / entry.value).is_file():
                raise ValueError(f"{path}: its weights {entry.value} are missing; the two files belong together")
    return model


def check_graph(model: Any, target: Hardware) -> None:
    """Raises ValueError for the first node that TensorRT miscompiles or the target cannot run, by layer."""
    onnx = require("onnx", "onnx")
    types = {tensor.name: onnx.TensorProto.DataType.Name(tensor.data_type) for tensor in model.graph.initializer}
    producer = {name: node for node in model.graph.node for name in node.output}
    shapes = _shapes(model)
    for node in model.graph.node:
        for problem in _node_problems(node, types, producer, shapes, target):
            raise ValueError(f"{_node_label(node)}: {problem}")


def check_tensors(model: nn.Module, plan: Plan | None, target: Hardware) -> None:
    """Raises ValueError for the first weight that the target cannot compute with, before an export takes its time."""
    kinds = [(name, str(tensor.dtype)) for name, tensor in model.named_parameters()]
    weights = [(layer.name, layer.weight) for layer in (plan.quantized if plan else ()) if layer.weight]
    # The export refuses what no target has, and names another format.
    weights = [(name, weight) for name, weight in weights if layer_problem(weight, None, ()) is None]
    kinds += [(name, number.name) for name, weight in weights for number in (weight.scale, weight.element)]
    for name, problem in ((name, problem) for name, kind in kinds for problem in _lacks(kind, target)):
        raise ValueError(f"{name}: {problem}")


def _lacks(kind: str, target: Hardware) -> Iterator[str]:
    feature = next((feature for part, feature in _FEATURES.items() if part in kind.lower()), None)
    is_old = target.capability < (8, 0)
    if feature == "FP4" and not target.has_block_scales:
        yield f"{target} has no FP4; use fp8 or int4 for it, or target sm120"
    if feature == "FP8" and not target.has_fp8:
        yield f"{target} has no FP8; use int8{'' if is_old else ' or int4'} for it, or target sm89 or later"
    if feature in ("INT4", "BF16") and is_old:
        way_out = "use int8 for it" if feature == "INT4" else f"pass {option('dtype', 'fp16')}"
        yield f"{target} has no {feature}; {way_out}, or target sm80 or later"


def _node_problems(
    node: Any, types: Mapping[str, str], producer: Mapping[str, Any], shapes: Mapping[str, Any], target: Hardware
) -> Iterator[str]:
    """Yields reasons why TensorRT does not run a node as it is."""
    for name in node.input:
        yield from _lacks(types.get(name, ""), target)
    # x ─> QuantizeLinear ─> DequantizeLinear ─┐
    # codes ───────────────> DequantizeLinear ─┴─> MatMul      codes are an initializer, and so have an entry in `types`
    if node.op_type == "MatMul":
        sources: list[Any] = [producer.get(name) for name in node.input]
        for index, source in enumerate(sources):
            while source is not None and source.op_type in ("Cast", "CastLike", "Transpose"):
                source = sources[index] = producer.get(source.input[0])
        if all(source is not None and source.op_type == "DequantizeLinear" for source in sources):
            weight = next((s for s in sources if types.get(s.input[0])), None)
            inputs = next((s for s in sources if not types.get(s.input[0])), None)
            blocked = weight is not None and _block_size(weight) > 0
            source = producer.get(inputs.input[0]) if inputs is not None else None
            if blocked and weight is not None and source is not None and source.op_type == "QuantizeLinear":
                kind = types[weight.input[0]]
                yield (
                    f"TensorRT miscompiles {kind} weights in blocks along the inputs when the input is quantized "
                    "too: it reads only the first scale of a row; use one scale a channel, or 16-bit inputs"
                )
    if node.op_type == "Attention":
        dims = shapes.get(node.input[0], ())  # q [batch, heads, sequence, dim]; a size that is not stated is 0
        heads, queries = (dims[1].dim_value, dims[2].dim_value) if len(dims) == 4 else (0, 0)
        if queries == 1 and 0 < heads < _FEWEST_HEADS:
            yield (
                f"TensorRT has no kernel for attention of one query with {heads} heads; it has from {_FEWEST_HEADS} "
                "on; let PyTorch or vLLM decode"
            )


def check_backend(model: Any, backend: str) -> None:
    """Raises ValueError for the first node that `backend`, a key of `EXTRAS`, does not build; by layer."""
    if backend != "tensorrt":
        return
    for node in model.graph.node:
        if node.op_type == CACHE_PLUGIN:
            raise ValueError(
                f"{_node_label(node)}: full TensorRT takes this plugin of several kernels from its C++ library alone; "
                f"pass {option('backend', 'tensorrt_rtx')}, or export with {option('kv_cache', '16bit')}"
            )
        if node.op_type == "DequantizeLinear" and _block_size(node) == _SMALL_GROUP:
            raise ValueError(
                f"{_node_label(node)}: full TensorRT has weights in groups of 64 and 128, these are of {_SMALL_GROUP}; "
                f"pass {option('backend', 'tensorrt_rtx')}, or use int4 or int4_g64"
            )


def make_profiles(model: Any, shapes: str | Sequence[str] | None) -> list[Shapes]:
    """Returns the optimization profiles of a graph, none if its shapes are fixed; ValueError as in `parse_profile`."""
    inputs = graph_inputs(model)
    floors = attention_floors(model, inputs)
    texts = as_profiles(shapes)
    capacity = cache_capacity(model)
    if capacity is None:
        profiles = [parse_profile(text, inputs, floors) for text in texts or [""]]
        return profiles if any(item.is_dynamic for item in inputs) else []
    # One token a row is a profile of its own: its kernels differ from the kernels for a long sequence. By default that
    # is for many rows, and chunks of prompts are for a few.
    floor, longest = max(1, floors.get("sequence", 1)), min(_LONGEST_CHUNK, capacity)
    chunks = f"batch=1:1:8,sequence={floor}:{max(floor, longest // 2)}:{longest}"
    texts = texts or ["batch=1:8:32,sequence=1:1:1", chunks]
    profiles = [parse_profile(text, inputs, {}, capacity) for text in texts]
    for profile in profiles:
        (_, low), _, (_, high) = profile[IDS]
        check_sequence(high, capacity)
        if high > 1 and low < floor:
            raise ValueError(
                f"{option('shapes')}: sequence starts at {low}, and TensorRT's fused FP8 attention needs one token or "
                f"at least {floor}: start it there, or export with {option('attention', 'none')}"
            )
    return profiles


def cache_capacity(model: Any) -> int | None:
    """Returns how many tokens the KV cache of a serving graph holds; None for other graphs."""
    return next((int(entry.value) for entry in model.metadata_props if entry.key == CAPACITY_KEY), None)


def attention_floors(model: Any, inputs: Sequence[Input]) -> dict[str, int]:
    """Returns the smallest value of each dimension that is the sequence of a quantized attention.

    Raises ValueError for a fixed sequence that has no fused kernel.
    """
    nodes = [node for node in model.graph.node if node.op_type == "TRT_QuantizedAttention"]
    if not nodes:
        return {}
    shapes = _shapes(model)
    producer = {name: node for node in model.graph.node for name in node.output}
    named = {dim for item in inputs for dim in item.dims if isinstance(dim, str)}
    floors: set[str] = set()
    for node in nodes:
        # The sequence of q, k and v `[batch, heads, sequence, dim]`: a number, a name, or None if it is not stated.
        sequences: list[int | str | None] = []
        for name in node.input[:3]:
            while name not in shapes and name in producer and producer[name].op_type in _SAME_SHAPE:
                name = producer[name].input[0]
            dim = shapes[name][-2] if shapes.get(name) else None
            sequences.append(dim and (dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None))
        # A single query, as in decoding, has a fused kernel for any number of keys.
        if sequences[0] == 1:
            continue
        for sequence in sequences:
            if sequence is None:
                # The graph does not state it: any dimension but the batch may be a sequence.
                floors |= named - {item.dims[0] for item in inputs if item.dims}
            elif isinstance(sequence, str):
                floors |= {sequence} & named
            elif sequence < FP8_ATTENTION_MINIMUM:
                raise ValueError(
                    f"{_node_label(node)}: FP8 attention over a fixed sequence of {sequence}; TensorRT fuses it for "
                    f"one query, or from {FP8_ATTENTION_MINIMUM} on: pad the sequence, or export with "
                    f"{option('attention', 'none')}"
                )
    return dict.fromkeys(sorted(floors), FP8_ATTENTION_MINIMUM)


def _shapes(model: Any) -> dict[str, Any]:
    """Returns the dimensions of every value whose shape the file states."""
    return {value.name: value.type.tensor_type.shape.dim for value in (*model.graph.value_info, *model.graph.input)}


def describe_graph(model: Any, folder: Path) -> dict[str, Any]:
    """Names every node of a module `<module>/<op type>`, and returns what the audit needs to know of the graph.

    Its linear `layers`, the names of its `attention_nodes`, and the digests of its `graph` (`_digests`). A node of a
    layer's low-rank branch is `<layer>/branch/<op type>`, since the MatMul of a layer's own is its GEMM. Weights that
    lie in a file of their own are read from `folder`.
    """
    names = {node.name for node in model.graph.node}
    layers = {layer_of(node) for node in model.graph.node}
    attention, attending = [], set()
    for index, node in enumerate(model.graph.node):
        layer, module = layer_of(node), module_of(node)
        if not layer and module:
            layer = f"{module}/branch" if module in layers and node.op_type in ("MatMul", "Gemm") else module
        if layer or not node.name:
            label = f"{layer or 'graph'}/{node.op_type}"
            node.name = label if label not in names else f"{label}_{index}"
            names.add(node.name)
        if node.op_type in ATTENTION:
            attention.append(node.name)
            attending.add(layer_of(node))
    linear = dict.fromkeys(map(layer_of, model.graph.node))
    return {
        "layers": [layer for layer in linear if layer and layer not in attending],
        "attention_nodes": attention,
        "graph": _digests(model, folder),
    }


def _digests(model: Any, folder: Path) -> dict[str, str]:
    """Returns two digests of each module's nodes, of eight digits each: how they are wired, and their numbers.

    A value is known by the module and the position in it of the node that writes it, so a node too many in one module
    changes the digest of that module, and of those that read another value than before.
    """
    graph = model.graph
    wiring: dict[str, Any] = defaultdict(hashlib.sha256)
    numbers: dict[str, Any] = defaultdict(hashlib.sha256)
    constants = {tensor.name: tensor for tensor in graph.initializer}
    sources = {name: f"{tensor.data_type} {list(tensor.dims)}" for name, tensor in constants.items()}
    sources |= {value.name: value.name for value in graph.input if value.name not in constants}
    wiring["the graph's opsets"].update(repr(sorted((x.domain, x.version) for x in model.opset_import)).encode())
    places: Counter[str] = Counter()
    for node in graph.node:
        module = layer_of(node) or module_of(node) or "the graph's own nodes"
        attributes = sorted(attribute.SerializeToString(deterministic=True) for attribute in node.attribute)
        read = [sources.get(name, name) for name in node.input]
        wiring[module].update(repr((node.domain, node.op_type, attributes, read)).encode())
        for name in node.input:
            if name in constants:
                numbers[module].update(_tensor_bytes(constants[name], folder))
        places[module] += 1
        sources |= {name: f"{module} {places[module]}.{index}" for index, name in enumerate(node.output)}
    for kind, values in (("the graph's inputs", graph.input), ("the graph's outputs", graph.output)):
        for value in values:
            kinds = value.type.SerializeToString(deterministic=True)
            wiring[kind].update(repr((value.name, kinds, sources.get(value.name))).encode())
    return {name: digest.hexdigest()[:8] + numbers[name].hexdigest()[:8] for name, digest in wiring.items()}


def _tensor_bytes(tensor: Any, folder: Path) -> Any:
    """Returns the numbers of an initializer as bytes; those in a file of their own are mapped."""
    where = {entry.key: entry.value for entry in tensor.external_data}
    if not where:
        return tensor.raw_data or require("onnx", "onnx").numpy_helper.to_array(tensor).tobytes()
    offset, length = int(where.get("offset", 0)), int(where["length"])
    return np.memmap(folder / where["location"], np.uint8, "r", offset, (length,)) if length else b""


def _block_size(node: Any) -> int:
    return next((attribute.i for attribute in node.attribute if attribute.name == "block_size"), 0)


def _node_label(node: Any) -> str:
    layer = layer_of(node)
    return f"{layer} ({node.op_type})" if layer else f"node {node.name or node.output[0]} ({node.op_type})"
