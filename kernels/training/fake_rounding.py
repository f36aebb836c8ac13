"""Fake quantization rounds a weight or an input to a format and keeps floats, so that a model is trained as deployed.

    quant::round_weight(weight, scale?, global_scale?, …)      -> weight that the packed model multiplies by
    quant::round_weight_gradient, quant::round_scale_gradient  -> the gradients of the weight and of its block scales
    quant::round_input(x, input_scale?, activation)            -> input as the packed model rounds it
    quant::round_input_gradient(gradient, x, rounded, …)       -> the gradient of the input

Rounding has a derivative of zero almost everywhere, so gradients pass straight through it (Bengio et al., 2013):
dW = dY for a weight within the range of its block, and 0 for one beyond a scale that is fixed, which no small change of
the weight would move. Under a scale that is measured from the weight itself, nothing is beyond the range. A scale that
is learned has the gradient of LSQ (Esser et al., 2020): with steps u = w / s and the code's value q,

    dL/ds = sum over the block of  dY · (q − u)    within the range,    dY · q    beyond it

Short blocks of inputs are scaled by their own largest magnitude a, which therefore decides how finely all of the block
are rounded. With s in proportion to a, this sum becomes a gradient of the input that has it:

    dL/da = sum over the block of  dY · (rounded − x) / a

so that training also learns to keep outliers small. Rounding scales with its block, and its gradient says so: over a
block, x · dL/dx sums to dY · rounded. It lowers the KL of NVFP4 by 2 to 5 % (docs/training.md). Scales of whole rows
have none: one input among thousands decides little there.

On a GPU Triton kernels round and mask (`kernels/training/portable_fake_rounding.py`); elsewhere the oracle runs.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quant.formats.format import FORMATS, INPUT_FORMATS, Format
from quant.formats.rounding import round_to
from quant.formats.scaling import global_scale_of
from quant.formats.tensor import choose_scale, round_activation, round_with_scale
from quant.kernels.base.custom_ops import below_autograd, first_order, register, runs_eagerly
from quant.kernels.base.hardware import has_triton
from quant.kernels.linear.rounded_products import round_rows

_FLOATS = (torch.float16, torch.bfloat16)
_SHORT = 32  # inputs of a block whose scale has a gradient


def _kernels() -> Any:
    from quant.kernels.training import portable_fake_rounding

    return portable_fake_rounding


def round_input(x: Tensor, activation: Format, input_scale: Tensor | None) -> Tensor:
    """Returns an input `[..., in]` as a packed linear rounds it, with straight-through gradients."""
    # Inputs beyond the range of a static scale have no gradient. The largest of a short block also gets its scale's.
    if runs_eagerly(x):
        return _RoundInput.apply(None, x, input_scale, activation.name)  # type: ignore[no-untyped-call]
    return torch.ops.quant.round_input(x, input_scale, activation.name)


def _round_input(x: Tensor, input_scale: Tensor | None, activation: str) -> Tensor:
    format = INPUT_FORMATS[activation]
    if x.numel() and x.is_cuda and x.dtype in _FLOATS and has_triton():
        with torch.cuda.device_of(x):
            rows = x.reshape(-1, x.shape[-1])
            if format.global_scale == (input_scale is not None) and _kernels().can_measure(format, rows.shape):
                return _kernels().round_weight(rows, format, x.dtype, None, input_scale).view(x.shape)
            return round_rows(rows, format, input_scale).view(x.shape)
    # An op returns no tensor that it was given, as rounding does of no rows.
    return round_activation(x, format, input_scale).contiguous() if x.numel() else torch.empty_like(x).contiguous()


def _input_gradient(
    gradient: Tensor, x: Tensor, rounded: Tensor, input_scale: Tensor | None, activation: str
) -> Tensor:
    """Returns the gradient of an input, straight through, plus the gradient of the scales of short blocks."""
    format = INPUT_FORMATS[activation]
    if not _follows(format):
        assert input_scale is not None
        return _passed(gradient, x, input_scale, format)
    if x.numel() and x.is_cuda and has_triton():
        rows = x.reshape(-1, x.shape[-1])
        if _kernels().can_sum(format, rows.shape):
            with torch.cuda.device_of(x):
                matrices = (part.reshape(rows.shape) for part in (gradient, x, rounded))
                dx: Tensor = _kernels().input_gradient(*matrices, format, input_scale)
            return dx.view(x.shape)
    columns = format.block[1]
    width = (0, -x.shape[-1] % columns)
    values, change, slope = (
        torch.nn.functional.pad(each.float(), width).unflatten(-1, (-1, columns))
        for each in (x, rounded.float() - x.float(), gradient)
    )
    # a of the module docstring, for each block; `change` is rounded − x, `slope` is dY.
    amax = values.abs().amax(dim=-1, keepdim=True)
    if input_scale is None:
        follows = amax > 0
    else:
        # The block scale is amax / (largest code · input scale), clamped to the range of its number.
        unit = format.element.max * input_scale.float().reshape(())
        follows = (amax > format.scale.min_subnormal * unit) & (amax <= format.scale.max * unit)
    of_scale = torch.where(follows, (slope * change).sum(dim=-1, keepdim=True) / amax, 0)
    # d|x|/dx at the maximum: the sign of x; where several inputs share the maximum, each gets an equal part.
    largest = values.abs() == amax
    added = largest * values.sign() * (of_scale / largest.sum(dim=-1, keepdim=True))
    total = added.flatten(-2)[..., : x.shape[-1]].to(gradient.dtype)
    return total.add_(gradient if input_scale is None else _passed(gradient, x, input_scale, format)).contiguous()


def _follows(format: Format) -> bool:
    """Returns whether the scales of an input belong to short blocks, and follow the largest magnitude of each."""
    rows, columns = format.block
    return rows == 1 and 0 < columns <= _SHORT


def _passed(gradient: Tensor, x: Tensor, input_scale: Tensor, format: Format) -> Tensor:
    """Returns the gradient with zeros where an input is beyond the range of a static scale."""
    largest = format.element.max * (format.scale.max if format.global_scale else 1)
    if runs_eagerly(gradient) and x.is_contiguous():
        with torch.cuda.device_of(x):
            return _kernels().within(gradient, x, input_scale.reshape(()), largest)
    # Beyond the range the code saturates, and a small change of x moves nothing.
    return (gradient * (x.float().abs() <= largest * input_scale.float().reshape(()))).contiguous()


class _RoundInput(torch.autograd.Function):
    """`quant::round_input` where the input needs a gradient."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, *args: Any) -> Tensor:
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
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.passes_all:
            gradient_of: Any = _input_gradient if ctx.is_eager else torch.ops.quant.round_input_gradient
            gradient = gradient_of(gradient, *ctx.saved_tensors, ctx.activation)
        return None, gradient, None, None


