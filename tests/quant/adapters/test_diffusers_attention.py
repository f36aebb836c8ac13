"""Attention in FP8 as a backend of diffusers: against float64, without a mask, and in a compiled model."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("diffusers", reason="the extra diffusion")

import quant


def _attend(backend: str, *operands: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn

    return dispatch_attention_fn(*operands, attn_mask=mask, backend=AttentionBackendName(backend))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_fp8_attention_is_near_float64_and_masked_calls_stay_in_16_bit(device: str) -> None:
    quant.load_pipeline  # noqa: B018 -- registers the backend
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, tokens, 3, 64, device=device).bfloat16() for tokens in (150, 40, 40))
    y = _attend("blockscale_fp8", q, k, v)
    turned = [x.double().transpose(1, 2) for x in (q, k, v)]
    exact = torch.nn.functional.scaled_dot_product_attention(*turned).transpose(1, 2)
    # E4M3 keeps 4 bits of every operand and of the probabilities.
    assert y.dtype is torch.bfloat16 and 2**-9 < float((y - exact).norm() / exact.norm()) < 2**-4
    mask = torch.arange(40, device=device) < 30
    mask = mask.expand(2, 1, 150, 40)
    assert torch.equal(_attend("blockscale_fp8", q, k, v, mask=mask), _attend("native", q, k, v, mask=mask))
    with pytest.raises(ValueError, match="head dimension 48"):
        _attend("blockscale_fp8", *(x[..., :48] for x in (q, k, v)))


@pytest.mark.slow
def test_a_transformer_takes_the_backend_compiled_too() -> None:
    import diffusers

    quant.load_pipeline  # noqa: B018 -- registers the backend
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=64, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(16, 24, 24),
    )  # fmt: skip
    model = model.bfloat16().eval().requires_grad_(False)
    call = {
        "hidden_states": torch.randn(1, 16, 16).bfloat16(), "encoder_hidden_states": torch.randn(1, 6, 32).bfloat16(),
        "pooled_projections": torch.randn(1, 32).bfloat16(), "timestep": torch.tensor([0.5]),
        "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(6, 3), "return_dict": False,
    }  # fmt: skip
    before = model(**call)[0]
    try:
        model.set_attention_backend("blockscale_fp8")
        y = model(**call)[0]
        assert 0 < float((y - before).norm() / before.norm()) < 0.05
        assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(**call)[0], y)
    finally:
        model.set_attention_backend("native")  # the choice is the whole process's in diffusers
