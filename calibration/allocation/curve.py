"""The `Loop` of an allocation solves the knapsack, and measures all groups together.

With a budget the best choice by the scores may be improved by measuring single changes on separate text (`Search`), so
that the reported loss is measured on text that the choice was not made on. With a limit on the loss, the scores order
the sizes, and measurements find the smallest that keeps the limit.

Corrections by gradients at the quantized model were measured and taken out: on SmolLM2 (weights in NVFP4 and FP8, to
nearest) two rounds changed the loss at 4.8 bits by −0.7, −1.8 and +2.1% on three texts, and no layer at `max_kl` 0.17.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quant.calibration.allocation.goal import CurvePoint, Goal, Round
from quant.calibration.allocation.measure_choices import Bench, Counts, Search, uniform_choices
from quant.calibration.allocation.space import Space, key_of
from quant.calibration.sensitivity.divergence import Prediction
from quant.calibration.sensitivity.knapsack import SCORE, Infeasible, KnapsackProblem, pareto, smallest, solve
from quant.calibration.sensitivity.switchable_model import CachedRun
from quant.calibration.sensitivity.table import Sensitivity
from quant.recipes.plan import Plan


@dataclass(frozen=True, eq=False)
class MeasuredChoice:
    """A choice, and its joint loss on the check rows."""

    choice: np.ndarray
    measured: float


@dataclass(eq=False)
class Loop:
    """Solve, measure, correct."""

    problem: KnapsackProblem
    space: Space
    scores: Sensitivity
    bench: Bench
    goal: Goal
    counts: Counts
    rounds: list[Round] = field(default_factory=list)
    corrected: dict[str, str] = field(default_factory=dict)
    scale: float = 1.0  # measured loss of the real solver divided by the loss of its stand-in; 1 without one
    last: np.ndarray | None = None

    def run(self, *, searches: bool = True) -> MeasuredChoice:
        """Returns the best choice, measured."""
        self.space.explain(self.goal, self.problem)
        self.corrected = {}
        if self.goal.has_limit:
            return self._against_uniform(self._within_loss())
        choice = solve(self.problem, self.space.limits(self.goal))
        best = MeasuredChoice(choice, self._note(choice, self.problem.total(SCORE, choice)))
        return self._against_uniform(self._search(best) if searches else best)

    def choose_cache(self, config: Any, mixes: Mapping[tuple[str, ...], float]) -> Space:
        """Takes the KV cache that loses the least together with the weights, which get the rest of the budgets."""
        best = math.inf
        for mix, loss in mixes.items() if len(mixes) > 1 else ():
            space = self.space.with_cache(config, self.goal, mix)
            try:
                choice = solve(self.problem, space.limits(self.goal))
            except Infeasible:
                continue
            if (total := loss + self.bench.loss(choice)) < best:
                best, self.space = total, space
        return self.space

    def plan(self, choice: np.ndarray) -> Plan:
        """Returns the plan of a choice, with a reason for every layer."""
        return self.space.plan(choice, self.problem, self.scores, self.goal, self.corrected)

    def curve(self) -> tuple[CurvePoint, ...]:
        """Returns the predicted Pareto curve by rising bits, with losses where they were measured."""
        choices = {key_of(c): c for c in pareto(self.problem, "bytes", self.counts.points)}
        points = [
            CurvePoint(self.space.bits(c), self.problem.total(SCORE, c), self.bench.losses.get(key))
            for key, c in choices.items()
        ]
        return tuple(sorted(points, key=lambda p: p.bits))

    def _within_loss(self) -> MeasuredChoice:
        """Returns the smallest model on the curve of the scores whose measured loss is within the limit, by bisection.

        A point of the curve is given by the sum of scores that is allowed. The first is the limit itself, which would
        be the answer if scores were exact, and each measurement rescales the next guess.
        """
        budgets = self.space.limits(self.goal)
        least = self.problem.total(SCORE, solve(self.problem, budgets))
        good: np.ndarray | None = None
        # The largest sum of scores that keeps the limit so far, and the smallest that breaks it.
        low, high = least, math.inf
        # Less than the least predicted loss within the budgets is infeasible, and the search starts at feasible points.
        # ΔNLL and KL have the same size for a calibrated model: KL is the expectation of ΔNLL.
        # Answers are lost at some other KL, which the measurements find.
        limit = self.goal.budget.limit if self.goal.max_ppl_increase is None else math.log1p(self.goal.max_ppl_increase)
        allowance = max(limit / self.scale, least)
        # Bounds the number of measurements; `_is_close` ends most searches earlier.
        for _ in range(10):
            choice = self._smallest_within(allowance, budgets)
            predicted = self.problem.total(SCORE, choice)
            self._note(choice, predicted)
            ratio = self._ratio(choice)  # measured loss / limit
            if ratio <= 1:
                good, low = choice, max(allowance, low)
                if self.space.bytes(choice) <= smallest(self.problem, "bytes"):
                    break
            else:
                high = predicted
                # Even the least lossy choice within the budgets breaks the limit.
                if predicted <= least * (1 + 1e-9) + 1e-15:
                    break
            if good is not None and high < math.inf and self._is_close(good, high, budgets):
                break
            allowance = self._next(allowance, ratio, low, high)
        if good is None:
            raise Infeasible(
                f"{self.limit_text()}: even the least lossy choice within the budgets measures {ratio:.3g} times that"
            )
        return MeasuredChoice(good, self.bench.loss(good))

    def _next(self, allowance: float, ratio: float, low: float, high: float) -> float:
        """Returns the next sum of scores to try: rescaled by the measurement, or halfway if outside the interval."""
        # As if the loss were proportional to the scores. A choice exactly at the limit may have room for 2 % more.
        guess = allowance / max(ratio, 0.05) if ratio != 1 else 1.02 * allowance
        if high == math.inf:
            return guess
        # Guesses near an end hardly shrink the interval.
        margin = 0.02 * (high - low)
        return guess if low + margin < guess < high - margin else (low + high) / 2

    def _smallest_within(self, allowance: float, budgets: Mapping[str, float]) -> np.ndarray:
        # A little more than `allowance`, which may be the sum of a choice that was found by the same solver.
        limits = {SCORE: allowance * (1 + 1e-9) + 1e-15, **budgets}
        return solve(self.problem, limits, minimize="bytes")

    def _is_close(self, good: np.ndarray, high: float, budgets: Mapping[str, float]) -> bool:
        """Returns whether the smallest choice that may still keep the limit would save at most 0.3 % more."""
        try:
            next_one = self._smallest_within(high * (1 - 1e-6), budgets)
        except Infeasible:
            return True
        return self.space.bytes(good) - self.space.bytes(next_one) < 0.003 * self.space.bytes(good)

    def limit_text(self) -> str:
        """Returns the limit as the user named it."""
        if self.goal.max_kl is not None:
            return f"max_{'error' if isinstance(self.bench.divergence, Prediction) else 'kl'} {self.goal.max_kl:g}"
        if self.goal.min_task is not None:
            return f"min_task {self.goal.min_task:g}"
        return f"max_ppl_increase {100 * (self.goal.max_ppl_increase or 0.0):g}%"

    def _ratio(self, choice: np.ndarray) -> float:
        """Returns the measured loss of a choice as a fraction of the limit."""
        return self.bench.limited_loss(choice) * self.scale / self.goal.budget.limit

    def _note(self, choice: np.ndarray, predicted: float) -> float:
        measured = self.bench.loss(choice)
        before = self.last
        groups = self.problem.groups
        changed = [] if before is None else [g for g, a, b in zip(groups, before, choice, strict=True) if a != b]
        # Readers know layers, not groups.
        layers = tuple(layer.name for group in changed for layer in self.space.groups[group])
        self.rounds.append(Round(self.space.bits(choice), predicted, measured, layers))
        self.last = choice
        return measured

    def _search(self, present: MeasuredChoice) -> MeasuredChoice:
        """Returns the least loss near a choice within the budgets, by measuring."""
        bench, count = self.bench, self.counts.probes(self.bench.searched.device)
        if present.measured == 0 or count == 0:
            return present
        cached_run = CachedRun(bench.switchable, bench.divergence, bench.searched)
        search = Search(
            self.problem, self.space.limits(self.goal), cached_run, self.space.named, count, bench.count_probe
        )
        choice = search.improve(present.choice)
        if np.array_equal(choice, present.choice):
            return present
        measured = self._note(choice, present.measured * search.loss_of(choice) / search.loss_of(present.choice))
        if measured >= present.measured:
            return present
        self._explain(present.choice, choice, present.measured, measured)
        return MeasuredChoice(choice, measured)

    def change(self, present: MeasuredChoice, choice: np.ndarray, before: float, after: float) -> MeasuredChoice:
        """Returns another choice, measured here, that was found better in another way."""
        self._explain(present.choice, choice, before, after, " in a solved model")
        return MeasuredChoice(choice, self._note(choice, present.measured * after / before))

    def _against_uniform(self, present: MeasuredChoice) -> MeasuredChoice:
        """Returns one format for all groups where it measures better: a mix by estimates can end worse than no mix."""
        best, best_name = present, ""
        for name, choice in self.uniform_within_budgets().items():
            measured = self.bench.loss(choice)
            if self.goal.has_limit:
                better = self.space.bytes(choice) < self.space.bytes(best.choice)
                better = better and self._ratio(choice) <= 1
            else:
                better = measured < best.measured
            if better and not np.array_equal(choice, present.choice):
                best, best_name = MeasuredChoice(choice, measured), name
        if best is not present:
            self.note_uniform(best_name, present.measured, best.measured)
            self._note(best.choice, best.measured)
        return best

    def uniform_within_budgets(self) -> dict[str, np.ndarray]:
        """Returns the choices of one format that every budget has room for, by the format's name."""
        limits = self.space.limits(self.goal)
        return {
            name: choice
            for name, choice in uniform_choices(self.problem).items()
            if all(self.problem.total(cost, choice) <= limit for cost, limit in limits.items())
        }

    def note_uniform(self, name: str, mixed: float, measured: float) -> None:
        """Lets every group's reason say that one format measured better than the mix."""
        reason = f"{name} for every layer measured better than the mix: joint loss {mixed:.4g} → {measured:.4g}"
        self.corrected = dict.fromkeys(self.problem.groups, reason)

    def _explain(
        self, present: np.ndarray, choice: np.ndarray, before: float, after: float, measured_where: str = ""
    ) -> None:
        names = self.problem.candidates
        for group, old, new in zip(self.problem.groups, present, choice, strict=True):
            if old != new:
                self.corrected[group] = (
                    f"changed from {names[old]} after measuring{measured_where}: joint loss {before:.4g} → {after:.4g}"
                )
