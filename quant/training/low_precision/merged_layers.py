"""Layers that a runtime merges (q, k and v) sum their dx in one product, in the native backend.

    forward    codes(x) · codes(q)ᵀ    codes(x) · codes(k)ᵀ    codes(x) · codes(v)ᵀ
    backward   dx = codes([dq dk dv]) · codes_t([q; k; v])ᵀ

Three products would write dx three times in 16 bit, and two additions would read them again. One product sums over the
outputs of all three in FP32 and rounds once. The other products stay apart: together they have as many tiles, so that
nothing is gained, and results in tensors of their own can be freed and viewed as ever.

The layers are called one by one. The first of a group computes the outputs of all, and leaves them with the products
that the model's layers share; the others fetch theirs, provided that they are called with the same input in the same
mode and have the same weights. A group whose outputs were not fetched is not computed as one again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from quant.kernels.linear.ops import autocast_dtype
from quant.kernels.training.fp8_block_layout import BLOCK
from quant.training.low_precision.native import NativeProducts, keeps_columns, unpadded
from quant.training.low_precision.state import LowPrecision
from quant.training.rounding.rms_norm import NormInput, cast, origin_of


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
