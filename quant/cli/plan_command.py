"""The commands of `quant plan` make, show, compare, edit and check plan files."""

import dataclasses
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import click

from quant.base.atomic import claimed
from quant.base.errors import UserError, counted, importing, megabytes
from quant.cli.command import JSON, PATH, Toolbox, command_line, echo, model_options, print_json
from quant.cli.completion import MODELS, TARGET_NAMES
from quant.cli.console import listener, page, print_plan, print_table
from quant.cli.quantize import OF_PLANS, RunCommand, request_of, run_options
from quant.export.checkpoint.files.directory import check_apart
from quant.export.tensorrt.gpu_targets import resolve_target
from quant.models.startup import skip_image_packages
from quant.recipes.gpus import Hardware
from quant.recipes.plan import Plan, edit, parse_setting, set_guard_and_observer, set_kv_cache
from quant.recipes.plan_check import Change, Problem, count_problems, diff, places_of, read_plan, totals, validate
from quant.recipes.recipe import matched, near_glob
from quant.recipes.targets import RTX, TARGETS, Target

# Fields of a whole plan that `diff` compares: key, label, and how the absence of a value reads.
_PLAN_FIELDS = (
    ("kv_cache", "KV cache", "16 bit"),
    ("attention", "attention", "16 bit"),
    ("guard", "guard", "none"),
    ("observer", "observer", ""),
)
_PLAN = click.argument("plan_file", metavar="PLAN", type=PATH)


@click.group("plan", cls=Toolbox)
def plan_group() -> None:
    """Make, show, compare, edit and check plan files."""


@plan_group.command("make", cls=RunCommand)
@click.argument("model", shell_complete=MODELS)
@partial(run_options, own=OF_PLANS)
@click.option("--out", type=PATH, required=True, help="File for the plan.")
@click.option("--overwrite", is_flag=True, help="Replace --out if it exists.")
def make_command(out: Path, quiet: bool, as_json: bool, **options: Any) -> None:
    """Decide the plan of MODEL and write it; `quantize MODEL --plan FILE` then executes it.

    \b
      quant plan make MODEL --max-kl 0.05 --eval text.txt --out plan.json
      quant plan make MODEL --fit 24GB --ctx 32k --pin '*.o_proj=fp8' --out plan.json

    Give --format, for which only shapes are read; or a budget (--bits, --fit, --latency) or limit
    (--max-kl, --max-ppl-increase), for which formats are measured and chosen.
    """  # noqa: D301  (a backspace, after which click keeps the lines of a paragraph)
    # The garbage collector finds nothing among the objects that imports make, and takes a fifth of their time.
    with importing():
        skip_image_packages(options["model"])
        from quant.run.run import run

    request = request_of({**options, "plan_out": out}, command_line(click.get_current_context()))
    plan = run(request, listener(quiet or as_json)).plan
    if as_json:
        print_json(plan.to_dict())
    elif not quiet:
        print_plan(plan)
        echo(f"written to {out}", err=True)


@plan_group.command("show")
@_PLAN
@click.option("--match", "globs", multiple=True, metavar="GLOB", help="Only layers that match. Repeatable.")
@click.option("--sort", type=click.Choice(["model", "score", "bytes"]), default="model")
@click.option("--all", "everything", is_flag=True, help="Show layers that stay in 16 bit too.")
@JSON
def show_command(plan_file: Path, globs: tuple[str, ...], sort: str, everything: bool, as_json: bool) -> None:
    """Show the format, the reason and the cost of every layer."""
    plan = Plan.load(plan_file)
    layers = [plan.by_name[name] for name in matched(globs or "*", plan.by_name)]
    if globs and not layers:
        near = near_glob(globs[0], plan.by_name)
        raise ValueError(f"--match {', '.join(globs)}: no layer of {plan_file} matches{near}")
    if sort != "model":
        # Stable, so that layers without a score stay in model order at the end.
        layers.sort(key=lambda m: -(m.nbytes if sort == "bytes" else m.score or 0.0))
    if as_json:
        fields = [{**m.to_dict(), "bits": m.bits_per_weight, "bytes": m.nbytes} for m in layers]
        print_json({**plan.to_dict(), "layers": fields})
    else:
        print_plan(plan, layers, everything=everything or bool(globs), costs=True)


@plan_group.command("diff")
@click.argument("before", type=PATH)
@click.argument("after", type=PATH)
@JSON
def diff_command(before: Path, after: Path, as_json: bool) -> None:
    """List the layers that change from BEFORE to AFTER, and the totals of both."""
    _show_diff(Plan.load(before), Plan.load(after), as_json)


