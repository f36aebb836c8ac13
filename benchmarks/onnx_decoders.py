"""This benchmark times exported decoders in onnxruntime on a processor: FP32 and quantized, in one job.

    python benchmarks/onnx_decoders.py [--model smollm2-135m] [--formats INT4,FP8] [--threads 2] [--keep FOLDER]

Each format is rounded to nearest, saved, and exported for onnxruntime; "FP32" is the model as it is, through the same
export, and names with "head" have the output head in INT8 too (`--lm-head int8`, the default of INT4 and INT8). All
sessions are opened, then they take turns: each reads a prompt of 256 tokens into an empty cache, and writes 32 tokens
after it, one at a time; medians over the rounds are printed. `quant.load` is the model of the INT4 checkpoint in FP32
under transformers, with its own cache, in the same turns. Files in `--keep` are used again.

`--profile INT4` prints instead what the operators of that file take of a token, by onnxruntime's profiler.

KL is the mean over the tokens of a text, against `quant.load` of the same checkpoint in FP32: what the runtime's own
roundings add to those of the format.
"""

from __future__ import annotations

import collections
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from _table import machine, show, versions

import quant
from quant.calibration.texts.rows import calibration_rows
from quant.export.checkpoint.load import load
from quant.export.onnx.engine_session import OnnxruntimeSession
from quant.export.onnx.export_onnx import write_onnx
from quant.generate.generate import cast_unquantized
from quant.models.open_model import open_model
from quant.recipes.blocks import cache_argument, cache_of

FORMATS = {"INT4": "int4a16_g64", "INT8": "int8", "INT8 static": "int8_static", "FP8": "fp8"}
FORMATS |= {"INT4 head": "int4a16_g64", "INT8 head": "int8"}  # with the output head in INT8
PROMPT, NEW = 256, 32  # tokens


def exported(name: str, model_name: str, folder: Path, capacity: int, dtype: str = "fp32") -> tuple[Path, Path | None]:
    """Returns the ONNX file and, of a quantized model, its checkpoint; they are made if they are not there."""
    checkpoint = folder / name / "checkpoint"
    if name in ("FP32", "FP16"):
        path = folder / name / f"{capacity}.onnx"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            model = open_model(model_name).model
            assert model is not None
            cast_unquantized(model, {"fp32": "float32", "fp16": "float16"}[dtype])
            write_onnx(model, path, capacity=capacity, runtime="onnxruntime")
        return path, None
    if not checkpoint.exists():
        source = open_model(model_name)
        assert source.model is not None
        text = Path(__file__).parent / "data" / "calibration.txt"
        rows = calibration_rows(str(text), source.load_tokenizer(), samples=4, seqlen=256, seed=0)
        done = quant.quantize(source.model, FORMATS[name], rows, solver="rtn")
        quant.save(done.model, done.plan, checkpoint)
    out, head = folder / name / str(capacity), "int8" if name.endswith("head") else "16bit"
    if not out.exists():
        quant.export_model(checkpoint, "onnx", out, capacity=capacity, dtype=dtype, lm_head=head)
    return out / "model.onnx", checkpoint


