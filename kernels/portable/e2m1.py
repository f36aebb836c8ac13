"""Triton kernels round to E2M1 in registers with these functions, to nearest even and saturating at 6.

    nearest_e2m1      float32 to the nearest value of E2M1
    encode_e2m1       float32 to codes

A value becomes its code on a line of three parts that gets flatter, which is the minimum of three lines: 2x, x + 2 and
x / 2 + 4. Each is one FMA that ends at 1.5 · 2^23, where float32 rounds to whole numbers, even ones at ties.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
def refined(step, near):
    """Returns 1 / step, correctly rounded, from an approximation a few units off, by one step of Newton's method.

    The step ends one unit low where the mantissa is all ones; its residual, then larger than any other, shows it.
    """
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
