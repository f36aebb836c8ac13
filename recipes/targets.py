"""A `Target` lists the formats that a runtime can run, as data: `tables/runtimes.toml`.

A target is a table of pairs: weight format and input format that its loader accepts together, and how they run then.

    native     the matmul itself runs in the low precision
    storage    weights are unpacked to 16 bit (or to 8) on the way; memory is saved, arithmetic is not

Everything that is not in the table is refused: a pair that nobody has seen work is worth less than an error. The
tables are read off the runtimes' own loaders, or off engines that were built and inspected; `Target.source` says
which, and `Pair.source` where in it. Our presets also ran in vLLM 0.26 and 0.29 on an H100, those of linear layers in
0.33 on an H200. Where a pair depends on the GPU, the note names the first architecture that runs it natively.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quant.base.errors import known_names
from quant.formats.format import Format
from quant.recipes.gpus import GENERATIONS, GPUS, Hardware, like, read_table
from quant.recipes.layers import LayerKind
from quant.recipes.plan import LayerPlan

NATIVE, STORAGE = "native", "storage"


@dataclass(frozen=True)
class Pair:
    """A weight format and an input format, by name, that a runtime accepts together."""

    weight: str
    activation: str | None  # None for 16 bit
    runs: str = NATIVE  # or STORAGE
    note: str = ""  # the hardware it needs, or its purpose
    kinds: tuple[LayerKind, ...] = (LayerKind.LINEAR, LayerKind.EXPERTS)
    merged_rows: int = 1  # where matrices are merged into one, `out` of each but the last must be a multiple of this
    rows: int = 1  # `out` of every matrix must be a multiple of this
    mixes: bool = True  # other layers may have other formats
    source: str = ""  # file or function of the runtime that accepts it; empty for the target's own

    def __str__(self) -> str:
        return _name(self.weight, self.activation)


def _name(weight: object, activation: object) -> str:
    return f"{weight}@{activation or '16bit'}"


@dataclass(frozen=True)
class Target:
    """A runtime, and the pairs of formats that it accepts."""

    name: str  # key in `TARGETS`
    description: str
    pairs: tuple[Pair, ...]
    kv_cache: tuple[str, ...] = ()  # formats of the KV cache by name, besides 16 bit
    fused: tuple[tuple[str, ...], ...] = ()  # siblings that it merges into one matmul, whose formats must agree
    parts: tuple[str, ...] = ()  # run-time parts that it can execute, of "pre_scale", "hadamard", "rank"
    source: str = ""  # the origin of the table
    refused: Mapping[str, str] = field(default_factory=dict)  # why it stops at a pair or a weight format, by name
    misread: Mapping[str, str] = field(default_factory=dict)  # the wrong reading that it silently gives a pair, by name

    def pair(self, weight: Format, activation: Format | None) -> Pair | None:
        """Returns the entry for two formats, if the runtime accepts them together."""
        names = (weight.name, activation.name if activation else None)
        return next((pair for pair in self.pairs if (pair.weight, pair.activation) == names), None)

    def why_not(self, layer: LayerPlan) -> str | None:
        """Returns why the runtime is known to stop at a layer's formats, or to take them for others."""
        # A pair is more specific than its weight format, so it is looked up first.
        reasons = {**self.refused, **self.misread}
        return reasons.get(_name(layer.weight, layer.activation)) or reasons.get(str(layer.weight))

    def problems(self, layer: LayerPlan, *, merged: bool = False, mixed: bool = False) -> list[str]:
        """Returns why the runtime cannot run `layer` as planned, one clause each; none if it can.

        `merged` says whether the rows of another weight follow its own in one matrix, `mixed` whether other layers have
        other formats.
        """
        if layer.weight is None:
            return []
        pair = self.pair(layer.weight, layer.activation)
        if pair is None:
            return [self._no_pair(layer)]
        clauses, rows = [], layer.matrix[-2]
        if mixed and not pair.mixes:
            clauses.append(
                f"{self.name} does not know {pair} where other layers have other formats, and silently takes it for 16 "
                f"bit ({self.source})"
            )
        if rows % pair.rows:
            clauses.append(f"out = {rows} is not a multiple of {pair.rows}, which {self.name} requires of {pair}")
        if merged and rows % pair.merged_rows:
            clauses.append(f"out = {rows} is not a multiple of {pair.merged_rows}, which {self.name} merges {pair} by")
        if layer.kind not in pair.kinds:
            kinds = " and ".join(pair.kinds)
            clauses.append(f"{self.name} runs {pair} for {kinds} layers, not for kind '{layer.kind}'")
        beyond = layer.parts.to_dict().keys() - set(self.parts)
        return clauses + [f"{self.name} has nothing to run {_PARTS[part]} with" for part in _PARTS if part in beyond]

    def _no_pair(self, layer: LayerPlan) -> str:
        if refusal := self.why_not(layer):
            return f"{self.name} cannot run {_name(layer.weight, layer.activation)}: {refusal}"
        inputs = [pair.activation or "16bit" for pair in self.pairs if pair.weight == str(layer.weight)]
        if inputs:
            planned = layer.activation.name if layer.activation else "16bit"
            return f"{self.name} takes {layer.weight} weights with inputs in {' or '.join(inputs)}, not in {planned}"
        weights = dict.fromkeys(pair.weight for pair in self.pairs)
        return f"{self.name} has no {layer.weight}; it has {', '.join(weights)}"


_PARTS = {
    "pre_scale": "an input scale (pre_scale)",
    "hadamard": "a rotation of the input (hadamard)",
    "rank": "a low-rank branch (rank)",
    "residual": "residual channels of the input (residual)",
}


def _read(name: str, table: dict[str, Any]) -> Target:
    pairs = []
    for pair, fields in table["pairs"].items():
        weight, _, inputs = pair.partition("@")
        kinds = {"kinds": tuple(map(LayerKind, fields["kinds"]))} if "kinds" in fields else {}
        pairs.append(Pair(weight, None if inputs == "16bit" else inputs, **fields | kinds))
    table["fused"] = [tuple(siblings) for siblings in table.get("fused", ())]
    lists: dict[str, Any] = {key: tuple(table[key]) for key in ("kv_cache", "fused", "parts") if key in table}
    return Target(name, **table | lists | {"pairs": tuple(pairs)})


TARGETS: dict[str, Target] = {name: _read(name, table) for name, table in read_table("runtimes").items()}

RTX = "tensorrt-rtx-"
"""Runtimes that are named with the GPU's generation."""


def get_gpu(name: str) -> Hardware:
    """Returns the GPU called `name`, or the one of a runtime for one kind; ValueError for any other name.

    A GPU of a generation, such as sm120, has no rates of its own.
    """
    short = name.lower().removeprefix(RTX)
    if short in GENERATIONS:
        return like(short, (int(short[2:-1]), int(short[-1])))
    if short in TARGETS:
        raise ValueError(f"target {name} is a runtime; name a GPU: {', '.join((*GPUS, *GENERATIONS))} or local")
    if short not in GPUS:
        names = [*TARGETS, *GPUS, *GENERATIONS]
        known = known_names(short, names, "targets", more=", and local, this machine's GPU")
        raise ValueError(f"unknown target {short!r}; {known}")
    return GPUS[short]
