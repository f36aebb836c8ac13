"""A gated MLP trains as one function in the native backend: y = down(silu(gate(x)) · up(x)).

Between its linear layers the kernels read the result of one product and write operands of the next: silu(gate) · up
and, in the backward pass, the gradients of gate and up are never written in 16 bit. x is rounded once. Kept for the
backward pass are gate and up in 16 bit, and the transposed codes of x, of silu(gate) · up and of some weights. Products
and roundings are those of the layers one by one.

The MLP keeps its class. Its `forward` is ours while its three layers train natively and have no hooks or adapters;
otherwise it runs as it always did.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from quant.kernels.linear.ops import autocast_dtype
from quant.training.low_precision.linear import LowPrecisionLinear
from quant.training.low_precision.native import NativeProducts, keeps_weight, unpadded

_LAYERS = ("gate_proj", "up_proj", "down_proj")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def fuse_gated_mlps(model: nn.Module) -> None:
    """Has the gated MLPs of a model, whose linear layers train natively, run as one function each."""
    for module in model.modules():
        layers = [getattr(module, name, None) for name in _LAYERS]
        if all(_trains_natively(layer) for layer in layers) and _is_swiglu(module):
            vars(module)["forward"] = partial(_forward, module)


def restore_gated_mlps(model: nn.Module) -> None:
    """Undoes `fuse_gated_mlps`."""
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, partial) and forward.func is _forward:
            del vars(module)["forward"]


def _is_swiglu(module: nn.Module) -> bool:
    """Returns whether a class computes just down(silu(gate(x)) · up(x)), tried on three stand-ins for layers."""
    stand_ins = {
        "gate_proj": lambda x: 3 * x + 1,
        "up_proj": lambda x: x - 2,
        "down_proj": lambda x: 5 * x + x.roll(1, -1),
    }
    x = torch.linspace(-2, 2, 12, dtype=torch.float64).view(1, 3, 4)
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
        layer.low_precision.deployed, layer.low_precision.weight_dtype = None, layer.weight.dtype
    weights = [layer.weight for layer in layers]
    y: torch.Tensor = _GatedMLP.apply(x.to(x_dtype), *weights, [layer.low_precision for layer in layers])  # type: ignore[no-untyped-call]
    return y


class _GatedMLP(torch.autograd.Function):
    """The three products and the operations between them, on operands in FP8 blocks."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, states: Sequence[Any]
    ) -> torch.Tensor:
        native: NativeProducts = states[0].products
        ctx.native, ctx.states, ctx.shape = native, states, x.shape
        ops = torch.ops.quant
        tokens = x.numel() // x.shape[-1]
        codes, scale, codes_t, scale_t = native.operands(x, gate.requires_grad or up.requires_grad)
        # Rows of padding stay: their zeros are rounded to zeros, and all sizes of products are multiples of 128.
        rounded = [
            native.quantize(w, square=True, columns=keeps_weight(w, tokens) and needed)
            for w, needed in ((gate, ctx.needs_input_grad[0]), (up, ctx.needs_input_grad[0]), (down, True))
        ]
        between = [ops.fp8_block_product(codes, scale, *w[:2], True, x.dtype) for w in rounded[:2]]
        h_codes, h_scale, h_codes_t, h_scale_t = ops.fp8_block_swiglu(*between, native.rule, down.requires_grad)
        for state, each in zip(states, (scale, scale, h_scale), strict=True):
            state.note_input(each)
        y = ops.fp8_block_product(h_codes, h_scale, *rounded[2][:2], True, x.dtype)
        transposed = [tensor for w in rounded for tensor in w[2:]]
        ctx.save_for_backward(codes_t, scale_t, h_codes_t, h_scale_t, *between, gate, up, down, *transposed)
        return unpadded(y, tokens, down.shape[0]).reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        codes_t, scale_t, h_codes_t, h_scale_t, of_gate, of_up, gate, up, down, *transposed = ctx.saved_tensors
        native, product = ctx.native, torch.ops.quant.fp8_block_product
        for_x, for_gate, for_up, for_down = ctx.needs_input_grad[:4]
        d = native.quantize(dy.reshape(-1, dy.shape[-1]))
        d_down = native.weight_gradient(d, h_codes_t, h_scale_t, down) if for_down else None
        dh = product(d[0], d[1], *native.transposed(down, *transposed[4:]), True, of_gate.dtype)
        both = torch.ops.quant.fp8_block_swiglu_gradients(dh, of_gate, of_up, native.rule)
        d_gate, d_up = both[:4], both[4:]
        for state, operands in zip(ctx.states, (d_gate, d_up, d), strict=True):
            state.note_gradient(operands[1])
        gradients = [
            native.weight_gradient(operands, codes_t, scale_t, weight) if is_trained else None
            for operands, weight, is_trained in ((d_gate, gate, for_gate), (d_up, up, for_up))
        ]
        dx = None
        if for_x:
            parts = [
                product(operands[0], operands[1], *native.transposed(weight, *operand), True, dy.dtype)
                for operands, weight, operand in ((d_gate, gate, transposed[:2]), (d_up, up, transposed[2:4]))
            ]
            dx = unpadded(parts[0] + parts[1], dy.numel() // dy.shape[-1], gate.shape[1]).reshape(ctx.shape)
        return dx, *gradients, d_down, None
