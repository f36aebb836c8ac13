"""A run of `quantize` keeps finished steps in a partial directory, so that the same command continues after them.

    .OUT.partial/
      run.json                    the dependencies of the run: its model, plan, data, options and versions
      00007-SHA256.safetensors    the seventh step that the run wrote; with -2 after the number, by its rank 2
      new/                        the checkpoint, while its last files are written
      complete                    stands here from the moment at which `new` is whole

A step is one safetensors file: its tensors, and in the metadata its name and a record of JSON. The file is written
under another name and renamed when it is whole, and its name holds the hash of its contents. So however a run stops, a
step is whole or missing, and a step that was damaged later is noticed and done again. Of two files of one step, the one
with the higher number counts. A run whose dependencies differ from `run.json` is refused: its steps would not fit.

The ranks of one run share the directory. The first rank writes the results that all ranks have, and each rank writes
its own results; all read all files. Threads write files while the next step is worked on. Written tensors are then
mapped from the file, so that the memory of finished steps belongs to the page cache and not to the process.

In the end the tensors move into the checkpoint's files, so that they do not lie on the disk twice (`MovedSteps`):

    1. tensors are written to a file of the checkpoint, and flushed to the disk
    2. a note, a step without tensors, says how far that file is whole, and which steps have no tensor left to write
    3. the files of these steps release their space, and keep their headers

Whatever stops a run, the same command continues after the last tensor that a note knows of. A step's file is emptied
and not deleted: this process maps it, and a mapped file keeps its space after its name is deleted. Besides, the next
run needs the names, shapes and dtypes in its header, though the tensors read as zeros then.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quant.base.atomic import claimed, not_written, sync, write_atomically
from quant.base.errors import option
from quant.base.json_files import JsonData, json_text, parse_json, read_json, typed
from quant.base.processor import trim_heap
from quant.calibration.ranks import from_first, rank_and_world, wait_for_all
from quant.calibration.session import Mapped, Step, Store, Tensors
from quant.export.checkpoint.files.directory import COMPLETE, NEW, finish_directory
from quant.export.checkpoint.files.tensor_file import sha256_of, write_tensor_file
from quant.models.files import WatchedFiles

_NAME = re.compile(r"(\d{5})(-\d+)?-([0-9a-f]{64})\.safetensors")
_STEPS = "*.safetensors"
RUN = "run.json"
NOTE = "shard "  # before the name of the checkpoint's file, in the names of notes
_IN_FLIGHT = 2  # steps that are written at a time, each by a thread: SHA-256 is slower than a GPU solves
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of Linux's falloc.h


class StepFile(NamedTuple):
    """The file of a finished step."""

    path: Path
    step: str

    @classmethod
    def read(cls, path: Path) -> StepFile | None:
        """Returns the file at `path`; None where it is no longer there, or its header is damaged."""
        try:
            with safe_open(path, framework="pt") as opened:
                step = (opened.metadata() or {}).get("step")
        except (OSError, SafetensorError):
            return None
        return cls(path, step) if step is not None and _NAME.fullmatch(path.name) else None

    @classmethod
    def write(cls, start: Path, step: str, tensors: Tensors, record: Any, *, durable: bool = False) -> StepFile:
        """Writes a step whole or not at all; `start` is its path up to the hash, such as `….partial/00007`."""
        unfinished = start.with_suffix(".unfinished")
        metadata = {"step": step, "record": json_text(record)}
        try:
            sha256 = write_tensor_file(unfinished, tensors, metadata, durable=durable)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            raise OSError(f"{not_written(start, error)}; what was finished before is kept") from error
        # A rename within a directory is atomic, so a file under its final name is whole.
        path = unfinished.rename(f"{start}-{sha256}.safetensors")
        if durable:
            sync(path.parent)
        return cls(path, step)

    def is_whole(self) -> bool:
        """Returns whether the contents are as they were written."""
        return self.path.is_file() and sha256_of(self.path) == self.path.stem.rpartition("-")[2]

    def record(self) -> Any:
        """Returns the record of the step."""
        with safe_open(self.path, framework="pt") as opened:
            return parse_json(opened.metadata()["record"].encode())

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors, as views of the mapped file."""
        with safe_open(self.path, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


class DirectoryStore(Store):
    """The partial directory of a run; open for one process at a time, or for the ranks of one run.

    `depends` are the run's dependencies by name, JSON-ready: the model's files, the plan, versions, options. ValueError
    names the difference to an earlier run that left the directory, and the `command` of that run.
    """

    def __init__(
        self, out: Path, depends: Mapping[str, Any], sources: WatchedFiles | None = None, *, restart: bool = False
    ) -> None:
        self.out, self.path = out.resolve(), partial_path(out)
        self.directory = self.path
        self.rank = rank_and_world()[0]
        self.sources = sources or WatchedFiles(None)
        self.holds: dict[str, str] = {}
        """The files of steps by the names of the model's layers and tensors that are in them, there as `KIND:NAME`."""
        self._steps: dict[str, StepFile] = {}
        self._seen, self._verified = set[Path](), set[Path]()
        self._awaited: list[tuple[str, Mapped]] = []
        self._claim = ExitStack()
        self._threads = ThreadPoolExecutor(_IN_FLIGHT, thread_name_prefix="writer")
        self._writing: list[Future[None]] = []
        self._bytes_per_second = 5e8  # a guess, until the first large step has been timed
        self._lock = threading.Lock()
        self._hopeless = False
        try:
            if self.rank == 0:
                self._open(depends, restart)
            self.is_complete = from_first((self.path / COMPLETE).exists)
            """Whether the checkpoint was whole when the run began, and perhaps not yet under its name."""
            if not (self.path / RUN).is_file():
                raise ValueError(
                    f"{self.path}: the first rank keeps its work there, and this one does not see it; give an "
                    f"{option('out')} on a file system that all machines share"
                )
            self._run = _read_run(self.path)
            self._take_in()
        except BaseException:
            self.close()
            raise
        # Numbers go on after the largest, so that the newest file of a step has the highest.
        self._number = max((int(file.path.name[:5]) for file in self._steps.values()), default=0)
        wait_for_all()

    def _open(self, depends: Mapping[str, Any], restart: bool) -> None:
        """Claims the directory, and compares its run with this one or begins a new one."""
        # The claim is a lock of the operating system: a killed process leaves none behind.
        self._claim.enter_context(claimed(self.out))
        if restart:
            shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True, exist_ok=True)
        run = {"depends": json.loads(json_text(depends)), "expected": {}}  # with lists for tuples, as in the file
        if (self.path / RUN).is_file():
            old = _read_run(self.path)
            changed = _difference(old["depends"], {**run["depends"], "command": old["depends"].get("command")})
            if not changed:
                return
            if not (self.path / COMPLETE).exists() or (self.path / NEW).exists():
                raise ValueError(f"{self.path} holds an unfinished run in which {changed}; {_way_out(old)}")
        # Steps without a run belong to one that finished, except for its last deletion.
        for file in (*self.path.glob(_STEPS), self.path / COMPLETE):
            file.unlink(missing_ok=True)
        write_atomically(self.path / RUN, json_text(run))

    def _take_in(self) -> None:
        """Reads the names of steps in files that were not seen before."""
        for path in sorted({*self.path.glob(_STEPS)} - self._seen):
            self._seen.add(path)
            if (file := StepFile.read(path)) is not None:
                self._steps[file.step] = file

    def refresh(self) -> None:
        """Takes in the steps of other ranks, and runs the callbacks that wait for them."""
        before = set(self._steps)
        self._take_in()
        # Another live rank wrote them a moment ago: hashing gigabytes again would stall the run.
        self._verified |= {file.path for step, file in self._steps.items() if step not in before}
        arrived = [(step, then) for step, then in self._awaited if step in self._steps]
        self._awaited = [(step, then) for step, then in self._awaited if step not in self._steps]
        for step, then in arrived:
            then(self._mapped(self._steps[step]))

    def __enter__(self) -> DirectoryStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Closes the directory. Its steps stay for the next run, unless the same command would fail again."""
        if kind is not None:
            self._threads.shutdown()  # steps that wait to be written are finished work too
        self.close()
        empty = not any(self.path.glob(_STEPS)) and not (self.path / COMPLETE).exists()
        if self.rank == 0 and kind is not None and (self._hopeless or empty):
            shutil.rmtree(self.path, ignore_errors=True)

    @contextmanager
    def solving(self) -> Iterator[None]:
        """Marks a ValueError as one that the same command would raise again, so that nothing is to be kept.

        Where a file of the model has changed, that explains it, and is said instead.
        """
        try:
            yield
        except ValueError:
            self.sources.check()
            self._hopeless = True
            raise

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Reports read errors as corruption while open: each step's SHA-256 has matched before."""
        try:
            yield
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, AssertionError, RuntimeError) as error:
            raise ValueError(
                f"{self.path}: a finished step is not as it was written ({type(error).__name__}: {error}); pass "
                "--restart to begin anew"
            ) from error

    def progress(self) -> tuple[int, int]:
        # Damaged steps are left out by `get`. What it has hashed is not hashed again when the run needs it.
        whole = filter(None, map(self.get, list(self._steps)))
        solved = sum(name.startswith("codes:") for step in whole for name in step.tensors)
        return solved, sum(file.stat().st_size for file in self.path.rglob("*.safetensors"))

    def __contains__(self, step: str) -> bool:
        return step in self._steps

    def get(self, step: str) -> Step | None:
        file = self._steps.get(step)
        if file is None:
            return None
        if file.path not in self._verified:
            # The space of a moved file was released: its pages read as zeros, and the SHA-256 cannot match.
            is_moved = not step.startswith(NOTE) and file.path.name in self._moved.files
            if not (is_moved and file.path.is_file()) and not file.is_whole():
                del self._steps[step]
                return None
            self._verified.add(file.path)
        with self.reading():
            return Step(self._mapped(file), file.record())

    def _mapped(self, file: StepFile) -> dict[str, Tensor]:
        tensors = file.tensors()
        self.holds |= {key.partition(":")[2]: file.path.name for key in tensors}
        return tensors

    def drop(self, step: str) -> None:
        self.flush()
        file = self._steps.pop(step, None)
        if file is not None and self.rank == 0:
            _delete(file.path)

    def put(self, step: str, tensors: Tensors, record: Any, then: Mapped | None = None, *, alone: bool = False) -> None:
        """As in `Store`, by a thread; waits while two other steps are written."""
        self.sources.check()
        if self.rank and not alone:
            if then is not None:
                self._awaited.append((step, then))
            self.refresh()
            return
        while len(self._writing) >= _IN_FLIGHT:
            self._writing.pop(0).result()
        own = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        devices = {tensor.device for tensor in own.values() if tensor.is_cuda}
        # A writer thread has a stream of its own: without the events it could copy a tensor before its kernel has run.
        computed = [torch.cuda.current_stream(device).record_event() for device in devices]
        start = self._next_start()

        def write() -> None:
            for event in computed:
                event.synchronize()
            started = time.perf_counter()
            file = StepFile.write(start, step, own, record)
            nbytes = sum(tensor.nbytes for tensor in own.values())
            if nbytes > 1 << 24:  # small files time the file system's latency instead of its bandwidth
                self._bytes_per_second = nbytes / (time.perf_counter() - started)
            # Drops the originals before their maps take over, so that `trim_heap` finds their memory free.
            own.clear()
            self._keep(file)
            if then is not None:
                then(self._mapped(file))
            if not computed:  # the heap is locked meanwhile; a run on a GPU has left nothing there
                trim_heap()

        self._writing.append(self._threads.submit(write))

    def note(self, step: str, record: Any) -> None:
        """Keeps a step that is only a record, which is on the disk when this returns."""
        self._keep(StepFile.write(self._next_start(), step, {}, record, durable=True))

    def _next_start(self) -> Path:
        self._number += 1
        return self.path / (f"{self._number:05d}-{self.rank}" if self.rank else f"{self._number:05d}")

    def _keep(self, file: StepFile) -> None:
        """Takes in a file that this rank has written; of two files of a step, the older one is deleted."""
        with self._lock:
            self._seen.add(file.path)
            self._verified.add(file.path)
            # The file itself may be there already: `refresh` sees it as soon as it has its name.
            files = {file, self._steps.get(file.step, file)}
            newest = self._steps[file.step] = max(files, key=lambda each: each.path.name)
        for each in files - {newest}:
            _delete(each.path)

    def expect(self, name: str, value: Any) -> None:
        expected = self._run["expected"]
        if name not in expected:
            expected[name] = value
            if self.rank == 0:
                write_atomically(self.path / RUN, json_text(self._run))
        elif expected[name] != value:
            raise ValueError(f"{self.path} holds an unfinished run with another {name}; {_way_out(self._run)}")

    @property
    def is_moving(self) -> bool:
        return bool(self._moved.files)

    def shards(self) -> list[str]:
        return [step.removeprefix(NOTE) for step in self._steps if step.startswith(NOTE)]

    def moving(self, made_of: Mapping[str, str]) -> MovedSteps:
        self._moved.begin(made_of)
        return self._moved

    @cached_property
    def _moved(self) -> MovedSteps:
        return MovedSteps(self)

    def seconds_to_write(self, nbytes: int) -> float:
        return nbytes / self._bytes_per_second

    def flush(self) -> None:
        while self._writing:
            self._writing.pop(0).result()
        while self._awaited:
            self.refresh()
            # Other ranks may write to a network file system, which has no notification to wait for.
            time.sleep(0.05)

    def finish(self) -> None:
        self.flush()
        if self.rank == 0:
            finish_directory(self.path, self.out)
        self.close()
        if self.rank == 0:
            shutil.rmtree(self.path, ignore_errors=True)
            if self.path.exists():  # as in `_delete`
                atexit.register(_remove_unmapped, self.path)

    def close(self) -> None:
        """Releases the directory after the steps that are being written; the next run finds it as it is."""
        self._threads.shutdown(cancel_futures=True)
        self._claim.close()


