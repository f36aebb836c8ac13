"""A `StandIn` remembers a solved layer's outputs, because the passes over a block repeat each other's beginnings.

A solved layer becomes a `StandIn`; a module in which every layer is solved, such as attention, returns its output of
the pass before. Both remember by batch, and `CurrentBatch` holds the number of the one that runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quant.calibration.ranks import number_of
from quant.calibration.solvers.rotation import matrix_of
from quant.calibration.walk.group import Group
from quant.kernels.linear.quant_linear import RunTimeParts
from quant.recipes.module_hooks import Substitute, has_hooks, take_hooks


@dataclass(eq=False)
class CurrentBatch:
    """The batch of calibration rows that runs through the block, for hooks and modules that it calls.

    Attributes:
        index: among the batches of this rank.
    """

    index: int = 0

    @property
    def number(self) -> int:
        """Its number among the batches of all ranks."""
        return number_of(self.index)


class StandIn(Substitute):
    """A solved layer while its block is being worked on: dense weights, and a memory of its outputs by batch.

    Args:
        original: the layer.
        dense: the quantized weight of the layer, `[out, in]`, in 16 or 32 bit.
        group: how its input is treated.
        batch: the number of the batch that runs.
        parts: the operations of the layer at run time besides its matmul.
    """

    def __init__(
        self, original: nn.Module, dense: torch.Tensor, group: Group, batch: CurrentBatch, parts: RunTimeParts
    ) -> None:
        super().__init__()
        self.original, self.dense, self.group = original, dense, group
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
        out = nn.functional.linear(self.group.round_input(x), self.dense)
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


class RememberedModules:
    """Modules that return their output of the pass before, until `forget`.

    Args:
        batch: the number of the batch that runs.
    """

    def __init__(self, batch: CurrentBatch) -> None:
        self.batch = batch
        self.modules: list[nn.Module] = []

    def add(self, module: nn.Module) -> None:
        """Runs `module` once more for each batch, and never again."""
        module.forward = _once_a_batch(module.forward, self.batch)
        self.modules.append(module)

    def forget(self) -> None:
        """Restores the original `forward` methods."""
        for module in self.modules:
            del module.forward
        self.modules.clear()


def _once_a_batch(forward: Callable[..., Any], batch: CurrentBatch) -> Callable[..., Any]:
    outputs: dict[int, Any] = {}

    def remembered(*args: Any, **kwargs: Any) -> Any:
        if batch.index not in outputs:
            outputs[batch.index] = forward(*args, **kwargs)
        return outputs[batch.index]

    return remembered
