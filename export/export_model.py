"""`export_model` turns a quantized model into a file that a runtime loads: what `quant export` does, in Python.

    check what was asked for → open → measure scales of attention → `EXPORTERS` → receipt

A model in memory is saved next to the destination first: exporters compare their result with stored codes and scales,
and some copy the tokenizer's files. The command reads its options and calls `export_model`.

`EXPORTERS` holds one function for each kind of export (`quant.export.kinds`). Each takes an `ExportJob` and returns the
record that the command prints. Nothing appears under the destination's name before everything is written and compared.
"""

import copy
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quant.base import old_names
from quant.base.atomic import claimed, temporary_directory
from quant.base.errors import UserError, check_installed, counted, known_names, listed, megabytes, option, warn
from quant.base.json_files import write_json
from quant.base.listener import SILENT, Listener
from quant.base.torch_modes import in_own_modes
from quant.calibration.attention_names import text_config
from quant.calibration.attention_scales import AttentionScales, collect_attention_scales
from quant.calibration.layer_result import Quantized
from quant.calibration.session import Session
from quant.calibration.texts import sources
from quant.export.aoti.package import export_aoti, export_aoti_decoder, find_device
from quant.export.checkpoint.convert import convert
from quant.export.checkpoint.files.directory import (
    check_apart,
    check_destination,
    check_parents,
    check_room,
    new_directory,
)
from quant.export.checkpoint.files.layout import LAYOUT_NAMES
from quant.export.checkpoint.files.tensors import read_layer
from quant.export.checkpoint.load import check_checkpoint, describe, load
from quant.export.checkpoint.open_checkpoint import Checkpoint, outline
from quant.export.checkpoint.save import save
from quant.export.gguf.export_gguf import check_gguf, gguf_notes, stored_vocabulary, vocabulary, write_gguf
from quant.export.kinds import CALIB_SAMPLES, CHOICES, DTYPES, KINDS, SEQLEN
from quant.export.onnx.compare_with_torch import check_file, verify, worst_layer
from quant.export.onnx.decoder_graph import GraphInput, is_decoder, model_inputs
from quant.export.onnx.dynamic_shapes import dimension_ranges
from quant.export.onnx.expert_nodes import check_experts
from quant.export.onnx.export_onnx import round_head, write_onnx
from quant.export.onnx.genai import write_genai_files
from quant.export.onnx.limits import layer_of_tensorrt, loaded, narrowest_dtype, onnxruntime_problem
from quant.export.onnx.opsets import RUNTIMES
from quant.export.onnx.serving import CACHE_FORMATS, CachedAttention, cache_shapes, holds_cache_scales
from quant.export.tensorrt.audit import failures
from quant.export.tensorrt.build import BuildOptions, check_tensors, export_engine
from quant.export.tensorrt.gpu_targets import choose_common_library, packages_of_engine, resolve_targets
from quant.export.tensorrt.torch_tensorrt import compile_engine
from quant.formats.format import GGUF_FORMATS, INT4, INT8, Format
from quant.formats.tensor import BlockScaledTensor
from quant.generate.generate import cast_unquantized
from quant.kernels.attention.attention_operands import DIMS
from quant.kernels.attention.kv_pages import kv_format
from quant.kernels.linear.conv import QuantConv
from quant.kernels.linear.quant_linear import QuantLinear, refuse_residual
from quant.models.files import SourceKind, find_checkpoint, local_gguf, packages_of
from quant.models.gguf_architectures import head_dim
from quant.models.huggingface import load_tokenizer, remote_code
from quant.models.open_model import Source
from quant.recipes.callers_model import unwrapped
from quant.recipes.plan import PLAN_FILE, Plan
from quant.report.report import rewrite

_INPUT_DTYPES = {**DTYPES, "int64": "int64"}
_OPTIONS = {"inputs": "input", "features": "engine_feature"}  # those that the command does not call by their name
_LEAST = {"capacity": 0, "calib_samples": 1, "seqlen": 1}


@dataclass(frozen=True)
class Exported:
    """The result of `quant.export_model`.

    Attributes:
        path: the file or directory that was written.
        kind: the kind of export, such as "onnx".
        record: all that is known of it, as `quant export --json` prints it.
    """

    path: Path
    kind: str
    record: Mapping[str, Any] = field(repr=False)

    @property
    def files(self) -> dict[str, int]:
        """Sizes in bytes of the written files, by name."""
        # The record of an engine is its receipt, which lies beside it and knows no sizes.
        alone = {self.path.name: self.path.stat().st_size} if self.path.is_file() else {}
        return dict(self.record.get("files", alone))

    @property
    def layers(self) -> list[dict[str, Any]]:
        """A comparison of each layer with PyTorch: `onnx` and `checkpoint` are relative errors.

        Empty where no graph was compared.
        """
        return list(self.record.get("layers", ()))

    @property
    def audit(self) -> list[dict[str, Any]]:
        """A row for each layer of an engine: its `planned` and its `found` precision; empty for other exports."""
        return list(self.record.get("audit", ()))

    @property
    def warnings(self) -> list[str]:
        """Sentences that were Python warnings, too."""
        return list(self.record.get("warnings", ()))


