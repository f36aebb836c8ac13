"""`solve_sequentially` solves every layer on the inputs that it will really get.

Rotations that can be merged into the model are merged first. Then come the blocks in order of execution, each with all
calibration rows at once; `solve_block` takes one through these steps:

1. *Observe.* The original block runs on the original hidden states. The inputs of its layers are kept.
2. *Transform.* An input scale is chosen for each fusion group, folded into its producer and into the weights.
   Rotations turn weights, residual channels repeat columns of them, branches are taken off them just before they are
   rounded.
3. *Round.* Group by group, in the order in which the block runs them: the block runs on the hidden states that
   the quantized blocks before it gave, with the groups solved so far in place, up to this group. Its inputs, rounded
   where activations are quantized, go into a second moment; where they are not, their distance from the original
   inputs goes into the drift.
4. *Guard.* If there is one, the last rows only judge: a group whose output on them is too far off gets another format.
5. *Fused experts*, each on the tokens that reach it.
6. *Reconstruct*, where requested: the whole block is refined against the output of the original.
7. The quantized block gives the hidden states for the next one.

Ranks share the calibration rows: each keeps the hidden states of its own batches. Sums over rows, and solutions that
one rank finds for all, are put together in the order of one rank (`quant.calibration.ranks`).

So memory holds one block, two sets of hidden states, one block's reference inputs and one second moment. A solved
layer remembers its outputs while its block is worked on, because the passes of step 3 repeat each other's
beginnings; a block costs three forward passes in all, one of them the reference.
"""

import copy
import math
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from quant.base.processor import value_of
from quant.calibration.evaluating import without_cache
from quant.calibration.inputs import call_of
from quant.calibration.outputs.gradients import OutputMoments, output_moments
from quant.calibration.outputs.stream import find_writers
from quant.calibration.ranks import at_first, from_first, number_of, own_batches, rank_and_world
from quant.calibration.session import (
    DeviceCopies,
    Prefetcher,
    Session,
    elsewhere,
    experts_on_device,
    fits,
    home_of_states,
    placed,
    tensors_of,
)
from quant.calibration.solvers.autoround import BlockLayer, Reconstructed, Reconstruction, reconstruct_block
from quant.calibration.solvers.registry import check_solvers, get_pipeline
from quant.calibration.solvers.replay import replaying
from quant.calibration.solvers.rotation import merge_rotations
from quant.calibration.solvers.solve_group import all_solved
from quant.calibration.texts.rows import check_ids, trial_rows
from quant.calibration.walk.block import Block, BlockCalls, FusedExperts, Group, Settings, Solved, gather, weight_of
from quant.calibration.walk.block_memory import Scratch, reporting_block
from quant.calibration.walk.collect import reporting_bad_tensor
from quant.calibration.walk.learned_rotation import merge_learned_rotation
from quant.calibration.walk.round import observe, observe_and_sum, round_siblings, sibling_groups, solve_siblings
from quant.calibration.walk.transform import choose_channels, fix_input_scales, rotate, scale_inputs
from quant.formats.tensor import moved
from quant.recipes.blocks import (
    Call,
    block_names,
    calls_of_chain,
    equal_but_hidden,
    find_chains,
    reads_experts,
    stored_dtype,
    without_experts,
    without_hidden,
)
from quant.recipes.layers import LayerKind, expert_matrices
from quant.recipes.plan import LayerPlan, Plan, groups_of

# ---- chains of blocks
#
# Between two blocks of a chain only the hidden state changes, and the mappings in which some models hand keys and
# values on. The last blocks of Gemma 3n and Gemma 4 attend to those of an earlier one (`shared_kv_states`):
#
#     block 0 ──hidden──▶ block 1 ──hidden──▶ block 2 ──hidden──▶ …
#                           └──── keys, values ────▶┘
#
# So the calls of all blocks are captured once, each block gets the hidden states that the block before it gave, and
# each batch has a mapping of its own. Original and quantized hidden states need two: a quantized block attends to the
# keys of the quantized block before it.


