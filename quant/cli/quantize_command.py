"""The command `quantize` turns a model into a quantized checkpoint with its plan and report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from quant import __version__
from quant.base.extras import importing
from quant.cli.command import command_line, print_json
from quant.cli.completion import MODELS
from quant.cli.console import CONSOLE, listener
from quant.cli.run_options import QuantizeCommand, request_of, run_options
from quant.cli.tables import print_plan
from quant.models.startup import read_ahead, skip_image_packages


@click.command("quantize", cls=QuantizeCommand)
@click.argument("model", shell_complete=MODELS)
@run_options
@click.option("--plan", "plan_file", type=click.Path(path_type=Path), help="Plan file, which you may have edited.")
@click.option("--out", type=click.Path(path_type=Path), help="Directory for the checkpoint, the plan and the report.")
@click.option("--overwrite", is_flag=True, help="Replace the contents of --out.")
@click.option("--allow-missing", is_flag=True, help="Write --out even if transformers would miss or ignore tensors.")
@click.option("--restart", is_flag=True, help="Delete what an unfinished run to --out left, and begin anew.")
@click.option("--dry-run", is_flag=True, help="Print the plan with its sizes; read no weights, write nothing.")
@click.version_option(__version__)
def quantize_command(quiet: bool, as_json: bool, **options: Any) -> None:
    """Quantize MODEL: a Hugging Face directory, a .gguf, .safetensors, .pt or .pt2 file, or an alias.

    \b
      quantize Qwen/Qwen3-0.6B --format nvfp4a16 --out qwen3-nvfp4
      quantize Qwen/Qwen3-0.6B --bits 4.8 --out qwen3-mixed

    Writes a checkpoint that vLLM and transformers load, a plan with the reason for every layer's format, and a report.
    Give one of --format, --recipe and --plan, or --bits, for which formats are chosen. A plan within other limits, of
    memory, time or loss, is made by `quant plan make`.
    """  # noqa: D301  (a backspace, after which click keeps the lines of a paragraph)
    # A dry run reads only headers: paging in gigabytes of weights would only cost time.
    if not options["dry_run"]:
        read_ahead(options["model"])
    # The garbage collector finds nothing among the objects that imports make, and takes a fifth of their time.
    with importing():
        skip_image_packages(options["model"])
        from quant.report.summary import next_steps, print_summary
        from quant.run.run import run

    out = options["out"]
    outcome = run(request_of(options, command_line(click.get_current_context())), listener(quiet or as_json))
    if as_json:
        # A dry run has a plan and no report.
        print_json((outcome.report or outcome.plan).to_dict())
    elif outcome.report is not None and not quiet:
        print_summary(outcome.report, CONSOLE)
        CONSOLE.print(f"written to {out}")
        for line in next_steps(outcome.report, outcome.plan, out):
            CONSOLE.print(line, soft_wrap=True)
    elif not quiet:
        print_plan(outcome.plan)
