"""This process builds an engine: `python -m quant.export.tensorrt.worker FD`, with a JSON request on standard input.

TensorRT is a large C++ compiler that some graphs bring down. In a process of its own a crash costs the build and not
the caller, which still knows the builder's last message. The process imports neither torch nor the model, so nearly
all of its memory is TensorRT's.

It writes one JSON object per line to the file descriptor FD, apart from the prints of libraries on standard output.

    {"said": "…", "severity": 3}               a message of the builder
    {"stage": "…", "done": 3, "of": 100}       progress
    {"built": {…}}                             the last line of a build that worked
    {"failed": "…", "node": "…"}               the last line of one that did not
"""

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from quant.base.processor import peak_rss
from quant.export.tensorrt.engine_file import RECORD

# Messages up to this severity are passed on: internal error, error, warning, info, and verbose (4) kept to oneself.
_VERBOSE = 4
_SHORT = 2000


class BuildError(Exception):
    """A build that TensorRT refused: its message, and the ONNX node at which it stopped, if it named one."""

    def __init__(self, text: str, node: str = "") -> None:
        super().__init__(text)
        self.node = node


def build(request: dict[str, Any], out: TextIO) -> dict[str, Any]:
    """Builds one engine and returns version, layers and memory; writes messages to `out`."""
    trt = importlib.import_module(request["backend"])
    logger = _logger(trt, out)
    builder = trt.Builder(logger)
    # From TensorRT 11 on every network is strongly typed; before, types were the builder's choice.
    strict = getattr(getattr(trt, "NetworkDefinitionCreationFlag", None), "STRONGLY_TYPED", None)
    network = builder.create_network(0 if strict is None else 1 << int(strict))
    for module in request["plugins"]:
        archs = [int(name.removeprefix("SM")) for name in request["compute_capabilities"]]
        importlib.import_module(module).register(trt, archs)
    _parse(trt, network, logger, request)
    record = {**json.loads(request["record"]), "builder": f"{trt.__name__} {trt.__version__}"}
    network.name = RECORD + json.dumps(record, allow_nan=False)
    if not network.name.startswith(RECORD):  # TensorRT logs an error and goes on
        raise BuildError(f"the record of the export is too long for a network's name: {logger.worst}")
    config = builder.create_builder_config()
    # Names and types of all kernels stay readable in the engine, for the audit.
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    for flag in request["flags"]:
        config.set_flag(getattr(trt.BuilderFlag, flag))
    config.progress_monitor = monitor = _monitor(trt, out)
    for shapes in request["profiles"]:
        profile = builder.create_optimization_profile()
        for name, (low, best, high) in shapes.items():
            profile.set_shape(name, low, best, high)
        config.add_optimization_profile(profile)
    # TensorRT-RTX takes its target as a setting. TensorRT builds for the GPU that it times kernels on.
    if hasattr(trt, "ComputeCapability"):
        config.num_compute_capabilities = len(request["compute_capabilities"])
        for index, name in enumerate(request["compute_capabilities"]):
            capability = getattr(trt.ComputeCapability, name, None)
            if capability is None:
                known = ", ".join(word.lower() for word in dir(trt.ComputeCapability) if word.startswith("SM"))
                raise BuildError(f"this {trt.__name__} {trt.__version__} builds for {known}, not for {name.lower()}")
            config.set_compute_capability(capability, index)
    try:
        with open(request["engine"], "wb") as file:
            writer = _writer(trt, file)
            is_built = builder.build_serialized_network_to_stream(network, config, writer)
            if writer.error is not None:
                raise writer.error
            if not is_built:
                raise BuildError(logger.worst or "the builder gave no engine and no reason", logger.node)
    except OSError as error:
        reason = f"{error.strerror}; make room, and run the same command again"
        raise BuildError(f"the engine cannot be written: {reason}") from error
    del monitor  # the bindings hold no reference to it, so it must live until here
    # File-backed pages included.
    return {"version": trt.__version__, "layers": network.num_layers, "peak_rss_bytes": peak_rss() or 0}


def _parse(trt: Any, network: Any, logger: Any, request: dict[str, Any]) -> None:
    # A function of its own, which frees the parser before the build.
    parser = trt.OnnxParser(network, logger)
    if parser.parse(Path(request["graph"]).read_bytes(), request["model"]):
        return
    error = parser.get_error(0) if parser.num_errors else None
    if error is None:
        raise BuildError(logger.worst or "the ONNX parser gave no reason", logger.node)
    raise BuildError(f"operator {error.node_operator()}: {error.desc()}", error.node_name())


def _logger(trt: Any, out: TextIO) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]
        """Passes messages on, and remembers the first error and the current node for the message of a failed build."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.worst = ""
            self.node = ""

        def log(self, severity: Any, text: str) -> None:
            level = int(severity)
            # "Parsing node: model.layers.0.mlp.up_proj/MatMul [MatMul]"; it names the node if the parser crashes.
            if text.startswith(("Parsing node: ", "Searching for plugin: ")):
                self.node = text.partition(": ")[2].partition(" [")[0]
                _say(out, said=text[:_SHORT], severity=level, node=self.node)
            elif level < _VERBOSE:
                if level < 2 and not self.worst:
                    self.worst = text
                _say(out, said=text[:_SHORT], severity=level, node=self.node)

    return Logger()


def _monitor(trt: Any, out: TextIO) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        """Sums up nested phases as one percentage."""

        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.phases: dict[str, tuple[int, int]] = {}  # open phases, outermost first: steps done, steps in all
            self.shown = -1

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            self.phases[phase] = (0, max(steps, 1))

        def phase_finish(self, phase: str) -> None:
            steps = self.phases.pop(phase, (0, 1))[1]
            if not self.phases:
                self.phases[phase] = (steps, steps)
                self.show()
                self.phases.clear()

        def step_complete(self, phase: str, step: int) -> bool:
            if phase in self.phases:
                self.phases[phase] = (step + 1, self.phases[phase][1])
                self.show()
            return True

        def show(self) -> None:
            """Reports a higher percentage: each open phase counts as the current step of the phase around it."""
            part = 0.0
            for done, steps in reversed(self.phases.values()):
                part = min((done + part) / steps, 1.0)
            if int(100 * part) > self.shown:
                self.shown = int(100 * part)
                _say(out, stage="building engine", done=self.shown, of=100)

    return Monitor()


def _writer(trt: Any, file: BinaryIO) -> Any:
    class Writer(trt.IStreamWriter):  # type: ignore[misc]
        """Takes the engine piece by piece, so that it is never in memory as a whole."""

        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)
            self.error: OSError | None = None  # the bindings drop it, and go on

        def write(self, data: Any) -> int:
            try:
                return file.write(data)
            except OSError as error:
                self.error = error
                return 0

    return Writer()


def _say(out: TextIO, **message: Any) -> None:
    out.write(json.dumps(message, allow_nan=False) + "\n")
    out.flush()


def main() -> None:
    """Reads a request and builds. The exit code is 0, or 3 if TensorRT refused."""
    # Messages have stdout to themselves, because libraries in C++ print there as they like. No handle of another number
    # reaches a process of Windows.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    request = json.load(sys.stdin)
    try:
        _say(out, built=build(request, out))
    except BuildError as error:
        _say(out, failed=str(error), node=error.node)
        sys.exit(3)
    except Exception as error:  # the bindings raise TypeError, AttributeError, RuntimeError and more
        _say(out, failed=f"{type(error).__name__}: {error}", node="")
        sys.exit(3)


if __name__ == "__main__":
    main()