register(
    "quant::round_input_gradient",
    "(Tensor gradient, Tensor x, Tensor rounded, Tensor? input_scale, str activation) -> Tensor",
    lambda gradient, *_: torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device),
    default=_input_gradient,
)
register(
    "quant::round_input",
    "(Tensor x, Tensor? input_scale, str activation) -> Tensor",
    lambda x, *_: torch.empty(x.shape, dtype=x.dtype, device=x.device),
    default=_round_input,
    autograd=_RoundInput,
    in_autocast=False,
)


def round_weight(
    weight: Tensor,
    format: Format,
    dtype: torch.dtype,
    *,
    scale: Tensor | None = None,
    global_scale: Tensor | None = None,
    rule: str = "max",
    stored: torch.dtype = torch.float32,
    clips: bool = True,
) -> Tensor:
    """Returns the weight `[..., out, in]` that a packed model multiplies by, with straight-through gradients.

    Args:
        dtype: of the result: the dtype of the inputs that it is multiplied by.
        scale: block scale values, float32 `format.scale_shape(weight.shape)`; None measures them by `rule`. They have
            a gradient where they need one.
        global_scale: float32 `weight.shape[:-2]`, for formats that have one.
        stored: dtype of the checkpoint, to which measured scales that are floats are rounded.
        clips: whether weights beyond the range of a given scale have no gradient.
    """
    arguments = (weight, scale, global_scale, format.name, rule, stored, dtype, clips and scale is not None)
    if runs_eagerly(weight):
        return _RoundWeight.apply(None, *arguments)  # type: ignore[no-untyped-call]
    return torch.ops.quant.round_weight(*arguments)


