"""`ExportJob` is what every exporter of `quant.export.exporters` takes; here are the steps that several of them share."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quant.api.export_kinds import DTYPES, KINDS
from quant.calibration.attention_names import text_config
from quant.calibration.attention_scales import AttentionScales
from quant.export.checkpoint.open_checkpoint import Checkpoint
from quant.base.errors import UserError, counted, listed
from quant.export.checkpoint.files.read_tensors import read_layer
from quant.export.tensorrt.build import BuildOptions, export_engine
from quant.export.onnx.decoder_graph import GraphInput, is_decoder
from quant.export.onnx.export_onnx import write_onnx
from quant.export.onnx.quantized_cache import CACHE_FORMATS
from quant.export.onnx_graph.runtimes import layer_of_tensorrt, narrowest_dtype
from quant.export.onnx.compare_with_torch import check_file, verify, worst_layer
from quant.formats.format import Format
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.attention.kv_pages import kv_format
from quant.recipes.plan import Plan
from quant.generate.generate import cast_unquantized

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
