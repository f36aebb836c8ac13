"""This benchmark measures how long the first prompt of each length waits in vLLM, beside the second of that length.

    python benchmarks/vllm_first_prompt.py llama-8b --layers 4
    python benchmarks/vllm_first_prompt.py qwen3-30b-a3b --layers 4

Weights are random, as in `vllm_speed.py`. The engines, each in a process of its own and with caches of its own, load
beside each other and measure one at a time: vLLM; the plug-in without its warm-up, which vLLM's option
`enable_jit_warmup` turns off; the plug-in; the same with an NVFP4 cache; and the plug-in started again, with the
kernels of its first start on disk. A prompt gets one new token, and no prefix of it is cached. Then 32 prompts come at
once and get 24 tokens each, so that steps have decoding sequences beside pieces of prompts. "compiled" counts vLLM's
own warnings that Triton compiled a kernel while it served.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from vllm_speed import SHAPES, write_config

from quant.base.json_files import json_text

LENGTHS = (40, 90, 140, 200, 300, 450, 700, 1000, 1500, 2200, 3000, 4500, 7000)
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "vLLM": ("0", {}),
    "not warmed": ("1", {"kernel_config": {"enable_jit_warmup": False}}),
    "plug-in": ("1", {}),
    "NVFP4 cache": ("1", {"kv_cache_dtype": "nvfp4"}),
    "plug-in, again": ("1", {}),
}


def serve(args: argparse.Namespace) -> None:
    """One engine: milliseconds of the first and the second prompt of each length go into a file."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from _vllm_engine import random_loader

    if os.environ["BLOCKSCALE_VLLM"] != "0":
        from quant.vllm_plugin.register import register

        register()  # by hand, for a checkout that is not installed has no entry points
    import torch
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(args.out / args.shape), load_format=random_loader(), skip_tokenizer_init=True, max_model_len=8192,
        max_num_seqs=64, max_num_batched_tokens=8192, gpu_memory_utilization=0.1, kv_cache_memory_bytes=2 << 30,
        enable_prefix_caching=False, disable_log_stats=True, seed=0,
        compilation_config={"cudagraph_capture_sizes": [1, 16, 64]}, jit_monitor_verbose=True,
        **ENGINES[args.serve][1],
    )  # fmt: skip
    common = {"temperature": 0, "ignore_eos": True, "detokenize": False}
    ask = SamplingParams(**common, max_tokens=1)

    def milliseconds(length: int) -> float:
        row = torch.randint(3, 30000, (length,)).tolist()
        start = time.perf_counter()
        llm.generate([{"prompt_token_ids": row}], ask, use_tqdm=False)
        return (time.perf_counter() - start) * 1e3

    with (args.out / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        milliseconds(16)  # a length that every engine has run: the first request of all has costs of its own
        times = {length: (milliseconds(length), milliseconds(length)) for length in LENGTHS}
        rows = [{"prompt_token_ids": torch.randint(3, 30000, (90 * i + 7,)).tolist()} for i in range(32)]
        llm.generate(rows, SamplingParams(**common, max_tokens=24), use_tqdm=False)
    (args.out / f"{args.serve}.json").write_text(json_text(times))
    os._exit(0)


def start(args: argparse.Namespace, name: str) -> subprocess.Popen[bytes]:
    """Starts an engine; its log is beside its result."""
    (args.out / f"{name}.json").unlink(missing_ok=True)
    cache = args.out / "cache" / name.partition(",")[0]
    caches = {"TRITON_CACHE_DIR": "triton", "VLLM_CACHE_ROOT": "vllm", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    environment = {
        **os.environ, "BLOCKSCALE_VLLM": ENGINES[name][0],
        **{variable: str((cache / folder).resolve()) for variable, folder in caches.items()},
    }  # fmt: skip
    log = (args.out / f"{name}.log").open("w")
    command = [sys.executable, __file__, args.shape, "--out", str(args.out), "--serve", name]
    return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--layers", type=int, help="fewer than the shape has: each has the same kernels")
    parser.add_argument("--out", type=Path, default=Path("vllm-first-prompt"))
    parser.add_argument("--only", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--serve", choices=list(ENGINES), help="makes this process an engine")
    args = parser.parse_args()
    if args.serve:
        return serve(args)
    from _table import machine, show, versions

    args.out.mkdir(parents=True, exist_ok=True)
    args.format, args.head = "nvfp4", "bf16"
    write_config(args, 8192, args.out)
    engines = {name: start(args, name) for name in args.only if "," not in name}
    for name, engine in engines.items():
        if engine.wait():
            raise SystemExit(f"{name}: {(args.out / f'{name}.log').read_text()[-1500:]}")
    if "plug-in, again" in args.only and start(args, "plug-in, again").wait():
        raise SystemExit("plug-in, again: see its log")
    results = {name: json.loads((args.out / f"{name}.json").read_text()) for name in args.only}
    rows: list[dict[str, object]] = [
        {"tokens": length} | {f"{name}, first / second": "{:.0f} / {:.0f}".format(*results[name][str(length)])
                              for name in args.only}
        for length in LENGTHS
    ]  # fmt: skip
    logs = {name: (args.out / f"{name}.log").read_text(errors="replace") for name in args.only}
    rows.append({"tokens": "compiled"} | {f"{name}, first / second": str(log.count("JIT compilation during inference"))
                                          for name, log in logs.items()})  # fmt: skip
    notes = [f"{name}: {line}" for name, log in logs.items() for line in re.findall(r"compiled \d+ kernels.*", log)]
    title = f"First prompts of {args.shape}, {args.layers or 'all'} layers: ms to a token"
    show(title, {**machine(), **versions("vllm", "triton")}, rows, notes)


if __name__ == "__main__":
    main()
