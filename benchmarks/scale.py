"""This benchmark quantizes a large model from disk to disk: it measures seconds, memory and how busy a GPU is.

A Llama of random weights is written in several shards, so nothing is downloaded. Each run is a process of its own
whose anonymous memory (`RssAnon`: what belongs to the process, without the page cache) is sampled until it ends, and
on a machine with a GPU how busy that is. Speed is given in megabytes of BF16 read a second, over the whole process,
its imports counted. Peers run in processes of their own, where they are installed, each stage timed:

    ModelOpt         transformers' load, `mtq.quantize` with W4A16 NVFP4, which rounds to nearest as `rtn` does, and
                     `export_hf_checkpoint`
    llm-compressor   transformers' load, `oneshot` with `GPTQModifier(scheme="NVFP4A16")` on the same rows, four at a
                     time as ours are, and `save_pretrained`

    python benchmarks/scale.py                                     on a GPU: the 8B shape, beside the peers
    python benchmarks/scale.py --layers 8,16,32 --hidden 2048      on a CPU: memory and time over the depth
    python benchmarks/scale.py --devices 1,2,4                     on 1, 2 and 4 GPUs: the speed-up, and the same bytes
    python benchmarks/scale.py --layers 1 --experts 256            a layer of DeepSeek-V3's shape, with few tokens
    python benchmarks/scale.py --layers 4 --hidden 2048 --experts 128 --family qwen3_moe       layers of 30B-A3B's shape
"""

from __future__ import annotations

import cProfile
import importlib.util
import json
import os
import pstats
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click
import torch
from _llama import VOCABULARY
from _plot import lines
from _table import machine, show, versions
from safetensors.torch import load_file, save_file

from quant.base.json_files import json_text

TITLE = "A large model from disk to disk"
SMALL_VOCABULARY = 16384
HEAD = 128  # columns of an attention head
_SAMPLE_SECONDS = 0.1
_PROFILE_LINES = 40


Shapes = list[tuple[str, tuple[int, ...]]]


