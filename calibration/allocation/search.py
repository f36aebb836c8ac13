"""A `Search` improves a choice by measuring its neighbours until none is better.

    flips    the joint loss with one group changed, for every group and format
    steps    the knapsack over those, within a few changes of the present choice: the gains of many changes do not add
             up, so several sizes of step are measured and the best is taken
    swaps    where no step helps: one group up and another down, most promising first; the first that helps is taken

Every measurement starts at the first block that differs and computes only the changes
(`calibration.sensitivity.baseline`), so hundreds take a minute on a GPU. With fewer measurements than flips, the flips
that scores find most promising are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from quant.calibration.allocation.space import key_of
from quant.calibration.sensitivity.baseline import Baseline
from quant.calibration.sensitivity.divergence import Later
from quant.calibration.sensitivity.knapsack import Infeasible, KnapsackProblem, Near, solve

_STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
# Of the swaps that flips promise to help, how many are measured before the search gives up.
_SWAPS = 200
# Losses on different devices and in different batches differ by rounding; a gain must be more than that.
_LEAST_GAIN = 1e-4
T = TypeVar("T")


@dataclass(eq=False)
class Search:
    """One search, on one text."""

    problem: KnapsackProblem
    limits: Mapping[str, float]  # budgets, by resource
    baseline: Baseline
    named: Callable[[np.ndarray], dict[str, str]]  # a function that returns the names of a choice's formats, by group
    measurements: int
    tick: Callable[[], None] = lambda: None
    losses: dict[tuple[int, ...], float] = field(default_factory=dict)  # measured losses, by choice

    def improve(self, choice: np.ndarray) -> np.ndarray:
        """Returns the best choice found; `choice` itself if none is better."""
        present = self._start(choice)
        while self.measurements > 0:
            # The other half is for steps and swaps.
            flips = self._flips(choice, present, self.measurements // 2)
            better = self._step(choice, present, flips)
            if better is None:
                better = self._swap(choice, present, flips)
            if better is None:
                break
            choice = better
            present = self._start(choice)
        return choice

    def gains(self, choice: np.ndarray) -> np.ndarray:
        """Returns the measured change of the loss by each change of one group of `choice`, `[G, F]`.

        All measurements that are left go to these changes, after one of `choice`. Infinite where none was left, for the
        changes that scores find least promising, and for formats that a group cannot take.
        """
        present = self._start(choice)
        return self._flips(choice, present, self.measurements)

    def loss_of(self, choice: np.ndarray) -> float:
        """Returns the loss of a choice that the search has measured."""
        return self.losses[key_of(choice)]

    def _start(self, choice: np.ndarray) -> float:
        self.measurements -= 1
        loss = self.baseline.start(self.named(choice))
        self.losses[key_of(choice)] = loss
        self.tick()
        return loss

    def _losses(self, choices: Iterable[np.ndarray], *, within: bool = False) -> Iterator[tuple[np.ndarray, float]]:
        """Yields choices with their losses, in turn; with `within`, as long as measurements are left.

        The next choice is started while the device still works on the one before, if it does so on its own. One that
        was started in vain, because the loop over these losses ends before it, does not count as a measurement.
        """
        started = self._started(choices, within=within)
        for choice, wait in _one_ahead(started) if self.baseline.is_queued else started:
            if within and self.measurements <= 0:
                return
            key = key_of(choice)
            if wait is not None:
                self.measurements -= 1
                self.losses[key] = wait()
                self.tick()
            yield choice, self.losses[key]

    def _started(self, choices: Iterable[np.ndarray], *, within: bool) -> Iterator[tuple[np.ndarray, Later | None]]:
        """Yields choices whose measurement was just started, with None for choices that were measured before."""
        last = None
        for choice in choices:
            if within and self.measurements <= 0:
                return
            key = key_of(choice)
            # The loss of the last one may still be under way.
            is_known = key in self.losses or key == last
            yield choice, None if is_known else self.baseline.start_loss(self.named(choice))
            last = key

    def _flips(self, choice: np.ndarray, present: float, count: int) -> np.ndarray:
        """Returns the change of the loss by each change of one group, `[G, F]`; infinite where it was not measured.

        At most `count` are measured.
        """
        table = np.full(self.problem.scores.shape, np.inf)
        # The present format costs nothing to keep.
        table[np.arange(len(choice)), choice] = 0.0
        flips = self._shortlist(choice, count)
        changed = (_changed(choice, [flip]) for flip in flips)
        for (group, format_), (_, loss) in zip(flips, self._losses(changed), strict=True):
            table[group, format_] = loss - present
        return table

    def _shortlist(self, choice: np.ndarray, count: int) -> list[tuple[int, int]]:
        """Returns the flips to measure: all, or the `count` most promising ones, by score per cost."""
        rows = np.arange(len(choice))
        flips = [(int(g), int(f)) for g, f in np.argwhere(self.problem.allowed) if choice[g] != f]
        if len(flips) <= count:
            return flips
        # Costs as fractions of their limits, so that bytes and seconds can be added.
        cost = sum(self.problem.costs[name] / max(abs(limit), 1e-300) for name, limit in self.limits.items())
        scores = self.problem.scores
        gain = scores - scores[rows, choice][:, None]
        extra = cost - np.asarray(cost)[rows, choice][:, None]
        # Negative gains are less loss: the most negative rate comes first.
        rate = gain / np.where(extra == 0, 1e-12, np.abs(extra))
        # Both larger and smaller formats, as a swap needs one of each; a side that has fewer leaves more to the other.
        up, down = (sorted((m for m in flips if up == (extra[m] > 0)), key=lambda m: rate[m]) for up in (True, False))
        half = max(count // 2, 1)
        return up[: max(half, count - len(down))] + down[: max(half, count - len(up))]

    def _step(self, choice: np.ndarray, present: float, flips: np.ndarray) -> np.ndarray | None:
        """Returns the best of the knapsack's answers near `choice`."""
        local = KnapsackProblem(self.problem.groups, self.problem.candidates, flips, self.problem.costs)
        best, least = None, present * (1 - _LEAST_GAIN)
        for candidate, loss in self._losses(self._answers(local, choice)):
            if loss < least:
                best, least = candidate, loss
        return best

    def _answers(self, local: KnapsackProblem, choice: np.ndarray) -> Iterator[np.ndarray]:
        """Yields the knapsack's answer for each number of changes that has one."""
        for changes in _STEPS:
            with suppress(Infeasible):
                yield solve(local, self.limits, near=Near(choice, changes))

    def _swap(self, choice: np.ndarray, present: float, flips: np.ndarray) -> np.ndarray | None:
        """Returns the first exchange of two groups that helps."""
        rows = np.arange(len(choice))
        # All pairs of measured flips at once: [moves, moves] matrices of their summed gains and costs.
        moves = np.argwhere(np.isfinite(flips) & (np.arange(flips.shape[1]) != choice[:, None]))
        gain = flips[moves[:, 0], moves[:, 1]]
        promised = gain[:, None] + gain[None]
        fits = moves[:, :1] < moves[:, 0]  # each pair once, and never two formats of one group
        for name, limit in self.limits.items():
            table = self.problem.costs[name]
            extra = (table - table[rows, choice][:, None])[moves[:, 0], moves[:, 1]]
            fits &= self.problem.total(name, choice) + extra[:, None] + extra[None] <= limit
        # Row-major order, as in promised[fits] below.
        pairs = np.argwhere(fits)
        best_first = pairs[np.argsort(promised[fits], kind="stable")][:_SWAPS]
        swapped = (_changed(choice, [moves[a], moves[b]]) for a, b in best_first)
        for candidate, loss in self._losses(swapped, within=True):
            if loss < present * (1 - _LEAST_GAIN):
                return candidate
        return None


def _one_ahead(items: Iterable[T]) -> Iterator[T]:
    """Yields items, each when the one after it has been made."""
    iterator = iter(items)
    for item in iterator:
        for following in iterator:
            yield item
            item = following
        yield item


def _changed(choice: np.ndarray, moves: Iterable[Sequence[int] | np.ndarray]) -> np.ndarray:
    """Returns a copy of a choice with other formats for some groups; `moves` are pairs of group and format."""
    changed = np.array(choice)
    for group, format_ in moves:
        changed[group] = format_
    return changed
