"""A `Listener` hears how a run goes. The command line prints messages and counts; Python's `progress=` gets the counts.

Code that runs for long takes a listener instead of asking whether it may print.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

Progress = Callable[[str, int, int], None]
"""Called as `progress(stage, done, total)`."""


def reporter(progress: Progress | None, stage: str) -> Callable[[int, int], None] | None:
    """Returns `progress` for one stage, called as `report(done, total)`; None without one."""
    return (lambda done, total: progress(stage, done, total)) if progress else None


class StageProgress(Protocol):
    """Counts the steps of stages: a `Progress` that may know the steps of a stage beforehand."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Reports that `done` steps of `total` are finished."""

    def expect(self, stage: str, names: Sequence[str], amounts: Sequence[float], unit: str) -> None:
        """Announces that a stage begins: the layer or block of each step, and the amount of its work in a unit."""


class _Counts:
    """Hands counts on to a callback."""

    def __init__(self, progress: Progress | None) -> None:
        self.progress = progress

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(stage, done, total)

    def expect(self, stage: str, names: Sequence[str], amounts: Sequence[float], unit: str) -> None:
        """Does nothing: a callback gets only counts."""


class Listener:
    """Hears of messages and stages; this one only passes counts to a callback.

    Args:
        progress: called as `progress(stage, done, total)`, if given.
    """

    is_silent = True
    """Whether messages are dropped, so that slow ones need not be made."""

    def __init__(self, progress: Progress | None = None) -> None:
        self.progress = progress

    def message(self, text: str) -> None:
        """Shows one sentence that a user should read now, on the device or on an effort below the requested one."""

    def step(self, text: str) -> AbstractContextManager[None]:
        """Returns a step without counts, such as loading a model; it ends with the block."""
        return nullcontext()

    def stages(self) -> AbstractContextManager[StageProgress]:
        """Returns a reporter of stages with counts; all stages end with the block."""
        return nullcontext(_Counts(self.progress))


SILENT = Listener()
