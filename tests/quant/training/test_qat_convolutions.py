"""Convolutions train under their deployed rounding: exact at both ends, with the gradients of an explicit graph."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from torch import nn

import quant
from quant.formats.format import FORMATS
from quant.formats.tensor import quantize, round_activation
from quant.kernels.linear.conv import QuantConv, weight_of_conv
from quant.training.qat_layers import SCALES, QATConv

IMAGES = torch.randn(4, 8, 12, 12, generator=torch.Generator().manual_seed(1))


def convolutions() -> nn.Module:
    """Strides, dilation, groups, padding of each kind, two transposed ones, and a linear."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(8, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding="same", padding_mode="circular", groups=2, dilation=2, bias=False), nn.SiLU(),
        nn.ConvTranspose2d(32, 16, 3, stride=2, padding=1, output_padding=1, groups=2), nn.ReLU(),
        nn.ConvTranspose2d(16, 32, 2), nn.BatchNorm2d(32),
        nn.Flatten(2), nn.Conv1d(32, 32, 5, padding=2), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, 16),
    )  # fmt: skip


def output(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found = model.eval()(IMAGES)
    return found  # type: ignore[no-any-return]


def train(model: nn.Module) -> None:
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        model.train()(IMAGES).square().mean().backward()
        optimizer.step()


# Batch norms in training mode make other inputs than those of calibration.
@pytest.mark.filterwarnings("ignore:.*beyond the range of its static input scale:UserWarning")
@pytest.mark.parametrize(
    ("recipe", "solver", "scales"),
    [
        ("int8", "rtn", "recomputed"),
        ("int8", "mse", "frozen"),
        ("int8_static", "rtn", "learned"),
        ("fp8_channel", "rtn", "recomputed"),
        ("fp8_channel", "gptq", "learned"),
    ],
)
def test_starts_at_the_quantized_model_and_ends_as_what_was_trained(recipe: str, solver: str, scales: str) -> None:
    model = convolutions()
    quantized = quant.quantize(copy.deepcopy(model), recipe, IMAGES, solver=solver)
    expected = output(quantized.model)
    before = dict(model.named_parameters())
    quant.prepare_qat(model, recipe, IMAGES, solver=solver, scales=scales)
    kinds = [type(module).__name__ for module in model if hasattr(module, "weight_format")]  # type: ignore[union-attr]
    count = 4 if recipe == "fp8_channel" else 5  # FP8 leaves out the first, which has 8 channels
    assert kinds == [*["QATConv"] * count, "QATLinear"]
    assert torch.equal(output(model), expected)
    # An optimizer that was made before would train them: they are the same parameters.
    assert all(parameter is before[name] for name, parameter in model.named_parameters() if "range_shift" not in name)
    twin = copy.deepcopy(quantized.model)
    quant.prepare_qat(twin, quantized.plan)
    assert torch.equal(output(twin), expected)
    train(model)
    trained = output(model)
    assert not torch.equal(trained, expected)
    quant.pack(model)
    assert sum(isinstance(module, QuantConv) for module in model) == count
    assert torch.equal(output(model), trained)


@pytest.mark.filterwarnings("ignore:.*needs? quant.load.*:UserWarning")
def test_a_trained_resnet_is_a_checkpoint(tmp_path: Path) -> None:
    model = tiny_models.resnet().requires_grad_(True)
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    quant.prepare_qat(model, "int8", images)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.train()(images).logits.square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        trained = model.eval()(images).logits
    quant.save(model, quant.pack(model), tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(quant.load(tmp_path / "out")(images).logits, trained)


GEOMETRIES: list[tuple[Any, tuple[int, ...]]] = [
    (lambda: nn.Conv2d(8, 12, 3, stride=2, padding=1, groups=2), (2, 8, 9, 9)),
    (lambda: nn.Conv2d(8, 12, 3, padding="same", padding_mode="reflect"), (2, 8, 9, 9)),
    (lambda: nn.ConvTranspose2d(8, 12, 3, stride=2, padding=1, output_padding=1, groups=2, dilation=2), (2, 8, 5, 5)),
    (lambda: nn.Conv1d(8, 12, 4, stride=2), (8, 11)),  # without a batch
    (lambda: nn.ConvTranspose3d(4, 6, 2), (1, 4, 3, 3, 3)),
]


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize(("weight", "activation"), [("int8", "int8_token"), ("int8", "int8"), ("fp8_channel", "")])
@pytest.mark.parametrize("geometry", range(len(GEOMETRIES)))
def test_gradients_are_those_of_an_explicit_straight_through_graph(
    geometry: int, weight: str, activation: str, scales: str
) -> None:
    build, size = GEOMETRIES[geometry]
    torch.manual_seed(geometry)
    conv, format, x = build(), FORMATS[weight], torch.randn(size, requires_grad=True)
    number = FORMATS[activation] if activation else None
    static = torch.tensor(0.012) if number is not None and number.is_static else None
    # Scales that are too small for the largest weights, so that some are beyond them.
    packed = QuantConv(quantize(0.8 * weight_of_conv(conv), format), conv, number, static)
    module = QATConv(nn.Parameter(conv.weight.detach().clone()), packed, conv.bias, scales, torch.float32)
    y = module(x)
    dy = torch.randn_like(y)
    y.backward(dy)

    with torch.no_grad():
        scale, _ = module.current_scales()
        matrix = module.rounded(torch.float32).double()
        rounded = module.packed().weight.double()
    twin, x64 = copy.deepcopy(conv).double(), x.detach().double().requires_grad_()
    wanted: list[torch.Tensor] = [x64, twin.weight]
    inside = torch.ones_like(matrix)
    as_parameter = twin.weight.new_zeros(()).expand_as(twin.weight)
    if scale is not None:
        inside = (module.matrix.double().abs() <= format.element.max * scale.double()).double()
        assert 0 < int((inside == 0).sum()) < 0.5 * inside.numel() or scales == "recomputed"
    if module.range_shift is not None:
        shift = module.range_shift.detach().double().requires_grad_()
        start = module.start_step.double()
        step = start * (shift / (format.element.max * start.mean())).exp()
        slope = matrix / scale.double() - inside * module.matrix.detach().double() / scale.double()
        as_parameter = back(slope * (step - step.detach()), conv)
        wanted.append(shift)
    mask = back(inside, conv)
    w = rounded + mask * (twin.weight - twin.weight.detach()) + as_parameter
    given, passed = x64, torch.ones_like(x64)
    if number is not None:
        batch = x.detach() if x.dim() == len(conv.kernel_size) + 2 else x.detach()[None]
        found = round_activation(batch.flatten(1), number, static).view(x.shape).double()
        if static is not None:
            passed = (x.detach().abs() <= number.element.max * static).double()
        given = found + passed * (x64 - x64.detach())
    expected = torch.func.functional_call(twin, {"weight": w}, (given,))
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    assert twin.bias is not None
    gradients = torch.autograd.grad(expected, [*wanted, twin.bias], dy.double())
    ours = [x.grad, module.weight.grad, *([] if module.range_shift is None else [module.range_shift.grad])]
    for gradient, exact in zip([*ours, module.bias.grad], gradients, strict=True):  # type: ignore[union-attr]
        assert gradient is not None and float((gradient.double() - exact).norm() / exact.norm()) < 1e-6


def back(matrix: torch.Tensor, conv: Any) -> torch.Tensor:
    """A matrix `[out, in / groups · kernel]` in the shape of the convolution's weight, element by element."""
    groups, shape = conv.groups, conv.weight.shape
    if not conv.transposed:
        return matrix.reshape(shape)
    per_in, per_out = shape[0] // groups, shape[1]
    split = matrix.reshape(groups, per_out, per_in, -1)
    return torch.cat([split[g].transpose(0, 1) for g in range(groups)]).reshape(shape)
