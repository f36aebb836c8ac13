"""Runs a serving graph in onnxruntime, its KV cache in buffers that are input and output at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from quant.base.errors import UserError
from quant.export.onnx.engine_session import check_memory, check_names
from quant.export.onnx.export_onnx import PLAN_KEY
from quant.export.onnx.limits import loaded
from quant.export.onnx.serving import CAPACITY_KEY, IDS, LAST, LENGTHS, LOGITS, cache_names
from quant.base.processor import memory_left

_DTYPES = {"tensor(float)": "float32", "tensor(float16)": "float16"}


class OnnxruntimeSession:
    """See `EngineSession`; any number of rows and any width run."""

    def __init__(self, path: Path) -> None:
        import onnxruntime

        self._path = path
        self._session = loaded(path)
        inputs = {value.name: value for value in self._session.get_inputs()}
        layers = check_names(path, list(inputs), [value.name for value in self._session.get_outputs()])
        self._names = list(zip(cache_names("past", layers), cache_names("new", layers), strict=True))
        # [batch, kv_heads, capacity, dim]
        self._shapes = {past: tuple(inputs[past].shape[1:]) for past, _ in self._names}
        self._caches: dict[str, onnxruntime.OrtValue] = {}
        metadata = self._session.get_modelmeta().custom_metadata_map
        self.dtype = _DTYPES[inputs[self._names[0][0]].type]
        self.capacity = int(metadata[CAPACITY_KEY])
        self.plan = metadata.get(PLAN_KEY, "")
        self.backend = f"onnxruntime {onnxruntime.__version__}, CPU"

    def most_rows(self) -> int:
        return 1 << 16

    def begin(self, rows: int) -> None:
        from onnxruntime import OrtValue

        self._caches = {}
        values = sum(rows * int(np.prod(shape)) for shape in self._shapes.values())
        check_memory(self._path, values * np.dtype(self.dtype).itemsize, memory_left(), rows)
        for name, shape in self._shapes.items():
            self._caches[name] = OrtValue.ortvalue_from_numpy(np.zeros((rows, *shape), self.dtype))

    def width(self, tokens: int) -> int:
        return min(tokens, self.capacity)

    def step(self, ids: np.ndarray, lengths: np.ndarray, last: np.ndarray) -> np.ndarray:
        binding = self._session.io_binding()
        for name, value in ((IDS, ids), (LENGTHS, lengths), (LAST, last)):
            binding.bind_cpu_input(name, value)
        # TensorScatter copies the cache unless its input and its output are one buffer.
        for past, new in self._names:
            binding.bind_ortvalue_input(past, self._caches[past])
            binding.bind_ortvalue_output(new, self._caches[past])
        binding.bind_output(LOGITS)
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:  # onnxruntime has a class for each of its status codes, and no base of them
            raise UserError(f"{self._path}: onnxruntime stopped: {' '.join(str(error).split())[:300]}") from error
        # The outputs are in the order in which they were bound.
        logits: np.ndarray = binding.get_outputs()[-1].numpy().astype(np.float32)
        return logits
