"""These kernels find the global scale that the weights of fused layers share, while a model trains.

    weights ─▶ largest magnitude of each run ─▶ largest of all runs ─▶ / (6 · 448)

Magnitudes are compared as the bits of float32, which have the same order; NaN is above infinity. There is a launch for
each weight and one for the scale, where PyTorch's own ops need ten.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl

from quant.formats.format import FORMATS, Format
from quant.formats.number import E4M3
from quant.kernels.base.launch_cache import CachedLaunch
from quant.kernels.rounding.portable_block_scales import amax_of, nonzero

_RUN = 8192


@triton.jit
def amax_kernel(weight, largest, count, block: tl.constexpr):
    """Raises `largest`, the bits of a magnitude, to the largest magnitude of a run of `weight`."""
    offset = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    w = tl.load(weight + offset, mask=offset < count, other=0.0).to(tl.float32)
    # Positive floats sort like their bits, so an integer maximum does.
    tl.atomic_max(largest, amax_of(w, 0).to(tl.int32, bitcast=True))


@triton.jit
def global_scale_kernel(largest, out, unit: tl.constexpr):
    """Writes the magnitude of the bits `largest` divided by `unit`, through its reciprocal; NaN if not finite."""
    # Both reciprocals are rounded, as by the modules that this replaces: the bits must agree.
    amax = tl.load(largest).to(tl.float32, bitcast=True)
    tl.store(out, tl.div_rn(1.0, tl.div_rn(1.0, nonzero(tl.div_rn(amax, unit)))))


def global_scale(weights: Sequence[torch.Tensor], format: Format) -> torch.Tensor:
    """Returns the global scale by the `max` rule, float32 scalar, of weights on one GPU: FP32, BF16 or FP16."""
    device = weights[0].device
    largest = torch.zeros((), dtype=torch.int32, device=device)
    out = torch.empty((), dtype=torch.float32, device=device)
    for weight in weights:
        _amax(weight.numel())(weight.contiguous(), largest, weight.numel())
    _global_scale(format.name)(largest, out)
    return out


@lru_cache(maxsize=1024)
def _amax(count: int) -> CachedLaunch:
    """Returns the launch of `amax_kernel` for a number of elements."""
    return CachedLaunch(amax_kernel, (triton.cdiv(count, _RUN),), {"block": _RUN, "num_warps": 8})


@lru_cache(maxsize=64)
def _global_scale(format: str) -> CachedLaunch:
    """Returns the launch of `global_scale_kernel` for a format."""
    return CachedLaunch(global_scale_kernel, (1,), {"unit": FORMATS[format].element.max * E4M3.max, "num_warps": 1})
