"""This benchmark loads every preset in vLLM, in both layouts, and prints perplexity there beside our own.

    python benchmarks/vllm_presets.py --model SmolLM2-135M-Instruct.Q4_1.gguf
    python benchmarks/vllm_presets.py --model smollm2-135m --families "" --presets nvfp4a16 fp8
    python benchmarks/vllm_presets.py --model bytes --json 0.29.json       a small Llama, trained here too
    python benchmarks/vllm_presets.py --do table --json 0.26.json 0.29.json    releases side by side

A dense model and tiny models of fused experts, which are trained here for some hundred steps on bytes of WikiText-2,
are quantized with round-to-nearest and eight rows of calibration text, written as compressed-tensors and converted to
ModelOpt's layout. Each checkpoint is loaded in vLLM as it is and, where our plug-in takes its format, once more with
it; "ours" is `quant.load` on the same GPU, in the model's own dtype. All perplexities are over the same rows.

vLLM must be importable; a GPU with 80 GB runs ten processes at once. Each process loads several checkpoints in turn.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from quant.base.json_files import json_text

DATA = Path(__file__).parent / "data"
PRESETS = (
    "nvfp4a16", "nvfp4", "mxfp4a16", "mxfp4", "mxfp6a16", "mxfp8", "fp8", "fp8_channel", "fp8_block", "int8", "int4a16",
)  # fmt: skip
# Also written: FP8 weights with inputs in 16 bit, FP8 KV caches, and a rotation that the weights absorb.
VARIANTS = ("fp8_channel weights", "fp8 + kv", "fp8 + head kv", "nvfp4a16 + kv", "nvfp4a16 rotated")
# Not written: the checkpoint with an FP8 cache, served with an NVFP4 cache.
NVFP4_KV = "nvfp4a16 + nvfp4 kv"
# Written by hand, in the form of OpenAI's own checkpoints: only the experts are in MXFP4.
GPT_OSS = "mxfp4 of gpt-oss"
BY_FOLDER = {preset.replace(" ", "_"): preset for preset in (*PRESETS, *VARIANTS, GPT_OSS)}
PLUGIN = ("nvfp4a16", "nvfp4", "mxfp4a16", "mxfp4", "mxfp8", "int4a16", "fp8_channel weights", NVFP4_KV)
OF_EXPERTS = (
    "nvfp4a16", "mxfp4a16", "mxfp8", "fp8", "fp8_channel", "fp8_block", "int8", "int4a16", "fp8_channel weights",
)  # fmt: skip
EXPERTS_PLUGIN = ("nvfp4a16", "mxfp4a16", "fp8_channel weights", GPT_OSS)
EXPERTS_IN_MODELOPT = ("nvfp4a16", "fp8")
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", {**EXPERTS, "moe_intermediate_size": 256, "head_dim": 64, "norm_topk_prob": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 256}),
    "qwen2_moe": ("Qwen2Moe", {**EXPERTS, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}),
    "olmoe": ("Olmoe", {**EXPERTS, "intermediate_size": 256, "num_key_value_heads": 4}),
    "gpt_oss": (
        "GptOss",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 64, "max_position_embeddings": 131072},
    ),
}
DECODER = {
    "vocab_size": 256, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "tie_word_embeddings": False,
}  # fmt: skip
DENSE = "dense"
BYTES = ("Llama", {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 128})
"""The dense model where `--model` is "bytes"."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="the dense model; `bytes` trains one")
    parser.add_argument("--presets", nargs="*", default=[*PRESETS, *VARIANTS])
    parser.add_argument("--families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--out", type=Path, default=Path("vllm-presets"))
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=600.0, help="after which further checkpoints are left out")
    parser.add_argument("--steps", type=int, default=300, help="of training, for the models of experts")
    parser.add_argument("--switch", default="1", help="value of BLOCKSCALE_VLLM where the plug-in is on, as layers")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--do", choices=("all", "make", "serve", "table"), default="all")
    parser.add_argument("--json", type=Path, nargs="*", default=[], help="also write the rows here; a table reads them")
    parser.add_argument("--name", help="of the one model that a process makes")
    parser.add_argument("--jobs", help="checkpoints that a process loads in vLLM, as JSON")
    args = parser.parse_args()
    args.families = [name for name in args.families if name]
    if args.do == "table" and args.json:
        return show_releases(args.json)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.do == "make":
        make(args)
    elif args.do == "serve":
        serve(args, json.loads(args.jobs))
    else:
        if args.do == "all":
            run_all(args)
        show_table(args)


