"""The examples of training run from a text to a checkpoint that loads."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import tiny_models
from samples import ROOT, TEXTS
from tiny_processors import _byte_tokenizer

import quant
from quant.kernels.linear.modules import QuantLinear

pytest.importorskip("transformers")


@pytest.mark.parametrize("name", ["qat", "qad"])
def test_an_example_of_training(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = _byte_tokenizer(["<pad>", "</s>"], "$A </s>")
    tokenizer.save_pretrained(tmp_path / "model")
    tiny_models.llama(vocab_size=len(tokenizer), num_hidden_layers=1).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text((TEXTS / "calibration.txt").read_text()[:20_000])
    options = ["--model", "model", "--steps", "2", "--seqlen", "16", "--out", "out"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "text.txt", *options])
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    loaded = quant.load(tmp_path / "out")
    assert sum(isinstance(module, QuantLinear) for module in loaded.modules()) == 7
