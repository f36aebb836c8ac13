"""FP8 operands for both directions of training have the oracle's codes and scales, and their products are exact."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quant.formats.format import E4M3, FORMATS
from quant.formats.rounding import encode
from quant.kernels.training import fp8_block
from quant.kernels.training.fp8_block_layout import RULES, Operands
from quant.training.low_precision.operands import round_operand
from quant.training.low_precision.training_recipe import RECIPES, Arithmetic, TrainingRecipe

BLOCK = RECIPES["fp8_block"]
RECIPE_OF_RULE: dict[str, TrainingRecipe] = {
    "power_of_two": BLOCK,
    "transformer_engine": replace(BLOCK, power_of_two_scales=False),
    "divided": replace(BLOCK, power_of_two_scales=False, arithmetic=Arithmetic.BLOCKSCALE),
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def matrix(rows: int = 200, columns: int = 300, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Rows and columns of very different sizes, blocks of zeros, and sizes that are no multiples of 128."""
    x = torch.randn(rows, columns) * torch.randn(rows, 1).mul(3).exp() * torch.randn(columns).exp()
    x[:128, :128], x[130:, -10] = 0, 0
    return x.to(dtype)


def operands(
    x: torch.Tensor, rule: str = "power_of_two", square: bool = False, rows: bool = True, columns: bool = True
) -> Operands:
    return Operands(*torch.ops.quant.fp8_block_operands(x, rule, square, rows, columns))


