"""This file draws a benchmark's rows as lines, one panel for each case, or as bars, with matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def lines(
    path: Path, rows: Sequence[Mapping[str, Any]], *, x: str, y: str, line: str, panel: str, par: float | None = 1
) -> None:
    """Writes a .png or .svg with `y` over `x`, both logarithmic, a line for each value of the column `line`.

    Rows with the same value of `panel` share a panel; rows without `x` or `y` are left out. `par` is the height of
    a dashed line, that of the thing compared with.

    Raises:
        SystemExit: matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import NullLocator, ScalarFormatter
    except ImportError as error:
        raise SystemExit("--plot needs matplotlib: pip install matplotlib") from error
    rows = [row for row in rows if row.get(x) is not None and row.get(y) is not None]
    titles = list(dict.fromkeys(row[panel] for row in rows))
    names = list(dict.fromkeys(row[line] for row in rows))
    figure = Figure(figsize=(3.6 * len(titles), 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(titles), sharey=True, squeeze=False)[0]
    for axes, title in zip(panels, titles, strict=True):
        for colour, name in enumerate(names):
            points = sorted((row[x], row[y]) for row in rows if (row[panel], row[line]) == (title, name))
            if points:
                axes.plot(*zip(*points, strict=True), "o-", ms=3, lw=1.5, color=f"C{colour}", label=name)
        if par is not None:
            axes.axhline(par, color="0.5", lw=1, ls="--")
        axes.set(yscale="log", title=title, xlabel=x)
        axes.set_xscale("log", base=2)
        least, most = min(row[x] for row in rows), max(row[x] for row in rows)
        step = 4 if most > 64 * least else 2
        axes.set_xticks([step**i for i in range(24) if least <= step**i <= most])
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_locator(NullLocator())
        axes.tick_params(labelsize=8)
        axes.grid(color="0.92")
        axes.spines[["top", "right"]].set_visible(False)
    low, high = panels[0].get_ylim()
    ticks = [t for t in (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 15, 30, 60, 125) if low <= t <= high]
    if len(ticks) > 1:
        panels[0].set_yticks(ticks)
        panels[0].yaxis.set_minor_locator(NullLocator())
    panels[0].set_ylabel(y)
    panels[-1].legend(frameon=False, fontsize=8)
    figure.savefig(path)


def bars(path: Path, rows: Sequence[Mapping[str, Any]], *, label: str, values: Mapping[str, str], x: str) -> None:
    """Writes a .png or .svg with horizontal bars, one group for each row.

    Args:
        path: of the figure.
        rows: in their order from the top.
        label: the column that names a group.
        values: columns of numbers, and how the legend calls each; a number that is zero has no bar.
        x: title of the axis.

    Raises:
        SystemExit: matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SystemExit("--plot needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(7.2, 0.5 + 0.36 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    height = 0.8 / len(values)
    for index, (column, name) in enumerate(values.items()):
        places = [row - 0.4 + height * (index + 0.5) for row in range(len(rows))]
        axes.barh(places, [row[column] for row in rows], height, color=f"C{index}", label=name)
    axes.set_yticks(range(len(rows)), [row[label] for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(x)
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(axis="x", color="0.92")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path)
