"""Operands of low-precision training are those of Transformer Engine and torchao, to the bit, and sum up right."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file
from samples import ROOT

from quant.formats.format import E2M1, E4M3, E5M2, FORMATS, Format, Number
from quant.formats.rounding import encode, pack
from quant.training.low_precision.operands import (
    SIGNS,
    Operand,
    RoundedOperand,
    hadamard_matrix,
    multiply,
    round_operand,
    round_stochastically,
    transform_tokens,
)
from quant.training.low_precision.training_recipe import NVFP4_SQUARE, RECIPES, TrainingRecipe

INPUTS = ("outliers", "ties", "zeros")
NVFP4, BLOCK = RECIPES["nvfp4"], RECIPES["fp8_block"]
FP32_SCALES = replace(BLOCK, power_of_two_scales=False)


@pytest.fixture(scope="module")
def goldens() -> dict[str, torch.Tensor]:
    return load_file(ROOT / "tests/data/goldens/training/operands.safetensors")


def _bytes(operand: RoundedOperand) -> torch.Tensor:
    codes = encode(operand.elements.contiguous(), operand.format.element)
    return pack(codes, 4) if operand.format.element.bits == 4 else codes.view(torch.uint8)


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize(
    ("peer", "format", "recipe"),
    [
        ("te_nvfp4_1x16", FORMATS["nvfp4"], NVFP4),
        ("te_nvfp4_16x16", NVFP4_SQUARE, NVFP4),
        ("te_block_1x128", FORMATS["fp8_group"], BLOCK),
        ("te_block_128x128", FORMATS["fp8_block"], BLOCK),
        ("te_block_1x128_f32", FORMATS["fp8_group"], FP32_SCALES),
        ("te_block_128x128_f32", FORMATS["fp8_block"], FP32_SCALES),
        ("torchao_rowwise", FORMATS["fp8_token"], RECIPES["fp8_rowwise"]),
        ("torchao_mxfp8_rceil", FORMATS["mxfp8"], RECIPES["mxfp8"]),
    ],
)
def test_codes_and_scales_are_the_peers(
    peer: str, format: Format, recipe: TrainingRecipe, name: str, goldens: dict[str, torch.Tensor]
) -> None:
    operand = round_operand(goldens[f"{name}.input"], format, recipe)
    assert torch.equal(_bytes(operand), goldens[f"{name}.{peer}.data"])
    theirs, own = goldens[f"{name}.{peer}.scale"], operand.scale
    if format.global_scale:  # E4M3 codes, a square's scale once for each of its rows
        own = encode(own.repeat_interleave(format.block[0], 0).contiguous(), E4M3).view(torch.uint8)
    elif format.has_power_of_two_scales:
        own = encode(own.contiguous(), format.scale)
    elif format.per_row:  # a factor where ours is a divisor; of a row of zeros theirs is arbitrary
        own, theirs = own[own != 1], (1 / theirs)[own != 1]
    elif format.block[0] == 1:  # stored [blocks, rows]
        theirs = theirs.t()
    else:  # padded to a multiple of four columns
        theirs = theirs[:, : own.shape[1]]
    assert torch.equal(own, theirs)


@pytest.mark.parametrize("name", INPUTS)
def test_the_hadamard_transform_is_transformer_engines(name: str, goldens: dict[str, torch.Tensor]) -> None:
    x = goldens[f"{name}.input"]
    operand = round_operand(transform_tokens(x.t(), 16), FORMATS["nvfp4"], NVFP4)
    assert torch.equal(_bytes(operand), goldens[f"{name}.te_nvfp4_1x16_rht.data_t"])
    scale = encode(operand.scale.contiguous(), E4M3).view(torch.uint8)
    assert torch.equal(scale, goldens[f"{name}.te_nvfp4_1x16_rht.scale_t"])


@pytest.mark.parametrize("peer", ["torchao_tensorwise", "te_current_e4m3"])
def test_one_scale_for_a_tensor_gives_the_peers_codes(peer: str, goldens: dict[str, torch.Tensor]) -> None:
    operand = round_operand(goldens["outliers.input"], FORMATS["fp8"], RECIPES["fp8_tensorwise"])
    assert torch.equal(_bytes(operand), goldens[f"outliers.{peer}.data"])
    scale = goldens[f"outliers.{peer}.scale"].reshape(())
    assert float(operand.factor) == float(1 / scale if peer.startswith("torchao") else scale)


def test_the_hadamard_transform_cancels_in_a_product() -> None:
    matrix = hadamard_matrix(torch.empty(0), 16).double()
    # Columns by Sylvester's definition: the sign of entry (i, j) is the parity of the ones in i & j.
    expected = torch.tensor([[SIGNS[i] * (-1) ** (i & j).bit_count() / 4 for j in range(16)] for i in range(16)])
    assert torch.equal(matrix.float(), expected)
    a, b = torch.randn(7, 64, dtype=torch.float64), torch.randn(5, 64, dtype=torch.float64)
    turned = [(m.unflatten(1, (-1, 16)) @ matrix).flatten(1) for m in (a, b)]
    assert torch.allclose(turned[0] @ turned[1].t(), a @ b.t(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("tokens", [32, 37])
def test_transformed_operands_have_the_product_of_the_originals(tokens: int) -> None:
    a, b = torch.randn(6, tokens).bfloat16(), torch.randn(4, tokens).bfloat16()
    exact = a.double() @ b.double().t()
    got = transform_tokens(a, 16).double() @ transform_tokens(b, 16).double().t()
    bound = a.double().norm(dim=1)[:, None] * b.double().norm(dim=1) * 2.0**-7  # BF16 rounds each operand by 2⁻⁹
    assert bool(((got - exact).abs() <= bound).all())


@pytest.mark.parametrize("number", [E2M1, E4M3, E5M2], ids=str)
def test_stochastic_rounding_is_unbiased(number: Number) -> None:
    draws = 20_000
    grid = number.grid().double()[:40]  # subnormal and normal steps
    inside = torch.tensor([0.1, 0.25, 0.5, 0.9], dtype=torch.float64)
    u = torch.cat([low + (high - low) * inside for low, high in pairwise(grid)])
    u = torch.cat([u, -u]).float()
    rounded = torch.zeros(len(u), dtype=torch.float64)
    for _ in range(10):
        rounded += round_stochastically(u.repeat(draws // 10, 1), number).double().sum(0)
    below = torch.bucketize(u.abs().double(), grid, right=True) - 1
    low, high = grid[below], grid[below + 1]
    p = (u.abs().double() - low) / (high - low)
    sigma = (high - low) * (p * (1 - p) / draws).sqrt()
    assert bool(((rounded / draws - u.double()).abs() <= 4 * sigma).all())


def test_stochastic_rounding_hits_neighbours_alone_and_keeps_numbers_of_the_grid() -> None:
    grid = torch.cat([-E2M1.grid().flip(0), E2M1.grid()])
    assert torch.equal(round_stochastically(grid, E2M1).abs(), grid.abs())
    u = torch.linspace(-6, 6, 4001)
    rounded = round_stochastically(u, E2M1)
    assert set(rounded.tolist()) <= set(grid.tolist())
    gap = torch.where(u.abs() < 2, 0.5, torch.where(u.abs() < 4, 1.0, 2.0))
    assert bool(((rounded - u).abs() < gap).all())
    assert torch.equal(round_stochastically(torch.tensor([7.0, -9.0]), E2M1), torch.tensor([6.0, -6.0]))


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "fp8_rowwise", "fp8_tensorwise", "fp8_block"])
def test_values_of_operands_are_exact_in_bf16(name: str) -> None:
    recipe = RECIPES[name]
    x = torch.randn(64, 256) * torch.logspace(-6, 3, 256)
    for format in (recipe.input, recipe.weight, recipe.gradient):
        assert format is not None
        operand = round_operand(x, format, recipe)
        assert torch.equal(operand.values, operand.values.bfloat16().float())


def test_a_product_is_that_of_the_decoded_operands() -> None:
    x, w = torch.randn(32, 64), torch.randn(48, 64)
    a, b = round_operand(x, FORMATS["nvfp4"], NVFP4), round_operand(w, NVFP4_SQUARE, NVFP4)
    decoded = [o.elements.double() * _spread(o, o.elements.shape) * o.factor.double() for o in (a, b)]
    exact = decoded[0] @ decoded[1].t()
    assert torch.allclose(multiply(a, b, torch.float32).double(), exact, rtol=1e-6, atol=1e-5)


def test_an_operand_in_bf16_is_multiplied_by_one_in_float32() -> None:
    """On a GPU NVFP4 comes in BF16, and blocks with FP32 scales do not fit it."""
    a = Operand(torch.randn(16, 32).bfloat16(), torch.tensor(0.5), is_exact_in_bf16=True)
    b = Operand(torch.randn(24, 32), torch.tensor(2.0), is_exact_in_bf16=False)
    exact = a.values.double() @ b.values.double().t()
    assert torch.allclose(multiply(a, b, torch.float32).double(), exact, rtol=1e-6, atol=1e-5)


def _spread(operand: RoundedOperand, shape: torch.Size) -> torch.Tensor:
    """The block scale of each element, float64."""
    height, width = operand.format.block_shape(shape)
    scale = operand.scale.double().repeat_interleave(height, 0).repeat_interleave(width, 1)
    return scale[: shape[0], : shape[1]]
