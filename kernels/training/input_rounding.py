"""Fake quantization of a layer's input: `[..., in]` as the packed model rounds it, with gradients to train by.

    quant::round_input(x, input_scale?, activation)             -> input as the packed model rounds it
    quant::round_input_gradient(gradient, x, rounded, …)        -> the gradient of the input

Gradients pass straight through the rounding, but not where an input is beyond the range of a static scale. Short blocks
of inputs are scaled by their own largest magnitude a, which therefore decides how finely all of the block are rounded.
With s in proportion to a, the sum of LSQ (`weight_rounding.py`) becomes a gradient of the input that has it:

    dL/da = sum over the block of  dY · (rounded − x) / a

so that training also learns to keep outliers small. Rounding scales with its block, and its gradient says so: over a
block, x · dL/dx sums to dY · rounded. It lowers the KL of NVFP4 by 2 to 5 % (docs/training.md). Scales of whole rows
have none: one input among thousands decides little there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from quant.formats.format import INPUT_FORMATS, Format
from quant.formats.tensor import round_activation
from quant.kernels.base.hardware import has_triton
from quant.kernels.linear.ops import below_autograd, register, runs_eagerly
from quant.kernels.rounding.round_inputs import round_rows

_FLOATS = (torch.float16, torch.bfloat16)
_SHORT = 32  # inputs of a block whose scale has a gradient


def round_input(x: torch.Tensor, activation: Format, input_scale: torch.Tensor | None) -> torch.Tensor:
    """Returns an input `[..., in]` as a packed linear rounds it, with straight-through gradients.

    Inputs beyond the range of a static scale have no gradient. The largest of a short block also gets its scale's.
    """
    if runs_eagerly(x):
        return _RoundInput.apply(None, x, input_scale, activation.name)  # type: ignore[no-any-return, no-untyped-call]
    return torch.ops.quant.round_input(x, input_scale, activation.name)  # type: ignore[no-any-return]


def _round_input(x: torch.Tensor, input_scale: torch.Tensor | None, activation: str) -> torch.Tensor:
    format = INPUT_FORMATS[activation]
    if x.numel() and x.is_cuda and x.dtype in _FLOATS and has_triton():
        from quant.kernels.training import portable_fake_rounding

        with torch.cuda.device_of(x):
            rows = x.reshape(-1, x.shape[-1])
            if portable_fake_rounding.can_measure(format, rows.shape) and format.global_scale == (
                input_scale is not None
            ):
                return portable_fake_rounding.round_weight(rows, format, x.dtype, None, input_scale).view(x.shape)
            return round_rows(rows, format, input_scale).view(x.shape)
    # An op returns no tensor that it was given, as rounding does of no rows.
    return round_activation(x, format, input_scale) if x.numel() else x.clone()


def _input_gradient(
    gradient: torch.Tensor, x: torch.Tensor, rounded: torch.Tensor, input_scale: torch.Tensor | None, activation: str
) -> torch.Tensor:
    """Returns the gradient of an input, straight through, plus the gradient of the scales of short blocks."""
    format = INPUT_FORMATS[activation]
    if not _follows(format):
        assert input_scale is not None
        return _passed(gradient, x, input_scale, format)
    if x.numel() and x.is_cuda and has_triton():
        from quant.kernels.training import portable_fake_rounding

        if portable_fake_rounding.can_sum(format, (rows := x.reshape(-1, x.shape[-1])).shape):
            with torch.cuda.device_of(x):
                gradient_of_rows = portable_fake_rounding.input_gradient(
                    gradient.reshape(rows.shape), rows, rounded.reshape(rows.shape), format, input_scale
                )
            return gradient_of_rows.view(x.shape)
    columns = format.block[1]
    width = (0, -x.shape[-1] % columns)
    values, change, slope = (
        torch.nn.functional.pad(each.float(), width).unflatten(-1, (-1, columns))
        for each in (x, rounded.float() - x.float(), gradient)
    )
    # a of the module docstring, for each block; `change` is rounded − x, `slope` is dY.
    amax = values.abs().amax(dim=-1, keepdim=True)
    follows = (amax > 0) if input_scale is None else _in_reach(amax, input_scale, format)
    of_scale = torch.where(follows, (slope * change).sum(dim=-1, keepdim=True) / amax, 0)
    # d|x|/dx at the maximum: the sign of x; where several inputs share the maximum, each gets an equal part.
    largest = values.abs() == amax
    added = largest * values.sign() * (of_scale / largest.sum(dim=-1, keepdim=True))
    total: torch.Tensor = added.flatten(-2)[..., : x.shape[-1]].to(gradient.dtype)
    return total.add_(gradient if input_scale is None else _passed(gradient, x, input_scale, format))


def _follows(format: Format) -> bool:
    """Returns whether the scales of an input belong to short blocks, and follow the largest magnitude of each."""
    rows, columns = format.block
    return rows == 1 and 0 < columns <= _SHORT


def _in_reach(amax: torch.Tensor, input_scale: torch.Tensor, format: Format) -> torch.Tensor:
    """Returns where a block's scale is neither the largest nor the smallest one, and so follows the block."""
    # The block scale is amax / (largest code · input scale), clamped to the range of its number.
    unit = format.element.max * input_scale.float().reshape(())
    return (amax > format.scale.min_subnormal * unit) & (amax <= format.scale.max * unit)


