"""Llama 4 as it is released is calibrated on text and runs; transformers 5.24 stops in its own forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch

import quant
from quant.models.huggingface import patch_forward

transformers = pytest.importorskip("transformers")

IDS = torch.arange(3, 35).view(2, 16)
SIZES = {
    "text_config": {
        **tiny_models.DECODER, "intermediate_size": 32, "intermediate_size_mlp": 128, "head_dim": 16,
        "num_local_experts": 4, "layer_types": ["chunked_attention", "full_attention"], "pad_token_id": 0,
    },
    "vision_config": {
        **tiny_models.IMAGES, "intermediate_size": 256, "vision_output_dim": 64, "projector_input_dim": 64,
        "projector_output_dim": 64,
    },
    "image_token_index": 63,
}  # fmt: skip


def llama4() -> Any:
    return tiny_models.build("Llama4", "ForConditionalGeneration", SIZES, dtype=torch.bfloat16, gain=2.0)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits.float()  # type: ignore[no-any-return]


def test_the_forward_is_that_of_the_language_model() -> None:
    model = llama4()
    alone = model.language_model(IDS).logits
    for _ in range(2):  # twice is once
        patch_forward(model)
    assert len(model.language_model._forward_hooks) == 1
    torch.testing.assert_close(logits(model), alone.float(), rtol=0, atol=0)


@pytest.mark.parametrize("in_memory", [False, True])
def test_it_is_calibrated_on_text(in_memory: bool, tmp_path: Path) -> None:
    llama4().save_pretrained(tmp_path / "model")
    model = llama4() if in_memory else quant.open_model(tmp_path / "model").model
    assert model is not None
    done = quant.quantize(model, "fp8", IDS, exclude=["vision_model*", "*projector*"], solver="mse")
    reference = logits(patch_forward(llama4()))
    with pytest.warns(UserWarning, match="Llama4ForConditionalGeneration, which quant.load mends"):
        quant.save(done.model, done.plan, tmp_path / "out")
    for found in (logits(done.model), logits(quant.load(tmp_path / "out"))):
        assert (found - reference).norm() / reference.norm() < 0.25
