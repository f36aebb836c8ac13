"""The local search is compared with every choice there is, on losses whose parts interact."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest

from quant.calibration.allocation.measure_choices import Search
from quant.calibration.sensitivity.knapsack import KnapsackProblem, solve

GROUPS, FORMATS = 7, 3
SIZE = np.array([4.5, 8.0, 16.0])


class Interacting:
    """½ |Σ errors|² over tokens: what a group adds depends on all others. Counts what it is asked."""

    def __init__(self, seed: int, *, is_queued: bool = False) -> None:
        self.is_queued = is_queued
        rng = np.random.default_rng(seed)
        common = rng.normal(size=(1, 1, 24))
        own = rng.normal(size=(GROUPS, 1, 24)) + 2.0 * rng.choice([-1, 1], (GROUPS, 1, 1)) * common
        self.errors = own * rng.lognormal(0, 1, (GROUPS, 1, 1)) * np.array([1.0, 0.15, 0.0])[None, :, None]
        self.asked = self.started = 0
        self.remembered: tuple[int, ...] | None = None

    def value(self, choice: Any) -> float:
        return 0.5 * float(np.square(self.errors[np.arange(GROUPS), list(choice)].sum(0)).sum())

    def start(self, named: Mapping[str, int]) -> float:
        self.remembered = tuple(named.values())
        return self.loss(named)

    def loss(self, named: Mapping[str, int]) -> float:
        self.asked += 1
        return self.value(named.values())

    def start_loss(self, named: Mapping[str, int]) -> Callable[[], float]:
        self.started += 1
        return partial(self.loss, dict(named))


def _search(seed: int, measurements: int, *, is_queued: bool = False) -> tuple[Search, Interacting, np.ndarray, float]:
    cached_run = Interacting(seed, is_queued=is_queued)
    scores = 0.5 * np.square(cached_run.errors).sum(-1)
    weights = np.random.default_rng(seed + 1000).integers(1, 5, (GROUPS, 1))
    problem = KnapsackProblem(tuple(map(str, range(GROUPS))), ("a", "b", "c"), scores, {"bytes": weights * SIZE})
    limit = 6.5 * weights.sum()
    named = lambda choice: dict(zip(problem.groups, map(int, choice), strict=True))  # noqa: E731
    search = Search(problem, {"bytes": limit}, cached_run, named, measurements)
    return search, cached_run, solve(problem, {"bytes": limit}), limit


@pytest.mark.parametrize("seed", range(12))
def test_nothing_near_the_answer_is_better_and_often_nothing_at_all(seed: int) -> None:
    search, cached_run, first, limit = _search(seed, 10_000)
    found = search.improve(first)
    taken = search.problem.costs["bytes"]
    fits = [c for c in itertools.product(range(FORMATS), repeat=GROUPS) if taken[np.arange(GROUPS), c].sum() <= limit]
    value = cached_run.value(found)
    assert tuple(found) in fits and value <= cached_run.value(first) and search.loss_of(found) == value
    near = [c for c in fits if (np.array(c) != found).sum() <= 1]
    assert value <= min(map(cached_run.value, near)) * (1 + 2e-4)
    assert value <= 1.3 * min(map(cached_run.value, fits))


def test_it_does_better_than_scores_that_add_up() -> None:
    ratios = []
    for seed in range(12):
        search, cached_run, first, _ = _search(seed, 10_000)
        ratios.append(cached_run.value(search.improve(first)) / cached_run.value(first))
    assert max(ratios) <= 1 and np.mean(ratios) < 0.9, ratios


@pytest.mark.parametrize("measurements", [0, 1, 9, 20])
def test_it_stops_when_its_measurements_are_used_up(measurements: int) -> None:
    search, cached_run, first, limit = _search(3, measurements)
    found = search.improve(first)
    # A step that was begun is finished: nine sizes of step and a new start.
    assert cached_run.asked <= measurements + 12
    assert search.problem.total("bytes", found) <= limit
    assert cached_run.value(found) <= cached_run.value(first)


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("changes", [6, GROUPS * (FORMATS - 1)])
def test_gains_measure_as_many_changes_as_there_are_measurements_left(changes: int, at: int) -> None:
    search, cached_run, _, _ = _search(5, changes + 1)
    choice = np.full(GROUPS, at)
    table = search.gains(choice)
    assert cached_run.asked == changes + 1 and search.measurements == 0
    measured = [(g, f) for g, f in np.argwhere(np.isfinite(table)) if f != at]
    # From the smallest formats every change is to a larger one, and all measurements go to these.
    assert len(measured) == changes
    for group, format_ in measured:
        other = choice.copy()
        other[group] = format_
        assert table[group, format_] == pytest.approx(cached_run.value(other) - cached_run.value(choice), abs=1e-12)


@pytest.mark.parametrize("measurements", [9, 60, 10_000])
@pytest.mark.parametrize("seed", [3, 4])
def test_measuring_one_ahead_decides_the_same(seed: int, measurements: int) -> None:
    """As a GPU does: a measurement begins while the one before it is not waited for yet."""
    results, starts = [], []
    for is_queued in (False, True):
        search, cached_run, first, _ = _search(seed, measurements, is_queued=is_queued)
        choice = search.improve(first)
        results.append((tuple(choice), search.measurements, list(search.losses.items()), cached_run.asked))
        starts.append(cached_run.started)
    assert results[0] == results[1]
    assert starts[0] == starts[1]
