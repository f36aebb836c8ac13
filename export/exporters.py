"""`EXPORTERS` holds one function for each kind of artifact that `quant export` makes of a checkpoint.

    onnx              model.onnx: checked, every layer compared with PyTorch, and opened in onnxruntime
    tensorrt          an engine, built and audited; its intermediate ONNX file is checked in the same way
    triton-server     such an engine, or a decoder's ONNX file, in a model repository of Triton Inference Server; a
                      decoder is text in, text out; and serve.md
    aoti              a .pt2 package of AOTInductor; of a decoder, one that reads prompts and decodes over a KV cache
    torch-tensorrt    the module lowered through torch-tensorrt's quantize ops, or compiled by it to an engine
    edge-llm          the checkpoint in ModelOpt's layout, and the ONNX that TensorRT Edge-LLM's exporter makes of it
    modelopt, compressed-tensors
                      the same checkpoint in the other layout, which other servers load

Each takes an `ExportJob` and returns the record that the command prints. Nothing appears under the destination's name
before everything is written and compared.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quant.api.export_job import ExportJob, graph_notes, put_in_dtype, unreached_notes, verified, write_engine
from quant.export.checkpoint.convert import convert
from quant.base.errors import UserError
from quant.export.checkpoint.files.directory import check_apart, check_destination, check_parents, new_directory
from quant.export.checkpoint.files.layout import LAYOUT_NAMES
from quant.export.tensorrt.audit import failures, receipt_path
from quant.export.tensorrt.gpu_targets import choose_common_library, resolve_targets
from quant.export.onnx.decoder_graph import is_decoder, model_inputs
from quant.export.onnx.export_onnx import write_onnx
from quant.export.onnx.genai import write_genai_files
from quant.export.onnx_graph.runtimes import layer_of_tensorrt, loaded, onnxruntime_problem
from quant.export.onnx.dynamic_shapes import dimension_ranges
from quant.export.aoti.package import export_aoti, find_device
from quant.export.aoti.aoti_decoder import export_aoti_decoder
from quant.export.packages.edge_llm import check_edge_llm, check_exported, expert_note, has_exporter, run_exporter
from quant.export.tensorrt.torch_tensorrt import lower
from quant.export.packages.torch_tensorrt_engine import compile_engine
from quant.export.packages.triton_decoder import END_TOKENS, batch_rows, decoder_config, publish_decoder
from quant.export.packages.triton_server import CONFIG_FILE, RECEIPT_FILE, SERVE_FILE, Bundle, publish
from quant.export.packages.triton_server_guide import serving_text
from quant.base.extras import require
from quant.base.atomic import temporary_directory
from quant.kernels.attention.kv_pages import kv_format
from quant.recipes.json_text import write_json
from quant.recipes.plan import PLAN_FILE, Plan
from quant.generate.generate import end_tokens


def export_onnx_files(job: ExportJob) -> dict[str, Any]:
    """Writes a directory with the ONNX file, plan and receipt; with --genai the files that its runtime needs."""
    if job.genai:
        _check_genai(job)
    notes = [*put_in_dtype(job), *graph_notes(job)]
    problem = onnxruntime_problem(job.model, fp8_attention=job.fp8_attention, kv_cache=job.cache_format)
    notes += [problem] if problem else []
    for note in notes:
        warnings.warn(note, stacklevel=2)
    with new_directory(job.out, overwrite=job.overwrite) as folder:
        path = folder / "model.onnx"
        write_onnx(job.model, path, **job.onnx_options())
        receipt = verified(job, path)
        notes += unreached_notes(receipt)
        if problem is None and find_spec("onnxruntime") is not None:
            loaded(path)
        if job.genai:
            write_genai_files(job.model, job.directory, folder)
        if job.plan is not None:
            job.plan.save(folder / PLAN_FILE)
        write_json(folder / RECEIPT_FILE, receipt)
        files = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    return {"out": str(job.out), "files": files, "warnings": notes, **receipt}


def _check_genai(job: ExportJob) -> None:
    """Raises UserError for a graph that no execution provider of onnxruntime-genai runs, or that has no tokenizer."""
    if job.capacity is not None or job.inputs is not None:
        raise UserError("--genai: its cache grows and its inputs are fixed; leave --capacity and --input out")
    # The library makes its tokenizer from this file. Exporting takes long enough to look for it before.
    if not (job.directory / "tokenizer.json").is_file():
        raise UserError(f"{job.directory}: onnxruntime-genai needs tokenizer.json, which is not there")
    of_tensorrt = layer_of_tensorrt(job.model)
    # The provider of TensorRT-RTX has FP4, but neither TensorRT's MXFP8 nor its attention in FP8.
    if of_tensorrt is not None and of_tensorrt[1] != "nvfp4":
        layer, format = of_tensorrt
        raise UserError(f"--genai: {layer} is in {format}, which no provider of onnxruntime runs; use --to tensorrt")
    if job.fp8_attention:
        raise UserError("--genai: no provider of onnxruntime has attention in FP8; pass --attention none")


def export_tensorrt(job: ExportJob) -> dict[str, Any]:
    """Writes an engine and its receipt (`--to tensorrt`)."""
    with temporary_directory(job.out) as folder:
        return write_engine(job, folder / "model.onnx", job.out)


def export_aoti_package(job: ExportJob) -> dict[str, Any]:
    """Writes a `.pt2` package (`--to aoti`)."""
    notes = [*put_in_dtype(job), *graph_notes(job)]
    for note in notes:
        warnings.warn(note, stacklevel=2)
    record = {"out": str(job.out), "warnings": notes, "passed": True}
    capacity = job.cache_capacity()
    check_attention(job.kind, job.plan, job.attention, cached=bool(capacity))
    if capacity:
        plan = job.plan.digest() if job.plan is not None else ""
        export_aoti_decoder(
            job.model.to(find_device(job.out, None)), job.out, capacity, shapes=list(job.shapes), plan=plan
        )
        return {**record, "files": {job.out.name: job.out.stat().st_size}}
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
    return {**record, "files": {job.out.name: job.out.stat().st_size}}


def export_torch_tensorrt(job: ExportJob) -> dict[str, Any]:
    """Writes the lowered module as a `.pt2` program, or with --target a compiled engine (`--to torch-tensorrt`)."""
    check_attention(job.kind, job.plan, job.attention)
    put_in_dtype(job)
    inputs = {name: x.example for name, x in (job.inputs or model_inputs(job.model)).items()}
    notes = []
    if job.inputs is None and is_decoder(job.model):
        notes.append(
            "torch-tensorrt compiles one pass over a fixed number of tokens, without a KV cache; a decoder that is to "
            "generate text goes through --to tensorrt, onnx or aoti"
        )
    for note in notes:
        warnings.warn(note, stacklevel=2)
    record: dict[str, Any] = {"out": str(job.out), "warnings": notes, "passed": True}
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
    if job.cache_capacity():
        return _export_text_server(job)
    if job.target is None:
        raise UserError("a model without a KV cache is served as an engine: name its GPU with --target, such as sm89")
    name = job.directory.resolve().name
    with temporary_directory(job.out) as folder:
        path, engine = folder / "model.onnx", folder / "engine"
        receipt = write_engine(job, path, engine)

        def guide(bundle: Bundle) -> str:
            return serving_text(job.directory, job.plan, bundle, receipt, text=is_decoder(job.model))

        bundle = publish(engine, receipt, path, job.out, name=name, guide=guide, overwrite=job.overwrite)
    return _server_record(job, bundle, receipt)


def _export_text_server(job: ExportJob) -> dict[str, Any]:
    """Publishes a decoder with its KV cache and tokenizer: an engine for --target, or else an ONNX file."""
    notes = [*put_in_dtype(job), *graph_notes(job)] if job.target is None else []
    problem = onnxruntime_problem(job.model, fp8_attention=job.fp8_attention)
    if job.target is None and problem is not None:
        raise UserError(f"{problem}; an engine for a GPU runs it: name it with --target, such as sm120")
    for note in notes:
        warnings.warn(note, stacklevel=2)
    with temporary_directory(job.out) as folder:
        path, engine = folder / "model.onnx", folder / "model.engine"
        if job.target is None:
            write_onnx(job.model, path, **job.onnx_options())
            receipt = verified(job, path)
            receipt |= {"warnings": [*notes, *unreached_notes(receipt)]}
            loaded(path)
            files = sorted(folder.glob("model.onnx*"))
        else:
            receipt = write_engine(job, path, engine)
            files = [engine, receipt_path(engine)]
        receipt = {**receipt, END_TOKENS: list(end_tokens(job.model))}

        def guide(bundle: Bundle) -> str:
            return serving_text(job.directory, job.plan, bundle, receipt, text=True)

        name = job.directory.resolve().name
        config = decoder_config(name, batch_rows(receipt, job.shapes), gpu=job.target is not None)
        bundle = publish_decoder(
            files, receipt, job.directory, job.out, name=name, config=config, guide=guide, overwrite=job.overwrite
        )
    return _server_record(job, bundle, receipt)


def _server_record(job: ExportJob, bundle: Bundle, receipt: dict[str, Any]) -> dict[str, Any]:
    """Returns the record of a published version."""
    home = job.out / bundle.name
    files = [home / CONFIG_FILE, *sorted((home / str(bundle.version)).rglob("*")), job.out / SERVE_FILE]
    return {
        **receipt,
        "out": str(job.out),
        "files": {str(file.relative_to(job.out)): file.stat().st_size for file in files if file.is_file()},
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
    compared, notes = {}, expert_note(job.plan)
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


def check_attention(
    kind: str, plan: Plan | None, attention: str, kv_cache: str | None = None, *, cached: bool = False
) -> None:
    """Raises UserError where an export would leave out the plan's attention without an option that says so.

    A KV cache of our plugin has attention in 16 bit, and so has a package with a KV cache (`cached`).
    """
    if plan is None or plan.attention is None or attention == "none":
        return
    if kv_format(kv_cache) is not None:
        raise UserError(
            f"--kv-cache {kv_cache}: the plugin attends in 16 bit over its cache, and the plan has attention in "
            f"{plan.attention}; pass --attention none with it"
        )
    if kind == "aoti" and cached:
        raise UserError(
            f"the plan has attention in {plan.attention}, which a package with a KV cache does not: pass --attention "
            "none, or --capacity 0 for a package of one pass"
        )
    if kind == "torch-tensorrt":
        raise UserError(
            f"the plan has attention in {plan.attention}, and torch-tensorrt has no op for that: pass --attention none "
            "to export attention in 16 bit, or --to tensorrt"
        )


def check_request(
    kind: str,
    directory: Path | None,
    out: Path,
    overwrite: bool,
    target: str | None,
    backend: str | None,
    features: Sequence[str] = (),
) -> None:
    """Refuses a request that cannot succeed, before a model is loaded.

    Raises UserError for an engine without a target, ValueError for a target for which no engine can be built here, and
    FileExistsError if the destination is taken, or is, holds or lies in the checkpoint `directory`; None is a model in
    memory.
    """
    check_apart(out, directory)
    if kind in ("onnx", "tensorrt", "triton-server"):
        for package in ("onnx", "onnxscript"):
            require(package, "onnx")
    # A decoder needs no target on a Triton server, but only the loaded model shows whether it is one.
    if kind == "tensorrt" or (kind == "triton-server" and target is not None):
        if target is None:
            raise UserError(
                "an engine is built for one kind of GPU: name it with --target, such as sm120, sm89 or local"
            )
        choose_common_library(resolve_targets(target), backend, features)
    if kind in ("onnx", "edge-llm", *LAYOUT_NAMES):
        check_destination(out, overwrite=overwrite)
        return
    check_parents(out)
    if kind == "triton-server":
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