def _delete(file: Path) -> None:
    """Deletes a file of a step. Windows does not, while a tensor maps it; then it stays until the run is finished."""
    with suppress(PermissionError):
        file.unlink(missing_ok=True)


def _remove_unmapped(directory: Path) -> None:
    """Deletes a directory when the tensors that map its files are garbage."""
    gc.collect()
    shutil.rmtree(directory, ignore_errors=True)


def partial_path(out: Path) -> Path:
    """Returns the directory in which a run that writes to `out` keeps finished steps."""
    out = out.resolve()
    return out.parent / f".{out.name}.partial"


def is_finished(out: Path) -> bool:
    """Returns whether an earlier run to `out` got as far as a whole checkpoint, and not to its own end."""
    return os.path.exists(partial_path(out) / COMPLETE)  # also where the name is too long for the file system


def _read_run(directory: Path) -> dict[str, dict[str, Any]]:
    """Returns what the run in a partial directory depends on, and what it came to expect later."""

    def make(document: Any) -> dict[str, dict[str, Any]]:
        run: dict[str, dict[str, Any]] = typed(dict[str, dict[str, Any]], document, "run")
        if set(run) == {"depends", "expected"}:
            return run
        raise ValueError("it does not say what the run depends on")

    try:
        return read_json(directory / RUN, "the start of a run", make)
    except ValueError as error:
        raise ValueError(f"{error}; pass --restart to begin anew") from None


