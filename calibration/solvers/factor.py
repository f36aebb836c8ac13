"""A `Factor` is the damped second moment of a layer's inputs and its inverse Cholesky factor, which solvers work with.

With M = mean of x xᵀ over the calibration tokens, damped on its diagonal, U is upper triangular with M⁻¹ = Uᵀ U. Its
row j says how later columns compensate an error of column j (see `gptq`), and M⁻¹ itself is never formed.

A `LossMetric` is a factor of the other side. In the loss of the whole model an error E of a weight costs tr(A E M Eᵀ),
see `kfac`: with A = L Lᵀ it is the error of outputs by M alone, of Lᵀ E. Solvers that minimize a squared error of
outputs, such as AWQ's search or a low-rank branch, minimize the loss instead when they are given Lᵀ W for the weight W.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from quant.calibration.fast_matmul import SplitMatrix
from quant.calibration.ranks import Exchange, dealt, rank_and_world, shares_rows
from quant.calibration.solvers.row_parallel import WHOLE
from quant.formats.scaling import nonzero

# Columns of a factor that are taken together on a CPU and on a GPU, and the number of such slabs that ranks share.
_SLAB, _SLAB_GPU, _SHARED_SLABS = 256, 2048, 4
# Added to the diagonal of A, as a fraction of its mean: the first one with which A has a Cholesky factor.
_OUTPUT_DAMPING = (0.001, 0.01, 0.1, 1.0)


@dataclass(frozen=True)
class Factor:
    """A damped second moment and its inverse Cholesky factor.

    Attributes:
        moment: M with damping, float32 `[in, in]`.
        inverse: U, upper triangular, with M⁻¹ = Uᵀ U.
        damping: the share of the diagonal's mean that was added to it.
        order: inputs in the order in which rows and columns of both matrices stand; None for the weight's own.
    """

    moment: Tensor
    inverse: Tensor
    damping: float
    order: Tensor | None = None


def block_order(power: Tensor, width: int) -> Tensor:
    """Returns the order of the inputs, int64 `[in]`, the loudest first.

    Blocks of `width` inputs are sorted by their sums, and then the inputs within each block.

    Args:
        power: the second moment's diagonal, `[in]`.
        width: inputs of a block; a shorter block at the end stays there.
    """
    whole = len(power) // width * width
    blocks = power[:whole].view(-1, width)
    ranks = blocks.argsort(dim=1, descending=True, stable=True)
    inputs = torch.arange(whole, device=power.device).view(-1, width).gather(1, ranks)
    after_blocks = whole + power[whole:].argsort(descending=True, stable=True)
    return torch.cat([inputs[blocks.sum(1).argsort(descending=True, stable=True)].flatten(), after_blocks])


def factorize(second_moment: Tensor, damping: float = 0.01, order: Tensor | None = None) -> Factor:
    """Damps a second moment until it can be inverted. A channel that is never active is not coupled to others.

    Args:
        second_moment: M, `[in, in]`.
        damping: added to the diagonal, as a fraction of its mean.
        order: the order of the inputs in the result; None leaves them in theirs.

    Raises:
        ValueError: not even a tenfold diagonal helps, which only NaN or infinity can cause.
    """
    diagonal = second_moment.diagonal()
    mean = nonzero(diagonal.mean())
    # λ · mean(diag M) on the diagonal, as GPTQ's `percdamp`; mean(diag M) for a dead channel, whose row is zero.
    diagonal = diagonal if order is None else diagonal[order]
    used = damping
    while used <= 10:
        moment = second_moment.clone() if order is None else second_moment[order][:, order]
        moment.diagonal().add_(torch.where(diagonal > 0, used * mean, mean))
        # M = R Rᵀ with R upper (a Cholesky of the flipped matrix), so U = R⁻¹: one factorization, no M⁻¹.
        lower, info = torch.linalg.cholesky_ex(moment.flip(0, 1))
        if int(info) == 0:
            return Factor(moment, inverse_of_upper(lower.flip(0, 1)), used, order)
        used = max(10 * used, 1e-4)
    raise ValueError("the second moment of the inputs cannot be inverted: it holds NaN or infinity")


def inverse_of_upper(upper: Tensor) -> Tensor:
    """Returns the inverse of an upper triangular matrix `[in, in]`, computed some columns at a time.

    Columns that end at input k have zeros below it, so that k rows and columns of the matrix are enough for them: in
    all a third of the operations. Ranks that solve one weight together share the columns of a large matrix; one rank
    takes the same ones together, because a product of other sizes may add up in another order.
    """
    # Columns [start, stop) of the inverse U need only the leading stop × stop part of R.
    slabs = _slabs(upper)
    rank, shared = rank_and_world()[0], shares_rows() and len(slabs) >= _SHARED_SLABS
    owners = dealt([stop**2 * (stop - start) for start, stop in slabs.items()]) if shared else [rank] * len(slabs)
    own: list[tuple[int, list[torch.Tensor]]] = []
    for (start, stop), owner in zip(slabs.items(), owners, strict=True):
        if owner == rank:
            ones = upper.new_zeros(stop, stop - start)
            ones[start:].fill_diagonal_(1)
            own.append((start, [torch.linalg.solve_triangular(upper[:stop, :stop], ones, upper=True)]))
    inverse = torch.zeros_like(upper)
    for start, (slab,) in Exchange(upper.device).in_order(own) if shared else own:
        inverse[: slabs[start], start : slabs[start]] = slab
    return inverse


def _slabs(upper: Tensor) -> dict[int, int]:
    """Returns the starts and stops of runs of columns of a triangular matrix."""
    width = _SLAB_GPU if upper.is_cuda else _SLAB
    return {start: min(start + width, len(upper)) for start in range(0, len(upper), width)}


def _times_inverse(x: Tensor, upper: Tensor, parts: Sequence[slice]) -> Tensor:
    """Returns `x` M⁻¹ = (`x` Uᵀ) U of `[n, in]`, U's zeros left out: little more than half of the operations."""
    slabs, inverse = _slabs(upper), SplitMatrix(upper)
    step, half, result = SplitMatrix(x), torch.empty_like(x), torch.empty_like(x)
    for start, stop in slabs.items():
        for rows in parts:
            half[rows, start:stop] = step[rows, start:] @ inverse[start:stop, start:].t()
    step = SplitMatrix(half)
    for start, stop in slabs.items():
        for rows in parts:
            result[rows, start:stop] = step[rows, :stop] @ inverse[:stop, start:stop]
    return result


