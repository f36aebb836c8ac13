"""This benchmark times a decoding step of a model of Llama 3 8B's shape, with 16-bit and with quantized linears.

    python benchmarks/decode.py                        batch 1, 8 and 64; BF16, NVFP4, MXFP8, FP8
    python benchmarks/decode.py --batch 1 --format nvfp4 --layers 8

The model is its matmuls, norms, rotary embedding and attention over a cache of `--context` tokens, with random
weights; the embedding stays in BF16, the output head has the format of the linears, or is in BF16 with `--head bf16`.
Norms, rotation and attention run the same kernels in every row, on a cache in BF16. A step is a CUDA graph, which is
replayed for about a second. The rate of bytes counts each weight and the cache once a step. Energy is NVML's counter
over the replays, where there is one. The weights are random, so outputs are only checked to be finite; tests compare
each matmul with float64.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _llama import VOCABULARY
from _plot import lines
from _table import machine, show, versions, write_json
from gemm import random_weight
from torch import nn

from quant.formats.format import FORMATS
from quant.kernels.attention.kv_pages import KVPages
from quant.kernels.attention.paged_attention import paged_attention
from quant.kernels.attention.portable_decoder_step import add_rmsnorm, greedy, rotate_and_store, swiglu
from quant.kernels.base.weight_layout import prepack, prepack_refusal
from quant.kernels.linear.quant_linear import QuantLinear

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD = 4096, 14336, 32, 8, 128
PAGE = 64


def linear(rows: int, columns: int, format: str | None) -> nn.Module:
    """A linear with random weights, whose outputs are about as large as its inputs."""
    if format is None:
        module = nn.Linear(columns, rows, bias=False, device="cuda", dtype=torch.bfloat16)
        nn.init.normal_(module.weight, std=columns**-0.5)
        return module
    weight = random_weight(FORMATS[format], (rows, columns))
    return QuantLinear(weight if prepack_refusal(weight) else prepack(weight))


class Layer(nn.Module):
    """A decoder layer that reads one new token a sequence, in ten launches."""

    def __init__(self, format: str | None, pages: KVPages) -> None:
        super().__init__()
        self.qkv = linear((HEADS + 2 * KV_HEADS) * HEAD, HIDDEN, format)
        self.out = linear(HIDDEN, HEADS * HEAD, format)
        self.up = linear(2 * INTERMEDIATE, HIDDEN, format)
        self.down = linear(HIDDEN, INTERMEDIATE, format)
        norms = (torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self.norms = nn.ParameterList(norms)
        self.pages = pages

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None, where: Where) -> tuple[torch.Tensor, ...]:
        batch = x.shape[0]
        normed, residual = add_rmsnorm(x, residual, self.norms[0], 1e-5)
        q = rotate_and_store(self.qkv(normed), where.cos, where.sin, self.pages, where.table, where.lengths)
        attended = paged_attention(
            q, self.pages, where.table, where.lengths, max_length=where.context, shortest=where.context
        )
        normed, residual = add_rmsnorm(self.out(attended.reshape(batch, -1)), residual, self.norms[1], 1e-5)
        return self.down(swiglu(self.up(normed))), residual


@dataclass(frozen=True)
class Where:
    """Place of the new tokens: their pages and lengths, and the angles of their position."""

    context: int
    table: torch.Tensor
    lengths: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


def step_of(
    format: str | None, layers: int, batch: int, context: int, head_format: str | None
) -> tuple[Callable[[], torch.Tensor], int]:
    """One decoding step as a function of nothing, and the bytes that it has to read."""
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    embedding = torch.randn(VOCABULARY, HIDDEN, **options)
    head, norm = linear(VOCABULARY, HIDDEN, head_format), torch.ones(HIDDEN, **options)
    count = -(-context // PAGE)
    shape = (batch * count, KV_HEADS, PAGE, HEAD)
    stack = [
        Layer(format, KVPages(torch.randn(shape, **options), torch.randn(shape, **options), None, HEAD))
        for _ in range(layers)
    ]
    tokens = torch.zeros(batch, dtype=torch.long, device="cuda")
    table = torch.arange(batch * count, dtype=torch.int32, device="cuda").view(batch, count)
    angles = (context - 1) / 500000 ** (torch.arange(0, HEAD, 2, device="cuda") / HEAD)
    cos, sin = (f(torch.cat([angles, angles])).bfloat16().repeat(batch, 1) for f in (torch.cos, torch.sin))
    lengths = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    where = Where(context, table, lengths, cos, sin)

    def step() -> torch.Tensor:
        x, residual = nn.functional.embedding(tokens, embedding), None
        for layer in stack:
            x, residual = layer(x, residual, where)
        logits = head(add_rmsnorm(x, residual, norm, 1e-5)[0])
        tokens.copy_(greedy(logits))
        return logits

    shapes = [((HEADS + 2 * KV_HEADS) * HEAD, HIDDEN), (HIDDEN, HIDDEN), (2 * INTERMEDIATE, HIDDEN)]
    shapes.append((HIDDEN, INTERMEDIATE))
    per_layer = sum(size_of(format, shape) for shape in shapes)
    cache = 2 * 2 * batch * KV_HEADS * context * HEAD
    return step, layers * (per_layer + cache) + size_of(head_format, (VOCABULARY, HIDDEN))


def size_of(format: str | None, shape: tuple[int, int]) -> int:
    """Bytes of a weight."""
    return 2 * shape[0] * shape[1] if format is None else FORMATS[format].nbytes(shape)


def measure(
    format: str | None, layers: int, batch: int, context: int, seconds: float, head_format: str | None
) -> dict[str, Any]:
    """One row of the table."""
    step, nbytes = step_of(format, layers, batch, context, head_format)
    with torch.no_grad():
        for _ in range(2):
            finite = bool(step().isfinite().all())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
    torch.cuda.synchronize()
    begin, energy, replays = time.perf_counter(), joules(), 0
    while time.perf_counter() - begin < seconds:
        for _ in range(10):
            graph.replay()
        torch.cuda.synchronize()
        replays += 10
    took = (time.perf_counter() - begin) / replays
    spent = joules()
    row: dict[str, Any] = {
        "linears": format or "bf16",
        "head": head_format or "bf16",
        "batch": batch,
        "ms a step": took * 1e3,
    }
    row |= {"tokens/s": batch / took, "TB/s": nbytes / took * 1e-12}
    row["mJ a token"] = None if energy is None or spent is None else (spent - energy) / replays / batch * 1e3
    return {**row, "finite": finite}


def joules() -> float | None:
    """The GPU's energy counter, or None where NVML has none."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetTotalEnergyConsumption(pynvml.nvmlDeviceGetHandleByIndex(0)) / 1e3
    except Exception:  # no binding, no driver library, or no counter
        return None


