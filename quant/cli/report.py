"""`quant report`: write a checkpoint's report anew, with the receipt of an export in it."""

from __future__ import annotations

import json
from pathlib import Path

import click

from quant.cli.base import DEBUG, Command


@click.command("report", cls=Command)
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--receipt", "receipt_file", type=click.Path(path_type=Path), help="Receipt that `quant export` wrote.")
@click.option("--out", type=click.Path(path_type=Path), help="HTML file; by default report.html in DIRECTORY.")
@DEBUG
def report_command(directory: Path, receipt_file: Path | None, out: Path | None, debug: bool) -> None:
    """Write the HTML report of a checkpoint again from its report.json and plan.json.

    With --receipt, report.json takes the receipt up, and the page shows every layer at every stage of the export.
    """
    from quant.errors import UserError
    from quant.report import rewrite

    fields = None
    if receipt_file is not None:
        try:
            fields = json.loads(receipt_file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{receipt_file}: not a receipt of `quant export`: {error}") from None
    page = rewrite(directory, fields, out=out, source=str(receipt_file))
    click.echo(f"written to {page}", err=True)
