"""The commands `quant verify` and `audit` check files: a checkpoint, and the precisions of an engine."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quant.base.errors import UserError, counted, printable
from quant.base.json_files import typed
from quant.base.json_files import read_json
from quant.cli.command import JSON, QUIET, REVISION, TRUST, Command, print_json
from quant.cli.console import page, stages, status
from quant.cli.tables import print_table
from quant.recipes.plan import PLAN_FILE, Plan

if TYPE_CHECKING:
    from torch import nn

    from quant.export.checkpoint.runtime_check import RuntimeCheck
    from quant.export.tensorrt.audit import AuditRow


@click.command("verify", cls=Command)
@click.argument("directory")
@click.option(
    "--model-factory",
    metavar="PACKAGE.MODULE:FUNCTION",
    help="Function that builds the module of a checkpoint without config.json.",
)
@click.option(
    "--source",
    metavar="MODEL",
    help="Original model, a directory or a name on the hub: its tensors, config and files outside the plan must be in "
    "the checkpoint as they are.",
)
@click.option(
    "--runtime",
    type=click.Choice(["vllm", "transformers"]),
    help="Also load the checkpoint in this runtime, as installed here, and hold each layer against quant.load.",
)
@click.option("--engine", metavar="JSON", help="With --runtime vllm: further arguments of vllm.LLM, as JSON.")
@TRUST
@REVISION
@QUIET
@JSON
@click.pass_context
def verify_command(
    ctx: click.Context,
    directory: str,
    model_factory: str | None,
    source: str | None,
    runtime: str | None,
    engine: str | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Check a quantized checkpoint: hashes, plan, tensors, shared scales, and a forward pass.

    Each finding is one line. If there is any, the command ends with exit code 2. With --source, the checkpoint of any
    tool is compared with its original model; expected differences are shown with their reason. With --runtime, a table
    shows the kernel and the largest error of each kind of layer, and a kind that is wrong is a finding.
    """
    from quant.export.checkpoint.verify import verify
    from quant.models.state_dict import call_factory

    with status(f"verifying {directory}", quiet or as_json):
        model = call_factory(model_factory) if model_factory else None
        result = verify(directory, model, source=source, runtime=runtime, engine=_engine(engine))
    if as_json:
        print_json({"passed": not result.findings, **result.to_dict()})
    else:
        for finding in result.findings:
            click.echo(printable(f"{finding.check}: {finding.what}"))
        if not quiet:
            for line in result.explained:
                click.echo(printable(f"not as in the source: {line}"), err=True)
            # Checks that were skipped for one reason share a line; on standard error, because they are not findings.
            for skip_reason in dict.fromkeys(result.skipped.values()):
                names = ", ".join(name for name, reason in result.skipped.items() if reason == skip_reason)
                click.echo(printable(f"{names}: not checked, {skip_reason}"), err=True)
            if result.runtime is not None:
                _show_runtime(result.runtime)
            click.echo(f"{counted(len(result.findings), 'finding')} in {', '.join(result.checked)}", err=True)
    # The same code as other expected errors, so that scripts need to know one.
    if result.findings:
        ctx.exit(2)