def main() -> None:
    """Parses the options, runs the rows, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--format", nargs="+", default=["nvfp4", "mxfp8", "fp8_channel"], choices=list(FORMATS))
    parser.add_argument("--head", default="same", choices=["same", "bf16"], help="format of the output head")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--context", type=int, default=1024, help="tokens in the cache")
    parser.add_argument("--seconds", type=float, default=1.0, help="of replays a row")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--plot", type=Path, help="also draw the rate over BF16's by batch here: .png or .svg")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(message="this benchmark needs a CUDA device; none is here\n")
    rows = []
    for batch in options.batch:
        base: float | None = None
        for format in (None, *options.format):
            try:
                head = format if options.head == "same" else None
                row = measure(format, options.layers, batch, options.context, options.seconds, head)
            except Exception as error:  # the other rows still count
                row = {"linears": format or "bf16", "batch": batch, "error": f"{type(error).__name__}: {error}"[:200]}
            base = row.get("tokens/s") if format is None else base
            row["x bf16"] = row["tokens/s"] / base if base and "tokens/s" in row else None
            rows.append(row)
            torch.cuda.empty_cache()
    columns = ("linears", "head", "batch", "ms a step", "tokens/s", "x bf16", "TB/s", "mJ a token", "finite", "error")
    table = [{column: row.get(column) for column in columns} for row in rows]
    header = {**machine(), **versions("triton"), "layers": str(options.layers), "context": str(options.context)}
    if options.json:
        write_json(options.json, "Decoding, Llama 3 8B's shape", header, table)
    if options.plot:
        case = f"8B shape, {options.context} tokens of context"
        drawn = [{**row, "case": case} for row in table]
        lines(options.plot, drawn, x="batch", y="x bf16", line="linears", panel="case")
    show("Decoding, Llama 3 8B's shape", header, table)


if __name__ == "__main__":
    main()
