"""A `Session` is everything that the steps of one run share, as one object that they hand on.

    device     where blocks are worked on and models run
    memory     bytes that the run may use
    progress   the listener that is called as steps progress
    store      the finished steps of the run, kept for the next run of the same command
    seed       of everything that is drawn
    rank       this process, of `world` that share the work

Public functions take `device=` and `progress=` and make a session of them:

    session = Session.on("cuda", progress=print)

Below them a function takes the session. It runs models `placed(model, session.device)`, reports its progress with
`session.report("solve", done, total)`, and keeps a finished step with `session.store.put(...)`; a session without a
listener or a store ignores these calls. Functions that compute with tensors or move them take a device.

A finished step is some tensors and a JSON-ready record under a name: a solved block, the calibration text, an
evaluation. `quant.calibration.walk.step_store.DirectoryStore` keeps steps in a directory; the `Store` here keeps
nothing. Callers need not ask which one it is: a step that was put into a plain `Store` is never in it, and `get` gives
None, so the work is done.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from quant.base.listener import Progress
from quant.base.processor import memory_left, memory_limit
from quant.calibration.placement import Device, elsewhere, find_device
from quant.calibration.ranks import rank_and_world

Tensors = Mapping[str, torch.Tensor]
Mapped = Callable[[Tensors], None]
"""Called with the tensors of a step, mapped from their file, when they are written."""


@dataclass(frozen=True, eq=False)
class Step:
    """A finished step: its tensors, mapped from their file, and its record, JSON-ready."""

    tensors: Tensors
    record: Any


class Store:
    """Keeps nothing."""

    directory: Path | None = None  # where finished steps and large temporary files are kept; None keeps both in memory
    is_complete = False  # whether an earlier run wrote the whole checkpoint, though perhaps not yet under its name

    @property
    def keeps(self) -> bool:
        """Whether steps are kept, so that their tensors need not stay in memory, and other ranks can read them."""
        return self.directory is not None

    @property
    def is_moving(self) -> bool:
        """Whether some steps are only in the checkpoint's files, so that their tensors hold zeros here."""
        return False

    def progress(self) -> tuple[int, int]:
        """Returns the number of layers that an earlier run has solved, and the bytes of all that it has kept."""
        return 0, 0

    def __contains__(self, step: str) -> bool:
        """Returns whether a step was finished, though perhaps its file is damaged."""
        return False

    def get(self, step: str) -> Step | None:
        """Returns a finished step; None where there is none, or its file is damaged."""
        return None

    def put(self, step: str, tensors: Tensors, record: Any, then: Mapped | None = None, *, alone: bool = False) -> None:
        """Keeps a finished step; a step of this name that was kept before goes when the new one is written.

        A step that all ranks have is written by the first, one that only this rank has computed (`alone`) by this one.
        """

    def drop(self, step: str) -> None:
        """Deletes a step that is no longer needed."""

    def expect(self, name: str, value: Any) -> None:
        """Records something that the run depends on and that was not known when it began."""

    def flush(self) -> None:
        """Waits until everything is written, also by other ranks where this one uses their results."""

    def seconds_to_write(self, nbytes: int) -> float:
        """Returns the seconds that `nbytes` take to write at the speed that was last measured."""
        return 0.0

    def refresh(self) -> None:
        """Reads the steps that other ranks have written since."""

    def moving(self, made_of: Mapping[str, str]) -> Any:
        """Returns the log that moves steps into the checkpoint's files; `made_of` names the layer of each tensor."""
        return None

    def shards(self) -> list[str]:
        """Returns the checkpoint's files that were begun in `directory`."""
        return []

    def finish(self) -> None:
        """Puts a whole checkpoint under its name, if it is not there, and deletes the steps."""

    def solving(self) -> AbstractContextManager[None]:
        """Marks a ValueError as one that the same command would raise again, so that no step is worth keeping."""
        return nullcontext()

    def reading(self) -> AbstractContextManager[None]:
        """Reports an error in a step's contents as damage of the store, while open."""
        return nullcontext()


@dataclass(frozen=True, eq=False)
class Session:
    """Device, memory, listener, store and seed that the steps of one run share."""

    # the device where blocks are worked on, with its index; None is where the model is
    device: torch.device | None = None
    # bytes that the user allows the run, the page cache not counted; None allows all that is left
    memory: int | None = None
    progress: Progress | None = None  # a function that is called as `progress(stage, done, total)`, if given
    store: Store = field(default_factory=Store)
    seed: int = 0

    @classmethod
    def on(cls, device: Device, *, progress: Progress | None = None, memory: int | None = None, seed: int = 0) -> Self:
        """Returns a session on "auto", "cpu", "cuda", "cuda:N", or a device; None is where the model is."""
        return cls(find_device(device), memory, progress, seed=seed)

    @property
    def rank(self) -> int:
        """The number of this process among the processes that share the work."""
        return rank_and_world()[0]

    @property
    def world(self) -> int:
        """How many processes share the work."""
        return rank_and_world()[1]

    def for_model(self, model: nn.Module) -> Self:
        """Returns the same session, with device None where the model need not be copied because it is on the device."""
        # `device=None` lets every step take the model's own tensors instead of copies.
        return self if elsewhere(model, self.device) else replace(self, device=None)

    def usable_memory(self) -> int | None:
        """Returns the bytes that the run may use, at most a container's limit; None where the system is silent."""
        if self.memory is None:
            return memory_left()
        limit = memory_limit()
        return self.memory if limit is None else min(self.memory, limit)

    def report(self, stage: str, done: int, total: int) -> None:
        """Tells the listener that `done` of `total` parts of a stage are done."""
        if self.progress is not None:
            self.progress(stage, done, total)
