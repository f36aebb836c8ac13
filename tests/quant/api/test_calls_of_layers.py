"""Models whose code calls a layer by `layer(input=x)`, or reads more of it than its weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import quant

X = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))


class Plain(nn.Module):
    """A block of a norm and two layers, with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 96), nn.Linear(96, 64)
        self.up.width_of_heads = 16  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())  # type: ignore[no-any-return]


class Particular(Plain):
    """The same function in other words."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.up(input=self.norm(input=x).view(-1, self.up.in_features)).unflatten(
            -1, (-1, self.up.width_of_heads)
        )
        return x + self.down(input=heads.flatten(1).tanh().view(-1, self.down.weight.shape[1]))  # type: ignore[no-any-return]


def state(model: nn.Module) -> dict[str, Any]:
    return {name: tensor.float() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    "options",
    [
        {"recipe": "nvfp4", "solver": "gptq"},
        {"recipe": "nvfp4", "solver": "awq:merge+gptq"},
        {"recipe": "nvfp4a16", "solver": "kfac"},
        {"recipe": "nvfp4a16", "solver": "gptq+autoround"},
        {"recipe": "fp8", "solver": "rtn"},
        {"bits": 6.0},
    ],
    ids=lambda options: options.get("solver", "budget"),
)
def test_a_model_is_quantized_as_one_that_calls_its_layers_by_position(options: dict[str, Any]) -> None:
    models = [nn.Sequential(kind(), kind()).eval() for kind in (Plain, Particular)]
    plain, particular = (quant.quantize(model, data=X, **options) for model in models)
    assert {str(layer.weight) for layer in particular.plan.layers} == {str(layer.weight) for layer in plain.plan.layers}
    expected = state(plain.model)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in state(particular.model).items())
    assert torch.equal(particular.model(X), plain.model(X))


@pytest.mark.parametrize("prepare", [quant.prepare_qat, quant.to_low_precision_training])
def test_it_trains_as_that_model_does(prepare: Any) -> None:
    gradients = []
    for kind in (Plain, Particular):
        model = nn.Sequential(kind())
        prepare(model, "mxfp8")
        model(X).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))
