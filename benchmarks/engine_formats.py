"""This benchmark times a token of a decoder in every format that a runtime takes, for the table in docs/engines.md.

    python benchmarks/engine_formats.py RUNTIME [--formats int8,fp8] [--blocks 30] [--keep FOLDER] [--json FILE]
    python benchmarks/engine_formats.py RUNTIME --make --formats int8 --keep FOLDER      writes the files alone
    python benchmarks/engine_formats.py aoti-gpu --jobs 6 --deadline 200   makes six packages at a time, for 200 seconds

    onnxruntime            a file of `--to onnx` on a processor, beside the model in FP32
    onnxruntime-tensorrt   a file of `--to onnx --target tensorrt` there
    onnxruntime-genai      a directory of `--to onnx --genai` there
    onnxruntime-gpu        a file of `--to onnx --dtype fp16` in the CUDA provider, beside the model in FP16
    onnxruntime-genai-gpu  a directory of `--to onnx --genai --dtype fp16` there
    aoti-cpu, aoti-gpu     a package of `--to aoti`, beside the model in FP32, or in BF16 on a GPU

The decoder has SmolLM2-135M's blocks and vocabulary, with random weights; `experts in …` is one of the same width with
16 experts of 384 in each of 8 blocks, 4 for a token. A format and the unquantized model take turns: each reads 32
tokens and writes 16, one row. "times" is the ratio of the medians of all steps, so above 1 the format is faster. A
processor has one thread, because two share it with whatever else runs.

With `--jobs` files are made in processes of their own, and each is timed as soon as it is there, before the next one:
the processes that make the others stand still meanwhile (SIGSTOP), so that nothing else is on the GPU.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from _table import machine, show, versions, write_json

import quant
from quant.base.json_files import json_text
from quant.export.onnx.engine_session import OnnxruntimeSession
from quant.export.onnx.export_onnx import round_head, write_onnx
from quant.export.onnx.genai import genai_config
from quant.generate.generate import cast_unquantized

FORMATS = (
    "nvfp4a16", "nvfp4", "mxfp4a16", "mxfp4", "mxfp6a16", "mxfp8", "fp8", "fp8_channel", "fp8_block", "int8",
    "int8_static", "int4a16", "int4a16_g64", "int4a16_g32", "fp8@16bit", "int8@16bit", "fp8_block@16bit",
    "mxfp8@16bit", "experts in int4a16_g32", "experts in int8@16bit", "experts in fp8@16bit",
)  # fmt: skip
DTYPES = {
    "onnxruntime": "fp32", "onnxruntime-tensorrt": "fp32", "onnxruntime-genai": "fp32", "onnxruntime-gpu": "fp16",
    "onnxruntime-genai-gpu": "fp16", "aoti-cpu": "fp32", "aoti-gpu": "bf16",
}  # fmt: skip
PACKAGES = {
    "onnxruntime": "onnxruntime", "onnxruntime-tensorrt": "onnxruntime", "onnxruntime-genai": "onnxruntime-genai",
    "onnxruntime-gpu": "onnxruntime-gpu", "onnxruntime-genai-gpu": "onnxruntime-genai-cuda", "aoti-cpu": "torch",
    "aoti-gpu": "triton",
}  # fmt: skip
PROMPT, NEW, CAPACITY = 32, 16, 64  # tokens
WIDE, WIDE_EXPERTS = "16 bit", "experts in 16 bit"


def decoder(experts: bool, blocks: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": blocks, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "tie_word_embeddings": True,
        "max_position_embeddings": 2048, "bos_token_id": 0, "eos_token_id": 0, "dtype": torch.float32,
    }  # fmt: skip
    torch.manual_seed(0)
    if not experts:
        return LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    sizes |= {"num_hidden_layers": min(blocks, 8), "num_experts": 16, "num_experts_per_tok": 4}
    config = Qwen3MoeConfig(**sizes, moe_intermediate_size=384)
    return Qwen3MoeForCausalLM(config).eval()


def written(runtime: str, format: str, folder: Path, blocks: int, *, make: bool = True) -> Path:
    """Returns the file or directory that the runtime loads; `make` says whether one that is not there is made."""
    kind, dtype = ("pt2" if "aoti" in runtime else "onnx"), DTYPES[runtime]
    out = folder / f"{format.replace(' ', '-')}-{blocks}.{kind}"
    if out.exists():
        return out
    if not make:
        raise FileNotFoundError(f"{out} was not made; its process says above why")
    folder.mkdir(parents=True, exist_ok=True)
    wide, genai = format in (WIDE, WIDE_EXPERTS), "genai" in runtime
    model = decoder(format.startswith("experts in "), blocks)
    done = None
    if not wide:
        rows = torch.randint(0, 49152, (2, 64), generator=torch.Generator().manual_seed(1))
        done = quant.quantize(model, format.removeprefix("experts in "), rows, solver="rtn")
        model = done.model
    if kind == "pt2":
        from quant.export.aoti.package import export_aoti_decoder

        cast_unquantized(model, {"fp32": "float32", "bf16": "bfloat16"}[dtype])
        return Path(export_aoti_decoder(model.to("cuda" if runtime == "aoti-gpu" else "cpu"), out, CAPACITY))
    if done is None or genai:
        if "int" in format:
            round_head(model, "lm_head")  # as `quant export` does
        part = Path(tempfile.mkdtemp(dir=folder))
        cast_unquantized(model, {"fp32": "float32", "fp16": "float16"}[dtype])
        write_onnx(model, part / "model.onnx", capacity=0 if genai else CAPACITY, genai=genai, runtime="onnxruntime")
        if genai:
            (part / "genai_config.json").write_text(json_text(genai_config(model)), encoding="utf-8")
        return part.rename(out)
    target = "tensorrt" if runtime == "onnxruntime-tensorrt" else "onnxruntime"
    return quant.export_model(done, "onnx", out, dtype=dtype, capacity=CAPACITY, target=target).path


class Genai:
    """A directory of onnxruntime-genai, with the calls of a session of one row; tokens are its own likeliest."""

    def __init__(self, folder: Path, on_gpu: bool) -> None:
        import onnxruntime_genai as genai

        path = folder / "genai_config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        options = config["model"]["decoder"]["session_options"]
        options |= {"provider_options": [{"cuda": {}}]} if on_gpu else {"intra_op_num_threads": 1}
        path.write_text(json_text(config), encoding="utf-8")
        self.library, self.model = genai, genai.Model(str(folder))

    def begin(self, rows: int) -> None:
        parameters = self.library.GeneratorParams(self.model)
        parameters.set_search_options(max_length=PROMPT + NEW + 2, do_sample=False)
        self.generator = self.library.Generator(self.model, parameters)

    def step(self, ids: np.ndarray, lengths: np.ndarray, last: np.ndarray) -> np.ndarray:
        """One token; appending a prompt computes its logits, from which `generate_next_token` takes the first."""
        self.generator.append_tokens(ids.astype(np.int32)) if ids.shape[1] > 1 else None
        self.generator.generate_next_token()
        return np.zeros((1, 1))


def opened(runtime: str, path: Path) -> Any:
    if "genai" in runtime:
        return Genai(path, runtime.endswith("-gpu"))
    if "aoti" in runtime:
        from quant.export.aoti.package import AotiSession

        return AotiSession(path, unsafe_load=True)
    gpu = torch.device("cuda", 0) if runtime == "onnxruntime-gpu" else None
    return OnnxruntimeSession(path / "model.onnx", threads=1, gpu=gpu)


def steps(session: Any) -> list[float]:
    """Returns the milliseconds of each token after a prompt."""
    session.begin(1)
    session.step(np.arange(100, 100 + PROMPT)[None], np.array([0]), np.array([PROMPT - 1]))
    times = []
    for index in range(NEW):
        started = time.perf_counter()
        session.step(np.array([[200 + index]]), np.array([PROMPT + index]), np.array([0]))
        times.append(1e3 * (time.perf_counter() - started))
    return times


def made_side_by_side(
    runtime: str, formats: list[str], folder: Path, blocks: int, jobs: int, deadline: float
) -> Iterator[str]:
    """Yields each format as soon as its file is there, those that they are compared with first.

    The processes that make the others stand still until the next one is asked for.
    """
    bases = list(dict.fromkeys(WIDE_EXPERTS if format.startswith("experts in ") else WIDE for format in formats))
    waiting, held, end = [*bases, *formats], list[str](), time.monotonic() + deadline
    running: dict[str, subprocess.Popen[bytes]] = {}
    command = [sys.executable, __file__, runtime, "--make", "--keep", str(folder), "--blocks", str(blocks), "--formats"]
    try:
        while (waiting or running) and time.monotonic() < end:
            while waiting and len(running) < jobs:
                format = waiting.pop(0)
                running[format] = subprocess.Popen([*command, format], start_new_session=True)
            ended = [format for format, process in running.items() if process.poll() is not None]
            for format in ended:
                del running[format]
            held += [format for format in ended if format not in bases]
            if not ended or running.keys() & bases or set(waiting) & set(bases):
                time.sleep(0.2)
                continue
            for process in running.values():
                os.killpg(process.pid, signal.SIGSTOP)
            yield from held
            held = []
            for process in running.values():
                os.killpg(process.pid, signal.SIGCONT)
    finally:
        for process in running.values():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def compared(
    runtime: str, formats: Iterable[str], folder: Path, blocks: int, rounds: int, *, make: bool
) -> Iterator[dict[str, Any]]:
    sessions: dict[str, Any] = {}
    for format in formats:
        base = WIDE_EXPERTS if format.startswith("experts in ") else WIDE
        try:
            path = written(runtime, format, folder, blocks, make=make)
            if base not in sessions:
                sessions[base] = opened(runtime, written(runtime, base, folder, blocks, make=make))
            session = opened(runtime, path)
        except Exception as error:
            yield {"format": format, "ms a token": None, "wide": None, "times": None, "said": _line(error)}
            continue
        wide: list[float] = []
        own: list[float] = []
        steps(sessions[base]), steps(session)  # these warm up
        for _ in range(rounds):
            wide += steps(sessions[base])
            own += steps(session)
        step, of_wide = statistics.median(own), statistics.median(wide)
        yield {"format": format, "ms a token": step, "wide": of_wide, "times": of_wide / step, "said": ""}
        del session


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


@click.command()
@click.argument("runtime", type=click.Choice([*DTYPES]))
@click.option("--formats", default=",".join(FORMATS), show_default=True)
@click.option("--blocks", default=30, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--keep", type=click.Path(path_type=Path), help="Keep the files there, and use those of before.")
@click.option("--make", is_flag=True, help="Write the files alone.")
@click.option("--jobs", type=int, help="Make so many files at a time, in processes of their own.")
@click.option("--deadline", default=3600.0, show_default=True, help="Seconds for --jobs; what is not made is left out.")
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def main(
    runtime: str,
    formats: str,
    blocks: int,
    rounds: int,
    keep: Path | None,
    make: bool,
    jobs: int | None,
    deadline: float,
    json_path: Path | None,
) -> None:
    warnings.simplefilter("ignore")
    if not runtime.endswith("-gpu"):
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = keep or Path(temporary)
        if make:
            for format in formats.split(","):
                try:
                    print(written(runtime, format, folder, blocks), flush=True)
                except Exception as error:
                    print(f"-- {format}: {_line(error)}", flush=True)
            return
        rows: list[dict[str, Any]] = []
        header = {**machine(), **versions(PACKAGES[runtime], "transformers"), "blocks": str(blocks), "runtime": runtime}
        names: Iterable[str] = formats.split(",")
        if jobs is not None:
            names = made_side_by_side(runtime, [*names], folder, blocks, jobs, deadline)
        for row in compared(runtime, names, folder, blocks, rounds, make=jobs is None):
            rows.append(row)
            print(row, flush=True)
            if json_path:  # after each row: a run that is cut short keeps what it has
                write_json(json_path, f"a token in {runtime}", header, rows)
        show(f"a token in {runtime}", header, rows)


if __name__ == "__main__":
    main()
