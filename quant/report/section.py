"""A `Section` is one section of the report's page: sentences, the data of a chart, and the table of its values.

`report.js` draws a chart by its `kind`, with Observable Plot. Every point, bar and cell names a row of a table, and the
text that hovers over it is read from that row, so each value is on the page once, as text.

Series have the colours c0 to c6, and `kept` for 16 bit. No chart depends on colour alone: each colour has a symbol of
its own, heat is a ramp of one hue, and chosen cells have a ring.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quant.report.report import Report

COLOURS = [f"c{i}" for i in range(7)]  # further series share the last one


@dataclass(frozen=True)
class Section:
    """One section of the page."""

    title: str
    text: str = ""  # sentences above the chart
    link: tuple[str, str] | None = None  # row and text of a link after `text`
    # What `report.js` draws, with its `kind` and the captions `x` and `y` of its axes.
    chart: Mapping[str, Any] | None = None
    head: Sequence[str] = ()  # names of the columns
    rows: Sequence[tuple[str, Sequence[str]]] = ()  # id and cells
    verdict: bool | None = None  # whether a check passed; None where nothing was checked
    folded: bool | None = None  # None folds a table of more than eight rows


def number(value: float | None) -> str:
    """Formats a number with four significant digits, or as a dash."""
    return "–" if value is None else f"{value:.4g}"


def short_name(name: str | None) -> str:
    """Returns the name of a model or text without its folders, which a page that is passed on need not tell."""
    if name is None:
        return "–"
    # A model of the hub, org/name, is no path; neither are the sources hf:org/name.
    is_path = name.startswith(("/", "~", ".")) or "\\" in name or name.count("/") > 1 or Path(name).suffix != ""
    return (re.split(r"[/\\]", name.rstrip("/\\"))[-1] or name) if is_path else name


def percentage(value: float, total: float) -> str:
    """Formats `value` as a percentage of `total`, or as a dash."""
    return f"{value / total:.1%}" if total else "–"


def format_colours(report: Report) -> dict[str | None, str]:
    """Returns the colours of the weight formats in use, fewest bits first; then `kept` for None, which is 16 bit."""
    # Ties by name: the colour of a format must not depend on the order of layers.
    bits = {layer.format: layer.bits for layer in report.layers if layer.format is not None}
    colours: dict[str | None, str] = {}
    colours.update(colours_of(sorted(bits, key=lambda name: (bits[name], name))))
    return {**colours, None: "kept"}


def coloured(*names: str) -> list[tuple[str, str]]:
    """Pairs of name and colour, as `report.js` takes them."""
    return [*colours_of(names).items()]


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """Returns a colour for each name, the last colour for all names after it."""
    return {name: COLOURS[min(i, len(COLOURS) - 1)] for i, name in enumerate(names)}


def role_and_block(name: str) -> tuple[str, int | None]:
    """Splits a group's name into its role, with the first number replaced by a star, and that number, its block."""
    # The first number alone: `layers.3.experts.7` is expert 7 in each of the blocks.
    match = re.search(r"(?:^|(?<=\.))\d+(?=\.|$)", name)
    return (f"{name[: match.start()]}*{name[match.end() :]}", int(match.group())) if match else (name, None)


def block_starts(names: Iterable[str]) -> list[tuple[int, int]]:
    """Returns the first position of each block of the model in a list of layer names, as (position, block number)."""
    first: dict[int, int] = {}
    for position, name in enumerate(names):
        if (block := role_and_block(name)[1]) is not None:
            first.setdefault(block, position)
    return [(position, block) for block, position in first.items()]
