"""A `Bench` measures the joint loss of choices of formats, each choice once."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from quant.allocation.space import Space, key_of
from quant.allocation_record import Uniform
from quant.calibration.progress import Progress
from quant.calibration.sensitivity.baseline import Baseline
from quant.calibration.sensitivity.candidates import KEPT
from quant.calibration.sensitivity.divergence import Divergence, NextToken
from quant.calibration.sensitivity.knapsack import Problem
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
        key = key_of(choice)
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
        key = () if choice is None else key_of(choice)
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
