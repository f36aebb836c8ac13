"""This benchmark puts vLLM to sleep, loads weights anew and offloads them, and compares log-probabilities afterwards.

    python benchmarks/vllm_reload.py --out vllm-reload
    python benchmarks/vllm_reload.py --only "nvfp4 cache"

Each small model with random weights is written twice, A and B. An engine (in a process of its own, all at once)
generates 24 tokens after each of eight prompts in one batch, and after one prompt alone, under CUDA graphs. It does so
again after each of these:

    sleep 1           weights to the CPU and back
    sleep 2           all memory given away, weights loaded anew
    reload            weights loaded anew while the engine is awake
    other             the weights of the other checkpoint, against an engine that started with them
    back              its own again

Other cases start with made-up weights (`dummy`) or keep weights on the CPU, and are compared with the plain case. A
cell has the tokens that are equal, and the largest difference of their log-probabilities: with the same kernels it
should be zero.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from quant.base.json_files import json_text

LLAMA = {
    "vocab_size": 8192, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 3,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 1024,
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
MOE = {
    **LLAMA, "hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 2,
    "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any], str, str | None]] = {
    "dense": ("Llama", LLAMA, "nvfp4a16", "nvfp4"),
    "mxfp4": ("Llama", LLAMA, "mxfp4a16", None),
    "moe": ("Qwen3Moe", MOE, "nvfp4a16", None),
    "moe-mxfp4": ("Qwen3Moe", MOE, "mxfp4a16", None),
    "moe-fp8": ("Qwen3Moe", MOE, "fp8_channel", None),
}
"""By name: family, sizes, preset, and format of the output head."""
GRAPHS = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 8]}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, GRAPHS) for name in MODELS},
    "dense compiled": ("dense", {"compilation_config": {"cudagraph_capture_sizes": [1, 8]}}),
    "nvfp4 cache": ("dense", {**GRAPHS, "kv_cache_dtype": "nvfp4"}),
    "dense, dummy": ("dense", {**GRAPHS, "load_format": "dummy"}),
    "moe, dummy": ("moe", {**GRAPHS, "load_format": "dummy"}),
    "dense, on the CPU": ("dense", {**GRAPHS, "cpu_offload_gb": 0.15}),
    "moe, on the CPU": ("moe", {**GRAPHS, "cpu_offload_gb": 0.15}),
    "dense, prefetched": (
        "dense",
        {**GRAPHS, "offload_backend": "prefetch", "offload_group_size": 3, "offload_num_in_group": 2},
    ),
}
PROMPTS, TOKENS, NEW = 8, 96, 24
Numbers = list[list[tuple[int, float]]]
"""Of each prompt, its new tokens with their log-probabilities."""


def make(out: Path, models: set[str]) -> None:
    """Writes the two checkpoints of each model."""
    import torch
    import transformers

    from quant.export.checkpoint.save import save
    from quant.recipes.plan_make import make_plan
    from quant.run.api import quantize

    for name in models:
        family, sizes, preset, head = MODELS[name]
        for seed, letter in enumerate("AB"):
            torch.manual_seed(seed)
            config = getattr(transformers, f"{family}Config")(**sizes)
            model = getattr(transformers, f"{family}ForCausalLM")(config).to("cuda", torch.bfloat16).eval()
            model.config.dtype = torch.bfloat16
            plan = make_plan(model, preset, solver="rtn", lm_head=head)
            if preset == "fp8_channel":
                plan = replace(plan, layers=tuple(replace(layer, activation=None) for layer in plan.layers))
            done = quantize(model, plan, torch.randint(0, sizes["vocab_size"], (4, 64), device="cuda"))
            save(done.model, done.plan, out / name / letter, allow_missing=True)


def serve(out: Path, case: str, letter: str) -> None:
    """One engine: what it continues, before and after each change, goes into a file."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch
    from vllm import LLM, SamplingParams

    from quant.vllm_plugin.register import register

    register()  # by hand, for a checkout that is not installed has no entry points
    model, options = CASES[case]
    folder, sleeps = out / model / letter, "," not in case
    llm = LLM(
        model=str(folder), skip_tokenizer_init=True, max_model_len=320, max_num_seqs=PROMPTS, seed=0,
        enable_sleep_mode=sleeps, gpu_memory_utilization=0.04, kv_cache_memory_bytes=1 << 28,
        enable_prefix_caching=False, disable_log_stats=True, **options,
    )  # fmt: skip
    rows = torch.randint(3, 250, (PROMPTS, TOKENS), generator=torch.Generator().manual_seed(5)).tolist()
    ask = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, logprobs=1, detokenize=False)

    def numbers() -> Numbers:
        found: Numbers = []
        for some in (rows, rows[:1]):
            for answer in llm.generate([{"prompt_token_ids": row} for row in some], ask, use_tqdm=False):
                [output] = answer.outputs
                steps = zip(output.token_ids, output.logprobs, strict=True)
                found.append([(token, step[token].logprob) for token, step in steps])
        return found

    def load(path: Path) -> None:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})

    result: dict[str, Any] = {"case": case, "letter": letter}
    if "load_format" in options:
        llm.collective_rpc("update_config", kwargs={"overrides": {"load_config": {"load_format": "auto"}}})
        load(folder)
    result["first"] = numbers()
    if sleeps:
        memory = torch.accelerator.get_memory_info()
        # vLLM asserts that a sleep frees memory of the GPU, which other engines take meanwhile.
        torch.accelerator.get_memory_info = lambda *arguments: memory
        llm.sleep(1)
        llm.wake_up()
        result["sleep 1"] = numbers()
        llm.sleep(2)
        llm.wake_up(tags=["weights"])
        load(folder)
        llm.wake_up(tags=["kv_cache"])
        result["sleep 2"] = numbers()
    if sleeps or "load_format" in options:
        load(folder)
        result["reload"] = numbers()
        load(out / model / ("B" if letter == "A" else "A"))
        result["other"] = numbers()
        load(folder)
        result["back"] = numbers()
    (out / f"{case}-{letter}.json").write_text(json_text(result))
    os._exit(0)


