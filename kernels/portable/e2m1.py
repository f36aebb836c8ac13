"""Triton kernels round to E2M1 in registers with these functions, to nearest even and saturating at 6.

    nearest_e2m1      float32 to the nearest value of E2M1
    encode_e2m1       float32 to codes
    pack, encode      blocks of 16 float32, rounded to BF16 first, to words of eight codes: two values at a time

A value becomes its code on a line of three parts that gets flatter, which is the minimum of three lines: 2x, x + 2 and
x / 2 + 4. Each is one FMA that ends at 1.5 · 2^23, where float32 rounds to whole numbers, even ones at ties.

`pack` rounds two values into one word and finds the largest magnitude and the signs of a block in words. A word holds
every other value,

    (0, 2) (4, 6) (1, 3) (5, 7)      so that one permutation of bytes gives the signs of values 0, 2, 4 and 6

Hopper has the minimum of three integers in one instruction, and the bits of positive float32 sort like their values.
The codes, each in the low half of a register, are merged in pairs (0, 4) (1, 5) (2, 6) (3, 7), every pair four bits
higher than the one before. That is 10 instructions a value instead of 13, and a quantizer
with a rotation is limited by instructions.
"""

from __future__ import annotations

import triton
import triton.language as tl

_PAIRS = ((0, 2), (4, 6), (1, 3), (5, 7))