def llama(layers: int, hidden: int) -> tuple[dict[str, Any], Shapes]:
    """Config and tensors of a Llama with the proportions of Llama-3-8B."""
    inner, vocabulary = hidden * 7 // 2, VOCABULARY * hidden // 4096
    heads = hidden // HEAD
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": max(heads // 4, 1), "head_dim": HEAD, "vocab_size": vocabulary, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192, "rope_theta": 500000.0, "tie_word_embeddings": False, "bos_token_id": 0,
        "eos_token_id": 1,
    }  # fmt: skip
    return config, list(_llama_shapes(layers, hidden, inner, vocabulary, max(heads // 4, 1) * HEAD))


def deepseek(layers: int, hidden: int, experts: int) -> tuple[dict[str, Any], Shapes]:
    """Config and tensors of layers with the proportions of DeepSeek-V3's, each with routed experts."""
    inner, heads, query, key = hidden * 2 // 7, hidden // 56, hidden * 3 // 14, hidden // 14
    config = {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "dtype": "bfloat16",
        "hidden_size": hidden, "moe_intermediate_size": inner, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": heads, "q_lora_rank": query, "kv_lora_rank": key,
        "qk_rope_head_dim": 64, "qk_nope_head_dim": HEAD, "v_head_dim": HEAD, "n_routed_experts": experts,
        "num_experts_per_tok": min(8, experts), "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
        "first_k_dense_replace": 0, "vocab_size": SMALL_VOCABULARY, "max_position_embeddings": 8192,
        "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    shapes: Shapes = [("model.embed_tokens.weight", (SMALL_VOCABULARY, hidden))]
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes += [
            (f"{at}.self_attn.{name}.weight", shape)
            for name, shape in (
                ("q_a_proj", (query, hidden)), ("q_a_layernorm", (query,)), ("q_b_proj", (heads * (HEAD + 64), query)),
                ("kv_a_proj_with_mqa", (key + 64, hidden)), ("kv_a_layernorm", (key,)),
                ("kv_b_proj", (heads * 2 * HEAD, key)), ("o_proj", (hidden, heads * HEAD)),
            )
        ]  # fmt: skip
        for name in ("shared_experts", *(f"experts.{expert}" for expert in range(experts))):
            shapes += [(f"{at}.mlp.{name}.{part}_proj.weight", (inner, hidden)) for part in ("gate", "up")]
            shapes.append((f"{at}.mlp.{name}.down_proj.weight", (hidden, inner)))
        shapes.append((f"{at}.mlp.gate.weight", (experts, hidden)))
        shapes.append((f"{at}.mlp.gate.e_score_correction_bias", (experts,)))
        shapes += [(f"{at}.{name}_layernorm.weight", (hidden,)) for name in ("input", "post_attention")]
    return config, [*shapes, ("model.norm.weight", (hidden,)), ("lm_head.weight", (SMALL_VOCABULARY, hidden))]


def qwen3_moe(layers: int, hidden: int, experts: int) -> tuple[dict[str, Any], Shapes]:
    """Config and tensors of layers with the proportions of Qwen3-30B-A3B's, eight experts a token."""
    inner, heads, keys = hidden * 3 // 8, hidden // 64, max(hidden // 512, 1)
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "bfloat16", "hidden_size": hidden,
        "moe_intermediate_size": inner, "intermediate_size": 3 * hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": keys, "head_dim": HEAD, "num_experts": experts,
        "num_experts_per_tok": min(8, experts), "norm_topk_prob": True, "decoder_sparse_step": 1,
        "vocab_size": SMALL_VOCABULARY, "max_position_embeddings": 8192, "tie_word_embeddings": False,
        "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    shapes: Shapes = [("model.embed_tokens.weight", (SMALL_VOCABULARY, hidden))]
    for layer in range(layers):
        at = f"model.layers.{layer}"
        sizes = {"q": (heads * HEAD, hidden), "k": (keys * HEAD, hidden), "v": (keys * HEAD, hidden)}
        shapes += [(f"{at}.self_attn.{name}_proj.weight", shape) for name, shape in sizes.items()]
        shapes.append((f"{at}.self_attn.o_proj.weight", (hidden, heads * HEAD)))
        shapes += [(f"{at}.self_attn.{name}_norm.weight", (HEAD,)) for name in "qk"]
        for expert in range(experts):
            shapes += [(f"{at}.mlp.experts.{expert}.{part}_proj.weight", (inner, hidden)) for part in ("gate", "up")]
            shapes.append((f"{at}.mlp.experts.{expert}.down_proj.weight", (hidden, inner)))
        shapes.append((f"{at}.mlp.gate.weight", (experts, hidden)))
        shapes += [(f"{at}.{name}_layernorm.weight", (hidden,)) for name in ("input", "post_attention")]
    return config, [*shapes, ("model.norm.weight", (hidden,)), ("lm_head.weight", (SMALL_VOCABULARY, hidden))]


def write_model(directory: Path, config: dict[str, Any], names: Shapes, shards: int, seed: int = 0) -> int:
    """Writes a model of random BF16 weights; gives their bytes."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json_text(config, indent=2))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    index, total = {}, 0
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        tensors = {}
        for name, shape in part:
            random = (
                torch.randn(shape, generator=generator, device=device).mul_(0.02)
                if len(shape) > 1
                else torch.ones(shape)
            )
            tensors[name] = random.bfloat16().cpu()
        save_file(tensors, directory / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, file))
        total += sum(tensor.nbytes for tensor in tensors.values())
    whole = {"metadata": {"total_size": total}, "weight_map": index}
    (directory / "model.safetensors.index.json").write_text(json_text(whole))
    return total


def _llama_shapes(
    layers: int, hidden: int, inner: int, vocabulary: int, keys: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for layer in range(layers):
        at = f"model.layers.{layer}"
        for name, rows, columns in (
            ("self_attn.q_proj", hidden, hidden), ("self_attn.k_proj", keys, hidden),
            ("self_attn.v_proj", keys, hidden), ("self_attn.o_proj", hidden, hidden), ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden), ("mlp.down_proj", hidden, inner),
        ):  # fmt: skip
            yield f"{at}.{name}.weight", (rows, columns)
        yield f"{at}.input_layernorm.weight", (hidden,)
        yield f"{at}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocabulary, hidden)


def sampled(command: list[str], threads: int) -> dict[str, Any]:
    """Runs a command; gives its seconds, the peak of its anonymous memory, and how busy the GPU was in percent."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONWARNINGS": "ignore"}
    # As packages are installed, with their bytecode; some images leave it out, and compile 2,000 files in each process.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment["PYTHONPYCACHEPREFIX"] = str(Path(tempfile.gettempdir()) / "blockscale-bytecode")
    started = time.perf_counter()
    process = subprocess.Popen(
        command, env=environment, text=True, encoding="utf-8", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    peak, busy, done = [0], [], threading.Event()

    def watch() -> None:
        while not done.wait(_SAMPLE_SECONDS):
            peak[0] = max(peak[0], sum(map(_anonymous_bytes, [process.pid, *_children(process.pid)])))
            if torch.cuda.is_available():
                busy.append(torch.cuda.utilization())

    watcher = threading.Thread(target=watch)
    watcher.start()
    out, errors = process.communicate()
    done.set()
    watcher.join()
    if process.returncode:
        raise click.ClickException(f"{' '.join(command)} failed:\n{errors}")
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "bytes": peak[0], "busy": sum(busy) / len(busy) if busy else None, "output": out}


def _children(process: int) -> list[int]:
    try:
        return list(map(int, Path(f"/proc/{process}/task/{process}/children").read_text(encoding="ascii").split()))
    except OSError:
        return []


def _anonymous_bytes(process: int) -> int:
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    except OSError:
        return 0
    return 1024 * sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))


def profiled(arguments: list[str]) -> None:
    """The command `quantize` in this process, profiled."""
    from quant.cli.quantize import quantize_command

    activities = [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    python = cProfile.Profile()
    with torch.profiler.profile(activities=activities) if activities else nullcontext() as device:
        python.runcall(quantize_command, arguments, standalone_mode=False)
    for order in ("tottime", "cumtime"):
        pstats.Stats(python).sort_stats(order).print_stats(_PROFILE_LINES)
    if device is not None:
        print(device.key_averages().table(sort_by="self_cuda_time_total", row_limit=_PROFILE_LINES))


def rows_file(model: Path, rows: tuple[int, int]) -> Path:
    """Writes rows of random tokens beside the model."""
    text = model.parent / "rows.safetensors"
    vocabulary = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    ids = torch.randint(2, vocabulary, rows, generator=torch.Generator().manual_seed(1))
    save_file({"input_ids": ids}, text)
    return text


def quantize(
    model: Path, format: str, solver: str, rows: tuple[int, int], threads: int, profile: bool = False,
    devices: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Our run, disk to disk; its stages and the hashes of its files come from its report."""
    out = model.parent / "out"
    text = rows_file(model, rows)
    command = [sys.executable, "-m", "quant", "quantize", str(model)]
    if profile:
        command = [sys.executable, __file__, "--profiled", str(model)]
    if devices is not None:
        command.append(f"--devices={devices}")
    command += [f"--format={format}", f"--solver={solver}", f"--out={out}", "--restart", "--overwrite", "--quiet"]
    command += [f"--calib={text}", f"--calib-samples={rows[0]}", f"--seqlen={rows[1]}"]
    measured = sampled(command, threads)
    if profile:
        click.echo(measured["output"])
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    measured["stages"], measured["files"] = report["seconds"], report["files"]
    shutil.rmtree(out)
    return measured


class Laps:
    """Seconds of a peer's stages, by name."""

    def __init__(self) -> None:
        self.stages: dict[str, float] = {}
        self._started = time.perf_counter()

    def end(self, stage: str) -> None:
        """Ends a stage, and begins the next one."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.stages[stage], self._started = now - self._started, now


def modelopt(model: Path, rows: Path) -> dict[str, float]:
    """ModelOpt in this process: load, quantize and export; it rounds to nearest, and needs no rows."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    laps = Laps()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, device_map=device)
    laps.end("load")
    mtq.quantize(loaded, mtq.W4A16_NVFP4_CFG)
    laps.end("quantize")
    with tempfile.TemporaryDirectory(dir=model.parent) as out, torch.inference_mode():
        export_hf_checkpoint(loaded, export_dir=out)
    laps.end("export")
    return laps.stages


def llmcompressor(model: Path, rows: Path) -> dict[str, float]:
    """llm-compressor in this process: load, GPTQ and save. It moves layers to the GPU by itself."""
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from tokenizers import Tokenizer, models
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    laps = Laps()
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    laps.end("load")
    # It wants a tokenizer, though the rows are token ids already.
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"": 0}, unk_token="")))
    ids = load_file(rows)["input_ids"]
    batches = DataLoader(list(ids), batch_size=4, collate_fn=lambda part: {"input_ids": torch.stack(part)})
    recipe = GPTQModifier(targets="Linear", scheme="NVFP4A16", ignore=["lm_head"])
    oneshot(
        model=loaded, processor=tokenizer, dataset=batches, recipe=recipe, num_calibration_samples=len(ids),
        max_seq_length=ids.shape[1],
    )  # fmt: skip
    laps.end("quantize")
    with tempfile.TemporaryDirectory(dir=model.parent) as out:
        loaded.save_pretrained(out, save_compressed=True)
    laps.end("export")
    return laps.stages


