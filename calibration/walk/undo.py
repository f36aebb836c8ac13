"""A caller's model is whole again after any exception: a solver's error, Ctrl-C, a full disk, NaN in the last layer.

Quantizing replaces modules and parameters, folds scales into norms, corrects biases and rotates matrices. Before it
begins, the parts of every module are noted by reference, and undoing puts them back. Matrices that change get a new
tensor, so a reference to the old one is enough; vectors (norms, biases, buffers) are written in place, so they are
copied, which is less than a thousandth of a model.

So the originals stay in memory until the end, next to the quantized weights. That is the price of a model that a caller
holds. The command `quantize` opens its model from files and does not pay it. A trial of a recipe on some blocks is
undone in the same way.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

# Dictionaries of a module that are changed in place when a part of it is replaced.
_PARTS = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


@contextmanager
def restored_on_error(model: nn.Module) -> Iterator[None]:
    """Restores `model` if an exception leaves the block: modules, tensors, values, modes, attributes and config."""
    restore = _noted(model)
    try:
        yield
    except BaseException:
        restore()
        raise


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Restores `model` in the same way when the block ends, with or without an exception: a trial leaves no trace."""
    restore = _noted(model)
    try:
        yield
    finally:
        restore()


def _noted(model: nn.Module) -> Callable[[], None]:
    """Notes the parts of every module of `model`, and returns the function that puts them back."""
    modules = [
        (module, {name: value.copy() if name in _PARTS else value for name, value in vars(module).items()})
        for module in model.modules()
    ]
    originals = [
        # Vectors and numbers are copied, for they may be written in place.
        (t, t.data, t.requires_grad, t.detach().clone() if t.dim() < 2 and not t.is_meta else None)
        for t in {id(t): t for t in (*model.parameters(), *model.buffers())}.values()
    ]
    config = getattr(model, "config", None)
    settings = dict(vars(config)) if hasattr(config, "__dict__") else None

    def restore() -> None:
        for module, attributes in modules:
            for name in _PARTS:
                # The dictionaries themselves stay: others may hold them.
                live, before = vars(module)[name], attributes[name]
                live.clear()
                live.update(before)
                attributes[name] = live
            vars(module).clear()
            vars(module).update(attributes)
        with torch.no_grad():
            for tensor, data, requires_grad, values in originals:
                tensor.data = data
                tensor.requires_grad_(requires_grad)
                # A vector that did not change, bit for bit, is never written, because it may belong to a file.
                if values is not None and not torch.equal(_bits(data), _bits(values)):
                    data.copy_(values)
        if settings is not None:
            vars(config).clear()
            vars(config).update(settings)

    return restore


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)
