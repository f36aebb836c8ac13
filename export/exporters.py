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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quant.base.atomic import temporary_directory
from quant.base.errors import UserError, counted, listed
from quant.base.extras import require
from quant.base.json_files import write_json
from quant.calibration.attention_names import text_config
from quant.calibration.attention_scales import AttentionScales
from quant.export.aoti.aoti_decoder import export_aoti_decoder
from quant.export.aoti.package import export_aoti, find_device
from quant.export.checkpoint.convert import convert
from quant.export.checkpoint.files.directory import check_apart, check_destination, check_parents, new_directory
from quant.export.checkpoint.files.layout import LAYOUT_NAMES
from quant.export.checkpoint.files.read_tensors import read_layer
from quant.export.checkpoint.open_checkpoint import Checkpoint
from quant.export.onnx.compare_with_torch import check_file, verify, worst_layer
from quant.export.onnx.decoder_graph import GraphInput, is_decoder, model_inputs
from quant.export.onnx.dynamic_shapes import dimension_ranges
from quant.export.onnx.export_onnx import write_onnx
from quant.export.onnx.genai import write_genai_files
from quant.export.onnx.limits import layer_of_tensorrt, loaded, narrowest_dtype, onnxruntime_problem
from quant.export.onnx.quantized_cache import CACHE_FORMATS
from quant.export.packages.edge_llm import check_edge_llm, check_exported, expert_note, has_exporter, run_exporter
from quant.export.packages.triton_decoder import END_TOKENS, batch_rows, decoder_config, publish_decoder
from quant.export.packages.triton_server import CONFIG_FILE, RECEIPT_FILE, SERVE_FILE, Bundle, publish
from quant.export.packages.triton_server_guide import serving_text
from quant.export.tensorrt.audit import failures, receipt_path
from quant.export.tensorrt.build import BuildOptions, export_engine
from quant.export.tensorrt.gpu_targets import choose_common_library, resolve_targets
from quant.export.tensorrt.torch_tensorrt import compile_engine, lower
from quant.formats.format import Format
from quant.formats.tensor import BlockScaledTensor
from quant.generate.generate import cast_unquantized, end_tokens
from quant.kernels.attention.kv_pages import kv_format
from quant.recipes.plan import PLAN_FILE, Plan

# The kinds of export are listed here without importing torch, for help texts and for checks of options.


# Options of everything that traces the module.
_GRAPH = {"shapes", "inputs", "attention", "dtype", "calib", "calib_samples", "seqlen"}
# Options of everything that builds an engine of such a graph.
_ENGINE = {*_GRAPH, "target", "backend", "allow_fallback", "features"}
KINDS: dict[str, tuple[str, set[str]]] = {
    "onnx": ("-onnx", {*_GRAPH, "capacity", "genai", "kv_cache"}),
    "tensorrt": (".engine", {*_ENGINE, "capacity", "kv_cache"}),
    "aoti": (".pt2", {*_GRAPH, "capacity"}),
    "torch-tensorrt": (".pt2", {"inputs", "attention", "dtype", "target", "allow_fallback"}),
    "triton-server": ("-triton", {*_ENGINE, "capacity"}),
    "edge-llm": ("-edge-llm", set()),
    "modelopt": ("-modelopt", set()),
    "compressed-tensors": ("-compressed-tensors", set()),
}
"""Every kind of export: the ending of its default destination, and the options that only some kinds take."""
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""Values of --dtype, and torch's names for them."""
CHOICES = {
    "attention": ("native", "plugin", "none"),
    "kv_cache": ("fp8", "nvfp4", "16bit"),
    "features": ("refit", "weight-streaming", "version-compatible"),
    "dtype": tuple(DTYPES),
}
"""Values of the options that take one of a few words."""
CALIB_SAMPLES, SEQLEN = 32, 512
"""Rows of calibration data by default, and tokens of a row."""


# `ExportJob` is what every exporter of `quant.export.exporters` takes; here are the steps that several of them share.


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
    kv_cache: str | None
    target: str | None
    backend: str | None
    allow_fallback: bool
    features: tuple[str, ...]
    progress: Callable[[str, int, int], None]

    def onnx_options(self) -> dict[str, Any]:
        """Returns the arguments of `write_onnx`."""
        return {
            "shapes": list(self.shapes) or None,
            "inputs": self.inputs,
            "attention": self.attention,
            "attention_scales": self.attention_scales,
            "capacity": self.cache_capacity(),
            "genai": self.genai,
            "kv_cache": self.cache_format,
            "plan": self.plan,
        }

    def cache_capacity(self) -> int:
        """Returns how many tokens the graph's KV cache has room for; 0 for a graph without one."""
        has_inputs = self.inputs is not None
        return cache_capacity(self.kind, self.model, self.capacity, has_inputs=has_inputs, genai=self.genai)

    @property
    def fp8_attention(self) -> bool:
        """Whether the graph has attention in FP8."""
        return self.plan is not None and self.plan.attention is not None and self.attention != "none"

    @property
    def cache_format(self) -> Format | None:
        """The format of the graph's KV cache; None for the model's dtype."""
        return kv_format(self.kv_cache)

    @cached_property
    def opened(self) -> Checkpoint:
        """The checkpoint's files."""
        return Checkpoint(self.directory, self.model)

    def stored(self, name: str) -> BlockScaledTensor:
        """Returns the weight of a layer, read from the checkpoint's files."""
        assert self.plan is not None
        return read_layer(self.opened.tensors, self.plan.by_name[name])[0]


