"""`kl_of_logits` computes KL divergences over a large vocabulary in one launch, where PyTorch needs a dozen.

With z the logits of the base, d the model's logits minus z, p = softmax(z) and m = Σ p d,

    KL(base‖model) = ln Σ p exp(d − m)  =  ln(1 + Σ p (exp(d − m) − 1))

so that nothing cancels in small divergences. A program takes one position and reads its row twice, the second time
from the cache:

    first    max z, Σ exp(z), Σ exp(z) d, max d        online: sums are rescaled where a larger z comes
    second   Σ p (exp(d − m) − 1), and Σ p (d − m), which is zero up to rounding and is taken off
    third    only where some d − m is so large that its exponential overflows: Σ p exp(d − max d)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quant.kernels.base.launch import on_its_gpu

_TILE = 4096
# Above this, exp(d − m) comes near the largest float32.
_LARGE = 80.0


@triton.jit
def _expm1(x):
    """Returns exp(x) − 1: near zero by its series, up to x⁸ / 8!, whose error is below float32's rounding."""
    series = 1.0 + x / 8.0
    series = 1.0 + x / 7.0 * series
    series = 1.0 + x / 6.0 * series
    series = 1.0 + x / 5.0 * series
    series = 1.0 + x / 4.0 * series
    series = 1.0 + x / 3.0 * series
    series = 1.0 + x / 2.0 * series
    return tl.where(tl.abs(x) < 0.4, x * series, tl.exp(x) - 1.0)


@triton.jit
def _log1p(x):
    """Returns ln(1 + x) with the rounding of 1 + x taken out (Kahan)."""
    one = 1.0 + x
    return tl.where(one == 1.0, x, tl.log(one) * (x / (one - 1.0)))


@triton.jit
def kl_of_logits_kernel(base, difference, out, vocabulary, LARGE: tl.constexpr, TILE: tl.constexpr):
    """Computes the divergence at one position; see the module docstring. Grid: positions."""
    position = tl.program_id(0).to(tl.int64)
    base += position * vocabulary
    difference += position * vocabulary
    lane = tl.arange(0, TILE)
    low = float("-inf")
    peak = tl.full((TILE,), low, tl.float32)
    largest = tl.full((TILE,), low, tl.float32)
    total, moment = tl.zeros((TILE,), tl.float32), tl.zeros((TILE,), tl.float32)
    for start in range(0, vocabulary, TILE):
        at = start + lane
        z = tl.load(base + at, mask=at < vocabulary, other=low).to(tl.float32)
        d = tl.load(difference + at, mask=at < vocabulary, other=0.0).to(tl.float32)
        # A token that the base rules out has p = 0, whatever the model's logit is.
        out_of = z == low
        above = tl.maximum(peak, z)
        scale = tl.where(peak == low, 0.0, tl.exp(peak - above))
        weight = tl.where(out_of, 0.0, tl.exp(z - above))
        total = total * scale + weight
        moment = moment * scale + tl.where(out_of, 0.0, weight * d)
        largest = tl.maximum(largest, tl.where(out_of, low, d))
        peak = above
    top = tl.max(peak, axis=0)
    share = tl.where(peak == low, 0.0, tl.exp(peak - top))
    whole = tl.sum(total * share, axis=0)
    mean = tl.sum(moment * share, axis=0) / whole
    grown, left = tl.zeros((TILE,), tl.float32), tl.zeros((TILE,), tl.float32)
    for start in range(0, vocabulary, TILE):
        at = start + lane
        z = tl.load(base + at, mask=at < vocabulary, other=low).to(tl.float32)
        d = tl.load(difference + at, mask=at < vocabulary, other=0.0).to(tl.float32)
        weight = tl.where(z == low, 0.0, tl.exp(z - top))
        rise = tl.where(z == low, 0.0, d - mean)
        grown += weight * _expm1(rise)
        left += weight * rise
    remainder = tl.sum(left, axis=0) / whole
    kl = _log1p(tl.sum(grown, axis=0) / whole) - remainder
    peak_rise = tl.max(largest, axis=0) - mean
    if peak_rise > LARGE:
        spread = tl.zeros((TILE,), tl.float32)
        for start in range(0, vocabulary, TILE):
            at = start + lane
            z = tl.load(base + at, mask=at < vocabulary, other=low).to(tl.float32)
            d = tl.load(difference + at, mask=at < vocabulary, other=0.0).to(tl.float32)
            rise = tl.where(z == low, low, d - mean)
            spread += tl.where(z == low, 0.0, tl.exp(z - top) * tl.exp(rise - peak_rise))
        kl = tl.log(tl.sum(spread, axis=0) / whole) + peak_rise - remainder
    tl.store(out + position, kl)


@on_its_gpu
def kl_of_logits(base: Tensor, difference: Tensor) -> Tensor:
    """Returns KL(base‖model) at each position, float32 `[positions]`; NaN where a logit is NaN, or +∞ in the base."""
    # `base` holds logits `[positions, vocabulary]`, −∞ for tokens that it rules out; `difference` the model's minus
    # these.
    base, difference = base.contiguous(), difference.contiguous()
    out = torch.empty(len(base), dtype=torch.float32, device=base.device)
    tile = min(_TILE, triton.next_power_of_2(base.shape[1]))
    kl_of_logits_kernel[(len(base),)](
        base, difference, out, base.shape[1], LARGE=_LARGE, TILE=tile, num_warps=8, enable_fp_fusion=True
    )
    return out
