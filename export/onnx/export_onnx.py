"""`write_onnx` writes an ONNX file from a quantized model.

    decoder with a KV cache     `serving`: one graph for prefill and decoding
    the same for another loop   `genai`: the inputs and outputs of onnxruntime-genai
    other transformers model    `decoder`: one forward pass
    any other module            as it is traced, from examples of its inputs

`translate` makes the ONNX model of each. Weights are not copied: initializers point at the module's buffers until they
are written, and above `EXTERNAL_BYTES` they go to a second file, tensor by tensor. Nodes of a linear are tagged with
its layer's name and its output is called `<layer>.output`, so that the file itself says which nodes to compare with
which layer (`verify`); an attention is tagged with its module's name. The file's metadata holds the plan's digest.
"""

import importlib.metadata
import inspect
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quant.base.atomic import put_file, temporary_directory
from quant.base.errors import UserError, known_names, option
from quant.base.json_files import JsonData, json_text, parse_json
from quant.calibration.attention_names import model_configs, text_config
from quant.calibration.attention_scales import AttentionScales
from quant.calibration.evaluating import without_cache
from quant.export.checkpoint.files.layouts import dtype_name
from quant.export.onnx import decoder_graph, limits
from quant.export.onnx.dynamic_shapes import SEQUENCE, dimension_ranges
from quant.export.onnx.expert_nodes import experts_as_ops
from quant.export.onnx.genai import genai_program
from quant.export.onnx.recurrent_states import HybridCache, recurrent_functions
from quant.export.onnx.serving import CachedAttention, GroupedAttention, QuantizedCache, serving_program
from quant.export.onnx.trace import MODEL_PREFIX, nested, trace
from quant.export.onnx.translate import quiet, translate
from quant.formats.format import FORMATS, GGUF_FORMATS, Format
from quant.formats.tensor import quantize
from quant.kernels.linear.quant_linear import QuantLinear
from quant.models.files import one_line
from quant.recipes.plan import Plan

EXTERNAL_BYTES = 256 << 20
"""From this size on weights go to a file of their own; protobuf ends at 2 GiB."""
PLAN_KEY = "blockscale.plan"
ATTENTION_KEY = "blockscale.attention"
EXPORT_KEY = "blockscale.export"
"""Key in the file's metadata; its value is a JSON object of the options by which a model is exported likewise."""


@dataclass(frozen=True)
class ExportRecord(JsonData):
    """The options by which a model is exported likewise."""

    dtypes: list[str]  # of the parameters
    inputs: dict[str, list[Any]]  # of a module: dtype, shape and dims of each example
    shapes: list[str] | None
    capacity: int
    genai: bool
    runtime: str
    kv_cache: str | None
    head: str | None  # the output head that the export itself rounded; the plan has it in 16 bit
    scales: dict[str, list[Any]]  # of attention: measured on calibration text, and not in the checkpoint
    versions: dict[str, str]


