"""`gptq` rounds with second-order feedback, block scales in the loop, and coordinate descent after it.

A layer's output error over the calibration tokens is quadratic in its weights: row by row (q - w) M (q - w)ᵀ, with
M the second moment of the inputs. GPTQ rounds the columns in turn and lets the ones still free make up for the
error. With U the upper Cholesky factor of M⁻¹ (M⁻¹ = Uᵀ U), rounding column j with error e_j = (w_j - q_j) / U_jj
moves every later column k by -e_j U_jk, and Σ e_j² is exactly the loss at the end (Frantar et al., 2022).

Three things are done beyond that paper.

**Order.** The columns that come first have the most others left to make up for their error, so the loud ones go first,
where scales are coarser than E4M3's.
A block that shares a scale stays whole: blocks are taken by falling power of their inputs, and so are the columns
within one. Codes and scales are put back in the original order, so the order need not be stored.

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

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from quant.base.parallel import in_parts
from quant.calibration.fast_matmul import SplitMatrix
from quant.calibration.solvers.block_search import round_with_feedback, search_block, search_threads, to_errors
from quant.calibration.solvers.factor import Factor, block_factors, block_order, corrected_weight, factorize
from quant.calibration.solvers.interfaces import required_stats
from quant.calibration.solvers.row_parallel import LEAST_ROWS, WHOLE, solve_by_rows
from quant.calibration.statistics import LayerStats, diagonal_blocks
from quant.formats.format import Format
from quant.formats.number import E4M3, Number
from quant.formats.tensor import BlockScaledTensor, choose_scale, quantize_with_scale

# Columns whose feedback to the rest of the matrix is gathered into one product.
_LAZY = 128
# Columns solved together where scales are fixed beforehand.
_FIXED_WIDTH = 32

# Solves the blocks of a window; takes the arguments of `_solve_window` after the first.
_SolveWindow = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, int, bool], Tensor]
# Solves one block: (its target [k, n], its first column, U [k, k]) -> values, errors e [k, n], scales [n].
_SolveBlock = Callable[[Tensor, int, Tensor], tuple[Tensor, Tensor, Tensor | None]]


@dataclass(frozen=True)
class Shares:
    """Shares of the errors of earlier layers that a weight makes up for; 0 for none, 1 for all.

    Attributes:
        drift: the moment of the error of its input.
        residual: the error of the residual stream that its output is added to.
    """

    drift: float = 0.0
    residual: float = 0.0


@dataclass(frozen=True)
class Gptq:
    """Second-order rounding. See the module docstring.

    Attributes:
        damping: added to the diagonal of the second moment, as a fraction of its mean.
        shares: the shares of earlier layers' errors that are made up for, where inputs stay in 16 bit.
        rounded_shares: the same where inputs are rounded, whose own rounding is not made up for.
        sweeps: rounds of coordinate descent.
        shortlist: scales of a block that are tried with feedback.
    """

    damping: float = 0.01
    shares: Shares = Shares(drift=0.5, residual=0.5)
    rounded_shares: Shares = Shares(drift=0.25, residual=0.25)
    sweeps: int = 1
    shortlist: int = 4
    rule: str = "mse"

    def __call__(
        self, weight: Tensor, stats: LayerStats | None, format: Format, *, global_scale: Tensor | None, name: str
    ) -> BlockScaledTensor:
        stats = required_stats(stats, name, "gptq")
        factor = self.factor(stats, format, name)
        solve = partial(
            gptq, factor=factor, format=format, global_scale=global_scale, drift=stats.drift, sweeps=self.sweeps,
            shortlist=self.shortlist,
        )  # fmt: skip
        return solve_by_rows(
            lambda rows, residual, parts: solve(rows, residual=residual, parts=parts), weight, format, stats.residual
        )

    def takes_several(self, weight: Tensor, format: Format) -> bool:
        """Returns whether weights of this shape are solved in fewer launches together, by `together`."""
        # A weight of more rows is solved in parts, which fill the GPU by themselves.
        small = weight.is_cuda and len(weight) < 2 * LEAST_ROWS and weight.shape[1] % _width(format) == 0
        return small and type(self) is Gptq and format.is_nvfp4

    def together(
        self, weights: Sequence[Tensor], stats: Sequence[LayerStats], format: Format, global_scales: Tensor, name: str
    ) -> list[BlockScaledTensor]:
        """Solves several weights that `takes_several`, each with its own statistics."""
        factors = [self.factor(each, format, name) for each in stats]
        corrected = [
            corrected_weight(weight.float(), each.drift, factor, each.residual)
            for weight, factor, each in zip(weights, factors, stats, strict=True)
        ]
        return gptq_together(corrected, factors, format, global_scales, sweeps=self.sweeps)

    def factor(self, stats: LayerStats, format: Format, name: str) -> Factor:
        """Returns the factor of the inputs' second moment, in the order in which inputs are rounded.

        Raises:
            ValueError: the second moment holds NaN or infinity; `name` is the layer's.
        """
        # E4M3 scales follow the weights so closely that the order gains nothing: SmolLM2 in NVFP4 lost 4% on WikiText.
        order = None if format.scale is E4M3 else block_order(stats.matrix.diagonal(), _width(format))
        try:
            factor = factorize(stats.matrix, self.damping, order)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if factor.damping > self.damping:
            warnings.warn(f"{name}: singular second moment, damped by {factor.damping:g} of its mean", stacklevel=3)
        return factor


def gptq(
    weight: Tensor,
    factor: Factor,
    format: Format,
    global_scale: Tensor | None = None,
    *,
    drift: Tensor | None = None,
    residual: Tensor | None = None,
    sweeps: int = 1,
    shortlist: int = 4,
    parts: Sequence[slice] = WHOLE,
) -> BlockScaledTensor:
    """Rounds `weight` against the quadratic loss of `factor`.

    Args:
        weight: `[out, in]`, finite; solved in float32.
        factor: the factor of the second moment of the inputs.
        format: the target. Scales are searched in the loop where a block lies within a row; a scale that spans
            rows, or a whole row, is chosen from `weight` beforehand.
        global_scale: global scale, for formats that have one.
        drift, residual: the weight is corrected for them; see `corrected_weight`.
        sweeps: rounds of coordinate descent afterwards.
        shortlist: how many scales of a block to try with feedback.
        parts: rows whose products are computed apart from other rows' products, as `solve_by_rows` gives them.
    """
    weight = corrected_weight(weight.float(), drift, factor, residual, parts)
    fixed = fixed_scales(weight, format, global_scale, factor)
    rounding = Rounding(
        by_input(weight, factor), factor, format, global_scale, shortlist, None if fixed is None else fixed.step
    )
    rounding.parts = parts

    def solve_rows(start: int, stop: int) -> None:
        rounding.feed_back(slice(start, stop))
        for _ in range(sweeps):
            rounding.descend(slice(start, stop))

    # Where scales lie within rows, `weight` is one of the threads' parts of `solve_by_rows` already.
    threads = 1 if format.block[0] == 1 else search_threads(*weight.shape)
    in_parts(solve_rows, weight, len(weight), threads)
    return encoded(rounding.values, rounding.scales, fixed, factor, format, global_scale)


def gptq_together(
    weights: Sequence[Tensor],
    factors: Sequence[Factor],
    format: Format,
    global_scales: Tensor,
    *,
    sweeps: int = 1,
) -> list[BlockScaledTensor]:
    """Rounds several weights of one shape, each against its own quadratic loss, in the launches of one.

    Args:
        weights: `[out, in]` each, corrected for the errors of earlier layers.
        factors: a factor for each, with the inputs in their own order.
        format: a format whose scales are searched in the loop.
        global_scales: float32 `[weights]`.
        sweeps: as in `gptq`.
    """
    # By columns, as U of one weight, for which the kernels are compiled.
    inverses = torch.stack([f.inverse.mT for f in factors]).mT
    several = Factor(torch.stack([f.moment for f in factors]), inverses, max(f.damping for f in factors))
    target = torch.stack([weight.t() for weight in weights])
    values, width = torch.empty_like(target), _width(format)
    scales = target.new_empty(len(target), target.shape[1] // width, target.shape[2])
    window = _nvfp4_window(global_scales)
    _feed_back(target, values, scales, several, width, window, WHOLE)
    for _ in range(sweeps):
        _descend(target, values, scales, several, width, window, WHOLE)
    return [
        encoded(value, scale, None, factor, format, second)
        for value, scale, factor, second in zip(values, scales, factors, global_scales, strict=True)
    ]


@dataclass(frozen=True)
class FixedScales:
    """Scales that are chosen before rounding, because they span rows, or whole rows.

    Attributes:
        scale: the block scales, as in `BlockScaledTensor`.
        step: the grid step of every weight, `[in, out]`, inputs in the factor's order.
    """

    scale: Tensor
    step: Tensor


def fixed_scales(weight: Tensor, format: Format, global_scale: Tensor | None, factor: Factor) -> FixedScales | None:
    """Returns the scales of `weight` `[out, in]`; None where the loop chooses the scales of blocks within a row."""
    if format.block[0] == 1 and 0 < format.block[1] <= _LAZY:
        return None
    scale = choose_scale(weight, format, "mse", weight.abs().amax(), global_scale)
    return FixedScales(scale, _steps_of(scale, weight, format, factor.order))


def by_input(weight: Tensor, factor: Factor) -> Tensor:
    """Returns `weight` `[out, in]` as solvers lay it out: `[in, out]`, inputs in the factor's order."""
    return weight.t().contiguous() if factor.order is None else weight.t()[factor.order]


