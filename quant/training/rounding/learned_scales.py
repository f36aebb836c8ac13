"""Learned block scales have a parameter in units of weights, for which an optimizer's usual settings are right.

LSQ (Esser et al., 2020) trains the rounding step s of each block: block scale times global scale. The step itself is a
poor parameter. AdamW moves each parameter by about the learning rate, which may be many times an FP8 step; weight decay
draws steps to zero, where whole blocks vanish; and an update may make one negative. The parameter here is d with

    s = s0 exp(d / r)        r = largest code * mean of s0

so scales stay positive, and weight decay draws them to s0, the scales that the solver chose. To first order the range
of an average block, largest code * s, grows by d: an update moves it as far as it moves the weights of the block.
"""

from __future__ import annotations

from typing import Any

import torch

from quant.formats.format import Format
from quant.formats.number import E4M3, E8M0
from quant.formats.rounding import decode_power_of_two, round_to
from quant.kernels.training.weight_rounding import as_stored_scale

# exp of 30 is 1e13, beyond every range of scales; without a limit a diverging parameter would give infinity and NaN.
_LARGEST = 30.0


def learned_step(start: torch.Tensor, shift: torch.Tensor, format: Format) -> torch.Tensor:
    """Returns the trained steps, float32: `start` where `shift` is zero.

    Args:
        start: the steps that training starts with, s0.
        shift: the parameter d, of the same shape.
        format: the format of the weight.
    """
    reach = (format.element.max * start.mean()).clamp(min=torch.finfo(torch.float32).tiny)
    return start * (shift.float() / reach).clamp(-_LARGEST, _LARGEST).exp()


def nearest_scale(step: torch.Tensor, format: Format, second: torch.Tensor | None, stored: torch.dtype) -> torch.Tensor:
    """Returns block scales nearest to `step` divided by the global scale.

    Gradients pass straight through the rounding.
    """
    exact = step if second is None else step / second.float()[..., None, None]
    with torch.no_grad():
        # The smallest scale of each format takes the place of zero, by which nothing could be divided. E8M0's codes are
        # exponents plus 127.
        if format.scale is E4M3:
            nearest = round_to(exact.clamp(min=E4M3.min_subnormal), E4M3)
        elif format.scale is E8M0:
            exponent = exact.clamp(min=2.0**-127).log2().round()
            nearest = decode_power_of_two((exponent.clamp(-127, 127) + 127).to(torch.uint8))
        else:
            tiny = torch.finfo(torch.float32).tiny
            nearest = as_stored_scale(round_to(exact.clamp(min=tiny), format.scale), format, stored)
    return nearest + (exact - exact.detach())  # the value of `nearest`, the gradient of `exact`


def whole_shift(shift: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Returns the parameter of another layer, which FSDP2 may keep sharded while this one runs.

    Args:
        shift: a tensor or a DTensor.
        dtype: the dtype to which FSDP2 casts the parameters of a layer that runs; None keeps them.
    """
    if not hasattr(shift, "full_tensor"):
        return shift
    whole: torch.Tensor = _Gathered.apply(shift)  # type: ignore[no-untyped-call]
    return whole if dtype is None else whole.to(dtype)


class _Gathered(torch.autograd.Function):
    """A sharded parameter as a whole tensor; its gradient is the mean over all ranks, as FSDP2's gradients are."""

    @staticmethod
    def forward(ctx: Any, sharded: Any) -> torch.Tensor:
        ctx.mesh, ctx.placements = sharded.device_mesh, sharded.placements
        return sharded.full_tensor()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        from torch.distributed.tensor import DTensor, Partial

        each = [Partial("sum")] * ctx.mesh.ndim
        whole: Any = DTensor.from_local(gradient / ctx.mesh.size(), ctx.mesh, each, run_check=False)
        # FSDP2 adds its own gradient of this parameter on another stream, and autograd would not wait for that.
        if gradient.is_cuda:
            torch.cuda.synchronize(gradient.device)
        return whole.redistribute(placements=ctx.placements)  # type: ignore[no-any-return]
