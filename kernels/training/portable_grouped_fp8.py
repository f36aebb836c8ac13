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

from quant.kernels.attention.portable_decoder_step import swiglu_kernel
from quant.kernels.base.launch import CachedLaunch
from quant.kernels.linear.portable_grouped_gemm import weigh_kernel
from quant.kernels.training.portable_fake_rounding import block_scale, on_grid

# This kernel rounds blocks of a matrix to E4M3 under power-of-two scales on a GPU, and keeps them as floats.
#
#     x [R, C] ─▶ tile of whole blocks ─▶ scale of a block: amax / 448, up to a power of two ─▶ element · scale, scale
#
# A block may be a run of a row (1×128), of a column (128×1) or a square. The values lie as x does in all cases: a
# product that sums over the rows reads them transposed, which BF16 tensor cores do at no cost.


@triton.jit
def e4m3_blocks_kernel(
    x, out, scales, R, C, row_stride, column_stride,
    height: tl.constexpr, width: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, casts: tl.constexpr,
):  # fmt: skip
    """A tile `[rows, columns]` of `out`, contiguous `[R, C]`, and its scales; blocks are `[height, width]`.

    `casts`: the GPU has a cast to E4M3; elsewhere arithmetic rounds, in twice the time.
    """
    across = tl.cdiv(C, columns)
    r = tl.program_id(0) // across * rows + tl.arange(0, rows)
    c = tl.program_id(0) % across * columns + tl.arange(0, columns)
    inside = (r[:, None] < R) & (c[None, :] < C)
    row = r.to(tl.int64)[:, None]
    # Zeros fill short last blocks, and change no largest magnitude.
    values = tl.load(x + row * row_stride + c.to(tl.int64)[None, :] * column_stride, mask=inside, other=0.0)
    blocks = values.to(tl.float32).reshape(rows // height, height, columns // width, width)
    bits = blocks.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    # Magnitudes have the order of their bits, NaN at the top.
    amax = tl.max(tl.max(bits, 3, keep_dims=True), 1, keep_dims=True).to(tl.float32, bitcast=True)
    scale = block_scale(amax, 1.0, 448.0, "e8m0")
    steps = blocks * tl.div_rn(1.0, scale)
    if casts:
        elements = steps.to(tl.float8e4nv).to(tl.float32)
    else:
        elements = on_grid(steps, 448.0, -448.0, 3, 0.015625, 256.0, False)
    rounded = (elements * scale).reshape(rows, columns)
    tl.store(out + row * C + c[None, :], rounded.to(out.dtype.element_ty), mask=inside)
    down, wide = tl.cdiv(R, height), tl.cdiv(C, width)
    r = tl.program_id(0) // across * (rows // height) + tl.arange(0, rows // height)
    c = tl.program_id(0) % across * (columns // width) + tl.arange(0, columns // width)
    pointer = scales + r.to(tl.int64)[:, None] * wide + c[None, :]
    tl.store(pointer, scale.reshape(rows // height, columns // width), mask=(r[:, None] < down) & (c[None, :] < wide))


def round_e4m3_blocks(
    x: torch.Tensor, height: int, width: int, dtype: torch.dtype, casts: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns element · scale of `x` `[R, C]`, of any strides, in blocks of these powers of two; and the scales.

    Without `casts`, nothing needs a GPU that has E4M3.
    """
    R, C = x.shape
    out = torch.empty(R, C, dtype=dtype, device=x.device)
    scales = torch.empty(triton.cdiv(R, height), triton.cdiv(C, width), dtype=torch.float32, device=x.device)
    if out.numel():
        _launch(R, C, height, width, casts)(x, out, scales, R, C, *x.stride())
    return out, scales


def tile_of(height: int, width: int) -> dict[str, int]:
    """Returns the rows and columns of a program's tile, for blocks of a size, and its warps."""
    rows, columns = max(height, 32), max(width, 64 if height > 1 else 128)
    return {"rows": rows, "columns": columns, "num_warps": min(rows * columns // 512, 16)}


@lru_cache(maxsize=1024)
def _launch(R: int, C: int, height: int, width: int, casts: bool) -> CachedLaunch:
    """Returns the launch of the kernel for a matrix of a shape."""
    tile = tile_of(height, width)
    constants = {"height": height, "width": width, "casts": casts, **tile}
    # One axis of programs: others end at 65,535.
    grid = (triton.cdiv(R, tile["rows"]) * triton.cdiv(C, tile["columns"]),)
    return CachedLaunch(e4m3_blocks_kernel, grid, constants)


# This kernel computes the gradients of silu(gate) · up, which lie in one matrix, in one pass.
#
#     dy [rows, width], both [rows, 2 · width] ─▶ [d gate, d up]
#
# The forward kernel is the decoder's (`decoder_step.py`). Values are rounded where PyTorch's separate operations round
# them; these write the halves apart, and then copy them into one matrix.


_WIDTH = 1024


@triton.jit
def swiglu_backward_kernel(dy, both, out, K, width: tl.constexpr):
    """`width` columns of one row of both halves of `out`."""
    pieces = tl.cdiv(K, width)
    row = (tl.program_id(0) // pieces).to(tl.int64)
    column = tl.program_id(0) % pieces * width + tl.arange(0, width)
    inside = column < K
    dtype: tl.constexpr = both.dtype.element_ty
    start = row * 2 * K + column
    gate = tl.load(both + start, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + start + K, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(dy + row * K + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    silu = (gate * sigmoid).to(dtype).to(tl.float32)
    d_silu = (d * up).to(dtype).to(tl.float32)
    tl.store(out + start, (d_silu * sigmoid * (1.0 + gate * (1.0 - sigmoid))).to(dtype), mask=inside)
    tl.store(out + start + K, (d * silu).to(dtype), mask=inside)


def swiglu(both: torch.Tensor) -> torch.Tensor:
    """Returns silu(gate) · up, `[rows, width]`, of `[rows, 2 · width]`, gate first."""
    both, (rows, columns) = both.contiguous(), both.shape
    out = both.new_empty(rows, columns // 2)
    if out.numel():
        _launch_of_swiglu(rows, columns // 2)(both, out, columns // 2)
    return out


def swiglu_backward(dy: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
    """Returns the gradients `[rows, 2 · width]`."""
    dy, both = dy.contiguous(), both.contiguous()
    out = torch.empty_like(both)
    if out.numel():
        _launch_backward(*dy.shape)(dy, both, out, dy.shape[1])
    return out


@lru_cache(maxsize=1024)
def _launch_of_swiglu(rows: int, K: int) -> CachedLaunch:
    constants = {"gelu": False, "width": _WIDTH, "overlap": False, "num_warps": 4}
    return CachedLaunch(swiglu_kernel, (rows * triton.cdiv(K, _WIDTH),), constants)


@lru_cache(maxsize=1024)
def _launch_backward(rows: int, K: int) -> CachedLaunch:
    constants = {"width": _WIDTH, "num_warps": 4}
    return CachedLaunch(swiglu_backward_kernel, (rows * triton.cdiv(K, _WIDTH),), constants)


# These kernels sum the rows of each token's experts, weighted by the router, and compute the gradients of that.
#
#     rows [rows, H], positions [tokens · k] ─▶ a program for a piece of a token ─▶ Σ weight · rows[position]
#     dy [tokens, H], rows, slots [rows]     ─▶ a program for each row ─▶ weight · dy[token], and Σ dy[token] · row
#
# Each row is read once, and once written in the backward pass. PyTorch's operations copy all rows for the gather, the
# product and the scatter.


@triton.jit
def weigh_backward_kernel(
    dy, rows, slots, weights, d_rows, d_weights, count, H, per_token: tl.constexpr, width: tl.constexpr
):
    """Computes the gradients of one row and of its weight; a row with the slot `count` belongs to no token."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    has_token = slot < count
    token = slot // per_token
    weight = tl.load(weights + slot, mask=has_token, other=0.0).to(tl.float32)
    products = tl.zeros((width,), tl.float32)
    for start in range(0, H, width):
        column = start + tl.arange(0, width)
        inside = (column < H) & has_token
        gradient = tl.load(dy + token * H + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(d_rows + row * H + column, (weight * gradient).to(d_rows.dtype.element_ty), mask=column < H)
        products += tl.load(rows + row * H + column, mask=inside, other=0.0).to(tl.float32) * gradient
    tl.store(d_weights + slot, tl.sum(products, 0).to(d_weights.dtype.element_ty), mask=has_token)


def weigh_rows(
    rows: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor | None, tokens: int, dtype: torch.dtype
) -> torch.Tensor:
    """Returns the sums `[tokens, H]`, in FP32 until the end; without weights, plain ones."""
    rows, H = rows.contiguous(), rows.shape[1]
    out = torch.empty(tokens, H, dtype=dtype, device=rows.device)
    if out.numel():
        factors = rows if weights is None else weights.contiguous()
        _launch_of_weighted_rows(tokens, H, len(positions) // tokens, weights is not None)(
            rows, positions, factors, out, H
        )
    return out


def weigh_rows_backward(
    dy: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the gradients of the rows and of the weights `[tokens, k]`."""
    dy, weights, rows = dy.contiguous(), weights.contiguous(), rows.contiguous()
    d_rows, d_weights = torch.empty_like(rows), torch.zeros_like(weights)
    if rows.numel():
        launch = _launch_backward_of_weighted_rows(*rows.shape, weights.shape[1])
        launch(dy, rows, slots, weights, d_rows, d_weights, weights.numel(), rows.shape[1])
    return d_rows, d_weights


@lru_cache(maxsize=1024)
def _launch_of_weighted_rows(tokens: int, H: int, per_token: int, weighted: bool) -> CachedLaunch:
    constants = {"weighted": weighted, "per_token": per_token, "width": 1024, "overlap": False, "num_warps": 4}
    return CachedLaunch(weigh_kernel, (tokens * triton.cdiv(H, 1024),), constants)


@lru_cache(maxsize=1024)
def _launch_backward_of_weighted_rows(rows: int, H: int, per_token: int) -> CachedLaunch:
    width = min(triton.next_power_of_2(H), 2048)
    constants = {"per_token": per_token, "width": width, "num_warps": 4}
    return CachedLaunch(weigh_backward_kernel, (rows,), constants)


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
