"""Builds an engine, compares it with its plan, and describes it in a receipt.

    model ──write_onnx──▶ ONNX ──checks, profiles──▶ builder in a process of its own ──▶ engine ──audit──▶ receipt

One path serves TensorRT-RTX, which needs no GPU, and TensorRT, which needs the GPU it builds for (`gpu_targets`). The
engine and its receipt are written only if the audit passes: a layer that the plan quantizes and that TensorRT left in
half precision is an error that names it.

Before anything is built, the ONNX graph is checked and prepared:

    load_graph       the graph without its weights
    check_backend    refuses nodes that the library which builds the engine does not take
    check_graph      refuses graphs that TensorRT compiles wrongly, or that need hardware that the target lacks
    make_profiles    the ranges of shapes, as `onnx.dynamic_shapes` reads them, above the minimum of fused attention
    describe_graph   names nodes after their layers, by which the audit finds a layer in the engine, and says what the
                     engine's record holds of the graph

Each refusal names the layer and an alternative. The failing combinations were found by building them.
"""

import dataclasses
import gc
import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from quant.base.atomic import destination, put_file, temporary_directory
from quant.base.errors import option, require, warn
from quant.base.json_files import json_text, write_json
from quant.base.processor import trim_heap
from quant.export.checkpoint.files.tensor_file import sha256_of
from quant.export.onnx import dynamic_shapes
from quant.export.onnx.export_onnx import ATTENTION_KEY, EXPORT_KEY, PLAN_KEY, own_metadata, write_onnx
from quant.export.onnx.limits import external_part, layer_problem, load_graph
from quant.export.onnx.opsets import CACHE_PLUGIN, PLUGIN
from quant.export.onnx.serving import CAPACITY_KEY, IDS
from quant.export.onnx.translate import layer_of, module_of
from quant.export.tensorrt.audit import AuditRow, audit, failures, fallback_message, is_storage_only
from quant.export.tensorrt.engine_file import NAME_LIMIT, digest_of, receipt_path
from quant.export.tensorrt.gpu_targets import FEATURES, choose_common_library, resolve_targets
from quant.recipes.gpus import Hardware
from quant.recipes.plan import Plan

# -I keeps the environment and the current directory out of sys.path; the folders come as an argument.
_START = """
import json, runpy, sys
sys.path[:] = json.loads(sys.argv.pop(1))
runpy.run_module("quant.export.tensorrt.worker", run_name="__main__")
"""

Progress = Callable[[str, int, int], None]


def run_worker(
    request: Mapping[str, Any], model: Path, progress: Progress | None, environment: Mapping[str, str] | None
) -> tuple[dict[str, Any], list[str]]:
    """Runs the process that builds an engine (`worker`) to its end and returns its result and warnings.

    A builder that crashes ends only its process. The error then names the model, the exit code or signal, the ONNX node
    that was being parsed, and the last message.
    """
    last, node, outcome = "", "", dict[str, Any]()
    warned: dict[str, None] = {}
    # The current directory may hold a `quant` of anybody. It stays only where this package was imported from it.
    current, home = Path.cwd(), Path(str(sys.modules["quant"].__file__)).resolve().parents[1]
    folders = dict.fromkeys([*(Path(entry).resolve() for entry in sys.path), home])
    import_path = [str(folder) for folder in folders if folder != current or folder == home]
    with tempfile.TemporaryFile() as prints:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _START, json.dumps(import_path, allow_nan=False)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,  # for messages alone: the worker sends what libraries in C++ print to stderr
            stderr=prints,
            env=environment,
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            with process.stdin:
                process.stdin.write(json.dumps(request, allow_nan=False).encode())
            # The lines end when the worker closes its end of the pipe: it has returned, or died.
            for message in map(json.loads, process.stdout):
                if "stage" in message and progress:
                    progress(message["stage"], message["done"], message["of"])
                elif "said" in message:
                    last, node = message["said"], message["node"]
                    if message["severity"] == 2:
                        warned[last] = None
                elif "built" in message or "failed" in message:
                    outcome = message
            process.wait()
        finally:
            if process.poll() is None:  # Ctrl-C, or an error of `progress`
                process.kill()
                process.wait()
            process.stdout.close()
        prints.seek(0)
        printed = prints.read().decode("utf-8", "replace").strip()
    if process.returncode == 0 and "built" in outcome:
        return outcome["built"], list(warned)
    if "failed" in outcome:
        where = f" at node {outcome['node']}" if outcome["node"] else ""
        reason = f"cannot build this graph{where}: {_explained(outcome['failed'])}"
    else:
        where = f", at node {node}" if node else ""
        # C++ libraries print the reason of an abort; otherwise the last message is the nearest thing to one.
        said = printed.splitlines()[-1] if printed else last or "nothing"
        reason = f"died while building ({_death(process.returncode)}{where}); the last it said: {said}"
    raise ValueError(f"{destination(model)}: {request['backend']} {reason}")


