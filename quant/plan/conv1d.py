"""GPT-2's `Conv1D` is a linear layer whose weight is stored `[in, out]`; solvers work on an `nn.Linear` in its place.

The linear layer's weight is a view of the same memory, so nothing is copied, and a change of one is a change of both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from quant.calibration.prefetch import value_of
from quant.recipes.module_hooks import take_hooks
from quant.recipes.plain_layers import is_conv1d


@contextmanager
def as_linears(model: nn.Module) -> Iterator[None]:
    """Replaces the `Conv1D` modules of `model` by linear layers while open, then restores the remaining ones."""
    for path, module in list(model.named_modules()):
        if is_conv1d(module):
            _put(model, path, _linear(module))
    try:
        yield
    finally:
        for path, module in list(model.named_modules()):
            if isinstance(module, nn.Linear) and hasattr(module, "stands_for"):
                original: Any = module.stands_for[0]  # type: ignore[index]
                # A solver may have replaced the weight by one in new memory, so the view of the start no longer holds.
                original.weight.data, original.bias = module.weight.data.t(), module.bias
                _put(model, path, original)


def _linear(module: nn.Module) -> nn.Linear:
    assert isinstance(module.weight, nn.Parameter)
    weight, trained = value_of(module.weight), module.weight.requires_grad
    module.weight = nn.Parameter(weight, requires_grad=trained)
    # The constructor would fill a matrix with random numbers, which takes seconds for a large layer and is thrown away.
    with torch.device("meta"):
        linear = nn.Linear(*weight.shape)
    linear.weight, linear.bias = nn.Parameter(weight.t(), requires_grad=trained), module.bias  # type: ignore[assignment]
    linear.stands_for = (module,)  # type: ignore[assignment]  # in a tuple, or it would be a submodule
    take_hooks(linear, module)
    return linear.train(module.training)


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, last = path.rpartition(".")
    setattr(model.get_submodule(parent), last, module)
