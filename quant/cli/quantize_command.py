"""The command `quantize` turns a model into a quantized checkpoint with its plan and report."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from quant import __version__
from quant.base.extras import importing
from quant.calibration.sensitivity.table import METHODS
from quant.cli.command import DEVICE, DEVICES, JSON, QUIET, SEED, Command, command_line, model_options, print_json
from quant.cli.completion import FORMAT_NAMES, MODELS, OBSERVERS, PRESET_LIST, PRESETS, RUNTIMES, SOLVERS, SOURCES
from quant.cli.console import CONSOLE, listener
from quant.cli.tables import print_plan
from quant.models.startup import read_ahead
from quant.models.startup import skip_image_packages


class QuantizeCommand(Command):
    """`--help` shows the options that most runs need, by purpose; `--help-all` shows every one."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the options in the groups of `_GROUPS`, or all of them in the order of their definition."""
        options = {option.opts[-1]: option for option in self.get_params(ctx) if isinstance(option, click.Option)}
        if ctx.meta.get(_ALL):
            super().format_options(ctx, formatter)
            return
        for title, names in _GROUPS.items():
            records = [record for name in names if (record := options[name].get_help_record(ctx)) is not None]
            with formatter.section(title):
                formatter.write_dl(records)
        shown = {"--help", "--help-all"}.union(*_GROUPS.values())
        formatter.write_text(f"-h, --help shows these options; --help-all shows {len(options.keys() - shown)} more.")


_ALL = "quant.help_all"  # key in click's context, with the package's name as click asks of extensions
_GROUPS = {
    "Formats": ("--format", "--recipe", "--plan", "--exclude", "--lm-head", "--kv-cache"),
    "Formats chosen within a limit": ("--bits", "--fit", "--latency", "--max-kl", "--formats"),
    "Rounding": ("--effort", "--solver", "--calib", "--calib-samples", "--eval"),
    "Output": ("--out", "--overwrite", "--restart", "--dry-run"),
    "Machine": ("--device", "--devices", "--memory"),
}


def _help_all(context: click.Context, _: click.Parameter, is_given: bool) -> None:
    if is_given:
        context.meta[_ALL] = True
        click.echo(context.get_help())
        context.exit()


@click.command("quantize", cls=QuantizeCommand)
@click.argument("model", shell_complete=MODELS)
@click.option(
    "--format",
    "recipe",
    shell_complete=PRESETS,
    help="Preset: nvfp4, nvfp4a16, fp8, … (`quant formats` lists them); or WEIGHT@INPUT.",
)
@click.option("--recipe", "recipe_file", type=click.Path(path_type=Path), help="Recipe file (TOML).")
@click.option("--plan", "plan_file", type=click.Path(path_type=Path), help="Plan file, which you may have edited.")
@click.option("--solver", shell_complete=SOLVERS, help="Method that rounds weights; replaces the recipe's.")
@click.option(
    "--effort",
    type=click.IntRange(0, 3),
    metavar="0|1|2|3",
    help="Chooses the solver: 0 rounds to nearest, 1 searches scales, 2 is gptq on calibration text, 3 is kfac, which "
    "rounds for the loss of the whole model.  [default: 2, and 0 for --max-kl and --max-ppl-increase]",
)
@click.option(
    "--guard",
    metavar="'LIMIT FORMAT …'",
    help="A layer with a relative output error above LIMIT gets the next format: '0.1 fp8 keep'.",
)
@click.option(
    "--observer",
    shell_complete=OBSERVERS,
    help="Method that sets static activation scales: absmax, percentile, mse or entropy.",
)
@click.option(
    "--kv-cache",
    shell_complete=FORMAT_NAMES,
    metavar="FORMAT",
    help="KV cache: fp8, or fp8_head with a scale for each head.",
)
@click.option("--attention", shell_complete=FORMAT_NAMES, metavar="FORMAT", help="Format of attention's operands: fp8.")
@click.option(
    "--include",
    multiple=True,
    metavar="GLOB",
    help="Quantize only layers that match; 'mtp.*' adds prediction heads. Repeatable.",
)
@click.option("--exclude", multiple=True, metavar="GLOB", help="Keep matching layers in 16 bit. Repeatable.")
@click.option(
    "--lm-head",
    shell_complete=FORMAT_NAMES,
    metavar="FORMAT",
    help="Format of the output head, its inputs in 16 bit.  [default: 16 bit]",
)
@click.option("--out", type=click.Path(path_type=Path), help="Directory for the checkpoint, the plan and the report.")
@click.option("--overwrite", is_flag=True, help="Replace the contents of --out.")
@click.option("--allow-missing", is_flag=True, help="Write --out even if transformers would miss or ignore tensors.")
@click.option("--memory", metavar="SIZE", help="Memory that may be used: 8GB.  [default: what is free]")
@click.option("--restart", is_flag=True, help="Delete what an unfinished run to --out left, and begin anew.")
@click.option(
    "--calib",
    shell_complete=SOURCES,
    multiple=True,
    metavar="SOURCE",
    help="Calibration data: a file of text, rows or token ids, hf:DATASET, a folder of images or sounds, self, mix, or "
    "mix+FILE (docs/calibration.md). Repeatable.  [default: mix, if the plan needs text]",
)
@click.option(
    "--calib-samples",
    type=click.IntRange(min=1),
    metavar="N",
    help="Rows of calibration text, images or sounds.  [default: 32; up to 512 of mix on a GPU]",
)
@click.option(
    "--eval",
    "eval_texts",
    shell_complete=SOURCES,
    multiple=True,
    metavar="SOURCE",
    help="Evaluation text or other inputs, as for --calib. Repeatable: text of another kind shows what carries over.",
)
@click.option("--eval-samples", type=click.IntRange(min=1), default=16, show_default=True, help="Rows of each --eval.")
@click.option("--seqlen", type=click.IntRange(min=1), default=512, show_default=True, help="Tokens per row.")
@SEED
@DEVICE
@DEVICES
# The fields of AllocationRequest:
@click.option("--bits", type=float, help="Choose formats with this many bits per weight, scales and padding counted.")
@click.option("--fit", metavar="SIZE", help="… so that weights and KV cache fit into SIZE: 24GB.")
@click.option("--ctx", default="4096", show_default=True, metavar="N", help="Tokens per sequence for --fit: 32k.")
@click.option("--batch", type=click.IntRange(1, 2**31 - 1), default=1, show_default=True,
              help="Concurrent sequences, for --fit and --latency.")  # fmt: skip
