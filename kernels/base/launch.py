"""`CachedLaunch` launches a Triton kernel again with arguments of the same kinds, past Triton's argument inspection.

At every call Triton determines for every argument whether it is a number, a multiple of 16, or a tensor of which dtype,
and finds the compiled kernel by the answers: 10 to 40 µs of host time, as much as a small kernel runs. Here the answers
of an earlier call are recognized by dtypes, by integers, and by whether all pointers are aligned.

The first call of a kind waits while Triton compiles its kernel. A server does that beforehand: within `recorded()`
launches are noted, not made, each kernel once, and can then be compiled (`quant/vllm_plugin/warm_up.py`).

Every launch says `enable_fp_fusion`, whose default changes in Triton 3.10: without it the same kernel would give other
bits there. True contracts a product and a sum to one rounding, as all results were measured; False is for kernels whose
oracle rounds every product.

Kernels whose programs share an output tile count arrivals in buffers of zeros, and every launch leaves them zero. The
program that counts the last arrival finishes the tile, so two launches that run at once must not share a counter.
Launches on one stream run one after the other (a kernel that starts early touches no counter before the kernel ahead
of it has ended), so each stream has one buffer. A CUDA graph may be replayed while any other work runs, so each
capture has buffers of its own, one for each stream in it. The buffers of a device are rows of one table, which is made
when a weight arrives there: memory that is allocated while a graph is captured, or while torch.compile prepares one,
belongs to that graph.
"""

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, lru_cache, partial, wraps
from threading import Lock
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor


def check_tensors(
    where: str, x: Tensor, expected: Mapping[str, tuple[Tensor | None, Sequence[int], torch.dtype | None]]
) -> None:
    """Raises ValueError unless tensors have their shape, a dtype where one is named, x's device, and no gaps."""
    for name, (tensor, shape, dtype) in expected.items():
        if tensor is None:
            continue
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{where}: {name} has shape {list(tensor.shape)}, expected {list(shape)}")
        if dtype is not None and tensor.dtype is not dtype:
            raise ValueError(f"{where}: {name} is {tensor.dtype}, expected {dtype}")
        if tensor.device != x.device:
            raise ValueError(f"{where}: {name} is on {tensor.device}, x on {x.device}")
        if not tensor.is_contiguous():
            raise ValueError(f"{where}: {name} is not contiguous (strides {tensor.stride()}); call .contiguous() once")


@cache
def cuda_driver() -> Any:
    """Returns the driver's library; ValueError where this machine has none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ValueError(f"no CUDA driver on this machine: {error}") from error


def check_status(status: int, action: str, log: str = "") -> None:
    """Raises ValueError with the action and the driver's error text, where `status` is an error."""
    if status:
        text = ctypes.c_char_p()
        cuda_driver().cuGetErrorString(status, ctypes.byref(text))
        reason = (text.value or b"unknown").decode()
        raise ValueError(f"{action}: CUDA error {status}: {reason}{'; ' + ' '.join(log.split()) if log else ''}")


# A PyTorch without CUDA has neither. The public functions would add several Python calls to each launch.
_stream_of = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
_ROWS, _LENGTH = 128, 4096
# By device: the table, and the rows of it that no stream and no capture has yet.
_tables: dict[int, Tensor] = {}
_free: dict[int, list[Tensor]] = {}
# By device, stream, and whether it is captured: number of the capture, and the buffer.
_buffers: dict[tuple[int, int, bool], tuple[int, Tensor]] = {}


def arrival_counters(x: Tensor, count: int) -> Tensor:
    """Returns zeros, int32, at least `count`, on the device of `x`, for a launch on its current stream."""
    device = x.get_device()
    # Of launches that are only noted (`recorded`) no counter is read; the device "meta" has the number of a CPU's.
    if x.is_meta:
        return torch.empty(count, dtype=torch.int32, device=x.device)
    # A buffer for each stream, since launches on two streams may count at the same time.
    stream, capture = 0, 0
    if device >= 0:
        assert _stream_of is not None and _is_capturing is not None
        stream = _stream_of(device)
        capture = _capture_number(stream) if _is_capturing() else 0
    key = (device, stream, capture > 0)
    held = _buffers.get(key)
    if held is None or held[0] != capture or held[1].numel() < count:
        held = _buffers[key] = capture, _zeros(x, count, captured=capture > 0)
    return held[1]


def reserve(x: Tensor, *, again: bool = False) -> None:
    """Makes the table of buffers of the GPU that `x` is on, if there is none; nothing on other devices."""
    # With `again` the table is zeroed, which must not happen while a kernel counts: a server says so for weights that
    # arrive, because one that sleeps may give away the table's memory together with its weights'.
    if x.is_cuda and x.get_device() not in _tables:
        _make_table(x)
    elif x.is_cuda and again:
        torch.cuda.synchronize(x.device)
        _tables[x.get_device()].zero_()
        torch.cuda.synchronize(x.device)


def _make_table(x: Tensor) -> None:
    table = torch.zeros(_ROWS, _LENGTH, dtype=torch.int32, device=x.device)
    torch.cuda.synchronize(x.device)  # other streams read it without waiting
    _tables[x.get_device()], _free[x.get_device()] = table, list(table)


