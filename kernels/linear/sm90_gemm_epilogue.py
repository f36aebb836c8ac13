"""The two Hopper matmuls turn their sums, yᵀ in registers, into rows of y in BF16 with these functions.

    acc [rows of W, tokens] ──▶ · scale, + bias ──▶ BF16 ──▶ y[tokens, rows of W]

A product leaves thread (warp, g, q) rows 16·warp + 8·b + g of the sum, b = 0, 1, at two neighbouring tokens of every 8.
The weight was decoded so that these are rows 16·warp + 2·g + b of W: a thread holds two neighbours of a row of y, and
writes them as one word.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quant.kernels.base.sm90_gluon import barrier
from quant.kernels.linear.sm90_decode_codes import scales_by_row


class Output(NamedTuple):
    """Where sums go: y `[M, N]` and bias `[N]`, pointers to BF16; without a bias, any pointer."""

    bias: gl.tensor
    y: gl.tensor
    M: gl.tensor
    N: gl.tensor


@gluon.jit
def halve(tile):
    """Splits [rows, 2 m] into its left and its right [rows, m]: other registers of the same threads."""
    rows: gl.constexpr = tile.shape[0]
    half: gl.constexpr = tile.shape[1] // 2
    return tile.reshape([rows, 2, half]).permute([0, 2, 1]).split()


@gluon.jit
def rows_of_weight(acc):
    """Returns a sum with its rows in the order of W, and not in the product's order (warp, b, g). No register moves."""
    rows: gl.constexpr = acc.shape[0]
    width: gl.constexpr = acc.shape[1]
    return acc.reshape([rows // 16, 2, 8, width]).permute([0, 2, 1, 3]).reshape([rows, width])


@gluon.jit
def times_row_scales(acc, row_scale, n, N, in_order: gl.constexpr, form: gl.constexpr):
    """Returns the channels' scales; `in_order` says that rows of the sum are in the order of W, not in (warp, b, g)."""
    if scales_by_row(form):
        i = gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
        n = n + (i if in_order else i // 16 * 16 + i % 8 * 2 + i // 8 % 2)
        acc *= gl.load(row_scale + n, mask=n < N, other=0.0)[:, None]
    return acc


@gluon.jit
def store_sum(acc, scale, out, n, m, has_bias: gl.constexpr):
    """y[m:, n:] = accᵀ · scale + bias; 64 tokens at a time, for lack of registers for more addresses."""
    rows: gl.constexpr = acc.shape[0]
    width: gl.constexpr = acc.shape[1]
    if width > 64:
        low, high = halve(acc)
        store_sum(low, scale, out, n, m, has_bias)
        barrier()
        store_sum(high, scale, out, n, m + width // 2, has_bias)
    else:
        acc = rows_of_weight(acc * scale)
        # Rows of W beyond the end were multiplied as zeros, and tokens beyond the end too: neither is stored.
        row = n + gl.arange(0, rows, gl.SliceLayout(1, acc.type.layout))
        if has_bias:
            acc += gl.load(out.bias + row, mask=row < out.N, other=0.0).to(gl.float32)[:, None]
        # The offset of a row of y may exceed 2^31.
        token = m + gl.arange(0, width, gl.SliceLayout(0, acc.type.layout))
        mask = (token < out.M)[None, :] & (row < out.N)[:, None]
        gl.store(out.y + (token.to(gl.int64)[None, :] * out.N + row[:, None]), acc.to(gl.bfloat16), mask=mask)