@in_own_modes
def export_model(
    model: str | Path | nn.Module | Quantized,
    to: str,
    out: str | Path | None = None,
    *,
    overwrite: bool = False,
    module: nn.Module | None = None,
    tokenizer: Any = None,
    inputs: Mapping[str, str | Tensor] | None = None,
    shapes: str | Sequence[str] = (),
    dtype: str | None = None,
    capacity: int | None = None,
    kv_cache: str | None = None,
    lm_head: str | None = None,
    attention: str = "native",
    data: str | Path | Sequence[str | Path] | Tensor | None = None,
    calib_samples: int = CALIB_SAMPLES,
    seqlen: int = SEQLEN,
    genai: bool = False,
    target: str | None = None,
    backend: str | None = None,
    features: str | Sequence[str] = (),
    allow_fallback: bool = False,
    trust_remote_code: bool = False,
    listener: Listener = SILENT,
) -> Exported:
    """Exports a quantized model to ONNX, a TensorRT engine, a package or another layout, as `quant export` does.

        exported = quant.export_model("small-nvfp4", "tensorrt", target="sm120")

    Every layer of an ONNX file or engine is compared with PyTorch, and a file that differs is not written.

    Args:
        model: a checkpoint's directory, whose report gets the receipt; the result of `quant.quantize`; or a quantized
            module. A module is not changed, and for a while there are two of it in memory.
        to: "onnx", "tensorrt", "aoti", "torch-tensorrt", "gguf", "modelopt" or "compressed-tensors".
        out: the file or directory to write; by default next to the directory `model`, with an ending for the kind.
        overwrite: replaces `out`.
        module: the unquantized module, for a directory without config.json; it is changed in place.
        tokenizer: the tokenizer of a model in memory, for exports that hold one.
        inputs: the inputs of a module that is not a transformers model, in order: "fp32:batch,3,224,224", a dtype and
            dimensions, where named ones are dynamic; or an example, whose dimensions are fixed.
        shapes: ranges of dynamic dimensions, such as "batch=1:1:4,sequence=32:128:512"; several are profiles of an
            engine.
        dtype: "fp32", "fp16" or "bf16", for everything that is not quantized; None is the model's.
        capacity: the tokens that each row of a decoder's KV cache holds; 0 exports one pass without a cache. None is
            4096, or the model's limit.
        kv_cache: the format of a decoder's KV cache, "fp8" or "nvfp4" for TensorRT with our plug-in; None is 16 bit.
        lm_head: "int8" rounds an output head that is in 16 bit to INT8 in groups of 32, in an ONNX file for
            onnxruntime; "16bit" leaves it. None is "int8" for decoders in INT4 or INT8 with a cache, of whose bytes the
            head is a large part for each token.
        attention: how FP8 attention of the plan runs: "native" in TensorRT, "plugin", or "none" in 16 bit.
        data: calibration data for FP8 attention and `kv_cache`: sources as `quantize --calib` takes them, or token ids
            `[rows, seqlen]`. None is text that the model writes, and samples.
        calib_samples: rows that are read from `data`.
        seqlen: tokens of a row.
        genai: writes what onnxruntime-genai loads: graph, configuration and tokenizer.
        target: the GPU of an engine: "sm89", "sm120", "h100", "rtx5090", "local", …; for TensorRT-RTX also several. Of
            an ONNX file the runtime: "onnxruntime", the default where it runs the formats, or "tensorrt".
        backend: the builder of the engine, "tensorrt_rtx" or "tensorrt".
        features: "refit", "weight-streaming" or "version-compatible", of an engine.
        allow_fallback: accepts an engine with layers in half precision.
        trust_remote_code: lets transformers run the Python files that config.json names in `auto_map`.
        listener: shows progress; `quant.Listener(print)` calls `print(stage, done, total)`.

    Raises:
        UserError, ValueError: an option that this kind does not take or has no such value, or a model, format or target
            that cannot be exported; the message names it. Nothing is written.
        OSError: `out` is taken, or cannot be written.
    """
    build: dict[str, Any] = {"target": target, "backend": backend, "features": _several(features)}
    graph: dict[str, Any] = {"shapes": _several(shapes), "attention": attention, "dtype": dtype, "capacity": capacity}
    graph |= {"genai": genai, "kv_cache": kv_cache, "lm_head": lm_head, "allow_fallback": allow_fallback}
    sampling = {"calib": data, "calib_samples": calib_samples, "seqlen": seqlen}
    _check_options(to, {**build, **graph, **sampling, "inputs": inputs})
    rows: sources.Rows | Tensor
    if isinstance(data, Tensor):
        rows = data
    else:
        rows = sources.Rows(() if data is None else _several(data), calib_samples, seqlen)
        sources.check_sources(rows.sources, option("calib"))
    with ExitStack() as stack:
        stack.enter_context(remote_code(trust_remote_code))
        stored = find_checkpoint(model) if isinstance(model, str | Path) else None
        if stored is not None:
            check_checkpoint(stored)
        path = _destination(model, to) if out is None else Path(out).expanduser()
        # Held until the end, so that two exports never write the same file.
        stack.enter_context(claimed(path))
        # Loading a model takes longer than everything that is checked here.
        own = [] if stored is None else packages_of(str(stored))
        read = [] if isinstance(rows, Tensor) else sources.packages_of_sources(rows.sources)
        _check_request(to, stored, path, overwrite, [*own, *read], **build)
        graph_inputs = {name: _parsed_input(name, value) for name, value in (inputs or {}).items()} or None
        with listener.step(f"loading {model}" if stored is not None else "saving the model"):
            directory, opened, plan = stack.enter_context(_opened(model, stored, to, path, module, tokenizer))
        if "inputs" in KINDS[to][1]:
            runtime = "onnxruntime" if to == "onnx" and target != "tensorrt" else "tensorrt"
            check_experts(opened, runtime, in_16_bit=to in ("onnx", "tensorrt"))
        job = ExportJob(
            kind=to, directory=directory, model=opened, plan=plan, out=path, overwrite=overwrite, inputs=graph_inputs,
            attention_scales=None, progress=stack.enter_context(listener.stages()), **build, **graph,
        )  # fmt: skip
        # The sizes of a cache decide what is refused, and attention's scales are measured only after that.
        _check_attention(job)
        if attention == "plugin" and capacity is None:
            job = replace(job, capacity=0)  # our plugin in the parser's graphs knows no cache
        record = EXPORTERS[to](replace(job, attention_scales=_measured_scales(job, rows, listener)))
    # Only a record with comparisons of layers is a receipt, which the report can show.
    if stored is not None and "layers" in record and (stored / "report.json").is_file():
        rewrite(stored, record)
    return Exported(path, to, record)


