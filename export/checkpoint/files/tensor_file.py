"""`write_tensor_file` writes a safetensors file piece by piece, and hashes it in the same pass.

The file has the same bytes as one written by `safetensors.torch.save_file`:

    8 bytes      length of the header, little-endian; a multiple of 8
    header       JSON: {"__metadata__": {…}, "NAME": {"dtype": "F8_E4M3", "shape": […], "data_offsets": [begin, end]}}
    tensors      without gaps, wide dtypes first (`DTYPE_NAMES`) and then by name

`save_file` takes all tensors in memory at once and leaves the hash to a second pass over the file. Here a tensor may be
on a GPU, from where it comes through pinned buffers, or be computed when its turn comes (`DeferredTensor`), so that a
file takes no more memory than its largest tensor.
"""

import hashlib
import json
import math
import os
import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, Self

import torch
from torch import Tensor

from quant.export.checkpoint.files.layouts import value_problem
from quant.formats.finite import are_finite

CHECKSUMS = "SHA256SUMS"
"""The SHA-256 of the files of a checkpoint without a report, in the form of `sha256sum --check`."""
# The star says that the file was read as bytes; names of weight files have no backslash, which would be escaped.
_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")


def sha256_of(path: Path) -> str:
    """Returns SHA-256 of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_checksums(directory: Path, hashes: Mapping[str, str], *unhashed: str) -> None:
    """Writes `hashes`, SHA-256 by the name of each file, and hashes those of the files `unhashed` that are there."""
    sums = {**hashes, **{name: sha256_of(directory / name) for name in unhashed if (directory / name).is_file()}}
    lines = [f"{digest}  {name}\n" for name, digest in sorted(sums.items())]
    (directory / CHECKSUMS).write_text("".join(lines), encoding="utf-8")


def read_checksums(file: Path) -> dict[str, str]:
    """Returns the SHA-256 of each file by its name; ValueError for a file of another form."""
    hashes = {}
    for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        fields = _LINE.fullmatch(line)
        if fields is None:
            raise ValueError(f"{file}: line {number} is no SHA-256 with a file's name; restore it, or delete the file")
        hashes[fields[2]] = fields[1]
    return hashes


_PIECE_BYTES = 1 << 24
_UNHASHED = 2  # pieces that may be written and not yet hashed
_SMALL = 1 << 18  # below this many bytes, pieces are written and hashed together
_UNSYNCED = 1 << 26  # bytes that the disk is asked to write at once
_LOG_BYTES = 1 << 28  # written between two calls of the log
DTYPE_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e8m0fnu: "F8_E8M0", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.int16: "I16", torch.uint16: "U16",
    torch.float16: "F16", torch.bfloat16: "BF16", torch.int32: "I32", torch.uint32: "U32", torch.float32: "F32",
    torch.complex64: "C64", torch.float64: "F64", torch.int64: "I64", torch.uint64: "U64",
}  # fmt: skip
"""Names in safetensors of PyTorch's dtypes, in the order of its `Dtype`: a file begins with tensors of the last."""
_RANK = {dtype: rank for rank, dtype in enumerate(DTYPE_NAMES)}


@dataclass(frozen=True, eq=False)
class DeferredTensor:
    """A tensor that is computed when it is written."""

    shape: torch.Size
    dtype: torch.dtype
    compute: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class FileLog(Protocol):
    """Records how far files were written, so that a later run continues them."""

    def begun(self, file: str) -> tuple[int, Any]:
        """Returns how many bytes of a file are whole, up to the end of a tensor, and the state of their SHA-256."""

    def reached(self, file: str, size: int, sha256: str, tensors: Sequence[str]) -> None:
        """Records that the first `size` bytes are on the disk, and `tensors` that ended since the last call."""


def write_tensor_file(
    path: Path, tensors: Mapping[str, Tensor | DeferredTensor], metadata: Mapping[str, str] | None = None, *,
    durable: bool = False, masks: Collection[str] | None = None, log: FileLog | None = None,
) -> str:  # fmt: skip
    """Writes `tensors` to `path` and returns its SHA-256; a file that is there is replaced, not overwritten.

    Of the tensors, `masks` may hold -infinity, and all others are refused unless they are finite (ValueError); None
    looks at no values. A `log` is called every quarter of a gigabyte and at the end, when the bytes so far are on the
    disk; it may know a beginning of the file that an earlier run wrote, after which the file is continued.
    """
    resume_at, sha256 = (0, hashlib.sha256()) if log is None else log.begun(path.name)
    if path.exists() and not resume_at:
        path.unlink()  # tensors may be memory-mapped from the old file
    with path.open("r+b" if resume_at else "wb") as file, _Writer(file, resume_at, sha256, durable) as writer:
        logged = resume_at
        for name, piece in _pieces(tensors, metadata, masks, resume_at):
            writer.write(piece)
            if name is not None:
                writer.ended.append(name)
                if log is not None and writer.size - logged >= _LOG_BYTES:
                    writer.report(log, path.name)
                    logged = writer.size
        writer.write_gathered()
        if log is not None:
            writer.report(log, path.name)
        elif durable:
            writer.sync()
    return str(sha256.hexdigest())


