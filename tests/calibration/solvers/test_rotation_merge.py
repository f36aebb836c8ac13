"""A model with merged rotations computes what it did before, with every rotated weight really rotated."""

from __future__ import annotations

import copy
from typing import Any

import architectures
import pytest
import tiny_models
import torch
from samples import BASE
from torch import nn

from quant.calibration.solvers.rotation import find_residual, merge_head_rotation, merge_residual_rotation
from quant.kernels.linear.quant_linear import QuantLinear
from quant.kernels.rounding.hadamard import hadamard_transform
from quant.recipes.blocks import capture
from quant.run.api import quantize

IDS = torch.randint(0, 200, (2, 12), generator=torch.Generator().manual_seed(3))


def _run(model: nn.Module) -> Any:
    return model(IDS, use_cache=False).logits


def _logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return _run(model)


def _built(kind: str, **settings: Any) -> Any:
    if kind == "golden":
        transformers = pytest.importorskip("transformers")
        return transformers.AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32).eval()
    sizes = {**tiny_models.DECODER, "vocab_size": 200, "head_dim": 16}
    model = tiny_models.build(kind, "ForCausalLM", sizes, seed=None, **settings)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norm weights and biases that are not what they were initialized to
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


CASES = [
    ("golden", {}),
    ("Llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
    ("Qwen2", {"tie_word_embeddings": False}),
    ("Qwen3", {"tie_word_embeddings": False}),
    ("Gemma", {"tie_word_embeddings": False, "hidden_activation": "gelu"}),
    ("Granite", {"tie_word_embeddings": False, "residual_multiplier": 0.5, "embedding_multiplier": 3.0}),
]


@pytest.mark.parametrize(("kind", "settings"), CASES, ids=[f"{kind}-{i}" for i, (kind, _) in enumerate(CASES)])
def test_the_model_computes_what_it_did(kind: str, settings: dict[str, Any]) -> None:
    model = _built(kind, **settings).double()
    before = _logits(model)
    embedding = model.get_input_embeddings().weight.detach().clone()
    residual = merge_residual_rotation(model, _run)
    after = _logits(model)
    assert float((after - before).norm() / before.norm()) < 1e-6  # norms and rotary embeddings work in float32
    block = 128 if kind == "golden" else 64
    assert torch.equal(model.get_input_embeddings().weight, hadamard_transform(embedding, block))
    suffixes = {name.rpartition(".")[2] for name in residual.writers}
    assert suffixes == {"embed_tokens", "o_proj", "down_proj"}
    assert len(residual.readers) == 2 * model.config.num_hidden_layers + 1


def test_in_float32_too() -> None:
    model = _built("golden")
    before = _logits(model)
    merge_residual_rotation(model, _run)
    assert float((_logits(model) - before).norm() / before.norm()) < 1e-5


def test_a_tied_head_is_refused_and_left_alone() -> None:
    model = _built("Llama", tie_word_embeddings=True)
    before = {n: p.clone() for n, p in model.state_dict().items()}
    with pytest.raises(ValueError, match="lm_head shares its weight with the embedding"):
        merge_residual_rotation(model, _run)
    assert all(torch.equal(before[n], p) for n, p in model.state_dict().items())


def test_what_a_rotation_cannot_pass_is_refused_and_left_alone() -> None:
    opt = tiny_models.opt(vocab_size=200, tie_word_embeddings=False)
    for model in (opt, _built("Gemma2", hidden_activation="gelu", tie_word_embeddings=False)):
        before = {n: p.clone() for n, p in model.state_dict().items()}
        with pytest.raises(ValueError, match=r"not an RMS norm|no linear layer reads this norm"):
            merge_residual_rotation(model, _run)
        assert all(torch.equal(before[n], p) for n, p in model.state_dict().items())


def test_the_tokens_that_try_a_norm_are_of_a_generator_of_their_own() -> None:
    """A training script draws the same numbers after a model was quantized as without."""
    model, state = _built("Llama"), torch.get_rng_state()
    quantize(model, "fp8_channel", IDS, solver="rotation:merge+rtn")
    assert torch.equal(torch.get_rng_state(), state)


def test_a_reader_that_was_not_seen_is_noticed() -> None:
    class Odd(nn.Module):
        """Reads its residual stream past the norm, too."""

        def __init__(self) -> None:
            super().__init__()
            self.embed, self.norm = nn.Embedding(200, 64), nn.RMSNorm(64)
            self.head = nn.Linear(64, 10)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids)
            return self.head(self.norm(x)) + x[..., :10]

    model = Odd()
    before = {n: p.clone() for n, p in model.state_dict().items()}
    assert find_residual(model, lambda m: m(IDS)).writers == ("embed",)
    with pytest.raises(ValueError, match="changes the output"):
        merge_residual_rotation(model, lambda m: m(IDS))
    assert all(torch.equal(before[n], p) for n, p in model.state_dict().items())


