"""The commands `quant bench` and `tune` time the quantized matmuls of a model on this GPU, and make them fast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from quant.base.errors import UserError
from quant.cli.command import JSON, QUIET, TRUST, Command, echo, print_json
from quant.cli.console import bar

if TYPE_CHECKING:
    from quant.formats.tensor import BlockScaledTensor


@click.command("bench", cls=Command)
@click.argument("model")
@click.option("--tokens", default="1,16,256", show_default=True, help="Numbers of rows to time MODEL's matmuls with.")
@TRUST
@QUIET
@JSON
def bench_command(model: str, tokens: str, quiet: bool, as_json: bool) -> None:
    """Time the quantized matmuls of MODEL on this GPU, each next to the 16-bit one.

    Byte rates count the weight as it is stored. Nothing is searched: the timed launches are the ones that a call uses
        (`quant tune` searches).
    """
    from quant.kernels.base.hardware import current
    from quant.kernels.linear.tuning import time_as_called

    sizes = _read_numbers(tokens)
    gpu = current()
    weights = _weights(model, "bench")
    with bar("bench", quiet or as_json) as advance:
        record: dict[str, Any] = {"gpu": gpu.name, "matmuls": time_as_called(weights, sizes, progress=advance)}
    if as_json:
        print_json(record)
        return
    echo(record["gpu"])
    for row in record["matmuls"]:
        echo(
            f"  {row['format']} [{row['out']}, {row['in']}], {row['tokens']} tokens: {row['microseconds']:.1f} µs, "
            f"{row['bytes_per_second'] / 1e12:.2f} TB/s, {row['flops'] / 1e12:.1f} TFLOP/s, "
            f"{row['times_16_bit']:.2f} × 16 bit ({row['choice']})"
        )


@click.command("tune", cls=Command)
@click.argument("model")
@click.option("--tokens", default="1,16,64,256", show_default=True, help="Numbers of rows to tune for.")
@TRUST
@QUIET
@JSON
def tune_command(model: str, tokens: str, quiet: bool, as_json: bool) -> None:
    """Measure launches of every quantized matmul of MODEL on this GPU, and keep the fastest.

    The table is kept in ~/.cache/blockscale ($BLOCKSCALE_CACHE) and used by later runs. Launches whose results differ
    from float64 are dropped and named.
    """
    from quant.kernels.base.hardware import current
    from quant.kernels.linear.tuning import tune_shapes

    gpu = current()
    sizes = _read_numbers(tokens)
    weights = _weights(model, "tune")
    with bar("tune", quiet or as_json) as advance:
        entries, dropped, path = tune_shapes(weights, sizes, gpu, progress=advance)
    if as_json:
        print_json({"file": str(path), "entries": entries, "dropped": dropped})
        return
    for name, entry in entries.items():
        echo(f"{name}: {entry['microseconds']:.1f} µs, {entry['choice']}")
    for name, reason in dropped.items():
        echo(f"dropped {name}: {reason}", err=True)
    if not quiet:
        echo(f"written to {path}", err=True)


def _weights(model: str, what: str) -> list[BlockScaledTensor]:
    """Returns one weight for each shape and format in a quantized model."""
    from quant.export.checkpoint.load import open_runnable
    from quant.kernels.linear.tuning import shapes_of

    weights = shapes_of(open_runnable(model)[1])
    if not weights:
        raise UserError(f"{model} has no quantized linear; {what} a checkpoint that `quantize` wrote")
    return weights


def _read_numbers(text: str) -> list[int]:
    """Returns positive numbers from "1,16,64", sorted; UserError names the option."""
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or numbers[0] < 1:
        raise UserError(f"--tokens {text}: expected numbers of 1 or more, separated by commas, such as 1,16,64")
    return numbers
