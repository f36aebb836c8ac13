"""A gated MLP trains as one function in the native backend: y = down(silu(gate(x)) · up(x)).

Between its linear layers the kernels read the result of one product and write operands of the next: silu(gate) · up
and, in the backward pass, the gradients of gate and up are never written in 16 bit. x is rounded once. Kept for the
backward pass are gate and up in 16 bit, and the transposed codes of x and of some weights. Products and roundings are
the same as in the layers one by one, except that dx, a sum of two products, is rounded once.

The MLP keeps its class. Its `forward` is ours while its three layers train natively and have no hooks or adapters;
otherwise it runs as it always did.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from quant.kernels.linear.ops import autocast_dtype
from quant.kernels.training.fp8_block_layout import BLOCK
from quant.training.low_precision.low_precision_linear import LowPrecisionLinear
from quant.training.low_precision.native import NativeProducts, is_distributed, keeps_weight, unpadded
from quant.training.rounding.rms_norm import (
    NormInput,
    cast,
    has_own_forward,
    origin_of,
    replace_forward,
    restore_forwards,
)

_LAYERS = ("gate_proj", "up_proj", "down_proj")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def fuse_gated_mlps(model: nn.Module) -> None:
    """Has the gated MLPs of a model, whose linear layers train natively, run as one function each."""
    for module in model.modules():
        layers: list[Any] = [getattr(module, name, None) for name in _LAYERS]
        if not all(_trains_natively(layer) for layer in layers) or has_own_forward(module):
            continue
        # Blocks of their gradients, which lie side by side, must not hold columns of both.
        if layers[0].out_features % BLOCK == 0 and _is_swiglu(module):
            replace_forward(module, _forward)


def restore_gated_mlps(model: nn.Module) -> None:
    """Undoes `fuse_gated_mlps`."""
    restore_forwards(model, _forward)


def _is_swiglu(module: nn.Module) -> bool:
    """Returns whether a class computes just down(silu(gate(x)) · up(x)), tried on three stand-ins for layers."""
    stand_ins = {
        "gate_proj": lambda x: 3 * x + 1,
        "up_proj": lambda x: x - 2,
        "down_proj": lambda x: 5 * x + x.roll(1, -1),
    }
    x = torch.linspace(-2, 2, 12, dtype=torch.float64, device="cpu").view(1, 3, 4)
    expected = stand_ins["down_proj"](functional.silu(3 * x + 1) * (x - 2))
    try:
        y = type(module).forward(SimpleNamespace(**{**vars(module), **module._modules, **stand_ins}), x)
    except Exception:  # a forward pass that needs more than these is another one
        return False
    return isinstance(y, torch.Tensor) and y.shape == x.shape and torch.allclose(y, expected, rtol=1e-12)


def _trains_natively(layer: Any) -> bool:
    return (
        isinstance(layer, LowPrecisionLinear)
        and isinstance(layer.low_precision.products, NativeProducts)
        and layer.bias is None
    )


def _forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Maps `[..., hidden]` to `[..., hidden]`."""
    layers = [getattr(module, name) for name in _LAYERS]
    x_dtype = autocast_dtype(x) or x.dtype
    is_plain = all(
        _trains_natively(layer)
        and layer.training
        and layer.low_precision.rounds_forward
        and not any(getattr(layer, hooks) for hooks in _HOOKS)
        for layer in layers
    )
    if not is_plain or not x.numel():
        return type(module).forward(module, x)  # type: ignore[no-any-return]
    for layer in layers:
        layer.low_precision.note_weight(layer.weight)
    weights, states = [layer.weight for layer in layers], [layer.low_precision for layer in layers]
    x = cast(x, x_dtype)
    y: torch.Tensor = _GatedMLP.apply(x, *weights, states, origin_of(x))  # type: ignore[no-untyped-call]
    return y


