"""`open_session` loads an exported file in the runtime that it is for."""

from __future__ import annotations

from pathlib import Path

from quant.engines.onnxruntime_session import OnnxruntimeSession
from quant.engines.session import Session
from quant.engines.tensorrt_session import TensorrtSession
from quant.errors import UserError

ONNX_FILE = "model.onnx"


def open_session(path: str | Path) -> Session:
    """The session of an ONNX file, a directory with `model.onnx`, or an engine.

    Raises:
        UserError: the file cannot be loaded here, or is no serving graph; the message names it and the way out.
    """
    path = Path(path)
    if is_engine(path):
        return TensorrtSession(path)
    return OnnxruntimeSession(path / ONNX_FILE if path.is_dir() else path)


def is_engine(path: Path) -> bool:
    """Whether a file is an engine, and not an ONNX file; UserError if it is neither."""
    if (path / ONNX_FILE).is_file():
        return False
    if not path.is_file():
        raise UserError(f"{path}: no such file; name an ONNX file or an engine that `quant export` wrote")
    return path.suffix != ".onnx"
