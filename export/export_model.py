"""`export_model` turns a quantized model into a file that a runtime loads: what `quant export` does, in Python.

    check what was asked for → open → measure scales of attention → `EXPORTERS` → receipt

A model in memory is saved next to the destination first: exporters compare their result with stored codes and scales,
and some copy the tokenizer's files. The command reads its options and calls `export_model`.
"""

import copy
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from quant.base import old_names
from quant.base.atomic import claimed, temporary_directory
from quant.base.errors import UserError, check_installed, known_names, option
from quant.base.listener import SILENT, Listener
from quant.base.torch_modes import in_own_modes
from quant.calibration.attention_scales import AttentionScales, collect_attention_scales
from quant.calibration.layer_result import Quantized
from quant.calibration.session import Session
from quant.calibration.texts import sources
from quant.export.checkpoint.files.directory import check_apart, check_destination, check_parents
from quant.export.checkpoint.files.layout import LAYOUT_NAMES
from quant.export.checkpoint.load import describe, is_checkpoint, load, no_checkpoint
from quant.export.checkpoint.open_checkpoint import outline
from quant.export.checkpoint.save import save
from quant.export.exporters import EXPORTERS, ExportJob, cache_capacity, check_attention
from quant.export.kinds import CALIB_SAMPLES, CHOICES, DTYPES, KINDS, SEQLEN
from quant.export.onnx.decoder_graph import GraphInput
from quant.export.onnx.expert_nodes import check_experts
from quant.export.onnx.opsets import RUNTIMES
from quant.export.onnx.quantized_cache import holds_cache_scales
from quant.export.tensorrt.gpu_targets import choose_common_library, packages_of_engine, resolve_targets
from quant.kernels.attention.kv_pages import kv_format
from quant.models.files import SourceKind, find_checkpoint, packages_of
from quant.models.huggingface import remote_code
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
    inputs: Mapping[str, str | torch.Tensor] | None = None,
    shapes: str | Sequence[str] = (),
    dtype: str | None = None,
    capacity: int | None = None,
    kv_cache: str | None = None,
    lm_head: str | None = None,
    attention: str = "native",
    data: str | Path | Sequence[str | Path] | torch.Tensor | None = None,
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
            onnxruntime; "16bit" leaves it. None is "int8" for decoders in INT4, which read more bytes of their head for
            each token than of all layers.
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
    rows: sources.Rows | torch.Tensor
    if isinstance(data, torch.Tensor):
        rows = data
    else:
        rows = sources.Rows(() if data is None else _several(data), calib_samples, seqlen)
        sources.check_sources(rows.sources, option("calib"))
    with ExitStack() as stack:
        stack.enter_context(remote_code(trust_remote_code))
        stored = find_checkpoint(model) if isinstance(model, str | Path) else None
        if stored is not None and not is_checkpoint(stored):
            raise no_checkpoint(stored)
        path = _destination(model, to) if out is None else Path(out)
        # Held until the end, so that two exports never write the same file.
        stack.enter_context(claimed(path))
        # Loading a model takes longer than everything that is checked here.
        own = [] if stored is None else packages_of(str(stored))
        read = [] if isinstance(rows, torch.Tensor) else sources.packages_of_sources(rows.sources)
        _check_request(to, stored, path, overwrite, [*own, *read], **build)
        graph_inputs = {name: _parsed_input(name, value) for name, value in (inputs or {}).items()} or None
        with listener.step(f"loading {model}" if stored is not None else "saving the model"):
            opened = stack.enter_context(_opened(model, stored, to, path, module, tokenizer))
        if "inputs" in KINDS[to][1]:
            runtime = "onnxruntime" if to == "onnx" and target != "tensorrt" else "tensorrt"
            check_experts(opened.model, runtime, in_16_bit=to in ("onnx", "tensorrt"))
        # The sizes of a cache decide what is refused, and attention's scales are measured only after that.
        cached = cache_capacity(to, opened.model, capacity, has_inputs=bool(inputs), genai=genai)
        check_attention(to, opened.plan, attention, kv_cache, cached=cached > 0, genai=genai)
        if attention == "plugin" and capacity is None:
            graph["capacity"] = 0  # our plugin in the parser's graphs knows no cache
        progress = stack.enter_context(listener.stages())
        scales = _measured_scales(to, opened, attention, kv_cache, rows, Session(progress=progress), listener)
        job = ExportJob(
            kind=to, directory=opened.directory, model=opened.model, plan=opened.plan, out=path, overwrite=overwrite,
            inputs=graph_inputs, attention_scales=scales, progress=progress, **build, **graph,
        )  # fmt: skip
        record = EXPORTERS[to](job)
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
        is_given = isinstance(value, torch.Tensor) or not (value is False or value in (None, (), {}, default))
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


def _parsed_input(name: str, value: str | torch.Tensor) -> GraphInput:
    """Parses `fp32:batch,3,224,224`: a dtype, and dimensions, where named ones are dynamic."""
    if isinstance(value, torch.Tensor):
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
    kind: str,
    directory: Path | None,
    out: Path,
    overwrite: bool,
    packages: Sequence[str],
    target: str | None,
    backend: str | None,
    features: Sequence[str],
) -> None:
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


class _Opened(NamedTuple):
    """A checkpoint as an export needs it."""

    directory: Path
    model: nn.Module
    plan: Plan | None


@contextmanager
def _opened(
    model: Any, stored: Path | None, kind: str, out: Path, module: nn.Module | None, tokenizer: Any
) -> Iterator[_Opened]:
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
                yield _Opened(directory, quantized, plan)
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
        yield _Opened(directory, loaded, describe(directory)[0] if (directory / PLAN_FILE).is_file() else None)


def _measured_scales(
    kind: str,
    opened: _Opened,
    attention: str,
    kv_cache: str | None,
    rows: sources.Rows | torch.Tensor,
    session: Session,
    listener: Listener,
) -> dict[str, AttentionScales] | None:
    """Returns the scales of attention and of the KV cache that no checkpoint holds; None if none are needed.

    The scales of FP8 attention are in no checkpoint. Those of a cache are, if it was quantized for that cache.
    """
    directory, model, plan = opened
    cache_format, attention_format = kv_format(kv_cache), None
    if plan is not None and plan.attention is not None and "attention" in KINDS[kind][1] and attention != "none":
        cache_format = attention_format = plan.attention
    elif cache_format is None or holds_cache_scales(model, cache_format):
        return None
    if not isinstance(rows, torch.Tensor):
        # The dtype of everything that is not quantized, in which the model runs.
        dtype = next(model.parameters()).dtype
        source = Source(
            name=str(directory), kind=SourceKind.HUGGINGFACE, model=model, state_dict=None, path=directory, dtype=dtype
        )  # fmt: skip
        data, _ = sources.read_calibration(source, rows, session, listener=listener, plan=plan)
        rows = sources.as_rows(model, data, "attention's scales")
    return collect_attention_scales(
        model, rows, kv_format=cache_format, attention_format=attention_format, session=session
    )
