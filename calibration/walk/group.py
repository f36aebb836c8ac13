"""A `Group` is a fusion group while its block is worked on: its inputs, and how they are scaled and rounded.

All members of a group read one input, so statistics, input scale, rotation and static scale belong to the group, and
the members' weights are solved as one tall matrix where the format allows it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from quant.calibration.fast_matmul import PairedWeight, multiplies_pairs
from quant.calibration.ranks import Exchange, number_of
from quant.calibration.solvers.interfaces import sampled
from quant.calibration.solvers.registry import Pipeline, get_pipeline
from quant.calibration.solvers.rotation import matrix_of
from quant.calibration.statistics import LayerStats, round_activation
from quant.formats.format import Format
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.linear.quant_linear import RunTimeParts
from quant.recipes.blocks import Substitute, has_hooks, take_hooks
from quant.recipes.plan import Guard, LayerPlan, groups_of


@dataclass(frozen=True, eq=False)
class Solved:
    """The solution of one layer."""

    weight: BlockScaledTensor  # codes and scales of [out, in], or of [experts, out, in]
    parts: RunTimeParts  # the operations of the layer at run time besides its matmul; `weight` is rotated already
    input_scale: torch.Tensor | None  # static scale of the activation format, float32 scalar, where it has one
    tokens: int  # how many calibration tokens reached the layer; 0 where its siblings' pooled statistics were used
    notes: tuple[str, ...] = ()  # sentences for the report


@dataclass(frozen=True)
class Settings:
    """Settings of the walk."""

    batch: int = 4  # calibration rows in one forward pass
    # The dtype of the forward passes; None takes the model's, or float32 where that is narrower: rounding of hidden
    # states to 16 bit, block after block, would look like an error of the weights.
    dtype: torch.dtype | None = None
    observer: str = "absmax"  # key of `OBSERVERS`: how static input scales are chosen
    guard: Guard | None = None  # when a layer gets another format; None for never
    # Makes the model run solved experts, for layers outside of blocks that follow them.
    run_experts: Callable[[nn.Module], Any] = lambda model: None

    def dtype_for(self, stored: torch.dtype) -> torch.dtype:
        """Returns the dtype of the forward passes of a model that is stored in `stored`."""
        return self.dtype or (torch.float32 if stored.itemsize < 4 else stored)


@dataclass(eq=False)
class Group:
    """A fusion group within one block, and the statistics of its input."""

    members: list[LayerPlan]  # the planned layers; the guard may change their formats
    names: list[str]  # the names of the members within the block
    pipeline: Pipeline  # their solver
    inputs: list[torch.Tensor] = field(default_factory=list)  # original inputs by batch of this rank, [tokens, in]
    batch_numbers: list[int] = field(default_factory=list)  # the numbers of `inputs`, among the batches of all ranks
    # The number, largest magnitudes and sums of magnitudes of each batch, until they are pooled.
    magnitudes: list[tuple[int, list[torch.Tensor]]] = field(default_factory=list)
    calls: int = 0  # how often the group is called in one pass of the block
    tokens: int = 0  # how many reached it in the original model
    total: torch.Tensor | None = None  # sum of magnitudes by channel, [in]
    amax: torch.Tensor | None = None  # largest magnitude by channel, [in]
    # The scale that the input is divided by, [in], at run time or by the module before.
    divisor: torch.Tensor | None = None
    parts: RunTimeParts = field(default_factory=RunTimeParts)  # see `Solved`; branches are the members' own
    input_scale: torch.Tensor | None = None
    # Second moment of the gradients at the members' outputs, one after the other, where it was measured.
    outputs: LayerStats | None = None
    # Weights of the tokens of each batch of this rank, [tokens], where gradients were measured.
    token_weights: list[torch.Tensor] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # notes for the plan

    @property
    def weight_format(self) -> Format:
        """Of all members."""
        return self.members[0].weight_format

    @property
    def activation(self) -> Format | None:
        """Of the input."""
        return self.members[0].activation

    @property
    def pattern(self) -> str:
        """The same for the same layer of sibling experts: names with their numbers left out, and the input size."""
        # experts.3.up_proj and experts.7.up_proj are siblings: experts.#.up_proj.
        return re.sub(r"\d+", "#", "|".join(self.names)) + f":{self.members[0].shape[-1]}"

    def inputs_of_all_ranks(self, every: int = 1) -> Iterator[torch.Tensor]:
        """Yields every `every`-th token of the inputs that all ranks have kept, batch by batch; see `sampled`."""
        assert self.amax is not None
        own = [(n, [sampled(x, every, n)]) for n, x in zip(self.batch_numbers, self.inputs, strict=True)]
        for _, (x,) in Exchange(self.amax.device).in_order(own):
            yield x

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        """Returns an input of the original model, `[tokens, in]`, scaled and rotated as the quantized one is."""
        x = x if self.divisor is None else x / self.divisor.to(x)
        return RunTimeParts(hadamard=self.parts.hadamard).input(x)

    def round_input(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the input as the quantized layer sees it, `[tokens, in]`, or wider by its residual channels."""
        x = self.parts.widened(self.parts.input(x), self.activation, self.input_scale)
        return round_activation(x, self.activation, self.input_scale)


