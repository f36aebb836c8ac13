"""The command `quant check-engine` runs an exported decoder next to the checkpoint that it was made from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from quant.cli.base import DEVICE, JSON, QUIET, TRUST, Command, print_json
from quant.cli.console import page, status, table
from quant.errors import UserError
from quant.models.files import find_checkpoint

if TYPE_CHECKING:
    from quant.engines.check import EngineCheck


@click.command("check-engine", cls=Command)
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("--source", required=True, metavar="DIRECTORY", help="Checkpoint that ENGINE was exported from.")
@click.option(
    "--max-new-tokens", type=click.IntRange(min=1), default=64, show_default=True, help="Tokens compared in each row."
)
@DEVICE
@TRUST
@QUIET
@JSON
def check_engine_command(
    engine: Path, source: str, max_new_tokens: int, device: str, quiet: bool, as_json: bool
) -> None:
    """Load ENGINE, let it read prompts and decode, and compare its tokens, logits and times with `quant.load`.

    ENGINE is an ONNX file, a directory of `quant export --to onnx`, or an engine. An engine needs the GPU that it was
    built for. Without it, everything that its file tells is checked: that it is whole, and of this plan, the precision
    of each layer, and the codes that it holds. A difference ends the command with exit code 2.
    """
    from quant.engines.check import check_engine

    with status(f"checking {engine}", quiet or as_json):
        checked = check_engine(engine, find_checkpoint(source), new=max_new_tokens, device=device)
    if as_json:
        print_json(checked.to_dict())
    elif not quiet:
        _print(checked)
    if checked.passed is False:
        raise UserError(f"{engine} does not compute what {source} computes; see the table")


def _print(checked: EngineCheck) -> None:
    shown = table("check", "result")
    for name, finding in checked.facts:
        shown.add_row(name, finding)
    if checked.backend:
        total = checked.steps * len(checked.prompts)
        first = checked.first_difference
        where = "" if first is None else f"; the first other one: row {first[0] + 1}, token {first[1] + 1}"
        shown.add_row("runs on", f"{checked.backend}, in {checked.dtype}")
        shown.add_row("prompts", f"{', '.join(map(str, checked.prompts))} tokens")
        shown.add_row("likeliest tokens", f"{checked.agreeing} of {total} the same{where}")
        shown.add_row("logits", f"relative difference {checked.error:.1e}, mean KL {checked.kl:.1e} nats")
        for index, part in enumerate(("prefill", "decoding step")):
            engine, reference = checked.engine_ms[index], checked.reference_ms[index]
            rows = "all rows" if index == 0 else "one row"
            shown.add_row(part, f"{engine:.1f} ms for all rows; quant.load: {reference:.1f} ms for {rows}")
    shown.add_row("result", {True: "passed", False: "failed", None: "not run on this machine"}[checked.passed])
    page().print(shown)
