"""Runs a serving engine in TensorRT or TensorRT-RTX, its KV cache in GPU memory that is input and output at once.

An engine has a profile for decoding and one for prompts, and an execution context has one profile at a time, so each
profile has a context of its own. Both contexts work on the same cache. The two libraries have one API; which of them
built the engine is in the receipt next to it.
"""

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quant.base.errors import UserError, install_command, option
from quant.base.json_files import read_json, typed
from quant.calibration.session import free_memory
from quant.export.checkpoint.files.tensor_file import sha256_of
from quant.export.onnx.engine_session import check_memory, check_names, check_step
from quant.export.onnx.serving import IDS, LAST, LENGTHS, LOGITS, new_name
from quant.export.tensorrt.engine_file import receipt_path
from quant.export.tensorrt.gpu_targets import EXTRAS, local_capability

_TORCH = {"FLOAT": torch.float32, "HALF": torch.float16, "BF16": torch.bfloat16}
_NUMPY = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16"}


class TensorrtSession:
    """See `EngineSession`; the engine's profiles limit rows and widths."""

    recurrent = False

    def __init__(self, path: Path) -> None:
        self._path = path
        receipt = read_receipt(path)
        engine_record = receipt["engine"]
        built_by = str(engine_record.get("backend", ""))
        if engine_record.get("kv_cache"):
            raise UserError(
                f"{path}: its KV cache is in {engine_record['kv_cache']}, by our plugin, which runs in C++ programs "
                f"(docs/engine-audit.md); for this command export it with {option('kv_cache', '16bit')}"
            )
        reason = runs_here(path)
        if reason is not None:
            raise UserError(reason)
        self._trt = library(path, built_by)
        self._engine, self._logger = deserialized(self._trt, path, built_by)
        names = [self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)]
        is_input = {name: self._engine.get_tensor_mode(name) == self._trt.TensorIOMode.INPUT for name in names}
        inputs = [name for name in names if is_input[name]]
        caches = check_names(path, inputs, [name for name in names if not is_input[name]])
        # [batch, kv_heads, capacity, dim]
        self._shapes = {name: tuple(self._engine.get_tensor_shape(name))[1:] for name in caches}
        kind = self._engine.get_tensor_dtype(caches[0]).name
        self.dtype, self._torch_dtype = _NUMPY[kind], _TORCH[kind]
        self.capacity = int(self._shapes[caches[0]][1])
        self.plan = str(receipt.get("plan") or "")
        self.backend = f"{self._trt.__name__} {self._trt.__version__}, {torch.cuda.get_device_name()}"
        # Smallest and largest [batch, sequence] of each profile.
        ranges = (self._engine.get_tensor_profile_shape(IDS, n) for n in range(self._engine.num_optimization_profiles))
        self._profiles = [(tuple(low), tuple(high)) for low, _, high in ranges]
        self._stream = torch.cuda.Stream()
        self._contexts: dict[int, Any] = {}
        self._caches: dict[str, Tensor] = {}
        self._rows = 0

    def most_rows(self) -> int:
        # A prompt and the steps after it have the same rows, so each kind of step must take them.
        shortest = min(low[1] for low, _ in self._profiles)
        decoding = max(high[0] for low, high in self._profiles if low[1] == shortest)
        return int(min(decoding, max(self._profiles, key=lambda profile: profile[1][1])[1][0]))

    def begin(self, rows: int) -> None:
        self._rows, self._caches = rows, {}
        values = sum(rows * int(np.prod(shape)) for shape in self._shapes.values())
        free = free_memory(torch.device("cuda", torch.cuda.current_device()))
        check_memory(self._path, values * self._torch_dtype.itemsize, free, rows)
        for name, shape in self._shapes.items():
            self._caches[name] = torch.zeros(rows, *shape, dtype=self._torch_dtype, device="cuda")

    def width(self, tokens: int) -> int:
        widths = [(low[1], high[1]) for low, high in self._profiles if low[0] <= self._rows <= high[0]]
        if not widths:
            raise UserError(
                f"{self._path}: no profile of this engine takes {self._rows} rows; build it with {option('shapes')}"
            )
        able = [max(low, tokens) for low, high in widths if tokens <= high]
        return int(min(able) if able else max(high for _, high in widths))

    def step(self, ids: np.ndarray, lengths: np.ndarray, last: np.ndarray) -> np.ndarray:
        check_step(ids, lengths, last, self.capacity)
        context = self._context(ids.shape)
        # The tensors must live until the stream has run, so they are named.
        values = {IDS: ids, LENGTHS: lengths, LAST: last}
        inputs = {name: torch.from_numpy(value).cuda() for name, value in values.items()}
        for name, tensor in {**inputs, **self._caches}.items():
            context.set_input_shape(name, tuple(tensor.shape))
            context.set_tensor_address(name, tensor.data_ptr())
        for past, cache in self._caches.items():
            context.set_tensor_address(new_name(past), cache.data_ptr())
        shape = tuple(context.get_tensor_shape(LOGITS))
        logits = torch.empty(shape, dtype=_TORCH[self._engine.get_tensor_dtype(LOGITS).name], device="cuda")
        context.set_tensor_address(LOGITS, logits.data_ptr())
        # The inputs were copied on torch's stream.
        self._stream.wait_stream(torch.cuda.current_stream())
        if not context.execute_async_v3(self._stream.cuda_stream):
            raise UserError(f"{self._path}: the engine stopped at a step of {list(ids.shape)} tokens")
        self._stream.synchronize()
        return logits.float().cpu().numpy()

    def _context(self, shape: tuple[int, ...]) -> Any:
        """Returns the execution context of the profile whose range of widths is narrowest around `shape`."""
        able = [
            (high[1] - low[1], index)
            for index, (low, high) in enumerate(self._profiles)
            if all(a <= n <= b for a, n, b in zip(low, shape, high, strict=True))
        ]
        if not able:
            raise UserError(
                f"{self._path}: no profile takes a step of {list(shape)} tokens; build it with {option('shapes')}"
            )
        index = min(able)[1]
        if index not in self._contexts:
            context = self._engine.create_execution_context()
            context.set_optimization_profile_async(index, self._stream.cuda_stream)
            self._stream.synchronize()
            self._contexts[index] = context
        return self._contexts[index]


