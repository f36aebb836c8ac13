"""A `Store` keeps finished steps of a run, so that the same command can go on after them. This one keeps nothing.

A step is some tensors and a JSON-ready record under a name: a solved block, the calibration text, an evaluation.
`quant.execution.store.Partial` keeps steps in a directory. Callers need not ask whether there is one: a step that was
put into a plain `Store` is never in it, `get` gives None, and the work is done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Mapped = Callable[[Mapping[str, torch.Tensor]], None]
"""Called with the tensors of a step, mapped from their file, when they are written."""


@dataclass(frozen=True, eq=False)
class Step:
    """A finished step: its tensors, mapped from their file, and its record, JSON-ready."""

    tensors: Mapping[str, torch.Tensor]
    record: Any


class Store:
    """Keeps nothing.

    Attributes:
        directory: where finished steps and large temporary files are kept; None keeps both in memory.
        is_complete: whether an earlier run wrote the whole checkpoint, though perhaps not yet under its name.
        is_moving: whether some steps are in the checkpoint's files alone, so that their tensors hold zeros here.
    """

    directory: Path | None = None
    is_complete = False

    @property
    def is_moving(self) -> bool:
        return False

    def __contains__(self, step: str) -> bool:
        """Whether a step was finished, though perhaps its file is damaged."""
        return False

    def get(self, step: str) -> Step | None:
        """A finished step; None where there is none, or its file is damaged."""
        return None

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
            then: called with the tensors, mapped from the file, when they are written; never by a store that keeps
                nothing.
            alone: this rank alone has computed them. A step that all ranks have is written by the first.
        """

    def drop(self, step: str) -> None:
        """Deletes a step that is no longer needed."""

    def expect(self, name: str, value: Any) -> None:
        """Records something that the run depends on and that was not known when it began.

        Raises:
            ValueError: an earlier run, whose steps are here, recorded another value.
        """

    def flush(self) -> None:
        """Waits until everything is written, also by other ranks where this one uses their results."""

    def refresh(self) -> None:
        """Reads the steps that other ranks have written meanwhile."""

    def moving(self, made_of: Mapping[str, str]) -> Any:
        """The log that moves steps into the files of the checkpoint as these are written; None where none is kept.

        Args:
            made_of: by name of each tensor of the checkpoint, the name of the model's layer or tensor it is made of.
        """
        return None

    def shards(self) -> list[str]:
        """The checkpoint's files that were begun in `directory`."""
        return []

    def finish(self) -> None:
        """Puts a whole checkpoint under its name, if it is not there, and deletes the steps."""

    def solving(self) -> AbstractContextManager[None]:
        """While open, a ValueError means that the same command would fail again, so that no step is worth keeping."""
        return nullcontext()

    def reading(self) -> AbstractContextManager[None]:
        """While open, an error in a step's contents is reported as damage of the store."""
        return nullcontext()
