"""What people see in the terminal: progress, tables, one-line errors. Everything goes through rich."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from quant.errors import counted
from quant.formats.format import FORMATS
from quant.recipes.plan import LayerPlan, Plan
from quant.recipes.recipe import presets

if TYPE_CHECKING:
    from quant.evaluation import Evaluation

CONSOLE = Console(stderr=True, markup=False)
_PIPE_WIDTH = 160  # columns
_STAGES = {
    "generate": "writing text",
    "calibrate": "calibrating",
    "score": "scoring",
    "verify": "measuring",
    "alone": "solving alone",
    "solve": "quantizing",
    "evaluate": "evaluating",
}


def _page() -> Console:
    """Standard output; a pipe or a file has no width to fit into, so long lines stay whole there."""
    out = Console(markup=False)
    return out if out.is_terminal else Console(markup=False, width=_PIPE_WIDTH)


def status(text: str, quiet: bool) -> Any:
    """A spinner with `text` while the block runs."""
    return nullcontext() if quiet else CONSOLE.status(text)


@contextmanager
def stages(quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar for each stage; gives `advance(stage, done, total)`."""
    columns = TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=CONSOLE, disable=quiet) as progress:
        tasks: dict[str, TaskID] = {}

        def advance(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(_STAGES.get(stage, stage), total=total)
            progress.update(tasks[stage], completed=done, total=total)

        yield advance


@contextmanager
def bar(stage: str, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """One progress bar; gives `advance(done, total)`."""
    with stages(quiet) as advance:
        yield lambda done, total: advance(stage, done, total)


def print_layers(plan: Plan, report: Mapping[str, Any] | None) -> None:
    """One line a quantized layer, kept layers counted by reason, totals."""
    snr = {layer["name"]: layer["snr_db"] for layer in report["layers"]} if report else {}
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("layer", "shape", "weight", "input", "solver", "bits", *(("SNR dB",) if snr else ()), "why"):
        table.add_column(column, overflow="fold", no_wrap=column != "why")
    for layer in plan.quantized:
        measured = [f"{snr[layer.name]:.1f}"] if snr.get(layer.name) is not None else ["–"] if snr else []
        table.add_row(
            layer.name,
            "×".join(map(str, layer.shape)),
            str(layer.weight),
            str(layer.activation or "16 bit"),
            layer.solver,
            f"{layer.bits_per_weight:.3f}",
            *measured,
            layer.reason,
        )
    out = _page()
    out.print(table)
    kept = [layer for layer in plan.layers if layer.weight is None]
    for reason, count in Counter(layer.reason for layer in kept).items():
        out.print(f"{counted(count, 'layer')} kept in 16 bit: {reason}")
    out.print(_totals(plan, kept))


def _totals(plan: Plan, kept: list[LayerPlan]) -> str:
    before = sum(2 * layer.numel for layer in plan.layers if layer.tied_to is None)
    return (
        f"{len(plan.quantized)} quantized at {plan.effective_bits:.4f} bits a weight, scales counted; "
        f"{len(kept)} kept; {before / 1e6:,.1f} MB in 16 bit become {plan.nbytes / 1e6:,.1f} MB"
    )


def print_evaluation(result: Evaluation) -> None:
    """The figures of `quant evaluate`."""
    table = Table(show_header=False)
    rows = [] if result.perplexity is None else [("perplexity", f"{result.perplexity:.3f}")]
    if result.cosine is not None:
        rows.append(("1 − cosine of the embeddings", f"{result.cosine:.6f}"))
    if result.kl is not None and result.top1 is not None and result.baseline_perplexity is not None:
        rows += [
            ("baseline perplexity", f"{result.baseline_perplexity:.3f}"),
            ("KL(baseline‖model)", f"{result.kl:.4f} nats"),
            ("top-1 agreement", f"{result.top1:.1%}"),
        ]
    for name, value in (
        *rows,
        ("predictions" if result.cosine is None else "tokens", f"{result.tokens:,}"),
        ("seconds", f"{result.seconds:.1f}"),
    ):
        table.add_row(name, value)
    _page().print(table)


def format_tables() -> dict[str, Any]:
    """Presets and number formats, JSON-ready."""
    return {
        "presets": {
            name: {"weight": r.weight, "activation": r.activation, "solver": r.solver, "description": r.description}
            for name, r in presets().items()
        },
        "formats": {
            f.name: {
                "element": f.element.name,
                "scale": f.scale.name,
                "block": list(f.block),
                "global_scale": f.global_scale,
                "bits_per_weight": f.bits_per_weight(),
            }
            for f in FORMATS.values()
        },
    }


def print_formats() -> None:
    """The two tables of `quant formats`."""
    tables = format_tables()
    out = _page()
    for title, first, rows in (
        ("Presets (--format)", "preset", tables["presets"]),
        ("Number formats (recipes and plans; block 0 is the whole axis)", "format", tables["formats"]),
    ):
        table = Table(title=title, title_justify="left")
        for column in (first, *next(iter(rows.values()))):
            table.add_column(column.replace("_", " "))
        for name, fields in rows.items():
            table.add_row(name, *(f"{v:g}" if isinstance(v, float) else str(v) for v in fields.values()))
        out.print(table)
