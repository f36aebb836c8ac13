"""This benchmark serves a shape in vLLM with our plug-in and without it, in turns: ms a decoding step, and prefill.

    python benchmarks/vllm_speed.py llama-8b                       torch.compile and CUDA graphs, as vLLM has them
    python benchmarks/vllm_speed.py llama-8b --backends            beside vLLM's default alone
    python benchmarks/vllm_speed.py qwen3-30b-a3b --engine '{"compilation_config": {"mode": 0}}'

Weights are random, in NVFP4 or MXFP4 (`--format mxfp4`, and always the experts of gpt-oss); inputs are in 16 bit, the
head is in BF16, and only config.json exists on disk. The engines are vLLM as it is by default, with each of its
--backends (of the experts where the shape has them, else of linear layers; one that refuses the shape is left out), and
with the plug-in for each --switch; gains are over the fastest of vLLM's own. They are ready at the same time in
processes of their own, and one measures while the others wait. A step is the mean time between the tokens of a
generation, once all its sequences decode: it holds attention, norms, the scheduler and the sampler. Prompts are in the
prefix cache by then. Prefill is the time to the first token of one new prompt. Each figure is the least of its rounds,
and of the `--passes` in each; the median of all, in brackets, tells how much they scatter.
`--profile 1 16` adds the time in which any kernel of a step ran, by PyTorch's profiler, and writes the kernels into the
JSON. `--tokens 64` also counts the prompts, of 64, whose first tokens are those of the first engine. All engines have
the same weights: with right kernels, ours agree with vLLM's as often as its backends do among themselves.

    python benchmarks/vllm_speed.py llama-8b --layers 4 --batch 16 --context 32000 --prefill 0 --kv-gib 8 \
        --engine '{"max_model_len": 32768}' --theirs '{"kv_cache_dtype": "fp8"}' --ours '{"kv_cache_dtype": "nvfp4"}'

compares KV caches. vLLM must be importable. Two engines take about 30 GB (8B) or 50 GB (30B).

    python benchmarks/vllm_speed.py llama-8b --batch 256 --kv-gib 34 --switch 1 fp8-prefill --alone

An engine that takes longer than `--seconds` to be ready, or to answer, is ended, and its log gets the Python stack.

With `--alone` the engines load and compile beside each other, and then one after the other takes the memory of its
cache, measures all its rounds and ends. So each may fill the GPU; figures of the same round are some minutes apart.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from quant.base.json_files import json_text

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


class Engine:
    """One engine in a process of its own."""

    def __init__(self, args: argparse.Namespace, label: str, switch: str, own: dict[str, Any]) -> None:
        self.log = args.out / f"{args.label}-{label}.log"
        self.seconds, self.end = args.seconds, 0.0
        self.process: subprocess.Popen[str] | None = None
        options = ["--engine", json_text(args.engine | own), "--kv-gib", str(args.kv_gib), "--out", str(args.out),
                   "--context", str(args.context), "--steps", str(args.steps), "--passes", str(args.passes),
                   *["--alone"] * args.alone,
                   "--folder", str(args.folder), "--batch", *map(str, args.batch)]  # fmt: skip
        self.command = [sys.executable, __file__, args.shape, *options]
        self.environment = {**os.environ, "BLOCKSCALE_VLLM": switch, "PYTHONFAULTHANDLER": "1"}

    def start(self) -> None:
        self.end = time.monotonic() + self.seconds[0]
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log.open("w"), text=True,
            env=self.environment,
        )  # fmt: skip

    def answer(self, seconds: float) -> dict[str, Any]:
        """Returns the engine's next result. Its error or silence is an `EngineError`."""
        assert self.process is not None and self.process.stdout is not None
        limit = threading.Timer(max(seconds, 0.1), self.process.send_signal, (signal.SIGABRT,))
        limit.start()
        try:
            for line in self.process.stdout:
                if line.startswith("RESULT "):
                    result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
                    if "error" in result:
                        raise EngineError(f"{self.log}: {result['error']}")
                    return result
        finally:
            limit.cancel()
        raise EngineError(f"{self.log}: the engine ended\n{self.log.read_text()[-1500:]}")

    def ready(self) -> dict[str, Any]:
        return self.answer(self.end - time.monotonic())

    def ask(self, line: str) -> dict[str, Any]:
        assert self.process is not None and self.process.stdin is not None
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # `answer` says how it ended
        return self.answer(self.seconds[1])

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(60)


class EngineError(Exception):
    """An engine did not answer."""