class _Writer:
    """An open file, cut after its first `size` bytes, with threads that hash its pieces and bring them to the disk."""

    def __init__(self, file: BinaryIO, size: int, sha256: Any, durable: bool) -> None:
        self.file, self.sha256, self.durable = file, sha256, durable
        self.size = file.truncate(file.seek(size))
        self.ended: list[str] = []
        """Names of the tensors that ended since the last report."""
        self._small = bytearray()
        self._unsynced = 0
        self._hashing: deque[Future[None]] = deque()
        self._syncing: Future[None] | None = None
        self._hasher, self._syncer = (ThreadPoolExecutor(1, thread_name_prefix="tensor-file") for _ in range(2))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._hasher.shutdown()
        self._syncer.shutdown()

    def write(self, piece: memoryview) -> None:
        """Writes a piece; small ones, such as the scales of thousands of experts, are gathered and written together."""
        self.size += len(piece)
        if len(piece) >= _SMALL:
            self.write_gathered()
            self._write(piece)
            return
        self._small += piece
        if len(self._small) >= _PIECE_BYTES:
            self.write_gathered()

    def write_gathered(self) -> None:
        if self._small:
            self._write(memoryview(self._small))
            self._small = bytearray()

    def _write(self, piece: memoryview) -> None:
        """Writes a piece while it and up to `_UNHASHED` pieces before it are hashed."""
        self._hashing.append(self._hasher.submit(self.sha256.update, piece))
        self.file.write(piece)
        self._unsynced += len(piece)
        # The disk writes in parallel; a single fsync at the end would wait for everything.
        if self.durable and self._unsynced >= _UNSYNCED and (self._syncing is None or self._syncing.done()):
            self._syncing = self._syncer.submit(os.fsync, self.file.fileno())
            self._unsynced = 0
        if len(self._hashing) > _UNHASHED:
            self._hashing.popleft().result()

    def sync(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())

    def report(self, log: FileLog, name: str) -> None:
        """Tells the log of the file `name` that all pieces are on the disk, with their hash."""
        self.write_gathered()
        while self._hashing:
            self._hashing.popleft().result()
        self.sync()
        log.reached(name, self.size, self.sha256.hexdigest(), self.ended)
        self.ended.clear()


def _pieces(
    tensors: Mapping[str, Tensor | DeferredTensor],
    metadata: Mapping[str, str] | None,
    masks: Collection[str] | None,
    resume_at: int,
) -> Iterator[tuple[str | None, memoryview]]:
    """Yields the bytes of the file after `resume_at`, valid for `_UNHASHED` + 1 more pieces.

    A tensor's last has its name.
    """
    names = sorted(tensors, key=lambda name: (-_RANK[tensors[name].dtype], name))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in names:
        tensor = tensors[name]
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight bytes, as in the Rust library
    if not resume_at:
        yield None, memoryview(len(text).to_bytes(8, "little") + text)
    end = 8 + len(text)
    for name in names:
        end += tensors[name].nbytes
        if end > resume_at:
            for piece in _pieces_of(name, tensors[name], masks):
                yield None, piece
        yield name, memoryview(b"")


def _pieces_of(name: str, tensor: Tensor | DeferredTensor, masks: Collection[str] | None) -> Iterator[memoryview]:
    tensor = tensor.compute() if isinstance(tensor, DeferredTensor) else tensor
    is_buffer = masks is not None and name in masks
    if tensor.is_cuda:
        # On a GPU one look at the whole tensor is fast; on the CPU a piece is checked while it is in the cache.
        if masks is not None:
            _check(name, tensor, is_buffer)
        yield from _pieces_of_gpu(_bytes_of(tensor))
        return
    data = _bytes_of(tensor if tensor.device.type == "cpu" else tensor.cpu()).numpy()
    for start in range(0, len(data), _PIECE_BYTES):
        piece = data[start : start + _PIECE_BYTES]
        if masks is not None and not are_finite(piece, tensor.dtype, is_mask=is_buffer):
            _check(name, tensor, is_buffer)
        yield piece.data


def _check(name: str, tensor: Tensor, is_buffer: bool) -> None:
    """Raises ValueError where a tensor holds NaN or infinity."""
    if problem := value_problem(tensor, is_buffer=is_buffer):
        raise ValueError(f"{name} {list(tensor.shape)} {problem}; nothing was written: repair the model")


def _bytes_of(tensor: Tensor) -> Tensor:
    """Returns the bytes of a tensor, uint8 `[bytes]`, which share its memory if it is contiguous.

    Each operation of PyTorch gives the interpreter's lock away: where tens of thousands of tensors go into several
    files at once, waiting for it takes longer than writing, so what is not needed is left out.
    """
    flat = (tensor.detach() if tensor.requires_grad else tensor).reshape(-1)
    # A single value may have any stride, and one that is not 1 cannot be viewed as bytes.
    flat = flat if flat.stride(0) == 1 else flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def _pieces_of_gpu(data: Tensor) -> Iterator[memoryview]:
    """Copies one piece while the piece before it is written; earlier work on the data must have ended.

    A buffer is filled again when its piece is hashed: at most `_UNHASHED` wait, one is written and one is filled.
    """
    stream = torch.cuda.Stream(data.device)
    count = _UNHASHED + 2
    buffers = [torch.empty(min(_PIECE_BYTES, len(data)), dtype=torch.uint8, pin_memory=True) for _ in range(count)]
    before: tuple[Tensor, torch.cuda.Event] | None = None
    for turn, start in enumerate(range(0, len(data), _PIECE_BYTES)):
        part = data[start : start + _PIECE_BYTES]
        buffer = buffers[turn % count][: len(part)]
        with torch.cuda.stream(stream):
            buffer.copy_(part, non_blocking=True)
            arrived = stream.record_event()
        if before is not None:
            before[1].synchronize()
            yield before[0].numpy().data
        before = buffer, arrived
    if before is not None:
        before[1].synchronize()
        yield before[0].numpy().data