Slot = int | str
HandedOn = Mapping[Slot, "UserDict[Any, Any]"]
"""The mappings among the arguments of a block, by their index or keyword."""


def handed_on(calls: Mapping[str, Call]) -> HandedOn:
    """Returns the mappings that the blocks of one pass hand on, as they are before the first block."""
    first, *later = calls.values()
    mappings: dict[Slot, UserDict[Any, Any]] = {
        i: value for i, value in enumerate(first.args) if isinstance(value, UserDict)
    }
    for name, value in first.kwargs.items():
        # A plain dict holds arguments as a rule; one that was empty at first and is not any more was filled by a block.
        if isinstance(value, UserDict):
            mappings[name] = value
        elif type(value) is dict and not value and any(call.kwargs.get(name) for call in later):
            mappings[name] = UserDict()
    return copied(mappings)


def copied(mappings: HandedOn) -> HandedOn:
    """Returns the same tensors in new mappings."""
    return {slot: copy.copy(mapping) for slot, mapping in mappings.items()}


@dataclass(frozen=True, eq=False)
class States:
    """Hidden states between two blocks, one tensor a batch."""

    quantized: list[Tensor]  # the hidden states that the quantized blocks before gave
    # The hidden states that the original blocks gave; the same list where the walk looks at one stream alone.
    original: list[Tensor]
    few: Tensor  # the hidden states of the original blocks on a few tokens

    def moved(self, move: Callable[[Tensor], Tensor]) -> "States":
        """Returns the same states on another device; states on a few tokens stay."""
        quantized = list(map(move, self.quantized))
        # Solvers that look only at original inputs walk with one list; two would take twice the memory.
        same = self.original is self.quantized
        return States(quantized, quantized if same else list(map(move, self.original)), self.few)


class BlockStore:
    """Keeps finished blocks, so that a walk that was stopped goes on after them. This one keeps nothing."""

    def resume(self, chain: Sequence[str]) -> tuple[int, States | None]:
        """Puts the finished blocks of a chain in place; returns how many, and the states behind them if it goes on."""
        return 0, None

    def begin(self, block: str) -> None:
        """Prepares for a block before it is solved."""

    def end(self, block: str, states: States | None) -> States | None:
        """Takes a finished block and the hidden states after it, which are returned, perhaps mapped from a file.

        They are None for the last block of a chain.
        """
        return states


class Chain:
    """Consecutive blocks of a model, which runs on each batch, at least up to the first block.

    `few_calls` are the calls of the blocks on a few tokens, by name, and `calls` those of each batch, without their
    hidden states after `take_states`. `few`, `original` and `quantized` are the mappings that blocks hand on, one set a
    batch.
    """

    def __init__(
        self, model: nn.Module, names: Sequence[str], run_few: Callable[[], Any], runs: Sequence[Callable[[], Any]]
    ) -> None:
        self.names = names
        self.few_calls = calls_of_chain(model, names, [run_few])[0]
        self.calls = calls_of_chain(model, names, runs)
        self.original: list[HandedOn] = []
        self.quantized: list[HandedOn] = []
        self.few: HandedOn = {}

    def take_states(self, session: Session, dtype: torch.dtype) -> tuple[States, torch.device | None]:
        """Returns the hidden states in front of the first block, in `dtype`, on the device if they fit there.

        The chain itself keeps none of them, so that they go when the first block is finished.
        """
        first = [by_block[self.names[0]].hidden for by_block in self.calls]
        home = home_of_states(sum(hidden.numel() for hidden in first) * dtype.itemsize, session.device)
        states = [hidden.to(home, dtype) for hidden in first]
        self.original = [moved(handed_on(by_block), session.device, dtype) for by_block in self.calls]
        self.few = moved(handed_on(self.few_calls), session.device, dtype)
        self.calls = [without_hidden(by_block) for by_block in self.calls]
        return States(states, states, self.few_calls[self.names[0]].hidden), home

    def calls_of(
        self, name: str, states: States, session: Session, dtype: torch.dtype
    ) -> tuple[list[Call], list[Call], Call]:
        """Returns the calls of a block on the states in front of it: quantized, original, and on a few tokens."""
        device = session.device
        if states.original is states.quantized or not self.quantized:
            # The walk has followed one of the two so far, or resumes with states that an earlier run kept. States are
            # kept only in front of the first block that hands mappings on, so these are still empty.
            self.quantized = [copied(mappings) for mappings in self.original]
        captured = [by_block[name].with_arguments(own) for by_block, own in zip(self.calls, self.original, strict=True)]
        calls = [moved(call, device, dtype) for call in captured]

        def on(handed_on: Sequence[HandedOn], hidden: Sequence[Tensor]) -> list[Call]:
            own = zip(calls, handed_on, hidden, strict=True)
            return [call.with_arguments(mappings).with_hidden(state) for call, mappings, state in own]

        few = moved(self.few_calls[name], device, dtype).with_arguments(self.few)
        quantized, original = on(self.quantized, states.quantized), on(self.original, states.original)
        return quantized, original, few.with_hidden(states.few.to(device, dtype))


