"""The command `quantize` turns a model into a quantized checkpoint with its plan and report.

`quant plan make` shares its options of formats, calibration and machine. Budgets other than `--bits`, and what experts
change about a plan, are options of `quant plan make` alone, whose plan `quantize --plan` runs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import click

from quant import __version__
from quant.base.errors import importing
from quant.calibration.sensitivity.table import METHODS
from quant.cli import command as cli
from quant.cli.completion import FORMAT_NAMES, MODELS, OBSERVERS, PRESET_LIST, SOLVERS, SOURCES, TARGET_NAMES
from quant.cli.console import CONSOLE, listener, print_plan
from quant.models.startup import read_ahead, skip_image_packages

GROUPS = {
    "Formats": ("--format", "--plan", "--include", "--exclude", "--lm-head", "--kv-cache", "--kv-bits", "--attention"),
    "Formats chosen within a limit": (
        "--bits", "--fit", "--ctx", "--batch", "--latency", "--max-kl", "--max-ppl-increase", "--min-task", "--target",
        "--power", "--method", "--pin", "--forbid", "--at-least", "--search", "--sensitivity",
    ),
    "Rounding": (
        "--effort", "--solver", "--guard", "--observer", "--calib", "--calib-samples", "--seqlen", "--eval",
        "--eval-samples", "--seed",
    ),
    "Pipelines of diffusers": ("--components", "--call", "--max-error"),
    "Output": ("--out", "--overwrite", "--restart", "--allow-missing", "--dry-run", "--quiet", "--json"),
    "Machine": ("--device", "--devices", "--memory"),
}  # fmt: skip


class RunCommand(cli.Command):
    """A command whose `--help` shows its options by purpose."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = {option.opts[-1]: option for option in self.get_params(ctx) if isinstance(option, click.Option)}
        grouped = {title: [options.pop(name) for name in names if name in options] for title, names in GROUPS.items()}
        for title, group in {**grouped, "Model and program": list(options.values())}.items():
            records = [record for option in group if (record := option.get_help_record(ctx)) is not None]
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


