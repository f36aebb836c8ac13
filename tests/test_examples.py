"""The examples run on a tiny model, as a reader calls them, and the checkpoints that they write hold what they say."""

import csv
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import tiny_processors
import torch
from safetensors.torch import load_file, save_file
from samples import ROOT

import quant
from quant.cli.main import main
from quant.kernels.linear.quant_linear import QuantLinear

pytest.importorskip("transformers", reason="the extra hf")


EXAMPLES = ROOT / "examples"


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a tiny decoder in `model` and a text, in which examples run on the CPU."""
    tokenizer = tiny_processors._byte_tokenizer(["<pad>", "</s>"], "$A </s>")
    tokenizer.save_pretrained(tmp_path / "model")
    made = tiny_models.llama(vocab_size=len(tokenizer), max_position_embeddings=128, num_hidden_layers=1)
    made.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text((ROOT / "benchmarks/data/calibration.txt").read_text()[:20_000])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


@pytest.fixture
def run(workplace: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> Callable[..., str]:
    """Runs an example with options in the workplace; returns the text that it and its commands print."""
    start = subprocess.run

    def run_here(command: Any, *arguments: Any, **options: Any) -> Any:
        """Runs `python -m quant` in this process, which has imported everything; other commands in theirs."""
        if command[:3] != [sys.executable, "-m", "quant"]:
            return start(command, *arguments, **options)
        with pytest.raises(SystemExit) as end:
            main(list(map(os.fspath, command[3:])), prog_name="quant")
        assert end.value.code == 0
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run_here)

    def run_example(example: str, *options: str) -> str:
        monkeypatch.setattr(sys, "argv", [f"{example}.py", *options])
        runpy.run_path(str(EXAMPLES / f"{example}.py"), run_name="__main__")
        return capfd.readouterr().out

    return run_example


def formats_in(directory: Path) -> dict[str, str]:
    """Formats of the layers of a checkpoint, by the last part of their names; the checkpoint is whole."""
    assert quant.verify(directory).findings == ()
    plan = quant.Plan.load(directory / "plan.json")
    return {layer.name.rpartition(".")[2]: layer.formats for layer in plan.quantized}


@pytest.mark.parametrize(
    ("example", "needs", "left"),
    [
        ("qat", "transformers", "out"),
        ("qad", "accelerate", "out"),
        ("lora", "peft", "out"),
        ("trainer", "accelerate", "out/checkpoint-2"),
        ("nvfp4_pretraining", "transformers", "out"),
        ("low_precision_trainer", "accelerate", "out"),
        ("sft_trl", "trl", "out/merged"),
    ],
)
def test_an_example_of_training_runs(
    example: str, needs: str, left: str, workplace: Path, run: Callable[..., str]
) -> None:
    pytest.importorskip(needs, reason="the extra training")
    options = ["--seqlen", "16"] if example in ("qat", "qad") else []
    assert left in run(example, "text.txt", "--model", "model", "--steps", "2", "--out", "out", *options)
    saved = quant.load(workplace / left)
    assert sum(isinstance(module, QuantLinear) for module in saved.modules()) == 7
    assert saved(torch.arange(8)[None]).logits.isfinite().all()


def test_every_example_is_short_and_in_the_table() -> None:
    table = (EXAMPLES / "README.md").read_text()
    for file in EXAMPLES.glob("*.py"):
        assert 10 <= len([line for line in file.read_text().splitlines() if line.strip()]) <= 60, file.name
        assert f"`{file.name}`" in table, file.name


def test_quantize_and_save(workplace: Path, run: Callable[..., str]) -> None:
    printed = run("quantize_and_save", "text.txt", "--model", "model", "--out", "out")
    loss = float(printed.partition("original ")[2].split(",")[0])
    rows = quant.token_rows("text.txt", quant.open_model("model").load_tokenizer(), samples=8, seqlen=64)
    assert loss == pytest.approx(quant.evaluate(quant.load("out"), rows, quant.open_model("model").model).kl, abs=1e-4)
    assert set(formats_in(workplace / "out").values()) == {"nvfp4"}


def test_own_recipe(workplace: Path, run: Callable[..., str]) -> None:
    tiny_models.llama(vocab_size=258, max_position_embeddings=128).save_pretrained(workplace / "model")
    run("own_recipe", "text.txt", "--model", "model", "--out", "out")
    plan = quant.Plan.load(workplace / "out/plan.json")
    assert plan.by_name["model.layers.0.mlp.down_proj"].weight is None
    assert formats_in(workplace / "out")["down_proj"] == "fp8_channel@fp8_token"
    assert formats_in(workplace / "out")["o_proj"] == "nvfp4"

    (workplace / "mine.toml").write_text('weight = "fp8_channel"\n')
    run("own_recipe", "text.txt", "--model", "model", "--recipe", "mine.toml", "--out", "out")
    assert set(formats_in(workplace / "out").values()) == {"fp8_channel"}


def test_mixed_bits(workplace: Path, run: Callable[..., str]) -> None:
    printed = run("mixed_bits", "text.txt", "--model", "model", "--bits", "6.5", "--out", "out")
    assert set(formats_in(workplace / "out").values()) == {"nvfp4", "fp8"}, printed
    assert quant.Plan.load(workplace / "out/plan.json").effective_bits <= 6.5


def test_loss_limit(workplace: Path, run: Callable[..., str]) -> None:
    assert "MB after" in run("loss_limit", "text.txt", "--model", "model", "--max-kl", "0.01", "--out", "out")
    rows = quant.token_rows("text.txt", quant.open_model("model").load_tokenizer(), samples=16, seqlen=64)
    assert quant.evaluate(quant.load("out"), rows, quant.open_model("model").model).kl <= 0.02


def test_custom_module(workplace: Path, run: Callable[..., str]) -> None:
    run("custom_module", "--out", "out")
    assert formats_in(workplace / "out") == dict.fromkeys(("query", "document", "1"), "nvfp4@nvfp4")


def test_edit_plan(workplace: Path, run: Callable[..., str]) -> None:
    printed = run("edit_plan", "text.txt", "--model", "model", "--set", "*.v_proj=fp8_channel", "--out", "out")
    sizes = [float(line.split()[0]) for line in printed.splitlines() if "KL to the original" in line]
    assert sizes[0] < sizes[1]
    formats = formats_in(workplace / "out")
    assert {formats[name] for name in ("q_proj", "k_proj", "v_proj")} == {"fp8_channel"}
    assert formats["o_proj"] == "nvfp4"


def test_explain_layers(workplace: Path, run: Callable[..., str]) -> None:
    printed = run("explain_layers", "text.txt", "--model", "model", "--out", "layers.csv")
    rows = list(csv.DictReader((workplace / "layers.csv").read_text().splitlines()))
    assert "lm_head" in {row["name"] for row in rows}
    assert sum(row["format"] == "nvfp4" and float(row["relative_error"]) > 0.05 for row in rows) == 7
    assert all(row["reason"] for row in rows) and rows[0]["reason"] in printed


def test_vision(workplace: Path, run: Callable[..., str]) -> None:
    tiny_processors.write_vit(workplace / "vit")
    tiny_processors.write_images(workplace / "photos")
    printed = run("vision", "photos", "--model", "vit", "--out", "out")
    assert "of 4 photos" in printed and "3.png: LABEL_" in printed
    assert set(formats_in(workplace / "out").values()) == {"fp8@fp8"}
    assert (workplace / "out/preprocessor_config.json").is_file()


def test_speech(workplace: Path, run: Callable[..., str]) -> None:
    tiny_processors.write_whisper(workplace / "whisper")
    tiny_processors.write_sounds(workplace / "sounds")
    assert "of the positions" in run("speech", "sounds", "--model", "whisper", "--out", "out")
    assert {"q_proj", "fc1"} <= formats_in(workplace / "out").keys()


def test_embeddings(workplace: Path, run: Callable[..., str]) -> None:
    (workplace / "bert").mkdir()
    for file in (workplace / "model").glob("token*"):
        (workplace / "bert" / file.name).write_bytes(file.read_bytes())
    tiny_models.bert(vocab_size=258, gain=3, max_position_embeddings=64).save_pretrained(workplace / "bert")
    printed = run("embeddings", "text.txt", "--model", "bert", "--out", "out")
    assert 0.99 < float(printed.partition("vectors: ")[2].split()[0]) < 1
    assert set(formats_in(workplace / "out").values()) == {"int8@int8_token"}


def test_verify_source(workplace: Path, run: Callable[..., str]) -> None:
    assert "is whole" in run("verify_source", "--model", "model", "--out", "out")
    weights = workplace / "out/model.safetensors"
    tensors = load_file(weights)
    tensors["model.norm.weight"] += 0.01
    save_file(tensors, weights, {"format": "pt"})
    with pytest.raises(SystemExit) as end:
        run("verify_source", "--model", "model", "--checkpoint", "out")
    assert end.value.code == 2


def test_serve_vllm(workplace: Path, run: Callable[..., str]) -> None:
    pytest.importorskip("compressed_tensors", reason="the extra dev")
    printed = run("serve_vllm", "--model", "model", "--out", "out")
    assert "weights in 4 bits, inputs in 16 bits" in printed and "vllm serve out" in printed
    assert json.loads((workplace / "out/config.json").read_text())["quantization_config"]["ignore"] == ["lm_head"]


def test_convert_layout(workplace: Path, run: Callable[..., str]) -> None:
    assert "tensors are equal" in run("convert_layout", "--text", "text.txt", "--model", "model", "--out", "out")
    assert set(formats_in(workplace / "out/modelopt").values()) == {"nvfp4@nvfp4"}


def test_from_pretrained(workplace: Path, run: Callable[..., str]) -> None:
    assert "MB in memory" in run("from_pretrained", "--model", "model", "--out", "out")
    assert len(formats_in(workplace / "out")) == 7


@pytest.mark.slow  # this example and those below start processes, which import torch again
def test_runtime_check(workplace: Path, run: Callable[..., str]) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra hf")
    transformers.AutoModelForCausalLM.from_pretrained("model", dtype=torch.bfloat16).save_pretrained("model")
    with pytest.raises(SystemExit) as end:
        run("runtime_check", "--model", "model", "--out", "out")
    assert end.value.code == 0


@pytest.mark.slow
def test_onnx_engine(workplace: Path, run: Callable[..., str]) -> None:
    pytest.importorskip("onnxruntime", reason="the extra onnx")
    printed = run("onnx_engine", "--model", "model", "--capacity", "128", "--prompt", "ab", "--out", "out")
    assert "likeliest tokens" in printed and "quant generate" in printed


@pytest.mark.slow
def test_onnx_genai(workplace: Path, run: Callable[..., str]) -> None:
    pytest.importorskip("onnxruntime_genai", reason="the extra genai")
    assert "written to out-genai" in run("onnx_genai", "--model", "model", "--out", "out")


@pytest.mark.slow
def test_several_processes(workplace: Path, run: Callable[..., str]) -> None:
    assert "are equal" in run("several_processes", "text.txt", "--model", "model", "--out", "out")
    assert len(formats_in(workplace / "out-2")) == 7
