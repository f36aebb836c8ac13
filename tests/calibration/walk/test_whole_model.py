"""Rounding for the whole model: the residual term and gradients lower the errors behind the last block."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tiny_models
import torch
from torch import nn

import quant
from quant.calibration.statistics import MomentSum
from quant.calibration.walk.block import FusedExperts
from quant.calibration.walk.transform import _scale_gradients
from quant.kernels.linear.experts import experts_forward
from quant.recipes.layers import LayerKind
from quant.run.api import quantize


def _rows(count: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 60, (count, 32), generator=torch.Generator().manual_seed(seed))


def _quantized(model: nn.Module, solver: str, recipe: str = "nvfp4a16") -> Any:
    return quantize(copy.deepcopy(model), recipe, _rows(32, 0), solver=solver)


@torch.no_grad()
def _errors(model: nn.Module, original: nn.Module) -> tuple[float, float]:
    """Squared error of the hidden states behind the last block, and KL divergence, on other rows."""
    rows = _rows(32, 1)
    outputs = [each(rows, output_hidden_states=True) for each in (original, model)]
    hidden = [output.hidden_states[-1] for output in outputs]
    before, after = (output.logits.float().log_softmax(-1) for output in outputs)
    kl = (before.exp() * (before - after)).sum(-1).mean()
    return float((hidden[0] - hidden[1]).square().mean()), float(kl)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_residual_term_lowers_the_error_behind_the_last_block(family: str) -> None:
    model = getattr(tiny_models, family)(num_hidden_layers=4, gain=2)
    plain, with_stream = (_errors(_quantized(model, solver).model, model) for solver in ("gptq_plain", "gptq"))
    assert with_stream[0] < 0.99 * plain[0]


def test_experts_make_up_for_their_share_of_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the stream is off by a token's one expert, its weight grows by up to half, by less with few tokens."""
    monkeypatch.setattr("quant.calibration.statistics.STRENGTH", 0.0)
    keep_inputs = FusedExperts._keep_inputs

    def keep(self: FusedExperts, error: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> None:
        output = experts_forward(self.module, hidden, index, weights)
        keep_inputs(self, lambda path, index: output, hidden, index, weights)

    monkeypatch.setattr(FusedExperts, "_keep_inputs", keep)
    model = tiny_models.mixtral(num_hidden_layers=1, num_experts_per_tok=1, intermediate_size=32, gain=2)
    before = model.model.layers[0].mlp.experts.down_proj.detach().clone()
    experts = _quantized(model, "gptq").model.model.layers[0].mlp.experts.down_proj
    after = torch.stack([experts.dense(index) for index in range(len(before))])
    growth = (after * before).sum((1, 2)) / before.square().sum((1, 2))
    assert bool((growth > 1.03).all()) and 1.2 < float(growth.max()) < 1.6


def test_kfac_lowers_the_divergence_of_the_model() -> None:
    model = tiny_models.llama(num_hidden_layers=3, gain=3)
    one, two = (_errors(_quantized(model, solver).model, model) for solver in ("gptq", "kfac"))
    assert two[1] < 0.97 * one[1]


@pytest.mark.parametrize("width", [None, 4])
def test_scales_that_are_folded_into_a_producer_scale_its_gradients(width: int | None) -> None:
    """Outputs y / d have gradients d g, so that their second moment is D A D."""
    gradients = torch.randn(50, 10)
    total = MomentSum(width)
    total.add(gradients, rows=5)
    group = SimpleNamespace(names=["k", "v"], outputs=total.stats())
    targets = {"k": torch.zeros(4, 3), "v": torch.zeros(6, 3)}
    divisor = torch.rand(6) + 0.5
    before = group.outputs.blocks_of(10)
    _scale_gradients(cast(Any, SimpleNamespace(groups=[group], targets=targets)), "v", divisor)
    scale = torch.cat([torch.ones(4), divisor])
    after = torch.block_diag(*group.outputs.blocks_of(10))
    torch.testing.assert_close(after, scale[:, None] * torch.block_diag(*before) * scale)


def test_the_plan_says_where_neither_applies() -> None:
    model = tiny_models.qwen3_moe(gain=2)
    result = _quantized(model, "kfac")
    experts = [layer for layer in result.plan.quantized if layer.kind == LayerKind.EXPERTS]
    assert experts and not any("as by gptq" in layer.reason for layer in experts)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                return self.second(self.first(x).relu())

    plain = nn.Sequential(*(Block() for _ in range(3)))
    plan = quant.make_plan(plain, "nvfp4a16", solver="kfac", run=lambda model: model(torch.randn(4, 64)))
    result = quantize(plain, plan, torch.randn(8, 64))
    reasons = [layer.reason for layer in result.plan.quantized]
    assert sum("no layer of its block was seen to add to the residual stream" in reason for reason in reasons) == 3
    assert all("as by gptq: no gradient" in reason for reason in reasons)
