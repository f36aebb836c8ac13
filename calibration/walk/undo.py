"""A caller's model is whole again after any exception: a solver's error, Ctrl-C, a full disk, NaN in the last layer.

Quantizing replaces modules and parameters, folds scales into norms, corrects biases and rotates matrices. Before it
begins, the parts of every module are noted by reference, and undoing puts them back. Matrices that change get a new
tensor, so a reference to the old one is enough; vectors (norms, biases, buffers) are written in place, so they are
copied, which is less than a thousandth of a model.

So the originals stay in memory until the end, next to the quantized weights. That is the price of a model that a caller
holds. The command `quantize` opens its model from files and does not pay it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

# Dictionaries of a module that are changed in place when a part of it is replaced.
_PARTS = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


@contextmanager
def restored_on_error(model: nn.Module) -> Iterator[None]:
    """Restores `model` if an exception leaves the block: modules, tensors, values, modes, attributes and config."""
    original = _Original(model)
    try:
        yield
    except BaseException:
        original.restore()
        raise


class _Original:
    """The parts of a model by reference."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = [(module, _attributes(module)) for module in model.modules()]
        tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
        self.tensors = [(t, t.data, t.requires_grad, _copy(t)) for t in tensors.values()]
        config = getattr(model, "config", None)
        self.config = (config, dict(vars(config))) if hasattr(config, "__dict__") else None

    def restore(self) -> None:
        """Puts everything back."""
        for module, attributes in self.modules:
            for name in _PARTS:
                # The dictionaries themselves stay: others may hold them.
                live, before = vars(module)[name], attributes[name]
                live.clear()
                live.update(before)
            attributes = {name: vars(module)[name] if name in _PARTS else attributes[name] for name in attributes}
            vars(module).clear()
            vars(module).update(attributes)
        with torch.inference_mode(False), torch.no_grad():
            for tensor, data, requires_grad, values in self.tensors:
                tensor.data = data
                tensor.requires_grad_(requires_grad)
                if values is not None and not _equal_bits(data, values):
                    data.copy_(values)
        if self.config is not None:
            config, attributes = self.config
            vars(config).clear()
            vars(config).update(attributes)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Returns all attributes of a module, with the dictionaries of its parts copied."""
    return {name: value.copy() if name in _PARTS else value for name, value in vars(module).items()}


def _copy(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns a copy of the values of a vector or a number."""
    return tensor.detach().clone() if tensor.dim() < 2 and not tensor.is_meta else None


def _equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns whether they are equal bit for bit, NaN included.

    A vector that did not change is never written, because it may belong to a file.
    """
    return torch.equal(*(each.detach().reshape(-1).contiguous().view(torch.uint8) for each in (a, b)))
