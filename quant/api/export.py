"""`EXPORTERS` holds one function for each kind of artifact that `quant export` makes of a checkpoint.

    onnx              model.onnx: checked, every layer compared with PyTorch, and opened in onnxruntime
    tensorrt          an engine, built and audited; its intermediate ONNX file is checked in the same way
    triton-server     such an engine in a model repository of Triton Inference Server, and serve.md
    aoti              a .pt2 package of AOTInductor
    torch-tensorrt    the module lowered through torch-tensorrt's quantize ops, or compiled by it to an engine
    edge-llm          the checkpoint in ModelOpt's layout, and the ONNX that TensorRT Edge-LLM's exporter makes of it
    modelopt, compressed-tensors
                      the same checkpoint in the other layout, which other servers load

Each takes an `ExportJob` and returns the record that the command prints. Nothing appears under the destination's name
before everything is written and compared.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quant.api.export_kinds import DTYPES, KINDS
from quant.calibration.attention_names import text_config
from quant.calibration.kv_cache import AttentionScales
from quant.checkpoints.convert import convert
from quant.checkpoints.open import Checkpoint
from quant.errors import UserError, counted
from quant.export.checkpoint.directory import check_apart, check_destination, new_directory
from quant.export.checkpoint.layout import LAYOUT_NAMES
from quant.export.checkpoint.read import read_layer
from quant.export.engine.audit import failures
from quant.export.engine.build import BuildOptions, export_engine
from quant.export.engine.targets import choose_common_backend, resolve_targets
from quant.export.onnx_graph.decoder import GraphInput, is_decoder, model_inputs
from quant.export.onnx_graph.export import write_onnx
from quant.export.onnx_graph.genai import write_genai_files
from quant.export.onnx_graph.runtimes import layer_of_tensorrt, loaded, main_dtype, onnxruntime_problem
from quant.export.onnx_graph.translate import dimension_ranges
from quant.export.onnx_graph.verify import check_file, verify, worst_layer
from quant.export.packages.aoti import export_aoti
from quant.export.packages.edge_llm import check_edge_llm, check_exported, has_exporter, run_exporter
from quant.export.packages.torch_tensorrt import lower
from quant.export.packages.torch_tensorrt_engine import compile_engine
from quant.export.packages.triton_server import RECEIPT_FILE, SERVE_FILE, Bundle, publish
from quant.export.packages.triton_server_guide import serving_text
from quant.extras import require
from quant.formats.atomic import temporary_directory, write_atomically
from quant.formats.tensor import BlockScaledTensor
from quant.recipes.json_text import json_text
from quant.recipes.plan import PLAN_FILE, Plan
from quant.runtime.generate import cast_unquantized

DEFAULT_CAPACITY = 4096
"""Tokens of the KV cache of an exported decoder by default."""


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
    dtype: str | None
    capacity: int | None
    genai: bool
    target: str | None
    backend: str | None
    allow_fallback: bool
    features: tuple[str, ...]
    progress: Callable[[str, int, int], None]

    def onnx_options(self) -> dict[str, Any]:
        """Returns the arguments of `export_onnx`."""
        return {
            "shapes": list(self.shapes) or None,
            "inputs": self.inputs,
            "attention": self.attention,
            "attention_scales": self.attention_scales,
            "capacity": self.cache_capacity(),
            "genai": self.genai,
            "plan": self.plan,
        }

    def cache_capacity(self) -> int:
        """Returns how many tokens the KV cache has room for: as requested, or `DEFAULT_CAPACITY` for a decoder.

        0 for a graph without one.
        """
        if "capacity" not in KINDS[self.kind][1] or self.inputs is not None or self.genai:
            return self.capacity or 0
        if self.capacity is None and is_decoder(self.model):
            positions = getattr(text_config(self.model.config), "max_position_embeddings", None)
            return min(DEFAULT_CAPACITY, positions or DEFAULT_CAPACITY)
        return self.capacity or 0

    @property
    def fp8_attention(self) -> bool:
        """Whether the graph has attention in FP8."""
        return self.plan is not None and self.plan.attention is not None and self.attention != "none"

    @cached_property
    def opened(self) -> Checkpoint:
        """The checkpoint's files."""
        return Checkpoint(self.directory, self.model)

    def stored(self, name: str) -> BlockScaledTensor:
        """Returns the weight of a layer, read from the checkpoint's files."""
        assert self.plan is not None
        return read_layer(self.opened.tensors, self.plan.by_name[name])[0]