def measured_scale(
    weight: Tensor, format: Format, rule: str, global_scale: Tensor | None, stored: torch.dtype
) -> Tensor:
    """Returns the float32 block scale values of `weight` by `rule`, as a model stored in `stored` is quantized."""
    matrices = weight.reshape(-1, *weight.shape[-2:])
    amax = torch.stack([matrix.abs().amax() for matrix in matrices]).view(weight.shape[:-2]).float()
    return as_stored_scale(choose_scale(weight, format, rule, amax, global_scale), format, stored)


def as_stored_scale(scale: Tensor, format: Format, stored: torch.dtype) -> Tensor:
    """Returns float scales rounded to the dtype in which a checkpoint stores them; `scale` may be overwritten."""
    if not format.scale.is_wide or stored not in _FLOATS:
        return scale
    info = torch.finfo(stored)
    # FP16 ends at 2^-24; without the floor a tiny scale would be stored as zero, and its block would decode to zeros.
    return scale.clamp_(min=info.tiny * info.eps).to(stored).float()


def group_amax(weights: Sequence[Tensor]) -> Tensor:
    """Returns the largest magnitude of weights `[..., out, in]` that share a scale, over all their shards."""
    amax = [_amax(weight) for weight in weights]
    return amax[0] if len(amax) == 1 else torch.stack(amax).amax(dim=0)


def measured_global_scale(weights: Sequence[Tensor], format: Format) -> Tensor:
    """Returns the global scale of weights `[..., out, in]` that share one, by the `max` rule: float32 `[...]`."""
    # It has gone through the reciprocal that files may store.
    if all(runs_eagerly(weight) and weight.dim() == 2 for weight in weights):
        with torch.cuda.device_of(weights[0]):
            return _kernels().global_scale(weights, format)
    # compressed-tensors files store 1 / s in float32: this is the s that a reader computes from it.
    return 1 / (1 / global_scale_of(group_amax(weights), format, "max"))


def _amax(weight: Tensor) -> Tensor:
    """Returns the largest magnitude of each matrix, float32, over all shards of the weight."""
    if not hasattr(weight, "full_tensor"):  # as one kernel, which DTensor does not have
        amax: Tensor = torch.linalg.vector_norm(weight, torch.inf, dim=(-2, -1))
        return amax.float()
    sharded_amax: Any = weight.abs().amax(dim=(-2, -1)).float()
    return sharded_amax.full_tensor()


def _round_weight(
    weight: Tensor, scale: Tensor | None, global_scale: Tensor | None, format_name: str, rule: str,
    stored: torch.dtype, dtype: torch.dtype, clips: bool,
) -> Tensor:  # fmt: skip
    format = FORMATS[format_name]
    if weight.is_cuda and has_triton() and weight.dim() == 2:
        with torch.cuda.device_of(weight):
            if scale is None and not (rule == "max" and _kernels().can_measure(format, weight.shape)):
                scale = measured_scale(weight, format, rule, global_scale, stored)
            return _kernels().round_weight(weight, format, dtype, scale, global_scale)
    if scale is None:
        scale = measured_scale(weight, format, rule, global_scale, stored)
    return round_with_scale(weight, format, scale, global_scale, dtype)


def _weight_gradient(
    gradient: Tensor, weight: Tensor, scale: Tensor, global_scale: Tensor | None, format_name: str
) -> Tensor:
    """Returns the gradient with zeros where a weight is beyond the range of its block, in the dtype of the weight."""
    format = FORMATS[format_name]
    if weight.is_cuda and has_triton() and weight.dim() == 2:
        with torch.cuda.device_of(weight):
            return _kernels().masked_gradient(gradient, weight, format, scale, global_scale)
    # Straight-through: d round(w) / dw = 1 inside the range, 0 where the code is clipped.
    inside = _inside(weight.float(), weight_steps(scale, global_scale, format, weight.shape), format)
    return (gradient * inside).to(weight.dtype).contiguous()


def _inside(weight: Tensor, step: Tensor, format: Format) -> Tensor:
    return (weight >= format.element.min * step) & (weight <= format.element.max * step)