# ---- the walk over a model
#
# An open block has copies of its weights on the session's device, and the calls of all calibration rows with the hidden
# states that the block before it gave. Closing it restores the original tensors, passes the solutions to the caller,
# and tells the store.


Apply = Callable[[LayerPlan, Solved | None, Tensor], None]
"""Takes a layer, its solution (None for one kept in 16 bit), and the weight that was solved."""
Run = Callable[[Tensor], Any]
"""Runs the model on a batch of rows, where it is placed."""
_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_BLOCKS = 16  # of a block in float32, so many fit into a GPU on which two are open
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(eq=False)
class ModelWalk:
    """A model, the arguments of `solve_sequentially`, and how far the walk is."""

    model: nn.Module
    plan: Plan
    rows: Tensor
    apply: Apply
    session: Session
    settings: Settings
    input_scales: Mapping[str, Tensor]
    store: BlockStore
    # Notes on layers whose rotation was merged into the model, by name.
    merged: dict[str, str] = field(default_factory=dict)
    # Second moments of the gradients at outputs, for solvers that look at them.
    outputs: OutputMoments = field(default_factory=OutputMoments)
    done: int = 0  # layers that are finished
    block_name: str = ""  # the block that is worked on; "" for the model itself
    # An exit stack that puts the experts of that block back into their files.
    experts: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.layers = [layer for layer in self.plan.quantized if layer.kind in (LayerKind.LINEAR, LayerKind.EXPERTS)]
        self.home = next(self.model.parameters()).device
        batches = self.rows.split(self.settings.batch)
        self.settings = replace(self.settings, row_bounds=tuple(pairwise(accumulate(map(len, batches), initial=0))))
        self.batches = [batches[number] for number in own_batches(len(batches))]
        self.few = trial_rows(self.rows)
        self.stored = stored_dtype(self.model)
        self.dtype = self.settings.dtype_for(self.stored)

    def merge_rotations(self) -> None:
        """Merges rotations into the modules around, in the model itself, before the walk."""
        linears = (layer for layer in self.layers if layer.kind == LayerKind.LINEAR)
        merging = [layer for layer in linears if get_pipeline(layer.solver).spec.merges_rotations]
        if not merging:
            return
        device = self._device_of_whole()
        # `check_solvers` refuses a plan with both kinds.
        if get_pipeline(merging[0].solver).spec.learns_rotation:
            self.merged = merge_learned_rotation(self.model, self.few, self.batches, merging, device, self.session)
        else:
            names = [layer.name for layer in merging]
            blocks = block_names(self.model)
            self.merged = merge_rotations(self.model.to(device), self.few.to(device), blocks, names)
            self.model.to(self.home)

    def measure_outputs(self) -> None:
        """Measures the gradients at outputs, in the original model, where a solver needs them."""
        linears = [layer for layer in self.layers if layer.kind == LayerKind.LINEAR]
        experts = [[layer] for layer in self.layers if layer.kind == LayerKind.EXPERTS]
        groups = [*groups_of(linears).values(), *experts]
        groups = [members for members in groups if get_pipeline(members[0].solver).rounding.two_sided]
        if groups:
            self.outputs = output_moments(self.model, groups, self.batches, self.session)

    def find_chains(self) -> tuple[list[list[str]], list[Chain]]:
        """Returns the names of the blocks of each chain, and the first planned chain, while the model is placed."""
        names = block_names(self.model)
        if names and elsewhere(self.model, self.session.device):
            # To copy 16 GB to a GPU takes seconds, and the values of weights in blocks do not matter as a rule.
            filler = torch.zeros((), dtype=self.stored, device=self.session.device)
            # A model that stops at such weights runs with its own next, or says why it does not.
            with suppress(Exception), self._placed(filler) as run:
                chains, captured = self._find_chains(names, run)
                if all(self._ignores_weights(chains[0], chain, run, filler) for chain in captured):
                    return chains, captured
        with self._placed() as run:
            return self._find_chains(names, run)

    def _find_chains(self, names: Sequence[str], run: Run) -> tuple[list[list[str]], list[Chain]]:
        # No value that a block gives is looked at here: not which blocks follow each other, and not the arguments of
        # later blocks but the hidden states.
        with without_experts(self.model, names):
            chains = find_chains(self.model, names, partial(run, self.few)) if names else []
        planned = [walked for walked in map(self.up_to_last_planned, chains) if walked]
        with without_experts(self.model, planned[0] if planned else []):
            return chains, [self._capture(walked, run) for walked in planned[:1]]

    def _ignores_weights(self, first: Sequence[str], chain: Chain, run: Run, filler: Tensor) -> bool:
        """Returns whether a chain has the calls of the model whatever the weights in its blocks are."""
        if list(chain.names) != list(first[: len(chain.names)]):
            return False  # blocks of another chain give it its hidden states
        filler.fill_(2**-10)
        with without_experts(self.model, chain.names):
            again = calls_of_chain(self.model, chain.names, [partial(run, self.few)])[0]
        start = chain.names[0]
        same_start = torch.equal(again[start].hidden, chain.few_calls[start].hidden)
        return same_start and all(equal_but_hidden(again[name], call) for name, call in chain.few_calls.items())

    def up_to_last_planned(self, chain: list[str]) -> list[str]:
        """Returns the blocks of a chain up to the last one with a planned layer."""
        planned = [position for position, name in enumerate(chain) if self._layers_of(name)]
        return chain[: planned[-1] + 1] if planned else []

    def capture(self, names: list[str]) -> Chain:
        """Returns a chain behind others, which are quantized by now: the model runs up to it once more."""
        with self._placed() as run:
            return self._capture(names, run)

    def _capture(self, names: list[str], run: Run) -> Chain:
        return Chain(self.model, names, partial(run, self.few), [partial(run, batch) for batch in self.batches])

    @contextmanager
    def _placed(self, filler: Tensor | None = None) -> Iterator[Run]:
        """Puts the model on the session's device while open, where it runs on the rows that the function is given."""
        # These passes look for the calls of blocks. cuDNN would compile its attention for each of their shapes first,
        # in 0.4 s, to save microseconds.
        with placed(self.model, self.session.device, filler=filler) as device, sdpa_kernel(_ATTENTION):
            yield lambda batch: self.model(batch.to(device))

    def begin(self, chain: Chain) -> tuple[States, Sequence[str]]:
        """Returns the hidden states in front of the first block that is not finished, and the blocks from there on."""
        states, home = chain.take_states(self.session, self.dtype)
        # Without saved states no block is skipped, unless the whole chain is finished.
        finished, saved = self.store.resume(chain.names)
        if saved is not None:
            states = saved.moved(lambda state: state.to(home))
        self.done += sum(len(self._layers_of(name)) for name in chain.names[:finished])
        self.block_name = chain.names[0]
        return states, chain.names[finished:]

    def solve(self, chain: Chain, states: States, unfinished: Sequence[str]) -> None:
        """Solves the blocks of a chain that are not finished.

        A GPU with room for two blocks still works on one while Python opens the next and looks for its writers, and
        already runs the next while Python closes the one before: on a stream beside, or Python would wait for the GPU.
        """
        device, closing = self.session.device, ExitStack()  # which closes the block before
        blocks = {name: self.model.get_submodule(name) for name in unfinished}
        # Ranks open and close in one order.
        ahead = from_first(lambda: self._has_room_for_two(list(blocks.values()), states))
        beside = torch.cuda.Stream(device) if ahead else None
        if beside is not None:
            beside.wait_stream(torch.cuda.current_stream(device))

        def close(name: str, block: Block, outputs: States | None, end: torch.cuda.Event) -> None:
            with torch.cuda.stream(beside):
                end.wait()  # also before the next block but one takes the memory of this one
                self.close_block(name, block, outputs)

        weights = Prefetcher(device, whole=False).in_turn(unfinished, lambda name: tensors_of(blocks[name].modules()))
        for name, copies in weights:
            needs_output = name != chain.names[-1]
            with torch.cuda.stream(beside):
                block = self.open_block(chain, name, copies, states)
                few_output = run_few(block, needs_output=needs_output)
            if beside is not None:
                torch.cuda.current_stream(device).wait_stream(beside)
            outputs = solve_block(block, few_output=few_output, needs_output=needs_output, meanwhile=closing.close)
            if beside is not None and outputs is not None:
                states = outputs
                closing.callback(close, name, block, outputs, torch.cuda.current_stream(device).record_event())
            else:
                states = self.close_block(name, block, outputs) or states
            del block, outputs  # before the next block is opened

    def _has_room_for_two(self, blocks: Sequence[nn.Module], states: States) -> bool:
        """Returns whether a GPU has much more memory than two of the blocks take; experts may be in files."""
        device = self.session.device
        if device is None or device.type != "cuda" or states.quantized[0].device != device:
            return False
        largest = max((sum(p.numel() for p in b.parameters()) for b in blocks), default=0) * self.dtype.itemsize
        has_experts = any(reads_experts(p) for b in blocks for p in b.parameters())
        return not has_experts and largest <= torch.cuda.get_device_properties(device).total_memory // _BLOCKS

    def open_block(self, chain: Chain, name: str, copies: list[Tensor], states: States) -> Block:
        """Returns a block with its weights and its calls on the device where it is worked on."""
        self.block_name = name
        self.store.begin(name)
        device = self.session.device
        module = self.model.get_submodule(name)
        self.experts.enter_context(experts_on_device(module, device))
        on_device = DeviceCopies(list(module.modules()), copies, device, self.dtype, _FLOATS)
        calls = BlockCalls(*chain.calls_of(name, states, self.session, self.dtype))
        return self._block(module, on_device, self._layers_of(name), calls, f"{name}.")

    def close_block(self, name: str, block: Block, outputs: States | None) -> States | None:
        """Restores the original tensors of the model, and passes the solved layers to `apply`.

        Hidden states after the block are returned, perhaps mapped from a file; None after the last block of a chain.
        """
        results = block.results()  # the original modules are in the block again, and go home with it
        block.copies.restore_dtypes()
        # `.data`, since a parameter that goes home must not be referred to here.
        weights = [
            expert_matrices(self.model, layer.name)
            if layer.kind == LayerKind.EXPERTS
            else weight_of(self.model, layer.name).data
            for layer, _ in results
        ]
        block.copies.keep_changes()
        for (layer, solved), weight in zip(results, weights, strict=True):
            self.apply(layer, solved, weight)
            self.done += 1
            self.session.report("solve", self.done, len(self.layers))
        self.experts.close()
        few = block.calls.few
        if any(isinstance(value, UserDict) and value for value in (*few.args, *few.kwargs.values())):
            # The store has room only for hidden states: a walk that is resumed begins before these blocks.
            self.store.end(name, None)
            return outputs
        return self.store.end(name, outputs)

    def open_outside(self, chains: Sequence[Sequence[str]]) -> Block | None:
        """Opens the layers outside every block as a block of their own.

        The model itself is their block, with its quantized blocks in place already. Returns None where there are no
        such layers, or they are finished.
        """
        inside = {layer.name for chain in chains for name in chain for layer in self._layers_of(name)}
        members = [layer for layer in self.layers if layer.name not in inside]
        # The empty name stands for the model itself, as the block of these layers.
        if not members or self.store.resume([""])[0]:
            return None
        self.store.begin("")
        if any(layer.kind == LayerKind.EXPERTS and layer.name in inside for layer in self.layers):
            self.settings.run_experts(self.model)
        device, modules = self._device_of_whole(), list(self.model.modules())
        copies = [value_of(tensor).to(device) for tensor in tensors_of(modules)]
        on_device = DeviceCopies(modules, copies, device, None)
        batches = [call_of(batch.to(device)) for batch in self.batches]
        calls = BlockCalls(batches, batches, call_of(self.few.to(device)))
        return self._block(self.model, on_device, members, calls, "")

    def _block(
        self, module: nn.Module, copies: DeviceCopies, members: Sequence[LayerPlan], calls: BlockCalls, prefix: str
    ) -> Block:
        """Returns the block with the planned layers `members`, whose names begin with `prefix`."""
        scratch = Scratch.of(self.session)
        projections: dict[str, list[LayerPlan]] = {}
        for layer in members:
            if layer.kind == LayerKind.EXPERTS:
                projections.setdefault(layer.name.removeprefix(prefix).rpartition(".")[0], []).append(layer)
        experts = [
            FusedExperts(module, path, layers, calls.batch, self.input_scales, scratch, self.stored, self.outputs)
            for path, layers in projections.items()
        ]
        groups = gather([layer for layer in members if layer.kind == LayerKind.LINEAR], prefix)
        for group in groups:
            group.notes.extend(dict.fromkeys(self.merged[m.name] for m in group.members if m.name in self.merged))
            group.outputs = self.outputs.moments.pop(group.members[0].name, None)
            group.token_weights = self.outputs.token_weights.pop(group.members[0].name, [])
            if group.members[0].name in self.outputs.missing:
                reason = self.outputs.missing[group.members[0].name]
                group.notes.append(f"rounded for its own output's error, as by gptq: {reason}")
        return Block(module, copies, groups, experts, calls, self.settings, self.stored)

    def _layers_of(self, block: str) -> list[LayerPlan]:
        return [layer for layer in self.layers if layer.name.startswith(f"{block}.")]

    def _device_of_whole(self) -> torch.device:
        device = self.session.device
        return device if device is not None and fits(self.model, device) else self.home


