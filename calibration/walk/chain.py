"""A `Chain` is a run of consecutive blocks, with their calls and the hidden states between them.

Between two blocks of a chain only the hidden state changes, and the mappings in which some models hand keys and values
on (`handed_on`). So the calls of all blocks are captured once, and each block gets the hidden states that the block
before it gave.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quant.calibration.placement import home_of_states
from quant.calibration.session import Session
from quant.formats.tensor import moved
from quant.recipes.blocks import Call, calls_of_chain, without_hidden

# Blocks may hand on more than the hidden state, in a mapping among their arguments: one fills it, others read it.
#
# The last blocks of Gemma 3n and Gemma 4 attend to keys and values of an earlier one (`shared_kv_states`):
#
#     block 0 ──hidden──▶ block 1 ──hidden──▶ block 2 ──hidden──▶ …
#                           └──── keys, values ────▶┘
#
# A walk that calls block after block, each on all batches, must therefore give each batch a mapping of its own.
# Original and quantized hidden states need two: a quantized block attends to the keys of the quantized block before it.


Slot = int | str
HandedOn = Mapping[Slot, "UserDict[Any, Any]"]
"""The mappings among the arguments of a block, by their index or keyword."""


def handed_on(calls: Mapping[str, Call]) -> HandedOn:
    """Returns the mappings that the blocks of one pass hand on, as they are before the first block.

    Args:
        calls: the calls of the blocks, in order of execution.
    """
    first, *later = calls.values()
    mappings: dict[Slot, UserDict[Any, Any]] = {i: value for i, value in enumerate(first.args) if _is_mapping(value)}
    for name, value in first.kwargs.items():
        # A plain dict holds arguments as a rule; one that was empty at first and is not any more was filled by a block.
        if _is_mapping(value):
            mappings[name] = value
        elif type(value) is dict and not value and any(call.kwargs.get(name) for call in later):
            mappings[name] = UserDict()
    return copied(mappings)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, UserDict)


def copied(mappings: HandedOn) -> HandedOn:
    """Returns the same tensors in new mappings."""
    return {slot: copy.copy(mapping) for slot, mapping in mappings.items()}


def is_filled(call: Call) -> bool:
    """Returns whether a mapping among the arguments of a block holds something."""
    return any(_is_mapping(value) and value for value in (*call.args, *call.kwargs.values()))


@dataclass(frozen=True, eq=False)
class States:
    """Hidden states between two blocks, one tensor a batch.

    Attributes:
        quantized: the hidden states that the quantized blocks before gave.
        original: the hidden states that the original blocks gave; the same list where the walk looks at one stream
            alone.
        few: the hidden states of the original blocks on a few tokens.
    """

    quantized: list[torch.Tensor]
    original: list[torch.Tensor]
    few: torch.Tensor

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> States:
        """Returns the same states on another device; states on a few tokens stay."""
        quantized = list(map(move, self.quantized))
        # Solvers that look only at original inputs walk with one list; two would take twice the memory.
        same = self.original is self.quantized
        return States(quantized, quantized if same else list(map(move, self.original)), self.few)


class BlockStore:
    """Keeps finished blocks, so that a walk that was stopped goes on after them. This one keeps nothing."""

    def resume(self, chain: Sequence[str]) -> tuple[int, States | None]:
        """Puts the finished blocks of a chain in place.

        Returns:
            How many there are, and the hidden states behind them if the chain goes on.
        """
        return 0, None

    def begin(self, block: str) -> None:
        """Prepares for a block before it is solved."""

    def end(self, block: str, states: States | None) -> States | None:
        """Takes a finished block and the hidden states after it; None for the last block of a chain.

        Returns:
            The same hidden states, perhaps mapped from a file.
        """
        return states


class Chain:
    """Consecutive blocks of a model.

    Args:
        model: the model, on its device; it runs on each batch, at least up to the first block.
        names: the names of the blocks, in order of execution.
        run_few: runs the model on a few tokens.
        runs: run it on each of this rank's batches.

    Attributes:
        few_calls: the calls of the blocks on a few tokens, by name.
        calls: the same for each batch, without their hidden states after `take_states`.
        original, quantized: the mappings that blocks hand on, one set a batch, next to the hidden states of that name.
        few: the same on a few tokens.
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
        quantized = [
            call.with_arguments(own).with_hidden(state)
            for call, own, state in zip(calls, self.quantized, states.quantized, strict=True)
        ]
        original = [
            call.with_arguments(own).with_hidden(state)
            for call, own, state in zip(calls, self.original, states.original, strict=True)
        ]
        few = moved(self.few_calls[name], device, dtype).with_arguments(self.few)
        return quantized, original, few.with_hidden(states.few.to(device, dtype))
