"""These kernels quantize activations on a GPU in one pass: rows in BF16 or FP16 become codes and scales.

A program owns a row and computes it in one of four ways, which saves the row a trip through memory:

    plain      x
    rms        x / rms(x) · weight
    add_rms    h = x + residual, which is written too; then as rms
    swiglu     silu(x) · second

then, with the row in registers:

    [columns] ─▶ blocks ─▶ amax ─▶ scale (the `max` rule) ─▶ x / scale ─▶ codes

The values equal those of the modules that are replaced, with each intermediate rounded to the dtype of x where they
round it; the codes equal those of `formats/`, rounded to nearest even against the decoded scale. The optional Hadamard
rotation consists of butterflies in registers (`kernels/portable/hadamard.py`) and equals `kernels/hadamard.py` bit for
bit; the step after it, from BF16 to four bits, is in `kernels/portable/e2m1.py`.

A block that holds NaN or infinity gets a scale that is NaN, as in `quant.formats.scaling`: E2M1 and INT8 have no code
for NaN. Under a static scale, which is not the block's own, the single code of E4M3 is NaN. The maximum that keeps NaN
takes as long as the one that drops it, and the rest is one FMA for each scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quant.formats.format import FORMATS, Format
from quant.formats.scaling import global_scale_of, scale_of
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.hardware import current
from quant.kernels.launch_cache import Repeated
from quant.kernels.portable.codes_gemm import decode_scale
from quant.kernels.portable.e2m1 import (
    code_bits,
    encode,
    encode_exact,
    in_two_parts,
    nearly,
    pack,
    refined,
)
from quant.kernels.portable.e2m1 import columns as _columns
from quant.kernels.portable.hadamard import hadamard_of_threads

FORMATS_OUT = ("nvfp4", "mxfp8", "mxfp4", "fp8", "fp8_token", "fp8_group", "int8_token")
"""Activation formats that can be written."""
MAX_COLUMNS = 32768


@triton.jit
def larger(a, b):
    """The larger of a and b; NaN if either is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def amax_of(x, axis: tl.constexpr):
    """The largest magnitude along an axis; NaN if any value is NaN."""
    return tl.reduce(tl.abs(x), axis, larger)


@triton.jit
def finite_or_nan(x):
    """x, with NaN in place of infinity."""
    return tl.fma(x, 0.0, x)


@triton.jit
def nonzero(scale):
    """A scale, with 1 in place of zero and NaN in place of infinity."""
    return tl.where(scale != 0, finite_or_nan(scale), 1.0)


@triton.jit
def reciprocal(step):
    """1 / step, correctly rounded."""
    return refined(step, 1.0 / step)


@triton.jit
def quotient(x, step, inverse):
    """x / step, correctly rounded where x is 0 or above 1e-30; below, the remainder underflows (Markstein, 1990).

    The product with the rounded reciprocal is off by less than one unit. One FMA gives the exact remainder, a second
    adds its quotient. A division costs three times as much.
    """
    near = x * inverse
    return tl.fma(tl.fma(near, -step, x), inverse, near)


@triton.jit
def quotient_to_code(x, step, inverse):
    """x / step, exact enough that every code is right, for an x of at most 11 bits and a step from 1e-30 to 1e30.

    1 / step is split into its rounded value and the remainder. Their products with x are rounded once, in an FMA,
    with an error of at most 2^-48 more than a division. No quotient lies that close to a boundary between two codes;
    tests/kernels/portable/test_casts.py tries the nearest ones.
    """
    left = tl.fma(inverse, -step, 1.0)
    rest = tl.fma(left, left, left) * inverse
    return tl.fma(x, inverse, x * rest)


@triton.jit
def encode_scale(amax, global_scale, kind: tl.constexpr, largest: tl.constexpr):
    """Block scales by the `max` rule, NaN if amax is not finite: the code, and its value times the global scale."""
    if kind == "e4m3":
        unit = largest * global_scale
        ideal = quotient(amax, unit, reciprocal(unit))
        # In this order: where the quotient is infinite, its correction is no number, of which the minimum is 448.
        stored = tl.fma(amax, 0.0, tl.maximum(tl.minimum(ideal, 448.0), 0.001953125)).to(tl.float8e4nv)
        return stored, stored.to(tl.float32) * global_scale
    elif kind == "e8m0":
        bits = tl.div_rn(amax, largest).to(tl.int32, bitcast=True)
        code = (bits >> 23) + tl.where((bits & 0x7FFFFF) != 0, 1, 0)
        code = tl.minimum(tl.where(bits <= 0x400000, 0, code), 255)
        return code.to(tl.uint8), decode_scale(code, "e8m0")
    else:
        scale = nonzero(tl.div_rn(amax, largest))
        return scale, scale