def _several(values: str | Path | Sequence[str | Path]) -> tuple[str, ...]:
    return (str(values),) if isinstance(values, str | Path) else tuple(map(str, values))


def _check_options(kind: str, options: Mapping[str, Any]) -> None:
    """Raises UserError for an unknown kind, an option that this kind does not take, or an unknown value of one.

    An option with its default counts as not given.
    """
    if kind in old_names.KINDS:
        raise UserError(f"{option('to', kind)} is no kind of export any more: {old_names.KINDS[kind]}")
    if kind not in KINDS:
        raise UserError(f"{option('to', kind)}: no such kind of export; {known_names(kind, KINDS)}")
    defaults = {"attention": "native", "calib_samples": CALIB_SAMPLES, "seqlen": SEQLEN}
    for name, value in options.items():
        named = _OPTIONS.get(name, name)
        default = defaults.get(name)
        is_given = isinstance(value, Tensor) or not (value is False or value in (None, (), {}, default))
        if is_given and name not in KINDS[kind][1]:
            takers = [option("to", taker) for taker, (_, options_of_kind) in KINDS.items() if name in options_of_kind]
            raise UserError(f"{option('to', kind)} has no use for {option(named)}; it is for {', '.join(takers)}")
        words = value if isinstance(value, tuple) else (value,)
        for word in words if name in CHOICES and value != default else ():
            if word not in CHOICES[name]:
                raise UserError(f"{option(named, word)}: expected one of {', '.join(CHOICES[name])}")
        if name in _LEAST and value is not None and (not isinstance(value, int) or value < _LEAST[name]):
            raise UserError(f"{option(named, repr(value))}: expected a number of at least {_LEAST[name]}")


def _destination(model: Any, kind: str) -> Path:
    """Returns the default destination: next to the checkpoint, with an ending for its kind."""
    if not isinstance(model, str | Path):
        raise UserError(
            f"{option('out')} is missing: a model in memory has no directory next to which an export could lie"
        )
    path = Path(model)
    if not path.exists():  # a name on the hub
        path = Path(path.name)
    elif path.name in ("", ".."):
        path = Path(os.path.abspath(path))
    return path.parent / f"{path.name}{KINDS[kind][0]}"


