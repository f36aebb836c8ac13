"""This benchmark compares greedy continuations in vLLM: with the plug-in, with an NVFP4 KV cache and its features.

    python benchmarks/vllm_greedy.py --out vllm-greedy
    python benchmarks/vllm_greedy.py --only GLM         a head for multi-token prediction drafts
    python benchmarks/vllm_greedy.py --model SmolLM2-135M-Instruct.Q4_1.gguf

A small Llama, or SmolLM2 with `--model`, is written in `nvfp4a16`; the Llama is trained on bytes, as in
`vllm_presets.py`. The engines run at once, each in a process of its own, and add 64 tokens to each of the same 64
prompts of 200 tokens. The table counts continuations that are equal to the last token, and the share of tokens before
the first difference. Engines that round alike should agree in all; those that round otherwise part where two tokens are
about equally likely, which in so small a model is often; the engines "vLLM, …" tell how often vLLM parts from itself.

One differing token changes all later ones. So every engine also replays the continuations of the engine "vLLM", or of
"LoRA" (from 0.29 on vLLM can be told the tokens of a request), and says at each step which token it would have chosen:
the table has the share that is the same, over all steps, and over those at which the first engine's two likeliest
tokens are further apart than `CLEAR`.

Checkpoints of the same `--model` in `--out` are used again. GLM-4-MoE models (`_mtp_model.py`) are trained with a head
that drafts a token; it is in 16 bit or in NVFP4.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from quant.base.json_files import json_text

PROMPTS, TOKENS, NEW = 64, 200, 64
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
MTP = {"method": "mtp", "num_speculative_tokens": 1}
CACHE, EAGER = {"kv_cache_dtype": "nvfp4"}, {"enforce_eager": True}
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "vLLM": ("0", EAGER),
    "vLLM, prompts in reverse": ("0", {**EAGER, "reverse": True}),
    "vLLM, 24 at once": ("0", {**EAGER, "max_num_seqs": 24}),
    "vLLM, CUDA graphs": ("0", {}),
    "plug-in": ("1", {}),
    "plug-in, layers": ("layers", {}),
    "FP8 cache": ("0", {**EAGER, "kv_cache_dtype": "fp8"}),
    "NVFP4 cache": ("1", {**EAGER, **CACHE}),
    "NVFP4 cache, CUDA graphs": ("1", CACHE),
    # Room for about 18 of the sequences: others wait, and some are preempted. Releases differ in their size of a block.
    "NVFP4 cache, preempted": ("1", {**EAGER, **CACHE, "block_size": 16, "num_gpu_blocks_override": 4800 // 16}),
    "NVFP4 cache, drafts verified": ("1", {**EAGER, **CACHE, "speculative_config": NGRAM}),
    "NVFP4 cache, chunks and prefixes": (
        "1", {**EAGER, **CACHE, "max_num_batched_tokens": 64, "enable_prefix_caching": True, "twice": True},
    ),
    "GLM": ("1", {**EAGER, "checkpoint": "glm"}),
    "GLM, drafts of its head": ("1", {**EAGER, "checkpoint": "glm", "speculative_config": MTP}),
    "GLM, drafts of its head in NVFP4": ("1", {**EAGER, "checkpoint": "glm-head", "speculative_config": MTP}),
    "GLM, drafts, CUDA graphs": ("1", {"checkpoint": "glm", "speculative_config": MTP}),
    "GLM, drafts, NVFP4 cache": ("1", {**EAGER, **CACHE, "checkpoint": "glm", "speculative_config": MTP}),
    "GLM, vLLM, drafts of its head": ("0", {**EAGER, "checkpoint": "glm", "speculative_config": MTP}),
    "LoRA": ("0", {**EAGER, "enable_lora": True}),
    "LoRA, plug-in": ("1", {**EAGER, "enable_lora": True}),
    "LoRA, plug-in, CUDA graphs": ("1", {"enable_lora": True}),
}  # fmt: skip
PAIRS = (
    ("vLLM", "plug-in"), ("vLLM", "FP8 cache"), ("vLLM", "NVFP4 cache"),
    *((name.partition(",")[0], name) for name in ENGINES if "," in name),
)  # fmt: skip
CLEAR = 0.25
"""Nats between the two likeliest tokens of a step, beyond which rounding should not change their order."""
Top = list[tuple[int, float]]
"""The likeliest token of each step, and the difference between its log-probability and the second one's."""


