"""`Moments` adds up second moments of inputs that lie on several ranks, batch by batch in the order of the rows.

There are two ways, and both give the sum of one rank to the bit.

*Together.* Each rank multiplies out its own batches, and the matrices [in, in] are added up in slabs of rows, each slab
by one rank (`Exchange.sum_in_order`). All ranks get the sum. This is for a layer that every token passes.

*By owners.* The inputs themselves go to the rank that will solve the layer, which adds them up by itself. This is for
experts: there are many, each gets few tokens, and each is solved by one rank.

A second moment of 7168 inputs is 205 MB, and a layer of DeepSeek-V3 has 256 experts with two each. So the
moments of a few experts are made at a time (`slices_that_fit`), from inputs that take less memory, and dropped when
these experts are solved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import torch

from quant.calibration.fast_matmul import difference_product, fast_matmul
from quant.calibration.ranks import Exchange, gathered, number_of, rank_and_world
from quant.calibration.statistics import LayerStats, MomentSpread, MomentSum, add_up, pooled_stats

Waiting = tuple[int, torch.Tensor, torch.Tensor | None, int, torch.Tensor | None, torch.Tensor | None]
"""Inputs of a batch until they are multiplied out: its number, inputs, drift, calibration rows, noise and residual."""

# Bytes of second moments that a rank holds at a time.
_BUDGET = 1 << 29


class Moments:
    """A `MomentSum` over the batches of all ranks."""

    def __init__(self, width: int | None = None, *, later: bool = False) -> None:
        self.sum, self.later = MomentSum(width), later or rank_and_world()[1] > 1
        self.waiting: list[Waiting] = []

    @property
    def tokens(self) -> int:
        """How many this rank has added."""
        return self.sum.tokens + sum(len(x) for _, x, *_ in self.waiting)

    def add(
        self,
        batch: int,
        x: torch.Tensor,
        drift: torch.Tensor | None = None,
        rows: int = 1,
        noise: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> None:
        """Adds inputs of this rank's `batch`-th batch; see `MomentSum.add`."""
        if self.later:
            drift, residual = (None if t is None else t.to(x) for t in (drift, residual))
            self.waiting.append((number_of(batch), x, drift, rows, noise, residual))
        else:
            self.sum.add(x, drift, rows, noise, residual)


