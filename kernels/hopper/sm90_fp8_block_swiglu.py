"""This kernel makes FP8 operands of the two gradients of silu(gate) · up, which are never written in 16 bit.

    gate, up, dh [R, C] ─▶ tiles [128, 128] ─┬─▶ h      = silu(gate) · up         ─▶ codes_t of h
                                             ├─▶ d up   = dh · silu(gate)         ─▶ operands of d up
                                             └─▶ d gate = dh · up · silu'(gate)   ─▶ operands of d gate

Operands are as in `sm90_fp8_block_operands.py`; codes of the two gradients lie side by side, so that one product
sums over the columns of both. The weight gradient of the next layer multiplies by codes_t of h: written here, where
gate and up are read anyway, they need not be kept from the forward pass on. Three tiles in registers and all results
would be too many for a thread. So TMA copies the three into shared memory, which all computations read in turn, and a
program stays on its SM: its next tiles arrive in a second slot while it works on these. Values are rounded where
PyTorch's separate operations round them.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quant.kernels.base.hardware import current
from quant.kernels.base.sm90_gluon import async_load, barrier
from quant.kernels.training.sm90_fp8_block import Tiling, rounded, sigmoid, store_tile, tile_options
from quant.kernels.training.fp8_block_layout import BLOCK, SwiGLUGradients, allocate

_TILE = gl.constexpr(BLOCK)


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


def takes(x: torch.Tensor) -> bool:
    """Returns whether the kernel takes matrices like `x`: of 16 bits, so wide that two side by side need no padding."""
    return x.dtype in (torch.bfloat16, torch.float16) and x.shape[1] % (2 * BLOCK) == 0


def sm90_fp8_block_swiglu_gradients(
    dh: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, rule: str, *, columns: bool = True, product: bool = False
) -> SwiGLUGradients:
    """Returns codes and scale of `[d gate, d up]`, and codes_t and scale_t of d gate, of d up and of silu(gate) · up.

    Args:
        dh: gradient of silu(gate) · up, `[R, C]`, as `takes` says.
        gate: `[R, C]`, of the same dtype.
        up: `[R, C]`, of the same dtype.
        rule: the rule of `RULES`.
        columns: whether to write `codes_t` and `scale_t` of the gradients; else they are empty.
        product: whether to write `codes_t` and `scale_t` of silu(gate) · up.
    """
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
            rule=rule, columns=columns, product=product, **tile_options(_TILING),
        )  # fmt: skip
    return codes, scale, *of_gate[2:], *of_up[2:], *of_product[2:]
