"""Every quantizer in Triton computes the scale of a block, and divides by it, with these functions.

    amax_of ─▶ encode_scale: the `max` rule, rounded to the stored dtype ─▶ reciprocal ─▶ quotient_to_code ─▶ code

Divisions must agree with the oracle's, which are correctly rounded. `tl.div_rn` is, and takes about ten instructions.
The reciprocal of a scale serves its whole block, so a quotient costs two or three FMAs here.

A block that holds NaN or infinity gets a scale that is NaN, as in `quant.formats.scaling`: E2M1 and INT8 have no code
for NaN. The maximum that keeps NaN takes as long as the one that drops it, and turning infinity into NaN is one FMA
for each scale.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quant.kernels.base.portable_small_floats import from_e4m3, nearest_e2m1, refined, to_e4m3
from quant.kernels.linear.portable_codes_gemm import decode_scale


@triton.jit
def larger(a, b):
    """Returns the larger of a and b; NaN if either is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def amax_of(x, axis: tl.constexpr):
    """Returns the largest magnitude along an axis; NaN if any value is NaN."""
    return tl.reduce(tl.abs(x), axis, larger)


@triton.jit
def finite_or_nan(x):
    """Returns x, with NaN in place of infinity: 0 · infinity is NaN, and 0 · x added to x changes no other value."""
    return tl.fma(x, 0.0, x)


@triton.jit
def nonzero(scale):
    """Returns a scale, with 1 in place of zero and NaN in place of infinity."""
    return tl.where(scale != 0, finite_or_nan(scale), 1.0)


@triton.jit
def reciprocal(step):
    """Returns 1 / step, correctly rounded."""
    return refined(step, 1.0 / step)


@triton.jit
def quotient(x, step, inverse):
    """Returns x / step, correctly rounded for x of 0 or above 1e-30; below, the remainder underflows (Markstein, 1990).

    The product with the rounded reciprocal is off by less than one unit. One FMA gives the exact remainder, a second
    adds its quotient. A division costs three times as much.
    """
    near = x * inverse
    return tl.fma(tl.fma(near, -step, x), inverse, near)


@triton.jit
def quotient_to_code(x, step, inverse):
    """Returns x / step, exact enough for every code, for an x of at most 11 bits and a step from 1e-30 to 1e30.

    1 / step is split into its rounded value and the remainder. Their products with x are rounded once, in an FMA,
    with an error of at most 2^-48 more than a division. No quotient lies that close to a boundary between two codes;
    tests/kernels/rounding/test_casts.py tries the nearest ones.
    """
    error = tl.fma(inverse, -step, 1.0)
    remainder = tl.fma(error, error, error) * inverse
    return tl.fma(x, inverse, x * remainder)


@triton.jit
def encode_scale_for_four_or_six(x, amax, global_scale, dtype: tl.constexpr):
    """Returns E4M3 block scales by the rule `four_over_six`, as `encode_scale` does by `max`.

    The two squared errors are sums in another order than the oracle's, so that errors equal to seven digits may be
    told apart differently.

    Args:
        x: `[blocks, 1, values]`.
        amax: largest magnitudes, `[blocks, 1]`.
        global_scale: float32.
        dtype: the dtype of the scales, E4M3 or uint8.
    """
    six, six_step = encode_scale(amax, global_scale, "e4m3", 6.0, dtype)
    four, four_step = encode_scale(amax * 1.5, global_scale, "e4m3", 6.0, dtype)
    better = _squared_error(x, four_step, amax) < _squared_error(x, six_step, amax)
    # E4M3 has no select of its own: its bits are chosen.
    code = tl.where(better, four.to(tl.uint8, bitcast=True), six.to(tl.uint8, bitcast=True))
    return code.to(dtype, bitcast=True), tl.where(better, four_step, six_step)


@triton.jit
def _squared_error(x, step, amax):
    """Returns the squared error of each block on a grid of `step`, in units of its amax."""
    steps = quotient(x, step[:, :, None], reciprocal(step)[:, :, None])
    error = nearest_e2m1(steps) - steps
    ratio = step / nonzero(amax)
    return tl.sum(error * error, axis=2) * (ratio * ratio)


@triton.jit
def encode_scale(amax, global_scale, kind: tl.constexpr, largest: tl.constexpr, dtype: tl.constexpr):
    """Returns block scales by the `max` rule, NaN if amax is not finite: code, and value times the global scale.

    `kind` is the stored dtype ("e4m3", "e8m0", or "wide" for float32), `largest` the element's largest value.
    `dtype` is the type behind the pointer to the scales: E4M3 is stored as uint8 where Triton has no such type.
    """
    if kind == "e4m3":
        unit = largest * global_scale
        ideal = quotient(amax, unit, reciprocal(unit))
        # Clamp before the FMA that brings NaN back: where the quotient is infinite, its correction in `quotient` is
        # NaN, and the minimum of NaN and 448 is 448.
        stored = to_e4m3(tl.fma(amax, 0.0, tl.maximum(tl.minimum(ideal, 448.0), 0.001953125)), dtype)
        return stored, from_e4m3(stored) * global_scale
    elif kind == "e8m0":
        # The exponent, rounded up where the mantissa is not zero. Quotients up to 2^-127, a subnormal, get code 0.
        bits = tl.div_rn(amax, largest).to(tl.int32, bitcast=True)
        code = (bits >> 23) + tl.where((bits & 0x7FFFFF) != 0, 1, 0)
        code = tl.minimum(tl.where(bits <= 0x400000, 0, code), 255)
        return code.to(tl.uint8), decode_scale(code, "e8m0")
    else:
        scale = nonzero(tl.div_rn(amax, largest))
        return scale, scale
