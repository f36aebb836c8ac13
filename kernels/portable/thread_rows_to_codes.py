"""This kernel turns 16-bit rows into codes and scales where a thread owns whole blocks: NVFP4, and any rotation first.

A program owns a row, or `width` elements where `flat`, and reads it as `[threads, per]`, 16 or 32 neighbours a thread:

    thread 0    x[0 … per)          blocks of NVFP4, or a part of a longer block      amax in the thread's registers
    thread 1    x[per … 2 per)                                                        then, for longer blocks, across
    …

With one row as one vector, a block would be shared by threads, and each of them would compute its scale. Here reshapes
split and join registers of one thread, and no element moves to another (only a rotation over more than `per` columns
shuffles). A thread reads and writes 16 bytes at a time.

A Hadamard rotation consists of butterflies in these registers (`kernels/portable/hadamard.py`) and equals
`kernels/hadamard.py` bit for bit; the step after it, from BF16 to four bits, is in `kernels/portable/e2m1.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quant.kernels.portable.block_scales import (
    amax_of,
    encode_scale,
    finite_or_nan,
    quotient_to_code,
    reciprocal,
)
from quant.kernels.portable.e2m1 import encode, encode_exact, in_two_parts, nearly, pack
from quant.kernels.portable.hadamard import hadamard_of_threads
from quant.kernels.portable.rows_to_codes import byte_code, e2m1_words


@triton.jit
def thread_rows_to_codes_kernel(
    x, codes, scale, global_scale, x_stride, K,
    element: tl.constexpr, largest: tl.constexpr, kind: tl.constexpr, block: tl.constexpr,
    static: tl.constexpr, hadamard: tl.constexpr, root: tl.constexpr, flat: tl.constexpr, width: tl.constexpr,
    per: tl.constexpr, whole: tl.constexpr, pairs: tl.constexpr,
):  # fmt: skip
    """See the module docstring; `whole` says that rows of K are whole numbers of threads.

    `hadamard` is the block of the rotation, 0 for none, and `root` its normalization. `pairs` rounds two BF16 at once,
    in PTX, which the interpreter does not know.
    """
    row = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = x.dtype.element_ty
    threads: tl.constexpr = width // per
    start, end = row * K, K
    if flat:
        start, end = row * width, width
    elif whole:
        # The same numbers, so written that the compiler sees that they are multiples of `per`.
        start, end = row * (K // per) * per, K // per * per
    value = _floats(_load_row(x + row * x_stride, end, threads, per))
    if hadamard > 0:
        value = hadamard_of_threads(value, hadamard)
    if hadamard > 0 and element == "e2m1" and pairs and dtype == tl.bfloat16:
        _write_pairs(value, codes, scale, global_scale, start, end, largest, kind, block, hadamard, root)
    else:
        if hadamard > 0:
            value = _rounded(value * root, dtype, pairs)
        _write(value, codes, scale, global_scale, row, start, end, element, largest, kind, block, static)


@triton.jit
def _write_pairs(
    value, codes, scale, global_scale, start, end, largest: tl.constexpr, kind: tl.constexpr,
    block: tl.constexpr, hadamard: tl.constexpr, root: tl.constexpr,
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
    index = tl.arange(0, blocks)
    tl.store(scale + start // block + index, stored, mask=index < end // block)
    if kind == "e4m3":
        inverse, remainder = in_two_parts(step, nearly(step))
        words = encode(w0, w1, w2, w3, w4, w5, w6, w7, inverse * after, remainder * after)
    else:
        inverse = tl.broadcast_to(tl.div_rn(1.0, step)[:, None], (blocks, share)).reshape(blocks * share)
        words = encode_exact(w0, w1, w2, w3, w4, w5, w6, w7, inverse)
    pointer = (codes + start // 2).to(tl.pointer_type(tl.int32))
    _store_row(pointer, words.reshape(threads, per // 8), end // 8, 4 if per > 16 else 2)


@triton.jit
def _write(
    value, codes, scale, global_scale, row, start, end, element: tl.constexpr, largest: tl.constexpr,
    kind: tl.constexpr, block: tl.constexpr, static: tl.constexpr,
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
        # E4M3 ends at 448; clamping at 512 steps keeps quotients finite and changes no code.
        within = tl.clamp(finite_or_nan(blocks), -512.0 * step, 512.0 * step, propagate_nan=tl.PropagateNan.ALL)
        steps = _steps_of_one(within, step)
    elif block == 0:
        stored, step = encode_scale(amax_of(amax_of(amax, 1), 0), 1.0, kind, largest)
        tl.store(scale + row, stored)
        steps = _steps_of_one(blocks, step)
    elif block <= per:
        # A thread has one block or several.
        second_level = tl.load(global_scale).to(tl.float32) if kind == "e4m3" else 1.0
        stored, step = encode_scale(amax, second_level, kind, largest)
        index = tl.arange(0, threads)[:, None] * parts + tl.arange(0, parts)[None, :]
        tl.store(scale + start // block + index, stored, mask=index < end // block)
        steps = _steps(blocks, step[:, :, None], kind)
    else:
        # `share` threads have one block.
        share: tl.constexpr = block // per
        stored, step = encode_scale(amax_of(amax.reshape(threads // share, share), 1), 1.0, kind, largest)
        index = tl.arange(0, threads // share)
        tl.store(scale + start // block + index, stored, mask=index < end // block)
        step = tl.broadcast_to(step[:, None], (threads // share, share)).reshape(threads, 1)
        steps = _steps(blocks, step[:, :, None], kind)

    if element == "e2m1":
        words = e2m1_words(steps.reshape(width // 8, 8), value.reshape(width // 8, 8)).reshape(threads, per // 8)
        _store_row((codes + start // 2).to(tl.pointer_type(tl.int32)), words, end // 8, 4 if per > 16 else 2)
    else:
        _store_row(codes + start, byte_code(steps, element).reshape(threads, per), end, 16)


@triton.jit
def _steps(x, step, kind: tl.constexpr):
    """x / step, as correctly rounded as a code can show."""
    if kind == "e8m0":
        return x * tl.div_rn(1.0, step)
    elif kind == "e4m3":
        return quotient_to_code(x, step, reciprocal(step))
    else:
        # By 2^±100 to where the reciprocal neither overflows nor loses its second part.
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
def _load_row(pointer, end, threads: tl.constexpr, per: tl.constexpr):
    """A row as `[threads, per]`, zeros beyond `end`; BF16 as words of two, `[threads, per / 2]`.

    A word is taken apart by a shift and an AND; where the compiler takes two BF16 apart, it needs three instructions.
    The row begins at a multiple of four bytes.
    """
    if pointer.dtype.element_ty == tl.bfloat16:
        return _load_columns(pointer.to(tl.pointer_type(tl.int32)), end // 2, threads, per // 2, 4)
    else:
        return _load_columns(pointer, end, threads, per, 8)


@triton.jit
def _load_columns(pointer, end, threads: tl.constexpr, columns: tl.constexpr, at_once: tl.constexpr):
    """`[threads, columns]`, two or four loads of `at_once` elements, 16 bytes each, joined in registers."""
    offset = tl.arange(0, threads)[:, None] * columns + tl.arange(0, at_once)[None, :]
    value = _load_two(pointer, offset, end, at_once)
    if columns > 2 * at_once:
        value = _after(value, _load_two(pointer, offset + 2 * at_once, end, at_once))
    return value


@triton.jit
def _load_two(pointer, offset, end, at_once: tl.constexpr):
    """The elements at `offset`, and the `at_once` elements after each of them."""
    first = tl.load(pointer + offset, mask=offset < end, other=0)
    return _after(first, tl.load(pointer + offset + at_once, mask=offset + at_once < end, other=0))


@triton.jit
def _floats(x):
    """float32 of `x`: int32 is unpacked as two BF16 values (`_load_row` returns such words), FP16 is converted."""
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
def _store_row(pointer, value, end, at_once: tl.constexpr):
    """`[threads, columns]` as a row, `at_once` elements of a thread at a time, all or half of them."""
    threads: tl.constexpr = value.shape[0]
    columns: tl.constexpr = value.shape[1]
    offset = tl.arange(0, threads)[:, None] * columns + tl.arange(0, at_once)[None, :]
    if columns == at_once:
        tl.store(pointer + offset, value, mask=offset < end)
    else:
        low, high = _halves(value)
        tl.store(pointer + offset, low, mask=offset < end)
        tl.store(pointer + offset + at_once, high, mask=offset + at_once < end)
