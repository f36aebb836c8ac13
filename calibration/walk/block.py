"""`BlockWork` quantizes one block: transforms, rounding group by group, guard, reconstruction.

`sequential` walks the blocks and says what each step is for. Until the block is finished, a `StandIn` takes the place
of each solved layer, so that the groups behind it get the inputs that the quantized layers before them give.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from quant.calibration.blocks import Call, Stop, output_of, removing
from quant.calibration.fast_matmul import fast_matmul
from quant.calibration.ranks import (
    Entry,
    at_first,
    dealt,
    from_first,
    gathered,
    in_order,
    number_of,
    rank_and_world,
    sharing,
)
from quant.calibration.solvers.autoround import BlockLayer, Reconstructed, Reconstruction, reconstruct_block
from quant.calibration.solvers.gptq import Gptq
from quant.calibration.solvers.group import all_solved, solve_stacked
from quant.calibration.solvers.lowrank import Branch, take_branches
from quant.calibration.solvers.rotation import rotate_weight, rotation_block
from quant.calibration.solvers.solver import get_pipeline, with_supported_solver
from quant.calibration.statistics import LayerStats, rows_of
from quant.calibration.walk.experts import ExpertsWork
from quant.calibration.walk.group import Group, Settings, Solved
from quant.calibration.walk.guard import promote, relative_error
from quant.calibration.walk.not_finite import InputNotFiniteError
from quant.calibration.walk.scaling import InputScaling
from quant.calibration.walk.shared_moments import Moments, at_a_time, pooled, stats_of
from quant.calibration.walk.stand_in import RememberedModules, StandIn, weight_of
from quant.formats.tensor import BlockScaledTensor
from quant.recipes.plan import LayerPlan

_DATA_FREE = "mse"  # the solver of effort 1

# Of a group on a held-out row: its input, and that of the original model.
_Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class _Rounded:
    """A group's codes and scales by name, its branches, and what was rounded, `[out, in]`."""

    weights: Mapping[str, BlockScaledTensor]
    branches: Mapping[str, Branch]
    wanted: Mapping[str, torch.Tensor]


