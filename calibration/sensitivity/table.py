"""A `Sensitivity` table holds the loss that each fusion group causes in each format.

    scores[group][format]      expected loss if only this group is quantized so and all others stay as they are
    bits, bytes                size of the group in that format, every scale and pad counted

A format here is a name that `--formats` takes: a preset (`nvfp4`, `mxfp8`, `fp8`: weights and inputs), a preset with
`a16` at its end (weights only), or `keep`, which is 16 bit and costs no loss. The three methods measure different
quantities at different expense, see `calibration.sensitivity.scores`; within one table scores can be added up, as the
allocator does.

The file is JSON, written whole or not at all. Its key is a hash of the model, text and settings, so that an interrupted
run continues from it, and never from another model's scores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from quant.base.json_files import read_json
from quant.base.json_data import JsonData
from quant.recipes.json_text import write_json

METHODS = ("fisher", "kl", "output")
UNITS = {
    "kl": "nats: KL(base‖model) of the next token",
    "fisher": "nats: second-order estimate of KL(base‖model) of the next token",
    "output": "relative squared error of the group's output",
    "cosine": "1 − cosine similarity of the embeddings",
}


@dataclass(frozen=True)
class GroupScores(JsonData):
    """One fusion group, or a layer without a group.

    Attributes:
        name: the group's, or the layer's.
        layers: the names of the group's members, in model order.
        numel: weights in all of them.
        scores: loss by format name, in the unit of the table; `keep` is 0.
        bits: bits per weight by format name.
        bytes: bytes by format name.

    Raises:
        ValueError: a score is NaN or infinite.
    """

    name: str
    layers: tuple[str, ...]
    numel: int
    scores: dict[str, float]
    bits: dict[str, float]
    bytes: dict[str, int]

    def __post_init__(self) -> None:
        # JSON of earlier releases may hold NaN, which the knapsack would compare as neither smaller nor larger.
        for format, score in self.scores.items():
            if not math.isfinite(score):
                raise ValueError(f"{self.name}: its score in {format} is {score}; measure it again")


@dataclass(frozen=True)
class Sensitivity(JsonData):
    """Scores of every group in every format.

    Attributes:
        method: one of `METHODS`.
        formats: columns of the table, as the user named them; `keep` is always among them.
        unit: the unit of the scores, a value of `UNITS`.
        rows, seqlen: size of the text that they were measured on.
        groups: the groups in model order.
        key: SHA-256 over model, text and settings.
        seconds: time that scoring took.
    """

    method: str
    formats: tuple[str, ...]
    unit: str
    rows: int
    seqlen: int
    groups: tuple[GroupScores, ...]
    key: str = ""
    seconds: float = 0.0

    @cached_property
    def by_name(self) -> dict[str, GroupScores]:
        """Groups by name."""
        return {group.name: group for group in self.groups}

    def save(self, path: str | Path) -> None:
        """Writes the table as JSON, whole or not at all."""
        write_json(path, self.to_dict(), ensure_ascii=False)

    @classmethod
    def load(cls, path: str | Path) -> Sensitivity:
        """Reads a table.

        Raises:
            ValueError: not JSON, or not a sensitivity table; the message names the file.
        """
        return read_json(path, "a sensitivity table", cls.from_dict)
