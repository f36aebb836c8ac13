"""These kernels read matrices once and write FP8 operands for both directions in which training multiplies by them.

    x [R, C] ─▶ tile [128, 128] ─┬─▶ codes   [R, C]   and one scale for 128 columns of a row: for sums over the columns
                                 └─▶ codes_t [C, R]   and one scale for 128 rows of a column: for sums over the rows

Hopper's tensor cores read FP8 operands along the axis of the sum only, so the second copy is transposed. A tile holds
whole blocks of either direction, so each block's largest magnitude is known without reading again: for each element in
BF16, 2 bytes are read and 2 written. With `square`, a tile has one scale, and both copies have the same codes.

A thread holds a piece of several rows and columns, and a warp's threads lie so that either copy is written in pieces of
32 bytes and more, straight from registers:

    one thread   8 rows × 8 columns        8 bytes of a row of codes, 8 bytes of a row of codes_t
    one warp     8 threads down, 4 across  32 bytes of a row of codes, 64 bytes of a row of codes_t

A transposition through shared memory would move single bytes there.

`swiglu` computes a tile where it is read, as silu(x) · up, and `norm` as RMSNorm(x), with one factor for a row and one
for a column. Neither is then ever written in 16 bit. Values are rounded where PyTorch's separate operations round them.

The axis of a sum is padded with zeros, which change no sum: cuBLASLt reads scales of squares by fours. Scales lie as it
reads them: by blocks, then rows. A block with NaN or infinity gets a scale that is NaN, and with it every product that
it is in.

The gradients of SwiGLU are never written in 16 bit either:

    gate, up, dh [R, C] ─▶ tiles [128, 128] ─┬─▶ h      = silu(gate) · up         ─▶ codes_t of h
                                             ├─▶ d up   = dh · silu(gate)         ─▶ operands of d up
                                             └─▶ d gate = dh · up · silu'(gate)   ─▶ operands of d gate

Codes of the two gradients lie side by side, so that one product sums over the columns of both. Three tiles in registers
and all results would be too many for a thread. So TMA copies the three into shared memory, which all computations read
in turn, and a program stays on its SM: its next tiles arrive in a second slot while it works on these.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quant.kernels.base.hardware import current
from quant.kernels.base.sm90_gluon import async_load, barrier
from quant.kernels.training.fp8_block_layout import BLOCK, Operands, SwiGLUGradients, allocate

_TILE = gl.constexpr(BLOCK)
_LARGEST = gl.constexpr(448.0)
_SIGMOID = gl.constexpr("""{
    .reg .f32 t;
    mul.f32 t, $1, 0fBFB8AA3B;
    ex2.approx.ftz.f32 t, t;
    add.f32 t, t, 0f3F800000;
    rcp.approx.ftz.f32 $0, t;
}""")  # -log2(e), 1


@gluon.jit
def _scale(bits, rule: gl.constexpr):
    """Returns the scale of blocks whose largest magnitude has these bits, and the factor from values to codes."""
    if rule == "power_of_two":
        # The power of two at or above amax / 448: with amax = m · 2^e it is 2^(e - 8) where m <= 1.75, else 2^(e - 7).
        # A mantissa above 1.75 carries into the exponent. At least 2^-126, whose reciprocal is finite.
        exponent = gl.maximum(((bits + 0x1FFFFF) >> 23) - 8, 1)
        exponent = gl.where(bits == 0, 127, exponent)
        # NaN and infinity become NaN.
        finite = bits < 0x7F800000
        scale = gl.where(finite, exponent << 23, 0x7FC00000).to(gl.float32, bitcast=True)
        factor = gl.where(finite, (254 - exponent) << 23, 0x7FC00000).to(gl.float32, bitcast=True)
        return scale, factor
    amax = bits.to(gl.float32, bitcast=True)
    divisor = gl.where(amax == 0.0, 1.0, amax)
    if rule == "transformer_engine":
        factor = gl.where(amax == 0.0, 1.0, gl.div_rn(_LARGEST, divisor))
        scale = gl.div_rn(1.0, factor)
    else:
        scale = gl.where(amax == 0.0, 1.0, gl.div_rn(amax, _LARGEST))
        factor = scale
    return gl.fma(amax, amax * 0.0, scale), gl.fma(amax, amax * 0.0, factor)


@gluon.jit
def _codes(values, factor, rule: gl.constexpr):
    steps = gl.div_rn(values, factor) if rule == "divided" else values * factor
    return steps.to(gl.float8e4nv)


@gluon.jit
def sigmoid(x):
    """Returns 1 / (1 + exp(-x)) by the approximations of the hardware, two units in the last place of FP32 off."""
    return gl.inline_asm_elementwise(_SIGMOID, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def rounded(values, dtype: gl.constexpr):
    """Returns `values` as PyTorch would have them after an operation in `dtype`."""
    return values.to(dtype).to(gl.float32)


@gluon.jit
def _load_tile(x, stride, tile_r, tile_c, R, C, layout: gl.constexpr):
    """Returns a tile, zeros beyond the matrix. Offsets within it are of 32 bits; only the tile's own is of 64."""
    r = gl.arange(0, _TILE, layout=gl.SliceLayout(1, layout))
    c = gl.arange(0, _TILE, layout=gl.SliceLayout(0, layout))
    inside = (r[:, None] < R - tile_r * _TILE) & (c[None, :] < C - tile_c * _TILE)
    corner = x + tile_r.to(gl.int64) * _TILE * stride + tile_c * _TILE
    return gl.load(corner + (r * stride)[:, None] + c[None, :], mask=inside, other=0.0)