class Rounding:
    """Some rows of a weight while they are rounded: targets, values so far, and scales.

    Args:
        target: `[in, out]`, contiguous, inputs in the factor's order.
        factor: the factor of the second moment of the inputs.
        format, global_scale, shortlist: as in `gptq`.
        step: the step of `FixedScales`, where scales are fixed.

    Attributes:
        values: `[in, out]`.
        scales: `[blocks, out]`; None where they are fixed.
        parts: as in `gptq`, where all outputs are solved together.
    """

    parts: Sequence[slice] = WHOLE

    def __init__(
        self,
        target: Tensor,
        factor: Factor,
        format: Format,
        global_scale: Tensor | None,
        shortlist: int,
        step: Tensor | None = None,
    ) -> None:
        self.target, self.factor, self.format, self.shortlist, self.step = target, factor, format, shortlist, step
        self.second = target.new_ones(()) if global_scale is None else global_scale
        self.width = _width(format)
        self.values = torch.empty_like(target)
        blocks = -(-len(target) // self.width)
        self.scales = (
            torch.empty(blocks, target.shape[1], device=target.device, dtype=torch.float32) if step is None else None
        )

    def feed_back(self, rows: slice = slice(None)) -> None:
        """Runs GPTQ's pass over some outputs, from no values."""
        self._pass(_feed_back, rows)

    def descend(self, rows: slice = slice(None)) -> None:
        """Sweeps once over some outputs."""
        self._pass(_descend, rows)

    def _pass(self, run: Callable[..., None], rows: slice) -> None:
        scales = None if self.scales is None else self.scales[:, rows]
        work = self.target[:, rows], self.values[:, rows], scales
        run(*work, self.factor, self.width, self._window(rows), self.parts)

    def _window(self, rows: slice) -> _SolveWindow:
        # Kernels take contiguous values, so that on a GPU all outputs go together.
        if self.target.is_cuda and len(self.target) % self.width == 0:
            if self.format.is_nvfp4:
                return _nvfp4_window(self.second)
            if self.step is not None:
                return _fixed_window(self.format.element, self.step)
        if self.step is None:
            return partial(_solve_window, partial(_search, self.format, self.second, self.shortlist))
        return partial(_solve_window, partial(_round, self.format.element, self.step[:, rows]))


def encoded(
    values: Tensor,
    scales: Tensor | None,
    fixed: FixedScales | None,
    factor: Factor,
    format: Format,
    global_scale: Tensor | None,
) -> BlockScaledTensor:
    """Returns the codes and scales of `values` `[in, out]` with `scales` `[blocks, out]`, in the original order."""
    order, width = factor.order, _width(format)
    if order is not None:
        values = torch.empty_like(values).index_copy_(0, order, values)
        # A block's inputs stay together, so the first input identifies the block.
        if scales is not None:
            scales = torch.empty_like(scales).index_copy_(0, order[::width] // width, scales)
    if scales is not None:
        scale = scales.t().contiguous()
    else:
        assert fixed is not None
        scale = fixed.scale
    return quantize_with_scale(values.t().contiguous(), format, scale, global_scale)


def _nvfp4_window(second: Tensor) -> _SolveWindow:
    """Returns `_solve_window` as one kernel for windows of whole NVFP4 blocks on a GPU."""
    from quant.kernels.rounding.portable_solvers import solve_nvfp4_window

    return partial(solve_nvfp4_window, second)


def compile_ahead(formats: Iterable[Format], device: torch.device | None) -> None:
    """Begins to compile the kernels with which a GPU rounds weights to these formats, in threads.

    A process whose kernels are in Triton's cache finds them there.
    """
    if device is not None and device.type == "cuda" and any(format.is_nvfp4 for format in formats):
        from quant.kernels.rounding.portable_solvers import compile_solver

        compile_solver(device)


def _fixed_window(element: Number, step: Tensor) -> _SolveWindow:
    """Returns `_solve_window` as one kernel for windows on a GPU whose grid steps are fixed."""
    from quant.kernels.rounding.portable_solvers import solve_fixed_window

    return partial(solve_fixed_window, element, step)


def _steps_of(scale: Tensor, weight: Tensor, format: Format, order: Tensor | None) -> Tensor:
    """Returns the grid step of every weight, `[in, out]`, where scales are chosen beforehand; inputs in `order`."""
    rows, columns = format.block_shape(weight.shape)
    step = scale.repeat_interleave(rows, 0)[: len(weight)].repeat_interleave(columns, 1)
    step = step[:, : weight.shape[1]].t()
    return step.contiguous() if order is None else step[order]


def _width(format: Format) -> int:
    """Returns how many columns are solved together: all that share a scale, where the scale is chosen in the loop."""
    rows, columns = format.block
    return columns if rows == 1 and 0 < columns <= _LAZY else _FIXED_WIDTH


def _search(
    format: Format, second: Tensor, shortlist: int, block: Tensor, start: int, inverse: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Solves a block whose scales are still to be chosen; see `_SolveBlock`."""
    return search_block(block, inverse, format, second, shortlist)


def _round(
    element: Number, step: Tensor, block: Tensor, start: int, inverse: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Solves a block of which the grid steps `[in, rows]` are fixed; see `_SolveBlock`."""
    own_step = step[start : start + len(block), None]
    values, errors = round_with_feedback(block, inverse, own_step, element)
    return values[:, 0], errors[:, 0], None


def _feed_back(
    target: Tensor,
    values: Tensor,
    scales: Tensor | None,
    factor: Factor,
    width: int,
    window: _SolveWindow,
    parts: Sequence[slice],
) -> None:
    """Runs GPTQ's pass: fills values `[in, out]` and scales `[blocks, out]`, block by block of `width` inputs.

    Several weights are solved together where all tensors have one more dimension in front.
    """
    upper, left = factor.inverse, target.clone()
    blocks = diagonal_blocks(upper, width)
    for span, within in _windows(target.shape[-2], width):
        window_scales = None if scales is None else scales[..., within, :]
        errors = window(
            left[..., span, :], upper[..., span, span], blocks[..., within, :, :], values[..., span, :], window_scales,
            span.start, False,
        )  # fmt: skip
        # Feedback to all later columns k at once: w_k -= Σ_j U_jk e_j over the columns j of the window.
        feedback = upper[..., span, span.stop :].mT
        for rows in parts:
            later = left[..., span.stop :, rows]
            (later.addmm_ if later.dim() == 2 else later.baddbmm_)(feedback, errors[..., rows], alpha=-1)


def _descend(
    target: Tensor,
    values: Tensor,
    scales: Tensor | None,
    factor: Factor,
    width: int,
    window: _SolveWindow,
    parts: Sequence[slice],
) -> None:
    """Sweeps once by block coordinate descent, in place: each block is solved again with the others fixed.

    The tensors are the same as in `_feed_back`.
    """
    moment, residual = SplitMatrix(factor.moment), SplitMatrix(target - values)
    inverses, uppers = block_factors(diagonal_blocks(factor.moment, width))
    outputs = values.shape[-1]
    for span, within in _windows(target.shape[-2], width):
        # The optimum of each block if it were free: q_b + M_bb⁻¹ M_b,: (w - q). A block a of the window that is
        # solved before it shifts that optimum by -M_bb⁻¹ M_ba times its move, which is `coupling`.
        products = [moment[..., span, :] @ residual[..., rows] for rows in parts]
        steps = torch.cat([*products, factor.moment[..., span, span]], dim=-1)
        steps = _by_blocks(inverses[..., within, :, :], steps)
        optimum, coupling = values[..., span, :] + steps[..., :outputs], steps[..., outputs:].mT
        window_scales = None if scales is None else scales[..., within, :]
        window(optimum, coupling, uppers[..., within, :, :], values[..., span, :], window_scales, span.start, True)
        residual[..., span, :] = target[..., span, :] - values[..., span, :]


def _windows(inputs: int, width: int) -> Iterator[tuple[slice, slice]]:
    """Returns the windows of `_LAZY` inputs, as columns and as blocks."""
    for first in range(0, inputs, _LAZY):
        last = min(first + _LAZY, inputs)
        yield slice(first, last), slice(first // width, -(-last // width))


def _by_blocks(blocks: Tensor, x: Tensor) -> Tensor:
    """Returns the block-diagonal matrix of `blocks` `[..., n, k, k]` times `x`, whose last block may be short."""
    count, width, _ = blocks.shape[-3:]
    short = count * width - x.shape[-2]
    whole = (pad(x, (0, 0, 0, short)) if short else x).unflatten(-2, (count, width))
    product = torch.bmm(blocks.flatten(0, -3), whole.flatten(0, -3)).view_as(whole)
    return product.flatten(-3, -2)[..., : x.shape[-2], :]


def _solve_window(
    solve: _SolveBlock,
    target: Tensor,
    coupling: Tensor,
    inverses: Tensor,
    values: Tensor,
    scales: Tensor | None,
    start: int,
    improve: bool,
) -> Tensor:
    """Solves the blocks of a window in turn; the moves of one shift the targets of the later ones.

    Args:
        solve: one block.
        target: `[inputs, n]`, the target of each block before the earlier ones of the window are solved.
        coupling: C `[inputs, inputs]`: block b should be `target[b]` less Σ C[a, b]ᵀ move[a] over blocks a before it.
        inverses: U of each block, `[blocks, k, k]`.
        values, scales: filled in place, `[inputs, n]` and `[blocks, n]`. With `improve`, they hold a solution, of which
            a block is kept where the new one is no better.
        start: first input of the window.
        improve: whether a move is the change of values; otherwise it is the error e.

    Returns:
        The moves, `[inputs, n]`.
    """
    moves = torch.empty_like(target)
    width = inverses.shape[-1]
    for index, first in enumerate(range(0, len(target), width)):
        columns = slice(first, min(first + width, len(target)))
        size = columns.stop - first
        block = target[columns]
        if first:
            block = block - coupling[:first, columns].t() @ moves[:first]
        inverse = inverses[index, :size, :size]
        new, errors, scale = solve(block, start + first, inverse)
        if not improve:
            values[columns], moves[columns] = new, errors
            if scales is not None and scale is not None:
                scales[index] = scale
            continue
        old = values[columns].clone()
        # Losses of the new and the old values of the block: both Σ e² under M_bb.
        better = errors.square().sum(0) < (to_errors(inverse) @ (block - old)).square().sum(0)
        values[columns] = torch.where(better, new, old)
        torch.sub(values[columns], old, out=moves[columns])
        if scales is not None and scale is not None:
            scales[index] = torch.where(better, scale, scales[index])
    return moves
