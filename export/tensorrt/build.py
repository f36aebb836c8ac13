"""Builds an engine, compares it with its plan, and describes it in a receipt.

    model ──write_onnx──▶ ONNX ──checks, profiles──▶ builder in a process of its own ──▶ engine ──audit──▶ receipt

One path serves TensorRT-RTX, which needs no GPU, and TensorRT, which needs the GPU it builds for (`targets`). The
engine and its receipt are written only if the audit passes: a layer that the plan quantizes and that TensorRT left in
half precision is an error that names it.

TensorRT compiles some graphs wrongly. `check_graph` refuses those, and graphs that need hardware that the target lacks,
before anything is built.
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
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from quant.base.atomic import destination, put_file, temporary_directory
from quant.base.errors import option, warn
from quant.base.json_files import json_text, write_json
from quant.base.processor import trim_heap
from quant.export.onnx.dynamic_shapes import FP8_ATTENTION_MINIMUM, format_profile
from quant.export.onnx.export_onnx import ATTENTION_KEY, EXPORT_KEY, PLAN_KEY, write_onnx
from quant.export.onnx.opsets import CACHE_PLUGIN, PLUGIN
from quant.export.tensorrt.audit import AuditRow, audit, failures, fallback_message, is_storage_only
from quant.export.tensorrt.engine_file import NAME_LIMIT, digest_of, receipt_path
from quant.export.tensorrt.gpu_targets import FEATURES, choose_common_library, resolve_targets
from quant.export.tensorrt.network import check_backend, check_graph, describe_graph, load_graph, make_profiles
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
            f"{FP8_ATTENTION_MINIMUM} ({option('shapes')}), or export with {option('attention', 'none')}"
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
    model: nn.Module | str | Path,
    out: str | Path,
    options: BuildOptions,
    *,
    plan: Plan | None = None,
    attention: str = "native",
    allow_fallback: bool = False,
    layers: Sequence[Mapping[str, Any]] = (),
    **onnx_options: Any,
) -> dict[str, Any]:
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
        with built.path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        engine = {key: value for key, value in vars(built).items() if key not in ("path", "warnings")}
        receipt = {
            "schema_version": RECEIPT_VERSION,
            "passed": not problems and all(layer["passed"] for layer in layers),
            "layers": [dict(layer) for layer in layers],
            "audit": [dataclasses.asdict(finding) for finding in findings],
            "fallbacks": problems,
            "warnings": built.warnings,
            "plan": plan.digest() if plan else None,
            "engine": {"file": out.name, "bytes": built.path.stat().st_size, "sha256": digest, **engine},
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
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    contents = {"export": json.loads(metadata[EXPORT_KEY]) if EXPORT_KEY in metadata else None, **described}
    # The audit reads this from the engine itself, and the contents from its receipt where they are too long for a name.
    record: dict[str, Any] = {
        "plan": metadata.get(PLAN_KEY),
        "attention": metadata.get(ATTENTION_KEY),
        "target": target_names,
        "features": list(options.features),
        "contents": contents,
    }
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
        path=out,
        warnings=messages,
        target=target_names,
        backend=f"{library.module} {result['version']}",
        reason=library.reason,
        profiles=[format_profile(profile) for profile in profiles],
        contents=contents,
        kv_cache=(contents["export"] or {}).get("kv_cache"),
        seconds=round(seconds, 2),
        peak_rss_bytes=result["peak_rss_bytes"],
    )


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