@pytest.mark.parametrize(("kind", "settings", "size"), [("golden", {}, 32), ("Qwen2", {}, 16)])
def test_values_are_rotated_within_their_heads(kind: str, settings: dict[str, Any], size: int) -> None:
    model = _built(kind, **settings).double()
    before = _logits(model)
    name = "model.layers.1"
    block, call = model.get_submodule(name), capture(model, [name], lambda: _run(model))[name]
    value = block.self_attn.v_proj.weight.detach().clone()
    assert merge_head_rotation(block, call, "self_attn.v_proj", "self_attn.o_proj") == size
    assert torch.equal(block.self_attn.v_proj.weight, hadamard_transform(value.mT, size).mT)
    assert float((_logits(model) - before).norm() / before.norm()) < 1e-6


def test_no_rotation_passes_a_product_with_a_gate() -> None:
    model = _built("golden")
    before = {n: p.clone() for n, p in model.state_dict().items()}
    name = "model.layers.0"
    call = capture(model, [name], lambda: _run(model))[name]
    assert merge_head_rotation(model.get_submodule(name), call, "mlp.up_proj", "mlp.down_proj") == 0
    assert all(torch.equal(before[n], p) for n, p in model.state_dict().items())


@pytest.mark.parametrize("tied", [False, True])
def test_as_a_solver(tied: bool) -> None:
    model = _built("Llama", tie_word_embeddings=tied)
    before, weights = _logits(model), {n: p.detach().clone() for n, p in model.named_parameters()}
    plan = quantize(model, "fp8_channel", IDS, solver="rotation:merge+rtn").plan
    assert float((_logits(model) - before).norm() / before.norm()) < 0.1
    layers = model.model.layers
    assert all(m.hadamard == 0 for m in model.modules() if isinstance(m, QuantLinear))
    gain = weights["model.layers.1.post_attention_layernorm.weight"]
    plain = weights["model.layers.1.mlp.up_proj.weight"]
    rotated = hadamard_transform((plain * gain).double(), 64)
    up, output = layers[1].mlp.up_proj.dequantize().double(), layers[1].self_attn.o_proj.dequantize().double()
    # FP8 keeps three binary digits.
    torch.testing.assert_close(up, plain.double() if tied else rotated, rtol=0.07, atol=1e-3)
    assert torch.equal(layers[1].post_attention_layernorm.weight, gain if tied else torch.ones(64))
    wanted = hadamard_transform(weights["model.layers.1.self_attn.o_proj.weight"].double(), 16)
    if not tied:
        wanted = hadamard_transform(wanted.t().contiguous(), 64).t()
    torch.testing.assert_close(output, wanted, rtol=0.07, atol=1e-3)
    reasons = {layer.name: layer.reason for layer in plan.quantized}
    assert "blocks of 16" in reasons["model.layers.0.self_attn.o_proj"]
    assert "rotation left out" in reasons["model.layers.0.mlp.down_proj"]
    kept = "shares its weight with the embedding" if tied else "rotated with the residual stream"
    assert kept in reasons["model.layers.0.self_attn.q_proj"]


def test_blocks_that_the_pass_does_not_reach_are_not_rotated() -> None:
    """Tokens do not reach the image encoder of GIT, whose blocks were looked up among those that had run."""
    model = _built("Llama", tie_word_embeddings=False)
    model.model.images = copy.deepcopy(model.model.layers)
    weight = model.model.images[1].mlp.up_proj.weight.detach().clone()
    plan = quantize(model, "fp8_channel", IDS, solver="rotation:merge+rtn").plan
    torch.testing.assert_close(model.model.images[1].mlp.up_proj.dequantize(), weight, rtol=0.07, atol=1e-3)
    reasons = {layer.name: layer.reason for layer in plan.quantized}
    assert "rotation left out" in reasons["model.images.1.mlp.up_proj"]
    assert "rotated with the residual stream" in reasons["model.layers.1.mlp.up_proj"]


def test_a_block_that_does_not_run_in_float64_stays_as_it_is() -> None:
    """XGLM ended in "value cannot be converted to type float without overflow"."""
    model = architectures.build("XGLMForCausalLM", torch.float32)
    weight = model.model.layers[1].self_attn.v_proj.weight.detach().clone()
    plan = quantize(model, "fp8_channel", IDS % 60, solver="rotation:merge+rtn").plan
    assert all("rotation left out" in layer.reason for layer in plan.quantized)
    torch.testing.assert_close(model.model.layers[1].self_attn.v_proj.dequantize(), weight, rtol=0.07, atol=1e-3)
