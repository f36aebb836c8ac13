"""The search of `block_search` for NVFP4 on a GPU: one launch a block, where PyTorch would need hundreds.

A program holds 16 inputs of `columns` rows of the weight in registers, and tries all sixteen candidate scales with
feedback, one after the other; the best values stay. With U from C⁻¹ = Uᵀ U, input j is rounded, and then

    left[i] -= U[j, i] · e[j]     for i > j,     e[j] = (left[j] - q[j]) / U[j, j],     loss = Σ e[j]²

where `left` begins as the block itself. Nothing is gained by a shortlist here: the trial is what is cheap.
"""

import torch
import triton
import triton.language as tl

from quant.formats.number import E2M1, E4M3

WIDTH = 16
_CANDIDATES = 16
_COLUMNS = 64


@triton.jit
def _search(
    block, inverse, first, grid, global_scale, values, scales, count, stride,
    WIDTH: tl.constexpr, CANDIDATES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    valid = column < count
    row = tl.arange(0, WIDTH)
    wanted = tl.load(block + row[:, None] * stride + column[None, :], mask=valid[None, :], other=0.0)
    start = tl.load(first + column, mask=valid, other=1)
    second = tl.load(global_scale)
    least = tl.full([COLUMNS], float("inf"), tl.float32)
    best = tl.zeros([WIDTH, COLUMNS], tl.float32)
    best_scale = tl.zeros([COLUMNS], tl.float32)
    for candidate in range(CANDIDATES):
        scale = tl.load(grid + start + candidate)
        step = scale * second
        left = wanted
        found = tl.zeros([WIDTH, COLUMNS], tl.float32)
        loss = tl.zeros([COLUMNS], tl.float32)
        for j in tl.static_range(WIDTH):
            here = tl.sum(tl.where((row == j)[:, None], left, 0.0), axis=0)
            magnitude = tl.abs(tl.div_rn(here, step))
            # E2M1: steps of 1/2 below 2, of 1 below 4, of 2 up to 6. Adding 1.5 · 2^23 rounds to an even integer.
            ruler = tl.where(magnitude < 2.0, 0.5, tl.where(magnitude < 4.0, 1.0, 2.0))
            nearest = ((magnitude / ruler + 12582912.0) - 12582912.0) * ruler
            nearest = tl.minimum(nearest, 6.0)
            value = tl.where(here < 0, -nearest, nearest) * step
            upper = tl.load(inverse + j * WIDTH + row)
            error = tl.div_rn(here - value, tl.sum(tl.where(row == j, upper, 0.0), axis=0))
            loss += error * error
            left = tl.where((row > j)[:, None], left - upper[:, None] * error[None, :], left)
            found = tl.where((row == j)[:, None], value[None, :], found)
        better = loss < least
        least = tl.where(better, loss, least)
        best = tl.where(better[None, :], found, best)
        best_scale = tl.where(better, scale, best_scale)
    tl.store(values + row[:, None] * count + column[None, :], best, mask=valid[None, :])
    tl.store(scales + column, best_scale, mask=valid)


def search_nvfp4_block(
    block: torch.Tensor, inverse: torch.Tensor, global_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`search_block` with every candidate tried with feedback.

    Args:
        block: `[16, n]`, float32.
        inverse: U, `[16, 16]`.
        global_scale: float32 scalar.

    Returns:
        Values `[16, n]` and block scales `[n]`.
    """
    count = block.shape[1]
    grid = _grid(block.device)
    ideal = (block.abs().amax(0) / (E2M1.max * global_scale)).clamp_(max=E4M3.max)
    first = (torch.searchsorted(grid, ideal) - 8).clamp_(1, E4M3.max_code - 15)
    values = torch.empty(block.shape, device=block.device)
    scales = torch.empty(count, device=block.device)
    if block.stride(1) != 1:
        block = block.contiguous()
    _search[(triton.cdiv(count, _COLUMNS),)](
        block, inverse.contiguous(), first, grid, global_scale, values, scales, count, block.stride(0),
        WIDTH=WIDTH, CANDIDATES=_CANDIDATES, COLUMNS=_COLUMNS,
    )  # fmt: skip
    return values, scales


_GRIDS: dict[torch.device, torch.Tensor] = {}


def _grid(device: torch.device) -> torch.Tensor:
    if device not in _GRIDS:
        _GRIDS[device] = E4M3.grid().to(device)
    return _GRIDS[device]
