"""A `Bench` measures the joint loss of choices of formats, each choice once.

The `Loop` of an allocation solves the knapsack, and measures all groups together.

With a budget the best choice by the scores may be improved by measuring single changes on separate text (`Search`), so
that the reported loss is measured on text that the choice was not made on. With a limit on the loss, the scores order
the sizes, and measurements find the smallest that keeps the limit.

Corrections by gradients at the quantized model were measured and taken out: on SmolLM2 (weights in NVFP4 and FP8, to
nearest) two rounds changed the loss at 4.8 bits by −0.7, −1.8 and +2.1% on three texts, and no layer at `max_kl` 0.17.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quant.base.errors import UserError, option
from quant.calibration.allocation.goal import BudgetKind, CurvePoint, Goal, Round, Space, Uniform, Verified, key_of
from quant.calibration.evaluating import mean_interval, paired_interval
from quant.calibration.sensitivity.divergence import Divergence, Later, NextToken, Prediction
from quant.calibration.sensitivity.knapsack import SCORE, Infeasible, KnapsackProblem, Near, pareto, smallest, solve
from quant.calibration.sensitivity.switchable_model import CachedRun, SwitchableModel
from quant.calibration.sensitivity.table import KEPT, Sensitivity
from quant.calibration.session import Session
from quant.recipes.plan import Plan

_STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
# Losses on different devices and in different batches differ by rounding; a gain must be more than that.
_LEAST_GAIN = 1e-4


@dataclass(eq=False)
class Search:
    """Improves a choice by measuring its neighbours until none is better.

    flips    the joint loss with one group changed, for every group and format, or the most promising ones by the scores
    steps    the knapsack over those, within a few changes of the present choice: the gains of many changes do not add
             up, so several sizes of step are measured and the best is taken

    Every measurement starts at the first block that differs and computes only the changes (`CachedRun`), so hundreds
    take a minute on a GPU. SmolLM2 with weights rounded to nearest at 4.8 bits loses 0.5% less after 57 measurements.
    """

    problem: KnapsackProblem
    limits: Mapping[str, float]  # budgets, by resource
    cached_run: CachedRun
    named: Callable[[np.ndarray], dict[str, str]]  # the names of a choice's formats, by group
    measurements: int  # that are left
    tick: Callable[[], None] = lambda: None
    losses: dict[tuple[int, ...], float] = field(default_factory=dict)  # measured losses, by choice

    def improve(self, choice: np.ndarray) -> np.ndarray:
        """Returns the best choice found; `choice` itself if none is better."""
        present = self._start(choice)
        while self.measurements > 0:
            # The other half is for steps.
            flips = self._flips(choice, present, self.measurements // 2)
            local = KnapsackProblem(self.problem.groups, self.problem.candidates, flips, self.problem.costs)
            better, least = None, present * (1 - _LEAST_GAIN)
            answers = []  # of the knapsack, for each number of changes that has one
            for changes in _STEPS:
                with suppress(Infeasible):
                    answers.append(solve(local, self.limits, near=Near(choice, changes)))
            for candidate, loss in self._losses(answers):
                if loss < least:
                    better, least = candidate, loss
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
        return self._flips(choice, self._start(choice), self.measurements)

    def loss_of(self, choice: np.ndarray) -> float:
        """Returns the loss of a choice that the search has measured."""
        return self.losses[key_of(choice)]

    def _start(self, choice: np.ndarray) -> float:
        self.measurements -= 1
        loss = self.losses[key_of(choice)] = self.cached_run.start(self.named(choice))
        self.tick()
        return loss

    def _losses(self, choices: Iterable[np.ndarray]) -> Iterator[tuple[np.ndarray, float]]:
        """Yields choices with their losses; the next one is started while a GPU still works on the one before."""
        waiting: deque[tuple[np.ndarray, Later]] = deque()
        started: set[tuple[int, ...]] = set()
        ahead = 1 if self.cached_run.is_queued else 0

        def finish() -> tuple[np.ndarray, float]:
            choice, wait = waiting.popleft()
            key = key_of(choice)
            if key not in self.losses:
                self.measurements -= 1
                self.losses[key] = wait()
                self.tick()
            return choice, self.losses[key]

        for choice in choices:
            key = key_of(choice)
            is_known = key in self.losses or key in started
            waiting.append((choice, float if is_known else self.cached_run.start_loss(self.named(choice))))
            started.add(key)
            if len(waiting) > ahead:
                yield finish()
        while waiting:
            yield finish()

    def _flips(self, choice: np.ndarray, present: float, count: int) -> np.ndarray:
        """Returns the change of the loss by at most `count` changes of one group, `[G, F]`; else infinite."""
        table = np.full(self.problem.scores.shape, np.inf)
        # The present format costs nothing to keep.
        table[np.arange(len(choice)), choice] = 0.0
        flips = self._shortlist(choice, count)
        changed = [np.where(np.arange(len(choice)) == group, format_, choice) for group, format_ in flips]
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
        # Both larger and smaller formats, as an exchange needs one of each; a side with fewer leaves the other more.
        up, down = (sorted((m for m in flips if up == (extra[m] > 0)), key=lambda m: rate[m]) for up in (True, False))
        half = max(count // 2, 1)
        return up[: max(half, count - len(down))] + down[: max(half, count - len(up))]


_CALIBRATION = "calibration text"


@dataclass(frozen=True, eq=False)
class Answers:
    """Questions of a task, by the name of their file."""

    name: str
    right: Callable[[nn.Module], list[bool]]  # whether a model answers each one rightly


@dataclass(frozen=True, eq=False)
class HeldOut:
    """The text on which a limit on the loss is kept, rows of token ids by its name, int64 `[rows, seqlen]`.

    The loss of the smallest choice that keeps a limit lies just below it on the text that it was chosen on, partly by
    luck. So one part chooses and the rows that verify take no part in choosing; of several texts the worst one counts.

    texts of their own    the first half of the rows of each text chooses, the second half verifies
    calibration rows      a quarter chooses and a quarter verifies, drawn once; the solver works with the other half
    """

    check: Mapping[str, Tensor]
    verify: Mapping[str, Tensor]  # rows for the loss of the final choice; empty where nothing is verified
    task: tuple[Answers, Answers] | None = None  # questions to choose on and to verify with, of a limit on a task

    @classmethod
    def halves(cls, texts: Mapping[str, Tensor]) -> "HeldOut":
        """Returns both parts of texts that are held out."""
        for name, rows in texts.items():
            if len(rows) < 2:
                raise UserError(
                    f"{name}: {len(rows)} row to evaluate on; a limit on the loss is kept on one half of the rows and "
                    f"verified on the other: give {option('eval_samples', 2)} or more"
                )
        # The first half, in the order of the text: neighbouring rows of one document stay on one side.
        check = {name: rows[: len(rows) // 2] for name, rows in texts.items()}
        return cls(check, {name: rows[len(rows) // 2 :] for name, rows in texts.items()})

    @classmethod
    def from_calibration(cls, rows: Tensor) -> "tuple[Tensor, HeldOut]":
        """Returns the rows that are left to calibrate with, and both parts taken out of them."""
        if len(rows) < 3:
            raise UserError(
                f"{len(rows)} calibration rows: a limit on the loss needs one to calibrate with, one to choose on and "
                "one to verify on; give 3 or more, or to the command a text of its own with --eval"
            )
        quarter = max(len(rows) // 4, 1)
        # The seed is fixed, and not the run's: the same rows verify every allocation on this text.
        # At random, since rows of a mixture follow each other by kind of text.
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0), device="cpu")
        check, verify, calibration = (
            rows[part.sort()[0]] for part in order.split([quarter, quarter, len(rows) - 2 * quarter])
        )
        return calibration, cls({_CALIBRATION: check}, {_CALIBRATION: verify})

    @classmethod
    def without_verification(cls, check: Tensor) -> "HeldOut":
        """Returns the calibration rows that a budget is checked on."""
        return cls({_CALIBRATION: check}, {})


# On a CPU a measurement takes seconds, and a hundred of them gain a percent or two.
_MEASUREMENTS = {"cpu": 0, "cuda": 500}


@dataclass(frozen=True)
class Counts:
    """The numbers of rows and measurements."""

    score_rows: int = 8
    check_rows: int = 8
    search_rows: int = 8
    # the number of measurements of the local search; None for 500 on a GPU, where they take seconds, and none on a CPU
    measurements: int | None = None
    solved_rows: int = 32
    solves: int = 3
    points: int = 17

    def probes(self, device: torch.device) -> int:
        """Returns the number of measurements of the local search on a device."""
        default = _MEASUREMENTS.get(device.type, _MEASUREMENTS["cpu"])
        return default if self.measurements is None else self.measurements


def rows_of_choice(
    rows: int, formats: int, counts: Counts, device: torch.device, *, changes: int = 0, rows_solved: int = 0
) -> int:
    """Estimates how many rows run forward through the model, or backward, while formats are chosen for a budget."""
    # Scores: forward, backward, and a product with the change of each weight in each format.
    gradients = counts.score_rows * (2 + formats)
    measured = counts.check_rows * (1 + formats)
    count = counts.probes(device)
    searched = rows_solved * min(changes, count) if rows_solved else counts.search_rows * count
    # A measurement of a change begins, on average, in the middle of the model.
    return rows + gradients + measured + searched // 2


@dataclass(eq=False)
class Bench:
    """Measures the joint loss of choices, each once."""

    switchable: SwitchableModel
    space: Space
    divergence: Divergence
    held_out: HeldOut
    searched: Tensor
    session: Session
    expected: int = 0
    allowed: float = math.inf  # the loss that a limit allows
    losses: dict[tuple[int, ...], float] = field(default_factory=dict)  # measured losses, by choice
    limited: BudgetKind = BudgetKind.KL  # the figure that a limit is on
    answers: dict[tuple[int, ...], list[bool]] = field(default_factory=dict)  # to the questions of a task, by choice
    # measured negative log-likelihoods by text, by choice; the empty choice is the original model
    nlls: dict[tuple[int, ...], dict[str, float]] = field(default_factory=dict)
    # negative log-likelihoods of the original model on the rows that verify, by text
    nlls_before: dict[str, list[float]] = field(default_factory=dict)
    probed: int = 0

    @cached_property
    def checked(self) -> dict[str, CachedRun]:
        """A cached run on the check rows of each text."""
        return {n: CachedRun(self.switchable, self.divergence, rows) for n, rows in self.held_out.check.items()}

    def loss(self, choice: np.ndarray) -> float:
        """Returns the mean divergence of a choice on the check rows; of several texts, on the worst."""
        key = key_of(choice)
        if key not in self.losses:
            # The worst text counts, or an easy text could pay for a hard one.
            self.losses[key] = max(each.loss(self.space.named(choice)) for each in self.checked.values())
            self._tick()
        return self.losses[key]

    def loss_of(self, divergence: Divergence) -> float:
        """Returns `loss` of a model that is quantized for real, which `divergence` runs."""
        return max(each.loss_of(divergence) for each in self.checked.values())

    def limited_loss(self, choice: np.ndarray) -> float:
        """Returns what a limit is on: `loss`, the increase of perplexity on the worst text, or the answers lost."""
        if self.limited == BudgetKind.KL:
            loss = self.loss(choice)
            # The squares of a denoiser's errors add up, and its limit is on the error.
            return math.sqrt(loss) if isinstance(self.divergence, Prediction) else loss
        if self.limited == BudgetKind.TASK:
            return self._answers_lost(self._right(choice))
        self._next_token()
        return self._increase(self._nlls(choice))

    def limited_loss_of(self, divergence: Divergence) -> float:
        """Returns `limited_loss` of a model that is quantized for real, which `divergence` runs."""
        if self.limited == BudgetKind.KL:
            return self.loss_of(divergence)
        if self.limited == BudgetKind.TASK:
            return self._answers_lost(self._task[0].right(divergence.model))
        self._next_token()
        return self._increase(_nlls_of(divergence, self.held_out.check))

    @property
    def _task(self) -> tuple[Answers, Answers]:
        assert self.held_out.task is not None
        return self.held_out.task

    def _right(self, choice: np.ndarray | None, *, verify: bool = False) -> list[bool]:
        """Returns which questions are answered rightly by a choice, or by the original model."""
        key = (verify, *(() if choice is None else key_of(choice)))
        if key not in self.answers:
            self.switchable.formats.set({} if choice is None else self.space.named(choice))
            self.answers[key] = self._task[verify].right(self.divergence.model)
            self.switchable.formats.forget_inputs()
        return self.answers[key]

    def _answers_lost(self, right: list[bool]) -> float:
        before, allowed = sum(self._right(None)), self.allowed
        if before == 0 or 1 / before > allowed:
            few = "none" if before == 0 else f"{before}, and one fewer is {1 / before:.3f} of them"
            raise UserError(
                f"{option('min_task', self._task[0].name)}: of {len(right)} questions to choose on, the original "
                f"answers {few}, where {allowed:.3g} may be lost; give more questions"
            )
        return 1 - sum(right) / before

    def _verified_task(self, right: list[bool]) -> tuple[Verified, ...]:
        before = self._right(None, verify=True)
        pairs = list(zip(before, right, strict=True))
        lost, gained = pairs.count((True, False)), pairs.count((False, True))
        # In shares of the original's right answers, like the limit.
        scale = len(right) / max(sum(before), 1)
        low, high = paired_interval(lost, gained, len(right))
        loss = scale * (lost - gained) / len(right)
        return (Verified(self._task[1].name, len(right), loss, (-scale * high, -scale * low)),)

    @cached_property
    def verifying(self) -> dict[str, CachedRun]:
        """A cached run on the rows of each text that verify, which measures row by row."""
        verify = self.held_out.verify
        return {n: CachedRun(self.switchable, self.divergence, rows, by_row=True) for n, rows in verify.items()}

    def verified(self, choice: np.ndarray) -> tuple[Verified, ...]:
        """Returns the loss of a choice on the rows that verify, text by text."""
        named = self.space.named(choice)
        if self.limited == BudgetKind.TASK:
            return self._verified_task(self._right(choice, verify=True))
        if self.limited == BudgetKind.KL:
            return tuple(_verified(name, each.losses(named)) for name, each in self.verifying.items())
        model = self._next_token()
        # Both models on the same rows, for the differences in `_verified_nlls`.
        self.switchable.formats.set({})
        self.nlls_before = {name: _row_nlls(model, rows) for name, rows in self.held_out.verify.items()}
        self.switchable.formats.set(named)
        nlls = {name: _row_nlls(model, rows) for name, rows in self.held_out.verify.items()}
        self.switchable.formats.forget_inputs()
        return self._verified_nlls(nlls)

    def verified_of(self, divergence: Divergence) -> tuple[Verified, ...]:
        """Returns `verified` of a model that is quantized for real; call `verified` for a choice before."""
        if self.limited == BudgetKind.TASK:
            return self._verified_task(self._task[1].right(divergence.model))
        if self.limited == BudgetKind.KL:
            return tuple(_verified(name, each.losses_of(divergence)) for name, each in self.verifying.items())
        return self._verified_nlls({name: _row_nlls(divergence, rows) for name, rows in self.held_out.verify.items()})

    def _verified_nlls(self, nlls: Mapping[str, list[float]]) -> tuple[Verified, ...]:
        verified = []
        for name, after in nlls.items():
            # The interval is of the difference of NLL row by row, since both models find the same rows hard. Its ends
            # become relative increases of perplexity, exp(ΔNLL) − 1.
            rises = [b - a for a, b in zip(self.nlls_before[name], after, strict=True)]
            interval = mean_interval(rises)
            ends = None if interval is None else tuple(_expm1(end) for end in interval)
            verified.append(Verified(name, len(rises), _expm1(fmean(rises)), ends))
        return tuple(verified)

    def _next_token(self) -> NextToken:
        if type(self.divergence) is not NextToken:
            raise UserError(
                f"{option('max_ppl_increase')} needs a causal language model; use {option('max_kl')}, here "
                f"{self.divergence.unit}"
            )
        return self.divergence

    def _increase(self, nlls: Mapping[str, float]) -> float:
        before = self._nlls(None)
        return max(_expm1(nlls[name] - before[name]) for name in nlls)

    def _nlls(self, choice: np.ndarray | None) -> dict[str, float]:
        """Returns the mean negative log-likelihood on the check rows of each text."""
        key = () if choice is None else key_of(choice)  # () is the model in 16 bit
        if key not in self.nlls:
            self.switchable.formats.set({} if choice is None else self.space.named(choice))
            self.nlls[key] = _nlls_of(self.divergence, self.held_out.check)
            self.switchable.formats.forget_inputs()
            self._tick()
        return self.nlls[key]

    def uniform(self, problem: KnapsackProblem) -> tuple[Uniform, ...]:
        """Returns the loss of each choice of one format for all groups."""
        return tuple(
            Uniform(name, self.space.bits(choice), self.loss(choice))
            for name, choice in uniform_choices(problem).items()
        )

    def count_probe(self) -> None:
        """Counts a measurement of the local search."""
        self.probed += 1
        self._tick()

    def _tick(self) -> None:
        done = len(self.losses) + len(self.nlls) + self.probed
        self.session.report("verify", done, max(done, self.expected))


def uniform_choices(problem: KnapsackProblem) -> dict[str, np.ndarray]:
    """Returns a choice for each format: all groups that may take it do, and others take the best that is allowed."""
    return {
        name: np.where(problem.allowed[:, j], j, problem.scores.argmin(axis=1))
        for j, name in enumerate(problem.candidates)
        if problem.allowed[:, j].any() and name != KEPT.name
    }


def _nlls_of(divergence: Divergence, texts: Mapping[str, Tensor]) -> dict[str, float]:
    """Returns the mean negative log-likelihood of a model's next tokens on each text."""
    return {name: fmean(_row_nlls(divergence, rows)) for name, rows in texts.items()}


