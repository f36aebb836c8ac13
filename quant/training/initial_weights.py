"""A quantized model is trained from weights that round to its codes: training starts at exactly its loss.

A code stands for an interval of weights, its cell. The values in the middle, which the codes decode to, are one start.
Where the original weight is known, the nearest point of the cell is another start. It keeps the difference that
rounding to nearest would have made anyway:

    gptq chose 3.0 for a weight of 2.4 (in steps of its block)     cell [2.5, 3.5]    start 2.55
    gptq chose 3.0 for a weight of 2.9                              cell [2.5, 3.5]    start 2.9

For a checkpoint, rounding targets are recovered from the original model: its weights, rotated, with rows and columns
scaled as solvers fold scales into them, less the branch. These scales are in no file; least squares finds them.

Starts keep a twentieth of half a cell from its ends, so that rounding errors cannot carry them over.
"""

from __future__ import annotations

import torch

from quant.calibration.solvers.lowrank import residual_weight
from quant.calibration.solvers.rotation import rotate_weight
from quant.formats.rounding import round_to
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.linear.quant_linear import RunTimeParts
from quant.kernels.training.weight_rounding import weight_steps
from quant.training.rounding.rounded_weight import decoded_scale

_WITHIN = 0.95  # of half a cell
_UNRELATED = 0.35  # relative distance of weights that are not of one another; 4-bit rounding makes 0.08 to 0.2
_TURNS = 4


def starting_weight(packed: BlockScaledTensor, original: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Returns the weight to train: it rounds to the codes of `packed` under its scales.

    Args:
        packed: the quantized weight.
        original: the values that were rounded, of the same shape; None starts in the middle of each cell.
        dtype: the dtype of the result.
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
    index = torch.searchsorted(grid, codes.abs().contiguous()).clamp(max=len(grid) - 1)
    gaps = (grid[1:] - grid[:-1]) * (_WITHIN / 2)
    # From zero a cell reaches as far down as up, and from the last value nowhere: values beyond it have no gradient.
    below = torch.cat([gaps[:1], gaps])[index]
    above = torch.cat([gaps, gaps.new_zeros(1)])[index] * (codes < element.max)
    sign = torch.where(codes < 0, -1.0, 1.0)
    steps = (original.float() / step * sign).clamp(codes.abs() - below, codes.abs() + above) * sign
    weight = (steps * step).to(dtype)
    # In a narrow dtype the start may have been rounded across the end of its cell.
    same = round_to(weight.float() / step, element) == codes
    return torch.where(same, weight, middle.to(dtype))


def before_rounding(packed: BlockScaledTensor, parts: RunTimeParts, original: torch.Tensor) -> torch.Tensor | None:
    """Returns the values that were rounded to `packed`, recovered from the original model's weight.

    Args:
        packed: the quantized weight.
        parts: the parts of its layer.
        original: the weight in the original model, of the same shape.

    Returns:
        float32; None where it came from another weight, as it does of models whose rotations were merged.
    """
    stored = packed.dequantize()
    residual = stored if parts.lowrank is None else residual_weight(stored, (parts.lowrank[0], -parts.lowrank[1]))
    turned = rotate_weight(original.to(stored.device, torch.float32), parts.hadamard)
    scaled = _scaled(turned, residual)
    if scaled is None:
        return None
    return scaled if parts.lowrank is None else residual_weight(scaled, parts.lowrank)


def _scaled(weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor | None:
    """Returns `weight` with rows and columns scaled to be nearest to `wanted`.

    Itself where that gains no more than chance.
    """

    def factor(matrix: torch.Tensor, dim: int) -> torch.Tensor:
        tiny = torch.finfo(torch.float32).tiny
        return (matrix * target).sum(dim, keepdim=True) / matrix.square().sum(dim, keepdim=True).clamp(min=tiny)

    # Alternating least squares on |target − rows · weight · columns|²: with one side fixed, the best factor of each row
    # or column is ⟨w, t⟩ / ⟨w, w⟩.
    rows, columns = torch.ones_like(weight[..., :1]), torch.ones_like(weight[..., :1, :])
    for _ in range(_TURNS):
        columns = factor(weight * rows, -2)
        rows = factor(weight * columns, -1)
    scaled = weight * rows * columns
    size = target.norm().clamp(min=torch.finfo(torch.float32).tiny)
    before, after = (float((each - target).norm() / size) for each in (weight, scaled))
    if not after <= _UNRELATED:  # NaN too
        return None
    # One factor a row and one a column fit about 1/in + 1/out of the squares of pure rounding noise; a gain below four
    # times that is not a scaling by a solver.
    chance = 4 * (1 / weight.shape[-1] + 1 / weight.shape[-2])
    return weight if before**2 <= after**2 * (1 + chance) else scaled