@gluon.jit
def store_tile(
    values, codes, scale, codes_t, scale_t, tile_r, tile_c, R, C, width, width_t, scale_stride, scale_t_stride,
    rule: gl.constexpr, square: gl.constexpr, rows: gl.constexpr, columns: gl.constexpr, layout: gl.constexpr,
    turned: gl.constexpr,
):  # fmt: skip
    """Stores the codes and scales of a tile in float32, in the requested directions."""
    # `turned` has the same elements in the same threads as `layout`, in an order that makes columns the vectors.
    r = gl.arange(0, _TILE, layout=gl.SliceLayout(1, layout))
    c = gl.arange(0, _TILE, layout=gl.SliceLayout(0, layout))
    across = gl.arange(0, _TILE, layout=gl.SliceLayout(1, turned))
    down = gl.arange(0, _TILE, layout=gl.SliceLayout(0, turned))
    corner = codes + tile_r.to(gl.int64) * _TILE * width + tile_c * _TILE
    by_rows = corner + (r * width)[:, None] + c[None, :]
    corner_t = codes_t + tile_c.to(gl.int64) * _TILE * width_t + tile_r * _TILE
    by_columns = corner_t + (down * width_t)[None, :] + across[:, None]
    # A tile beyond the matrix is padding of only one direction.
    has_rows, has_columns = tile_r * _TILE < R, tile_c * _TILE < C
    # Magnitudes have the order of their bits, NaN at the top.
    bits = values.to(gl.int32, bitcast=True) & 0x7FFFFFFF
    if square:
        step, factor = _scale(gl.max(gl.max(bits, 1), 0), rule)
        tile = _codes(values, factor, rule)
        if rows and has_rows:
            gl.store(by_rows, tile)
            gl.store(scale + tile_r * scale_stride + tile_c, step)
        if columns and has_columns:
            gl.store(by_columns, gl.convert_layout(tile, turned))
            gl.store(scale_t + tile_c * scale_t_stride + tile_r, step)
    else:
        if rows:
            step, factor = _scale(gl.max(bits, 1), rule)
            gl.store(by_rows, _codes(values, factor[:, None], rule))
            gl.store(scale + tile_c.to(gl.int64) * scale_stride + tile_r * _TILE + r, step)
        if columns:
            step_t, factor_t = _scale(gl.max(bits, 0), rule)
            if has_columns:
                gl.store(by_columns, gl.convert_layout(_codes(values, factor_t[None, :], rule), turned))
                gl.store(scale_t + tile_r.to(gl.int64) * scale_t_stride + tile_c * _TILE + c, step_t)