def _scale_gradient(
    gradient: Tensor, weight: Tensor, scale: Tensor, global_scale: Tensor | None, format_name: str
) -> Tensor:
    """Returns LSQ's gradient of block scales, float32 of their shape."""
    format = FORMATS[format_name]
    if weight.is_cuda and has_triton() and weight.dim() == 2 and _kernels().can_sum(format, weight.shape):
        with torch.cuda.device_of(weight):
            return _kernels().scale_gradient(gradient, weight, format, scale, global_scale)
    rows, columns = format.block_shape(weight.shape)
    step = weight_steps(scale, global_scale, format, weight.shape)
    steps = weight.float() / step
    inside = _inside(weight.float(), step, format)
    # LSQ, equation 3 of Esser et al.: q − u inside the range, q beyond it, for each weight.
    slope = gradient.float() * (round_to(steps, format.element) - torch.where(inside, steps, torch.zeros_like(steps)))
    # Short last blocks are padded with zeros, which add nothing to their sums.
    slope = torch.nn.functional.pad(slope, (0, -slope.shape[-1] % columns, 0, -slope.shape[-2] % rows))
    summed: Tensor = slope.unflatten(-1, (-1, columns)).sum(-1).unflatten(-2, (-1, rows)).sum(-2)
    return summed if global_scale is None else summed * global_scale[..., None, None]


def weight_steps(scale: Tensor, global_scale: Tensor | None, format: Format, shape: torch.Size) -> Tensor:
    """Returns block scale times global scale for each weight of `shape`."""
    rows, columns = format.block_shape(shape)
    step = scale if global_scale is None else scale * global_scale[..., None, None]
    step = step.repeat_interleave(rows, dim=-2)[..., : shape[-2], :]
    return step.repeat_interleave(columns, dim=-1)[..., : shape[-1]]


class _RoundWeight(torch.autograd.Function):
    """`quant::round_weight` where the weight or the scale needs a gradient."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, *args: Any) -> Tensor:
        weight, scale, global_scale, ctx.format, _, _, _, ctx.clips = args
        ctx.dtype = weight.dtype
        learned = scale is not None and scale.requires_grad
        ctx.save_for_backward(*((weight, scale, global_scale) if ctx.clips or learned else ()))
        ctx.is_eager = keyset is None
        if ctx.is_eager:
            return _round_weight(*args)
        return below_autograd(torch.ops.quant.round_weight.default, keyset, *args)

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        _, for_weight, for_scale, *_ = ctx.needs_input_grad
        weight = scale = None
        saved = ctx.saved_tensors  # once: under gradient checkpointing, each access runs the block again
        # Without clipping the Jacobian is the identity, and nothing was saved.
        if for_weight and ctx.clips:
            masked: Any = _weight_gradient if ctx.is_eager else torch.ops.quant.round_weight_gradient
            weight = masked(gradient, *saved, ctx.format)
        elif for_weight:
            weight = gradient.to(ctx.dtype)
        if for_scale:
            summed: Any = _scale_gradient if ctx.is_eager else torch.ops.quant.round_scale_gradient
            scale = summed(gradient, *saved, ctx.format)
        return None, weight, scale, None, None, None, None, None, None


register(
    "quant::round_weight_gradient",
    "(Tensor gradient, Tensor weight, Tensor scale, Tensor? global_scale, str format) -> Tensor",
    lambda gradient, weight, *_: torch.empty(weight.shape, dtype=weight.dtype, device=weight.device),
    default=_weight_gradient,
)
register(
    "quant::round_scale_gradient",
    "(Tensor gradient, Tensor weight, Tensor scale, Tensor? global_scale, str format) -> Tensor",
    lambda gradient, weight, scale, *_: torch.empty(scale.shape, dtype=torch.float32, device=scale.device),
    default=_scale_gradient,
)
register(
    "quant::round_weight",
    "(Tensor weight, Tensor? scale, Tensor? global_scale, str format, str rule, ScalarType stored, ScalarType dtype, "
    "bool clips) -> Tensor",
    lambda weight, *arguments: torch.empty(weight.shape, dtype=arguments[-2], device=weight.device),
    default=_round_weight,
    autograd=_RoundWeight,
    gradients_of=(0, 1),
    in_autocast=False,
)
