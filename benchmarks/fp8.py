"""This benchmark times FP8 × FP8 matmuls on one GPU, plain and grouped by expert, and the library's BF16.

    python benchmarks/fp8.py                         both tables
    python benchmarks/fp8.py --json fp8.json

Plain: `torch._scaled_mm` with a scale a tensor and a scale a row, and 1×128 by 128×128 blocks through what a model
calls (`block`) and through our Triton kernel (`block, Triton`); rounding the input is not counted. Grouped: one
projection of 128 experts, 2048 to 1536, eight experts a token, as in Qwen3-30B-A3B; rounding the input is counted, and
the library's `torch._grouped_mm` in BF16 is the base. Each call is replayed from a CUDA graph; values are random.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _table import machine, show_all, versions

from quant.formats.format import FORMATS
from quant.formats.tensor import BlockScaledTensor, quantize
from quant.kernels.base.hardware import current
from quant.kernels.base.weight_layout import prepack
from quant.kernels.linear import experts, portable_block_scaled_gemm
from quant.kernels.linear.tuning import graph_microseconds
from quant.kernels.rounding import portable_casts

SHAPES = ((4096, 28672, 4096), (8192, 8192, 8192), (1024, 4096, 14336))
EXPERTS, HIDDEN, INNER, CHOICES = 128, 2048, 1536, 8
GROUPED = (("nvfp4", None), ("mxfp8", None), ("fp8_channel", "fp8_token"), ("fp8_block", "fp8_group"))


def plain() -> list[dict[str, Any]]:
    """One row a shape and way."""
    rows = []
    for tokens, out, columns in SHAPES:
        x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
        dense = torch.randn(out, columns, device="cuda", dtype=torch.bfloat16)
        codes = dense.to(torch.float8_e4m3fn)
        squares = torch.rand(-(-out // 128), -(-columns // 128), device="cuda") + 0.5
        weight = BlockScaledTensor(codes, squares, FORMATS["fp8_block"], (out, columns))
        x8 = portable_casts.quantize(x, FORMATS["fp8_group"])
        one, by_row = torch.ones((), device="cuda"), torch.ones(tokens, 1, device="cuda")
        by_channel = torch.ones(1, out, device="cuda")

        def scaled(a: torch.Tensor, b: torch.Tensor, x8: Any = x8, codes: torch.Tensor = codes) -> torch.Tensor:
            return torch._scaled_mm(x8.codes, codes.t(), a, b, out_dtype=torch.bfloat16, use_fast_accum=True)

        calls: dict[str, Callable[[], Any]] = {
            "bf16": lambda x=x, dense=dense: x @ dense.T,
            "tensor": lambda scaled=scaled, one=one: scaled(one, one),
            "row": lambda scaled=scaled, a=by_row, b=by_channel: scaled(a, b),
            "block": lambda x8=x8, w=weight: portable_block_scaled_gemm.fp8_block_gemm(x8, w, None, torch.bfloat16),
            "block, Triton": lambda x8=x8, w=weight: portable_block_scaled_gemm.by_triton(x8, w, None, torch.bfloat16),
        }
        times = {name: graph_microseconds([call]) for name, call in calls.items()}
        for name, us in times.items():
            rate = 2 * tokens * out * columns / us * 1e-6
            row = {"scales": name, "M": tokens, "N": out, "K": columns, "us": us, "TFLOP/s": rate}
            rows.append({**row, "x bf16": times["bf16"] / us, "x tensor": times["tensor"] / us})
    return rows


def by_expert() -> list[dict[str, Any]]:
    """One row a number of tokens and format."""
    rows = []
    values = torch.randn(EXPERTS, INNER, HIDDEN, device="cuda", dtype=torch.bfloat16) * 0.05
    weights = {name: quantize(values, FORMATS[name]) for name, _ in GROUPED}
    if current().has_wgmma:
        weights["nvfp4"] = prepack(weights["nvfp4"])  # as a loaded model has it
    for tokens in (1, 64, 1024, 4096):
        index = torch.rand(tokens, EXPERTS, device="cuda").topk(CHOICES).indices
        order, offsets = experts.sort_by_expert(index, EXPERTS)
        x = torch.randn(len(order), HIDDEN, device="cuda", dtype=torch.bfloat16)
        ends = offsets[1:]
        calls: dict[str, Callable[[], Any]] = {
            "bf16": lambda x=x, ends=ends: torch._grouped_mm(x, values.transpose(1, 2), offs=ends)
        }
        for name, activation in GROUPED:
            form = FORMATS[activation] if activation else None
            calls[f"{name} × {activation or 'bf16'}"] = lambda x=x, w=weights[name], o=offsets, f=form: (
                experts.grouped_linear(x, w, o, None, f)
            )
        times = {name: graph_microseconds([call]) for name, call in calls.items()}
        for name, us in times.items():
            rate = 2 * len(order) * HIDDEN * INNER / us * 1e-6
            row = {"weights × inputs": name, "tokens": tokens, "us": us, "TFLOP/s": rate}
            rows.append({**row, "x bf16": times["bf16"] / us})
    return rows


def main() -> None:
    """Parses the options, prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(message="this benchmark needs a CUDA device; none is here\n")
    header = {**machine(), **versions("triton")}
    tables = {"FP8 by FP8": plain(), "128 experts, one projection": by_expert()}
    show_all("FP8 by FP8", header, tables, options.json)


if __name__ == "__main__":
    main()
