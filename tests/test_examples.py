"""The examples run for two steps on a tiny model, as a reader calls them, and leave what they say."""

import runpy
import sys
from pathlib import Path

import pytest
import tiny_models
import torch
from samples import ROOT
from tiny_processors import _byte_tokenizer

import quant

pytest.importorskip("transformers", reason="the extra hf")


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
def test_an_example_runs(
    example: str, needs: str, left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    pytest.importorskip(needs, reason="the extra training")
    file = ROOT / "examples" / f"{example}.py"
    assert len([line for line in file.read_text().splitlines() if line.strip()]) <= 40
    tokenizer = _byte_tokenizer(["<pad>", "</s>"], "$A </s>")
    tokenizer.save_pretrained(tmp_path / "model")
    made = tiny_models.llama(vocab_size=len(tokenizer), max_position_embeddings=128, num_hidden_layers=1)
    made.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text((ROOT / "benchmarks/data/calibration.txt").read_text()[:20_000])
    options = ["--seqlen", "16"] if example in ("qat", "qad") else []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "argv", [file.name, "text.txt", "--model", "model", "--steps", "2", "--out", "out", *options]
    )
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    runpy.run_path(str(file), run_name="__main__")
    assert left in capsys.readouterr().out
    saved = quant.load(tmp_path / left)
    assert sum(isinstance(module, quant.QuantLinear) for module in saved.modules()) == 7
    assert saved(torch.arange(8)[None]).logits.isfinite().all()
