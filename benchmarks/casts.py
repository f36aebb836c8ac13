"""This benchmark times the kernels that quantize activations on one GPU, and a copy in the same run.

    python benchmarks/casts.py                          the table
    python benchmarks/casts.py --formats mxfp4,fp8      other formats
    python benchmarks/casts.py --json casts.json

A row of the table is a format and a width. Rates are bytes read and written, as those of the copy are. Inputs are 128
MiB, more than any L2 cache holds; calls are replayed from a CUDA graph. The last table has few tokens, where the time
is that of a launch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _copy_rate import copy_rate
from _table import machine, show_all, versions

from quant.formats.format import FORMATS
from quant.kernels.linear.tuning import graph_microseconds
from quant.kernels.rounding import portable_casts

ELEMENTS = 1 << 26
WIDTHS = (4096, 14336)


def quantizer(name: str) -> Callable[[torch.Tensor], Any]:
    """The call for an input, under static scales."""
    form, number = FORMATS[name], torch.tensor(0.02, device="cuda")
    scales = {"scale": number} if form.per_tensor else {"global_scale": number} if form.global_scale else {}
    return lambda x: portable_casts.quantize(x, form, **scales)


def rates(formats: list[str]) -> list[dict[str, Any]]:
    """One row a format and width: TB/s, and a copy's."""
    rows = []
    for columns in WIDTHS:
        tokens = ELEMENTS // columns
        inputs = [torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        for name in formats:
            row: dict[str, Any] = {"format": name, "width": columns, "copy TB/s": copy_rate() * 1e-12}
            moved = 2 * tokens * columns + FORMATS[name].nbytes((tokens, columns))
            call = quantizer(name)
            row["TB/s"] = moved / graph_microseconds([lambda x=x, c=call: c(x) for x in inputs], 3) * 1e-6
            rows.append(row)
    return rows


def latencies() -> list[dict[str, Any]]:
    """Microseconds with few tokens, one row a width and number of them."""
    rows = []
    for columns in WIDTHS:
        for tokens in (1, 16, 64):
            x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
            y = torch.empty_like(x)
            row: dict[str, Any] = {"width": columns, "tokens": tokens}
            row["copy µs"] = graph_microseconds([lambda x=x, y=y: y.copy_(x)] * 20)
            for name in ("nvfp4", "mxfp8"):
                call = quantizer(name)
                row[f"{name} µs"] = graph_microseconds([lambda x=x, c=call: c(x)] * 20)
            rows.append(row)
    return rows


def main() -> None:
    """Parses the options, prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--formats", default="nvfp4,mxfp8,fp8_token", help=f"of {', '.join(portable_casts.FORMATS_OUT)}"
    )
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(message="this benchmark needs a CUDA device; none is here\n")
    header = {**machine(), **versions("triton")}
    tables = {"Quantizers, TB/s": rates(options.formats.split(",")), "Few tokens": latencies()}
    show_all("Quantizers", header, tables, options.json)


if __name__ == "__main__":
    main()
