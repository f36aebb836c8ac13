"""An `EngineSession` runs one exported decoder: it holds the KV cache, and computes a step of tokens for several rows.

    onnxruntime    an ONNX file of `quant export --to onnx`, on the processor
    tensorrt       an engine of `quant export --to tensorrt`, on the GPU that it was built for
    aoti           a package of `quant export --to aoti`, on the kind of machine that it was compiled on

All take the inputs and outputs of `quant.export.onnx.serving`, and everything above this interface (`loop`,
`check`) is the same code for all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np

from quant.base.errors import UserError, option
from quant.export.onnx.serving import IDS, LAST, LENGTHS, LOGITS, cache_names


class EngineSession(Protocol):
    """A loaded file.

    Attributes:
        backend: library and device, such as "onnxruntime 1.32.0, CPU".
        capacity: tokens that each row of the KV cache holds.
        dtype: the dtype of the cache and of everything that is not quantized, as numpy names it.
        plan: digest of the plan that the file was exported with; empty if the file does not record it.
    """

    backend: str
    capacity: int
    dtype: str
    plan: str

    def most_rows(self) -> int:
        """Returns the largest number of rows."""

    def begin(self, rows: int) -> None:
        """Makes an empty KV cache for `rows` rows; UserError if the file or the memory does not allow it."""

    def width(self, tokens: int) -> int:
        """Returns how many tokens a step takes, at least `tokens`; the largest step's number if that takes fewer."""

    def step(self, ids: np.ndarray, lengths: np.ndarray, last: np.ndarray) -> np.ndarray:
        """Computes logits `[rows, vocabulary]` in float32.

        Args:
            ids: int64 `[rows, width]`.
            lengths: int64 `[rows]`, tokens of the row that precede `ids`.
            last: int64 `[rows]`, index of the row's last real token in `ids`.
        """


def check_names(path: Path, inputs: list[str], outputs: list[str]) -> int:
    """Returns the number of layers of a serving graph; UserError for the inputs and outputs of any other graph."""
    layers = sum(name.startswith("past_key.") for name in inputs)
    expected = {IDS, LENGTHS, LAST, *cache_names("past", layers)}, {LOGITS, *cache_names("new", layers)}
    if not layers or (set(inputs), set(outputs)) != expected:
        listed = ", ".join(name for name in inputs if not name.startswith("past_"))
        raise UserError(
            f"{path}: no serving graph of a decoder (its inputs are {listed}); export one with `quant export DIRECTORY "
            f"--to onnx` or `--to tensorrt`, without {option('capacity', 0)}"
        )
    return layers


def check_memory(path: Path, nbytes: int, free: int | None, rows: int) -> None:
    """Raises UserError for a KV cache that does not fit into `free` bytes; None if the free memory is unknown."""
    if free is not None and nbytes > free:
        raise UserError(
            f"{path}: the KV cache of {rows} rows takes {nbytes / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free; run "
            f"fewer rows, or export with a smaller {option('capacity')}"
        )