@gluon.jit
def sm90_fp8_block_operands_kernel(
    x, up, rstd, weight, codes, scale, codes_t, scale_t, stride, up_stride, R, C, tiles_across, width, width_t,
    scale_stride, scale_t_stride, prologue: gl.constexpr, normalized: gl.constexpr, dtype: gl.constexpr,
    rule: gl.constexpr, square: gl.constexpr, rows: gl.constexpr, columns: gl.constexpr, layout: gl.constexpr,
    turned: gl.constexpr,
):  # fmt: skip
    """One tile in each program; neighbours lie side by side in a band of rows."""
    tile_r, tile_c = gl.program_id(0) // tiles_across, gl.program_id(0) % tiles_across
    read = _load_tile(x, stride, tile_r, tile_c, R, C, layout)
    values = read.to(gl.float32)
    if prologue == "swiglu":
        factor = _load_tile(up, up_stride, tile_r, tile_c, R, C, layout).to(gl.float32)
        values = rounded(rounded(values * sigmoid(values), read.dtype) * factor, read.dtype)
    elif prologue == "norm":
        r = tile_r * _TILE + gl.arange(0, _TILE, layout=gl.SliceLayout(1, layout))
        c = tile_c * _TILE + gl.arange(0, _TILE, layout=gl.SliceLayout(0, layout))
        of_rows = gl.load(rstd + r, mask=r < R, other=0.0)
        of_columns = gl.load(weight + c, mask=c < C, other=0.0).to(gl.float32)
        values = rounded(rounded(values * of_rows[:, None], normalized) * of_columns[None, :], dtype)
    store_tile(
        values, codes, scale, codes_t, scale_t, tile_r, tile_c, R, C, width, width_t, scale_stride, scale_t_stride,
        rule, square, rows, columns, layout, turned,
    )  # fmt: skip


class RMSNorm(NamedTuple):
    """The factors of RMSNorm(x) = x · rstd · weight, and where its values are rounded."""

    rstd: Tensor  # float32 `[R]`, 1 / √(mean of squares + eps) of each row
    weight: Tensor  # `[C]`, any float dtype
    # Dtype that x · rstd is rounded to, before it is multiplied by the weight; float32 rounds nothing.
    normalized: torch.dtype
    dtype: torch.dtype  # the dtype of the product, whose values are quantized


class Tiling(NamedTuple):
    """How a tile lies in the threads of a program."""

    rows: int  # of a thread's piece, which has 8 columns
    lanes_down: int  # of a warp's 32
    warps_down: int
    warps_across: int
    registers: int | None = None  # at most, so that two programs run on an SM


_TILINGS = {
    "none": Tiling(8, 8, 2, 4),
    "norm": Tiling(8, 8, 2, 4),
    "square": Tiling(8, 4, 4, 2),
    "swiglu": Tiling(4, 8, 4, 4, 64),
}
"""By time on an H100."""


