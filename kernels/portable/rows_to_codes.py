"""This kernel turns 16-bit rows into codes and scales; a program owns a row, and the compiler places its elements.

    x [K] ─▶ blocks [K / block, block] ─▶ amax ─▶ scale ─▶ x / scale ─▶ codes [K · bits / 8]
                                                  └──────────────────▶ scale [K / block], or one a row

It serves formats with one scale for a row, or a static one for the tensor, and blocks of FP8: there, each reduction
goes across threads anyway. NVFP4's blocks of 16 take `kernels/portable/nvfp4_rows_to_codes.py`.

With `flat`, a program owns `width` elements as they lie in memory, whole blocks of one or several rows, so that short
rows leave no lane idle.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quant.kernels.rounding.portable_block_scales import (
    amax_of,
    encode_scale,
    finite_or_nan,
    quotient_to_code,
    reciprocal,
)
from quant.kernels.base.portable_small_floats import code_bits, columns, to_e4m3


@triton.jit
def rows_to_codes_kernel(
    x, codes, scale, global_scale, x_stride, K,
    element: tl.constexpr, largest: tl.constexpr, kind: tl.constexpr, block: tl.constexpr,
    static: tl.constexpr, flat: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """A row of K a program, or `width` elements where `flat`. With `block` 0 the row has one scale.

    `static` divides by `global_scale`, a scale that was measured before, and writes none.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, width)
    dtype: tl.constexpr = x.dtype.element_ty
    start = row * K
    inside = column < (width if flat else K)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)

    if static:
        steps = tl.div_rn(finite_or_nan(value), tl.load(global_scale).to(tl.float32))
    elif block == 0:
        # The row waits here for the slowest of its threads. It waits in 16 bit, which takes half of the registers, so
        # that more rows fit on an SM. Bits of magnitudes sort like their values, NaN above infinity.
        half = value.to(dtype)
        bits = half.to(tl.int16, bitcast=True) & 0x7FFF
        amax = tl.max(bits, axis=0).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        stored, step = encode_scale(amax, 1.0, kind, largest, scale.dtype.element_ty)
        tl.store(scale + row, stored)
        if (amax > 1e-20) & (amax < 1e30):
            steps = quotient_to_code(half.to(tl.float32), step, reciprocal(step))
        else:
            steps = tl.div_rn(half.to(tl.float32), step)
    else:
        blocks = value.reshape(width // block, block)
        stored, step = encode_scale(amax_of(blocks, 1), 1.0, kind, largest, scale.dtype.element_ty)
        index = tl.arange(0, width // block)
        tl.store(scale + start // block + index, stored, mask=index < (width if flat else K) // block)
        if kind == "wide":
            steps = tl.div_rn(blocks, tl.broadcast_to(step[:, None], (width // block, block))).reshape(width)
        else:
            # The reciprocal of a power of two is exact.
            steps = (blocks * tl.div_rn(1.0, step)[:, None]).reshape(width)

    if element == "e2m1":
        word = e2m1_words(steps.reshape(width // 8, 8), value.reshape(width // 8, 8))
        index = tl.arange(0, width // 8)
        words = (codes + start // 2).to(tl.pointer_type(tl.int32))
        tl.store(words + index, word, mask=index < (width if flat else K) // 8)
    else:
        tl.store(codes + start + column, byte_code(steps, element, codes.dtype.element_ty), mask=inside)


@triton.jit
def byte_code(steps, element: tl.constexpr, dtype: tl.constexpr):
    """Rounds float32 to INT8 or E4M3 (or its bytes): to nearest even, saturating, as a cast to E4M3 does by itself."""
    if element == "int8":
        # 1.5 · 2^23: the sum has no bits below one.
        return tl.clamp((steps + 12582912.0) - 12582912.0, -127.0, 127.0).to(tl.int8)
    else:
        return to_e4m3(steps, dtype)


@triton.jit
def e2m1_words(steps, signed):
    """Packs rows of eight E2M1 codes into one int32 each, the first in the lowest bits, with the signs of `signed`."""
    s0, s1, s2, s3, s4, s5, s6, s7 = columns(signed.to(tl.uint32, bitcast=True))
    signs = s7 >> 28
    signs = (signs << 4) | (s6 >> 28)
    signs = (signs << 4) | (s5 >> 28)
    signs = (signs << 4) | (s4 >> 28)
    signs = (signs << 4) | (s3 >> 28)
    signs = (signs << 4) | (s2 >> 28)
    signs = (signs << 4) | (s1 >> 28)
    signs = (signs << 4) | (s0 >> 28)
    # Subtract 0x4B400000 eight times, each time four bits further left: the sum of these wraps to 0x3F400000.
    words = tl.sum(code_bits(tl.abs(steps)) << (tl.arange(0, 8) * 4)[None, :], axis=1) - 0x3F400000
    return (words & 0x77777777) | (signs.to(tl.int32, bitcast=True) & -0x77777778)
