"""This benchmark measures what a call of a quantized linear costs the host, and `nn.Linear` in BF16 in the same run.

    python benchmarks/overhead.py                 every format, 1 token
    python benchmarks/overhead.py --tokens 300    so many tokens
    python benchmarks/overhead.py --json overhead.json

The layer is small, so that the GPU waits for the host: microseconds are those of a call, from Python, in a queue that
is never empty. `functions` are those of Python that are entered from `forward` to the launch of the first kernel, that
of Triton or of PyTorch's library, both not counted.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from _table import machine, show_all, versions
from torch import nn

from quant.formats.format import FORMATS
from quant.formats.tensor import quantize
from quant.kernels.linear.quant_linear import QuantLinear
from quant.kernels.linear.tuning import warm_up

OUT, IN = 512, 1024
CALLS, REPEATS = 1000, 7
PAIRS = {"nvfp4": "nvfp4", "mxfp8": "mxfp8", "fp8": "fp8", "fp8_channel": "fp8_token", "fp8_block": "fp8_group"}


def microseconds(call: Callable[[], Any]) -> float:
    """Of the host, a call: the median of several rounds, each of many calls in a row."""
    times = []
    for _ in range(REPEATS + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - start) / CALLS * 1e6)
    return sorted(times[1:])[REPEATS // 2]


def functions(module: nn.Module, x: torch.Tensor) -> int:
    """How many functions of Python are entered from `forward` to the launch."""
    count, launched = 0, False

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count, launched
        if event == "call" and not launched:
            launched = count > 0 and "/triton/" in frame.f_code.co_filename
            count += not launched and (count > 0 or frame.f_code.co_name == "forward")

    gc.disable()  # it calls the weak references of what it frees, which are no part of a forward
    sys.setprofile(profile)
    try:
        module(x)
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def measure(tokens: int) -> list[dict[str, Any]]:
    """One row a layer."""
    x = torch.randn(tokens, IN, device="cuda", dtype=torch.bfloat16)
    layers: dict[str, nn.Module] = {"nn.Linear, BF16": nn.Linear(IN, OUT, device="cuda", dtype=torch.bfloat16)}
    bias = torch.randn(OUT, device="cuda", dtype=torch.bfloat16)
    for format, activation in [*((name, "") for name in FORMATS), *PAIRS.items()]:
        form = FORMATS[activation] if activation else None
        static = torch.tensor(0.02, device="cuda") if form is not None and form.is_static else None
        weight = quantize(torch.randn(OUT, IN, device="cuda"), FORMATS[format])
        layers[f"{format} by {activation or 'BF16'}"] = QuantLinear(weight, bias, form, static)
    rows = []
    modes: dict[str, Any] = {
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
    }
    for name, layer in layers.items():
        row: dict[str, Any] = {"layer": name}
        for mode, context in modes.items():
            with context():
                for _ in range(3):
                    layer(x)
                row[f"{mode} µs"] = microseconds(lambda layer=layer: layer(x))
                row[f"{mode} functions"] = functions(layer, x)
        rows.append(row)
    return rows


def main() -> None:
    """Parses the options, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(message="this benchmark needs a CUDA device; none is here\n")
    warm_up()
    tables = {f"{OUT} × {IN}, {options.tokens} tokens": measure(options.tokens)}
    show_all("Host time of a linear", {**machine(), **versions("triton")}, tables, options.json)


if __name__ == "__main__":
    main()
