"""`RealSolver` quantizes a choice of formats with a solver that works from data, measures it, and chooses again.

Such a solver (GPTQ, AWQ) fits a layer to the quantized layers before it, so groups influence each other. The loop of an
allocation only knows the loss that the solver leaves in each group by itself. Here the whole model is solved: for a
budget once, and once more for a single format that may be better than the mix; for a limit on the loss until it is
kept.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import nn

from quant.calibration.allocation.curve import Loop, MeasuredChoice
from quant.calibration.allocation.record import Round, Verified
from quant.calibration.allocation.space import key_of
from quant.calibration.evaluating import prepared
from quant.calibration.placement import device_of
from quant.calibration.sensitivity.divergence import Divergence, divergence_of
from quant.calibration.sensitivity.knapsack import Infeasible
from quant.calibration.session import Session
from quant.calibration.layer_result import Quantized
from quant.calibration.walk.solve import solve_plan
from quant.recipes.plan import Plan

# The loss of groups solved one by one only estimates the loss of the solved model: a single format whose estimate is
# worse than the estimate of the mix by less than this factor is solved too.
_CLOSE = 1.25


@dataclass(eq=False)
class RealSolver:
    """Quantizes copies of the model with the solver that the plan names, and measures them.

    Groups influence each other there, unlike in separate solutions of each group. The loop learns one number from a
    copy: its loss divided by the loss of layers solved one by one.

    Attributes:
        model: the model in 16 bit; it is copied for each quantization.
        loop: the loop that made the choice.
        rows: calibration rows, int64 `[rows, seqlen]`.
        dtype: dtype to which 16-bit tensors are widened while measuring.
        session: the session in which models are solved and run.
        uniform: measured losses of single formats, by format.
    """

    model: nn.Module
    loop: Loop
    rows: torch.Tensor
    dtype: torch.dtype | None
    session: Session
    uniform: dict[str, float] = field(default_factory=dict)

    def within_budget(self, estimated: MeasuredChoice) -> tuple[MeasuredChoice, Quantized]:
        """Returns the choice, or one format for all groups if its measured loss is smaller."""
        loop = self.loop
        quantized = self._quantized(estimated.choice)
        best = MeasuredChoice(estimated.choice, self._measured(quantized, estimated))
        for name, choice in loop.uniform_within_budgets().items():
            # Measured before, by `Bench.uniform`.
            alone = loop.bench.losses[key_of(choice)]
            if np.array_equal(choice, estimated.choice) or alone > _CLOSE * estimated.measured:
                continue
            rival = self._quantized(choice)
            self.uniform[name] = measured = self._measured(rival, MeasuredChoice(choice, alone))
            if measured < best.measured:
                loop.note_uniform(name, best.measured, measured)
                best = MeasuredChoice(choice, measured)
                quantized = replace(rival, plan=_reasons(rival.plan, self.loop.plan(choice)))
        return best, quantized

    def within_loss(self, estimated: MeasuredChoice) -> tuple[MeasuredChoice, Quantized]:
        """Returns the smallest choice that keeps the limit, searched again while it is missed.

        Raises:
            Infeasible: no quantization kept it.
        """
        loop, limit = self.loop, self.loop.goal.limit
        assert limit is not None
        best: tuple[MeasuredChoice, Quantized] | None = None
        for _ in range(loop.effort.solves):
            alone = self._alone(estimated)
            quantized = self._quantized(estimated.choice)
            measured = self._measured(quantized, estimated)
            limited = self._limited(quantized, measured)
            smaller = best is None or loop.space.bytes(estimated.choice) < loop.space.bytes(best[0].choice)
            if limited <= limit and smaller:
                best = MeasuredChoice(estimated.choice, measured), quantized
            # The ratio corrects the loop's measurements of groups solved one by one; the next choice aims at limit /
            # scale.
            loop.scale = limited / alone if alone > 0 and limited > 0 else 1.0
            with loop.bench.switchable.ready():
                estimated = loop.run()
            # A further quantization must promise to save more than 0.5 %.
            if best is not None and loop.space.bytes(estimated.choice) > 0.995 * loop.space.bytes(best[0].choice):
                break
        if best is None:
            raise Infeasible(
                f"{loop.limit_text()}: not reached after {loop.effort.solves} quantizations; allow a little more"
            )
        return best

    def verified(self, quantized: Quantized) -> tuple[Verified, ...]:
        """Returns the loss of a quantized copy on the rows that verify, text by text."""
        with self._running(quantized) as divergence:
            return self.loop.bench.verified_of(divergence)

    def _quantized(self, choice: np.ndarray) -> Quantized:
        plan = self.loop.plan(choice)
        # The store of the run has the steps of another plan, so this one keeps none.
        session = Session(self.session.device, progress=self.session.progress)
        # A copy each time: solving replaces modules, and the original is still the reference of every divergence.
        return solve_plan(copy.deepcopy(self.model), plan, self.rows, session)

    def _measured(self, quantized: Quantized, estimated: MeasuredChoice) -> float:
        """Returns the joint loss of a quantized copy; the measurement is recorded as a round."""
        with self._running(quantized) as divergence:
            measured = self.loop.bench.loss_of(divergence)
        predicted = estimated.measured * self.loop.scale
        self.loop.rounds.append(Round(self.loop.space.bits(estimated.choice), predicted, measured))
        return measured

    def _alone(self, estimated: MeasuredChoice) -> float:
        """Returns the limited figure of groups solved one by one, as the loop measured it."""
        if not self.loop.goal.by_perplexity:
            return estimated.measured
        return self.loop.bench.perplexity_increase(estimated.choice)

    def _limited(self, quantized: Quantized, measured: float) -> float:
        """Returns the limited figure of a quantized copy whose loss is known."""
        if not self.loop.goal.by_perplexity:
            return measured
        with self._running(quantized) as divergence:
            return self.loop.bench.perplexity_increase_of(divergence)

    @contextmanager
    def _running(self, quantized: Quantized) -> Iterator[Divergence]:
        """Gives a divergence that runs a quantized copy."""
        few = next(iter(self.loop.bench.held_out.check.values()))
        divergence = divergence_of(quantized.model, few.to(device_of(quantized.model)))
        with prepared(quantized.model, self.dtype, self.session):
            yield divergence


def _reasons(quantized: Plan, planned: Plan) -> Plan:
    """Returns the executed plan, with the reasons of the planned one."""
    return quantized.replace_layers(
        replace(layer, reason=planned.by_name[layer.name].reason) for layer in quantized.quantized
    )
