"""TensorRT engines: build, prove what is in them, and say so in a receipt.

    model ──export_onnx──▶ ONNX ──checks, profiles──▶ builder in a process of its own ──▶ engine ──audit──▶ receipt

One path serves TensorRT-RTX, which needs no GPU, and TensorRT, which needs the GPU it builds for (`engine_targets`).
The engine and its receipt appear when the audit has passed, and not before: a layer that the plan quantizes and that
TensorRT left in half precision is an error that names it.

TensorRT accepts some graphs that it then compiles wrongly. `check_graph` refuses those, and what the target has no
hardware for, before anything is built.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from quant.export.audit import Finding, audit, failures
from quant.export.engine_codes import held_codes
from quant.export.engine_shapes import (
    FP8_ATTENTION_MINIMUM,
    Input,
    Shapes,
    format_profile,
    graph_inputs,
    parse_profile,
)
from quant.export.engine_targets import Target, choose_backend, resolve_target
from quant.recipes.plan import Plan

Progress = Callable[[str, int, int], None]

LAYER_KEY = "blockscale.layer"  # metadata of an ONNX node: the layer of the plan that it belongs to
PLAN_KEY = "blockscale.plan"
PLUGIN = "QuantFp8Attention"
QUANTIZED_ATTENTION = ("TRT_QuantizedAttention", PLUGIN)
ATTENTION = ("Attention", *QUANTIZED_ATTENTION)
RECEIPT_VERSION = 1
_SAME_SHAPE = ("Cast", "DequantizeLinear", "Identity", "Mul", "QuantizeLinear")
_CODES = ".codes"
_CODE_BITS = {"FLOAT4E2M1": 4, "INT4": 4, "FLOAT8E4M3FN": 8, "INT8": 8}
_FEATURES = {"FLOAT4E2M1": "FP4", "FLOAT8E4M3FN": "FP8"}
_NOT_IMPORTED = {
    "FLOAT8E5M2": "E5M2 numbers; use fp8 (E4M3)",
    "FLOAT8E8M0": "E8M0 scales as FLOAT8E8M0; export them as UINT8 through TRT_MXFP8DequantizeLinear",
    "UINT4": "unsigned 4-bit weights; use int4",
}


@dataclass(frozen=True)
class Built:
    """An engine file and how it came about.

    Attributes:
        path: of the engine.
        target: compute capability it is for, as `sm120`.
        backend: `tensorrt_rtx` or `tensorrt`, and its version.
        reason: why that backend.
        profiles: ranges of shapes it takes, as `--shapes` writes them.
        layers: the quantized layers in its graph; empty where the graph does not name them.
        attention_nodes: names of the attention nodes of its graph.
        warnings: what the builder warned of, each message once.
        seconds: the build took.
        peak_rss_bytes: of the process that built it.
    """

    path: Path
    target: str
    backend: str
    reason: str
    profiles: tuple[str, ...]
    layers: tuple[str, ...]
    attention_nodes: tuple[str, ...]
    warnings: tuple[str, ...]
    seconds: float
    peak_rss_bytes: int


def export_engine(
    model: nn.Module | str | Path,
    out: str | Path,
    *,
    target: str,
    plan: Plan | None = None,
    shapes: str | Sequence[str] | None = None,
    attention: str = "native",
    allow_fallback: bool = False,
    backend: str | None = None,
    progress: Progress | None = None,
    layers: Sequence[Mapping[str, Any]] = (),
    **onnx_options: Any,
) -> dict[str, Any]:
    """Exports, builds, audits; writes `out` and the receipt beside it, `<out>.json`.

    Args:
        model: a quantized module, or an ONNX file of one.
        out: the engine file.
        target: key of `TARGETS`, or "local".
        plan: what the model follows; the engine is compared with it.
        shapes: range of every dynamic dimension, see `engine_shapes`; several texts make several profiles.
        attention: "native", "plugin" or "none": what runs FP8 attention where the plan has it.
        allow_fallback: lets layers that run in half precision pass; the receipt still names them.
        backend: insists on "tensorrt_rtx" or "tensorrt".
        progress: called as `progress(stage, done, total)`.
        layers: comparisons of earlier stages by layer, for the receipt.
        onnx_options: further options of `export_onnx`.

    Returns:
        The receipt, as written: `passed`, `audit` (one `{"name", "planned", "found", "passed"}` a layer), `layers`,
        `codes_found` and `codes_not_found` (layers whose codes lie in the engine byte for byte, and the others),
        `engine` (file, bytes, SHA-256, target, backend, profiles, seconds, memory), `fallbacks`, `warnings`.

    Raises:
        ValueError: something cannot be exported, built or targeted, or the audit failed; nothing is written.
    """
    out = Path(out)
    profiles = _as_profiles(shapes)
    # Before the export, which takes longer than finding out that nothing here builds for the target.
    choose_backend(resolve_target(target), backend)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
        if isinstance(model, nn.Module):
            from quant.export.onnx import export_onnx

            path = Path(folder) / "model.onnx"
            model = export_onnx(model, path, plan=plan, shapes=profiles or None, attention=attention, **onnx_options)
        built = build_engine(
            model, Path(folder) / out.name, target=target, shapes=profiles, backend=backend, progress=progress
        )
        findings = audit_built(built, plan, attention)
        problems = failures(findings)
        if problems and not allow_fallback:
            raise ValueError(fallback_message(problems))
        held = held_codes(built.path, *stored_codes(Path(model)))
        receipt = _receipt(built, out, findings, problems, layers, plan)
        receipt["codes_found"] = [name for name, found in held.items() if found]
        receipt["codes_not_found"] = [name for name, found in held.items() if not found]
        text = json.dumps(receipt, indent=1) + "\n"
        (Path(folder) / "receipt.json").write_text(text, encoding="utf-8")
        os.replace(built.path, out)
        os.replace(Path(folder) / "receipt.json", receipt_path(out))
    return receipt


def build_engine(
    onnx_path: str | Path,
    out: str | Path,
    *,
    target: str,
    shapes: str | Sequence[str] | None = None,
    backend: str | None = None,
    progress: Progress | None = None,
) -> Built:
    """Builds the engine of an ONNX file, in a process of its own.

    Args:
        onnx_path: the model; external data are read from beside it.
        out: the engine file; appears when it is complete.
        target, shapes, backend, progress: see `export_engine`.

    Raises:
        ValueError: the graph, a shape or the target cannot be built, or the builder failed or died; the message names
            the model, and the node where it is known. `out` is left as it was.
    """
    onnx_path, out = Path(onnx_path), Path(out)
    chosen_target = resolve_target(target)
    chosen = choose_backend(chosen_target, backend)
    model = _load_graph(onnx_path)
    check_graph(model, chosen_target)
    profiles = make_profiles(model, shapes)
    layers = tuple(dict.fromkeys(filter(None, map(_layer_of, model.graph.node))))
    attention_nodes = label_nodes(model)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
        graph, engine = Path(folder) / "graph.onnx", Path(folder) / "engine"
        graph.write_bytes(model.SerializeToString())
        request = {
            "backend": chosen.module,
            "graph": str(graph),
            "model": str(onnx_path.resolve()),
            "engine": str(engine),
            "compute_capability": chosen_target.sm.upper(),
            "profiles": profiles,
            "plugin": any(node.op_type == PLUGIN for node in model.graph.node),
            "timing_cache": _timing_cache(chosen.module, chosen_target),
        }
        del model
        started = time.perf_counter()
        built, warnings = _run_worker(request, onnx_path, progress, _environment(request, Path(folder)))
        seconds = time.perf_counter() - started
        os.replace(engine, out)
    return Built(
        path=out,
        target=chosen_target.sm,
        backend=f"{chosen.module} {built['version']}",
        reason=chosen.reason,
        profiles=tuple(format_profile(profile) for profile in profiles),
        layers=layers,
        attention_nodes=tuple(attention_nodes),
        warnings=tuple(warnings),
        seconds=seconds,
        peak_rss_bytes=built["peak_rss_bytes"],
    )


def stored_codes(onnx_path: Path) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Stored bytes of each quantized linear of an exported file, as uint8 `[out, …]`, and bits of a code."""
    model = _load_graph(onnx_path)
    names = _require("onnx").TensorProto.DataType
    codes, bits = {}, {}
    for tensor in model.graph.initializer:
        width = _CODE_BITS.get(names.Name(tensor.data_type))
        if width and tensor.name.endswith(_CODES) and len(tensor.dims) == 2:
            layer = tensor.name.removesuffix(_CODES)
            codes[layer] = _bytes_of(tensor, onnx_path.parent).reshape(tensor.dims[0], -1)
            bits[layer] = width
    return codes, bits