def _passed(gradient: torch.Tensor, x: torch.Tensor, input_scale: torch.Tensor, format: Format) -> torch.Tensor:
    """Returns the gradient with zeros where an input is beyond the range of a static scale."""
    largest = format.element.max * (format.scale.max if format.global_scale else 1)
    if runs_eagerly(gradient) and x.is_contiguous():
        from quant.kernels.training import portable_fake_rounding

        with torch.cuda.device_of(x):
            return portable_fake_rounding.within(gradient, x, input_scale.reshape(()), largest)
    # Beyond the range the code saturates, and a small change of x moves nothing.
    return gradient * (x.float().abs() <= largest * input_scale.float().reshape(()))


class _RoundInput(torch.autograd.Function):
    """`quant::round_input` where the input needs a gradient."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, *args: Any) -> torch.Tensor:
        x, input_scale, ctx.activation = args
        ctx.is_eager = keyset is None
        if ctx.is_eager:
            rounded = _round_input(*args)
        else:
            rounded = below_autograd(torch.ops.quant.round_input.default, keyset, *args)
        ctx.passes_all = input_scale is None and not _follows(INPUT_FORMATS[ctx.activation])
        ctx.save_for_backward(*(() if ctx.passes_all else (x, rounded, input_scale)))
        return rounded

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if not ctx.passes_all:
            gradient_of: Any = _input_gradient if ctx.is_eager else torch.ops.quant.round_input_gradient
            gradient = gradient_of(gradient, *ctx.saved_tensors, ctx.activation)
        return None, gradient, None, None


def _input_with_gradients(keyset: Any, *args: Any) -> torch.Tensor:
    if torch.is_grad_enabled() and args[0].requires_grad:
        return _RoundInput.apply(keyset, *args)  # type: ignore[no-any-return, no-untyped-call]
    return below_autograd(torch.ops.quant.round_input.default, keyset, *args)


def _fake_input_gradient(gradient: torch.Tensor, *arguments: Any) -> torch.Tensor:
    return torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device)


def _fake_input(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


register(
    "quant::round_input_gradient",
    "(Tensor gradient, Tensor x, Tensor rounded, Tensor? input_scale, str activation) -> Tensor",
    _fake_input_gradient,
    default=_input_gradient,
)
register(
    "quant::round_input",
    "(Tensor x, Tensor? input_scale, str activation) -> Tensor",
    _fake_input,
    autograd=_input_with_gradients,
    in_autocast=False,
    default=_round_input,
)
