"""Channels that were silent in calibration, as most neurons of a ReLU are on few tokens, do not spoil the others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import quant


class Mlp(nn.Module):
    """A ReLU, of whose neurons 52 of 96 are silent on nearly all tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(128, 96), nn.Linear(96, 128)
        self.up.bias.data[:52] -= 2.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


@pytest.mark.parametrize("solver", ["awq", "awq+gptq", "smoothquant"])
@pytest.mark.parametrize("format", ["nvfp4a16", "nvfp4", "fp8"])
def test_scaling_loses_no_more_than_rounding_alone(format: str, solver: str) -> None:
    generator = torch.Generator().manual_seed(1)
    rows, others = (torch.randn(256, 128, generator=generator) for _ in range(2))
    expected = Mlp()(others)

    def error(solver: str) -> float:
        model = quant.quantize(Mlp(), format, rows, solver=solver).model
        with torch.no_grad():
            return float((model(others) - expected).norm() / expected.norm())

    assert error(solver) <= 1.1 * error("rtn")
