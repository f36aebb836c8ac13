"""This benchmark serves a shape in vLLM with our plug-in and without it, in turns: ms a decoding step, and prefill.

    python benchmarks/vllm_speed.py llama-8b                       torch.compile and CUDA graphs, as vLLM has them
    python benchmarks/vllm_speed.py qwen3-30b-a3b --engine '{"compilation_config": {"mode": 0}}'

Weights are random, in NVFP4 or MXFP4 (`--format mxfp4`, and always the experts of gpt-oss); inputs are in 16 bit, the
head is in BF16, and only config.json exists on disk. The engines, one without the plug-in and one for each --switch,
are ready at the same time in processes of their own, and one measures while the others wait. A step is the mean time
between the tokens of a generation, once all its sequences decode: it holds attention, norms, the scheduler and the
sampler. Prompts are in the prefix cache by then. Prefill is the time to the first token of one new prompt. Each figure
is the least of its rounds. `--profile` adds the time in which any kernel of a step ran, by PyTorch's profiler.

    python benchmarks/vllm_speed.py llama-8b --layers 4 --batch 16 --context 32000 --prefill 0 --kv-gib 8 \
        --engine '{"max_model_len": 32768}' --theirs '{"kv_cache_dtype": "fp8"}' --ours '{"kv_cache_dtype": "nvfp4"}'

compares KV caches. vLLM must be importable. Two engines take about 30 GB (8B) or 50 GB (30B).
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

from quant.recipes.json_text import json_text

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-8b": (
        "LlamaForCausalLM",
        {
            "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
            "rope_theta": 500000.0, "hidden_act": "silu",
        },
    ),
    "qwen3-30b-a3b": (
        "Qwen3MoeForCausalLM",
        {
            "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
            "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
            "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
            "mlp_only_layers": [], "vocab_size": 151936, "rope_theta": 1000000.0, "hidden_act": "silu",
        },
    ),
    "gpt-oss-20b": (
        "GptOssForCausalLM",
        {
            "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
            "num_experts_per_tok": 4, "vocab_size": 201088, "sliding_window": 128, "attention_bias": True,
            "hidden_act": "silu", "layer_types": ["sliding_attention", "full_attention"] * 12,
            "rope_parameters": {
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                "original_max_position_embeddings": 4096, "rope_theta": 150000.0,
            },
        },
    ),
}  # fmt: skip
NVFP4 = {
    "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True, "dynamic": False,
    "scale_dtype": "torch.float8_e4m3fn",
}  # fmt: skip
MXFP4 = {
    "num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False,
    "scale_dtype": "torch.uint8",
}  # fmt: skip
SCHEMES = {"nvfp4": ("nvfp4-pack-quantized", NVFP4), "mxfp4": ("mxfp4-pack-quantized", MXFP4)}
"""Name of each format in compressed-tensors, and its description of the weights."""
STEPS, SETTLED = 64, 4
"""Decoding steps that are timed, after those in which sequences start."""


def write_config(args: argparse.Namespace, positions: int, out: Path) -> Path:
    """A folder with the config.json of a checkpoint in `--format`, weights only, for texts of so many positions.

    The output head is in that format too where `--head` says so, and in BF16 else. gpt-oss has its own format.
    """
    shape, layers, head = args.shape, args.layers, args.head
    architecture, fields = SHAPES[shape]
    packed, weights = SCHEMES[args.format]
    group = {"format": packed, "input_activations": None, "targets": ["Linear"], "weights": weights}
    ignored = [r"re:.*mlp\.gate$"]
    if head == args.format:
        group["targets"] = ["Linear", "lm_head"]
    else:
        ignored.append("lm_head")
    config = {
        "architectures": [architecture], "dtype": "bfloat16", "max_position_embeddings": positions,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, **fields,
        "quantization_config": {
            "quant_method": "compressed-tensors", "format": packed, "config_groups": {"group_0": group},
            "ignore": ignored, "quantization_status": "compressed",
        },
    }  # fmt: skip
    if fields["model_type"] == "gpt_oss":
        config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
        config["max_position_embeddings"] = 131072
    if layers:
        config["num_hidden_layers"] = layers
        if "layer_types" in fields:
            config["layer_types"] = fields["layer_types"][:layers]
    folder = out / shape
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json_text(config, indent=1) + "\n")
    return folder


def random_loader() -> str:
    """Registers a loader that makes up weights of the size that trained ones have; returns its name."""
    import torch
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    @register_model_loader("random_nvfp4")
    class RandomLoader(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            pass

        @torch.no_grad()
        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            torch.manual_seed(0)
            for name, parameter in model.named_parameters():
                data = parameter.data
                if data.dtype is torch.uint8 and name.endswith("scale"):
                    data.random_(119, 123)  # powers of two, stored as exponent + 127
                elif data.dtype is torch.uint8:
                    data.random_(0, 256)
                elif data.dtype is torch.float8_e4m3fn:
                    data.copy_(torch.rand(data.shape, device=data.device).add_(0.5))
                elif "global_scale" in name:
                    data.fill_(160.0)  # stored as the reciprocal
                elif "norm" in name:
                    data.fill_(1.0)
                else:
                    data.normal_(0, 0.02)

    return "random_nvfp4"


def engine(args: argparse.Namespace) -> None:
    """Builds one engine, says so, and measures what the lines of stdin ask for."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch
    from vllm import LLM, SamplingParams

    if os.environ.get("BLOCKSCALE_VLLM") != "0":
        from quant.vllm_plugin.register import register

        register()  # by hand, for a checkout that is not installed has no entry points
    settings = {
        "load_format": random_loader(), "skip_tokenizer_init": True, "max_model_len": 4608, "seed": 0,
        "max_num_seqs": max(args.batch), "max_num_batched_tokens": 8192, "gpu_memory_utilization": 0.1,
        "kv_cache_memory_bytes": int(args.kv_gib * 2**30), "enable_prefix_caching": True, "disable_log_stats": True,
        "compilation_config": {},
    }  # fmt: skip
    settings |= args.engine
    settings["compilation_config"] = {"cudagraph_capture_sizes": sorted(args.batch), **settings["compilation_config"]}
    start = time.time()
    llm = LLM(model=args.folder, **settings)
    cache, needed = llm.llm_engine.vllm_config.cache_config, max(args.batch) * (args.context + STEPS + SETTLED + 2)
    capacity = (cache.num_gpu_blocks or 0) * cache.block_size
    if 0 < capacity < needed:
        raise SystemExit(f"the cache holds {capacity:,} tokens, and the largest batch has {needed:,}: raise --kv-gib")
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    generator = torch.Generator().manual_seed(0)

    def seconds(prompts: list[list[int]], tokens: int) -> float:
        ask = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        llm.generate([{"prompt_token_ids": row} for row in prompts], ask, use_tqdm=False)
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    def step_milliseconds(rows: list[list[int]]) -> float:
        """Mean time of a step in which every sequence gains a token."""
        ask = SamplingParams(temperature=0, max_tokens=STEPS + SETTLED + 2, ignore_eos=True, detokenize=False)
        requests, lengths, times = llm.llm_engine, dict.fromkeys(map(str, range(len(rows))), 0), []
        for name, row in zip(lengths, rows, strict=True):
            requests.add_request(f"{name}-{time.perf_counter()}", {"prompt_token_ids": row}, ask)
        while requests.has_unfinished_requests():
            for output in requests.step():
                lengths[output.request_id.partition("-")[0]] = len(output.outputs[0].token_ids)
            if min(lengths.values()):
                times.append(time.perf_counter())
        settled = times[SETTLED : SETTLED + STEPS]
        return (settled[-1] - settled[0]) / (len(settled) - 1) * 1e3

    def prompts(batch: int, length: int) -> list[list[int]]:
        return torch.randint(3, vocabulary, (batch, length), generator=generator).tolist()

    say({"ready_s": round(time.time() - start, 1), "gpu": torch.cuda.get_device_name()})

    def measure(task: str, count: int, length: int) -> dict[str, Any]:
        rows = prompts(count, length)
        if task == "prefill":
            return {
                "ms": min(seconds(each, 1) for each in (rows, prompts(count, length), prompts(count, length))) * 1e3
            }
        first = seconds(rows, 1)
        if task == "decode":
            return {"ms": min(step_milliseconds(rows) for _ in range(2)), "first_s": first}
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            seconds(rows, 9)
        times = {event.key: event.self_device_time_total / 9e3 for event in profiler.key_averages()}
        most = sorted(times.items(), key=lambda pair: -pair[1])[:24]
        ranges = [event.time_range for event in profiler.events() if event.device_type.name == "CUDA"]
        return {"ms": busy(ranges) / 9e3, "kernels": {name[:60]: round(ms, 4) for name, ms in most}}

    for line in sys.stdin:
        task, count, length = line.split()
        try:
            say(measure(task, int(count), int(length)))
        except Exception as error:
            say({"error": f"{type(error).__name__}: {error}"[:200]})
    os._exit(0)


