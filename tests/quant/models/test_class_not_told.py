"""A config that names no class: the class is guessed where every tensor has its place, and else asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch

import quant

pytest.importorskip("transformers")

WHISPER = {
    "vocab_size": 64, "d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_mel_bins": 16,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
LLAVA = {
    "vision_config": {**tiny_models.IMAGES, "model_type": "clip_vision_model", "projection_dim": 64},
    "text_config": {**tiny_models.DECODER, "model_type": "llama"}, "image_token_index": 63,
}  # fmt: skip


def without_class(model: Any, directory: Path) -> Path:
    model.save_pretrained(directory)
    fields = json.loads((directory / "config.json").read_text())
    del fields["architectures"]
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


@pytest.mark.parametrize(
    ("name", "sizes", "lost"), [("Whisper", WHISPER, "encoder"), ("Llava", LLAVA, "lm_head")], ids=["Whisper", "Llava"]
)
def test_a_class_that_would_lose_tensors_is_refused(
    name: str, sizes: dict[str, Any], lost: str, tmp_path: Path
) -> None:
    model = tiny_models.build(name, "ForConditionalGeneration", sizes, dtype=torch.bfloat16)
    directory = without_class(model, tmp_path / "model")
    with pytest.raises(ValueError, match=rf"names no class .*{lost}.*\"{name}ForConditionalGeneration\""):
        quant.open_model(directory)
    fields = json.loads((directory / "config.json").read_text())
    fields["architectures"] = [f"{name}ForConditionalGeneration"]
    (directory / "config.json").write_text(json.dumps(fields))
    opened = quant.open_model(directory).model
    assert {n for n, _ in opened.named_parameters()} == {n for n, _ in model.named_parameters()}


def test_a_class_that_loses_nothing_is_taken(tmp_path: Path) -> None:
    directory = without_class(tiny_models.llama(dtype=torch.bfloat16), tmp_path / "model")
    assert type(quant.open_model(directory).model).__name__ == "LlamaForCausalLM"
