"""`export_model` turns a quantized model into a file that a runtime loads: what `quant export` does, in Python.

    check what was asked for → open → measure scales of attention → `EXPORTERS` → receipt

A model in memory is saved next to the destination first: exporters compare their result with stored codes and scales,
and some copy the tokenizer's files. The command reads its options and calls `export_model`.
"""

from __future__ import annotations

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

from quant.base.atomic import claimed, temporary_directory
from quant.base.errors import UserError, known_names
from quant.base.listener import SILENT, Listener
from quant.calibration.attention_scales import AttentionScales, collect_attention_scales
from quant.calibration.layer_result import Quantized
from quant.calibration.session import Session
from quant.calibration.texts.sources import Rows, as_rows, check_sources, read_calibration
from quant.export.checkpoint.files.layout import LAYOUT_NAMES
from quant.export.checkpoint.load import describe, is_checkpoint, load, no_checkpoint
from quant.export.checkpoint.open_checkpoint import outline
from quant.export.checkpoint.save import save
from quant.export.exporters import (
    CALIB_SAMPLES,
    CHOICES,
    DTYPES,
    EXPORTERS,
    KINDS,
    SEQLEN,
    ExportJob,
    cache_capacity,
    check_attention,
    check_request,
)
from quant.export.onnx.decoder_graph import GraphInput
from quant.export.onnx.quantized_cache import holds_cache_scales
from quant.formats.format import Format
from quant.kernels.attention.kv_pages import kv_format
from quant.models.files import SourceKind, find_checkpoint
from quant.models.huggingface import remote_code
from quant.models.open_model import Source
from quant.recipes.callers_model import unwrapped
from quant.recipes.plan import PLAN_FILE, Plan
from quant.report.render import rewrite

_INPUT_DTYPES = {**DTYPES, "int64": "int64"}
_OPTIONS = {"inputs": "--input", "features": "--engine-feature"}  # those that the command does not call by their name
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
        to: "onnx", "tensorrt", "aoti", "torch-tensorrt", "triton-server", "edge-llm", "modelopt" or
            "compressed-tensors".
        out: the file or directory to write; by default next to the directory `model`, with an ending for the kind.
        overwrite: replaces `out`; for "triton-server", all versions there.
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
        attention: how FP8 attention of the plan runs: "native" in TensorRT, "plugin", or "none" in 16 bit.
        data: calibration data for FP8 attention and `kv_cache`: sources as `quantize --calib` takes them, or token ids
            `[rows, seqlen]`. None is text that the model writes, and samples.
        calib_samples: rows that are read from `data`.
        seqlen: tokens of a row.
        genai: writes what onnxruntime-genai loads: graph, configuration and tokenizer.
        target: the GPU of an engine: "sm89", "sm120", "h100", "rtx5090", "local", …; for TensorRT-RTX also several.
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
    graph |= {"genai": genai, "kv_cache": kv_cache, "allow_fallback": allow_fallback}
    sampling = {"calib": data, "calib_samples": calib_samples, "seqlen": seqlen}
    _check_options(to, {**build, **graph, **sampling, "inputs": inputs})
    rows = _calibration_rows(data, calib_samples, seqlen)
    with ExitStack() as stack:
        stack.enter_context(remote_code(trust_remote_code))
        stored = _stored_checkpoint(model)
        path = _destination(model, to, is_compiled=target is not None) if out is None else Path(out)
        # Held until the end, so that two exports never write the same file.
        stack.enter_context(claimed(path))
        # Loading a model takes longer than everything that is checked here.
        check_request(to, stored, path, overwrite, **build)
        graph_inputs = _parse_inputs(inputs or {}) or None
        with listener.step(f"loading {model}" if stored is not None else "saving the model"):
            opened = stack.enter_context(_opened(model, stored, to, path, module, tokenizer))
        graph["capacity"] = _checked_capacity(to, opened, graph, has_inputs=bool(inputs))
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
    if kind not in KINDS:
        raise UserError(f"--to {kind}: no such kind of export; {known_names(kind, KINDS)}")
    defaults = {"attention": "native", "calib_samples": CALIB_SAMPLES, "seqlen": SEQLEN}
    for name, value in options.items():
        option = _OPTIONS.get(name, f"--{name.replace('_', '-')}")
        default = defaults.get(name)
        is_given = isinstance(value, torch.Tensor) or not (value is False or value in (None, (), {}, default))
        if is_given and name not in KINDS[kind][1]:
            takers = ", ".join(taker for taker, (_, options_of_kind) in KINDS.items() if name in options_of_kind)
            raise UserError(f"--to {kind} has no use for {option}; it is for --to {takers}")
        words = value if isinstance(value, tuple) else (value,)
        for word in words if name in CHOICES and value != default else ():
            if word not in CHOICES[name]:
                raise UserError(f"{option} {word}: expected one of {', '.join(CHOICES[name])}")
        if name in _LEAST and value is not None and (not isinstance(value, int) or value < _LEAST[name]):
            raise UserError(f"{option} {value!r}: expected a number of at least {_LEAST[name]}")


