"""Stochastic rounding: a value goes to one of its two neighbours on the grid, by chance, so that the mean is the value.

    p(up) = (u − low) / (high − low)

The draws come from PyTorch's default generator of the device, whose state training scripts save with their checkpoints;
a resumed run draws on. Ranks often have the same seed. So that they do not round alike, each shifts its draws by a
multiple of the golden ratio, modulo 1, which leaves them uniform.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from quant.formats.number import Number

_GOLDEN = 0.6180339887498949


def round_stochastically(steps: torch.Tensor, number: Number, draws: torch.Tensor | None = None) -> torch.Tensor:
    """Rounds `steps` to neighbours on the grid of `number`, saturating.

    Args:
        steps: float32, any shape.
        number: a float format.
        draws: uniform in [0, 1), of the shape of `steps`; None draws them.
    """
    magnitude = steps.abs()
    exponent = torch.frexp(magnitude).exponent - 1  # floor(log2 |u|)
    gap = torch.ldexp(torch.ones_like(steps), exponent - number.mantissa).clamp(min=number.min_subnormal)
    # floor(v + u) is v rounded up with probability v − floor(v), in units of the gap.
    draws = draws_of(steps) if draws is None else draws
    return (torch.floor(magnitude / gap + draws) * gap).clamp(max=number.max).copysign(steps)


def draws_of(like: torch.Tensor) -> torch.Tensor:
    """Returns draws, uniform in [0, 1), of the shape of a tensor and on its device."""
    draws = torch.rand(like.shape, device=like.device, dtype=torch.float32)
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    return draws if not rank else (draws + rank * _GOLDEN) % 1.0
