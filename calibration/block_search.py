"""Rounding one block of a weight under a quadratic loss: which scale, and which values on its grid.

A block is `[k, n]`: k neighbouring inputs of n rows of the weight, transposed so that one input is contiguous. Its
loss is (w - q) C (w - q)ᵀ for every row, and C comes as the upper factor U of its inverse, C⁻¹ = Uᵀ U. In these
terms the loss is Σ e_j² with

    e_j = (w_j - Σ_{i<j} e_i U_ij - q_j) / U_jj

so a greedy choice of each q_j, the value nearest to what stands before it in the bracket, is error feedback. Greedy
is not optimal, but the loss it reaches is known exactly, and that is what candidate scales are compared by.
"""

from __future__ import annotations

import torch

from quant.formats.format import Format
from quant.formats.number import E2M1, E4M3, Number
from quant.formats.rounding import round_to
from quant.formats.scaling import SCALE_RULES, candidate_scales


def round_with_feedback(
    block: torch.Tensor, inverse: torch.Tensor, step: torch.Tensor, element: Number
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and errors e of a block on each of several grids, both `[k, candidates, n]`.

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
        wanted = block[j]
        if j:
            wanted = wanted - (inverse[:j, j] @ errors[:j].flatten(1)).view(step.shape[1:])
        values[j] = round_to(wanted / step[j], element).mul_(step[j])
        torch.sub(wanted, values[j], out=errors[j]).div_(inverse[j, j])
    return values, errors


def search_block(
    block: torch.Tensor, inverse: torch.Tensor, format: Format, global_scale: torch.Tensor, shortlist: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best values found for a block, and their scale.

    All candidate scales are tried without feedback first; the best `shortlist` of each row are tried with it. On a
    GPU all of NVFP4's are.

    Args:
        block: `[k, n]`.
        inverse: U, `[k, k]`.
        format: one scale a row of the block.
        global_scale: float32 scalar, 1 for formats without one.
        shortlist: how many candidates get the full trial.

    Returns:
        Values `[k, n]` and block scales `[n]`.
    """
    if block.is_cuda and format.element is E2M1 and format.scale is E4M3 and len(block) == 16:
        from quant.calibration.block_search_triton import search_nvfp4_block

        return search_nvfp4_block(block, inverse, global_scale)
    scales = block_scales(block, format, global_scale)
    if shortlist < len(scales):
        step = scales * global_scale
        plain = round_to(block[:, None] / step, format.element).mul_(step).sub_(block[:, None])
        loss = (_lower(inverse) @ plain.flatten(1)).square_().sum(0).view(scales.shape)
        scales = scales.gather(0, loss.topk(shortlist, dim=0, largest=False).indices)
    values, errors = round_with_feedback(block, inverse, (scales * global_scale)[None], format.element)
    best = errors.square_().sum(0).argmin(0, keepdim=True)
    return values.gather(1, best.expand(len(block), 1, -1))[:, 0], scales.gather(0, best)[0]


def local_scales(
    block: torch.Tensor, inverse: torch.Tensor, format: Format, global_scale: torch.Tensor
) -> torch.Tensor:
    """Block scales `[n]` with the smallest loss when every value is rounded to nearest, no feedback."""
    scales = block_scales(block, format, global_scale)
    step = scales * global_scale
    error = round_to(block[:, None] / step, format.element).mul_(step).sub_(block[:, None])
    loss = (_lower(inverse) @ error.flatten(1)).square_().sum(0).view(scales.shape)
    return scales.gather(0, loss.argmin(0, keepdim=True))[0]


def block_scales(block: torch.Tensor, format: Format, global_scale: torch.Tensor) -> torch.Tensor:
    """Candidate scales of each row, `[candidates, n]`."""
    amax = block.abs().amax(0)
    if format.scale is E4M3:
        grid = E4M3.grid().to(amax.device)
        ideal = (amax / (format.element.max * global_scale)).clamp_(max=E4M3.max)
        first = (torch.searchsorted(grid, ideal) - 8).clamp_(1, E4M3.max_code - 15)
        return grid[first + torch.arange(16, device=amax.device)[:, None]]
    nearest = SCALE_RULES["max"](block.t()[:, None, None], format, global_scale)
    others = candidate_scales(amax.view_as(nearest), format, global_scale)
    return torch.stack([scale.view(-1) for scale in (nearest, *others)])


def _lower(inverse: torch.Tensor) -> torch.Tensor:
    """U⁻ᵀ, which maps w - q to the errors e."""
    eye = torch.eye(len(inverse), dtype=inverse.dtype, device=inverse.device)
    return torch.linalg.solve_triangular(inverse.t(), eye, upper=False)
