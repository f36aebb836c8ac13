"""These kernels round weights to a format on a GPU and keep them as floats: the weights of a model in training.

A program owns a tile `[block_n, block_k]` of the weight `[N, K]`, and reads it once:

    w ─▶ scale of its block (the `max` rule, or one that is given) ─▶ w / step ─▶ nearest value of the grid ─▶ · step

The grid may be any element number's, computed as `quant.formats.rounding.round_to` does: the exponent bits of the
quotient give the distance of its neighbours, a power of two, and adding and subtracting 1.5 · 2^23 rounds to integers.
Divisions are correctly rounded, so the result is the oracle's bit for bit. `mask_kernel` is the straight-through
gradient under a scale that is given: it passes where the weight is within the range of its block. `slope_kernel` sums
LSQ's gradient of a scale over its block. `input_kernel` adds such a sum to the gradient of an input: to the one that
decides the scale of its block.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quant.formats.format import E4M3, Format
from quant.kernels.base import hardware
from quant.kernels.base.launch import CachedLaunch, cached_launch
from quant.kernels.base.portable_small_floats import amax_of, from_e4m3, nonzero, to_e4m3

# The global scale that the weights of fused layers share takes a launch for each weight and one for the scale, where
# PyTorch's own ops need ten. Magnitudes are compared as the bits of float32, which have the same order; NaN is on top.
_AMAX_RUN = 8192


@triton.jit
def amax_kernel(weight, largest, count, block: tl.constexpr):
    """Raises `largest`, the bits of a magnitude, to the largest magnitude of a run of `weight`."""
    offset = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    w = tl.load(weight + offset, mask=offset < count, other=0.0).to(tl.float32)
    # Positive floats sort like their bits, so an integer maximum does.
    tl.atomic_max(largest, amax_of(w, 0).to(tl.int32, bitcast=True))


@triton.jit
def global_scale_kernel(largest, out, unit: tl.constexpr):
    """Writes the magnitude of the bits `largest` divided by `unit`, through its reciprocal; NaN if not finite."""
    # Both reciprocals are rounded, as by the modules that this replaces: the bits must agree.
    amax = tl.load(largest).to(tl.float32, bitcast=True)
    tl.store(out, tl.div_rn(1.0, tl.div_rn(1.0, nonzero(tl.div_rn(amax, unit)))))


def global_scale(weights: Sequence[Tensor], format: Format) -> Tensor:
    """Returns the global scale by the `max` rule, float32 scalar, of weights on one GPU: FP32, BF16 or FP16."""
    device = weights[0].device
    largest = torch.zeros((), dtype=torch.int32, device=device)
    out = torch.empty((), dtype=torch.float32, device=device)
    for weight in weights:
        grid = (triton.cdiv(weight.numel(), _AMAX_RUN),)
        launch = cached_launch(amax_kernel, grid, block=_AMAX_RUN, num_warps=8)
        launch(weight.contiguous(), largest, weight.numel())
    cached_launch(global_scale_kernel, (1,), unit=format.element.max * E4M3.max, num_warps=1)(largest, out)
    return out


_BLOCK_N, _BLOCK_K = 16, 256
_MOST_ROWS = _BLOCK_N * 65535  # of CUDA's grids
_RUN = 2048


@triton.jit
def block_scale(amax, second, largest: tl.constexpr, kind: tl.constexpr):
    """Returns a block's step by the `max` rule: its scale, to E4M3 or up to a power of two, times the second."""
    # `kind` is "e4m3", or "e4m3 in bytes" where Triton has no such type, or "e8m0".
    if kind != "e8m0":
        ideal = tl.maximum(tl.div_rn(amax, largest * second), 0.001953125)
        # In this order: NaN and infinity become NaN.
        dtype: tl.constexpr = tl.float8e4nv if kind == "e4m3" else tl.uint8
        return from_e4m3(to_e4m3(tl.fma(amax, 0.0, tl.minimum(ideal, 448.0)), dtype)) * second
    else:
        bits = tl.div_rn(amax, largest).to(tl.int32, bitcast=True)
        exponent = (bits >> 23) + tl.where((bits & 0x7FFFFF) != 0, 1, 0)
        # Exponent 0 stands for 2^-127, a subnormal.
        up = tl.where(bits <= 0x400000, 0x400000, exponent << 23).to(tl.float32, bitcast=True)
        return tl.fma(amax, 0.0, up)