def _parsed_input(name: str, value: str | Tensor) -> GraphInput:
    """Parses `fp32:batch,3,224,224`: a dtype, and dimensions, where named ones are dynamic."""
    if isinstance(value, Tensor):
        return GraphInput(value.detach().cpu(), tuple(value.shape))
    dtype, _, dims = value.partition(":")
    sizes = tuple(int(dim) if dim.isdecimal() else dim for dim in dims.split(","))
    are_names = all(isinstance(dim, int) or dim.isidentifier() for dim in sizes)
    if dtype not in _INPUT_DTYPES or not name or not are_names:
        raise UserError(
            f"{option('input', f'{name}:{value}')}: expected NAME:DTYPE:DIMS with DTYPE one of "
            f"{', '.join(_INPUT_DTYPES)}, and DIMS such as batch,3,224,224"
        )
    # Dynamic dimensions are traced at 2: torch.export specialises on sizes 0 and 1.
    shape = [dim if isinstance(dim, int) else 2 for dim in sizes]
    return GraphInput(torch.zeros(shape, dtype=getattr(torch, _INPUT_DTYPES[dtype]), device="cpu"), sizes)


def _check_request(
    kind: str, directory: Path | None, out: Path, overwrite: bool, packages: Sequence[str], target: str | None,
    backend: str | None, features: Sequence[str],
) -> None:  # fmt: skip
    """Refuses a request that cannot succeed, before a model is loaded.

    Raises UserError for a package that is missing, among `packages` or those of the kind, or an engine without a
    target; ValueError for a target for which no engine can be built here, and FileExistsError if the destination is
    taken, or is, holds or lies in the checkpoint `directory`; None is a model in memory.
    """
    check_apart(out, directory)
    if kind == "onnx" and target not in (None, *RUNTIMES):
        raise UserError(
            f"{option('target', target)}: an ONNX file is for {' or '.join(RUNTIMES)}; an engine for a GPU is "
            f"{option('to', 'tensorrt')}"
        )
    if kind in ("tensorrt", "torch-tensorrt") and target is None:
        raise UserError(
            f"an engine is built for one kind of GPU: name it with {option('target')}, such as sm120, sm89 or local"
        )
    of_kind = ["onnx", "onnxscript"] if kind in ("onnx", "tensorrt") else []
    if kind == "tensorrt" and target is not None:
        of_kind += packages_of_engine(resolve_targets(target), backend)
    check_installed([*packages, *of_kind], f"{option('to', kind)}")
    if kind == "tensorrt" and target is not None:
        choose_common_library(resolve_targets(target), backend, features)
    # Half of the weights at least: a head, or weights in FP32, can become smaller on the way.
    room = 0 if directory is None else sum(file.stat().st_size for file in directory.glob("*.safetensors")) // 2
    check_room(out, room)
    if kind in ("onnx", *LAYOUT_NAMES):
        check_destination(out, overwrite=overwrite)
        return
    check_parents(out)
    if out.is_dir():
        raise FileExistsError(f"{out} is a directory; name a file with {option('out')}")
    if out.exists() and not overwrite:
        raise FileExistsError(
            f"{out} exists; pass {option('overwrite', True)} to replace it, or choose another {option('out')}"
        )


@contextmanager
def _opened(
    model: Any, stored: Path | None, kind: str, out: Path, module: nn.Module | None, tokenizer: Any
) -> Iterator[tuple[Path, nn.Module, Plan | None]]:
    """Opens the checkpoint `stored`, or saves a model in memory to a temporary directory next to `out` while open.

    `module` is the module to be filled, for a checkpoint without config.json.
    """
    with ExitStack() as stack:
        directory, copied = stored, None
        if directory is None:
            quantized, plan = (model.model, model.plan) if isinstance(model, Quantized) else (model, None)
            quantized, module = unwrapped(quantized, "export_model"), None
            directory = stack.enter_context(temporary_directory(out)) / out.stem
            if kind == "gguf":  # its formats need not be those of a checkpoint
                directory.mkdir()
                if tokenizer is not None:
                    tokenizer.save_pretrained(directory)
                yield directory, quantized, plan
                return
            with warnings.catch_warnings():
                if kind not in LAYOUT_NAMES:
                    # They are about servers of this checkpoint, which none will see.
                    warnings.simplefilter("ignore", UserWarning)
                save(quantized, plan, directory, tokenizer=tokenizer)
            if not (directory / "config.json").is_file():  # which would say how to build the model
                copied = copy.deepcopy(quantized).cpu().eval()
        if kind in LAYOUT_NAMES:
            # Layouts move stored bytes: shapes on the meta device are enough.
            loaded = outline(directory)
        else:
            loaded = load(directory, module) if copied is None else copied
        yield directory, loaded, describe(directory)[0] if (directory / PLAN_FILE).is_file() else None


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
    lm_head: str | None
    target: str | None
    backend: str | None
    allow_fallback: bool
    features: tuple[str, ...]
    progress: Callable[[str, int, int], None]

    def cache_capacity(self) -> int:
        """Returns how many tokens of a KV cache the graph has room for; 0 for a graph without a cache of fixed size.

        As many as requested, or `DEFAULT_CAPACITY` for a decoder that is exported as a serving graph.
        """
        serves = "capacity" in KINDS[self.kind][1] and self.inputs is None and not self.genai
        if self.capacity is None and serves and is_decoder(self.model):
            positions = getattr(text_config(self.model.config), "max_position_embeddings", None)
            return min(DEFAULT_CAPACITY, positions or DEFAULT_CAPACITY)
        return self.capacity or 0

    @property
    def fp8_attention(self) -> bool:
        """Whether the graph has attention in FP8."""
        return self.plan is not None and self.plan.attention is not None and self.attention != "none"

    @property
    def runtime(self) -> str:
        """The runtime that an ONNX file is written for, one of `RUNTIMES`."""
        if self.kind != "onnx":
            return "tensorrt"
        of_tensorrt = layer_of_tensorrt(self.model) is not None or self.fp8_attention or self.cache_format is not None
        return self.target or ("tensorrt" if of_tensorrt or self.dtype == "bf16" else "onnxruntime")

    @property
    def cache_format(self) -> Format | None:
        """The format of the graph's KV cache; None for the model's dtype."""
        return kv_format(self.kv_cache)


