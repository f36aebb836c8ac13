"""A low-rank branch in 16 bit becomes more columns of a product in FP8, where the library multiplies rows by rows.

    y = (x8 · sx) (w8 · sw)ᵀ + h upᵀ         h = x · downᵀ, as in 16 bit

The second matmul writes as much as the first, and y is read and written again to add the two up: 11 and 18 µs beside a
product of 54 on an H200 (4,096 tokens, 3,072 inputs and outputs). But two numbers of E4M3 have eight digits together,
and BF16 has no more:

    h / sx = g₁ + g₂        up / sw = u₁ + u₂        y = [x8 | g₁ | g₁ | g₂ | g₂] [w8 | u₁ | u₂ | u₁ | u₂]ᵀ · sx sw

With these 128 columns for a rank of 32 the product takes 56 µs, and y is rounded once, not thrice. Both sides keep
their scales, so that `g` and `u` must not exceed the largest number: `up` is multiplied by a power of two for each
direction, which `h` is divided by, and where h then is above the amax of x, the scale of its row is multiplied by the
power of two that lets it fit. Powers of two leave the digits of x8 as they are.

The left side is made by a kernel of its own (`kernels/rounding/portable_branch.py`), which reads x and writes it wider.
So only layers that write at least as much as they read are taken.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quant.formats.format import E4M3, Format
from quant.formats.scaling import scale_of
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.base.custom_ops import register
from quant.kernels.base.hardware import has_triton
from quant.kernels.linear.rounded_products import takes_fp8

_E4M3 = torch.float8_e4m3fn
_RANKS = (16, 32, 64, 128)
_MAX_COLUMNS = 32768  # of a row that a program holds


def takes_branch(weight: BlockScaledTensor, activation: Format | None, parts: Any) -> bool:
    """Returns whether `branch_linear` computes a layer with such `RunTimeParts` for inputs in BF16."""
    per_row = activation is not None and activation.per_row and weight.format.per_row and parts.channels is None
    fits = parts.rank in _RANKS and weight.shape[1] <= min(weight.shape[0], _MAX_COLUMNS)
    return fits and per_row and takes_fp8(weight.format, activation, weight.shape, torch.bfloat16)


def widened(weight: BlockScaledTensor, up: Tensor) -> tuple[BlockScaledTensor, Tensor]:
    """Returns the right side, its codes `[out, in + 4 rank]`, and what h is multiplied by, float32 `[rank]`."""
    steps = up.float() / weight.scale.reshape(-1, 1)
    power = torch.exp2(torch.floor(torch.log2(E4M3.max / steps.abs().amax(0).clamp(min=1e-30))))
    first, rest = _halves(steps * power)
    return replace(weight, codes=_beside(weight.codes, first, rest, first, rest)), 1 / power


def _halves(steps: Tensor) -> tuple[Tensor, Tensor]:
    steps = steps.clamp(-E4M3.max, E4M3.max)
    first = steps.to(_E4M3)
    return first, (steps - first.float()).to(_E4M3)


def _beside(*parts: Tensor) -> Tensor:
    # Autocast refuses FP8.
    return torch.cat([part.view(torch.uint8) for part in parts], 1).view(_E4M3)


def _reference(x: Tensor, h: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
    g, scale = h.float() * unit, scale_of(x.abs().amax(-1, keepdim=True), E4M3.max)
    over = (g.abs().amax(-1, keepdim=True) / (scale * E4M3.max)).view(torch.int32)
    scale = (scale * ((over + 0x7FFFFF) & 0x7F800000).view(torch.float32).clamp(min=1)).clamp(min=2**-89)
    codes = (x.float() / scale).clamp(-E4M3.max, E4M3.max).to(_E4M3)
    first, rest = _halves(g / scale)
    return _beside(codes, first, first, rest, rest), scale


def branch_linear(x: Tensor, weight: BlockScaledTensor, bias: Tensor | None, down: Tensor, unit: Tensor) -> Tensor:
    """Maps BF16 `[..., in]` to `[..., out]`; the codes of `weight` are what `widened` returned."""
    rows = x.reshape(-1, x.shape[-1])
    codes, scale = torch.ops.quant.branch_columns(rows, torch.nn.functional.linear(rows, down.to(x.dtype)), unit)
    sw = weight.scale.reshape(1, -1)
    bias = None if bias is None else bias.to(x.dtype)
    y = torch._scaled_mm(codes, weight.codes.t(), scale, sw, bias, out_dtype=x.dtype, use_fast_accum=True)
    return y.view(*x.shape[:-1], y.shape[-1])


def _on_gpu(x: Tensor, h: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
    from quant.kernels.rounding.portable_branch import branch_rows_to_codes

    return branch_rows_to_codes(x.contiguous(), h.contiguous(), unit)


register(
    "quant::branch_columns",
    "(Tensor x, Tensor h, Tensor unit) -> (Tensor, Tensor)",
    lambda x, h, unit: (
        x.new_empty(x.shape[0], x.shape[1] + 4 * h.shape[1], dtype=_E4M3),
        x.new_empty(x.shape[0], 1, dtype=torch.float32),
    ),
    default=_reference,
    cuda=_on_gpu,
    where=lambda x: has_triton(),
)
