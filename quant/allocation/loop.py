"""The loop of an allocation: solve, measure all groups together, correct what measuring shows.

A budget is solved once and then improved: a few groups at a time by gradients at the quantized model, then by
measuring changes one by one (`quant.allocation.search`), on text of its own, so that the loss that is reported is that
of text the choice was not made on. A limit on the loss is a search: the scores order the sizes, measuring says which of
them keeps the limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from quant.allocation.search import Search
from quant.allocation.space import Goal, Space
from quant.allocation_record import CurvePoint, Round, Uniform
from quant.calibration.progress import Progress
from quant.calibration.sensitivity.baseline import Baseline
from quant.calibration.sensitivity.candidates import KEPT
from quant.calibration.sensitivity.divergence import Divergence, NextToken
from quant.calibration.sensitivity.knapsack import SCORE, Infeasible, Near, Problem, pareto, smallest, solve
from quant.calibration.sensitivity.scores import TokenProducts, observed
from quant.calibration.sensitivity.switchable_model import SwitchableModel
from quant.errors import UserError

# On a CPU a measurement takes seconds, and a hundred of them gain a percent or two.
_MEASUREMENTS = {"cpu": 0, "cuda": 500}


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        score_rows: rows that scores and gains are taken on.
        check_rows: rows that the joint loss is measured on.
        search_rows: rows that the local search measures on.
        measurements: of the local search; None for 500 on a GPU, where they take seconds, and none on a CPU.
        rounds: turns of the correcting loop.
        solves: quantizations with a solver that works from data.
        points: of the Pareto curve.
    """

    score_rows: int = 8
    check_rows: int = 8
    search_rows: int = 8
    measurements: int | None = None
    rounds: int = 2
    solves: int = 3
    points: int = 17

    def probes(self, device: torch.device) -> int:
        """Measurements of the local search on `device`."""
        return _MEASUREMENTS.get(device.type, _MEASUREMENTS["cpu"]) if self.measurements is None else self.measurements


@dataclass(eq=False)
class Bench:
    """Measures the joint loss of choices, each once.

    Attributes:
        switchable: the model, entered.
        space: the choices.
        divergence: what is measured.
        scored: rows for gains.
        check: rows for the loss.
        searched: rows for the local search.
        progress: as in `allocate`.
        expected: how many measurements there will be, about.
    """

    switchable: SwitchableModel
    space: Space
    divergence: Divergence
    scored: torch.Tensor
    check: torch.Tensor
    searched: torch.Tensor
    progress: Progress | None = None
    expected: int = 0
    references: list[Any] = field(default_factory=list)
    losses: dict[tuple[int, ...], float] = field(default_factory=dict)
    nlls: dict[tuple[int, ...], float] = field(default_factory=dict)
    probed: int = 0

    @cached_property
    def checked(self) -> Baseline:
        """Measures on the check rows."""
        return Baseline(self.switchable, self.divergence, self.check)

    def loss(self, choice: np.ndarray) -> float:
        """Mean divergence on the check rows."""
        key = tuple(int(j) for j in choice)
        if key not in self.losses:
            self.losses[key] = self.checked.loss(self.space.named(choice))
            self._tick()
        return self.losses[key]

    def perplexity_increase(self, choice: np.ndarray) -> float:
        """Relative increase of perplexity on the check rows.

        Raises:
            UserError: the model has no next tokens.
        """
        if type(self.divergence) is not NextToken:
            raise UserError(
                f"--max-ppl-increase needs a causal language model; use --max-kl, here {self.divergence.unit}"
            )
        return math.expm1(min(self._nll(choice) - self._nll(None), 700.0))

    def _nll(self, choice: np.ndarray | None) -> float:
        assert isinstance(self.divergence, NextToken)
        key = () if choice is None else tuple(int(j) for j in choice)
        if key not in self.nlls:
            self.switchable.set({} if choice is None else self.space.named(choice))
            total = sum(self.divergence.nll(row, i) for i, row in enumerate(self.check.split(1)))
            self.switchable.forget_inputs()
            self.nlls[key] = total / self.divergence.count(self.check)
            self._tick()
        return self.nlls[key]

    def gains(self, choice: np.ndarray, problem: Problem) -> np.ndarray:
        """What changing one group alone would add to the loss of a choice, `[G, F]`; one backward pass a row.

        To first order by the gradient at the quantized model, which sees how errors add up; to second order by the
        scores, of which the change takes one away and brings another.
        """
        if not self.references:
            self.switchable.set({})
            self.references = [self.divergence.reference(part) for part in self.scored.split(1)]
        sums = np.zeros(problem.scores.shape)
        names = list(self.space.candidates)
        self.switchable.set(self.space.named(choice))
        for place, rows in enumerate(self.scored.split(1)):
            products = TokenProducts(self.switchable, self.space.allowed)
            with observed(self.switchable, products.observe, rows.numel()):
                self.divergence.descend(rows, self.references[place], place)
            for i, group in enumerate(problem.groups):
                for name, value in products.sums().get(group, {}).items():
                    sums[i, names.index(name)] += value
        self._tick()
        sums /= self.divergence.count(self.scored)
        own = problem.scores[np.arange(len(choice)), choice][:, None]
        table = sums + problem.scores + own
        table[np.arange(len(choice)), choice] = 0.0
        return np.where(problem.allowed, table, np.inf)

    def uniform(self, problem: Problem) -> tuple[Uniform, ...]:
        """Each format for every group that may take it, the best allowed one for others."""
        found = []
        for j, name in enumerate(problem.candidates):
            if not problem.allowed[:, j].any() or name == KEPT.name:
                continue
            choice = np.where(problem.allowed[:, j], j, problem.scores.argmin(axis=1))
            found.append(Uniform(name, self.space.bits(choice), self.loss(choice)))
        return tuple(found)

    def probe(self) -> None:
        """Counts a measurement of the local search."""
        self.probed += 1
        self._tick()

    def _tick(self) -> None:
        if self.progress is not None:
            done = len(self.losses) + len(self.nlls) + self.probed
            self.progress("verify", done, max(done, self.expected))