@plan_group.command("edit")
@_PLAN
@click.option("--set", "settings", multiple=True, metavar="GLOB=FORMAT[:SOLVER][@INPUT]", help="New format of "
              "matching layers, or a preset such as nvfp4a16; keep is 16 bit. Without @INPUT, inputs get the format "
              "that goes with the weight's if the plan quantizes inputs. Repeatable; the last match wins.")  # fmt: skip
@click.option("--kv-cache", metavar="FORMAT", help="Format of the KV cache: fp8, fp8_head, or keep.")
@click.option("--guard", metavar="'LIMIT FORMAT …'", help="As in `quantize`; an empty text takes it away.")
@click.option("--observer", metavar="NAME", help="As in `quantize`: absmax, percentile, mse or entropy.")
@click.option("--whole-groups", is_flag=True, help="Change all layers that are fused with a matching one.")
@click.option("--out", type=PATH, required=True, help="File for the edited plan.")
@click.option("--overwrite", is_flag=True, help="Replace --out if it exists.")
@JSON
def edit_command(
    plan_file: Path, settings: tuple[str, ...], kv_cache: str | None, guard: str | None, observer: str | None,
    whole_groups: bool, out: Path, overwrite: bool, as_json: bool,
) -> None:  # fmt: skip
    """Write PLAN with some layers changed. `quantize MODEL --plan FILE` then executes it."""
    from quant.export.checkpoint.files.compressed_tensors import check_plan

    if not settings and kv_cache is guard is observer is None:
        raise UserError("nothing to change: give --set 'GLOB=FORMAT', --kv-cache FORMAT, --guard or --observer")
    check_apart(out, plan_file)
    # Before the test of existence, or another edit could write the file in between.
    click.get_current_context().with_resource(claimed(out))
    if out.exists() and not overwrite:
        raise UserError(f"{out}: exists already; pass --overwrite to replace it")
    old = Plan.load(plan_file)
    new = edit(old, [parse_setting(text) for text in settings], whole_groups=whole_groups)
    if kv_cache is not None:
        new = set_kv_cache(new, kv_cache)
    if guard is not None or observer is not None:
        new = set_guard_and_observer(new, guard, observer)
    if not any(layer.weight is not None and layer.weight.gguf for layer in new.quantized):
        check_plan(new)  # else `quantize` would refuse it
    new.save(out)
    _show_diff(old, new, as_json)
    if not as_json:
        echo(f"written to {out}", err=True)


@plan_group.command("validate")
@_PLAN
@click.option("--model", shell_complete=MODELS, help="Model that the plan is for; only its shapes are read.")
@click.option("--target", "target_name", shell_complete=TARGET_NAMES, metavar="NAME", help="Runtime or GPU: "
              "vllm, rtx5090, … (`quant plan targets` lists runtimes).  [default: the plan's]")  # fmt: skip
@model_options
@JSON
@click.pass_context
def validate_command(
    context: click.Context, plan_file: Path, model: str | None, target_name: str | None, model_factory: str | None,
    unsafe_load: bool, as_json: bool,
) -> None:  # fmt: skip
    """List every problem of PLAN; exit code 1 if there is one.

    The plan is checked by itself, and against the model and the runtime or GPU that are named. No weight is read.
    """
    target_name = target_name and target_name.lower()
    gpu = None if target_name is None or target_name in TARGETS else resolve_target(target_name)
    plan, problems = read_plan(plan_file)
    # An entry that could not be read is one problem, not a second one for being missing.
    unread = {problem.where for problem in problems}
    # A GPU stands for TensorRT-RTX where that builds for it; a plan's own GPU says nothing of the runtime.
    runtime = target_name or plan.target or "" if gpu is None else f"{RTX}{gpu.sm}"
    target = TARGETS.get(runtime)
    layers = None
    if model is not None:
        from quant.models.open_model import open_model

        source = open_model(model, model_factory=model_factory, unsafe_load=unsafe_load, meta=True)
        layers, problems = source.layers, [*problems, *count_problems(plan, source.config)]
    problems += [problem for problem in validate(plan, layers, target) if problem.where not in unread]
    if as_json:
        print_json([problem.to_dict() for problem in problems])
    else:
        _print_problems(plan, problems, model, target or gpu)
    if problems:
        context.exit(1)


