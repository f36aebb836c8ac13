"""An `EngineSession` runs one exported decoder: it holds the KV cache, and computes a step of tokens for several rows.

    onnxruntime    an ONNX file of `quant export --to onnx`, on the processor or by the CUDA provider of onnxruntime-gpu
    tensorrt       an engine of `quant export --to tensorrt`, on the GPU that it was built for
    aoti           a package of `quant export --to aoti`, on the kind of machine that it was compiled on

All take the inputs and outputs of `quant.export.onnx.serving`, and `check_engine` is the same code for all.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from quant.base.errors import UserError, counted, option
from quant.base.processor import memory_left
from quant.calibration.session import free_memory
from quant.export.onnx.export_onnx import PLAN_KEY
from quant.export.onnx.limits import is_older, loaded
from quant.export.onnx.recurrent_states import STATES, STEP_TOKENS
from quant.export.onnx.serving import CAPACITY_KEY, IDS, KEYS, LAST, LENGTHS, LOGITS, new_name


class EngineSession(Protocol):
    """A loaded file."""

    backend: str  # library and device, such as "onnxruntime 1.32.0, CPU"
    capacity: int  # tokens that each row of the KV cache holds
    dtype: str  # the dtype of the cache and of everything that is not quantized, as numpy names it
    plan: str  # digest of the plan that the file was exported with; empty if the file does not record it
    recurrent: bool  # whether a row has states, which each of its tokens may change only once

    def most_rows(self) -> int:
        """Returns the largest number of rows."""

    def begin(self, rows: int) -> None:
        """Makes an empty KV cache for `rows` rows; UserError if the file or the memory does not allow it."""

    def width(self, tokens: int) -> int:
        """Returns how many tokens a step takes, at least `tokens`; the largest step's number if that takes fewer."""

    def step(self, ids: np.ndarray, lengths: np.ndarray, last: np.ndarray) -> np.ndarray:
        """Computes logits `[rows, vocabulary]` in float32.

        Args:
            ids: int64 `[rows, width]`.
            lengths: int64 `[rows]`, tokens of the row that precede `ids`.
            last: int64 `[rows]`, index of the row's last real token in `ids`.
        """


def check_names(path: Path, inputs: list[str], outputs: list[str], kinds: Sequence[str] = KEYS) -> list[str]:
    """Returns the caches of a serving graph, which are of `kinds`; UserError for any other inputs and outputs."""
    caches = [name for name in inputs if name.removeprefix("past_").partition(".")[0] in kinds]
    if not caches or (set(inputs), set(outputs)) != ({IDS, LENGTHS, LAST, *caches}, {LOGITS, *map(new_name, caches)}):
        listed = ", ".join(name for name in inputs if not name.startswith("past_"))
        raise UserError(
            f"{path}: no serving graph of a decoder (its inputs are {listed}); export one with `quant export DIRECTORY "
            f"--to onnx` or `--to tensorrt`, without {option('capacity', 0)}"
        )
    return caches


def check_memory(path: Path, nbytes: int, free: int | None, rows: int) -> None:
    """Raises UserError for a KV cache that does not fit into `free` bytes; None if the free memory is unknown."""
    if free is not None and nbytes > free:
        raise UserError(
            f"{path}: the KV cache of {rows} rows takes {nbytes / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free; run "
            f"fewer rows, or export with a smaller {option('capacity')}"
        )


def check_step(ids: np.ndarray, lengths: np.ndarray, last: np.ndarray, capacity: int) -> None:
    """Raises UserError for tokens beyond the cache, or a last token that is not in the step.

    A graph would compute with both without a word: a `last` of -1 is the last token of the row before.
    """
    for row, (length, index) in enumerate(zip(lengths.tolist(), last.tolist(), strict=True)):
        if not 0 <= index < ids.shape[1]:
            raise UserError(f"row {row}: last is {index}, and the step has tokens 0 to {ids.shape[1] - 1} of it")
        if not 0 <= length <= capacity - ids.shape[1]:
            raise UserError(
                f"row {row}: lengths is {length}; with {counted(ids.shape[1], 'token')} of a step the cache of "
                f"{capacity} takes 0 to {capacity - ids.shape[1]}"
            )