def slices_that_fit(count: int, columns: int, width: int | None = None) -> list[slice]:
    """Returns slices of sums `[columns, columns]`, or of their diagonal blocks, that all ranks together can hold."""
    together = max(_BUDGET // (4 * columns * (width or columns)), 1) * rank_and_world()[1]
    return [slice(first, min(first + together, count)) for first in range(0, count, together)]


def stats_of(
    moments: Sequence[Moments], exchange: Exchange, owners: Sequence[int] | None = None, *, again: bool = False
) -> list[LayerStats | None]:
    """Returns the means of several sums over all ranks; None where no token came. All ranks must call this together.

    Second moment and drift of each sum are on its owner alone, or without owners on all ranks.
    """
    with fast_matmul():
        if rank_and_world()[1] == 1:
            for each in moments:
                for _, x, drift, rows, noise, residual in each.waiting:
                    each.sum.add(x, drift, rows, noise, residual)
        elif owners is None:
            for each in moments:
                _add_together(each, exchange)
        else:
            _add_at_owners(moments, exchange, owners)
    means = []
    for each in moments:
        means.append(each.sum.stats())
        if each.later or not again:
            each.sum = MomentSum(each.sum.width)
        if not again:
            each.waiting = []
    return means


def pooled(
    stats_by_sum: Sequence[LayerStats | None],
    exchange: Exchange,
    owners: Sequence[int] | None,
    tokens: int | None = None,
    before: LayerStats | None = None,
) -> LayerStats | None:
    """Returns the statistics of all tokens together, from sums of which each has its second moment at its owner.

    `tokens` and `before` are as in `pooled_stats`.
    """
    reached = [stats for stats in stats_by_sum if stats is not None]
    if owners is None or rank_and_world()[1] == 1:
        return pooled_stats(reached, tokens, before)
    rank = rank_and_world()[0]
    own = [
        (index, [stats.second_moment, stats.block_moments])
        for index, (stats, owner) in enumerate(zip(stats_by_sum, owners, strict=True))
        if stats is not None and owner == rank
    ]
    whole = (tensors for _, tensors in exchange.in_order(own))
    parts = [replace(s, second_moment=t[0], block_moments=t[1]) for s, t in zip(reached, whole, strict=True)]
    return pooled_stats(parts, tokens, before)


def _add_together(moments: Moments, exchange: Exchange) -> None:
    total, waiting = moments.sum, moments.waiting
    everywhere = gathered(
        [
            (number, *x.shape, drift is not None, 0 if residual is None else residual.shape[1], rows)
            for number, x, drift, rows, _, residual in waiting
        ]
    )
    outlines = [outline for _, *outline in chain.from_iterable(everywhere)]
    if not outlines:
        return
    numbers = [[number for number, *_ in part] for part in everywhere]
    _, columns, drifts, outputs, _ = outlines[0]
    means = [MomentSum(total.width) for _ in waiting]
    for part, (_, x, drift, rows, noise, error) in zip(means, waiting, strict=True):
        part.add_means(x, drift, noise, error)
        part.add_spread(x, rows)
    total.tokens = sum(tokens for tokens, *_ in outlines)
    # Vectors are added up in order on every rank; only the matrices are worth dealing out in slabs.
    small = [
        (number, [part.first, part.shift, part.noise, part.push, None if part.spread is None else part.spread.sums])
        for (number, *_), part in zip(waiting, means, strict=True)
    ]
    for _, (first, shift, noise, push, sums) in exchange.in_order(small):
        total.first, total.shift = add_up(total.first, first), add_up(total.shift, shift)
        total.noise, total.push = add_up(total.noise, noise), add_up(total.push, push)
        assert first is not None and sums is not None
        if total.spread is None:
            total.spread = MomentSpread(first)
            total.spread.tokens = total.tokens
            total.spread.squared_tokens = sum(tokens**2 // rows for tokens, *_, rows in outlines)
        total.spread.sums += sums

    def residual(index: int) -> torch.Tensor:
        _, x, *_, error = waiting[index]
        assert error is not None
        return difference_product(error, x)

    def second(index: int) -> torch.Tensor:
        part = MomentSum(total.width)
        part.add_products(waiting[index][1])
        assert part.second is not None
        return part.second

    def cross(index: int) -> torch.Tensor:
        _, x, drift, *_ = waiting[index]
        assert drift is not None
        return difference_product(drift, x).add_(0.0)  # no negative zeros, as in a sum that begins with zeros

    width = total.width
    shape = (columns, columns) if width is None else (-(-columns // width), width, width)
    total.second = exchange.sum_in_order(numbers, second, shape)
    if drifts and width is None:
        total.cross = exchange.sum_in_order(numbers, cross, shape)
    if outputs:
        total.residual = exchange.sum_in_order(numbers, residual, (outputs, columns))


def _add_at_owners(moments: Sequence[Moments], exchange: Exchange, owners: Sequence[int]) -> None:
    # index · 2³² + number sorts by sum first and by batch within a sum.
    rank, most = rank_and_world()[0], 1 << 32
    # The rows of a batch travel as its first dimension.
    own = [
        (index * most + number, [x.unflatten(0, (rows, -1)), drift, noise, residual])
        for index, each in enumerate(moments)
        for number, x, drift, rows, noise, residual in each.waiting
    ]
    for number, (x, drift, noise, residual) in exchange.in_order(own):
        index = number // most
        assert x is not None
        if owners[index] == rank:
            moments[index].sum.add(x.flatten(0, 1), drift, len(x), noise, residual)
        else:
            moments[index].sum.add_means(x.flatten(0, 1), drift, noise, residual)
