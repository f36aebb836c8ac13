"""The command `quant check` checks a checkpoint, or a file that was exported from one, by what it is given.

A checkpoint is checked by its files, plan and tensors. Of an engine, the audit says in which precision its layers run
and whether it is what the checkpoint becomes; with `--source`, any exported file runs next to its checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quant.base.atomic import temporary_directory
from quant.base.errors import UserError, counted, printable, quoted
from quant.base.json_files import typed
from quant.cli.command import COUNT, DEVICE, JSON, PATH, QUIET, REVISION, TRUST_CODE, Command, print_json
from quant.cli.console import page, print_table, stages, status
from quant.models.files import find_checkpoint, is_export
from quant.recipes.plan import PLAN_FILE, Plan

if TYPE_CHECKING:
    from quant.export.checkpoint.runtime_check import RuntimeCheck
    from quant.export.engines.check_engine import EngineCheck
    from quant.export.tensorrt.audit import AuditRow

# The options of each kind of target, besides --source, --trust-remote-code, --revision, --quiet and --json.
_OPTIONS = {
    "a checkpoint": ("model_factory", "runtime", "engine"),
    "an exported file with --source": ("max_new_tokens", "device", "rebuild"),
    "an engine without --source": (
        "plan_file", "checkpoint", "model_factory", "rebuild", "attention", "allow_fallback",
    ),
    "a GGUF file": (),
}  # fmt: skip


@click.command("check", cls=Command)
@click.argument("directory", metavar="TARGET")
@click.option("--source", metavar="MODEL", help="What TARGET was made from: the original model of a checkpoint, whose "
              "tensors, config and files outside the plan must be in it as they are; or the checkpoint of an exported "
              "file, which then runs next to it.")  # fmt: skip
@click.option("--model-factory", metavar="FILE.py:FUNCTION",
              help="Function that builds the module of a checkpoint without config.json.")  # fmt: skip
@click.option(
    "--runtime",
    type=click.Choice(["vllm", "transformers"]),
    help="Also load the checkpoint in this runtime, as installed here, and hold each layer against quant.load.",
)
@click.option("--engine", metavar="JSON", help="With --runtime vllm: further arguments of vllm.LLM, as JSON.")
@click.option("--plan", "plan_file", type=PATH,
              help="Plan that the engine was built from.  [default: that of --checkpoint; without both, the layers are "
              "listed and the audit cannot fail]")  # fmt: skip
@click.option("--checkpoint", type=click.Path(path_type=Path, exists=True, file_okay=False),
              help="Checkpoint that the engine must have been built from; nothing runs.  [default: --plan's directory, "
              "if that is one]")  # fmt: skip
@click.option("--rebuild/--no-rebuild", default=None, help="Build the engine again from the checkpoint, and compare "
              "programs and constants; without it, only the graph that was built.  [default: where the TensorRT-RTX "
              "that built it is installed and, with --source, the engine cannot run]")  # fmt: skip
@click.option("--attention", type=click.Choice(["fp8", "half"]), help="Precision that attention must run in.")
@click.option("--allow-fallback", is_flag=True, help="List layers that do not run as planned, and succeed.")
@click.option("--max-new-tokens", type=COUNT, default=64,
              help="With --source: tokens of an exported file that are compared in each row.")  # fmt: skip
@DEVICE
@TRUST_CODE
@REVISION
@QUIET
@JSON
def check_command(directory: str, **options: Any) -> None:
    """Check TARGET: a quantized checkpoint, or what `quant export` made of one.

    \b
      quant check MODEL-nvfp4 --source MODEL
      quant check MODEL.engine --source MODEL-nvfp4

    A checkpoint: hashes, plan, tensors, shared scales, and a forward pass. Each finding is one line. With --source, the
    checkpoint of any tool is compared with its original model; expected differences are shown with their reason. With
    --runtime, a table shows the kernel and the largest error of each kind of layer.

    An engine of TensorRT: the precision of GEMMs and attentions. With --checkpoint, that is exported again, and every
    module of the engine's graph must be the same; then it is built again, and the programs and constants must be the
    same. That takes no GPU, and the last rows say what was compared.

    With --source, an engine, an ONNX file, a directory of `quant export --to onnx` or a .pt2 of AOTInductor reads
    prompts and decodes next to quant.load; tokens, logits and times are compared. An ONNX file must also have the graph
    that the checkpoint is exported as. An engine needs the GPU that it was built for. Without it, everything that its
    file shows is checked. A GGUF file must have the fields and tensors of the checkpoint, byte for byte.

    A finding or difference ends the command with exit code 2.
    """  # noqa: D301  (a backspace, after which click keeps the lines of a paragraph)
    path, source = Path(directory), options.pop("source")
    is_gguf = path.suffix == ".gguf" and path.is_file()
    if is_gguf and source is None:
        measured = f"quant evaluate {quoted(directory)} --text FILE --baseline MODEL"
        raise UserError(
            f"{directory}: name the checkpoint that it was exported from with --source; any GGUF file is measured by "
            f"`{measured}`"
        )
    exported = path.is_file() or is_export(path)
    if path.suffix in (".safetensors", ".json") or (path.is_dir() and not exported):
        from quant.export.checkpoint.load import check_checkpoint

        check_checkpoint(path)
    if exported and source is None and (path.is_dir() or path.suffix in (".onnx", ".pt2")):
        raise UserError(f"{directory}: name the checkpoint that it was exported from with --source")
    if exported and source is not None and (find_checkpoint(source) / "config.json").is_file():
        from quant.export.checkpoint.load import is_checkpoint

        if not is_checkpoint(find_checkpoint(source)):
            way_out = f"name the checkpoint that {directory} was exported from"
            raise UserError(f"--source {source} is not quantized: {way_out}")
    kind = list(_OPTIONS)[3 if is_gguf else 0 if not exported else 1 if source is not None else 2]
    foreign = {name for names in _OPTIONS.values() for name in names} - set(_OPTIONS[kind])
    ctx = click.get_current_context()
    for parameter in ctx.command.params:
        is_given = ctx.get_parameter_source(str(parameter.name)) is click.core.ParameterSource.COMMANDLINE
        if parameter.name in foreign and is_given:
            raise UserError(f"{parameter.opts[0]} means nothing here: {directory} is {kind}; leave it out")
    own = {name: options[name] for name in (*_OPTIONS[kind], "quiet", "as_json")}
    if not exported:
        _verify(ctx, directory, source, **own)
    elif is_gguf:
        _compare_gguf(ctx, path, str(source), **own)
    elif source is not None:
        _run_export(path, source, unsafe_load=options["unsafe_load"], **own)
    else:
        _audit(path, **own)


def _compare_gguf(ctx: click.Context, path: Path, source: str, *, quiet: bool, as_json: bool) -> None:
    from quant.export.export_model import export_model
    from quant.export.gguf.export_gguf import compare_gguf

    with status(f"exporting {source} again", quiet or as_json), temporary_directory(path) as folder:
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # told when the file was written
            export_model(source, "gguf", folder / path.name)
        count, findings = compare_gguf(path, folder / path.name)
    if as_json:
        print_json({"passed": not findings, "compared": count, "findings": findings})
    else:
        for finding in findings:
            click.echo(printable(finding))
        if not quiet:
            click.echo(f"{counted(len(findings), 'finding')} in {count} fields and tensors", err=True)
    if findings:
        ctx.exit(2)


def _verify(
    ctx: click.Context, directory: str, source: str | None, *, model_factory: str | None, runtime: str | None,
    engine: str | None, quiet: bool, as_json: bool,
) -> None:  # fmt: skip
    from quant.export.checkpoint.verify import verify
    from quant.models.state_dict import call_factory

    try:
        arguments = typed(dict[str, Any], json.loads(engine or "{}"), "--engine")
    except ValueError as error:
        what = str(error).removeprefix("--engine: ")
        raise UserError(f"--engine: no JSON object of arguments, such as '{{\"seed\": 1}}' ({what})") from None
    with status(f"verifying {directory}", quiet or as_json):
        model = call_factory(model_factory) if model_factory else None
        result = verify(directory, model, source=source, runtime=runtime, engine=arguments)
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
            # A check that a damaged file stopped has a finding, too.
            made = dict.fromkeys((*(finding.check for finding in result.findings), *result.checked))
            click.echo(f"{counted(len(result.findings), 'finding')} in {', '.join(made)}", err=True)
    # The same code as other expected errors, so that scripts need to know one.
    if result.findings:
        ctx.exit(2)


def _show_runtime(check: RuntimeCheck) -> None:
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


def _audit(
    engine: Path, *, plan_file: Path | None, checkpoint: Path | None, model_factory: str | None, rebuild: bool | None,
    attention: str | None, allow_fallback: bool, quiet: bool, as_json: bool,
) -> None:  # fmt: skip
    from quant.export.checkpoint.load import check_checkpoint, describe, load
    from quant.export.tensorrt.audit import audit, failures, fallback_message
    from quant.export.tensorrt.engine_file import receipt_path
    from quant.export.tensorrt.rebuild import audit_with_checkpoint
    from quant.export.tensorrt.tensorrt_session import receipt_of
    from quant.models.state_dict import call_factory

    if plan_file is None and checkpoint is not None and (checkpoint / PLAN_FILE).is_file():
        plan_file = checkpoint
    plan_file = Plan.file(plan_file) if plan_file else None
    plan = Plan.load(plan_file) if plan_file else None
    receipt = receipt_of(engine) if receipt_path(engine).is_file() else {}
    # A receipt without a digest cannot contradict the plan.
    if plan is not None and receipt.get("plan") not in (None, plan.digest()):
        raise UserError(f"{engine} was built from another plan than {plan_file}: their digests differ")
    # A plan next to safetensors files belongs to a checkpoint; without them it says nothing about codes.
    if checkpoint is None and plan_file is not None and any(plan_file.parent.glob("*.safetensors")):
        checkpoint = plan_file.parent
    if checkpoint is None:
        if rebuild:
            raise UserError("--rebuild: name the checkpoint that the engine was exported from with --checkpoint")
        if plan is not None and not quiet:
            click.echo("compared with the plan alone: name the checkpoint with --checkpoint", err=True)
        findings = audit(engine, plan, attention=attention)
    else:
        check_checkpoint(checkpoint)
        model = load(checkpoint, call_factory(model_factory) if model_factory else None)  # its files are mapped
        own_plan = describe(checkpoint)[0] if plan is None else plan
        with stages(quiet or as_json) as progress:
            findings = audit_with_checkpoint(
                engine, model, own_plan, attention=attention, rebuild=rebuild, progress=progress
            )
    if as_json:
        print_json([dataclasses.asdict(finding) for finding in findings])
    elif not quiet:
        _print_audit(findings)
    problems = failures(findings)
    if problems and not allow_fallback:
        raise UserError(f"{engine}: {fallback_message(problems)}")


def _print_audit(findings: list[AuditRow]) -> None:
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


def _run_export(
    path: Path, source: str, *, max_new_tokens: int, device: str, unsafe_load: bool, rebuild: bool | None, quiet: bool,
    as_json: bool,
) -> None:  # fmt: skip
    from quant.export.engines.check_engine import check_engine

    with status(f"checking {path}", quiet or as_json):
        checked = check_engine(
            path, find_checkpoint(source), new=max_new_tokens, device=device, rebuild=rebuild, unsafe_load=unsafe_load
        )
    if as_json:
        print_json(checked.to_dict())
    elif not quiet:
        if checked.audit:
            _print_audit(checked.audit)
        _print_check(checked)
    if checked.passed is False:
        raise UserError(f"{path} does not compute what {source} computes; see the table")


def _print_check(checked: EngineCheck) -> None:
    from quant.export.engines.check_engine import LEAST_AGREEMENT, NEAREST, noise_limits

    rows = list(checked.facts)
    if checked.backend:
        total = checked.steps * len(checked.prompts)
        first = checked.first_difference
        where = "" if first is None else f"; the first other one: row {first[0] + 1}, token {first[1] + 1}"
        rows += [
            ("runs on", f"{checked.backend}, in {checked.dtype}"),
            ("prompts", f"{', '.join(map(str, checked.prompts))} tokens"),
            ("likeliest tokens", f"{checked.agreeing} of {total} the same{where}"),
            ("near ties", f"{checked.near} of {total}: each one's token is among the other's {NEAREST} likeliest"),
            ("logits", f"relative difference {checked.error:.1e}, mean KL {checked.kl:.1e} nats"),
        ]
        if checked.noise_kl is not None and checked.noise_agreeing is not None:
            most_kl, least_agreement = noise_limits(checked.noise_kl, checked.noise_agreeing / total)
            # Inputs in few bits turn the last bit of a sum into another code, so the reference is no exact one.
            rows += [
                (
                    "quant.load itself",
                    f"{checked.noise_agreeing} of {total} likeliest tokens the same, mean KL {checked.noise_kl:.1e} "
                    "nats, if inputs of layers move by one rounding",
                ),
                (
                    "limits",
                    f"{least_agreement:.0%} of the tokens the same and {LEAST_AGREEMENT:.0%} near ties, mean KL "
                    f"{most_kl:.1e} nats",
                ),
            ]
        for index, part in enumerate(("prefill", "decoding step")):
            engine, reference = checked.engine_ms[index], checked.reference_ms[index]
            timed = "all rows" if index == 0 else "one row"
            rows.append((part, f"{engine:.1f} ms for all rows; quant.load: {reference:.1f} ms for {timed}"))
    rows.append(("result", {True: "passed", False: "failed", None: "not run"}[checked.passed]))
    print_table({"!check": [name for name, _ in rows], "result": [finding for _, finding in rows]})