def corrected_weight(
    weight: Tensor,
    drift: Tensor | None,
    factor: Factor,
    residual: Tensor | None = None,
    parts: Sequence[slice] = WHOLE,
) -> Tensor:
    """Returns W + (W drift + residual) M⁻¹: maps the inputs as they are closest to the outputs as they should be.

    Args:
        weight: `[out, in]`.
        drift: mean of (r - x) xᵀ, `[in, in]`; None for no such term.
        factor: the factor of the second moment.
        residual: mean of s xᵀ, `[out, in]`, with s the error that the output makes up for; None for no such term.
        parts: rows whose products are computed apart from other rows' products.
    """
    if drift is None and residual is None:
        return weight
    if drift is None:
        step = torch.zeros_like(weight)
    else:
        original, errors = SplitMatrix(weight), SplitMatrix(drift)
        step = torch.cat([original[rows] @ errors for rows in parts])
    if residual is not None:
        step += residual
    if factor.order is None:
        return weight + _times_inverse(step, factor.inverse, parts)
    return weight.index_add(1, factor.order, _times_inverse(step[:, factor.order], factor.inverse, parts))


def block_factors(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns inverses of positive definite blocks `[..., k, k]`, and their upper factors U with C⁻¹ = Uᵀ U."""
    lower = torch.linalg.cholesky(blocks.flip(-2, -1))
    eye = torch.eye(blocks.shape[-1], dtype=blocks.dtype, device=blocks.device).expand_as(blocks)
    uppers = torch.linalg.solve_triangular(lower.flip(-2, -1), eye, upper=True)
    return uppers.mT @ uppers, uppers


class LossMetric:
    """A factor of A, by which weights are taken into the metric of the loss and back.

    Args:
        blocks: the diagonal blocks of A, `[k, k]`, whose sizes add up to the outputs of the weight; none for A = 1.
        damping: added to the diagonal of A at the least, as a fraction of its mean.
    """

    def __init__(self, blocks: Sequence[Tensor], damping: float = _OUTPUT_DAMPING[0]) -> None:
        self.sizes = [len(block) for block in blocks]
        self.factors = [_factor(block.float(), damping) for block in blocks]

    def enter(self, weight: Tensor) -> Tensor:
        """Returns Lᵀ W of `[out, n]`, in the dtype of W."""
        if not self.sizes:
            return weight
        return torch.cat([factor.to(rows).t() @ rows for factor, rows in self._parts(weight)])

    def leave(self, weight: Tensor) -> Tensor:
        """Returns L⁻ᵀ W of `[out, n]`: `enter` undone."""
        if not self.sizes:
            return weight
        solved = [
            torch.linalg.solve_triangular(factor.to(rows).t(), rows, upper=True) for factor, rows in self._parts(weight)
        ]
        return torch.cat(solved)

    def _parts(self, weight: Tensor) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self.factors, weight.split(self.sizes), strict=True))


def blocks_between(blocks: Sequence[Tensor], start: int, stop: int) -> list[Tensor]:
    """Returns the diagonal blocks of A for some neighbouring outputs, cut where they reach beyond these."""
    ends = list(accumulate(len(block) for block in blocks))
    spans = [(max(start - end + len(b), 0), min(stop - end, 0) + len(b)) for end, b in zip(ends, blocks, strict=True)]
    return [block[a:b, a:b] for (a, b), block in zip(spans, blocks, strict=True) if a < b]


def _factor(block: Tensor, least: float) -> Tensor:
    """Returns the lower L with L Lᵀ = A, damped, of a float32 block `[k, k]` of A."""
    mean = nonzero(block.diagonal().mean())
    for damping in (step for step in _OUTPUT_DAMPING if step >= least):
        damped = block.clone()
        damped.diagonal().add_(damping * mean)
        lower: Tensor
        lower, info = torch.linalg.cholesky_ex(damped)
        # Rounding gives A negative eigenvalues where a few outputs have gradients far above the others'.
        if int(info) == 0:
            return lower
    # Each output by itself; 1e-6 of the mean keeps it invertible.
    return block.diagonal().clamp(min=1e-6 * float(mean)).sqrt().diag()
