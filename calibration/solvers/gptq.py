"""`gptq` rounds with second-order feedback, block scales in the loop, and coordinate descent after it.

A layer's output error over the calibration tokens is quadratic in its weights: row by row (q - w) H (q - w)ᵀ, with
H the second moment of the inputs. GPTQ rounds the columns in turn and lets the ones still free make up for the
error. With U the upper Cholesky factor of H⁻¹ (H⁻¹ = Uᵀ U), rounding column j with error e_j = (w_j - q_j) / U_jj
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
its target to w_b + H_bb⁻¹ H_b,rest (w - q)_rest, and the block is solved again, scale and codes, under H_bb. A
change is kept where it lowers the loss, so a sweep can only improve.

Everything is laid out [in, out], so that a column of the weight is contiguous and all rows go in parallel. The file
reads from the whole weight (`gptq`) over a pass of 128 inputs at a time (`Rounding`) and the blocks of one such window
(`solve_window`) to a single block (`search_block`); then comes the algebra of U.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from threading import Thread
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from quant.base.errors import warn
from quant.base.parallel import bounds_of, in_parts
from quant.calibration.fast_matmul import (
    RightOperand,
    SplitMatrix,
    add_product,
    exact_operands,
    has_pairs,
    left_operand,
)
from quant.calibration.ranks import Exchange, dealt, gathered, rank_and_world, shares_rows
from quant.calibration.solvers import replay
from quant.calibration.solvers.interfaces import Shares, Solver, required_stats
from quant.calibration.solvers.row_parallel import LEAST_ROWS, WHOLE, search_threads, solve_by_rows
from quant.calibration.statistics import LayerStats, MomentSum, diagonal_blocks
from quant.formats.format import E4M3, FORMATS, Format, Number
from quant.formats.rounding import round_to
from quant.formats.scaling import SCALE_RULES, candidate_scales, nonzero
from quant.formats.superblocks import candidates, choose_scales, grid, levels, pack_scales, units
from quant.formats.tensor import BlockScaledTensor, choose_scale, quantize_with_scale

# Columns whose feedback to the rest of the matrix is gathered into one product.
_LAZY = 128
# Two codes of a block in one float, and a step that rounds everything to zero.
_CODES, _HUGE = 256, 1e30
# Columns solved together where scales are fixed beforehand.
_FIXED_WIDTH = 32
# Numbers of a block under its candidate scales that a CPU computes together: they stay in the cache.
_TILE = 1 << 17
# Columns of a factor that are taken together on a CPU and on a GPU.
_SLAB, _SLAB_GPU = 256, 2048
# Columns of a triangular matrix that a GPU inverts, of a matrix that it factorizes by itself, and leaves of a matrix
# that ranks share.
_LEAF, _WHOLE, _SHARED_LEAVES = 1024, 8192, 8

# Errors of earlier layers that are made up for where inputs stay in 16 bit, and where they are rounded: their own
# rounding is not made up for.
_IN_16_BIT, _ROUNDED = Shares(drift=0.5, residual=0.5), Shares(drift=0.25, residual=0.25)

# Solves the blocks of a window; takes the arguments of `solve_window` after the first.
_SolveWindow = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, int, bool], Tensor]
# Solves one block: (its target [k, n], its first column, U and U⁻ᵀ [k, k]) -> values, errors e [k, n], scales [n].
_SolveBlock = Callable[[Tensor, int, Tensor, Tensor], tuple[Tensor, Tensor, Tensor | None]]


@dataclass(frozen=True)
class Gptq(Solver):
    """Second-order rounding; see the module docstring."""

    damping: float = 0.01  # added to the diagonal of H, as a fraction of its mean
    shares: Shares = _IN_16_BIT
    rounded_shares: Shares = _ROUNDED
    sweeps: int = 1  # of coordinate descent
    shortlist: int = 4  # scales of a block that are tried with feedback
    rule: str = "mse"

    needs_moment = True
    feeds_back = True

    def __call__(
        self, weight: Tensor, stats: LayerStats | None, format: Format, *, global_scale: Tensor | None, name: str
    ) -> BlockScaledTensor:
        stats = required_stats(stats, name, "gptq")
        factor = self.factor(stats, format, name)
        solve = partial(
            gptq, factor=factor, format=format, global_scale=global_scale, drift=stats.drift, sweeps=self.sweeps,
            shortlist=self.shortlist,
        )  # fmt: skip
        return solve_by_rows(solve, weight, format, stats.residual)

    def shares_where(self, inputs_are_rounded: bool) -> Shares:
        return self.rounded_shares if inputs_are_rounded else self.shares

    def batches_small(self, weight: Tensor, format: Format) -> bool:
        # A weight of more rows is solved in parts, which fill the GPU by themselves.
        small = weight.is_cuda and len(weight) < 2 * LEAST_ROWS and weight.shape[1] % _width(format) == 0
        return small and format.is_nvfp4

    def together(
        self, weights: Sequence[Tensor], stats: Sequence[LayerStats], format: Format, global_scales: Tensor, name: str
    ) -> list[BlockScaledTensor]:
        factors = [self.factor(each, format, name) for each in stats]
        corrected = [
            corrected_weight(weight.float(), each.drift, factor, each.residual)
            for weight, factor, each in zip(weights, factors, stats, strict=True)
        ]
        return gptq_together(corrected, factors, format, global_scales, sweeps=self.sweeps)

    def factor(self, stats: LayerStats, format: Format, name: str) -> Factor:
        """Returns the factor of the inputs' second moment, in the order in which inputs are rounded."""
        # E4M3 scales follow the weights so closely that the order gains nothing: SmolLM2 in NVFP4 lost 4% on WikiText.
        order = None if format.scale is E4M3 else block_order(stats.matrix.diagonal(), _width(format))
        factor = factorize(stats.matrix, self.damping, order, name)
        if factor.damping > self.damping:
            warn(f"{name}: singular second moment, damped by {factor.damping:g} of its mean")
        return factor


