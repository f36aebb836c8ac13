"""A run of `quantize` keeps finished steps in a partial directory, so that the same command continues after them.

    .OUT.partial/
      run.json                    the dependencies of the run, see `RunRecord`
      00007-SHA256.safetensors    a finished step, see `StepFile`
      new/                        the checkpoint, while its last files are written
      complete                    stands here from the moment at which `new` is whole

A run whose model, plan, data or versions differ from `run.json` is refused: its steps would not fit together. Of two
files of one step, the one with the higher number counts, and a damaged one is ignored: the step is done again.

The ranks of one run share the directory. The first rank writes the results that all ranks have, and each rank writes
its own results in files with its number; all read all files.

Threads write files while the next step is worked on, see `StepWriter`. Written tensors are then mapped from the file,
so that the memory of finished steps belongs to the page cache and not to the process. In the end they move into the
checkpoint's files, see `MovedSteps`.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from quant.calibration.ranks import from_first, rank_and_world, wait_for_all
from quant.calibration.session import Mapped, Step, Store
from quant.execution.steps.moved_steps import NOTE, MovedSteps
from quant.execution.steps.run_record import RUN, WAY_OUT, RunRecord
from quant.execution.steps.step_file import StepFile
from quant.execution.steps.step_writer import StepWriter
from quant.export.checkpoint.files.directory import COMPLETE, NEW, finish_directory
from quant.base.atomic import claimed
from quant.models.watched_files import WatchedFiles

_STEPS = "*.safetensors"


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
        self._writer = StepWriter()
        self._lock = threading.Lock()
        self._hopeless = False
        try:
            if self.rank == 0:
                self._open(depends, restart)
            self.is_complete = from_first((self.path / COMPLETE).exists)
            """Whether the checkpoint was whole when the run began, and perhaps not yet under its name."""
            if not (self.path / RUN).is_file():
                raise ValueError(
                    f"{self.path}: the first rank keeps its work there, and this one does not see it; give an --out on "
                    "a file system that all machines share"
                )
            self._run = RunRecord.read(self.path)
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
        run = RunRecord.begin(depends)
        if (self.path / RUN).is_file():
            changed = RunRecord.read(self.path).changes(run)
            if not changed:
                return
            if not (self.path / COMPLETE).exists() or (self.path / NEW).exists():
                raise ValueError(f"{self.path} holds an unfinished run in which {changed}; {WAY_OUT}")
        # Steps without a run belong to one that finished, except for its last deletion.
        for file in (*self.path.glob(_STEPS), self.path / COMPLETE):
            file.unlink(missing_ok=True)
        run.write(self.path)

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
            self._writer.close(unfinished=True)
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

        def keep(file: StepFile) -> None:
            self._keep(file)
            if then is not None:
                then(self._mapped(file))

        self._writer.put(self._next_start(), step, tensors, record, keep)

    def note(self, step: str, record: Any) -> None:
        """Keeps a step that is only a record, which is on the disk when this returns."""
        self._keep(StepFile.write(self._next_start(), step, {}, record, durable=True))

    def _next_start(self) -> Path:
        """Returns the path of the next step's file, up to its hash."""
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
            each.path.unlink(missing_ok=True)

    def expect(self, name: str, value: Any) -> None:
        """Notes a dependency of the run that was not known when it began.

        Raises:
            ValueError: an earlier run noted something else.
        """
        expected = self._run.expected
        if name not in expected:
            expected[name] = value
            if self.rank == 0:
                self._run.write(self.path)
        elif expected[name] != value:
            raise ValueError(f"{self.path} holds an unfinished run with another {name}; {WAY_OUT}")

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
        return self._writer.seconds(nbytes)

    def flush(self) -> None:
        """Waits until everything is written, by other ranks too where this one waits for it."""
        self._writer.flush()
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
        self._writer.close(unfinished=False)
        self._claim.close()


def partial_path(out: Path) -> Path:
    """Returns the directory in which a run that writes to `out` keeps finished steps."""
    out = out.resolve()
    return out.parent / f".{out.name}.partial"


def is_finished(out: Path) -> bool:
    """Returns whether an earlier run to `out` got as far as a whole checkpoint, and not to its own end."""
    return (partial_path(out) / COMPLETE).exists()