def export_onnx_files(job: ExportJob) -> dict[str, Any]:
    """Writes a directory with the ONNX file, plan and receipt; with --genai the files that its runtime needs."""
    if job.genai:
        _check_genai(job)
    notes = [*_put_in_dtype(job), *_cache_notes(job)]
    problem = onnxruntime_problem(job.model, fp8_attention=job.fp8_attention)
    notes += [problem] if problem else []
    for note in notes:
        warnings.warn(note, stacklevel=2)
    with new_directory(job.out, overwrite=job.overwrite) as folder:
        path = folder / "model.onnx"
        write_onnx(job.model, path, **job.onnx_options())
        receipt = _verified(job, path)
        if problem is None and find_spec("onnxruntime") is not None:
            loaded(path)
        if job.genai:
            write_genai_files(job.model, job.directory, folder)
        if job.plan is not None:
            job.plan.save(folder / PLAN_FILE)
        write_atomically(folder / RECEIPT_FILE, json_text(receipt, indent=1) + "\n")
        files = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    return {"out": str(job.out), "files": files, "warnings": notes, **receipt}


def _check_genai(job: ExportJob) -> None:
    """Raises UserError for a graph that no execution provider of onnxruntime-genai runs."""
    if job.capacity is not None or job.inputs is not None:
        raise UserError("--genai: its cache grows and its inputs are fixed; leave --capacity and --input out")
    of_tensorrt = layer_of_tensorrt(job.model)
    # The provider of TensorRT-RTX has FP4, but neither TensorRT's MXFP8 nor its attention in FP8.
    if of_tensorrt is not None and of_tensorrt[1] != "nvfp4":
        layer, format = of_tensorrt
        raise UserError(f"--genai: {layer} is in {format}, which no provider of onnxruntime runs; use --to tensorrt")
    if job.fp8_attention:
        raise UserError("--genai: no provider of onnxruntime has attention in FP8; pass --attention none")


def _put_in_dtype(job: ExportJob) -> list[str]:
    """Casts unquantized tensors to --dtype, or to FP32 where onnxruntime runs all but BF16; a note of the latter."""
    dtype, notes = job.dtype, []
    is_for_onnxruntime = job.kind == "onnx" and layer_of_tensorrt(job.model) is None and not job.fp8_attention
    if dtype is None and is_for_onnxruntime and main_dtype(job.model) == torch.bfloat16:
        dtype = "fp32"
        notes.append(
            "the model is in BF16, which onnxruntime does not run on a processor, so the file is in FP32; "
            "--dtype fp16 or bf16 halves what is not quantized"
        )
    if dtype is not None:
        cast_unquantized(job.model, DTYPES[dtype])
    return notes


def _cache_notes(job: ExportJob) -> list[str]:
    """Returns a sentence for the user on the KV cache in an exported graph."""
    if job.plan is None or job.plan.kv_cache is None or not (job.cache_capacity() or job.genai):
        return []
    return [
        f"the plan has the KV cache in {job.plan.kv_cache}, and this graph keeps it in 16 or 32 bit: ONNX and TensorRT "
        "write no other cache in place"
    ]


def export_tensorrt(job: ExportJob) -> dict[str, Any]:
    """Writes an engine and its receipt (`--to tensorrt`)."""
    with temporary_directory(job.out) as folder:
        return _engine(job, folder / "model.onnx", job.out)


def _engine(job: ExportJob, path: Path, out: Path) -> dict[str, Any]:
    """Builds and audits the engine `out` from the ONNX file `path`, which it writes; returns the receipt."""
    assert job.target is not None
    notes = [*_put_in_dtype(job), *_cache_notes(job)]
    for note in notes:
        warnings.warn(note, stacklevel=2)
    write_onnx(job.model, path, **job.onnx_options())
    receipt = _verified(job, path)
    return export_engine(
        path,
        out,
        BuildOptions(job.target, job.shapes or None, job.backend, job.progress, job.features),
        plan=job.plan,
        attention=job.attention,
        allow_fallback=job.allow_fallback,
        layers=receipt["layers"],
        source=job.model,
    )


