"""Butterflies in a Triton kernel's registers compute the fast Hadamard transform in the order of the oracle.

A thread holds 32 neighbours of a row, `[threads, columns]`:

    distance    1, 2, 4, 8, 16     within a thread           32, 64, 128   between threads

Distances grow as in `kernels/hadamard.py` and each sum is one addition in float32, so the result equals the oracle's
bit for bit; tensor cores sum in another order and would not. A sum between threads takes a shuffle: reducing a pair by
XOR gives each of the two (a ^ b) ^ a, the other's value, and the compiler keeps only the shuffle.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def hadamard_of_threads(x, block: tl.constexpr):
    """Each `block` neighbours of x times Hn, not yet divided by the root of n.

    Args:
        x: float32 `[threads, columns]`: a thread's columns, each row continuing the previous one.
        block: n, a power of two up to 256.
    """
    columns: tl.constexpr = x.shape[1]
    for bit in tl.static_range(8):
        if block > 1 << bit:
            x = _within(x, 1 << bit) if columns > 1 << bit else _across(x, (1 << bit) // columns)
    return x


@triton.jit
def _within(x, distance: tl.constexpr):
    """Sums and differences of columns at `distance`."""
    threads: tl.constexpr = x.shape[0]
    columns: tl.constexpr = x.shape[1]
    # The pair as the last axis: a split of registers.
    pairs = x.reshape(threads, columns // (2 * distance), 2, distance).permute(0, 1, 3, 2)
    low, high = tl.split(pairs)
    return tl.join(low + high, low - high).permute(0, 1, 3, 2).reshape(threads, columns)


@triton.jit
def _across(x, distance: tl.constexpr):
    """Sums and differences of rows at `distance`."""
    threads: tl.constexpr = x.shape[0]
    columns: tl.constexpr = x.shape[1]
    own = x.reshape(threads // (2 * distance), 2, distance * columns)
    bits = own.to(tl.int32, bitcast=True)
    other = (tl.reduce(bits, 1, _xor, keep_dims=True) ^ bits).to(tl.float32, bitcast=True)
    # own + other in the first row of a pair, other − own in the second: one FMA each, exact.
    sign = (1.0 - 2.0 * tl.arange(0, 2).to(tl.float32))[None, :, None]
    return tl.fma(own, tl.broadcast_to(sign, own.shape), other).reshape(threads, columns)


@triton.jit
def _xor(a, b):
    return a ^ b
