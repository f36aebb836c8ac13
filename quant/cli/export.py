"""The command `quant export` calls `quant.api.export`, which turns a checkpoint into a file that a runtime loads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quant.api.export_kinds import DTYPES, KINDS
from quant.cli.base import JSON, QUIET, TRUST, Command, print_json
from quant.cli.terminal.console import CONSOLE, listener, stages, status
from quant.errors import UserError, counted
from quant.export.checkpoint.layout import LAYOUT_NAMES
from quant.formats.atomic import claimed
from quant.models.files import SourceKind
from quant.recipes.plan import PLAN_FILE

if TYPE_CHECKING:
    from torch import nn

    from quant.calibration.kv_cache import AttentionScales
    from quant.calibration.listener import Listener, Progress
    from quant.execution.sources import Rows
    from quant.export.onnx_graph.decoder import GraphInput
    from quant.formats.format import Format
    from quant.recipes.plan import Plan

_INPUT_DTYPES = {**DTYPES, "int64": "int64"}


@click.command("export", cls=Command)
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--to", "kind", required=True, type=click.Choice(list(KINDS)), help="Kind of export.")
@click.option("--out", type=click.Path(path_type=Path), help="Destination. [default: next to DIRECTORY]")
@click.option("--overwrite", is_flag=True, help="Replace --out; for triton-server, all versions there.")
@click.option(
    "--shapes",
    multiple=True,
    metavar="TEXT",
    help="Ranges of dynamic dimensions: batch=1:1:4,sequence=32:128:512. Repeatable, one per profile.",
)
@click.option(
    "--input",
    "inputs",
    multiple=True,
    metavar="NAME:DTYPE:DIMS",
    help="Input of a module that is not a transformers model: x:fp32:batch,3,224,224. Repeatable, in order.",
)
@click.option(
    "--attention",
    type=click.Choice(["native", "plugin", "none"]),
    default="native",
    show_default=True,
    help="How FP8 attention of the plan runs: in TensorRT, in our plugin, or not (16 bit).",
)
@click.option("--dtype", type=click.Choice(list(DTYPES)), help="For all that is not quantized.  [default: the model's]")
@click.option(
    "--capacity",
    type=click.IntRange(min=0),
    help="Tokens that each row of a decoder's KV cache holds; 0 exports one pass without a cache.  "
    "[default: 4096, or the model's limit]",
)
@click.option(
    "--kv-cache",
    type=click.Choice(["fp8", "nvfp4", "16bit"]),
    help="Format of a decoder's KV cache; fp8 and nvfp4 are for TensorRT with our plugin.  [default: 16bit]",
)
@click.option("--genai", is_flag=True, help="Write what onnxruntime-genai loads: graph, configuration, tokenizer.")
@click.option("--target", help="GPU of an engine: sm89, sm120, h100, rtx5090, local, …; for TensorRT-RTX also several.")
@click.option("--backend", help="Builder of the engine: tensorrt_rtx or tensorrt.")
@click.option(
    "--engine-feature",
    "features",
    multiple=True,
    type=click.Choice(["refit", "weight-streaming", "version-compatible"]),
    help="Build an engine whose weights can be replaced or streamed, or which other versions load. Repeatable.",
)
@click.option("--allow-fallback", is_flag=True, help="Accept an engine with layers in half precision; they are named.")
@click.option(
    "--calib",
    multiple=True,
    metavar="SOURCE",
    help="Calibration text for FP8 attention and --kv-cache, as for `quantize`.",
)
@click.option(
    "--calib-samples", type=click.IntRange(min=1), default=32, show_default=True, help="Rows of calibration text."
)
@click.option("--seqlen", default=512, show_default=True, help="Tokens per row.")
@click.option(
    "--model-factory",
    metavar="PACKAGE.MODULE:FUNCTION",
    help="Function that builds the module, without config.json.",
)
@TRUST
@QUIET
@JSON
def export_command(
    directory: Path,
    kind: str,
    out: Path | None,
    inputs: tuple[str, ...],
    calib: tuple[str, ...],
    calib_samples: int,
    seqlen: int,
    model_factory: str | None,
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Export DIRECTORY, a checkpoint that `quantize --out` wrote, to ONNX, a TensorRT engine or a package.

    Every layer of the exported file is compared with PyTorch, and a file that differs is not written. The result is
    added to the report of DIRECTORY.

    Decoders get a KV cache with --to onnx, tensorrt, aoti and triton-server; --to torch-tensorrt compiles one pass
    without it. A Triton server without --target runs a decoder in onnxruntime.

    --to modelopt writes the same codes and scales in ModelOpt's layout, for TensorRT-LLM; vLLM 0.26 refuses mxfp4 and
    ragged fp8_block there, and mixes only fp8, nvfp4, nvfp4a16 and mxfp8. --to compressed-tensors converts a
    checkpoint of ModelOpt.
    """
    from quant.api.export import EXPORTERS, check_attention, check_request
    from quant.api.export_job import ExportJob, cache_capacity
    from quant.checkpoints.load import is_checkpoint, no_checkpoint
    from quant.execution.sources import Rows
    from quant.report.render import rewrite

    quiet = quiet or as_json
    _check_options(kind)
    if not is_checkpoint(directory):
        raise no_checkpoint(directory)
    is_compiled = kind == "torch-tensorrt" and options["target"] is not None
    out = out or directory.parent / f"{directory.name}{'.engine' if is_compiled else KINDS[kind][0]}"
    # Held until the command ends, so that two exports never write the same file.
    click.get_current_context().with_resource(claimed(out))
    # Loading a model takes longer than everything that is checked here.
    build = (options["target"], options["backend"], options["features"])
    check_request(kind, directory, out, options["overwrite"], *build)
    with status(f"loading {directory}", quiet):
        model, plan = _open(kind, directory, model_factory)
    # The sizes of a cache decide what is refused, and attention's scales are measured only after that.
    capacity = cache_capacity(kind, model, options["capacity"], has_inputs=bool(inputs), genai=options["genai"])
    check_attention(kind, plan, options["attention"], options["kv_cache"], cached=capacity > 0)
    if options["attention"] == "plugin" and options["capacity"] is None:
        # Our plugin in the parser's graphs knows no cache.
        options["capacity"] = 0
    with stages(quiet) as progress:
        scales = None
        attends_in_fp8 = "attention" in KINDS[kind][1] and options["attention"] != "none"
        formats = _formats_to_measure(model, plan, options["kv_cache"], attends_in_fp8=attends_in_fp8)
        if any(formats):
            rows = Rows(calib, samples=calib_samples, seqlen=seqlen)
            scales = _attention_scales(model, plan, directory, rows, formats, progress, listener(quiet))
        job = ExportJob(
            kind=kind,
            directory=directory,
            model=model,
            plan=plan,
            out=out,
            inputs=_parse_inputs(inputs) or None,
            attention_scales=scales,
            progress=progress,
            **options,
        )
        record = EXPORTERS[kind](job)
    # Only a record with comparisons of layers is a receipt, which the report can show.
    if "layers" in record and (directory / "report.json").is_file():
        rewrite(directory, record)
    if as_json:
        print_json(record)
    elif not quiet:
        _print(record, out)


