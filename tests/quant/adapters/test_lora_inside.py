"""LoRA on a model in QAT trains the sum W + s·BA under its rounding, and exactly that is packed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from torch import nn

import quant
from quant.training.qat_layers import QATLinear

peft = pytest.importorskip("peft", reason="the extra training")

ROWS = torch.randint(0, 64, (4, 24), generator=torch.Generator().manual_seed(7))


def prepared(recipe: str = "nvfp4", **options: Any) -> Any:
    model = tiny_models.llama(num_hidden_layers=1, gain=2.0).requires_grad_(True)
    quant.prepare_qat(model, recipe, ROWS, **options)
    return model


def inside(model: nn.Module, **options: Any) -> Any:
    config = quant.lora(peft.LoraConfig(**{"r": 4, "target_modules": "all-linear", **options}), model)
    torch.manual_seed(0)
    return peft.get_peft_model(model, config)


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ROWS).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("recipe", "options"),
    [("nvfp4", {"solver": "rtn"}), ("nvfp4", {"solver": "gptq"}), ("fp8", {"solver": "mse", "scales": "learned"}),
     ("mxfp4", {}), ("nvfp4", {"solver": "gptq", "dtype": torch.bfloat16})],
)  # fmt: skip
@pytest.mark.parametrize("lora", [{}, {"use_rslora": True}])
def test_the_trained_sum_is_packed(recipe: str, options: Any, lora: Any, tmp_path: Path) -> None:
    model = prepared(recipe, **options)
    before = logits(model)
    tuned = inside(model, **lora)
    assert torch.equal(logits(tuned), before)  # B is zero
    optimizer = torch.optim.Adam([p for p in tuned.parameters() if p.requires_grad], 3e-2)
    for _ in range(3):
        optimizer.zero_grad()
        loss = tuned(input_ids=ROWS, labels=ROWS).loss
        loss.backward()
        optimizer.step()
    trained = logits(tuned)
    assert not torch.equal(trained, before)
    with tuned.disable_adapter():
        assert torch.equal(logits(tuned), before)
    merged = tuned.merge_and_unload()
    assert torch.equal(logits(merged), trained)
    plan = quant.pack(merged)
    assert torch.equal(logits(merged), trained)
    quant.save(merged, plan, tmp_path / "out")
    assert torch.equal(logits(quant.load(tmp_path / "out")), trained)


def test_gradients_are_those_of_the_sum() -> None:
    """With W + s·BA as the weight itself, its gradient G gives s·Bᵀ G for A and s·G Aᵀ for B."""
    model = prepared("nvfp4", solver="gptq")  # frozen scales, which clip
    twin = copy.deepcopy(model)
    tuned = inside(model, target_modules=["q_proj", "k_proj", "gate_proj"])
    for name, parameter in tuned.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    factors = {}
    for name, module in tuned.get_base_model().named_modules():
        if hasattr(module, "lora_A"):
            down, up, scaling = module.lora_A["default"].weight, module.lora_B["default"].weight, module.scaling
            factors[name] = (down, up, scaling["default"])
            twin.get_submodule(name).weight.data += up.detach() @ down.detach() * scaling["default"]
    assert len(factors) == 3
    for each in (tuned, twin):
        each(input_ids=ROWS, labels=ROWS).loss.backward()
    for name, (down, up, scaling) in factors.items():
        whole = twin.get_submodule(name).weight.grad.double()
        torch.testing.assert_close(down.grad.double(), scaling * up.double().T @ whole, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(up.grad.double(), scaling * whole @ down.double().T, rtol=1e-4, atol=1e-6)


def test_fused_layers_measure_one_scale_of_their_sums() -> None:
    """The second level of NVFP4 is that of q, k and v with their adapters, also where only one has changed."""
    tuned = inside(prepared("nvfp4a16", solver="rtn"))
    attention = tuned.get_base_model().model.layers[0].self_attn
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    attention.q_proj(x)
    with torch.no_grad():
        attention.k_proj.lora_B["default"].weight.fill_(1.0)  # within a pass of the group
    attention.v_proj(x)
    whole = [member.matrix.detach().abs().max() for member in attention.q_proj.base_layer.fusion.members]
    for layer in (attention.q_proj, attention.k_proj, attention.v_proj):
        _, second = layer.base_layer.current_scales()
        assert float(second) == pytest.approx(float(max(whole)) / (6 * 448), rel=1e-6)
    expected = nn.functional.linear(x, attention.v_proj.base_layer.packed_weight().dequantize())
    torch.testing.assert_close(attention.v_proj(x), expected, rtol=1e-5, atol=1e-5)


def test_adapters_that_were_taken_off_or_saved(tmp_path: Path) -> None:
    tuned = inside(prepared())
    for name, parameter in tuned.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    trained = logits(tuned)
    tuned.save_pretrained(tmp_path)
    fresh = prepared()
    config = quant.lora(peft.LoraConfig.from_pretrained(tmp_path), fresh)
    assert torch.equal(logits(peft.PeftModel.from_pretrained(fresh, tmp_path, config=config)), trained)
    base = tuned.unload()
    assert torch.equal(logits(base), logits(prepared()))
    assert all(module.adapter is None for module in base.modules() if isinstance(module, QATLinear))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lora_dropout": 0.1}, r"lora_dropout=0\.1: not for LoRA inside of the rounding"),
        ({"use_dora": True}, "use_dora=True: not for LoRA inside"),
        ({"lora_bias": True}, "lora_bias=True: not for LoRA inside"),
    ],
)
def test_what_cannot_be_inside_is_refused_by_name(options: Any, text: str) -> None:
    with pytest.raises(quant.UserError, match=text):
        inside(prepared("nvfp4a16"), **options)


def test_other_adapters_and_orders_are_refused_by_name() -> None:
    model = prepared("nvfp4a16")
    with pytest.raises(quant.UserError, match="a IA3Config cannot go inside of its rounding"):
        quant.lora(peft.IA3Config(), model)
    tuned = inside(model)
    with pytest.raises(quant.UserError, match=r"merge it first.*quant\.pack\(model\.merge_and_unload\(\)\)"):
        quant.pack(tuned)
    before = peft.get_peft_model(tiny_models.llama(num_hidden_layers=1), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(quant.UserError, match=r"q_proj: has an adapter of PEFT.*put new ones on afterwards"):
        quant.prepare_qat(before.get_base_model(), "nvfp4a16")
    done = quant.quantize(tiny_models.llama(num_hidden_layers=1), "nvfp4a16")
    over = peft.get_peft_model(done.model, quant.lora(peft.LoraConfig(target_modules=["q_proj"]), done.model))
    with pytest.raises(quant.UserError, match=r"q_proj: has an adapter of PEFT.*put new ones on afterwards"):
        quant.prepare_qat(over.get_base_model(), done.plan)