def _calibration_rows(
    data: str | Path | Sequence[str | Path] | torch.Tensor | None, samples: int, seqlen: int
) -> Rows | torch.Tensor:
    """Returns rows of token ids as they are, and anything else as sources to read rows from, which are checked."""
    if isinstance(data, torch.Tensor):
        return data
    rows = Rows(() if data is None else _several(data), samples, seqlen)
    check_sources(rows.sources, "--calib")
    return rows


def _stored_checkpoint(model: Any) -> Path | None:
    """Returns the directory of a checkpoint, or None for a model in memory; UserError if there is no checkpoint."""
    stored = find_checkpoint(model) if isinstance(model, str | Path) else None
    if stored is not None and not is_checkpoint(stored):
        raise no_checkpoint(stored)
    return stored


def _destination(model: Any, kind: str, *, is_compiled: bool) -> Path:
    """Returns the default destination: next to the checkpoint, with an ending for its kind."""
    if not isinstance(model, str | Path):
        raise UserError("--out is missing: a model in memory has no directory next to which an export could lie")
    path = Path(model)
    if not path.exists():  # a name on the hub
        path = Path(path.name)
    elif path.name in ("", ".."):
        path = Path(os.path.abspath(path))
    ending = ".engine" if kind == "torch-tensorrt" and is_compiled else KINDS[kind][0]
    return path.parent / f"{path.name}{ending}"


def _parse_inputs(inputs: Mapping[str, str | torch.Tensor]) -> dict[str, GraphInput]:
    """Parses `fp32:batch,3,224,224` of each input: a dtype, and dimensions, where named ones are dynamic."""
    examples = {}
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor):
            examples[name] = GraphInput(value.detach().cpu(), tuple(value.shape))
            continue
        dtype, _, dims = value.partition(":")
        sizes = tuple(int(dim) if dim.isdecimal() else dim for dim in dims.split(","))
        if (
            dtype not in _INPUT_DTYPES
            or not name
            or not all(dim if isinstance(dim, int) else dim.isidentifier() for dim in sizes)
        ):
            raise UserError(
                f"--input {name}:{value}: expected NAME:DTYPE:DIMS with DTYPE one of {', '.join(_INPUT_DTYPES)}, and "
                "DIMS such as batch,3,224,224"
            )
        # Dynamic dimensions are traced at 2: torch.export specialises on sizes 0 and 1.
        example = torch.zeros(
            [dim if isinstance(dim, int) else 2 for dim in sizes],
            dtype=getattr(torch, _INPUT_DTYPES[dtype]),
            device="cpu",
        )
        examples[name] = GraphInput(example, sizes)
    return examples


class _Opened(NamedTuple):
    """A checkpoint as an export needs it: its directory, its module, and its plan if it has one."""

    directory: Path
    model: nn.Module
    plan: Plan | None


@contextmanager
def _opened(
    model: Any, stored: Path | None, kind: str, out: Path, module: nn.Module | None, tokenizer: Any
) -> Iterator[_Opened]:
    """Opens the checkpoint `stored`, or saves a model in memory next to `out` while open.

    `module` is the module to be filled, for a checkpoint without config.json.
    """
    with ExitStack() as stack:
        directory, quantized = stored, None
        if directory is None:
            directory, quantized = stack.enter_context(_saved(model, kind, out, tokenizer))
        if kind in (*LAYOUT_NAMES, "edge-llm"):
            # Layouts move stored bytes: shapes on the meta device are enough.
            loaded = outline(directory)
        else:
            loaded = load(directory, module if stored is not None else None) if quantized is None else quantized
        plan = describe(directory)[0] if (directory / PLAN_FILE).is_file() else None
        yield _Opened(directory, loaded, plan)


