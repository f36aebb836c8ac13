"""This benchmark loads every preset in SGLang, in both layouts, and compares its logits with those of `quant.load`.

    python benchmarks/sglang_presets.py --do make             on any machine: checkpoints, and logits of `quant.load`
    python benchmarks/sglang_presets.py --do serve            on a GPU with SGLang: its logits and its tokens
    python benchmarks/sglang_presets.py --do table            on any machine: prints both, one row a checkpoint

A small Llama and a small Qwen3-MoE of random weights over 256 tokens are quantized with round-to-nearest, written as
compressed-tensors and converted to ModelOpt's layout. SGLang's engine reads each checkpoint as it is and answers four
rows of 64 tokens with the log-probabilities of all 256 tokens at each place, then writes eight tokens a row. The table
has the KL divergence from `quant.load` on the CPU, in nats a token, as the checkpoint plans it and once with inputs in
16 bit: on Hopper, SGLang's kernels for NVFP4 leave them there. "rounding" is that of the model in BF16 from the same,
which says how far an error in a scale would reach. A right engine is about as far from `quant.load` in FP32 as
`quant.load` in BF16 is.

`serve` needs SGLang alone, neither this package nor its requirements.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

DENSE, EXPERTS = "llama", "qwen3_moe"
PRESETS = {
    DENSE: (
        "fp8", "int4a16", "nvfp4a16", "fp8_channel", "fp8_block", "nvfp4", "int8", "int8_static", "mxfp8", "mxfp4",
        "mxfp4a16", "mxfp6a16", "int4a16_g64", "int4a16_g32", "fp8 weights", "fp8_channel weights",
        "fp8 + kv", "nvfp4a16 + kv", "nvfp4a16 and fp8", "nvfp4a16, head in fp8_channel",
    ),
    EXPERTS: ("nvfp4a16", "fp8", "fp8_channel", "fp8_block", "int4a16", "nvfp4", "int8", "mxfp4a16", "mxfp8"),
}  # fmt: skip
MODELOPT = {DENSE: ("fp8", "nvfp4", "nvfp4a16", "fp8_channel", "fp8_block", "mxfp8", "int4a16"),
            EXPERTS: ("nvfp4", "fp8")}  # fmt: skip
SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024, "tie_word_embeddings": False,
}  # fmt: skip
SIZES_OF_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
NEW = 8
_TIE = 0.05  # nats by which two tokens may change places


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--do", choices=("make", "serve", "table"), required=True)
    parser.add_argument("--out", type=Path, default=Path("sglang-presets"))
    parser.add_argument("--models", nargs="*", default=list(PRESETS))
    parser.add_argument("--presets", nargs="*", help="all by default")
    parser.add_argument("--processes", type=int, default=12, help="engines at once on the one GPU")
    parser.add_argument("--seconds", type=float, default=600.0, help="after which no further checkpoint is loaded")
    parser.add_argument("--engine", type=json.loads, default={}, help="further arguments of sglang.Engine, as JSON")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    parser.add_argument("--one", type=Path, help="the checkpoint that a process of `serve` loads")
    args = parser.parse_args()
    if args.one:
        serve_one(args.one, args.engine)
    else:
        {"make": make, "serve": serve, "table": show_table}[args.do](args)


def make(args: argparse.Namespace) -> None:
    """Writes every checkpoint, and the logits that SGLang's are compared with."""
    for name in args.models:
        original = random_model(name)
        for preset in ("bf16", *(args.presets or PRESETS[name])):
            make_one(args.out / name / preset.replace(" ", "_"), name, preset, original)


def random_model(name: str) -> Any:
    """A model whose tokens depend on all of its weights, in BF16."""
    import torch
    import transformers

    torch.manual_seed(0)
    if name == DENSE:
        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    else:
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**{**SIZES, **SIZES_OF_EXPERTS}))
    for key, weight in model.named_parameters():
        if weight.ndim > 1:
            gain = 3.0 if key.startswith("lm_head") else 1.0
            torch.nn.init.normal_(weight, std=1.0 if "embed" in key else gain * weight.shape[-1] ** -0.5)
    model.config.dtype = torch.bfloat16
    return model.to(torch.bfloat16).eval()


def token_rows(first: int, count: int) -> Any:
    import torch

    return torch.randint(0, SIZES["vocab_size"], (count, 64), generator=torch.Generator().manual_seed(first))


