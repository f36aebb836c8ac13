"""Counters for kernels whose programs share a tile of the output: zeros, which every launch leaves as zeros.

The program that counts the last arrival finishes the tile, so no two launches under way at once may share a counter.
Launches of one stream run one after the other (a kernel that starts early touches no counter before the one ahead of
it has ended), so each stream has one buffer. A CUDA graph may be replayed beside any other work, so each capture has
a buffer of its own for each of its streams; it lies in the graph's memory, and the graph zeroes it once a replay.
"""

from __future__ import annotations

import ctypes

import torch

from quant.kernels.driver import check_status, cuda_driver

# Absent where PyTorch is built without CUDA. The public names are several calls of Python deep, at every launch.
_stream_of = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
_LEAST = 4096
# By device, stream, and whether it is captured: number of the capture, and the buffer.
_buffers: dict[tuple[int, int, bool], tuple[int, torch.Tensor]] = {}


def arrival_counters(x: torch.Tensor, count: int) -> torch.Tensor:
    """Zeros, int32, at least `count`, on the device of `x`, for a launch on its current stream."""
    device = x.get_device()
    stream, capture = 0, 0
    if device >= 0:
        assert _stream_of is not None and _is_capturing is not None
        stream = _stream_of(device)
        capture = _capture_number(stream) if _is_capturing() else 0
    place = (device, stream, capture > 0)
    held = _buffers.get(place)
    if held is None or held[0] != capture or held[1].numel() < count:
        held = capture, torch.zeros(max(count, _LEAST), dtype=torch.int32, device=x.device)
        _buffers[place] = held
    return held[1]


def _capture_number(stream: int) -> int:
    """The number that the driver gave to the capture that `stream` is in; it gives none twice."""
    status, number, nothing = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    error = cuda_driver().cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), nothing, nothing, nothing
    )
    check_status(error, "the capture of a CUDA graph")
    return number.value
