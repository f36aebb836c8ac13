"""A run of `quantize` keeps finished steps in a partial directory, so that the same command continues after them.

    .OUT.partial/
      run.json                    the dependencies of the run
      00007-SHA256.safetensors    a finished step, see `StepFile`
      new/                        the checkpoint, while its last files are written
      complete                    stands here from the moment at which `new` is whole

A run whose model, plan, data or versions differ from `run.json` is refused: its steps would not fit together. Of two
files of one step, the one with the higher number counts, and a damaged one is ignored: the step is done again.

The ranks of one run share the directory. The first rank writes the results that all ranks have, and each rank writes
its own results in files with its number; all read all files.

Files are written by threads while the next step is worked on. Written tensors are then mapped from the file, so that
the memory of finished steps belongs to the page cache and not to the process. In the end they move into the
checkpoint's files, see `MovedSteps`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from quant.calibration.ranks import from_first, rank_and_world, wait_for_all
from quant.calibration.session import Mapped, Step, Store
from quant.execution.moved_steps import NOTE, MovedSteps
from quant.execution.step_file import StepFile
from quant.export.checkpoint.directory import COMPLETE, NEW, finish_directory
from quant.formats.atomic import claimed, write_atomically
from quant.formats.json_files import read_json
from quant.formats.memory import trim_heap
from quant.models.watched_files import WatchedFiles
from quant.recipes.json_data import typed
from quant.recipes.json_text import json_text

_RUN, _STEPS = "run.json", "*.safetensors"
_IN_FLIGHT = 2  # steps that are written at a time, each by a thread: SHA-256 is slower than a GPU solves
_WAY_OUT = "give what it was begun with, or pass --restart to begin anew"


class DirectoryStore(Store):
    """The partial directory of a run; open for one process at a time, or for the ranks of one run.

    Args:
        out: the directory where the checkpoint will be.
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
        self.sources = sources or WatchedFiles(None)
        self._steps: dict[str, StepFile] = {}
        self._seen: set[Path] = set()
        self._verified: set[Path] = set()
        self._holds: dict[str, str] = {}
        self._awaited: list[tuple[str, Mapped]] = []
        self._claim = ExitStack()
        self._threads = ThreadPoolExecutor(_IN_FLIGHT, thread_name_prefix="writer")
        self._writing: list[Future[None]] = []
        self._lock = threading.Lock()
        # A guess, 500 MB/s, until the first large step has been timed.
        self._bytes_per_second = 5e8
        self._hopeless = False
        try:
            if self.rank == 0:
                self._open(depends, restart)
            self.is_complete = from_first((self.path / COMPLETE).exists)
            """Whether the checkpoint was whole when the run began, and perhaps not yet under its name."""
            if not (self.path / _RUN).is_file():
                raise ValueError(
                    f"{self.path}: the first rank keeps its work there, and this one does not see it; give an --out on "
                    "a file system that all machines share"
                )
            self._run = _read_run(self.path / _RUN)
            self._take_in()
        except BaseException:
            self.close()
            raise
        # Numbers go on after the largest, so that the newest file of a step has the highest.
        self._number = max((file.number for file in self._steps.values()), default=0)
        wait_for_all()

    def _open(self, depends: Mapping[str, Any], restart: bool) -> None:
        """Claims the directory, and compares its run with this one or begins a new one."""
        # The claim is a lock of the operating system: a killed process leaves none behind.
        self._claim.enter_context(claimed(self.out))
        if restart:
            shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True, exist_ok=True)
        # Through JSON and back, so that tuples are lists here as they are in the file.
        run = {"depends": json.loads(json_text(depends)), "expected": {}}
        if (self.path / _RUN).is_file():
            changed = _difference(_read_run(self.path / _RUN)["depends"], run["depends"])
            if not changed:
                return
            if not (self.path / COMPLETE).exists() or (self.path / NEW).exists():
                raise ValueError(f"{self.path} holds an unfinished run in which {changed}; {_WAY_OUT}")
        # Steps without a run belong to one that finished, except for its last deletion.
        for file in (*self.path.glob(_STEPS), self.path / COMPLETE):
            file.unlink(missing_ok=True)
        write_atomically(self.path / _RUN, json_text(run))

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
        waiting, self._awaited = self._awaited, []
        for step, then in waiting:
            if step in self._steps:
                then(self._mapped(self._steps[step]))
            else:
                self._awaited.append((step, then))

    def __enter__(self) -> DirectoryStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Closes the directory. Its steps stay for the next run, unless the same command would fail again."""
        if kind is not None:
            # Steps in flight are finished work: they are written out even after an error.
            self._threads.shutdown(wait=True)
        self.close()
        if self.rank:
            return
        empty = not any(self.path.glob(_STEPS)) and not (self.path / COMPLETE).exists()
        if kind is not None and (self._hopeless or empty):
            shutil.rmtree(self.path, ignore_errors=True)

    @contextmanager
    def solving(self) -> Iterator[None]:
        """Marks a ValueError as one that the same command would raise again, so that nothing is to be kept.

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
        """Reports read errors as corruption while open: each step's SHA-256 has matched before."""
        try:
            yield
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, AssertionError, RuntimeError) as error:
            raise ValueError(
                f"{self.path}: a finished step is not as it was written ({type(error).__name__}: {error}); pass "
                "--restart to begin anew"
            ) from error

    def __contains__(self, step: str) -> bool:
        """Returns whether a step was finished, though perhaps its file is damaged."""
        return step in self._steps

    def get(self, step: str) -> Step | None:
        """Returns a finished step; None where there is none, or its file is damaged."""
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

    def drop(self, step: str) -> None:
        """Deletes a step that nothing needs any more."""
        self.flush()
        file = self._steps.pop(step, None)
        if file is not None and self.rank == 0:
            file.path.unlink(missing_ok=True)

    def put(
        self,
        step: str,
        tensors: Mapping[str, torch.Tensor],
        record: Any,
        then: Mapped | None = None,
        *,
        alone: bool = False,
    ) -> None:
        """As in `Store`.

        Raises:
            ValueError: a file of the model changed during the run.
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
        own = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        devices = {tensor.device for tensor in own.values() if tensor.is_cuda}
        # A writer thread has a stream of its own: without the events it could copy a tensor before its kernel has run.
        computed = [torch.cuda.current_stream(device).record_event() for device in devices]
        start = self._next_start()

        def write() -> None:
            for event in computed:
                event.synchronize()
            started = time.perf_counter()
            file = self._keep(StepFile.write(start, step, own, record))
            nbytes = sum(tensor.nbytes for tensor in own.values())
            # Small files time the file system's latency instead of its bandwidth.
            if nbytes > 1 << 24:
                self._bytes_per_second = nbytes / (time.perf_counter() - started)
            # Drops the originals before their maps take over, so that `trim_heap` finds their memory free.
            own.clear()
            if then is not None:
                then(self._mapped(file))
            # The heap is locked meanwhile; a run on a GPU has left nothing there.
            if not devices:
                trim_heap()

        self._writing.append(self._threads.submit(write))

    def note(self, step: str, record: Any) -> None:
        """Keeps a step that is only a record, which is on the disk when this returns."""
        self._keep(StepFile.write(self._next_start(), step, {}, record, durable=True))

    def _next_start(self) -> Path:
        """Returns the path of the next step's file, up to its hash."""
        self._number += 1
        return self.path / (f"{self._number:05d}-{self.rank}" if self.rank else f"{self._number:05d}")

    def _keep(self, file: StepFile) -> StepFile:
        """Takes in a file that this rank has written; of two files of a step, the older one is deleted."""
        with self._lock:
            self._seen.add(file.path)
            self._verified.add(file.path)
            # The file itself may be there already: `refresh` sees it as soon as it has its name.
            files = {file, self._steps.get(file.step, file)}
            newest = self._steps[file.step] = max(files, key=lambda each: each.path.name)
        for each in files - {newest}:
            each.path.unlink(missing_ok=True)
        return file

    def expect(self, name: str, value: Any) -> None:
        """Notes a dependency of the run that was not known when it began.

        Raises:
            ValueError: an earlier run noted something else.
        """
        expected = self._run["expected"]
        if name not in expected:
            expected[name] = value
            if self.rank == 0:
                write_atomically(self.path / _RUN, json_text(self._run))
        elif expected[name] != value:
            raise ValueError(f"{self.path} holds an unfinished run with another {name}; {_WAY_OUT}")

    @property
    def holds(self) -> Mapping[str, str]:
        """The files of steps by the names of the model's layers and tensors that are in them, there as `KIND:NAME`."""
        return self._holds

    @property
    def is_moving(self) -> bool:
        """Whether some of the steps are only in the checkpoint's files, so that their tensors hold zeros here."""
        return bool(self._moved.files)

    def shards(self) -> list[str]:
        """Returns the checkpoint's files that were written in part."""
        return [step.removeprefix(NOTE) for step in self._steps if step.startswith(NOTE)]

    def moving(self, made_of: Mapping[str, str]) -> MovedSteps:
        """Returns the log that moves kept tensors into the checkpoint's files.

        `made_of` is as in `MovedSteps.begin`.
        """
        self._moved.begin(made_of)
        return self._moved

    @cached_property
    def _moved(self) -> MovedSteps:
        return MovedSteps(self)

    def _mapped(self, file: StepFile) -> dict[str, torch.Tensor]:
        tensors = file.tensors()
        self._holds |= {key.partition(":")[2]: file.path.name for key in tensors}
        return tensors

    def seconds_to_write(self, nbytes: int) -> float:
        """Returns the seconds that `nbytes` take to write at the speed that was last measured."""
        return nbytes / self._bytes_per_second

    def flush(self) -> None:
        """Waits until everything is written, by other ranks too where this one waits for it."""
        while self._writing:
            self._writing.pop(0).result()
        while self._awaited:
            self.refresh()
            # Other ranks may write to a network file system, which has no notification to wait for.
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
        """Releases the directory; the next run finds it as it is."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._claim.close()


def _read_run(file: Path) -> dict[str, Any]:
    """Returns the contents of `run.json`."""

    def make(document: Any) -> dict[str, Any]:
        run: dict[str, Any] = typed(dict[str, dict[str, Any]], document, "run")
        if set(run) != {"depends", "expected"}:
            raise ValueError("it does not say what the run depends on")
        return run

    try:
        return read_json(file, "the start of a run", make)
    except ValueError as error:
        raise ValueError(f"{error}; pass --restart to begin anew") from None


def partial_path(out: Path) -> Path:
    """Returns the directory in which a run that writes to `out` keeps finished steps."""
    out = out.resolve()
    return out.parent / f".{out.name}.partial"


def is_finished(out: Path) -> bool:
    """Returns whether an earlier run to `out` got as far as a whole checkpoint, and not to its own end."""
    return (partial_path(out) / COMPLETE).exists()


def tensor_hash(tensor: torch.Tensor) -> str:
    """Returns SHA-256 of a tensor's values."""
    return hashlib.sha256(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data).hexdigest()


def _difference(old: Any, new: Any, name: str = "") -> str:
    """Returns the first thing in which two values differ, in words; nothing where they are equal."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in dict.fromkeys((*old, *new)):
            if difference := _difference(old.get(key), new.get(key), f"{name} {key}".lstrip()):
                return difference
        return ""
    if old == new:
        return ""
    if any(isinstance(value, str) and len(value) > 40 for value in (old, new)):
        return f"{name} was another"
    return f"{name} was {old}, and is {new} now"