def _check_options(kind: str) -> None:
    """Raises UserError for an option that was given and that this kind of export does not take."""
    context = click.get_current_context()
    everywhere = {
        "directory", "kind", "out", "overwrite", "model_factory", "trust_remote_code", "quiet", "as_json", "debug",
    }  # fmt: skip
    for parameter in context.command.params:
        # Defaults do not count: every option has one.
        source = context.get_parameter_source(parameter.name or "")
        is_taken = parameter.name in everywhere | KINDS[kind][1]
        if source is click.core.ParameterSource.COMMANDLINE and not is_taken:
            takers = ", ".join(name for name, (_, options) in KINDS.items() if parameter.name in options)
            raise UserError(f"--to {kind} has no use for {parameter.opts[0]}; it is for --to {takers}")


def _open(kind: str, directory: Path, model_factory: str | None) -> tuple[nn.Module, Plan | None]:
    """Returns the model of a checkpoint, as this kind of export needs it, and the checkpoint's plan if it has one."""
    from quant.checkpoints.load import describe, load
    from quant.checkpoints.open import outline
    from quant.models.state_dict import call_factory

    if kind in (*LAYOUT_NAMES, "edge-llm"):
        # Layouts move stored bytes: shapes on the meta device are enough.
        model = outline(directory)
    else:
        model = load(directory, call_factory(model_factory) if model_factory else None)
    return model, describe(directory)[0] if (directory / PLAN_FILE).is_file() else None


