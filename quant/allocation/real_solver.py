"""`RealSolver` quantizes what an allocation chose with a solver that works from data, measures it, and chooses again.

Such a solver (GPTQ, AWQ) gives a layer what suits the quantized layers before it, so groups influence each other. The
loop of an allocation knows only what the solver leaves of each group alone. Here the whole model is solved: for a
budget once, and once more for a single format that may be better than the mix; for a limit on the loss until the limit
is kept.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import nn

from quant.allocation.loop import Found, Loop
from quant.allocation.record import Round, Verified
from quant.allocation.space import key_of
from quant.calibration.evaluating import prepared
from quant.calibration.placement import device_of
from quant.calibration.progress import Progress
from quant.calibration.sensitivity.divergence import Divergence, divergence_of
from quant.calibration.sensitivity.knapsack import Infeasible
from quant.execution.solve import Quantized, solve_plan
from quant.recipes.plan import Plan

# What a solver leaves of groups solved alone is an estimate of what it leaves of all: a format for all that is worse
# than the mix by less than this factor is solved too.
_CLOSE = 1.25


@dataclass(eq=False)
class RealSolver:
    """Quantizes copies of the model with the solver that the plan names, and measures them.

    Groups influence each other there, which solutions of each group alone do not show. What is learned from a copy is
    one number: its loss over that of layers solved alone.
    """

    model: nn.Module
    loop: Loop
    plan_of: Callable[[np.ndarray], Plan]
    rows: torch.Tensor
    dtype: torch.dtype | None
    device: torch.device | None
    progress: Progress | None
    uniform: dict[str, float] = field(default_factory=dict)

    def within_budget(self, found: Found) -> tuple[Found, Quantized]:
        """The choice, or one format for all groups where that is measured to be better."""
        loop = self.loop
        quantized = self._quantized(found.choice)
        best = Found(found.choice, self._measured(quantized, found))
        for name, choice in loop.uniform_within_budgets().items():
            alone = loop.bench.losses[key_of(choice)]
            if np.array_equal(choice, found.choice) or alone > _CLOSE * found.measured:
                continue
            rival = self._quantized(choice)
            self.uniform[name] = measured = self._measured(rival, Found(choice, alone))
            if measured < best.measured:
                loop.note_uniform(name, best.measured, measured)
                best = Found(choice, measured)
                quantized = replace(rival, plan=_reasons(rival.plan, self.plan_of(choice)))
        return best, quantized

    def within_loss(self, found: Found) -> tuple[Found, Quantized]:
        """The smallest choice that keeps the limit, searched again while it is missed.

        Raises:
            Infeasible: no quantization kept it.
        """
        loop, limit = self.loop, self.loop.goal.limit
        assert limit is not None
        best: tuple[Found, Quantized] | None = None
        for _ in range(loop.effort.solves):
            alone = self._alone(found)
            quantized = self._quantized(found.choice)
            measured = self._measured(quantized, found)
            limited = self._limited(quantized, measured)
            smaller = best is None or loop.space.bytes(found.choice) < loop.space.bytes(best[0].choice)
            if limited <= limit and smaller:
                best = Found(found.choice, measured), quantized
            loop.scale = limited / alone if alone > 0 and limited > 0 else 1.0
            with loop.bench.switchable.ready():
                found = loop.run()
            if best is not None and loop.space.bytes(found.choice) > 0.995 * loop.space.bytes(best[0].choice):
                break
        if best is None:
            raise Infeasible(
                f"{loop.limit_text()}: not reached after {loop.effort.solves} quantizations; allow a little more"
            )
        return best

    def verified(self, quantized: Quantized) -> tuple[Verified, ...]:
        """The loss of what was quantized on the rows kept for it."""
        with self._running(quantized) as divergence:
            return self.loop.bench.verified_of(divergence)

    def _quantized(self, choice: np.ndarray) -> Quantized:
        plan = self.plan_of(choice)
        return solve_plan(copy.deepcopy(self.model), plan, self.rows, device=self.device, progress=self.progress)

    def _measured(self, quantized: Quantized, found: Found) -> float:
        """The joint loss of a quantized copy; the record gets a line."""
        with self._running(quantized) as divergence:
            measured = self.loop.bench.loss_of(divergence)
        self.loop.rounds.append(Round(self.loop.space.bits(found.choice), found.measured * self.loop.scale, measured))
        return measured

    def _alone(self, found: Found) -> float:
        """The limited figure of groups solved alone, which the loop has measured."""
        if not self.loop.goal.by_perplexity:
            return found.measured
        return self.loop.bench.perplexity_increase(found.choice)

    def _limited(self, quantized: Quantized, measured: float) -> float:
        """The limited figure of a quantized copy whose loss is known."""
        if not self.loop.goal.by_perplexity:
            return measured
        with self._running(quantized) as divergence:
            return self.loop.bench.perplexity_increase_of(divergence)

    @contextmanager
    def _running(self, quantized: Quantized) -> Iterator[Divergence]:
        """A divergence that runs a quantized copy."""
        few = next(iter(self.loop.bench.held_out.check.values()))
        divergence = divergence_of(quantized.model, few.to(device_of(quantized.model)))
        with prepared(quantized.model, self.dtype, self.device):
            yield divergence


def _reasons(quantized: Plan, planned: Plan) -> Plan:
    """A plan that was executed, with the reasons of the one that was asked for."""
    return quantized.replace_layers(
        replace(layer, reason=planned.by_name[layer.name].reason) for layer in quantized.quantized
    )
