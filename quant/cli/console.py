"""The two streams of a command, through rich: standard output is a `page`, standard error shows progress."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from quant.base.errors import counted, in_words, megabytes, printable
from quant.base.listener import SILENT, Listener
from quant.recipes.plan import LayerPlan, Plan, bits_per_weight


class _Console(Console):
    """A console that escapes the control characters that names from files may hold."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if not self.width:  # COLUMNS=0 would show nothing
            self.width = 80

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            # Control segments are rich's own cursor movements; text may hold escape sequences of a hostile file name.
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


CONSOLE = _Console(stderr=True, markup=False)
_PIPE_WIDTH = 240  # columns
_SECONDS_A_LINE = 10
_SECONDS_OF_SPEED = 60  # the last ones, which speed is the mean of
_STAGES = {
    "generate": "writing text", "calibrate": "calibrating", "score": "scoring", "verify": "measuring",
    "alone": "solving alone", "gradients": "measuring gradients", "choose": "trying transforms", "solve": "quantizing",
    "evaluate": "evaluating", "cache": "caching the teacher", "train": "training",
}  # fmt: skip


def page() -> Console:
    """Returns standard output; a pipe or a file is as wide as COLUMNS says, or else as no line or cell needs."""
    # Without markup: rich would read the brackets of a glob such as `*.[0-9]` as one of its tags.
    out = _Console(markup=False)
    return out if out.is_terminal or "COLUMNS" in os.environ else _Console(markup=False, width=_PIPE_WIDTH)


def status(text: str, quiet: bool) -> Any:
    """Returns a spinner with `text` while the block runs."""
    return nullcontext() if quiet else CONSOLE.status(text)


class Printer(Listener):
    """Prints messages and progress on standard error."""

    is_silent = False

    def message(self, text: str) -> None:
        CONSOLE.print(text, soft_wrap=True)

    def step(self, text: str) -> AbstractContextManager[Any]:
        return CONSOLE.status(text)

    def stages(self) -> AbstractContextManager[Stages]:
        return stages(quiet=False)


def listener(quiet: bool) -> Listener:
    """Returns a listener that prints, or a silent one."""
    return SILENT if quiet else Printer()


class Stages:
    """The progress of a command's stages, called as `progress(stage, done, total)`.

    `ended` is called with the last line of each stage when the next one begins.
    """

    def __init__(self, bars: Progress, ended: Callable[[str], None] | None = None) -> None:
        self.bars = bars
        self.ended = ended
        self.tasks: dict[str, TaskID] = {}
        self.steps: dict[str, tuple[Sequence[str], list[float], str]] = {}
        self.reports: deque[tuple[float, float]] = deque()  # of the stage that runs: time, work done so far
        self.count = 0  # of its reports
        self.stage: str | None = None

    def expect(self, stage: str, names: Sequence[str], amounts: Sequence[float], unit: str) -> None:
        """Begins a stage whose steps are known: the layer or block that each works on, and how much work it is."""
        # Sums of the work, so that the work done after step i is entry i.
        self.steps[stage] = names, [0, *accumulate(amounts)], unit
        self(stage, 0, len(names))

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Notes that `done` steps of `total` are finished."""
        # The speed of one stage does not predict the next.
        if stage != self.stage:
            self.end()
            self.stage, self.count = stage, 0
            self.reports.clear()
        if stage not in self.tasks:
            self.tasks[stage] = self.bars.add_task(_STAGES.get(stage, stage), total=total, facts="", left="")
        names, work, unit = self.steps.get(stage, ((), [], ""))
        is_known = bool(names) and len(names) == total
        facts = []
        if done < len(names):
            facts.append(names[done])
        now, now_done = time.monotonic(), work[done] if is_known else done
        self.reports.append((now, now_done))
        self.count += 1
        # Two reports stay, however old: a block may take longer than the window.
        while len(self.reports) > 2 and now - self.reports[1][0] > _SECONDS_OF_SPEED:
            self.reports.popleft()
        start, done_before = self.reports[0]
        speed, left = (now_done - done_before) / max(now - start, 1e-9), ""
        if speed and is_known:
            facts.append(f"{speed:,.0f} {unit}/s")
        # Two steps at least: the first one also imports, compiles or reads, and is a bad measure of the others.
        if speed and self.count > 2 and done < total:
            left = in_words(((work[total] if is_known else total) - now_done) / speed)
        self.bars.update(
            self.tasks[stage], completed=done, total=total, facts=", ".join((*facts, _memory())), left=left
        )

    def line(self) -> str | None:
        """Returns one line about the running stage; None while no stage runs."""
        is_over = self.stage is None or self.bars.tasks[self.tasks[self.stage]].finished
        return None if is_over else self._line(str(self.stage))

    def end(self) -> None:
        """Ends the running stage, if there is one."""
        if self.stage is not None and self.ended is not None:
            self.ended(self._line(self.stage))
        self.stage = None

    def _line(self, stage: str) -> str:
        task = self.bars.tasks[self.tasks[stage]]
        elapsed = f"{(task.finished_time if task.finished else task.elapsed) or 0:.0f} s"
        left = "" if task.finished or not task.fields["left"] else f", {task.fields['left']} left"
        return f"{task.description} {task.completed:.0f}/{task.total or 0:.0f}, {elapsed}{left}; {task.fields['facts']}"


@contextmanager
def stages(quiet: bool) -> Iterator[Stages]:
    """Shows a bar for each stage; in a pipe a line every ten seconds, and one at the end of each stage."""
    columns = TextColumn("{task.description:<12}"), BarColumn(14), MofNCompleteColumn()
    times = TimeElapsedColumn(), TextColumn("left {task.fields[left]:>6}")
    facts = TextColumn("{task.fields[facts]}", table_column=Column(ratio=1, no_wrap=True))  # the remaining width
    # A bar that redraws itself would fill a log file with control characters.
    plain = not CONSOLE.is_terminal
    with Progress(*columns, *times, facts, console=CONSOLE, disable=quiet or plain, expand=True) as progress:
        running = Stages(progress, _print_line if plain and not quiet else None)
        with _printed_now_and_then(running) if plain and not quiet else nullcontext():
            yield running


def _print_line(line: str) -> None:
    CONSOLE.print(line, soft_wrap=True)


@contextmanager
def _printed_now_and_then(running: Stages) -> Iterator[None]:
    """Prints the line of the running stage every ten seconds, whether or not a step has ended."""
    over = threading.Event()

    def print_lines() -> None:
        # `wait` is true as soon as the stage is over, so the thread ends without a last delay.
        while not over.wait(_SECONDS_A_LINE):
            line = running.line()
            if line is not None:
                _print_line(line)

    thread = threading.Thread(target=print_lines, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    running.end()


def _memory() -> str:
    """Returns the most memory that the process has taken so far, and its tensors on a GPU."""
    from quant.base.processor import peak_rss

    # Not imported for this line: some stages run before torch is loaded.
    torch = sys.modules.get("torch")
    parts = [f"{megabytes(peak)} of memory" for peak in [peak_rss()] if peak]
    if torch is not None and torch.cuda.is_initialized():
        parts.append(f"{megabytes(torch.cuda.max_memory_allocated())} on the GPU")
    return ", ".join(parts)


@contextmanager
def bar(stage: str, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Shows one progress bar, and yields `advance(done, total)`."""
    with stages(quiet) as advance:
        yield lambda done, total: advance(stage, done, total)


