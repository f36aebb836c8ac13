"""A run of `quantize` keeps what it has finished in a partial directory, so that the same command goes on behind it.

    .OUT.partial/
      journal.jsonl     first line: what the run depends on; then one line for every finished step
      00007.safetensors the tensors of a step, written whole and named in the journal afterwards
      new/              the checkpoint, while its last files are written
      complete          stands here from the moment at which `new` is whole

A step is in the journal with the SHA-256 of its file, so a process that is killed, a full disk or a power failure
leaves steps that are either whole or not there. A run whose model, plan, data or versions differ from those of the
first line is refused: nothing of it would fit.

Files are written by a thread while the next step is worked on. What was written is then mapped from the file, so that
the memory of finished steps belongs to the page cache and not to the process.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import safe_open

from quant.export.checkpoint import sha256_of
from quant.export.directory import COMPLETE, NEW, finish_directory
from quant.export.tensor_file import write_tensor_file
from quant.recipes.json_text import json_text

_JOURNAL = "journal.jsonl"
_IN_FLIGHT = 2  # steps whose tensors wait to be written
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".pt2")
_WAY_OUT = "give what it was begun with, or pass --restart to begin anew"


@dataclass(frozen=True, eq=False)
class Step:
    """A finished step: its tensors, mapped from their file, and whatever else belongs to it, JSON-ready."""

    tensors: Mapping[str, torch.Tensor]
    record: Any


class Partial:
    """The partial directory of a run; open for one process at a time.

    Args:
        out: where the checkpoint will be.
        depends: what the result depends on, by name, JSON-ready: the model's files, the plan, versions, options.
        sources: files that must not change while the run reads them.
        restart: deletes what an earlier run left.

    Raises:
        ValueError: another process works on it, or an earlier run with other dependencies left it; the message names
            what changed.
    """

    def __init__(
        self, out: Path, depends: Mapping[str, Any], sources: Sequence[Path] = (), *, restart: bool = False
    ) -> None:
        self.out, self.path = out.resolve(), partial_path(out)
        if restart:
            shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = (self.path / "lock").open("w")
        try:
            _lock(self._lock)
        except OSError:
            self._lock.close()
            raise ValueError(f"{self.path}: another process is working on {out}; wait for it, or stop it") from None
        self._sources = {file: _stamp(file) for file in sources}
        self._steps: dict[str, dict[str, Any]] = {}
        self._verified: set[int] = set()
        self._numbers = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="writer")
        self._writing: list[Future[None]] = []
        self._bytes_per_second = 5e8
        self._hopeless = False
        depends = json.loads(json_text(depends))
        try:
            if not self._read(depends):
                self._append({"depends": depends})
        except BaseException:
            self.close()
            raise

    def _read(self, depends: Mapping[str, Any]) -> bool:
        """Takes in the steps of an earlier run, if there was one."""
        journal = self.path / _JOURNAL
        lines = journal.read_bytes().split(b"\n") if journal.is_file() else []
        whole = lines[:-1]  # what follows the last newline was cut off in the middle
        if not whole:
            journal.unlink(missing_ok=True)
            return False
        journal.write_bytes(b"".join(line + b"\n" for line in whole))
        first, *steps = map(json.loads, whole)
        if changed := _difference(first["depends"], depends):
            if self.is_complete and not (self.path / NEW).exists():  # that run ended well, but for its last deletion
                for file in self.path.glob("*.safetensors"):
                    file.unlink()
                (self.path / COMPLETE).unlink()
                journal.unlink()
                return False
            raise ValueError(f"{self.path} holds an unfinished run in which {changed}; {_WAY_OUT}")
        for step in steps:
            self._steps[step["step"]] = step
            self._numbers = max(self._numbers, step["number"])
        return True

    def __enter__(self) -> Partial:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Lets go of the directory. What is in it stays for the next run, if that can get further with it."""
        if kind is not None:
            self._thread.shutdown(wait=True)
        self.close()
        empty = not any(self.path.glob("*.safetensors")) and not self.is_complete
        if kind is not None and (self._hopeless or empty):
            shutil.rmtree(self.path, ignore_errors=True)

    @contextmanager
    def solving(self) -> Iterator[None]:
        """While open, a ValueError means that the same command would fail again, so that nothing is to be kept."""
        try:
            yield
        except ValueError:
            self._hopeless = self._changed_source() is None
            raise

    @property
    def is_complete(self) -> bool:
        """Whether the checkpoint is whole, and perhaps not yet under its name."""
        return (self.path / COMPLETE).exists()

    def __contains__(self, step: str) -> bool:
        """Whether a step was finished, though perhaps its file is damaged."""
        return step in self._steps

    def get(self, step: str) -> Step | None:
        """A finished step; None where there is none, or its file is damaged."""
        found = self._steps.get(step)
        if found is None:
            return None
        number, file = found["number"], self._file(found["number"])
        if found["sha256"] is None:
            return Step({}, found["record"])
        if number not in self._verified:
            if not file.is_file() or sha256_of(file) != found["sha256"]:
                del self._steps[step]
                return None
            self._verified.add(number)
        return Step(_mapped(file), found["record"])

    def put(
        self,
        step: str,
        tensors: Mapping[str, torch.Tensor],
        record: Any,
        then: Callable[[Mapping[str, torch.Tensor]], None] | None = None,
    ) -> None:
        """Keeps a finished step; a step of this name that was kept before goes when the new one is written.

        Args:
            step: its name.
            tensors: must not change any more.
            record: JSON-ready.
            then: called with the tensors, mapped from the file, when they are written.

        Raises:
            ValueError: a file of the model changed meanwhile.
            OSError: an earlier step could not be written.
        """
        self.check_sources()
        while len(self._writing) >= _IN_FLIGHT:
            self._writing.pop(0).result()
        self._numbers += 1
        number, before = self._numbers, self._steps.get(step)
        here = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        devices = {tensor.device for tensor in here.values() if tensor.is_cuda}
        computed = [torch.cuda.current_stream(device).record_event() for device in devices]
        entry = {"step": step, "number": number, "sha256": None, "record": record}
        self._steps[step] = entry

        def write() -> None:
            for event in computed:
                event.synchronize()
            started = time.perf_counter()
            if here:
                entry["sha256"] = _write(here, self._file(number))
                self._verified.add(number)
            self._append(entry)
            if before is not None:
                self._file(before["number"]).unlink(missing_ok=True)
            nbytes = sum(tensor.nbytes for tensor in here.values())
            if nbytes > 1 << 24:
                self._bytes_per_second = nbytes / (time.perf_counter() - started)
            here.clear()
            if then is not None:
                then(_mapped(self._file(number)))
            _trim()

        self._writing.append(self._thread.submit(write))

    def expect(self, what: str, value: Any) -> None:
        """Notes what the run depends on and what was not known when it began.

        Raises:
            ValueError: an earlier run noted something else.
        """
        noted = self.get(what)
        if noted is None:
            self.put(what, {}, value)
        elif noted.record != value:
            raise ValueError(f"{self.path} holds an unfinished run with another {what}; {_WAY_OUT}")

    def seconds_to_write(self, nbytes: int) -> float:
        """Seconds that so many bytes took to write when it was last measured."""
        return nbytes / self._bytes_per_second

    def check_sources(self) -> None:
        """Raises ValueError where a file of the model is not what it was when the run began."""
        if (file := self._changed_source()) is not None:
            what = "changed" if file.exists() else "disappeared"
            raise ValueError(
                f"{file}: this file of the model {what} while it was read; put it back, and run the command again"
            )

    def _changed_source(self) -> Path | None:
        return next((file for file, stamp in self._sources.items() if _stamp(file) != stamp), None)

    def flush(self) -> None:
        """Waits until everything is written."""
        while self._writing:
            self._writing.pop(0).result()

    def finish(self) -> None:
        """Puts a whole checkpoint under its name, if it is not there, and removes the partial directory."""
        self.flush()
        finish_directory(self.path, self.out)
        self.close()
        shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        """Lets go of the directory; the next run finds it as it is."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._lock.close()

    def _file(self, number: int) -> Path:
        return self.path / f"{number:05d}.safetensors"

    def _append(self, line: Mapping[str, Any]) -> None:
        with (self.path / _JOURNAL).open("ab") as file:
            file.write(json_text(line).encode() + b"\n")


def _trim() -> None:
    """Gives freed memory back to the system. glibc keeps what lies between small blocks that are still in use."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _lock(file: IO[str]) -> None:
    """Locks a file until it is closed, where the system has such locks."""
    if sys.platform != "win32":
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def partial_path(out: Path) -> Path:
    """Where a run that writes to `out` keeps what it has finished."""
    out = out.resolve()
    return out.parent / f".{out.name}.partial"