def export_aoti_package(job: ExportJob) -> dict[str, Any]:
    """Writes a `.pt2` package (`--to aoti`)."""
    _put_in_dtype(job)
    inputs = job.inputs or model_inputs(job.model)
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
    """Writes the lowered module as a `.pt2` program, or with --target a compiled engine (`--to torch-tensorrt`)."""
    check_attention(job.kind, job.plan, job.attention)
    _put_in_dtype(job)
    inputs = {name: x.example for name, x in (job.inputs or model_inputs(job.model)).items()}
    record: dict[str, Any] = {"out": str(job.out), "passed": True}
    if job.target is None:
        lower(job.model, job.out, inputs)
    else:
        findings = compile_engine(
            job.model, job.out, inputs, job.target, plan=job.plan, allow_fallback=job.allow_fallback
        )
        record |= {"audit": [asdict(finding) for finding in findings], "passed": not failures(findings)}
    return {**record, "files": {job.out.name: job.out.stat().st_size}}


def export_triton_server(job: ExportJob) -> dict[str, Any]:
    """Adds an engine to a model repository, and writes `serve.md` (`--to triton-server`)."""
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
    """Rewrites the checkpoint (`--to modelopt`, `--to compressed-tensors`); the job's model is an outline."""
    done = convert(job.directory, job.out, job.kind, overwrite=job.overwrite, model=job.model)
    return {"out": str(job.out), **done, "passed": True}


def export_edge_llm(job: ExportJob) -> dict[str, Any]:
    """Writes ModelOpt's layout, and runs TensorRT Edge-LLM's exporter if it is installed (`--to edge-llm`)."""
    if job.plan is None:
        raise UserError(f"{job.directory}: no plan, and so nothing to compare the exported graph with")
    check_edge_llm(job.model, job.plan)
    compared, notes = {}, []
    with new_directory(job.out, overwrite=job.overwrite) as folder:
        checkpoint, onnx = folder / "checkpoint", folder / "onnx"
        convert(job.directory, checkpoint, "modelopt", model=job.model)
        if has_exporter():
            run_exporter(checkpoint, onnx)
            compared = check_exported(checkpoint, onnx, job.plan)
        else:
            notes.append(
                "the exporter is not installed here (pip install 'tensorrt-edgellm[export]', best in an environment of "
                f"its own); run: tensorrt-edgellm-export {job.out / 'checkpoint'} {job.out / 'onnx'}"
            )
        files = {str(f.relative_to(folder)): f.stat().st_size for f in sorted(folder.rglob("*")) if f.is_file()}
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return {"out": str(job.out), "files": files, "warnings": notes, **compared, "passed": True}


def check_attention(kind: str, plan: Plan | None, attention: str) -> None:
    """Raises UserError where an export would leave out the plan's attention without an option that says so."""
    if kind == "torch-tensorrt" and plan is not None and plan.attention is not None and attention != "none":
        raise UserError(
            f"the plan has attention in {plan.attention}, and torch-tensorrt has no op for that: pass --attention none "
            "to export attention in 16 bit, or --to tensorrt"
        )


def check_request(
    kind: str,
    directory: Path,
    out: Path,
    overwrite: bool,
    target: str | None,
    backend: str | None,
    features: Sequence[str] = (),
) -> None:
    """Refuses a request that cannot succeed, before a model is loaded.

    Raises UserError for an engine without a target, ValueError for a target for which no engine can be built here, and
    FileExistsError if the destination is taken, or is, holds or lies in the checkpoint `directory`.
    """
    check_apart(out, directory)
    if kind in ("onnx", "tensorrt", "triton-server"):
        for package in ("onnx", "onnxscript"):
            require(package, "onnx")
    if kind in ("tensorrt", "triton-server"):
        if target is None:
            raise UserError(
                "an engine is built for one kind of GPU: name it with --target, such as sm120, sm89 or local"
            )
        choose_common_backend(resolve_targets(target), backend, features)
    if kind in ("onnx", "edge-llm", *LAYOUT_NAMES):
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
    "edge-llm": export_edge_llm,
    "modelopt": export_layout,
    "compressed-tensors": export_layout,
}


def _verified(job: ExportJob, path: Path) -> dict[str, Any]:
    """Returns the receipt of an ONNX file; UserError if a layer in it differs from PyTorch's."""
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