def _bytes_of(tensor: Any, folder: Path) -> np.ndarray:
    """The data of an initializer; those in a file of their own are mapped, not read."""
    place = {entry.key: entry.value for entry in tensor.external_data}
    if not place:
        return np.frombuffer(tensor.raw_data, np.uint8)
    start, length = int(place.get("offset", 0)), int(place["length"])
    return np.memmap(folder / place["location"], np.uint8, "r", start, (length,))


def audit_built(built: Built, plan: Plan | None, attention: str = "native") -> list[Finding]:
    """The audit of an engine just built, its attention nodes known."""
    wanted = "half" if attention == "none" else None
    return audit(
        built.path,
        plan,
        attention=wanted,
        attention_nodes=built.attention_nodes,
        exported=built.layers or None,
    )


def fallback_message(problems: Sequence[str]) -> str:
    """The error for layers that do not run as planned."""
    shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
    return (
        f"not run as planned in the engine: {shown}. Change the formats in the plan, or "
        "pass --allow-fallback to take the engine as it is"
    )


def summary(receipt: Mapping[str, Any]) -> list[str]:
    """What a user should know of an engine, a line each: who built it, for which shapes, and what runs in it."""
    if "engine" not in receipt:
        return []
    engine, rows = receipt["engine"], receipt["audit"]
    found = Counter(row["found"] for row in rows)
    lines = [
        f"{engine['reason']} ({engine['seconds']:.0f} s, {engine['peak_rss_bytes'] / 1e9:.1f} GB)",
        *(f"shapes {profile}" for profile in engine["profiles"]),
        "runs in " + ", ".join(f"{word}: {count}" for word, count in found.most_common()),
        f"{len(receipt['codes_found'])} layers' codes lie in the engine byte for byte",
    ]
    if receipt["codes_not_found"]:
        lines.append(f"stored in another layout, and so not compared: {', '.join(receipt['codes_not_found'])}")
    return [*lines, *(f"fallback {problem}" for problem in receipt["fallbacks"])]


