"""This kernel rounds an operand of NVFP4 training on a GPU, in Transformer Engine's order of operations.

    x [R, C] ─▶ tile [32, 128] ─▶ a scale for 16 columns of a row, or for a square of 16×16 ─▶ element · scale, BF16

It reads a matrix once, in any layout, and writes the values of `quant.training.low_precision.operands`, bit for bit:
they are exact in BF16, and BF16 tensor cores multiply them. The tensor's own scale stays outside of the product. One
kernel serves all sizes, so nothing is compiled for a layer: the same steps in PyTorch are some forty operations on
blocks, which `torch.compile` fuses into a program of its own for each size, in minutes for a model.

Stochastic rounding takes its draws from a tensor, so that PyTorch's generator remains the only one.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from quant.kernels.base.launch_cache import CachedLaunch
from quant.kernels.training.portable_fake_rounding import on_grid

_ROWS, _COLUMNS = 32, 128


@triton.jit
def _up_or_down(steps, draws):
    """Returns `steps`, in [-6, 6], rounded to a neighbour on the grid of E2M1: up where its draw says so."""
    magnitude = tl.abs(steps)
    gap = tl.where(magnitude < 2.0, 0.5, tl.where(magnitude < 4.0, 1.0, 2.0))
    rounded = tl.minimum(tl.floor(tl.div_rn(magnitude, gap) + draws) * gap, 6.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(steps < 0, -rounded, rounded)


@triton.jit
def nvfp4_operand_kernel(
    x, whole, draws, out, factor, R, C, row_stride, column_stride, draws_stride,
    square: tl.constexpr, stochastic: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """A tile of `out`, contiguous `[R, C]`, and the tensor's scale in `factor`; `whole` is its largest magnitude."""
    amax_of_all = tl.load(whole).to(tl.float32)
    # 2688 = 6 · 448: the largest element times the largest block scale.
    encode = tl.minimum(tl.div_rn(2688.0, amax_of_all), 3.4028234663852886e38, propagate_nan=tl.PropagateNan.ALL)
    encode = tl.where(amax_of_all == 0.0, 1.0, encode)
    second = tl.div_rn(1.0, encode)
    tl.store(factor, second)  # the same from all programs
    r = tl.program_id(1) * rows + tl.arange(0, rows)
    c = tl.program_id(0) * columns + tl.arange(0, columns)
    inside = (r[:, None] < R) & (c[None, :] < C)
    row = r.to(tl.int64)[:, None]
    values = tl.load(x + row * row_stride + c.to(tl.int64)[None, :] * column_stride, mask=inside, other=0.0)
    height: tl.constexpr = 16 if square else 1
    blocks = values.to(tl.float32).reshape(rows // height, height, columns // 16, 16)
    bits = blocks.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    # Magnitudes have the order of their bits, NaN at the top.
    amax = tl.max(tl.max(bits, 3, keep_dims=True), 1, keep_dims=True).to(tl.float32, bitcast=True)
    # Times a rounded sixth: Transformer Engine does not divide here, and other orders round some scales differently.
    scale = on_grid(amax * (encode * 0.16666667163372040), 448.0, -448.0, 3, 0.015625, 256.0, False)  # to E4M3
    inverse = tl.div_rn(1.0, scale * second)
    # The scale of a block of tiny values is zero.
    inverse = tl.minimum(inverse, 3.4028234663852886e38, propagate_nan=tl.PropagateNan.ALL)
    steps = tl.clamp(blocks * inverse, -6.0, 6.0, propagate_nan=tl.PropagateNan.ALL)
    if stochastic:
        drawn = tl.load(draws + row * draws_stride + c[None, :], mask=inside, other=0.0)
        elements = _up_or_down(steps, drawn.reshape(rows // height, height, columns // 16, 16))
    else:
        elements = on_grid(steps, 6.0, -6.0, 1, 1.0, 4.0, False)
    rounded = (elements * scale).reshape(rows, columns)
    tl.store(out + row * C + c[None, :], rounded.to(tl.bfloat16), mask=inside)


def round_nvfp4_operand(
    x: torch.Tensor, amax: torch.Tensor, square: bool, draws: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns element · scale of `x` `[R, C]`, BF16, and the scale of the tensor, float32 scalar.

    Args:
        x: float32, BF16 or FP16, with any strides.
        amax: float scalar, the largest magnitude that the tensor is scaled by.
        square: one scale for 16×16 instead of 1×16.
        draws: uniform in [0, 1), float32, `[R, C]` or wider, for stochastic rounding; None rounds to nearest.
    """
    R, C = x.shape
    out = torch.empty(R, C, dtype=torch.bfloat16, device=x.device)
    factor = torch.empty((), dtype=torch.float32, device=x.device)
    launch = _launch(R, C, square, draws is not None)
    launch(
        x, amax, x if draws is None else draws, out, factor, R, C, *x.stride(), 0 if draws is None else draws.stride(0)
    )
    return out, factor


@lru_cache(maxsize=1024)
def _launch(R: int, C: int, square: bool, stochastic: bool) -> CachedLaunch:
    """Returns the launch of the kernel for operands of a shape."""
    grid = triton.cdiv(C, _COLUMNS), triton.cdiv(R, _ROWS)
    constants = {"square": square, "stochastic": stochastic, "rows": _ROWS, "columns": _COLUMNS, "num_warps": 4}
    return CachedLaunch(nvfp4_operand_kernel, grid, constants)
