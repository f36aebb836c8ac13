"""This benchmark times an exported decoder in onnxruntime's CUDA provider, next to PyTorch and `quant generate`.

    python benchmarks/onnx_cuda.py [--model smollm2-135m] [--formats INT4,FP8] [--keep FOLDER] [--json FILE]
    python benchmarks/onnx_cuda.py --make INT4 --keep FOLDER      writes the files of one format; needs no GPU

Everything is in FP16 where it is not quantized. Each run reads a prompt of 256 tokens into an empty cache and writes
128 tokens after it, one row, greedily; runs take turns, and medians over the rounds are printed.

    onnxruntime       the file in a session with our loop: each step's logits come to the host
    quant.load        the same checkpoint, eager, under transformers
    quant generate    the same checkpoint by its CUDA graph
    PyTorch, eager    the model that was quantized, under transformers
    PyTorch, compiled the same with a static cache, prefill and step compiled with `reduce-overhead` (CUDA graphs)

"equal tokens" are those of the same weights in PyTorch, of 128, where each run continues its own text. KL is the mean
over 64 of the prompt's tokens, from `quant.load` of the checkpoint on the same GPU. "on the processor" counts the nodes
of a step that the CUDA provider does not have, by onnxruntime's profiler.
"""

from __future__ import annotations

import collections
import copy
import json
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from _table import machine, show, versions
from onnx_decoders import FORMATS, PROMPT, Loaded, exported, kl

from quant.export.onnx.engine_session import OnnxruntimeSession
from quant.generate.fused_decoder import Decoder, decoder_refusal
from quant.generate.generate import cast_unquantized
from quant.models.open_model import open_model
from quant.recipes.blocks import cache_argument, cache_of

NEW = 128  # tokens
CAPACITY = 512
WIDE, TYPE = "FP16", "float16"


class Run:
    """One contestant; `write` returns milliseconds of a prefill and of a token after it, and the tokens."""

    def __init__(self, session: Any) -> None:
        self.session = session

    def write(self, prompt: np.ndarray) -> tuple[float, float, list[int]]:
        self.session.begin(1)
        started = time.perf_counter()
        logits = self.session.step(prompt, np.array([0]), np.array([prompt.shape[1] - 1]))
        prefill, steps, tokens = time.perf_counter() - started, [], [int(logits.argmax())]
        for index in range(NEW - 1):
            started = time.perf_counter()
            token = np.array([[tokens[-1]]])
            tokens.append(int(self.session.step(token, np.array([prompt.shape[1] + index]), np.array([0])).argmax()))
            steps.append(time.perf_counter() - started)
        return 1e3 * prefill, 1e3 * statistics.median(steps), tokens


