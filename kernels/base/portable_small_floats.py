"""Triton kernels round to E2M1 and E4M3 in registers with these functions, to nearest even and saturating.

    nearest_e2m1              float32 to the nearest value of E2M1
    encode_e2m1               float32 to codes of E2M1
    to_e4m3, from_e4m3        float32 to E4M3, and back

A value becomes its code of E2M1 on a line of three parts that gets flatter, which is the minimum of three lines: 2x,
x + 2 and x / 2 + 4. Each is one FMA that ends at 1.5 · 2^23, where float32 rounds to whole numbers, even ones at ties.

Triton has no E4M3 on NVIDIA GPUs before Ada (compute capability 8.9). A kernel takes it as bytes there: the dtype of
the pointer says so, and `to_e4m3` and `from_e4m3` compile to integer operations instead of the GPU's conversions. The
values and the codes are the same, bit for bit.

    code  s eeee mmm ─▶ float32  s 0000eeee mmm0…     2^120 times too small, because the biases are 127 and 7

Every quantizer computes the scale of a block, and divides by it, with these functions too:

    amax_of ─▶ encode_scale: the `max` rule, rounded to the stored dtype ─▶ reciprocal ─▶ quotient_to_code ─▶ code

Divisions must agree with the oracle's, which are correctly rounded. `tl.div_rn` is, and takes about ten instructions;
the reciprocal of a scale serves its whole block, so a quotient costs two or three FMAs here. A block that holds NaN or
infinity gets a scale that is NaN, as in `quant.formats.scaling`: E2M1 and INT8 have no code for NaN. The maximum that
keeps NaN takes as long as the one that drops it, and turning infinity into NaN is one FMA for each scale.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quant.kernels.base import hardware


@triton.jit
def nearest_e2m1(x):
    """Returns the nearest value of E2M1. Its step is half the power of two below x, and at least a half."""
    x = tl.clamp(x, -6.0, 6.0)
    power = tl.maximum((x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True), 1.0)
    magic = power * 6291456.0  # 1.5 · 2^22 powers leave room for only the digits of E2M1
    return (x + magic) - magic


@triton.jit
def encode_e2m1(x):
    """Returns the codes, int32, of float32; NaN becomes 6 with its sign."""
    # Bit 31 of the float to bit 3 of the code.
    sign = (x.to(tl.uint32, bitcast=True) >> 28).to(tl.int32, bitcast=True) & 8
    return (code_bits(tl.abs(x)) - 0x4B400000) | sign


@triton.jit
def code_bits(magnitude):
    """Returns the codes of float32 magnitudes plus 0x4B400000, the bits of 1.5 · 2^23. See the module docstring."""
    magnitude = tl.minimum(magnitude, 6.0)
    line = tl.minimum(tl.fma(magnitude, 2.0, 12582912.0), magnitude + 12582914.0)
    line = tl.minimum(line, tl.fma(magnitude, 0.5, 12582916.0))
    return line.to(tl.int32, bitcast=True)


@triton.jit
def decode_e4m3(code):
    """Converts codes, integers from 0 to 255, to float32, exactly."""
    code = code.to(tl.int32)
    bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
    # Subnormal codes are subnormal float32 numbers, and the product makes both normal.
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def encode_e4m3(x):
    """Returns the codes (uint8) nearest to float32, ties to even, saturating at 448; NaN is 0x7F, without a sign."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # The mantissa loses 20 bits; adding half of the last bit, and one where it is odd, carries into the exponent.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 codes are multiples of 2^-9. 1.5 · 2^23 leaves the nearest whole number in the low bits of the sum.
    small = (tl.abs(x) * 512.0 + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    code = tl.minimum(tl.where(magnitude < 0x3C800000, small, normal), 0x7E) | ((bits >> 24) & 0x80)
    return tl.where(magnitude > 0x7F800000, 0x7F, code).to(tl.uint8)


@triton.jit
def from_e4m3(x):
    """Converts E4M3, or its bytes, to float32."""
    if x.dtype == tl.uint8:
        return decode_e4m3(x)
    else:
        return x.to(tl.float32)


@triton.jit
def to_e4m3(x, dtype: tl.constexpr):
    """Rounds float32 to nearest even, saturating: to E4M3, or to its bytes where `dtype` is uint8."""
    if dtype == tl.uint8:
        return encode_e4m3(x)
    else:
        return x.to(tl.float8e4nv)


@triton.jit
def decode_scale(scale, kind: tl.constexpr):
    """Converts stored scales to float32, exactly. Code 0 of E8M0 is a float32 subnormal, 255 is NaN."""
    if kind == "e8m0":
        code = scale.to(tl.int32)
        bits = tl.where(code == 0, 1 << 22, code << 23)
        return tl.where(code == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    elif kind == "e4m3":
        return from_e4m3(scale)
    else:
        return scale.to(tl.float32)


def compilable(x: Tensor) -> Tensor:
    """Returns a tensor as a kernel takes it: E4M3 as its bytes where Triton does not compile the type."""
    return x.view(torch.uint8) if x.dtype is torch.float8_e4m3fn and hardware.lacks_e4m3(x) else x


@triton.jit
def refined(step, near):
    """Returns 1 / step, correctly rounded, from an approximation a few units off, by one step of Newton's method."""
    # The step ends one unit low where the mantissa is all ones; its residual, then larger than any other, shows it.
    near = tl.fma(tl.fma(-step, near, 1.0), near, near)
    return tl.where(tl.fma(-step, near, 1.0) >= 5.960464477539063e-08, near * 1.0000001192092896, near)


@triton.jit
def columns(x):
    """Returns the columns of `[rows, 8]`."""
    rows: tl.constexpr = x.shape[0]
    even, odd = tl.split(x.reshape(rows, 4, 2))
    x04, x26 = tl.split(even.reshape(rows, 2, 2))
    x15, x37 = tl.split(odd.reshape(rows, 2, 2))
    x0, x4 = tl.split(x04)
    x2, x6 = tl.split(x26)
    x1, x5 = tl.split(x15)
    x3, x7 = tl.split(x37)
    return x0, x1, x2, x3, x4, x5, x6, x7


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
    """Returns x / step, correctly rounded for x of 0 or above 1e-30; below, the remainder underflows (Markstein)."""
    # The product with the rounded reciprocal is off by less than one unit. One FMA gives the exact remainder, a second
    # adds its quotient. A division costs three times as much.
    near = x * inverse
    return tl.fma(tl.fma(near, -step, x), inverse, near)


@triton.jit
def quotient_to_code(x, step, inverse):
    """Returns x / step, exact enough for every code, for an x of at most 11 bits and a step from 1e-30 to 1e30."""
    # 1 / step is split into its rounded value and the remainder. Their products with x are rounded once, in an FMA,
    # with an error of at most 2^-48 more than a division. No quotient lies that close to a boundary between two codes;
    # tests/kernels/rounding/test_casts.py tries the nearest ones.
    error = tl.fma(inverse, -step, 1.0)
    remainder = tl.fma(error, error, error) * inverse
    return tl.fma(x, inverse, x * remainder)


@triton.jit
def encode_scale_for_four_or_six(x, amax, global_scale, dtype: tl.constexpr):
    """Returns E4M3 scales of x `[blocks, 1, values]` by the rule `four_over_six`, as `encode_scale` does by `max`."""
    # The two squared errors are sums in another order than the oracle's, so that errors equal to seven digits may be
    # told apart differently. `amax` is `[blocks, 1]`, and `dtype` the type of the scales, E4M3 or uint8.
    six, six_step = encode_scale(amax, global_scale, "e4m3", 6.0, dtype)
    four, four_step = encode_scale(amax * 1.5, global_scale, "e4m3", 6.0, dtype)
    better = _squared_error(x, four_step, amax) < _squared_error(x, six_step, amax)
    # E4M3 has no select of its own: its bits are chosen.
    code = tl.where(better, four.to(tl.uint8, bitcast=True), six.to(tl.uint8, bitcast=True))
    return code.to(dtype, bitcast=True), tl.where(better, four_step, six_step)


@triton.jit
def _squared_error(x, step, amax):
    steps = quotient(x, step[:, :, None], reciprocal(step)[:, :, None])
    error = nearest_e2m1(steps) - steps
    ratio = step / nonzero(amax)
    return tl.sum(error * error, axis=2) * (ratio * ratio)


@triton.jit
def encode_scale(amax, global_scale, kind: tl.constexpr, largest: tl.constexpr, dtype: tl.constexpr):
    """Returns block scales by the `max` rule, NaN if amax is not finite: code, and value times the global scale."""
    # `kind` is the stored dtype ("e4m3", "e8m0", or "wide" for float32), `largest` the element's largest value. `dtype`
    # is the type behind the pointer to the scales: E4M3 is stored as uint8 where Triton has no such type.
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
