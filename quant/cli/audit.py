"""`quant audit`: what a built engine really runs, layer by layer, against what its plan says."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quant.cli.base import DEBUG, JSON, QUIET, Command
from quant.errors import UserError

if TYPE_CHECKING:
    from quant.export.engine.audit import Finding


@click.command("audit", cls=Command)
@click.argument("engine", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option(
    "--plan",
    "plan_file",
    type=click.Path(path_type=Path),
    help="The plan that the engine was built from; without one, what runs is listed and nothing can fail.",
)
@click.option("--attention", type=click.Choice(["fp8", "half"]), help="Precision that attention must be found in.")
@click.option("--allow-fallback", is_flag=True, help="Name the layers that do not run as planned, and pass.")
@QUIET
@JSON
@DEBUG
def audit_command(
    engine: Path,
    plan_file: Path | None,
    attention: str | None,
    allow_fallback: bool,
    quiet: bool,
    as_json: bool,
    debug: bool,
) -> None:
    """Which GEMMs and attentions of ENGINE run in FP4, FP8, INT8 or half precision, read from the file. Needs no GPU.

    A layer that the plan quantizes and that runs in half precision ends in exit code 2, with its name.
    """
    from quant.export.engine.audit import audit, failures
    from quant.export.engine.build import fallback_message, receipt_path
    from quant.recipes.plan import Plan

    plan = Plan.load(plan_file) if plan_file else None
    receipt = _read_receipt(receipt_path(engine))
    if plan is not None and receipt.get("plan") not in (None, plan.digest()):
        raise UserError(f"{engine} was built from another plan than {plan_file}: their digests differ")
    known = receipt.get("engine", {})
    findings = audit(
        engine,
        plan,
        attention=attention,
        attention_nodes=known.get("attention_nodes", ()),
        exported=known.get("layers") or None,
    )
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1))
    elif not quiet:
        print_findings(findings)
    problems = failures(findings)
    if problems and not allow_fallback:
        raise UserError(f"{engine}: {fallback_message(problems)}")


def print_findings(findings: list[Finding]) -> None:
    """A table of the audit, and its sum."""
    from rich.console import Console
    from rich.table import Table

    from quant.export.engine.audit import UNPLANNED

    table = Table("layer", "planned", "found", "")
    for finding in findings:
        table.add_row(finding.name, finding.planned, finding.found, "" if finding.passed else "differs")
    out = Console(markup=False)
    out.print(table)
    planned = [finding for finding in findings if finding.planned != UNPLANNED]
    passed = sum(finding.passed for finding in planned)
    out.print(f"{passed} of {len(planned)} as planned" if planned else f"{len(findings)} found; --plan compares them")


def _read_receipt(path: Path) -> dict[str, Any]:
    """The receipt beside an engine; empty where it has none."""
    if not path.is_file():
        return {}
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not a receipt ({error}); delete it to audit the engine without it") from error
    return fields if isinstance(fields, dict) else {}