def export_onnx_files(job: ExportJob) -> dict[str, Any]:
    """Writes a directory with the ONNX file, plan and receipt; with --genai the files that its runtime needs."""
    if job.genai:
        _check_genai(job)
    notes = [*_put_in_dtype(job), *_graph_notes(job)]
    problem = onnxruntime_problem(job.model, fp8_attention=job.fp8_attention, kv_cache=job.cache_format)
    if problem and job.target == "onnxruntime":
        raise UserError(f"{option('target', job.target)}: {problem}")
    notes += [problem] if problem else []
    head = _round_head(job)
    with new_directory(job.out, overwrite=job.overwrite) as folder:
        path = folder / "model.onnx"
        receipt = _write_verified(job, path, notes)
        notes += _unreached_notes(receipt)
        if problem is None and find_spec("onnxruntime") is not None:
            loaded(path)
        if job.genai:
            write_genai_files(job.model, job.directory, folder)
        if job.plan is not None:
            job.plan.save(folder / PLAN_FILE)
        write_json(folder / "receipt.json", receipt)
        files = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    return {"out": str(job.out), "files": files, "warnings": notes, "notes": [*head, *_cost_notes(job)], **receipt}


def _round_head(job: ExportJob) -> list[str]:
    """Rounds a head in 16 bit to INT8 if `--lm-head` or its default says so; a note of that."""
    model: Any = job.model
    head: Any = model.get_output_embeddings() if is_decoder(model) else None
    elements = {module.weight_format.element for module in model.modules() if isinstance(module, QuantLinear)}
    by_tokens = job.genai or job.cache_capacity() > 0  # one pass reads the head once for all tokens
    is_default = by_tokens and bool(elements & {INT4, INT8}) and job.runtime == "onnxruntime"
    if job.lm_head == "16bit" or (job.lm_head is None and not is_default):
        return []
    format, refusal = GGUF_FORMATS["q8_0"], ""
    if job.runtime != "onnxruntime":
        refusal = f"{option('target', job.runtime)} does not take it"
    elif type(head) is not nn.Linear:
        refusal = "this model has no output head in 16 bit"
    elif not format.divides(head.weight.shape):
        refusal = f"its {head.in_features} inputs are no multiple of {format.block[1]}"
    if refusal:
        if job.lm_head is None:
            return []
        raise UserError(f"{option('lm_head', job.lm_head)}: {refusal}; leave it out")
    name = next(name for name, module in model.named_modules() if module is head)
    error = round_head(model, name)
    return [
        f"{name} is in INT8 in groups of {format.block[1]}, {error:.1%} from the checkpoint's, because a token "
        f"reads all of it; {option('lm_head', '16bit')} leaves it as it is"
    ]


def export_tensorrt(job: ExportJob) -> dict[str, Any]:
    """Builds and audits an engine from its ONNX file, and writes it with its receipt (`--to tensorrt`)."""
    assert job.target is not None
    notes = [*_put_in_dtype(job), *_graph_notes(job)]
    for target in resolve_targets(job.target):
        check_tensors(job.model, job.plan, target)
    with temporary_directory(job.out) as folder:
        receipt = _write_verified(job, folder / "model.onnx", notes)
        build = BuildOptions(job.target, job.shapes or None, job.backend, job.progress, job.features)
        record = export_engine(
            folder / "model.onnx", job.out, build, plan=job.plan, attention=job.attention,
            allow_fallback=job.allow_fallback, layers=receipt["layers"],
        )  # fmt: skip
        return {**record, "notes": _cost_notes(job)}


