"""This benchmark times ring attention on the GPUs of one machine: how it scales, and how many bytes it sends.

    python benchmarks/ring.py                                  128k tokens, on 1, 2, 4, … GPUs, as many as there are
    python benchmarks/ring.py --tokens 32768 --world 1 2

The sequence stays the same size, and each GPU has its share of it. Efficiency is the time on one GPU, which passes
nothing on, over the time on n times n. Bytes are what a rank sends in all, as a share of what 16 bit takes. The
difference is between a ring's output and that of one GPU over the same values, at 4,096 tokens: pieces are quantized
for themselves, so block scales begin elsewhere, and FP8's probabilities are rounded against other maxima.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from _table import machine, show, versions, write_json

from quant.formats.format import FORMATS
from quant.kernels.attention.ring import message_bytes, ring_attention, shard, unshard

CHECKED_TOKENS = 4096


def operands(heads: int, kv_heads: int, tokens: int, dim: int) -> list[torch.Tensor]:
    """q, k and v of the whole sequence, the same on every rank."""
    made = torch.Generator("cuda").manual_seed(0)
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "generator": made}
    return [torch.randn(1, n, tokens, dim, **options) for n in (heads, kv_heads, kv_heads)]


def of_a_rank(rank: int, world: int, folder: str, options: argparse.Namespace) -> None:
    """Runs every format; rank 0 writes what was measured."""
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/meet", rank=rank, world_size=world, device_id=device)
    rows = []
    for name in (None, "fp8", "nvfp4"):
        format = FORMATS[name] if name else None
        small = operands(options.heads, options.kv_heads, CHECKED_TOKENS, options.dim)
        mine = ring_attention(*(shard(x, rank, world) for x in small), format=format)
        parts = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(parts, mine)
        whole = unshard(parts).float().cpu()
        q, k, v = (
            shard(x, rank, world) for x in operands(options.heads, options.kv_heads, options.tokens, options.dim)
        )
        ms = milliseconds(lambda q=q, k=k, v=v, format=format: ring_attention(q, k, v, format=format, check=False))
        nbytes = [(world - 1) * message_bytes(k, each) for each in (format, None)]
        rows.append({"keys": name or "bf16", "ms": ms, "bytes": nbytes, "out": whole})
        del q, k, v
        torch.cuda.empty_cache()
    if rank == 0:
        torch.save(rows, f"{folder}/rows.pt")
    dist.destroy_process_group()


def milliseconds(run: Any, repeats: int = 5) -> float:
    """The median time of a run on the slowest rank."""
    run()
    times = []
    for _ in range(repeats):
        dist.barrier()
        torch.cuda.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        slowest = torch.tensor(begin.elapsed_time(end), device="cuda")
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times.append(float(slowest))
    return sorted(times)[repeats // 2]


def main() -> None:
    """Parses the options, runs each size of the ring, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, nargs="+", help="numbers of GPUs; by default 1, 2, 4, …")
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    there = torch.cuda.device_count()
    if not there:
        parser.exit(message="this benchmark needs CUDA devices; none is here\n")
    worlds = options.world or [n for n in (1, 2, 4, 8) if n <= there]
    if max(worlds) > there:
        parser.error(f"--world {max(worlds)}: there are {there} GPUs")
    found: dict[int, list[dict[str, Any]]] = {}
    for world in dict.fromkeys([1, *worlds]):
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(of_a_rank, (world, folder, options), nprocs=world)
            found[world] = torch.load(Path(folder, "rows.pt"))
    rows = []
    for world, measured in found.items():
        for row, alone in zip(measured, found[1], strict=True):
            difference = float((row["out"] - alone["out"]).norm() / alone["out"].norm())
            sent, in_16_bit = row["bytes"]
            rows.append(
                {"GPUs": world, "keys and values": row["keys"], "ms": row["ms"]}
                | {"efficiency %": 100 * alone["ms"] / (world * row["ms"]), "MB sent": sent * 1e-6}
                | {"x 16 bit": sent / in_16_bit if in_16_bit else None, "difference": difference}
            )
    header = {**machine(), **versions("triton"), "tokens": str(options.tokens), "dim": str(options.dim)}
    header |= {"heads": f"{options.heads} over {options.kv_heads}"}
    if options.json:
        write_json(options.json, "Ring attention, causal", header, rows)
    show("Ring attention, causal", header, rows)


if __name__ == "__main__":
    main()
