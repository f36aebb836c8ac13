"""`solve` chooses one format for every group: an exact multiple-choice knapsack.

    minimize    Σ_g Σ_f score[g, f] · x[g, f]
    subject to  Σ_f x[g, f] = 1                     every group gets exactly one format
                Σ_g Σ_f cost[g, f] · x[g, f] ≤ limit    for each resource: bytes, seconds
                x ∈ {0, 1}

HiGHS solves it by branch and cut (`scipy.optimize.milp`), to optimality: unlike a greedy walk along gain per bit, it
fills the last bits of a budget, and any number of budgets hold at once. Score and cost can change places: the
smallest model whose summed score stays below a limit is the same problem.

The solver works in floating point with tolerances, and a budget of bytes is exact. So costs are given as fractions
of their limit, the answer is added up again from the original numbers, and where it is over by less than the
tolerance, the limit is lowered by that much and the problem solved again.
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from quant.base.errors import check_installed

SCORE = "score"


class Infeasible(ValueError):  # noqa: N818 -- the field's word
    """No allocation keeps the limits; the message names the smallest feasible value."""


@dataclass(frozen=True, eq=False)
class KnapsackProblem:
    """Groups, formats, and the score and the costs of each choice."""

    groups: tuple[str, ...]
    candidates: tuple[str, ...]
    scores: np.ndarray  # expected loss, float64 `[G, F]`; infinite where the format is not allowed
    costs: Mapping[str, np.ndarray]  # the costs of each resource by name, float64 `[G, F]`

    def __post_init__(self) -> None:
        unusable = {SCORE: np.isnan(self.scores), **{name: ~np.isfinite(cost) for name, cost in self.costs.items()}}
        for resource, bad in unusable.items():
            for group, format_ in np.argwhere(bad)[:1]:
                value = (self.scores if resource == SCORE else self.costs[resource])[group, format_]
                raise ValueError(f"{self.groups[group]} in {self.candidates[format_]}: its {resource} is {value}")

    @property
    def allowed(self) -> np.ndarray:
        """Whether a group may take a format, bool `[G, F]`."""
        return np.isfinite(self.scores)

    def total(self, resource: str, choice: Sequence[int] | np.ndarray) -> float:
        """Returns the sum of `resource` (a key of `costs`, or "score") over a choice."""
        table = self.scores if resource == SCORE else self.costs[resource]
        return float(table[np.arange(len(self.groups)), choice].sum())


@dataclass(frozen=True, eq=False)
class Near:
    """A limit on the distance of the answer from another choice."""

    choice: np.ndarray  # index of a format for each group, `[G]`
    changes: int


def solve(
    problem: KnapsackProblem, limits: Mapping[str, float], *, minimize: str = SCORE, near: Near | None = None
) -> np.ndarray:
    """Returns the best choice within `limits` by resource ("score" is one): the format of each group, int64 `[G]`."""
    check_installed(["scipy"], "allocation")
    check_feasible(problem, limits)
    # HiGHS may exceed a limit by its tolerance, 1e-6: lower the limit by twice the excess and solve again.
    tightened = dict(limits)
    for _ in range(8):
        choice = _milp(problem, tightened, minimize, near)
        over = {name: problem.total(name, choice) - limit for name, limit in limits.items()}
        if all(excess <= 0 for excess in over.values()):
            return choice
        tightened = {name: tightened[name] - max(2 * over[name], 0.0) for name in limits}
    raise Infeasible(f"no choice found within {_listed(limits)}; loosen a limit a little")


def smallest(problem: KnapsackProblem, resource: str) -> float:
    """Returns the smallest sum of `resource` over all choices, with no limit on the other resources."""
    table = problem.scores if resource == SCORE else problem.costs[resource]
    return float(np.where(problem.allowed, table, np.inf).min(axis=1).sum())


def check_feasible(problem: KnapsackProblem, limits: Mapping[str, float]) -> None:
    """Raises Infeasible where one of `limits` cannot be kept by itself, with the smallest value that can."""
    for name, limit in limits.items():
        least = smallest(problem, name)
        if least > limit:
            raise Infeasible(f"{name}: the limit is {limit:g}, the smallest feasible value is {least:g}")


def pareto(problem: KnapsackProblem, resource: str, points: int = 25) -> list[np.ndarray]:
    """Returns the best choices for limits of `resource`, denser near its smallest sum, where the curve bends most."""
    low = smallest(problem, resource)
    unbounded = problem.scores.argmin(axis=1)
    high = max(problem.total(resource, unbounded), low)
    choices: dict[tuple[int, ...], np.ndarray] = {}
    # (1 + 1e-12): the last limit is the sum of the least lossy choice itself, up to rounding.
    for limit in low + (high - low) * np.linspace(0, 1, points) ** 2:
        choice = solve(problem, {resource: float(limit) * (1 + 1e-12)})
        # Neighbouring limits often have the same best choice.
        choices.setdefault(tuple(choice), choice)
    return list(choices.values())


def _milp(problem: KnapsackProblem, limits: Mapping[str, float], minimize: str, near: Near | None) -> np.ndarray:
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array, vstack

    rows, columns = problem.allowed.nonzero()  # one variable for each allowed pair
    count, groups = len(rows), len(problem.groups)
    tables = {SCORE: problem.scores, **problem.costs}
    # Σ_f x[g, f] = 1: a row for each group, with ones at its variables.
    matrices = [csr_array((np.ones(count), (rows, np.arange(count))), shape=(groups, count))]
    low, high = [1.0] * groups, [1.0] * groups
    for name, limit in limits.items():
        values = tables[name][rows, columns]
        # Coefficients about 1: the solver's tolerances are absolute.
        unit = max(float(np.median(np.abs(values))), 1e-300)
        matrices.append(csr_array(values[None] / unit))
        low.append(-np.inf)
        high.append(limit / unit)
    # At least G − changes groups keep the format of the known choice: Σ x[g, choice[g]] ≥ G − changes.
    if near is not None:
        matrices.append(csr_array((near.choice[rows] == columns).astype(float)[None]))
        low.append(float(groups - near.changes))
        high.append(float(groups))
    objective = tables[minimize][rows, columns]
    with _silent_stdout():
        result = milp(
            objective / max(float(np.abs(objective).mean()), 1e-300),
            constraints=LinearConstraint(vstack(matrices).tocsc(), np.array(low), np.array(high)),
            integrality=np.ones(count),
            bounds=Bounds(0, 1),
            # Within 1e-6 of the optimum, or the best after 20 s.
            options={"mip_rel_gap": 1e-6, "time_limit": 20.0},
        )
    if result.x is None:
        raise Infeasible(f"no choice keeps {_listed(limits)} together")
    # x is 0 or 1 up to the tolerance: the largest of a group's variables is its format.
    variables = np.full(problem.scores.shape, -np.inf)
    variables[rows, columns] = result.x
    return variables.argmax(axis=1)


@contextmanager
def _silent_stdout() -> Iterator[None]:
    """Closes file descriptor 1 while open: HiGHS sometimes prints a line past Python, into the output of --json."""
    sys.stdout.flush()
    saved = os.dup(1)
    try:
        with open(os.devnull, "wb") as sink:
            os.dup2(sink.fileno(), 1)
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def _listed(limits: Mapping[str, float]) -> str:
    return " and ".join(f"{name} ≤ {limit:g}" for name, limit in limits.items())
