"""`gptq` rounds with second-order feedback, block scales in the loop, and coordinate descent after it.

A layer's output error over the calibration tokens is quadratic in its weights: row by row (q - w) M (q - w)ᵀ, with
M the second moment of the inputs. GPTQ rounds the columns in turn and lets the ones still free make up for the
error. With U the upper Cholesky factor of M⁻¹ (M⁻¹ = Uᵀ U), rounding column j with error e_j = (w_j - q_j) / U_jj
moves every later column k by -e_j U_jk, and Σ e_j² is exactly the loss at the end (Frantar et al., 2022).

Three things are done beyond that paper.

**Order.** The columns that come first have the most others left to make up for their error, so the loud ones go first,
where scales are coarser than E4M3's.
A block that shares a scale stays whole: blocks are taken by falling power of their inputs, and so are the columns
within one. Codes and scales are put back in their places, and nothing is stored of the order.

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from quant.calibration.ranks import Entry, dealt, in_order, rank_and_world, shares_rows
from quant.calibration.solvers.base import required_stats
from quant.calibration.solvers.block_search import round_with_feedback, search_block, search_threads, to_errors
from quant.calibration.solvers.rows import solve_by_rows
from quant.calibration.statistics import LayerStats, diagonal_blocks
from quant.formats.format import Format
from quant.formats.number import E4M3, Number
from quant.formats.parallel import in_parts
from quant.formats.scaling import nonzero
from quant.formats.tensor import BlockScaledTensor, choose_scale, quantize_with_scale

# Columns whose feedback to the rest of the matrix is gathered into one product.
_LAZY = 128
# Columns solved together where scales are fixed beforehand.
_FIXED_WIDTH = 32
# Columns of a factor that are taken together on a CPU and on a GPU, and the number of such slabs that ranks share.
_SLAB, _SLAB_GPU, _SHARED_SLABS = 256, 2048, 4

# Solves the blocks of a window: see `_solve_window`, whose arguments after the first these are.
_SolveWindow = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, int, bool], Tensor]
# Solves one block: (what it should be [k, n], its first column, U [k, k]) -> values, errors e [k, n], scales [n].
_SolveBlock = Callable[[Tensor, int, Tensor], tuple[Tensor, Tensor, Tensor | None]]


@dataclass(frozen=True)
class Gptq:
    """Second-order rounding. See the module docstring.

    Attributes:
        damping: added to the diagonal of the second moment, as a fraction of its mean.
        correction: how much of the input error that earlier layers left is made up for, where inputs stay in 16 bit;
            0 for none, 1 for all.
        sweeps: rounds of coordinate descent.
        shortlist: scales of a block that are tried with feedback.
    """

    damping: float = 0.01
    correction: float = 0.5
    sweeps: int = 1
    shortlist: int = 4
    rule: str = "mse"

    def __call__(
        self, weight: Tensor, stats: LayerStats | None, format: Format, *, global_scale: Tensor | None, name: str
    ) -> BlockScaledTensor:
        stats = required_stats(stats, name, "gptq")
        assert stats.second_moment is not None
        # E4M3 scales follow the weights so closely that the order gains nothing: SmolLM2 in NVFP4 lost 4% on WikiText.
        order = None if format.scale is E4M3 else block_order(stats.second_moment.diagonal(), _width(format))
        try:
            factor = factorize(stats.second_moment, self.damping, order)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if factor.damping > self.damping:
            warnings.warn(f"{name}: singular second moment, damped by {factor.damping:g} of its mean", stacklevel=2)
        drift = stats.drift

        def solve(rows: Tensor) -> BlockScaledTensor:
            target = corrected_weight(rows.float(), drift, factor)
            return gptq(target, factor, format, global_scale, sweeps=self.sweeps, shortlist=self.shortlist)

        return solve_by_rows(solve, weight, format)


@dataclass(frozen=True)
class Factor:
    """A damped second moment and its inverse Cholesky factor.

    Attributes:
        moment: M with damping, float32 `[in, in]`.
        inverse: U, upper triangular, with M⁻¹ = Uᵀ U.
        damping: what was added to the diagonal, as a fraction of its mean.
        order: inputs in the order in which rows and columns of both matrices stand; None for the weight's own.
    """

    moment: Tensor
    inverse: Tensor
    damping: float
    order: Tensor | None = None


def block_order(power: Tensor, width: int) -> Tensor:
    """Inputs, the loudest first, int64 `[in]`: blocks of `width` by their sums, and the inputs within each block.

    Args:
        power: the second moment's diagonal, `[in]`.
        width: inputs of a block; a shorter block at the end stays there.
    """
    whole = len(power) // width * width
    blocks = power[:whole].view(-1, width)
    ranks = blocks.argsort(dim=1, descending=True, stable=True)
    places = torch.arange(whole, device=power.device).view(-1, width).gather(1, ranks)
    rest = whole + power[whole:].argsort(descending=True, stable=True)
    return torch.cat([places[blocks.sum(1).argsort(descending=True, stable=True)].flatten(), rest])


def factorize(second_moment: Tensor, damping: float = 0.01, order: Tensor | None = None) -> Factor:
    """Damps a second moment until it can be inverted. A channel that is never active is left to itself.

    Args:
        second_moment: M, `[in, in]`.
        damping: added to the diagonal, as a fraction of its mean.
        order: of the inputs in the result; None leaves them in theirs.

    Raises:
        ValueError: not even a tenfold diagonal helps, which only NaN or infinity can cause.
    """
    diagonal = second_moment.diagonal()
    mean = nonzero(diagonal.mean())
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
    """The inverse of an upper triangular matrix `[in, in]`, some columns at a time.

    Columns that end at input k have zeros below it, so that k rows and columns of the matrix are enough for them: in
    all a third of the operations. Ranks that solve one weight together share the columns of a large matrix; one rank
    takes the same ones together, because a product of other sizes may add up in another order.
    """
    slabs = _slabs(upper)
    rank, shared = rank_and_world()[0], shares_rows() and len(slabs) >= _SHARED_SLABS
    owners = dealt([stop**2 * (stop - start) for start, stop in slabs.items()]) if shared else [rank] * len(slabs)
    own: list[Entry] = []
    for (start, stop), owner in zip(slabs.items(), owners, strict=True):
        if owner == rank:
            ones = upper.new_zeros(stop, stop - start)
            ones[start:].fill_diagonal_(1)
            own.append((start, [torch.linalg.solve_triangular(upper[:stop, :stop], ones, upper=True)]))
    inverse = torch.zeros_like(upper)
    for start, (slab,) in in_order(own, upper.device) if shared else own:
        assert slab is not None
        inverse[: slabs[start], start : slabs[start]] = slab
    return inverse


def _slabs(upper: Tensor) -> dict[int, int]:
    """Where runs of columns of a triangular matrix start and stop."""
    width = _SLAB_GPU if upper.is_cuda else _SLAB
    return {start: min(start + width, len(upper)) for start in range(0, len(upper), width)}


def _times_inverse(x: Tensor, upper: Tensor) -> Tensor:
    """`x` M⁻¹ = (`x` Uᵀ) U of `[n, in]`, U's zeros left out: little more than half of the operations."""
    left, found = torch.empty_like(x), torch.empty_like(x)
    for start, stop in _slabs(upper).items():
        left[:, start:stop] = x[:, start:] @ upper[start:stop, start:].t()
    for start, stop in _slabs(upper).items():
        found[:, start:stop] = left[:, :stop] @ upper[:stop, start:stop]
    return found


