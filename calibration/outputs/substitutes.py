"""Layers and tensors that take the place of a model's own while it runs, and leave it as it was.

A `Substitute` takes the place of a layer that is measured or solved. Modeling code reads more of a layer than its
weight: its width (`self.proj.in_features`), or a mark that somebody set.

`run_with` runs a module with other tensors. PyTorch's `functional_call` exchanges a tensor once for each of its names.
Where a module is held in several places (two blocks with one MLP), it takes the new tensor for the original one the
second time, and leaves it in the module (torch 2.11 to 2.15). So tensors have one name here, in the first place of
their module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.func import functional_call


class Substitute(nn.Module):
    """A module from which all attributes can be read that it lacks and that the layer in its place has."""

    def read_from(self, replaced: nn.Module) -> None:
        """Reads attributes from `replaced` from here on; PyTorch registers no parameter of a name that can be read."""
        # Past nn.Module.__setattr__: as a submodule the layer would appear in the state of the model.
        object.__setattr__(self, "_replaced", replaced)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            replaced = vars(self).get("_replaced")
            if replaced is None:
                raise
            return getattr(replaced, name)


def other_tensors(model: nn.Module, change: Callable[[torch.Tensor], torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """Returns `change(tensor)` for the parameters and buffers of a model, by name, where that is not None.

    A tensor of several modules is changed once, and has a name in each of them.

    Args:
        model: the model.
        change: gets a parameter or a buffer.
    """
    changed: dict[int, torch.Tensor | None] = {}
    named = {}
    for path, module in model.named_modules():  # each module once
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None:
                continue
            if id(tensor) not in changed:
                changed[id(tensor)] = change(tensor)
            other = changed[id(tensor)]
            if other is not None:
                named[f"{path}.{name}".lstrip(".")] = other
    return named


def run_with(module: nn.Module, tensors: Mapping[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    """Returns the result of `module` with `tensors` of `other_tensors` in place of its own."""
    return functional_call(module, dict(tensors), args, kwargs, tie_weights=False)
