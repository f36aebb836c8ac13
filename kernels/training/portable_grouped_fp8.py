"""The kernels of experts in FP8 training.

    e4m3_blocks      x [R, C] ─▶ tile of whole blocks ─▶ amax / 448, up to a power of two ─▶ element · scale, scale
    e4m3_rows        x [R, C] ─▶ a program for each row                         ─▶ codes   [R, C], scale   [R]
    e4m3_columns     x [R, C] ─▶ a program for 64 columns of each expert's rows ─▶ codes_t [C, R], scale_t [experts, C]
    swiglu_backward  dy [rows, width], both [rows, 2 · width] ─▶ [d gate, d up], in one matrix
    weigh_rows       rows [rows, H], positions [tokens · k] ─▶ a program for a piece of a token ─▶ Σ weight · its rows
    its backward     dy [tokens, H], rows, slots [rows] ─▶ a program for each row ─▶ weight · dy[token], Σ dy · row

FP8 tensor cores read both operands along the axis of the sum, so `e4m3_columns` transposes. A vector's largest
magnitude is known only at its end: each is read twice, a row the second time from the cache. Blocks may be a run of a
row, of a column or a square; they keep floats, which lie as x does: BF16 tensor cores read them transposed at no cost.

PyTorch's operations write the halves of SwiGLU's gradient apart and copy them into one matrix, and copy all rows for
the gather, the product and the scatter of experts. Values are rounded where its separate operations round them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quant.kernels.attention.portable_decoder_step import swiglu_kernel
from quant.kernels.base.launch import cached_launch
from quant.kernels.linear.portable_grouped_gemm import weigh_kernel
from quant.kernels.training.portable_fake_rounding import block_scale, on_grid


@triton.jit
def e4m3_blocks_kernel(
    x, out, scales, R, C, row_stride, column_stride,
    height: tl.constexpr, width: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, casts: tl.constexpr,
):  # fmt: skip
    """A tile `[rows, columns]` of `out`, contiguous `[R, C]`, and its scales; blocks are `[height, width]`."""
    # `casts`: the GPU has a cast to E4M3; elsewhere arithmetic rounds, in twice the time.
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
    x: Tensor, height: int, width: int, dtype: torch.dtype, casts: bool = True
) -> tuple[Tensor, Tensor]:
    """Returns element · scale of `x` `[R, C]`, of any strides, in blocks of these powers of two; and the scales."""
    # Without `casts`, nothing needs a GPU that has E4M3.
    R, C = x.shape
    out = torch.empty(R, C, dtype=dtype, device=x.device)
    scales = torch.empty(triton.cdiv(R, height), triton.cdiv(C, width), dtype=torch.float32, device=x.device)
    if out.numel():
        tile = tile_of(height, width)
        # One axis of programs: others end at 65,535.
        grid = (triton.cdiv(R, tile["rows"]) * triton.cdiv(C, tile["columns"]),)
        launch = cached_launch(e4m3_blocks_kernel, grid, height=height, width=width, casts=casts, **tile)
        launch(x, out, scales, R, C, *x.stride())
    return out, scales


def tile_of(height: int, width: int) -> dict[str, int]:
    """Returns the rows and columns of a program's tile, for blocks of a size, and its warps."""
    rows, columns = max(height, 32), max(width, 64 if height > 1 else 128)
    return {"rows": rows, "columns": columns, "num_warps": min(rows * columns // 512, 16)}


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


def swiglu(both: Tensor) -> Tensor:
    """Returns silu(gate) · up, `[rows, width]`, of `[rows, 2 · width]`, gate first."""
    both, (rows, columns) = both.contiguous(), both.shape
    out = both.new_empty(rows, columns // 2)
    if out.numel():
        options = {"gelu": False, "width": _WIDTH, "overlap": False, "num_warps": 4}
        cached_launch(swiglu_kernel, (rows * triton.cdiv(columns // 2, _WIDTH),), **options)(both, out, columns // 2)
    return out


def swiglu_backward(dy: Tensor, both: Tensor) -> Tensor:
    """Returns the gradients `[rows, 2 · width]`."""
    dy, both = dy.contiguous(), both.contiguous()
    out = torch.empty_like(both)
    if out.numel():
        rows, K = dy.shape
        grid = (rows * triton.cdiv(K, _WIDTH),)
        cached_launch(swiglu_backward_kernel, grid, width=_WIDTH, num_warps=4)(dy, both, out, K)
    return out


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


def weigh_rows(rows: Tensor, positions: Tensor, weights: Tensor | None, tokens: int, dtype: torch.dtype) -> Tensor:
    """Returns the sums `[tokens, H]`, in FP32 until the end; without weights, plain ones."""
    rows, H = rows.contiguous(), rows.shape[1]
    out = torch.empty(tokens, H, dtype=dtype, device=rows.device)
    if out.numel():
        factors, per_token = rows if weights is None else weights.contiguous(), len(positions) // tokens
        options = {"weigh": weights is not None, "per_token": per_token, "width": 1024, "overlap": False}
        launch = cached_launch(weigh_kernel, (tokens * triton.cdiv(H, 1024),), num_warps=4, **options)
        launch(rows, positions, factors, out, H)
    return out


def weigh_rows_backward(dy: Tensor, rows: Tensor, slots: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of the rows and of the weights `[tokens, k]`."""
    dy, weights, rows = dy.contiguous(), weights.contiguous(), rows.contiguous()
    d_rows, d_weights = torch.empty_like(rows), torch.zeros_like(weights)
    if rows.numel():
        width = min(triton.next_power_of_2(rows.shape[1]), 2048)
        options = {"per_token": weights.shape[1], "width": width, "num_warps": 4}
        launch = cached_launch(weigh_backward_kernel, (len(rows),), **options)
        launch(dy, rows, slots, weights, d_rows, d_weights, weights.numel(), rows.shape[1])
    return d_rows, d_weights


TILES = (512, 32, 8), (256, 32, 4)
"""Rows and columns that a program of the second kernel reads at once, and its warps: of a matrix, and of a wide one."""
_WIDE = 8192  # columns of one matrix, whose programs fill a GPU twice
_MOST_COLUMNS = 4096


@triton.jit
def _scale_and_factor(bits):
    """Returns the scale of vectors whose largest magnitude has these bits, and the factor from values to codes."""
    # The power of two at or above amax / 448: with amax = m · 2^e it is 2^(e - 8) where m <= 1.75, else 2^(e - 7). A
    # mantissa above 1.75 carries into the exponent. At least 2^-126, whose reciprocal is finite.
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
    """`columns` columns of one expert's rows: codes at `expert_stride` · expert + `column_stride` · column + row."""
    # Without `measured`, `scale` holds powers of two that are to be used.
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


def e4m3_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns codes `[R, C]` and scales `[R]` of `x` `[R, C]`."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    (R, C), device = x.shape, x.device
    codes = torch.empty(R, C, dtype=torch.float8_e4m3fn, device=device)
    scale = torch.empty(R, dtype=torch.float32, device=device)
    if codes.numel():
        columns = min(triton.next_power_of_2(C), _MOST_COLUMNS)
        launch = cached_launch(e4m3_rows_kernel, (R,), columns=columns, num_warps=max(columns // 1024, 1))
        launch(x, codes, scale, C, x.stride(0))
    return codes, scale


def e4m3_columns(x: Tensor, offsets: Tensor, is_stack: bool, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns codes of the columns of `x` `[R, C]`, transposed, and scales `[experts, C]`: powers of two."""
    # `offsets` has the row after the last of each expert, int32, multiples of 16. With `is_stack`, each expert has R /
    # experts rows, and codes are `[experts, C, R / experts]`; otherwise `[C, R]`, not written beyond the last offset.
    x = x if x.stride(-1) == 1 else x.contiguous()
    (R, C), experts = x.shape, len(offsets)
    shape = (experts, C, R // experts) if is_stack else (C, R)
    codes = torch.empty(shape, dtype=torch.float8_e4m3fn, device=x.device)
    measured = scale is None
    scale = torch.empty(experts, C, dtype=torch.float32, device=x.device) if scale is None else scale.clone()
    # The kernel counts rows from the first of all experts.
    strides = (codes.stride(0) - R // experts, codes.stride(1)) if is_stack else (0, R)
    if scale.numel():
        # Programs of few columns are many, and read many rows at once: it is memory's latency that they wait for. These
        # tiles are within 10 % of the fastest of 27 on an H100, and leave all values in registers.
        rows, columns, warps = TILES[experts == 1 and C >= _WIDE]
        options = {"measured": measured, "rows": rows, "columns": columns, "num_warps": warps}
        launch = cached_launch(e4m3_columns_kernel, (experts * triton.cdiv(C, columns),), **options)
        launch(x, offsets, codes, scale, C, x.stride(0), *strides)
    return codes, scale