def main() -> None:
    args = parsed()
    if args.folder:
        from _vllm_engine import engine

        return engine(args)
    from _table import machine, versions

    args.label = args.label or args.shape
    positions = max(8192, 2 * args.context)
    args.folder = write_config(args, positions, args.out / args.label)
    engines = {"vLLM": Engine(args, "vllm", "0", args.theirs)}
    option = "linear_backend" if SHAPES[args.shape][1]["model_type"] == "llama" else "moe_backend"
    for backend in args.backends:
        own = args.theirs | {option: backend}
        engines[f"vLLM, {backend}"] = Engine(args, f"vllm-{backend}", "0", own)
    for switch in args.switch:
        label = "plug-in" if switch == "1" else f"plug-in, {switch}"
        engines[label] = Engine(args, f"plugin-{switch}", switch, args.ours)
    start_all(engines, args.at_once or len(engines))
    asks = {f"batch {n}": f"decode {n} {args.context}" for n in args.batch}
    if args.prefill:
        asks[f"prefill {args.prefill}"] = f"prefill 1 {args.prefill}"
    asks |= {f"batch {n}, on the GPU": f"profile {n} {args.context}" for n in args.profile}
    if args.tokens:
        asks[TOKENS] = f"tokens {args.tokens} {args.context}"
    print("; ".join(f"{k} {v}" for k, v in {**machine(), **versions("vllm", "triton")}.items()) + "\n")
    for answers in measured_alone(engines, asks, args) if args.alone else measured_in_turns(engines, asks, args):
        (args.out / f"{args.label}.json").write_text(json_text(answers, indent=1) + "\n")
        print(f"{table(answers, args.label)}\n", flush=True)
    print(f"Engine: {json_text(args.engine)}, {json_text(args.theirs)} and {json_text(args.ours)}")


def parsed() -> argparse.Namespace:
    """Returns the options of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--context", type=int, default=960, help="tokens in each prompt")
    parser.add_argument("--prefill", type=int, default=4096, help="tokens of the prompt whose prefill is timed")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--passes", type=int, default=2, help="generations of a round that are timed")
    parser.add_argument("--steps", type=int, default=64, help="decoding steps of a generation that are timed")
    parser.add_argument("--layers", type=int, help="fewer than the shape has, for a trial")
    parser.add_argument("--format", choices=SCHEMES, default="nvfp4", help="of the weights; gpt-oss has its own")
    parser.add_argument("--head", choices=["bf16", *SCHEMES], default="bf16", help="format of the output head")
    parser.add_argument("--kv-gib", type=float, default=10.0)
    parser.add_argument("--engine", type=json.loads, default={}, help="further arguments of vllm.LLM, as JSON")
    parser.add_argument("--theirs", type=json.loads, default={}, help="the same, for vLLM without the plug-in")
    parser.add_argument("--backends", nargs="*", help="of vLLM's linear layers or experts, an engine for each")
    parser.add_argument("--ours", type=json.loads, default={}, help="the same, for vLLM with the plug-in")
    parser.add_argument("--switch", nargs="+", default=["1"], help="values of BLOCKSCALE_VLLM, an engine for each")
    parser.add_argument("--profile", type=int, nargs="*", default=[], help="batches whose kernels are listed, by time")
    parser.add_argument("--tokens", type=int, help="prompts whose first tokens are compared")
    parser.add_argument("--seconds", type=float, nargs=2, default=[1800.0, 600.0], help="to be ready, and to answer")
    parser.add_argument("--at-once", type=int, help="engines that load beside each other; by default all")
    parser.add_argument("--alone", action="store_true", help="an engine has its cache only while it measures")
    parser.add_argument("--label", help="of the files; by default the shape")
    parser.add_argument("--out", type=Path, default=Path("vllm-speed"))
    parser.add_argument("--folder", help="of a config.json: makes this process an engine")
    args = parser.parse_args()
    if args.backends is None:  # vLLM prefers Marlin up to 0.29 and humming in 0.33, and Triton's for gpt-oss in both
        args.backends = ["humming", "marlin"]
    return args


Answers = dict[str, dict[str, list[dict[str, Any]]]]
"""Results by figure and by engine, one for each round."""
TOKENS = "first tokens"
ONCE = {"tokens": 0, "profile": -1}
"""Tasks of the first round alone, and of the last alone: the profiler may fail, and times of other rounds stay."""


def is_due(line: str, number: int, rounds: int) -> bool:
    """Tells whether an engine does this task in this round."""
    return number == ONCE.get(line.split()[0], number) % rounds


def start_all(engines: dict[str, Engine], at_once: int) -> None:
    """Starts the engines in their order, so many beside each other, and waits until all are ready."""
    waiting = iter(list(engines.values()))
    for each in islice(waiting, at_once):
        each.start()
    for label, each in list(engines.items()):
        try:
            print(f"{label} answered: {each.ready()}", file=sys.stderr, flush=True)
        except EngineError as error:
            leave_out(engines, label, error)
        for following in islice(waiting, 1):
            following.start()


def leave_out(engines: dict[str, Engine], label: str, error: EngineError) -> None:
    """Ends an engine that failed. Without any of vLLM's own, or of ours, there is nothing to compare."""
    print(f"{label} is left out: {error}", file=sys.stderr, flush=True)
    engines.pop(label).stop()
    if len({each.startswith("vLLM") for each in engines}) < 2:
        for each in engines.values():
            each.stop()
        raise SystemExit(f"{label}: {str(error).splitlines()[0]}")


