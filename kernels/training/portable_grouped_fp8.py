"""These kernels round the rows, or the columns, of a matrix to E4M3, each under one power of two.

    x [R, C] ─▶ a program for each row                       ─▶ codes   [R, C], scale   [R]
    x [R, C] ─▶ a program for 64 columns of each expert's rows ─▶ codes_t [C, R], scale_t [experts, C]

FP8 tensor cores read both operands along the axis of the sum, so the second kernel transposes. A vector's largest
magnitude is known only at its end: each is read twice, a row the second time from the cache.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from quant.kernels.base.launch_cache import CachedLaunch

TILES = (512, 32, 8), (256, 32, 4)
"""Rows and columns that a program of the second kernel reads at once, and its warps: of a matrix, and of a wide one."""
_WIDE = 8192  # columns of one matrix, whose programs fill a GPU twice
_MOST_COLUMNS = 4096


@triton.jit
def _scale_and_factor(bits):
    """Returns the scale of vectors whose largest magnitude has these bits, and the factor from values to codes.

    The power of two at or above amax / 448: with amax = m · 2^e it is 2^(e - 8) where m <= 1.75, else 2^(e - 7). A
    mantissa above 1.75 carries into the exponent. At least 2^-126, whose reciprocal is finite.
    """
    exponent = tl.maximum(((bits + 0x1FFFFF) >> 23) - 8, 1)
    exponent = tl.where(bits == 0, 127, exponent)
    # NaN and infinity become NaN, in the whole vector.
    finite = bits < 0x7F800000
    scale = tl.where(finite, exponent << 23, 0x7FC00000).to(tl.float32, bitcast=True)
    factor = tl.where(finite, (254 - exponent) << 23, 0x7FC00000).to(tl.float32, bitcast=True)
    return scale, factor


@triton.jit
def e4m3_rows_kernel(x, codes, scale, C, row_stride, columns: tl.constexpr):
    """One row of `codes`, contiguous `[R, C]`, and its scale."""
    row = tl.program_id(0)
    source, target = x + row.to(tl.int64) * row_stride, codes + row.to(tl.int64) * C
    c = tl.arange(0, columns)
    largest = tl.zeros((columns,), tl.int32)
    for start in range(0, C, columns):
        values = tl.load(source + start + c, mask=start + c < C, other=0.0).to(tl.float32)
        # Magnitudes have the order of their bits, NaN at the top.
        largest = tl.maximum(largest, values.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    step, factor = _scale_and_factor(tl.max(largest, 0))
    tl.store(scale + row, step)
    for start in range(0, C, columns):
        values = tl.load(source + start + c, mask=start + c < C, other=0.0).to(tl.float32)
        tl.store(target + start + c, (values * factor).to(codes.dtype.element_ty), mask=start + c < C)


@triton.jit
def e4m3_columns_kernel(
    x, offsets, codes, scale, C, row_stride, expert_stride, column_stride, measured: tl.constexpr, rows: tl.constexpr,
    columns: tl.constexpr,
):  # fmt: skip
    """`columns` columns of one expert's rows: codes at `expert_stride` · expert + `column_stride` · column + row.

    Without `measured`, `scale` holds powers of two that are to be used.
    """
    across = tl.cdiv(C, columns)
    expert = tl.program_id(0) // across
    begin = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets + expert)
    # Experts begin at multiples of 16 rows, so that transposed codes are written 16 at once.
    begin, end = tl.multiple_of(begin, 16), tl.multiple_of(end, 16)
    c = tl.program_id(0) % across * columns + tl.arange(0, columns)
    in_matrix = c < C
    if measured:
        largest = tl.zeros((columns,), tl.int32)
        for start in range(begin, end, rows):
            r = start + tl.arange(0, rows)
            inside = (r[:, None] < end) & in_matrix[None, :]
            values = tl.load(x + r.to(tl.int64)[:, None] * row_stride + c[None, :], mask=inside, other=0.0)
            bits = values.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
            largest = tl.maximum(largest, tl.max(bits, 0))
        step, factor = _scale_and_factor(largest)
        tl.store(scale + expert * C + c, step, mask=in_matrix)
    else:
        factor = tl.div_rn(1.0, tl.load(scale + expert * C + c, mask=in_matrix, other=1.0))
    target = codes + expert.to(tl.int64) * expert_stride + c.to(tl.int64) * column_stride
    for start in range(begin, end, rows):
        r = start + tl.arange(0, rows)
        inside = (r[:, None] < end) & in_matrix[None, :]
        values = tl.load(x + r.to(tl.int64)[:, None] * row_stride + c[None, :], mask=inside, other=0.0).to(tl.float32)
        tile = (values * factor[None, :]).to(codes.dtype.element_ty)
        tl.store(target[None, :] + r[:, None], tile, mask=inside)


def e4m3_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns codes `[R, C]` and scales `[R]` of `x` `[R, C]`."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    (R, C), device = x.shape, x.device
    codes = torch.empty(R, C, dtype=torch.float8_e4m3fn, device=device)
    scale = torch.empty(R, dtype=torch.float32, device=device)
    if codes.numel():
        _launch_rows(R, C)(x, codes, scale, C, x.stride(0))
    return codes, scale


def e4m3_columns(
    x: torch.Tensor, offsets: torch.Tensor, is_stack: bool, scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns codes of the columns of `x` `[R, C]`, transposed, and scales `[experts, C]`.

    Args:
        x: the rows of one expert after another.
        offsets: the row after the last of each expert, int32 `[experts]`, multiples of 16.
        is_stack: whether each expert has R / experts rows, and codes are `[experts, C, R / experts]`; otherwise they
            are `[C, R]`, and codes beyond the last offset are not written.
        scale: powers of two `[experts, C]`; None measures each column.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    (R, C), experts = x.shape, len(offsets)
    shape = (experts, C, R // experts) if is_stack else (C, R)
    codes = torch.empty(shape, dtype=torch.float8_e4m3fn, device=x.device)
    measured = scale is None
    scale = torch.empty(experts, C, dtype=torch.float32, device=x.device) if scale is None else scale.clone()
    # The kernel counts rows from the first of all experts.
    strides = (codes.stride(0) - R // experts, codes.stride(1)) if is_stack else (0, R)
    if codes.numel():
        _launch_columns(experts, C, measured)(x, offsets, codes, scale, C, x.stride(0), *strides)
    return codes, scale


@lru_cache(maxsize=1024)
def _launch_rows(R: int, C: int) -> CachedLaunch:
    columns = min(triton.next_power_of_2(C), _MOST_COLUMNS)
    return CachedLaunch(e4m3_rows_kernel, (R,), {"columns": columns, "num_warps": max(columns // 1024, 1)})


@lru_cache(maxsize=1024)
def _launch_columns(experts: int, C: int, measured: bool) -> CachedLaunch:
    # Programs of few columns are many, and read many rows at once: it is memory's latency that they wait for. These
    # tiles are within 10 % of the fastest of 27 on an H100, and leave all values in registers.
    rows, columns, warps = TILES[experts == 1 and C >= _WIDE]
    constants = {"measured": measured, "rows": rows, "columns": columns, "num_warps": warps}
    return CachedLaunch(e4m3_columns_kernel, (experts * triton.cdiv(C, columns),), constants)
