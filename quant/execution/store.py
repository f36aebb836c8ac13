"""A run of `quantize` keeps finished steps in a partial directory, so that the same command continues after them.

    .OUT.partial/
      journal.jsonl     first line: the run's dependencies; then one line for every finished step; each with a SHA-256
      00007.safetensors the tensors of a step, written whole and named in the journal afterwards
      new/              the checkpoint, while its last files are written
      complete          stands here from the moment at which `new` is whole

The tensors of the steps come into the checkpoint's files in the end. So that they do not lie on the disk twice, a
step's file gives up its room, and keeps its header, as soon as the journal says that all of it is in those files, which
have been synchronized to the disk before. The same command then continues after the last tensor in the files.

A step is in the journal with the SHA-256 of its file, so a process that is killed, a full disk or a power failure
leaves steps that are either whole or not there. A run whose model, plan, data or versions differ from the first
line is refused: its steps would not fit together.

The ranks of one run share the directory. The first rank writes the results that all ranks have, and each rank writes
its own results in a journal of its own (`journal-2.jsonl`, `00007-2.safetensors`); all read all journals.

Files are written by a thread while the next step is worked on. Written tensors are then mapped from the file, so that
the memory of finished steps belongs to the page cache and not to the process.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from quant.calibration.ranks import from_first, rank_and_world, wait_for_all
from quant.calibration.session import Mapped, Step, Store
from quant.export.checkpoint.directory import COMPLETE, NEW, finish_directory
from quant.export.checkpoint.tensor_file import write_tensor_file
from quant.export.checkpoint.write import sha256_of
from quant.formats.atomic import claimed, sync
from quant.formats.json_files import parse_json
from quant.models.watched_files import WatchedFiles
from quant.recipes.json_data import typed
from quant.recipes.json_text import json_text

_JOURNAL, _JOURNALS = "journal.jsonl", "journal*.jsonl"
_SHARD = "shard "  # of the checkpoint, in the names of steps
_IN_FLIGHT = 2  # steps whose tensors wait to be written
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of Linux's falloc.h
_STEP_FILE = re.compile(r"\d{5}(-\d+)?\.safetensors")
_FIRST: dict[str, Any] = {"depends": dict[str, Any]}
_OTHERS: dict[str, Any] = {"step": str, "file": str, "sha256": str | None}
_WRITTEN: dict[str, Any] = {"bytes": int, "sha256": str, "moved": list[str]}
_WAY_OUT = "give what it was begun with, or pass --restart to begin anew"


class Partial(Store):
    """The partial directory of a run; open for one process at a time, or for the ranks of one run.

    Args:
        out: where the checkpoint will be.
        depends: the run's dependencies by name, JSON-ready: the model's files, the plan, versions, options.
        sources: the model's files, which must not change while the run reads them.
        restart: deletes the steps of an earlier run.

    Raises:
        OSError: another process works on it.
        ValueError: an earlier run with other dependencies left it; the message names the difference.
    """

    def __init__(
        self, out: Path, depends: Mapping[str, Any], sources: WatchedFiles | None = None, *, restart: bool = False
    ) -> None:
        self.out, self.path = out.resolve(), partial_path(out)
        self.directory = self.path
        self.rank = rank_and_world()[0]
        own = f"-{self.rank}" if self.rank else ""
        self._journal, self._suffix = self.path / f"journal{own}.jsonl", f"{own}.safetensors"
        self.sources = sources or WatchedFiles(None)
        self._steps: dict[str, dict[str, Any]] = {}
        self._verified: set[str] = set()
        self._holds: dict[str, str] = {}  # files by the names of the model's layers and tensors that are in them
        self._awaited: list[tuple[str, Mapped]] = []
        self._claim = ExitStack()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="writer")
        self._writing: list[Future[None]] = []
        # A guess, 500 MB/s, until the first large step has been timed.
        self._bytes_per_second = 5e8
        self._hopeless = False
        try:
            if self.rank == 0:
                # Through JSON and back, so that tuples are lists here as they are in the journal that they are compared
                # with.
                self._open(json.loads(json_text(depends)), restart)
            self.is_complete = from_first((self.path / COMPLETE).exists)
            """Whether the checkpoint was whole when the run began, and perhaps not yet under its name."""
            if not (self.path / _JOURNAL).is_file() and not self.is_complete:
                raise ValueError(
                    f"{self.path}: the first rank keeps its work there, and this one does not see it; give an --out on "
                    "a file system that all machines share"
                )
            self._take_in(self.path.glob(_JOURNALS))
        except BaseException:
            self.close()
            raise
        # Numbers go on after the largest, and never over the file of a step that a later line of the journal names.
        self._numbers = max((int(step["file"][:5]) for step in self._steps.values()), default=0)
        wait_for_all()

    def _open(self, depends: Mapping[str, Any], restart: bool) -> None:
        """Claims the directory, and completes the journals of the same run or begins a new one."""
        # The claim is a lock of the operating system: a killed process leaves none behind.
        self._claim.enter_context(claimed(self.out))
        if restart:
            shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True, exist_ok=True)
        for journal in self.path.glob(_JOURNALS):
            whole = journal.read_bytes()
            journal.write_bytes(whole[: whole.rfind(b"\n") + 1])  # what follows was cut off in the middle
        first = next(iter(_lines(self.path / _JOURNAL)), None)
        changed = None if first is None else _difference(first["depends"], depends)
        if changed and (not (self.path / COMPLETE).exists() or (self.path / NEW).exists()):
            raise ValueError(f"{self.path} holds an unfinished run in which {changed}; {_WAY_OUT}")
        if changed:  # that run ended well, but for its last deletion
            for file in (*self.path.glob("*.safetensors"), self.path / COMPLETE):
                file.unlink(missing_ok=True)
        if first is None or changed:
            for journal in self.path.glob(_JOURNALS):
                journal.unlink()
            _append(self.path / _JOURNAL, {"depends": depends})

    def _take_in(self, journals: Iterable[Path]) -> None:
        # "journal.jsonl" sorts after "journal-2.jsonl", so it comes first here; later journals win where both name a
        # step.
        for journal in sorted(journals, reverse=True):
            self._steps |= {line["step"]: line for line in _lines(journal) if "step" in line}

    def refresh(self) -> None:
        """Reads the journals of other ranks and runs the callbacks of steps that have arrived."""
        before = set(self._steps)
        self._take_in(set(self.path.glob(_JOURNALS)) - {self._journal})
        # Another live rank wrote them a moment ago: hashing gigabytes again would stall the run.
        self._verified |= {step["file"] for name, step in self._steps.items() if name not in before}
        waiting, self._awaited = self._awaited, []
        for step, then in waiting:
            if step in self._steps:
                # The writer's file is complete by now, since its journal line follows it.
                then(self._mapped(self._steps[step]["file"]))
            else:
                self._awaited.append((step, then))

    def __enter__(self) -> Partial:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Closes the directory. Its steps stay for the next run, unless the same command would fail again."""
        if kind is not None:
            # Steps in flight are finished work: they are written out even after an error.
            self._thread.shutdown(wait=True)
        self.close()
        if self.rank:
            return
        empty = not any(self.path.glob("*.safetensors")) and not (self.path / COMPLETE).exists()
        if kind is not None and (self._hopeless or empty):
            shutil.rmtree(self.path, ignore_errors=True)

    @contextmanager
    def solving(self) -> Iterator[None]:
        """While open, a ValueError means that the same command would fail again, so that nothing is to be kept.

        Raises:
            ValueError: a file of the model changed, which explains whatever else went wrong.
        """
        try:
            yield
        except ValueError:
            self.sources.check()
            self._hopeless = True
            raise

    @contextmanager
    def reading(self) -> Iterator[None]:
        """While open, read errors are reported as corruption: each step's SHA-256 has matched before."""
        try:
            yield
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, AssertionError, RuntimeError) as error:
            raise ValueError(
                f"{self._journal}: a finished step is not as it was written ({type(error).__name__}: {error}); pass "
                "--restart to begin anew"
            ) from error

    def __contains__(self, step: str) -> bool:
        """Whether a step was finished, though perhaps its file is damaged."""
        return step in self._steps

    def get(self, step: str) -> Step | None:
        """A finished step; None where there is none, or its file is damaged."""
        found = self._steps.get(step)
        if found is None:
            return None
        file = self.path / found["file"]
        if found["sha256"] is None:
            return Step({}, found["record"])
        if file.name not in self._verified:
            # The room of a moved file was given up: its pages read as zeros, and the SHA-256 cannot match.
            moved = self.is_moving and file.name in self.moved_parts()
            if not file.is_file() or not (moved or sha256_of(file) == found["sha256"]):
                del self._steps[step]
                return None
            self._verified.add(file.name)
        return Step(self._mapped(file.name), found["record"])

    def drop(self, step: str) -> None:
        """Deletes a step that nothing needs any more."""
        self.flush()
        found = self._steps.pop(step, None)
        if found is not None and self.rank == 0:
            (self.path / found["file"]).unlink(missing_ok=True)

    def put(
        self,
        step: str,
        tensors: Mapping[str, torch.Tensor],
        record: Any,
        then: Mapped | None = None,
        *,
        alone: bool = False,
    ) -> None:
        """Keeps a finished step; a step of this name that was kept before goes when the new one is written.

        Args:
            step: its name.
            tensors: must not change any more.
            record: JSON-ready.
            then: called with the tensors, mapped from the file, when they are written.
            alone: this rank alone has them. Tensors that all ranks have are written by the first rank.

        Raises:
            ValueError: a file of the model changed meanwhile.
            OSError: an earlier step could not be written.
        """
        self.sources.check()
        if self.rank and not alone:
            if then is not None:
                self._awaited.append((step, then))
            self.refresh()
            return
        # Bounds the memory of waiting tensors, and raises the error of an earlier write here.
        while len(self._writing) >= _IN_FLIGHT:
            self._writing.pop(0).result()
        self._numbers += 1
        file, before = self.path / f"{self._numbers:05d}{self._suffix}", self._steps.get(step)
        here = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        devices = {tensor.device for tensor in here.values() if tensor.is_cuda}
        # The writer thread has a stream of its own: without the events it could copy a tensor before its kernel has
        # run.
        computed = [torch.cuda.current_stream(device).record_event() for device in devices]
        entry = {"step": step, "file": file.name, "sha256": None, "record": record}
        self._steps[step] = entry

        def write() -> None:
            for event in computed:
                event.synchronize()
            started = time.perf_counter()
            if here:
                entry["sha256"] = _write(here, file)
                self._verified.add(file.name)
            # The file first and its line last: a crash in between leaves a file that no line names, and nothing broken.
            _append(self._journal, entry)
            if before is not None:
                (self.path / before["file"]).unlink(missing_ok=True)
            nbytes = sum(tensor.nbytes for tensor in here.values())
            # Small files time the file system's latency instead of its bandwidth.
            if nbytes > 1 << 24:
                self._bytes_per_second = nbytes / (time.perf_counter() - started)
            # Drops the originals before their maps take over, so that `_trim` finds their memory free.
            here.clear()
            if then is not None:
                then(self._mapped(file.name))
            _trim()

        self._writing.append(self._thread.submit(write))

    def expect(self, name: str, value: Any) -> None:
        """Notes a dependency of the run that was not known when it began.

        Raises:
            ValueError: an earlier run noted something else.
        """
        noted = self.get(name)
        if noted is None:
            self.put(name, {}, value)
        elif noted.record != value:
            raise ValueError(f"{self.path} holds an unfinished run with another {name}; {_WAY_OUT}")

    @property
    def holds(self) -> Mapping[str, str]:
        """The files of steps by the names of the model's layers and tensors that are in them, there as `KIND:NAME`."""
        return self._holds

    @property
    def is_moving(self) -> bool:
        """Whether some of the steps are in the checkpoint's files alone, so that their tensors hold zeros here."""
        return bool(self._shards and self.moved_parts())

    def shards(self) -> list[str]:
        """The checkpoint's files of which something was written."""
        return [step.removeprefix(_SHARD) for step in self._steps if step.startswith(_SHARD)]

    def written(self) -> dict[str, tuple[int, Any]]:
        """Of each of the checkpoint's files that earlier runs began: how many bytes are whole, and their SHA-256."""
        return {name: (size, hashed.copy()) for name, (size, hashed) in self._shards.items()}

    def moving(self, made_of: Mapping[str, str]) -> Moving:
        """The log that moves kept tensors into the checkpoint's files; `made_of` as in `Moving`."""
        return Moving(self, made_of)

    def moved(self, shard: str, size: int, sha256: str, parts: Collection[str]) -> None:
        """Notes that the first `size` bytes of one of the checkpoint's files are on the disk.

        Args:
            shard: its name.
            size: ends with a tensor.
            sha256: of these bytes.
            parts: files of steps that nothing needs any more; they give up their room.
        """
        # Order of a move: tensors synchronized to disk, then this line, then the room of the parts given up.
        self._note(shard, size, sha256, sorted({*self.moved_parts(), *parts}))
        sync(self._journal)
        for part in parts:
            _give_up_room(self.path / part)

    def give_up_room(self) -> None:
        """Frees files whose move is in the journal; a run that was stopped after that line has not done so."""
        for part in self.moved_parts() if self.is_moving else ():
            _give_up_room(self.path / part)

    def _note(self, shard: str, size: int, sha256: str, moved: list[str]) -> None:
        self._numbers += 1
        record = {"bytes": size, "sha256": sha256, "moved": moved}
        entry = {"step": f"{_SHARD}{shard}", "file": f"{self._numbers:05d}.safetensors", "sha256": None}
        self._steps[f"{_SHARD}{shard}"] = {**entry, "record": record}
        _append(self._journal, self._steps[f"{_SHARD}{shard}"])

    def moved_parts(self) -> set[str]:
        """Files of steps that are in the checkpoint's files."""
        records = [entry["record"] for step, entry in self._steps.items() if step.startswith(_SHARD)]
        return {part for record in records for part in record["moved"]}

    @cached_property
    def _shards(self) -> dict[str, tuple[int, Any]]:
        """As `written`. Where one file is not as it was, none counts: steps that were moved are worked on again."""
        found = {}
        for name in self.shards():
            record = self._steps[f"{_SHARD}{name}"]["record"]
            if not record["bytes"]:
                continue
            hashed = _hash_of_start(self.path / NEW / name, record["bytes"])
            if hashed is None or hashed.hexdigest() != record["sha256"]:
                for shard in self.shards() if self.rank == 0 else ():
                    self._note(shard, 0, "", [])
                return {}
            found[name] = record["bytes"], hashed
        return found

    def _mapped(self, file: str) -> dict[str, torch.Tensor]:
        tensors = _mapped(self.path / file)
        self._holds |= {key.partition(":")[2]: file for key in tensors}
        return tensors

    def seconds_to_write(self, nbytes: int) -> float:
        """Seconds that `nbytes` take to write at the speed that was last measured."""
        return nbytes / self._bytes_per_second

    def flush(self) -> None:
        """Waits until everything is written, by other ranks too where this one waits for it."""
        while self._writing:
            self._writing.pop(0).result()
        while self._awaited:
            self.refresh()
            # Journals of other ranks may be on a network file system, which has no notification to wait for.
            time.sleep(0.05)

    def finish(self) -> None:
        """Puts a whole checkpoint under its name, if it is not there, and removes the partial directory."""
        self.flush()
        if self.rank:
            return self.close()
        finish_directory(self.path, self.out)
        self.close()
        shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        """Lets go of the directory; the next run finds it as it is."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._claim.close()


class Moving:
    """Moves the tensors that a run has kept into the files of its checkpoint; a `FileLog` of them.

    Args:
        partial: the run's.
        made_of: by name of each tensor of the checkpoint, the name of the model's layer or tensor that it is made of.
    """

    def __init__(self, partial: Partial, made_of: Mapping[str, str]) -> None:
        self.partial, self.found, self.lock = partial, partial.written(), threading.Lock()
        self.parts = {stored: partial.holds[name] for stored, name in made_of.items() if name in partial.holds}
        self.left = Counter(self.parts.values())
        known = set(made_of.values())
        # A file with anything else stays: what is tied to it is perhaps still to be written.
        self.left.update(part for name, part in partial.holds.items() if name not in known)
        partial.give_up_room()

    def begun(self, file: str) -> tuple[int, Any]:
        """As of `FileLog`."""
        return self.found.get(file, (0, hashlib.sha256()))

    def reached(self, file: str, size: int, sha256: str, tensors: Sequence[str]) -> None:
        """As of `FileLog`."""
        with self.lock:  # a part may go when the journal has the lines of all files that hold some of it
            found = [self.parts.pop(name) for name in tensors if name in self.parts]
            self.left.subtract(found)
            done = {part for part in found if not self.left[part]} - self.partial.moved_parts()
            if done or size != self.begun(file)[0]:
                self.partial.moved(file, size, sha256, done)


def _append(journal: Path, line: Mapping[str, Any]) -> None:
    """Adds a line whole or not at all: lines after half a line could not be read."""
    text = json_text(line).encode()
    whole = b"%s %s\n" % (_digest(text), text)
    with journal.open("ab", buffering=0) as file:
        before = file.tell()
        try:
            if file.write(whole) != len(whole):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(journal))
        except OSError:
            file.truncate(before)
            raise


def _lines(journal: Path) -> list[dict[str, Any]]:
    """The whole lines of a journal; an unfinished line after the last newline is still being written.

    Raises:
        ValueError: a line is not as it was written.
    """
    whole = journal.read_bytes().split(b"\n")[:-1] if journal.is_file() else []
    try:
        lines = [_checked(line) for line in whole]
        if journal.name == _JOURNAL and lines and "depends" not in lines[0]:
            raise ValueError("it does not begin with what the run depends on")
        return lines
    except ValueError as error:
        raise ValueError(f"{journal}: {error}; pass --restart to begin anew") from None


def _checked(line: bytes) -> dict[str, Any]:
    digest, _, text = line.partition(b" ")
    if digest != _digest(text):
        raise ValueError("a line of it was damaged or changed")
    found: dict[str, Any] = typed(dict[str, Any], parse_json(text), "line")
    for key, kind in _FIRST.items() if "depends" in found else _OTHERS.items():
        typed(kind, found.get(key), key)
    found.setdefault("record", None)
    files = [found["file"]] if "file" in found else []
    if found.get("step", "").startswith(_SHARD):
        record = typed(dict[str, Any], found["record"], "record")
        for key, kind in _WRITTEN.items():
            typed(kind, record.get(key), key)
        files += record["moved"]
    for file in files:
        if not _STEP_FILE.fullmatch(file):
            raise ValueError(f"file: {file!r} is no file of a step")
    return found


def _digest(line: bytes) -> bytes:
    return hashlib.sha256(line).hexdigest().encode()


def _trim() -> None:
    """Gives freed memory back to the system. glibc keeps free memory between small blocks that are still in use."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def partial_path(out: Path) -> Path:
    """The directory in which a run that writes to `out` keeps finished steps."""
    out = out.resolve()
    return out.parent / f".{out.name}.partial"