_FORMATS = (
    click.option("--format", "recipe", shell_complete=PRESET_LIST,
                 help="Preset: nvfp4, nvfp4a16, fp8, … (`quant formats` lists them); WEIGHT@INPUT; or a recipe file, "
                 "NAME.toml. Within a limit, formats to choose from besides 16 bit, with commas; +lowrank:RANK adds a "
                 "branch in 16 bit.  [default within a limit: nvfp4,fp8]"),
    click.option("--include", multiple=True, metavar="GLOB",
                 help="Quantize only layers that match; 'mtp.*' adds prediction heads. Repeatable."),
    click.option("--exclude", multiple=True, metavar="GLOB", help="Keep matching layers in 16 bit. Repeatable."),
    click.option("--lm-head", shell_complete=FORMAT_NAMES, metavar="FORMAT",
                 help="Format of the output head, apart from a tied embedding; inputs in 16 bit.  [default: 16 bit]"),
    click.option("--kv-cache", shell_complete=FORMAT_NAMES, metavar="FORMAT",
                 help="KV cache: fp8, or fp8_head with a scale for each head."),
)  # fmt: skip
_ROUNDING = (
    click.option("--effort", type=click.IntRange(0, 3), metavar="0|1|2|3",
                 help="Chooses the solver: 0 rounds to nearest, 1 searches scales, 2 is gptq on calibration text, 3 is "
                 "kfac, which rounds for the loss of the whole model.  [default: 2, and 0 for a limit on the loss]"),
    click.option("--solver", shell_complete=SOLVERS, help="Method that rounds weights; replaces the recipe's."),
    click.option("--calib", shell_complete=SOURCES, multiple=True, metavar="SOURCE",
                 help="Calibration data: a file of text, rows or token ids, hf:DATASET, a folder of images or sounds, "
                 "self, mix, or mix+FILE (docs/calibration.md). Repeatable.  [default: mix, if the plan needs text]"),
    click.option("--calib-samples", type=cli.COUNT, metavar="N",
                 help="Rows of calibration text, images or sounds.  [default: 32; up to 512 of mix on a GPU]"),
    click.option("--eval", "eval_texts", shell_complete=SOURCES, multiple=True, metavar="SOURCE",
                 help="Evaluation text or other inputs, as for --calib. Repeatable: text of another kind shows what "
                 "carries over."),
    click.option("--eval-samples", type=cli.COUNT, default=16,
                 help="Rows of each --eval."),
    click.option("--seqlen", type=cli.COUNT, default=512, help="Tokens per row."),
    cli.SEED,
)  # fmt: skip
OF_PIPELINES = (
    click.option("--components", metavar="LIST",
                 help="Models of a diffusers pipeline to quantize: transformer,text_encoder.  "
                 "[default: its denoisers]"),
    click.option("--call", multiple=True, metavar="NAME=VALUE", help="Argument of the pipeline for calibration: "
                 "num_inference_steps=20 or guidance_scale=3.5. Repeatable.  [default: the pipeline's]"),
    click.option("--max-error", type=float, metavar="RATIO",
                 help="Find the smallest model whose predictions differ by less, relatively: 0.05."),
)  # fmt: skip
_BUDGET = click.option(
    "--bits", type=float, help="Choose formats with this many bits per weight, scales and padding counted."
)
OF_PLANS = (
    click.option("--kv-bits", metavar="BITS", help="Choose a format of the KV cache for each layer (nvfp4, fp8, 16 "
                 "bit) with this many bits per value, or auto: so that weights and cache together lose the least; for "
                 "checkpoints that Blockscale runs."),
    click.option("--attention", shell_complete=FORMAT_NAMES, metavar="FORMAT",
                 help="Format of attention's operands: fp8."),
    click.option("--guard", metavar="'LIMIT FORMAT …'",
                 help="A layer with a relative output error above LIMIT gets the next format: '0.1 fp8 keep'."),
    click.option("--observer", shell_complete=OBSERVERS,
                 help="Method that sets static activation scales: absmax, percentile, mse or entropy."),
    click.option("--fit", metavar="SIZE", help="… so that weights and KV cache fit into SIZE: 24GB."),
    click.option("--ctx", default="4096", metavar="N", help="Tokens per sequence for --fit: 32k."),
    click.option("--batch", type=click.IntRange(1, 2**31 - 1), default=1,
                 help="Concurrent sequences, for --fit and --latency."),
    click.option("--latency", metavar="TIME", help="… so that a decoding step takes at most TIME, such as 12ms."),
    click.option("--max-kl", type=float, metavar="NATS",
                 help="Find the smallest model whose KL stays below, on each --eval text."),
    click.option("--max-ppl-increase", metavar="PERCENT", help="The same for perplexity, such as 1%."),
    click.option("--min-task", metavar="'FILE>=SHARE'", help="The same for right answers to the questions of a JSONL "
                 "file, relative to MODEL's own: 'task.jsonl>=0.97' (docs/measuring.md)."),
    click.option("--target", shell_complete=TARGET_NAMES, multiple=True, metavar="NAME",
                 help="Runtime, whose formats are offered, or GPU, for --latency: vllm, h100, FILE.json. Repeatable."),
    click.option("--power", metavar="WATTS", help="Power mode of the GPU of --target, for --latency: 30W."),
    click.option("--method", type=click.Choice(METHODS), help="How groups are scored.  [default: fisher]"),
    click.option("--pin", multiple=True, metavar="GLOB=FORMAT", help="Matching layers get FORMAT. Repeatable."),
    click.option("--forbid", multiple=True, metavar="GLOB=FORMAT", help="Matching layers do not get FORMAT."),
    click.option("--at-least", multiple=True, metavar="GLOB=FORMAT",
                 help="Matching layers get at least FORMAT's bits."),
    click.option("--search", type=click.IntRange(min=0), metavar="N",
                 help="Measurements that improve the choice for a budget.  [default: 500 on a GPU, 0 on a CPU]"),
    click.option("--sensitivity", type=cli.PATH,
                 help="File that keeps the scores for the next run."),
    cli.REVISION,
)  # fmt: skip
_MACHINE = (
    cli.DEVICE, cli.DEVICES,
    click.option("--memory", metavar="SIZE", help="Memory that may be used: 8GB.  [default: what is free]"),
    cli.FACTORY, cli.TRUST_CODE, cli.QUIET, cli.JSON,
)  # fmt: skip