def _way_out(run: Mapping[str, Any]) -> str:
    command = run["depends"].get("command", "quantize")  # which is that of a call in Python
    same = "give what it was begun with" if command == "quantize" else f"`{command}` continues it"
    return f"{same}; pass --restart to begin anew"


def _difference(old: Any, new: Any, name: str = "") -> str:
    """Returns the first thing in which two values differ, in words; nothing where they are equal."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        keys = dict.fromkeys((*old, *new))
        return next(filter(None, (_difference(old.get(k), new.get(k), f"{name} {k}".lstrip()) for k in keys)), "")
    if old == new:
        return ""
    if any(isinstance(value, str) and len(value) > 40 for value in (old, new)):
        return f"{name} was another"
    return f"{name} was {old}, and is {new} now"


@dataclass(frozen=True)
class Note(JsonData):
    """The first `bytes` bytes of a file of the checkpoint are whole; the step files named in `moved` are emptied."""

    bytes: int
    sha256: str
    moved: tuple[str, ...]

    def __post_init__(self) -> None:
        for name in self.moved:
            if not _NAME.fullmatch(name):  # such a name leads into no other folder
                raise ValueError(f"moved: {name!r} is not a file of a step")


class MovedSteps:
    """The steps of a store that are in the checkpoint's files, and the `FileLog` that moves more of them there."""

    def __init__(self, store: DirectoryStore) -> None:
        self._store, self._lock = store, threading.Lock()
        # By file of the checkpoint: its note, and the state of the hash there, from which hashing continues.
        self._notes: dict[str, tuple[Note, Any]] = {}
        self._sources: dict[str, str] = {}  # the step's file that holds a tensor, by its name in the checkpoint
        self._left: Counter[str] = Counter()  # tensors of each step's file that are not in the checkpoint yet
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
        """Prepares the log; `made_of` is as in `Store.moving`."""
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
    with file.open("r+b") as opened, suppress(OSError, AttributeError, TypeError):
        # A safetensors file: 8 bytes with the length of the JSON header, the header, then the tensors.
        start = 8 + int.from_bytes(opened.read(8), "little")
        size = file.stat().st_size - start
        fallocate = ctypes.CDLL(None, use_errno=True).fallocate
        fallocate.argtypes = ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64
        fallocate(opened.fileno(), _KEEP_SIZE | _PUNCH_HOLE, start, size)
