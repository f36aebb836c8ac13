"""`solve_sequentially` solves every layer on the inputs that it will really get.

Rotations that can be merged into the model are merged first. Then come the blocks in order of execution, each with all
calibration rows at once:

1. *Reference.* The original block runs on the original hidden states. What its layers receive is kept.
2. *Transforms* choose an input scale for each fusion group, fold it into its producer and scale the weights.
   Rotations turn weights, branches are taken off them just before they are rounded.
3. *Rounding.* Group by group, in the order in which the block runs them: the block runs on the hidden states that
   the quantized blocks before it gave, with the groups solved so far in place, up to this group. Its inputs, rounded
   where activations are quantized, go into a second moment; where they are not, their distance from the original
   inputs goes into the drift.
   With a guard, the last rows only judge: a group whose output on them is too far off gets another format.
4. *Fused experts*, each on the tokens that reach it; see `experts`.
5. *Reconstruction*, where asked for, refines the whole block against the output of the original.
6. The quantized block gives the hidden states for the next one.

Ranks share the calibration rows: each keeps the hidden states of its own batches. Sums over rows, and what one rank
solves for all, are put together in the order of one rank (`quant.calibration.ranks`).

So memory holds one block, two sets of hidden states, one block's reference inputs and one second moment. A solved
layer remembers its outputs while its block is worked on, because the passes of step 3 repeat each other's
beginnings; a block costs three forward passes in all, one of them the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from quant.calibration.blocks import (
    Call,
    block_names,
    calls_of_chain,
    find_chains,
    output_of,
    stored_dtype,
    without_hidden,
)
from quant.calibration.inputs import call_of
from quant.calibration.placement import Loan, fits, home_of_states, placed, tensors_of
from quant.calibration.prefetch import brought, value_of
from quant.calibration.ranks import own_batches
from quant.calibration.solvers.rotation_merge import merge_rotations
from quant.calibration.solvers.solver import check_solvers, get_pipeline
from quant.calibration.texts.rows import check_ids, few_of
from quant.calibration.walk.block import BlockWork
from quant.calibration.walk.experts import ExpertsWork
from quant.calibration.walk.group import Settings, Solved, gather
from quant.calibration.walk.memory import naming_the_block
from quant.calibration.walk.not_finite import naming_the_culprit
from quant.calibration.walk.stand_in import weight_of
from quant.recipes.expert_stacks import expert_matrices
from quant.recipes.layer_kind import LayerKind
from quant.recipes.plan import LayerPlan, Plan

Progress = Callable[[int, int], None]
Apply = Callable[[LayerPlan, Solved | None, torch.Tensor], None]
_Captured = tuple[dict[str, Call], list[dict[str, Call]]]
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class States:
    """Hidden states between two blocks, one tensor a batch.

    Attributes:
        quantized: as the quantized blocks before gave them.
        original: as the original blocks gave them; the same list where the walk looks at these alone.
        few: of the original blocks, on a few tokens.
    """

    quantized: list[torch.Tensor]
    original: list[torch.Tensor]
    few: torch.Tensor


class Keeper:
    """Keeps finished blocks, so that a walk that was stopped goes on behind them. This one keeps nothing."""

    def resume(self, chain: Sequence[str]) -> tuple[int, States | None]:
        """Puts the finished blocks of a chain in place.

        Returns:
            How many there are, and the hidden states behind them if the chain goes on.
        """
        return 0, None

    def begin(self, block: str) -> None:
        """Is called before a block is worked on."""

    def end(self, block: str, states: States | None) -> States | None:
        """Is called when a block is finished, with the hidden states behind it; None for the last of a chain.

        Returns:
            The same hidden states, perhaps mapped from a file.
        """
        return states


def solve_sequentially(
    model: nn.Module,
    plan: Plan,
    rows: torch.Tensor,
    *,
    apply: Apply,
    settings: Settings | None = None,
    input_scales: Mapping[str, torch.Tensor] | None = None,
    progress: Progress | None = None,
    keeper: Keeper | None = None,
) -> None:
    """Solves every planned linear layer and every fused-expert projection of `model`, block by block.

    Args:
        model: called as `model(rows)`; norms and biases that scales are folded into change in place.
        plan: names the layers, their formats, groups and solvers.
        rows: calibration token ids, int64 `[rows, seqlen]`.
        apply: puts a solved layer in place of the original; called when its block is finished, with the original
            still in the model. Gets None for a layer that the guard keeps in 16 bit. Both the solution and the weight
            that was solved, the third argument, are where blocks are worked on.
        settings: how the walk is done.
        input_scales: static scales of the inputs of fused experts, by name.
        progress: called as `progress(layers done, layers in all)`.
        keeper: is told of every block, and may know finished ones.

    Raises:
        ValueError: a token id outside the vocabulary; an input that holds NaN or infinity (the weight that does is
            named, or else the layer and the row); a layer that no token reached, with no sibling to borrow statistics
            from; a solver that does not support a format; a device without room for a block (`BlockTooLargeError`).
    """
    check_solvers(plan)
    check_ids(rows, model)
    walk = _Walk(model, plan, rows, apply, settings or Settings(), input_scales or {}, progress, keeper or Keeper())
    with torch.no_grad(), _without_cache(model), naming_the_culprit(model):
        walk.run()


@contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    """While open, a transformers model keeps no keys and values of what it has seen."""
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
        input_scales: Mapping[str, torch.Tensor],
        progress: Progress | None,
        keeper: Keeper,
    ) -> None:
        self.keeper = keeper
        self.model, self.apply, self.settings, self.progress = model, apply, settings, progress
        self.input_scales = {name: scale.to(settings.device) for name, scale in input_scales.items()}
        self.layers = [layer for layer in plan.quantized if layer.kind in (LayerKind.LINEAR, LayerKind.EXPERTS)]
        self.done = 0
        self.merged: dict[str, str] = {}
        self.home = next(model.parameters()).device
        batches = rows.split(settings.batch)
        self.batches = [batches[number] for number in own_batches(len(batches))]
        self.few = few_of(rows)
        self.stored = stored_dtype(model)

    def run(self) -> None:
        names = block_names(self.model)
        self._merge_rotations(names)
        with placed(self.model, self.settings.device) as there:
            chains = find_chains(self.model, names, lambda: self.model(self.few.to(there))) if names else []
            walks = [walk for walk in map(self._up_to_the_last_planned, chains) if walk]
            captured = [self._captured(walk, there) for walk in walks[:1]]  # while the model is there
        for walk in walks:
            self._walk_chain(walk, captured)
        if any(layer.name not in self._inside(chains) for layer in self.layers):
            self._solve_rest(chains)

    def _merge_rotations(self, blocks: Sequence[str]) -> None:
        """Rotations that the modules around take over are done in the model itself, before the walk."""
        linears = (layer for layer in self.layers if layer.kind == LayerKind.LINEAR)
        wanted = [layer.name for layer in linears if get_pipeline(layer.solver).spec.merges_rotations]
        if wanted:
            there = self._whole()
            self.merged = merge_rotations(self.model.to(there), self.few.to(there), blocks, wanted)
            self.model.to(self.home)

    def _whole(self) -> torch.device:
        """Where the whole model can be worked on."""
        device = self.settings.device
        return device if device is not None and fits(self.model, device) else self.home

    def _inside(self, chains: Sequence[Sequence[str]]) -> set[str]:
        return {layer.name for chain in chains for name in chain for layer in self._layers_of(name)}

    def _layers_of(self, block: str) -> list[LayerPlan]:
        return [layer for layer in self.layers if layer.name.startswith(f"{block}.")]

    def _up_to_the_last_planned(self, chain: list[str]) -> list[str]:
        planned = [place for place, name in enumerate(chain) if self._layers_of(name)]
        return chain[: planned[-1] + 1] if planned else []

    def _captured(self, chain: list[str], there: torch.device) -> _Captured:
        """What the blocks of a chain are called with on a few tokens, and on each batch of this rank."""
        few = calls_of_chain(self.model, chain, [lambda: self.model(self.few.to(there))])[0]
        return few, calls_of_chain(self.model, chain, [partial(self._run, batch, there) for batch in self.batches])

    def _walk_chain(self, chain: list[str], captured: list[_Captured]) -> None:
        """Solves a chain; what is in `captured` is taken out, so that nothing else keeps the hidden states alive."""
        device, dtype = self.settings.device, self.settings.dtype_for(self.stored)
        if not captured:
            with placed(self.model, device) as there:
                captured.append(self._captured(chain, there))
        few, calls = captured.pop()
        first = [by_block[chain[0]].hidden for by_block in calls]
        home = home_of_states(sum(hidden.numel() for hidden in first) * dtype.itemsize, device)
        states = [hidden.to(home, dtype) for hidden in first]
        calls = [without_hidden(by_block) for by_block in calls]
        behind = States(states, states, few[chain[0]].hidden)
        del first, states
        finished, kept = self.keeper.resume(chain)
        if kept is not None:
            quantized = [state.to(home) for state in kept.quantized]
            same = kept.original is kept.quantized
            behind = States(quantized, quantized if same else [s.to(home) for s in kept.original], kept.few)
            del quantized
        self.done += sum(len(self._layers_of(name)) for name in chain[:finished])
        at = chain[0]
        with naming_the_block(lambda: at, device):
            for at, copies in brought(chain[finished:], self._tensors_of, device, whole=False):
                behind = self._walk_block(at, copies, calls, few[at], behind, last=at == chain[-1])

    def _walk_block(
        self,
        name: str,
        copies: list[torch.Tensor],
        calls: Sequence[Mapping[str, Call]],
        few: Call,
        behind: States,
        *,
        last: bool,
    ) -> States:
        """Solves one block.

        Args:
            name: of the block.
            copies: of its tensors, where it is worked on.
            calls: of each batch by block, without their hidden states.
            few: its call with a few tokens.
            behind: the hidden states of the block before.
            last: whether no block of the chain needs the hidden states behind it.

        Returns:
            The hidden states behind it.
        """
        device, dtype = self.settings.device, self.settings.dtype_for(self.stored)
        self.keeper.begin(name)
        block = self.model.get_submodule(name)
        loan = Loan(list(block.modules()), copies, device, dtype, _FLOATS)
        here = [by_block[name].to(device, dtype) for by_block in calls]
        current = [call.with_hidden(state) for call, state in zip(here, behind.quantized, strict=True)]
        original = [call.with_hidden(state) for call, state in zip(here, behind.original, strict=True)]
        small = few.to(device, dtype).with_hidden(behind.few.to(device, dtype))
        few_state = output_of(block(*small.args, **small.kwargs))
        work = self._work(block, self._layers_of(name), f"{name}.")
        behind = States(*work.solve(current, original, small, needs_output=not last), few_state)
        self._finish(work, loan)
        return self.keeper.end(name, None if last else behind) or behind

    def _run(self, batch: torch.Tensor, there: torch.device) -> Any:
        return self.model(batch.to(there))

    def _tensors_of(self, block: str) -> list[torch.Tensor]:
        return tensors_of(self.model.get_submodule(block).modules())

    def _solve_rest(self, chains: Sequence[Sequence[str]]) -> None:
        """Layers outside every block: the model itself is their block, with the real ones in place already."""
        inside = self._inside(chains)
        members = [layer for layer in self.layers if layer.name not in inside]
        if self.keeper.resume([""])[0]:
            return
        self.keeper.begin("")
        there, modules = self._whole(), list(self.model.modules())
        tensors = tensors_of(modules)
        loan = Loan(modules, [value_of(t).to(there) for t in tensors], there, None)
        work = self._work(self.model, members, "")
        calls = [call_of(batch.to(there)) for batch in self.batches]
        with naming_the_block(lambda: "", there):
            work.solve(calls, calls, call_of(self.few.to(there)), needs_output=False)
        self._finish(work, loan)
        self.keeper.end("", None)

    def _work(self, block: nn.Module, members: Sequence[LayerPlan], prefix: str) -> BlockWork:
        linear = [layer for layer in members if layer.kind == LayerKind.LINEAR]
        by_module: dict[str, list[LayerPlan]] = {}
        for layer in members:
            if layer.kind == LayerKind.EXPERTS:
                by_module.setdefault(layer.name.rpartition(".")[0], []).append(layer)
        experts = [
            ExpertsWork(block, projections, prefix, self.input_scales, self.settings, self.stored)
            for projections in by_module.values()
        ]
        groups = gather(linear, prefix)
        for group in groups:
            group.notes.extend(dict.fromkeys(self.merged[m.name] for m in group.members if m.name in self.merged))
        return BlockWork(block, groups, experts, self.settings, self.stored)

    def _finish(self, work: BlockWork, loan: Loan) -> None:
        found = work.results()  # the original modules are in the block again, and go home with it
        loan.narrow()
        weights = [_weight_of(self.model, layer) for layer, _ in found]
        loan.settle()
        for (layer, solved), weight in zip(found, weights, strict=True):
            self.apply(layer, solved, weight)
            self.done += 1
            if self.progress:
                self.progress(self.done, len(self.layers))


def _weight_of(model: nn.Module, layer: LayerPlan) -> torch.Tensor:
    """The weight of a layer as it is now; a parameter that goes home keeps nothing of it."""
    if layer.kind == LayerKind.EXPERTS:
        return expert_matrices(model, layer.name)  # type: ignore[no-any-return]
    return weight_of(model, layer.name).data