def corrected_weight(weight: Tensor, drift: Tensor | None, factor: Factor) -> Tensor:
    """W + W drift M⁻¹: the weight that maps the inputs as they are closest to the outputs as they should be.

    Args:
        weight: `[out, in]`.
        drift: mean of (r - x) xᵀ, `[in, in]`; None leaves the weight.
        factor: of the second moment.
    """
    if drift is None:
        return weight
    step = weight @ drift
    if factor.order is None:
        return weight + _times_inverse(step, factor.inverse)
    return weight.index_add(1, factor.order, _times_inverse(step[:, factor.order], factor.inverse))


def gptq(
    weight: Tensor,
    factor: Factor,
    format: Format,
    global_scale: Tensor | None = None,
    *,
    sweeps: int = 1,
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
    second = weight.new_ones(()) if global_scale is None else global_scale
    order = factor.order
    target = weight.t().contiguous() if order is None else weight.t()[order]
    values = torch.empty_like(target)
    scale = scales = step = None
    width = _width(format)
    if block_rows == 1 and 0 < block_columns <= _LAZY:
        scales = torch.empty(-(-len(target) // width), len(weight), device=weight.device)
    else:
        scale = choose_scale(weight, format, "mse", weight.abs().amax(), global_scale)
        shape = format.block_shape(weight.shape)
        step = scale.repeat_interleave(shape[0], 0)[: len(weight)].repeat_interleave(shape[1], 1)
        step = step[:, : weight.shape[1]].t()
        step = step.contiguous() if order is None else step[order]
    at_a_time = weight.is_cuda and format.is_nvfp4 and len(target) % width == 0

    def solve_rows(start: int, stop: int) -> None:
        rows = slice(start, stop)
        found = None if scales is None else scales[:, rows]
        if at_a_time:
            from quant.kernels.portable.nvfp4_solvers import solve_nvfp4_window

            window: _SolveWindow = partial(solve_nvfp4_window, second)
        elif step is None:
            window = partial(_solve_window, partial(_search, format, second, shortlist))
        else:
            window = partial(_solve_window, partial(_round, format.element, step[:, rows]))
        _feed_back(target[:, rows], values[:, rows], found, factor, width, window)
        for _ in range(sweeps):
            _descend(target[:, rows], values[:, rows], found, factor, width, window)

    # Where scales lie within rows, `weight` is one of the parts of `solve_by_rows` already.
    in_parts(solve_rows, len(weight), 1 if block_rows == 1 else search_threads(*weight.shape), weight.device)
    if order is not None:
        values = torch.empty_like(values).index_copy_(0, order, values)
        # A block's inputs lie together, so its first one tells its place.
        if scales is not None:
            scales = torch.empty_like(scales).index_copy_(0, order[::width] // width, scales)
    if scales is not None:
        scale = scales.t().contiguous()
    assert scale is not None
    return quantize_with_scale(values.t().contiguous(), format, scale, global_scale)


def _width(format: Format) -> int:
    """How many columns are solved together: those that share a scale, where that is chosen in the loop."""
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
    here = step[start : start + len(block), None]
    values, errors = round_with_feedback(block, inverse, here, element)
    return values[:, 0], errors[:, 0], None


def _feed_back(
    target: Tensor,
    values: Tensor,
    scales: Tensor | None,
    factor: Factor,
    width: int,
    window: _SolveWindow,
) -> None:
    """GPTQ's pass: fills values `[in, out]` and scales `[blocks, out]`, one block of `width` inputs after the other."""
    upper, left = factor.inverse, target.clone()
    blocks = diagonal_blocks(upper, width)
    for here, inside in _windows(len(target), width):
        found = None if scales is None else scales[inside]
        errors = window(left[here], upper[here, here], blocks[inside], values[here], found, here.start, False)
        left[here.stop :].addmm_(upper[here, here.stop :].t(), errors, alpha=-1)


def _descend(
    target: Tensor,
    values: Tensor,
    scales: Tensor | None,
    factor: Factor,
    width: int,
    window: _SolveWindow,
) -> None:
    """One sweep of block coordinate descent, in place: every block again, with all others as they are."""
    moment = factor.moment
    residual = target - values
    inverses, uppers = block_factors(diagonal_blocks(moment, width))
    for here, inside in _windows(len(target), width):
        # What each block would be if it were free: its own values plus the step to the minimum. A block of the
        # window that is solved before it moves that by `coupling`.
        steps = torch.cat([moment[here] @ residual, moment[here, here]], dim=1)
        steps = _by_blocks(inverses[inside], steps)
        wanted, coupling = values[here] + steps[:, : values.shape[1]], steps[:, values.shape[1] :].t()
        found = None if scales is None else scales[inside]
        window(wanted, coupling, uppers[inside], values[here], found, here.start, True)
        residual[here] = target[here] - values[here]


def _windows(inputs: int, width: int) -> Iterator[tuple[slice, slice]]:
    """Windows of `_LAZY` inputs, as columns and as blocks."""
    for first in range(0, inputs, _LAZY):
        last = min(first + _LAZY, inputs)
        yield slice(first, last), slice(first // width, -(-last // width))


def _by_blocks(blocks: Tensor, x: Tensor) -> Tensor:
    """The block-diagonal matrix of `blocks` `[n, k, k]` times `x`, whose last block may be short."""
    count, width, _ = blocks.shape
    whole = pad(x, (0, 0, 0, count * width - len(x))).view(count, width, -1)
    return torch.bmm(blocks, whole).flatten(0, 1)[: len(x)]


def _solve_window(
    solve: _SolveBlock,
    wanted: Tensor,
    coupling: Tensor,
    inverses: Tensor,
    values: Tensor,
    scales: Tensor | None,
    start: int,
    improve: bool,
) -> Tensor:
    """Solves the blocks of a window in turn; what one does moves what the later ones should be.

    Args:
        solve: one block.
        wanted: `[inputs, n]`, what each block should be before the earlier ones of the window are solved.
        coupling: C `[inputs, inputs]`: block b should be `wanted[b]` less Σ C[a, b]ᵀ move[a] over blocks a before it.
        inverses: U of each block, `[blocks, k, k]`.
        values, scales: filled here, `[inputs, n]` and `[blocks, n]`. With `improve`, they hold a solution, of which
            a block is kept where the new one is no better.
        start: first input of the window.
        improve: whether a move is the change of values; otherwise it is the error e.

    Returns:
        The moves, `[inputs, n]`.
    """
    moves = torch.empty_like(wanted)
    width = inverses.shape[-1]
    for index, first in enumerate(range(0, len(wanted), width)):
        here = slice(first, min(first + width, len(wanted)))
        size = here.stop - first
        block = wanted[here]
        if first:
            block = block - coupling[:first, here].t() @ moves[:first]
        inverse = inverses[index, :size, :size]
        new, errors, scale = solve(block, start + first, inverse)
        if not improve:
            values[here], moves[here] = new, errors
            if scales is not None and scale is not None:
                scales[index] = scale
            continue
        old = values[here].clone()
        better = errors.square().sum(0) < (to_errors(inverse) @ (block - old)).square().sum(0)
        values[here] = torch.where(better, new, old)
        torch.sub(values[here], old, out=moves[here])
        if scales is not None and scale is not None:
            scales[index] = torch.where(better, scale, scales[index])
    return moves


def block_factors(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Inverses of positive definite blocks `[n, k, k]`, and their upper factors U with C⁻¹ = Uᵀ U."""
    lower = torch.linalg.cholesky(blocks.flip(1, 2))
    eye = torch.eye(blocks.shape[-1], dtype=blocks.dtype, device=blocks.device).expand_as(blocks)
    uppers = torch.linalg.solve_triangular(lower.flip(1, 2), eye, upper=True)
    return uppers.mT @ uppers, uppers
