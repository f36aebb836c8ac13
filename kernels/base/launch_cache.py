"""`CachedLaunch` launches a Triton kernel again with arguments of the same kinds, past Triton's argument inspection.

At every call Triton determines for every argument whether it is a number, a multiple of 16, or a tensor of which dtype,
and finds the compiled kernel by the answers: 10 to 40 µs of host time, as much as a small kernel runs. Here the answers
of an earlier call are recognized by dtypes, by integers, and by whether all pointers are aligned.

The first call of a kind waits while Triton compiles its kernel. A server does that beforehand: within `recorded()`
launches are noted, not made, each kernel once, and can then be compiled (`quant/vllm_plugin/warm_up.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from threading import Lock
from typing import Any, TypeVar

import torch

_LOCKS: dict[tuple[int, str], Lock] = {}
_ALIGNMENT = 16  # bytes, of which Triton compiles kernels that know
_Value = TypeVar("_Value")
Variants = dict[Any, Callable[[], object]]
"""By all that Triton tells compiled kernels apart by: a function that compiles one."""
_record: ContextVar[Variants | None] = ContextVar("record of launches", default=None)


class BoundedTable(dict[Any, _Value]):
    """Prepared launches by all that they depend on. A table that has `most` of them starts again with none.

    Programs have few kinds of launches, so only one with ever new shapes fills a table, and hardly repeats them.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: Any, value: _Value) -> None:
        if len(self) >= self.most:
            self.clear()
        super().__setitem__(key, value)


@contextmanager
def recorded() -> Iterator[Variants]:
    """Yields a table, in which launches of this thread are noted in place of being made.

    Arguments may be on the device "meta". Launches that `CachedLaunch` has made before are made again, and not noted.
    """
    variants: Variants = {}
    token = _record.set(variants)
    try:
        yield variants
    finally:
        _record.reset(token)


def _variant_of(kernel: Any, arguments: Sequence[Any], constants: Mapping[str, Any]) -> Any:
    """Returns what Triton compiles a kernel for: constants, dtypes, tensor maps, and what it knows of integers."""
    parts: list[Any] = [id(kernel), repr(constants)]
    for parameter, argument in zip(kernel.params, arguments, strict=False):
        if isinstance(argument, torch.Tensor):
            parts.append((argument.dtype, argument.data_ptr() % _ALIGNMENT == 0))
        elif type(argument) is int:
            known = () if parameter.do_not_specialize else (argument == 1, argument % 16 == 0)
            parts.append((argument.bit_length() > 31, *known))
        elif argument is None or isinstance(argument, float):
            parts.append(type(argument))
        else:
            parts.append((argument.base.dtype, tuple(argument.block_shape), repr(argument.layout)))
    return tuple(parts)


def _lock_of(kernel: Any, constants: Mapping[str, Any]) -> Lock:
    """Returns the lock under which a kernel is compiled with these constants: one thread compiles, others wait."""
    return _LOCKS.setdefault((id(kernel), repr(constants)), Lock())


class CachedLaunch:
    """`kernel[grid](*arguments, **constants)`, again and again.

    Descriptors must be of the same kind at each call.

    Args:
        kernel: a Triton or Gluon kernel, whose compile-time constants come last.
        grid: the grid of programs, one to three numbers.
        constants: all compile-time constants of the kernel, and options such as `num_warps`.
    """

    __slots__ = ("_after", "_constants", "_device", "_grid", "_kernel", "_launches")

    def __init__(self, kernel: Any, grid: Sequence[int], constants: Mapping[str, Any]) -> None:
        self._kernel, self._grid, self._constants = kernel, grid, constants
        # Under Triton's interpreter there may be no GPU, or a PyTorch without CUDA; both count as GPU 0.
        self._device: Callable[[], int] = torch._C._cuda_getDevice if torch.cuda.is_available() else int
        self._after: list[Any] = []
        self._launches = BoundedTable[Callable[..., None]](64)

    def __call__(self, *arguments: Any) -> None:
        """Launches on the current stream; arguments are tensors, descriptors, integers, floats and None."""
        # The OR of all addresses is a multiple of 16 only if each of them is.
        addresses, parts = 0, list[Any]()
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                addresses |= argument.data_ptr()
                parts.append(argument.dtype)
            elif argument is None or type(argument) is int:
                parts.append(argument)
        # A compiled kernel is loaded into one GPU.
        key = (addresses % _ALIGNMENT, self._device(), *parts)
        launch = self._launches.get(key)
        if launch is not None:
            launch(*arguments, *self._after)
            return
        if (variants := _record.get()) is not None:
            key = _variant_of(self._kernel, arguments, self._constants)
            variants[key] = partial(self._kernel.warmup, *arguments, grid=self._grid, **self._constants)
            return
        with _lock_of(self._kernel, self._constants):
            compiled = self._kernel[self._grid](*arguments, **self._constants)
        # Unaligned pointers stay with Triton's own launch, which compiles a variant for them.
        if compiled is not None and not key[0]:  # Triton's interpreter compiles nothing
            self._after = [self._constants[name] for name in self._kernel.arg_names if name in self._constants]
            self._launches[key] = compiled[(*self._grid, 1, 1)[:3]]
