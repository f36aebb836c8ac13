"""Says whose code an unexpected exception came from: this package's, transformers', or a model's own files.

The innermost frame of one of the three decides. Frames below it are of torch or of the standard library, which only
report a bad call.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import FrameType

_OURS = "quant"
_REMOTE = "transformers_modules"  # where transformers puts the Python files of a model


def explained(error: Exception, message: str) -> str:
    """Returns one line about an exception that is not a mistake of the user.

    Args:
        error: the exception with its traceback.
        message: the text of the exception in one line.
    """
    frames = list(_frames(error))
    packages = (_OURS, "transformers", _REMOTE)
    frame, line = next(((f, n) for f, n in reversed(frames) if _package(f) in packages), frames[-1])
    where = f"{type(error).__name__} at {Path(frame.f_code.co_filename).name}:{line}: {message}"
    function = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
    if _package(frame) == "transformers":
        return (
            f"transformers {metadata.version('transformers')} fails in its own {function} ({where}); try another "
            "version of it, or other inputs. If transformers by itself runs the model on these, report what --debug "
            "prints"
        )
    if _package(frame) == _REMOTE:
        return (
            f"the model's own Python files fail in {function} ({where}); they may need another version of "
            "transformers. --debug shows the traceback"
        )
    innermost, line = frames[-1]
    where = f"{type(error).__name__} at {Path(innermost.f_code.co_filename).name}:{line}: {message}"
    return f"this is a bug in Blockscale: run with --debug, and report what that prints ({where})"


def _frames(error: Exception) -> Iterator[tuple[FrameType, int]]:
    """Returns frames and line numbers, the innermost last."""
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
