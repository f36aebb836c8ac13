"""NVFP4 rounding in one pass over memory, where PyTorch takes a dozen: for values that stay float.

`fake_quantize_nvfp4` is `formats.fake_quantize` for inputs on a GPU. `learned_values` and its gradient are the weight
of `autoround`, whose straight-through gradient needs no graph. A program takes a tile of blocks of sixteen values.
"""

import torch
import triton
import triton.language as tl

from quant.formats.scaling import global_scale_of
from quant.kernels.portable.gptq import WIDTH, nearest_e2m1

_BLOCKS = 64


@triton.jit
def _nearest_e4m3(x):
    """The value of E4M3 nearest to 0 < x, to even, saturating at 448 and at the least above zero."""
    x = tl.minimum(tl.maximum(x, 0.001953125), 448.0)
    power = tl.maximum((x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True), 0.015625)
    magic = power * 1572864.0  # 1.5 · 2^20 powers
    return (x + magic) - magic


@triton.jit
def _fake_quantize(x, out, global_scale, blocks, WIDTH: tl.constexpr, BLOCKS: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    place = block[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    valid = (block < blocks)[:, None]
    value = tl.load(x + place, mask=valid, other=0.0).to(tl.float32)
    second = tl.load(global_scale)
    step = _nearest_e4m3(tl.div_rn(tl.max(tl.abs(value), axis=1), 6.0 * second)) * second
    step = tl.broadcast_to(step[:, None], [BLOCKS, WIDTH])
    rounded = nearest_e2m1(tl.div_rn(value, step)) * step
    tl.store(out + place, rounded.to(out.dtype.element_ty), mask=valid)


@triton.jit
def _learned(
    latent, first_step, step, gradient, values, scale_gradient, blocks,
    backward: tl.constexpr, WIDTH: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    place = block[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = block < blocks
    valid = inside[:, None]
    first = tl.broadcast_to(tl.load(first_step + block, mask=inside, other=1.0)[:, None], [BLOCKS, WIDTH])
    now = tl.broadcast_to(tl.load(step + block, mask=inside, other=1.0)[:, None], [BLOCKS, WIDTH])
    wanted = tl.div_rn(tl.load(latent + place, mask=valid, other=0.0) * first, now)
    nearest = nearest_e2m1(wanted)
    if backward:
        error = tl.load(gradient + place, mask=valid, other=0.0).to(tl.float32)
        free = tl.abs(wanted) <= 6.0
        tl.store(values + place, tl.where(free, error * first, 0.0), mask=valid)
        total = tl.sum(error * (nearest - tl.where(free, wanted, 0.0)), axis=1)
        tl.store(scale_gradient + block, total, mask=inside)
    else:
        tl.store(values + place, nearest * now, mask=valid)


def fake_quantize_nvfp4(x: torch.Tensor, global_scale: torch.Tensor | None) -> torch.Tensor:
    """`fake_quantize(x, nvfp4, global_scale=global_scale)`, the same to the bit but for the sign of zeros.

    Args:
        x: `[..., in]` on a GPU, `in` a multiple of sixteen; any float dtype up to float32.
        global_scale: float32 scalar; None measures it.
    """
    from quant.formats.format import FORMATS

    x = x.contiguous()
    if global_scale is None:
        global_scale = global_scale_of(x.abs().amax(), FORMATS["nvfp4"])
    out = torch.empty_like(x)
    blocks = x.numel() // WIDTH
    _fake_quantize[(triton.cdiv(blocks, _BLOCKS),)](x, out, global_scale, blocks, WIDTH=WIDTH, BLOCKS=_BLOCKS)
    return out


def learned_values(latent: torch.Tensor, first_step: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """step · nearest(latent · first_step / step), float32 `[out, in]`.

    Args:
        latent: `[out, in]`, float32, contiguous.
        first_step, step: `[out, in / 16]`, float32, contiguous.
    """
    values = torch.empty_like(latent)
    _launch(latent, first_step, step, latent, values, values, backward=False)
    return values


def learned_gradient(
    latent: torch.Tensor, first_step: torch.Tensor, step: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `gradient` of the values means for `latent`, `[out, in]`, and for `step`, `[out, in / 16]`."""
    found, of_step = torch.empty_like(latent), torch.empty_like(step)
    _launch(latent, first_step, step, gradient.contiguous(), found, of_step, backward=True)
    return found, of_step


def _launch(
    latent: torch.Tensor,
    first_step: torch.Tensor,
    step: torch.Tensor,
    gradient: torch.Tensor,
    values: torch.Tensor,
    scale_gradient: torch.Tensor,
    *,
    backward: bool,
) -> None:
    blocks = latent.numel() // WIDTH
    _learned[(triton.cdiv(blocks, _BLOCKS),)](
        latent, first_step, step, gradient, values, scale_gradient, blocks,
        backward=backward, WIDTH=WIDTH, BLOCKS=_BLOCKS,
    )  # fmt: skip