@dataclass(frozen=True, eq=False)
class Found:
    """A choice and its joint loss on the check rows."""

    choice: np.ndarray
    measured: float


@dataclass(eq=False)
class Loop:
    """Solve, measure, correct.

    Attributes:
        problem: by the scores.
        rounds: what was measured, in order.
        corrected: what measuring changed, by group, for the reasons.
        scale: measured loss of the real solver over that of its stand-in; 1 without one.
    """

    problem: Problem
    space: Space
    bench: Bench
    goal: Goal
    effort: Effort
    rounds: list[Round] = field(default_factory=list)
    corrected: dict[str, str] = field(default_factory=dict)
    scale: float = 1.0
    last: np.ndarray | None = None

    def run(self) -> Found:
        """The choice, and what it measures.

        Raises:
            Infeasible: the budgets cannot be kept, or not together with the limit on the loss.
        """
        self.space.explain(self.goal, self.problem)
        found = self._within_loss() if self.goal.has_limit else self._within_budget()
        found = self._search(self._correct(found))
        # A smaller loss at the same size is room for a smaller size.
        return self._correct(found) if self.goal.has_limit else found

    def curve(self) -> tuple[CurvePoint, ...]:
        """Predicted Pareto curve with what was measured on it, by rising bits."""
        points = {tuple(map(int, c)): c for c in pareto(self.problem, "bytes", self.effort.points)}
        found = [
            CurvePoint(self.space.bits(c), self.problem.total(SCORE, c), self.bench.losses.get(key))
            for key, c in points.items()
        ]
        return tuple(sorted(found, key=lambda p: p.bits))

    def _within_budget(self) -> Found:
        choice = solve(self.problem, self.space.limits(self.goal))
        return Found(choice, self._note(choice, self.problem.total(SCORE, choice)))

    def _within_loss(self) -> Found:
        """The smallest model on the curve of the scores whose measured loss is within the limit, by bisection.

        The curve is walked by its one parameter, the sum of scores that is allowed. It starts at the limit itself,
        which is where it would end if scores were exact, and each measurement rescales the next guess.
        """
        budgets = self.space.limits(self.goal)
        least = self.problem.total(SCORE, solve(self.problem, budgets))
        good: np.ndarray | None = None
        low, high = least, math.inf  # sums of scores that are known to keep the limit, and to break it
        allowance = max(self._limit_as_loss(), least)
        for _ in range(10):
            choice = self._smallest_within(allowance, budgets)
            predicted = self.problem.total(SCORE, choice)
            ratio = self._ratio(choice, predicted)
            if ratio <= 1:
                good, low = choice, max(allowance, low)
                if not self._can_shrink(choice):
                    break
            else:
                high = predicted
                if predicted <= least * (1 + 1e-9) + 1e-15:
                    break
            if good is not None and high < math.inf and self._is_close(good, high, budgets):
                break
            allowance = self._next(allowance, ratio, low, high)
        if good is None:
            raise Infeasible(
                f"{self._limit_text()}: even the least lossy choice within the budgets measures {ratio:.3g} times that"
            )
        return Found(good, self.bench.loss(good))

    def _next(self, allowance: float, ratio: float, low: float, high: float) -> float:
        """The next sum of scores to try: rescaled by what was measured, or halfway where that leads nowhere."""
        guess = allowance / max(ratio, 0.05) if ratio != 1 else 1.02 * allowance
        if high == math.inf:
            return guess
        margin = 0.02 * (high - low)
        return guess if low + margin < guess < high - margin else (low + high) / 2

    def _smallest_within(self, allowance: float, budgets: Mapping[str, float]) -> np.ndarray:
        limits = {SCORE: allowance * (1 + 1e-9) + 1e-15, **budgets}
        return solve(self.problem, limits, minimize="bytes")

    def _can_shrink(self, choice: np.ndarray) -> bool:
        return self.space.bytes(choice) > smallest(self.problem, "bytes")

    def _is_close(self, good: np.ndarray, high: float, budgets: Mapping[str, float]) -> bool:
        """Whether the smallest choice that may still keep the limit would save less than 0.3 % more."""
        try:
            next_one = self._smallest_within(high * (1 - 1e-6), budgets)
        except Infeasible:
            return True
        return self.space.bytes(good) - self.space.bytes(next_one) < 0.003 * self.space.bytes(good)

    def _limit_as_loss(self) -> float:
        if self.goal.max_kl is not None:
            return self.goal.max_kl / self.scale
        # ΔNLL and KL are of one size for a calibrated model: the expectation of one is the other.
        return math.log1p(self.goal.max_ppl_increase or 0.0) / self.scale

    def _limit_text(self) -> str:
        if self.goal.max_kl is not None:
            return f"--max-kl {self.goal.max_kl:g}"
        return f"--max-ppl-increase {100 * (self.goal.max_ppl_increase or 0.0):g}%"

    def _ratio(self, choice: np.ndarray, predicted: float) -> float:
        """What a choice measures as a fraction of the limit."""
        return self._ratio_of(choice, self._note(choice, predicted))

    def _ratio_of(self, choice: np.ndarray, measured: float) -> float:
        if self.goal.max_kl is not None:
            return measured * self.scale / self.goal.max_kl
        assert self.goal.max_ppl_increase is not None
        return self.bench.perplexity_increase(choice) * self.scale / self.goal.max_ppl_increase

    def _note(self, choice: np.ndarray, predicted: float) -> float:
        measured = self.bench.loss(choice)
        before = self.last
        groups = self.problem.groups
        changed = [] if before is None else [g for g, a, b in zip(groups, before, choice, strict=True) if a != b]
        layers = tuple(layer.name for group in changed for layer in self.space.groups[group])
        self.rounds.append(Round(self.space.bits(choice), predicted, measured, layers))
        self.last = choice
        return measured

    def _correct(self, found: Found) -> Found:
        """Changes the groups with the best gain at the quantized model, a few at a time, while that does gain."""
        changes = max(len(self.problem.groups) // 24, 2)
        gains: np.ndarray | None = None
        for _ in range(self.effort.rounds):
            if gains is None:
                gains = self.bench.gains(found.choice, self.problem)
            choice, predicted = self._step(found, gains, changes)
            if choice is None or np.array_equal(choice, found.choice):
                break
            ratio = self._ratio(choice, predicted) if self.goal.has_limit else 0.0
            measured = self.bench.loss(choice) if self.goal.has_limit else self._note(choice, predicted)
            better = (
                self.space.bytes(choice) < self.space.bytes(found.choice)
                if self.goal.has_limit
                else measured < found.measured
            )
            if ratio <= 1 and better:
                self._explain(found, choice, measured)
                found, gains = Found(choice, measured), None
            else:
                changes //= 2
                if changes == 0:
                    break
        return found

    def _search(self, found: Found) -> Found:
        """The least loss near a choice at its size, by measuring."""
        bench, count = self.bench, self.effort.probes(self.bench.searched.device)
        if found.measured == 0 or count == 0:
            return found
        limits = self.space.limits(self.goal)
        if self.goal.has_limit:
            limits["bytes"] = self.space.bytes(found.choice)
        baseline = Baseline(bench.switchable, bench.divergence, bench.searched)
        search = Search(self.problem, limits, baseline, self.space.named, count, bench.probe)
        choice = search.improve(found.choice)
        if np.array_equal(choice, found.choice):
            return found
        measured = self._note(choice, found.measured * search.loss_of(choice) / search.loss_of(found.choice))
        ratio = self._ratio_of(choice, measured) if self.goal.has_limit else 0.0
        if ratio > 1 or measured >= found.measured:
            return found
        self._explain(found, choice, measured)
        return Found(choice, measured)

    def _step(self, found: Found, gains: np.ndarray, changes: int) -> tuple[np.ndarray | None, float]:
        """The best choice near the present one by its gains, and the loss that they promise."""
        near = Near(found.choice, changes)
        # Gains are differences and may be negative; the solver is indifferent to that.
        local = Problem(self.problem.groups, self.problem.candidates, gains, self.problem.costs)
        limits = self.space.limits(self.goal)
        try:
            if not self.goal.has_limit:
                choice = solve(local, limits, near=near)
            else:
                slack = max(self._limit_as_loss() - found.measured, 0.0)
                if self.goal.max_kl is None:
                    slack = 0.0
                choice = solve(local, {SCORE: 0.9 * slack, **limits}, minimize="bytes", near=near)
        except Infeasible:
            return None, math.nan
        return choice, found.measured + local.total(SCORE, choice)

    def _explain(self, found: Found, choice: np.ndarray, measured: float) -> None:
        names = self.problem.candidates
        for group, old, new in zip(self.problem.groups, found.choice, choice, strict=True):
            if old != new:
                self.corrected[group] = (
                    f"changed from {names[old]} after measuring: joint loss {found.measured:.4g} → {measured:.4g}"
                )
