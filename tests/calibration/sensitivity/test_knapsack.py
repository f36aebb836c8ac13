"""The knapsack is compared with brute force, with dynamic programming over integers, and with a Lagrangian bound."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

from quant.calibration.sensitivity.knapsack import SCORE, Infeasible, KnapsackProblem, Near, pareto, smallest, solve


def _problem(
    groups: int, formats: int, seed: int, *, seconds: bool = False, forbidden: bool = False
) -> KnapsackProblem:
    rng = np.random.default_rng(seed)
    bits = np.array([4.5, 4.25, 6.25, 8.0, 8.25, 16.0])[:formats]
    numel = rng.integers(1, 64, (groups, 1)) * 512
    scores = numel * 2.0 ** (-2 * bits) * rng.lognormal(0, 1.5, (groups, 1)) * rng.lognormal(0, 0.3, (groups, formats))
    if forbidden:
        scores[rng.random(scores.shape) < 0.2] = np.inf
        scores[:, 0] = np.where(np.isfinite(scores).any(axis=1), scores[:, 0], 1.0)
    costs = {"bytes": np.round(numel * bits / 8)}
    if seconds:
        costs["seconds"] = numel * rng.uniform(1, 3, (groups, formats)) * 1e-9
    return KnapsackProblem(tuple(map(str, range(groups))), tuple("abcdef"[:formats]), scores, costs)


def _brute(
    problem: KnapsackProblem, limits: dict[str, float], minimize: str = SCORE, near: Near | None = None
) -> float:
    best = np.inf
    for choice in itertools.product(range(len(problem.candidates)), repeat=len(problem.groups)):
        picked = np.array(choice)
        if not np.isfinite(problem.total(SCORE, picked)):
            continue
        if near is not None and (picked != near.choice).sum() > near.changes:
            continue
        if all(problem.total(name, picked) <= limit for name, limit in limits.items()):
            best = min(best, problem.total(minimize, picked))
    return best


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("fraction", [0.02, 0.3, 0.8])
def test_optimum_of_brute_force(seed: int, fraction: float) -> None:
    problem = _problem(6, 4, seed, seconds=True, forbidden=seed % 2 == 1)
    low, high = smallest(problem, "bytes"), float(problem.costs["bytes"].max(axis=1).sum())
    limits = {"bytes": low + fraction * (high - low)}
    if seed >= 3:
        least = smallest(problem, "seconds")
        limits["seconds"] = 1.4 * least
    expected = _brute(problem, limits)
    if expected == np.inf:
        with pytest.raises(Infeasible):
            solve(problem, limits)
        return
    choice = solve(problem, limits)
    assert all(problem.total(name, choice) <= limit for name, limit in limits.items())
    assert problem.total(SCORE, choice) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_smallest_model_below_a_score(seed: int) -> None:
    problem = _problem(6, 4, seed)
    limit = 3 * smallest(problem, SCORE)
    choice = solve(problem, {SCORE: limit}, minimize="bytes")
    assert problem.total(SCORE, choice) <= limit
    assert problem.total("bytes", choice) == _brute(problem, {SCORE: limit}, "bytes")


@pytest.mark.parametrize("changes", [1, 2])
def test_near_a_known_choice(changes: int) -> None:
    problem = _problem(6, 3, 1)
    near = Near(np.zeros(6, dtype=int), changes)
    limits = {"bytes": 1.3 * problem.total("bytes", near.choice)}
    choice = solve(problem, limits, near=near)
    assert (choice != 0).sum() <= changes
    assert problem.total(SCORE, choice) == pytest.approx(_brute(problem, limits, near=near), rel=1e-6)


def test_budget_is_kept_to_the_byte_and_filled() -> None:
    """Dynamic programming over whole units of 16 bytes is exact, and so must the solver be."""
    problem = _problem(24, 4, 7)
    units = problem.costs["bytes"].astype(int) // 16
    assert (units * 16 == problem.costs["bytes"]).all()
    limit = int(units.min(axis=1).sum() * 1.31)
    best = np.full(limit + 1, np.inf)
    best[0] = 0.0
    for scores, costs in zip(problem.scores, units, strict=True):
        new = np.full_like(best, np.inf)
        for score, cost in zip(scores, costs, strict=True):
            new[cost:] = np.minimum(new[cost:], best[: len(best) - cost] + score)
        best = new
    choice = solve(problem, {"bytes": 16 * limit})
    assert problem.total("bytes", choice) <= 16 * limit
    assert problem.total(SCORE, choice) == pytest.approx(best.min(), rel=1e-6)


def test_a_thousand_groups_in_a_second() -> None:
    problem = _problem(1000, 6, 0)
    limit = 1.2 * smallest(problem, "bytes")
    started = time.process_time()
    choice = solve(problem, {"bytes": limit})
    assert time.process_time() - started < 2  # under 1 s on a machine that does nothing else
    assert problem.total("bytes", choice) <= limit
    # No multiplier gives a bound above the optimum; the best of them is close to it with so many groups.
    bounds = [
        (problem.scores + price * problem.costs["bytes"]).min(axis=1).sum() - price * limit
        for price in np.logspace(-9, 0, 400)
    ]
    assert max(bounds) <= problem.total(SCORE, choice) <= 1.01 * max(bounds)


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    for seed in range(3):
        problem = _problem(200, 6, seed)
        solve(problem, {"bytes": 1.4 * smallest(problem, "bytes")})
    assert capfd.readouterr().out == ""


def test_the_curve_is_a_curve() -> None:
    problem = _problem(12, 4, 3)
    points = pareto(problem, "bytes", 9)
    sizes = [problem.total("bytes", choice) for choice in points]
    losses = [problem.total(SCORE, choice) for choice in points]
    assert sizes == sorted(sizes) and losses == sorted(losses, reverse=True)
    assert sizes[0] == smallest(problem, "bytes")
    assert losses[-1] == pytest.approx(smallest(problem, SCORE))
    problem = _problem(60, 4, 3)
    sizes = [problem.total("bytes", choice) for choice in pareto(problem, "bytes", 17)]
    low, high = sizes[0], sizes[-1]
    assert sum(size < low + (high - low) / 4 for size in sizes) >= 7  # where budgets are, not evenly


def test_infeasible_says_the_smallest_feasible_value() -> None:
    problem = _problem(5, 3, 0)
    least = smallest(problem, "bytes")
    with pytest.raises(Infeasible, match=f"bytes: the limit is .* smallest feasible value is {least:g}"):
        solve(problem, {"bytes": least - 1})
    assert problem.total("bytes", solve(problem, {"bytes": least})) == least


def test_limits_that_exclude_each_other() -> None:
    scores = np.array([[1.0, 0.0]])
    problem = KnapsackProblem(
        ("g",), ("small", "quick"), scores, {"bytes": np.array([[1.0, 9]]), "seconds": np.array([[9.0, 1]])}
    )
    with pytest.raises(Infeasible, match=r"bytes ≤ 2 and seconds ≤ 2 together"):
        solve(problem, {"bytes": 2, "seconds": 2})


def test_a_score_or_cost_that_compares_with_nothing_is_refused_by_name() -> None:
    scores, bytes_ = np.array([[0.1, np.inf], [0.2, 0.3]]), np.array([[1.0, 2.0], [1.0, 2.0]])
    problem = KnapsackProblem(("a", "b"), ("small", "large"), scores, {"bytes": bytes_})
    assert problem.allowed.tolist() == [[True, False], [True, True]]
    with pytest.raises(ValueError, match=r"^b in small: its score is nan$"):
        KnapsackProblem(("a", "b"), ("small", "large"), np.array([[0.1, np.inf], [np.nan, 0.3]]), {"bytes": bytes_})
    for value in (np.nan, np.inf):
        with pytest.raises(ValueError, match=rf"^a in large: its bytes is {value}$"):
            KnapsackProblem(("a", "b"), ("small", "large"), scores, {"bytes": np.array([[1.0, value], [1.0, 2.0]])})