def gather(members: Sequence[LayerPlan], prefix: str) -> list[Group]:
    """Returns linear layers by fusion group; names within the block leave `prefix` out."""
    return [
        Group(group, [layer.name.removeprefix(prefix) for layer in group], get_pipeline(group[0].solver))
        for group in groups_of(members).values()
    ]


@dataclass(eq=False)
class CurrentBatch:
    """The batch of calibration rows that runs through the block, for hooks and modules that it calls."""

    index: int = 0  # among the batches of this rank

    @property
    def number(self) -> int:
        """Its number among the batches of all ranks."""
        return number_of(self.index)


class StandIn(Substitute):
    """A solved layer while its block is being worked on: dense weights, and a memory of its outputs by batch.

    The passes over a block repeat each other's beginnings, so that it need not compute them again.
    """

    def __init__(
        self, original: nn.Module, dense: torch.Tensor, group: Group, batch: CurrentBatch, parts: RunTimeParts
    ) -> None:
        super().__init__()
        self.original, self.dense, self.group = original, dense, group
        self.paired: PairedWeight | None = None  # the same values for products on a GPU
        self.batch, self.parts = batch, parts
        take_hooks(self, original)
        # One that is called several times in a pass would have to remember all of its outputs, and a hook may change
        # an output in place.
        self.keeps = group.calls == 1 and not has_hooks(original)
        self.outputs: dict[int, torch.Tensor] = {}
        self.read_from(original)

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias of the layer, `[out]`, corrected for rounding where that was done; None where it has none."""
        return getattr(self.original, "bias", None)

    @property
    def weight(self) -> torch.Tensor:
        """The matrix `[out, in]` that the input is multiplied by, for modeling code that reads it or its dtype."""
        return matrix_of(self.dense, self.parts)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the output without its bias."""
        # The low-rank branch below reads the input unrounded, as kernels do at run time.
        rounded = self.group.round_input(x)
        if self.paired is not None and multiplies_pairs(rounded):
            out = self.paired.linear(rounded)
        else:
            out = nn.functional.linear(rounded, self.dense)
        branch = self.parts.branch(self.parts.input(x)) if self.parts.lowrank else None
        return out if branch is None else out + branch

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        index = self.batch.index
        if index in self.outputs:
            return self.outputs[index] if self.keeps else self.outputs.pop(index)
        out = self.product(input)
        out = out if self.bias is None else out + self.bias
        if self.keeps:
            self.outputs[index] = out
        return out


def weight_of(block: nn.Module, name: str) -> torch.Tensor:
    """Returns the weight of the module called `name`."""
    weight = block.get_submodule(name).weight
    assert isinstance(weight, torch.Tensor)
    return weight