def compared(first: Numbers | None, second: Numbers | None) -> str:
    """The equal tokens, and the largest difference of their log-probabilities."""
    if first is None or second is None:
        return ""
    pairs = [pair for rows in zip(first, second, strict=True) for pair in zip(*rows, strict=True)]
    apart = [abs(a[1] - b[1]) for a, b in pairs if a[0] == b[0]]
    return f"{len(apart)} of {len(pairs)}, {max(apart, default=0.0):.2g}"


def rows_of(results: dict[str, dict[str, Any]]) -> list[dict[str, object]]:
    """One row for each engine."""
    rows = []
    for result in results.values():
        case, letter = result["case"], result["letter"]
        fresh = results.get(f"{case}-{'B' if letter == 'A' else 'A'}", {})
        plain = results.get(f"{case.partition(',')[0]}-{letter}", {}) if "," in case else {}
        changes = {name: compared(result["first"], result.get(name)) for name in ("sleep 1", "sleep 2", "reload")}
        rows.append({
            "case": case, "weights": letter, **changes, "other": compared(result.get("other"), fresh.get("first")),
            "back": compared(result["first"], result.get("back")),
            "plain case": compared(result["first"], plain.get("first")),
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("vllm-reload"))
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--seconds", type=float, default=150.0, help="after which an engine is stopped")
    parser.add_argument("--serve", choices=list(CASES), help="makes this process an engine")
    parser.add_argument("--weights", choices="AB", default="A", help="of that engine")
    args = parser.parse_args()
    if args.serve:
        return serve(args.out, args.serve, args.weights)
    from _table import machine, show, versions

    args.out.mkdir(parents=True, exist_ok=True)
    make(args.out, {CASES[case][0] for case in args.only})
    processes = []
    for case in args.only:
        for letter in "A" if "," in case else "AB":
            (args.out / f"{case}-{letter}.json").unlink(missing_ok=True)
            log = (args.out / f"{case}-{letter}.log").open("w")
            command = [sys.executable, __file__, "--out", str(args.out), "--serve", case, "--weights", letter]
            processes.append(subprocess.Popen(command, stdout=log, stderr=log))
    for process in processes:
        try:
            process.wait(args.seconds)
        except subprocess.TimeoutExpired:
            process.kill()
    results = {path.stem: json.loads(path.read_text()) for path in sorted(args.out.glob("*.json"))}
    show("Reloads in vLLM", {**machine(), **versions("vllm", "triton")}, rows_of(results))
    if missing := [path.name for path in args.out.glob("*.log") if path.stem not in results]:
        raise SystemExit(f"no result: see {', '.join(sorted(missing))} in {args.out}")


if __name__ == "__main__":
    main()