def is_finished(out: Path) -> bool:
    """Whether an earlier run to `out` got as far as a whole checkpoint, and not to its own end."""
    return (partial_path(out) / COMPLETE).exists()


def model_files(path: Path | None) -> list[Path]:
    """The files that a model is read from."""
    if path is None or not path.is_dir():
        return [] if path is None else [path]
    return sorted(file for file in path.iterdir() if file.name == "config.json" or file.suffix in _WEIGHTS)


def fingerprints(files: Sequence[Path]) -> dict[str, str]:
    """Size, time of the last change and a hash of the header of each file, by name."""
    return {file.name: f"{_stamp(file)} {_header(file)}" for file in files}


def tensor_hash(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's values."""
    return hashlib.sha256(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data).hexdigest()


def _header(file: Path) -> str:
    with file.open("rb") as opened:
        if file.suffix == ".safetensors":
            head = opened.read(8)
            head += opened.read(min(int.from_bytes(head, "little"), 100_000_000))
        else:
            head = opened.read(1 << 16)
    return hashlib.sha256(head).hexdigest()


def _stamp(file: Path) -> str:
    try:
        status = file.stat()
    except OSError:
        return "missing"
    return f"{status.st_size} {status.st_mtime_ns}"


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
    unfinished.rename(file)
    return found


def _mapped(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file, as views of the mapped file."""
    if not file.is_file():
        return {}
    with safe_open(file, framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
