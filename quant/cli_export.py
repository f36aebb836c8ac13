"""`quant export`: a quantized checkpoint as something that a runtime runs.

    onnx              model.onnx, and decode.onnx with --decode: checked, every layer compared with PyTorch
    tensorrt          an engine, built and audited; the ONNX file on the way is checked like the above
    aoti              a .pt2 package of AOTInductor
    torch-tensorrt    the module lowered through torch-tensorrt's quantize ops

Each has one function in `EXPORTERS`, which takes a `Job` and gives what is to be reported. What it needs is imported
there, so that one missing package stops one kind of export. Nothing appears under the destination's name before
everything is written and compared.
"""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quant.cli_base import DEBUG, JSON, QUIET, Command
from quant.errors import UserError, counted

if TYPE_CHECKING:
    from torch import nn

    from quant.calibration.kv_cache import AttentionScales
    from quant.export.onnx_decoder import GraphInput
    from quant.formats.tensor import BlockScaledTensor
    from quant.recipes.plan import Plan

RECEIPT_FILE = "receipt.json"
_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "int64": "int64"}


@dataclass(frozen=True)
class Job:
    """A loaded checkpoint and the options of `quant export`, as its help describes them."""

    directory: Path
    model: nn.Module
    plan: Plan | None
    out: Path
    overwrite: bool
    shapes: tuple[str, ...]
    inputs: Mapping[str, GraphInput] | None
    attention: str
    attention_scales: Mapping[str, AttentionScales] | None
    decode: bool
    target: str | None
    backend: str | None
    allow_fallback: bool
    progress: Callable[[str, int, int], None]

    @property
    def onnx_options(self) -> dict[str, Any]:
        """What every ONNX file of the job is written with."""
        return {
            "shapes": self.shapes or None,
            "inputs": self.inputs,
            "attention": self.attention,
            "attention_scales": self.attention_scales,
            "plan": self.plan,
        }

    def stored(self, name: str) -> BlockScaledTensor:
        """A layer's weight as the checkpoint's files hold it."""
        from quant.export.checkpoint import TensorFiles, read_layer

        assert self.plan is not None
        return read_layer(TensorFiles(self.directory), self.plan.by_name[name])[0]


def export_onnx_files(job: Job) -> dict[str, Any]:
    """`--to onnx`: a directory with the files, the plan and the receipt."""
    from quant.export.checkpoint import PLAN_FILE, new_directory
    from quant.export.onnx import export_onnx

    receipts = {}
    with new_directory(job.out, overwrite=job.overwrite) as folder:
        graphs: dict[str, dict[str, Any]] = {"model.onnx": {"cache": job.decode}}
        if job.decode:
            graphs["decode.onnx"] = {"decode": True}
        for file, options in graphs.items():
            export_onnx(job.model, folder / file, **job.onnx_options, **options)
            receipts[file] = _verified(job, folder / file)
        receipt = next(iter(receipts.values()))
        if job.plan is not None:
            job.plan.save(folder / PLAN_FILE)
        (folder / RECEIPT_FILE).write_text(json.dumps(receipt, indent=1) + "\n", encoding="utf-8")
        files = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    return {"out": str(job.out), "files": files, **receipt}


def export_tensorrt(job: Job) -> dict[str, Any]:
    """`--to tensorrt`: an engine file and its receipt beside it."""
    from quant.export.onnx import export_onnx
    from quant.export.tensorrt import export_engine

    assert job.target is not None
    _check_file(job)
    job.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{job.out.name}.", dir=job.out.parent) as folder:
        path = Path(folder) / "model.onnx"
        export_onnx(job.model, path, **job.onnx_options, decode=job.decode)
        receipt = _verified(job, path)
        return export_engine(
            path,
            job.out,
            target=job.target,
            plan=job.plan,
            shapes=job.shapes or None,
            attention=job.attention,
            allow_fallback=job.allow_fallback,
            backend=job.backend,
            progress=job.progress,
            layers=receipt["layers"],
        )


def export_aoti_package(job: Job) -> dict[str, Any]:
    """`--to aoti`: a `.pt2` package."""
    from quant.export.aoti import export_aoti
    from quant.export.onnx import dimension_ranges
    from quant.export.onnx_decoder import model_inputs

    _check_file(job)
    given = job.inputs or model_inputs(job.model, decode=False)
    dims = {name: {axis: dim for axis, dim in enumerate(x.dims) if isinstance(dim, str)} for name, x in given.items()}
    examples = {name: x.example for name, x in given.items()}
    export_aoti(
        job.model,
        job.out,
        examples,
        dims=dims,
        ranges=dimension_ranges(given, job.shapes),
        attention_scales=job.attention_scales,
    )
    return {"out": str(job.out), "files": {job.out.name: job.out.stat().st_size}, "passed": True}


