"""`LowPrecisionLinear` is an `nn.Linear` whose three matrix products take rounded operands.

It is put in place by changing the class of a module: parameters, buffers, hooks and attributes stay the same objects,
so optimizers made before go on, tied weights stay tied, and a state dict has the keys of `nn.Linear`. Everything that
training adds is in `low_precision`, a plain attribute.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from quant.training.low_precision.hadamard import transform_tokens
from quant.training.low_precision.operands import Operand, multiply, round_operand
from quant.training.low_precision.recipe import TrainingRecipe

INPUT_HISTORY = 1024
"""Training steps whose largest input magnitude becomes the static input scale of the deployed layer."""


class AmaxHistory:
    """The largest magnitudes of a tensor in the last steps.

    Args:
        steps: how many steps are remembered.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._values: torch.Tensor | None = None  # float32 [steps], on the device of what is recorded
        self._next = 0

    def record(self, amax: torch.Tensor) -> None:
        """Takes in the largest magnitude of a step."""
        if self._values is None or self._values.device != amax.device:
            self._values = torch.zeros(self.steps, device=amax.device)
        self._values[self._next] = amax.float()
        self._next = (self._next + 1) % self.steps

    @property
    def amax(self) -> torch.Tensor | None:
        """The largest of the remembered magnitudes, float32 scalar; None before the first step."""
        return None if self._values is None else self._values.amax()


@dataclass(eq=False)
class LowPrecision:
    """What a layer in low-precision training has beside its parameters.

    Attributes:
        recipe: how products are rounded.
        rounds_forward: whether the forward product is rounded; a recipe's schedule turns it off in the end.
        amax: histories of x, w and dy, by those names, for recipes with delayed scaling; x is always recorded.
    """

    recipe: TrainingRecipe
    rounds_forward: bool = True
    amax: dict[str, AmaxHistory] = field(default_factory=dict)

    def __post_init__(self) -> None:
        steps = self.recipe.history or INPUT_HISTORY
        self.amax = {name: AmaxHistory(steps) for name in ("x", "w", "dy")}

    def delayed(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """The largest magnitude of earlier steps, by which a recipe with a history scales; records this step's.

        The first step has no earlier ones and scales by its own.
        """
        if not self.recipe.history:
            return None
        current = tensor.detach().abs().amax().float()
        earlier = self.amax[name].amax
        self.amax[name].record(current)
        return current if earlier is None else earlier


class LowPrecisionLinear(nn.Linear):
    """A linear layer in low-precision training; see `to_low_precision_training`."""

    low_precision: LowPrecision

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), self.weight.to(dtype)
        y = _RoundedProducts.apply(x, weight, self.low_precision)
        return y if self.bias is None else y + self.bias.to(dtype)  # type: ignore[no-any-return]


class _RoundedProducts(torch.autograd.Function):
    """The three products of a linear layer, each on rounded operands."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, layer: LowPrecision) -> torch.Tensor:
        ctx.layer, ctx.shape = layer, x.shape
        rows = x.reshape(-1, x.shape[-1])
        recipe = layer.recipe
        ctx.scaled_by = layer.delayed("x", rows), layer.delayed("w", weight)
        if not recipe.history and rows.numel():
            layer.amax["x"].record(rows.abs().amax())
        ctx.save_for_backward(rows, weight)
        if recipe.input is None or recipe.weight is None or not layer.rounds_forward:
            return nn.functional.linear(x, weight)
        a = round_operand(rows, recipe.input, recipe, amax=ctx.scaled_by[0])
        b = round_operand(weight, recipe.weight, recipe, amax=ctx.scaled_by[1])
        return multiply(a, b, x.dtype).reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:  # type: ignore[override]
        (rows, weight), layer = ctx.saved_tensors, ctx.layer
        recipe: TrainingRecipe = layer.recipe
        flat = dy.reshape(-1, dy.shape[-1])
        amax = layer.delayed("dy", flat)
        of_x, of_w = ctx.scaled_by
        dx = dw = None
        if ctx.needs_input_grad[0]:
            if recipe.gradient is None or not recipe.rounds_dx:
                dx = flat @ weight
            else:
                a = round_operand(flat, recipe.gradient, recipe, stochastic=recipe.stochastic_gradients, amax=amax)
                dx = multiply(a, _transposed_weight(weight, recipe, of_w), dy.dtype)
            dx = dx.reshape(ctx.shape)
        if ctx.needs_input_grad[1]:
            if recipe.gradient is None or recipe.input is None or not recipe.rounds_dw:
                dw = flat.t() @ rows
            else:
                columns = transform_tokens(flat.t(), recipe.hadamard)
                a = round_operand(columns, recipe.gradient, recipe, stochastic=recipe.stochastic_gradients, amax=amax)
                b = round_operand(transform_tokens(rows.t(), recipe.hadamard), recipe.input, recipe, amax=of_x)
                dw = multiply(a, b, weight.dtype)
        return dx, dw, None


def _transposed_weight(weight: torch.Tensor, recipe: TrainingRecipe, amax: torch.Tensor | None) -> Operand:
    """wᵀ, rounded along the outputs: the same codes as in the forward product where blocks are square or the tensor."""
    format = recipe.weight_for_dx
    assert format is not None
    if format.per_tensor or format.has_square_blocks:
        return round_operand(weight, format, recipe, amax=amax).transposed
    return round_operand(weight.t(), format, recipe)
