"""This benchmark times decode attention over a paged KV cache in 16 bit, FP8 and NVFP4, and other kernels in 16 bit.

    python benchmarks/kv_decode.py                                   batch 16, 32k tokens, 64 heads over 8 KV heads
    python benchmarks/kv_decode.py --batch 1 64 --context 4096 --heads 32 --dim 128

One new token a sequence attends to `--context` keys. Pages lie in random order. Bytes are those of the codes and
scales that have to be read, once; the share of copy bandwidth is against a copy of a gigabyte in the same run. Each
time is that of a CUDA graph's replay. The error is against float64 over the first sequence's dequantized cache; the
last two columns are time against our FP8 with a scale a head, and against the fastest in 16 bit.

FlashInfer and FlashAttention 3 are measured where they are installed; the first reads the same pages in BF16, the
second and PyTorch's SDPA a dense cache.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from _copy_rate import copy_rate
from _table import machine, show, versions, write_json

from quant.kernels.attention.kv_pages import KVPages, encode_kv, kv_format, token_bytes
from quant.kernels.attention.paged_attention import paged_attention, paged_reference
from quant.kernels.linear.tuning import graph_microseconds, warm_up

Run = Callable[[], torch.Tensor]


def random_pages(name: str | None, count: int, kv_heads: int, dim: int, page_size: int) -> KVPages:
    """Pages of normal values in the cache format `name`."""
    format = kv_format(name)
    scale = torch.full((kv_heads,), 5 / 448 if name == "fp8" else 5 / 2688, device="cuda")
    parts: dict[str, list[torch.Tensor]] = {}
    for _ in range(0, count, 256):
        for operand in "kv":
            x = torch.randn(256, kv_heads, page_size, dim, device="cuda", dtype=torch.bfloat16)
            if format is None:
                parts.setdefault(operand, []).append(x)
                continue
            codes, found, blocks = encode_kv(x, format, None if name == "fp8_token" else scale)
            for part, tensor in ((operand, codes), (f"{operand}_scale", found), (f"{operand}_blocks", blocks)):
                if tensor is not None:
                    parts.setdefault(part, []).append(tensor)
    whole: dict[str, Any] = {part: torch.cat([_bytes(x) for x in list_])[:count] for part, list_ in parts.items()}
    for part, tensor in whole.items():
        whole[part] = tensor.view(parts[part][0].dtype)
    if name in ("fp8", "nvfp4"):
        whole |= {"k_scale": scale, "v_scale": scale}
    return KVPages(whole.pop("k"), whole.pop("v"), format, dim, **whole)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8) if x.dtype is torch.float8_e4m3fn else x


def error_of(out: torch.Tensor, q: torch.Tensor, pages: KVPages, table: torch.Tensor, context: int) -> float:
    """Relative error of the first sequence against float64."""
    lengths = torch.tensor([context], dtype=torch.int32, device="cuda")
    expected = paged_reference(q[:1].float(), pages, table[:1], lengths, compute=torch.float64).double()
    return float((out[:1].double() - expected).norm() / expected.norm())


def ours(batch: int, context: int, heads: int, kv_heads: int, dim: int, page_size: int) -> Iterator[dict[str, Any]]:
    """Our kernel over each format of the cache."""
    per_sequence = -(-context // page_size)
    table = torch.randperm(batch * per_sequence, device="cuda").int().view(batch, per_sequence)
    lengths = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    q = torch.randn(batch, heads, 1, dim, device="cuda", dtype=torch.bfloat16)
    for name in (None, "fp8", "fp8_token", "nvfp4"):
        pages = random_pages(name, batch * per_sequence, kv_heads, dim, page_size)

        def run(pages: KVPages = pages) -> torch.Tensor:
            return paged_attention(q, pages, table, lengths, max_length=context, shortest=context)

        nbytes = 2 * batch * context * kv_heads * token_bytes(kv_format(name), dim)
        yield _row(f"ours, {name or 'bf16'}", run, nbytes, error_of(run(), q, pages, table, context))
        del pages, run


def peers(batch: int, context: int, heads: int, kv_heads: int, dim: int, page_size: int) -> Iterator[dict[str, Any]]:
    """16-bit decode attention of others, as far as it is installed."""
    q = torch.randn(batch, heads, 1, dim, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(batch, kv_heads, context, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    nbytes = k.nbytes + v.nbytes

    def sdpa() -> torch.Tensor:
        # The query heads of a KV head as the rows of one tile: what a user of SDPA can do for decoding.
        rows = q.view(batch, kv_heads, heads // kv_heads, dim)
        return torch.nn.functional.scaled_dot_product_attention(rows, k, v)

    yield _row("PyTorch SDPA, bf16", sdpa, nbytes, None)
    try:
        from flash_attn_interface import flash_attn_with_kvcache

        dense = [x.transpose(1, 2).contiguous() for x in (k, v)]
        yield _row(
            "FlashAttention 3, bf16",
            lambda: flash_attn_with_kvcache(q.transpose(1, 2), *dense, cache_seqlens=context),
            nbytes,
            None,
        )
    except ImportError:
        pass
    try:
        import flashinfer

        per_sequence = context // page_size
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 27, dtype=torch.uint8, device="cuda"))
        start = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * per_sequence
        index = torch.randperm(batch * per_sequence, device="cuda").int()
        last = torch.full((batch,), page_size, dtype=torch.int32, device="cuda")
        wrapper.plan(start, index, last, heads, kv_heads, dim, page_size, q_data_type=q.dtype)
        paged = torch.stack([k.view(-1, kv_heads, page_size, dim), v.view(-1, kv_heads, page_size, dim)], 1)
        paged = paged.transpose(2, 3).contiguous()
        yield _row("FlashInfer, bf16", lambda: wrapper.run(q[:, :, 0], paged), nbytes, None)
    except ImportError:
        pass


def _row(what: str, run: Run, nbytes: int, error: float | None) -> dict[str, Any]:
    us = graph_microseconds([run])
    return {"attention": what, "us": us, "TB/s": nbytes / us * 1e-6, "error": error}


def main() -> None:
    """Parses the options, runs the rows, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[16])
    parser.add_argument("--context", type=int, nargs="+", default=[32768])
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(message="this benchmark needs a CUDA device; none is here\n")
    warm_up()
    bandwidth = copy_rate()
    rows: list[dict[str, Any]] = []
    for batch in options.batch:
        for context in options.context:
            shape = (batch, context, options.heads, options.kv_heads, options.dim, options.page_size)
            found = [*ours(*shape), *peers(*shape)]
            fp8 = next(row["us"] for row in found if row["attention"] == "ours, fp8")
            half = min((row["us"] for row in found if row["attention"].endswith("bf16")), default=math.nan)
            for row in found:
                row |= {"% of copy": 100 * row["TB/s"] * 1e12 / bandwidth, "x fp8": fp8 / row["us"]}
                row |= {"x 16 bit": half / row["us"]}
                rows.append({"batch": batch, "context": context, **row})
            torch.cuda.empty_cache()
    header = {**machine(), **versions("triton"), "copy": f"{bandwidth * 1e-12:.2f} TB/s"}
    header |= {"heads": f"{options.heads} over {options.kv_heads}", "dim": str(options.dim)}
    header |= {"page": str(options.page_size)}
    if options.json:
        write_json(options.json, "Decode attention over a paged KV cache", header, rows)
    show("Decode attention over a paged KV cache", header, rows)


if __name__ == "__main__":
    main()
