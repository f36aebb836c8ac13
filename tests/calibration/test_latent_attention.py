"""The scale of a latent cache is compared with the tensors that transformers' own cache holds after the same rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from safetensors.torch import load_file

import quant
from quant.calibration.attention_scales import collect_attention_scales
from quant.formats.format import FORMATS
from quant.generate.quantized_attention import quantized_attention
from quant.recipes.blocks import cache_argument

transformers = pytest.importorskip("transformers")

ROWS = torch.randint(3, 64, (4, 16), generator=torch.Generator().manual_seed(0))
SIZES = {
    **tiny_models.DECODER, "num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 4,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    "pad_token_id": 0,
}  # fmt: skip
NAMES = ["DeepseekV2", "DeepseekV3", "Glm4MoeLite"]


def latent_model(name: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    sizes = {**SIZES, **({"head_dim": 16} if name != "Glm4MoeLite" else {})}
    return tiny_models.build(name, "ForCausalLM", sizes, dtype=dtype, gain=2.0)


class RecordingCache(transformers.DynamicCache):  # type: ignore[misc]
    """Keeps the largest magnitude of each layer's rows."""

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **options: Any) -> Any:
        self.amax = getattr(self, "amax", {})
        largest = max(float(keys.detach().abs().max()), float(values.detach().abs().max()))
        self.amax[layer_idx] = max(self.amax.get(layer_idx, 0.0), largest)
        return super().update(keys, values, layer_idx, *args, **options)


@pytest.mark.parametrize("granularity", ["tensor", "head"])
@pytest.mark.parametrize("name", NAMES)
def test_scales_are_those_of_the_cached_rows(name: str, granularity: str) -> None:
    model = latent_model(name)
    cache = RecordingCache(config=model.config)
    with torch.no_grad():
        model(ROWS, **cache_argument(model, cache))
    # transformers 5.24 caches the latent vector and the rotary key; before, expanded keys.
    if cache.layers[0].keys.shape[-1] != SIZES["kv_lora_rank"]:
        pytest.skip("this transformers caches expanded keys")
    scales = collect_attention_scales(
        model, ROWS, kv_format=FORMATS["fp8"], attention_format=None, granularity=granularity
    )
    for layer, largest in cache.amax.items():
        of_module = scales[f"model.layers.{layer}.self_attn"]
        assert of_module.k is not None and of_module.v is not None
        assert float(of_module.k) == float(of_module.v) == pytest.approx(largest / 448, rel=1e-6)


def test_a_checkpoint_holds_them(tmp_path: Path) -> None:
    model = latent_model("DeepseekV3")
    with pytest.raises(ValueError, match=r'no scale for each \(fp8_head\); use kv_cache="fp8"'):
        quant.quantize(model, "fp8_channel", ROWS, kv_cache="fp8_head", effort=0)
    done = quant.quantize(model, "fp8_channel", ROWS, kv_cache="fp8", effort=0)
    quant.save(done.model, done.plan, tmp_path / "out")
    stored = load_file(tmp_path / "out/model.safetensors")
    scales = collect_attention_scales(done.model, ROWS, kv_format=FORMATS["fp8"], attention_format=None)
    for name, of_module in scales.items():
        assert of_module.k is not None
        for operand in "kv":
            assert float(stored[f"{name}.{operand}_scale"]) == pytest.approx(float(of_module.k), rel=2**-8)
    assert not quant.verify(tmp_path / "out").findings


def test_the_forward_pass_rounds_the_cached_rows() -> None:
    """Rounded by hand: the output of the norm and the rotary key, and nothing of the expanded keys and values."""
    model = latent_model("DeepseekV3", torch.float32)
    scale = torch.tensor([0.01])
    attentions = [layer.self_attn for layer in model.model.layers]
    for attention in attentions:
        attention.register_buffer("k_scale", scale)
        attention.register_buffer("v_scale", scale)
    with torch.no_grad(), quantized_attention(model, kv_cache="fp8"):
        found = model(ROWS).logits
    plain = model(ROWS).logits

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale

    handles = []
    for attention in attentions:
        handles.append(attention.kv_a_layernorm.register_forward_hook(lambda m, a, out: rounded(out)))
        expand = type(attention).expand_kv
        attention.expand_kv = lambda latent, rotary, a=attention, e=expand: e(a, latent, rounded(rotary))
    with torch.no_grad():
        expected = model(ROWS).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert (expected - plain).abs().max() > 1e-3