class Replayed:
    """`quant generate`: transformers reads the prompt, then a captured graph writes token after token."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.decoder = Decoder(model, PROMPT + NEW)

    @torch.no_grad()
    def write(self, prompt: np.ndarray) -> tuple[float, float, list[int]]:
        started = time.perf_counter()
        seen = self.model(torch.from_numpy(prompt).cuda(), use_cache=True)
        first = int(seen.logits[0, -1].argmax())
        prefill, decoder = time.perf_counter() - started, self.decoder
        decoder.begin(cache_of(seen), first)
        steps_done = 0
        if decoder.replay is None:
            decoder.step()
            decoder.capture()
            steps_done = 1
        torch.cuda.synchronize()
        started, tokens = time.perf_counter(), []
        for some in decoder.run(PROMPT, PROMPT + NEW, (), steps_done=steps_done):
            tokens += some
        # The prompt gave the first token.
        return 1e3 * prefill, 1e3 * (time.perf_counter() - started) / (NEW - 1 - steps_done), tokens


class Compiled:
    """transformers with a static cache, compiled; one graph for the prompt and one for a token."""

    def __init__(self, model: Any, capacity: int) -> None:
        from transformers import StaticCache

        self.model, device = model, next(model.parameters()).device
        self.cache = StaticCache(config=model.config, max_cache_len=capacity)
        heads = model.config.num_key_value_heads
        dim = getattr(model.config, "head_dim", None) or model.config.hidden_size // model.config.num_attention_heads
        self.cache.early_initialization(1, heads, dim, getattr(torch, TYPE), device)
        self.place = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self.token = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self.compiled = torch.compile(self.forward, mode="reduce-overhead", fullgraph=False, dynamic=False)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        known = cache_argument(self.model, self.cache)
        seen = self.model(ids, position_ids=positions, use_cache=True, logits_to_keep=1, **known)
        chosen: torch.Tensor = seen.logits[:, -1].argmax(-1, keepdim=True)
        return chosen

    @torch.no_grad()
    def write(self, prompt: np.ndarray) -> tuple[float, float, list[int]]:
        self.cache.reset()
        ids = torch.from_numpy(prompt).to(self.place.device)
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        started = time.perf_counter()
        self.token.copy_(self.compiled(ids, positions))
        tokens = [int(self.token)]
        prefill, steps = time.perf_counter() - started, []
        for index in range(NEW - 1):
            started = time.perf_counter()
            self.place.fill_(ids.shape[1] + index)
            self.token.copy_(self.compiled(self.token, self.place))
            tokens.append(int(self.token))
            steps.append(time.perf_counter() - started)
        return 1e3 * prefill, 1e3 * statistics.median(steps), tokens


class OnGpu(Loaded):
    """A model under transformers on the GPU, eager, with the calls of a session of one row."""

    def __init__(self, model: Any) -> None:
        self.model, self.cache = model, None

    def step(self, ids: np.ndarray, lengths: np.ndarray, last: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            tokens = torch.from_numpy(ids).cuda()
            seen = self.model(tokens, use_cache=True, logits_to_keep=1, **cache_argument(self.model, self.cache))
        self.cache = cache_of(seen)
        logits: np.ndarray = seen.logits[:, -1].float().cpu().numpy()
        return logits


def wide_model(name: str) -> Any:
    """The model that was quantized, in FP16 on the GPU."""
    model: Any = open_model(name).model
    cast_unquantized(model, TYPE)
    return model.cuda()


def on_the_processor(path: Path, prompt: np.ndarray) -> str:
    """The nodes of a step that the CUDA provider lacks, as `12 × MatMulIntegerToFloat`."""
    import onnxruntime

    usual = onnxruntime.SessionOptions
    with tempfile.TemporaryDirectory() as folder:

        def profiled() -> Any:
            options = usual()
            options.enable_profiling, options.profile_file_prefix = True, f"{folder}/of"
            return options

        onnxruntime.SessionOptions = profiled
        try:
            session = OnnxruntimeSession(path, gpu=torch.device("cuda", 0))
        finally:
            onnxruntime.SessionOptions = usual
        session.begin(1)
        session.step(prompt[:, :1], np.array([0]), np.array([0]))
        events = json.loads(Path(session._session.end_profiling()).read_text())
    nodes: collections.Counter[str] = collections.Counter()
    for event in events:
        arguments = event.get("args", {})
        if event["name"].endswith("kernel_time") and "CUDA" not in arguments.get("provider", "CUDA"):
            nodes[arguments["op_name"]] += 1
    return ", ".join(f"{count} × {op}" for op, count in nodes.most_common()) or "none"


def contestants(model: str, formats: list[str], keep: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Path]]:
    """Every run by its name, the model on the GPU with the same weights, and the paths of files."""
    runs: dict[str, Any] = {}
    models: dict[str, Any] = {}
    files: dict[str, Path] = {}
    wide = wide_model(model)
    for name in (WIDE, *formats):
        path, checkpoint = exported(name, model, keep, CAPACITY, dtype="fp16")
        same = wide
        if checkpoint is not None:
            import quant

            same = quant.load(checkpoint, device="cuda")
            cast_unquantized(same, TYPE)
        try:
            runs[f"onnxruntime, {name}"] = Run(OnnxruntimeSession(path, gpu=torch.device("cuda", 0)))
            files[f"onnxruntime, {name}"], models[f"onnxruntime, {name}"] = path, same
        except ValueError as error:
            print(f"-- {name}: {' '.join(str(error).split())}", flush=True)
        if name.endswith(" head"):
            continue
        if checkpoint is not None:
            runs[f"quant.load, {name}"] = Run(OnGpu(same))
        if not decoder_refusal(same):
            runs[f"quant generate, {name}"], models[f"quant generate, {name}"] = Replayed(copy.deepcopy(same)), same
    runs["PyTorch, eager"] = Run(OnGpu(wide))
    runs["PyTorch, compiled"], models["PyTorch, compiled"] = Compiled(wide, CAPACITY), wide
    return runs, models, files


def compile_only(model: str) -> None:
    """Fills the compilers' caches, so that a later run on this machine does not wait for them."""
    Compiled(wide_model(model), CAPACITY).write(np.arange(PROMPT)[None] + 100)