def make(out: Path, source: str) -> None:
    """Writes the checkpoint, an adapter with random weights, and the prompts."""
    import torch
    from safetensors.torch import load_file, save_file
    from vllm_presets import DATA, DENSE, token_rows, trained

    from quant.export.checkpoint.save import save
    from quant.models.open_model import open_model
    from quant.recipes.plan_make import make_plan
    from quant.run.api import quantize

    args = argparse.Namespace(name=DENSE, model=source, steps=300, device="cuda")
    model = trained(args) if source == "bytes" else open_model(source).model
    adapter = {}
    torch.manual_seed(1)
    for name, module in model.model.named_modules():
        if isinstance(module, torch.nn.Linear):
            down = torch.randn(8, module.in_features) / module.in_features**0.5
            up = torch.randn(module.out_features, 8) * 0.1
            adapter[f"base_model.model.model.{name}.lora_A.weight"] = down.bfloat16()
            adapter[f"base_model.model.model.{name}.lora_B.weight"] = up.bfloat16()
    (out / "adapter").mkdir(parents=True, exist_ok=True)
    save_file(adapter, out / "adapter" / "adapter_model.safetensors")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": targets, "bias": "none"}
    (out / "adapter" / "adapter_config.json").write_text(json_text(config))
    done = quantize(model.cuda(), make_plan(model, "nvfp4a16", solver="rtn"), token_rows(args)[0][:8])
    save(done.model, done.plan, out / "checkpoint", overwrite=True)
    if source == "bytes":
        prompts = byte_prompts()
    else:
        rows = load_file(DATA / "smollm2_wikitext2_512.safetensors")["calibration"][8:].flatten()
        prompts = rows[: PROMPTS * TOKENS].view(PROMPTS, TOKENS).tolist()
    (out / "prompts.json").write_text(json_text(prompts))
    (out / "source").write_text(source)  # the last file: the others are complete


def make_glm(out: Path, steps: int = 300, device: str = "cuda") -> None:
    """Writes a GLM-4-MoE in NVFP4 with its head in 16 bit (`glm`) and in NVFP4 (`glm-head`), and the prompts."""
    from _mtp_model import LAYERS, write_model
    from vllm_presets import DENSE, token_rows

    args = argparse.Namespace(name=DENSE, model="bytes", steps=steps, device=device)
    write_model(token_rows(args)[0], out / "glm-source", steps=steps, device=device)
    command = [sys.executable, "-m", "quant", "quantize", str(out / "glm-source"), "--format", "nvfp4a16", "--effort",
               "0", "--device", device, "--overwrite", "--allow-missing"]  # fmt: skip
    for name, also in (("glm", []), ("glm-head", ["--include", "*", "--include", f"model.layers.{LAYERS}.*"])):
        subprocess.run([*command, *also, "--out", str(out / name)], check=True)
    (out / "prompts.json").write_text(json_text(byte_prompts()))


def byte_prompts() -> list[list[int]]:
    """Pieces of the evaluation text, whose bytes are tokens."""
    text = list((Path(__file__).parent / "data" / "evaluation.txt").read_bytes())
    return [text[i * 311 : i * 311 + TOKENS] for i in range(PROMPTS)]