def write_onnx(
    model: nn.Module, path: str | Path, *, shapes: str | Sequence[str] | None = None,
    inputs: Mapping[str, decoder_graph.GraphInput] | None = None, attention: str = "native",
    attention_scales: Mapping[str, AttentionScales] | None = None, capacity: int = 0, genai: bool = False,
    kv_cache: Format | None = None, plan: Plan | None = None, runtime: str = "tensorrt",
) -> Path:  # fmt: skip
    """Writes `model` as an ONNX file that TensorRT builds into low-precision kernels, and returns the path.

    Args:
        model: quantized or not; a transformers model needs nothing else. It is not changed.
        path: the path of the file; weights of a big model go to `<path>.data`.
        shapes: ranges of the dynamic dimensions, as `--shapes` takes them; None sets no limits.
        inputs: examples of a module's positional inputs by name, for modules that are not transformers models.
        attention: "native" for TensorRT's fused FP8 attention, "plugin" for ours, "none" for 16 bit.
        attention_scales: required if the plan has attention in FP8, or `kv_cache` needs scales that the model lacks.
        capacity: tokens that each row of a decoder's KV cache holds; 0 makes a graph of one pass without a cache.
        genai: makes the graph that onnxruntime-genai runs (`genai`), with a cache that grows.
        kv_cache: format of the KV cache by our plugin, one of `CACHE_FORMATS`; None for the model's dtype.
        plan: the plan of the model; says whether attention is in FP8, and its digest is written.
        runtime: "tensorrt", or "onnxruntime" for a file of the operators that are fast there (`onnxruntime_graph`).

    Raises:
        ValueError: a layer, format, shape or option that cannot be exported; nothing is written.
    """
    path = Path(path)
    scales = _checked_scales(model, inputs, attention, attention_scales, capacity, genai, kv_cache, plan, runtime)
    with quiet(), experts_as_ops(model):
        if inputs is not None:
            with without_cache(model_configs(model)), decoder_graph.learned_biases(model):
                exported = trace(model, _arguments(model, inputs), inputs, dimension_ranges(inputs, shapes))
            program = translate(exported, inputs, None, "", model, runtime=runtime)
        elif genai:
            program = genai_program(model, kind=attention, scales=scales, runtime=runtime)
        elif capacity:
            names = {module: name for name, module in model.named_modules()}
            cached = GroupedAttention if runtime == "onnxruntime" and not scales else CachedAttention
            if runtime == "onnxruntime" and recurrent_functions(model):
                cached = HybridCache
            function = cached(names, kind=attention, scales=scales)
            if kv_cache is not None:
                function = QuantizedCache(names, format=kv_cache, measured=attention_scales or {})
            program = serving_program(model, capacity, shapes, function, runtime)
        else:
            program = _forward_program(model, shapes, attention, scales, runtime)
    if plan is not None:
        program.metadata_props[PLAN_KEY] = plan.digest()
    program.metadata_props[ATTENTION_KEY] = "native" if plan is None or plan.attention is None else attention
    examples, planned = (inputs or {}).items(), {} if plan is None else plan.by_name
    rounded = [n for n, x in model.named_modules() if isinstance(x, QuantLinear) and x.weight_format.gguf]
    record = ExportRecord(
        dtypes=parameter_dtypes(model), capacity=capacity, genai=genai, runtime=runtime, versions=tracer_versions(),
        inputs={name: [dtype_name(x.example.dtype), list(x.example.shape), list(x.dims)] for name, x in examples},
        shapes=[shapes] if isinstance(shapes, str) else list(shapes or ()) or None,
        kv_cache=None if kv_cache is None else kv_cache.name,
        head=next((name for name in rounded if name not in planned or planned[name].weight is None), None),
        scales=_recorded_scales(attention_scales) if scales or kv_cache is not None else {},
    )  # fmt: skip
    program.metadata_props[EXPORT_KEY] = json_text(record.to_dict())
    return _save(program, path)


def round_head(model: nn.Module, name: str) -> float:
    """Rounds an output head in 16 bit to INT8 in groups of 32, and returns how far that is from it."""
    head: Any = model.get_submodule(name)
    exact = head.weight.detach()
    weight = quantize(exact, GGUF_FORMATS["q8_0"], name=name)
    model.set_submodule(name, QuantLinear(weight, head.bias, dtype=exact.dtype))
    return float(torch.linalg.vector_norm(weight.dequantize() - exact) / torch.linalg.vector_norm(exact))


def _checked_scales(
    model: nn.Module, inputs: Mapping[str, decoder_graph.GraphInput] | None, attention: str,
    attention_scales: Mapping[str, AttentionScales] | None, capacity: int, genai: bool, kv_cache: Format | None,
    plan: Plan | None, runtime: str,
) -> Mapping[str, Sequence[float]]:  # fmt: skip
    """Returns FP8 scales of attention's operands, as the plan requires them; ValueError for what cannot be exported."""
    limits.check_model(model, runtime)
    scales: Mapping[str, Sequence[float]] = {}
    if plan is not None and plan.attention is not None and attention != "none":
        if inputs is not None:
            way_out = f"leave {option('input')} out, or pass {option('attention', 'none')}"
            raise ValueError(f"attention in {plan.attention} is for graphs with inputs of their own; {way_out}")
        if not attention_scales:
            raise ValueError(
                f"the plan has attention in {plan.attention}, and no scales were given; pass attention_scales from "
                "collect_attention_scales (--calib TEXT on the command line), or attention 'none'"
            )
        scales = decoder_graph.operand_scales(attention_scales)
    if inputs is not None and (capacity or genai):
        raise ValueError(
            f"a graph with a KV cache has inputs of its own; leave {option('input')} out, or pass "
            f"{option('capacity', 0)} without {option('genai', True)}"
        )
    if inputs is None and not hasattr(model, "main_input_name"):
        raise ValueError(
            f"{type(model).__name__} is not a transformers model: name each of its inputs, as in "
            f"{option('input', 'x:fp32:batch,3,224,224')}"
        )
    return scales


