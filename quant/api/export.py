"""`EXPORTERS` holds one function for each kind of artifact that `quant export` makes of a checkpoint.

    onnx              model.onnx, and decode.onnx with --decode: checked, every layer compared with PyTorch
    tensorrt          an engine, built and audited; its intermediate ONNX file is checked in the same way
    triton-server     such an engine in a model repository of Triton Inference Server, and serve.md
    aoti              a .pt2 package of AOTInductor
    torch-tensorrt    the module lowered through torch-tensorrt's quantize ops
    modelopt, compressed-tensors
                      the same checkpoint in the other layout, which other servers load

Each takes an `ExportJob` and returns the record that the command prints. Nothing appears under the destination's name
before everything is written and compared.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from quant.calibration.kv_cache import AttentionScales
from quant.checkpoints.convert import convert
from quant.checkpoints.open import Checkpoint
from quant.errors import UserError, counted
from quant.export.checkpoint.directory import check_apart, check_destination, new_directory
from quant.export.checkpoint.layout import LAYOUT_NAMES
from quant.export.checkpoint.read import read_layer
from quant.export.engine.build import BuildOptions, export_engine
from quant.export.engine.targets import choose_backend, resolve_target
from quant.export.onnx_graph.decoder import GraphInput, is_decoder, model_inputs
from quant.export.onnx_graph.export import dimension_ranges, export_onnx
from quant.export.onnx_graph.runtimes import onnxruntime_problem
from quant.export.onnx_graph.verify import check_file, verify, worst_layer
from quant.export.packages.aoti import export_aoti
from quant.export.packages.torch_tensorrt import lower
from quant.export.packages.triton_server import RECEIPT_FILE, SERVE_FILE, Bundle, publish
from quant.export.packages.triton_server_guide import serving_text
from quant.formats.atomic import temporary_directory, write_atomically
from quant.formats.tensor import BlockScaledTensor
from quant.recipes.json_text import json_text
from quant.recipes.plan import PLAN_FILE, Plan


@dataclass(frozen=True)
class ExportJob:
    """A loaded checkpoint and the options of `quant export`, as its help describes them."""

    kind: str
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

    def onnx_options(self, decode: bool) -> dict[str, Any]:
        """Arguments of `export_onnx` for the graph of one decoding step, or for the other one."""
        return {
            "shapes": self._shapes_of(decode) or None,
            "inputs": self.inputs,
            "attention": self.attention,
            "attention_scales": self.attention_scales,
            "plan": self.plan,
        }

    def _shapes_of(self, decode: bool) -> list[str]:
        """--shapes without the ranges of a dimension that only the other of two files has."""
        if self.kind != "onnx" or not self.decode:
            return list(self.shapes)
        # The graph with past keys takes one token a step, so it has no dimension `sequence`.
        foreign = "sequence=" if decode else "past="
        parts = ([part for part in text.split(",") if not part.strip().startswith(foreign)] for text in self.shapes)
        return [",".join(ranges) for ranges in parts]

    @cached_property
    def opened(self) -> Checkpoint:
        """The checkpoint's files."""
        return Checkpoint(self.directory, self.model)

    def stored(self, name: str) -> BlockScaledTensor:
        """The weight of a layer, read from the checkpoint's files."""
        assert self.plan is not None
        return read_layer(self.opened.tensors, self.plan.by_name[name])[0]


def export_onnx_files(job: ExportJob) -> dict[str, Any]:
    """`--to onnx` writes a directory with the files, the plan and the receipt."""
    receipts = {}
    problem = onnxruntime_problem(job.model)
    if problem is not None:
        warnings.warn(problem, stacklevel=2)
    with new_directory(job.out, overwrite=job.overwrite) as folder:
        for file in ("model.onnx", *(["decode.onnx"] if job.decode else [])):
            decode = file == "decode.onnx"
            # model.onnx gives the cache that decode.onnx takes; alone, it needs none.
            cache = "in" if decode else "out" if job.decode else "none"
            export_onnx(job.model, folder / file, **job.onnx_options(decode), cache=cache)
            receipts[file] = _verified(job, folder / file)
        # Both files hold the same layers: the receipt of model.onnx stands for both.
        receipt = next(iter(receipts.values()))
        if job.plan is not None:
            job.plan.save(folder / PLAN_FILE)
        write_atomically(folder / RECEIPT_FILE, json_text(receipt, indent=1) + "\n")
        files = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    return {"out": str(job.out), "files": files, "warnings": [problem] if problem else [], **receipt}


def export_tensorrt(job: ExportJob) -> dict[str, Any]:
    """`--to tensorrt` writes an engine and its receipt."""
    with temporary_directory(job.out) as folder:
        return _engine(job, folder / "model.onnx", job.out)