def _explained(text: str) -> str:
    """Returns the builder's message, with the way out if we know one."""
    text = " ".join(text.split())
    ways_out = {
        "Attention operation was not supported by a dedicated kernel": (
            "TensorRT has no fused attention for these shapes; where attention is in FP8, let its sequences start at "
            f"{dynamic_shapes.FP8_ATTENTION_MINIMUM} ({option('shapes')}), or export with {option('attention', 'none')}"
        ),
        # TensorRT-RTX 1.7.1: a decoder whose batch is 1 throughout gets two ops of one name.
        "Graph contains more than one op named": (
            "TensorRT's compiler fails on some fixed dimensions; let the batch range from 1 to 2 "
            f"({option('shapes', 'batch=1:1:2')})"
        ),
        "HW-specific datatypes": "the target lacks hardware for one of the graph's types; choose another format",
    }
    way_out = next((way for sign, way in ways_out.items() if sign in text), "")
    return f"{way_out} ({text[:300]})" if way_out else text[:600]


def _death(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"{name}, perhaps out of memory" if name == "SIGKILL" else name


def worker_environment(request: Mapping[str, Any], folder: Path) -> dict[str, str] | None:
    """Returns the environment of the build process; None for the environment of this process.

    For a graph with a plugin the parser of TensorRT-RTX 1.7 loads `libtensorrt_rtx.so`, and its wheel has only
    `libtensorrt_rtx.so.1`: the build fails without a link of the first name.
    """
    spec = importlib.util.find_spec("tensorrt_rtx_libs")
    if not request["plugins"] or request["backend"] != "tensorrt_rtx" or spec is None:
        return None
    for library in (Path(root) / "libtensorrt_rtx.so.1" for root in spec.submodule_search_locations or ()):
        (folder / "libtensorrt_rtx.so").symlink_to(library)
    path = os.environ.get("LD_LIBRARY_PATH")
    return {**os.environ, "LD_LIBRARY_PATH": f"{folder.resolve()}{os.pathsep + path if path else ''}"}


RECEIPT_VERSION = 1
# They import torch, so the build process loads a plugin only if the graph holds it.
PLUGIN_MODULES = {PLUGIN: "quant.export.tensorrt.plugin", CACHE_PLUGIN: "quant.export.tensorrt.cache_plugin"}


@dataclass(frozen=True)
class BuildOptions:
    """The GPU and the shapes that an engine is built for."""

    target: str  # a GPU, its generation, or "local"; several with commas between them, for TensorRT-RTX
    shapes: str | Sequence[str] | None = None  # ranges, see `onnx.dynamic_shapes`; several texts, several profiles
    backend: str | None = None  # "tensorrt_rtx" or "tensorrt", to insist on one
    progress: Progress | None = None  # called as `progress(stage, done, total)`
    features: Sequence[str] = ()  # keys of `FEATURES`


@dataclass(frozen=True)
class BuiltEngine:
    """An engine file; all other fields are copied to the receipt."""

    path: Path
    warnings: list[str]  # the builder's, each message once
    target: str  # compute capability, such as `sm120`, or several of them
    backend: str  # `tensorrt_rtx` or `tensorrt`, and its version
    reason: str  # for choosing that backend
    profiles: list[str]  # ranges of shapes, as `--shapes` writes them
    contents: dict[str, Any]  # of `describe_graph`, and "export": the options of its export, None if it does not say
    kv_cache: str | None  # format of its KV cache in our plugin; None for other caches, or none
    seconds: float
    peak_rss_bytes: int  # peak memory of the build process


def export_engine(
    model: nn.Module | str | Path, out: str | Path, options: BuildOptions, *, plan: Plan | None = None,
    attention: str = "native", allow_fallback: bool = False, layers: Sequence[Mapping[str, Any]] = (),
    **onnx_options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Exports, builds and audits; writes `out` and its receipt `<out>.json`, and returns the receipt.

    `model` is a quantized module, or its ONNX file; `layers` are comparisons of earlier stages for the receipt, and
    `onnx_options` go to `write_onnx`. Raises ValueError if something cannot be exported, built or
    targeted, or if the audit fails; nothing is written then.
    """
    out = Path(out)
    storage = [layer for layer in plan.quantized if is_storage_only(layer)] if plan else []
    if storage:
        warn(
            f"{len(storage)} layers in {storage[0].weight} are stored in 8 bit and multiplied in half precision: "
            "TensorRT has no GEMM for them; fp8 and nvfp4 layers are multiplied as they are"
        )
    # The export takes minutes, so first find out whether anything on this machine builds for the target.
    choose_common_library(resolve_targets(options.target), options.backend, options.features)
    with temporary_directory(out) as folder:
        if isinstance(model, nn.Module):
            path = folder / "model.onnx"
            model = write_onnx(model, path, plan=plan, shapes=options.shapes, attention=attention, **onnx_options)
        built = build_engine(model, folder / out.name, options)
        findings = audit_built(built, plan, attention)
        problems = failures(findings)
        if problems and not allow_fallback:
            raise ValueError(fallback_message(problems))
        engine = {key: value for key, value in vars(built).items() if key not in ("path", "warnings")}
        receipt = {
            "schema_version": RECEIPT_VERSION,
            "passed": not problems and all(layer["passed"] for layer in layers),
            "layers": [dict(layer) for layer in layers],
            "audit": [dataclasses.asdict(finding) for finding in findings],
            "fallbacks": problems,
            "warnings": built.warnings,
            "plan": plan.digest() if plan else None,
            "engine": {"file": out.name, "bytes": built.path.stat().st_size, "sha256": sha256_of(built.path), **engine},
        }
        # The engine first: a receipt never describes an engine that is not there.
        put_file(built.path, out)
        write_json(receipt_path(out), receipt)
    return receipt


def build_engine(onnx_path: str | Path, out: str | Path, options: BuildOptions) -> BuiltEngine:
    """Builds the engine of an ONNX file in a process of its own.

    Raises ValueError if the graph, a shape or the target cannot be built, or the builder failed or died; the message
    names the model, and the node if it is known. `out` appears when it is complete.
    """
    onnx_path, out = Path(onnx_path), Path(out)
    targets = resolve_targets(options.target)
    library = choose_common_library(targets, options.backend, options.features)
    model = load_graph(onnx_path)
    for target in targets:
        check_graph(model, target)
    check_backend(model, library.module)
    profiles = make_profiles(model, options.shapes)
    # Builders name nodes in their messages, and engines in the list of their kernels: both then name the layer.
    described = describe_graph(model, onnx_path.parent)
    target_names = ",".join(target.sm for target in targets)
    metadata = own_metadata(model)
    contents = {"export": json.loads(metadata[EXPORT_KEY]) if EXPORT_KEY in metadata else None, **described}
    # The audit reads this from the engine itself, and the contents from its receipt where they are too long for a name.
    record: dict[str, Any] = {"plan": metadata.get(PLAN_KEY), "attention": metadata.get(ATTENTION_KEY)}
    record |= {"target": target_names, "features": list(options.features), "contents": contents}
    if len(json_text(record)) > NAME_LIMIT:
        record["contents"] = digest_of(contents)
    with temporary_directory(out) as folder:
        graph, engine = folder / "graph.onnx", folder / "engine"
        graph.write_bytes(model.SerializeToString())
        request = {
            "backend": library.module,
            "graph": str(graph),
            "model": str(onnx_path.resolve()),
            "engine": str(engine),
            "compute_capabilities": [target.sm.upper() for target in targets],
            "flags": [flag for feature in options.features for flag in FEATURES[feature]],
            "profiles": profiles,
            "record": json_text(record),
            "plugins": sorted({PLUGIN_MODULES[n.op_type] for n in model.graph.node if n.op_type in PLUGIN_MODULES}),
        }
        del model  # the graph is in memory once, in the build process
        # The export's graphs refer to each other in cycles; the builder next to them takes a gigabyte.
        gc.collect()
        trim_heap()
        started = time.perf_counter()
        environment = worker_environment(request, folder)
        result, messages = run_worker(request, onnx_path, options.progress, environment)
        seconds = time.perf_counter() - started
        put_file(engine, out)
    return BuiltEngine(
        path=out, warnings=messages, target=target_names, backend=f"{library.module} {result['version']}",
        reason=library.reason, profiles=[dynamic_shapes.format_profile(profile) for profile in profiles],
        contents=contents, kv_cache=(contents["export"] or {}).get("kv_cache"), seconds=round(seconds, 2),
        peak_rss_bytes=result["peak_rss_bytes"],
    )  # fmt: skip


def audit_built(built: BuiltEngine, plan: Plan | None, attention: str = "native") -> list[AuditRow]:
    """Audits an engine just built, with the layers and attention nodes of its graph."""
    required, nodes = "half" if attention == "none" else None, built.contents["attention_nodes"]
    # A graph need not name its layers.
    layers = built.contents["layers"] or None
    dtypes = (built.contents["export"] or {}).get("dtypes")
    return audit(built.path, plan, attention=required, attention_nodes=nodes, exported=layers, dtypes=dtypes)


def summary(receipt: Mapping[str, Any]) -> list[str]:
    """Returns a summary of an engine, one line each: its builder, its shapes, and its precisions."""
    if "engine" not in receipt:
        return []
    engine, rows = receipt["engine"], receipt["audit"]
    precisions = Counter(row["found"] for row in rows)
    # The shape of the KV cache, in two inputs for each layer, follows from the rows.
    shapes = [",".join(x for x in text.split(",") if not x.startswith("past_")) for text in engine["profiles"]]
    return [
        f"{engine['reason']} ({engine['seconds']:.0f} s, {engine['peak_rss_bytes'] / 1e9:.1f} GB)",
        *(f"shapes {text}" for text in shapes),
        "runs in " + ", ".join(f"{word}: {count}" for word, count in precisions.most_common()),
        *(f"fallback {problem}" for problem in receipt["fallbacks"]),
    ]


# Op types that become one attention each.
ATTENTION = ("Attention", "TRT_QuantizedAttention", PLUGIN, CACHE_PLUGIN)
# Ops whose output has the shape of their first input.
_SAME_SHAPE = ("Cast", "DequantizeLinear", "Identity", "Mul", "QuantizeLinear")
_LONGEST_CHUNK = 512  # of a prompt, in the default profile
_SMALL_GROUP = 32  # of INT4 weights
_FEWEST_HEADS = 4  # of attention with a single query, in half precision
# What types need of the hardware, by what their names in ONNX, PyTorch and a format have in common.
_FEATURES = {"e2m1": "FP4", "e4m3": "FP8", "int4": "INT4", "bfloat16": "BF16"}


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


def make_profiles(model: Any, shapes: str | Sequence[str] | None) -> list[dynamic_shapes.Shapes]:
    """Returns the optimization profiles of a graph, none if its shapes are fixed; ValueError as in `parse_profile`."""
    inputs = dynamic_shapes.graph_inputs(model)
    floors = attention_floors(model, inputs)
    texts = dynamic_shapes.as_profiles(shapes)
    stored = own_metadata(model).get(CAPACITY_KEY)
    if stored is None:
        profiles = [dynamic_shapes.parse_profile(text, inputs, floors) for text in texts or [""]]
        return profiles if any(item.is_dynamic for item in inputs) else []
    # One token a row is a profile of its own: its kernels differ from the kernels for a long sequence. By default that
    # is for many rows, and chunks of prompts are for a few.
    capacity, floor = int(stored), max(1, floors.get("sequence", 1))
    longest = min(_LONGEST_CHUNK, capacity)
    chunks = f"batch=1:1:8,sequence={floor}:{max(floor, longest // 2)}:{longest}"
    texts = texts or ["batch=1:8:32,sequence=1:1:1", chunks]
    profiles = [dynamic_shapes.parse_profile(text, inputs, {}, capacity) for text in texts]
    for profile in profiles:
        (_, low), _, (_, high) = profile[IDS]
        dynamic_shapes.check_sequence(high, capacity)
        if high > 1 and low < floor:
            raise ValueError(
                f"{option('shapes')}: sequence starts at {low}, and TensorRT's fused FP8 attention needs one token or "
                f"at least {floor}: start it there, or export with {option('attention', 'none')}"
            )
    return profiles


def attention_floors(model: Any, inputs: Sequence[dynamic_shapes.Input]) -> dict[str, int]:
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
            elif sequence < dynamic_shapes.FP8_ATTENTION_MINIMUM:
                raise ValueError(
                    f"{_node_label(node)}: FP8 attention over a fixed sequence of {sequence}; TensorRT fuses it for "
                    f"one query, or from {dynamic_shapes.FP8_ATTENTION_MINIMUM} on: pad the sequence, or export with "
                    f"{option('attention', 'none')}"
                )
    return dict.fromkeys(sorted(floors), dynamic_shapes.FP8_ATTENTION_MINIMUM)


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
    names = Counter([*(x.name for x in graph.initializer), *(x.values.name for x in graph.sparse_initializer)])
    for name in (name for name, count in names.items() if count > 1):  # onnxruntime reads the first, and none sparse
        wiring["numbers of one name"].update(name.encode())
    sources = {name: f"{tensor.data_type} {list(tensor.dims)}" for name, tensor in constants.items()}
    sources |= {value.name: value.name for value in graph.input if value.name not in constants}
    wiring["the graph's opsets"].update(repr(sorted((x.domain, x.version) for x in model.opset_import)).encode())
    for function in model.functions:  # which may stand in the place of an operator
        wiring["the graph's opsets"].update(function.SerializeToString(deterministic=True))
    places: Counter[str] = Counter()
    for node in graph.node:
        module = layer_of(node) or module_of(node) or "the graph's own nodes"
        attributes = sorted(attribute.SerializeToString(deterministic=True) for attribute in node.attribute)
        read = [sources.get(name, name) for name in node.input]
        wiring[module].update(repr((node.domain, node.op_type, attributes, read)).encode())
        for tensor in (constants[name] for name in node.input if name in constants):
            if tensor.data_location != tensor.EXTERNAL:  # whatever `external_data` names then is not read
                numbers[module].update(tensor.raw_data or require("onnx_ir", "onnx").from_proto(tensor).tobytes())
            elif (part := external_part(tensor, folder))[2]:
                numbers[module].update(np.memmap(part[0], np.uint8, "r", part[1], (part[2],)))
        places[module] += 1
        sources |= {name: f"{module} {places[module]}.{index}" for index, name in enumerate(node.output)}
    for kind, values in (("the graph's inputs", graph.input), ("the graph's outputs", graph.output)):
        for value in values:
            kinds = value.type.SerializeToString(deterministic=True)
            wiring[kind].update(repr((value.name, kinds, sources.get(value.name))).encode())
    return {name: digest.hexdigest()[:8] + numbers[name].hexdigest()[:8] for name, digest in wiring.items()}


def _block_size(node: Any) -> int:
    return next((attribute.i for attribute in node.attribute if attribute.name == "block_size"), 0)


def _node_label(node: Any) -> str:
    layer = layer_of(node)
    return f"{layer} ({node.op_type})" if layer else f"node {node.name or node.output[0]} ({node.op_type})"
