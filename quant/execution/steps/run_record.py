"""A `RunRecord` is the file `run.json` of a partial directory: the dependencies of the run that the steps belong to.

Steps of two runs with different models, plans, data or versions would not fit together. So a run compares its
dependencies with those of the record before it goes on, and names the first difference.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quant.base.atomic import write_atomically
from quant.base.json_files import read_json
from quant.base.json_data import typed
from quant.recipes.json_text import json_text

RUN = "run.json"
WAY_OUT = "give what it was begun with, or pass --restart to begin anew"


@dataclass(frozen=True)
class RunRecord:
    """The dependencies of a run.

    Attributes:
        depends: those that were known when the run began, by name, JSON-ready.
        expected: those that became known later.
    """

    depends: dict[str, Any]
    expected: dict[str, Any]

    @classmethod
    def begin(cls, depends: Mapping[str, Any]) -> RunRecord:
        """Returns the record of a run that begins, with lists for tuples as in the file."""
        return cls(json.loads(json_text(depends)), {})

    @classmethod
    def read(cls, directory: Path) -> RunRecord:
        """Returns the record of the run in a partial directory.

        Raises:
            ValueError: the file cannot be read as one; the message names it and the way out.
        """

        def make(document: Any) -> RunRecord:
            run: dict[str, Any] = typed(dict[str, dict[str, Any]], document, "run")
            if set(run) != {"depends", "expected"}:
                raise ValueError("it does not say what the run depends on")
            return cls(**run)

        try:
            return read_json(directory / RUN, "the start of a run", make)
        except ValueError as error:
            raise ValueError(f"{error}; pass --restart to begin anew") from None

    def write(self, directory: Path) -> None:
        """Writes the record into a partial directory, whole or not at all."""
        write_atomically(directory / RUN, json_text({"depends": self.depends, "expected": self.expected}))

    def changes(self, new: RunRecord) -> str:
        """Returns the first dependency in which a new run differs, in words; nothing where there is none."""
        return _difference(self.depends, new.depends)


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
