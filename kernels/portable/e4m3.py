"""E4M3 by integer operations, for GPUs whose Triton has no such type: those before Ada (compute capability 8.9).

A kernel takes E4M3 by its own type, or as bytes: the dtype of the pointer says which, and `from_e4m3` and `to_e4m3`
compile to the GPU's conversion or to these functions. The values and the codes are the same, bit for bit.

    code  s eeee mmm ─▶ float32  s 0000eeee mmm0…     2^120 times too small, because the biases are 127 and 7
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quant.kernels import hardware


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


def compilable(x: torch.Tensor) -> torch.Tensor:
    """Returns a tensor as a kernel takes it: E4M3 as its bytes where Triton does not compile the type."""
    return x.view(torch.uint8) if x.dtype is torch.float8_e4m3fn and hardware.lacks_e4m3(x) else x
