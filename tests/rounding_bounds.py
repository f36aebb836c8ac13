"""The three products of a linear layer in float64, and how far a recipe's rounding may take results from them.

The bounds come from the definition of each format alone: no code of the toolkit that rounds is called.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quant.formats.format import Format
from quant.training.low_precision.operands import hadamard_matrix
from quant.training.low_precision.training_recipe import TrainingRecipe


@dataclass
class Exact:
    """An operand in float64, and how far its rounded values may lie from it."""

    values: torch.Tensor
    error: torch.Tensor


def _exact(x: torch.Tensor, format: Format | None, *, powers: bool, draws: bool, hadamard: bool = False) -> Exact:
    """`x` `[rows, summed]` and a bound of its rounding error, from the format's definition alone.

    An element is off by half a gap of the grid, or by a whole one where draws decide. Gaps are 2⁻ᵐ of the number, and
    at the smallest numbers the least subnormal times the scale, which is the block's largest magnitude over the largest
    element, twice that where scales are rounded up to powers of two, an eighth more where E4M3 rounds them.
    """
    x = x.double()
    error = torch.zeros_like(x)
    if hadamard:
        turned = (x.unflatten(1, (-1, 16)) @ hadamard_matrix(x, 16).double()).flatten(1)
        spread = x.abs().unflatten(1, (-1, 16)).sum(-1, keepdim=True).expand(-1, -1, 16).flatten(1) / 4
        x, error = turned, turned.abs() * 2.0**-9 + spread * 2.0**-23  # rounded to BF16
    if format is None:
        return Exact(x, error)
    height, width = format.block_shape(x.shape)
    blocks = x.unflatten(1, (-1, width)).unflatten(0, (-1, height))
    amax = blocks.abs().amax(dim=(1, 3), keepdim=True).expand_as(blocks).flatten(2).flatten(0, 1)
    number = format.element
    scale = amax / number.max * (2.0 if powers or format.has_power_of_two_scales else 1.125)
    gap = torch.maximum((x.abs() + error) * 2.0**-number.mantissa, scale * number.min_subnormal)
    return Exact(x, error + gap * (1.0 if draws else 0.5))


def _product(a: Exact, b: Exact) -> Exact:
    """`a bᵀ` and the bound of its error; sums in float32 add their own."""
    sizes = a.values.abs(), b.values.abs()
    error = a.error @ b.error.t() + sizes[0] @ b.error.t() + a.error @ sizes[1].t()
    return Exact(a.values @ b.values.t(), error + (sizes[0] @ sizes[1].t()) * 1e-5)


def bounds_of_products(
    recipe: TrainingRecipe, x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor
) -> dict[str, Exact]:
    """y, dx and dw for x `[tokens, in]`, weight `[out, in]` and dy `[tokens, out]`."""
    powers, draws, turns = recipe.power_of_two_scales, recipe.stochastic_gradients, bool(recipe.hadamard)

    def exact(tensor: torch.Tensor, format: Format | None, draws: bool = False, hadamard: bool = False) -> Exact:
        return _exact(tensor, format, powers=powers, draws=draws, hadamard=hadamard)

    of_w = recipe.weight_for_dx if recipe.rounds_dx else None
    of_dy, of_x = (recipe.gradient, recipe.input) if recipe.rounds_dw else (None, None)
    return {
        "y": _product(exact(x, recipe.input), exact(weight, recipe.weight)),
        "dx": _product(exact(dy, recipe.gradient, draws), exact(weight.t(), of_w)),
        "dw": _product(exact(dy.t(), of_dy, draws, turns), exact(x.t(), of_x, hadamard=turns)),
    }