# By name: the package, the function, and whether it needs a GPU (ModelOpt's NVFP4 is a CUDA kernel).
PEERS = {"ModelOpt": ("modelopt", modelopt, True), "llm-compressor": ("llmcompressor", llmcompressor, False)}


def peers_here(chosen: str) -> list[str]:
    """Names of the peers that are chosen, installed and able to run."""
    on_gpu = torch.cuda.is_available()
    names = [name for name in PEERS if chosen in ("all", name)]
    return [n for n in names if importlib.util.find_spec(PEERS[n][0]) is not None and (on_gpu or not PEERS[n][2])]


def table_row(run: str, layers: int, nbytes: int, measured: dict[str, Any]) -> dict[str, object]:
    stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in measured["stages"].items())
    return {
        "run": run,
        "layers": layers,
        "GB of BF16": nbytes / 1e9,
        "seconds": measured["seconds"],
        "of stages": sum(measured["stages"].values()),
        "MB/s": nbytes / 1e6 / measured["seconds"],
        "memory GiB": measured["bytes"] / 2**30,
        "GPU busy %": measured["busy"],
        "stages": stages,
    }


def with_speed_up(
    row: dict[str, object], measured: dict[str, Any], one: dict[str, Any], devices: int
) -> dict[str, object]:
    """A row of several GPUs beside the run on one."""
    return {
        "run": row.pop("run"),
        "GPUs": devices,
        "speed-up": one["seconds"] / measured["seconds"],
        "of solve": one["stages"]["solve"] / measured["stages"]["solve"],
        "same bytes": measured["files"] == one["files"],
        **row,
    }