def solve_sequentially(
    model: nn.Module, plan: Plan, rows: Tensor, *, apply: Apply, session: Session | None = None,
    settings: Settings | None = None, input_scales: Mapping[str, Tensor] | None = None, store: BlockStore | None = None,
) -> None:  # fmt: skip
    """Solves every planned linear layer and every fused-expert projection of `model`, block by block, on its device.

    `apply` puts a solved layer in place of the original; it is called when the block is finished, with the original
    still in the model, and gets None for a layer that the guard keeps in 16 bit. The solution, and the weight that was
    solved, are where blocks are worked on. `store` receives every finished block, and may have blocks of an earlier
    run.

    ValueError where a token id is outside the vocabulary, where an input holds NaN or infinity (the weight that does is
    named, or else the layer and the row), where no token reached a layer that has no sibling to borrow statistics from,
    or where a device has no room for a block (`BlockTooLargeError`).
    """
    check_solvers(plan)
    check_ids(rows, model)
    session = session or Session()
    scales = {name: scale.to(session.device) for name, scale in (input_scales or {}).items()}
    walk = ModelWalk(model, plan, rows, apply, session, settings or Settings(), scales, store or BlockStore())
    uncached = without_cache([getattr(model, "config", None)])
    with torch.no_grad(), uncached, replaying(), reporting_bad_tensor(model), walk.experts:
        walk.merge_rotations()
        walk.measure_outputs()
        chains, captured = walk.find_chains()
        for names in filter(None, map(walk.up_to_last_planned, chains)):
            chain = captured.pop() if captured else walk.capture(names)
            with reporting_block(lambda: walk.block_name, session):
                walk.solve(chain, *walk.begin(chain))
            del chain
        outside = walk.open_outside(chains)
        if outside is not None:
            with reporting_block(lambda: "", replace(session, device=outside.device)):
                solve_block(outside, few_output=run_few(outside, needs_output=False), needs_output=False)
            walk.close_block("", outside, None)