def measured_in_turns(engines: dict[str, Engine], asks: dict[str, str], args: argparse.Namespace) -> Iterator[Answers]:
    """Yields the answers after each round, in which all engines, ready at the same time, measure each figure."""
    answers: Answers = {name: {label: [] for label in engines} for name in asks}
    for number in range(args.rounds):
        for name, line in asks.items():
            for label, each in list(engines.items()):
                if not is_due(line, number, args.rounds):
                    continue
                try:
                    answers[name][label].append(result := each.ask(line))
                    report(label, name, result)
                except EngineError as error:
                    leave_out(engines, label, error)
        yield {name: {label: by_engine[label] for label in engines} for name, by_engine in answers.items()}
    for each in engines.values():
        each.stop()


def measured_alone(engines: dict[str, Engine], asks: dict[str, str], args: argparse.Namespace) -> Iterator[Answers]:
    """Yields the answers after each engine, which measured all its rounds alone and ended."""
    answers: Answers = {name: {} for name in asks}
    for label, each in list(engines.items()):
        try:
            print(f"{label} is ready after {each.ask('the GPU is yours')}", file=sys.stderr, flush=True)
            results: dict[str, list[dict[str, Any]]] = {name: [] for name in asks}
            for number in range(args.rounds):
                for name, line in asks.items():
                    if is_due(line, number, args.rounds):
                        results[name].append(result := each.ask(line))
                        report(label, name, result)
        except EngineError as error:
            leave_out(engines, label, error)
            continue
        each.stop()
        for name, of_rounds in results.items():
            answers[name][label] = of_rounds
        yield answers


def report(label: str, name: str, result: dict[str, Any]) -> None:
    """Says at once what was measured, and when: a run that is ended early loses the tables of its last round."""
    if times := result.get("passes", [result["ms"]] if "ms" in result else []):
        each = ", ".join(f"{ms:.3f}" for ms in times)
        print(f"{time.strftime('%H:%M:%S')} {label}: {name} {each} ms", file=sys.stderr, flush=True)


def table(answers: Answers, label: str) -> str:
    """Returns the least time of each figure by engine, and how many times as fast as the fastest vLLM ours are.

    Medians of all passes are in brackets behind it, and so is the gain by medians.
    """
    from statistics import median

    from _table import markdown

    rows = []
    for name, by_engine in answers.items():
        if name == TOKENS:
            continue
        times, gains = {}, {}
        all_of = {e: [ms for r in of_rounds for ms in r.get("passes", [r["ms"]])] for e, of_rounds in by_engine.items()}
        both = {engine: (min(ms), median(ms)) for engine, ms in all_of.items() if ms}
        theirs = [pair for engine, pair in both.items() if engine.startswith("vLLM")]
        for engine, pair in both.items():
            times[f"{engine}, ms"] = "{:.3f} ({:.3f})".format(*pair)
            if theirs and not engine.startswith("vLLM"):
                gain = [min(ms) / own for ms, own in zip(zip(*theirs, strict=True), pair, strict=True)]
                gains[f"× {engine}"] = "{:.3f} ({:.3f})".format(*gain)
        rows.append({label: name, **times, **gains})
    return "\n\n".join([str(markdown(rows)), *same_tokens(answers.get(TOKENS, {}))])


def same_tokens(by_engine: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    """Yields, for each engine but the first, how many prompts' first tokens are those of the first engine."""
    all_tokens = {engine: of_rounds[0]["tokens"] for engine, of_rounds in by_engine.items() if of_rounds}
    for engine, tokens in list(all_tokens.items())[1:]:
        first, reference = next(iter(all_tokens.items()))
        pairs = list(zip(tokens, reference, strict=True))
        once, whole = sum(a[0] == b[0] for a, b in pairs), sum(a == b for a, b in pairs)
        yield f"{engine} and {first}: first token equal {once} of {len(pairs)}, first {len(tokens[0])} {whole}"


if __name__ == "__main__":
    main()