def matches(codes: torch.Tensor, scale: torch.Tensor, x: torch.Tensor, rule: str, square: bool = False) -> bool:
    """Whether a direction has the oracle's codes and scales, and zeros in its padding."""
    codes, scale, x = codes.cpu(), scale.cpu(), x.cpu()
    expected = round_operand(x, FORMATS["fp8_block" if square else "fp8_group"], RECIPE_OF_RULE[rule])
    padding = codes.float().clone()
    padding[: x.shape[0], : x.shape[1]] = 0
    stored = scale if square else scale.t()
    rows, columns = expected.scale.shape
    return (
        torch.equal(
            codes.view(torch.uint8)[: x.shape[0], : x.shape[1]],
            encode(expected.elements.contiguous(), E4M3).view(torch.uint8),
        )
        and torch.equal(stored[:rows, :columns], expected.scale)
        and stored.shape == (codes.shape[0] // (128 if square else 1), codes.shape[1] // 128)
        and not padding.any()
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("square", [False, True], ids=["rows and columns", "squares"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("shape", [(200, 300), (128, 512), (700, 1100)])
def test_both_directions_are_the_oracles(
    shape: tuple[int, int], dtype: torch.dtype, rule: str, square: bool, device: str
) -> None:
    x = matrix(*shape, dtype)
    made = operands(x.to(device), rule, square)
    assert matches(made.codes, made.scale, x, rule, square)
    assert matches(made.codes_t, made.scale_t, x.t(), rule, square)


@pytest.mark.parametrize("device", DEVICES)
def test_a_view_with_a_stride_and_one_direction_alone(device: str) -> None:
    x = matrix(128, 512).to(device)[:, 128:384]
    columns, rows = operands(x, rows=False), operands(x.t(), columns=False)
    assert matches(columns.codes_t, columns.scale_t, x.t(), "power_of_two")
    assert matches(rows.codes, rows.scale, x.t(), "power_of_two")
    assert not columns.codes.numel() and not rows.codes_t.numel()
    squares = operands(x, square=True, rows=False)
    assert matches(squares.codes_t, squares.scale_t, x.t(), "power_of_two", True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite_reach_every_product_of_their_block(value: float, device: str) -> None:
    x = matrix(128, 512)
    x[3, 140] = value
    made = operands(x.to(device))
    assert made.scale.isnan().nonzero().tolist() == [[1, 3]]
    assert made.scale_t.isnan().nonzero().tolist() == [[0, 140]]
    assert bool(made.codes.float()[3, 128:256].isnan().all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("shape", "dtype"), [
    ((130, 256), torch.bfloat16), ((300, 1000), torch.bfloat16), ((130, 250), torch.bfloat16),
    ((130, 256), torch.float32),
])  # fmt: skip
def test_swiglu_and_its_gradients_are_operands_at_once(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    gate, up, dh = matrix(*shape, dtype).clamp(-50, 50), torch.randn(shape).to(dtype), matrix(*shape, dtype)
    leaves = [each.clone().requires_grad_() for each in (gate, up)]
    product = torch.nn.functional.silu(leaves[0]) * leaves[1]
    product.backward(dh)
    ops, rule, moved = torch.ops.quant, "power_of_two", [x.to(device) for x in (dh, gate, up)]
    of_product = Operands(*ops.fp8_block_swiglu(*moved[1:], rule, True, True))
    both = ops.fp8_block_swiglu_gradients(*moved, rule, True, True)
    # The product's transposed codes come with the gradients, or without the codes; flags leave the others as they are.
    only_t = ops.fp8_block_swiglu(*moved[1:], rule, False, True)
    assert not only_t[0].numel() and not only_t[1].numel()
    for own in (both[6:], only_t[2:]):
        assert all(torch.equal(_bits(a), _bits(b)) for a, b in zip(own, of_product[2:], strict=True))
    fewer = ops.fp8_block_swiglu_gradients(*moved, rule, False, False)
    assert [x.numel() > 0 for x in fewer] == [True, True] + [False] * 6
    assert torch.equal(_bits(fewer[0]), _bits(both[0])) and torch.equal(fewer[1], both[1])
    d_gate, d_up = (leaf.grad for leaf in leaves)
    assert d_gate is not None and d_up is not None
    h = product.detach()
    for codes, scale, x in (
        (of_product.codes, of_product.scale, h), (of_product.codes_t, of_product.scale_t, h.t()),
        (*both[:2], torch.cat([d_gate, d_up], 1)), (*both[2:4], d_gate.t()), (*both[4:6], d_up.t()),
    ):  # fmt: skip
        if device == "cpu":
            assert matches(codes, scale, x, rule)
            continue
        # A GPU's exponential is not PyTorch's to the last bit, and a value near a tie of BF16 goes the other way.
        decoded = codes.float() * scale.t().repeat_interleave(128, 1)
        expected = operands(x.contiguous(), columns=False)
        values = expected.codes.float() * expected.scale.t().repeat_interleave(128, 1)
        size = [min(a, b) for a, b in zip(decoded.shape, values.shape, strict=True)]
        decoded, values = decoded.cpu()[: size[0], : size[1]], values[: size[0], : size[1]]
        assert float((decoded != values).float().mean()) < 0.01
        torch.testing.assert_close(decoded, values, rtol=2.0**-3, atol=float(scale.max()) * 2.0**-8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heights", [(256, 256), (128, 384, 128)])
def test_stacked_weights_are_the_oracles_one_by_one_and_together(heights: tuple[int, ...], device: str) -> None:
    parts = [matrix(height, 300).to(device) for height in heights]
    whole = torch.cat(parts)
    *own, codes_t, scale_t = torch.ops.quant.fp8_block_stacked(parts, "power_of_two", True, True)
    assert matches(codes_t, scale_t, whole.t(), "power_of_two", True)
    for index, part in enumerate(parts):
        assert matches(own[2 * index], own[2 * index + 1], part, "power_of_two", True)
    *empty, again_t, _ = torch.ops.quant.fp8_block_stacked(parts, "power_of_two", False, True)
    assert not any(x.numel() for x in empty) and torch.equal(_bits(again_t), _bits(codes_t))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("widths", [(256, 256), (128, 384, 128)])
def test_gradients_side_by_side_are_the_oracles_together_and_one_by_one(widths: tuple[int, ...], device: str) -> None:
    # Parts of a wider matrix, as the gradients of views are.
    parts = [matrix(200, width + 8).to(device)[:, 4:-4] for width in widths]
    codes, scale, *own = torch.ops.quant.fp8_block_side_by_side(parts, "power_of_two", True, True)
    assert matches(codes, scale, torch.cat(parts, 1), "power_of_two")
    for index, part in enumerate(parts):
        assert matches(own[2 * index], own[2 * index + 1], part.t(), "power_of_two")
    again, _, *empty = torch.ops.quant.fp8_block_side_by_side(parts, "power_of_two", True, False)
    assert not any(x.numel() for x in empty) and torch.equal(_bits(again), _bits(codes))


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8) if x.dtype is torch.float8_e4m3fn else x


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("normalized", [torch.float32, torch.bfloat16], ids=["rounded once", "rounded twice"])
@pytest.mark.parametrize(("shape", "dtypes"), [
    ((130, 256), (torch.bfloat16, torch.bfloat16, torch.bfloat16)),
    ((300, 1000), (torch.bfloat16, torch.float32, torch.float32)),
    ((130, 250), (torch.float32, torch.float32, torch.bfloat16)),
])  # fmt: skip
def test_a_norm_is_quantized_as_its_values_are(
    shape: tuple[int, int], dtypes: tuple[torch.dtype, ...], normalized: torch.dtype, rule: str, device: str
) -> None:
    x_dtype, weight_dtype, dtype = dtypes
    x, weight = matrix(*shape, x_dtype).to(device), torch.randn(shape[1]).to(weight_dtype).to(device)
    rstd = torch.rsqrt(x.float().square().mean(1) + 1e-6)
    # The same numbers by separate operations, so that every code and scale must be equal.
    y = ((x.float() * rstd[:, None]).to(normalized).float() * weight.float()).to(dtype)
    both = Operands(*torch.ops.quant.fp8_block_rms_norm(x, rstd, weight, normalized, dtype, rule, True))
    assert matches(both.codes, both.scale, y, rule) and matches(both.codes_t, both.scale_t, y.t(), rule)
    rows = Operands(*torch.ops.quant.fp8_block_rms_norm(x, rstd, weight, normalized, dtype, rule, False))
    assert torch.equal(_bits(rows.codes), _bits(both.codes)) and not rows.codes_t.numel()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("columns", [256, 512, 640])
@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_product_is_that_of_the_decoded_operands(columns: int, square: bool, dtype: torch.dtype, device: str) -> None:
    if device == "cuda" and square and dtype is torch.float32:
        pytest.skip("outputs in FP32 are those of weight gradients")
    x, w = matrix(40, columns), matrix(80, columns)
    a, b = operands(x.to(device), columns=False), operands(w.to(device), square=square, columns=False)
    y = torch.ops.quant.fp8_block_product(a.codes, a.scale, b.codes, b.scale, square, dtype)
    left = round_operand(x, FORMATS["fp8_group"], BLOCK).values.double()
    right = round_operand(w, FORMATS["fp8_block" if square else "fp8_group"], BLOCK).values.double()
    # Hopper cuts each of the 32 products of an instruction at 13 bits below the largest of them.
    bound = (left.abs() @ right.abs().t()) * (1e-6 if device == "cpu" else 32 * 2.0**-13)
    exact = left @ right.t()
    bound += exact.abs() * (2.0**-8 if dtype is torch.bfloat16 else 0)
    assert bool(((y[:40, :80].cpu().double() - exact).abs() <= bound).all())


@pytest.mark.gpu
def test_on_this_gpu_the_kernels_run() -> None:
    """The tests above would pass without them."""
    assert fp8_block.runs_on(torch.empty(0, device="cuda"))
