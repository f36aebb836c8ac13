"""Layer-by-layer calibration: every layer is solved on the inputs it will really get.

Block by block, in order of execution, on all calibration rows at once:

1. *Reference.* The original block runs on the original hidden states. What its layers receive is kept.
2. *Transforms* choose an input scale for each fusion group, fold it into its producer and scale the weights.
   Rotations turn weights, branches are taken off them just before they are rounded.
3. *Rounding.* Group by group, in the order in which the block runs them: the block runs on the hidden states that
   the quantized blocks before it gave, with the groups solved so far in place, up to this group. Its inputs, rounded
   where activations are quantized, go into a second moment; their distance from the reference into the drift.
4. *Reconstruction*, where asked for, refines the whole block against the output of the original.
5. The quantized block gives the hidden states for the next one.

So memory holds one block, two sets of hidden states, one block's reference inputs and one second moment. A solved
layer remembers its outputs while its block is worked on, because the passes of step 3 repeat each other's
beginnings; a block costs three forward passes in all, one of them the reference.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any

import torch
from torch import nn

from quant.calibration.autoround import BlockLayer, reconstruct_block
from quant.calibration.blocks import Call, Stop, block_names, calls_of_chain, find_chains, output_of, streamed
from quant.calibration.fold import Fold, apply_fold, find_fold, modules_in_order
from quant.calibration.gptq import corrected_weight, factorize
from quant.calibration.lowrank import lowrank_branch, residual_weight
from quant.calibration.rotation import rotate_weight, rotation_block
from quant.calibration.solver import GroupInputs, Pipeline, Solver, get_pipeline, solve_group
from quant.calibration.statistics import LayerStats, MomentSum, static_input_scale, token_weights
from quant.formats.format import Format
from quant.formats.tensor import BlockScaledTensor, fake_quantize
from quant.kernels.hadamard import hadamard_transform
from quant.kernels.linear import RunTimeParts
from quant.recipes.plan import LayerPlan, Plan

Progress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class Solved:
    """What became of one layer.

    Attributes:
        weight: codes and scales of `[out, in]`.
        pre_scale: float32 `[in]` that the input is multiplied by at run time; None where nothing is left of it.
        input_scale: static scale of the activation format, float32 scalar, where it has one.
        tokens: how many calibration tokens reached the layer; 0 where it got the pooled statistics of its likes.
        notes: what a reader of the report should know.
        hadamard: block of the rotation that `weight` is rotated by and the input is to go through; 0 for none.
        lowrank: the 16-bit branch beside `weight`, (down, up), if there is one.
    """

    weight: BlockScaledTensor
    pre_scale: torch.Tensor | None
    input_scale: torch.Tensor | None
    tokens: int
    notes: tuple[str, ...] = ()
    hadamard: int = 0
    lowrank: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def parts(self) -> RunTimeParts:
        """What the layer does at run time beside its matmul."""
        return RunTimeParts(self.pre_scale, self.hadamard, self.lowrank)


Apply = Callable[[LayerPlan, Solved], None]


@dataclass(frozen=True)
class Settings:
    """How the walk is done.

    Attributes:
        batch: calibration rows in one forward pass.
        dtype: of the forward passes; None takes the model's.
        device: where blocks are worked on, one at a time; None is where the model is.
        online: keep an input scale that cannot be folded as `pre_scale`; otherwise such a group stays unscaled.
        sample: tokens that transforms look at.
        limit: largest squared norm of a token that counts in full, in units of the median; see `MomentSum`.
    """

    batch: int = 4
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    online: bool = False
    sample: int = 1024
    limit: float | None = 4.0


@dataclass(eq=False)
class _Group:
    """A fusion group within one block, and what is known of its input."""

    members: list[LayerPlan]
    names: list[str]
    pipeline: Pipeline
    kept: list[torch.Tensor] = field(default_factory=list)
    calls: int = 0
    tokens: int = 0
    total: torch.Tensor | None = None
    amax: torch.Tensor | None = None
    divisor: torch.Tensor | None = None
    pre_scale: torch.Tensor | None = None
    input_scale: torch.Tensor | None = None
    hadamard: int = 0
    unrounded: MomentSum | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def weight_format(self) -> Format:
        format = self.members[0].weight
        assert format is not None
        return format

    @property
    def activation(self) -> Format | None:
        return self.members[0].activation

    @property
    def pattern(self) -> str:
        """The same for the same layer of sibling experts: names with their numbers left out, and the input size."""
        return re.sub(r"\d+", "#", "|".join(self.names)) + f":{self.members[0].shape[-1]}"

    def input(self, x: torch.Tensor) -> torch.Tensor:
        """The input as the quantized layer sees it, but for its rounding."""
        return RunTimeParts(self.pre_scale, self.hadamard).input(x)

    def original(self, batch: int) -> torch.Tensor:
        """The input of the original model, `[tokens, in]`, scaled and rotated as the quantized one is."""
        x = self.kept[batch]
        x = x if self.divisor is None else x / self.divisor.to(x)
        return hadamard_transform(x, self.hadamard) if self.hadamard else x

    def round_input(self, x: torch.Tensor) -> torch.Tensor:
        """The input as the quantized layer sees it."""
        x = self.input(x)
        if self.activation is None:
            return x
        if self.activation.global_scale:
            return fake_quantize(x, self.activation, global_scale=self.input_scale)
        return fake_quantize(x, self.activation, scale=self.input_scale)


class _StandIn(nn.Module):
    """A solved layer while its block is being worked on: dense weights, and a memory of its outputs by batch."""

    def __init__(
        self,
        original: nn.Module,
        weight: torch.Tensor,
        group: _Group,
        clock: list[int],
        lowrank: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        super().__init__()
        self.beside = RunTimeParts(lowrank=lowrank)
        self.original = original
        self.dense = weight
        self.group = group
        self.clock = clock
        self.outputs: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.clock[0] in self.outputs:
            return self.outputs[self.clock[0]]
        bias = getattr(self.original, "bias", None)
        out = torch.nn.functional.linear(self.group.round_input(x), self.dense, bias)
        branch = self.beside.branch(self.group.input(x)) if self.beside else None
        out = out if branch is None else out + branch
        if self.group.calls == 1:
            self.outputs[self.clock[0]] = out
        return out


def solve_sequentially(
    model: nn.Module,
    plan: Plan,
    rows: torch.Tensor,
    *,
    apply: Apply,
    settings: Settings = Settings(),
    progress: Progress | None = None,
) -> None:
    """Solves every planned linear layer of `model`, block by block.

    Args:
        model: called as `model(rows)`; norms and biases that scales are folded into change in place.
        plan: names the layers, their formats, groups and solvers.
        rows: calibration token ids, int64 `[rows, seqlen]`.
        apply: puts a solved layer in place of the original; called when its block is finished, with the original
            still in the model.
        settings: how the walk is done.
        progress: called as `progress(layers done, layers in all)`.

    Raises:
        ValueError: an input holds NaN or infinity (layer and row are named); a layer that no token reached and that
            has no likes; a solver that does not support a format.
    """
    walk = _Walk(model, plan, rows, apply, settings, progress)
    with torch.no_grad(), _without_cache(model):
        walk.run()


@contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    """Within it, a transformers model keeps no keys and values of what it has seen."""
    config: Any = getattr(model, "config", None)
    use_cache = getattr(config, "use_cache", None)
    if use_cache:
        config.use_cache = False
    try:
        yield
    finally:
        if use_cache:
            config.use_cache = use_cache


class _Walk:
    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        rows: torch.Tensor,
        apply: Apply,
        settings: Settings,
        progress: Progress | None,
    ) -> None:
        self.model, self.apply, self.settings, self.progress = model, apply, settings, progress
        self.layers = [layer for layer in plan.quantized if layer.kind == "linear"]
        self.done = 0
        self.home = next(model.parameters()).device
        self.batches = list(rows.to(self.home).split(settings.batch))
        self.few = rows[:1, :16].to(self.home)
        self.stored = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)

    def run(self) -> None:
        names = block_names(self.model)
        with streamed(self.model, names, self.settings.device):
            chains = find_chains(self.model, names, lambda: self.model(self.few)) if names else []
        for chain in chains:
            if any(self._layers_of(name) for name in chain):
                self._walk_chain(chain, names)
        if any(layer.name not in self._inside(chains) for layer in self.layers):
            self._solve_rest(chains)

    def _inside(self, chains: Sequence[Sequence[str]]) -> set[str]:
        return {layer.name for chain in chains for name in chain for layer in self._layers_of(name)}

    def _layers_of(self, block: str) -> list[LayerPlan]:
        return [layer for layer in self.layers if layer.name.startswith(f"{block}.")]

    def _walk_chain(self, chain: list[str], names: list[str]) -> None:
        device, dtype = self.settings.device, self.settings.dtype or self.stored
        with streamed(self.model, names, device):
            few = calls_of_chain(self.model, chain, [lambda: self.model(self.few)])
            calls = calls_of_chain(self.model, chain, [partial(self.model, batch) for batch in self.batches])
        states = [by_block[chain[0]].hidden.to(device, dtype) for by_block in calls]
        originals = states
        few_state = few[0][chain[0]].hidden
        for position, name in enumerate(chain):
            block = self.model.get_submodule(name).to(device, dtype)
            here = [by_block[name].to(device, dtype) for by_block in calls]
            current = [call.with_hidden(state) for call, state in zip(here, states, strict=True)]
            original = [call.with_hidden(state) for call, state in zip(here, originals, strict=True)]
            small = few[0][name].to(device, dtype).with_hidden(few_state.to(device, dtype))
            few_state = output_of(block(*small.args, **small.kwargs))
            work = _BlockWork(block, name, self._groups(name), self.settings, self.stored)
            last = position == len(chain) - 1
            states, originals = work.solve(current, original, small, needs_output=not last)
            block.to(self.home, self.stored)
            self._finish(work)

    def _solve_rest(self, chains: Sequence[Sequence[str]]) -> None:
        """Layers outside every block: the model itself is their block, with the real ones in place already."""
        inside = self._inside(chains)
        members = [layer for layer in self.layers if layer.name not in inside]
        work = _BlockWork(self.model, "", _gather(members, ""), self.settings, self.stored)
        calls = [Call((batch,), {}, 0) for batch in self.batches]
        work.solve(calls, calls, Call((self.few,), {}, 0), needs_output=False)
        self._finish(work)

    def _groups(self, block: str) -> list[_Group]:
        return _gather(self._layers_of(block), f"{block}.")

    def _finish(self, work: _BlockWork) -> None:
        for layer, solved in work.results():
            self.apply(layer, solved)
            self.done += 1
            if self.progress:
                self.progress(self.done, len(self.layers))


def _gather(members: Sequence[LayerPlan], prefix: str) -> list[_Group]:
    by_name: dict[str, list[LayerPlan]] = {}
    for layer in members:
        by_name.setdefault(f"{layer.group or layer.name}|{layer.solver}", []).append(layer)
    return [
        _Group(group, [layer.name.removeprefix(prefix) for layer in group], get_pipeline(group[0].solver))
        for group in by_name.values()
    ]


class _BlockWork:
    """One block from original to quantized."""

    def __init__(
        self, block: nn.Module, name: str, groups: list[_Group], settings: Settings, stored: torch.dtype
    ) -> None:
        self.block, self.name, self.groups, self.settings, self.stored = block, name, groups, settings, stored
        self.clock = [0]
        self.targets = {n: block.get_submodule(n).weight.detach().float() for g in groups for n in g.names}  # type: ignore[operator]
        self.stand_ins: dict[str, _StandIn] = {}
        self.solved: dict[str, tuple[LayerPlan, Solved]] = {}
        self.rounded: dict[str, torch.Tensor] = {}

    def solve(
        self, current: Sequence[Call], original: Sequence[Call], small: Call, *, needs_output: bool
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Solves all groups.

        Args:
            current: calls with the hidden states that the quantized blocks before give, one a batch.
            original: the same with the original hidden states.
            small: a call on a few tokens.
            needs_output: whether another block follows.

        Returns:
            The hidden states behind the block: quantized, original.
        """
        if all(group.pipeline.at_once for group in self.groups):
            outputs = self._observe_at_once(original)
            return outputs, outputs
        self.tokens = sum(_token_count(call.hidden) for call in original)
        reference = self._observe(original)
        self._transform(small)
        for group in self.groups:
            self._rotate(group)
            self._fix_input_scale(group)
        for stage in self._stages():
            self._solve_stage(stage, current)
        self._reconstruct(current, reference)
        outputs = self._outputs(current) if needs_output else []
        return outputs, reference

    def results(self) -> list[tuple[LayerPlan, Solved]]:
        """The solved layers, with the original modules back in the block."""
        for name, stand_in in self.stand_ins.items():
            _set_module(self.block, name, stand_in.original)
        return [self.solved[name] for group in self.groups for name in group.names]

    def _outputs(self, calls: Sequence[Call]) -> list[torch.Tensor]:
        out = []
        for self.clock[0], call in enumerate(calls):
            out.append(output_of(self.block(*call.args, **call.kwargs)))
        return out

    def _observe(self, calls: Sequence[Call]) -> list[torch.Tensor]:
        """The reference pass: magnitudes, the inputs themselves, and the order in which groups are called."""
        order: list[int] = []

        def watch(index: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
            def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
                order.append(index)
                group = self.groups[index]
                x = args[0].reshape(-1, args[0].shape[-1])
                if len(x) == 0:
                    return
                magnitude = x.abs()
                self._check(magnitude, args[0], group)
                amax = magnitude.amax(0).float()
                if self.settings.limit is not None:
                    magnitude *= token_weights(x, self.settings.limit).sqrt_()[:, None].to(x)
                total = magnitude.sum(0, dtype=torch.float32)
                group.amax = amax if group.amax is None else torch.maximum(group.amax, amax)
                group.total = total if group.total is None else group.total + total
                group.tokens += len(x)
                group.kept.append(x)

            return hook

        with _hooks(self.block, {g.names[0]: watch(i) for i, g in enumerate(self.groups)}):
            outputs = self._outputs(calls)
        for index, group in enumerate(self.groups):
            group.calls = order.count(index) // len(calls) if order.count(index) % len(calls) == 0 else 2
        rank = {index: place for place, index in reversed(list(enumerate(order)))}
        self.groups = [self.groups[i] for i in sorted(range(len(self.groups)), key=lambda i: rank.get(i, len(order)))]
        return outputs

    def _check(self, magnitude: torch.Tensor, x: torch.Tensor, group: _Group) -> None:
        if bool(torch.isfinite(magnitude.sum(dtype=torch.float32))):
            return
        if bool(torch.isfinite(x).all()):
            return
        row = self.clock[0] * self.settings.batch
        if x.dim() > 2:
            row += int((~torch.isfinite(x).flatten(1).all(1)).nonzero()[0])
        raise ValueError(f"{group.members[0].name}: the input holds NaN or infinity on calibration row {row}")

    def _transform(self, small: Call) -> None:
        """Input scales, last group first, because a scale may go into a linear layer that is solved before."""
        if not any(group.pipeline.transforms for group in self.groups):
            return
        folds = self._find_folds(small)
        for group, found in zip(reversed(self.groups), reversed(folds), strict=True):
            if not group.kept or not group.pipeline.transforms:
                continue
            if found is None and not self.settings.online:
                group.notes.append("input scale left out: nothing before the layer can take it")
                continue
            assert group.total is not None and group.amax is not None
            sample = torch.cat([x[:: max(group.tokens // self.settings.sample, 1)].float() for x in group.kept])
            weight_of = sample.new_ones(len(sample))
            if self.settings.limit is not None:
                weight_of = token_weights(sample, self.settings.limit)
            for transform in group.pipeline.transforms:
                weight = torch.cat([self.targets[name] for name in group.names])
                divisor = torch.ones_like(group.total) if group.divisor is None else group.divisor
                inputs = GroupInputs(
                    sample / divisor, weight_of, group.total / group.tokens / divisor, group.amax / divisor
                )
                owner = None if found is None else found.owner
                scale = transform(weight, inputs, group.weight_format, group.activation, owner)
                if found is not None:
                    scale = self._fold(found, scale)
                else:
                    group.pre_scale = 1 / scale if group.pre_scale is None else group.pre_scale / scale
                group.divisor = divisor * scale
                for name in group.names:
                    self._set_target(name, self.targets[name] * scale)

    def _find_folds(self, small: Call) -> list[Fold | None]:
        """Where each group's input scale can go, tried in float64 on a few tokens."""
        block = copy.deepcopy(self.block).double()
        call = small.to(dtype=torch.float64)
        order = modules_in_order(block, call)
        folds = []
        for group in self.groups:
            first = min((order.index(name) for name in group.names if name in order), default=0)
            producers = [n for n in reversed(order[:first]) if n in self.targets or _is_vector(block.get_submodule(n))]
            folds.append(find_fold(block, call, group.names, producers) if group.pipeline.transforms else None)
        return folds

    def _fold(self, fold: Fold, scale: torch.Tensor) -> torch.Tensor:
        """Puts `scale` into the producer; gives the scale `[in]` that the group's inputs were really divided by."""
        module = self.block.get_submodule(fold.producer)
        rows = len(module.weight)  # type: ignore[arg-type]
        by = torch.ones(rows, device=scale.device).index_copy_(0, fold.owner, scale)
        if fold.producer in self.targets:
            self.targets[fold.producer] = self.targets[fold.producer] / by[:, None]
            apply_fold(module, by, fold.style)
            return scale
        return apply_fold(module, by, fold.style, self.stored)[fold.owner]

    def _set_target(self, name: str, target: torch.Tensor) -> None:
        self.targets[name] = target
        weight = self.block.get_submodule(name).weight
        assert isinstance(weight, torch.Tensor)
        weight.data = target.to(weight.dtype)

    def _rotate(self, group: _Group) -> None:
        """Rotates what is to be rounded. The block's own weight stays, for it still gets the input as it is."""
        if group.pipeline.rotation:
            group.hadamard = rotation_block(group.members[0].shape[-1], group.pipeline.rotation)
            for name in group.names:
                self.targets[name] = rotate_weight(self.targets[name], group.hadamard)

    def _fix_input_scale(self, group: _Group) -> None:
        if group.activation is None or group.amax is None:
            return
        amax = group.amax if group.divisor is None else group.amax / group.divisor
        if group.hadamard:
            amax = torch.stack([group.original(batch).abs().amax().float() for batch in range(len(group.kept))])
        group.input_scale = static_input_scale(amax.amax(), group.activation, self.stored)

    def _stages(self) -> list[list[_Group]]:
        """Groups that are collected in one pass: sibling experts, who get some tokens each; all others alone."""
        routed = {group.pattern for group in self.groups if group.tokens < self.tokens}
        stages: dict[str, list[_Group]] = {}
        for index, group in enumerate(self.groups):
            stages.setdefault(group.pattern if group.pattern in routed else str(index), []).append(group)
        return list(stages.values())

    def _solve_stage(self, stage: list[_Group], calls: Sequence[Call]) -> None:
        sums = [MomentSum(self.settings.limit) for _ in stage]

        def watch(group: _Group, moment: MomentSum) -> Callable[[nn.Module, tuple[Any, ...]], None]:
            def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
                x = args[0].reshape(-1, args[0].shape[-1])
                if len(x) == 0:
                    return
                reference = self._reference(group, x)
                if group.pipeline.rank and group.activation is not None:
                    # The branch sees the input unrounded and answers for its drift, the rest for its rounding.
                    group.unrounded = group.unrounded or MomentSum(self.settings.limit)
                    group.unrounded.add(group.input(x), reference)
                    reference = group.input(x)
                moment.add(group.round_input(x), reference)
                if len(stage) == 1 and group.calls == 1:
                    raise Stop

            return hook

        hooks = {g.names[0]: watch(g, m) for g, m in zip(stage, sums, strict=True)}
        with _hooks(self.block, hooks):
            for self.clock[0], call in enumerate(calls):
                with suppress(Stop):
                    self.block(*call.args, **call.kwargs)
        self._solve_collected(stage, [moment.stats() for moment in sums])

    def _solve_collected(self, stage: list[_Group], found: list[LayerStats | None]) -> None:
        """Solves groups of a kind; one that no token reached gets the statistics of all the others together."""
        pooled = _pooled([stats for stats in found if stats is not None])
        for group, stats in zip(stage, found, strict=True):
            group.kept.clear()
            if stats is None and pooled is None:
                raise ValueError(
                    f"{group.members[0].name}: no calibration token reached it; give more text, or exclude the layer"
                )
            if stats is None:
                group.notes.append("no calibration token reached it: solved on the pooled statistics of its siblings")
            self._solve_group(group, stats or pooled, 0 if stats is None else stats.tokens)

    def _reference(self, group: _Group, x: torch.Tensor) -> torch.Tensor | None:
        """The input that the outputs should be right for: `x` before rounding, moved towards the original input."""
        correction = group.pipeline.correction
        aligned = group.calls == 1 and group.tokens == self.tokens
        x = group.input(x)
        if correction and aligned:
            return x + correction * (group.original(self.clock[0]) - x)
        return None if group.activation is None else x

    def _solve_group(self, group: _Group, stats: LayerStats | None, tokens: int) -> None:
        weights = {member.name: self.targets[name] for member, name in zip(group.members, group.names, strict=True)}
        branches: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        if group.pipeline.rank:
            weights, branches, stats = self._take_branches(group, weights, stats)
        solved = solve_stacked(weights, stats, group.weight_format, group.pipeline, self.stored)
        for member, name in zip(group.members, group.names, strict=True):
            original = self.block.get_submodule(name)
            dense = solved[member.name].dequantize(original.weight.dtype)  # type: ignore[arg-type]
            stand_in = _StandIn(original, dense, group, self.clock, branches.get(member.name))
            self.stand_ins[name] = stand_in
            _set_module(self.block, name, stand_in)
            del self.targets[name]
            if group.pipeline.reconstruction:
                self.rounded[name] = weights[member.name]
            self.solved[name] = (
                member,
                Solved(
                    solved[member.name],
                    group.pre_scale,
                    group.input_scale,
                    tokens,
                    tuple(group.notes),
                    group.hadamard,
                    branches.get(member.name),
                ),
            )

    def _take_branches(
        self, group: _Group, weights: Mapping[str, torch.Tensor], stats: LayerStats | None
    ) -> tuple[dict[str, torch.Tensor], dict[str, tuple[torch.Tensor, torch.Tensor]], LayerStats | None]:
        """Each weight's branch and what it leaves to be rounded. The inputs' drift is made up for in both together."""
        seen = stats if group.unrounded is None else group.unrounded.stats()
        assert stats is not None and seen is not None and seen.second_moment is not None
        factor = factorize(seen.second_moment)
        left, branches = {}, {}
        for name, weight in weights.items():
            wanted = corrected_weight(weight, seen.drift, factor)
            rank = min(group.pipeline.rank, *weight.shape)
            branches[name] = lowrank_branch(wanted, factor.moment, rank, self.stored, name)
            left[name] = residual_weight(wanted, branches[name])
        return left, branches, replace(stats, drift=None) if group.unrounded is None else stats

    def _reconstruct(self, calls: Sequence[Call], outputs: Sequence[torch.Tensor]) -> None:
        """Refines the finished block against the original's outputs."""
        settings = next((g.pipeline.reconstruction for g in self.groups if g.pipeline.reconstruction), None)
        if settings is None:
            return
        layers = {}
        for name, target in self.rounded.items():
            member, solved = self.solved[name]
            layers[name] = BlockLayer(target, solved.weight, member.activation, solved.input_scale, solved.parts)
        for group in self.groups:
            group.calls = 0  # what stands in beside the learned layers must no longer remember its outputs
        for stand_in in self.stand_ins.values():
            stand_in.outputs.clear()
        found = reconstruct_block(self.block, calls, outputs, layers, settings)
        for name, weight in found.weights.items():
            member, solved = self.solved[name]
            note = f"block error {found.before:.3g} before autoround, {found.after:.3g} after"
            self.solved[name] = (member, replace(solved, weight=weight, notes=(*solved.notes, note)))
            self.stand_ins[name].dense = weight.dequantize(self.stand_ins[name].dense.dtype)

    def _observe_at_once(self, calls: Sequence[Call]) -> list[torch.Tensor]:
        """One pass for all groups, on original inputs, and then all are solved."""
        sums = {}

        def watch(group: _Group, moment: MomentSum) -> Callable[[nn.Module, tuple[Any, ...]], None]:
            def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
                x = args[0].reshape(-1, args[0].shape[-1])
                if len(x):
                    amax = x.abs().amax(0).float()
                    self._check(amax, args[0], group)
                    group.amax = amax if group.amax is None else torch.maximum(group.amax, amax)
                    moment.add(x)

            return hook

        hooks = {}
        for group in self.groups:
            sums[group.names[0]] = MomentSum(self.settings.limit, group.weight_format.block[1] or None)
            hooks[group.names[0]] = watch(group, sums[group.names[0]])
        with _hooks(self.block, hooks):
            outputs = self._outputs(calls)
        likes: dict[str, list[_Group]] = {}
        for group in self.groups:
            self._fix_input_scale(group)
            likes.setdefault(group.pattern, []).append(group)
        for stage in likes.values():
            self._solve_collected(stage, [sums[group.names[0]].stats() for group in stage])
        return outputs


def solve_stacked(
    weights: Mapping[str, torch.Tensor],
    stats: LayerStats | None,
    format: Format,
    solver: Solver,
    stored: torch.dtype | None = None,
) -> dict[str, BlockScaledTensor]:
    """`solve_group` for layers with one input: where the format allows it, as one tall weight, solved once."""
    if format.block[0] != 1 or len(weights) == 1:
        return solve_group(weights, dict.fromkeys(weights, stats), format, solver, stored)
    name = "|".join(weights)
    tall = solve_group({name: torch.cat(list(weights.values()))}, {name: stats}, format, solver, stored)[name]
    parts, start = {}, 0
    for member, weight in weights.items():
        rows = slice(start, start + len(weight))
        start = rows.stop
        parts[member] = replace(
            tall, codes=tall.codes[rows].clone(), scale=tall.scale[rows].clone(), shape=tuple(weight.shape)
        )
    return parts


def _pooled(found: Sequence[LayerStats]) -> LayerStats | None:
    """The statistics of all tokens together, without the drift."""
    if not found:
        return None
    tokens = sum(stats.tokens for stats in found)

    def mean(tensors: list[torch.Tensor | None]) -> torch.Tensor | None:
        if tensors[0] is None:
            return None
        weighted = (t * (s.tokens / tokens) for t, s in zip(tensors, found, strict=True) if t is not None)
        return reduce(torch.add, weighted)

    return LayerStats(tokens, mean([s.second_moment for s in found]), None, mean([s.block_moments for s in found]))


def _token_count(hidden: torch.Tensor) -> int:
    """Tokens of a hidden state `[..., tokens, features]`, or of token ids `[..., tokens]`."""
    return hidden.numel() // hidden.shape[-1] if hidden.is_floating_point() else hidden.numel()


def _is_vector(module: nn.Module) -> bool:
    return module.weight.dim() == 1  # type: ignore[union-attr,operator,no-any-return]


def _set_module(block: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(block.get_submodule(parent), last, module)


@contextmanager
def _hooks(block: nn.Module, hooks: Mapping[str, Callable[..., None]]) -> Iterator[None]:
    handles = [block.get_submodule(name).register_forward_pre_hook(hook) for name, hook in hooks.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