class _GatedMLP(torch.autograd.Function):
    """The three products and the operations between them, on operands in FP8 blocks."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        gate: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        states: Sequence[Any],
        origin: NormInput | None,
    ) -> torch.Tensor:
        native: NativeProducts = states[0].products
        ctx.native, ctx.states, ctx.shape = native, states, x.shape
        ops = torch.ops.quant
        tokens = x.numel() // x.shape[-1]
        codes, scale, codes_t, scale_t = native.operands(x, gate.requires_grad or up.requires_grad, origin)
        for_x, for_gate, for_up, _ = ctx.needs_input_grad[:4]
        keeps, keeps_down = _keeps_weights(gate, up, down, tokens)
        # Rows of padding stay: their zeros are rounded to zeros, and all sizes of products are multiples of 128.
        *both, w_codes_t, w_scale_t = native.quantize_stacked((gate, up), columns=keeps and for_x)
        for_h = for_x or for_gate or for_up
        down_codes, down_scale, *down_t = native.quantize(down, square=True, columns=keeps_down and for_h)
        of_gate, of_up = (ops.fp8_block_product(codes, scale, *w, True, x.dtype) for w in (both[:2], both[2:]))
        # The backward pass reads gate and up again, and makes the transposed codes of their product there.
        h_codes, h_scale, *_ = ops.fp8_block_swiglu(of_gate, of_up, native.rule, True, False)
        for state, each in zip(states, (scale, scale, h_scale), strict=True):
            state.note_input(each)
        y = ops.fp8_block_product(h_codes, h_scale, down_codes, down_scale, True, x.dtype)
        ctx.save_for_backward(codes_t, scale_t, of_gate, of_up, gate, up, down, w_codes_t, w_scale_t, *down_t)
        return unpadded(y, tokens, down.shape[0]).reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        codes_t, scale_t, of_gate, of_up, gate, up, down, w_codes_t, w_scale_t, *down_t = ctx.saved_tensors
        native, ops = ctx.native, torch.ops.quant
        for_x, for_gate, for_up, for_down = ctx.needs_input_grad[:4]
        for_h = for_x or for_gate or for_up
        d = native.quantize(dy.reshape(-1, dy.shape[-1]), rows=for_h, columns=for_down)
        ctx.states[2].note_gradient(d[1] if for_h else d[3])
        if not for_h:
            h = ops.fp8_block_swiglu(of_gate, of_up, native.rule, False, True)[2:]
            return None, None, None, native.weight_gradient(d, *h, down), None, None
        dh = ops.fp8_block_product(d[0], d[1], *native.transposed(down, *down_t), True, of_gate.dtype)
        both, both_scale, *transposed = ops.fp8_block_swiglu_gradients(
            dh, of_gate, of_up, native.rule, for_gate or for_up, for_down
        )
        d_down = native.weight_gradient(d, *transposed[4:], down) if for_down else None
        # Further scales belong to padding.
        for state, scale in zip(ctx.states[:2], both_scale.split(len(gate) // BLOCK), strict=False):
            state.note_gradient(scale)
        gradients = [
            native.weight_gradient((both, both_scale, *operand), codes_t, scale_t, weight) if is_trained else None
            for operand, weight, is_trained in ((transposed[:2], gate, for_gate), (transposed[2:4], up, for_up))
        ]
        dx = None
        if for_x:
            if not w_codes_t.numel():
                w_codes_t, w_scale_t = native.quantize_stacked((gate, up), rows=False)[-2:]
            # One product for both: the sum of d gate · gate and d up · up is rounded once.
            dx = ops.fp8_block_product(both, both_scale, w_codes_t, w_scale_t, True, dy.dtype)
            dx = unpadded(dx, dy.numel() // dy.shape[-1], gate.shape[1]).reshape(ctx.shape)
        return dx, *gradients, d_down, None, None


def _keeps_weights(gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, tokens: int) -> tuple[bool, bool]:
    """Returns whether transposed codes of gate and up, and of down, stay in memory until the backward pass.

    16-bit training keeps silu(gate) · up, two bytes an element, which here is made again. The codes of the three
    weights stay if they take no more than that.
    """
    size = gate.numel() + up.numel() + down.numel()
    if size <= 2 * tokens * len(gate) and not is_distributed():
        return True, True
    return keeps_weight(gate, tokens), keeps_weight(down, tokens)
