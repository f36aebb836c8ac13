"""Learned scales train under an optimizer's usual settings: weight decay, and rates that suit the weights."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models
import torch

import quant
from quant.formats.format import FORMATS
from quant.training.qat_layers import RoundedWeight, learned_step

ROWS = torch.randint(0, 64, (4, 24), generator=torch.Generator().manual_seed(7))


def prepared(recipe: str) -> Any:
    model = tiny_models.llama(num_hidden_layers=1, gain=2.0).requires_grad_(True)
    quant.prepare_qat(model, recipe, ROWS, solver="mse", scales="learned")
    return model


def layers_of(model: Any) -> list[RoundedWeight]:
    return [module for module in model.modules() if isinstance(module, RoundedWeight)]


def test_weight_decay_alone_draws_scales_to_those_of_the_solver() -> None:
    """On the logarithm's origin; a decayed step would end at zero, and its block with it."""
    model = prepared("nvfp4a16")
    start = {id(layer): layer.start_step.clone() for layer in layers_of(model)}  # type: ignore[union-attr]
    shifts = [layer.range_shift for layer in layers_of(model)]
    for shift in shifts:
        shift.data.uniform_(-0.05, 0.05, generator=torch.Generator().manual_seed(0))  # type: ignore[union-attr]
    optimizer = torch.optim.AdamW(shifts, 1e-2, weight_decay=1.0)  # type: ignore[arg-type]
    for shift in shifts:
        shift.grad = torch.zeros_like(shift)  # type: ignore[union-attr, arg-type]
    for _ in range(600):
        optimizer.step()
    for layer in layers_of(model):
        torch.testing.assert_close(layer.step(), start[id(layer)], rtol=0.02, atol=0)


@pytest.mark.parametrize("recipe", ["nvfp4a16", "fp8"])
def test_scales_stay_positive_and_near_the_weights_under_adamw(recipe: str) -> None:
    model = prepared(recipe)
    before = model(ROWS, labels=ROWS).loss.item()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.1)
    for _ in range(30):
        optimizer.zero_grad()
        loss = model(ROWS, labels=ROWS).loss
        loss.backward()
        optimizer.step()
    assert loss.item() < before
    for layer in layers_of(model):
        step = layer.step()
        assert step is not None and bool((step > 0).all())
        # An FP8 step is 1/448 of its weights' range: updates of its own size would have made it many times larger.
        owner = layer if layer.start_step is not None else layer.fusion.members[0]
        ratio = step / owner.start_step  # type: ignore[operator]
        assert float(ratio.detach().min()) > 0.3 and float(ratio.detach().max()) < 3


def test_an_update_moves_the_range_of_an_average_block_as_far_as_weights() -> None:
    start, format = torch.tensor([[0.01, 0.03]]), FORMATS["nvfp4"]
    moved = learned_step(start, torch.full((1, 2), 1e-4), format) - start
    assert float(moved.mean()) * format.element.max == pytest.approx(1e-4, rel=1e-2)
    limits = learned_step(start, torch.tensor([[torch.finfo(torch.float32).max, -1e30]]), format)
    assert bool(limits.isfinite().all()) and bool((limits > 0).all())
