"""`run_worker` runs the process that builds an engine (`worker`) and reports how it ended.

A builder that crashes ends only its process. The error then names the model, the exit code or signal, the ONNX node
that was being parsed, and the last message.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quant.export.tensorrt.gpu_targets import GpuTarget
from quant.export.onnx.dynamic_shapes import FP8_ATTENTION_MINIMUM

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
    """Runs the build process to its end and returns its result and warnings.

    Args:
        request: as `worker.build` takes it.
        model: the ONNX file, for messages.
        progress: a function that is called as `progress(stage, done, total)`.
        environment: the environment of the process, from `worker_environment`.

    Raises:
        ValueError: the builder refused the graph, or died.
    """
    received = _BuilderMessages()
    # Messages have a pipe of their own, because libraries in C++ print on stdout and stderr as they like.
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as prints, open(reading, encoding="utf-8") as messages:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _START, json.dumps(_import_path(), allow_nan=False), str(writing)],
            stdin=subprocess.PIPE,
            stdout=prints,
            stderr=prints,
            pass_fds=[writing],
            env=environment,
        )
        os.close(writing)  # the pipe must end with the worker's copy
        assert process.stdin is not None
        try:
            with process.stdin:
                process.stdin.write(json.dumps(request, allow_nan=False).encode())
            # The lines end when the worker closes its end of the pipe: it has returned, or died.
            for line in messages:
                received.add(json.loads(line), progress)
            process.wait()
        finally:
            if process.poll() is None:  # Ctrl-C, or an error of `progress`
                process.kill()
                process.wait()
        prints.seek(0)
        printed = prints.read().decode("utf-8", "replace").strip()
    if process.returncode == 0 and "built" in received.outcome:
        return received.outcome["built"], list(received.warnings)
    raise ValueError(f"{model}: {request['backend']} {received.failure(process.returncode, printed)}")


@dataclass
class _BuilderMessages:
    """The messages of a build process, one JSON object a line: progress, sentences of the builder, the outcome.

    Attributes:
        last, node: the builder's last sentence, and the node of the graph that it was about.
        warnings: its warnings in their order, each once.
        outcome: the result of the build, or the reason that it failed; empty until the process sends one.
    """

    last: str = ""
    node: str = ""
    warnings: dict[str, None] = field(default_factory=dict)
    outcome: dict[str, Any] = field(default_factory=dict)

    def add(self, message: dict[str, Any], progress: Progress | None) -> None:
        """Takes in one message, and passes progress on."""
        if "stage" in message and progress:
            progress(message["stage"], message["done"], message["of"])
        elif "said" in message:
            self.last, self.node = message["said"], message["node"]
            if message["severity"] == 2:
                self.warnings[self.last] = None
        elif "built" in message or "failed" in message:
            self.outcome = message

    def failure(self, returncode: int, printed: str) -> str:
        """Returns why there is no engine: the builder's own reason, or how the process died and its last words."""
        if "failed" in self.outcome:
            node = self.outcome["node"]
            where = f" at node {node}" if node else ""
            return f"cannot build this graph{where}: {_explained(self.outcome['failed'])}"
        where = f", at node {self.node}" if self.node else ""
        # C++ libraries print the reason of an abort; otherwise the last message is the nearest thing to one.
        last = printed.splitlines()[-1] if printed else self.last or "nothing"
        return f"died while building ({_death(returncode)}{where}); the last it said: {last}"


def _import_path() -> list[str]:
    """Returns the absolute folders that the build process imports from: this process's, without the current directory.

    The current directory may hold a `quant` of anybody. It stays only where this package itself was imported from it.
    """
    current, home = Path.cwd(), Path(str(sys.modules["quant"].__file__)).resolve().parents[1]
    folders = dict.fromkeys([*(Path(entry).resolve() for entry in sys.path), home])
    return [str(folder) for folder in folders if folder != current or folder == home]


def _explained(text: str) -> str:
    """Returns the builder's message, with the way out if we know one."""
    text = " ".join(text.split())
    ways_out = {
        "Attention operation was not supported by a dedicated kernel": (
            "TensorRT has no fused attention for these shapes; where attention is in FP8, let its sequences start at "
            f"{FP8_ATTENTION_MINIMUM} (--shapes), or export with --attention none"
        ),
        # TensorRT-RTX 1.7.1: a decoder whose batch is 1 throughout gets two ops of one name.
        "Graph contains more than one op named": (
            "TensorRT's compiler fails on some fixed dimensions; let the batch range from 1 to 2 (--shapes batch=1:1:2)"
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


def timing_cache(backend: str, target: GpuTarget) -> str | None:
    """Returns a file for the kernel timings that TensorRT measures; None for TensorRT-RTX, which measures nothing."""
    if backend != "tensorrt":
        return None
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "blockscale"
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return str(root / f"timing-{target.sm}.cache")