def _row_nlls(divergence: Divergence, rows: Tensor) -> list[float]:
    """Returns the mean negative log-likelihood of the next tokens of each row."""
    assert isinstance(divergence, NextToken)
    return [divergence.nll(row, i) / divergence.count(row) for i, row in enumerate(rows.split(1))]


def _verified(text: str, losses: list[float]) -> Verified:
    return Verified(text, len(losses), fmean(losses), mean_interval(losses, least=0.0))


def _expm1(nll: float) -> float:
    """Returns exp(x) − 1, finite where a double overflows: a broken model's perplexity is still a number."""
    return math.expm1(min(nll, 700.0))


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
        return solve(self.problem, {SCORE: allowance * (1 + 1e-9) + 1e-15, **budgets}, minimize="bytes")

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
            name = "max_error" if isinstance(self.bench.divergence, Prediction) else "max_kl"
            return option(name, f"{self.goal.max_kl:g}")
        if self.goal.min_task is not None:
            return option("min_task", f"{self.goal.min_task:g}")
        return option("max_ppl_increase", f"{100 * (self.goal.max_ppl_increase or 0.0):g}%")

    def _ratio(self, choice: np.ndarray) -> float:
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
        run = CachedRun(bench.switchable, bench.divergence, bench.searched)
        search = Search(self.problem, self.space.limits(self.goal), run, self.space.named, count, bench.count_probe)
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
