"""Blocks of a matrix in E4M3 under power-of-two scales, as a custom op that torch.compile leaves whole.

    quant::e4m3_blocks(x, height, width, dtype) -> element · scale of x [R, C] in blocks [height, width], scales

Values take 4 significant bits, so BF16 holds them exactly. On a GPU one kernel computes them
(`kernels/portable/training/e4m3_blocks.py`), elsewhere PyTorch.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from quant.formats.number import E4M3
from quant.formats.rounding import decode_power_of_two, encode_power_of_two, round_to
from quant.formats.scaling import divided
from quant.kernels.base.hardware import has_triton
from quant.kernels.linear.ops import register


def _reference(x: torch.Tensor, height: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = x.shape
    filled = pad(x.float(), (0, -columns % width, 0, -rows % height))
    blocks = filled.unflatten(1, (-1, width)).unflatten(0, (-1, height))
    amax = blocks.abs().amax(dim=(1, 3), keepdim=True)
    # Rounded up, so that no element saturates; the least is 2^-127.
    scale = decode_power_of_two(encode_power_of_two(divided(amax, E4M3.max)))
    values = round_to(blocks / scale, E4M3) * scale
    values = values.flatten(2).flatten(0, 1)[:rows, :columns].to(dtype, memory_format=torch.contiguous_format)
    return values, scale[:, 0, :, 0].masked_fill(~amax.isfinite()[:, 0, :, 0], torch.nan)


def _on_gpu(x: torch.Tensor, height: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    if not has_triton():
        return _reference(x, height, width, dtype)
    from quant.kernels.portable.training.e4m3_blocks import round_e4m3_blocks

    with torch.cuda.device_of(x):
        return round_e4m3_blocks(x, height, width, dtype, has_e4m3(x))


def has_e4m3(x: torch.Tensor) -> bool:
    """Returns whether Triton casts to E4M3 on the GPU of `x`: Ada and newer."""
    return torch.cuda.get_device_capability(x.device) >= (8, 9)


def _fake(x: torch.Tensor, height: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    scales = x.new_empty(-(-x.shape[0] // height), -(-x.shape[1] // width), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=dtype), scales


register(
    "quant::e4m3_blocks",
    "(Tensor x, int height, int width, ScalarType dtype) -> (Tensor, Tensor)",
    _fake,
    default=_reference,
    cuda=_on_gpu,
)
