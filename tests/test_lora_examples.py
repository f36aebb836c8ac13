"""The examples of fine-tuning run for two steps on a tiny model, and leave what they say."""

import runpy
import sys
from pathlib import Path

import pytest
import tiny_models
import torch
from samples import ROOT

import quant

transformers = pytest.importorskip("transformers", reason="the extra hf")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A model directory whose tokenizer has a token for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE({**tokens, "<end>": 256}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    out = tmp_path / "model"
    tiny_models.llama(vocab_size=264, max_position_embeddings=128, num_hidden_layers=1).save_pretrained(out)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(out)
    return out


@pytest.mark.parametrize(
    ("example", "needs", "left"),
    [
        ("lora", "peft", "out"),
        ("trainer", "accelerate", "out/checkpoint-2"),
        ("sft_trl", "trl", "out/merged"),
    ],
)
def test_an_example_runs(
    example: str, needs: str, left: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(needs, reason="the extra training")
    file = ROOT / "examples" / f"{example}.py"
    assert len([line for line in file.read_text().splitlines() if line.strip()]) <= 40
    text = ROOT / "benchmarks" / "data" / "calibration.txt"
    monkeypatch.setattr(sys, "argv", [str(file), str(tiny), str(text), "2", str(tmp_path / "out")])
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    runpy.run_path(str(file), run_name="__main__")
    saved = quant.load(tmp_path / left)
    assert any(isinstance(module, quant.QuantLinear) for module in saved.modules())
    assert saved(torch.arange(8)[None]).logits.isfinite().all()