def export_aoti_package(job: ExportJob) -> dict[str, Any]:
    """Writes a `.pt2` package (`--to aoti`)."""
    refuse_residual(job.model, "AOTInductor")
    notes = [*_put_in_dtype(job), *_graph_notes(job)]
    _warn(notes)
    if capacity := job.cache_capacity():
        plan = job.plan.digest() if job.plan is not None else ""
        model = job.model.to(find_device(job.out, None))
        export_aoti_decoder(model, job.out, capacity, shapes=list(job.shapes), plan=plan)
    else:
        inputs = job.inputs or model_inputs(job.model)
        dims = {n: {axis: dim for axis, dim in enumerate(x.dims) if isinstance(dim, str)} for n, x in inputs.items()}
        examples, ranges = {n: x.example for n, x in inputs.items()}, dimension_ranges(inputs, job.shapes)
        export_aoti(job.model, job.out, examples, dims=dims, ranges=ranges, attention_scales=job.attention_scales)
    return _file_record(job, notes)


def export_torch_tensorrt(job: ExportJob) -> dict[str, Any]:
    """Writes an engine that torch-tensorrt compiles (`--to torch-tensorrt`)."""
    refuse_residual(job.model, "torch-tensorrt")
    _put_in_dtype(job)
    inputs = {name: x.example for name, x in (job.inputs or model_inputs(job.model)).items()}
    notes = []
    if job.inputs is None and is_decoder(job.model):
        notes.append(
            "torch-tensorrt compiles one pass over a fixed number of tokens, without a KV cache; a decoder that is to "
            f"generate text goes through {option('to', 'tensorrt')}, onnx or aoti"
        )
    _warn(notes)
    assert job.target is not None
    findings = compile_engine(job.model, job.out, inputs, job.target, plan=job.plan, allow_fallback=job.allow_fallback)
    return {**_file_record(job, notes), "audit": [asdict(each) for each in findings], "passed": not failures(findings)}


def export_gguf(job: ExportJob) -> dict[str, Any]:
    """Writes a GGUF file, with the tokenizer that lies in the checkpoint's directory (`--to gguf`)."""
    check_gguf(job.model, job.plan)
    notes, words = gguf_notes(job.model, job.plan), None
    origin = local_gguf(str(job.plan.provenance.get("model", ""))) if job.plan is not None else None
    if origin is not None:
        words = stored_vocabulary(origin)
    elif (job.directory / "tokenizer.json").is_file():
        config: Any = job.model.config
        words = vocabulary(load_tokenizer(job.directory), config.vocab_size)
    else:
        notes.append(f"{job.directory} has no tokenizer.json: llama.cpp takes the file for token ids alone")
    _warn(notes)
    done = write_gguf(job.model, job.out, job.plan, words=words, progress=job.progress)
    return {"out": str(job.out), "warnings": notes, "passed": True, **done}


def export_layout(job: ExportJob) -> dict[str, Any]:
    """Rewrites the checkpoint (`--to modelopt`, `--to compressed-tensors`); the job's model is an outline."""
    done = convert(job.directory, job.out, job.kind, overwrite=job.overwrite, model=job.model)
    return {"out": str(job.out), **done, "passed": True}


EXPORTERS: dict[str, Callable[[ExportJob], dict[str, Any]]] = {
    "onnx": export_onnx_files, "tensorrt": export_tensorrt, "aoti": export_aoti_package,
    "torch-tensorrt": export_torch_tensorrt, "gguf": export_gguf, "modelopt": export_layout,
    "compressed-tensors": export_layout,
}  # fmt: skip


def _warn(notes: Sequence[str]) -> None:
    for note in notes:
        warn(note)


def _file_record(job: ExportJob, notes: list[str]) -> dict[str, Any]:
    files = {job.out.name: job.out.stat().st_size}
    return {"out": str(job.out), "warnings": notes, "notes": _cost_notes(job), "passed": True, "files": files}


