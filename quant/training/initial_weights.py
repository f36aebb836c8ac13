"""A quantized model is trained from weights that round to its codes: training starts at exactly its loss.

A code stands for an interval of weights, its cell. The values in the middle, which the codes decode to, are one start.
Where the weight that was rounded is at hand, the point of the cell that is nearest to it is another, which keeps what
rounding to nearest would have lost anyway:

    gptq chose 3.0 for a weight of 2.4 (in steps of its block)     cell [2.5, 3.5]    start 2.55
    gptq chose 3.0 for a weight of 2.9                              cell [2.5, 3.5]    start 2.9

Of a checkpoint the original model tells what was rounded: its weights, rotated, with rows and columns scaled as solvers
fold scales into them, and less the branch. Those scales are in no file, and least squares finds them.

Starts keep a twentieth of half a cell from its ends, so that rounding errors cannot carry them over.
"""

from __future__ import annotations

import torch

from quant.calibration.solvers.lowrank import residual_weight
from quant.calibration.solvers.rotation import rotate_weight
from quant.formats.rounding import round_to
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.linear.modules import RunTimeParts
from quant.kernels.training.weight_rounding import weight_steps
from quant.training.modules import decoded_scale

_WITHIN = 0.95  # of half a cell
_UNRELATED = 0.35  # relative distance of weights that are not of one another; 4-bit rounding makes 0.08 to 0.2
_TURNS = 4


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
    # A code beyond the grid, which other toolkits write in INT8, has the cell of the last; its value is not changed.
    place = torch.searchsorted(grid, codes.abs().contiguous()).clamp(max=len(grid) - 1)
    gaps = (grid[1:] - grid[:-1]) * (_WITHIN / 2)
    # From zero a cell reaches as far down as up, and from the last value nowhere: what is beyond has no gradient.
    below = torch.cat([gaps[:1], gaps])[place]
    above = torch.cat([gaps, gaps.new_zeros(1)])[place] * (codes < element.max)
    sign = torch.where(codes < 0, -1.0, 1.0)
    steps = (original.float() / step * sign).clamp(codes.abs() - below, codes.abs() + above) * sign
    found = (steps * step).to(dtype)
    same = round_to(found.float() / step, element) == codes
    return torch.where(same, found, middle.to(dtype))


def before_rounding(packed: BlockScaledTensor, parts: RunTimeParts, original: torch.Tensor) -> torch.Tensor | None:
    """What `packed` was rounded from, as far as the original model tells.

    Args:
        packed: the quantized weight.
        parts: of its layer.
        original: the weight in the original model, of the same shape.

    Returns:
        float32; None where it came from another weight, as it does of models whose rotations were merged.
    """
    stored = packed.dequantize()
    wanted = stored if parts.lowrank is None else residual_weight(stored, (parts.lowrank[0], -parts.lowrank[1]))
    turned = rotate_weight(original.to(stored.device, torch.float32), parts.hadamard)
    scaled = _scaled(turned, wanted)
    if scaled is None:
        return None
    return scaled if parts.lowrank is None else residual_weight(scaled, parts.lowrank)


def _scaled(weight: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor | None:
    """`weight` with rows and columns scaled to be nearest to `wanted`; itself where that gains no more than chance."""

    def factor(given: torch.Tensor, dim: int) -> torch.Tensor:
        tiny = torch.finfo(torch.float32).tiny
        return (given * wanted).sum(dim, keepdim=True) / given.square().sum(dim, keepdim=True).clamp(min=tiny)

    rows, columns = torch.ones_like(weight[..., :1]), torch.ones_like(weight[..., :1, :])
    for _ in range(_TURNS):
        columns = factor(weight * rows, -2)
        rows = factor(weight * columns, -1)
    scaled = weight * rows * columns
    size = wanted.norm().clamp(min=torch.finfo(torch.float32).tiny)
    before, after = (float((each - wanted).norm() / size) for each in (weight, scaled))
    if not after <= _UNRELATED:  # NaN too
        return None
    chance = 4 * (1 / weight.shape[-1] + 1 / weight.shape[-2])
    return weight if before**2 <= after**2 * (1 + chance) else scaled