def _engine(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        engine: dict[str, Any] = typed(dict[str, Any], json.loads(text), "--engine")
        return engine
    except ValueError as error:
        raise UserError(f"--engine: no JSON object of arguments ({error})") from None


def _show_runtime(check: RuntimeCheck) -> None:
    """Prints a row for each kind of layer and kernel, and how far the whole model agrees."""
    rows: dict[tuple[str, str, str], list[float | None]] = {}
    for layer in check.layers:
        rows.setdefault((layer.kind, layer.kernel, layer.inputs), []).append(layer.error)
    measured = [[error for error in errors if error is not None] for errors in rows.values()]
    columns = {
        "!layer": [kind for kind, _, _ in rows],
        "kernel": [kernel for _, kernel, _ in rows],
        "inputs": [inputs for _, _, inputs in rows],
        "!>layers": [f"{len(errors)}" for errors in rows.values()],
        "!>largest error": [f"{max(errors):.2%}" if errors else "not compared" for errors in measured],
    }
    print_table(columns, drops=("inputs", "kernel"))
    attention = f"; attention {check.attention}, KV cache {check.kv_cache}" if check.attention else ""
    click.echo(
        f"{check.runtime}: log-probabilities differ by {check.logprob_difference:.3f} nat on average, "
        f"{check.top_1:.1%} of the likeliest and {check.greedy:.1%} of greedy tokens are equal{attention}"
    )
    if check.noise is not None:
        click.echo(
            f"quant.load itself: log-probabilities differ by {check.noise:.3f} nat if inputs of layers move by one "
            "rounding"
        )


@click.command("audit", cls=Command)
@click.argument("engine", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option(
    "--plan",
    "plan_file",
    type=click.Path(path_type=Path),
    help="Plan that the engine was built from.  [default: that of --checkpoint; without both, the layers are listed "
    "and the audit cannot fail]",
)
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Checkpoint whose tensors the engine must hold.  [default: the directory of --plan, if it is one]",
)
@click.option(
    "--model-factory",
    metavar="PACKAGE.MODULE:FUNCTION",
    help="Function that builds the module of a checkpoint without config.json.",
)
@click.option(
    "--rebuild",
    is_flag=True,
    help="Also build the engine again from the checkpoint, and compare kernel by kernel how they are wired.",
)
@click.option("--attention", type=click.Choice(["fp8", "half"]), help="Precision that attention must run in.")
@click.option("--allow-fallback", is_flag=True, help="List layers that do not run as planned, and succeed.")
@QUIET
@JSON
def audit_command(
    engine: Path,
    plan_file: Path | None,
    checkpoint: Path | None,
    model_factory: str | None,
    rebuild: bool,
    attention: str | None,
    allow_fallback: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Check in which precision GEMMs and attentions of ENGINE run, and that it holds the tensors of a checkpoint.

    The audit reads the file and needs no GPU. It ends with exit code 2 and names the layer if one that the plan
    quantizes runs in half precision, if its codes, scales, bias or input scale are not those of the checkpoint, or
    another module's weights, if blocks run in another order, or if the engine ignores one of its inputs.
    """
    from quant.export.tensorrt.audit import audit, failures, fallback_message, receipt_path

    if plan_file is None and checkpoint is not None and (checkpoint / PLAN_FILE).is_file():
        plan_file = checkpoint / PLAN_FILE
    plan = Plan.load(plan_file) if plan_file else None
    receipt = _read_receipt(receipt_path(engine))
    # A receipt without a digest cannot contradict the plan.
    if plan is not None and receipt.get("plan") not in (None, plan.digest()):
        raise UserError(f"{engine} was built from another plan than {plan_file}: their digests differ")
    # A plan next to safetensors files belongs to a checkpoint; without them it says nothing about codes.
    if checkpoint is None and plan_file is not None and any(plan_file.parent.glob("*.safetensors")):
        checkpoint = plan_file.parent
    if checkpoint is None and plan is not None and not quiet:
        click.echo("the tensors were not compared: name the checkpoint with --checkpoint", err=True)
    model = _load(checkpoint, model_factory)
    findings = audit(engine, plan, attention=attention, model=model)
    if rebuild:
        findings += _rebuilt(engine, model, checkpoint, quiet or as_json)
    if as_json:
        print_json([dataclasses.asdict(finding) for finding in findings])
    elif not quiet:
        print_findings(findings)
    problems = failures(findings)
    if problems and not allow_fallback:
        raise UserError(f"{engine}: {fallback_message(problems)}")


def _rebuilt(engine: Path, model: nn.Module | None, checkpoint: Path | None, quiet: bool) -> list[AuditRow]:
    """Compares an engine with one that is built again from its checkpoint."""
    from quant.export.checkpoint.load import describe
    from quant.export.tensorrt.rebuild import rebuilt_findings

    if model is None or checkpoint is None:
        raise UserError("--rebuild: name the checkpoint that the engine was exported from with --checkpoint")
    plan = describe(checkpoint)[0] if (checkpoint / PLAN_FILE).is_file() else None
    with stages(quiet) as progress:
        return rebuilt_findings(engine, model, plan, progress)


def print_findings(findings: list[AuditRow]) -> None:
    """Prints a table of the audit, and its totals."""
    from quant.export.tensorrt.audit import UNPLANNED

    columns = {
        "!layer": [finding.name for finding in findings],
        "planned": [finding.planned for finding in findings],
        "found": [finding.found for finding in findings],
        "!": ["" if finding.passed else "differs" for finding in findings],
    }
    print_table(columns)
    out = page()
    planned = [finding for finding in findings if finding.planned != UNPLANNED]
    passed = sum(finding.passed for finding in planned)
    out.print(f"{passed} of {len(planned)} as planned" if planned else f"{len(findings)} found; --plan compares them")


def _load(checkpoint: Path | None, model_factory: str | None) -> nn.Module | None:
    """Returns the model of a checkpoint, its files mapped."""
    if checkpoint is None:
        return None
    from quant.export.checkpoint.load import is_checkpoint, load, no_checkpoint
    from quant.models.state_dict import call_factory

    if not is_checkpoint(checkpoint):
        raise no_checkpoint(checkpoint)
    return load(checkpoint, call_factory(model_factory) if model_factory else None)


def _read_receipt(path: Path) -> dict[str, Any]:
    """Returns the receipt next to an engine; empty if there is none."""
    if not path.is_file():
        return {}
    try:
        return read_json(path, "a receipt of an engine", _checked)
    except ValueError as error:
        raise UserError(f"{error}; delete it to audit the engine without it") from None


def _checked(document: Any) -> dict[str, Any]:
    fields: dict[str, Any] = typed(dict[str, Any], document, "receipt")
    typed(str | None, fields.get("plan"), "plan")
    return fields
