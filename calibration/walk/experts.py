"""`ExpertsWork` solves fused experts: each expert on the tokens that reach it.

A projection is one parameter `[experts, out, in]`. A router sends each expert different tokens, so each has a second
moment of its own. An expert that no calibration token reached gets the pooled statistics of the others, and the plan
says so. Projections are solved in the order in which tokens pass them, with the quantized ones before in place.

Scaling, rotation and branches belong to linear layers, because no runtime applies them expert by expert. Where a
solver's name has such parts, experts get its rounding alone, and the plan says that too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from quant.calibration.ranks import rank_and_world
from quant.calibration.solvers.gptq import Gptq
from quant.calibration.solvers.group import all_solved, solve_group
from quant.calibration.solvers.local_hessian import LocalHessian
from quant.calibration.solvers.solver import get_pipeline
from quant.calibration.statistics import LayerStats, round_activation
from quant.calibration.walk.group import Settings, Solved
from quant.calibration.walk.shared_moments import Moments, pooled, stats_of
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.linear.modules import QuantExperts, RunTimeParts, experts_forward
from quant.recipes.plan import LayerPlan

# Bytes of second moments that are held at a time; more experts than fit take more passes.
_BUDGET = 1 << 29


class ExpertsWork:
    """The projections of one experts module from original to quantized.

    Args:
        block: holds the module.
        members: its planned projections, in the order in which tokens pass them.
        prefix: of the block's name in theirs, with its dot.
        input_scales: static scales of their inputs, by name.
        settings: how the walk is done.
        stored: dtype of the model.
    """

    def __init__(
        self,
        block: nn.Module,
        members: Sequence[LayerPlan],
        prefix: str,
        input_scales: Mapping[str, torch.Tensor],
        settings: Settings,
        stored: torch.dtype,
    ) -> None:
        path = members[0].name.removeprefix(prefix).rpartition(".")[0]
        self.module = block.get_submodule(path)
        self.members, self.input_scales, self.settings, self.stored = members, input_scales, settings, stored
        self.device = self.module.get_parameter(members[0].name.rpartition(".")[2]).device
        self.originals: dict[str, nn.Parameter] = {}
        self.solved: list[tuple[LayerPlan, Solved | None]] = []

    @property
    def name(self) -> str:
        """Of the first projection, in the model."""
        return self.members[0].name

    def solve(self, run: Callable[[], Any], clock: list[int]) -> None:
        """Solves the projections; `run` runs the block on this rank's calibration rows, `clock` tells their batch."""
        self.clock = clock
        self.module.forward = partial(experts_forward, self.module)
        for member in self.members:
            projection = member.name.rpartition(".")[2]
            weight = self.module.get_parameter(projection)
            found = self._statistics(member, projection, len(weight), run)
            solved = self._solve(member, weight.detach().float(), found)
            self.originals[projection] = weight
            delattr(self.module, projection)
            setattr(self.module, projection, QuantExperts(solved.weight, member.activation, solved.input_scale))
            self.solved.append((member, solved))

    def results(self) -> list[tuple[LayerPlan, Solved | None]]:
        """What became of the projections. The original parameters are back in the module."""
        for projection, weight in self.originals.items():
            delattr(self.module, projection)
            self.module.register_parameter(projection, weight)
        if self.originals:
            del self.module.forward
        return self.solved

    def _statistics(
        self, member: LayerPlan, projection: str, count: int, run: Callable[[], Any]
    ) -> list[LayerStats | None]:
        """Of the inputs of each expert."""
        pipeline = get_pipeline(member.solver)
        if not isinstance(pipeline.rounding, Gptq | LocalHessian):
            return [None] * count
        assert member.weight is not None
        width = member.weight.block[1] if isinstance(pipeline.rounding, LocalHessian) else None
        columns = member.shape[-1]
        together = max(_BUDGET // (4 * columns * (width or columns)), 1)
        found: list[LayerStats | None] = []
        for first in range(0, count, together):
            sums = {expert: Moments(width) for expert in range(first, min(first + together, count))}

            def observe(name: str, expert: int, x: torch.Tensor, sums: dict[int, Moments] = sums) -> None:
                if name != projection or expert not in sums or len(x) == 0:
                    return
                if not bool(torch.isfinite(x).all()):
                    raise ValueError(f"{member.name}: the input of expert {expert} holds NaN or infinity")
                rounded = round_activation(x, member.activation, self.input_scales.get(member.name))
                sums[expert].add(self.clock[0], rounded)

            self.module.forward = partial(experts_forward, self.module, observe=observe)
            run()
            found += stats_of(list(sums.values()), self.device, [_owner(expert) for expert in sums])
        self.module.forward = partial(experts_forward, self.module)
        return found

    def _solve(self, member: LayerPlan, weight: torch.Tensor, found: Sequence[LayerStats | None]) -> Solved:
        pipeline = get_pipeline(member.solver)
        assert member.weight is not None
        notes = []
        if pipeline.transforms or pipeline.reshapes:
            notes.append(f"experts take no scaling, rotation, branch or reconstruction: {pipeline.spec.rounding} alone")
        reached = [stats for stats in found if stats is not None]
        silent = sum(stats is None for stats in found) if pipeline.needs_moment else 0
        others = pooled(found, self.device, list(map(_owner, range(len(found))))) if silent else None
        if silent and others is None:
            raise ValueError(f"{member.name}: no calibration token reached any expert; give more text, or exclude it")
        if silent:
            notes.append(
                f"no calibration token reached {silent} of {len(weight)} experts: solved on the pooled statistics of "
                "the others"
            )
        own = {
            expert: solve_group({member.name: matrix}, {member.name: stats or others}, member.weight,
                                pipeline.rounding, self.stored)
            for expert, (matrix, stats) in enumerate(zip(weight, found, strict=True))
            if _owner(expert) == rank_and_world()[0]
        }  # fmt: skip
        shapes = {member.name: tuple(weight.shape[1:])}
        solved = [each[member.name] for each in all_solved(own, [(shapes, member.weight)] * len(weight), self.device)]
        tokens = sum(stats.tokens for stats in reached)
        return Solved(stacked(solved), RunTimeParts(), self.input_scales.get(member.name), tokens, tuple(notes))


def _owner(expert: int) -> int:
    """The rank that solves an expert."""
    return expert % rank_and_world()[1]


def stacked(matrices: Sequence[BlockScaledTensor]) -> BlockScaledTensor:
    """The matrices of all experts as one weight `[experts, out, in]`."""
    first = matrices[0]
    scales = [matrix.global_scale for matrix in matrices if matrix.global_scale is not None]
    return BlockScaledTensor(
        torch.stack([matrix.codes for matrix in matrices]),
        torch.stack([matrix.scale for matrix in matrices]),
        first.format,
        (len(matrices), *first.shape),
        torch.stack(scales) if scales else None,
    )
