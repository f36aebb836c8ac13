"""`open_session` loads an exported file in the runtime that it is for."""

from __future__ import annotations

from pathlib import Path

from quant.base.errors import UserError
from quant.export.aoti.aoti_session import AotiSession
from quant.export.onnx.engine_session import EngineSession
from quant.export.onnx.onnxruntime_session import OnnxruntimeSession
from quant.export.tensorrt.tensorrt_session import TensorrtSession

ONNX_FILE = "model.onnx"
PACKAGE_ENDING = ".pt2"


def open_session(path: str | Path, *, unsafe_load: bool = False) -> EngineSession:
    """Opens a session of an ONNX file, a directory with `model.onnx`, an engine, or a package of AOTInductor.

    Args:
        path: the file or directory.
        unsafe_load: whether a package may be loaded: it is compiled code, which runs at once.

    Raises:
        UserError: the file cannot be loaded here, or is no serving graph; the message names it and the way out.
    """
    path = Path(path)
    if path.suffix == PACKAGE_ENDING and path.is_file():
        return AotiSession(path, unsafe_load=unsafe_load)
    if is_engine(path):
        return TensorrtSession(path)
    return OnnxruntimeSession(path / ONNX_FILE if path.is_dir() else path)


def is_engine(path: Path) -> bool:
    """Returns whether a file is an engine of TensorRT; UserError if there is no such file."""
    if (path / ONNX_FILE).is_file():
        return False
    if not path.is_file():
        raise UserError(f"{path}: no such file; name an ONNX file, engine or package that `quant export` wrote")
    return path.suffix not in (".onnx", PACKAGE_ENDING)
