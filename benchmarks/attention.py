"""This benchmark times attention on one GPU over 16k tokens, in FP8 and BF16, and measures errors against float64.

    python benchmarks/attention.py                   every section
    python benchmarks/attention.py --only speed      speed, quantize or error
    python benchmarks/attention.py --compile-only    fills Triton's cache and measures nothing

Method: heads × head dimension is 2048; operands are normally distributed; a time is the median of five replays of a
CUDA graph. TFLOP/s count 4 · tokens² · 2048 operations, half of that under the causal mask. "with quantizing" starts
from BF16 Q, K and V and takes block scales and the Hadamard rotation. The error is that of the last 256 queries
against softmax attention in float64, relative in the norm over eight draws; outliers are those of the FlashAttention-3
paper, one value in a thousand drawn from a ten times wider distribution, and "outlier channels" widens four channels
of Q and K.

Peers are measured in the same run: PyTorch's flash and cuDNN attention in BF16, and FlashAttention-3 (`fa3-fwd`) in
BF16 and FP8 where it is installed.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from _copy_rate import copy_rate
from _table import Row, machine, show, versions, write_json
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from quant.kernels.attention.forward import AttentionOperands, attention, quantize_attention
from quant.kernels.linear.tuning import graph_microseconds, warm_up

TOKENS, WIDTH = 16384, 2048
DRAWS = 8
WAYS: dict[str, dict[str, Any] | None] = {
    "FP8 per tensor": {"axes": (0, 1, 2, 3)},
    "FP8 per head": {"axes": (2, 3)},
    "FP8 per block": {},
    "FP8 per block, Hadamard": {"hadamard": True},
    "BF16": None,
}
CASES = [(dim, causal) for dim in (64, 128, 256) for causal in (False, True)]


def operands(dim: int, kind: str = "normal", tokens: int = TOKENS) -> tuple[torch.Tensor, ...]:
    """BF16 Q, K and V, `[1, heads, tokens, dim]`."""
    shape = (1, WIDTH // dim, tokens, dim)
    q, k, v = (torch.randn(shape, device="cuda") for _ in range(3))
    if kind == "outliers":
        q, k, v = (x + 10 * torch.randn_like(x) * (torch.rand_like(x) < 1e-3) for x in (q, k, v))
    elif kind == "outlier channels":
        for x in (q, k):
            x[..., torch.randperm(dim)[:4]] *= 10
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


def quantized(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, axes: Any = None, **options: Any) -> AttentionOperands:
    """FP8 operands, with scales of their own over `axes`."""
    if axes is not None:
        options["scales"] = tuple(x.float().abs().amax(axes) / 448 for x in (q, k, v))
    return quantize_attention(q, k, v, **options)


def fa3() -> Callable[..., Any] | None:
    """FlashAttention-3's forward pass, where it is installed."""
    try:
        from fa3_fwd_interface import flash_attn_func
    except ImportError:
        try:
            from flash_attn_interface import flash_attn_func
        except ImportError:
            return None
    return flash_attn_func


def contenders(dim: int, causal: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Name and call of everything that is timed."""
    q, k, v = operands(dim)
    laid_out = quantize_attention(q, k, v)
    yield "FP8", lambda: laid_out.attend(causal=causal)
    yield "FP8 with quantizing", lambda: quantize_attention(q, k, v, hadamard=True).attend(causal=causal)
    yield "BF16", lambda: attention(q, k, v, causal=causal)
    for name, backend in (("cuDNN BF16", SDPBackend.CUDNN_ATTENTION), ("flash BF16", SDPBackend.FLASH_ATTENTION)):

        def library(backend: SDPBackend = backend) -> torch.Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, is_causal=causal)

        yield name, library
    flash = fa3()
    if flash is not None:
        rows = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
        rows8 = [x.to(torch.float8_e4m3fn) for x in rows]
        yield "FA3 BF16", lambda: flash(*rows, causal=causal)
        yield "FA3 FP8", lambda: flash(*rows8, causal=causal)


def speed(compile_only: bool) -> Iterator[Row]:
    """TFLOP/s of every contender."""
    for dim, causal in CASES:
        row: dict[str, object] = {"what": "TFLOP/s", "dim": dim, "mask": "causal" if causal else "none"}
        work = 4 * TOKENS**2 * WIDTH * (0.5 if causal else 1)
        for name, call in contenders(dim, causal):
            try:
                call()
                row[name] = None if compile_only else work / graph_microseconds([call]) * 1e-6
            except RuntimeError as error:
                row[name] = f"{type(error).__name__}"
        yield row


def quantizing(compile_only: bool) -> Iterator[Row]:
    """Bytes a second of the quantize-and-lay-out pass; heads lie between tokens, as models leave them."""
    copy = math.nan if compile_only else copy_rate()
    # Two sets, so that one is not in the L2 cache when its turn comes.
    sets = [
        [torch.randn(1, TOKENS, heads, 128, device="cuda").bfloat16().transpose(1, 2) for heads in (32, 8, 8)]
        for _ in range(2)
    ]
    kinds: dict[str, dict[str, Any]] = {
        "block scales": {},
        "block scales, Hadamard": {"hadamard": True},
    }
    for name, options in kinds.items():
        calls = [lambda x=x, o=options: quantize_attention(*x, **o) for x in sets]
        calls[0]()
        if not compile_only:
            us = graph_microseconds(calls)
            rate = 3 * TOKENS * 48 * 128 / us * 1e6
            yield {"what": f"quantize, {name}", "dim": 128, "us": us, "TB/s": rate * 1e-12, "of copy": rate / copy}


def error(compile_only: bool) -> Iterator[Row]:
    """Relative error of the last queries, over several draws."""
    tokens, queries, dim = 4096, 256, 128
    for kind in ("normal", "outliers", "outlier channels"):
        square, squares = 0.0, dict.fromkeys(WAYS, 0.0)
        for _ in range(1 if compile_only else DRAWS):
            q, k, v = operands(dim, kind, tokens)
            scores = q[:, :, -queries:].double() @ k.double().mT / math.sqrt(dim)
            exact = scores.softmax(-1) @ v.double()
            square += float(exact.square().sum())
            for name, options in WAYS.items():
                out = attention(q, k, v) if options is None else quantized(q, k, v, **options).attend()
                squares[name] += float((out[:, :, -queries:].double() - exact).square().sum())
        row: dict[str, object] = {"what": f"error, {kind}", "dim": dim}
        yield row | {name: None if compile_only else math.sqrt(off / square) for name, off in squares.items()}


SECTIONS = {"speed": speed, "quantize": quantizing, "error": error}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, separated by commas")
    parser.add_argument("--compile-only", action="store_true", help="compile and measure nothing")
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    unknown = [name for name in given.only.split(",") if name not in SECTIONS]
    if unknown:
        parser.error(f"unknown section {unknown[0]!r}; known: {', '.join(SECTIONS)}")
    torch.manual_seed(0)
    if not given.compile_only:
        warm_up()
    header = {**machine(), **versions("triton")}
    for name in given.only.split(","):
        rows = list(SECTIONS[name](given.compile_only))
        if given.compile_only:
            continue
        show(f"Attention: {name}", header, rows)
        if given.json:
            write_json(given.json.with_stem(f"{given.json.stem}-{name}"), f"Attention: {name}", header, rows)


if __name__ == "__main__":
    main()