def make(args: argparse.Namespace) -> None:
    """Writes every checkpoint of one model."""
    import torch

    from quant.evaluation.evaluate import evaluate
    from quant.export.checkpoint.convert import convert
    from quant.export.checkpoint.save import save
    from quant.formats.format import FORMATS, FP8_HEAD
    from quant.models.open_model import open_model
    from quant.recipes.plan_make import make_plan
    from quant.run.api import quantize

    rows, evaluation = token_rows(args)
    is_file = args.name == DENSE and args.model != "bytes"
    original = open_model(args.model).model if is_file else trained(args)
    model = copy.deepcopy(original).to(args.device)
    report(
        args,
        preset="bf16",
        layout="16 bit",
        perplexity=evaluate(model, evaluation, dtype=None, batch_size=8).perplexity,
    )
    if args.name == "gpt_oss":
        write_gpt_oss(model, args.out / args.name / GPT_OSS.replace(" ", "_") / "compressed-tensors")
        own = evaluate(model, evaluation, dtype=None, batch_size=8).perplexity
        return report(args, preset=GPT_OSS, layout="ours", perplexity=own)
    for preset in args.presets:
        name, _, variant = preset.partition(" ")
        out = args.out / args.name / preset.replace(" ", "_")
        try:
            model = copy.deepcopy(original).to(args.device)
            solver = "rotation:merge+rtn" if variant == "rotated" else "rtn"
            plan = make_plan(model, name, solver=solver)
            if variant == "weights":
                plan = replace(plan, layers=tuple(replace(layer, activation=None) for layer in plan.layers))
            elif variant == "+ kv":
                plan = replace(plan, kv_cache=FORMATS["fp8"])
            elif variant == "+ head kv":
                plan = replace(plan, kv_cache=FP8_HEAD)
            done = quantize(model, plan, rows[:8])
            save(done.model, done.plan, out / "compressed-tensors", allow_missing=True)  # vLLM knows its layers
            own = evaluate(done.model, evaluation, dtype=None, batch_size=8).perplexity
            report(args, preset=preset, layout="ours", perplexity=own)
        except Exception as error:
            report(args, preset=preset, layout="compressed-tensors", error=f"not written: {last_line(error)}")
            continue
        if args.name != DENSE and preset not in EXPERTS_IN_MODELOPT:
            continue
        try:
            convert(out / "compressed-tensors", out / "modelopt", to="modelopt")
        except Exception as error:
            report(args, preset=preset, layout="modelopt", error=f"not written: {last_line(error)}")
        del model
        torch.cuda.empty_cache()


def write_gpt_oss(model: Any, out: Path) -> None:
    """Writes a model with its experts in MXFP4, as gpt-oss comes, and gives the model the rounded values."""
    import torch
    from safetensors.torch import save_file

    from quant.formats.format import FORMATS
    from quant.formats.tensor import quantize as rounded

    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        # transformers holds an expert `[in, out]`; the file has rows of blocks of 32 inputs.
        stack = tensors.pop(name)
        weight = rounded(stack.transpose(1, 2).float().contiguous(), FORMATS["mxfp4"])
        stack.copy_(weight.dequantize(torch.float32).transpose(1, 2))
        tensors[f"{name}_blocks"] = weight.codes.unflatten(-1, (-1, 16))
        tensors[f"{name}_scales"] = weight.scale.view(torch.uint8)
    out.mkdir(parents=True)
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, out / "model.safetensors")
    config = {**model.config.to_dict(), "architectures": ["GptOssForCausalLM"]}
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (out / "config.json").write_text(json_text(config) + "\n")