def cache_capacity(kind: str, model: nn.Module, requested: int | None, *, has_inputs: bool, genai: bool) -> int:
    """Returns how many tokens of a KV cache an export has room for; 0 for a graph without a cache of fixed size.

    As many as requested, or `DEFAULT_CAPACITY` for a decoder that is exported as a serving graph.
    """
    serves = "capacity" in KINDS[kind][1] and not has_inputs and not genai
    if requested is None and serves and is_decoder(model):
        positions = getattr(text_config(model.config), "max_position_embeddings", None)
        return min(DEFAULT_CAPACITY, positions or DEFAULT_CAPACITY)
    return requested or 0


def put_in_dtype(job: ExportJob) -> list[str]:
    """Casts unquantized tensors to --dtype, or to FP32 where onnxruntime runs all but BF16; a note of the latter."""
    dtype, notes = job.dtype, []
    runs_on_cpu = job.kind == "onnx" or (job.kind == "triton-server" and job.target is None)
    is_for_tensorrt = layer_of_tensorrt(job.model) is not None or job.fp8_attention or job.cache_format is not None
    is_for_onnxruntime = runs_on_cpu and not is_for_tensorrt
    if dtype is None and is_for_onnxruntime and narrowest_dtype(job.model) == torch.bfloat16:
        dtype = "fp32"
        notes.append(
            "the model is in BF16, which onnxruntime does not run on a processor, so the file is in FP32; "
            "--dtype fp16 or bf16 halves what is not quantized"
        )
    if dtype is not None:
        _check_input_dtypes(job.inputs or {}, dtype)
        cast_unquantized(job.model, DTYPES[dtype])
    return notes


def _check_input_dtypes(inputs: Mapping[str, GraphInput], dtype: str) -> None:
    """Raises UserError for an input that is not in the dtype of the tensors that it meets in the graph."""
    short = {getattr(torch, name): key for key, name in DTYPES.items()}
    for name, graph_input in inputs.items():
        own = short.get(graph_input.example.dtype, dtype)
        if own != dtype:
            raise UserError(
                f"--input {name} is in {own}, and everything that is not quantized in {dtype}: give both the same "
                f"dtype, --input {name}:{dtype}:… or --dtype {own}"
            )


def graph_notes(job: ExportJob) -> list[str]:
    """Returns sentences on what an exported graph does otherwise than the model."""
    return [*_input_notes(job), *_cache_notes(job)]


def _input_notes(job: ExportJob) -> list[str]:
    """Returns a sentence on images or sounds that a decoder takes, and its graph of tokens does not."""
    senses = {"vision_config": "images", "audio_config": "sounds"}
    config = getattr(job.model, "config", None)
    lost = [noun for name, noun in senses.items() if getattr(config, name, None) is not None]
    if not lost or job.inputs is not None or not is_decoder(job.model):
        return []
    return [
        f"{type(job.model).__name__} reads {' and '.join(lost)} too, and this graph reads tokens only; serve the "
        "checkpoint (vLLM) for both"
    ]


def _cache_notes(job: ExportJob) -> list[str]:
    """Returns a sentence for the user on the KV cache in an exported graph."""
    if job.cache_format is not None:
        return [
            f"the KV cache in {job.cache_format} is a node of our plugin: the engine runs in programs that load its "
            "C++ library (docs/engine-audit.md)"
        ]
    if job.plan is None or job.plan.kv_cache is None or job.kv_cache or not (job.cache_capacity() or job.genai):
        return []
    way_out = f"; --kv-cache {job.plan.kv_cache} keeps it as planned in engines that load our plugin"
    return [
        f"the plan has the KV cache in {job.plan.kv_cache}, and this graph keeps it in 16 or 32 bit"
        + way_out * ("kv_cache" in KINDS[job.kind][1] and job.plan.kv_cache.name in CACHE_FORMATS)
    ]


def write_engine(job: ExportJob, path: Path, out: Path) -> dict[str, Any]:
    """Builds and audits the engine `out` from the ONNX file `path`, which it writes; returns the receipt."""
    assert job.target is not None
    notes = [*put_in_dtype(job), *graph_notes(job)]
    for note in notes:
        warnings.warn(note, stacklevel=2)
    write_onnx(job.model, path, **job.onnx_options())
    receipt = verified(job, path)
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


def verified(job: ExportJob, path: Path) -> dict[str, Any]:
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
    for note in unreached_notes(receipt):
        warnings.warn(note, stacklevel=2)
    return receipt


def unreached_notes(receipt: Mapping[str, Any]) -> list[str]:
    """Returns a sentence on the quantized layers that a file lacks, because its outputs do not depend on them."""
    unreached = receipt["unreached"]
    if not unreached:
        return []
    layers = counted(len(unreached), "quantized layer")
    return [f"no output of the graph depends on {layers}, left out of it: {listed(unreached, 3)}"]


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
