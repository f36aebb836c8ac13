"""The command `quant export` calls `export_model`, which turns a checkpoint into a file that a runtime loads."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from quant.base import old_names
from quant.base.errors import UserError, counted
from quant.cli.command import COUNT, JSON, PATH, QUIET, TRUST, Command, print_json
from quant.cli.console import CONSOLE, listener
from quant.export.kinds import CALIB_SAMPLES, CHOICES, KINDS, SEQLEN


class _Kind(click.Choice):  # type: ignore[type-arg]  # generic from click 8.2 on
    """A kind of export; one of an earlier release passes, and `export_model` says what takes its place."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value in old_names.KINDS else super().convert(value, param, ctx)


@click.command("export", cls=Command)
@click.argument("directory", type=PATH)
@click.option("--to", "kind", required=True, type=_Kind(list(KINDS)), help="Kind of export.")
@click.option("--out", type=PATH, help="Destination. [default: next to DIRECTORY]")
@click.option("--overwrite", is_flag=True, help="Replace --out.")
@click.option("--shapes", multiple=True, metavar="TEXT", help="Ranges of dynamic dimensions: "
              "batch=1:1:4,sequence=32:128:512. Repeatable, one per profile.")  # fmt: skip
@click.option("--input", "inputs", multiple=True, metavar="NAME:DTYPE:DIMS", help="Input of a module that is not a "
              "transformers model: x:fp32:batch,3,224,224. Repeatable, in order.")  # fmt: skip
@click.option("--attention", type=click.Choice(CHOICES["attention"]), default="native",
              help="How FP8 attention of the plan runs: in TensorRT, in our plugin, or not (16 bit).")  # fmt: skip
@click.option(
    "--dtype", type=click.Choice(CHOICES["dtype"]), help="For all that is not quantized.  [default: the model's]"
)
@click.option("--capacity", type=click.IntRange(min=0), help="Tokens that each row of a decoder's KV cache holds; 0 "
              "exports one pass without a cache.  [default: 4096, or the model's limit]")  # fmt: skip
@click.option("--kv-cache", type=click.Choice(CHOICES["kv_cache"]), help="Format of a decoder's KV cache; fp8 and "
              "nvfp4 are for TensorRT with our plugin.  [default: 16bit]")  # fmt: skip
@click.option("--lm-head", type=click.Choice(CHOICES["lm_head"]), help="Format of a head that is in 16 bit, in a file "
              "for onnxruntime.  [default: int8 for decoders in INT4 or INT8]")  # fmt: skip
@click.option("--genai", is_flag=True, help="Write what onnxruntime-genai loads: graph, configuration, tokenizer.")
@click.option("--target", help="GPU of an engine: sm89, sm120, h100, rtx5090, local, …; for TensorRT-RTX also "
              "several. Of an ONNX file onnxruntime or tensorrt.")  # fmt: skip
@click.option("--backend", help="Builder of the engine: tensorrt_rtx or tensorrt.")
@click.option("--engine-feature", "features", multiple=True, type=click.Choice(CHOICES["features"]),
              help="Build an engine whose weights can be replaced or streamed, or which other versions load. "
              "Repeatable.")  # fmt: skip
@click.option("--allow-fallback", is_flag=True, help="Accept an engine with layers in half precision; they are named.")
@click.option("--calib", multiple=True, metavar="SOURCE", help="Calibration text for FP8 attention and --kv-cache, "
              "as for `quantize`.")  # fmt: skip
@click.option("--calib-samples", type=COUNT, default=CALIB_SAMPLES, help="Rows of calibration text.")
@click.option("--seqlen", default=SEQLEN, help="Tokens per row.")
@click.option(
    "--model-factory", metavar="FILE.py:FUNCTION", help="Function that builds the module, without config.json."
)
@TRUST
@QUIET
@JSON
def export_command(
    directory: Path, kind: str, out: Path | None, inputs: tuple[str, ...], calib: tuple[str, ...],
    model_factory: str | None, quiet: bool, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Export DIRECTORY, a checkpoint that `quantize --out` wrote, to ONNX, a TensorRT engine, a package or GGUF.

    Every layer of the exported file is compared with PyTorch, and a file that differs is not written. The result is
    added to the report of DIRECTORY.

    Decoders get a KV cache with --to onnx, tensorrt and aoti; --to torch-tensorrt compiles one pass without it.

    --to gguf writes the same codes and scales in one file, for llama.cpp, Ollama and LM Studio.

    --to modelopt writes the same codes and scales in ModelOpt's layout, for TensorRT-LLM; vLLM (0.26 to 0.33) refuses
    mxfp4 and ragged fp8_block there, and mixes only fp8, nvfp4, nvfp4a16 and mxfp8. --to compressed-tensors converts
    a checkpoint of ModelOpt.
    """
    from quant.export.export_model import export_model
    from quant.models.state_dict import call_factory

    shapes: dict[str, str] = {}  # dtype and dimensions of each `--input` by its name
    for text in inputs:
        name, _, dtype_and_dims = text.partition(":")
        if name in shapes:
            raise UserError(f"--input {name} is given twice; each input has one dtype and one shape")
        shapes[name] = dtype_and_dims
    exported = export_model(
        directory, kind, out, inputs=shapes, data=calib, module=call_factory(model_factory) if model_factory else None,
        listener=listener(quiet or as_json), **options,
    )  # fmt: skip
    if as_json:
        print_json(exported.record)
    elif not quiet:
        _print(exported.record, exported.path)


def _print(record: Mapping[str, Any], out: Path) -> None:
    from quant.export.onnx.compare_with_torch import worst_layer
    from quant.export.tensorrt.build import summary

    layers = [layer for layer in record.get("layers", ()) if layer["onnx"] is not None]
    if layers:
        worst = worst_layer({"layers": layers})
        assert worst is not None
        errors = f"the worst, {worst['name']}, differs by {worst['onnx']:.1e}" if worst["onnx"] else "all are the same"
        CONSOLE.print(f"{len(layers)} layers compared with PyTorch; {errors}")
    if audit := record.get("audit"):
        CONSOLE.print(f"{sum(row['passed'] for row in audit)} of {len(audit)} layers run in the engine as planned")
    for line in summary(record):
        CONSOLE.print(line)
    for name, size in record.get("files", {}).items():
        CONSOLE.print(f"{size / 1e6:12,.1f} MB  {name}")
    if rounded := record.get("rounded_scales"):
        CONSOLE.print(
            f"{counted(rounded, 'global scale')}: the nearest float32, at most 6e-8 away; exact in the metadata"
        )
    for note in record.get("notes", ()):
        CONSOLE.print(note)
    CONSOLE.print(f"written to {out}")
