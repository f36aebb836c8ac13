"""Adapters of PEFT other than LoRA compute on quantized linears what they compute on the dequantized ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from adapter_samples import dequantized
from torch import nn

import quant

peft = pytest.importorskip("peft", reason="the extra training")

IDS = torch.arange(24).view(2, 12)
TARGETS = ["q_proj", "v_proj", "down_proj"]
CONFIGS: dict[str, Any] = {
    "ia3": lambda: peft.IA3Config(target_modules=TARGETS, feedforward_modules=["down_proj"], init_ia3_weights=False),
    "vera": lambda: peft.VeraConfig(target_modules=TARGETS, r=8, d_initial=0.5, init_weights=False),
    "oft": lambda: peft.OFTConfig(target_modules=TARGETS, oft_block_size=8, init_weights=False),
    "adalora": lambda: peft.AdaLoraConfig(target_modules=TARGETS, init_r=4, total_step=10),
}


def adapted(model: nn.Module, config: Any) -> Any:
    torch.manual_seed(0)
    model = peft.get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dim():
            generator = torch.Generator().manual_seed(len(name))
            with torch.no_grad():
                # AdaLoRA's is a product of three, each small.
                size = 0.3 if isinstance(config, peft.AdaLoraConfig) else 0.05
                parameter.add_(size * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("kind", CONFIGS)
def test_outputs_gradients_and_the_merge_are_those_of_peft_on_the_dequantized_model(kind: str, tmp_path: Path) -> None:
    done = quant.quantize(tiny_models.llama(gain=2.0), "nvfp4a16")
    plain = dequantized(done.model)
    before = done.model(IDS).logits.detach()
    model = adapted(done.model, quant.lora(CONFIGS[kind](), done.model))
    twin = adapted(plain, CONFIGS[kind]())
    losses = []
    for each in (model, twin):
        output = each(input_ids=IDS, labels=IDS)
        output.loss.backward()
        losses.append(output.logits.detach())
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(losses[0], before, atol=1e-2)
    gradients = {name: parameter.grad for name, parameter in twin.named_parameters() if parameter.grad is not None}
    own = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert own.keys() == gradients.keys() and len(own) >= 2 * len(TARGETS)
    for name, gradient in gradients.items():
        torch.testing.assert_close(own[name], gradient, rtol=1e-3, atol=1e-5)
    with pytest.raises(quant.UserError, match=r"merged by quant\.merge_lora"):
        model.merge_and_unload()
    trained = model(input_ids=IDS).logits.detach()
    merged = quant.merge_lora(model)
    assert {result.name.rpartition(".")[2] for result in merged.layers} >= set(TARGETS)
    after = merged.model(IDS).logits.detach()
    # W changes, and is rounded again: closer to what was trained than the base is.
    assert float((after - trained).norm()) < 0.6 * float((before - trained).norm())
    quant.save(merged.model, merged.plan, tmp_path / "out")
    assert torch.equal(quant.load(tmp_path / "out")(IDS).logits, merged.model(IDS).logits)


def test_a_model_without_its_adapters_is_the_quantized_one() -> None:
    done = quant.quantize(tiny_models.llama(gain=2.0), "nvfp4a16")
    before = done.model(IDS).logits
    model = adapted(done.model, quant.lora(CONFIGS["ia3"](), done.model))
    base = model.unload()
    assert torch.equal(base(IDS).logits, before)
    again = adapted(base, quant.lora(peft.LoraConfig(r=4, target_modules=TARGETS), base))
    again(input_ids=IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None for name, p in again.named_parameters() if "lora_" in name)
