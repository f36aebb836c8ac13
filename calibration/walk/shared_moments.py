"""`Moments` adds up second moments of inputs that lie on several ranks, batch by batch in the order of the rows.

The inputs go to the ranks that add them up: of a layer that every token passes, each rank adds up some rows of the
matrices, and all get the sums; of an expert, the rank that will solve it adds up all. For there are many experts, each
gets few tokens, and each is solved by one rank. Both give the sums of one rank to the bit.

A second moment of 7168 inputs is 205 MB, and a layer of DeepSeek-V3 has 256 experts with two each. So the
moments of a few experts are made at a time (`slices_that_fit`), from inputs that take less memory, and dropped when
these experts are solved.
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from quant.calibration.fast_matmul import fast_matmul, has_pairs
from quant.calibration.ranks import Exchange, number_of, rank_and_world
from quant.calibration.statistics import LayerStats, MomentSum, pooled_stats, total_of

Waiting = tuple[int, Tensor, Tensor | None, int, Tensor | None, Tensor | None]
"""Inputs of a batch until they are multiplied out: its number, inputs, drift, calibration rows, noise and residual."""

# Bytes of second moments that a rank holds at a time.
_BUDGET = 1 << 29


class Moments:
    """A `MomentSum` over the batches of all ranks."""

    def __init__(self, width: int | None = None, unit: Tensor | None = None, *, later: bool = False) -> None:
        self.sum, self.unit, self.later = MomentSum(width, unit), unit, later or rank_and_world()[1] > 1
        self.waiting: list[Waiting] = []

    @property
    def tokens(self) -> int:
        """How many this rank has added."""
        return self.sum.tokens + sum(len(x) for _, x, *_ in self.waiting)

    def add(
        self, batch: int, x: Tensor, drift: Tensor | None = None, rows: int = 1, noise: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> None:  # fmt: skip
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
        else:
            _add_up(moments, exchange, owners)
    means = []
    for each in moments:
        means.append(each.sum.stats())
        if each.later or not again:
            each.sum = MomentSum(each.sum.width, each.unit)
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


def _add_up(moments: Sequence[Moments], exchange: Exchange, owners: Sequence[int] | None) -> None:
    # index · 2³² + number sorts by sum first and by batch within a sum.
    rank, most = rank_and_world()[0], 1 << 32
    # The rows of a batch travel as its first dimension, and errors as they are multiplied.
    own = [
        (index * most + number, [x.unflatten(0, (rows, -1)), noise, *_errors(x, drift), *_errors(x, residual)])
        for index, each in enumerate(moments)
        for number, x, drift, rows, noise, residual in each.waiting
    ]
    for number, (rows_of_x, noise, drift, shift, residual, push) in exchange.in_order(own):
        index = number // most
        assert rows_of_x is not None
        x = rows_of_x.flatten(0, 1)
        moments[index].sum.add_means(x, shift, noise, push)
        if owners is None or owners[index] == rank:
            moments[index].sum.add_spread(x, len(rows_of_x))
            moments[index].sum.add_products(x, drift, residual, shared=owners is None)
    if owners is None:
        for each in moments:
            each.sum.gather(exchange)


def _errors(x: Tensor, errors: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Returns errors beside inputs `x` as `MomentSum.add_products` takes them, and their sum over tokens."""
    return (errors.bfloat16() if errors is not None and has_pairs(x) else errors), total_of(errors)
