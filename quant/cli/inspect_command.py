"""The commands `quant inspect` and `report` show a checkpoint, `formats` and `solvers` what recipes can name."""

from pathlib import Path
from typing import Any

import click

from quant.base.atomic import write_atomically
from quant.base.errors import UserError
from quant.base.json_files import read_json
from quant.cli.command import JSON, PATH, REVISION, TRUST, Command, echo, print_json
from quant.cli.completion import MODELS
from quant.cli.console import print_plan, print_table
from quant.export.checkpoint.files.directory import check_apart, saved_report
from quant.formats.format import FORMATS
from quant.models.files import find_checkpoint
from quant.recipes.plan import PLAN_FILE, Plan
from quant.recipes.recipe import KEEP, presets
from quant.recipes.solver_names import EFFORTS, METHODS, ROUNDINGS, parse_solver, solver_of

_SOLVER_NOTE = (
    "Parts are joined by + in the order scaling+rotation+lowrank+residual+rounding+autoround, such as awq:merge+gptq; "
    "a scaling alone is followed by mse, other parts by gptq. work: elementwise operations a weight, those of rtn "
    "being 1. --json has the formats of each, and its passes of the calibration text through each block."
)


@click.command("inspect", cls=Command)
@click.argument("directory", shell_complete=MODELS)
@TRUST
@REVISION
@JSON
def inspect_command(directory: str, as_json: bool) -> None:
    """List the layers of a quantized checkpoint with format, shape, bits, SNR and reason, and totals."""
    checkpoint = find_checkpoint(directory)
    if (checkpoint / PLAN_FILE).is_file():
        plan, report = Plan.load(checkpoint / PLAN_FILE), saved_report(checkpoint)
    else:
        # A checkpoint of another tool has no plan: one is read off its config and tensors, which takes torch.
        from quant.export.checkpoint.load import describe

        plan, report = describe(checkpoint)
    if as_json:
        print_json({"plan": plan.to_dict(), "report": report})
    else:
        print_plan(plan, report=report)


@click.command("report", cls=Command)
@click.argument("directory", type=PATH)
@click.argument("other", type=PATH, required=False)
@click.option("--receipt", "receipt_file", type=PATH, help="Receipt that `quant export` wrote.")
@click.option("--out", type=PATH, help="HTML file.  [default: report.html in DIRECTORY; comparison.html here]")
def report_command(directory: Path, other: Path | None, receipt_file: Path | None, out: Path | None) -> None:
    """Write the HTML report of a checkpoint again from its report.json and plan.json, or compare it with OTHER.

    With --receipt, the receipt is added to report.json, and the page shows every layer at every stage of the export.
    With OTHER, a second run on the same model, a page shows both side by side, and the totals are printed.
    """
    if out is not None and out.is_dir():
        raise UserError(f"{out} is a directory; name a file with --out")
    if other is not None:
        if receipt_file is not None:
            raise UserError("--receipt belongs to one checkpoint; leave it out to compare two")
        _compare(directory, other, out or Path("comparison.html"))
        return
    from quant.report.report import rewrite

    if out is not None:
        # The page may replace its own predecessor in the checkpoint, and nothing else there.
        check_apart(out, receipt_file, None if out.resolve() == directory.resolve() / "report.html" else directory)
    fields = None
    if receipt_file is not None:
        fields = read_json(receipt_file, "a receipt of `quant export`", lambda receipt: receipt)
    written = rewrite(directory, fields, out=out, source=str(receipt_file))
    echo(f"written to {written}", err=True)


def _compare(first: Path, second: Path, out: Path) -> None:
    from quant.report.comparison import compare_html, read_runs, totals

    check_apart(out, first, second)
    runs = read_runs(first, second)
    label, *columns = zip(*totals(*runs), strict=True)
    names = ("", *(f"!>{run.name}" for run in runs), "!>difference")
    print_table(dict(zip(names, (label, *columns), strict=True)), drops=("difference",))
    write_atomically(out, compare_html(*runs))
    echo(f"written to {out}", err=True)


