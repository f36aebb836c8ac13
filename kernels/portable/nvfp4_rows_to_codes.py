"""This kernel turns 16-bit rows into NVFP4, whose blocks are so short that a thread owns whole ones.

A program owns a row, or `width` elements where `flat`, and reads it as `[threads, 16]`:

    thread 0    x[0 … 16)     a block: amax ─▶ scale ─▶ x / scale ─▶ two words of eight codes
    thread 1    x[16 … 32)
    …

With one row as one vector, a block would be shared by threads, and each of them would compute its scale. Here reshapes
split and join registers of one thread, and no element moves to another. A thread reads 16 bytes at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quant.kernels.rounding.portable_block_scales import (
    amax_of,
    encode_scale,
    encode_scale_for_four_or_six,
    quotient_to_code,
    reciprocal,
)
from quant.kernels.portable.rows_to_codes import e2m1_words

BLOCK = 16
_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def nvfp4_rows_to_codes_kernel(
    x, codes, scale, global_scale, x_stride, K,
    largest: tl.constexpr, flat: tl.constexpr, width: tl.constexpr, whole: tl.constexpr, four_or_six: tl.constexpr,
):  # fmt: skip
    """See the module docstring; `whole` says that rows of K are whole numbers of blocks.

    With `four_or_six`, the largest value of a block becomes 4 or 6, whichever has the smaller error.
    """
    row = tl.program_id(0).to(tl.int64)
    threads: tl.constexpr = width // _BLOCK
    start, end = row * K, K
    if flat:
        start, end = row * width, width
    elif whole:
        # The same numbers, so written that the compiler sees that they are multiples of a block.
        start, end = row * (K // _BLOCK) * _BLOCK, K // _BLOCK * _BLOCK
    value = _floats(_load_row(x + row * x_stride, end, threads))
    blocks = value.reshape(threads, 1, _BLOCK)
    second_level = tl.load(global_scale).to(tl.float32)
    dtype: tl.constexpr = scale.dtype.element_ty
    if four_or_six:
        stored, step = encode_scale_for_four_or_six(blocks, amax_of(blocks, 2), second_level, dtype)
    else:
        stored, step = encode_scale(amax_of(blocks, 2), second_level, "e4m3", largest, dtype)
    index = tl.arange(0, threads)[:, None]
    tl.store(scale + start // _BLOCK + index, stored, mask=index < end // _BLOCK)
    step = step[:, :, None]
    steps = quotient_to_code(blocks, step, reciprocal(step))
    words = e2m1_words(steps.reshape(width // 8, 8), value.reshape(width // 8, 8)).reshape(threads, 2)
    word = tl.arange(0, threads)[:, None] * 2 + tl.arange(0, 2)[None, :]
    tl.store((codes + start // 2).to(tl.pointer_type(tl.int32)) + word, words, mask=word < end // 8)


@triton.jit
def _load_row(pointer, end, threads: tl.constexpr):
    """Returns a row as `[threads, 16]`, zeros beyond `end`; BF16 as words of two, `[threads, 8]`.

    A word is taken apart by a shift and an AND; where the compiler takes two BF16 apart, it needs three instructions.
    The row begins at a multiple of four bytes.
    """
    if pointer.dtype.element_ty == tl.bfloat16:
        return _load_halves(pointer.to(tl.pointer_type(tl.int32)), end // 2, threads, 4)
    else:
        return _load_halves(pointer, end, threads, 8)


@triton.jit
def _load_halves(pointer, end, threads: tl.constexpr, at_once: tl.constexpr):
    """Returns `[threads, 2 at_once]` by two loads of `at_once` elements, 16 bytes each, joined in registers."""
    offset = tl.arange(0, threads)[:, None] * (2 * at_once) + tl.arange(0, at_once)[None, :]
    first = tl.load(pointer + offset, mask=offset < end, other=0)
    second = tl.load(pointer + offset + at_once, mask=offset + at_once < end, other=0)
    return tl.join(first, second).permute(0, 2, 1).reshape(threads, 2 * at_once)


@triton.jit
def _floats(x):
    """Converts `x` to float32: int32 holds two BF16 values (`_load_row` returns such words), FP16 is cast."""
    if x.dtype == tl.int32:
        low, high = (x << 16).to(tl.float32, bitcast=True), (x & -65536).to(tl.float32, bitcast=True)
        return tl.join(low, high).reshape(x.shape[0], 2 * x.shape[1])
    else:
        return x.to(tl.float32)
