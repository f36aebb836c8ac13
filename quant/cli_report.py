"""`quant report`: write a checkpoint's report anew, with the receipt of an export in it."""

from __future__ import annotations

import json
from pathlib import Path

import click

from quant.cli_base import DEBUG, Command


@click.command("report", cls=Command)
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--receipt", "receipt_file", type=click.Path(path_type=Path), help="Receipt that `quant export` wrote.")
@click.option("--out", type=click.Path(path_type=Path), help="HTML file; by default report.html in DIRECTORY.")
@DEBUG
def report_command(directory: Path, receipt_file: Path | None, out: Path | None, debug: bool) -> None:
    """Write the HTML report of a checkpoint again from its report.json and plan.json.

    With --receipt, report.json takes the receipt up, and the page shows every layer at every stage of the export.
    """
    from quant.calibration.sensitivity import write_atomically
    from quant.errors import UserError
    from quant.recipes.plan import Plan
    from quant.report import Receipt, Report, render_html

    for name in ("report.json", "plan.json"):
        if not (directory / name).is_file():
            raise UserError(f"{directory}: no {name}; pass a directory that `quantize --out` wrote")
    report, plan = Report.load(directory / "report.json"), Plan.load(directory / "plan.json")
    if receipt_file is not None:
        try:
            fields = json.loads(receipt_file.read_text(encoding="utf-8"))
            receipt = Receipt.from_dict(fields)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(f"{receipt_file}: not a receipt of `quant export`: {error}") from None
        strangers = [layer.name for layer in receipt.layers if layer.name not in plan.by_name]
        if fields.get("plan") not in (None, plan.digest()) or strangers:
            raise UserError(f"{receipt_file}: the receipt of another plan than {directory / 'plan.json'}")
        report.receipt = receipt
        write_atomically(directory / "report.json", json.dumps(report.to_dict(), indent=1, ensure_ascii=False) + "\n")
    page = out or directory / "report.html"
    write_atomically(page, render_html(report, plan))
    click.echo(f"written to {page}", err=True)
