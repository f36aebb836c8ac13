"""A module that keeps its class, its parameters and its hooks gets another `forward`, and later its own again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn


def has_own_forward(module: nn.Module) -> bool:
    """Returns whether something replaced the `forward` of this module alone, not of its class."""
    return "forward" in vars(module)


def replace_forward(module: nn.Module, function: Callable[..., Any], *arguments: Any) -> None:
    """Has a module compute `function(module, *arguments, ...)` when it is called."""
    # An entry of the instance, which copies and pickles of the module keep.
    vars(module)["forward"] = partial(function, module, *arguments)


def restore_forwards(model: nn.Module, function: Callable[..., Any]) -> None:
    """Undoes `replace_forward` by `function` in all modules of a model."""
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, partial) and forward.func is function:
            del vars(module)["forward"]