def export_torch_tensorrt(job: Job) -> dict[str, Any]:
    """`--to torch-tensorrt`: the lowered module as a `.pt2` program."""
    from quant.export.onnx_decoder import model_inputs

    try:
        lower = importlib.import_module("quant.export.torch_tensorrt").lower
    except ImportError as error:
        raise UserError(f"export to torch-tensorrt is not available: {error}") from error
    _check_file(job)
    given = job.inputs or model_inputs(job.model, decode=False)
    lower(job.model, job.out, {name: x.example for name, x in given.items()})
    return {"out": str(job.out), "files": {job.out.name: job.out.stat().st_size}, "passed": True}


EXPORTERS: dict[str, Callable[[Job], dict[str, Any]]] = {
    "onnx": export_onnx_files,
    "tensorrt": export_tensorrt,
    "aoti": export_aoti_package,
    "torch-tensorrt": export_torch_tensorrt,
}


@click.command("export", cls=Command)
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--to", "kind", required=True, type=click.Choice(list(EXPORTERS)), help="What to make.")
@click.option("--out", type=click.Path(path_type=Path), help="Destination. [default: beside DIRECTORY]")
@click.option("--overwrite", is_flag=True, help="Replace what is at --out.")
@click.option(
    "--shapes",
    multiple=True,
    metavar="TEXT",
    help="Ranges of the dynamic dimensions: batch=1:1:4,sequence=32:128:512. Repeatable: a profile each.",
)
@click.option(
    "--input",
    "inputs",
    multiple=True,
    metavar="NAME:DTYPE:DIMS",
    help="An input of a module that is no transformers model: x:fp32:batch,3,224,224. Repeatable, in order.",
)
@click.option(
    "--attention",
    type=click.Choice(["native", "plugin", "none"]),
    default="native",
    show_default=True,
    help="What runs attention where the plan has it in FP8: TensorRT, our plugin, or nothing (16 bit).",
)
@click.option("--decode", is_flag=True, help="The graph of one decoding step, with the KV cache as inputs.")
@click.option("--target", help="GPU of an engine: sm89, sm120, h100, rtx5090, local, …")
@click.option("--backend", help="Insist on tensorrt_rtx or tensorrt.")
@click.option("--allow-fallback", is_flag=True, help="Pass although layers run in half precision; they are named.")
@click.option("--calib", metavar="SOURCE", help="Calibration text, for FP8 attention; as `quantize` takes it.")
@click.option("--calib-samples", default=32, show_default=True, help="Rows of calibration text.")
@click.option("--seqlen", default=512, show_default=True, help="Tokens a row.")
@click.option("--model-factory", metavar="PACKAGE.MODULE:FUNCTION", help="Builds the module, without config.json.")
@QUIET
@JSON
@DEBUG
def export_command(
    directory: Path,
    kind: str,
    out: Path | None,
    inputs: tuple[str, ...],
    calib: str | None,
    calib_samples: int,
    seqlen: int,
    model_factory: str | None,
    quiet: bool,
    as_json: bool,
    debug: bool,
    **options: Any,
) -> None:
    """Export DIRECTORY, a checkpoint that `quantize --out` wrote, to ONNX, a TensorRT engine or a package.

    Every layer of the exported file is compared with PyTorch, and a file that differs is not written. What was found
    goes into the report of DIRECTORY as well.
    """
    from quant import checkpoint, console
    from quant.report import rewrite

    quiet = quiet or as_json
    given = _parse_inputs(inputs) or None
    if kind == "tensorrt" and options["target"] is None:
        raise UserError("an engine is built for one kind of GPU: name it with --target, such as sm120, sm89 or local")
    if not checkpoint.is_checkpoint(directory):
        raise UserError(f"{directory}: no quantized checkpoint; make one: quantize MODEL --format nvfp4 --out DIR")
    out = out or directory.parent / f"{directory.name}{_SUFFIX[kind]}"
    if kind == "onnx":
        from quant.export.checkpoint import check_destination

        check_destination(out, overwrite=options["overwrite"])
    with console.status(f"loading {directory}", quiet):
        model = _load(directory, model_factory)
        plan = checkpoint.describe(directory)[0] if (directory / "plan.json").is_file() else None
    with console.stages(quiet) as progress:
        scales = None
        if plan is not None and plan.attention is not None and options["attention"] != "none":
            scales = _attention_scales(model, plan, directory, calib, calib_samples, seqlen, progress)
        job = Job(
            directory=directory,
            model=model,
            plan=plan,
            out=out,
            inputs=given,
            attention_scales=scales,
            progress=progress,
            **options,
        )
        found = EXPORTERS[kind](job)
    if "layers" in found and (directory / "report.json").is_file():
        rewrite(directory, found)
    if as_json:
        click.echo(json.dumps(found, indent=1))
    elif not quiet:
        _print(found, out)


