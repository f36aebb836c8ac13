"""Grouped products of fused experts in training: one matrix product multiplies the tokens of all experts.

    hidden [tokens, in]  ─▶  x [rows, in]      a row for each token and slot, sorted by expert
    x                    ─▶  y [rows, out]     rows of expert e multiply its matrix
    y                    ─▶  [tokens, out]     sum over the slots of a token, by the router's weights

    rows    0       45      128        256       295         capacity
            ├ expert 0 ┤ zeros ┤ expert 1 ┤ expert 2 ┤ zeros ┤

Zeros fill the rows of each expert to a multiple of the recipe's block along the tokens. So one rounding of the whole
matrix gives the operands that each expert has by itself, for blocks along the rows (y, dx) and along the tokens (dw):
no block holds tokens of two experts, and zeros change no largest magnitude and no sum.

Operands in blocks are elements times a power of two, which BF16 holds exactly. A grouped product in BF16, which sums in
FP32, therefore gives the products of the recipe but for the order of sums, on any GPU. Where each row of an operand has
one scale, Hopper's FP8 tensor cores multiply (`quant/kernels/training/grouped_fp8.py`). Recipes with one scale for all
tokens of an expert have no grouped products: `takes_recipe`.

The capacity follows from shapes alone, and offsets stay on the device: the host does not wait for the router.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from quant.formats.format import Format
from quant.formats.format import E4M3
from quant.kernels.linear.experts import sort_by_expert
from quant.kernels.linear.ops import autocast_dtype
from quant.kernels.training import grouped_fp8 as grouped_fp8  # registers quant::e4m3_grouped_product and its operands
from quant.training.low_precision.state import LowPrecision
from quant.training.low_precision.training_recipe import TrainingRecipe

_DEVICES = {"cuda"}  # kinds of device with grouped products; on a CPU they save nothing, and tests add it


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


def takes_experts(module: Any, recipe: TrainingRecipe) -> bool:
    """Returns whether a GPU multiplies the experts of a transformers module in groups, by a recipe."""
    # Other kinds of experts add a bias or a norm for each token, which the zeros between experts must not get.
    is_plain = not getattr(module, "has_bias", False) and not getattr(module, "has_post_expert_norm", False)
    return is_plain and takes_recipe(recipe)


def takes(module: Any, x: torch.Tensor, recipe: TrainingRecipe) -> bool:
    """Returns whether the experts of a transformers module are multiplied in groups where `x` `[tokens, in]` is."""
    dtype = autocast_dtype(x) or x.dtype
    # FP16 does not hold the operands, and PyTorch multiplies groups in FP32 one after another.
    has_products = dtype is torch.bfloat16 or (dtype is torch.float32 and not x.is_cuda)
    if not (has_products and x.device.type in _DEVICES and len(x) > 0 and takes_experts(module, recipe)):
        return False
    # Parallelism that leaves parameters as DTensors in the forward pass divides experts or their products.
    return not any(hasattr(parameter, "full_tensor") for parameter in module.parameters())


def block_of_tokens(recipe: TrainingRecipe) -> int:
    """Returns the number of rows of which each expert has a multiple: a grouped product needs 16."""
    formats = (recipe.input, recipe.gradient)
    return math.lcm(16, *(size for format in formats if format is not None for size in format.block if size))


@dataclass(frozen=True, eq=False)
class Groups:
    """The rows of a grouped product.

    Attributes:
        positions: the row of each token and slot, int64 `[tokens · k]`; slots of no expert have rows of zeros.
        slots: the token and slot of each row, int64 `[rows]`; tokens · k for a row of zeros.
        offsets: the row after the last of each expert, int32 `[experts]`; the last expert has all rows that remain.
        is_empty: whether a row is one of zeros, `[rows, 1]`.
    """

    positions: torch.Tensor
    slots: torch.Tensor
    offsets: torch.Tensor
    is_empty: torch.Tensor


def group_by_expert(index: torch.Tensor, experts: int, block: int) -> Groups:
    """Returns the rows for a router's choice `[tokens, k]`; each expert has a multiple of `block`, and at least one.

    An expert without tokens has a block of zeros, whose product writes the zeros of its weight gradient.
    """
    order, starts = sort_by_expert(index, experts)
    count = len(order)
    blocks = (starts.diff() + (block - 1)).div(block, rounding_mode="floor").clamp(min=1)
    ends = (blocks * block).cumsum(0)
    # From the place of a slot in the sorted order to its row; experts that are not on this rank come last of all.
    begins = torch.cat([ends - blocks * block, ends[-1:]])
    sorted_index = index.flatten()[order].clamp(max=experts)
    rows = torch.arange(count, device=index.device) + (begins - starts)[sorted_index]
    # Σ of blocks is at most count / block + experts, so the host needs no number from the device.
    capacity = -(-count // block) * block + experts * block
    positions = torch.empty_like(order)
    positions[order] = rows
    slots = torch.full((capacity,), count, device=index.device)
    slots[rows] = torch.where(sorted_index < experts, order, count)
    # A product then writes every row, and zeros where no token is.
    ends[-1] = capacity
    return Groups(positions, slots, ends.int(), (slots == count)[:, None])


class SpreadRows(torch.autograd.Function):
    """Copies tokens `[tokens, columns]` to the rows of their experts, `[rows, columns]`, among zeros."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(positions)
        ctx.tokens = len(x)
        # A row of zeros follows the tokens, and rows without a token read that.
        return functional.pad(x, (0, 0, 0, 1)).index_select(0, slots // (len(positions) // len(x)))

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Each slot reads its own row, so the sum has the same order at every call, unlike a sum by `index_add_`.
        return torch.ops.quant.weigh_rows(dy, *ctx.saved_tensors, None, ctx.tokens, dy.dtype), None, None


class WeighRows(torch.autograd.Function):
    """Sums the rows of each token's experts by the router's weights: `[rows, columns]` to `[tokens, columns]`."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weights: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, positions, slots, weights)
        y: torch.Tensor = torch.ops.quant.weigh_rows(rows, positions, weights, len(weights), dtype)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *torch.ops.quant.weigh_rows_backward(dy, *ctx.saved_tensors), None, None, None


def grouped_experts(
    module: Any, first: Any, down: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Runs a transformers experts module by grouped products, `[tokens, hidden]` to the same.

    Between the products, PyTorch's operations would take as long as these: SwiGLU and the weighted sum are one kernel
    for each direction.

    Args:
        module: that `takes` accepts.
        first, down: the stacks of its projections.
        hidden: `[tokens, hidden]`.
        index: expert of each token and slot, `[tokens, k]`; indices beyond the last expert count nothing.
        weights: the router's, `[tokens, k]`.
    """
    groups = group_by_expert(index, module.num_experts, block_of_tokens(first.low_precision.recipe))
    x = hidden.to(autocast_dtype(hidden) or hidden.dtype)
    up = first.grouped(SpreadRows.apply(x, groups.positions, groups.slots), groups.offsets)  # type: ignore[no-untyped-call]
    if has_swiglu(module):
        up = SwiGLU.apply(up)  # type: ignore[no-untyped-call]
    else:
        # Not every activation maps zeros to zeros.
        up = (module._apply_gate(up) if module.has_gate else module.act_fn(up)).masked_fill(groups.is_empty, 0)
    y = down.grouped(up, groups.offsets)
    weighted: torch.Tensor = WeighRows.apply(y, weights, groups.positions, groups.slots, hidden.dtype)  # type: ignore[no-untyped-call]
    return weighted


def has_swiglu(module: Any) -> bool:
    """Returns whether a transformers experts module computes silu(gate) · up between its products."""
    from transformers.integrations.moe import _default_apply_gate

    is_silu = isinstance(module.act_fn, torch.nn.SiLU) or type(module.act_fn).__name__ == "SiLUActivation"
    return is_silu and module.has_gate and type(module)._apply_gate is _default_apply_gate


class SwiGLU(torch.autograd.Function):
    """silu(gate) · up of `[rows, 2 · columns]`; nothing but the argument is kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, both: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(both)
        y: torch.Tensor = torch.ops.quant.swiglu(both)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        d_both: torch.Tensor = torch.ops.quant.swiglu_backward(dy, *ctx.saved_tensors)
        return d_both


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
    """Products of operands with a scale for each row.

    Attributes:
        offsets: the row after the last of each expert.
        in_fp8: whether FP8 tensor cores multiply, where the GPU has such a product.
    """

    offsets: torch.Tensor
    in_fp8: bool

    def rows(self, x: torch.Tensor, format: Format) -> _Rounded:
        """Rounds each row of `x` `[rows, columns]`."""
        operand: _Rounded = torch.ops.quant.e4m3_rows(x)
        return operand

    def columns(self, x: torch.Tensor, format: Format) -> _Rounded:
        """Rounds each column of `x` `[rows, columns]` within the rows of an expert; codes are transposed."""
        operand: _Rounded = torch.ops.quant.e4m3_columns(x, self.offsets, False, None)
        return operand

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
    """Products of operands in blocks, by BF16 tensor cores.

    Attributes:
        offsets: the row after the last of each expert.
    """

    offsets: torch.Tensor

    def rows(self, x: torch.Tensor, format: Format) -> _Rounded:
        """Rounds `x` `[rows, columns]` in blocks along the columns."""
        operand: _Rounded = torch.ops.quant.e4m3_blocks(x, *format.block, x.dtype)
        return operand

    def columns(self, x: torch.Tensor, format: Format) -> _Rounded:
        """Rounds `x` `[rows, columns]` in blocks along the rows."""
        operand: _Rounded = torch.ops.quant.e4m3_blocks(x, *format.block[::-1], x.dtype)
        return operand

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
