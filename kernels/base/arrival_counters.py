"""Kernels whose programs share an output tile count arrivals in buffers of zeros, and every launch leaves them zero.

The program that counts the last arrival finishes the tile, so two launches that run at once must not share a counter.
Launches on one stream run one after the other (a kernel that starts early touches no counter before the kernel ahead
of it has ended), so each stream has one buffer. A CUDA graph may be replayed while any other work runs, so each
capture has buffers of its own, one for each stream in it.

The buffers of a device are rows of one table, which is made when a weight arrives there: memory that is allocated
while a graph is captured, or while torch.compile prepares one, belongs to that graph.
"""

from __future__ import annotations

import ctypes

import torch

from quant.export.tensorrt.cuda_driver import check_status, cuda_driver

# A PyTorch without CUDA has neither. The public functions would add several Python calls to each launch.
_stream_of = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
_ROWS, _LENGTH = 128, 4096
# By device: the table, and the rows of it that no stream and no capture has yet.
_tables: dict[int, torch.Tensor] = {}
_free: dict[int, list[torch.Tensor]] = {}
# By device, stream, and whether it is captured: number of the capture, and the buffer.
_buffers: dict[tuple[int, int, bool], tuple[int, torch.Tensor]] = {}


def arrival_counters(x: torch.Tensor, count: int) -> torch.Tensor:
    """Returns zeros, int32, at least `count`, on the device of `x`, for a launch on its current stream."""
    device = x.get_device()
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


def reserve(x: torch.Tensor) -> None:
    """Makes the table of buffers of the GPU that `x` is on, or zeros it again; nothing on other devices.

    A server calls it for weights that arrive, while none of its kernels runs. It is zeroed again because a server that
    sleeps may give away the table's memory together with its weights'.
    """
    if not x.is_cuda:
        return
    if x.get_device() in _tables:
        _tables[x.get_device()].zero_()
        torch.cuda.synchronize(x.device)
    else:
        _make_table(x)


def _make_table(x: torch.Tensor) -> None:
    table = torch.zeros(_ROWS, _LENGTH, dtype=torch.int32, device=x.device)
    torch.cuda.synchronize(x.device)  # other streams read it without waiting
    _tables[x.get_device()], _free[x.get_device()] = table, list(table)


def _zeros(x: torch.Tensor, count: int, *, captured: bool) -> torch.Tensor:
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