@triton.jit
def _given_scale(scale, second, n, k, N, K, stride, rows: tl.constexpr, columns: tl.constexpr):
    """Returns the step of each weight of a tile; a block is `rows` by `columns`, 0 for the whole axis."""
    first = n // rows if rows > 0 else n * 0
    across = k // columns if columns > 0 else k * 0
    inside = (n[:, None] < N) & (k[None, :] < K)
    return tl.load(scale + first.to(tl.int64)[:, None] * stride + across[None, :], mask=inside, other=1.0) * second


@triton.jit
def on_grid(
    steps, largest: tl.constexpr, least: tl.constexpr, mantissa: tl.constexpr, lowest: tl.constexpr, top: tl.constexpr,
    integer: tl.constexpr,
):  # fmt: skip
    """Returns `steps` rounded to the nearest value of a number, ties to even, saturating at `least` and `largest`."""
    # `lowest` is its smallest normal, and `top` the power of two below its largest value.
    bound = tl.where(steps < 0, -least, largest)
    magnitude = tl.minimum(tl.abs(steps), bound, propagate_nan=tl.PropagateNan.ALL)
    # 1.5 · 2^23: the sum has no bits below one, and rounds ties to even.
    if integer:
        rounded = (magnitude + 12582912.0) - 12582912.0
    else:
        # The power of two below the magnitude, from its exponent bits; subnormals share the step of the lowest normal.
        power = (magnitude.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        power = tl.minimum(tl.maximum(power, lowest), top) * (0.5**mantissa)
        rounded = (tl.div_rn(magnitude, power) + 12582912.0 - 12582912.0) * power
        rounded = tl.minimum(rounded, bound, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(steps < 0, -rounded, rounded)


@triton.jit
def round_kernel(
    weight, scale, global_scale, out, N, K, w_stride, scale_stride,
    largest: tl.constexpr, least: tl.constexpr, mantissa: tl.constexpr, lowest: tl.constexpr, top: tl.constexpr,
    integer: tl.constexpr,
    kind: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, measured: tl.constexpr, has_global: tl.constexpr,
    block_n: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """The tile of `out`, contiguous `[N, K]`: the weight, rounded."""
    n = tl.program_id(1) * block_n + tl.arange(0, block_n)
    k = tl.program_id(0) * block_k + tl.arange(0, block_k)
    inside = (n[:, None] < N) & (k[None, :] < K)
    w = tl.load(weight + n.to(tl.int64)[:, None] * w_stride + k[None, :], mask=inside, other=0.0).to(tl.float32)
    second = tl.load(global_scale).to(tl.float32) if has_global else 1.0
    if measured:
        blocks = w.reshape(block_n, block_k // columns, columns)
        step = block_scale(amax_of(blocks, 2), second, largest, kind)
        step = tl.broadcast_to(step[:, :, None], (block_n, block_k // columns, columns)).reshape(block_n, block_k)
    else:
        step = _given_scale(scale, second, n, k, N, K, scale_stride, rows, columns)
    rounded = on_grid(tl.div_rn(w, step), largest, least, mantissa, lowest, top, integer) * step
    tl.store(out + n.to(tl.int64)[:, None] * K + k[None, :], rounded.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward_tile(
    gradient, weight, scale, global_scale, n, k, N, K, dy_stride, w_stride, scale_stride,
    rows: tl.constexpr, columns: tl.constexpr, has_global: tl.constexpr,
):  # fmt: skip
    """Loads the operands of a gradient: tiles of dY, of the weight and of its steps, and the global scale."""
    inside = (n[:, None] < N) & (k[None, :] < K)
    row = n.to(tl.int64)[:, None]
    w = tl.load(weight + row * w_stride + k[None, :], mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(gradient + row * dy_stride + k[None, :], mask=inside, other=0.0).to(tl.float32)
    second = tl.load(global_scale).to(tl.float32) if has_global else 1.0
    return dy, w, _given_scale(scale, second, n, k, N, K, scale_stride, rows, columns), second


@triton.jit
def mask_kernel(
    gradient, weight, scale, global_scale, out, N, K, dy_stride, w_stride, scale_stride,
    largest: tl.constexpr, least: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, has_global: tl.constexpr,
    block_n: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """The tile of `out`, contiguous `[N, K]`: the gradient, zero where the weight is beyond the range of its block."""
    n = tl.program_id(1) * block_n + tl.arange(0, block_n)
    k = tl.program_id(0) * block_k + tl.arange(0, block_k)
    dy, w, step, _ = _backward_tile(
        gradient, weight, scale, global_scale, n, k, N, K, dy_stride, w_stride, scale_stride, rows, columns, has_global
    )
    dw = tl.where((w >= least * step) & (w <= largest * step), dy, 0.0).to(out.dtype.element_ty)
    tl.store(out + n.to(tl.int64)[:, None] * K + k[None, :], dw, mask=(n[:, None] < N) & (k[None, :] < K))


@triton.jit
def slope_kernel(
    gradient, weight, scale, global_scale, out, N, K, dy_stride, w_stride, scale_stride,
    largest: tl.constexpr, least: tl.constexpr, mantissa: tl.constexpr, lowest: tl.constexpr, top: tl.constexpr,
    integer: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr, has_global: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """The tile of `out`, float32 contiguous `[N, K / columns]`: the sum over each block of dY · (q - u), or dY · q."""
    n = tl.program_id(1) * block_n + tl.arange(0, block_n)
    k = tl.program_id(0) * block_k + tl.arange(0, block_k)
    dy, w, step, second = _backward_tile(
        gradient, weight, scale, global_scale, n, k, N, K, dy_stride, w_stride, scale_stride, rows, columns, has_global
    )
    # LSQ: the slope of q(w / s) · s in s is q − w / s inside the range, and q at its ends.
    steps = tl.div_rn(w, step)
    within = tl.where((w >= least * step) & (w <= largest * step), steps, 0.0)
    slope = dy * (on_grid(steps, largest, least, mantissa, lowest, top, integer) - within)
    summed = tl.sum(slope.reshape(block_n, block_k // columns, columns), 2) * second
    blocks = tl.program_id(0) * (block_k // columns) + tl.arange(0, block_k // columns)
    at = n.to(tl.int64)[:, None] * (K // columns) + blocks[None, :]
    tl.store(out + at, summed, mask=(n[:, None] < N) & (blocks[None, :] < K // columns))


@triton.jit
def input_kernel(
    gradient, x, rounded, scale, out, N, K, dy_stride, stride, rounded_stride,
    least: tl.constexpr, most: tl.constexpr, columns: tl.constexpr, has_scale: tl.constexpr,
    block_n: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """The tile of `out`, contiguous `[N, K]`: the gradient of inputs that were rounded in blocks of `columns`."""
    # With a scale, blocks whose largest magnitude is at most `least` times it, or above `most` times it, have a scale
    # that does not follow them, and inputs above have no gradient.
    n = tl.program_id(1) * block_n + tl.arange(0, block_n)
    k = tl.program_id(0) * block_k + tl.arange(0, block_k)
    inside = (n[:, None] < N) & (k[None, :] < K)
    row = n.to(tl.int64)[:, None]
    dy = tl.load(gradient + row * dy_stride + k[None, :], mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + row * stride + k[None, :], mask=inside, other=0.0).to(tl.float32)
    change = tl.load(rounded + row * rounded_stride + k[None, :], mask=inside, other=0.0).to(tl.float32) - value
    size = tl.abs(value).reshape(block_n, block_k // columns, columns)
    amax = tl.max(size, 2)
    # The scale is amax / largest, so it follows the largest input; equal ones share its gradient.
    follows = amax > 0.0
    passed = dy
    if has_scale:
        unit = tl.load(scale).to(tl.float32)
        follows = (amax > least * unit) & (amax <= most * unit)
        passed = tl.where(tl.abs(value) <= most * unit, dy, 0.0)
    # d scale / d x is sign(x) / largest at the largest inputs of a block, and zero elsewhere.
    is_largest = size == amax[:, :, None]
    slope = tl.sum((dy * change).reshape(block_n, block_k // columns, columns), 2)
    slope = tl.where(follows, slope / (tl.where(follows, amax, 1.0) * tl.sum(is_largest.to(tl.float32), 2)), 0.0)
    added = tl.where(is_largest, slope[:, :, None], 0.0).reshape(block_n, block_k)
    dx = passed + tl.where(value < 0, -added, added)
    tl.store(out + row * K + k[None, :], dx.to(out.dtype.element_ty), mask=inside)


@triton.jit
def within_kernel(gradient, x, scale, out, count, largest: tl.constexpr, block: tl.constexpr):
    """A run of `out`: the gradient, zero where a value is beyond `largest` steps of a scale that all share."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    reach = tl.load(scale).to(tl.float32) * largest
    value = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
    dy = tl.load(gradient + at, mask=at < count, other=0.0)
    tl.store(out + at, tl.where(tl.abs(value) <= reach, dy, 0.0).to(out.dtype.element_ty), mask=at < count)


def can_measure(format: Format, shape: Sequence[int]) -> bool:
    """Returns whether `round_weight` finds the block scales of a weight of `shape` itself: short runs, E4M3 or E8M0."""
    by_amax = format.input_rule == "max"
    return by_amax and not format.scale.is_wide and format.block[1] <= 32 and can_sum(format, shape)


def can_sum(format: Format, shape: Sequence[int]) -> bool:
    """Returns whether `scale_gradient` takes a weight of `shape`: tiles hold whole blocks, which are runs of a row."""
    rows, columns = format.block
    if shape[0] > _MOST_ROWS:
        return False
    return rows == 1 and 0 < columns <= _BLOCK_K and _BLOCK_K % columns == 0 and shape[-1] % columns == 0


def round_weight(
    weight: Tensor, format: Format, dtype: torch.dtype, scale: Tensor | None, global_scale: Tensor | None
) -> Tensor:
    """Returns the weight `[N, K]` as a packed model multiplies by it, in one pass, in `dtype`."""
    # `scale` holds float32 block scale values; None measures them by the `max` rule, where `can_measure`.
    weight, (N, K) = _rows(weight), weight.shape
    out = torch.empty(N, K, dtype=dtype, device=weight.device)
    steps = weight if scale is None else scale.contiguous()
    has_global = global_scale is not None
    kind = format.scale.name
    if kind == "e4m3" and hardware.lacks_e4m3(weight):
        kind = "e4m3 in bytes"
    constants = {"kind": kind, "measured": scale is None}
    launch = _launch(round_kernel, N, K, format, has_global, **constants)
    launch(weight, steps, global_scale if has_global else weight, out, N, K, weight.stride(0), steps.stride(0))
    return out


def masked_gradient(
    gradient: Tensor, weight: Tensor, format: Format, scale: Tensor, global_scale: Tensor | None
) -> Tensor:
    """Returns the gradient `[N, K]`, with zeros where the weight is beyond the range of its block."""
    out = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    return _backward(mask_kernel, out, gradient, weight, format, scale, global_scale)


def scale_gradient(
    gradient: Tensor, weight: Tensor, format: Format, scale: Tensor, global_scale: Tensor | None
) -> Tensor:
    """Returns LSQ's gradient of the block scales `[N, K / columns]`, float32; for weights that `can_sum` accepts."""
    out = torch.empty(scale.shape, dtype=torch.float32, device=weight.device)
    return _backward(slope_kernel, out, gradient, weight, format, scale, global_scale)


def input_gradient(gradient: Tensor, x: Tensor, rounded: Tensor, format: Format, scale: Tensor | None) -> Tensor:
    """Returns the gradient `[N, K]` of inputs that were rounded in short blocks; `can_sum` tells in which."""
    # `gradient` is that of the rounded inputs; x and `rounded` are the inputs before and after; `scale` is the global
    # scale.
    gradient, x, rounded, (N, K) = _rows(gradient), _rows(x), _rows(rounded), x.shape
    out = torch.empty(N, K, dtype=gradient.dtype, device=x.device)
    launch = cached_launch(
        input_kernel, _grid(N, K), least=format.element.max * format.scale.min_subnormal,
        most=format.element.max * format.scale.max, columns=format.block[1], has_scale=scale is not None,
        block_n=_BLOCK_N, block_k=_BLOCK_K, num_warps=8,
    )  # fmt: skip
    second_level = x if scale is None else scale
    launch(gradient, x, rounded, second_level, out, N, K, gradient.stride(0), x.stride(0), rounded.stride(0))
    return out


def within(gradient: Tensor, x: Tensor, scale: Tensor, largest: float) -> Tensor:
    """Returns the gradient of `x`, with zeros where `x` is beyond `largest` steps of a scalar scale."""
    gradient = gradient.contiguous()
    out = torch.empty_like(gradient)
    if x.numel():
        launch = cached_launch(within_kernel, (triton.cdiv(x.numel(), _RUN),), largest=largest, block=_RUN, num_warps=8)
        launch(gradient, x, scale, out, x.numel())
    return out


def _backward(
    kernel: Any, out: Tensor, gradient: Tensor, weight: Tensor, format: Format, scale: Tensor, second: Tensor | None
) -> Tensor:
    """Returns `out`, contiguous, which `kernel` fills from the gradient `[N, K]` of the rounded weight."""
    gradient, weight, scale, (N, K) = _rows(gradient), _rows(weight), scale.contiguous(), weight.shape
    launch = _launch(kernel, N, K, format, second is not None)
    strides = [x.stride(0) for x in (gradient, weight, scale)]
    launch(gradient, weight, scale, weight if second is None else second, out, N, K, *strides)
    return out


def _launch(kernel: Any, N: int, K: int, format: Format, has_global: bool, **constants: Any) -> CachedLaunch:
    element = format.element
    if kernel is not mask_kernel:
        # The number of `on_grid`, except its largest value.
        constants |= {"mantissa": element.mantissa, "lowest": element.min_normal, "integer": element.is_integer}
        constants["top"] = 2.0**element.max_exponent
    return cached_launch(
        kernel, _grid(N, K), largest=element.max, least=element.min, rows=format.block[0], columns=format.block[1],
        has_global=has_global, block_n=_BLOCK_N, block_k=_BLOCK_K, num_warps=8, **constants,
    )  # fmt: skip


def _rows(x: Tensor) -> Tensor:
    """Returns a matrix whose rows are contiguous."""
    return x if x.stride(1) == 1 else x.contiguous()


def _grid(N: int, K: int) -> tuple[int, int]:
    return triton.cdiv(K, _BLOCK_K), triton.cdiv(N, _BLOCK_N)


# An operand of NVFP4 training, in Transformer Engine's order of operations: the values of
# `quant.training.low_precision.operands`, bit for bit, which are exact in BF16; the tensor's own scale stays outside of
# the product. One kernel serves all sizes, where `torch.compile` would fuse a program for each, in minutes for a model.
# Stochastic rounding takes its draws from a tensor, so that PyTorch's generator remains the only one.
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


def round_nvfp4_operand(x: Tensor, amax: Tensor, square: bool, draws: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns element · scale of `x` `[R, C]`, of any strides, in BF16, and the scale of the tensor, float32 scalar."""
    # `amax` is the largest magnitude that the tensor is scaled by; `square` takes one scale for 16×16 instead of 1×16.
    # `draws`, uniform in [0, 1), float32 `[R, C]` or wider, round stochastically; None rounds to nearest.
    R, C = x.shape
    out = torch.empty(R, C, dtype=torch.bfloat16, device=x.device)
    factor = torch.empty((), dtype=torch.float32, device=x.device)
    options = {"square": square, "stochastic": draws is not None, "rows": _ROWS, "columns": _COLUMNS, "num_warps": 4}
    launch = cached_launch(nvfp4_operand_kernel, (triton.cdiv(C, _COLUMNS), triton.cdiv(R, _ROWS)), **options)
    launch(
        x, amax, x if draws is None else draws, out, factor, R, C, *x.stride(), 0 if draws is None else draws.stride(0)
    )
    return out, factor
