"""A second device that any machine has, to find tensors on two devices without a GPU.

PyTorch lets a device be written in Python. This one computes on the CPU, with tensors that say they are elsewhere. As
on a GPU, an operation on tensors of two devices is an error unless it copies, or those of the CPU are scalars.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, reduce
from typing import Any

import torch
from torch.utils._device import _device_constructors
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "twin"
ON_SECOND_DEVICE = "BLOCKSCALE_TESTS_ON_SECOND_DEVICE"
"""Environment variable that adds the tests which run on this device."""
_MIXED = {"aten::copy_", "aten::_to_copy", "aten::index", "aten::index_put_", "aten::_index_put_impl_"}
# These size the tensor that they fill, which a wrapped tensor cannot follow.
_MAKERS = ("arange", "arange.start", "arange.start_step", "linspace", "logspace", "eye", "eye.m", "randperm")


class SecondTensor(torch.Tensor):
    """A tensor on the second device; `held` is its data, on the CPU."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> SecondTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device=torch.device(NAME, 0),
        )  # fmt: skip
        made.held = held
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.data_ptr, torch.Tensor.tolist):
            return func(args[0].held)
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        if func == torch.Tensor.data.__set__:
            args[0].held = args[1].held
        return out

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(op, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = SecondTensor(self.held.clone()).requires_grad_(self.requires_grad)
        copied.__dict__.update({k: v for k, v in self.__dict__.items() if k != "held"})
        return memo.setdefault(id(self), copied)


def _run(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    owners: dict[int, torch.Tensor] = {}
    tensors: list[torch.Tensor] = []

    def bare(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            if isinstance(value, SecondTensor):
                owners[id(value.held)] = value
                return value.held
        elif isinstance(value, torch.device) and value.type == NAME:
            return torch.device("cpu")
        return value

    held_args = _mapped(bare, tuple(args))
    held_kwargs = {key: _mapped(bare, value) for key, value in kwargs.items()}
    here = [x for x in tensors if not isinstance(x, SecondTensor) and x.dim()]
    if here and len(here) < len(tensors) and op._schema.name not in _MIXED:
        raise RuntimeError(f"{op}: tensors on two devices, one of the CPU is {list(here[0].shape)}")
    target = kwargs.get("device")
    home = target is not None and torch.device(target).type == "cpu"
    if op._schema.name == "aten::copy_" and not isinstance(args[0], SecondTensor):
        home = True

    def wrapped(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or home:
            return value
        owner = owners.get(id(value))
        if owner is None:
            return SecondTensor(value)
        if owner.shape != value.shape:  # such as `squeeze_`
            owner.data = SecondTensor(value)
        return owner

    return _mapped(wrapped, op(*held_args, **held_kwargs))


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Applies a function to a value, or to those in a list or tuple, in a fifth of the time of PyTorch's `tree_map`."""
    if type(value) in (list, tuple):
        return type(value)(_mapped(function, each) for each in value)
    return function(value)


@cache
def second_device() -> torch.device:
    """The device; it is registered when first asked for."""
    _setup_privateuseone_for_python_backend(NAME)
    second_device.makers = makers = torch.library.Library("aten", "IMPL")  # type: ignore[attr-defined]
    for name in _MAKERS:
        op = reduce(getattr, (*name.split("."), "default")[:2], torch.ops.aten)
        makers.impl(name, lambda *args, op=op, **kwargs: _run(op, args, kwargs), "PrivateUse1")
    second_device.library = torch.library.Library("_", "IMPL")  # type: ignore[attr-defined]
    second_device.library.fallback(lambda op, *args, **kwargs: _run(op, args, kwargs), "PrivateUse1")  # type: ignore[attr-defined]
    # PyTorch keeps the set of constructors that `with torch.device(…)` applies to once it is asked for. Made after
    # the next lines it lacks `torch.tensor`: transformers then thinks that it builds no model on the meta device, and
    # leaves the buffers of rotary embeddings as the allocator gave them.
    _device_constructors()
    # The constructor leaves out what is written in Python.
    plain = torch.tensor
    torch.tensor = lambda data, *, device=None, **rest: plain(data, **rest).to(device)  # type: ignore[assignment]
    return torch.device(NAME, 0)
