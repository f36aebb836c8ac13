"""The command `quant sensitivity` scores the loss of each fusion group of a model in each format."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from quant.base.atomic import claimed
from quant.calibration.sensitivity.table import METHODS, Sensitivity, parse_candidates
from quant.cli.command import COUNT, DEVICE, DEVICES, JSON, PATH, QUIET, SEED, Command, model_options, print_json
from quant.cli.completion import MODELS, PRESET_LIST, SOLVERS, SOURCES
from quant.cli.console import listener, print_table
from quant.export.checkpoint.files.directory import check_apart
from quant.models.files import WatchedFiles, find_model, packages_of


@click.command("sensitivity", cls=Command)
@click.argument("model", shell_complete=MODELS)
@click.option(
    "--formats", shell_complete=PRESET_LIST, default="nvfp4,mxfp8,fp8", help="Presets, PRESETa16, or WEIGHT@INPUT."
)
@click.option("--method", type=click.Choice(METHODS), default="fisher", help="fisher: one "
              "backward pass; kl: measured for each group; output: relative error of each layer's output.")  # fmt: skip
@click.option("--out", type=PATH, help="File for the table; an interrupted run continues it.")
@click.option("--calib", shell_complete=SOURCES, multiple=True, metavar="SOURCE", help="Calibration data, as for "
              "`quantize`.  [default: mix]")  # fmt: skip
@click.option("--samples", type=COUNT, default=8, help="Rows of text; 2 are enough for kl.")
@click.option("--seqlen", default=512, help="Tokens per row.")
@click.option("--solver", shell_complete=SOLVERS, default="rtn", help="Method that rounds the weights to be scored.")
@click.option("--include", multiple=True, metavar="GLOB", help="Score only layers that match. Repeatable.")
@click.option("--exclude", multiple=True, metavar="GLOB", help="Leave out layers that match. Repeatable.")
@SEED
@DEVICE
@DEVICES
@model_options
@QUIET
@JSON
def sensitivity_command(
    model: str, out: Path | None, calib: tuple[str, ...], samples: int, seqlen: int, seed: int, device: str,
    model_factory: str | None, unsafe_load: bool, quiet: bool, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Score the loss of each fusion group of MODEL in each format.

    Ranks share the work; the scores do not depend on their number.
    """
    from quant.base.errors import check_installed
    from quant.calibration.allocation.allocate import score
    from quant.calibration.inputs import call_on_first_row
    from quant.calibration.ranks import rank_and_world
    from quant.calibration.session import Session
    from quant.calibration.texts import sources
    from quant.export.checkpoint.load import open_original
    from quant.run.job import announce_device, announce_source, check_same

    # Before the model writes text, which takes minutes.
    parse_candidates(options["formats"])
    sources.check_sources(calib, "--calib")
    check_installed([*packages_of(model), *sources.packages_of_sources(calib)], "this measurement")
    if out is not None:
        check_apart(out, find_model(model), *calib)
    terminal = listener(quiet or as_json)
    # The first rank writes the table for all.
    if out is not None and rank_and_world()[0] == 0:
        click.get_current_context().with_resource(claimed(out))
    session = Session.on(device, seed=seed)
    announce_device(terminal, session)
    with terminal.step(f"loading {model}"):
        source, module = open_original(model, model_factory=model_factory, unsafe_load=unsafe_load)
    announce_source(terminal, source)
    with terminal.stages() as progress:
        session = replace(session, progress=progress)
        data, _ = sources.read_calibration(
            source, sources.Rows(calib, samples, seqlen, seed), session, listener=terminal
        )
        rows = sources.as_rows(module, data, "a sensitivity table")
        # Scores are sums over rows that ranks share: different text would add up without an error.
        check_same({"the calibration text": sources.digest_of(rows)}, session, WatchedFiles(source.path).files)
        if rows.is_floating_point():
            options["run"] = call_on_first_row(rows)
        sensitivity = score(
            module, rows[:samples], seed=seed, path=out, device=session.device, progress=progress, **options
        )
    if as_json:
        print_json(sensitivity.to_dict())
    elif not quiet:
        print_scores(sensitivity)


def print_scores(sensitivity: Sensitivity) -> None:
    """Prints groups by falling score, with the scores of each format."""
    formats = [name for name in sensitivity.formats if name != "keep"]
    groups = sorted(sensitivity.groups, key=lambda group: -max(group.scores.values()))
    columns = {"group": [group.name for group in groups], "!>weights": [f"{group.numel:,}" for group in groups]}
    for name in formats:
        columns[f"!>{name}"] = [f"{group.scores[name]:.2e}" if name in group.scores else "–" for group in groups]
    # Names of groups are long, so they are broken before a format goes.
    print_table(columns, title=f"{sensitivity.method}: {sensitivity.unit}", drops=("weights", *formats[:0:-1]))
