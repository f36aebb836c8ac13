"""A `Candidate` is a pair of formats that an allocator may choose, under the name that `--formats` takes.

nvfp4, mxfp8, fp8, …     a preset: its weights and its inputs
nvfp4a16, fp8a16, …      the same weights, inputs in 16 bit
nvfp4@fp8, fp8@16bit     a weight format and an input format, written out
keep                     16 bit; always among them
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from quant.formats.format import Format, get_format, is_16bit, parse_format
from quant.recipes.plan import LayerPlan, Parts
from quant.recipes.recipe import KEEP, presets


@dataclass(frozen=True)
class Candidate:
    """One choice for a fusion group.

    Attributes:
        name: as the user wrote it.
        weight: weight format; None keeps 16 bit.
        activation: input format; None keeps 16 bit.
    """

    name: str
    weight: Format | None
    activation: Format | None

    @property
    def has_static_scale(self) -> bool:
        """Whether the input has a scale that calibration measures."""
        return self.activation is not None and self.activation.is_static

    def applied(self, layer: LayerPlan) -> LayerPlan:
        """The layer in these formats; nothing stands beside its weight."""
        return replace(layer, weight=self.weight, activation=self.activation, parts=Parts(), cost=None)


KEPT = Candidate(KEEP, None, None)


def parse_candidates(names: str | Iterable[str]) -> tuple[Candidate, ...]:
    """Candidates by name, in the order given, `keep` last.

    Args:
        names: a list, or one string with commas.

    Raises:
        ValueError: an unknown name, or the same pair of formats twice.
    """
    names = names.split(",") if isinstance(names, str) else list(names)
    found = [_parse(name.strip()) for name in names if name.strip() and not is_16bit(name.strip())]
    if not found:
        raise ValueError("no formats to choose from; name some, such as nvfp4,mxfp8,fp8")
    pairs: dict[tuple[Format | None, Format | None], str] = {}
    for candidate in found:
        other = pairs.setdefault((candidate.weight, candidate.activation), candidate.name)
        if other != candidate.name or [c.name for c in found].count(other) > 1:
            raise ValueError(f"formats {other!r} and {candidate.name!r} are the same; name each once")
    return (*found, KEPT)


def _parse(name: str) -> Candidate:
    if "@" in name:
        weight, activation = name.split("@", 1)
        return Candidate(name, get_format(weight), parse_format(activation))
    known = presets()
    stem = name.removesuffix("a16")
    if name not in known and (stem == name or stem not in known):
        raise ValueError(
            f"unknown format {name!r}; known formats: {', '.join(known)}, any of them with a16 at its end, "
            "or WEIGHT@INPUT such as nvfp4@fp8"
        )
    recipe = known.get(name) or known[stem]
    activation = recipe.activation if name in known else KEEP
    return Candidate(name, get_format(recipe.weight), parse_format(activation))