def _engine(job: ExportJob, path: Path, out: Path) -> dict[str, Any]:
    """Builds and audits the engine `out` from the ONNX file `path`, which it writes; returns the receipt."""
    assert job.target is not None
    export_onnx(job.model, path, **job.onnx_options(job.decode), cache="in" if job.decode else "none")
    receipt = _verified(job, path)
    return export_engine(
        path,
        out,
        BuildOptions(job.target, job.shapes or None, job.backend, job.progress),
        plan=job.plan,
        attention=job.attention,
        allow_fallback=job.allow_fallback,
        layers=receipt["layers"],
    )


def export_aoti_package(job: ExportJob) -> dict[str, Any]:
    """`--to aoti` writes a `.pt2` package."""
    inputs = job.inputs or model_inputs(job.model, decode=False)
    dims = {name: {axis: dim for axis, dim in enumerate(x.dims) if isinstance(dim, str)} for name, x in inputs.items()}
    examples = {name: x.example for name, x in inputs.items()}
    export_aoti(
        job.model,
        job.out,
        examples,
        dims=dims,
        ranges=dimension_ranges(inputs, job.shapes),
        attention_scales=job.attention_scales,
    )
    return {"out": str(job.out), "files": {job.out.name: job.out.stat().st_size}, "passed": True}


def export_torch_tensorrt(job: ExportJob) -> dict[str, Any]:
    """`--to torch-tensorrt` writes the lowered module as a `.pt2` program."""
    check_attention(job.kind, job.plan, job.attention)
    inputs = job.inputs or model_inputs(job.model, decode=False)
    lower(job.model, job.out, {name: x.example for name, x in inputs.items()})
    return {"out": str(job.out), "files": {job.out.name: job.out.stat().st_size}, "passed": True}


def export_triton_server(job: ExportJob) -> dict[str, Any]:
    """`--to triton-server` adds an engine to a model repository, and writes `serve.md`."""
    if job.attention == "plugin":
        raise UserError(
            "the plugin is unknown to a Triton server, which would have to load it first; pass --attention native"
        )
    name = job.directory.resolve().name
    with temporary_directory(job.out) as folder:
        path, engine = folder / "model.onnx", folder / "engine"
        receipt = _engine(job, path, engine)

        def guide(bundle: Bundle) -> str:
            return serving_text(job.directory, job.plan, bundle, receipt, text=is_decoder(job.model))

        bundle = publish(engine, receipt, path, job.out, name=name, guide=guide, overwrite=job.overwrite)
    version = job.out / name / str(bundle.version)
    files = [job.out / name / "config.pbtxt", *sorted(version.iterdir()), job.out / SERVE_FILE]
    return {
        **receipt,
        "out": str(job.out),
        "files": {str(file.relative_to(job.out)): file.stat().st_size for file in files},
        "config_checked": bundle.checked,
    }


def export_layout(job: ExportJob) -> dict[str, Any]:
    """`--to modelopt` and `--to compressed-tensors` rewrite the checkpoint; the job's model is an outline."""
    done = convert(job.directory, job.out, job.kind, overwrite=job.overwrite, model=job.model)
    return {"out": str(job.out), **done, "passed": True}


def check_attention(kind: str, plan: Plan | None, attention: str) -> None:
    """Raises UserError where an export would leave out the plan's attention without being told to."""
    if kind == "torch-tensorrt" and plan is not None and plan.attention is not None and attention != "none":
        raise UserError(
            f"the plan has attention in {plan.attention}, and torch-tensorrt has no op for that: pass --attention none "
            "to export attention in 16 bit, or --to tensorrt"
        )


def check_request(
    kind: str, directory: Path, out: Path, overwrite: bool, target: str | None, backend: str | None
) -> None:
    """Refuses a request that cannot succeed, before a model is loaded.

    Raises UserError for an engine without a target, ValueError for a target for which no engine can be built here, and
    FileExistsError if the destination is taken, or is, holds or lies in the checkpoint `directory`.
    """
    check_apart(out, directory)
    if kind in ("tensorrt", "triton-server"):
        if target is None:
            raise UserError(
                "an engine is built for one kind of GPU: name it with --target, such as sm120, sm89 or local"
            )
        choose_backend(resolve_target(target), backend)
    if kind in ("onnx", *LAYOUT_NAMES):
        check_destination(out, overwrite=overwrite)
    elif kind == "triton-server":
        if out.exists() and not out.is_dir():
            raise FileExistsError(f"{out} is a file; name a model repository with --out")
    elif out.is_dir():
        raise FileExistsError(f"{out} is a directory; name a file with --out")
    elif out.exists() and not overwrite:
        raise FileExistsError(f"{out} exists; pass --overwrite to replace it, or choose another --out")


EXPORTERS: dict[str, Callable[[ExportJob], dict[str, Any]]] = {
    "onnx": export_onnx_files,
    "tensorrt": export_tensorrt,
    "aoti": export_aoti_package,
    "torch-tensorrt": export_torch_tensorrt,
    "triton-server": export_triton_server,
    "modelopt": export_layout,
    "compressed-tensors": export_layout,
}


def _verified(job: ExportJob, path: Path) -> dict[str, Any]:
    """The receipt of an ONNX file; UserError if a layer in it differs from PyTorch's."""
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
