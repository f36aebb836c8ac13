"""GPTQ with the block scales in the loop, and coordinate descent after it.

A layer's output error over the calibration tokens is quadratic in its weights: row by row (q - w) M (q - w)ᵀ, with
M the second moment of the inputs. GPTQ rounds the columns in turn and lets the ones still free make up for the
error. With U the upper Cholesky factor of M⁻¹ (M⁻¹ = Uᵀ U), rounding column j with error e_j = (w_j - q_j) / U_jj
moves every later column k by -e_j U_jk, and Σ e_j² is exactly the loss at the end (Frantar et al., 2022).

Two things are done beyond that paper.

**Scales.** When the loop reaches a block that shares a scale, its weights have moved, so the scale is chosen now.
For each candidate scale the block is rounded with feedback inside it, and the smallest Σ e_j² wins. That is the
true cost of the choice: the block's curvature given that all later columns adapt, U_bb⁻¹ U_bb⁻ᵀ (Schur
complement), which earlier methods approximate by the plain squared error, or by its diagonal.

**Descent.** GPTQ never looks back. Afterwards each block is revisited with all others fixed: their errors shift
its target to w_b + M_bb⁻¹ M_b,rest (w - q)_rest, and the block is solved again, scale and codes, under M_bb. A
change is kept where it lowers the loss, so a sweep can only improve.

Everything is laid out [in, out], so that a column of the weight is contiguous and all rows go in parallel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from quant.calibration.block_search import round_with_feedback, search_block
from quant.calibration.statistics import diagonal_blocks
from quant.formats.format import Format
from quant.formats.tensor import BlockScaledTensor, choose_scale, quantize_with_scale

# Columns whose feedback to the rest of the matrix is gathered into one product.
_LAZY = 128
# Columns solved together where scales are fixed beforehand.
_FIXED_WIDTH = 32

# Solves the block of inputs that begins at a column: (block [k, n], column, U [k, k]) -> values [k, n], scales [n].
_SolveBlock = Callable[[torch.Tensor, int, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]


@dataclass(frozen=True)
class Factor:
    """A damped second moment and its inverse Cholesky factor.

    Attributes:
        moment: M with damping, float32 `[in, in]`.
        inverse: U, upper triangular, with M⁻¹ = Uᵀ U.
        damping: what was added to the diagonal, as a fraction of its mean.
    """

    moment: torch.Tensor
    inverse: torch.Tensor
    damping: float


def factorize(second_moment: torch.Tensor, damping: float = 0.01) -> Factor:
    """Damps a second moment until it can be inverted. A channel that is never active is left to itself.

    Raises:
        ValueError: not even a tenfold diagonal helps, which only NaN or infinity can cause.
    """
    diagonal = second_moment.diagonal()
    mean = diagonal.mean()
    mean = torch.where(mean > 0, mean, torch.ones_like(mean))
    used = damping
    while used <= 10:
        moment = second_moment.clone()
        moment.diagonal().add_(torch.where(diagonal > 0, used * mean, mean))
        # M = R Rᵀ with R upper (a Cholesky of the flipped matrix), so U = R⁻¹: one factorization, no M⁻¹.
        lower, info = torch.linalg.cholesky_ex(moment.flip(0, 1))
        if int(info) == 0:
            eye = torch.eye(len(moment), dtype=moment.dtype, device=moment.device)
            inverse = torch.linalg.solve_triangular(lower.flip(0, 1), eye, upper=True)
            return Factor(moment, inverse, used)
        used = max(10 * used, 1e-4)
    raise ValueError("the second moment of the inputs cannot be inverted: it holds NaN or infinity")


def corrected_weight(weight: torch.Tensor, drift: torch.Tensor | None, factor: Factor) -> torch.Tensor:
    """W + W drift M⁻¹: the weight that maps the inputs as they are closest to the outputs as they should be.

    Args:
        weight: `[out, in]`.
        drift: mean of (r - x) xᵀ, `[in, in]`; None leaves the weight.
        factor: of the second moment.
    """
    if drift is None:
        return weight
    return weight + (weight @ drift) @ factor.inverse.t() @ factor.inverse


def gptq(
    weight: torch.Tensor,
    factor: Factor,
    format: Format,
    global_scale: torch.Tensor | None = None,
    *,
    sweeps: int = 2,
    shortlist: int = 4,
) -> BlockScaledTensor:
    """Rounds `weight` against the quadratic loss of `factor`.

    Args:
        weight: `[out, in]`, float32, finite.
        factor: of the second moment of the inputs.
        format: the target. Scales are searched in the loop where a block lies within a row; a scale that spans
            rows, or a whole row, is chosen from `weight` beforehand.
        global_scale: second-level scale, for formats that have one.
        sweeps: rounds of coordinate descent afterwards.
        shortlist: how many scales of a block to try with feedback.
    """
    block_rows, block_columns = format.block
    if block_rows == 1 and 0 < block_columns <= _LAZY:
        return _with_searched_scales(weight, factor, format, global_scale, sweeps, shortlist)
    scale = choose_scale(weight, format, "mse", weight.abs().amax(), global_scale)
    shape = format.block_shape(weight.shape)
    step = scale.repeat_interleave(shape[0], 0)[: len(weight)].repeat_interleave(shape[1], 1)
    step = step[:, : weight.shape[1]].t().contiguous()

    def solve(block: torch.Tensor, start: int, inverse: torch.Tensor) -> tuple[torch.Tensor, None]:
        here = step[start : start + len(block), None]
        return round_with_feedback(block, inverse, here, format.element)[0][:, 0], None

    target = weight.t().contiguous()
    values, _ = _feed_back(target, factor, _FIXED_WIDTH, solve)
    for _ in range(sweeps):
        _descend(target, values, None, factor, _FIXED_WIDTH, solve)
    return quantize_with_scale(values.t().contiguous(), format, scale, global_scale)


def _with_searched_scales(
    weight: torch.Tensor,
    factor: Factor,
    format: Format,
    global_scale: torch.Tensor | None,
    sweeps: int,
    shortlist: int,
) -> BlockScaledTensor:
    second = weight.new_ones(()) if global_scale is None else global_scale

    def solve(block: torch.Tensor, start: int, inverse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return search_block(block, inverse, format, second, shortlist)

    target = weight.t().contiguous()
    width = format.block[1]
    values, scales = _feed_back(target, factor, width, solve)
    for _ in range(sweeps):
        _descend(target, values, scales, factor, width, solve)
    return quantize_with_scale(values.t().contiguous(), format, scales.t().contiguous(), global_scale)


def _feed_back(
    target: torch.Tensor, factor: Factor, width: int, solve: _SolveBlock
) -> tuple[torch.Tensor, torch.Tensor]:
    """GPTQ's pass: values `[in, out]` and scales `[blocks, out]`, one block of `width` inputs after the other."""
    upper, left = factor.inverse, target.clone()
    values = torch.empty_like(target)
    scales: list[torch.Tensor] = []
    for first in range(0, len(target), _LAZY):
        last = min(first + _LAZY, len(target))
        errors = torch.empty_like(left[first:last])
        for start in range(first, last, width):
            stop = min(start + width, last)
            here, inverse = slice(start, stop), upper[start:stop, start:stop]
            values[here], scale = solve(left[here], start, inverse)
            if scale is not None:
                scales.append(scale)
            error = torch.linalg.solve_triangular(inverse.t(), left[here] - values[here], upper=False)
            errors[start - first : stop - first] = error
            left[stop:last].addmm_(upper[here, stop:last].t(), error, alpha=-1)
        left[last:].addmm_(upper[first:last, last:].t(), errors, alpha=-1)
    return values, torch.stack(scales) if scales else values[:0]


