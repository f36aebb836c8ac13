"""`read_ahead` brings the weight files of models into the page cache while Python still imports torch and transformers.

A thread reads the files and drops the bytes; the kernel keeps them, and the loader then finds them in memory.
POSIX_FADV_WILLNEED would not do: since 4.10 Linux reads no more than one window of readahead for a call, about 1 MB.

    chunk of 16 MiB    skipped if it is cached: its first and its middle byte can be read without waiting (RWF_NOWAIT)
                       else read into a buffer, while the interpreter's lock is free
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from quant.kernels.base.processor import memory_left

_CHUNK = 16 << 20  # bytes; so few calls that the thread seldom waits for the interpreter, which imports are using
_SHARE = 0.5  # of the memory that is left: a cache that is full drops what was read first


def read_ahead(*models: str | Path) -> threading.Thread | None:
    """Starts to read the weight files of models in the background.

    Args:
        models: files or directories, in the order in which they are opened. A name on the hub, which may have to be
            downloaded first, is left to the loader.

    Returns: The thread, which ends with the process; None where there is nothing to read, or it is unknown how much
        fits.
    """
    files = [file for model in models for file in files_to_read(Path(model).expanduser())]
    memory = memory_left()
    if not files or memory is None:
        return None
    thread = threading.Thread(target=_read, args=(files, int(_SHARE * memory)), name="read ahead", daemon=True)
    thread.start()
    return thread


def files_to_read(path: Path) -> list[Path]:
    """Returns the weight files that loading `path` will read, in that order."""
    if path.is_file():
        return [path]
    for pattern in ("model*.safetensors", "pytorch_model*.bin"):
        if files := sorted(file for file in path.glob(pattern) if file.is_file()):
            return files
    return []


def _read(files: Sequence[Path], limit: int) -> None:
    """Reads files in chunks, `limit` bytes of them at most."""
    buffer = memoryview(bytearray(_CHUNK))
    for path in files:
        try:
            with path.open("rb", buffering=0) as file:
                size = min(os.fstat(file.fileno()).st_size, limit)
                for offset in range(0, size, _CHUNK):
                    if not _is_cached(file.fileno(), offset, size):
                        file.seek(offset)
                        file.readinto(buffer[: min(_CHUNK, size - offset)])
        except OSError:  # the code that opens the file reports the error
            return
        limit -= size


def _is_cached(file: int, offset: int, size: int) -> bool:
    """Returns whether a chunk seems to be in the page cache: its first and its middle byte are."""
    nowait = getattr(os, "RWF_NOWAIT", None)  # Linux has it
    if nowait is None:
        return False
    try:
        middle = min(offset + _CHUNK // 2, size - 1)
        return all(os.preadv(file, [bytearray(1)], at, nowait) == 1 for at in (offset, middle))
    except OSError:  # it would have to wait, or the file system cannot say
        return False
