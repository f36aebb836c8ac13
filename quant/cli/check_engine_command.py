"""The command `quant check-engine` compares an exported file with the checkpoint that it was made from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from quant.base.errors import UserError
from quant.cli.command import DEVICE, JSON, QUIET, TRUST, UNSAFE, Command, print_json
from quant.cli.console import status
from quant.cli.tables import print_table
from quant.models.files import find_checkpoint

if TYPE_CHECKING:
    from quant.export.engines.check_engine import EngineCheck


@click.command("check-engine", cls=Command)
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("--source", required=True, metavar="DIRECTORY", help="Checkpoint that ENGINE was exported from.")
@click.option(
    "--max-new-tokens", type=click.IntRange(min=1), default=64, show_default=True, help="Tokens compared in each row."
)
@DEVICE
@UNSAFE
@TRUST
@QUIET
@JSON
def check_engine_command(
    engine: Path, source: str, max_new_tokens: int, device: str, unsafe_load: bool, quiet: bool, as_json: bool
) -> None:
    """Load ENGINE, let it read prompts and decode, and compare its tokens, logits and times with `quant.load`.

    ENGINE is an ONNX file, a directory of `quant export --to onnx`, a .pt2 of AOTInductor, or an engine. An engine
    needs the GPU that it was built for. Without it, everything that its file shows is checked: that it is whole, and of
    this plan, the precision of each layer, and the codes that it holds. A difference ends the command with exit code 2.
    """
    from quant.export.engines.check_engine import check_engine

    with status(f"checking {engine}", quiet or as_json):
        checked = check_engine(
            engine, find_checkpoint(source), new=max_new_tokens, device=device, unsafe_load=unsafe_load
        )
    if as_json:
        print_json(checked.to_dict())
    elif not quiet:
        _print_check(checked)
    if checked.passed is False:
        raise UserError(f"{engine} does not compute what {source} computes; see the table")


def _print_check(checked: EngineCheck) -> None:
    from quant.export.engines.check_engine import noise_limits

    rows = list(checked.facts)
    if checked.backend:
        total = checked.steps * len(checked.prompts)
        first = checked.first_difference
        where = "" if first is None else f"; the first other one: row {first[0] + 1}, token {first[1] + 1}"
        rows += [
            ("runs on", f"{checked.backend}, in {checked.dtype}"),
            ("prompts", f"{', '.join(map(str, checked.prompts))} tokens"),
            ("likeliest tokens", f"{checked.agreeing} of {total} the same{where}"),
            ("logits", f"relative difference {checked.error:.1e}, mean KL {checked.kl:.1e} nats"),
        ]
        if checked.noise_kl is not None and checked.noise_agreeing is not None:
            most_kl, least_agreement = noise_limits(checked.noise_kl, checked.noise_agreeing / total)
            # Inputs in few bits turn the last bit of a sum into another code, so the reference is no exact one.
            rows += [
                (
                    "quant.load itself",
                    f"{checked.noise_agreeing} of {total} likeliest tokens the same, mean KL {checked.noise_kl:.1e} "
                    "nats, if inputs of layers move by one rounding",
                ),
                ("limits", f"{least_agreement:.0%} of the tokens the same, mean KL {most_kl:.1e} nats"),
            ]
        for index, part in enumerate(("prefill", "decoding step")):
            engine, reference = checked.engine_ms[index], checked.reference_ms[index]
            timed = "all rows" if index == 0 else "one row"
            rows.append((part, f"{engine:.1f} ms for all rows; quant.load: {reference:.1f} ms for {timed}"))
    rows.append(("result", {True: "passed", False: "failed", None: "not run on this machine"}[checked.passed]))
    print_table({"!check": [name for name, _ in rows], "result": [finding for _, finding in rows]})