def run_options(command: Callable[..., Any], own: Sequence[Callable[..., Any]] = OF_PIPELINES) -> Callable[..., Any]:
    """Adds the options that `quantize` and `quant plan make` share, and those that only one of them has."""
    for option in (*own, *_FORMATS, *_ROUNDING, _BUDGET, *_MACHINE):
        command = option(command)
    return command


def request_of(options: dict[str, Any], command: str) -> Any:
    """Returns the `Request` of a command with these options; one that it does not have has its default."""
    from dataclasses import fields, replace

    from quant.run.request import AllocationRequest, Request

    named = {field.name: options.pop(field.name) for field in fields(AllocationRequest) if field.name in options}
    request = Request(**options, budget=AllocationRequest(**named), command=command)
    if request.goal is None or request.recipe_file is not None:
        return request
    # Within a limit, --format names the formats to choose from.
    return replace(request, recipe=None, budget=AllocationRequest(**named, formats=options["recipe"]))


@click.command("quantize", cls=RunCommand)
@click.argument("model", shell_complete=MODELS)
@run_options
@click.option("--plan", "plan_file", type=cli.PATH, help="Plan file, which you may have edited.")
@click.option("--out", type=cli.PATH, help="Directory for checkpoint and report, or a .gguf file.")
@click.option("--overwrite", is_flag=True, help="Replace the contents of --out.")
@click.option("--allow-missing", is_flag=True, help="Write --out even if transformers would miss or ignore tensors.")
@click.option("--restart", is_flag=True, help="Delete what an unfinished run to --out left, and begin anew.")
@click.option("--dry-run", is_flag=True, help="Print the plan with its sizes; read no weights, write nothing.")
@click.version_option(__version__)
def quantize_command(quiet: bool, as_json: bool, **options: Any) -> None:
    """Quantize MODEL: a Hugging Face or diffusers directory, a .gguf, .safetensors, .pt or .pt2 file, or an alias.

    \b
      quantize Qwen/Qwen3-0.6B --format nvfp4a16 --out qwen3-nvfp4
      quantize Qwen/Qwen3-0.6B --bits 4.8 --out qwen3-mixed

    Writes a checkpoint that vLLM and transformers load, a plan with the reason for every layer's format, and a report.
    Give --format or --plan, or --bits, for which formats are chosen. A plan within other limits, of memory, time or
    loss, is made by `quant plan make`.
    """  # noqa: D301  (a backspace, after which click keeps the lines of a paragraph)
    # A dry run reads only headers: paging in gigabytes of weights would only cost time.
    if not options["dry_run"]:
        read_ahead(options["model"])
    # The garbage collector finds nothing among the objects that imports make, and takes a fifth of their time.
    with importing():
        skip_image_packages(options["model"])
        from quant.report.summary import next_steps, print_denoising, print_summary
        from quant.run.pipeline import PipelineOutcome, run_any

    out = options["out"]
    outcome = run_any(request_of(options, cli.command_line(click.get_current_context())), listener(quiet or as_json))
    if isinstance(outcome, PipelineOutcome):
        results = outcome.reports or outcome.plans
        if as_json:
            cli.print_json({**{name: each.to_dict() for name, each in results.items()}, "denoising": outcome.denoising})
        elif not quiet:
            for report in outcome.reports.values():
                print_summary(report, CONSOLE)
            if outcome.reports:
                print_denoising(outcome.denoising, CONSOLE)
                CONSOLE.print(f"written to {out}\nrun it with quant.load_pipeline({str(out)!r})", soft_wrap=True)
            for plan in () if outcome.reports else outcome.plans.values():
                print_plan(plan)
    elif as_json:
        # A dry run has a plan and no report.
        cli.print_json((outcome.report or outcome.plan).to_dict())
    elif outcome.report is not None and not quiet:
        print_summary(outcome.report, CONSOLE)
        CONSOLE.print(f"written to {out}")
        for line in next_steps(outcome.report, outcome.plan, out):
            CONSOLE.print(line, soft_wrap=True)
    elif not quiet:
        print_plan(outcome.plan)
