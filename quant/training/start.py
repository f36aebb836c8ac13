"""A quantized model is trained from weights that round to its codes: training starts at exactly its loss.

A code stands for an interval of weights, its cell. The values in the middle, which the codes decode to, are one start.
Where the original weight is at hand and rounding was all that was done to it, the point of the cell that is nearest to
the original is another, which keeps what rounding to nearest would have lost anyway:

    gptq chose 3.0 for a weight of 2.4 (in steps of its block)     cell [2.5, 3.5]    start 2.55
    gptq chose 3.0 for a weight of 2.9                              cell [2.5, 3.5]    start 2.9

Starts keep a twentieth of half a cell from its ends, so that rounding errors cannot carry them over.
"""

from __future__ import annotations

import torch

from quant.formats.rounding import round_to
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.linear.fake_rounding import weight_steps
from quant.training.modules import decoded_scale

_WITHIN = 0.95  # of half a cell


def starting_weight(packed: BlockScaledTensor, original: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """The weight to train: it rounds to the codes of `packed` under its scales.

    Args:
        packed: the quantized weight.
        original: what was rounded, of the same shape; None starts in the middle of each cell.
        dtype: of the result.
    """
    middle = packed.dequantize(torch.float32)
    if original is None:
        return middle.to(dtype)
    scale, element = decoded_scale(packed), packed.format.element
    second = None if packed.global_scale is None else packed.global_scale.float()
    step = weight_steps(scale, second, packed.format, torch.Size(packed.shape))
    codes, grid = packed.element_values(), element.grid().to(step.device)
    if -element.min > element.max:  # INT4, whose lowest value has no positive counterpart
        grid = torch.cat([grid, grid.new_tensor([-element.min])])
    place = torch.searchsorted(grid, codes.abs().contiguous())
    gaps = (grid[1:] - grid[:-1]) * (_WITHIN / 2)
    # From zero a cell reaches as far down as up, and from the last value nowhere: what is beyond has no gradient.
    below = torch.cat([gaps[:1], gaps])[place]
    above = torch.cat([gaps, gaps.new_zeros(1)])[place] * (codes < element.max)
    sign = torch.where(codes < 0, -1.0, 1.0)
    steps = (original.float() / step * sign).clamp(codes.abs() - below, codes.abs() + above) * sign
    found = (steps * step).to(dtype)
    same = round_to(found.float() / step, element) == codes
    return torch.where(same, found, middle.to(dtype))
