"""A `Sensitivity` table holds the loss that each fusion group causes in each format.

    scores[group][format]      expected loss if only this group is quantized so and all others stay as they are
    bits, bytes                size of the group in that format, every scale and pad counted

A format here is a name that `--format` takes: a preset (`nvfp4`, `mxfp8`, `fp8`: weights and inputs), a preset with
`a16` at its end (weights only), or `keep`, which is 16 bit and costs no loss. The three methods measure different
quantities at different expense, see `calibration.sensitivity.scores`; within one table scores can be added up, as the
allocator does.

The file is JSON, written whole or not at all. Its key is a hash of the model, text and settings, so that an interrupted
run continues from it, and never from another model's scores.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from quant.base.errors import known_names
from quant.base.json_files import JsonData, read_json, write_json
from quant.formats.format import Format, fitting, get_format, is_16bit, parse_format
from quant.recipes.layers import LayerKind
from quant.recipes.plan import LayerPlan, Parts
from quant.recipes.recipe import FURTHER_NAMES, KEEP, find_preset, presets
from quant.recipes.solver_names import parse_solver, with_branch, without_residual

# A `Candidate` is one choice that an allocator has for a layer, under the name that `--format` takes.
#
# nvfp4, mxfp8, fp8, …     a preset: its weights and its inputs
# nvfp4a16, fp8a16, …      the same weights, inputs in 16 bit
# nvfp4@fp8, fp8@16bit     a weight format and an input format, written out
# nvfp4+lowrank:32, …      any of these with a branch of this rank in 16 bit, whose bits are counted
# keep                     16 bit; always among them


@dataclass(frozen=True)
class Candidate:
    """One choice for a fusion group."""

    name: str
    weight: Format | None  # weight format; None keeps 16 bit
    activation: Format | None  # input format; None keeps 16 bit
    rank: int = 0

    def format_for(self, width: int) -> Format:
        """Returns the format of rows of this width, of a candidate that does not keep 16 bit."""
        assert self.weight is not None, self.name
        return fitting(self.weight, width)

    @property
    def has_static_scale(self) -> bool:
        """Whether the input has a scale that calibration measures."""
        return self.activation is not None and self.activation.is_static

    def applied(self, layer: LayerPlan) -> LayerPlan:
        """Returns the layer in these formats, with branch and residual channels of its solver and no other parts."""
        rank = min(self.rank, *layer.shape[-2:]) if self.rank else 0
        channels, solver = parse_solver(layer.solver).residual, layer.solver
        is_nvfp4 = all(format is not None and format.is_nvfp4 for format in (self.weight, self.activation))
        if channels and not (layer.kind == LayerKind.LINEAR and is_nvfp4):
            channels, solver = 0, without_residual(solver)
        if channels < 0:
            raise ValueError(
                f"solver {solver!r}: a budget counts bits before any layer is solved, and residual without a number "
                "chooses its channels then; name how many, such as residual:32"
            )
        solver = with_branch(solver, rank) if rank else solver
        weight = None if self.weight is None else fitting(self.weight, layer.matrix[-1])
        planned = replace(layer, weight=weight, activation=self.activation)
        parts = Parts(rank=rank, residual=min(channels, layer.shape[-1] // 16 * 16))
        return replace(planned, solver=solver, parts=parts, cost=None)


KEPT = Candidate(KEEP, None, None)


def parse_candidates(names: str | Iterable[str]) -> tuple[Candidate, ...]:
    """Returns candidates by name, in the order given, `keep` last."""
    names = names.split(",") if isinstance(names, str) else list(names)
    candidates = [_parse(name.strip()) for name in names if name.strip() and not is_16bit(name.strip())]
    if not candidates:
        raise ValueError("no formats to choose from; name some, such as nvfp4,mxfp8,fp8")
    # Two names for the same formats would give the knapsack two equal columns, and the plan an arbitrary name.
    pairs: dict[tuple[Format | None, Format | None, int], str] = {}
    for candidate in candidates:
        other = pairs.setdefault((candidate.weight, candidate.activation, candidate.rank), candidate.name)
        if other != candidate.name or [c.name for c in candidates].count(other) > 1:
            raise ValueError(f"formats {other!r} and {candidate.name!r} are the same; name each once")
    return (*candidates, KEPT)


def _parse(name: str) -> Candidate:
    if "+" in name:  # nvfp4+lowrank:32
        stem, _, branch = name.partition("+")
        rank = branch.removeprefix("lowrank:")
        if rank == branch or not rank.isdecimal() or int(rank) < 1:
            raise ValueError(f"format {name!r}: after '+' comes lowrank:RANK, such as {stem}+lowrank:32")
        return replace(_parse(stem), name=name, rank=int(rank))
    recipe = find_preset(name)
    if recipe is None:
        more = f"{FURTHER_NAMES}; with +lowrank:RANK after it, a branch in 16 bit"
        raise ValueError(f"unknown format {name!r}; {known_names(name, presets(), 'formats', more=more)}")
    return Candidate(name, get_format(recipe.weight), parse_format(recipe.activation))


METHODS = ("fisher", "kl", "output")
UNITS = {
    "kl": "nats: KL(base‖model) of the next token",
    "fisher": "nats: second-order estimate of KL(base‖model) of the next token",
    "output": "relative squared error of the group's output",
    "cosine": "1 − cosine similarity of the embeddings",
}


@dataclass(frozen=True)
class GroupScores(JsonData):
    """One fusion group, or a layer without a group."""

    name: str
    layers: tuple[str, ...]
    numel: int
    scores: dict[str, float]  # loss by format name, in the unit of the table; `keep` is 0
    bits: dict[str, float]  # bits per weight by format name
    bytes: dict[str, int]  # bytes by format name

    def __post_init__(self) -> None:
        # JSON of earlier releases may hold NaN, which the knapsack would compare as neither smaller nor larger.
        for format, score in self.scores.items():
            if not math.isfinite(score):
                raise ValueError(f"{self.name}: its score in {format} is {score}; measure it again")


@dataclass(frozen=True)
class Sensitivity(JsonData):
    """Scores of every group in every format."""

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
    def load(cls, path: str | Path) -> "Sensitivity":
        """Reads a table."""
        return read_json(path, "a sensitivity table", cls.from_dict)