def _write_verified(job: ExportJob, path: Path, notes: Sequence[str]) -> dict[str, Any]:
    """Writes the ONNX file of a job and returns its receipt; UserError if a layer in it differs from PyTorch's."""
    _warn(notes)
    write_onnx(
        job.model, path, shapes=list(job.shapes) or None, inputs=job.inputs, attention=job.attention,
        attention_scales=job.attention_scales, capacity=job.cache_capacity(), genai=job.genai,
        kv_cache=job.cache_format, plan=job.plan, runtime=job.runtime,
    )  # fmt: skip
    check_file(path)
    stored = None if job.plan is None else _stored_weights(job.directory, job.model, job.plan)
    receipt = verify(job.model, path, checkpoint=stored, progress=partial(job.progress, "compare"))
    if not receipt["passed"]:
        worst = worst_layer(receipt)
        assert worst is not None
        failed = sum(not layer["passed"] for layer in receipt["layers"])
        raise UserError(
            f"{failed} of {counted(len(receipt['layers']), 'exported layer')} differ from PyTorch; the worst is "
            f"{worst['name']}: relative error {worst['onnx']:.2g} of its ONNX nodes. "
            "This is a defect of the export; nothing was written"
        )
    _warn(_unreached_notes(receipt))
    return receipt


def _stored_weights(directory: Path, model: nn.Module, plan: Plan) -> Callable[[str], BlockScaledTensor | None]:
    """Returns a function that reads a layer's weight; None for a head that the export itself has rounded."""
    tensors = Checkpoint(directory, model).tensors
    return lambda name: None if plan.by_name[name].weight is None else read_layer(tensors, plan.by_name[name])[0]


def _unreached_notes(receipt: Mapping[str, Any]) -> list[str]:
    """Returns a sentence on the quantized layers that a file lacks, because its outputs do not depend on them."""
    if not receipt["unreached"]:
        return []
    layers = counted(len(receipt["unreached"]), "quantized layer")
    return [f"no output of the graph depends on {layers}, left out of it: {listed(receipt['unreached'], 3)}"]


def _put_in_dtype(job: ExportJob) -> list[str]:
    """Casts unquantized tensors to --dtype, or to FP32 where a runtime lacks BF16, or FP64; a note of the latter."""
    dtype, notes = job.dtype, []
    if dtype is None and job.runtime == "onnxruntime" and narrowest_dtype(job.model) == torch.bfloat16:
        dtype = "fp32"
        notes.append(
            "the model is in BF16, which onnxruntime does not run on a processor, so the file is in FP32; "
            f"{option('dtype', 'fp16')} halves what is not quantized"
        )
    elif dtype is None and any(parameter.dtype == torch.float64 for parameter in job.model.parameters()):
        dtype = "fp32"
        notes.append("the model is in FP64, which no exported file has: what is not quantized is in FP32 there")
    if dtype is not None:
        # An input meets tensors of its own dtype in the graph.
        short = {getattr(torch, name): key for key, name in DTYPES.items()}
        for name, graph_input in (job.inputs or {}).items():
            own = short.get(graph_input.example.dtype, dtype)
            if own != dtype:
                raise UserError(
                    f"{option('input')} {name} is in {own}, and everything that is not quantized in {dtype}: give both "
                    f"the same dtype, {option('input', f'{name}:{dtype}:…')} or {option('dtype', own)}"
                )
        cast_unquantized(job.model, DTYPES[dtype])
    return notes


def _graph_notes(job: ExportJob) -> list[str]:
    notes = []
    senses = {"vision_config": "images", "audio_config": "sounds"}
    config = getattr(job.model, "config", None)
    lost = [noun for name, noun in senses.items() if getattr(config, name, None) is not None]
    if lost and job.inputs is None and is_decoder(job.model):
        notes.append(
            f"{type(job.model).__name__} reads {' and '.join(lost)} too, and this graph reads tokens only; serve the "
            "checkpoint (vLLM) for both"
        )
    planned = None if job.plan is None else job.plan.kv_of_all
    if job.plan is not None and job.plan.has_kv_mix:
        notes.append(f"the plan has the KV cache in {job.plan.kv_text}, and this graph has one format for all layers")
    if job.cache_format is not None:
        notes.append(
            f"the KV cache in {job.cache_format} is a node of our plugin: the engine runs in programs that load its "
            "C++ library (docs/engine-audit.md)"
        )
    elif planned is not None and not job.kv_cache and (job.cache_capacity() or job.genai):
        way_out = f"; {option('kv_cache', planned)} keeps it as planned in engines that load our plugin"
        has_kernel = planned.name in CACHE_FORMATS and head_dim(text_config(job.model.config)) in DIMS
        notes.append(
            f"the plan has the KV cache in {planned}, and this graph keeps it in 16 or 32 bit"
            + way_out * ("kv_cache" in KINDS[job.kind][1] and has_kernel)
        )
    return notes


