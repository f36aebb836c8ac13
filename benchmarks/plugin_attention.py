"""Times the attention plugin of served engines, launched from C++, beside our Triton kernels in Python.

    python benchmarks/plugin_attention.py

Both run in CUDA graphs, so that the time is the GPU's: the new tokens rounded into the cache, attention over 32,768
keys, and the sum of the splits.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from _plugin_library import PluginKernels, build_launches

from quant.export.tensorrt.cache_plugin import CacheSpec, compile_cache_attention
from quant.export.tensorrt.plugin import pack
from quant.kernels.attention.kv_pages import KVPages, kv_format
from quant.kernels.attention.paged_attention import paged_attention
from quant.kernels.attention.portable_paged_kv_cache import write_kv

HEADS, KV_HEADS, DIM, KEYS, PAGE = 32, 8, 128, 32768, 64


def microseconds(run: Callable[[], None]) -> float:
    """The fastest of some replays of a CUDA graph of `run`, over a cache that does not fit L2."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            run()
    best = float("inf")
    for _ in range(10):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(stop) * 1000 / 20)
    return best


def measure(kernels: PluginKernels, name: str, batch: int, fresh: int) -> tuple[float, float]:
    """Microseconds of the plugin and of the Triton kernels."""
    width = DIM if name == "fp8" else DIM // 2
    codes = torch.randint(0, 120, (2, batch, KV_HEADS, KEYS, width), dtype=torch.uint8, device="cuda")
    blocks = torch.randint(40, 80, (2, batch, KV_HEADS, KEYS, DIM // 16), dtype=torch.uint8, device="cuda")
    k, v = codes.view(torch.float8_e4m3fn) if name == "fp8" else codes
    k_blocks, v_blocks = blocks.view(torch.float8_e4m3fn)
    scale = torch.full((KV_HEADS,), 0.01, device="cuda")
    q = torch.randn(batch, HEADS, fresh, DIM, dtype=torch.bfloat16, device="cuda")
    new = torch.randn(2, batch, KV_HEADS, fresh, DIM, dtype=torch.bfloat16, device="cuda")
    past = torch.full((batch,), KEYS - fresh, dtype=torch.int32, device="cuda")
    lengths, out = past + fresh, torch.empty_like(q)
    tensors = {"q": q, "k": new[0], "v": new[1], "k_cache": k, "v_cache": v, "past": past, "lengths": lengths}
    tensors |= {"k_scale": scale, "v_scale": scale, "out": out}
    tensors |= {"k_blocks": k_blocks, "v_blocks": v_blocks} if name == "nvfp4" else {"k_blocks": None, "v_blocks": None}
    call = kernels.cache_call(tensors, KEYS)
    plugin = microseconds(lambda: kernels.attend_cache(call))
    # The same memory as pages of 64 tokens: in another order, which costs the same.
    paged = [x.view(-1, KV_HEADS, PAGE, x.shape[-1]) for x in (k, v, k_blocks, v_blocks)]
    pages = KVPages(*paged[:2], kv_format(name), DIM, scale, scale, *(paged[2:] if name == "nvfp4" else (None, None)))
    table = torch.arange(batch * KEYS // PAGE, dtype=torch.int32, device="cuda").view(batch, -1)

    def triton() -> None:
        write_kv(pages, table, past, new[0], new[1])
        paged_attention(q, pages, table, lengths, max_length=KEYS, shortest=KEYS)

    return plugin, microseconds(triton)


def main() -> None:
    """Prints a table."""
    major, minor = torch.cuda.get_device_capability()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{HEADS} heads over {KV_HEADS}, {KEYS} keys of {DIM}")
    print(f"{'cache':>6} {'sequences':>9} {'new':>4} {'plugin µs':>10} {'Triton µs':>10} {'plugin / Triton':>16}")
    with tempfile.TemporaryDirectory() as folder:
        library = build_launches(Path(folder) / "launches.so")
        for name in ("fp8", "nvfp4"):
            spec = CacheSpec(DIM, HEADS // KV_HEADS, KEYS, name, "BF16")
            kernels = PluginKernels(library, pack(compile_cache_attention(spec, 10 * major + minor)))
            for batch, fresh in ((1, 1), (8, 1), (1, 8), (8, 8)):
                plugin, triton = measure(kernels, name, batch, fresh)
                row = f"{name:>6} {batch:>9} {fresh:>4} {plugin:>10.1f} {triton:>10.1f}"
                print(f"{row} {triton / plugin:>15.2f}×", flush=True)


if __name__ == "__main__":
    main()
