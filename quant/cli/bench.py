"""`quant bench`: what this GPU reaches, and how far from that the matmuls of a model are."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import click

from quant.cli.base import DEBUG, JSON, QUIET, Command
from quant.cli.generate import read_numbers
from quant.errors import UserError


@click.command("bench", cls=Command)
@click.argument("model", required=False)
@click.option("--ceilings", is_flag=True, help="Measure copy bandwidth and the peaks of BF16 and FP8.")
@click.option("--tokens", default="1,16,256", show_default=True, help="Numbers of rows to time MODEL's matmuls with.")
@QUIET
@JSON
@DEBUG
def bench_command(model: str | None, ceilings: bool, tokens: str, quiet: bool, as_json: bool, debug: bool) -> None:
    """Time the quantized matmuls of MODEL on this GPU, each beside the 16-bit one, or the GPU itself (--ceilings).

    Rates of bytes count the weight as it is stored. Nothing is searched: what is timed is what a call would run
    (`quant tune` searches).
    """
    from quant.kernels.hardware import current

    if model is None and not ceilings:
        raise UserError("nothing to measure: name a MODEL, or pass --ceilings")
    sizes = read_numbers(tokens, "--tokens")
    gpu = current()
    found: dict[str, Any] = {"gpu": gpu.name}
    if ceilings:
        from quant.kernels.ceilings import measure_ceilings

        found["ceilings"] = {
            c.name: {"rate": c.rate, "unit": c.unit, "sheet": c.sheet, "share": c.share} for c in measure_ceilings()
        }
    if model is not None:
        found["matmuls"] = _time_model(model, sizes, quiet or as_json)
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    click.echo(found["gpu"])
    for name, entry in found.get("ceilings", {}).items():
        share = "" if entry["share"] is None else f", {entry['share']:.0%} of the data sheet"
        rate = entry["rate"] / 1e12
        digits = 0 if rate >= 100 else 2
        click.echo(f"  {name}: {rate:.{digits}f} {entry['unit']}{share}")
    _print_matmuls(found.get("matmuls", []))


def _time_model(model: str, sizes: Sequence[int], quiet: bool) -> list[dict[str, Any]]:
    from quant.cli.console import bar
    from quant.cli.pipeline import open_any
    from quant.kernels.linear.benchmark import time_as_called
    from quant.kernels.linear.tuning import shapes_of

    source = open_any(model)
    assert source.model is not None
    weights = shapes_of(source.model)
    if not weights:
        raise UserError(f"{model} has no quantized linear; bench a checkpoint that `quantize` wrote")
    with bar("bench", quiet) as advance:
        return time_as_called(weights, list(sizes), progress=advance)


def _print_matmuls(rows: Sequence[Mapping[str, Any]]) -> None:
    for row in rows:
        click.echo(
            f"  {row['format']} [{row['out']}, {row['in']}], {row['tokens']} tokens: {row['microseconds']:.1f} µs, "
            f"{row['bytes_per_second'] / 1e12:.2f} TB/s, {row['flops'] / 1e12:.1f} TFLOP/s, "
            f"{row['times_16_bit']:.2f} × 16 bit ({row['choice']})"
        )