@triton.jit
def _rounded(x, dtype: tl.constexpr, pairs: tl.constexpr):
    """float32 of x rounded to `dtype`; by `pairs`, two BF16 are made and taken apart in three instructions."""
    if pairs and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 pair;
                cvt.rn.bf16x2.f32 pair, $3, $2;
                shl.b32 $0, pair, 16;
                and.b32 $1, pair, 0xffff0000; }""",
            "=r,=r,r,r", [x], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return x.to(dtype).to(tl.float32)


@triton.jit
def _rounded_product(x, other, dtype: tl.constexpr, pairs: tl.constexpr):
    """float32 of x rounded to `dtype`, times `other` (from `_row` or a load), rounded again."""
    if pairs and dtype == tl.bfloat16 and other.dtype == tl.int32:
        low, high = tl.split(x.reshape(x.shape[0], x.shape[1] // 2, 2))
        low, high = tl.inline_asm_elementwise(
            """{ .reg .b32 pair;
                cvt.rn.bf16x2.f32 pair, $3, $2;
                mul.rn.bf16x2 pair, pair, $4;
                shl.b32 $0, pair, 16;
                and.b32 $1, pair, 0xffff0000; }""",
            "=r,=r,r,r,r", [low, high, other], dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
        return tl.join(low, high).reshape(x.shape[0], x.shape[1])
    else:
        return (x.to(dtype).to(tl.float32) * _floats(other)).to(dtype).to(tl.float32)


@triton.jit
def _added(x, residual, dtype: tl.constexpr, pairs: tl.constexpr):
    """float32 of x + residual, rounded as `hidden` has it."""
    return _rounded(x + _floats(residual), dtype, pairs)


@triton.jit
def _finish(value, scaling, other, dtype: tl.constexpr, source: tl.constexpr, pairs: tl.constexpr):
    """The float32 values to quantize, each step rounded to `dtype`; `other`: the norm's weight or the second factor."""
    if source == "swiglu":
        return _rounded_product(value / (1.0 + tl.exp(-value)), other, dtype, pairs)
    else:
        return _rounded_product(value * scaling, other, dtype, pairs)