def gptq(
    weight: Tensor, factor: Factor, format: Format, global_scale: Tensor | None = None, *, drift: Tensor | None = None,
    residual: Tensor | None = None, sweeps: int = 1, shortlist: int = 4, parts: Sequence[slice] = WHOLE,
) -> BlockScaledTensor:  # fmt: skip
    """Rounds `weight` against the quadratic loss of `factor`.

    Args:
        weight: `[out, in]`, finite; solved in float32.
        factor: H and U.
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
    step = None if fixed is None else fixed.step
    target = by_input(weight, factor) if fixed is None else by_input(weight, factor) + fixed.shift
    supers = superblocks(weight, format, factor)
    rounding = Rounding(target, factor, format, global_scale, shortlist, step, parts, sweeps=sweeps, supers=supers)
    # Without a kernel, E4M3's grid would be copied to the GPU while launches are recorded.
    if weight.is_cuda and (rounding.kernel is not None or format.scale is not E4M3):
        rounding = replay.run(rounding)
    else:
        # Where scales lie within rows, `weight` is one of the threads' parts of `solve_by_rows` already.
        threads = 1 if format.block[0] == 1 else search_threads(*weight.shape)
        in_parts(lambda start, stop: rounding.run(slice(start, stop)), weight, len(weight), threads)
    return encoded(rounding.values, rounding.scales, fixed, factor, format, global_scale, supers)


def gptq_together(
    weights: Sequence[Tensor], factors: Sequence[Factor], format: Format, global_scales: Tensor, *, sweeps: int = 1
) -> list[BlockScaledTensor]:
    """Rounds several weights of one shape, each against its own quadratic loss, in the launches of one.

    Weights `[out, in]` are corrected for the errors of earlier layers, inputs are in their own order, and the format's
    scales are searched in the loop; global scales are `[weights]`.
    """
    from quant.kernels.rounding.portable_solvers import solve_nvfp4_window

    # By columns, as U of one weight, for which the kernels are compiled.
    U = torch.stack([f.U.mT for f in factors]).mT
    several = Factor(torch.stack([f.H for f in factors]), U, max(f.damping for f in factors))
    target = torch.stack([weight.t() for weight in weights])
    kernel = partial(solve_nvfp4_window, global_scales)
    rounding = Rounding(target, several, format, global_scales, shortlist=0, kernel=kernel, sweeps=sweeps)
    if target.is_cuda:
        rounding = replay.run(rounding)
    else:
        rounding.run()
    assert rounding.scales is not None
    return [
        encoded(value, scale, None, factor, format, second)
        for value, scale, factor, second in zip(rounding.values, rounding.scales, factors, global_scales, strict=True)
    ]


class FixedScales(NamedTuple):
    """Scales that are chosen before rounding, because they span rows, or whole rows."""

    scale: Tensor  # as in `BlockScaledTensor`
    step: Tensor  # the grid step of every weight, [in, out], inputs in the factor's order
    # What is added to weights before they are divided, of the shape of `step` or one zero: where blocks have a minimum,
    # the loop rounds shifted weights, whose errors are those of the weights themselves.
    shift: Tensor


def fixed_scales(weight: Tensor, format: Format, global_scale: Tensor | None, factor: Factor) -> FixedScales | None:
    """Returns the scales of `weight` `[out, in]`; None where the loop chooses the scales of blocks within a row."""
    if format.superblock:
        return None
    if format.has_packed_scales:
        power = factor.H.diagonal() if factor.order is None else _unordered(factor.H.diagonal(), factor.order)
        scale = choose_scales(weight, format, power)
        step, shift = (x.t().contiguous() if factor.order is None else x.t()[factor.order] for x in grid(scale, format))
        return FixedScales(scale, step, shift)
    if format.block[0] == 1 and 0 < format.block[1] <= _LAZY:
        return None
    scale = choose_scale(weight, format, "mse", weight.abs().amax(), global_scale)
    rows, columns = format.block_shape(weight.shape)
    step = scale.repeat_interleave(rows, 0)[: len(weight)].repeat_interleave(columns, 1)
    step = step[:, : weight.shape[1]].t()
    step = step.contiguous() if factor.order is None else step[factor.order]
    return FixedScales(scale, step, step.new_zeros(()))


def _unordered(x: Tensor, order: Tensor) -> Tensor:
    """Returns `x` `[in, …]`, which is in `order`, in the original order of the inputs."""
    return torch.empty_like(x).index_copy_(0, order, x)


class Superblocks(NamedTuple):
    """The scales of superblocks, which are chosen beforehand; those of their blocks are searched in the loop."""

    units: list[Tensor]  # d and, where there is one, d_min, [in / superblock, out]
    of_block: Tensor  # the superblock of each block, in the factor's order, int64 [blocks]

    def of_rows(self, rows: Tensor | slice) -> Superblocks:
        """Returns those of some outputs."""
        return self._replace(units=[unit[:, rows] for unit in self.units])


def superblocks(weight: Tensor, format: Format, factor: Factor) -> Superblocks | None:
    """Returns the superblocks of `weight` `[out, in]`; None for a format without any."""
    if not format.superblock:
        return None
    power = factor.H.diagonal() if factor.order is None else _unordered(factor.H.diagonal(), factor.order)
    chosen = units(choose_scales(weight, format, power), format)
    width = format.block[1]
    order = torch.arange(0, weight.shape[1], width, device=weight.device)
    order = order if factor.order is None else factor.order[::width]
    return Superblocks([unit.t().contiguous() for unit in chosen], order // format.superblock)


def by_input(weight: Tensor, factor: Factor) -> Tensor:
    """Returns `weight` `[out, in]` as solvers lay it out: `[in, out]`, inputs in the factor's order."""
    return weight.t().contiguous() if factor.order is None else weight.t()[factor.order]