def _cost_notes(job: ExportJob) -> list[str]:
    notes = []
    if job.runtime == "onnxruntime":
        weights = {m.weight_format for m in job.model.modules() if isinstance(m, QuantLinear | QuantConv)}
        if any(format.element.name == "int4" for format in weights):
            notes.append(
                "onnxruntime multiplies INT4 weights by inputs that it rounds to INT8 in groups; the session's option "
                "session.qdq_matmulnbits_accuracy_level=1 keeps them in FP32, at a quarter of the speed"
            )
        if any(format.element.name == "e4m3" for format in weights):
            notes.append("onnxruntime has no FP8 products on a processor: it dequantizes these weights once, at load")
    elif capacity := job.cache_capacity():
        function = CachedAttention({module: name for name, module in job.model.named_modules()})
        with function.replacing(job.model):
            parts = cache_shapes(job.model, function)
        bits = 8 * parts[0][2].itemsize if job.cache_format is None else job.cache_format.bits_per_weight()
        size = megabytes(sum(heads * dim for heads, dim, _ in parts) * capacity * bits / 8)
        notes.append(
            f"each step reads all {capacity} tokens of a row's cache, filled or not, {size}: a smaller "
            f"{option('capacity')} is faster"
        )
    return notes


def _check_genai(job: ExportJob) -> None:
    """Raises UserError for a graph that no execution provider of onnxruntime-genai runs, or that has no tokenizer."""
    if job.capacity is not None or job.inputs is not None:
        given = option("input" if job.capacity is None else "capacity")
        raise UserError(f"{option('genai', True)}: its cache grows and its inputs are fixed; leave {given} out")
    # The library makes its tokenizer from this file. Exporting takes long enough to look for it before.
    if not (job.directory / "tokenizer.json").is_file():
        raise UserError(
            f"{job.directory}: onnxruntime-genai needs tokenizer.json, which is not there: put it there, or leave "
            f"{option('genai', True)} out"
        )
    of_tensorrt = layer_of_tensorrt(job.model)
    # The provider of TensorRT-RTX has FP4, but neither TensorRT's MXFP8 nor its attention in FP8.
    if of_tensorrt is not None and of_tensorrt[1] != "nvfp4":
        layer, format = of_tensorrt
        raise UserError(
            f"{option('genai', True)}: {layer} is in {format}, which no provider of onnxruntime runs; use "
            f"{option('to', 'tensorrt')}"
        )


def _check_attention(job: ExportJob) -> None:
    """Raises UserError where a graph has no place for a KV cache in a format, or for the plan's attention.

    A KV cache of our plugin has attention in 16 bit, and so has a package with a KV cache.
    """
    cached = job.cache_capacity() > 0
    if job.cache_format is not None and not cached:
        raise UserError(
            f"{option('kv_cache', job.kv_cache)} is for a decoder's serving graph; leave {option('capacity', 0)}, "
            f"{option('genai', True)} and {option('input')} out"
        )
    if job.plan is None or not job.fp8_attention:
        return
    if job.genai:
        raise UserError(
            f"{option('genai', True)}: no provider of onnxruntime has attention in FP8; pass "
            f"{option('attention', 'none')}"
        )
    if job.cache_format is not None:
        raise UserError(
            f"{option('kv_cache', job.kv_cache)}: the plugin attends in 16 bit over its cache, and the plan has "
            f"attention in {job.plan.attention}; pass {option('attention', 'none')} with it"
        )
    if job.kind == "aoti" and cached:
        raise UserError(
            f"the plan has attention in {job.plan.attention}, which a package with a KV cache does not: pass "
            f"{option('attention', 'none')}, or {option('capacity', 0)} for a package of one pass"
        )
    if job.kind == "torch-tensorrt":
        raise UserError(
            f"the plan has attention in {job.plan.attention}, and torch-tensorrt has no op for that: pass "
            f"{option('attention', 'none')} to export attention in 16 bit, or {option('to', 'tensorrt')}"
        )


def _measured_scales(
    job: ExportJob, rows: sources.Rows | Tensor, listener: Listener
) -> dict[str, AttentionScales] | None:
    """Returns the scales of attention and of the KV cache that no checkpoint holds; None if none are needed.

    The scales of FP8 attention are in no checkpoint. Those of a cache are, if it was quantized for that cache.
    """
    model, plan = job.model, job.plan
    cache_format, attention_format, session = job.cache_format, None, Session(progress=job.progress)
    if plan is not None and job.fp8_attention and "attention" in KINDS[job.kind][1]:
        cache_format = attention_format = plan.attention
    elif cache_format is None or holds_cache_scales(model, cache_format):
        return None
    if not isinstance(rows, Tensor):
        # The dtype of everything that is not quantized, in which the model runs.
        dtype, path = next(model.parameters()).dtype, job.directory
        source = Source(
            name=str(path), kind=SourceKind.HUGGINGFACE, model=model, state_dict=None, path=path, dtype=dtype
        )
        data, _ = sources.read_calibration(source, rows, session, listener=listener, plan=plan)
        rows = sources.as_rows(model, data, "attention's scales")
    return collect_attention_scales(
        model, rows, kv_format=cache_format, attention_format=attention_format, session=session
    )
