"""Products of operands that have a scale for each row, or in blocks, over the tokens of one expert or of several.

    x [rows, in], sorted by expert    rows of expert e multiply its matrix    y [rows, out]

Operands in blocks are elements times a power of two, which BF16 holds exactly. A grouped product in BF16, which sums in
FP32, therefore gives the products of the recipe but for the order of sums, on any GPU. Where each row of an operand has
one scale, Hopper's FP8 tensor cores multiply (`quant/kernels/training/grouped_fp8.py`). Recipes with one scale for all
tokens of an expert have no grouped products: `takes_recipe`.

`RowProducts` trains a linear layer so: it is one expert that gets all tokens. That needs no package, and in eager mode
is as fast as torchao's compiled.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.nn.functional import pad

from quant.formats.format import E4M3, Format
from quant.kernels.training import grouped_fp8 as grouped_fp8
from quant.training.low_precision.state import LowPrecision
from quant.training.low_precision.training_recipe import TrainingRecipe


def takes_recipe(recipe: TrainingRecipe) -> bool:
    """Returns whether grouped products follow a recipe: E4M3 in blocks or rows, whose scales are powers of two.

    The scale of a tensor would have to be measured for each expert, as NVFP4's second-level scale would.
    """
    if recipe.history or recipe.hadamard or recipe.stochastic_gradients:
        return False
    formats = (recipe.input, recipe.weight, recipe.gradient, recipe.weight_for_dx)
    in_blocks = all(format is None or (all(format.block) and _has_exact_values(format, recipe)) for format in formats)
    return in_blocks or has_rows(recipe)


def has_rows(recipe: TrainingRecipe) -> bool:
    """Returns whether x, w and dy have a scale for each row; w may have one for each matrix in the product of dx."""
    formats, in_dx = (recipe.input, recipe.weight, recipe.gradient), recipe.weight_for_dx
    return all(format is not None and format.per_row and _has_exact_values(format, recipe) for format in formats) and (
        in_dx is not None and (in_dx.per_row or in_dx.per_tensor) and _has_exact_values(in_dx, recipe)
    )


def _has_exact_values(format: Format, recipe: TrainingRecipe) -> bool:
    """Returns whether BF16 holds the decoded values of a format."""
    has_powers_of_two = format.has_power_of_two_scales or recipe.power_of_two_scales
    return format.element is E4M3 and not format.global_scale and has_powers_of_two


def is_rowwise(recipe: TrainingRecipe) -> bool:
    """Returns whether `RowProducts` follow a recipe: `fp8_rowwise`, `fp8_rowwise_wgrad_bf16`, or one like them."""
    return has_rows(recipe) and takes_recipe(recipe)


def block_of_tokens(recipe: TrainingRecipe) -> int:
    """Returns the number of rows of which each expert has a multiple: a grouped product needs 16."""
    formats = (recipe.input, recipe.gradient)
    return math.lcm(16, *(size for format in formats if format is not None for size in format.block if size))


class GroupedProducts(torch.autograd.Function):
    """The three products of one projection of all experts, each on rounded operands.

    x: `[rows, in]`, weight: `[experts, out, in]`, y: `[rows, out]`. Rows of zeros stay zeros, in y and in dx.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, state: LowPrecision, in_fp8: bool
    ) -> torch.Tensor:
        recipe = state.recipe
        in_rows = has_rows(recipe)
        products = _RowProducts(offsets, in_fp8) if in_rows else _BlockProducts(offsets)
        ctx.state, ctx.products = state, products
        # Codes in FP8 take half of the memory until the backward pass. Values of blocks are BF16, and made there.
        if in_rows and recipe.input is not None and recipe.rounds_dw and ctx.needs_input_grad[1]:
            ctx.save_for_backward(weight, *products.columns(x, recipe.input))
        else:
            ctx.save_for_backward(weight, x)
        if recipe.input is None or recipe.weight is None or not state.rounds_forward:
            state.note_input(x)
            return functional.grouped_mm(x, weight.to(x.dtype).transpose(1, 2), offs=offsets)
        rows = products.rows(x, recipe.input)
        state.note_input(rows[1])  # scales are NaN where a value is not finite
        return products.y(rows, weight, recipe.weight, x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight, *x = ctx.saved_tensors
        state, products, recipe, dx, dw = ctx.state, ctx.products, ctx.state.recipe, None, None
        dy = dy.contiguous()  # as a grouped product that is not rounded takes it
        rounds_dx = recipe.gradient is not None and recipe.weight_for_dx is not None and recipe.rounds_dx
        if ctx.needs_input_grad[0] and rounds_dx:
            rows = products.rows(dy, recipe.gradient)
            state.note_gradient(rows[1])
            dx = products.dx(rows, weight, recipe.weight_for_dx, dy.dtype)
        else:
            state.note_gradient(dy)
            if ctx.needs_input_grad[0]:
                dx = functional.grouped_mm(dy, weight.to(dy.dtype), offs=products.offsets)
        if ctx.needs_input_grad[1]:
            # Summed in FP32 and rounded to BF16, as the gradient of a 16-bit product is, also for a wider weight.
            if recipe.gradient is not None and recipe.input is not None and recipe.rounds_dw:
                columns = x if len(x) > 1 else products.columns(x[0], recipe.input)
                dw = products.dw(products.columns(dy, recipe.gradient), columns, dy.dtype).to(weight.dtype)
            else:
                dw = functional.grouped_mm(dy.t(), *x, offs=products.offsets).to(weight.dtype)
        return dx, dw, None, None, None


_Rounded = Sequence[torch.Tensor]  # codes, or values, and their scales


@dataclass(frozen=True, eq=False)
class _RowProducts:
    """Products of operands with a scale for each row."""

    offsets: torch.Tensor  # the row after the last of each expert
    in_fp8: bool  # whether FP8 tensor cores multiply

    def rows(self, x: torch.Tensor, format: Format) -> _Rounded:
        """Rounds each row of `x` `[rows, columns]`."""
        return torch.ops.quant.e4m3_rows(x)  # type: ignore[no-any-return]

    def columns(self, x: torch.Tensor, format: Format) -> _Rounded:
        """Rounds each column of `x` `[rows, columns]` within the rows of an expert; codes are transposed."""
        return torch.ops.quant.e4m3_columns(x, self.offsets, False, None)  # type: ignore[no-any-return]

    def y(self, x: _Rounded, weight: torch.Tensor, format: Format, dtype: torch.dtype) -> torch.Tensor:
        codes, scale = torch.ops.quant.e4m3_rows(weight.flatten(0, 1))
        return self._product(x, (codes.view(weight.shape), scale.view(weight.shape[:2])), dtype, is_forward=True)

    def dx(self, dy: _Rounded, weight: torch.Tensor, format: Format, dtype: torch.dtype) -> torch.Tensor:
        experts, outputs, inputs = weight.shape
        ends = torch.arange(1, experts + 1, dtype=torch.int32, device=weight.device) * outputs
        scale = None
        if format.per_tensor:
            # A larger magnitude has no smaller scale, so the largest scale belongs to the largest magnitude.
            _, of_rows = torch.ops.quant.e4m3_rows(weight.flatten(0, 1))
            scale = of_rows.view(experts, outputs).amax(1, keepdim=True).expand(-1, inputs).contiguous()
        return self._product(dy, torch.ops.quant.e4m3_columns(weight.flatten(0, 1), ends, True, scale), dtype)

    def dw(self, dy: _Rounded, x: _Rounded, dtype: torch.dtype) -> torch.Tensor:
        return self._product(dy, x, dtype)

    def _product(self, a: _Rounded, b: _Rounded, dtype: torch.dtype, is_forward: bool = False) -> torch.Tensor:
        ops = torch.ops.quant
        y: torch.Tensor
        if self.in_fp8 and len(self.offsets) == 1:
            # A product of its own, whose sums have all bits in the backward pass at no cost.
            (codes, scale), (other, other_scale) = a, b
            matrix = other.view(-1, other.shape[-1])
            y = ops.e4m3_product(codes, scale.view(-1), matrix, other_scale.view(-1), is_forward, dtype)
            return y if other.dim() == 3 else y[None]
        y = ops.e4m3_grouped_product(*a, *b, self.offsets, not self.in_fp8, dtype)
        return y


@dataclass(frozen=True, eq=False)
class _BlockProducts:
    """Products of operands in blocks, by BF16 tensor cores."""

    offsets: torch.Tensor  # the row after the last of each expert

    def rows(self, x: torch.Tensor, format: Format) -> _Rounded:
        """Rounds `x` `[rows, columns]` in blocks along the columns."""
        return torch.ops.quant.e4m3_blocks(x, *format.block, x.dtype)  # type: ignore[no-any-return]

    def columns(self, x: torch.Tensor, format: Format) -> _Rounded:
        """Rounds `x` `[rows, columns]` in blocks along the rows."""
        return torch.ops.quant.e4m3_blocks(x, *format.block[::-1], x.dtype)  # type: ignore[no-any-return]

    def y(self, x: _Rounded, weight: torch.Tensor, format: Format, dtype: torch.dtype) -> torch.Tensor:
        matrices = _rounded_stack(weight, *format.block, dtype)
        return functional.grouped_mm(x[0], matrices.transpose(1, 2), offs=self.offsets)

    def dx(self, dy: _Rounded, weight: torch.Tensor, format: Format, dtype: torch.dtype) -> torch.Tensor:
        # The sum is over the outputs.
        return functional.grouped_mm(dy[0], _rounded_stack(weight, *format.block[::-1], dtype), offs=self.offsets)

    def dw(self, dy: _Rounded, x: _Rounded, dtype: torch.dtype) -> torch.Tensor:
        return functional.grouped_mm(dy[0].t(), x[0], offs=self.offsets)


def _rounded_stack(weight: torch.Tensor, height: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Rounds matrices `[experts, out, in]` in blocks."""
    rows = weight.shape[1]
    # Zeros keep a block from reaching into the next expert.
    missing = -rows % height
    filled = functional.pad(weight, (0, 0, 0, missing)) if missing else weight
    values: torch.Tensor = torch.ops.quant.e4m3_blocks(filled.flatten(0, 1), height, width, dtype)[0]
    values = values.view(filled.shape)
    # A grouped product takes matrices that lie one after another.
    return values[:, :rows].contiguous() if missing else values


class RowProducts:
    """The three products of a linear layer: `[..., in]` to `[..., out]`, with gradients."""

    # On an H100, torch.compile of torch 2.11 gave zeros as gradients of x and w in one graph, on a CPU the right ones.
    @torch.compiler.disable(reason="FP8 rows by native run as they are; torchao has them in one graph")  # type: ignore[untyped-decorator]
    def __call__(self, x: torch.Tensor, weight: torch.Tensor, state: LowPrecision, whole: torch.Tensor) -> torch.Tensor:
        """Computes the product; each row has a scale of its own, so that shards of `whole` need nothing of it."""
        rows = x.reshape(-1, x.shape[-1])
        # Tensor cores sum over multiples of 16, in dw over tokens. Zeros change no largest magnitude and no sum.
        missing = -len(rows) % block_of_tokens(state.recipe)
        filled = pad(rows, (0, 0, 0, missing)) if missing else rows
        end = torch.full((1,), len(filled), dtype=torch.int32, device=x.device)
        y: torch.Tensor = GroupedProducts.apply(filled, weight[None], end, state, True)  # type: ignore[no-untyped-call]
        return (y[: len(rows)] if missing else y).reshape(*x.shape[:-1], -1)
