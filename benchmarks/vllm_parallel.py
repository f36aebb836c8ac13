"""This benchmark spreads small models over several GPUs in vLLM, and compares greedy tokens with those of one GPU.

    python benchmarks/vllm_parallel.py --out vllm-parallel
    python benchmarks/vllm_parallel.py --only "MoE, EP 4"

A Llama and a Qwen3-MoE, trained on bytes as in `vllm_presets.py`, are written in `nvfp4a16`. The engines run at once on
the same four GPUs, each in processes of its own, under torch.compile and CUDA graphs. They generate one at a time: GPUs
that wait for each other's sums would otherwise wait for other engines, too. Only "TP 4" compiles every kernel at its
start, as vLLM does by default: sixty processes that do so at once would take minutes.

    TP    tensor parallelism: each GPU has a part of every layer
    PP    pipeline parallelism: each GPU has some of the layers
    EP    expert parallelism: each GPU has some of the experts of every layer (`--enable-expert-parallel`)
    DP    data parallelism: each group of GPUs has prompts of its own, and all share the experts

Each engine adds 64 tokens to the same 64 prompts of 200 tokens, then replays the continuations of the engine on one
GPU, as `vllm_greedy.py` explains. The columns are the same as there: continuations that are equal, and the share of
steps at which both engines find the same token likeliest, of all and of those that are clear. GPUs add up their parts
in 16 bit, so they round otherwise than one GPU does; the rows of vLLM's own kernels tell how much that changes.

Below the table stand the lines of each log that say what our kernels took, and the last line of an engine that failed.
The plug-in is found as in an installed environment, by its entry point; a checkout gets one in `--out`.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm_greedy import NEW, PROMPTS, agreement, await_reference, byte_prompts, likeliest, same_choices, write

CARDS = 4


@dataclass(frozen=True)
class Engine:
    """An engine: its model, value of BLOCKSCALE_VLLM, how it is spread, the engine it is compared with, and options."""

    model: str
    like: str = ""
    switch: str = "1"
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    options: dict[str, Any] = field(default_factory=dict)


EP, CACHE = {"enable_expert_parallel": True}, {"kv_cache_dtype": "nvfp4"}
EPLB = {**EP, "enable_eplb": True, "eplb_config": {"num_redundant_experts": 4}}
ENGINES = {
    "one GPU": Engine("dense"),
    "TP 4": Engine("dense", "one GPU", tensor=4, options={"kernel_config": {}}),
    "PP 2": Engine("dense", "one GPU", pipeline=2),
    "TP 2, PP 2": Engine("dense", "one GPU", tensor=2, pipeline=2),
    "NVFP4 cache, one GPU": Engine("dense", options=CACHE),
    "NVFP4 cache, TP 4": Engine("dense", "NVFP4 cache, one GPU", tensor=4, options=CACHE),
    "NVFP4 cache, PP 2": Engine("dense", "NVFP4 cache, one GPU", pipeline=2, options=CACHE),
    "NVFP4 cache, TP 2, PP 2": Engine("dense", "NVFP4 cache, one GPU", tensor=2, pipeline=2, options=CACHE),
    "vLLM, one GPU": Engine("dense", switch="0"),
    "vLLM, TP 4": Engine("dense", "vLLM, one GPU", switch="0", tensor=4),
    "MoE, one GPU": Engine("moe"),
    "MoE, TP 4": Engine("moe", "MoE, one GPU", tensor=4),
    "MoE, PP 2": Engine("moe", "MoE, one GPU", pipeline=2),
    "MoE, EP 4": Engine("moe", "MoE, one GPU", tensor=4, options=EP),
    "MoE, NVFP4 cache, one GPU": Engine("moe", options=CACHE),
    "MoE, NVFP4 cache, TP 4": Engine("moe", "MoE, NVFP4 cache, one GPU", tensor=4, options=CACHE),
    "MoE, NVFP4 cache, EP 4": Engine("moe", "MoE, NVFP4 cache, one GPU", tensor=4, options={**EP, **CACHE}),
    "MoE, EP 4, DP 2": Engine("moe", "MoE, one GPU", tensor=2, data=2, options=EP),
    "MoE, EP 2, PP 2": Engine("moe", "MoE, one GPU", tensor=2, pipeline=2, options=EP),
    "MoE, EP 4, EPLB": Engine("moe-modelopt", "MoE, one GPU", tensor=4, options=EPLB),
    "MoE, vLLM, one GPU": Engine("moe", switch="0"),
    "MoE, vLLM, EP 4": Engine("moe", "MoE, vLLM, one GPU", switch="0", tensor=4, options=EP),
}


def make(out: Path, model: str, steps: int, device: str) -> None:
    """Writes the checkpoint of a model; of the MoE also in ModelOpt's layout, which vLLM can rearrange."""
    from vllm_presets import DENSE, token_rows, trained

    from quant.export.checkpoint.convert import convert
    from quant.export.checkpoint.save import save
    from quant.recipes.plan_make import make_plan
    from quant.run.api import quantize

    name = DENSE if model == "dense" else "qwen3_moe"
    args = argparse.Namespace(name=name, model="bytes", steps=steps, device=device)
    original = trained(args).to(device)
    done = quantize(original, make_plan(original, "nvfp4a16", solver="rtn"), token_rows(args)[0][:8])
    save(done.model, done.plan, out / model, allow_missing=True, overwrite=True)
    if model == "moe":
        convert(out / model, out / "moe-modelopt", to="modelopt", overwrite=True)


