"""`Scan` looks for NaN and infinity in weight files, in threads.

Float tensors of one dtype lie side by side in a file. Such runs are read in pieces that stay in the cache, where two
integer maxima decide (`quant.formats.finite`). The result is a list of suspects, the tensors in a piece that holds such
a value. The caller looks at these again, because it knows which of them are masks.

The search runs after the model is built. Its calls take microseconds each and need Python's lock before and after, so
a search at the same time would wait for the building, and slow it down.
"""

from __future__ import annotations

import json
import os
import threading
from bisect import bisect_right
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from quant.export.checkpoint.files.tensor_file import DTYPE_NAMES
from quant.formats.finite import is_finite

_PIECE, _TASK = 1 << 22, 1 << 26  # bytes that are read at a time, and by one task
_THREADS = 4
# E8M0 are scales, whose NaN is read with them.
_FLOATS = {
    name: dtype for dtype, name in DTYPE_NAMES.items() if dtype.is_floating_point and dtype != torch.float8_e8m0fnu
}
# Each thread's buffer for a piece.
_own = threading.local()


@dataclass
class _Run:
    """Tensors of one dtype that lie side by side: where each begins, their names, and where the last one ends."""

    dtype: torch.dtype
    begins: list[int]
    names: list[str]
    end: int


class Scan:
    """The float tensors of safetensors files, by their headers.

    Args:
        files: the files to read.
        fp8: whether to read tensors in FP8 as well.

    Raises:
        ValueError: a file is damaged; the message names it.
    """

    def __init__(self, files: Iterable[Path], *, fp8: bool = True) -> None:
        runs = [(file, run) for file in files for run in _runs(file) if fp8 or run.dtype.itemsize > 1]
        # A task reads 64 MiB, so that threads share a large run.
        self._tasks = [(file, run, start) for file, run in runs for start in range(run.begins[0], run.end, _TASK)]

    def suspects(self) -> set[str]:
        """Reads the tensors; gives the names in the files of all tensors that may hold NaN or infinity."""
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="scan") as pool:
            return {name for names in pool.map(lambda task: _suspects(*task), self._tasks) for name in names}


def _runs(file: Path) -> list[_Run]:
    try:
        with file.open("rb") as opened:
            # The file begins with the header's length, and offsets count from the header's end.
            length, size = int.from_bytes(opened.read(8), "little"), file.stat().st_size
            if length > size:
                raise ValueError("the header is longer than the file")
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        placed = sorted((*fields["data_offsets"], name, fields["dtype"]) for name, fields in header.items())
        runs: list[_Run] = []
        for begin, end, name, kind in placed:
            dtype = _FLOATS.get(kind)
            if dtype is None or begin == end:
                continue
            begin, end = begin + 8 + length, end + 8 + length
            if not 8 + length <= begin <= end <= size:
                raise ValueError(f"{name} lies outside the file")
            if runs and runs[-1].dtype is dtype and runs[-1].end == begin:
                runs[-1].begins.append(begin)
                runs[-1].names.append(name)
                runs[-1].end = end
            else:
                runs.append(_Run(dtype, [begin], [name], end))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file}: truncated or damaged ({error}); write or download it again") from None
    return runs


def _suspects(file: Path, run: _Run, start: int) -> list[str]:
    """Returns the names of the tensors with NaN or infinity in the pieces of one task, from `start` on."""
    if not hasattr(_own, "buffer"):
        _own.buffer = torch.empty(_PIECE, dtype=torch.uint8)
    names: list[str] = []
    with file.open("rb", buffering=0) as opened:
        for begin in range(start, min(start + _TASK, run.end), _PIECE):
            piece = _own.buffer[: min(_PIECE, run.end - begin)]
            size = os.preadv(opened.fileno(), [piece.numpy()], begin)
            if size != len(piece):
                raise ValueError(f"{file}: ends before its tensors do; write or download it again")
            if not is_finite(piece.view(run.dtype)):
                first, last = (bisect_right(run.begins, offset) - 1 for offset in (begin, begin + size - 1))
                names += run.names[first : last + 1]
    return names