@plan_group.command("targets")
@JSON
def targets_command(as_json: bool) -> None:
    """List the runtimes for --target, and the formats that each of them runs."""
    if as_json:
        print_json({name: dataclasses.asdict(target) for name, target in TARGETS.items()})
        return
    out = page()
    for target in TARGETS.values():
        title = f"{target.name}: {target.description}"
        columns = {
            "!weight": [pair.weight for pair in target.pairs],
            "!input": [pair.activation or "16 bit" for pair in target.pairs],
            "!runs": [pair.runs for pair in target.pairs],
            "layers": [", ".join(pair.kinds) for pair in target.pairs],
            "note": [pair.note for pair in target.pairs],
        }
        if any(pair.source for pair in target.pairs):
            columns["!from"] = [pair.source for pair in target.pairs]
        print_table(columns, title=title, drops=("from", "layers"))
        for formats, reason in target.refused.items():
            out.print(f"refused: {formats}: {reason}")
        for formats, reason in target.misread.items():
            out.print(f"misread without a word: {formats}: {reason}")
        out.print(f"KV cache: {', '.join((*target.kv_cache, '16 bit'))}. From: {target.source}\n")


def _show_diff(old: Plan, new: Plan, as_json: bool) -> None:
    changes, before, after = diff(old, new), totals(old), totals(new)
    if as_json:
        print_json({"before": before, "after": after, "layers": [change.to_dict() for change in changes]})
        return
    out = page()
    if changes:
        columns = {
            "!layer": [change.name for change in changes],
            "change": [change.kind for change in changes],
            "!bits": [_arrow(change, lambda m: f"{m.bits_per_weight:.3f}") for change in changes],
            "!bytes": [_arrow(change, lambda m: f"{m.nbytes:,}") for change in changes],
            "why": [(change.after or change.before).reason for change in changes],  # type: ignore[union-attr]
        }
        print_table(columns, drops=("why", "bytes"))
        for kind, count in Counter(change.kind for change in changes).most_common():
            out.print(f"{counted(count, 'layer')}: {kind}")
    else:
        out.print("no layer changes")
    out.print(f"quantized layers: {before['quantized']} → {after['quantized']}")
    out.print(f"bits a quantized weight: {before['effective_bits']:.4f} → {after['effective_bits']:.4f}")
    out.print(f"bits a weight of all linear layers: {before['bits_linear']:.4f} → {after['bits_linear']:.4f}")
    change = after["bytes"] - before["bytes"]
    sign = "+" if change >= 0 else "−"
    out.print(f"weights: {megabytes(before['bytes'])} → {megabytes(after['bytes'])} ({sign}{megabytes(abs(change))})")
    for key, label, unset in _PLAN_FIELDS:
        if before[key] != after[key]:
            out.print(f"{label}: {before[key] or unset} → {after[key] or unset}")


def _arrow(change: Change, text: Any) -> str:
    sides = ["–" if side is None else text(side) for side in (change.before, change.after)]
    return sides[0] if sides[0] == sides[1] else " → ".join(sides)


def _print_problems(plan: Plan, problems: list[Problem], model: str | None, target: Target | Hardware | None) -> None:
    out = page()
    names = (f"model {model}" if model else "", f"target {target.name}" if target else "")
    against = " and ".join(filter(None, names))
    if not problems:
        # The conditions under which the runtime runs the formats of the plan, and the number of layers of each.
        notes = Counter[str]()
        for layer in plan.quantized:
            pair = target.pair(layer.weight_format, layer.activation) if isinstance(target, Target) else None
            if pair is not None and pair.note:
                notes[f"{pair}: {pair.note}"] += 1
        conditions = (f" with {against}" if against else "") + (" under these conditions:" if notes else "")
        out.print(f"{counted(len(plan.layers), 'layer')}, no problem{conditions}")
        for note, count in notes.items():
            out.print(f"{counted(count, 'layer')} in {note}")
        if isinstance(target, Hardware):
            native = ", ".join(target.native_formats)
            out.print(f"{target} multiplies {native} as they are; name a runtime too, which may not load the plan")
        if not against:
            out.print("checked by itself alone; pass --model and --target to check it against them")
        return
    alike = places_of(problems)
    columns = {
        "where": ["\n".join(places) for places in alike.values()],
        "problem": [problem for problem, _ in alike],
        "way out": [remedy for _, remedy in alike],
    }
    print_table(columns, show_lines=True)
    count = len({problem.where for problem in problems})
    out.print(
        f"{counted(len(problems), 'problem')} in {counted(count, 'place')}{f', with {against}' if against else ''}"
    )