def busy(ranges: list[Any]) -> float:
    """Microseconds in which any of the ranges is under way: kernels that overlap count once."""
    total, end = 0.0, float("-inf")
    for each in sorted(ranges, key=lambda r: r.start):
        total += max(each.end - max(each.start, end), 0.0)
        end = max(end, each.end)
    return total


def say(result: dict[str, Any]) -> None:
    print("RESULT " + json_text(result), flush=True)


class Engine:
    """One engine in a process of its own."""

    def __init__(self, args: argparse.Namespace, label: str, switch: str, own: dict[str, Any]) -> None:
        self.log = args.out / f"{args.label}-{label}.log"
        options = ["--engine", json_text(args.engine | own), "--kv-gib", str(args.kv_gib), "--out", str(args.out),
                   "--context", str(args.context),
                   "--folder", str(args.folder), "--batch", *map(str, args.batch)]  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, __file__, args.shape, *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self.log.open("w"), env={**os.environ, "BLOCKSCALE_VLLM": switch}, text=True,
        )  # fmt: skip

    def answer(self) -> dict[str, Any]:
        """Returns the engine's next result. Its error ends the benchmark: later figures would not be comparable."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("RESULT "):
                result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
                if "error" in result:
                    raise SystemExit(f"{self.log}: {result['error']}")
                return result
        raise SystemExit(f"{self.log}: the engine ended\n{self.log.read_text()[-1500:]}")

    def ask(self, line: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.answer()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--context", type=int, default=960, help="tokens in each prompt")
    parser.add_argument("--prefill", type=int, default=4096, help="tokens of the prompt whose prefill is timed")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--layers", type=int, help="fewer than the shape has, for a trial")
    parser.add_argument("--format", choices=SCHEMES, default="nvfp4", help="of the weights; gpt-oss has its own")
    parser.add_argument("--head", choices=["bf16", *SCHEMES], default="bf16", help="format of the output head")
    parser.add_argument("--kv-gib", type=float, default=10.0)
    parser.add_argument("--engine", type=json.loads, default={}, help="further arguments of vllm.LLM, as JSON")
    parser.add_argument("--theirs", type=json.loads, default={}, help="the same, for vLLM without the plug-in")
    parser.add_argument("--ours", type=json.loads, default={}, help="the same, for vLLM with the plug-in")
    parser.add_argument("--switch", nargs="+", default=["1"], help="values of BLOCKSCALE_VLLM, an engine for each")
    parser.add_argument("--profile", action="store_true", help="also the time of a step on the GPU")
    parser.add_argument("--label", help="of the files; by default the shape")
    parser.add_argument("--out", type=Path, default=Path("vllm-speed"))
    parser.add_argument("--folder", help="of a config.json: makes this process an engine")
    args = parser.parse_args()
    if args.folder:
        return engine(args)
    from _table import machine, markdown, versions

    args.label = args.label or args.shape
    positions = max(8192, 2 * args.context)
    args.folder = write_config(args, positions, args.out / args.label)
    engines = {"vLLM": Engine(args, "vllm", "0", args.theirs)}
    for switch in args.switch:
        label = "plug-in" if switch == "1" else f"plug-in, {switch}"
        engines[label] = Engine(args, f"plugin-{switch}", switch, args.ours)
    ready = {label: each.answer() for label, each in engines.items()}
    print(f"ready after {ready}", file=sys.stderr, flush=True)
    asks = {f"batch {n}": f"decode {n} {args.context}" for n in args.batch}
    if args.prefill:
        asks[f"prefill {args.prefill}"] = f"prefill 1 {args.prefill}"
    if args.profile:
        asks |= {f"batch {n}, on the GPU": f"profile {n} {args.context}" for n in args.batch}
    answers: dict[str, dict[str, list[dict[str, Any]]]] = {name: {label: [] for label in engines} for name in asks}
    print("; ".join(f"{k} {v}" for k, v in {**machine(), **versions("vllm", "triton")}.items()) + "\n")
    for number in range(args.rounds):
        for name, line in asks.items():
            for label, each in engines.items():
                if not (number and line.startswith("profile")):
                    answers[name][label].append(each.ask(line))
        rows = []
        for name, by_label in answers.items():
            best = {label: min(each["ms"] for each in of_rounds) for label, of_rounds in by_label.items()}
            times = {f"{label}, ms": f"{ms:.3f}" for label, ms in best.items()}
            gains = {f"× {label}": f"{best['vLLM'] / ms:.3f}" for label, ms in best.items() if label != "vLLM"}
            rows.append({args.label: name, **times, **gains})
        print(f"After round {number + 1}:\n\n{markdown(rows)}\n", flush=True)
        (args.out / f"{args.label}.json").write_text(json_text(answers, indent=1) + "\n")
    print(f"Engine: {json_text(args.engine)}, {json_text(args.theirs)} and {json_text(args.ours)}")
    for each in engines.values():
        each.process.kill()


if __name__ == "__main__":
    main()