def run_few(block: Block, *, needs_output: bool) -> Tensor:
    """Returns the output of the original block on a few tokens; the pass finds the layers that write to the stream.

    It comes before anything changes the block, because the few tokens follow the original model throughout.
    """
    few = block.calls.few
    members = [*(g.members[0] for g in block.groups), *(m for e in block.experts for m in e.members)]
    # The model itself as the block of layers outside of blocks takes token ids, and has no stream to correct.
    # Two streams are no residual stream of one module, so they are not corrected.
    corrects = (
        few.hidden.is_floating_point()
        and not few.streams
        and any(get_pipeline(m.solver).rounding.shares_where(m.activation is not None).residual for m in members)
    )
    if not needs_output and not corrects:
        return few.hidden
    run = partial(block.module, *few.args, **few.kwargs)
    if not corrects:
        return few.output(run())
    names = [name for group in block.groups for name in group.names]
    block.stream.writers, result = find_writers(block.module, run, names, [each.path for each in block.experts])
    if not block.stream.writers and block.groups:
        block.groups[-1].notes.append(
            "no layer of its block was seen to add to the residual stream, whose error is left as it is"
        )
    block.stream.begin([call.hidden for call in block.calls.original])
    return few.output(result)


def solve_block(
    block: Block, *, few_output: Tensor, needs_output: bool, meanwhile: Callable[[], None] = lambda: None
) -> States | None:
    """Takes a block through all steps; returns the hidden states behind it, if another one follows.

    `meanwhile` is called when a GPU has got its first work.
    """
    calls = block.calls
    if block.settings.guard is None and all(group.pipeline.at_once for group in block.groups):
        outputs = _solve_at_once(block, meanwhile)
        return States(outputs, outputs, few_output) if needs_output else None
    # The steps 1 to 7 of the module docstring.
    reference = observe(block, meanwhile)
    scale_inputs(block)
    for group in block.groups:
        rotate(block, group)
    fix_input_scales(block)
    choose_channels(block, block.groups)
    for groups in sibling_groups(block):
        round_siblings(block, groups)
        block.remember_finished()
    for experts in block.experts:
        with block.stream.following(block.module):
            experts.solve(partial(block.run_until_stopped, calls.quantized), block.stream.error)
    reconstruct(block, reference)
    return States(block.run(calls.quantized), reference, few_output) if needs_output else None


