"""`LowPrecisionLinear` is an `nn.Linear` whose three matrix products take rounded operands.

It is put in place by changing the class of a module: parameters, buffers, hooks and attributes stay the same objects,
so optimizers made before go on, tied weights stay tied, and a state dict has the keys of `nn.Linear`. Everything that
training adds is in `low_precision`, a plain attribute.

A layer in training mode rounds as the recipe says. A layer in eval mode computes as the deployed layer will, with the
static input scale of the steps so far: the loss that a training loop evaluates is the loss of the packed model.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from quant.base.errors import UserError
from quant.kernels.base.custom_ops import autocast_dtype
from quant.training.low_precision.native import cast
from quant.training.low_precision.native_fusions import merged_product
from quant.training.low_precision.operands import multiply, operand_of, transform_tokens
from quant.training.low_precision.state import LowPrecision, deployed_layer


class LowPrecisionLinear(nn.Linear):
    """A linear layer in low-precision training; see `to_low_precision_training`."""

    low_precision: LowPrecision

    @property
    def held(self) -> Tensor:
        return self.weight

    @property
    def trains(self) -> bool:
        return self.training

    def forward(self, input: Tensor) -> Tensor:
        """Maps `[..., in]` to `[..., out]`, in the dtype of `input`, or autocast's."""
        # The backward pass of delayed scaling changes a history, which no compiled graph can.
        return _outside_graphs(self, input) if self.low_precision.recipe.history else _forward(self, input)


def _forward(layer: LowPrecisionLinear, x: Tensor) -> Tensor:
    # Autocast would give each layer another tensor, and hide that q, k and v read the same one.
    merged = merged_product(layer, x) if layer.training and x.numel() else None
    x = cast(x, autocast_dtype(x) or x.dtype)
    bias = None if layer.bias is None else layer.bias.to(x.dtype)
    if merged is not None:
        layer.low_precision.note_weight(layer.weight)
        return merged if bias is None else merged + bias
    # No tokens, as an expert may have in a step: there is no largest magnitude to scale by.
    if not x.numel():
        return functional.linear(x, layer.weight.to(x.dtype), bias)
    if hasattr(layer.weight, "full_tensor"):
        return _trained_on_shards(layer, x, bias)
    if layer.training:
        return _trained(layer, x, bias)
    y: Tensor = _deployed(layer, x)
    if not torch.is_grad_enabled():
        return y
    return ValueOf.apply(_trained(layer, x, bias), y)  # type: ignore[no-untyped-call]


def _trained(layer: LowPrecisionLinear, x: Tensor, bias: Tensor | None) -> Tensor:
    y = _product(layer, x, layer.weight, x)
    return y if bias is None else y + bias


def _trained_on_shards(layer: LowPrecisionLinear, x: Any, bias: Any) -> Tensor:
    """Computes `_trained` under tensor parallelism: each rank multiplies by its shard of the weight, a DTensor.

    Shards of outputs (colwise) give shards of y, shards of inputs (rowwise) give summands of it. Blocks lie on one rank
    where shards are whole blocks; a scale of the whole x or w is common to all ranks. A model in eval mode rounds as in
    training, for a deployed layer is not sharded.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    weight: Any = layer.weight
    mesh, placements = weight.device_mesh, tuple(weight.placements)
    if placements not in ((Shard(0),), (Shard(1),)):
        raise UserError(
            f"{layer.low_precision.name}: its weight is a DTensor placed as {placements}; tensor parallelism shards "
            "outputs (ColwiseParallel) or inputs (RowwiseParallel) along one axis of a mesh"
        )
    by_outputs, last = placements == (Shard(0),), Shard(x.dim() - 1)
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [Replicate() if by_outputs else last], run_check=False)
    x = x.redistribute(placements=[Replicate() if by_outputs else last])
    # dx of a shard of outputs is a summand.
    local = x.to_local(grad_placements=[Partial() if by_outputs else last])
    product = _product(layer, local, weight.to_local(), x)
    y: Any = DTensor.from_local(product, mesh, [last if by_outputs else Partial()], run_check=False)
    # A bias is added once, to the sum.
    return y if bias is None else (y if by_outputs else y.redistribute(placements=[Replicate()])) + bias


def _product(layer: LowPrecisionLinear, x: Tensor, weight: Tensor, whole: Tensor) -> Tensor:
    """Computes x wᵀ as the recipe rounds it; `whole` is x of all ranks, whose largest magnitude counts."""
    state = layer.low_precision
    y: Tensor
    if torch._C._are_functorch_transforms_active():
        raise UserError(f"{state.name}: trains in {state.recipe.name}, which takes no part in transforms of torch.func")
    if layer.training:
        state.note_weight(layer.weight)
    # A schedule that ends the forward's rounding is ours alone, and so are gradients in eval mode.
    if state.products is not None and state.rounds_forward and layer.training:
        y = state.products(x, weight, state, whole)
    else:
        if layer.training:
            x_amax, w_amax = state.scaled_by(whole)
        else:
            x_amax, w_amax = None, None
            if state.recipe.weight is not None and state.recipe.weight.is_static:
                w_amax = state.weight_amax()
        y = RoundedProducts.apply(x, weight, x_amax, w_amax, state)  # type: ignore[no-untyped-call]
    return y


@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason="delayed scaling changes a history in the backward pass: compile without fullgraph=True, or train in "
    "fp8_tensorwise"
)
def _outside_graphs(layer: LowPrecisionLinear, x: Tensor) -> Tensor:
    return _forward(layer, x)


@torch.compiler.disable  # type: ignore[untyped-decorator]
@torch.no_grad()
def _deployed(layer: LowPrecisionLinear, x: Tensor) -> Tensor:
    return deployed_layer(layer, layer.low_precision, x)(x)


class ValueOf(torch.autograd.Function):
    """The gradient of `y` with another value: a deployed layer's product is trained by the recipe's gradients."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