@click.command("formats", cls=Command)
@JSON
def formats_command(as_json: bool) -> None:
    """List the presets for --format, and the number formats that recipes and plans can name."""
    tables: dict[str, dict[str, dict[str, Any]]] = {
        "presets": {
            name: {"weight": r.weight, "activation": r.activation, "solver": r.solver, "description": r.description}
            for name, r in presets().items()
        },
        "formats": {
            f.name: {
                "element": f.element.name, "scale": f.scale.name, "block": list(f.block),
                "global_scale": f.global_scale, "bits_per_weight": f.bits_per_weight(),
            }
            for f in FORMATS.values()
        },
    }  # fmt: skip
    if as_json:
        print_json(tables)
        return
    for title, first, rows in (
        ("Presets (--format)", "preset", tables["presets"]),
        ("Number formats (recipes and plans)", "format", tables["formats"]),
    ):
        columns = {f"!{first}": list(rows)}
        for field in next(iter(rows.values())):
            name = field.replace("_", " ")
            mark = {"description": "", "bits_per_weight": "!>"}.get(field, "!")
            columns[mark + name] = [_in_words(field, fields[field]) for fields in rows.values()]
        print_table(columns, title=title, drops=("solver", "activation", "global scale", "scale"))


def _in_words(field: str, value: Any) -> str:
    if field == "block":
        return {(0, 0): "tensor", (1, 0): "row"}.get(tuple(value), "×".join(map(str, value)))
    if field == "solver":
        return value or "by --effort"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return "16 bit" if value == KEEP else str(value)


@click.command("solvers", cls=Command)
@JSON
def solvers_command(as_json: bool) -> None:
    """List the solvers for --solver, with what each needs and costs."""
    rows = {name: _solver_facts(name) for name in METHODS}
    if as_json:
        print_json(rows)
        return
    for title, names in (
        ("Roundings (--solver)", ROUNDINGS),
        ("Parts that are joined to a rounding", tuple(name for name in METHODS if name not in ROUNDINGS)),
    ):
        facts = [rows[name] for name in names]
        formats = [each["formats"] for each in facts]
        counts = ["" if f is None else f[0] if len(f) == 1 else f"{len(f)} formats" for f in formats]
        limited = [f"; for {count}" if count else "" for count in counts]
        columns = {
            "!solver": names,
            "!needs": [each["needs"] for each in facts],
            "!>work": [f"{each['work']:g}" for each in facts],
            "!effort": [", ".join(map(str, each["effort"])) for each in facts],
            "method": [each["method"] + limits for each, limits in zip(facts, limited, strict=True)],
        }
        print_table(columns, title=title, drops=("effort", "needs"))
    echo(_SOLVER_NOTE)


def _solver_facts(name: str) -> dict[str, Any]:
    """Returns a row of the table; `formats` is None for a part that takes all."""
    from quant.calibration.solvers.registry import get_pipeline
    from quant.calibration.walk.expected_time import operations, passes

    pipeline = get_pipeline(name)
    formats = [format.name for format in FORMATS.values() if pipeline.rounding.supports(format)]
    # The efforts of presets with inputs in 16, 8 and 4 bits.
    by_effort = {effort: [parse_solver(solver_of(effort, i)) for i in (KEEP, "fp8", "nvfp4")] for effort in EFFORTS}
    return {
        "needs": ("text, gradients" if pipeline.rounding.two_sided else "text") if pipeline.needs_data else "nothing",
        "work": round(operations(pipeline) / operations(get_pipeline("rtn")), 1),
        "passes": passes(pipeline, rows=1, on_gpu=False),
        "effort": [e for e, specs in by_effort.items() if any(name in (s.rounding, *s.transforms) for s in specs)],
        "formats": None if len(formats) == len(FORMATS) else formats,
        "method": METHODS[name],
    }
