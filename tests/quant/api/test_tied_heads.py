"""Heads that differ from the embedding that their config ties them to: every reader must find the head.

The logits of the model before writing are the reference. The readers are `quant.load`, transformers, and a reader that
goes by the flag alone, as vLLM does: it takes the embedding for the head where config.json says so.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

import quant
from quant.cli.quantize import quantize_command

transformers = pytest.importorskip("transformers")

IDS = torch.arange(3, 35).view(2, 16)
IMAGE_SIZES = {
    "vision_config": {**tiny_models.IMAGES, "model_type": "siglip_vision_model"},
    "text_config": {**tiny_models.DECODER, "head_dim": 16, "model_type": "gemma3_text"},
    "mm_tokens_per_image": 16, "image_token_index": 63, "boi_token_index": 61, "eoi_token_index": 62,
}  # fmt: skip


def untied(model: Any) -> Any:
    """The model with a head of its own, under a config that says that it has none."""
    torch.manual_seed(1)
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.05)
    return model.bfloat16().eval()


def llama() -> Any:
    return untied(tiny_models.llama(tie_word_embeddings=True, dtype=torch.bfloat16, gain=2.0))


def directory_of(model: Any, directory: Path) -> Path:
    """A directory as a fine-tune leaves it: both tensors, and the flag of the model that was trained."""
    model.save_pretrained(directory)
    tensors, fields = load_file(directory / "model.safetensors"), json.loads((directory / "config.json").read_text())
    assert any(name.endswith("lm_head.weight") for name in tensors)
    fields["tie_word_embeddings"] = True
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


def logits(model: Any) -> torch.Tensor:
    options = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(IDS, **options).logits.float()  # type: ignore[no-any-return]


def check_readers(written: Path, reference: torch.Tensor) -> None:
    """Every reader's logits are those of the original, but for INT8's rounding."""
    fields = json.loads((written / "config.json").read_text())
    for table in (fields, fields.get("text_config", {})):
        assert table.get("tie_word_embeddings", False) is False
    for model in (quant.load(written), transformers.AutoModelForCausalLM.from_pretrained(written)):
        error = (logits(model) - reference).norm() / reference.norm()
        assert error < 0.05, (type(model), float(error))
    assert not quant.verify(written).findings


@pytest.mark.parametrize("extra", [[], ["--lm-head", "fp8_channel"]])
def test_a_directory(tmp_path: Path, extra: list[str]) -> None:
    source = directory_of(llama(), tmp_path / "model")
    reference = logits(transformers.AutoModelForCausalLM.from_pretrained(source))
    arguments = [source, "--format", "int8", "--effort", 0, "--device", "cpu", "--out", tmp_path / "out", *extra]
    result = CliRunner().invoke(quantize_command, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    check_readers(tmp_path / "out", reference)


@pytest.mark.parametrize(("lm_head", "shared"), [(None, False), ("int8", False), ("int8", True)])
def test_a_model_in_memory(tmp_path: Path, lm_head: str | None, shared: bool) -> None:
    """A head that *is* the embedding may be quantized too: it gets codes of its own, and the embedding stays."""
    model = llama()
    if shared:
        model.tie_weights()
        assert model.lm_head.weight is model.model.embed_tokens.weight
    reference, embedding = logits(model), model.model.embed_tokens.weight.detach().clone()
    done = quant.quantize(model, "int8", effort=0, lm_head=lm_head)
    assert torch.equal(done.model.model.embed_tokens.weight, embedding)
    quant.save(done.model, done.plan, tmp_path / "saved")
    check_readers(tmp_path / "saved", reference)
    done.model.save_pretrained(tmp_path / "pretrained")
    check_readers(tmp_path / "pretrained", reference)


def test_a_language_model_inside_another(tmp_path: Path) -> None:
    """Servers read the flag of text_config, transformers that of the whole."""
    model = untied(tiny_models.build("Gemma3", "ForConditionalGeneration", IMAGE_SIZES, tie_word_embeddings=True))
    model.config.text_config.tie_word_embeddings = True
    reference = logits(model)
    done = quant.quantize(model, "int8", effort=0)
    quant.save(done.model, done.plan, tmp_path / "out")
    fields = json.loads((tmp_path / "out/config.json").read_text())
    assert fields["tie_word_embeddings"] is False and fields["text_config"]["tie_word_embeddings"] is False
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    for model in (quant.load(tmp_path / "out"), theirs):
        torch.testing.assert_close(logits(model), reference, rtol=0.1, atol=0.1 * float(reference.abs().max()))


@pytest.mark.parametrize("name", ["Bart", "T5"])
def test_other_tensors_under_the_same_flag(tmp_path: Path, name: str) -> None:
    """The embeddings of encoder and decoder stay one; T5's flag means the scale of its outputs too."""
    sizes = {
        "Bart": {"vocab_size": 64, "d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64,
                 "decoder_ffn_dim": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4},
        "T5": {"vocab_size": 64, "d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 4},
    }[name]  # fmt: skip
    model = untied(tiny_models.build(name, "ForConditionalGeneration", sizes, tie_word_embeddings=True))
    reference = logits(model)
    done = quant.quantize(model, "int8", effort=0)
    quant.save(done.model, done.plan, tmp_path / "out")
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    for loaded in (quant.load(tmp_path / "out"), theirs):
        error = (logits(loaded) - reference).norm() / reference.norm()
        assert error < 0.1, (type(loaded), float(error))


@pytest.mark.parametrize("copied", [False, True])
def test_equal_tensors_are_stored_once(tmp_path: Path, copied: bool) -> None:
    model = tiny_models.llama(tie_word_embeddings=True, dtype=torch.bfloat16)
    if copied:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    done = quant.quantize(model, "int8", effort=0)
    quant.save(done.model, done.plan, tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is True
    assert "lm_head.weight" not in load_file(tmp_path / "out/model.safetensors")


def test_checkpoints_of_others_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    model = llama()
    reference = logits(model)
    done = quant.quantize(model, "fp8", torch.arange(64).view(2, 32), effort=0)
    quant.save(done.model, done.plan, tmp_path / "out")
    file = tmp_path / "out/config.json"
    fields = json.loads(file.read_text())
    file.write_text(json.dumps({**fields, "tie_word_embeddings": True}))
    error = (logits(quant.load(tmp_path / "out")) - reference).norm() / reference.norm()
    assert error < 0.1
    changed, head = quant.verify(tmp_path / "out").findings
    assert "config.json: is not what was written" in changed.what
    assert "lm_head.weight is not the embedding" in head.what
    # Written again in another layout, the flag is right.
    quant.convert(tmp_path / "out", tmp_path / "modelopt", "modelopt")
    assert json.loads((tmp_path / "modelopt/config.json").read_text())["tie_word_embeddings"] is False
