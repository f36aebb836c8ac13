"""This kernel makes FP8 operands of the two gradients of silu(gate) · up, which are never written in 16 bit.

    gate, up, dh [R, C] ─▶ tiles [128, 128] ─┬─▶ d up   = dh · silu(gate)         ─▶ operands of d up
                                             └─▶ d gate = dh · up · silu'(gate)   ─▶ operands of d gate

The operands are those of `sm90_fp8_block_operands.py`. Three tiles in registers and both results would be too many for
a thread. So TMA copies the three into shared memory, which both computations read in turn, and a program stays on its
SM: the copy of its next tiles starts as soon as it has read these, and goes on while it computes and writes d gate.
Values are rounded where PyTorch's separate operations round them.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quant.kernels.hardware import current
from quant.kernels.hopper.sm90_fp8_block_operands import Tiling, rounded, sigmoid, store_tile, tile_options
from quant.kernels.hopper.sm90_gemm_pipeline import barrier
from quant.kernels.portable.training.fp8_block_layout import BLOCK, Operands, allocate

_TILE = gl.constexpr(BLOCK)


@gluon.jit
def _fetch(dh, gate, up, tiles, full, tile, count, across):
    """Starts the copy of one tile of each input; of none beyond the last."""
    corner = [tile // across * _TILE, tile % across * _TILE]
    inside = tile < count
    mbarrier.expect(full, 3 * _TILE * _TILE * 2, pred=inside)
    tma.async_copy_global_to_shared(dh, corner, full, tiles.index(0), pred=inside)
    tma.async_copy_global_to_shared(gate, corner, full, tiles.index(1), pred=inside)
    tma.async_copy_global_to_shared(up, corner, full, tiles.index(2), pred=inside)


@gluon.jit
def sm90_fp8_block_swiglu_gradients_kernel(
    dh_map, gate_map, up_map, g_codes, g_scale, g_codes_t, g_scale_t, u_codes, u_scale, u_codes_t, u_scale_t, R, C,
    count, across, width, width_t, scale_stride, scale_t_stride, rule: gl.constexpr, layout: gl.constexpr,
    turned: gl.constexpr,
):  # fmt: skip
    """Program p takes tiles p, p + programs, … of `count`, of which `across` lie side by side."""
    dtype: gl.constexpr = dh_map.dtype
    programs = gl.num_programs(0)
    tiles = gl.allocate_shared_memory(dtype, [3, _TILE, _TILE], dh_map.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    barrier()
    _fetch(dh_map, gate_map, up_map, tiles, full, gl.program_id(0), count, across)
    phase = count * 0
    for tile in range(gl.program_id(0), count, programs):
        tile_r, tile_c = tile // across, tile % across
        mbarrier.wait(full, phase)
        phase ^= 1
        dh = tiles.index(0).load(layout).to(gl.float32)
        g = tiles.index(1).load(layout).to(gl.float32)
        of_up = rounded(dh * rounded(g * sigmoid(g), dtype), dtype)
        store_tile(
            of_up, u_codes, u_scale, u_codes_t, u_scale_t, tile_r, tile_c, R, C, width, width_t, scale_stride,
            scale_t_stride, rule, False, True, True, layout, turned,
        )  # fmt: skip
        # Read again, instead of held in registers meanwhile.
        dh = tiles.index(0).load(layout).to(gl.float32)
        g = tiles.index(1).load(layout).to(gl.float32)
        up = tiles.index(2).load(layout).to(gl.float32)
        # All threads have read the tiles: the next ones take their place.
        barrier()
        _fetch(dh_map, gate_map, up_map, tiles, full, tile + programs, count, across)
        of_silu = rounded(dh * up, dtype)
        s = sigmoid(g)
        of_gate = rounded(of_silu * (s * (1.0 + g * (1.0 - s))), dtype)
        store_tile(
            of_gate, g_codes, g_scale, g_codes_t, g_scale_t, tile_r, tile_c, R, C, width, width_t, scale_stride,
            scale_t_stride, rule, False, True, True, layout, turned,
        )  # fmt: skip


_TILING = Tiling(8, 4, 4, 2)  # by time on an H100


def takes(x: torch.Tensor) -> bool:
    """Returns whether the kernel takes matrices like `x`: of 16 bits, with rows that TMA can read."""
    return x.dtype in (torch.bfloat16, torch.float16) and x.shape[1] % 8 == 0


def sm90_fp8_block_swiglu_gradients(
    dh: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, rule: str
) -> tuple[Operands, Operands]:
    """Returns the operands of d gate and d up.

    Args:
        dh: gradient of silu(gate) · up, `[R, C]`, as `takes` says.
        gate: `[R, C]`, of the same dtype.
        up: `[R, C]`, of the same dtype.
        rule: the rule of `RULES`.
    """
    (R, C), number = dh.shape, gl.bfloat16 if dh.dtype is torch.bfloat16 else gl.float16
    of_gate, of_up = (allocate(dh, square=False, rows=True, columns=True) for _ in range(2))
    if dh.numel():
        shared = gl.NVMMASharedLayout.get_default_for([BLOCK, BLOCK], number)
        maps = [TensorDescriptor(x.contiguous(), [R, C], [C, 1], [BLOCK, BLOCK], shared) for x in (dh, gate, up)]
        # Tiles beyond the matrix are padding of the axis that is summed over.
        across = of_gate.codes.shape[1] // BLOCK
        count = triton.cdiv(R, BLOCK) * across
        sms = current(dh.device.index).sms if dh.is_cuda else count
        sm90_fp8_block_swiglu_gradients_kernel[(min(count, sms),)](
            *maps, *of_gate, *of_up, R, C, count, across, of_gate.codes.stride(0), of_gate.codes_t.stride(0),
            of_gate.scale.stride(0), of_gate.scale_t.stride(0), rule=rule, **tile_options(_TILING),
        )  # fmt: skip
    return of_gate, of_up