# rich would cut or fold cells to the width, and a number that is cut is another number: columns without room are left
# out here, and named below the table. A pipe or a file has room for every column.
_WORDS_WIDTH = 20  # least width of a column whose text may go on in the next line
# Columns of a plan that a narrow terminal goes without, in this order.
_PLAN_DROPS = ("group", "solver", "SNR dB", "shape", "input", "why")
_REASONS = 8  # reasons that are counted below a plan without their column


def print_table(
    columns: Mapping[str, Sequence[str]], *, title: str = "", drops: Sequence[str] = (), **style: Any
) -> None:
    """Prints a table, and below it the names of the columns that had no room.

    A column whose name begins with `!` keeps its cells in one line, and `>` aligns them right. A narrow terminal goes
    without the columns of `drops`, the first one first.
    """
    out = page()
    grid, left_out = fitting(columns, out, title=title, drops=drops, **style)
    out.print(grid)
    print_left_out(left_out, out)


def fitting(
    columns: Mapping[str, Sequence[str]], out: Console, *, title: str = "", drops: Sequence[str] = (), **style: Any
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
    grid = Table(title=Text(title) if title else None, **settings)
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
    plan: Plan, layers: Sequence[LayerPlan] | None = None, *, report: Mapping[str, Any] | None = None,
    everything: bool = False, costs: bool = False,
) -> None:  # fmt: skip
    """Prints a line per layer, the number of kept layers by reason, and totals.

    `report` has the SNR of each layer. Layers that stay in 16 bit have a line with `everything`, and `costs` adds
    columns for bytes, scores and fusion groups.
    """
    layers = plan.layers if layers is None else layers
    # A layer with a score was given 16 bit by an allocation: that is a decision too.
    shown = [m for m in layers if everything or m.weight is not None or m.score is not None]
    out = page()
    columns = _plan_columns(shown, report, costs=costs)
    # Few reasons stand below the table, which then has room for the numbers; many have a column.
    reasons = dict(Counter(m.reason for m in shown).most_common(_REASONS))
    if len(reasons) < 3 and not costs:
        del columns["why"]
    grid, left_out = fitting(columns, out, drops=_PLAN_DROPS)
    out.print(grid)
    if "why" not in columns or "why" in left_out:
        _print_reasons("", [m for m in shown if m.reason in reasons], out)
    print_left_out([name for name in left_out if name != "why"], out)
    names = {m.name for m in shown}
    _print_reasons(" kept in 16 bit", [m for m in layers if m.name not in names], out)
    # Totals are over the layers shown, which --match may have narrowed.
    chosen = [m for m in layers if m.weight is not None]
    # Two bytes for each weight in 16 bit; a tied weight is stored once.
    before = sum(2 * m.numel for m in layers if m.tied_to is None)
    out.print(
        f"{counted(len(layers), 'layer')}{'' if len(layers) == len(plan.layers) else f' of {len(plan.layers)}'}; "
        f"{len(chosen)} quantized at {bits_per_weight(chosen):.4f} bits a weight, scales counted; "
        f"{megabytes(before)} in 16 bit become {megabytes(sum(m.nbytes for m in layers))}"
    )
    for label, value in (("KV cache", plan.kv_text), ("attention", plan.attention), ("target", plan.target)):
        if value:
            out.print(f"{label}: {value}")


def _print_reasons(what: str, layers: Sequence[LayerPlan], out: Console) -> None:
    by_reason: dict[str, list[LayerPlan]] = {}
    for layer in layers:
        by_reason.setdefault(layer.reason, []).append(layer)
    for reason, members in by_reason.items():
        first = f", {members[0].name}" + (" first" if len(members) > 1 else "")
        out.print(f"{counted(len(members), 'layer')}{what}{first}: {reason}")


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