@click.option("--latency", metavar="TIME", help="… so that a decoding step takes at most TIME, such as 12ms.")
@click.option(
    "--max-kl", type=float, metavar="NATS", help="Find the smallest model whose KL stays below, on each --eval text."
)
@click.option("--max-ppl-increase", metavar="PERCENT", help="The same for perplexity, such as 1%.")
@click.option(
    "--target",
    shell_complete=RUNTIMES,
    multiple=True,
    metavar="NAME",
    help="Runtime, whose formats are offered, or GPU, for --latency: vllm, h100, FILE.json. Repeatable.",
)
@click.option(
    "--formats",
    shell_complete=PRESET_LIST,
    metavar="LIST",
    help="Formats to choose from, besides 16 bit; +lowrank:RANK after one adds a branch in 16 bit.  "
    "[default: nvfp4,fp8]",
)
@click.option("--method", type=click.Choice(METHODS), help="How groups are scored.  [default: fisher]")
@click.option("--pin", multiple=True, metavar="GLOB=FORMAT", help="Matching layers get FORMAT. Repeatable.")
@click.option("--forbid", multiple=True, metavar="GLOB=FORMAT", help="Matching layers do not get FORMAT.")
@click.option("--at-least", multiple=True, metavar="GLOB=FORMAT", help="Matching layers get at least FORMAT's bits.")
@click.option(
    "--search",
    type=click.IntRange(min=0),
    metavar="N",
    help="Measurements that improve the choice.  [default: 500 on a GPU, 0 on a CPU]",
)
@click.option("--sensitivity", type=click.Path(path_type=Path), help="File that keeps the scores for the next run.")
@click.option("--dry-run", is_flag=True, help="Print the plan with its sizes; read no weights, write nothing.")
@model_options
@QUIET
@JSON
@click.option(
    "--help-all",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_help_all,
    help="Show every option and exit.",
)
@click.version_option(__version__)
def quantize_command(quiet: bool, as_json: bool, **options: Any) -> None:
    """Quantize MODEL: a Hugging Face directory, a .gguf, .safetensors, .pt or .pt2 file, or an alias.

    \b
      quantize Qwen/Qwen3-0.6B --format nvfp4a16 --out qwen3-nvfp4
      quantize Qwen/Qwen3-0.6B --bits 4.8 --out qwen3-mixed

    Writes a checkpoint that vLLM and transformers load, a plan with the reason for every layer's format, and a report.
    Give one of --format, --recipe and --plan, or a budget or limit for which formats are chosen (--bits …).
    """  # noqa: D301  (a backspace, after which click keeps the lines of a paragraph)
    # A dry run reads only headers: paging in gigabytes of weights would only cost time.
    if not options["dry_run"]:
        read_ahead(options["model"])
    # The garbage collector finds nothing among the objects that imports make, and takes a fifth of their time.
    with importing():
        skip_image_packages(options["model"])
        from quant.report.next_steps import next_steps
        from quant.report.summary import print_summary
        from quant.run.request import AllocationRequest, Request
        from quant.run.run import run

    budget = AllocationRequest(**{field.name: options.pop(field.name) for field in fields(AllocationRequest)})
    command = command_line(click.get_current_context())
    outcome = run(Request(**options, budget=budget, command=command), listener(quiet or as_json))
    if as_json:
        # A dry run has a plan and no report.
        print_json((outcome.report or outcome.plan).to_dict())
    elif outcome.report is not None and not quiet:
        print_summary(outcome.report, CONSOLE)
        CONSOLE.print(f"written to {options['out']}")
        for line in next_steps(outcome.report, outcome.plan, options["out"]):
            CONSOLE.print(line, soft_wrap=True)
    elif not quiet:
        print_plan(outcome.plan)
