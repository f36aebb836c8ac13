"""The model that a caller passes is the one that is quantized: its modes, hooks and forwards stay as they were."""

import copy

import pytest
import torch
from torch import nn

from quant.api.quantize import quantize
from quant.training.qat import prepare_qat

ROWS = torch.randn(8, 4, 64, generator=torch.Generator().manual_seed(0))


class Noisy(nn.Module):
    """Dropout before the second linear, a BatchNorm behind it: neither may act while the model is quantized."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.out = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 8)
        self.drop, self.norm = nn.Dropout(0.3), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.norm(self.b(self.drop(torch.tanh(self.a(x)))))))


def modes(model: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


@pytest.mark.parametrize(("recipe", "effort"), [("nvfp4", 2), ("int8_static", 0)])
def test_a_model_in_training_is_quantized_as_in_evaluation_and_keeps_its_modes(recipe: str, effort: int) -> None:
    model = Noisy().train()
    model.a.eval()  # a layer that the caller froze
    before, expected = modes(model), quantize(Noisy().eval(), recipe, ROWS, effort=effort).model
    buffers = copy.deepcopy(dict(model.norm.named_buffers()))
    result = quantize(model, recipe, ROWS, effort=effort).model
    assert modes(result) == before
    state = result.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in expected.state_dict().items())
    assert all(torch.equal(tensor, buffers[name]) for name, tensor in model.norm.named_buffers())


def test_a_forward_loop_runs_in_evaluation_mode() -> None:
    seen = []

    def loop(model: nn.Module) -> None:
        seen.append(model.training or model.drop.training)
        model(ROWS)

    assert quantize(Noisy().train(), "int8_static", forward_loop=loop, effort=0).model.training
    assert seen == [False]


def test_a_plan_that_fails_gives_the_modes_back() -> None:
    model = Noisy().train()
    model.norm.eval()
    before = modes(model)
    rows = ROWS.clone()
    rows[0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="calibration row 0"):
        quantize(model, "int8_static", rows, effort=0)
    assert modes(model) == before


def test_training_under_the_rounding_keeps_modes() -> None:
    model = Noisy().train()
    model.b.eval()
    before = modes(model)
    prepare_qat(model, "int8_static", ROWS)
    assert {name: module.training for name, module in model.named_modules() if name in before} == before
