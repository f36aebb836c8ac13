"""`ExpertsWork` solves fused experts, one after the other, each on the tokens that reach it.

A projection is one parameter for all experts. A router sends each expert different tokens, so each has a second
moment of its own. One pass over the block keeps what the experts are called with; from there an expert's inputs are
computed when it is its turn, with its quantized projections before in place. So beside the codes, which `Scratch` may
take, a few second moments and one expert are in memory, whatever the number of experts, which may be in their files
until then. Where only the modeling code knows what experts are called with, the block runs once for each projection
with `WatchedExperts`.

An expert that no calibration token reached gets the pooled statistics of the others, and the plan says so.

Scaling, rotation and branches belong to linear layers, because no runtime applies them expert by expert. Where a
solver's name has such parts, experts get its rounding alone, and the plan says that too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from quant.calibration.blocks import Stop
from quant.calibration.fast_matmul import fast_matmul
from quant.calibration.ranks import gathered, rank_and_world
from quant.calibration.solvers.gptq import Gptq
from quant.calibration.solvers.group import all_solved, solve_group
from quant.calibration.solvers.local_hessian import LocalHessian
from quant.calibration.solvers.solver import get_pipeline
from quant.calibration.statistics import LayerStats, round_activation
from quant.calibration.walk.collect import put_back, watch_experts
from quant.calibration.walk.group import Settings, Solved
from quant.calibration.walk.not_finite import InputNotFiniteError
from quant.calibration.walk.scratch import Scratch
from quant.calibration.walk.shared_moments import Moments, at_a_time, pooled, stats_of
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.linear.expert_modules import QuantExperts, experts_forward, runs_experts_alone
from quant.kernels.linear.modules import RunTimeParts
from quant.recipes.expert_stacks import expert_matrices, stacking_of
from quant.recipes.plan import LayerPlan


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
        self.device = next(p.device for p in block.parameters() if not p.is_meta)
        self.inputs: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.alone = runs_experts_alone(self.module)
        self.originals: dict[str, nn.Parameter] = {}
        self.solved: list[tuple[LayerPlan, Solved | None]] = []

    @property
    def name(self) -> str:
        """Of the first projection, in the model."""
        return self.members[0].name

    def solve(self, run: Callable[[], Any], clock: Sequence[int]) -> None:
        """Solves the projections.

        Args:
            run: runs the block on this rank's calibration rows, each until `Stop`.
            clock: a cell with the number of the current batch.
        """
        if self.alone:
            self.module.forward = self._keep_inputs
            run()
        self.run, self.clock = run, clock
        for member in self.members:
            projection = member.name.rpartition(".")[2]
            weight, stacking = self.module.get_parameter(projection), stacking_of(self.module, projection)
            solved = self._solve(member, projection, expert_matrices(self.module, projection))
            self.originals[projection] = weight
            delattr(self.module, projection)
            new = QuantExperts(solved.weight, member.activation, solved.input_scale, weight.dtype, stacking)
            setattr(self.module, projection, new)
            self.solved.append((member, solved))
        self.inputs.clear()
        if self.alone:
            self.module.forward = partial(experts_forward, self.module)

    def _watch(self, projection: str, experts: range, see: Callable[[int, int, torch.Tensor], None]) -> None:
        """Calls `see(batch, expert, input)` for what reaches some experts."""
        if not self.alone:

            def shown(expert: int, x: torch.Tensor) -> None:
                if expert in experts:
                    see(self.clock[0], expert, x)

            parameter = watch_experts(self.module, projection, shown)
            try:
                self.run()
            finally:
                put_back(self.module, {projection: parameter})
            return

        def observe(batch: int, name: str, expert: int, x: torch.Tensor) -> None:
            if name == projection:
                see(batch, expert, x)

        for batch, (hidden, index, weights) in enumerate(self.inputs):
            other = index.new_tensor(self.module.num_experts)
            here = torch.where((index >= experts.start) & (index < experts.stop), index, other)
            experts_forward(self.module, hidden, here, weights, partial(observe, batch), until=projection)

    def _keep_inputs(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> None:
        self.inputs.append((hidden_states, top_k_index, top_k_weights))
        raise Stop

    def results(self) -> list[tuple[LayerPlan, Solved | None]]:
        """What became of the projections. The original parameters are back in the module."""
        put_back(self.module, self.originals)
        if self.originals and self.alone:
            del self.module.forward
        return self.solved

    def _statistics(self, member: LayerPlan, projection: str, experts: range) -> list[LayerStats | None]:
        """Of the inputs of some experts."""
        assert member.weight is not None
        width = member.weight.block[1] if isinstance(get_pipeline(member.solver).rounding, LocalHessian) else None
        sums = {expert: Moments(width) for expert in experts}

        def see(batch: int, expert: int, x: torch.Tensor) -> None:
            if len(x) == 0:
                return
            if not bool(torch.isfinite(x).all()):
                raise InputNotFiniteError(member.name, f"at expert {expert}")
            sums[expert].add(batch, round_activation(x, member.activation, self.input_scales.get(member.name)))

        with fast_matmul():
            self._watch(projection, experts, see)
        return stats_of(list(sums.values()), self.device, list(map(_owner, experts)))

    def _tokens(self, projection: str, count: int) -> list[int]:
        """How many tokens of all ranks reach each expert."""
        total = torch.zeros(count + 1, dtype=torch.int64)
        if not self.alone:

            def see(batch: int, expert: int, x: torch.Tensor) -> None:
                total[expert] += len(x)

            self._watch(projection, range(count), see)
        for _, index, _ in self.inputs:
            total += torch.bincount(index.flatten().clamp(max=count).cpu(), minlength=count + 1)
        return [sum(of_ranks) for of_ranks in zip(*gathered(total[:count].tolist()), strict=True)]

    def _solve(self, member: LayerPlan, projection: str, weight: Sequence[torch.Tensor]) -> Solved:
        pipeline = get_pipeline(member.solver)
        assert member.weight is not None
        count, format = len(weight), member.weight
        notes = []
        if pipeline.transforms or pipeline.reshapes:
            notes.append(f"experts take no scaling, rotation, branch or reconstruction: {pipeline.spec.rounding} alone")
        looks = isinstance(pipeline.rounding, Gptq | LocalHessian)
        tokens = self._tokens(projection, count) if looks else [0] * count
        width = member.weight.block[1] if isinstance(pipeline.rounding, LocalHessian) else None
        parts = [range(count)[part] for part in at_a_time(count, member.shape[-1], width)]
        silent = tokens.count(0) if looks else 0
        if silent == count:
            raise ValueError(f"{member.name}: no calibration token reached any expert; give more text, or exclude it")
        others = None
        if silent:
            notes.append(
                f"no calibration token reached {silent} of {count} experts: solved on the pooled statistics of "
                "the others"
            )
            for part in parts:
                others = pooled(
                    self._statistics(member, projection, part),
                    self.device,
                    list(map(_owner, part)),
                    sum(tokens),
                    others,
                )

        def solve_part(part: range) -> list[dict[str, BlockScaledTensor]]:
            found = self._statistics(member, projection, part) if looks else [None] * len(part)
            own = {}
            for place, (expert, stats) in enumerate(zip(part, found, strict=True)):
                if _owner(expert) == rank_and_world()[0]:
                    matrix = {member.name: weight[expert].to(self.device).float()}
                    own[place] = solve_group(
                        matrix, {member.name: stats or others}, format, pipeline.rounding, self.stored
                    )
            return all_solved(own, [({member.name: tuple(member.shape[1:])}, format)] * len(part), self.device)

        solved = (each[member.name] for part in parts for each in solve_part(part))
        whole = stacked(solved, count, self.settings.scratch)
        return Solved(whole, RunTimeParts(), self.input_scales.get(member.name), sum(tokens), tuple(notes))


def _owner(expert: int) -> int:
    """The rank that solves an expert."""
    return expert % rank_and_world()[1]


def stacked(matrices: Iterable[BlockScaledTensor], count: int, scratch: Scratch | None = None) -> BlockScaledTensor:
    """The matrices of all experts as one weight `[experts, out, in]`; each is dropped before the next is asked for.

    Where they would take much of the memory, they lie in a file of `scratch`.
    """
    whole: list[torch.Tensor | None] = []
    for place, matrix in enumerate(matrices):
        tensors = (matrix.codes, matrix.scale, matrix.global_scale)
        if not whole:
            format, shape = matrix.format, (count, *matrix.shape)
            in_file = scratch is not None and scratch.takes(count * sum(t.nbytes for t in tensors if t is not None))
            empty = scratch.empty if scratch is not None and in_file else torch.Tensor.new_empty
            whole = [None if t is None else empty(t, (count, *t.shape)) for t in tensors]
        for target, tensor in zip(whole, tensors, strict=True):
            if target is not None and tensor is not None:
                target[place] = tensor
    codes, scale, second = whole
    assert codes is not None and scale is not None
    return BlockScaledTensor(codes, scale, format, shape, second)