def make_one(out: Path, name: str, preset: str, original: Any) -> None:
    import copy

    from safetensors.torch import save_file

    import quant

    rows = token_rows(1, 4)
    if preset == "bf16":
        original.save_pretrained(out / "16-bit")
        save_file({"tokens": rows, "planned": log_probs(original, rows)}, out / "expected.safetensors")
        return
    try:
        done = quant.quantize(copy.deepcopy(original), plan_of(original, preset), token_rows(0, 8))
        quant.save(done.model, done.plan, out / "compressed-tensors")
    except quant.UserError as error:
        return note(out / "compressed-tensors", {"not written": str(error)})
    if preset in MODELOPT[name]:
        try:
            quant.export_model(out / "compressed-tensors", "modelopt", out / "modelopt")
        except quant.UserError as error:
            note(out / "modelopt", {"not written": str(error)})
    loaded = quant.load(out / "compressed-tensors")
    expected = {"tokens": rows, "planned": log_probs(loaded, rows), "original": log_probs(original, rows)}
    for module in loaded.modules():
        if getattr(module, "activation_format", None) is not None:
            module.activation_format = None
    expected["wide"] = log_probs(loaded, rows)
    save_file(expected, out / "expected.safetensors")
    kl = divergence(expected["planned"], expected["original"])
    print(f"{name} {preset}: KL {kl:.2g} from BF16, spread {expected['planned'].std(dim=-1).mean():.2f}", flush=True)


def plan_of(model: Any, preset: str) -> Any:
    """The plan of a preset, or of one with a variation in words."""
    from dataclasses import replace

    from quant.formats.format import FORMATS
    from quant.recipes.plan_make import make_plan

    name, _, variant = preset.partition(" ")
    name = name.removesuffix(",")
    plan = make_plan(model, name, solver="rtn", **({"lm_head": "fp8_channel"} if "head" in variant else {}))
    if variant == "weights":
        return replace(plan, layers=tuple(replace(layer, activation=None) for layer in plan.layers))
    if variant == "+ kv":
        return replace(plan, kv_cache=FORMATS["fp8"])
    if variant == "and fp8":
        other = make_plan(model, "fp8", solver="rtn").by_name
        layers = (other[layer.name] if "self_attn" in layer.name else layer for layer in plan.layers)
        return replace(plan, layers=tuple(layers))
    return plan


def log_probs(model: Any, rows: Any) -> Any:
    """`[rows, tokens, vocabulary]`, each place's distribution of the next token."""
    import torch

    with torch.no_grad():
        return model(rows, use_cache=False).logits.float().log_softmax(-1)


def divergence(own: Any, expected: Any) -> float:
    """KL of `own` from `expected`, in nats a token."""
    return float((expected.exp() * (expected - own)).sum(-1).mean())


def note(folder: Path, result: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps(result, allow_nan=False) + "\n", encoding="utf-8")


def serve(args: argparse.Namespace) -> None:
    """Loads the checkpoints in SGLang, `--processes` at once, until the time is over."""
    started = time.time()

    def start(job: tuple[int, Path]) -> None:
        index, folder = job
        left = args.seconds - (time.time() - started)
        if left < 10 or (folder / "result.json").exists():
            return
        options = {"port": 31000 + 20 * index, "nccl_port": 42000 + index, **args.engine}
        command = [sys.executable, __file__, "--do", "serve", "--one", str(folder), "--engine"]
        command.append(json.dumps(options, allow_nan=False))
        with (folder / "sglang.log").open("w") as log, suppress(subprocess.TimeoutExpired):
            # The engine's processes are those of a session of their own, which is ended as a whole.
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
            try:
                process.wait(left)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, 9)
        result = json.loads((folder / "result.json").read_text()) if (folder / "result.json").exists() else {}
        said = result.get("error") or f"{result.get('seconds', 'no answer in time')} s, KL {result.get('kl')}"
        print(f"{time.time() - started:4.0f} s  {folder.relative_to(args.out)}: {said}", flush=True)

    with ThreadPoolExecutor(args.processes) as pool:
        list(pool.map(start, enumerate(checkpoints(args))))


def checkpoints(args: argparse.Namespace) -> list[Path]:
    """The directories of checkpoints, in the order of the presets."""
    order = [(name, preset) for name in args.models for preset in ("bf16", *(args.presets or PRESETS[name]))]
    folders = [
        args.out / name / preset.replace(" ", "_") / layout
        for layout in ("16-bit", "compressed-tensors", "modelopt")
        for name, preset in order
    ]
    return [folder for folder in folders if (folder / "config.json").exists()]


def answers_of(folder: Path) -> Path:
    """The file of SGLang's answers: beside the checkpoint, whose tensors are all that its own directory may hold."""
    return folder.with_name(f"sglang-{folder.name}.safetensors")


