"""`quant sensitivity`, and the options that ask `quantize` for an allocation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quant.cli.base import DEBUG, JSON, QUIET, Command

if TYPE_CHECKING:
    from quant.calibration.sensitivity.table import Sensitivity

_METHOD = click.Choice(["fisher", "kl", "output"])

_ALLOCATION = (
    click.option("--bits", type=float, help="Choose formats for so many bits a weight; scales and pads count."),
    click.option("--fit", metavar="SIZE", help="… so that weights and KV cache take at most SIZE, such as 24GB."),
    click.option("--ctx", default="4096", show_default=True, metavar="N", help="Tokens a sequence for --fit: 32k."),
    click.option("--batch", default=1, show_default=True, help="Sequences at once, for --fit and --latency."),
    click.option("--latency", metavar="TIME", help="… so that a decoding step takes at most TIME, such as 12ms."),
    click.option("--max-kl", type=float, metavar="NATS", help="The smallest model whose measured KL stays below."),
    click.option("--max-ppl-increase", metavar="PERCENT", help="The same for perplexity, such as 1%."),
    click.option("--target", multiple=True, metavar="NAME", help="Runtime (only what it runs is offered) or GPU (for "
                 "--latency): vllm, h100, FILE.json. Repeatable."),
    click.option("--formats", metavar="LIST", help="What may be chosen beside 16 bit.  [default: nvfp4,fp8]"),
    click.option("--method", type=_METHOD, help="How groups are scored.  [default: fisher]"),
    click.option("--pin", multiple=True, metavar="GLOB=FORMAT", help="Matching layers get FORMAT. Repeatable."),
    click.option("--forbid", multiple=True, metavar="GLOB=FORMAT", help="Matching layers do not get FORMAT."),
    click.option("--at-least", multiple=True, metavar="GLOB=FORMAT", help="Matching layers get no fewer bits."),
    click.option("--search", type=click.IntRange(min=0), metavar="N", help="Measurements for improving the choice.  "
                 "[default: 500 on a GPU, 0 on a CPU]"),
    click.option("--sensitivity", type=click.Path(path_type=Path), help="Keeps the scores; used again, resumed."),
)  # fmt: skip


def allocation_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of `quant.allocation.request.AllocationRequest`."""
    for option in reversed(_ALLOCATION):
        command = option(command)
    return command


def take_request(options: dict[str, Any]) -> Any:
    """Moves those options out of `options` into an `AllocationRequest`."""
    import dataclasses

    from quant.allocation.request import AllocationRequest

    names = [f.name for f in dataclasses.fields(AllocationRequest)]
    return AllocationRequest(**{name: options.pop(name) for name in names})


@click.command("sensitivity", cls=Command)
@click.argument("model")
@click.option("--formats", default="nvfp4,mxfp8,fp8", show_default=True, help="Presets, PRESETa16, or WEIGHT@INPUT.")
@click.option(
    "--method",
    type=_METHOD,
    default="fisher",
    show_default=True,
    help="fisher: one backward pass; kl: measured one by one; output: relative error of each layer's own output.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Writes the table here; resumes a run that was cut off.")
@click.option("--calib", metavar="SOURCE", help="Text, as for quantize. By default the model writes its own.")
@click.option("--samples", default=8, show_default=True, help="Rows of text; 2 are enough for kl.")
@click.option("--seqlen", default=512, show_default=True, help="Tokens a row.")
@click.option("--solver", default="rtn", show_default=True, help="How weights are rounded meanwhile.")
@click.option("--include", multiple=True, metavar="GLOB", help="Only layers that match. Repeatable.")
@click.option("--exclude", multiple=True, metavar="GLOB", help="Not the layers that match. Repeatable.")
@click.option("--seed", default=0, show_default=True, help="Seed of everything random.")
@click.option("--model-factory", metavar="PACKAGE.MODULE:FUNCTION", help="Builds the module of a state dict.")
@click.option("--unsafe-load", is_flag=True, help="Unpickle whole modules. Runs code that is in the file.")
@QUIET
@JSON
@DEBUG
def sensitivity_command(
    model: str,
    formats: str,
    method: str,
    out: Path | None,
    calib: str | None,
    samples: int,
    seqlen: int,
    solver: str,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    seed: int,
    model_factory: str | None,
    unsafe_load: bool,
    quiet: bool,
    as_json: bool,
    debug: bool,
) -> None:
    """What each fusion group of MODEL would lose in each format.

    Under torchrun the work is shared out over the processes; the scores are the same on any number of them.
    """
    from quant.allocation.allocate import score
    from quant.cli.console import stages, status
    from quant.cli.pipeline import Job, open_any, read_calibration

    _join_ranks()
    silent = quiet or as_json or not _is_first()
    with status(f"loading {model}", silent):
        source = open_any(model, model_factory=model_factory, unsafe_load=unsafe_load)
    assert source.model is not None
    source.model.to(_device())
    with stages(silent) as progress:
        rows = read_calibration(
            Job(model, calib=calib, calib_samples=samples, seqlen=seqlen, seed=seed), source, progress
        )
        table = score(
            source.model, rows[:samples], formats=formats, method=method, solver=solver, include=include,
            exclude=exclude, seed=seed, path=out, progress=progress,
        )  # fmt: skip
    if not _is_first():
        return
    if as_json:
        click.echo(json.dumps(table.to_dict(), indent=1))
    elif not quiet:
        _print_table(table)


def _print_table(table: Sensitivity) -> None:
    """Groups by falling score, with the scores of each format."""
    from rich.console import Console
    from rich.table import Table

    formats = [name for name in table.formats if name != "keep"]
    shown = Table(title=f"{table.method}: {table.unit}", title_justify="left")
    shown.add_column("group", overflow="fold")
    shown.add_column("weights", justify="right")
    for name in formats:
        shown.add_column(name, justify="right")
    for group in sorted(table.groups, key=lambda group: -max(group.scores.values())):
        scores = [f"{group.scores[name]:.2e}" if name in group.scores else "–" for name in formats]
        shown.add_row(group.name, f"{group.numel:,}", *scores)
    out = Console(markup=False)
    # A pipe or a file has no width to fit into.
    (out if out.is_terminal else Console(markup=False, width=160)).print(shown)


def _join_ranks() -> None:
    """Joins the process group that torchrun describes in the environment, if it does."""
    import os

    import torch

    if "WORLD_SIZE" in os.environ and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")


def _device() -> str:
    """This process's GPU where there are any; each rank of torchrun has one of its own."""
    import os

    import torch

    count = torch.cuda.device_count()
    return f"cuda:{int(os.environ.get('LOCAL_RANK', 0)) % count}" if count else "cpu"


def _is_first() -> bool:
    from quant.calibration.sensitivity.units import rank_and_world

    return rank_and_world()[0] == 0