def _formats_to_measure(
    model: nn.Module, plan: Plan | None, kv_cache: str | None, *, attends_in_fp8: bool
) -> tuple[Format | None, Format | None]:
    """Returns the formats of the KV cache and of attention whose scales have to be measured before the export.

    The scales of FP8 attention are in no checkpoint. Those of a cache are, if it was quantized for that cache.
    """
    from quant.export.onnx_graph.quantized_cache import holds_cache_scales
    from quant.kernels.kv_pages import kv_format

    if plan is not None and plan.attention is not None and attends_in_fp8:
        return plan.attention, plan.attention
    cache = kv_format(kv_cache)
    return (None if cache is None or holds_cache_scales(model, cache) else cache), None


def _attention_scales(
    model: nn.Module,
    plan: Plan | None,
    directory: Path,
    rows: Rows,
    formats: tuple[Format | None, Format | None],
    progress: Progress,
    terminal: Listener,
) -> Mapping[str, AttentionScales]:
    """Measures scales of a KV cache and of attention's operands, which the checkpoint does not hold.

    `formats` are those of the cache and of attention; None measures no scales of it.
    """
    from quant.calibration.kv_cache import collect_attention_scales
    from quant.calibration.session import Session
    from quant.execution.sources import as_rows, read_calibration
    from quant.models.open import Source

    # The dtype of what is not quantized, in which the model runs.
    dtype = next(model.parameters()).dtype
    source = Source(
        name=str(directory), kind=SourceKind.HUGGINGFACE, model=model, state_dict=None, path=directory, dtype=dtype
    )  # fmt: skip
    session = Session(progress=progress)
    data, _ = read_calibration(source, rows, session, listener=terminal, plan=plan)
    texts = as_rows(model, data, "attention's scales")
    cache, attention = formats
    return collect_attention_scales(model, texts, kv_format=cache, attention_format=attention, session=session)


def _parse_inputs(texts: tuple[str, ...]) -> dict[str, GraphInput]:
    """Parses `x:fp32:batch,3,224,224`: a name, a dtype, and dimensions, where named ones are dynamic."""
    import torch

    from quant.export.onnx_graph.decoder import GraphInput

    examples = {}
    for text in texts:
        # Padded, so that a missing part reaches the message below and not an unpacking error.
        name, dtype, dims = [*text.split(":"), "", ""][:3]
        if dtype not in _INPUT_DTYPES or not name or not dims:
            raise UserError(f"--input {text!r}: expected NAME:DTYPE:DIMS with DTYPE one of {', '.join(_INPUT_DTYPES)}")
        sizes = tuple(int(dim) if dim.isdigit() else dim for dim in dims.split(","))
        # Dynamic dimensions are traced at 2: torch.export specialises on sizes 0 and 1.
        example = torch.zeros(
            [dim if isinstance(dim, int) else 2 for dim in sizes], dtype=getattr(torch, _INPUT_DTYPES[dtype])
        )
        examples[name] = GraphInput(example, sizes)
    return examples


def _print(record: Mapping[str, Any], out: Path) -> None:
    from quant.export.engine.audit import TENSORS
    from quant.export.engine.build import summary
    from quant.export.onnx_graph.verify import worst_layer

    layers = [layer for layer in record.get("layers", ()) if layer["onnx"] is not None]
    if layers:
        worst = worst_layer({"layers": layers})
        assert worst is not None
        errors = f"the worst, {worst['name']}, differs by {worst['onnx']:.1e}" if worst["onnx"] else "all are the same"
        CONSOLE.print(f"{len(layers)} layers compared with PyTorch; {errors}")
    if audit := record.get("audit"):
        runs = [row for row in audit if row["planned"] != TENSORS]  # the others compare constants of the same layers
        CONSOLE.print(f"{sum(row['passed'] for row in runs)} of {len(runs)} layers run in the engine as planned")
    for line in summary(record):
        CONSOLE.print(line)
    for name, size in record.get("files", {}).items():
        CONSOLE.print(f"{size / 1e6:12,.1f} MB  {name}")
    if rounded := record.get("rounded_scales"):
        CONSOLE.print(
            f"{counted(rounded, 'global scale')}: the nearest float32, at most 6e-8 away; exact in the metadata"
        )
    if record.get("config_checked") is False:
        CONSOLE.print("config.pbtxt was not compared with the server's schema: that needs the package tritonclient")
    CONSOLE.print(f"written to {out}")