_DTYPES = {"tensor(float)": "float32", "tensor(float16)": "float16"}


class OnnxruntimeSession:
    """Runs a serving graph in onnxruntime, its KV cache in buffers that are input and output at once.

    Any number of rows and any width run.
    """

    def __init__(self, path: Path, *, threads: int = 0, gpu: torch.device | None = None) -> None:
        import onnxruntime

        self._path, self._gpu = path, gpu
        self._session = loaded(path, threads, gpu)
        inputs = {value.name: value for value in self._session.get_inputs()}
        outputs = [value.name for value in self._session.get_outputs()]
        names = check_names(path, list(inputs), outputs, (*KEYS, *STATES))
        # [batch, kv_heads, capacity, dim], and states of other layers
        self._shapes = {name: tuple(inputs[name].shape[1:]) for name in names}
        self._dtypes = {name: _DTYPES[inputs[name].type] for name in names}
        self.recurrent = any(name.removeprefix("past_").partition(".")[0] in STATES for name in names)
        self._caches: dict[str, onnxruntime.OrtValue] = {}
        self.dtype = next(self._dtypes[name] for name in names if "state" not in name)
        metadata = self._session.get_modelmeta().custom_metadata_map
        # Models of recurrent layers alone have no keys.
        keys = (shape[1] for name, shape in self._shapes.items() if name.startswith("past_key."))
        self.capacity = next(keys, None) or int(metadata[CAPACITY_KEY])
        self.plan = metadata.get(PLAN_KEY, "")
        where = "CPU" if gpu is None else torch.cuda.get_device_name(gpu)
        self.backend = f"onnxruntime {onnxruntime.__version__}, {where}"

    def most_rows(self) -> int:
        return 1 << 16

    def begin(self, rows: int) -> None:
        from onnxruntime import OrtValue

        self._caches = {}
        sizes = [int(np.prod(shape)) * np.dtype(self._dtypes[name]).itemsize for name, shape in self._shapes.items()]
        free = memory_left() if self._gpu is None else free_memory(self._gpu)
        check_memory(self._path, rows * sum(sizes), free, rows)
        place = ("cpu", 0) if self._gpu is None else ("cuda", self._gpu.index)
        for name, shape in self._shapes.items():
            self._caches[name] = OrtValue.ortvalue_from_numpy(np.zeros((rows, *shape), self._dtypes[name]), *place)

    def width(self, tokens: int) -> int:
        return min(tokens, self.capacity, STEP_TOKENS if self.recurrent else self.capacity)

    def step(self, ids: np.ndarray, lengths: np.ndarray, last: np.ndarray) -> np.ndarray:
        check_step(ids, lengths, last, self.capacity)
        if self._gpu is not None and is_older() and min(ids.shape) > 1 and lengths.any():
            raise UserError(f"{self.backend} reads prompts of several rows whole, and not in chunks; leave `chunk` out")
        binding = self._session.io_binding()
        for name, value in ((IDS, ids), (LENGTHS, lengths), (LAST, last)):
            binding.bind_cpu_input(name, value)
        # TensorScatter copies the cache unless its input and its output are one buffer.
        for past, cache in self._caches.items():
            binding.bind_ortvalue_input(past, cache)
            binding.bind_ortvalue_output(new_name(past), cache)
        binding.bind_output(LOGITS)
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:  # onnxruntime has a class for each of its status codes, and no base of them
            raise UserError(f"{self._path}: onnxruntime stopped: {' '.join(str(error).split())[:300]}") from error
        # The outputs are in the order in which they were bound.
        return binding.get_outputs()[-1].numpy().astype(np.float32)
