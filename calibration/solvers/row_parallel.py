"""`solve_by_rows` solves a tall weight in parts of rows, which ranks share.

The rows of a weight are independent in GPTQ and in `local_hessian`, but a product of other sizes may add up in another
order. So the parts depend only on the weight, and one rank solves the same parts as several do: the result does not
depend on the number of ranks.

On a GPU a rank solves its parts in one go. A launch takes as long for few rows as for many, so only matrix products are
taken part by part.
"""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor

from quant.base.parallel import bounds_of, run_parts
from quant.calibration.ranks import Exchange, dealt, rank_and_world, shares_rows
from quant.formats.format import Format
from quant.formats.tensor import BlockScaledTensor

# On a GPU: rows of a part at least, and numbers of parts, which two ranks share evenly.
LEAST_ROWS, _COUNTS = 2048, (4, 2, 1)
# Values that are solved in one go. Some ten copies of them exist meanwhile: of more, memory counts more than launches.
TOGETHER = 1 << 27

WHOLE = (slice(None),)
"""The parts of a weight that is solved as one."""


class _Solve(Protocol):
    """Solves some rows of a weight; the products of each of `parts` of these rows are taken by themselves."""

    def __call__(self, rows: Tensor, /, *, residual: Tensor | None, parts: Sequence[slice]) -> BlockScaledTensor: ...


def solve_by_rows(solve: _Solve, weight: Tensor, format: Format, residual: Tensor | None = None) -> BlockScaledTensor:
    """Returns the codes and scales of a weight `[out, in]`; where ranks share it, each solves some of the parts.

    A weight whose scales span rows is solved in one part.
    """
    rows = len(weight)
    if weight.is_cuda:
        count: float = next((count for count in _COUNTS if rows >= count * LEAST_ROWS), 1)
    else:
        count = search_threads(*weight.shape)
    # Bounds depend only on the weight: a part of other rows could round differently.
    parts = bounds_of(rows, count) if format.block[0] == 1 else []
    if len(parts) < 2:
        return solve(weight, residual=residual, parts=WHOLE)
    owners = dealt([stop - start for start, stop in parts]) if shares_rows() else [rank_and_world()[0]] * len(parts)
    own_parts = [part for part, owner in zip(parts, owners, strict=True) if owner == rank_and_world()[0]]
    solved: dict[int, BlockScaledTensor] = {}

    def solve_part(start: int, stop: int) -> None:
        own_residual = None if residual is None else residual[start:stop]
        solved[start] = solve(weight[start:stop], residual=own_residual, parts=WHOLE)

    if weight.is_cuda:
        solved = _solve_together(solve, weight, residual, own_parts)
    else:
        run_parts(solve_part, own_parts)
    own = [(start, [part.codes, part.scale, part.global_scale]) for start, part in sorted(solved.items())]
    in_row_order = [part for _, part in (Exchange(weight.device).in_order(own) if shares_rows() else own)]
    codes, scales, seconds = zip(*in_row_order, strict=True)
    return BlockScaledTensor(torch.cat(codes), torch.cat(scales), format, tuple(weight.shape), seconds[0])


def _solve_together(
    solve: _Solve, weight: Tensor, residual: Tensor | None, parts: Sequence[tuple[int, int]]
) -> dict[int, BlockScaledTensor]:
    """Returns the solutions of some parts by their first row, several solved in one call."""
    solved: dict[int, BlockScaledTensor] = {}
    longest = max((stop - start for start, stop in parts), default=1)
    most = max(TOGETHER // (longest * weight.shape[1]), 1)
    for first in range(0, len(parts), most):
        together = parts[first : first + most]
        bounds = accumulate((stop - start for start, stop in together), initial=0)
        rows = [slice(*pair) for pair in pairwise(bounds)]
        own_residual = None if residual is None else _joined(residual, together)
        whole = solve(_joined(weight, together), residual=own_residual, parts=rows)
        for (start, _), part in zip(together, rows, strict=True):
            solved[start] = whole.rows(part.start, part.stop)
    return solved


def _joined(matrix: Tensor, parts: Sequence[tuple[int, int]]) -> Tensor:
    if all(stop == start for (_, stop), (start, _) in pairwise(parts)):
        return matrix[parts[0][0] : parts[-1][1]]
    return torch.cat([matrix[start:stop] for start, stop in parts])


def search_threads(rows: int, inputs: int) -> int:
    """Returns how many threads a search over a weight `[rows, inputs]` is worth, a power of two.

    Python's own part takes as long for a few rows as for many, and is not shared, so n threads need n² times the work:
    some for each weight, and products that grow with `inputs`. Measured on two cores, GPTQ of 1536 × 576 takes twice as
    long in two threads, of 4096 × 1024 nine tenths, and of 14336 × 512 less than six tenths.
    """
    return 1 << (max(math.isqrt(rows * (3000 + inputs) // 3_700_000), 1).bit_length() - 1)
