"""This file runs llama.cpp through a Python binding of its C API, in a process and an environment of its own.

    python _llama_cpp.py logits MODEL.gguf TOKENS.npy LOGITS.npy        tokens [rows, seqlen] -> float32 logits
    python _llama_cpp.py quantize MODEL.gguf OUT.gguf TYPE MOMENTS.npz  llama.cpp's own quantization, with an imatrix
    python _llama_cpp.py round WEIGHTS.npz OUT.npz TYPE                 ggml's rounding of single tensors, to bytes

The Python is one that has the package llama-cpp-py-sync. `Llama` calls it from a benchmark.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np


class Llama:
    """A llama.cpp: the Python that has its binding."""

    def __init__(self, python: Path) -> None:
        self.python = python
        script = "import importlib.util as u; print(u.find_spec('llama_cpp_py_sync').submodule_search_locations[0])"
        self.libraries = subprocess.run(
            [python, "-c", script], check=True, capture_output=True, text=True
        ).stdout.strip()

    def logits(self, model: Path, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Logits of rows of token ids, float32 `[rows, seqlen, vocabulary]`."""
        with tempfile.TemporaryDirectory() as folder:
            tokens, out = Path(folder, "tokens.npy"), Path(folder, "logits.npy")
            np.save(tokens, rows.astype(np.int32))
            self._run("logits", model, tokens, out)
            result: np.ndarray[Any, Any] = np.load(out)
            return result

    def quantize(self, model: Path, out: Path, kind: str, moments: Path) -> None:
        """Writes `model` as llama.cpp quantizes it, with the mean squares of inputs in `moments` by tensor."""
        self._run("quantize", model, out, kind, moments)

    def rounded(self, weights: dict[str, np.ndarray[Any, Any]], kind: str) -> dict[str, np.ndarray[Any, Any]]:
        """Bytes `[rows, bytes]` of float32 weights `[rows, columns]` in a type of ggml, by its own rounding."""
        with tempfile.TemporaryDirectory() as folder:
            source, out = Path(folder, "weights.npz"), Path(folder, "codes.npz")
            np.savez(source, **weights)
            self._run("round", source, out, kind)
            return dict(np.load(out))

    def _run(self, *arguments: str | Path) -> None:
        environment = {**os.environ, "LD_LIBRARY_PATH": self.libraries, "PYTHONPATH": ""}
        done = subprocess.run([self.python, __file__, *arguments], env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"llama.cpp: {' '.join(done.stderr.splitlines()[-8:])}")


def _binding() -> tuple[Any, Any]:
    import llama_cpp_py_sync

    home = Path(llama_cpp_py_sync.__file__).parent
    ggml = ctypes.CDLL(str(next(home.glob("libggml.*so"))))
    # The kernels of each kind of CPU are libraries of their own.
    ggml.ggml_backend_load_all_from_path.argtypes = [ctypes.c_char_p]
    ggml.ggml_backend_load_all_from_path(str(home).encode())
    from llama_cpp_py_sync._cffi_bindings import get_ffi, get_lib

    get_lib().llama_backend_init()
    return get_ffi(), get_lib()


def _logits(model_file: str, tokens: str, out: str) -> None:
    ffi, lib = _binding()
    rows = np.load(tokens)
    model = lib.llama_model_load_from_file(model_file.encode(), lib.llama_model_default_params())
    if model == ffi.NULL:
        raise SystemExit("the model was not loaded")
    options = lib.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = rows.shape[1]
    options.n_threads = options.n_threads_batch = int(os.environ.get("OMP_NUM_THREADS", "1"))
    context = lib.llama_init_from_model(model, options)
    vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    result = np.empty((*rows.shape, vocabulary), np.float32)
    for index, row in enumerate(rows):
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        batch = lib.llama_batch_init(len(row), 0, 1)
        for i, token in enumerate(row):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = int(token), i, 1, 1
            batch.seq_id[i][0] = 0
        batch.n_tokens = len(row)
        if lib.llama_decode(context, batch):
            raise SystemExit("the model did not run")
        flat = ffi.buffer(lib.llama_get_logits(context), 4 * len(row) * vocabulary)
        result[index] = np.frombuffer(flat, np.float32).reshape(len(row), vocabulary)
        lib.llama_batch_free(batch)
    np.save(out, result)


def _quantize(model: str, out: str, kind: str, moments: str) -> None:
    ffi, lib = _binding()
    entries = [
        (ffi.new("char[]", name.encode()), np.ascontiguousarray(x, np.float32)) for name, x in np.load(moments).items()
    ]
    matrix = ffi.new("struct llama_model_imatrix_data[]", len(entries) + 1)  # the last has no name
    for index, (name, means) in enumerate(entries):
        matrix[index].name, matrix[index].size = name, means.size
        matrix[index].data = ffi.cast("const float *", means.ctypes.data)
    options = ffi.new("llama_model_quantize_params *", lib.llama_model_quantize_default_params())
    options.ftype = getattr(lib, f"LLAMA_FTYPE_MOSTLY_{kind}")
    options.nthread = int(os.environ.get("OMP_NUM_THREADS", "1"))
    options.imatrix = ffi.cast("const struct llama_model_imatrix_data *", matrix)
    if lib.llama_model_quantize(model.encode(), out.encode(), options):
        raise SystemExit("the model was not quantized")


def _round(weights: str, out: str, kind: str) -> None:
    _, lib = _binding()
    import llama_cpp_py_sync

    ggml = ctypes.CDLL(str(Path(llama_cpp_py_sync.__file__).with_name("libggml-base.so")))
    ggml.ggml_row_size.restype, ggml.ggml_row_size.argtypes = ctypes.c_size_t, [ctypes.c_int, ctypes.c_int64]
    ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
    ggml.ggml_quantize_chunk.argtypes = [
        ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p,
    ]  # fmt: skip
    number, codes = getattr(lib, f"GGML_TYPE_{kind}"), {}
    for name, x in np.load(weights).items():
        rows, columns = x.shape
        codes[name] = np.zeros((rows, ggml.ggml_row_size(number, columns)), np.uint8)
        source = np.ascontiguousarray(x, np.float32)
        ggml.ggml_quantize_chunk(number, source.ctypes.data, codes[name].ctypes.data, 0, rows, columns, None)
    np.savez(out, **codes)


if __name__ == "__main__":
    {"logits": _logits, "quantize": _quantize, "round": _round}[sys.argv[1]](*sys.argv[2:])