def _packing() -> str:
    """Words $0 to $7, and the largest magnitude, float32 $8, of $9 to $24."""
    lines = ["{ .reg .b32 m<8>, t; .reg .f32 p, q;"]
    for word in range(8):
        low, high = (9 + 8 * (word // 4) + value for value in _PAIRS[word % 4])
        lines.append(f"cvt.rn.bf16x2.f32 ${word}, ${high}, ${low};")
    lines += [f"max.NaN.xorsign.abs.bf16x2 m{word}, ${2 * word}, ${2 * word + 1};" for word in range(4)]
    lines.append("max.NaN.xorsign.abs.bf16x2 m4, m0, m1; max.NaN.xorsign.abs.bf16x2 m5, m2, m3;")
    lines.append("max.NaN.xorsign.abs.bf16x2 m6, m4, m5;")
    lines.append("shl.b32 t, m6, 16; mov.b32 p, t; and.b32 t, m6, 0xffff0000; mov.b32 q, t;")
    lines.append("abs.f32 p, p; abs.f32 q, q; max.NaN.f32 $8, p, q; }")
    return "\n".join(lines)


def _encoding(quotient: str) -> str:
    """Words of eight codes, $0 and $1, of the words $2 to $9; `quotient` divides x by the step of the block."""
    lines = ["{ .reg .b32 s, t; .reg .f32 x, r; .reg .s32 a, b, c, k<8>;"]
    for word in range(2):
        first = 2 + 4 * word
        for index, pair in enumerate(_PAIRS):
            for which, value in enumerate(pair):
                source = f"${first + index}"
                lines.append(f"and.b32 t, {source}, 0xffff0000;" if which else f"shl.b32 t, {source}, 16;")
                lines.append(f"mov.b32 x, t; {quotient}")
                lines.append("abs.f32 x, x; min.f32 x, x, 0f40C00000;")
                lines.append("fma.rn.f32 r, x, 0f40000000, 0f4B400000; mov.b32 a, r;")
                lines.append("add.rn.f32 r, x, 0f4B400002; mov.b32 b, r;")
                lines.append("fma.rn.f32 r, x, 0f3F000000, 0f4B400004; mov.b32 c, r;")
                lines.append(f"min.s32 a, a, b; min.s32 k{value}, a, c;")
        lines += [f"prmt.b32 k{value}, k{value}, k{value + 4}, 0x5410;" for value in range(4)]
        lines.append("shl.b32 a, k3, 4; add.s32 a, a, k2; shl.b32 a, a, 4; add.s32 a, a, k1;")
        lines.append("shl.b32 a, a, 4; add.s32 a, a, k0;")
        lines.append(f"prmt.b32 s, ${first}, ${first + 1}, 0xFDB9; prmt.b32 t, ${first + 2}, ${first + 3}, 0xFDB9;")
        # Signs of even values where the first mask has bits, else of odd ones; then codes, or signs of the second mask.
        lines.append(f"lop3.b32 s, s, t, 0x0F0F0F0F, 0xE4; lop3.b32 ${word}, a, s, 0x88888888, 0xF8;")
    return "\n".join(lines) + " }"


@triton.jit
def nearest_e2m1(x):
    """The nearest value of E2M1. Its step is half the power of two below x, and at least a half."""
    x = tl.clamp(x, -6.0, 6.0)
    power = tl.maximum((x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True), 1.0)
    magic = power * 6291456.0  # 1.5 · 2^22 powers leave room for the digits of E2M1 alone
    return (x + magic) - magic


@triton.jit
def encode_e2m1(x):
    """Codes, int32, of float32; NaN becomes 6 with its sign."""
    # Bit 31 of the float to bit 3 of the code.
    sign = (x.to(tl.uint32, bitcast=True) >> 28).to(tl.int32, bitcast=True) & 8
    return (code_bits(tl.abs(x)) - 0x4B400000) | sign


@triton.jit
def code_bits(magnitude):
    """Codes of float32 magnitudes plus 0x4B400000, the bits of 1.5 · 2^23. See the module docstring."""
    magnitude = tl.minimum(magnitude, 6.0)
    line = tl.minimum(tl.fma(magnitude, 2.0, 12582912.0), magnitude + 12582914.0)
    line = tl.minimum(line, tl.fma(magnitude, 0.5, 12582916.0))
    return line.to(tl.int32, bitcast=True)


_PACK = tl.constexpr(_packing())
_ENCODE = tl.constexpr(_encoding("mul.f32 r, x, $11; fma.rn.f32 x, x, $10, r;"))
_ENCODE_EXACT = tl.constexpr(_encoding("mul.f32 x, x, $10;"))


@triton.jit
def pack(x):
    """Blocks of 16 float32, `[blocks, 16]`, as eight words of BF16 pairs, and the amax of each, NaN if one value is."""
    # Sixteen operands of one block of PTX; splits of registers, nothing moves between threads.
    even, odd = tl.split(x.reshape(x.shape[0], 8, 2))
    x0, x2, x4, x6, x8, xa, xc, xe = columns(even)
    x1, x3, x5, x7, x9, xb, xd, xf = columns(odd)
    return tl.inline_asm_elementwise(
        _PACK, "=r,=r,=r,=r,=r,=r,=r,=r,=f,f,f,f,f,f,f,f,f,f,f,f,f,f,f,f,f",
        [x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, xa, xb, xc, xd, xe, xf],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.float32),
        is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def encode(w0, w1, w2, w3, w4, w5, w6, w7, inverse, remainder):
    """Words of eight codes, `[blocks, 2]`, from the words of `pack`; 1 / step is inverse + remainder. NaN becomes 6."""
    low, high = tl.inline_asm_elementwise(
        _ENCODE, "=r,=r,r,r,r,r,r,r,r,r,f,f", [w0, w1, w2, w3, w4, w5, w6, w7, inverse, remainder],
        dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    return tl.join(low, high)


@triton.jit
def encode_exact(w0, w1, w2, w3, w4, w5, w6, w7, inverse):
    """As `encode`, for steps that are powers of two: `inverse` is 1 / step."""
    low, high = tl.inline_asm_elementwise(
        _ENCODE_EXACT, "=r,=r,r,r,r,r,r,r,r,r,f", [w0, w1, w2, w3, w4, w5, w6, w7, inverse],
        dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    return tl.join(low, high)


@triton.jit
def nearly(step):
    """1 / step, accurate to about one unit in the last place."""
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [step], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def refined(step, near):
    """1 / step, correctly rounded, from an approximation a few units off, by one step of Newton's method.

    The step ends one unit low where the mantissa is all ones; its residual, then larger than any other, tells.
    """
    near = tl.fma(tl.fma(-step, near, 1.0), near, near)
    return tl.where(tl.fma(-step, near, 1.0) >= 5.960464477539063e-08, near * 1.0000001192092896, near)


@triton.jit
def in_two_parts(step, near):
    """1 / step, correctly rounded, and the remainder that this rounding cut off; their sum is accurate to 2^-48."""
    inverse = refined(step, near)
    left = tl.fma(-step, inverse, 1.0)
    return inverse, tl.fma(left, left, left) * inverse


@triton.jit
def columns(x):
    """The columns of `[rows, 8]`."""
    rows: tl.constexpr = x.shape[0]
    even, odd = tl.split(x.reshape(rows, 4, 2))
    x04, x26 = tl.split(even.reshape(rows, 2, 2))
    x15, x37 = tl.split(odd.reshape(rows, 2, 2))
    x0, x4 = tl.split(x04)
    x2, x6 = tl.split(x26)
    x1, x5 = tl.split(x15)
    x3, x7 = tl.split(x37)
    return x0, x1, x2, x3, x4, x5, x6, x7
