"""`quant plan`: look at a plan, compare two, edit one, and check one against a model and a runtime."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quant.cli.base import DEBUG, JSON, Toolbox
from quant.errors import counted

if TYPE_CHECKING:
    from rich.console import Console

    from quant.plan_check import Problem
    from quant.plan_diff import Change
    from quant.recipes.plan import LayerPlan, Plan

_PLAN = click.argument("plan_file", metavar="PLAN", type=click.Path(path_type=Path))


@click.group("plan", cls=Toolbox)
def plan_group() -> None:
    """Show, compare, edit and check plan files."""


@plan_group.command("show")
@_PLAN
@click.option("--match", "globs", multiple=True, metavar="GLOB", help="Only layers that match. Repeatable.")
@click.option("--sort", type=click.Choice(["model", "score", "bytes"]), default="model", show_default=True)
@click.option("--all", "everything", is_flag=True, help="Also the layers that stay in 16 bit.")
@JSON
@DEBUG
def show_command(
    plan_file: Path, globs: tuple[str, ...], sort: str, everything: bool, as_json: bool, debug: bool
) -> None:
    """What becomes of every layer, why, and what it costs."""
    from quant.recipes.plan import Plan

    plan = Plan.load(_file_of(plan_file))
    layers = [m for m in plan.layers if not globs or any(fnmatchcase(m.name, glob) for glob in globs)]
    if globs and not layers:
        raise ValueError(f"--match {', '.join(globs)}: no layer of {plan_file} matches")
    if sort != "model":
        layers.sort(key=lambda m: -(m.nbytes if sort == "bytes" else m.score or 0.0))
    if as_json:
        fields = [{**m.to_dict(), "bits": m.bits_per_weight, "bytes": m.nbytes} for m in layers]
        click.echo(json.dumps({**plan.to_dict(), "layers": fields}, indent=1))
    else:
        _print_plan(plan, layers, everything or bool(globs))


@plan_group.command("diff")
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@JSON
@DEBUG
def diff_command(before: Path, after: Path, as_json: bool, debug: bool) -> None:
    """Which layers change from BEFORE to AFTER, and what the two plans take."""
    from quant.plan_diff import diff, totals
    from quant.recipes.plan import Plan

    old, new = Plan.load(_file_of(before)), Plan.load(_file_of(after))
    changes, sums = diff(old, new), (totals(old), totals(new))
    if as_json:
        fields = {"before": sums[0], "after": sums[1], "layers": [change.to_dict() for change in changes]}
        click.echo(json.dumps(fields, indent=1))
    else:
        _print_diff(changes, *sums)


@plan_group.command("edit")
@_PLAN
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="GLOB=FORMAT[:SOLVER][@INPUT]",
    help="What matching layers become; keep is 16 bit. Without @INPUT, inputs get the format that belongs to the "
    "weight's where the plan quantizes inputs. Repeatable, last match wins.",
)
@click.option("--kv-cache", metavar="FORMAT", help="Format of the KV cache: fp8, or keep.")
@click.option("--whole-groups", is_flag=True, help="Take along the layers that are fused with a matching one.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="File for the edited plan.")
@click.option("--overwrite", is_flag=True, help="Replace --out if it is there.")
@JSON
@DEBUG
def edit_command(
    plan_file: Path,
    settings: tuple[str, ...],
    kv_cache: str | None,
    whole_groups: bool,
    out: Path,
    overwrite: bool,
    as_json: bool,
    debug: bool,
) -> None:
    """Write PLAN with some layers changed. `quantize MODEL --plan FILE` then executes it."""
    from quant.errors import UserError
    from quant.plan_diff import diff, totals
    from quant.plan_edit import edit, parse_setting, set_kv_cache
    from quant.recipes.plan import Plan

    if not settings and kv_cache is None:
        raise UserError("nothing to change: give --set 'GLOB=FORMAT' or --kv-cache FORMAT")
    if out.exists() and not overwrite:
        raise UserError(f"{out}: exists already; pass --overwrite to replace it")
    old = Plan.load(_file_of(plan_file))
    new = edit(old, [parse_setting(text) for text in settings], whole_groups=whole_groups)
    if kv_cache is not None:
        new = set_kv_cache(new, kv_cache)
    changes = diff(old, new)
    new.save(out)
    if as_json:
        fields = {"before": totals(old), "after": totals(new), "layers": [change.to_dict() for change in changes]}
        click.echo(json.dumps(fields, indent=1))
    else:
        _print_diff(changes, totals(old), totals(new))
        click.echo(f"written to {out}", err=True)


@plan_group.command("validate")
@_PLAN
@click.option("--model", help="The model that the plan is for; only its shapes are read.")
@click.option(
    "--target",
    "target_name",
    metavar="RUNTIME",
    help="vllm, sglang, … (`quant plan targets` lists them). By default the plan's own.",
)
@click.option("--model-factory", metavar="PACKAGE.MODULE:FUNCTION", help="Builds the module of a state dict.")
@click.option("--unsafe-load", is_flag=True, help="Unpickle whole modules. Runs code that is in the file.")
@JSON
@DEBUG
@click.pass_context
def validate_command(
    context: click.Context,
    plan_file: Path,
    model: str | None,
    target_name: str | None,
    model_factory: str | None,
    unsafe_load: bool,
    as_json: bool,
    debug: bool,
) -> None:
    """Everything that is wrong with PLAN, at once; exit code 1 if anything is.

    Checks the plan by itself, and against the model and the runtime that are named. No weight is read.
    """
    from quant.models.shapes import stored_layers
    from quant.plan_check import read_plan, validate
    from quant.recipes.targets import TARGETS, get_target

    if target_name is not None:
        get_target(target_name)
    plan, problems = read_plan(_file_of(plan_file))
    # A plan may be for a GPU, whose name says nothing of the runtime.
    target_name = target_name or (plan.target if plan.target in TARGETS else None)
    target = get_target(target_name) if target_name else None
    layers = stored_layers(model, plan) if model and model_factory is None else None
    if model and layers is None:
        from quant.models.open import open_model

        layers = open_model(model, model_factory=model_factory, unsafe_load=unsafe_load, meta=True).layers
    unread = {problem.where for problem in problems}
    problems += [problem for problem in validate(plan, layers, target) if problem.where not in unread]
    if as_json:
        click.echo(json.dumps([problem.to_dict() for problem in problems], indent=1))
    else:
        _print_problems(plan, problems, model, target_name)
    if problems:
        context.exit(1)


@plan_group.command("targets")
@JSON
@DEBUG
def targets_command(as_json: bool, debug: bool) -> None:
    """The runtimes that --target takes, and which formats each of them runs."""
    from quant.recipes.targets import TARGETS

    if as_json:
        click.echo(json.dumps({name: dataclasses.asdict(target) for name, target in TARGETS.items()}, indent=1))
    else:
        _print_targets()


def _file_of(path: Path) -> Path:
    """A plan file; of a checkpoint, the one in it."""
    return path / "plan.json" if path.is_dir() else path


def _print_plan(plan: Plan, layers: list[LayerPlan], everything: bool) -> None:
    from rich.table import Table

    from quant.recipes.plan import bits_per_weight

    # A layer with a score was given 16 bit by an allocation: that is a decision too.
    shown = [m for m in layers if everything or m.weight is not None or m.score is not None]
    scored = any(m.score is not None for m in shown)
    grouped = any(m.group is not None for m in shown)
    table = Table(title=None)
    for column, numeric in (
        ("layer", False),
        ("shape", True),
        ("weight", False),
        ("input", False),
        ("solver", False),
        ("bits", True),
        ("bytes", True),
        *((("score", True),) if scored else ()),
        *((("group", False),) if grouped else ()),
        ("why", False),
    ):
        table.add_column(column, justify="right" if numeric else "left", overflow="fold", no_wrap=column == "layer")
    for m in shown:
        table.add_row(
            m.name,
            "×".join(map(str, m.shape)),
            str(m.weight or "16 bit"),
            str(m.activation or "16 bit") if m.weight else "–",
            m.solver if m.weight else "–",
            f"{m.bits_per_weight:.3f}",
            f"{m.nbytes:,}",
            *((("–" if m.score is None else f"{m.score:.3g}"),) if scored else ()),
            *((_short_group(m),) if grouped else ()),
            m.reason,
        )
    out = _console()
    out.print(table)
    if not everything:
        names = {m.name for m in shown}
        for reason, count in Counter(m.reason for m in layers if m.name not in names).items():
            out.print(f"{counted(count, 'layer')} kept in 16 bit: {reason}")
    chosen = [m for m in layers if m.weight is not None]
    of = "" if len(layers) == len(plan.layers) else f" of {len(plan.layers)}"
    out.print(
        f"{counted(len(layers), 'layer')}{of}; {len(chosen)} quantized at {bits_per_weight(chosen):.4f} bits a weight, "
        f"scales counted; {sum(m.nbytes for m in layers) / 1e6:,.1f} MB"
    )
    for label, value in (("KV cache", plan.kv_cache), ("attention", plan.attention), ("target", plan.target)):
        if value:
            out.print(f"{label}: {value}")


def _short_group(layer: LayerPlan) -> str:
    """The group's name without what it shares with the layer's own."""
    parent = layer.name.rpartition(".")[0] + "."
    return (layer.group or "–").removeprefix(parent)


def _print_diff(changes: list[Change], before: dict[str, Any], after: dict[str, Any]) -> None:
    from rich.table import Table

    from quant.report import megabytes

    out = _console()
    if changes:
        table = Table(title=None)
        for column in ("layer", "change", "bits", "bytes", "why"):
            table.add_column(column, overflow="fold", no_wrap=column == "layer")
        for change in changes:
            table.add_row(
                change.name,
                change.kind,
                _arrow(change, lambda m: f"{m.bits_per_weight:.3f}"),
                _arrow(change, lambda m: f"{m.nbytes:,}"),
                (change.after or change.before).reason,  # type: ignore[union-attr]
            )
        out.print(table)
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
    for key, label in (("kv_cache", "KV cache"), ("attention", "attention")):
        if before[key] != after[key]:
            out.print(f"{label}: {before[key] or '16 bit'} → {after[key] or '16 bit'}")


def _arrow(change: Change, text: Any) -> str:
    sides = ["–" if side is None else text(side) for side in (change.before, change.after)]
    return sides[0] if sides[0] == sides[1] else " → ".join(sides)


def _print_problems(plan: Plan, problems: list[Problem], model: str | None, target: str | None) -> None:
    from rich.table import Table

    out = _console()
    against = " and ".join(filter(None, (f"model {model}" if model else "", f"target {target}" if target else "")))
    if not problems:
        out.print(f"{counted(len(plan.layers), 'layer')}, no problem{f' with {against}' if against else ''}")
        if not against:
            out.print("checked by itself alone; pass --model and --target to check it against them")
        return
    table = Table(title=None, show_lines=True)
    for column in ("where", "problem", "what to do"):
        table.add_column(column, overflow="fold")
    alike: dict[tuple[str, str], list[str]] = {}
    for problem in problems:
        alike.setdefault((problem.what, problem.remedy), []).append(problem.where)
    for (what, remedy), places in alike.items():
        table.add_row("\n".join(places), what, remedy)
    out.print(table)
    count = len({problem.where for problem in problems})
    out.print(
        f"{counted(len(problems), 'problem')} in {counted(count, 'place')}{f', with {against}' if against else ''}"
    )


def _print_targets() -> None:
    from rich.table import Table

    from quant.recipes.targets import TARGETS

    out = _console()
    for target in TARGETS.values():
        table = Table(title=f"{target.name}: {target.description}", title_justify="left", min_width=60)
        for column in ("weight", "input", "runs", "layers", "note"):
            table.add_column(column, overflow="fold")
        for pair in target.pairs:
            table.add_row(pair.weight, pair.activation or "16 bit", pair.runs, ", ".join(pair.kinds), pair.note)
        out.print(table)
        out.print(f"KV cache: {', '.join((*target.kv_cache, '16 bit'))}. From: {target.source}\n")


def _console() -> Console:
    """Standard output; wide where it goes into a file or a pipe, so that no cell is broken there."""
    from rich.console import Console

    out = Console(markup=False, highlight=False)
    return out if out.is_terminal else Console(markup=False, highlight=False, width=240)