_SUFFIX = {"onnx": "-onnx", "tensorrt": ".engine", "aoti": ".pt2", "torch-tensorrt": ".pt2"}


def _load(directory: Path, factory: str | None) -> nn.Module:
    from quant import checkpoint
    from quant.load_state import call_factory

    return checkpoint.load(directory, call_factory(factory) if factory else None)


def _attention_scales(
    model: nn.Module,
    plan: Plan,
    directory: Path,
    calib: str | None,
    samples: int,
    seqlen: int,
    progress: Callable[[str, int, int], None],
) -> Mapping[str, AttentionScales]:
    """FP8 scales of attention's operands: the plan has their format, a checkpoint has no place for the scales."""
    from quant import api
    from quant.calibration.data import calibration_rows
    from quant.calibration.kv_cache import collect_attention_scales
    from quant.load_huggingface import load_tokenizer

    if calib is None or calib == "self":
        rows = api.own_text(model, plan, progress=progress)
    else:
        rows = calibration_rows(calib, load_tokenizer(directory), samples=samples, seqlen=seqlen)
    return collect_attention_scales(
        model,
        rows,
        kv_format=plan.attention,
        attention_format=plan.attention,
        progress=lambda done, total: progress("calibrate", done, total),
    )


def _parse_inputs(texts: tuple[str, ...]) -> dict[str, GraphInput]:
    """`x:fp32:batch,3,224,224`: a name, a dtype, and dimensions, of which those with a name are dynamic."""
    import torch

    from quant.export.onnx_decoder import GraphInput

    found = {}
    for text in texts:
        name, dtype, dims = [*text.split(":"), "", ""][:3]
        if dtype not in _DTYPES or not name or not dims:
            raise UserError(f"--input {text!r}: expected NAME:DTYPE:DIMS with DTYPE one of {', '.join(_DTYPES)}")
        sizes = tuple(int(dim) if dim.isdigit() else dim for dim in dims.split(","))
        example = torch.zeros(
            [dim if isinstance(dim, int) else 2 for dim in sizes], dtype=getattr(torch, _DTYPES[dtype])
        )
        found[name] = GraphInput(example, sizes)
    return found


def _verified(job: Job, path: Path) -> dict[str, Any]:
    """The receipt of an ONNX file.

    Raises:
        UserError: a layer in it differs from PyTorch's.
    """
    from quant.export.onnx_verify import check_file, verify, worst_layer

    check_file(path)
    receipt = verify(
        job.model,
        path,
        checkpoint=job.stored if job.plan is not None else None,
        progress=lambda done, total: job.progress("compare", done, total),
    )
    if not receipt["passed"]:
        worst = worst_layer(receipt)
        assert worst is not None
        failed = sum(not layer["passed"] for layer in receipt["layers"])
        raise UserError(
            f"{failed} of {counted(len(receipt['layers']), 'exported layer')} differ from PyTorch; the worst is "
            f"{worst['name']}: relative error {worst['onnx']:.2g} of its ONNX nodes. "
            "This is a defect of the export; nothing was written"
        )
    return receipt


def _check_file(job: Job) -> None:
    """Raises FileExistsError where the destination is taken."""
    if job.out.exists() and not job.overwrite:
        raise FileExistsError(f"{job.out} exists; pass --overwrite to replace it, or choose another --out")
    if job.out.is_dir():
        raise FileExistsError(f"{job.out} is a directory; name a file with --out")


def _print(found: Mapping[str, Any], out: Path) -> None:
    from quant.console import CONSOLE
    from quant.export.onnx_verify import worst_layer
    from quant.export.tensorrt import summary

    layers = [layer for layer in found.get("layers", ()) if layer["onnx"] is not None]
    if layers:
        worst = worst_layer({"layers": layers})
        assert worst is not None
        said = f"the worst, {worst['name']}, differs by {worst['onnx']:.1e}" if worst["onnx"] else "all are the same"
        CONSOLE.print(f"{len(layers)} layers compared with PyTorch; {said}")
    if audit := found.get("audit"):
        CONSOLE.print(f"{sum(row['passed'] for row in audit)} of {len(audit)} layers run in the engine as planned")
    for line in summary(found):
        CONSOLE.print(line)
    for name, size in found.get("files", {}).items():
        CONSOLE.print(f"{size / 1e6:12,.1f} MB  {name}")
    CONSOLE.print(f"written to {out}")