class RoundedProducts(torch.autograd.Function):
    """The three products of a linear layer, each on rounded operands.

    The weight may be wider than the input: it is rounded to the format from its own dtype, never through a third one.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, x_amax: Tensor | None, w_amax: Tensor | None, state: LowPrecision
    ) -> Tensor:
        ctx.state, ctx.shape = state, x.shape
        ctx.x_amax, ctx.w_amax = x_amax, w_amax
        rows = x.reshape(-1, x.shape[-1])
        recipe = state.recipe
        state.note_input(rows)
        # The operands themselves, and not their codes: dw rounds x along the tokens, dx rounds w along the outputs.
        ctx.save_for_backward(rows, weight)
        if recipe.input is None or recipe.weight is None or not state.rounds_forward:
            return functional.linear(x, weight.to(x.dtype))
        a = operand_of(rows, recipe.input, recipe, amax=x_amax)
        b = operand_of(weight, recipe.weight, recipe, amax=w_amax)
        return multiply(a, b, x.dtype).reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (rows, weight), state = ctx.saved_tensors, ctx.state
        flat = dy.reshape(-1, dy.shape[-1])
        state.note_gradient(flat)
        amax = state.gradient_scaled_by(flat)
        recipe, dx, dw = state.recipe, None, None
        gradient, stochastic = recipe.gradient, recipe.stochastic_gradients
        if ctx.needs_input_grad[0]:
            if gradient is None or recipe.weight is None or not recipe.rounds_dx:
                dx = flat @ weight.to(flat.dtype)
            else:
                a = operand_of(flat, gradient, recipe.of_gradients, stochastic=stochastic, amax=amax)
                format = recipe.weight_for_dx
                assert format is not None
                # wᵀ along the outputs has the forward product's codes if blocks are square or the whole tensor.
                if format.per_tensor or format.has_square_blocks:
                    b = operand_of(weight, format, recipe, amax=ctx.w_amax).transposed
                else:
                    b = operand_of(weight.t(), format, recipe, amax=ctx.w_amax if format.global_scale else None)
                dx = multiply(a, b, flat.dtype)
            dx = dx.reshape(ctx.shape)
        if ctx.needs_input_grad[1]:
            if gradient is None or recipe.input is None or not recipe.rounds_dw:
                dw = flat.t() @ rows
            else:
                # Both operands are transformed before they are rounded, so that H cancels in their product.
                dy_t, x_t = (transform_tokens(each.t(), recipe.hadamard) for each in (flat, rows))
                a = operand_of(dy_t, gradient, recipe.of_gradients, stochastic=stochastic, amax=amax)
                # Without a history the transposed input has a scale of its own, after the Hadamard transform.
                b = operand_of(x_t, recipe.input, recipe, amax=ctx.x_amax if recipe.history else None)
                dw = multiply(a, b, torch.float32)
            dw = dw.to(weight.dtype)
        return dx, dw, None, None, None
