"""`write_tensor_file` writes a safetensors file piece by piece, and hashes it in the same pass.

The file is byte for byte what `safetensors.torch.save_file` writes: a header of names, dtypes, shapes and places, then
the tensors, wide dtypes first and then by name. `save_file` wants all tensors in memory at once and leaves the hash to
a second pass over the file. Here a tensor may be on a GPU, from where it comes through two pinned buffers, and may be
made when its turn comes, so that a file takes no more memory than its largest tensor.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from quant.export.checkpoint.check import value_problem
from quant.formats.finite import is_finite, is_finite_or_mask

_PIECE_BYTES = 1 << 24
_BEHIND = 2  # pieces that are written and wait to be hashed
_TOLD_BYTES = 1 << 28
# In the order in which the format has them: the file begins with tensors of the last.
_DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e8m0fnu: "F8_E8M0", torch.int16: "I16", torch.uint16: "U16",
    torch.float16: "F16", torch.bfloat16: "BF16", torch.int32: "I32", torch.uint32: "U32", torch.float32: "F32",
    torch.complex64: "C64", torch.float64: "F64", torch.int64: "I64", torch.uint64: "U64",
}  # fmt: skip
_RANK = {dtype: rank for rank, dtype in enumerate(_DTYPES)}


@dataclass(frozen=True, eq=False)
class Made:
    """A tensor that is made when it is written.

    Attributes:
        shape, dtype: of the tensor.
        make: gives it.
    """

    shape: torch.Size
    dtype: torch.dtype
    make: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class FileLog(Protocol):
    """Knows how far files were written, so that they are not begun anew."""

    def begun(self, file: str) -> tuple[int, Any]:
        """How many bytes of a file are whole, up to the end of a tensor, and their SHA-256 so far."""

    def reached(self, file: str, size: int, sha256: str, tensors: Sequence[str]) -> None:
        """Is told that the first `size` bytes are on the disk, and which tensors ended since it was last told."""


def write_tensor_file(
    path: Path,
    tensors: Mapping[str, torch.Tensor | Made],
    metadata: Mapping[str, str] | None = None,
    *,
    durable: bool = False,
    masks: Collection[str] | None = None,
    log: FileLog | None = None,
) -> str:
    """Writes `tensors` to `path`; a file that is there is replaced, not overwritten, unless `log` knows its beginning.

    Args:
        path: of the file.
        tensors: by name.
        metadata: for its header.
        durable: whether it is on the disk when this returns.
        masks: buffers, which may hold -infinity; every other tensor is then refused if it is not finite. None looks at
            no values.
        log: is told of what is on the disk, every quarter of a gigabyte and at the end.

    Returns:
        SHA-256 of the file.

    Raises:
        OSError: it cannot be written.
        ValueError: a tensor holds NaN or infinity; the file is incomplete.
    """
    names = sorted(tensors, key=lambda name: (-_RANK[tensors[name].dtype], name))
    found, hashed = (0, hashlib.sha256()) if log is None else log.begun(path.name)
    if path.exists() and not found:
        path.unlink()  # tensors may be maps of it
    syncing: Future[None] | None = None
    hashing: deque[Future[None]] = deque()
    done: list[str] = []
    with path.open("r+b" if found else "wb") as file, _thread() as hasher, _thread() as syncer:
        place = told = file.truncate(file.seek(found))

        def tell() -> None:
            assert log is not None
            while hashing:
                hashing.popleft().result()
            file.flush()
            os.fsync(file.fileno())
            log.reached(path.name, place, hashed.hexdigest(), done)
            done.clear()

        for name, piece in _pieces(tensors, names, metadata, masks, found):
            if len(piece):
                hashing.append(hasher.submit(hashed.update, piece))
                file.write(piece)
                place += len(piece)
            if durable and (syncing is None or syncing.done()):
                syncing = syncer.submit(os.fsync, file.fileno())  # the disk does not wait for the end
            if len(hashing) > _BEHIND:
                hashing.popleft().result()
            if name is not None:
                done.append(name)
                if log is not None and place - told >= _TOLD_BYTES:
                    tell()
                    told = place
        if log is not None:
            tell()
        elif durable:
            file.flush()
            os.fsync(file.fileno())
    return hashed.hexdigest()


def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="tensor-file")


def _pieces(
    tensors: Mapping[str, torch.Tensor | Made],
    names: list[str],
    metadata: Mapping[str, str] | None,
    masks: Collection[str] | None,
    found: int,
) -> Iterator[tuple[str | None, memoryview]]:
    """The bytes of the file behind the first `found`, and with the last piece of a tensor its name.

    A piece is valid until `_BEHIND` + 1 more have been given.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in names:
        tensor = tensors[name]
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    text += b" " * (-len(text) % 8)
    if not found:
        yield None, memoryview(len(text).to_bytes(8, "little") + text)
    end = 8 + len(text)
    for name in names:
        end += tensors[name].nbytes
        if end > found:
            for piece in _pieces_of(name, tensors[name], masks):
                yield None, piece
        yield name, memoryview(b"")


def _pieces_of(name: str, tensor: torch.Tensor | Made, masks: Collection[str] | None) -> Iterator[memoryview]:
    """The bytes of one tensor."""
    made = tensor.make() if isinstance(tensor, Made) else tensor
    data = made.detach().contiguous().flatten().view(torch.uint8)
    if masks is not None and data.is_cuda:
        _check(name, made, made, name in masks)
    if data.is_cuda:
        yield from _pieces_of_gpu(data)
        return
    data = data.cpu()
    for start in range(0, len(data), _PIECE_BYTES):
        piece = data[start : start + _PIECE_BYTES]
        if masks is not None:
            _check(name, made, piece.view(made.dtype), name in masks)
        yield piece.numpy().data


def _check(name: str, tensor: torch.Tensor, piece: torch.Tensor, is_buffer: bool) -> None:
    """Raises ValueError where a piece of a tensor holds NaN or infinity."""
    if not (is_finite_or_mask(piece) if is_buffer else is_finite(piece)):
        raise ValueError(
            f"{name} {list(tensor.shape)} {value_problem(tensor, is_buffer=is_buffer)}; nothing was written: repair "
            "the model"
        )


def _pieces_of_gpu(data: torch.Tensor) -> Iterator[memoryview]:
    """One piece is on its way while the one before is written; earlier work on the data must have ended."""
    stream = torch.cuda.Stream(data.device)
    count = _BEHIND + 2
    buffers = [torch.empty(min(_PIECE_BYTES, len(data)), dtype=torch.uint8, pin_memory=True) for _ in range(count)]
    before: tuple[torch.Tensor, torch.cuda.Event] | None = None
    for turn, start in enumerate(range(0, len(data), _PIECE_BYTES)):
        part = data[start : start + _PIECE_BYTES]
        here = buffers[turn % count][: len(part)]
        with torch.cuda.stream(stream):
            here.copy_(part, non_blocking=True)
            arrived = stream.record_event()
        if before is not None:
            before[1].synchronize()
            yield before[0].numpy().data
        before = here, arrived
    if before is not None:
        before[1].synchronize()
        yield before[0].numpy().data