def tracer_versions() -> dict[str, str]:
    """Returns the installed packages, and the kind of processor, of which another may make another graph of a model."""
    # Where it has no AVX2, PyTorch's powers, and so the frequencies of RoPE, differ in the last bit.
    vectors = torch.backends.cpu.get_cpu_capability()
    versions = {"processor": platform.machine() + ("" if vectors.startswith("AVX") else f" {vectors}")}
    for name in ("torch", "transformers", "onnxscript"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def parameter_dtypes(model: nn.Module) -> list[str]:
    """Returns the dtypes of a model's parameters, which are not quantized."""
    return sorted({dtype_name(tensor.dtype) for tensor in model.parameters() if tensor.dtype.is_floating_point})


def own_metadata(file: Any) -> dict[str, str]:
    """Returns what the metadata of a loaded ONNX file hold of ours, by key."""
    return {entry.key: entry.value for entry in file.metadata_props if entry.key.startswith(PLAN_KEY.split(".")[0])}


def read_record(where: str, document: Any) -> tuple[ExportRecord, dict[str, Any]]:
    """Returns the JSON under `EXPORT_KEY`, and its options of `write_onnx`; UserError, after `where`, for damage."""
    try:
        record = ExportRecord.from_dict(parse_json(document) if isinstance(document, str) else document)
        inputs = {
            name: decoder_graph.GraphInput(torch.zeros(shape, dtype=getattr(torch, dtype), device="cpu"), tuple(dims))
            for name, (dtype, shape, dims) in record.inputs.items()
        }
        scales = {}
        for name, (numbers, formats) in record.scales.items():
            k, v, q, p = (None if x is None else torch.tensor(x, device="cpu") for x in numbers)
            scales[name] = AttentionScales(k, v, q, p, {}, *(x and FORMATS[x] for x in formats))
        kv_cache = record.kv_cache and FORMATS[record.kv_cache]
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        reason = one_line(error).removeprefix("ExportRecord: ")
        raise UserError(f"{where} {EXPORT_KEY} is damaged ({reason}); export it again") from None
    kept = {name: getattr(record, name) for name in ("shapes", "capacity", "genai", "runtime")}
    return record, {**kept, "inputs": inputs or None, "attention_scales": scales, "kv_cache": kv_cache}


def _recorded_scales(scales: Mapping[str, AttentionScales] | None) -> dict[str, Any]:
    return {
        name: [
            [None if x is None else x.tolist() for x in (module.k, module.v, module.q, module.p)],
            [x and x.name for x in (module.kv_format, module.attention_format)],
        ]
        for name, module in (scales or {}).items()
    }


def _arguments(model: nn.Module, inputs: Mapping[str, decoder_graph.GraphInput]) -> tuple[Any, ...] | dict[str, Any]:
    """Returns the caller's inputs by name where the model has parameters of these names, or else in their order.

    `added_cond_kwargs.time_ids` is an entry of a dict.
    """
    # Copies, because torch.export takes one tensor under two names for one input.
    examples = {name: x.example.clone() for name, x in inputs.items()}
    parameters = inspect.signature(model.forward).parameters
    unknown = [name for name in inputs if name.partition(".")[0] not in parameters]
    if unknown and hasattr(model, "main_input_name"):
        known = known_names(unknown[0], [name for name in parameters if name != "kwargs"])
        raise ValueError(f"{option('input', unknown[0])}: {type(model).__name__} has no input of this name; {known}")
    return tuple(examples.values()) if unknown else nested(examples)


def _forward_program(
    model: Any, shapes: str | Sequence[str] | None, attention: str, scales: Mapping[str, Sequence[float]], runtime: str
) -> Any:
    """Returns the ONNX model of one forward pass of a transformers model, as an `onnx_ir.Model`."""
    inputs = decoder_graph.model_inputs(model)
    decoder_graph.check_attends(model, {name: x.example for name, x in inputs.items()})
    names = {module: name for name, module in model.named_modules()}
    # Configs of models that read sounds too may have a number of seconds under this name, beside the one of their text.
    longest = getattr(text_config(model.config), "max_position_embeddings", None)
    ranges = dimension_ranges(inputs, shapes, longest=longest if isinstance(longest, int) else None)
    # Sliding windows need not cut sequences that are no longer than they are. The model's positions alone are no
    # limit: with RoPE the graph takes more.
    window = ranges.get(SEQUENCE, (1, None))[1] if shapes else None
    function = decoder_graph.Attention(names, kind=attention, scales=scales, window=window)
    with decoder_graph.attending(model, function, masked="attention_mask" in inputs):
        arguments = ({name: x.example for name, x in inputs.items()},)
        exported = trace(decoder_graph.Graph(model, function), arguments, inputs, ranges, split=len(inputs))
    return translate(exported, inputs, function.outputs, MODEL_PREFIX, model, runtime=runtime)


def _save(model: Any, path: Path) -> Path:
    """Writes the file, and above `EXTERNAL_BYTES` a second one of its weights; both or neither."""
    import onnx_ir as ir

    size = sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)
    with temporary_directory(path) as temporary:
        # The data file is put first (reverse order of names), so that a graph never stands without its weights.
        external = f"{path.name}.data" if size > EXTERNAL_BYTES else None
        ir.save(model, temporary / path.name, external_data=external)
        for file in sorted(temporary.iterdir(), reverse=True):
            put_file(file, path.parent / file.name)
        if external is None:
            (path.parent / f"{path.name}.data").unlink(missing_ok=True)
    return path