def _solve_at_once(block: Block, meanwhile: Callable[[], None]) -> list[Tensor]:
    """Solves all groups from one pass over the original inputs, whose outputs are returned."""
    outputs, sums = observe_and_sum(block)
    meanwhile()
    siblings: dict[str, list[Group]] = {}
    for group in block.groups:
        siblings.setdefault(group.pattern, []).append(group)
    for groups in siblings.values():
        solve_siblings(block, groups, [sums[group.names[0]] for group in groups])
    for experts in block.experts:
        experts.solve(partial(block.run_until_stopped, block.calls.original))
    return outputs


def reconstruct(block: Block, outputs: Sequence[Tensor]) -> None:
    """Refines the roundings of a block by AutoRound, where a group's solver includes it.

    `outputs` are the hidden states that the original block gave, for each of this rank's batches.
    """
    # One setting for the block, whose layers are learned together.
    settings = next((g.pipeline.reconstruction for g in block.groups if g.pipeline.reconstruction), None)
    if settings is None:
        return
    # Remembered outputs have no gradient, and would come from the earlier weights.
    block.forget()
    if block.experts:
        raise ValueError(
            f"{block.experts[0].members[0].name}: solver autoround learns linear layers, and these are fused experts; "
            "use 'gptq' for the model, or exclude them"
        )
    layers = {}
    for name, target in block.learned.items():
        member, solved = block.solutions[name]
        assert solved is not None
        layers[name] = BlockLayer(target, solved.weight, member.activation, solved.input_scale, solved.parts)
    for stand_in in block.stand_ins.values():
        # Stand-ins next to the learned layers must no longer remember their outputs.
        stand_in.keeps = False
        stand_in.outputs.clear()
    calls = moved(block.calls.quantized, block.device)
    refined = _on_first_rank(block, calls, moved(outputs, block.device), layers, settings)
    if not math.isfinite(refined.before):
        first = block.groups[0].members[0].name
        raise ValueError(f"{first}: NaN or infinity in the output of its block, which autoround would refine")
    note = f"block error {refined.before:.3g} before autoround, {refined.after:.3g} after"
    for name, weight in refined.weights.items():
        member, solved = block.solutions[name]
        assert solved is not None
        block.solutions[name] = (member, replace(solved, weight=weight, notes=(*solved.notes, note)))
        stand_in = block.stand_ins[name]
        stand_in.dense, stand_in.paired = weight.dequantize(stand_in.dense.dtype), None


