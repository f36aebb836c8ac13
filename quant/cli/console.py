"""The terminal shows progress on standard error and tables on standard output, both through rich."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment
from rich.table import Table

from quant.errors import counted, megabytes, printable
from quant.recipes.plan import LayerPlan, Plan, bits_per_weight


class _Console(Console):
    """A console on which names from files are only shown, whatever they hold."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Renders, with control characters escaped."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


CONSOLE = _Console(stderr=True, markup=False)
_PIPE_WIDTH = 240  # columns
_SECONDS_A_LINE = 10
_STAGES = {
    "generate": "writing text",
    "calibrate": "calibrating",
    "score": "scoring",
    "verify": "measuring",
    "alone": "solving alone",
    "solve": "quantizing",
    "evaluate": "evaluating",
}


def page() -> Console:
    """Standard output; a pipe or a file is as wide as needed, so that no line or cell is broken there."""
    out = _Console(markup=False)
    return out if out.is_terminal else _Console(markup=False, width=_PIPE_WIDTH)


def table(*columns: str, title: str | None = None, **style: Any) -> Table:
    """An empty table. Columns named with `!` keep their text in one line, those with `>` align it right."""
    made = Table(title=title, title_justify="left", **style)
    for column in columns:
        name = column.lstrip("!>")
        marks = column.removesuffix(name)
        made.add_column(name, justify="right" if ">" in marks else "left", overflow="fold", no_wrap="!" in marks)
    return made


def status(text: str, quiet: bool) -> Any:
    """A spinner with `text` while the block runs."""
    return nullcontext() if quiet else CONSOLE.status(text)


def announce(device: Any, quiet: bool) -> None:
    """Says in one line that a command computes on a GPU, if it does."""
    from quant.calibration.placement import describe

    if device is not None and device.type != "cpu" and not quiet:
        CONSOLE.print(f"on {describe(device)}")


def announce_source(source: Any, quiet: bool) -> None:
    """Says in one line that the files of a model hold it quantized, if they do."""
    if source.quantization is not None and not quiet:
        dtype = str(source.dtype).removeprefix("torch.")
        CONSOLE.print(f"the source is quantized ({source.quantization}); its weights are dequantized to {dtype}")


@contextmanager
def stages(quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar for each stage, in a pipe a line every ten seconds; gives `advance(stage, done, total)`."""
    columns = TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn()
    times = TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[memory]}")
    with Progress(*columns, *times, console=CONSOLE, disable=quiet) as progress:
        tasks: dict[str, TaskID] = {}
        told = time.monotonic()

        def advance(stage: str, done: int, total: int) -> None:
            nonlocal told
            if stage not in tasks:
                tasks[stage] = progress.add_task(_STAGES.get(stage, stage), total=total, memory="")
            progress.update(tasks[stage], completed=done, total=total, memory=_memory())
            task = progress.tasks[tasks[stage]]
            if not quiet and not CONSOLE.is_terminal and done < total and time.monotonic() - told >= _SECONDS_A_LINE:
                told = time.monotonic()
                left = "" if task.time_remaining is None else f", {task.time_remaining:.0f} s left"
                CONSOLE.print(f"{task.description} {done}/{total}, {task.elapsed or 0:.0f} s{left}; {_memory()}")

        yield advance


def _memory() -> str:
    """The most memory that the process has taken so far, and its tensors on a GPU."""
    from quant.page.report import peak_rss

    torch = sys.modules.get("torch")
    found = [f"{megabytes(peak)} of memory" for peak in [peak_rss()] if peak]
    if torch is not None and torch.cuda.is_initialized():
        found.append(f"{megabytes(torch.cuda.max_memory_allocated())} on the GPU")
    return ", ".join(found)


@contextmanager
def bar(stage: str, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """One progress bar; gives `advance(done, total)`."""
    with stages(quiet) as advance:
        yield lambda done, total: advance(stage, done, total)


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
        layers: those to show; all by default.
        report: the checkpoint's report, for the SNR of each layer.
        everything: whether layers that stay in 16 bit get a line too.
        costs: whether bytes, scores and fusion groups are columns.
    """
    layers = plan.layers if layers is None else layers
    # A layer with a score was given 16 bit by an allocation: that is a decision too.
    shown = [m for m in layers if everything or m.weight is not None or m.score is not None]
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
    listed = table(*columns, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for layer in shown:
        listed.add_row(*(text(layer) for text in columns.values()))
    out = page()
    out.print(listed)
    names = {m.name for m in shown}
    for reason, count in Counter(m.reason for m in layers if m.name not in names).items():
        out.print(f"{counted(count, 'layer')} kept in 16 bit: {reason}")
    chosen = [m for m in layers if m.weight is not None]
    before = sum(2 * m.numel for m in layers if m.tied_to is None)
    out.print(
        f"{counted(len(layers), 'layer')}{'' if len(layers) == len(plan.layers) else f' of {len(plan.layers)}'}; "
        f"{len(chosen)} quantized at {bits_per_weight(chosen):.4f} bits a weight, scales counted; "
        f"{megabytes(before)} in 16 bit become {megabytes(sum(m.nbytes for m in layers))}"
    )
    for label, value in (("KV cache", plan.kv_cache), ("attention", plan.attention), ("target", plan.target)):
        if value:
            out.print(f"{label}: {value}")
