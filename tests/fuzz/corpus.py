"""The corpus is one healthy input of every kind that commands read, and the commands that read it.

The inputs are made by the commands themselves, in the process that is forked later, which imports everything that they
need. A command's arguments name inputs as `in/NAME` and its results as `out`; a case runs in a folder of its own.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf_samples
import tiny_models
import torch
from fuzz import forks
from safetensors.torch import save_file
from samples import BASE, GOLDENS, TEXTS
from torch import nn
from transformers import AutoConfig, LlamaForCausalLM

from quant.calibration.walk import step_store
from quant.cli.main import COMMANDS
from quant.export.checkpoint.files.tensor_file import sha256_of

_IMPORTED = (
    "accelerate", "compressed_tensors", "datasets", "gguf", "onnx", "onnxruntime", "onnxscript",
    "quant.calibration.texts.sources", "quant.export.export_model", "quant.generate.generate", "quant.report.render",
    "quant.run.run", "scipy.optimize", "torch._dynamo", "torch.export", "torch.onnx",
    "transformers.conversion_mapping", "transformers.core_model_loading",
    "transformers.generation", "transformers.integrations.ggml", "transformers.integrations.moe",
    "transformers.modeling_gguf_pytorch_utils", "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama", "transformers.models.qwen3_moe.modeling_qwen3_moe",
)  # fmt: skip
"""What commands import, so that the forks need not."""

ROWS = "--calib in/tokens.safetensors --calib-samples 2 --seqlen 8"
SHORT = "--samples 1 --seqlen 8"
TO = "--out out --quiet"
TRAINED = "--steps 1 --batch-size 2"
RESUMED = f"quantize in/model --format nvfp4 --solver gptq {ROWS} {TO}"


@dataclass(frozen=True)
class ChangedFile:
    """A file that is changed, and the commands that read it.

    Attributes:
        file: the changed file, below `in`, or beside it if it begins with a dot; "" changes an option instead.
        kind: how it is changed, a key of `mutations.KINDS`.
        commands: one of them runs, its words separated by spaces.
        weight: how often the target is chosen.
    """

    file: str
    kind: str
    commands: Sequence[str]
    weight: int = 4

    def inputs(self, command: str) -> list[str]:
        """What stands in `in` while a command runs, files and directories."""
        named = [word.removeprefix("in/").partition("/")[0] for word in command.split() if word.startswith("in/")]
        beside = [f"{name}.json" for name in named if name == "m.engine"]
        return sorted({*named, *beside, *filter(None, [self.file.partition("/")[0]])})


WRITTEN = ("ckpt/report.json", "ckpt/report.html", "scores.json")
"""Inputs that commands may write: an export adds to the report of its checkpoint."""


def make_some(home: Path) -> None:
    """Writes the healthy inputs that commands which write are tried with, and imports all that commands need."""
    for command, _ in COMMANDS.values():
        importlib.import_module(command.partition(":")[0])
    for module in _IMPORTED:
        importlib.import_module(module)
    _models(home)
    _texts(home)
    _run(home, f"quantize in/model --format nvfp4 --effort 0 --kv-cache fp8 {ROWS} --out in/ckpt --quiet")
    _run(home, f"quantize in/model --format fp8 --effort 0 {ROWS} --out in/static --quiet")
    shutil.copy(home / "ckpt" / "plan.json", home / "plan.json")


def make(home: Path) -> list[ChangedFile]:
    """Writes all healthy inputs to `home`, and lists what to do with them."""
    make_some(home)
    _run(home, f"sensitivity in/model --calib in/tokens.safetensors {SHORT} --out in/scores.json --quiet")
    _run(home, "export in/ckpt --to onnx --out in/graph --quiet")
    cached = "--cache-teacher in/teacher.safetensors --top 4 --data in/tokens.safetensors --samples 2 --seqlen 8"
    _run(home, f"distill in/ckpt --teacher in/model {cached} {TRAINED} --out in/trained --quiet")
    shutil.copytree(home / "ckpt", home / "plain")
    for name in ("plan.json", "report.json", "report.html"):
        (home / "plain" / name).unlink()
    shutil.copy(home / "graph" / "receipt.json", home / "receipt.json")
    _engine(home)
    return _targets(_unfinished(home))


def _run(home: Path, command: str) -> None:
    done = forks.run(command.split(), _beside(home))
    assert not done.code, (command, done)


def _beside(home: Path) -> Path:
    """A folder in which the inputs are called `in`."""
    folder = home.parent / "making"
    folder.mkdir(exist_ok=True)
    if not (folder / "in").exists():
        (folder / "in").symlink_to(home)
    return folder


def _models(home: Path) -> None:
    shutil.copytree(BASE, home / "model")
    config = json.loads((BASE / "tokenizer_config.json").read_text(encoding="utf-8"))
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    (home / "model" / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    tiny_models.qwen3_moe(dtype=torch.bfloat16).save_pretrained(home / "experts", max_shard_size="60KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BASE / name, home / "experts")
    for name in ("compressed_tensors/NVFP4", "compressed_tensors/FP8_BLOCK", "modelopt/mixed", "modelopt/fp8"):
        shutil.copytree(GOLDENS / name, home / Path(name).name)
        for each in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(BASE / each, home / Path(name).name)
    weights = {"a.weight": torch.randn(64, 128), "b.weight": torch.randn(32, 64), "b.bias": torch.zeros(32)}
    save_file(weights, home / "w.safetensors")
    torch.save(weights, home / "w.pt")
    torch.save(weights, home / "old.bin", _use_new_zipfile_serialization=False)
    size = torch.export.Dim("rows", max=64)
    program = torch.export.export(nn.Linear(16, 16), (torch.randn(4, 16),), dynamic_shapes={"input": {0: size}})
    torch.export.save(program, home / "m.pt2")
    config = AutoConfig.from_pretrained(BASE)
    config.tie_word_embeddings = True
    gguf_samples.write_gguf(home / "m.gguf", LlamaForCausalLM(config))


def _texts(home: Path) -> None:
    text = (TEXTS / "calibration.txt").read_text(encoding="utf-8")[:20000]
    (home / "text.txt").write_text(text, encoding="utf-8")
    ids = torch.randint(5, 60, (4, 16), generator=torch.Generator().manual_seed(1))
    save_file({"input_ids": ids}, home / "tokens.safetensors")
    records = [{"text": text[i : i + 500], "messages": None, "id": i} for i in range(0, 20000, 500)]
    (home / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    chat = {"messages": [{"role": "user", "content": text[:800]}, {"role": "assistant", "content": text[800:2000]}]}
    (home / "chats.jsonl").write_text((json.dumps(chat) + "\n") * 3, encoding="utf-8")
    rows = [
        {"weight": format, "activation": format, "out": out, "in": inside, "tokens": 1, "seconds": 1e-6 * (i + 1)}
        for i, format in enumerate((None, "nvfp4"))
        for out, inside in ((128, 128), (64, 128), (256, 128), (128, 256))
    ]
    (home / "times.json").write_text(json.dumps({"name": "ours", "bandwidth": 1e12, "times": rows}), encoding="utf-8")
    recipe = (
        'name = "mine"\nweight = "nvfp4"\nactivation = "nvfp4"\nsolver = "rtn"\nkv_cache = "fp8"\n\n'
        '[[rules]]\nmatch = "*.down_proj"\nweight = "mxfp8"\nactivation = "mxfp8"\nreason = "wide"\n'
    )
    (home / "recipe.toml").write_text(recipe, encoding="utf-8")


def _engine(home: Path) -> None:
    """What `quant check` reads of an engine: its program as text, and the receipt beside one of two copies."""
    nodes = [f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")]
    tensors = "".join(
        f' tensor={{ dims={{ 256 128 }} name="w{i}" const_payload_size=9 type=fp4_e2m1 }}\n'
        f' tensor={{ dims={{ 8 128 }} name="x{i}" type=fp4_e2m1 }}\n'
        for i in range(3)
    )
    lines = "".join(
        f'  fully_connected={{ name="{node}/MatMul" input={{ "x{i}" "w{i}" }} output={{ "y{i}" }} '
        f'layers="[ONNX Layer: {node}/MatMul]" }}\n'
        for i, node in enumerate(nodes)
    )
    text = f"header {{\n  version = 1\n}}\n{tensors}\nmain {{\n{lines}}}\n"
    for name in ("bare.engine", "m.engine"):
        (home / name).write_bytes(bytes(64) + text.encode() + bytes(64))
    receipt = json.loads((home / "receipt.json").read_text())
    digest = json.loads((home / "ckpt" / "report.json").read_text())["plan_digest"]
    known = {"attention_nodes": ["model.layers.0.self_attn/Attention"], "layers": nodes}
    engine = {"contents": known, "sha256": sha256_of(home / "m.engine"), "target": "sm120", "backend": "tensorrt_rtx 1"}
    (home / "m.engine.json").write_text(json.dumps({**receipt, "plan": digest, "engine": engine}), encoding="utf-8")


def _unfinished(home: Path) -> str:
    """Makes the partial directory of a run that was killed before it wrote its checkpoint; gives the file of a step."""

    def stop() -> None:
        step_store.DirectoryStore.put = _killed_after(2, step_store.DirectoryStore.put)  # type: ignore[method-assign]

    folder = _beside(home)
    killed = forks.run(RESUMED.split(), folder, stop)
    assert killed.code == -signal.SIGKILL, killed
    shutil.move(folder / ".out.partial", home / ".out.partial")
    return max((home / ".out.partial").glob("*.safetensors"), key=lambda file: file.stat().st_size).name


def _killed_after(calls: int, put: Callable[..., None]) -> Callable[..., None]:
    left = calls

    def kill(self: step_store.DirectoryStore, *arguments: Any, **options: Any) -> None:
        nonlocal left
        left -= 1
        if not left:
            self.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        put(self, *arguments, **options)

    return kill


def _targets(step: str) -> list[ChangedFile]:
    quantize = f"quantize in/model --format fp8_channel --effort 0 {TO}"
    calibrated = f"quantize in/model --format nvfp4 --effort 0 {ROWS} {TO}"
    evaluate = f"evaluate in/model --text in/tokens.safetensors {SHORT} --json"
    generate = "generate in/model --prompt ab --max-new-tokens 3"
    run = [
        quantize, calibrated, evaluate, generate,
        "quantize in/model --format nvfp4 --effort 0 --dry-run --json",
        "plan validate in/plan.json --model in/model",
        f"sensitivity in/model --calib in/tokens.safetensors {SHORT} {TO}",
        f"quantize in/model --bits 6 {ROWS} {TO}",
    ]  # fmt: skip
    with_text = [
        quantize, f"{generate} --json",
        f"evaluate in/model --text in/text.txt {SHORT} --json",
        f"quantize in/model --format nvfp4 --effort 0 --calib in/text.txt --calib-samples 2 --seqlen 8 {TO}",
    ]  # fmt: skip
    read = [
        "inspect in/ckpt", "inspect in/ckpt --json", "report in/ckpt", "plan show in/ckpt", "check in/ckpt --quiet",
        f"evaluate in/ckpt --text in/tokens.safetensors {SHORT} --json",
        "generate in/ckpt --prompt ab --max-new-tokens 3",
        f"export in/ckpt --to modelopt {TO}",
        f"export in/ckpt --to compressed-tensors {TO}",
        f"export in/ckpt --to onnx {TO}",
    ]  # fmt: skip
    plans = [
        "plan show in/plan.json --all", "plan show in/plan.json --json",
        "plan validate in/plan.json --model in/model --target vllm",
        "plan diff in/plan.json in/ckpt",
        "plan edit in/plan.json --set *.down_proj=mxfp8 --out out",
        f"quantize in/model --plan in/plan.json {ROWS} {TO}",
        "quantize in/model --plan in/plan.json --dry-run",
    ]  # fmt: skip
    audits = ["check in/m.engine", "check in/m.engine --plan in/plan.json"]
    recipes = [f"quantize in/model --format in/recipe.toml {more}" for more in ("--dry-run", f"{ROWS} {TO}")]
    scored = f"plan make in/model --bits 6 --format nvfp4,mxfp8,fp8 --sensitivity in/scores.json {ROWS} {TO}"
    timed = f"plan make in/model --latency 1ms --format nvfp4 --target in/times.json {ROWS} {TO}"
    options = [
        *run, *read[-1:], *plans[2:5:2], f"{quantize} --seed 0", f"{calibrated} --seed 0", f"{calibrated} --memory 8GB",
        f"plan make in/model --format nvfp4 --guard 0.1\u00a0fp8\u00a0keep {TO}", f"{calibrated} --include *",
        f"{evaluate} --batch-size 1",
        f"plan make in/model --max-kl 0.1 --calib in/tokens.safetensors --calib-samples 3 --seqlen 8 {TO}",
        f"plan make in/model --fit 8GB --ctx 32 --batch 2 {ROWS} {TO}",
        "plan show in/plan.json --match *", f"export in/ckpt --to onnx --shapes batch=1:1:2,sequence=4:8:16 {TO}",
    ]  # fmt: skip
    found = [
        ChangedFile("", "options", options, 12),
        ChangedFile("model/config.json", "json", run, 16),
        ChangedFile("model/generation_config.json", "json", run, 2),
        ChangedFile("model/tokenizer.json", "json", with_text),
        ChangedFile("model/tokenizer_config.json", "json", with_text),
        ChangedFile("model/model.safetensors", "safetensors", run, 8),
        ChangedFile("experts/config.json", "json", _of("experts", run)),
        ChangedFile("experts/model.safetensors.index.json", "json", _of("experts", run[:6]), 8),
        ChangedFile("ckpt/plan.json", "json", read, 8),
        ChangedFile("ckpt/config.json", "json", read, 8),
        ChangedFile("ckpt/report.json", "json", [*read[:3], read[4]], 6),
        ChangedFile("ckpt/model.safetensors", "safetensors", read, 8),
        ChangedFile("plan.json", "json", plans, 12),
        ChangedFile("recipe.toml", "toml", recipes, 6),
        ChangedFile("receipt.json", "json", ["report in/ckpt --receipt in/receipt.json"]),
        ChangedFile("bare.engine", "text", [audit.replace("in/m.", "in/bare.") for audit in audits], 3),
        ChangedFile("m.engine.json", "json", audits, 3),
        ChangedFile("scores.json", "json", [scored]),
        ChangedFile("times.json", "json", [timed], 3),
        ChangedFile(".out.partial/run.json", "json", [RESUMED]),
        ChangedFile(f".out.partial/{step}", "safetensors", [RESUMED], 1),
        ChangedFile(f".out.partial/{step}", "step", [RESUMED]),
        ChangedFile("m.gguf", "bytes", _of("m.gguf", [*run[:3], *run[4:6]]), 6),
        ChangedFile("tokens.safetensors", "safetensors", [calibrated, evaluate]),
        ChangedFile(
            "teacher.safetensors", "safetensors", [f"distill in/ckpt --teacher in/teacher.safetensors {TRAINED} {TO}"]
        ),
    ]
    for name, kind in (("text.txt", "text"), ("records.jsonl", "lines"), ("chats.jsonl", "lines")):
        found.append(ChangedFile(name, kind, _of(name, with_text[-1:], "text.txt"), 2))
    for name in ("w.safetensors", "w.pt", "old.bin", "m.pt2"):
        kind = "safetensors" if name.endswith("safetensors") else "torch"
        found.append(ChangedFile(name, kind, _of(name, [quantize, *run[4:6]]), 6))
    for name in ("NVFP4", "FP8_BLOCK", "mixed", "fp8", "plain"):
        other = "compressed-tensors" if name in ("mixed", "fp8") else "modelopt"
        ours = _of(name, [*read[:1], read[5], f"export in/ckpt --to {other} {TO}"], "ckpt")
        again = _of(name, [f"quantize in/model --format mxfp8 --effort 0 {TO}", run[4]])
        files = ["config.json", "model.safetensors", *(["hf_quant_config.json"] if name in ("mixed", "fp8") else [])]
        for file in files:
            kind = "safetensors" if file.endswith("safetensors") else "json"
            found.append(ChangedFile(f"{name}/{file}", kind, [*ours, *again], 4))
    return found


def _of(name: str, commands: Sequence[str], before: str = "model") -> list[str]:
    """Commands with another input."""
    return [command.replace(f"in/{before}", f"in/{name}") for command in commands]