def serve(out: Path, name: str) -> None:
    """One engine: its continuations and counters go into a file."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    switch, options = ENGINES[name]
    os.environ["BLOCKSCALE_VLLM"] = switch
    if switch != "0":
        from quant.vllm_plugin.register import register

        register()
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    settings = {
        "skip_tokenizer_init": True, "max_model_len": 320, "max_num_seqs": PROMPTS, "seed": 0,
        "gpu_memory_utilization": 0.03, "kv_cache_memory_bytes": 1 << 29, "enable_prefix_caching": False,
        "disable_log_stats": False,
    }  # fmt: skip
    own = ("twice", "checkpoint", "reverse")
    engine = {key: value for key, value in options.items() if key not in own}
    replays = hasattr(SamplingParams(), "trace_decode_token_ids") and not engine.get("speculative_config")
    replays &= "checkpoint" not in options
    if replays:
        settings["enable_trace_replay"] = True
    llm = LLM(model=str(out / options.get("checkpoint", "checkpoint")), **{**settings, **engine})
    adapter = LoRARequest("adapter", 1, str(out / "adapter")) if "enable_lora" in engine else None
    prompts = [{"prompt_token_ids": row} for row in json.loads((out / "prompts.json").read_text())]
    order = slice(None, None, -1 if options.get("reverse") else 1)

    def outputs(**asked: list[Any]) -> list[Any]:
        """Completions of all prompts, in their order; `asked` are further sampling parameters, one for each prompt."""
        ask = [SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False,
                              **{key: each[i] for key, each in asked.items()}) for i in range(PROMPTS)]  # fmt: skip
        answers = llm.generate(prompts[order], ask[order], use_tqdm=False, lora_request=adapter)
        return [each.outputs[0] for each in answers][order]

    for _ in range(2 if options.get("twice") else 1):
        tokens = [list(each.token_ids) for each in outputs()]
    counters = {metric.name.removeprefix("vllm:"): getattr(metric, "value", None) for metric in llm.get_metrics()}
    reported = (
        "num_preemptions",
        "spec_decode_num_drafts",
        "spec_decode_num_accepted_tokens",
        "spec_decode_num_draft_tokens",
        "prefix_cache_hits",
    )
    result = {"tokens": tokens, "counters": {key: counters[key] for key in reported if counters.get(key)}}
    write(out / f"{name}.json", result)
    reference = await_reference(out, "vLLM" if adapter is None else "LoRA") if replays else None
    if reference:
        replayed = outputs(trace_decode_token_ids=reference, logprobs=[2] * PROMPTS)
        write(out / f"{name}.json", {**result, "top": [likeliest(each.logprobs) for each in replayed]})
    os._exit(0)


def write(path: Path, result: dict[str, Any]) -> None:
    """Writes a result, which other processes find whole or not at all."""
    path.with_suffix(".part").write_text(json_text(result))
    path.with_suffix(".part").rename(path)


def await_reference(out: Path, name: str, seconds: float = 120.0) -> list[list[int]] | None:
    """Returns the tokens of an engine, which may run beside this one, or None if it has not written any."""
    end = time.monotonic() + seconds
    while not (path := out / f"{name}.json").is_file():
        if time.monotonic() > end or not (out / f"{name}.log").is_file():
            return None
        time.sleep(0.5)
    tokens: list[list[int]] = json.loads(path.read_text())["tokens"]
    return tokens


def likeliest(steps: list[dict[int, Any]]) -> Top:
    """Returns the likeliest token of each step, from log-probabilities of the first two and of the replayed token."""
    found = []
    for step in steps:
        ranked = sorted(step.items(), key=lambda pair: pair[1].rank)
        found.append((ranked[0][0], ranked[0][1].logprob - ranked[1][1].logprob))
    return found


def agreement(first: list[list[int]], second: list[list[int]]) -> dict[str, object]:
    """Continuations that are wholly equal, and the mean share of tokens before the first difference."""
    lengths = [next((i for i, pair in enumerate(zip(*rows, strict=True)) if pair[0] != pair[1]), NEW)
               for rows in zip(first, second, strict=True)]  # fmt: skip
    whole = sum(length == NEW for length in lengths)
    return {"equal": f"{whole} of {PROMPTS}", "before a difference": f"{sum(lengths) / NEW / PROMPTS:.1%}"}


def same_choices(first: list[Top], second: list[Top]) -> dict[str, object]:
    """The share of steps, behind the same tokens, at which two engines find the same token likeliest."""
    steps = [pair for rows in zip(first, second, strict=True) for pair in zip(*rows, strict=True)]
    clear = [a[0] == b[0] for a, b in steps if a[1] > CLEAR]
    apart = sorted(abs(a[1] - b[1]) for a, b in steps if a[0] == b[0])
    return {"same choice": f"{sum(a[0] == b[0] for a, b in steps) / len(steps):.2%}",
            "where clear": f"{sum(clear) / len(clear):.2%} of {len(clear):,}",
            "margins apart": f"{apart[len(apart) // 2]:.3f}, {apart[len(apart) * 99 // 100]:.3f}"}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("vllm-greedy"))
    parser.add_argument("--model", default="bytes", help="the dense model; `bytes` trains one")
    parser.add_argument("--only", nargs="+", default=[""], help="engines whose names begin so")
    parser.add_argument("--device", default="cuda", help="that trains GLM-4-MoE")
    parser.add_argument("--serve", choices=list(ENGINES), help="makes this process an engine")
    args = parser.parse_args()
    if args.serve:
        return serve(args.out, args.serve)
    from _table import machine, show, versions

    names = [name for name in ENGINES if name.startswith(tuple(args.only))]
    source, of_glm = args.out / "source", (args.out / "glm-head" / "config.json", args.out / "prompts.json")
    is_made = source.is_file() and source.read_text() == args.model
    if any(not name.startswith("GLM") for name in names) and not is_made:
        make(args.out, args.model)
    if any(name.startswith("GLM") for name in names) and not all(path.is_file() for path in of_glm):
        make_glm(args.out, device=args.device)
    processes = []
    for name in names:
        (args.out / f"{name}.json").unlink(missing_ok=True)  # an engine that fails must not leave an earlier result
        log = (args.out / f"{name}.log").open("w")
        command = [sys.executable, __file__, "--out", str(args.out), "--serve", name]
        processes.append(subprocess.Popen(command, stdout=log, stderr=log))
    for process in processes:
        process.wait()
    results = {name: json.loads(path.read_text()) for name in names if (path := args.out / f"{name}.json").is_file()}
    replayed = {name for name, result in results.items() if "top" in result}
    rows = [
        {"engine": first, "other": second, **agreement(results[first]["tokens"], results[second]["tokens"]),
         **(same_choices(results[first]["top"], results[second]["top"]) if replayed >= {first, second} else {}),
         "counters of the other": json_text(results[second]["counters"])}
        for first, second in PAIRS if first in results and second in results
    ]  # fmt: skip
    show("Greedy continuations in vLLM", {**machine(), **versions("vllm", "triton")}, rows)
    if missing := set(names) - results.keys():
        raise SystemExit(f"no result of {', '.join(sorted(missing))}: see the logs in {args.out}")


if __name__ == "__main__":
    main()