def serve_one(folder: Path, options: dict[str, Any]) -> None:
    """One checkpoint in SGLang's engine; the answers, or the error, lie beside its weights."""
    import torch
    from safetensors.torch import load_file, save_file

    start = time.time()
    expected = load_file(folder.parent / "expected.safetensors")
    rows = expected["tokens"]
    try:
        import sglang

        # Many engines share the GPU, and a graph is captured for none.
        engine = sglang.Engine(
            model_path=str(folder), skip_tokenizer_init=True, attention_backend="triton", disable_cuda_graph=True,
            disable_radix_cache=True, mem_fraction_static=0.5, max_total_tokens=4096, context_length=512,
            max_running_requests=8, sampling_backend="pytorch", random_seed=0, **options,
        )  # fmt: skip
        answers = engine.generate(
            input_ids=rows.tolist(), sampling_params={"temperature": 0.0, "max_new_tokens": NEW, "ignore_eos": True},
            return_logprob=True, logprob_start_len=0, top_logprobs_num=SIZES["vocab_size"],
        )  # fmt: skip
        own = torch.full((*rows.shape, SIZES["vocab_size"]), float("nan"))
        steps = torch.full((len(rows), NEW, SIZES["vocab_size"]), float("nan"))
        for row, answer in enumerate(answers):
            facts = answer["meta_info"]
            for place, entries in enumerate(facts["input_top_logprobs"][1:]):
                for entry in entries:
                    own[row, place, entry[1]] = entry[0]
            for step, entries in enumerate(facts["output_top_logprobs"]):
                for entry in entries:
                    steps[row, step, entry[1]] = entry[0]
        own[:, -1] = steps[:, 0]
        tokens = torch.tensor([answer["output_ids"][:NEW] for answer in answers])
        save_file({"prompt": own, "steps": steps, "tokens": tokens}, answers_of(folder))
        kl = {name: divergence(own, expected[name]) for name in ("planned", "wide") if name in expected}
        note(folder, {"seconds": round(time.time() - start, 1), "kl": kl, "sglang": sglang.__version__,
                      "gpu": torch.cuda.get_device_name()})  # fmt: skip
    except BaseException as error:
        note(folder, {"error": f"{type(error).__name__}: {error}"})
        raise
    finally:
        sys.stdout.flush()
        os._exit(0)  # the answers are out: the engine's teardown would only cost time


def show_table(args: argparse.Namespace) -> None:
    from _table import show, versions

    rows = [row for folder in checkpoints(args) if (row := result_row(args, folder))]
    results = [json.loads(path.read_text()) for path in sorted(args.out.glob("*/*/*/result.json"))]
    header = {**versions("transformers"), **next((r for r in results if "sglang" in r), {})}
    header = {key: value for key, value in header.items() if key not in ("seconds", "kl")}
    show("Presets in SGLang", header, rows, json_path=args.json)


def result_row(args: argparse.Namespace, folder: Path) -> dict[str, object]:
    """What SGLang did with a checkpoint, beside `quant.load`."""
    from safetensors.torch import load_file

    name, written, layout = folder.relative_to(args.out).parts
    preset = next((preset for preset in PRESETS[name] if preset.replace(" ", "_") == written), written)
    row: dict[str, object] = {"model": name, "preset": preset, "layout": layout}
    result = json.loads((folder / "result.json").read_text()) if (folder / "result.json").exists() else {}
    if not answers_of(folder).exists():
        return {**row, "verdict": error_of(folder, result), "KL": "", "KL, inputs in 16 bit": "", "rounding": ""}
    own, expected = load_file(answers_of(folder)), load_file(folder.parent / "expected.safetensors")
    planned = divergence(own["prompt"], expected["planned"])
    wide = divergence(own["prompt"], expected["wide"]) if "wide" in expected else planned
    rounding = divergence(expected["original"], expected["planned"]) if "original" in expected else 1.0
    exact, usual, steps, tokens = beside_float32(folder, own, expected)
    return {**row, "verdict": "loads", "KL": planned, "KL, inputs in 16 bit": wide, "rounding": rounding,
            "from FP32": exact, "quant.load from FP32": usual, "steps": steps, "tokens by margin": tokens}  # fmt: skip


def beside_float32(folder: Path, own: dict[str, Any], expected: dict[str, Any]) -> tuple[float, float, float, str]:
    """KL from `quant.load` in FP32 of SGLang and of `quant.load` in BF16, that of the steps, and SGLang's best tokens.

    A rounding to BF16 moves an input over the boundary of two codes, so two right runs with rounded inputs differ.
    """
    import torch
    import transformers

    import quant

    rows = expected["tokens"]
    is_plain = folder.name == "16-bit"
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder) if is_plain else quant.load(folder)
    followed = log_probs(model, torch.cat([rows, own["tokens"]], 1))[:, rows.shape[1] - 1 : -1]
    chosen = followed.gather(-1, own["tokens"][..., None])[..., 0]
    near = followed.max(-1).values - chosen <= _TIE
    exact = log_probs(model.float(), rows)
    return (divergence(own["prompt"], exact), divergence(expected["planned"], exact),
            divergence(own["steps"], followed), f"{int(near.sum())} of {near.numel()}")  # fmt: skip


def error_of(folder: Path, result: dict[str, Any]) -> str:
    """The message that SGLang's scheduler ended with, else that of the engine."""
    if "not written" in result:
        return f"not written: {result['not written']}"
    log = (folder / "sglang.log").read_text(errors="replace").splitlines() if (folder / "sglang.log").exists() else []
    errors = [line.strip() for line in log if line.partition(":")[0].strip().endswith(("Error", "Exception"))]
    return f"refused: {errors[0]}"[:300] if errors else f"no answer: {result.get('error', 'the time was up')}"


if __name__ == "__main__":
    main()