def read_receipt(path: Path) -> dict[str, Any]:
    """Reads the receipt next to an engine; UserError if there is none: only the receipt names the GPU of the engine."""
    receipt = receipt_path(path)
    if not receipt.is_file():
        raise UserError(f"{path}: its receipt {receipt.name} is missing; keep both files of `quant export` together")

    def checked(document: Any) -> dict[str, Any]:
        fields = typed(dict[str, Any], document, "receipt")
        record = typed(dict[str, Any], fields.get("engine"), "engine")
        for name in ("sha256", "target", "backend"):
            typed(str, record.get(name), name)
        typed(list[str], record.get("profiles", []), "profiles")
        return fields

    try:
        return read_json(receipt, "a receipt of an engine", checked)
    except ValueError as error:
        raise UserError(f"{error}; export the engine again") from None


def receipt_of(path: Path) -> dict[str, Any]:
    """Reads the receipt of an engine, as `read_receipt`; UserError if it is another file's, by its SHA-256."""
    receipt = read_receipt(path)
    if receipt["engine"].get("sha256") != sha256_of(path):
        name = receipt_path(path).name
        raise UserError(f"{path} is not the file that {name} describes: their SHA-256 differ; export it again")
    return receipt


def runs_here(path: Path) -> str | None:
    """Returns why the engine cannot run on this machine, which lacks the GPU that it was built for; None if it can."""
    target = str(read_receipt(path)["engine"].get("target", ""))
    capability = local_capability()
    if capability is None:
        return f"{path} runs on a GPU of {target}, and this machine has no GPU"
    local = f"sm{capability[0]}{capability[1]}"
    if local not in target.split(","):
        return f"{path} was built for {target}, and this GPU is {local}; export it with {option('target', local)}"
    return None


def library(path: Path, built_by: str) -> Any:
    """Imports the TensorRT that an engine was built with; UserError if it is missing or has another version."""
    module, _, version = built_by.partition(" ")
    if module not in EXTRAS:
        raise UserError(f"{path}: its receipt names no builder; export it again")
    if importlib.util.find_spec(module) is None:
        raise UserError(
            f"{path} needs the package `{module}`, which is not installed: {install_command(EXTRAS[module])}"
        )
    trt = importlib.import_module(module)
    if version and version != trt.__version__:
        raise UserError(f"{path} was built by {built_by}, and {module} {trt.__version__} is installed; export it again")
    return trt


def deserialized(trt: Any, path: Path, built_by: str) -> tuple[Any, Any]:
    """Loads an engine and its logger, which must live as long; UserError if the library refuses the file."""
    messages: list[str] = []

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, text: str) -> None:
            if int(severity) < 2:
                messages.append(text)

    logger = Logger()
    engine = trt.Runtime(logger).deserialize_cuda_engine(path.read_bytes())
    if engine is None:
        reason = messages[0] if messages else "no reason given"
        raise UserError(f"{path}: {built_by} cannot load it: {' '.join(reason.split())[:300]}")
    return engine, logger
