"""A `StepFile` holds one finished step of a run: its tensors, its name, and a record of JSON.

    00007-SHA256.safetensors       the seventh step that the run wrote; with -2 after the number, by its rank 2

The file is written under another name and renamed when it is whole, and its name holds the hash of its contents. So
however a run stops, a step is whole or missing, and a step that was damaged later is noticed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from quant.export.checkpoint.checksums import sha256_of
from quant.export.checkpoint.files.tensor_file import write_tensor_file
from quant.base.atomic import sync
from quant.base.json_files import parse_json
from quant.recipes.json_text import json_text

_NAME = re.compile(r"(\d{5})(-\d+)?-([0-9a-f]{64})\.safetensors")


@dataclass(frozen=True)
class StepFile:
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
        return cls(path, step) if step is not None and is_step_file(path.name) else None

    @classmethod
    def write(
        cls, start: Path, step: str, tensors: Mapping[str, torch.Tensor], record: Any, *, durable: bool = False
    ) -> StepFile:
        """Writes a step whole or not at all.

        Args:
            start: the path up to the hash, such as `….partial/00007`.
            step: the name of the step.
            tensors: the tensors by name.
            record: JSON-ready.
            durable: whether it is on the disk when this returns.
        """
        unfinished = start.with_suffix(".unfinished")
        metadata = {"step": step, "record": json_text(record)}
        try:
            sha256 = write_tensor_file(unfinished, tensors, metadata, durable=durable)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            raise OSError(
                f"{start} cannot be written: {error}; what was finished before is kept: make room, and run the same "
                "command again"
            ) from error
        # A rename within a directory is atomic, so a file under its final name is whole.
        path = unfinished.rename(f"{start}-{sha256}.safetensors")
        if durable:
            sync(path.parent)
        return cls(path, step)

    @property
    def number(self) -> int:
        """Steps are numbered in the order in which they were begun."""
        return int(self.path.name[:5])

    def is_whole(self) -> bool:
        """Returns whether the contents are as they were written."""
        return self.path.is_file() and sha256_of(self.path) == self.path.stem.rpartition("-")[2]

    def record(self) -> Any:
        """Returns the record of the step."""
        with safe_open(self.path, framework="pt") as opened:
            return parse_json(opened.metadata()["record"].encode())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the tensors, as views of the mapped file."""
        with safe_open(self.path, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def is_step_file(name: str) -> bool:
    """Returns whether a file name has the form of a step's, and so leads into no other folder."""
    return _NAME.fullmatch(name) is not None
