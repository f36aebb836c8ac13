"""`search_block` rounds one block of a weight under a quadratic loss: it chooses the scale and the values.

A block is `[k, n]`: k neighbouring inputs of n rows of the weight, transposed so that one input is contiguous. Its
loss is (w - q) C (w - q)ᵀ for every row, and C comes as the upper factor U of its inverse, C⁻¹ = Uᵀ U. In these
terms the loss is Σ e_j² with

    e_j = (w_j - Σ_{i<j} e_i U_ij - q_j) / U_jj

so a greedy choice of each q_j, the value nearest to the terms before it in the bracket, is error feedback. Greedy
is not optimal, but the loss it reaches is known exactly, and candidate scales are compared by it.
"""

from __future__ import annotations

import math

import torch

from quant.formats.format import Format
from quant.formats.number import E4M3, Number
from quant.formats.rounding import round_to
from quant.formats.scaling import SCALE_RULES, candidate_scales


def search_threads(rows: int, inputs: int) -> int:
    """Returns how many threads a search over a weight `[rows, inputs]` is worth, a power of two.

    Python's own part takes as long for a few rows as for many, and is not shared, so n threads need n² times the work:
    some for each weight, and products that grow with `inputs`. Measured on two cores, GPTQ of 1536 × 576 takes twice as
    long in two threads, of 4096 × 1024 nine tenths, and of 14336 × 512 less than six tenths.
    """
    count = math.isqrt(rows * (3000 + inputs) // 3_700_000)
    return 1 << (max(count, 1).bit_length() - 1)


def round_with_feedback(
    block: torch.Tensor, inverse: torch.Tensor, step: torch.Tensor, element: Number
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the values and errors e of a block on each of several grids, both `[k, candidates, n]`.

    Args:
        block: `[k, n]`.
        inverse: U, `[k, k]`.
        step: positive grid steps `[k, candidates, n]`; k may be 1 where all inputs share theirs.
        element: the grid.
    """
    values = block.new_empty(len(block), *step.shape[1:])
    errors = torch.empty_like(values)
    step = step.expand_as(values)
    for j in range(len(block)):
        target = block[j]
        if j:
            target = target - (inverse[:j, j] @ errors[:j].flatten(1)).view(step.shape[1:])
        values[j] = _nearest(target / step[j], element).mul_(step[j])
        torch.sub(target, values[j], out=errors[j]).div_(inverse[j, j])
    return values, errors


def search_block(
    block: torch.Tensor, inverse: torch.Tensor, format: Format, global_scale: torch.Tensor, shortlist: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the best values found for a block, and their scale.

    All candidate scales are tried without feedback first; the best `shortlist` of each row are tried with it.

    Args:
        block: `[k, n]`.
        inverse: U, `[k, k]`.
        format: one scale a row of the block.
        global_scale: float32 scalar, 1 for formats without one.
        shortlist: how many candidates get the full trial.

    Returns:
        Values and errors e `[k, n]`, and block scales `[n]`.
    """
    scales = block_scales(block, format, global_scale)
    if shortlist < len(scales):
        loss = _losses(block, inverse, format, scales * global_scale)
        scales = scales.gather(0, loss.topk(shortlist, dim=0, largest=False).indices)
    values, errors = round_with_feedback(block, inverse, (scales * global_scale)[None], format.element)
    best = errors.square().sum(0).argmin(0, keepdim=True)
    index = best.expand(len(block), 1, -1)
    return values.gather(1, index)[:, 0], errors.gather(1, index)[:, 0], scales.gather(0, best)[0]


def block_scales(block: torch.Tensor, format: Format, global_scale: torch.Tensor) -> torch.Tensor:
    """Returns the candidate scales of each row, `[candidates, n]`."""
    amax = block.abs().amax(0)
    if format.scale is E4M3:
        return torch.stack(candidate_scales(amax, format, global_scale))
    # Powers of two (E8M0) and wide scales: the rule `max`, then the search's candidates around it.
    nearest = SCALE_RULES["max"](block.t()[:, None, None], format, global_scale)
    searched = candidate_scales(amax.view_as(nearest), format, global_scale)
    return torch.stack([scale.view(-1) for scale in (nearest, *searched)])


def to_errors(inverse: torch.Tensor) -> torch.Tensor:
    """Returns u⁻ᵀ, which maps w - q to the errors e."""
    eye = torch.eye(len(inverse), dtype=inverse.dtype, device=inverse.device)
    errors: torch.Tensor = torch.linalg.solve_triangular(inverse.t(), eye, upper=False)
    return errors


def _losses(block: torch.Tensor, inverse: torch.Tensor, format: Format, step: torch.Tensor) -> torch.Tensor:
    """Returns the losses where every value is rounded to nearest on a grid of `step` `[candidates, n]`."""
    in_steps = block[:, None] / step
    # In grid steps, which are squared and multiplied in only after the sum.
    off = _nearest(in_steps, format.element).sub_(in_steps)
    return (to_errors(inverse) @ off.flatten(1)).square_().sum(0).view(step.shape).mul_(step).mul_(step)


def _nearest(x: torch.Tensor, number: Number) -> torch.Tensor:
    """Returns `round_to` in fewer passes over memory, for float grids that no dtype has; zeros lose their sign."""
    if number.torch_dtype is not None or number.is_integer:
        return round_to(x, number)
    x = x.clamp(-number.max, number.max)
    # 1.5 · 2^(23 - mantissa) powers of two: adding it leaves room for only the grid's digits, rounded to even.
    magic = (x.view(torch.int32) & 0x7F800000).view(torch.float32)
    magic.clamp_(min=number.min_normal).mul_(1.5 * 2.0 ** (23 - number.mantissa))
    return x.add_(magic).sub_(magic)