def _on_first_rank(
    block: Block,
    calls: Sequence[Call],
    outputs: Sequence[Tensor],
    layers: Mapping[str, BlockLayer],
    settings: Reconstruction,
) -> Reconstructed:
    """Returns the weights that the first rank learns from the rows of all ranks, on every rank.

    Steps of gradient descent follow each other, so one rank takes them all.
    """
    if rank_and_world()[1] == 1:
        return reconstruct_block(block.module, calls, outputs, layers, settings)
    cpu = torch.device("cpu")
    own = [
        (number_of(index), moved(call, cpu), output.to(cpu))
        for index, (call, output) in enumerate(zip(calls, outputs, strict=True))
    ]
    # Ranks exchange Python objects through the CPU, whatever their devices.
    everywhere = at_first(own)
    learned: list[Reconstructed] = []

    def learn() -> tuple[float, float]:
        assert everywhere is not None
        batches = sorted((batch for part in everywhere for batch in part), key=itemgetter(0))
        all_calls = [moved(call, block.device) for _, call, _ in batches]
        all_outputs = [output.to(block.device) for _, _, output in batches]
        learned.append(reconstruct_block(block.module, all_calls, all_outputs, layers, settings))
        return learned[0].before, learned[0].after

    before, after = from_first(learn)
    solved = {index: {name: each.weights[name]} for each in learned for index, name in enumerate(layers)}
    outlines = [({name: layer.quantized.shape}, layer.quantized.format) for name, layer in layers.items()]
    # Codes and scales as they are: decoding and rounding again could differ by a bit.
    parts = all_solved(solved, outlines, block.exchange)
    return Reconstructed({name: weight for part in parts for name, weight in part.items()}, before, after)