def token_rows(args: argparse.Namespace) -> tuple[Any, Any]:
    """Rows of token ids to calibrate and to evaluate `args.name` with, `[n, 512]`: SmolLM2's tokens, or bytes."""
    import torch
    from safetensors.torch import load_file

    if args.name == DENSE and args.model != "bytes":
        tokens = load_file(DATA / "smollm2_wikitext2_512.safetensors")
        return tokens["calibration"].long(), tokens["eval"].long()[:8]
    texts = (torch.frombuffer(bytearray((DATA / f"{part}.txt").read_bytes()), dtype=torch.uint8)
             for part in ("calibration", "evaluation"))  # fmt: skip
    calibration, evaluation = (text[: len(text) // 512 * 512].view(-1, 512).long() for text in texts)
    return calibration, evaluation[:8]


def trained(args: argparse.Namespace) -> Any:
    """A model of experts, trained on bytes, in bfloat16."""
    import torch
    import transformers

    family, sizes = BYTES if args.name == DENSE else FAMILIES[args.name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**DECODER, **sizes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(args.device).train()
    rows, _ = token_rows(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=max(args.steps, 2))
    for _ in range(args.steps):
        batch = rows[torch.randint(len(rows), (16,))][:, :256].to(args.device)
        with torch.autocast(args.device, torch.bfloat16):
            loss = model(batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model = model.to("cpu", torch.bfloat16).eval()
    model.config.dtype = torch.bfloat16
    return model


def serve(args: argparse.Namespace, jobs: list[dict[str, Any]]) -> None:
    """Loads checkpoints in vLLM, one after the other, and reports each."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process, so that its modules can be read
    import torch
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    if os.environ.get("BLOCKSCALE_VLLM") != "0":
        from quant.vllm_plugin.register import register

        register()  # by hand, for a checkout that is not installed has no entry points
    for job in jobs:
        args.name = job["name"]
        rows, cache = token_rows(args)[1].tolist(), job["preset"].endswith(" kv")
        start = time.time()
        try:
            llm = LLM(
                model=job["path"], enforce_eager=True, max_model_len=576, max_num_seqs=8, seed=0,
                # A later chunk of a prompt reads the cache; in one chunk nothing would.
                max_num_batched_tokens=128 if cache else 4608,
                **({"kv_cache_dtype": "nvfp4"} if job["preset"] == NVFP4_KV else {}),
                kv_cache_memory_bytes=1 << 29, gpu_memory_utilization=0.06, enable_prefix_caching=False,
                disable_log_stats=True, skip_tokenizer_init=True,
            )  # fmt: skip
            ask = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
            outputs = llm.generate([{"prompt_token_ids": row} for row in rows], ask, use_tqdm=False)
            logs = [
                entries[token].logprob
                for row, output in zip(rows, outputs, strict=True)
                for token, entries in zip(row[1:], output.prompt_logprobs[1:], strict=True)
            ]
            result = {"perplexity": math.exp(-sum(logs) / len(logs)), "kernels": kernels(llm)}
            del llm
        except Exception as error:
            traceback.print_exc()
            result = {"error": last_line(error)}
        cleanup_dist_env_and_memory()
        torch.cuda.empty_cache()
        report(args, **{**job, **result, "seconds": round(time.time() - start, 1)})
    os._exit(0)  # the results are out: the engine's teardown would only cost time


def kernels(llm: Any) -> str:
    """The kernel of each kind of quantized layer in a vLLM model, most frequent first."""
    count: Counter[str] = Counter()
    for module in llm.llm_engine.model_executor.driver_worker.worker.model_runner.model.modules():
        method = getattr(module, "quant_method", None)
        scheme = getattr(module, "scheme", None)
        names = ("kernel", "linear_kernel", "fp8_linear", "w8a8_block_fp8_linear", "experts_cls")
        kernel = next(
            (k for n in names for owner in (scheme, method) if (k := getattr(owner, n, None)) is not None), None
        )
        if kernel is not None:
            name = kernel.__name__ if isinstance(kernel, type) else type(kernel).__name__
            if name.startswith("Blockscale") and getattr(module, "blockscale_format", None) == "":
                name = name.replace("Blockscale", "Marlin")
            count[name.replace("LinearKernel", "").replace("ScaledMM", "")] += 1
    return ", ".join(name for name, _ in count.most_common()) or "16 bit"


def report(args: argparse.Namespace, **result: Any) -> None:
    """Appends a result to the file of results: one line, so that processes can share it."""
    with (args.out / "results.jsonl").open("a") as file:
        file.write(json_text({"name": args.name, **result}) + "\n")


def last_line(error: BaseException) -> str:
    """The message of an error in one line, the innermost one's where there are several."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and "validation error" in lines[0]:
        lines = lines[1:]  # pydantic counts its errors before it names one
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:160]


def run_all(args: argparse.Namespace) -> None:
    """Makes the checkpoints and loads them, in `--processes` processes at once, until the time is over."""
    started = time.time()
    shared = ["--model", args.model, "--out", str(args.out), "--steps", str(args.steps), "--device", args.device]

    def start(label: str, *options: str, **environment: str) -> None:
        left = args.seconds - (time.time() - started)
        if left < 1:
            return
        with (args.out / f"{label}.log").open("w") as log, suppress(subprocess.TimeoutExpired):
            subprocess.run([sys.executable, __file__, *shared, *options], stdout=log, stderr=log, timeout=left,
                           env={**os.environ, **environment})  # fmt: skip

    of_experts = [preset for preset in OF_EXPERTS if preset in args.presets]
    parts = [(name, [GPT_OSS] if name == "gpt_oss" else of_experts) for name in args.families]
    # A model that is trained is trained once: another process would end up with other weights.
    shares_of_dense = 1 if args.model == "bytes" else 4
    parts += [(DENSE, args.presets[i::shares_of_dense]) for i in range(shares_of_dense)]
    with ThreadPoolExecutor(args.processes) as pool:
        for index, (name, presets) in enumerate(part for part in parts if part[1]):
            pool.submit(start, f"make-{name}-{index}", "--do", "make", "--name", name, "--presets", *presets)
    print(f"made after {time.time() - started:.0f} s", file=sys.stderr, flush=True)
    with ThreadPoolExecutor(args.processes) as pool:
        for index, (jobs, switch) in enumerate(shares(args, [DENSE, *args.families])):
            pool.submit(
                start,
                f"vllm-{index}",
                "--do",
                "serve",
                "--jobs",
                json_text(jobs),
                BLOCKSCALE_VLLM=args.switch if switch == "1" else switch,
            )
    print(f"done after {time.time() - started:.0f} s", file=sys.stderr, flush=True)


def show_table(args: argparse.Namespace) -> None:
    """Prints the tables of the results in the file."""
    from _table import machine, markdown, versions, write_json

    results = [json.loads(line) for line in (args.out / "results.jsonl").read_text().splitlines()]
    header = {**machine(), **versions("vllm", "triton"), "model": args.model}
    print("; ".join(f"{k} {v}" for k, v in header.items()) + "\n")
    tables = {name: list(table(name, results)) for name in (DENSE, *args.families)}
    for name, rows in tables.items():
        if rows:
            print(f"### {name}\n\n{markdown(rows)}\n")
    for path in args.json:
        rows = [{"of": name, **row} for name, some in tables.items() for row in some]
        write_json(path, "Presets in vLLM", header, rows)


def show_releases(paths: list[Path]) -> None:
    """Prints one table of the files that runs in several releases of vLLM wrote with `--json`.

    A cell has the kernel and the perplexity, and after a stroke those with the plug-in, where it took the layers.
    """
    from _table import markdown

    runs = [json.loads(path.read_text()) for path in paths]
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for run in runs:
        header = run["header"]
        column = f"vLLM {header['vllm']}, {header['gpu'].removeprefix('NVIDIA ').split()[0]}, {header['model']}"
        for row in run["rows"]:
            key = row["of"], row["preset"], row["layout"]
            line = rows.setdefault(key, {"model": key[0], "preset": key[1], "layout": key[2]})
            line[column] = release_cell(row)
            line.setdefault("order", len(rows))
    columns = list(dict.fromkeys(name for row in rows.values() for name in row if name != "order"))
    ordered = sorted(rows.values(), key=lambda row: row["order"])
    print(markdown([{name: row.get(name, "") for name in columns} for row in ordered]))


def release_cell(row: dict[str, Any]) -> str:
    """`Marlin 8.138 / ours 8.137`, or why it is not served."""
    plain = f"{row['kernel']} {row['vLLM']}"
    if row["loads"] != "yes":
        # A layout without a name for the formats is no matter of vLLM.
        plain = "–" if "not written" in row["loads"] else f"refused: {row['loads'].removeprefix('no: ')}"
    if row["with the plug-in"] == "–":
        return plain
    ours = f"{row['its kernel']} {row['with the plug-in']}"
    return ours if row["loads"] != "yes" else f"{plain} / {ours}"


def shares(args: argparse.Namespace, names: list[str]) -> Iterator[tuple[list[dict[str, Any]], str]]:
    """The checkpoints that each process loads, and whether with the plug-in; a process loads models of one kind."""
    jobs: dict[str, list[dict[str, Any]]] = {"0": [], "1": []}
    for name in names:
        for path in sorted((args.out / name).glob("*/*/config.json")):
            layout, preset = path.parent.name, BY_FOLDER[path.parent.parent.name]
            job = {"name": name, "preset": preset, "layout": layout, "path": str(path.parent)}
            jobs["0"].append({**job, "plugin": False})
            if layout == "compressed-tensors" and preset in (PLUGIN if name == DENSE else EXPERTS_PLUGIN):
                jobs["1"].append({**job, "plugin": True})
            if layout == "compressed-tensors" and preset == "nvfp4a16 + kv":
                jobs["1"].append({**job, "preset": NVFP4_KV, "plugin": True})
    whole = sum(map(len, jobs.values()))
    for switch, some in jobs.items():
        count = max(round(args.processes * len(some) / max(whole, 1)), 1)
        yield from ((some[i::count], switch) for i in range(count) if some[i::count])


def shown(result: dict[str, Any]) -> str:
    """A perplexity, or why there is none."""
    return f"{result['perplexity']:.3f}" if result.get("perplexity") else result.get("error", "–")


def table(name: str, results: list[dict[str, Any]]) -> Iterator[dict[str, object]]:
    """One row for each preset and layout of a model."""
    of_model = [result for result in results if result["name"] == name]
    base = next((r.get("perplexity") for r in of_model if r["preset"] == "bf16"), None)
    for preset in (*PRESETS, *VARIANTS, NVFP4_KV, GPT_OSS):
        own = next((r for r in of_model if r["preset"] == preset and r["layout"] == "ours"), {})
        for layout in ("compressed-tensors", "modelopt"):
            served = [r for r in of_model if r["preset"] == preset and r["layout"] == layout]
            plain = next((r for r in served if not r.get("plugin")), None)
            with_plugin = next((r for r in served if r.get("plugin")), {})
            if plain is None and not with_plugin:
                continue
            plain = plain or {"error": "needs the plug-in"}
            yield {
                "preset": preset, "layout": layout,
                "loads": "yes" if "perplexity" in plain else f"no: {plain.get('error')}",
                "vLLM": shown(plain), "kernel": plain.get("kernels", "–"),
                "with the plug-in": shown(with_plugin), "its kernel": with_plugin.get("kernels", "–"),
                "ours": shown(own), "BF16": shown({"perplexity": base}),
            }  # fmt: skip


if __name__ == "__main__":
    main()
