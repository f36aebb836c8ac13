"""The tensors of finished steps move into the files of the checkpoint, so that they do not lie on the disk twice.

    1. tensors are written to a file of the checkpoint, and flushed to the disk
    2. a note in the store says how far that file is whole, and which steps have no tensor left to be written
    3. the files of these steps release their space, and keep their headers

Whatever stops a run, the same command continues after the last tensor that a note knows of. A step's file is emptied
and not deleted: this process maps it, and a mapped file keeps its space after its name is deleted. Besides, the next
run needs the names, shapes and dtypes in its header, though the tensors read as zeros then.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quant.execution.steps.step_file import is_step_file
from quant.export.checkpoint.files.directory import NEW
from quant.base.json_data import JsonData

if TYPE_CHECKING:
    from quant.calibration.walk.step_store import DirectoryStore

NOTE = "shard "  # before the name of the checkpoint's file, in the names of steps
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of Linux's falloc.h


@dataclass(frozen=True)
class Note(JsonData):
    """The first `bytes` bytes of a file of the checkpoint are whole; the step files named in `moved` are emptied."""

    bytes: int
    sha256: str
    moved: tuple[str, ...]

    def __post_init__(self) -> None:
        for name in self.moved:
            if not is_step_file(name):
                raise ValueError(f"moved: {name!r} is not a file of a step")


class MovedSteps:
    """The steps of a store that are in the checkpoint's files, and the `FileLog` that moves more of them there.

    Args:
        store: the store; it has notes if an earlier run was stopped while it moved steps.
    """

    def __init__(self, store: DirectoryStore) -> None:
        self._store, self._lock = store, threading.Lock()
        # By file of the checkpoint: its note, and the state of the hash there, from which hashing continues.
        self._notes: dict[str, tuple[Note, Any]] = {}
        self._sources: dict[str, str] = {}
        self._left: Counter[str] = Counter()
        for shard in store.shards():
            step = store.get(f"{NOTE}{shard}")
            with store.reading():
                note = Note(0, "", ()) if step is None else Note.from_dict(step.record)
            hashed = _hash_of_start(store.path / NEW / shard, note.bytes)
            if hashed is None or hashed.hexdigest() != note.sha256:
                # If one file has changed, no note is trusted, and the steps that were moved run again.
                self._notes.clear()
                for each in store.shards():
                    store.drop(f"{NOTE}{each}")
                return
            self._notes[shard] = note, hashed

    @property
    def files(self) -> set[str]:
        """Names of the files of steps whose tensors are only in the checkpoint's files."""
        return {name for note, _ in self._notes.values() for name in note.moved}

    def begin(self, made_of: Mapping[str, str]) -> None:
        """Prepares the log.

        Args:
            made_of: by tensor of the checkpoint, the name of the model's layer or tensor that it is made of.
        """
        holds, sources = self._store.holds, set(made_of.values())
        self._sources = {stored: holds[name] for stored, name in made_of.items() if name in holds}
        self._left = Counter(self._sources.values())
        # A file that holds anything else is kept: tensors tied to it may still have to be written.
        self._left.update(file for name, file in holds.items() if name not in sources)
        for file in self.files:  # a run that was stopped between steps 2 and 3 has not released it
            _release_space(self._store.path / file)

    def begun(self, file: str) -> tuple[int, Any]:
        """Returns the size of the whole part of a file, and the state of its hash there, as `FileLog` asks."""
        note, hashed = self._notes.get(file, (Note(0, "", ()), hashlib.sha256()))
        return note.bytes, hashed.copy()

    def reached(self, file: str, size: int, sha256: str, tensors: Sequence[str]) -> None:
        """Notes that a file is whole up to `size`, as `FileLog` asks; several threads write files at a time."""
        with self._lock:  # a step's file is emptied when the notes of all files that hold some of it are written
            sources = [self._sources.pop(name) for name in tensors if name in self._sources]
            self._left.subtract(sources)
            emptied = {source for source in sources if not self._left[source]} - self.files
            before, hashed = self._notes.get(file, (Note(0, "", ()), None))
            if emptied or size != before.bytes:
                note = Note(size, sha256, tuple(sorted({*before.moved, *emptied})))
                self._notes[file] = note, hashed
                self._store.note(f"{NOTE}{file}", note.to_dict())
                for source in emptied:
                    _release_space(self._store.path / source)


def _hash_of_start(file: Path, size: int) -> Any:
    """Returns SHA-256 of the first `size` bytes of a file; None where it has fewer."""
    hashed = hashlib.sha256()
    if not file.is_file() or file.stat().st_size < size:
        return None
    with file.open("rb") as opened:
        while size:
            piece = opened.read(min(size, 1 << 24))
            hashed.update(piece)
            size -= len(piece)
    return hashed


def _release_space(file: Path) -> None:
    """Gives the pages of a file's tensors back to the disk, where the file system can; they read as zeros then."""
    with file.open("r+b") as opened, suppress(OSError, AttributeError):
        # A safetensors file: 8 bytes with the length of the JSON header, the header, then the tensors.
        start = 8 + int.from_bytes(opened.read(8), "little")
        size = file.stat().st_size - start
        fallocate = ctypes.CDLL(None, use_errno=True).fallocate
        fallocate.argtypes = ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64
        fallocate(opened.fileno(), _KEEP_SIZE | _PUNCH_HOLE, start, size)
