"""A `StandIn` remembers a solved layer's outputs, because the passes over a block repeat each other's beginnings.

A solved layer becomes a `StandIn`; a module in which every layer is solved, such as attention, returns what it gave in
the pass before. Both remember by batch, and the clock, a cell with the number of the current batch, says which.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from quant.calibration.solvers.rotation import matrix_of
from quant.calibration.walk.group import Group
from quant.kernels.linear.modules import RunTimeParts


class StandIn(nn.Module):
    """A solved layer while its block is being worked on: dense weights, and a memory of its outputs by batch.

    Args:
        original: the layer.
        weight: what it became, dense.
        group: how its input is treated.
        clock: a cell with the number of the current batch.
        parts: what it does at run time beside its matmul.
    """

    def __init__(
        self,
        original: nn.Module,
        weight: torch.Tensor,
        group: Group,
        clock: list[int],
        parts: RunTimeParts,
    ) -> None:
        super().__init__()
        self.parts = parts
        self.original = original
        self.dense = weight
        self.group = group
        self.clock = clock
        self.keeps = group.calls == 1
        self.outputs: dict[int, torch.Tensor] = {}

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias of the layer, `[out]`, corrected for rounding where that was done; None where it has none."""
        return getattr(self.original, "bias", None)

    @property
    def weight(self) -> torch.Tensor:
        """The matrix `[out, in]` that the input is multiplied by, for modeling code that reads it or its dtype."""
        return matrix_of(self.dense, self.parts)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """The output without its bias."""
        out = nn.functional.linear(self.group.round_input(x), self.dense)
        branch = self.parts.branch(self.parts.input(x)) if self.parts.lowrank else None
        return out if branch is None else out + branch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.clock[0] in self.outputs:
            return self.outputs[self.clock[0]] if self.keeps else self.outputs.pop(self.clock[0])
        out = self.product(x)
        out = out if self.bias is None else out + self.bias
        if self.keeps:
            self.outputs[self.clock[0]] = out
        return out


def weight_of(block: nn.Module, name: str) -> torch.Tensor:
    """The weight of the module called `name`."""
    weight = block.get_submodule(name).weight
    assert isinstance(weight, torch.Tensor)
    return weight


class RememberedModules:
    """Modules that return their output of the pass before, until `forget`.

    Args:
        clock: a cell with the number of the current batch.
    """

    def __init__(self, clock: list[int]) -> None:
        self.clock = clock
        self.modules: list[nn.Module] = []

    def add(self, module: nn.Module) -> None:
        """Runs `module` once more for each batch, and never again."""
        module.forward = _once_a_batch(module.forward, self.clock)
        self.modules.append(module)

    def forget(self) -> None:
        """Restores the original `forward` methods."""
        for module in self.modules:
            del module.forward
        self.modules.clear()


def _once_a_batch(forward: Callable[..., Any], clock: list[int]) -> Callable[..., Any]:
    found: dict[int, Any] = {}

    def remembered(*args: Any, **kwargs: Any) -> Any:
        if clock[0] not in found:
            found[clock[0]] = forward(*args, **kwargs)
        return found[clock[0]]

    return remembered