class Loaded:
    """`quant.load` of a checkpoint in FP32, with the calls of a session of one row."""

    def __init__(self, checkpoint: Path) -> None:
        self.model: Any = load(checkpoint)
        cast_unquantized(self.model, "float32")
        self.cache: Any = None

    def begin(self, rows: int) -> None:
        self.cache = None

    def step(self, ids: np.ndarray, lengths: np.ndarray, last: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            seen = self.model(torch.from_numpy(ids), use_cache=True, **cache_argument(self.model, self.cache))
        self.cache = cache_of(seen)
        logits: np.ndarray = seen.logits[:, -1].numpy()
        return logits


def timed(session: Any, prompt: np.ndarray) -> tuple[float, float]:
    """Returns milliseconds of a prefill, and of a token after it."""
    session.begin(1)
    started = time.perf_counter()
    logits = session.step(prompt, np.array([0]), np.array([prompt.shape[1] - 1]))
    prefill, steps = time.perf_counter() - started, []
    for index in range(NEW):
        started = time.perf_counter()
        token = logits.argmax(-1)[:, None]
        logits = session.step(token, np.array([prompt.shape[1] + index]), np.array([0]))
        steps.append(time.perf_counter() - started)
    return 1e3 * prefill, 1e3 * statistics.median(steps)


def kl(run: Callable[..., np.ndarray], reference: Callable[..., np.ndarray], prompt: np.ndarray, tokens: int) -> float:
    """Returns the mean KL divergence from the reference after each of the first tokens of a text."""
    divergences = []
    for index in range(tokens):
        arguments = prompt[:, index : index + 1], np.array([index]), np.array([0])
        p, q = (torch.from_numpy(step(*arguments)).double().log_softmax(-1) for step in (reference, run))
        divergences.append(float((p.exp() * (p - q)).sum()))
    return statistics.mean(divergences)


def profiled(path: Path, prompt: np.ndarray, threads: int) -> list[dict[str, Any]]:
    """Returns the time of each operator in a token after the prompt, the mean of `NEW` tokens."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    options.enable_profiling, options.profile_file_prefix = True, str(path.parent / "profile")
    session = OnnxruntimeSession(path, threads=threads)
    session._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    timed(session, prompt)
    events = json.loads(Path(session._session.end_profiling()).read_text())
    begin = sorted(event["ts"] for event in events if event["name"] == "model_run")[1]  # the first one is the prefill
    times: dict[str, float] = collections.Counter()
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("kernel_time") and event["ts"] >= begin:
            head = " of the head" if "lm_head" in event["name"] else ""
            times[event["args"]["op_name"] + head] += event["dur"] / 1e3 / NEW
    total = sum(times.values())
    ordered = sorted(times.items(), key=lambda item: -item[1])
    return [{"operator": op, "ms a token": ms, "share": ms / total} for op, ms in ordered[:12]]


@click.command()
@click.option("--model", default="smollm2-135m", show_default=True)
@click.option("--formats", default=",".join(FORMATS), show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--capacity", default=1024, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--keep", type=click.Path(path_type=Path))
@click.option("--profile", help="Time the operators of one file.")
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def main(
    model: str,
    formats: str,
    threads: int,
    capacity: int,
    rounds: int,
    keep: Path | None,
    profile: str | None,
    json_path: Path | None,
) -> None:
    torch.set_num_threads(threads)
    text = (Path(__file__).parent / "data" / "evaluation.txt").read_text("utf-8")
    prompt = np.array([open_model(model).load_tokenizer()(text[:20_000])["input_ids"][:PROMPT]])
    with tempfile.TemporaryDirectory() as temporary:
        if profile is not None:
            path, _ = exported(profile, model, keep or Path(temporary), capacity)
            show(f"a token of {profile}", machine(threads), profiled(path, prompt, threads), json_path=json_path)
            return
        files = {
            name: exported(name, model, keep or Path(temporary), capacity) for name in ("FP32", *formats.split(","))
        }
        sessions: dict[str, Any] = {
            name: OnnxruntimeSession(path, threads=threads) for name, (path, _) in files.items()
        }
        sessions["quant.load of INT4"] = Loaded(files["INT4"][1] or Path())
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in sessions}
        for _ in range(rounds):
            for name, session in sessions.items():
                times[name].append(timed(session, prompt))
        medians = {
            name: (statistics.median(run[0] for run in runs), statistics.median(run[1] for run in runs))
            for name, runs in times.items()
        }
        rows = []
        for name, (prefill, step) in medians.items():
            path, checkpoint = files.get(name, (None, None))
            divergence, size = None, None
            if path is not None:
                size = sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*")) / 1e6
            if checkpoint is not None:
                sessions[name].begin(1)
                divergence = kl(sessions[name].step, Loaded(checkpoint).step, prompt, 64)
            rows.append({
                "file": name, "MB": size, "prefill ms": prefill, "of FP32": medians["FP32"][0] / prefill,
                "ms a token": step, "tokens/s": 1e3 / step, "times FP32": medians["FP32"][1] / step, "KL": divergence,
            })  # fmt: skip
        header = {**machine(threads), **versions("onnxruntime", "transformers")}
        show(f"{model} in onnxruntime, capacity {capacity}", header, rows, json_path=json_path)


if __name__ == "__main__":
    main()