@triton.jit
def _row(pointer, end, threads: tl.constexpr, per: tl.constexpr):
    """A row as `[threads, per]`, 16 or 32 neighbours a thread, zeros beyond `end`; BF16 as words of two.

    It is read 16 bytes at a time and joined: whatever is `[threads, ...]` lies in the registers of those threads, and
    no element moves to another. A word is taken apart by a shift and an AND; where the compiler takes two BF16 apart,
    it needs three. The row begins at a multiple of four bytes.
    """
    if pointer.dtype.element_ty == tl.bfloat16:
        return _gathered(pointer.to(tl.pointer_type(tl.int32)), end // 2, threads, per // 2, 4)
    else:
        return _gathered(pointer, end, threads, per, 8)


@triton.jit
def _gathered(pointer, end, threads: tl.constexpr, columns: tl.constexpr, at_once: tl.constexpr):
    """`[threads, columns]`, two or four times `at_once`."""
    place = tl.arange(0, threads)[:, None] * columns + tl.arange(0, at_once)[None, :]
    value = _two(pointer, place, end, at_once)
    if columns > 2 * at_once:
        value = _after(value, _two(pointer, place + 2 * at_once, end, at_once))
    return value


@triton.jit
def _two(pointer, place, end, at_once: tl.constexpr):
    """The elements at `place`, and the `at_once` elements after each of them."""
    first = tl.load(pointer + place, mask=place < end, other=0)
    return _after(first, tl.load(pointer + place + at_once, mask=place + at_once < end, other=0))


@triton.jit
def _floats(x):
    """float32 of `x`: int32 is unpacked as two BF16 values (`_row` returns such words), other dtypes are converted."""
    if x.dtype == tl.int32:
        low, high = (x << 16).to(tl.float32, bitcast=True), (x & -65536).to(tl.float32, bitcast=True)
        return tl.join(low, high).reshape(x.shape[0], 2 * x.shape[1])
    else:
        return x.to(tl.float32)


@triton.jit
def _after(a, b):
    """`[threads, 2 n]`: each row of a, followed by the same row of b."""
    return tl.join(a, b).permute(0, 2, 1).reshape(a.shape[0], 2 * a.shape[1])


@triton.jit
def _halves(x):
    """The inverse of `_after`: `[threads, 2 n]` as two of `[threads, n]`."""
    return tl.split(x.reshape(x.shape[0], 2, x.shape[1] // 2).permute(0, 2, 1))


@triton.jit
def _store(pointer, value, end, at_once: tl.constexpr):
    """`[threads, columns]` as a row, `at_once` elements of a thread at a time, all or half of them."""
    threads: tl.constexpr = value.shape[0]
    columns: tl.constexpr = value.shape[1]
    place = tl.arange(0, threads)[:, None] * columns + tl.arange(0, at_once)[None, :]
    if columns == at_once:
        tl.store(pointer + place, value, mask=place < end)
    else:
        low, high = _halves(value)
        tl.store(pointer + place, low, mask=place < end)
        tl.store(pointer + place + at_once, high, mask=place + at_once < end)


@triton.jit
def quantize_threads_kernel(
    x, second, norm_weight, hidden, codes, scale, global_scale, x_stride, second_stride, K, columns, eps,
    source: tl.constexpr, element: tl.constexpr, largest: tl.constexpr, kind: tl.constexpr, block: tl.constexpr,
    static: tl.constexpr, hadamard: tl.constexpr, root: tl.constexpr, flat: tl.constexpr, width: tl.constexpr,
    per: tl.constexpr, whole: tl.constexpr, pairs: tl.constexpr, swizzled: tl.constexpr,
):  # fmt: skip
    """As `quantize_rows_kernel`, where a thread has `per` neighbours, and so whole blocks: for NVFP4 and rotations.

    With one row as one vector, a block would be shared by threads, and each would find its scale. `whole` says that
    rows, of K or, where `flat`, of `columns`, are whole numbers of threads.
    """
    row = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = x.dtype.element_ty
    threads: tl.constexpr = width // per
    start, end = row * K, K
    if flat:
        start, end = row * width, width
    elif whole:
        start, end = row * (K // per) * per, K // per * per
    normed: tl.constexpr = source == "rms" or source == "add_rms"
    value = _floats(_row(x + row * x_stride, end, threads, per))
    if source == "add_rms":
        value = _added(value, _row(second + row * second_stride, end, threads, per), dtype, pairs)
        column = tl.arange(0, threads)[:, None] * per + tl.arange(0, per)[None, :]
        tl.store(hidden + start + column, value.to(dtype), mask=column < end)
    scaling = tl.rsqrt(tl.sum(tl.sum(value * value, axis=1), axis=0) / K + eps) if normed else 1.0
    if normed:
        value = _finish(value, scaling, _row(norm_weight, end, threads, per), dtype, source, pairs)
    if source == "swiglu":
        value = _finish(value, 1.0, _row(second + row * second_stride, end, threads, per), dtype, source, pairs)
    if hadamard > 0:
        value = hadamard_of_threads(value, hadamard)
    # Behind SiLU, words of two values were not faster.
    in_pairs: tl.constexpr = pairs and dtype == tl.bfloat16 and source != "swiglu"
    if hadamard > 0 and element == "e2m1" and in_pairs:
        _write_pairs(value, codes, scale, global_scale, start, end, columns, largest, kind, block, hadamard, root,
                     swizzled)  # fmt: skip
    else:
        if hadamard > 0:
            value = _rounded(value * root, dtype, pairs)
        _write(value, codes, scale, global_scale, row, start, end, columns, element, largest, kind, block, static,
               swizzled)  # fmt: skip


@triton.jit
def _write_pairs(
    value, codes, scale, global_scale, start, end, columns, largest: tl.constexpr, kind: tl.constexpr,
    block: tl.constexpr, hadamard: tl.constexpr, root: tl.constexpr, swizzled: tl.constexpr,
):  # fmt: skip
    """NVFP4 or MXFP4 of `value` times `root`, rounded to BF16.

    A root that is a power of two goes into NVFP4's scales instead. MXFP4's reach down to where BF16 has fewer bits.
    """
    threads: tl.constexpr = value.shape[0]
    per: tl.constexpr = value.shape[1]
    blocks: tl.constexpr = threads * per // block
    share: tl.constexpr = block // 16
    power: tl.constexpr = hadamard == 16 or hadamard == 64 or hadamard == 256
    after: tl.constexpr = root if power and kind == "e4m3" else 1.0
    if after == 1.0:
        value *= root
    w0, w1, w2, w3, w4, w5, w6, w7, amax = pack(value.reshape(blocks * share, 16))
    if share > 1:
        amax = amax_of(amax.reshape(blocks, share), 1)
    second_level = tl.load(global_scale).to(tl.float32) if kind == "e4m3" else 1.0
    stored, step = encode_scale(amax * after, second_level, kind, largest)
    _store_scales(scale, stored, tl.arange(0, blocks), start // block, end // block, columns // block, swizzled)
    if kind == "e4m3":
        inverse, rest = in_two_parts(step, nearly(step))
        words = encode(w0, w1, w2, w3, w4, w5, w6, w7, inverse * after, rest * after)
    else:
        inverse = tl.broadcast_to(tl.div_rn(1.0, step)[:, None], (blocks, share)).reshape(blocks * share)
        words = encode_exact(w0, w1, w2, w3, w4, w5, w6, w7, inverse)
    pointer = (codes + start // 2).to(tl.pointer_type(tl.int32))
    _store(pointer, words.reshape(threads, per // 8), end // 8, 4 if per > 16 else 2)


@triton.jit
def _store_scales(scale, stored, index, first, count, across, swizzled: tl.constexpr):
    """Scales of the blocks `first + index`, those below `count`; `across` is how many a row has."""
    if swizzled:
        place = _swizzled_place(first + index, across)
    else:
        place = first + index
    tl.store(scale + place, stored, mask=index < count)


@triton.jit
def _write(
    value, codes, scale, global_scale, row, start, end, columns, element: tl.constexpr, largest: tl.constexpr,
    kind: tl.constexpr, block: tl.constexpr, static: tl.constexpr, swizzled: tl.constexpr,
):  # fmt: skip
    """Scales and codes of `value`, `[threads, per]`."""
    threads: tl.constexpr = value.shape[0]
    per: tl.constexpr = value.shape[1]
    width: tl.constexpr = threads * per
    own: tl.constexpr = block if block > 0 and block < per else per
    parts: tl.constexpr = per // own
    blocks = value.reshape(threads, parts, own)
    amax = amax_of(blocks, 2)
    if static:
        step = tl.load(global_scale).to(tl.float32)
        within = tl.clamp(finite_or_nan(blocks), -512.0 * step, 512.0 * step, propagate_nan=tl.PropagateNan.ALL)
        steps = _steps_of_one(within, step)
    elif block == 0:
        stored, step = encode_scale(amax_of(amax_of(amax, 1), 0), 1.0, kind, largest)
        tl.store(scale + row, stored)
        steps = _steps_of_one(blocks, step)
    elif block <= per:
        second_level = tl.load(global_scale).to(tl.float32) if kind == "e4m3" else 1.0
        stored, step = encode_scale(amax, second_level, kind, largest)
        index = tl.arange(0, threads)[:, None] * parts + tl.arange(0, parts)[None, :]
        _store_scales(scale, stored, index, start // block, end // block, columns // block, swizzled)
        steps = _steps(blocks, step[:, :, None], kind)
    else:
        share: tl.constexpr = block // per
        stored, step = encode_scale(amax_of(amax.reshape(threads // share, share), 1), 1.0, kind, largest)
        index = tl.arange(0, threads // share)
        tl.store(scale + start // block + index, stored, mask=index < end // block)
        step = tl.broadcast_to(step[:, None], (threads // share, share)).reshape(threads, 1)
        steps = _steps(blocks, step[:, :, None], kind)

    if element == "e2m1":
        words = _words(steps.reshape(width // 8, 8), value.reshape(width // 8, 8)).reshape(threads, per // 8)
        _store((codes + start // 2).to(tl.pointer_type(tl.int32)), words, end // 8, 4 if per > 16 else 2)
    else:
        _store(codes + start, _encode_byte(steps, element).reshape(threads, per), end, 16)


@triton.jit
def quantize_rows_kernel(
    x, second, norm_weight, hidden, codes, scale, global_scale, x_stride, second_stride, K, eps,
    source: tl.constexpr, element: tl.constexpr, largest: tl.constexpr, kind: tl.constexpr, block: tl.constexpr,
    static: tl.constexpr, flat: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """A row of K a program, or `width` elements where `flat`. With `block` 0 the row has one scale."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, width)
    dtype: tl.constexpr = x.dtype.element_ty
    start = row * K
    inside = column < (width if flat else K)
    normed: tl.constexpr = source == "rms" or source == "add_rms"
    other = second + row * second_stride + column
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if source == "add_rms":
        value = _added(value, tl.load(other, mask=inside, other=0.0), dtype, False)
        tl.store(hidden + start + column, value.to(dtype), mask=inside)
    scaling = tl.rsqrt(tl.sum(value * value, axis=0) / K + eps) if normed else 1.0
    if normed:
        value = _finish(value, scaling, tl.load(norm_weight + column, mask=inside, other=0.0), dtype, source, False)
    if source == "swiglu":
        value = _finish(value, 1.0, tl.load(other, mask=inside, other=0.0), dtype, source, False)

    if static:
        steps = tl.div_rn(finite_or_nan(value), tl.load(global_scale).to(tl.float32))
    elif block == 0:
        # A row waits here for all its threads, in 16 bit: with fewer registers, an SM has more rows at a time.
        kept = value.to(dtype)
        bits = kept.to(tl.int16, bitcast=True) & 0x7FFF
        amax = tl.max(bits, axis=0).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        stored, step = encode_scale(amax, 1.0, kind, largest)
        tl.store(scale + row, stored)
        if (amax > 1e-20) & (amax < 1e30):
            steps = quotient_to_code(kept.to(tl.float32), step, reciprocal(step))
        else:
            steps = tl.div_rn(kept.to(tl.float32), step)
    else:
        blocks = value.reshape(width // block, block)
        second_level = tl.load(global_scale).to(tl.float32) if kind == "e4m3" else 1.0
        stored, step = encode_scale(amax_of(blocks, 1), second_level, kind, largest)
        index = tl.arange(0, width // block)
        tl.store(scale + start // block + index, stored, mask=index < (width if flat else K) // block)
        if kind == "wide":
            steps = tl.div_rn(blocks, tl.broadcast_to(step[:, None], (width // block, block))).reshape(width)
        elif kind == "e8m0":
            steps = (blocks * tl.div_rn(1.0, step)[:, None]).reshape(width)
        else:
            steps = quotient_to_code(blocks, step[:, None], reciprocal(step)[:, None]).reshape(width)

    if element == "e2m1":
        word = _words(steps.reshape(width // 8, 8), value.reshape(width // 8, 8))
        index = tl.arange(0, width // 8)
        words = (codes + start // 2).to(tl.pointer_type(tl.int32))
        tl.store(words + index, word, mask=index < (width if flat else K) // 8)
    else:
        tl.store(codes + start + column, _encode_byte(steps, element), mask=inside)


@triton.jit
def _encode_byte(steps, element: tl.constexpr):
    """INT8 or E4M3 of float32: to nearest even, saturating, as the cast to E4M3 does by itself."""
    if element == "int8":
        return tl.clamp((steps + 12582912.0) - 12582912.0, -127.0, 127.0).to(tl.int8)
    else:
        return steps.to(tl.float8e4nv)


@triton.jit
def _swizzled_place(index, across):
    """Where the tensor cores want the scale of a block: tiles of 128 rows by 4, one after another.

    In a tile, 16 bytes are four blocks of row r, then of rows r + 32, r + 64 and r + 96.
    """
    row, column = index // across, index % across
    tile = row // 128 * ((across + 3) // 4) + column // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4


@triton.jit
def _steps(x, step, kind: tl.constexpr):
    """x / step, as correctly rounded as a code can show."""
    if kind == "e8m0":
        return x * tl.div_rn(1.0, step)
    elif kind == "e4m3":
        return quotient_to_code(x, step, reciprocal(step))
    else:
        # By a power of two to where the reciprocal neither overflows nor loses its second part.
        shift = tl.where(step < 1e-36, 1.2676506002282294e30, tl.where(step > 1e29, 7.888609052210118e-31, 1.0))
        return quotient_to_code(x * shift, step * shift, reciprocal(step * shift))


@triton.jit
def _steps_of_one(x, step):
    """The same for one step, where a branch costs less than a product."""
    if (step > 1e-36) & (step < 1e29):
        steps = quotient_to_code(x, step, reciprocal(step))
    else:
        steps = _steps(x, step, "wide")
    return steps


@triton.jit
def _words(steps, signed):
    """Rows of eight codes of E2M1 as one int32 each, the first in the lowest bits, with the signs of `signed`."""
    s0, s1, s2, s3, s4, s5, s6, s7 = _columns(signed.to(tl.uint32, bitcast=True))
    signs = s7 >> 28
    signs = (signs << 4) | (s6 >> 28)
    signs = (signs << 4) | (s5 >> 28)
    signs = (signs << 4) | (s4 >> 28)
    signs = (signs << 4) | (s3 >> 28)
    signs = (signs << 4) | (s2 >> 28)
    signs = (signs << 4) | (s1 >> 28)
    signs = (signs << 4) | (s0 >> 28)
    # 0x4B400000 eight times, each four bits further left.
    words = tl.sum(code_bits(tl.abs(steps)) << (tl.arange(0, 8) * 4)[None, :], axis=1) - 0x3F400000
    return (words & 0x77777777) | (signs.to(tl.int32, bitcast=True) & -0x77777778)


def quantize(
    x: torch.Tensor,
    format: Format,
    *,
    scale: torch.Tensor | None = None,
    global_scale: torch.Tensor | None = None,
    hadamard: int = 0,
) -> BlockScaledTensor:
    """`x` in `format`, block scales by the `max` rule: the codes of the values of `fake_quantize`.

    Args:
        x: `[..., in]`, FP16 or BF16.
        format: one of `FORMATS_OUT`.
        scale: static scale of `fp8`, float32 scalar; measured where None.
        global_scale: static second-level scale of `nvfp4`, float32 scalar; measured where None.
        hadamard: block of a rotation to apply first, a power of two from 16 to 256; 0 for none.

    Returns:
        Codes and scales of `[tokens, in]`, leading axes flattened.

    Raises:
        ValueError: a format, dtype, width or rotation that the kernel does not take.
    """
    return quantize_rows(x, format, "plain", scale=scale, global_scale=global_scale, hadamard=hadamard)


def quantize_swizzled(
    x: torch.Tensor, format: Format, *, global_scale: torch.Tensor | None = None, hadamard: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """`quantize` with the block scales in the order of Blackwell's tensor cores, as `torch._scaled_mm` takes them.

    Args:
        x: `[..., in]`, FP16 or BF16.
        format: `nvfp4`, `mxfp4` or `mxfp8`.
        global_scale, hadamard: as `quantize` takes them.

    Returns:
        Codes, `[tokens, in]` of the format; its scales, flat, in tiles of 128 rows by 4 blocks, zeros where a tile
        reaches beyond; and the global scale, or None.

    Raises:
        ValueError: as `quantize`, and for a format without block scales of 8 bits.
    """
    if format.name not in ("nvfp4", "mxfp4", "mxfp8"):
        raise ValueError(f"{format} has no block scales that are swizzled; nvfp4, mxfp4 and mxfp8 have")
    made = quantize_rows(x, format, "plain", global_scale=global_scale, hadamard=hadamard, swizzled=True)
    return made.codes, made.scale, made.global_scale


def quantize_rows(
    x: torch.Tensor,
    format: Format,
    source: str,
    *,
    second: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    hidden: torch.Tensor | None = None,
    eps: float = 0.0,
    scale: torch.Tensor | None = None,
    global_scale: torch.Tensor | None = None,
    hadamard: int = 0,
    swizzled: bool = False,
) -> BlockScaledTensor:
    """One launch of the kernel for any `source`; `fused.py` and `quantize_swizzled` name its arguments."""
    _check(x, format, source, second, norm_weight, hadamard)
    check_scales(x, format, scale, global_scale)
    rows = _contiguous_rows(x)
    other = rows if second is None else _contiguous_rows(second)
    unmeasured = scale is None if format.per_tensor else format.global_scale and global_scale is None
    if unmeasured and (source != "plain" or hadamard):
        raise ValueError(f"{source} to {format}: needs a static scale, for the tensor's amax is not known in one pass")
    contiguous = rows.is_contiguous() and other.is_contiguous()
    cast = prepare(rows, format, source, contiguous=contiguous, hadamard=hadamard, swizzled=swizzled)
    norm = None if norm_weight is None else _contiguous_rows(norm_weight)
    return cast(rows, scale, global_scale, other, norm, hidden, eps)


Cast = Callable[..., BlockScaledTensor]
"""Of (rows `[tokens, in]`, scale, global scale, second input, weight of a norm, its sum, eps): the rows as codes."""


def prepare(
    rows: torch.Tensor,
    format: Format,
    source: str = "plain",
    *,
    contiguous: bool = True,
    hadamard: int = 0,
    swizzled: bool = False,
) -> Cast:
    """`quantize_rows` for rows like these, checked, with everything decided that does not depend on their values."""
    (tokens, columns), device = rows.shape, rows.device
    codes_shape, codes_dtype = format.codes_shape(rows.shape), format.element.torch_dtype or torch.uint8
    scale_shape = format.scale_shape(rows.shape)
    allocate: Callable[..., torch.Tensor] = torch.empty
    scale_dtype = torch.float32 if format.scale.is_wide else format.scale.torch_dtype
    if swizzled:
        down, across = scale_shape
        allocate = torch.zeros if down % 128 or across % 4 else torch.empty
        scale_shape = (-(-down // 128) * -(-across // 4) * 512,)
    per_tensor, has_global, largest = format.per_tensor, format.global_scale, format.element.max
    constants = {
        "element": format.element.name, "largest": largest,
        "kind": "wide" if format.scale.is_wide else format.scale.name, "block": format.block[1], "static": per_tensor,
    }  # fmt: skip
    kernel, width, by_threads = None, 0, False
    if tokens:
        launch = _launch(tokens, columns, format, source, hadamard, contiguous, swizzled)
        width, by_threads = launch.width if launch.flat else 0, launch.per > 0
        constants |= {
            "source": source, "flat": launch.flat or columns == launch.width, "width": launch.width,
            "num_warps": launch.warps,
        }  # fmt: skip
        if by_threads:
            constants |= {
                "hadamard": hadamard, "root": hadamard**-0.5 if hadamard else 1.0, "per": launch.per,
                "whole": columns % launch.per == 0, "pairs": rows.is_cuda, "swizzled": swizzled,
            }  # fmt: skip
        named = quantize_threads_kernel if by_threads else quantize_rows_kernel
        kernel = Repeated(named, (launch.programs,), constants)

    def run(
        rows: torch.Tensor,
        scale: torch.Tensor | None,
        global_scale: torch.Tensor | None = None,
        other: torch.Tensor | None = None,
        norm_weight: torch.Tensor | None = None,
        hidden: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> BlockScaledTensor:
        if per_tensor and scale is None:
            amax = rows.abs().amax().float() if tokens else rows.new_zeros((), dtype=torch.float32)
            scale = scale_of(amax, largest)
        if has_global and global_scale is None:
            global_scale = global_scale_of(rows.abs().amax() if tokens else rows.new_zeros(()), format)
        codes = torch.empty(codes_shape, dtype=codes_dtype, device=device)
        if per_tensor:
            assert scale is not None
            scales = scale.reshape(1, 1).float()
        else:
            scales = allocate(scale_shape, dtype=scale_dtype, device=device)
        if kernel is not None:
            other = rows if other is None else other
            tensors = (
                rows, other, rows if norm_weight is None else norm_weight, rows if hidden is None else hidden, codes,
                scales, scales if global_scale is None else global_scale, width or rows.stride(0),
                width or other.stride(0), width or columns,
            )  # fmt: skip
            if by_threads:
                kernel(*tensors, columns, eps)
            else:
                kernel(*tensors, eps)
        return BlockScaledTensor(codes, scales, format, (tokens, columns), global_scale)

    return run


@dataclass(frozen=True)
class _Launch:
    """How rows are given to programs.

    Attributes:
        programs: how many.
        width: elements of one, a power of two.
        flat: whether pieces are cut from all elements as they lie in memory, and not one from each row.
        warps: of a program.
        per: neighbours that a thread has; 0 leaves it to the compiler.
    """

    programs: int
    width: int
    flat: bool
    warps: int
    per: int


def _launch(
    tokens: int, columns: int, format: Format, source: str, hadamard: int, contiguous: bool, swizzled: bool
) -> _Launch:
    """Without a norm, blocks are cut from all elements in memory, so that short rows leave no lane idle."""
    by_threads = hadamard or swizzled or format.name == "nvfp4"
    per = 0 if not by_threads else 32 if hadamard or format.block[1] == 32 else 16
    width = min(tokens * columns & -(tokens * columns), 4096)
    scales_by_block = format.block[1] > 0 or (hadamard > 0 and format.per_tensor)
    flat = contiguous and scales_by_block and source in ("plain", "swiglu") and width >= 1024
    if flat:
        programs = tokens * columns // width
    else:
        width, programs = max(triton.next_power_of_2(columns), 32 * per, 64), tokens
    if hadamard:
        warps = max(min(width // per // 32, 16), 1)
    else:
        warps = 4 if width <= 8192 and (flat or width <= 4096) else 8 if width <= 16384 else 16
    return _Launch(programs, width, flat, warps, per)


def _check(
    x: torch.Tensor,
    format: Format,
    source: str,
    second: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    hadamard: int,
) -> None:
    what = f"{source} of x {list(x.shape)} to {format}"
    if format.name not in FORMATS_OUT or format is not FORMATS.get(format.name):
        raise ValueError(f"{what}: no such kernel; activation formats: {', '.join(FORMATS_OUT)}")
    if x.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"{what}: x is {x.dtype}, expected float16 or bfloat16")
    columns = x.shape[-1]
    multiple = max(format.block[1], 2 if format.element.bits == 4 else 1, hadamard, 1)
    if columns % multiple or not 0 < columns <= MAX_COLUMNS:
        raise ValueError(f"{what}: the last axis must be a multiple of {multiple}, at most {MAX_COLUMNS}")
    if hadamard and (hadamard & (hadamard - 1) or not 16 <= hadamard <= 256):
        raise ValueError(f"{what}: hadamard is {hadamard}, expected a power of two from 16 to 256, or 0")
    if second is not None and (second.shape != x.shape or second.dtype != x.dtype or second.device != x.device):
        raise ValueError(
            f"{what}: the second input is {list(second.shape)} {second.dtype} on {second.device}, expected "
            f"{list(x.shape)} {x.dtype} on {x.device}"
        )
    if norm_weight is not None and (norm_weight.shape != (columns,) or norm_weight.device != x.device):
        raise ValueError(f"{what}: weight is {list(norm_weight.shape)} on {norm_weight.device}, expected [{columns}]")
    if norm_weight is not None and not norm_weight.is_contiguous():
        raise ValueError(f"{what}: weight is not contiguous")


def check_scales(
    x: torch.Tensor, format: Format, scale: torch.Tensor | None, global_scale: torch.Tensor | None
) -> None:
    """The static scales, and whether the GPU can convert to E4M3."""
    what = f"x {list(x.shape)} to {format}"
    for name, tensor in (("scale", scale), ("global_scale", global_scale)):
        if tensor is None:
            continue
        if tensor.numel() != 1 or not tensor.dtype.is_floating_point:
            raise ValueError(
                f"{what}: {name} is {list(tensor.shape)} {tensor.dtype}, expected one floating-point number"
            )
        if tensor.device != x.device:
            raise ValueError(f"{what}: {name} is on {tensor.device}, x on {x.device}")
    if scale is not None and not format.per_tensor:
        raise ValueError(f"{what}: a static scale is for formats of one scale a tensor; {format} measures its own")
    if global_scale is not None and not format.global_scale:
        raise ValueError(f"{what}: {format} has no global scale")
    needs_fp8 = torch.float8_e4m3fn in (format.element.torch_dtype, format.scale.torch_dtype)
    if x.is_cuda and needs_fp8 and not current(x.device.index or 0).has_fp8:
        raise ValueError(f"{what}: {torch.cuda.get_device_name(x.device)} has no FP8, which starts with capability 8.9")


def _contiguous_rows(x: torch.Tensor) -> torch.Tensor:
    """`[tokens, in]`, elements of a row side by side, and rows at multiples of four bytes; a copy only where needed."""
    rows = x.reshape(-1, x.shape[-1])
    aligned = rows.data_ptr() % 4 == 0 and (rows.stride(0) % 2 == 0 or rows.shape[0] == 1)
    return rows if rows.stride(1) == 1 and aligned else rows.clone(memory_format=torch.contiguous_format)