def encoded(
    values: Tensor, scales: Tensor | None, fixed: FixedScales | None, factor: Factor, format: Format,
    global_scale: Tensor | None, supers: Superblocks | None = None,
) -> BlockScaledTensor:  # fmt: skip
    """Returns the codes and scales of `values` `[in, out]` with `scales` `[blocks, out]`, in the original order."""
    order, width = factor.order, _width(format)
    if fixed is not None:
        values = values - fixed.shift
    if order is not None:
        values = _unordered(values, order)
        # A block's inputs stay together, so the first input identifies the block.
        if scales is not None:
            scales = _unordered(scales, order[::width] // width)
    if scales is not None and supers is not None:
        codes = [scales % _CODES, scales // _CODES][: len(supers.units)]
        scale = pack_scales([u.t() for u in supers.units], [code.t() for code in codes], format)
    elif scales is not None:
        scale = scales.t().contiguous()
    else:
        assert fixed is not None
        scale = fixed.scale
    return quantize_with_scale(values.t().contiguous(), format, scale, global_scale)


def _width(format: Format) -> int:
    """Returns how many columns are solved together: all that share a scale, where the scale is chosen in the loop."""
    rows, columns = format.block
    return columns if rows == 1 and 0 < columns <= _LAZY else _FIXED_WIDTH


# ---- a pass over a weight


class Rounding:
    """Rows of a weight while they are rounded; several weights where all tensors have one more dimension in front.

    Args:
        target: `[in, out]`, contiguous, inputs in the factor's order.
        kernel: solves the windows, in place of the kernel for the device of `target`, or of `solve_window`.
        sweeps: rounds of coordinate descent in `run`.
        supers: the scales of superblocks, of a format that has them.

    Attributes:
        values: `[in, out]`.
        scales: `[blocks, out]`; None where they are fixed. Under superblocks, the codes s + 256 m.
    """

    def __init__(
        self, target: Tensor, factor: Factor, format: Format, global_scale: Tensor | None, shortlist: int,
        step: Tensor | None = None, parts: Sequence[slice] = WHOLE, kernel: _SolveWindow | None = None, sweeps: int = 1,
        supers: Superblocks | None = None,
    ) -> None:  # fmt: skip
        self.sweeps = sweeps
        self.target, self.factor, self.format, self.shortlist, self.step = target, factor, format, shortlist, step
        self.second = target.new_ones(()) if global_scale is None else global_scale
        self.width, self.parts, self.supers = _width(format), parts, supers
        self.values = torch.empty_like(target)
        *several, inputs, outputs = target.shape
        shape = (*several, -(-inputs // self.width), outputs)
        self.scales = torch.empty(shape, device=target.device, dtype=torch.float32) if step is None else None
        # Kernels take contiguous values, so that on a GPU all outputs go together.
        if kernel is None and target.is_cuda and inputs % self.width == 0:
            from quant.kernels.rounding.portable_solvers import solve_fixed_window, solve_nvfp4_window

            if format.is_nvfp4:
                kernel = partial(solve_nvfp4_window, self.second)
            elif step is not None:
                kernel = partial(solve_fixed_window, format.element, step)
        self.kernel = kernel

    @cached_property
    def blocks(self) -> tuple[Tensor, ...]:
        """The diagonal blocks of U, the inverses of those of H, and their upper factors, each `[blocks, k, k]`."""
        first, own = diagonal_blocks(self.factor.U, self.width), diagonal_blocks(self.factor.H, self.width)
        inverses, upper = block_factors(own)
        # Where no kernel solves windows, U⁻ᵀ of both follow.
        to_errors = () if self.kernel is not None else (_to_errors(first), _to_errors(upper))
        return first, inverses, upper, *to_errors

    @property
    def key(self) -> Any:
        """What the launches of `run` depend on; see `replay`."""
        parts = tuple((part.start, part.stop) for part in self.parts)
        shapes = [(each.shape, each.stride(), each.device) for each in self.operands()]
        return self.format, self.shortlist, self.sweeps, parts, *shapes

    def operands(self) -> list[Tensor]:
        """Returns the tensors that are read."""
        scales = [] if self.step is None else [self.step]
        if self.supers is not None:
            scales += [*self.supers.units, self.supers.of_block]
        return [self.target, self.factor.H, self.factor.U, *self.blocks, self.second, *scales]

    def copy(self) -> Rounding:
        """Returns a rounding of copies of all operands, which has no results yet."""
        H, U = self.factor.H.clone(), self.factor.U.clone()
        second, step = self.second.clone(), None if self.step is None else self.step.clone()
        supers = None
        if self.supers is not None:
            supers = Superblocks([unit.clone() for unit in self.supers.units], self.supers.of_block.clone())
        own = Rounding(
            self.target.clone(), replace(self.factor, H=H, U=U), self.format, second, self.shortlist, step, self.parts,
            sweeps=self.sweeps, supers=supers,
        )  # fmt: skip
        own.blocks = tuple(each.clone() for each in self.blocks)
        return own

    def run(self, rows: slice = slice(None)) -> None:
        """Runs GPTQ's pass and the sweeps after it over some outputs."""
        self.feed_back(rows)
        for _ in range(self.sweeps):
            self.descend(rows)

    def feed_back(self, rows: slice = slice(None)) -> None:
        """Runs GPTQ's pass over some outputs: fills values and scales, block by block of `width` inputs."""
        left, values, scales = self.target[..., rows].clone(), self.values[..., rows], self._scales(rows)
        U, blocks, solve = self.factor.U, self.blocks[0], self._window_solver(rows, *self.blocks[3:4])
        for span, within in self._windows():
            errors = solve(
                left[..., span, :], U[..., span, span], blocks[..., within, :, :], values[..., span, :],
                None if scales is None else scales[..., within, :], span.start, False,
            )  # fmt: skip
            if span.stop < U.shape[-1]:
                # Feedback to all later columns k at once: w_k -= Σ_j U_jk e_j over the columns j of the window.
                self._add(left[..., span.stop :, :], U[..., span, span.stop :].mT, RightOperand(errors), factor=-1)

    def descend(self, rows: slice = slice(None)) -> None:
        """Sweeps once over some outputs by block coordinate descent: each block is solved with the others fixed."""
        target, values, scales = self.target[..., rows], self.values[..., rows], self._scales(rows)
        H, off, (_, inverses, U, *to_errors) = self.factor.H, RightOperand(target - values), self.blocks
        solve = self._window_solver(rows, *to_errors[1:])
        for span, within in self._windows():
            # The optimum of each block if it were free: q_b + H_bb⁻¹ H_b,: (w - q). A block a of the window that is
            # solved before it shifts that optimum by -H_bb⁻¹ H_ba times its move, which is `coupling`.
            pull = _by_blocks(inverses[..., within, :, :], H[..., span, :])
            optimum = values[..., span, :].clone()
            self._add(optimum, pull, off)
            window_scales = None if scales is None else scales[..., within, :]
            solve(
                optimum, pull[..., span].mT, U[..., within, :, :], values[..., span, :], window_scales, span.start, True
            )
            off.set(span, target[..., span, :], minus=values[..., span, :])

    def _add(self, total: Tensor, left: Tensor, right: RightOperand, factor: float = 1.0) -> None:
        """Computes `total += factor · left @ right`, each part of the outputs by itself."""
        left, stacked = left_operand(left), right.stacked
        for part in self.parts:
            add_product(total[..., part], left, stacked[..., part], factor)

    def _scales(self, rows: slice) -> Tensor | None:
        return None if self.scales is None else self.scales[..., rows]

    def _windows(self) -> Iterator[tuple[slice, slice]]:
        """Yields the windows of `_LAZY` inputs, as columns and as blocks."""
        inputs = self.target.shape[-2]
        for first in range(0, inputs, _LAZY):
            last = min(first + _LAZY, inputs)
            yield slice(first, last), slice(first // self.width, -(-last // self.width))

    def _window_solver(self, rows: slice, to_errors: Tensor | None = None) -> _SolveWindow:
        if self.kernel is not None:
            return self.kernel
        solve: _SolveBlock
        if self.step is not None:
            solve = partial(round_block, self.format.element, self.step[:, rows])
        elif self.supers is not None:
            solve = partial(search_codes, self.supers.of_rows(rows), self.format, self.shortlist)
        else:

            def solve(block: Tensor, start: int, U: Tensor, own: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
                return search_block(block, U, self.format, self.second, self.shortlist, own)

        return partial(solve_window, solve, to_errors)


def _by_blocks(blocks: Tensor, x: Tensor) -> Tensor:
    """Returns the block-diagonal matrix of `blocks` `[..., n, k, k]` times `x`, whose last block may be short."""
    count, width, _ = blocks.shape[-3:]
    short = count * width - x.shape[-2]
    whole = (pad(x, (0, 0, 0, short)) if short else x).unflatten(-2, (count, width))
    product = torch.bmm(blocks.flatten(0, -3), whole.flatten(0, -3)).view_as(whole)
    return product.flatten(-3, -2)[..., : x.shape[-2], :]


def compile_ahead(formats: Iterable[Format], device: torch.device | None) -> None:
    """Begins to compile the kernels with which a GPU rounds weights to these formats, in threads, by rounding a weight.

    Triton takes 4 s for each of the two large ones, most of them without Python's lock, and keeps them on the disk for
    later processes. A launch waits for the kernel that it needs.
    """
    if device is None or device.type != "cuda" or not any(format.is_nvfp4 for format in formats):
        return

    def round_one(step: Callable[[Rounding], object]) -> None:
        # An error is left to the weight that comes upon it again.
        with suppress(Exception), torch.cuda.device(device), torch.no_grad():
            # By columns, as U of every weight: Triton compiles another kernel for other strides.
            eye = torch.eye(512, device=device, dtype=torch.float32).t()
            factor = Factor(eye, eye, 0.0)
            step(Rounding(eye.contiguous(), factor, FORMATS["nvfp4"], eye.new_ones(()), shortlist=1))

    def correct(rounding: Rounding) -> None:
        moments = MomentSum()
        moments.add(rounding.target, rounding.target)
        corrected_weight(rounding.target, moments.cross, factorize(rounding.target))

    for step in (Rounding.feed_back, Rounding.descend, correct):
        Thread(target=round_one, args=(step,), name="compile").start()


# ---- the blocks of a window


def solve_window(
    solve: _SolveBlock, to_errors: Tensor | None, target: Tensor, coupling: Tensor, U: Tensor, values: Tensor,
    scales: Tensor | None, start: int, improve: bool,
) -> Tensor:  # fmt: skip
    """Solves the blocks of a window in turn; the moves of one shift the targets of the later ones.

    Args:
        solve: one block.
        to_errors: U⁻ᵀ of every block of the weight, `[blocks, k, k]`, or None.
        target: `[inputs, n]`, the target of each block before the earlier ones of the window are solved.
        coupling: C `[inputs, inputs]`: block b should be `target[b]` less Σ C[a, b]ᵀ move[a] over blocks a before it.
        U: of each block, `[blocks, k, k]`.
        values, scales: filled in place, `[inputs, n]` and `[blocks, n]`. With `improve`, they hold a solution, of which
            a block is kept where the new one is no better.
        start: first input of the window.
        improve: whether a move is the change of values; otherwise it is the error e.

    Returns:
        The moves, `[inputs, n]`.
    """
    moves = torch.empty_like(target)
    width = U.shape[-1]
    inverses = _to_errors(U) if to_errors is None else to_errors[start // width :]
    for index, first in enumerate(range(0, len(target), width)):
        columns = slice(first, min(first + width, len(target)))
        size = columns.stop - first
        block = target[columns]
        if first:
            block = block - coupling[:first, columns].t() @ moves[:first]
        block_U, inverse = U[index, :size, :size], inverses[index, :size, :size]
        new, errors, scale = solve(block, start + first, block_U, inverse)
        if not improve:
            values[columns], moves[columns] = new, errors
            if scales is not None and scale is not None:
                scales[index] = scale
            continue
        old = values[columns].clone()
        # Losses of the new and the old values of the block: both Σ e² under H_bb.
        better = errors.square().sum(0) < (inverse @ (block - old)).square().sum(0)
        values[columns] = torch.where(better, new, old)
        torch.sub(values[columns], old, out=moves[columns])
        if scales is not None and scale is not None:
            scales[index] = torch.where(better, scale, scales[index])
    return moves


# ---- one block [k, n]: k neighbouring inputs of n rows
#
# Its loss is (w - q) C (w - q)ᵀ for every row, and C comes as the upper factor U of its inverse, C⁻¹ = Uᵀ U. In these
# terms the loss is Σ e_j² with
#
#     e_j = (w_j - Σ_{i<j} e_i U_ij - q_j) / U_jj
#
# so a greedy choice of each q_j, the value nearest to the terms before it in the bracket, is error feedback. Greedy
# is not optimal, but the loss it reaches is known exactly, and candidate scales are compared by it.


def search_block(
    block: Tensor, U: Tensor, format: Format, global_scale: Tensor, shortlist: int, to_errors: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the best values for a block `[k, n]` and their errors e `[k, n]`, and block scales `[n]`.

    All candidate scales of each row are tried without feedback first; the best `shortlist` are tried with it.
    """
    inverse = _to_errors(U) if to_errors is None else to_errors
    scales = _tried_scales(block, format, global_scale)
    if shortlist < len(scales):
        rows = block.shape[1] if block.is_cuda else max(_TILE // (len(block) * len(scales)), 1)
        tiles = zip(block.split(rows, dim=1), scales.split(rows, dim=1), strict=True)
        losses = [_losses(tile, tried * global_scale, inverse, format) for tile, tried in tiles]
        shortlists = [loss.topk(shortlist, dim=0, largest=False).indices for loss in losses]
        scales = scales.gather(0, torch.cat(shortlists, dim=1))
    values, errors = round_with_feedback(block, U, (scales * global_scale)[None], format.element)
    best = errors.square().sum(0).argmin(0, keepdim=True)
    index = best.expand(len(block), 1, -1)
    return values.gather(1, index)[:, 0], errors.gather(1, index)[:, 0], scales.gather(0, best)[0]


def _tried_scales(block: Tensor, format: Format, global_scale: Tensor) -> Tensor:
    """Returns the scales `[candidates, n]` that are tried for a block `[k, n]`."""
    amax = block.abs().amax(0)
    if format.scale is E4M3:
        return torch.stack(candidate_scales(amax, format, global_scale))
    # Powers of two (E8M0) and wide scales: the rule `max`, then the search's candidates around it.
    nearest = SCALE_RULES["max"](block.t()[:, None, None], format, global_scale)
    searched = candidate_scales(amax.view_as(nearest), format, global_scale)
    return torch.stack([scale.view(-1) for scale in (nearest, *searched)])


def _losses(block: Tensor, step: Tensor, to_errors: Tensor, format: Format) -> Tensor:
    """Returns what each step `[candidates, n]` loses on a block `[k, n]` without feedback."""
    in_steps = block[:, None] / step
    # In grid steps, which are squared and multiplied in only after the sum.
    off = _nearest(in_steps, format.element).sub_(in_steps)
    return (to_errors @ off.flatten(1)).square_().sum(0).view(step.shape).mul_(step).mul_(step)


def search_codes(
    supers: Superblocks, format: Format, shortlist: int, block: Tensor, start: int, U: Tensor, to_errors: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the same as `search_block` under superblocks: the codes of a block's scale and minimum as `scales`."""
    # Picked on the device: a number from there would be waited for.
    own = supers.of_block[start // format.block[1]].view(1)
    unit = [x.index_select(0, own)[0] for x in supers.units]
    # The diagonal of the block's own curvature U⁻¹ U⁻ᵀ weighs the errors while scales are fitted.
    codes = candidates(block.t(), to_errors.square().sum(0), unit, format)
    step, *minimum = (c * u for c, u in zip(codes, unit, strict=True))
    shift = minimum[0] - levels(format) * step if minimum else torch.zeros_like(step)
    step = torch.where(step == 0, _HUGE, step)
    shifted = block[:, None] + shift
    off = (_nearest(shifted / step, format.element) * step).sub_(shifted)
    loss = (to_errors @ off.flatten(1)).square_().sum(0).view(step.shape)
    best = loss.topk(min(shortlist, len(step)), dim=0, largest=False).indices
    step, shift, *codes = (x.gather(0, best) for x in (step, shift, *codes))
    values, errors = round_with_feedback(block, U, step[None], format.element, shift)
    best = errors.square().sum(0).argmin(0, keepdim=True)
    index = best.expand(len(block), 1, -1)
    packed = codes[0] + (_CODES * codes[1] if minimum else 0)
    return values.gather(1, index)[:, 0], errors.gather(1, index)[:, 0], packed.gather(0, best)[0]


def round_block(
    element: Number, step: Tensor, block: Tensor, start: int, U: Tensor, to_errors: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Solves a block of which the grid steps `[in, rows]` are fixed; see `_SolveBlock`."""
    values, errors = round_with_feedback(block, U, step[start : start + len(block), None], element)
    return values[:, 0], errors[:, 0], None


def round_with_feedback(
    block: Tensor, U: Tensor, step: Tensor, element: Number, shift: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the values and errors e of a block `[k, n]` on each of several grids, both `[k, candidates, n]`.

    Their steps are `[k, candidates, n]`; k may be 1 where all inputs share theirs. `shift` `[candidates, n]` is added
    to weights before they are divided, and subtracted from their values.
    """
    if block.is_cuda and len(step) == 1 and block.dtype is torch.float32:
        from quant.kernels.rounding.portable_solvers import feed_back_block

        return feed_back_block(block, U, step[0], element, shift)
    values = block.new_empty(len(block), *step.shape[1:])
    errors = torch.empty_like(values)
    step = step.expand_as(values)
    for j in range(len(block)):
        target = block[j]
        if j:
            target = target - (U[:j, j] @ errors[:j].flatten(1)).view(step.shape[1:])
        shifted = target if shift is None else target + shift
        torch.mul(_nearest(shifted / step[j], element), step[j], out=values[j])
        if shift is not None:
            values[j] -= shift
        torch.sub(target, values[j], out=errors[j]).div_(U[j, j])
    return values, errors


def _to_errors(U: Tensor) -> Tensor:
    """Returns U⁻ᵀ, which maps w - q to the errors e."""
    eye = torch.eye(U.shape[-1], dtype=U.dtype, device=U.device).expand_as(U)
    return torch.linalg.solve_triangular(U.mT, eye, upper=False)


def _nearest(x: Tensor, number: Number) -> Tensor:
    """Returns `round_to` in fewer passes over memory, for float grids that no dtype has; zeros lose their sign."""
    if number.torch_dtype is not None or number.is_integer:
        return round_to(x, number)
    x = x.clamp(-number.max, number.max)
    # 1.5 · 2^(23 - mantissa) powers of two: adding it leaves room for only the grid's digits, rounded to even.
    magic = (x.view(torch.int32) & 0x7F800000).view(torch.float32)
    magic.clamp_(min=number.min_normal).mul_(1.5 * 2.0 ** (23 - number.mantissa))
    return x.add_(magic).sub_(magic)


# ---- H and U; H⁻¹ itself is never formed


@dataclass(frozen=True)
class Factor:
    """The damped second moment of a layer's inputs and its inverse Cholesky factor."""

    H: Tensor  # mean of x xᵀ over the calibration tokens, damped on its diagonal, float32 [in, in]
    U: Tensor  # upper triangular, with H⁻¹ = Uᵀ U
    damping: float  # the share of the diagonal's mean that was added to it
    order: Tensor | None = None  # of the inputs, in which rows and columns of both stand; None for the weight's own


def block_order(power: Tensor, width: int) -> Tensor:
    """Returns the order of inputs by their power `[in]`, the second moment's diagonal; the loudest come first.

    Blocks of `width` inputs are sorted by their sums, and then the inputs within each block.
    """
    whole = len(power) // width * width
    blocks = power[:whole].view(-1, width)
    ranks = blocks.argsort(dim=1, descending=True, stable=True)
    inputs = torch.arange(whole, device=power.device).view(-1, width).gather(1, ranks)
    after_blocks = whole + power[whole:].argsort(descending=True, stable=True)
    return torch.cat([inputs[blocks.sum(1).argsort(descending=True, stable=True)].flatten(), after_blocks])


def factorize(second_moment: Tensor, damping: float = 0.01, order: Tensor | None = None, name: str = "") -> Factor:
    """Damps a second moment `[in, in]` until it can be inverted; a channel that is never active stays uncoupled.

    The damping is a fraction of the diagonal's mean. The result has the inputs in an order, or in theirs. ValueError
    where not even a tenfold diagonal helps, which only NaN or infinity can cause.
    """
    diagonal = second_moment.diagonal()
    mean = nonzero(diagonal.mean())
    # λ · mean(diag H) on the diagonal, as GPTQ's `percdamp`; mean(diag H) for a dead channel, whose row is zero.
    diagonal = diagonal if order is None else diagonal[order]
    used = damping
    while used <= 10:
        H = second_moment.clone() if order is None else second_moment[order][:, order]
        H.diagonal().add_(torch.where(diagonal > 0, used * mean, mean))
        U = _inverse_root(H)
        if U is not None:
            return Factor(H, U, used, order)
        used = max(10 * used, 1e-4)
    layer = f"{name}: " if name else ""
    raise ValueError(f"{layer}the second moment of the inputs cannot be inverted: it holds NaN or infinity")


def _inverse_root(H: Tensor) -> Tensor | None:
    """Returns U, upper, with H⁻¹ = Uᵀ U; None where H is not positive definite."""
    # H = R Rᵀ with R upper (a Cholesky of the flipped matrix), so U = R⁻¹: one factorization, no H⁻¹.
    if has_pairs(H) and len(H) > _WHOLE:
        inverse = torch.zeros_like(H).t()  # by columns, as below: kernels are compiled for the strides of U
        upper = _root_by_blocks(H, inverse)
        return None if upper is None else inverse_of_upper(upper, inverse)
    lower, info = torch.linalg.cholesky_ex(H.flip(0, 1))
    return None if int(info) else inverse_of_upper(lower.flip(0, 1))


def _root_by_blocks(H: Tensor, leaves: Tensor) -> Tensor | None:
    """Returns R, upper, with H = R Rᵀ, and zeros or not below it; `leaves` get the inverses of its diagonal blocks.

    On a GPU products as exact as float32's take two thirds of the time of float32's own, and ranks share them: each has
    some of the columns. The last columns come first.
    """
    R, infos = H.clone(), [torch.zeros((), dtype=torch.int32, device=H.device)]
    rank, world = rank_and_world() if shares_rows() else (0, 1)
    exchange = Exchange(H.device)
    for index, start in reversed(list(enumerate(range(0, len(H), _LEAF)))):
        own, above = slice(start, min(start + _LEAF, len(H))), slice(0, start)
        if index % world == rank:
            lower, info = torch.linalg.cholesky_ex(R[own, own].flip(0, 1))
            infos.append(info)
            R[own, own] = lower.flip(0, 1)
            leaves[own, own] = _inverse_of_leaf(R[own, own])
            if start:
                panel = torch.zeros_like(R[above, own])
                add_product(panel, exact_operands(R[above, own])[0], exact_operands(leaves[own, own])[1].t())
                R[above, own] = panel
        for matrix in (R[: own.stop, own], leaves[own, own]) if world > 1 else ():
            matrix.copy_(exchange.broadcast(matrix, matrix.shape, matrix.dtype, index % world))
        left, right = exact_operands(R[above, own])
        for other, first in enumerate(range(0, start, _LEAF)):
            if other % world == rank:
                last = first + _LEAF
                add_product(R[:last, first:last], left[:last], right[first:last].t(), factor=-1)
    failed = gathered(bool(torch.stack(infos).any())) if world > 1 else [bool(torch.stack(infos).any())]
    return None if any(failed) else R


def inverse_of_upper(upper: Tensor, inverse: Tensor | None = None) -> Tensor:
    """Returns the inverse of an upper triangular matrix `[in, in]`; `inverse` may have those of its diagonal blocks.

    It is found by halves: that of [[A, B], [0, C]] is [[A⁻¹, -A⁻¹ B C⁻¹], [0, C⁻¹]]. In pairs of BF16, at a condition
    of 10⁵, its error is 4e-6, and the loss of weights rounded with it is the same in float32. Ranks that solve one
    weight together share the rows of large corners; one rank takes the same rows together, because a product of other
    sizes may add up in another order.
    """
    size, leaf = len(upper), _LEAF if has_pairs(upper) else _SLAB
    found = torch.zeros_like(upper) if inverse is None else inverse
    if size <= leaf:
        return found.copy_(_inverse_of_leaf(upper)) if inverse is None else found
    half = -(-size // leaf) // 2 * leaf
    first, last = slice(None, half), slice(half, None)
    for part in (first, last):
        found[part, part] = inverse_of_upper(upper[part, part], None if inverse is None else inverse[part, part])
    rank, is_large = rank_and_world()[0], size >= _SHARED_LEAVES * leaf
    rows = [slice(*bounds) for bounds in bounds_of(half, _SHARED_LEAVES if is_large else 1)]
    shared = is_large and shares_rows()
    owners = dealt([(part.stop - part.start) * (size - part.start) for part in rows]) if shared else [rank] * len(rows)
    left, corner, right = SplitMatrix(found[first, first]), SplitMatrix(upper[first, last]), None
    for part, owner in zip(rows, owners, strict=True):
        if owner == rank:
            right = right or SplitMatrix(found[last, last])
            # Columns before the rows hold zeros.
            product = SplitMatrix(left[part, part.start :] @ corner[part.start :])
            torch.neg(product @ right, out=found[part, last])
    exchange = Exchange(upper.device)
    for part, owner in zip(rows, owners, strict=True) if shared else ():
        corner_rows = found[part, last]
        corner_rows.copy_(exchange.broadcast(corner_rows, corner_rows.shape, corner_rows.dtype, owner))
    return found


def _inverse_of_leaf(upper: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(upper, torch.zeros_like(upper).fill_diagonal_(1), upper=True)


def corrected_weight(
    weight: Tensor, drift: Tensor | None, factor: Factor, residual: Tensor | None = None, parts: Sequence[slice] = WHOLE
) -> Tensor:
    """Returns W + (W drift + residual) H⁻¹: maps the inputs as they are closest to the outputs as they should be.

    Args:
        weight: `[out, in]`.
        drift: mean of (r - x) xᵀ, `[in, in]`; None for no such term.
        factor: H and U.
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
        return weight + _times_inverse(step, factor.U, parts)
    return weight.index_add(1, factor.order, _times_inverse(step[:, factor.order], factor.U, parts))


def _times_inverse(x: Tensor, U: Tensor, parts: Sequence[slice]) -> Tensor:
    """Returns `x` H⁻¹ = (`x` Uᵀ) U of `[n, in]`, U's zeros left out: little more than half of the operations."""
    width, upper = _SLAB_GPU if U.is_cuda else _SLAB, SplitMatrix(U)
    slabs = [(start, min(start + width, len(U))) for start in range(0, len(U), width)]
    step, half, result = SplitMatrix(x), torch.empty_like(x), torch.empty_like(x)
    for start, stop in slabs:
        for rows in parts:
            half[rows, start:stop] = step[rows, start:] @ upper[start:stop, start:].t()
    step = SplitMatrix(half)
    for start, stop in slabs:
        for rows in parts:
            result[rows, start:stop] = step[rows, :stop] @ upper[:stop, start:stop]
    return result


def block_factors(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns inverses of positive definite blocks C `[..., k, k]`, and their upper factors U with C⁻¹ = Uᵀ U."""
    # Whether they are positive definite is asked on a CPU alone: on a GPU the answer would have to be waited for.
    lower = torch.linalg.cholesky_ex(blocks.flip(-2, -1), check_errors=not blocks.is_cuda)[0]
    eye = torch.eye(blocks.shape[-1], dtype=blocks.dtype, device=blocks.device).expand_as(blocks)
    U = torch.linalg.solve_triangular(lower.flip(-2, -1), eye, upper=True)
    return U.mT @ U, U