def receipt_path(engine: str | Path) -> Path:
    """Where the receipt of an engine lies."""
    return Path(f"{engine}.json")


def check_graph(model: Any, target: Target) -> None:
    """Refuses what TensorRT would miscompile or the target has no hardware for.

    Args:
        model: an ONNX model; weights may be left out.
        target: the GPU.

    Raises:
        ValueError: the first such node, by layer, with an alternative.
    """
    onnx = _require("onnx")
    types = {tensor.name: onnx.TensorProto.DataType.Name(tensor.data_type) for tensor in model.graph.initializer}
    producer = {name: node for node in model.graph.node for name in node.output}
    for node in model.graph.node:
        for problem in _node_problems(node, types, producer, target):
            raise ValueError(f"{_place(node)}: {problem}")


def make_profiles(model: Any, shapes: str | Sequence[str] | None) -> list[Shapes]:
    """The optimization profiles of a graph; none where its shapes are fixed.

    Raises:
        ValueError: see `parse_profile`.
    """
    inputs = graph_inputs(model)
    floors = attention_floors(model, inputs)
    texts = _as_profiles(shapes)
    if not any(item.is_dynamic for item in inputs):
        for text in texts:
            parse_profile(text, inputs, floors)
        return []
    return [parse_profile(text, inputs, floors) for text in texts or [""]]


def attention_floors(model: Any, inputs: Sequence[Input]) -> dict[str, int]:
    """Smallest value of each dimension that is the sequence of a quantized attention.

    Raises:
        ValueError: a fixed sequence that has no fused kernel.
    """
    nodes = [node for node in model.graph.node if node.op_type == "TRT_QuantizedAttention"]
    if not nodes:
        return {}
    shapes = {value.name: value.type.tensor_type.shape.dim for value in (*model.graph.value_info, *model.graph.input)}
    producer = {name: node for node in model.graph.node for name in node.output}
    named = {dim for item in inputs for dim in item.dims if isinstance(dim, str)}
    floors: set[str] = set()
    for node in nodes:
        sequences = [_sequence(name, shapes, producer) for name in node.input[:3]]
        # A single query, as in decoding, has a fused kernel for any number of keys.
        if sequences[0] == 1:
            continue
        for sequence in sequences:
            if sequence is None:
                # The graph does not say: whatever is not the batch may be a sequence.
                floors |= named - {item.dims[0] for item in inputs if item.dims}
            elif isinstance(sequence, str):
                floors |= {sequence} & named
            elif sequence < FP8_ATTENTION_MINIMUM:
                raise ValueError(
                    f"{_place(node)}: FP8 attention over a fixed sequence of {sequence}; TensorRT fuses it for one "
                    f"query, or from {FP8_ATTENTION_MINIMUM} on: pad the sequence, or export with --attention none"
                )
    return dict.fromkeys(sorted(floors), FP8_ATTENTION_MINIMUM)