def _zeros(x: Tensor, count: int, *, captured: bool) -> Tensor:
    if not captured and x.is_cuda and x.get_device() not in _tables:
        _make_table(x)
    # Rows of the table are never given back: a stream keeps its buffer as long as the process runs.
    free = _free.get(x.get_device())
    if free and count <= _LENGTH:
        return free.pop()
    # In the memory of a graph that is captured, these are zeroed once a replay.
    return torch.zeros(max(count, _LENGTH), dtype=torch.int32, device=x.device)


def _capture_number(stream: int) -> int:
    """Returns the number that the driver gave to the capture that `stream` is in; it gives none twice."""
    status, number, null = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    error = cuda_driver().cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), null, null, null
    )
    check_status(error, "the capture of a CUDA graph")
    return number.value


_P = ParamSpec("_P")
_Value = TypeVar("_Value")


def on_its_gpu(function: Callable[_P, _Value]) -> Callable[_P, _Value]:
    """Returns `function` as called on the GPU of its first tensor: Triton launches on the current GPU, no other."""

    @wraps(function)
    def on_gpu(*args: _P.args, **kwargs: _P.kwargs) -> _Value:
        tensors = (x[0] if isinstance(x, list) else x for x in args)
        with torch.cuda.device_of(next(x for x in tensors if isinstance(x, Tensor))):
            return function(*args, **kwargs)

    return on_gpu


_LOCKS: dict[tuple[int, str], Lock] = {}
_ALIGNMENT = 16  # bytes, of which Triton compiles kernels that know
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
    """Yields a table, in which launches of this thread are noted in place of being made."""
    # Arguments may be on the device "meta". Launches that `CachedLaunch` has made before are made again, and not noted.
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
        if isinstance(argument, Tensor):
            parts.append((argument.dtype, argument.data_ptr() % _ALIGNMENT == 0))
        elif type(argument) is int:
            known = () if parameter.do_not_specialize else (argument == 1, argument % 16 == 0)
            parts.append((argument.bit_length() > 31, *known))
        elif argument is None or isinstance(argument, float):
            parts.append(type(argument))
        else:
            parts.append((argument.base.dtype, tuple(argument.block_shape), repr(argument.layout)))
    return tuple(parts)


class CachedLaunch:
    """`kernel[grid](*arguments, **constants)`, again and again; descriptors must be of the same kind at each call."""

    # `constants` are all compile-time constants of the kernel, which come last, and options such as `num_warps`.

    __slots__ = ("_after", "_constants", "_device", "_grid", "_kernel", "_launches")

    def __init__(self, kernel: Any, grid: Sequence[int], constants: Mapping[str, Any]) -> None:
        self._kernel, self._grid, self._constants = kernel, grid, {"enable_fp_fusion": True, **constants}
        # Under Triton's interpreter there may be no GPU, or a PyTorch without CUDA; both count as GPU 0.
        self._device: Callable[[], int] = torch._C._cuda_getDevice if torch.cuda.is_available() else int
        self._after: list[Any] = []
        self._launches = BoundedTable[Callable[..., None]](64)

    def __call__(self, *arguments: Any) -> None:
        """Launches on the current stream; arguments are tensors, descriptors, integers, floats and None."""
        # The OR of all addresses is a multiple of 16 only if each of them is.
        addresses, parts, first, device = 0, list[Any](), None, self._device()
        for argument in arguments:
            if isinstance(argument, Tensor):
                addresses |= argument.data_ptr()
                parts.append(argument.dtype)
                first = argument if first is None else first
            elif argument is None or type(argument) is int:
                parts.append(argument)
        if first is not None and first.get_device() not in (device, -1):
            return on_its_gpu(self)(*arguments)
        # A compiled kernel is loaded into one GPU.
        key = (addresses % _ALIGNMENT, device, *parts)
        launch = self._launches.get(key)
        if launch is not None:
            launch(*arguments, *self._after)
            return
        if (variants := _record.get()) is not None:
            key = _variant_of(self._kernel, arguments, self._constants)
            variants[key] = partial(self._kernel.warmup, *arguments, grid=self._grid, **self._constants)
            return
        # One thread compiles, others wait.
        with _LOCKS.setdefault((id(self._kernel), repr(self._constants)), Lock()):
            compiled = self._kernel[self._grid](*arguments, **self._constants)
        # Unaligned pointers stay with Triton's own launch, which compiles a variant for them.
        if compiled is not None and not key[0]:  # Triton's interpreter compiles nothing
            self._after = [self._constants[name] for name in self._kernel.arg_names if name in self._constants]
            self._launches[key] = compiled[(*self._grid, 1, 1)[:3]]


@lru_cache(maxsize=4096)
def cached_launch(kernel: Any, grid: tuple[int, ...], **constants: Any) -> CachedLaunch:
    """Returns the `CachedLaunch` of these arguments, made once: for functions that are called with many shapes."""
    return CachedLaunch(kernel, grid, constants)