@click.command()
@click.option("--model", default="smollm2-135m", show_default=True)
@click.option("--formats", default="INT4,INT4 head,INT8 head,FP8", show_default=True, help=f"Of {', '.join(FORMATS)}.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--keep", type=click.Path(path_type=Path))
@click.option("--make", help="Write the files of one format.")
@click.option("--compile-only", "only_compile", is_flag=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def main(
    model: str,
    formats: str,
    rounds: int,
    keep: Path | None,
    make: str | None,
    only_compile: bool,
    json_path: Path | None,
) -> None:
    warnings.simplefilter("ignore")
    if only_compile:
        compile_only(model)
        return
    if make is not None:
        print(exported(make, model, keep or Path(), CAPACITY, dtype="fp16")[0])
        return
    text = (Path(__file__).parent / "data" / "evaluation.txt").read_text("utf-8")
    prompt = np.array([open_model(model).load_tokenizer()(text[:20_000])["input_ids"][:PROMPT]])
    with tempfile.TemporaryDirectory() as temporary:
        runs, models, files = contestants(model, formats.split(","), keep or Path(temporary))
        seen: dict[str, list[tuple[float, float, list[int]]]] = {name: [] for name in runs}
        for turn in range(rounds + 2):
            for name, run in list(runs.items()):
                try:
                    result = run.write(prompt)
                except Exception as error:
                    print(f"-- {name}: {type(error).__name__}: {' '.join(str(error).split())[:400]}", flush=True)
                    del runs[name], seen[name]
                    continue
                if turn >= 2:  # the first two warm up
                    seen[name].append(result)
                print(f"-- round {turn - 1}, {name}: {result[0]:.1f} ms, {result[1]:.2f} ms a token", flush=True)
        rows: list[dict[str, Any]] = []
        own: dict[int, list[int]] = {}  # tokens of the same weights in PyTorch, by the model's id
        for name, run in runs.items():
            if isinstance(run, Run) and isinstance(run.session, OnGpu):
                own[id(run.session.model)] = seen[name][0][2]
        for name, results in seen.items():
            prefill, step = (statistics.median(result[index] for result in results) for index in (0, 1))
            rows.append({"run": name, "prefill ms": prefill, "ms a token": step, "tokens/s": 1e3 / step})
            if name in models:
                key = id(models[name])
                if key not in own:
                    own[key] = Run(OnGpu(models[name])).write(prompt)[2]
                rows[-1]["equal tokens"] = sum(a == b for a, b in zip(results[0][2], own[key], strict=True))
            if name in files:
                path = files[name]
                rows[-1]["MB"] = sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*")) / 1e6
                session, reference = runs[name].session, OnGpu(models[name])
                session.begin(1)
                rows[-1]["KL"] = kl(session.step, reference.step, prompt, 64)
                rows[-1]["on the processor"] = on_the_processor(path, prompt)
            print(rows[-1], flush=True)
        header = {**machine(), **versions("onnxruntime-gpu", "transformers", "triton")}
        show(f"{model} in the CUDA provider", header, rows, json_path=json_path)


if __name__ == "__main__":
    main()
