"""The command line: `quantize` does the main job; `quant` is the toolbox around it.

Commands parse, call one public function, and print. A mistake of the user's is one line on standard error and exit
code 2, with nothing written; `--debug` shows the traceback behind it.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from quant.cli.audit import audit_command
from quant.cli.base import ATTENTION, KV_CACHE, attention_options
from quant.cli.base import DEBUG as _DEBUG
from quant.cli.base import JSON as _JSON
from quant.cli.base import QUIET as _QUIET
from quant.cli.base import Command as _Command
from quant.cli.base import Toolbox as _Toolbox
from quant.cli.bench import bench_command
from quant.cli.export import export_command
from quant.cli.generate import generate_command, tune_command
from quant.cli.plan import plan_group
from quant.cli.report import report_command
from quant.cli.sensitivity import allocation_options, sensitivity_command, take_request

# torch takes seconds to import: commands import what they need, so that --help does not wait for it.


def _model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--model-factory", metavar="PACKAGE.MODULE:FUNCTION", help="Builds the module of a state dict."),
        click.option("--unsafe-load", is_flag=True, help="Unpickle whole modules. Runs code that is in the file."),
    ):
        command = option(command)
    return command


@click.command("quantize", cls=_Command)
@click.argument("model")
@click.option("--format", "format_name", help="Preset: nvfp4, nvfp4a16, mxfp8, fp8, … (`quant formats` lists them).")
@click.option("--recipe", "recipe_file", type=click.Path(path_type=Path), help="Recipe file (TOML).")
@click.option("--plan", "plan_file", type=click.Path(path_type=Path), help="Plan file, perhaps edited.")
@click.option("--solver", help="How weights are rounded; replaces the recipe's.")
@click.option(
    "--guard",
    metavar="'LIMIT FORMAT …'",
    help="A layer whose output is off by more than LIMIT, relatively, gets the next format: '0.1 fp8 keep'.",
)
@click.option("--observer", help="How static activation scales are chosen: absmax, percentile, mse or entropy.")
@click.option("--kv-cache", metavar="FORMAT", help="Format of the KV cache: fp8.")
@click.option("--include", multiple=True, metavar="GLOB", help="Quantize only layers that match. Repeatable.")
@click.option("--exclude", multiple=True, metavar="GLOB", help="Keep matching layers in 16 bit. Repeatable.")
@click.option("--out", type=click.Path(path_type=Path), help="Directory for the checkpoint, the plan and the report.")
@click.option("--overwrite", is_flag=True, help="Replace what is in --out.")
@click.option(
    "--calib",
    metavar="SOURCE",
    help="Calibration text: a text file, token ids in safetensors, .jsonl/.csv/.parquet, hf:NAME[:CONFIG][:SPLIT]"
    "[#COLUMN], or self. By default the model writes its own where the plan needs any.",
)
@click.option("--calib-samples", default=32, show_default=True, help="Rows of calibration text.")
@click.option("--eval", "eval_text", type=click.Path(path_type=Path), help="Evaluation text, or token ids.")
@click.option("--eval-samples", default=16, show_default=True, help="Rows of evaluation text.")
@click.option("--seqlen", default=512, show_default=True, help="Tokens a row.")
@click.option("--seed", default=0, show_default=True, help="Seed of everything random.")
@allocation_options
@click.option("--dry-run", is_flag=True, help="Print the plan with its sizes; read no weights, write nothing.")
@_model_options
@_QUIET
@_JSON
@_DEBUG
def quantize_command(**options: Any) -> None:
    """Quantize MODEL: a Hugging Face directory, a .gguf, .safetensors, .pt or .pt2 file, or an alias.

    Ends with a checkpoint that vLLM and transformers load, a plan that says why every layer is what it is, and a
    report. Give one of --format, --recipe and --plan, or a budget or limit for which formats are chosen (--bits …).
    """
    from quant.cli.pipeline import Job, run

    quiet, as_json = options.pop("quiet"), options.pop("as_json")
    options.pop("debug")
    options["request"] = take_request(options)
    options["command"] = shlex.join(["quantize", *sys.argv[1:]])
    outcome = run(Job(**options), quiet=quiet or as_json)
    if as_json:
        click.echo(json.dumps(outcome, indent=1))


@click.group("quant", cls=_Toolbox)
@click.version_option(package_name="blockscale")
def main() -> None:
    """The Blockscale toolbox."""


@main.command("evaluate")
@click.argument("model")
@click.option("--text", required=True, type=click.Path(path_type=Path), help="Text, or token ids in safetensors.")
@click.option("--baseline", help="Model to compare with; gives KL and top-1 agreement.")
@click.option("--samples", default=16, show_default=True, help="Rows of text.")
@click.option("--seqlen", default=512, show_default=True, help="Tokens a row.")
@click.option("--batch-size", default=1, show_default=True, help="Rows that run together.")
@ATTENTION
@KV_CACHE
@_model_options
@_QUIET
@_JSON
@_DEBUG
def evaluate_command(
    model: str,
    text: Path,
    baseline: str | None,
    samples: int,
    seqlen: int,
    batch_size: int,
    attention: str | None,
    kv_cache: str | None,
    model_factory: str | None,
    unsafe_load: bool,
    quiet: bool,
    as_json: bool,
    debug: bool,
) -> None:
    """Perplexity of MODEL, and its KL and top-1 agreement with a baseline. MODEL may be quantized or not.

    The baseline attends in 16 bit whatever MODEL does.
    """
    from quant.cli.console import bar, print_evaluation
    from quant.cli.pipeline import open_any, read_rows
    from quant.evaluation import evaluate
    from quant.runtime.attention import quantized_attention

    source = open_any(model, model_factory=model_factory, unsafe_load=unsafe_load)
    other = open_any(baseline, model_factory=model_factory, unsafe_load=unsafe_load) if baseline else None
    rows = read_rows(source, text, samples, seqlen)
    assert source.model is not None
    how = quantized_attention(source.model, **attention_options(model, attention, kv_cache))
    with how, bar("evaluate", quiet or as_json) as advance:
        base = other.model if other else None
        result = evaluate(source.model, rows, base, batch_size=batch_size, progress=advance)
    if as_json:
        click.echo(json.dumps(result.to_dict(), indent=1))
    elif not quiet:
        print_evaluation(result)


@main.command("inspect")
@click.argument("directory", type=click.Path(path_type=Path))
@_JSON
@_DEBUG
def inspect_command(directory: Path, as_json: bool, debug: bool) -> None:
    """What is in a quantized checkpoint: format, shape, bits, SNR and reason of every layer, and totals."""
    from quant.api.load import describe
    from quant.cli.console import print_layers

    plan, report = describe(directory)
    if as_json:
        click.echo(json.dumps({"plan": plan.to_dict(), "report": report}, indent=1))
    else:
        print_layers(plan, report)


@main.command("doctor")
@_JSON
@_DEBUG
def doctor_command(as_json: bool, debug: bool) -> None:
    """What this machine has: torch, GPU, and the optional packages or how to get them."""
    from quant.cli.doctor import examine, print_findings

    findings = examine()
    if as_json:
        click.echo(json.dumps(findings, indent=1))
    else:
        print_findings(findings)


@main.command("formats")
@_JSON
@_DEBUG
def formats_command(as_json: bool, debug: bool) -> None:
    """The presets that --format takes, and the number formats that recipes and plans can name."""
    from quant.cli.console import format_tables, print_formats

    if as_json:
        click.echo(json.dumps(format_tables(), indent=1))
    else:
        print_formats()


main.add_command(plan_group)
main.add_command(report_command)
main.add_command(sensitivity_command)
main.add_command(audit_command)
main.add_command(export_command)
main.add_command(generate_command)
main.add_command(bench_command)
main.add_command(tune_command)


if __name__ == "__main__":
    main()
