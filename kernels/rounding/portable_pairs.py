"""`split_pairs` writes float32 values as pairs of BF16, h + l, in one pass over memory, where PyTorch takes three.

Products of matrices in pairs are sums of products of BF16 matrices (`quant.calibration.fast_matmul`). Where the parts
lie one below the other, one product with three times the inner dimension gives that sum; h is then written twice.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quant.kernels.base.launch import cached_launch

_ROWS, _COLUMNS = 2, 1024


@triton.jit
def split_pairs_kernel(
    x, minus, high, low, again, rows, columns, x_row, minus_row, out_row, x_matrix, minus_matrix, out_matrix,
    low_factor: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Splits a tile of `x`, or of `x - minus`; grid: (column tiles, row tiles, matrices)."""
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    matrix = tl.program_id(2).to(tl.int64)
    valid = (row < rows) & (column < columns)
    value = tl.load(x + matrix * x_matrix + row * x_row + column, valid, 0.0)
    if minus is not None:
        value -= tl.load(minus + matrix * minus_matrix + row * minus_row + column, valid, 0.0)
    first = value.to(tl.bfloat16)
    second = (value - first.to(tl.float32)) * low_factor
    place = matrix * out_matrix + row * out_row + column
    tl.store(high + place, first, valid)
    tl.store(low + place, second.to(tl.bfloat16), valid)
    if again is not None:
        tl.store(again + place, first, valid)


def split_pairs(
    x: Tensor, high: Tensor, low: Tensor, again: Tensor | None = None, minus: Tensor | None = None, low_factor: int = 1
) -> None:
    """Writes `x`, or `x - minus`, as BF16 values `high` and what is left of it, times a power of two, as `low`.

    All are `[..., rows, columns]` with neighbouring columns, `x` and `minus` float32, and have at most one dimension in
    front; the BF16 outputs are alike in their strides. `again` is a second place for `high`.
    """
    rows, columns = x.shape[-2:]
    several = x.dim() > 2
    grid = (triton.cdiv(columns, _COLUMNS), triton.cdiv(rows, _ROWS), len(x) if several else 1)
    launch = cached_launch(split_pairs_kernel, grid, low_factor=low_factor, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=4)
    matrices = [tensor.stride(0) if several and tensor is not None else 0 for tensor in (x, minus, high)]
    minus_row = 0 if minus is None else minus.stride(-2)
    launch(x, minus, high, low, again, rows, columns, x.stride(-2), minus_row, high.stride(-2), *matrices)