@contextmanager
def _saved(model: Any, kind: str, out: Path, tokenizer: Any) -> Iterator[tuple[Path, nn.Module | None]]:
    """Writes a model in memory to a temporary directory next to `out`.

    Gives the directory, and a copy of the model if no config.json says how to build it.
    """
    quantized, plan = (model.model, model.plan) if isinstance(model, Quantized) else (model, None)
    quantized = unwrapped(quantized, "export_model")
    with temporary_directory(out) as folder:
        # A server's repository calls the model by the name of its directory.
        directory = folder / out.stem
        with warnings.catch_warnings():
            if kind not in LAYOUT_NAMES:
                # They are about servers of this checkpoint, which none will see.
                warnings.simplefilter("ignore", UserWarning)
            save(quantized, plan, directory, tokenizer=tokenizer)
        is_described = (directory / "config.json").is_file()
        yield directory, None if is_described else copy.deepcopy(quantized).cpu().eval()


def _checked_capacity(kind: str, opened: _Opened, graph: Mapping[str, Any], *, has_inputs: bool) -> int | None:
    """Returns the option `--capacity`; UserError for attention that an export with this cache would leave out.

    The sizes of a cache decide what is refused, and attention's scales are measured only after that.
    """
    capacity, attention = graph["capacity"], graph["attention"]
    cached = cache_capacity(kind, opened.model, capacity, has_inputs=has_inputs, genai=graph["genai"])
    check_attention(kind, opened.plan, attention, graph["kv_cache"], cached=cached > 0)
    # Our plugin in the parser's graphs knows no cache.
    return 0 if attention == "plugin" and capacity is None else capacity


def _formats_to_measure(
    kind: str, opened: _Opened, attention: str, kv_cache: str | None
) -> tuple[Format | None, Format | None]:
    """Returns the formats of the KV cache and of attention whose scales have to be measured before the export.

    The scales of FP8 attention are in no checkpoint. Those of a cache are, if it was quantized for that cache.
    """
    plan, attends_in_fp8 = opened.plan, "attention" in KINDS[kind][1] and attention != "none"
    if plan is not None and plan.attention is not None and attends_in_fp8:
        return plan.attention, plan.attention
    cache = kv_format(kv_cache)
    return (None if cache is None or holds_cache_scales(opened.model, cache) else cache), None


def _measured_scales(
    kind: str,
    opened: _Opened,
    attention: str,
    kv_cache: str | None,
    rows: Rows | torch.Tensor,
    session: Session,
    listener: Listener,
) -> dict[str, AttentionScales] | None:
    """Returns the scales of attention and of the KV cache that no checkpoint holds; None if none are needed.

    Args:
        kind: the kind of export.
        opened: the checkpoint.
        attention: how FP8 attention of the plan runs.
        kv_cache: the format of the KV cache, as `--kv-cache` names it.
        rows: where calibration rows come from, or the rows, int64 `[rows, seqlen]`.
        session: the session; the model runs on its device.
        listener: is told where the rows come from.
    """
    cache_format, attention_format = _formats_to_measure(kind, opened, attention, kv_cache)
    if cache_format is None and attention_format is None:
        return None
    tokens = rows if isinstance(rows, torch.Tensor) else _tokens(opened, rows, session, listener)
    return collect_attention_scales(
        opened.model, tokens, kv_format=cache_format, attention_format=attention_format, session=session
    )


def _tokens(opened: _Opened, rows: Rows, session: Session, listener: Listener) -> torch.Tensor:
    """Returns calibration rows of token ids for a checkpoint, int64 `[rows, seqlen]`."""
    directory, model, plan = opened
    # The dtype of everything that is not quantized, in which the model runs.
    dtype = next(model.parameters()).dtype
    source = Source(
        name=str(directory), kind=SourceKind.HUGGINGFACE, model=model, state_dict=None, path=directory, dtype=dtype
    )  # fmt: skip
    data, _ = read_calibration(source, rows, session, listener=listener, plan=plan)
    return as_rows(model, data, "attention's scales")