def is_finished(out: Path) -> bool:
    """Whether an earlier run to `out` got as far as a whole checkpoint, and not to its own end."""
    return (partial_path(out) / COMPLETE).exists()


def tensor_hash(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's values."""
    return hashlib.sha256(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data).hexdigest()


def _difference(old: Any, new: Any, name: str = "") -> str:
    """The first thing in which two values differ, in words; nothing where they are equal."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in dict.fromkeys((*old, *new)):
            if found := _difference(old.get(key), new.get(key), f"{name} {key}".lstrip()):
                return found
        return ""
    if old == new:
        return ""
    if any(isinstance(value, str) and len(value) > 40 for value in (old, new)):
        return f"{name} was another"
    return f"{name} was {old}, and is {new} now"


def _write(tensors: Mapping[str, torch.Tensor], file: Path) -> str:
    """Writes a file whole or not at all, and gives its SHA-256."""
    unfinished = file.with_suffix(".unfinished")
    try:
        found = write_tensor_file(unfinished, tensors)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise OSError(
            f"{file} cannot be written: {error}; what was finished before is kept: make room, and run the same "
            "command again"
        ) from error
    # A rename within a directory is atomic, so a file under its final name is whole.
    unfinished.rename(file)
    return found


def _hash_of_start(file: Path, size: int) -> Any:
    """SHA-256 of the first `size` bytes of a file; None where it has fewer."""
    hashed = hashlib.sha256()
    if not file.is_file() or file.stat().st_size < size:
        return None
    with file.open("rb") as opened:
        while size:
            piece = opened.read(min(size, 1 << 24))
            hashed.update(piece)
            size -= len(piece)
    return hashed


def _give_up_room(file: Path) -> None:
    """Gives the pages of a file's tensors back to the disk, where the file system can; they read as zeros then."""
    with file.open("r+b") as opened, suppress(OSError, AttributeError):
        # A safetensors file: 8 bytes with the length of the JSON header, the header, then the tensors.
        start = 8 + int.from_bytes(opened.read(8), "little")
        size = file.stat().st_size - start
        fallocate = ctypes.CDLL(None, use_errno=True).fallocate
        fallocate.argtypes = ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64
        fallocate(opened.fileno(), _KEEP_SIZE | _PUNCH_HOLE, start, size)


def _mapped(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file, as views of the mapped file."""
    if not file.is_file():
        return {}
    with safe_open(file, framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