def _descend(
    target: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor | None,
    factor: Factor,
    width: int,
    solve: _SolveBlock,
) -> None:
    """One sweep of block coordinate descent, in place: every block again, with all others as they are."""
    moment = factor.moment
    residual = target - values
    inverses, uppers = block_factors(diagonal_blocks(moment, width))
    for index, start in enumerate(range(0, len(target), width)):
        here = slice(start, start + width)
        size = len(target[here])
        own = moment[here, here]
        gradient = moment[here] @ residual
        # What the block would be if it were free: its own values plus the step to the minimum.
        wanted = values[here] + inverses[index][:size, :size] @ gradient
        new, scale = solve(wanted, start, uppers[index][:size, :size])
        off_new, off_old = wanted - new, wanted - values[here]
        gain = (off_old * (own @ off_old)).sum(0) - (off_new * (own @ off_new)).sum(0)
        better = gain > 0
        values[here] = torch.where(better, new, values[here])
        if scales is not None and scale is not None:
            scales[index] = torch.where(better, scale, scales[index])
        residual[here] = target[here] - values[here]


def block_factors(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverses of positive definite blocks `[n, k, k]`, and their upper factors U with C⁻¹ = Uᵀ U."""
    lower = torch.linalg.cholesky(blocks.flip(1, 2))
    eye = torch.eye(blocks.shape[-1], dtype=blocks.dtype, device=blocks.device).expand_as(blocks)
    uppers = torch.linalg.solve_triangular(lower.flip(1, 2), eye, upper=True)
    return uppers.mT @ uppers, uppers