def _sizes(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


@click.command(help=__doc__)
@click.option("--layers", default="32", show_default=True, help="Decoder layers; several, such as 8,16,32, show depth.")
@click.option("--hidden", type=int, help="Width, a multiple of 512; other sizes follow.  [default: 4096, experts 7168]")
@click.option("--experts", default=0, help="Routed experts of a layer, in the proportions of --family.")
@click.option("--family", type=click.Choice(["deepseek_v3", "qwen3_moe"]), default="deepseek_v3", show_default=True)
@click.option("--shards", default=9, show_default=True, help="Weight files.")
@click.option("--format", "format_name", default="nvfp4a16", show_default=True, help="Format of the weights.")
@click.option("--solvers", default="rtn,gptq", show_default=True, help="Solvers to run.")
@click.option("--rows", default="32x512", show_default=True, help="Calibration rows and tokens; several, as 128x1024.")
@click.option("--threads", default=torch.get_num_threads(), show_default=True, help="CPU threads.")
@click.option("--directory", type=click.Path(path_type=Path), help="Where models are written.  [default: a temporary]")
@click.option("--plot", type=click.Path(path_type=Path), help="Also draw memory and seconds over the layers here.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the table here.")
@click.option("--devices", help="Numbers of GPUs, such as 1,2,4: each run on so many, the first number for comparison.")
@click.option("--profile", is_flag=True, help="Also print where each of our runs spent its time; it takes longer.")
@click.option(
    "--peers",
    default="all",
    show_default=True,
    help="Peers to run: all, none, or the name of one, which also runs beside --devices.",
)
@click.option("--peer", type=(str, click.Path(path_type=Path), click.Path(path_type=Path)), hidden=True)
def main(
    layers: str, hidden: int | None, experts: int, family: str, shards: int, format_name: str, solvers: str,
    rows: str, threads: int, directory: Path | None, plot: Path | None, json_path: Path | None, devices: str | None,
    profile: bool, peers: str, peer: tuple[str, Path, Path] | None,
) -> None:  # fmt: skip
    if peer:  # a peer's own process: its name, the model and the rows
        print(json_text(PEERS[peer[0]][1](*peer[1:])))
        return
    sizes = [tuple(map(int, part.split("x"))) for part in rows.split(",")]
    hidden = hidden or (7168 if experts else 4096)
    with_experts = deepseek if family == "deepseek_v3" else qwen3_moe
    beside = [] if experts or (devices and peers == "all") else peers_here(peers)
    table = []
    with tempfile.TemporaryDirectory(dir=directory) as home:
        for depth in _sizes(layers):
            model = Path(home) / "model"
            config, shapes = with_experts(depth, hidden, experts) if experts else llama(depth, hidden)
            nbytes = write_model(model, config, shapes, shards)
            for name in beside:
                text = rows_file(model, sizes[0])
                measured = sampled([sys.executable, __file__, "--peer", name, str(model), str(text)], threads)
                measured["stages"] = json.loads(measured["output"].splitlines()[-1])
                table.append(table_row(name, depth, nbytes, measured))
                click.echo(f"{depth} layers, {name}: {measured['seconds']:.1f} s, {table[-1]['stages']}", err=True)
            for solver in solvers.split(","):
                for samples, seqlen in sizes[:1] if solver == "rtn" else sizes:
                    name = solver if solver == "rtn" else f"{solver} {samples}×{seqlen}"
                    one = None
                    for count in _sizes(devices or ""):
                        measured = quantize(model, format_name, solver, (samples, seqlen), threads, profile, count)
                        one = one or measured
                        row = table_row(name, depth, nbytes, measured)
                        table.append(with_speed_up(row, measured, one, count))
                        click.echo(f"{name} on {count}: {measured['seconds']:.1f} s, {measured['stages']}", err=True)
                    if devices:
                        continue
                    measured = quantize(model, format_name, solver, (samples, seqlen), threads, profile)
                    table.append(table_row(name, depth, nbytes, measured))
                    click.echo(f"{depth} layers, {name}: {measured['seconds']:.1f} s, {table[-1]['stages']}", err=True)
            shutil.rmtree(model)
    table.sort(key=lambda row: "GPUs" not in row)  # columns are those of the first row
    notes = ["Memory: peak of the process's own, the page cache not counted. Weights are random."]
    header = machine(threads) | versions("transformers", "nvidia-modelopt", "llmcompressor")
    show(TITLE, header, table, notes, json_path=json_path)
    if plot:
        points = [
            {"layers": row["layers"], "value": row[column], "run": row["run"], "panel": column}
            for row in table
            for column in ("memory GiB", "seconds")
        ]
        lines(plot, points, x="layers", y="value", line="run", panel="panel", par=None)


if __name__ == "__main__":
    if "--profiled" in sys.argv:
        profiled(sys.argv[sys.argv.index("--profiled") + 1 :])
    else:
        main()
