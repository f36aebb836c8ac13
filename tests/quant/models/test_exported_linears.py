"""Exported programs give the same numbers as before, and quantize as the model that they came from."""

import copy
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import quant
from quant.cli.quantize import quantize_command


class Net(nn.Module):
    """A linear with a bias, one without, one called twice, a convolution, and a weight that something else reads."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.parts = nn.ModuleDict({"first": nn.Linear(128, 64), "second": nn.Linear(64, 64, bias=False)})
        self.twice = nn.Linear(64, 64)
        self.shared = nn.Linear(64, 64)
        self.last = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.adaptive_avg_pool2d(self.conv(x).relu(), 4).flatten(1)
        x = self.parts["second"](self.parts["first"](x).relu()).relu()
        x = self.twice(self.twice(x).relu())
        return self.last(self.shared(x) + x @ self.shared.weight)


LINEARS = {"parts.first", "parts.second", "twice", "last"}


@pytest.fixture
def exported(tmp_path: Path) -> tuple[Net, Path]:
    torch.manual_seed(0)
    model = Net().eval()
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(model, (torch.randn(2, 3, 8, 8),), dynamic_shapes=({0: batch},))
    torch.export.save(program, tmp_path / "net.pt2")
    return model, tmp_path / "net.pt2"


def test_linears_come_back_and_change_nothing(exported: tuple[Net, Path]) -> None:
    original, file = exported
    model = quant.open_model(file, unsafe_load=True).model
    assert model is not None
    assert {n for n, m in model.named_modules() if isinstance(m, nn.Linear)} == LINEARS
    there, here = original.state_dict(), model.state_dict()
    assert set(there) == set(here) and all(torch.equal(there[n], here[n]) for n in there)
    x = torch.randn(5, 3, 8, 8)
    with torch.no_grad():
        assert torch.equal(model.eval()(x), original(x))
        assert torch.equal(copy.deepcopy(model)(x), original(x))


@pytest.mark.parametrize("format", ["fp8_channel", "fp8", "nvfp4"])
def test_quantized_as_the_original(exported: tuple[Net, Path], format: str, tmp_path: Path) -> None:
    original, file = exported
    model = quant.open_model(file, unsafe_load=True).model
    assert model is not None
    images = torch.randn(4, 3, 8, 8)
    result = quant.quantize(model, format, images)
    expected = quant.quantize(original, format, images, include=sorted(LINEARS))
    assert {layer.name for layer in result.plan.quantized} == LINEARS
    with torch.no_grad():
        assert torch.equal(result.model(images), expected.model(images))
    quant.save(result.model, result.plan, tmp_path / "out")
    back = quant.load(tmp_path / "out", quant.open_model(file, unsafe_load=True).model)
    with torch.no_grad():
        assert torch.equal(back(images), result.model(images))


def test_from_the_command_line(exported: tuple[Net, Path], tmp_path: Path) -> None:
    options = ["--format", "mxfp8", "--out", str(tmp_path / "out"), "--quiet", "--trust-remote-code"]
    result = CliRunner().invoke(quantize_command, [str(exported[1]), *options])
    assert (result.exit_code, result.output) == (0, "")
    model = quant.load(tmp_path / "out", quant.open_model(exported[1], unsafe_load=True).model)
    weight = exported[0].parts["first"].weight.detach().double()
    error = model.get_submodule("parts.first").dequantize(torch.float64) - weight
    assert 0 < float(error.norm() / weight.norm()) < 2**-4