@lru_cache
def tile_options(tiling: Tiling) -> dict[str, Any]:
    """Returns the layout of a tile, and the same with the elements of each thread in the order of columns."""
    across, down = _bits([0, 1], 8), _bits([1, 0], tiling.rows)
    lanes_across = 32 // tiling.lanes_down
    rows, columns = tiling.rows * tiling.lanes_down, 8 * lanes_across
    lanes = _bits([0, 8], lanes_across) + _bits([tiling.rows, 0], tiling.lanes_down)
    warps = _bits([rows, 0], tiling.warps_down) + _bits([0, columns], tiling.warps_across)
    rows, columns = rows * tiling.warps_down, columns * tiling.warps_across
    # Where the warps do not cover the block at once, each thread has further pieces.
    more = _bits([0, columns], BLOCK // columns) + _bits([rows, 0], BLOCK // rows)
    layout, turned = (
        gl.DistributedLinearLayout(piece + more, lanes, warps, [], [BLOCK, BLOCK])
        for piece in (across + down, down + across)
    )
    warps_of_all = tiling.warps_down * tiling.warps_across
    limit = {} if tiling.registers is None else {"maxnreg": tiling.registers}
    return {"layout": layout, "turned": turned, "num_warps": warps_of_all, **limit}


def _bits(step: list[int], count: int) -> list[list[int]]:
    """Returns the offsets of `count` neighbours at `step`, one for each bit of their number."""
    return [[size << bit for size in step] for bit in range(count.bit_length() - 1)]


_DTYPES = {torch.float32: gl.float32, torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def sm90_fp8_block_operands(
    x: Tensor, rule: str, *, square: bool = False, rows: bool = True, columns: bool = True, up: Tensor | None = None,
    norm: RMSNorm | None = None, out: Operands | None = None,
) -> Operands:  # fmt: skip
    """Returns `x` `[R, C]` in FP8 blocks for sums over its columns (`rows`), its rows (`columns`), or both."""
    # `square` takes one scale for 128×128 instead of 1×128. With `up` the matrix is silu(x) · up, with `norm`
    # RMSNorm(x). `out` has the tensors to write; None allocates them.
    x = x if x.stride(-1) == 1 else x.contiguous()
    factor = x if up is None else up if up.stride(-1) == 1 else up.contiguous()
    out = allocate(x, square, rows, columns) if out is None else out
    # Tiles beyond the matrix fill the padding of an axis that is summed over.
    down = out.codes_t.shape[1] if square and columns else -(-x.shape[0] // BLOCK) * BLOCK
    across = out.codes.shape[1] if rows else -(-x.shape[1] // BLOCK) * BLOCK
    if x.numel():
        prologue = "norm" if norm is not None else "none" if up is None else "swiglu"
        # Without a norm the kernel reads neither factor: any pointer will do.
        factors = (x, x) if norm is None else (norm.rstd.contiguous(), norm.weight.contiguous())
        normalized, dtype = (x.dtype, x.dtype) if norm is None else (norm.normalized, norm.dtype)
        tiling = _TILINGS["square" if square else prologue]
        sm90_fp8_block_operands_kernel[(down // BLOCK * (across // BLOCK),)](
            x, factor, *factors, *out, x.stride(0), factor.stride(0), *x.shape, across // BLOCK, out.codes.stride(0),
            out.codes_t.stride(0), out.scale.stride(0), out.scale_t.stride(0),
            prologue=prologue, normalized=_DTYPES[normalized], dtype=_DTYPES[dtype], rule=rule, square=square,
            rows=rows, columns=columns, **tile_options(tiling), enable_fp_fusion=True,
        )  # fmt: skip
    return out


@gluon.jit
def _fetch(dh, gate, up, tiles, full, slot, tile, count, across):
    """Starts the copy of one tile of each input into a slot; of none beyond the last."""
    corner = [tile // across * _TILE, tile % across * _TILE]
    inside = tile < count
    arrived = full.index(slot)
    mbarrier.expect(arrived, 3 * _TILE * _TILE * 2, pred=inside)
    async_load(dh, corner, arrived, tiles.index(3 * slot), pred=inside)
    async_load(gate, corner, arrived, tiles.index(3 * slot + 1), pred=inside)
    async_load(up, corner, arrived, tiles.index(3 * slot + 2), pred=inside)


@gluon.jit
def sm90_fp8_block_swiglu_gradients_kernel(
    dh_map, gate_map, up_map, g_codes, g_scale, g_codes_t, g_scale_t, u_codes, u_scale, u_codes_t, u_scale_t, h_codes_t,
    h_scale_t, R, C, count, across, width, width_t, scale_stride, scale_t_stride, rule: gl.constexpr,
    columns: gl.constexpr, product: gl.constexpr, layout: gl.constexpr, turned: gl.constexpr,
):  # fmt: skip
    """Program p takes tiles p, p + programs, … of `count`, of which `across` lie side by side."""
    dtype: gl.constexpr = dh_map.dtype
    programs = gl.num_programs(0)
    tiles = gl.allocate_shared_memory(dtype, [6, _TILE, _TILE], dh_map.layout)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full.index(0), count=1)
    mbarrier.init(full.index(1), count=1)
    barrier()
    _fetch(dh_map, gate_map, up_map, tiles, full, 0, gl.program_id(0), count, across)
    slot = count * 0
    phase = count * 0
    for tile in range(gl.program_id(0), count, programs):
        tile_r, tile_c = tile // across, tile % across
        # All threads have read the tiles before these: the next ones take their place.
        barrier()
        _fetch(dh_map, gate_map, up_map, tiles, full, 1 - slot, tile + programs, count, across)
        mbarrier.wait(full.index(slot), phase)
        of_dh, of_gate, of_up = tiles.index(3 * slot), tiles.index(3 * slot + 1), tiles.index(3 * slot + 2)
        g = of_gate.load(layout).to(gl.float32)
        silu = (g * sigmoid(g)).to(dtype)
        if product:
            h = rounded(silu.to(gl.float32) * of_up.load(layout).to(gl.float32), dtype)
            store_tile(
                h, h_codes_t, h_scale_t, h_codes_t, h_scale_t, tile_r, tile_c, R, C, width, width_t, scale_stride,
                scale_t_stride, rule, False, False, True, layout, turned,
            )  # fmt: skip
        d_up = rounded(of_dh.load(layout).to(gl.float32) * silu.to(gl.float32), dtype)
        store_tile(
            d_up, u_codes, u_scale, u_codes_t, u_scale_t, tile_r, tile_c, R, C, width, width_t, scale_stride,
            scale_t_stride, rule, False, True, columns, layout, turned,
        )  # fmt: skip
        # Read again, instead of held in registers meanwhile.
        dh = of_dh.load(layout).to(gl.float32)
        g = of_gate.load(layout).to(gl.float32)
        up = of_up.load(layout).to(gl.float32)
        of_silu = rounded(dh * up, dtype)
        s = sigmoid(g)
        d_gate = rounded(of_silu * (s * (1.0 + g * (1.0 - s))), dtype)
        store_tile(
            d_gate, g_codes, g_scale, g_codes_t, g_scale_t, tile_r, tile_c, R, C, width, width_t, scale_stride,
            scale_t_stride, rule, False, True, columns, layout, turned,
        )  # fmt: skip
        phase ^= slot
        slot = 1 - slot


_TILING = Tiling(8, 8, 2, 4)  # by time on an H100


def takes(x: Tensor) -> bool:
    """Returns whether the kernel takes matrices like `x`: of 16 bits, so wide that two side by side need no padding."""
    return x.dtype in (torch.bfloat16, torch.float16) and x.shape[1] % (2 * BLOCK) == 0


def sm90_fp8_block_swiglu_gradients(
    dh: Tensor, gate: Tensor, up: Tensor, rule: str, *, columns: bool = True, product: bool = False
) -> SwiGLUGradients:
    """Returns codes, scale of `[d gate, d up]`, and codes_t, scale_t of d gate, of d up and of silu(gate) · up."""
    # dh is the gradient of silu(gate) · up, `[R, C]` as `takes` says. Without `columns`, the gradients' codes_t are
    # empty; without `product`, those of the product.
    (R, C), number = dh.shape, gl.bfloat16 if dh.dtype is torch.bfloat16 else gl.float16
    # Side by side, so that one product sums over the columns of both.
    codes, scale = allocate(dh, False, True, False, width=2 * C)[:2]
    of_gate, of_up = (allocate(dh, False, False, columns) for _ in range(2))
    of_product = allocate(dh, False, False, product)
    if dh.numel():
        shared = gl.NVMMASharedLayout.get_default_for([BLOCK, BLOCK], number)
        maps = [TensorDescriptor(x.contiguous(), [R, C], [C, 1], [BLOCK, BLOCK], shared) for x in (dh, gate, up)]
        across = C // BLOCK
        count = triton.cdiv(R, BLOCK) * across
        sms = current(dh.device.index).sms if dh.is_cuda else count
        transposed = of_gate if columns else of_product
        sm90_fp8_block_swiglu_gradients_kernel[(min(count, sms),)](
            *maps, codes, scale, *of_gate[2:], codes[:, C:], scale[across:], *of_up[2:], *of_product[2:], R, C, count,
            across, codes.stride(0), transposed.codes_t.stride(0), scale.stride(0), transposed.scale_t.stride(0),
            rule=rule, columns=columns, product=product, **tile_options(_TILING), enable_fp_fusion=True,
        )  # fmt: skip
    return codes, scale, *of_gate[2:], *of_up[2:], *of_product[2:]
