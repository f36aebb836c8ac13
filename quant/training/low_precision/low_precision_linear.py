"""`LowPrecisionLinear` is an `nn.Linear` whose three matrix products take rounded operands.

It is put in place by changing the class of a module: parameters, buffers, hooks and attributes stay the same objects,
so optimizers made before go on, tied weights stay tied, and a state dict has the keys of `nn.Linear`. Everything that
training adds is in `low_precision`, a plain attribute.

A layer in training mode rounds as the recipe says. A layer in eval mode computes as the deployed layer will, with the
static input scale of the steps so far: the loss that a training loop evaluates is the loss of the packed model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.functional import pad

from quant.base.errors import UserError
from quant.kernels.base.custom_ops import autocast_dtype, register, without_autocast
from quant.kernels.rounding.hadamard import on_each_device
from quant.kernels.training.fp8_block_layout import BLOCK
from quant.training.low_precision.native import NativeProducts, keeps_columns, unpadded
from quant.training.low_precision.operands import Operand, float32_product, multiply, operand_of
from quant.training.low_precision.state import deployed_layer
from quant.training.low_precision.state import LowPrecision
from quant.training.low_precision.training_recipe import TrainingRecipe
from quant.training.low_precision.native_fusions import NormInput, cast, origin_of

# Layers that a runtime merges (q, k and v) sum their dx in one product, in the native backend.
#
#     forward    codes(x) · codes(q)ᵀ    codes(x) · codes(k)ᵀ    codes(x) · codes(v)ᵀ
#     backward   dx = codes([dq dk dv]) · codes_t([q; k; v])ᵀ
#
# Three products would write dx three times in 16 bit, and two additions would read them again. One product sums over
# the outputs of all three in FP32 and rounds once. The other products stay apart: together they have as many tiles, so
# that nothing is gained, and results in tensors of their own can be freed and viewed as ever.
#
# The layers are called one by one. The first of a group computes the outputs of all, and leaves them with the products
# that the model's layers share; the others fetch theirs, provided that they are called with the same input in the same
# mode and have the same weights. A group whose outputs were not fetched is not computed as one again.


@dataclass(eq=False)
class _Pending:
    """Outputs of a group's layers that have not been called yet.

    Attributes:
        x: the input, before autocast.
        mode: of the call: see `_mode`.
        outputs: by the position of a layer in its group: its weight, the weight's version, and the output.
        state: of the layer that computed them.
    """

    x: torch.Tensor
    mode: tuple[Any, ...]
    outputs: dict[int, tuple[torch.Tensor, int, torch.Tensor]]
    state: LowPrecision


def merged_product(layer: Any, x: torch.Tensor) -> torch.Tensor | None:
    """Returns x wᵀ of a layer in training, computed with the layers that are merged with it; None where none is.

    Args:
        layer: a `LowPrecisionLinear`.
        x: `[..., in]`, before autocast.
    """
    state = layer.low_precision
    native, group = state.products, state.group
    if len(group) < 2 or not isinstance(native, NativeProducts):
        return None
    if group[0] is not layer:
        positions = [position for position, member in enumerate(group) if member is layer]
        # A replica of `nn.DataParallel` is in no group.
        return _fetched(native, positions[0], layer.weight, x) if positions else None
    if native.pending is not None:
        # Some layer of that group got another input: computing it as one would be in vain again.
        native.pending.state.merges, native.pending = False, None
    if not (state.merges and torch.is_grad_enabled() and x.requires_grad):
        return None  # without a gradient of x there is nothing to sum
    if not all(_is_alike(layer, member, x) for member in group):
        return None
    weights = [member.weight for member in group]
    rounded_x = cast(x, autocast_dtype(x) or x.dtype)
    states = [member.low_precision for member in group]
    y, *siblings = _MergedProducts.apply(rounded_x, states, origin_of(rounded_x), *weights)  # type: ignore[no-untyped-call]
    outputs = {i + 1: (weights[i + 1], _version(weights[i + 1]), sibling) for i, sibling in enumerate(siblings)}
    native.pending = _Pending(x, _mode(x), outputs, state)
    return y  # type: ignore[no-any-return]


def _fetched(native: NativeProducts, position: int, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
    """Returns the output that the first layer of the group has computed for another one; None for another product."""
    pending: _Pending | None = native.pending
    if pending is None or pending.x is not x or pending.mode != _mode(x) or position not in pending.outputs:
        return None
    expected, version, y = pending.outputs[position]
    if expected is not weight or version != _version(weight):
        return None
    del pending.outputs[position]
    if not pending.outputs:
        native.pending = None
    return y


def _mode(x: torch.Tensor) -> tuple[Any, ...]:
    return torch.is_grad_enabled(), autocast_dtype(x), _version(x)


def _version(x: torch.Tensor) -> int:
    """Returns a number that changes when a tensor is changed in place; a compiler sees such changes itself."""
    return 0 if torch.compiler.is_compiling() else x._version


def _is_alike(first: Any, member: Any, x: torch.Tensor) -> bool:
    """Returns whether a layer of a group can be computed with the first one."""
    weight, state = member.weight, member.low_precision
    return (
        member.training
        and state.products is first.low_precision.products
        and state.rounds_forward
        and weight.requires_grad == first.weight.requires_grad
        and weight.device == x.device
        and not hasattr(weight, "full_tensor")  # a DTensor, of tensor parallelism or of FSDP2 for single layers
        and weight.shape[0] % BLOCK == 0
    )


class _MergedProducts(torch.autograd.Function):
    """The products of layers with the same input, on operands in FP8 blocks."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, states: Any, origin: NormInput | None, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        native: NativeProducts = states[0].products
        ctx.native, ctx.states, ctx.shape, ctx.dtype = native, states, x.shape, x.dtype
        tokens = x.numel() // x.shape[-1]
        codes, scale, codes_t, scale_t = native.operands(x, weights[0].requires_grad, origin)
        keeps = keeps_columns(sum(map(len, weights)), tokens)
        *operands, w_codes_t, w_scale_t = native.quantize_stacked(weights, columns=keeps)
        ctx.save_for_backward(codes_t, scale_t, w_codes_t, w_scale_t, *weights)
        outputs = []
        for state, weight, w in zip(states, weights, zip(operands[::2], operands[1::2], strict=True), strict=True):
            state.note_input(scale)
            y = torch.ops.quant.fp8_block_product(codes, scale, *w, True, x.dtype)
            outputs.append(unpadded(y, tokens, len(weight)).reshape(*x.shape[:-1], -1))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        codes_t, scale_t, w_codes_t, w_scale_t, *weights = ctx.saved_tensors
        native, ops = ctx.native, torch.ops.quant
        for_x, for_w = ctx.needs_input_grad[0], any(ctx.needs_input_grad[3:])
        rows = [dy.reshape(-1, dy.shape[-1]) for dy in gradients]
        codes, scale, *transposed = ops.fp8_block_side_by_side(rows, native.rule, for_x, for_w)
        d = [(codes, scale, *t) for t in zip(transposed[::2], transposed[1::2], strict=True)]
        # Further scales belong to padding.
        blocks = [len(weight) // BLOCK for weight in weights]
        own_scales = scale[: sum(blocks)].split(blocks) if for_x else [operands[3] for operands in d]
        for state, each in zip(ctx.states, own_scales, strict=True):
            state.note_gradient(each)
        dx = None
        if for_x:
            if not w_codes_t.numel():
                w_codes_t, w_scale_t = native.quantize_stacked(weights, rows=False)[-2:]
            dx = ops.fp8_block_product(codes, scale, w_codes_t, w_scale_t, True, ctx.dtype)
            dx = unpadded(dx, len(rows[0]), weights[0].shape[1]).reshape(ctx.shape)
        dw = [
            native.weight_gradient(operands, codes_t, scale_t, weight) if is_needed else None
            for operands, weight, is_needed in zip(d, weights, ctx.needs_input_grad[3:], strict=True)
        ]
        return dx, None, None, *dw


# The random Hadamard transform of 16 consecutive tokens that precedes the rounding of dw's operands.
#
#     H = diag(signs) H₁₆ / 4        orthogonal, so (H dyᵀᵀ)ᵀ (H x) = dyᵀ x
#
# An outlier of one token is spread over 16, which an E2M1 grid with a largest value of 6 rounds far better. Both
# operands need the same signs. Transformer Engine has one vector of signs for all layers and ranks, never drawn again;
# the same vector serves here, so nothing has to be saved or kept equal among ranks.


SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""Transformer Engine 2.20's `get_wgrad_sign_vector`."""


@on_each_device
def hadamard_matrix(size: int) -> torch.Tensor:
    """Returns `diag(signs) H / sqrt(size)`, float32 `[size, size]`."""
    matrix = torch.ones(1, 1, device="cpu", dtype=torch.float32)
    while len(matrix) < size:  # Sylvester's construction
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    signs = torch.tensor(SIGNS[:size], dtype=torch.float32, device="cpu")
    turned: torch.Tensor = signs[:, None] * matrix / size**0.5
    return turned


def transform_tokens(x: torch.Tensor, size: int) -> torch.Tensor:
    """Transforms each `size` consecutive tokens of `x` `[rows, tokens]`; a short last block counts zeros.

    The result is BF16, as in Transformer Engine's kernels: the transform happens in registers between the load of a
    BF16 tensor and the rounding to E2M1. Its width is a multiple of `size`, which changes no sum over tokens.
    """
    return torch.ops.quant.transform_tokens(x, size) if size else x


def _transformed(x: torch.Tensor, size: int) -> torch.Tensor:
    # Both operands get the same zeros, which add nothing to a sum over tokens.
    blocks = pad(x, (0, -x.shape[1] % size)).bfloat16().unflatten(1, (-1, size))
    matrix = hadamard_matrix(x, size)
    if x.is_cuda:  # tensor cores sum in FP32, and BF16 holds the matrix
        with without_autocast(x):
            turned = blocks @ matrix.bfloat16()
    else:
        turned = float32_product(blocks.float(), matrix).bfloat16()
    transformed: torch.Tensor = turned.flatten(1)
    return transformed


def _fake(x: torch.Tensor, size: int) -> torch.Tensor:
    return x.new_empty((x.shape[0], -(-x.shape[1] // size) * size), dtype=torch.bfloat16)


# An op, because compilers would make the matrix anew in each graph, on the host.
register("quant::transform_tokens", "(Tensor x, int size) -> Tensor", _fake, default=_transformed)


class LowPrecisionLinear(nn.Linear):
    """A linear layer in low-precision training; see `to_low_precision_training`."""

    low_precision: LowPrecision

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Maps `[..., in]` to `[..., out]`, in the dtype of `input`, or autocast's."""
        # The backward pass of delayed scaling changes a history, which no compiled graph can.
        return _outside_graphs(self, input) if self.low_precision.recipe.history else _forward(self, input)


def _forward(layer: LowPrecisionLinear, x: torch.Tensor) -> torch.Tensor:
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
    y: torch.Tensor = _deployed(layer, x)
    if not torch.is_grad_enabled():
        return y
    return ValueOf.apply(_trained(layer, x, bias), y)  # type: ignore[no-any-return, no-untyped-call]


def _trained(layer: LowPrecisionLinear, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Computes the product as the recipe rounds it, with gradients."""
    y = _product(layer, x, layer.weight, x)
    return y if bias is None else y + bias


def _trained_on_shards(layer: LowPrecisionLinear, x: Any, bias: Any) -> torch.Tensor:
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
    return y if bias is None else (y if by_outputs else y.redistribute(placements=[Replicate()])) + bias  # type: ignore[no-any-return]


def _product(layer: LowPrecisionLinear, x: torch.Tensor, weight: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Computes x wᵀ as the recipe rounds it; `whole` is x of all ranks, whose largest magnitude counts."""
    state = layer.low_precision
    y: torch.Tensor
    if layer.training:
        state.note_weight(layer.weight)
    # A schedule that ends the forward's rounding is ours alone, and so are gradients in eval mode.
    if state.products is not None and state.rounds_forward and layer.training:
        y = state.products(x, weight, state, whole)
    else:
        if layer.training:
            of_x, of_w = state.scaled_by(whole)
        else:
            of_x, of_w = None, state.weight_amax() if state.recipe.weight and state.recipe.weight.is_static else None
        y = RoundedProducts.apply(x, weight, of_x, of_w, state)  # type: ignore[no-untyped-call]
    return y


@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason="delayed scaling changes a history in the backward pass: compile without fullgraph=True, or train in "
    "fp8_tensorwise"
)
def _outside_graphs(layer: LowPrecisionLinear, x: torch.Tensor) -> torch.Tensor:
    return _forward(layer, x)


@torch.compiler.disable  # type: ignore[untyped-decorator]
@torch.no_grad()
def _deployed(layer: LowPrecisionLinear, x: torch.Tensor) -> torch.Tensor:
    """Computes the product of the deployed layer, without gradients."""
    return deployed_layer(layer, layer.low_precision, x)(x)  # type: ignore[no-any-return]


class ValueOf(torch.autograd.Function):
    """The gradient of `y` with another value: a deployed layer's product is trained by the recipe's gradients."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return dy, None


class RoundedProducts(torch.autograd.Function):
    """The three products of a linear layer, each on rounded operands.

    The weight may be wider than the input: it is rounded to the format from its own dtype, never through a third one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        of_x: torch.Tensor | None,
        of_w: torch.Tensor | None,
        state: LowPrecision,
    ) -> torch.Tensor:
        ctx.state, ctx.shape = state, x.shape
        ctx.rows_amax, ctx.weight_amax = of_x, of_w
        rows = x.reshape(-1, x.shape[-1])
        recipe = state.recipe
        state.note_input(rows)
        # The operands themselves, and not their codes: dw rounds x along the tokens, dx rounds w along the outputs.
        ctx.save_for_backward(rows, weight)
        if recipe.input is None or recipe.weight is None or not state.rounds_forward:
            return functional.linear(x, weight.to(x.dtype))
        a = operand_of(rows, recipe.input, recipe, amax=of_x)
        b = operand_of(weight, recipe.weight, recipe, amax=of_w)
        return multiply(a, b, x.dtype).reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (rows, weight), state = ctx.saved_tensors, ctx.state
        flat = dy.reshape(-1, dy.shape[-1])
        state.note_gradient(flat)
        amax = state.gradient_scaled_by(flat)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = _input_gradient(flat, weight, state.recipe, amax, ctx.weight_amax).reshape(ctx.shape)
        if ctx.needs_input_grad[1]:
            # Without a history the transposed input has a scale of its own, after the Hadamard transform.
            of_x = ctx.rows_amax if state.recipe.history else None
            dw = _weight_gradient(flat, rows, state.recipe, amax, of_x).to(weight.dtype)
        return dx, dw, None, None, None


def _input_gradient(
    dy: torch.Tensor,
    weight: torch.Tensor,
    recipe: TrainingRecipe,
    amax: torch.Tensor | None,
    weight_amax: torch.Tensor | None,
) -> torch.Tensor:
    """Computes dx = dy w, `[tokens, in]`."""
    if recipe.gradient is None or recipe.weight is None or not recipe.rounds_dx:
        return dy @ weight.to(dy.dtype)
    a = operand_of(dy, recipe.gradient, recipe.of_gradients, stochastic=recipe.stochastic_gradients, amax=amax)
    return multiply(a, _transposed_weight(weight, recipe, weight_amax), dy.dtype)


def _weight_gradient(
    dy: torch.Tensor,
    x: torch.Tensor,
    recipe: TrainingRecipe,
    amax: torch.Tensor | None,
    input_amax: torch.Tensor | None,
) -> torch.Tensor:
    """Computes dw = dyᵀ x, `[out, in]`, summed over the tokens."""
    if recipe.gradient is None or recipe.input is None or not recipe.rounds_dw:
        return dy.t() @ x
    # Both operands are transformed before they are rounded, so that H cancels in their product.
    columns = transform_tokens(dy.t(), recipe.hadamard)
    a = operand_of(columns, recipe.gradient, recipe.of_gradients, stochastic=recipe.stochastic_gradients, amax=amax)
    b = operand_of(transform_tokens(x.t(), recipe.hadamard), recipe.input, recipe, amax=input_amax)
    return multiply(a, b, torch.float32)


def _transposed_weight(weight: torch.Tensor, recipe: TrainingRecipe, amax: torch.Tensor | None) -> Operand:
    """Rounds wᵀ along the outputs: to the forward product's codes if blocks are square or the whole tensor."""
    format = recipe.weight_for_dx
    assert format is not None
    if format.per_tensor or format.has_square_blocks:
        return operand_of(weight, format, recipe, amax=amax).transposed
    return operand_of(weight.t(), format, recipe, amax=amax if format.global_scale else None)
