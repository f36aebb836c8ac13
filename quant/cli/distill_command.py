"""The command `quant distill` trains a quantized checkpoint towards its original, and writes a new one."""

from pathlib import Path
from typing import Any

import click

from quant.base.errors import importing
from quant.cli.command import COUNT, DEVICE, JSON, PATH, QUIET, SEED, TRUST, Command, command_line, print_json
from quant.cli.console import CONSOLE, listener
from quant.models.startup import read_ahead, skip_image_packages


@click.command("distill", cls=Command)
@click.argument("directory", type=PATH)
@click.option("--teacher", required=True, help="The original, in 16 bit or quantized; or a file of cache_teacher.")
@click.option("--cache-teacher", type=PATH,
              help="Write the teacher's outputs to this file first, and train on it: the teacher and the student "
              "are never in memory together. Later runs take the file as their --teacher.")  # fmt: skip
@click.option("--top", default=64, type=COUNT, help="Likeliest tokens that --cache-teacher keeps at each position.")
@click.option("--data", multiple=True, help="Training text, as --calib of `quantize` takes it; repeatable.  "
              "[default: mix, or the rows of a cached teacher]")  # fmt: skip
@click.option("--steps", default=300, type=COUNT, help="Optimizer steps.")
@click.option("--batch-size", default=8, type=COUNT, help="Rows a step.")
@click.option("--seqlen", default=512, help="Tokens per row.")
@click.option("--samples", default=512, type=COUNT,
              help="Rows of training text at most; used again as often as the steps need them.")  # fmt: skip
@click.option("--lr", type=float, help="Peak learning rate, at most 1.  [default: 1.5e-4 of "
              "the weights' root mean square, 1e-4 where only weights are rounded, 1e-3 for norms]")  # fmt: skip
@click.option("--temperature", default=1.0, type=click.FloatRange(0, min_open=True),
              help="Divides the logits of teacher and student.")  # fmt: skip
@click.option("--hidden", default=0.0, type=click.FloatRange(0), help="Weight of the distance of hidden states.")
@click.option("--train", type=click.Choice(["weights", "norms"]), default="weights",
              help="Train all quantized weights, or those of norms alone, with all codes as they are.")  # fmt: skip
@click.option("--scales", type=click.Choice(["frozen", "learned"]), default="frozen",
              help="Whether the block scales are trained.")  # fmt: skip
@click.option("--eval", "eval_texts", multiple=True, type=PATH, help="Evaluation text, before and after. Repeatable.")
@click.option("--eval-samples", default=16, help="Rows of each evaluation text.")
@click.option("--out", required=True, type=PATH, help="Directory for the trained checkpoint.")
@click.option("--overwrite", is_flag=True, help="Replace the contents of --out.")
@SEED
@DEVICE
@TRUST
@QUIET
@JSON
def distill_command(
    directory: Path, teacher: str, out: Path, overwrite: bool, device: str, quiet: bool, as_json: bool, **options: Any
) -> None:
    """Train the quantized checkpoint DIRECTORY on its teacher's outputs, under exactly its own rounding.

    Training starts at the checkpoint's own loss. If the teacher is the original of the checkpoint, its weights before
    rounding are known, and training gets further from there. The new checkpoint has the same layout, formats and size,
    and a report with the figures of both.
    """
    # Before the imports: the system reads the files while Python imports torch and transformers.
    read_ahead(teacher, directory)
    with importing():
        skip_image_packages(teacher, directory)
        from quant.report.summary import print_summary
        from quant.training.distill import distill

    report = distill(
        directory, teacher, out=out, overwrite=overwrite, device=device, listener=listener(quiet or as_json),
        command=command_line(click.get_current_context()), **options,
    )  # fmt: skip
    if as_json:
        print_json(report.to_dict())
    elif not quiet:
        print_summary(report, CONSOLE)
        CONSOLE.print(f"written to {out}")
