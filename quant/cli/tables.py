"""Tables fit the terminal: a number is never cut, and columns without room are left out and named below the table.

rich would cut or fold cells to the width, and a number that is cut is another number. A pipe or a file has room for
every column (`quant.cli.console.page`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from quant.base.errors import counted, megabytes, printable
from quant.cli.console import page
from quant.recipes.plan import LayerPlan, Plan, bits_per_weight

_WORDS_WIDTH = 20  # least width of a column whose text may go on in the next line
# Columns of a plan that a narrow terminal goes without, in this order.
_PLAN_DROPS = ("group", "solver", "why", "SNR dB", "shape", "input")
_REASONS = 8  # reasons that are counted below a plan without their column


def print_table(
    columns: Mapping[str, Sequence[str]], *, title: str | None = None, drops: Sequence[str] = (), **style: Any
) -> None:
    """Prints a table, and below it the names of the columns that had no room.

    Args:
        columns: the cells by the column's name; a name that begins with `!` keeps its cells in one line, one with `>`
            aligns them right.
        title: the line above it.
        drops: the names of columns that a narrow terminal goes without, the first one first.
        style: options of the rich table.
    """
    out = page()
    grid, left_out = fitting(columns, out, title=title, drops=drops, **style)
    out.print(grid)
    print_left_out(left_out, out)


def fitting(
    columns: Mapping[str, Sequence[str]],
    out: Console,
    *,
    title: str | None = None,
    drops: Sequence[str] = (),
    **style: Any,
) -> tuple[Table, list[str]]:
    """Returns the table that fits a console, and the names of the columns that it goes without; see `print_table`."""
    # Control characters are shown, which makes cells wider, before anything is measured.
    columns = {printable(column): list(map(printable, cells)) for column, cells in columns.items()}
    names = {column: column.lstrip("!>") for column in columns}
    # Two spaces between columns, and one at each side.
    widths = {
        column: 2 + max(cell_len(line) for text in (names[column], *cells) for line in text.split("\n"))
        for column, cells in columns.items()
    }
    for column in widths:
        if "!" not in column.removesuffix(names[column]):
            widths[column] = min(widths[column], _WORDS_WIDTH)
    left_out: list[str] = []
    for name in drops:
        dropped = next((column for column in widths if names[column] == name), None)
        if dropped is not None and sum(widths.values()) > out.width:
            del widths[dropped]
            left_out.append(name)
    # Names in the first column are broken where even they have no room.
    may_break = {next(iter(widths))} if sum(widths.values()) > out.width else set()
    settings = {"box": SIMPLE_HEAD, "padding": (0, 1, 0, 0), "pad_edge": False, "title_justify": "left", **style}
    grid = Table(title=None if title is None else Text(title), **settings)
    for column in widths:
        marks = column.removesuffix(names[column])
        one_line = "!" in marks and column not in may_break
        grid.add_column(
            Text(names[column]), justify="right" if ">" in marks else "left", overflow="fold", no_wrap=one_line
        )
    for row in zip(*(columns[column] for column in widths), strict=True):
        grid.add_row(*map(Text, row))
    return grid, left_out


def print_left_out(names: Sequence[str], out: Console) -> None:
    """Prints which columns had no room, if any."""
    if names:
        out.print(f"no room in {out.width} columns for: {', '.join(names)}; a wider terminal or --json shows them")


def print_plan(
    plan: Plan,
    layers: Sequence[LayerPlan] | None = None,
    *,
    report: Mapping[str, Any] | None = None,
    everything: bool = False,
    costs: bool = False,
) -> None:
    """Prints a line per layer, the number of kept layers by reason, and totals.

    Args:
        plan: the plan.
        layers: the layers to show; all by default.
        report: the checkpoint's report, for the SNR of each layer.
        everything: whether layers that stay in 16 bit get a line too.
        costs: whether bytes, scores and fusion groups are columns.
    """
    layers = plan.layers if layers is None else layers
    # A layer with a score was given 16 bit by an allocation: that is a decision too.
    shown = [m for m in layers if everything or m.weight is not None or m.score is not None]
    out = page()
    grid, left_out = fitting(_plan_columns(shown, report, costs=costs), out, drops=_PLAN_DROPS)
    out.print(grid)
    if "why" in left_out:
        for reason, count in Counter(m.reason for m in shown).most_common(_REASONS):
            out.print(f"{counted(count, 'layer')}: {reason}")
    print_left_out(left_out, out)
    names = {m.name for m in shown}
    for reason, count in Counter(m.reason for m in layers if m.name not in names).items():
        out.print(f"{counted(count, 'layer')} kept in 16 bit: {reason}")
    # Totals are over the layers shown, which --match may have narrowed.
    chosen = [m for m in layers if m.weight is not None]
    # Two bytes for each weight in 16 bit; a tied weight is stored once.
    before = sum(2 * m.numel for m in layers if m.tied_to is None)
    out.print(
        f"{counted(len(layers), 'layer')}{'' if len(layers) == len(plan.layers) else f' of {len(plan.layers)}'}; "
        f"{len(chosen)} quantized at {bits_per_weight(chosen):.4f} bits a weight, scales counted; "
        f"{megabytes(before)} in 16 bit become {megabytes(sum(m.nbytes for m in layers))}"
    )
    for label, value in (("KV cache", plan.kv_cache), ("attention", plan.attention), ("target", plan.target)):
        if value:
            out.print(f"{label}: {value}")


def _plan_columns(shown: Sequence[LayerPlan], report: Mapping[str, Any] | None, *, costs: bool) -> dict[str, list[str]]:
    snr = {layer["name"]: layer["snr_db"] for layer in report["layers"]} if report else {}
    columns: dict[str, Callable[[LayerPlan], str]] = {
        "!layer": lambda m: m.name,
        "!>shape": lambda m: "×".join(map(str, m.shape)),
        "!weight": lambda m: str(m.weight or "16 bit"),
        "!input": lambda m: str(m.activation or "16 bit") if m.weight else "–",
        "!solver": lambda m: m.solver if m.weight else "–",
        "!>bits": lambda m: f"{m.bits_per_weight:.3f}",
    }
    if costs:
        columns["!>bytes"] = lambda m: f"{m.nbytes:,}"
    if snr:
        columns["!>SNR dB"] = lambda m: "–" if snr.get(m.name) is None else f"{snr[m.name]:.1f}"
    if costs and any(m.score is not None for m in shown):
        columns["!>score"] = lambda m: "–" if m.score is None else f"{m.score:.3g}"
    if costs and any(m.group is not None for m in shown):
        columns["group"] = lambda m: (m.group or "–").removeprefix(m.name.rpartition(".")[0] + ".")
    columns["why"] = lambda m: m.reason
    return {name: [text(m) for m in shown] for name, text in columns.items()}