def _sequence(name: str, shapes: Mapping[str, Any], producer: Mapping[str, Any]) -> int | str | None:
    """Length of the sequence of an operand `[batch, heads, sequence, dim]`, its name, or None where nothing says."""
    while name not in shapes and name in producer and producer[name].op_type in _SAME_SHAPE:
        name = producer[name].input[0]
    dims = shapes.get(name)
    if not dims:
        return None
    return dims[-2].dim_value if dims[-2].HasField("dim_value") else dims[-2].dim_param or None


def label_nodes(model: Any) -> list[str]:
    """Names every node of a layer `<layer>/<op type>`, which is how the audit finds the layer in the engine.

    Returns:
        Names of the attention nodes.
    """
    taken = {node.name for node in model.graph.node}
    attention = []
    for index, node in enumerate(model.graph.node):
        layer = _layer_of(node)
        if layer or not node.name:
            wanted = f"{layer or 'graph'}/{node.op_type}"
            node.name = wanted if wanted not in taken else f"{wanted}_{index}"
            taken.add(node.name)
        if node.op_type in ATTENTION:
            attention.append(node.name)
    return attention


def _node_problems(node: Any, types: Mapping[str, str], producer: Mapping[str, Any], target: Target) -> Iterator[str]:
    for name in node.input:
        kind = types.get(name, "")
        if kind in _NOT_IMPORTED:
            yield f"TensorRT does not import {_NOT_IMPORTED[kind]}"
        if _FEATURES.get(kind) == "FP4" and not target.has_fp4:
            yield f"{target} has no FP4; use fp8 or int4 for it, or target sm120"
        if _FEATURES.get(kind) == "FP8" and not target.has_fp8:
            yield f"{target} has no FP8; use int8 or int4 for it, or target sm89 or later"
    if node.op_type == "MatMulNBits":
        yield "TensorRT does not import MatMulNBits; export int4 weights as DequantizeLinear"
    if node.op_type == "MatMul":
        sources = [_unwrap(producer.get(name), producer) for name in node.input]
        if all(source is not None and source.op_type == "DequantizeLinear" for source in sources):
            weight = next((s for s in sources if types.get(s.input[0])), None)
            inputs = next((s for s in sources if not types.get(s.input[0])), None)
            blocked = weight is not None and _attribute(weight, "block_size", 0) > 0
            static = inputs is not None and _is_static_quantize(producer.get(inputs.input[0]))
            if blocked and static and weight is not None:
                yield _blocked_and_quantized(types[weight.input[0]])
    if node.op_type == "Attention":
        if _attribute(node, "softcap", 0.0):
            yield "TensorRT has no attention with a soft cap; it cannot run this model's attention as one node"
        if len(node.input) > 4 and any(node.input[4:6]):
            yield "TensorRT does not take past keys and values at Attention; concatenate them before the node"


def _blocked_and_quantized(kind: str) -> str:
    if kind == "FLOAT4E2M1":
        return (
            "TensorRT's builder fails or crashes on FP4 weights with inputs quantized to another format; use nvfp4 "
            "inputs, or 16-bit ones"
        )
    return (
        f"TensorRT miscompiles {kind} weights in blocks along the inputs when the input is quantized too: it reads "
        "only the first scale of a row; use one scale a channel, or 16-bit inputs"
    )


def _unwrap(node: Any, producer: Mapping[str, Any]) -> Any:
    """The node behind casts and transposes."""
    while node is not None and node.op_type in ("Cast", "CastLike", "Transpose"):
        node = producer.get(node.input[0])
    return node


def _is_static_quantize(node: Any) -> bool:
    return node is not None and node.op_type == "QuantizeLinear"


def _attribute(node: Any, name: str, default: Any) -> Any:
    found = next((a for a in node.attribute if a.name == name), None)
    return default if found is None else (found.f if isinstance(default, float) else found.i)


def _layer_of(node: Any) -> str:
    return next((entry.value for entry in node.metadata_props if entry.key == LAYER_KEY), "")


def _place(node: Any) -> str:
    layer = _layer_of(node)
    return f"{layer} ({node.op_type})" if layer else f"node {node.name or node.output[0]} ({node.op_type})"


