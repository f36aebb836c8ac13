"""A model with tensors that accelerate has offloaded is refused by the tensor's name, before any work."""

from pathlib import Path

import pytest
import tiny_models
import torch

import quant
from quant.base.errors import UserError

transformers = pytest.importorskip("transformers", reason="the extra hf")
pytest.importorskip("accelerate", reason="the extra hf")

IN_MEMORY = dict.fromkeys(
    ("model.embed_tokens", "model.layers.0", "model.layers.1.self_attn", "model.layers.1.mlp",
     "model.layers.1.input_layernorm", "model.layers.1.post_attention_layernorm", "model.norm", "model.rotary_emb",
     "lm_head"),
    "cpu",
)  # fmt: skip


@pytest.mark.parametrize(
    "part", ["lm_head", "model.norm", "model.embed_tokens", "model.layers.1.input_layernorm", "model.layers.1.mlp"]
)
def test_parts_on_the_disk_are_refused(part: str, tmp_path: Path) -> None:
    tiny_models.llama(tie_word_embeddings=False).save_pretrained(tmp_path / "m")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "m", device_map=IN_MEMORY | {part: "disk"}, offload_folder=tmp_path / "offload"
    )
    ids = torch.randint(3, 60, (2, 16))
    before = model(ids).logits
    for recipe in ("nvfp4a16", "nvfp4"):
        with pytest.raises(UserError, match=rf"^{part}.*on the meta device.*it is offloaded.*without offloading"):
            quant.quantize(model, recipe, ids)
    assert torch.equal(model(ids).logits, before)  # it is what it was


def test_a_map_that_holds_all_in_memory_is_right(tmp_path: Path) -> None:
    tiny_models.llama(tie_word_embeddings=False).save_pretrained(tmp_path / "m")
    auto, ids = transformers.AutoModelForCausalLM, torch.randint(3, 60, (2, 16))
    mapped = quant.quantize(auto.from_pretrained(tmp_path / "m", device_map=IN_MEMORY), "nvfp4", ids)
    plain = quant.quantize(auto.from_pretrained(tmp_path / "m"), "nvfp4", ids)
    assert torch.equal(mapped.model(ids).logits, plain.model(ids).logits)


def test_a_model_that_was_never_loaded_is_refused() -> None:
    with torch.device("meta"):
        model = tiny_models.llama(seed=None)
    with pytest.raises(UserError, match=r"on the meta device.*load the model first"):
        quant.quantize(model, "nvfp4a16")