def entry_point(out: Path) -> list[str]:
    """The folder with the entry point by which vLLM finds the plug-in; none where the package is installed."""
    try:
        metadata.version("blockscale")
    except metadata.PackageNotFoundError:
        folder = out / "site" / "blockscale-0.dist-info"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: blockscale\nVersion: 0\n")
        line = "[vllm.general_plugins]\nblockscale = quant.vllm_plugin.register:register\n"
        (folder / "entry_points.txt").write_text(line)
        return [str(folder.parent.resolve())]
    return []


def environments(out: Path, name: str, cards: Sequence[str]) -> list[dict[str, str]]:
    """The environment of each process of an engine: one, or one for each of its data-parallel ranks."""
    engine = ENGINES[name]
    common = {
        "BLOCKSCALE_VLLM": engine.switch, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1",
        # Engines that compile the same model would write into one cache.
        "VLLM_CACHE_ROOT": str((out / "cache" / name).resolve()), "CUDA_VISIBLE_DEVICES": ",".join(cards),
        # Not every host lets programs use the multicast of NVLink.
        "NCCL_NVLS_ENABLE": "0", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
        "PYTHONPATH": ":".join([*entry_point(out), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    if engine.data == 1:
        return [{**os.environ, **common}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = {"VLLM_DP_SIZE": str(engine.data), "VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": port}
    return [{**os.environ, **common, **ranks, "VLLM_DP_RANK": str(rank)} for rank in range(engine.data)]


def serve(out: Path, name: str) -> None:
    """One process of an engine: what its prompts are continued by, and what it would have chosen, goes into a file."""
    from vllm import LLM, SamplingParams

    engine, rank = ENGINES[name], int(os.environ.get("VLLM_DP_RANK", "0"))
    llm = LLM(
        model=str(out / engine.model), skip_tokenizer_init=True, max_model_len=320, max_num_seqs=PROMPTS, seed=0,
        gpu_memory_utilization=0.03, kv_cache_memory_bytes=1 << 28, enable_prefix_caching=False,
        disable_log_stats=True, enable_trace_replay=True, tensor_parallel_size=engine.tensor,
        pipeline_parallel_size=engine.pipeline, compilation_config={"cudagraph_capture_sizes": [1, 8, 32, 64]},
        **{"kernel_config": {"enable_jit_warmup": False}, **engine.options},
    )  # fmt: skip
    mine = slice(rank * PROMPTS // engine.data, (rank + 1) * PROMPTS // engine.data)
    prompts = byte_prompts()[mine]

    def outputs(asked: list[dict[str, Any]]) -> list[Any]:
        common = {"temperature": 0, "max_tokens": NEW, "ignore_eos": True, "detokenize": False}
        ask = [SamplingParams(**common, **own) for own in asked]
        answers = llm.generate([{"prompt_token_ids": row} for row in prompts], ask, use_tqdm=False)
        return [answer.outputs[0] for answer in answers]

    with alone(out, f"{name} tokens", rank):
        tokens = [list(each.token_ids) for each in outputs([{}] * len(prompts))]
    path = out / (f"{name}.json" if engine.data == 1 else f"{name} {rank}.json")
    write(path, {"tokens": tokens})
    if reference := await_reference(out, engine.like or name):
        with alone(out, f"{name} replay", rank):
            replayed = outputs([{"trace_decode_token_ids": row, "logprobs": 2} for row in reference[mine]])
        write(path, {"tokens": tokens, "top": [likeliest(each.logprobs) for each in replayed]})
    os._exit(0)


@contextmanager
def alone(out: Path, task: str, rank: int) -> Iterator[None]:
    """Waits until no other engine is within; the other ranks of an engine follow its first."""
    started = out / f"{task}.started"
    if rank:
        while not started.is_file():
            time.sleep(0.02)
        yield
        return
    with (out / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        started.touch()
        yield


def result_of(out: Path, name: str) -> dict[str, Any] | None:
    """Tokens and choices of an engine for all prompts, or None if a process of it has written none."""
    ranks = ENGINES[name].data
    paths = [out / f"{name}.json"] if ranks == 1 else [out / f"{name} {rank}.json" for rank in range(ranks)]
    if not all(path.is_file() for path in paths):
        return None
    parts = [json.loads(path.read_text()) for path in paths]
    return {key: [row for part in parts for row in part[key]] for key in parts[0] if all(key in p for p in parts)}


def said(log: Path) -> list[str]:
    """The lines of a log by which the plug-in says what it took, each once."""
    lines = [line.partition("] Blockscale: ")[2] for line in log.read_text(errors="replace").splitlines()]
    return list(dict.fromkeys(line for line in lines if line and "may take our kernels" not in line))


def last_error(log: Path) -> str:
    """The last line of a log that names an error."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if "Error" in line and "rror:" in line]
    return lines[-1][-200:] if lines else "no error in its log"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("vllm-parallel"))
    parser.add_argument("--only", nargs="+", default=[""], help="engines whose names begin so")
    parser.add_argument("--seconds", type=float, default=150.0, help="after which the engines are stopped")
    parser.add_argument("--steps", type=int, default=300, help="of training")
    parser.add_argument("--device", default="cuda", help="that trains")
    parser.add_argument("--make", choices=("dense", "moe"), help="makes this process write a model")
    parser.add_argument("--serve", choices=list(ENGINES), help="makes this process a part of an engine")
    args = parser.parse_args()
    if args.serve:
        return serve(args.out, args.serve)
    if args.make:
        return make(args.out, args.make, args.steps, args.device)
    from _table import machine, show, versions

    args.out.mkdir(parents=True, exist_ok=True)
    names = [name for name in ENGINES if name.startswith(tuple(args.only))]
    names += [like for name in names if (like := ENGINES[name].like) and like not in names]
    names = list(dict.fromkeys(names))
    end = time.monotonic() + args.seconds
    command = [sys.executable, __file__, "--out", str(args.out)]
    makers = []
    for model in {ENGINES[name].model.partition("-")[0] for name in names}:
        if not (args.out / model / "config.json").is_file():
            how = ["--make", model, "--steps", str(args.steps), "--device", args.device]
            makers.append(subprocess.Popen([*command, *how], stdout=sys.stderr))
    if any(maker.wait() for maker in makers):
        raise SystemExit("a model was not written")
    print(f"models written, {end - time.monotonic():.0f} s left", file=sys.stderr, flush=True)
    visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(CARDS)))).split(",")
    processes = []
    for path in [*args.out.glob("*.json"), *args.out.glob("*.started")]:
        path.unlink()
    for index, name in enumerate(names):
        at = index % len(visible)
        log = (args.out / f"{name}.log").open("w")
        for environment in environments(args.out, name, visible[at:] + visible[:at]):
            processes.append(subprocess.Popen([*command, "--serve", name], stdout=log, stderr=log, env=environment,
                                              start_new_session=True))  # fmt: skip
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(end - time.monotonic(), 0.1))
    for process in processes:
        # A process of its own group, with the workers that it started.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    report = {name: result_of(args.out, name) for name in names}
    results = {name: result for name, result in report.items() if result}
    rows = []
    for name, result in results.items():
        other = results.get(ENGINES[name].like)
        if other:
            choices = same_choices(other["top"], result["top"]) if "top" in other and "top" in result else {}
            rows.append({"engine": name, "like": ENGINES[name].like, **agreement(other["tokens"], result["tokens"]),
                         **choices})  # fmt: skip
    if rows:
        show("Models spread over GPUs in vLLM", {**machine(), **versions("vllm", "triton")}, rows)
    for name in names:
        lines = said(args.out / f"{name}.log")
        print(f"\n{name}: {'; '.join(lines) or 'nothing of Blockscale'}")
        if name not in results:
            print(f"    no result: {last_error(args.out / f'{name}.log')}")


if __name__ == "__main__":
    main()
