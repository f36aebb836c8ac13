"""Run-time parts of `QuantLinear` equal the formula written out, through casts and through torch.export."""

from __future__ import annotations

from typing import Any

import pytest
import scipy.linalg
import torch

from quant.formats.format import get_format
from quant.formats.tensor import fake_quantize, quantize
from quant.kernels.linear.quant_linear import QuantLinear, RunTimeParts

OUT, IN, RANK, BLOCK = 48, 64, 4, 32


def _parts(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {
        "pre_scale": (torch.rand(IN) + 0.5).to(dtype),
        "hadamard": BLOCK,
        "lowrank": (torch.randn(RANK, IN).to(dtype), torch.randn(OUT, RANK).to(dtype)),
    }


def _matrix() -> torch.Tensor:
    block = torch.from_numpy(scipy.linalg.hadamard(BLOCK)).double() / BLOCK**0.5
    return torch.block_diag(*[block] * (IN // BLOCK))


@pytest.mark.parametrize("chosen", [("pre_scale",), ("hadamard",), ("lowrank",), ("pre_scale", "hadamard", "lowrank")])
@pytest.mark.parametrize("activation", [None, "mxfp8", "nvfp4"])
def test_is_the_formula(chosen: tuple[str, ...], activation: str | None) -> None:
    parts = {name: part for name, part in _parts().items() if name in chosen}
    weight = quantize(torch.randn(OUT, IN), get_format("nvfp4"))
    bias, x = torch.randn(OUT), torch.randn(3, 5, IN)
    format = get_format(activation) if activation else None
    layer = QuantLinear(weight, bias, format, **parts)

    # Inputs are multiples of 1/8 and sums stay below 2^24, so that the rotation is exact but for its last factor.
    x = (x * 8).round() / 8
    seen = x.double()
    if "pre_scale" in parts:
        seen = (x * parts["pre_scale"]).double()
    if "hadamard" in parts:
        seen = seen @ _matrix()
    rounded = fake_quantize(layer.parts.input(x), format).double() if format else seen
    expected = rounded @ weight.dequantize().double().T + bias.double()
    if "lowrank" in parts:
        down, up = parts["lowrank"]
        expected = expected + (seen @ down.double().T) @ up.double().T
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(layer.parts.input(x).double(), seen, rtol=1e-5, atol=1e-5)


def test_rotating_weight_and_input_changes_nothing() -> None:
    weight = torch.randn(OUT, IN, dtype=torch.float64)
    x = torch.randn(7, IN, dtype=torch.float64)
    scale = torch.rand(IN, dtype=torch.float64) + 0.5
    seen = RunTimeParts(1 / scale, BLOCK).input(x)
    torch.testing.assert_close(seen @ (weight * scale @ _matrix()).T, x @ weight.T, rtol=0, atol=1e-12)


def test_casts_follow_the_model_and_codes_do_not() -> None:
    layer = QuantLinear(quantize(torch.randn(OUT, IN), get_format("nvfp4")), **_parts())
    codes, scale = layer.codes.clone(), layer.scale.clone()
    layer.to(torch.bfloat16)
    assert layer.pre_scale is not None and layer.lowrank_down is not None and layer.lowrank_up is not None
    assert {layer.pre_scale.dtype, layer.lowrank_down.dtype, layer.lowrank_up.dtype} == {torch.bfloat16}
    assert torch.equal(layer.codes, codes) and torch.equal(layer.scale.view(torch.uint8), scale.view(torch.uint8))
    assert layer(torch.randn(2, IN, dtype=torch.bfloat16)).dtype is torch.bfloat16


@pytest.mark.parametrize("chosen", ["pre_scale", "hadamard", "lowrank"])
def test_exports(chosen: str) -> None:
    layer = QuantLinear(quantize(torch.randn(OUT, IN), get_format("nvfp4")), **{chosen: _parts()[chosen]})
    tokens = torch.export.Dim("tokens", min=2, max=64)
    program = torch.export.export(layer, (torch.randn(4, IN),), dynamic_shapes=({0: tokens},))
    x = torch.randn(9, IN)
    assert torch.equal(program.module()(x), layer(x))


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ({"pre_scale": torch.ones(3)}, r"pre_scale is \[3\], expected \[64\]"),
        ({"hadamard": 48}, "Hadamard block 48 must be a power of two that divides 64; the largest is 64"),
        ({"hadamard": 128}, "Hadamard block 128"),
        ({"lowrank": (torch.ones(4, 64), torch.ones(48, 5))}, r"branch of \[4, 64\] and \[48, 5\]"),
    ],
)
def test_what_does_not_fit_is_refused(parts: dict[str, Any], problem: str) -> None:
    weight = quantize(torch.randn(OUT, IN), get_format("nvfp4"))
    with pytest.raises(ValueError, match=problem):
        QuantLinear(weight, **parts)


def test_no_parts_changes_nothing() -> None:
    assert not QuantLinear(quantize(torch.randn(OUT, IN), get_format("nvfp4"))).parts
    assert RunTimeParts(hadamard=2) and RunTimeParts(pre_scale=torch.ones(2)) and RunTimeParts().rank == 0


@pytest.mark.parametrize(
    "chosen", [(), ("pre_scale",), ("hadamard",), ("lowrank",), ("pre_scale", "hadamard", "lowrank")]
)
def test_the_weight_that_modeling_code_reads_is_what_the_layer_multiplies_by(chosen: tuple[str, ...]) -> None:
    parts = {name: part for name, part in _parts().items() if name in chosen}
    layer = QuantLinear(quantize(torch.randn(OUT, IN), get_format("nvfp4")), **parts)
    effect = layer(torch.eye(IN)).T  # column by column
    assert layer.weight.shape == (OUT, IN)
    torch.testing.assert_close(layer.weight, effect, rtol=1e-5, atol=1e-5)


def test_the_weight_follows_casts_of_the_model() -> None:
    layer = QuantLinear(quantize(torch.randn(OUT, IN), get_format("nvfp4")), dtype=torch.bfloat16)
    assert layer.weight.dtype == torch.bfloat16
    assert layer.float().weight.dtype == torch.float32 and layer.to(torch.float16).weight.dtype == torch.float16
    assert "weight" not in layer.state_dict()