class BlockWork:
    """One block from original to quantized."""

    def __init__(
        self,
        block: nn.Module,
        groups: list[Group],
        experts: list[ExpertsWork],
        settings: Settings,
        stored: torch.dtype,
    ) -> None:
        self.block, self.groups, self.experts, self.settings, self.stored = block, groups, experts, settings, stored
        self.clock = [0]
        self.device = next(p.device for p in block.parameters() if not p.is_meta)
        self.batches = 0  # of all ranks
        self.targets = {n: weight_of(block, n).detach().float() for g in groups for n in g.names}
        self.stand_ins: dict[str, StandIn] = {}
        self.solved: dict[str, tuple[LayerPlan, Solved | None]] = {}
        self.rounded: dict[str, torch.Tensor] = {}
        self.biases: dict[str, torch.Tensor] = {}
        self.calls: Counter[str] = Counter()
        self.remembered = RememberedModules(self.clock)

    def solve(
        self, current: Sequence[Call], original: Sequence[Call], small: Call, *, needs_output: bool
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Solves all groups.

        Args:
            current: calls with the hidden states that the quantized blocks before give, one for each of this rank's
                batches.
            original: the same with the original hidden states.
            small: a call on a few tokens.
            needs_output: whether another block follows.

        Returns:
            The hidden states behind the block: quantized, original.
        """
        self.batches = sum(gathered(len(original)))
        if self.settings.guard is None and all(group.pipeline.at_once for group in self.groups):
            outputs = self._observe_at_once(original)
            self._solve_experts(original)
            return outputs, outputs
        self.tokens = sum(gathered(sum(_token_count(call.hidden) for call in original)))
        reference = self._observe(original)
        InputScaling(self.block, self.groups, self.targets, self.stored).choose(small)
        for group in self.groups:
            self._rotate(group)
            group.fix_input_scale(self.settings.observer, self.stored)
        for stage in self._stages():
            self._solve_stage(stage, current)
            self._remember_finished()
        self._solve_experts(current)
        if any(group.pipeline.reconstruction for group in self.groups):
            self.remembered.forget()
            self._reconstruct(current, reference)
        outputs = self._outputs(current) if needs_output else []
        return outputs, reference

    def results(self) -> list[tuple[LayerPlan, Solved | None]]:
        """Each layer as planned, or as the guard promoted it, with its solution; None for a layer kept in 16 bit.

        Puts the original modules back into the block.
        """
        self.remembered.forget()
        for name, stand_in in self.stand_ins.items():
            self.block.set_submodule(name, stand_in.original)
        found = [self.solved[name] for group in self.groups for name in group.names]
        return found + [result for experts in self.experts for result in experts.results()]

    def _outputs(self, calls: Sequence[Call]) -> list[torch.Tensor]:
        """The hidden states behind the block, each where the one before it is kept."""
        out = []
        with fast_matmul():
            for self.clock[0], call in enumerate(calls):
                here = call.to(self.device)
                out.append(output_of(self.block(*here.args, **here.kwargs)).to(call.hidden.device))
        return out

    def _remember_finished(self) -> None:
        """Modules in which every layer is solved are not run again."""
        unfinished = [work.module for work in self.experts if not work.solved]
        for name, calls in self.calls.items():
            module = self.block.get_submodule(name)
            inside = [group for group in self.groups if any(n.startswith(f"{name}.") for n in group.names)]
            solved = not any(target.startswith(f"{name}.") for target in self.targets)
            once = calls == self.batches and all(group.calls == 1 for group in inside)
            if not solved or not once or "forward" in vars(module) or any(m in unfinished for m in module.modules()):
                continue
            self.remembered.add(module)
            for member in (member for group in inside for member in group.names):
                if member in self.stand_ins:
                    self.stand_ins[member].keeps = False

    def _observe(self, calls: Sequence[Call]) -> list[torch.Tensor]:
        """The reference pass: magnitudes, the inputs themselves, and the order in which groups are called."""
        order: list[tuple[int, int]] = []

        def watch(index: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
            def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
                order.append((number_of(self.clock[0]), index))
                self._take_in(self.groups[index], args[0], keep=True)

            return hook

        def count(name: str) -> Callable[..., None]:
            return lambda module, args: self.calls.update([name])

        parents = {name[:dot] for g in self.groups for name in g.names for dot in _dots(name)}
        counting = _hooks(self.block, {name: count(name) for name in sorted(parents)})
        with counting, _hooks(self.block, {g.names[0]: watch(i) for i, g in enumerate(self.groups)}):
            outputs = self._outputs(calls)
        orders, counts, tokens = zip(*gathered((order, self.calls, [g.tokens for g in self.groups])), strict=True)
        self.calls = sum(counts, Counter())
        called = [index for _, index in sorted((c for part in orders for c in part), key=itemgetter(0))]
        for index, group in enumerate(self.groups):
            group.calls = called.count(index) // self.batches if called.count(index) % self.batches == 0 else 2
            group.pool(self.device, sum(of_rank[index] for of_rank in tokens))
        first = {index: place for place, index in reversed(list(enumerate(called)))}
        self.groups = [self.groups[i] for i in sorted(range(len(self.groups)), key=lambda i: first.get(i, len(called)))]
        return outputs

    def _take_in(self, group: Group, given: torch.Tensor, *, keep: bool) -> torch.Tensor:
        """Adds an original input to what is known of a group, and returns it as `[tokens, in]`."""
        x = given.reshape(-1, given.shape[-1])
        if len(x):
            magnitude = x.abs()
            amax, total = magnitude.amax(0).float(), magnitude.sum(0, dtype=torch.float32)
            self._check(amax, given, group)
            group.seen.append((number_of(self.clock[0]), [amax, total]))
            group.tokens += len(x)
            if keep:
                group.kept.append(x)
                group.places.append(number_of(self.clock[0]))
        return x

    def _check(self, amax: torch.Tensor, x: torch.Tensor, group: Group) -> None:
        if bool(torch.isfinite(amax.sum())):
            return
        if bool(torch.isfinite(x).all()):
            return
        row = number_of(self.clock[0]) * self.settings.batch
        if x.dim() > 2:
            row += int((~torch.isfinite(x).flatten(1).all(1)).nonzero()[0])
        raise InputNotFiniteError(group.members[0].name, f"on calibration row {row}")

    def _rotate(self, group: Group) -> None:
        """Rotates the weights to be rounded. The block's own weights stay, because they still get unrotated inputs."""
        if group.pipeline.spec.rotation:
            block = rotation_block(group.members[0].shape[-1], group.pipeline.spec.rotation)
            group.parts = replace(group.parts, hadamard=block)
            for name in group.names:
                self.targets[name] = rotate_weight(self.targets[name], block)

    def _stages(self) -> list[list[Group]]:
        """Groups whose statistics one pass collects: sibling experts together, all others one by one."""
        routed = {group.pattern for group in self.groups if group.tokens < self.tokens}
        stages: dict[str, list[Group]] = {}
        for index, group in enumerate(self.groups):
            stages.setdefault(group.pattern if group.pattern in routed else str(index), []).append(group)
        return list(stages.values())

    def _solve_stage(self, stage: list[Group], calls: Sequence[Call]) -> None:
        moments, held_out = self._collect(stage, calls)
        targets = {name: self.targets[name] for group in stage for name in group.names} if self.settings.guard else {}
        self._solve_collected(stage, moments, self._owners(stage))
        for group, pairs in zip(stage, held_out, strict=True):
            while pairs and self._promote(group, targets, pairs):
                again, (pairs,) = self._collect([group], calls)
                self._solve_collected([group], again)
        for group in stage:
            group.kept.clear()

    def _collect(self, stage: list[Group], calls: Sequence[Call]) -> tuple[list[Moments], list[list[_Pair]]]:
        """Sums over the inputs of each group; for the guard also pairs on held-out rows."""
        # Tokens that a router has sent to many experts take less memory than the experts' moments.
        columns = stage[0].members[0].shape[-1]
        later = len(stage) > 1 and sum(group.tokens for group in stage) < len(stage) * columns
        moments = [Moments(later=later) for _ in stage]
        pairs: list[list[Entry]] = [[] for _ in stage]
        judged = self._held_out(self.batches)

        def watch(group: Group, found: Moments, held: list[Entry]) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
                x = args[0].reshape(-1, args[0].shape[-1])
                if len(x) == 0:
                    return
                drift = self._drift(group, x)
                number = number_of(self.clock[0])
                if number in judged:
                    held.append((number, [x, group.input(x) if drift is None else group.input(x) + drift]))
                if number not in judged or self.batches == 1:
                    self._add(group, found, x, drift, rows_of(args[0]))
                if len(stage) == 1 and group.calls == 1:
                    raise Stop

            return hook

        hooks = {g.names[0]: watch(g, m, p) for g, m, p in zip(stage, moments, pairs, strict=True)}
        if judged or any(group.pipeline.needs_moment for group in stage):
            with _hooks(self.block, hooks):
                self._run_until_stopped(calls)
        return moments, [[_pair(held) for _, held in in_order(part, self.device)] if judged else [] for part in pairs]

    def _owners(self, stage: Sequence[Group]) -> list[int] | None:
        """The rank that solves each of several groups; None where all ranks solve the only one together."""
        if len(stage) == 1:
            return None
        if any(group.pipeline.reconstruction for group in stage):
            return [0] * len(stage)  # where blocks are refined
        return dealt([sum(member.numel for member in group.members) for group in stage])

    def _held_out(self, calls: int) -> range:
        """Batches that only judge, where there is a guard: the last eighth, at least one."""
        return range(calls - max(calls // 8, 1), calls) if self.settings.guard else range(0)

    def _add(
        self,
        group: Group,
        found: Moments,
        x: torch.Tensor,
        drift: torch.Tensor | None,
        rows: int,
    ) -> None:
        """Adds a batch of inputs to the group's statistics."""
        if not group.pipeline.needs_moment:
            return
        rounded, noise = group.round_input(x), None
        if group.pipeline.spec.rank and group.activation is not None:
            noise = (rounded - group.input(x)).float().square().sum(0)
        found.add(self.clock[0], rounded, drift, rows, noise)

    def _promote(self, group: Group, targets: Mapping[str, torch.Tensor], pairs: list[_Pair]) -> bool:
        """Asks the guard. True where the group has another format now and is to be solved again."""
        guard = self.settings.guard
        assert guard is not None
        wanted = [torch.cat([nn.functional.linear(ref, targets[n].to(ref)) for _, ref in pairs]) for n in group.names]
        given = [torch.cat([self.stand_ins[n].product(x) for x, _ in pairs]) for n in group.names]
        try:
            worst = max(relative_error(w, g) for w, g in zip(wanted, given, strict=True))
        except ValueError as error:
            raise ValueError(f"{group.members[0].name}: {error}") from None
        promoted = [promote(m, worst, guard.limit, guard.formats_for(m)) for m in group.members]
        changed = promoted[0].weight != group.members[0].weight
        group.members = [with_supported_solver(member) for member in promoted]
        for member, name in zip(group.members, group.names, strict=True):
            self.solved[name] = (member, self.solved[name][1])
        if not changed:
            return False
        for name in group.names:
            original = self.stand_ins.pop(name).original
            if name in self.biases:
                original.bias.data = self.biases.pop(name)
            self.block.set_submodule(name, original)
            self.targets[name] = targets[name]
        if group.members[0].weight is not None:
            group.pipeline = get_pipeline(group.members[0].solver)
            group.fix_input_scale(self.settings.observer, self.stored)
            return True
        for member, name in zip(group.members, group.names, strict=True):
            self.solved[name] = (member, None)
            self.rounded.pop(name, None)
            if group.parts.pre_scale is not None:
                # In 16 bit nothing scales the input any more.
                weight = weight_of(self.block, name)
                weight.data = weight * group.parts.pre_scale.to(weight)
            del self.targets[name]
        return False

    def _solve_collected(
        self, stage: list[Group], moments: Sequence[Moments], owners: Sequence[int] | None = None
    ) -> None:
        """Solves sibling groups; one that no token reached gets the pooled statistics of the others.

        Args:
            stage: the groups.
            moments: sums over their inputs, which are empty afterwards.
            owners: the ranks that solve them; None where each rank solves them all, sharing their rows.
        """
        parts = at_a_time(len(stage), stage[0].members[0].shape[-1], moments[0].sum.width)
        ranks = [None if owners is None else owners[part] for part in parts]
        others = None
        counts = [sum(of_ranks) for of_ranks in zip(*gathered([each.tokens for each in moments]), strict=True)]
        if any(group.pipeline.needs_moment and not tokens for group, tokens in zip(stage, counts, strict=True)):
            for part, solvers in zip(parts, ranks, strict=True):
                others = pooled(
                    stats_of(moments[part], self.device, solvers, again=True), self.device, solvers, sum(counts), others
                )
        for part, solvers in zip(parts, ranks, strict=True):
            self._solve_part(stage[part], stats_of(moments[part], self.device, solvers), others, solvers)

    def _solve_part(
        self,
        stage: list[Group],
        found: Sequence[LayerStats | None],
        others: LayerStats | None,
        owners: Sequence[int] | None,
    ) -> None:
        """Solves some groups from their statistics; `others` are the pooled ones of all siblings."""
        taken: list[LayerStats | None] = []
        for group, stats in zip(stage, found, strict=True):
            if self.settings.guard is None:
                group.kept.clear()
                group.places.clear()
            taken.append((stats or others) if group.pipeline.needs_moment else None)
            if not group.pipeline.needs_moment:
                continue
            if stats is None and others is None:
                _look_at_no_data(group)
            elif stats is None:
                group.notes.append("no calibration token reached it: solved on the pooled statistics of its siblings")
            elif isinstance(group.pipeline.rounding, Gptq) and stats.tokens < group.members[0].shape[-1]:
                found_in = f"{stats.tokens} tokens for {group.members[0].shape[-1]} inputs"
                group.notes.append(f"{found_in}: a singular second moment, damped; more text would do better")
        tokens = [
            group.tokens if not group.pipeline.needs_moment else 0 if stats is None else stats.tokens
            for group, stats in zip(stage, found, strict=True)
        ]
        rounded = self._solve_groups(stage, taken, owners)
        for group, stats, solved, count in zip(stage, taken, rounded, tokens, strict=True):
            self._put_in_place(group, stats, solved, count)

    def _drift(self, group: Group, x: torch.Tensor) -> torch.Tensor | None:
        """The part of the input error that the solver corrects for; None where it corrects nothing.

        Rounded inputs are not corrected: they differ from the originals by noise, against which least squares shrinks
        the weights, layer after layer, and the model loses more than it gains.
        """
        correction = group.pipeline.correction
        aligned = group.calls == 1 and group.tokens == self.tokens
        if not correction or not aligned or group.activation is not None:
            return None
        return (group.original(self.clock[0]) - group.input(x)).mul_(correction)

    def _solve_groups(
        self, stage: Sequence[Group], found: Sequence[LayerStats | None], owners: Sequence[int] | None
    ) -> Iterator[_Rounded]:
        """Codes and scales of each group, and the branches that were taken off before."""
        if owners is None or rank_and_world()[1] == 1:
            for group, stats in zip(stage, found, strict=True):
                with sharing():
                    yield self._solve_group(group, stats)
            return
        own = {
            index: self._solve_group(group, stats)
            for index, (group, stats) in enumerate(zip(stage, found, strict=True))
            if owners[index] == rank_and_world()[0]
        }
        outlines = [({m.name: m.shape for m in group.members}, group.weight_format) for group in stage]
        solved = all_solved({index: rounded.weights for index, rounded in own.items()}, outlines, self.device)
        branches = [
            (index, [part for member in stage[index].members for part in rounded.branches[member.name]])
            for index, rounded in own.items() if rounded.branches
        ]  # fmt: skip
        found_branches = dict(in_order(branches, self.device))
        for index, group in enumerate(stage):
            pairs = zip(found_branches.get(index, ())[::2], found_branches.get(index, ())[1::2], strict=True)
            yield own.get(index) or _Rounded(
                solved[index],
                {member.name: _pair(pair) for member, pair in zip(group.members, pairs, strict=False)},
                {member.name: self.targets[name] for member, name in zip(group.members, group.names, strict=True)},
            )

    def _solve_group(self, group: Group, stats: LayerStats | None) -> _Rounded:
        weights = {member.name: self.targets[name] for member, name in zip(group.members, group.names, strict=True)}
        branches: dict[str, Branch] = {}
        if group.pipeline.spec.rank:
            assert stats is not None
            # Rest and branch together correct the inputs' drift.
            weights, branches, stats = take_branches(weights, stats, group.pipeline.spec.rank, self.stored)
        solved = solve_stacked(weights, stats, group.weight_format, group.pipeline.rounding, self.stored)
        return _Rounded(solved, branches, weights)

    def _put_in_place(self, group: Group, stats: LayerStats | None, rounded: _Rounded, tokens: int) -> None:
        """Puts stand-ins in the place of a group's layers."""
        solved, branches, weights = rounded.weights, rounded.branches, rounded.wanted
        for member, name in zip(group.members, group.names, strict=True):
            original = self.block.get_submodule(name)
            dense = solved[member.name].dequantize(original.weight.dtype)  # type: ignore[arg-type]
            parts = replace(group.parts, lowrank=branches.get(member.name))
            stand_in = StandIn(original, dense, group, self.clock, parts)
            if stats is not None:
                self._correct_bias(group, name, stand_in, self.targets[name], stats)
            self.stand_ins[name] = stand_in
            self.block.set_submodule(name, stand_in)
            del self.targets[name]
            if group.pipeline.reconstruction:
                self.rounded[name] = weights[member.name]
            weight = solved[member.name]
            self.solved[name] = (member, Solved(weight, parts, group.input_scale, tokens, tuple(group.notes)))

    def _correct_bias(
        self, group: Group, name: str, stand_in: StandIn, target: torch.Tensor, stats: LayerStats
    ) -> None:
        """Adds the mean output error to the bias, where there is one: it costs nothing at run time."""
        bias = stand_in.bias
        if bias is None or stats.mean is None or group.pipeline.spec.rank:
            return
        self.biases[name] = bias.detach().clone()
        wanted = stats.mean if stats.mean_drift is None else stats.mean + stats.mean_drift
        bias.data = bias + (target @ wanted - stand_in.dense.float() @ stats.mean).to(bias)
        if "bias corrected" not in group.notes:
            group.notes.append("bias corrected")

    def _reconstruct(self, calls: Sequence[Call], outputs: Sequence[torch.Tensor]) -> None:
        """Refines the finished block against the original's outputs."""
        settings = next((g.pipeline.reconstruction for g in self.groups if g.pipeline.reconstruction), None)
        if settings is None:
            return
        if self.experts:
            raise ValueError(
                f"{self.experts[0].name}: solver autoround learns linear layers, and these are fused experts; "
                "use 'gptq' for the model, or exclude them"
            )
        layers = {}
        for name, target in self.rounded.items():
            member, solved = self.solved[name]
            assert solved is not None
            layers[name] = BlockLayer(target, solved.weight, member.activation, solved.input_scale, solved.parts)
        for stand_in in self.stand_ins.values():
            # Stand-ins beside the learned layers must no longer remember their outputs.
            stand_in.keeps = False
            stand_in.outputs.clear()
        here, wanted = [call.to(self.device) for call in calls], [output.to(self.device) for output in outputs]
        found = self._reconstructed(here, wanted, layers, settings)
        if not math.isfinite(found.before):
            first = self.groups[0].members[0].name
            raise ValueError(f"{first}: NaN or infinity in the output of its block, which autoround would refine")
        for name, weight in found.weights.items():
            member, solved = self.solved[name]
            assert solved is not None
            note = f"block error {found.before:.3g} before autoround, {found.after:.3g} after"
            self.solved[name] = (member, replace(solved, weight=weight, notes=(*solved.notes, note)))
            self.stand_ins[name].dense = weight.dequantize(self.stand_ins[name].dense.dtype)

    def _reconstructed(
        self,
        calls: Sequence[Call],
        outputs: Sequence[torch.Tensor],
        layers: dict[str, BlockLayer],
        settings: Reconstruction,
    ) -> Reconstructed:
        """What the first rank learns from the rows of all ranks: steps of gradient descent follow each other."""
        if rank_and_world()[1] == 1:
            return reconstruct_block(self.block, calls, outputs, layers, settings)
        cpu = torch.device("cpu")
        everywhere = at_first(
            [
                (number_of(i), call.to(cpu), output.to(cpu))
                for i, (call, output) in enumerate(zip(calls, outputs, strict=True))
            ]
        )

        learned: list[Reconstructed] = []

        def learn() -> tuple[float, float]:
            assert everywhere is not None
            batches = sorted((batch for part in everywhere for batch in part), key=itemgetter(0))
            here = [call.to(self.device) for _, call, _ in batches]
            wanted = [output.to(self.device) for _, _, output in batches]
            learned.append(reconstruct_block(self.block, here, wanted, layers, settings))
            return learned[0].before, learned[0].after

        before, after = from_first(learn)
        own = {index: {name: found.weights[name]} for found in learned for index, name in enumerate(layers)}
        outlines = [({name: layer.quantized.shape}, layer.quantized.format) for name, layer in layers.items()]
        everything = all_solved(own, outlines, self.device)
        return Reconstructed({name: weight for part in everything for name, weight in part.items()}, before, after)

    def _observe_at_once(self, calls: Sequence[Call]) -> list[torch.Tensor]:
        """Solves all groups from one pass over the original inputs."""
        sums = {}
        keeps = self.settings.observer != "absmax"

        def watch(group: Group, moments: Moments) -> Callable[[nn.Module, tuple[Any, ...]], None]:
            def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
                x = self._take_in(group, args[0], keep=keeps)
                if len(x):
                    moments.add(self.clock[0], x, rows=rows_of(args[0]))

            return hook

        hooks = {}
        for group in self.groups:
            sums[group.names[0]] = Moments(group.weight_format.block[1] or None)
            hooks[group.names[0]] = watch(group, sums[group.names[0]])
        with _hooks(self.block, hooks):
            outputs = self._outputs(calls)
        siblings: dict[str, list[Group]] = {}
        tokens = gathered([group.tokens for group in self.groups])
        for index, group in enumerate(self.groups):
            group.pool(self.device, sum(of_rank[index] for of_rank in tokens))
            group.fix_input_scale(self.settings.observer, self.stored)
            siblings.setdefault(group.pattern, []).append(group)
        for stage in siblings.values():
            self._solve_collected(stage, [sums[group.names[0]] for group in stage])
        return outputs

    def _solve_experts(self, calls: Sequence[Call]) -> None:
        """Solves fused experts, with the rest of the block quantized."""
        for experts in self.experts:
            experts.solve(partial(self._run_until_stopped, calls), self.clock)

    def _run_until_stopped(self, calls: Sequence[Call]) -> None:
        with fast_matmul():
            for self.clock[0], call in enumerate(calls):
                here = call.to(self.device)
                with suppress(Stop):
                    self.block(*here.args, **here.kwargs)


def _look_at_no_data(group: Group) -> None:
    """Gives a group that no token reached, such as one of a vision tower under text, a solver that needs none.

    Raises:
        ValueError: its inputs need a static scale, which nothing gives.
    """
    if group.activation is not None and group.activation.is_static:
        raise ValueError(f"{group.members[0].name}: no calibration token reached it; give more text, or exclude it")
    group.members = [replace(member, solver=_DATA_FREE) for member in group.members]
    group.pipeline = get_pipeline(_DATA_FREE)
    group.notes.append(f"no calibration token reached it: solved with {_DATA_FREE}, which looks at none")


def _pair(tensors: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = tensors
    assert first is not None and second is not None
    return first, second


def _dots(name: str) -> list[int]:
    """Where the names of a module's parents end."""
    return [place for place, letter in enumerate(name) if letter == "."]


def _token_count(hidden: torch.Tensor) -> int:
    """Tokens of a hidden state `[..., tokens, features]`, or of token ids `[..., tokens]`."""
    return hidden.numel() // hidden.shape[-1] if hidden.is_floating_point() else hidden.numel()


@contextmanager
def _hooks(block: nn.Module, hooks: Mapping[str, Callable[..., None]]) -> Iterator[None]:
    with removing(block.get_submodule(name).register_forward_pre_hook(hook) for name, hook in hooks.items()):
        yield
