"""Fused experts train with rounded products of each expert's matrix, and are packed as they were trained."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from torch import nn

import quant
from quant.training.low_precision.experts import trained_layers

IDS = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(3))


def _experts(model: Any) -> Any:
    return model.model.layers[0].mlp.experts


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "fp8_rowwise", "fp8_tensorwise"])
def test_experts_are_evaluated_packed_and_saved_as_they_train(name: str, tmp_path: Path) -> None:
    model = tiny_models.qwen3_moe(gain=3.0).train()
    keys, parameters = list(model.state_dict()), dict(model.named_parameters())
    before = model.config._experts_implementation
    report = quant.to_low_precision_training(model, name)
    assert {"model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"} <= set(report.converted)
    assert list(model.state_dict()) == keys
    assert all(parameter is parameters[key] for key, parameter in model.named_parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    evaluated = model.eval()(IDS).logits
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(each(IDS).logits, evaluated)
    plain = copy.deepcopy(model)
    quant.from_low_precision_training(plain)
    assert plain.config._experts_implementation == before
    assert not trained_layers(plain)
    plan = quant.convert_trained(model)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of runtimes that read experts otherwise
        assert torch.equal(model(IDS).logits, evaluated)
        quant.save(model, plan, tmp_path / "out")
        assert torch.equal(quant.load(tmp_path / "out")(IDS).logits, evaluated)


def test_each_expert_is_a_linear_layer_of_its_own() -> None:
    model = tiny_models.qwen3_moe(gain=3.0).train()
    quant.to_low_precision_training(model, "mxfp8")
    experts = _experts(model)
    hidden = torch.randn(12, 64)
    chosen = torch.arange(12)[:, None] % 4  # three tokens for each expert
    hidden.requires_grad_()
    y = experts(hidden, chosen, torch.ones(12, 1))
    y.sum().backward()
    for expert in range(4):
        gate_up, down = nn.Linear(64, 64, bias=False), nn.Linear(32, 64, bias=False)
        twin = nn.ModuleDict({"gate_up": gate_up, "down": down})
        gate_up.weight.data = experts.gate_up_proj.detach()[expert].clone()
        down.weight.data = experts.down_proj.detach()[expert].clone()
        quant.to_low_precision_training(twin, "mxfp8")
        rows = hidden.detach()[expert::4].requires_grad_()
        gate, up = gate_up(rows).chunk(2, dim=-1)
        own = down(nn.functional.silu(gate) * up)
        own.sum().backward()
        assert torch.equal(own, y[expert::4])
        assert torch.equal(rows.grad, hidden.grad[expert::4])
        assert torch.equal(gate_up.weight.grad, experts.gate_up_proj.grad[expert])
        assert torch.equal(down.weight.grad, experts.down_proj.grad[expert])


def test_the_input_scale_of_experts_is_that_of_the_largest_input_of_any() -> None:
    model = tiny_models.qwen3_moe().train()
    quant.to_low_precision_training(model, "nvfp4")
    experts = _experts(model)
    for largest in (2.0, 9.0, 4.0):
        hidden = torch.rand(8, 64)
        hidden[3, 5] = largest
        experts(hidden, torch.arange(8)[:, None] % 4, torch.ones(8, 1))
    stack = trained_layers(model)["model.layers.0.mlp.experts.gate_up_proj"]
    assert stack.low_precision.amax["x"].values[:4].tolist() == [4.0, 9.0, 2.0, -1.0]


def test_experts_that_cannot_train_say_why() -> None:
    report = quant.to_low_precision_training(tiny_models.qwen3_moe(), "fp8_delayed")
    assert report.in_16bit["model.layers.0.mlp.experts.down_proj"] == (
        "experts: fp8_delayed would need a history for each of them"
    )
    report = quant.to_low_precision_training(tiny_models.qwen3_moe(), "nvfp4", exclude=["*.experts.*"])
    assert report.in_16bit["model.layers.0.mlp.experts.down_proj"] == "excluded"


def test_a_gradient_of_experts_that_is_not_finite_is_named() -> None:
    model = tiny_models.qwen3_moe().train()
    quant.to_low_precision_training(model, "mxfp8")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(IDS, labels=IDS).loss.backward()
    _experts(model).down_proj.grad[0, 0, 0] = torch.nan
    with pytest.raises(quant.UserError, match=r"^model.layers.0.mlp.experts.down_proj: its gradient holds NaN"):
        optimizer.step()
