"""This kernel rounds blocks of a matrix to E4M3 under power-of-two scales on a GPU, and keeps them as floats.

    x [R, C] ─▶ tile of whole blocks ─▶ scale of a block: amax / 448, up to a power of two ─▶ element · scale, scale

A block may be a run of a row (1×128), of a column (128×1) or a square. The values lie as x does in all cases: a product
that sums over the rows reads them transposed, which BF16 tensor cores do at no cost.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from quant.kernels.base.launch_cache import CachedLaunch
from quant.kernels.training.portable_fake_rounding import block_scale, on_grid


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