def _as_profiles(shapes: str | Sequence[str] | None) -> list[str]:
    if shapes is None:
        return []
    return [shapes] if isinstance(shapes, str) else list(shapes)


def _load_graph(path: Path) -> Any:
    onnx = _require("onnx")
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


def _require(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"engines need the package `{module}`, which is not installed: pip install 'blockscale[onnx]'"
        ) from error


def _timing_cache(backend: str, target: Target) -> str | None:
    """A file for kernel timings, which TensorRT measures while it builds; TensorRT-RTX measures nothing."""
    if backend != "tensorrt":
        return None
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "blockscale"
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return str(root / f"timing-{target.sm}.cache")


def _environment(request: Mapping[str, Any], folder: Path) -> dict[str, str] | None:
    """Environment of the build process, None for this one's.

    A graph with a plugin makes TensorRT-RTX's parser load its own library under a name that the wheel does not have.
    """
    spec = importlib.util.find_spec("tensorrt_rtx_libs")
    if not request["plugin"] or request["backend"] != "tensorrt_rtx" or spec is None:
        return None
    for library in (Path(place) / "libtensorrt_rtx.so.1" for place in spec.submodule_search_locations or ()):
        (folder / "libtensorrt_rtx.so").symlink_to(library)
    path = os.environ.get("LD_LIBRARY_PATH")
    return {**os.environ, "LD_LIBRARY_PATH": f"{folder.resolve()}{os.pathsep + path if path else ''}"}


def _run_worker(
    request: Mapping[str, Any], model: Path, progress: Progress | None, environment: Mapping[str, str] | None
) -> tuple[dict[str, Any], list[str]]:
    """Runs the build process to its end.

    Returns:
        What it built, and its warnings.
    """
    command = [sys.executable, "-m", "quant.export.engine_worker"]
    last, node = "", ""
    warnings: dict[str, None] = {}
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            text=True,
            encoding="utf-8",
        )
        assert process.stdin is not None and process.stdout is not None
        outcome: dict[str, Any] = {}
        try:
            with process.stdin:
                json.dump(request, process.stdin)
            for line in process.stdout:
                message = json.loads(line)
                if "stage" in message and progress:
                    progress(message["stage"], message["done"], message["of"])
                elif "said" in message:
                    last, node = message["said"], message["node"]
                    if message["severity"] == 2:
                        warnings[last] = None
                elif "built" in message or "failed" in message:
                    outcome = message
            process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            process.stdout.close()
        errors.seek(0)
        printed = errors.read().decode("utf-8", "replace").strip()
    if process.returncode == 0 and "built" in outcome:
        return outcome["built"], list(warnings)
    backend = request["backend"]
    if "failed" in outcome:
        where = f" at node {outcome['node']}" if outcome["node"] else ""
        raise ValueError(f"{model}: {backend} cannot build this graph{where}: {_explained(outcome['failed'])}")
    where = f", at node {node}" if node else ""
    heard = printed.splitlines()[-1] if printed else last or "nothing"
    raise ValueError(
        f"{model}: {backend} died while building ({_death(process.returncode)}{where}); the last it said: {heard}"
    )


def _explained(text: str) -> str:
    """The builder's message, with the way out where it is one that we know."""
    text = " ".join(text.split())
    ways_out = {
        "Attention operation was not supported by a dedicated kernel": (
            f"FP8 attention has no fused kernel for these shapes; let its sequences start at {FP8_ATTENTION_MINIMUM} "
            "(--shapes), or export with --attention none"
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


def _receipt(
    built: Built,
    out: Path,
    findings: Sequence[Finding],
    problems: Sequence[str],
    layers: Sequence[Mapping[str, Any]],
    plan: Plan | None,
) -> dict[str, Any]:
    with built.path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {
        "schema_version": RECEIPT_VERSION,
        "passed": not problems and all(layer["passed"] for layer in layers),
        "layers": [dict(layer) for layer in layers],
        "audit": [dataclasses.asdict(finding) for finding in findings],
        "fallbacks": list(problems),
        "warnings": list(built.warnings),
        "plan": plan.digest() if plan else None,
        "engine": {
            "file": out.name,
            "bytes": built.path.stat().st_size,
            "sha256": digest,
            "target": built.target,
            "backend": built.backend,
            "reason": built.reason,
            "profiles": list(built.profiles),
            "layers": list(built.layers),
            "attention_nodes": list(built.attention_nodes),
            "seconds": round(built.seconds, 2),
            "peak_rss_bytes": built.peak_rss_bytes,
        },
    }
