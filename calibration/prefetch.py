"""`brought` has tensors on a device before they are needed there: a thread brings those of the next step meanwhile.

On the way to a GPU the bytes pass through two pinned buffers and a stream of their own, so that neither the disk, nor
the page cache, nor the bus is waited for. Where tensors are worked on where they are, the thread brings the pages of
mapped files into memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from quant.formats.mapped import in_memory, populate

Step = TypeVar("Step")

_BUFFER_BYTES = 1 << 26
_READERS = 8  # threads that fill a buffer: one brings about 3 GB/s from the page cache, a GPU takes 40


class Carrier:
    """Brings tensors to a device on a thread, until it is closed.

    Args:
        device: with its index; None stands for where each tensor is.
        whole: reads parameters that are still in their files, also experts that can be run one by one from there.
    """

    def __init__(self, device: torch.device | None, *, whole: bool = True) -> None:
        self.device, self.whole = device, whole
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="carrier")
        self._lane: _Lane | None = None

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """Begins to bring tensors.

        Returns:
            A function that waits for them and gives them in order, to be called on the thread that uses them. What is
            there already is given as it is, and so are parameters that stay in their files.
        """
        if self.device is not None and self.device.type == "cuda":
            carried = self._thread.submit(self._to_gpu, tensors)
            return lambda: _handed_over(*carried.result())
        coming = self._thread.submit(lambda: [in_memory(value_of(tensor, whole=self.whole)) for tensor in tensors])
        return lambda: [t if t.is_meta else t.to(self.device) for t in coming.result()]

    def close(self) -> None:
        """Ends the threads."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._lane is not None:
            self._lane.readers.shutdown()

    def _to_gpu(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], torch.cuda.Event]:
        assert self.device is not None
        with torch.cuda.device(self.device):
            self._lane = lane = self._lane or _Lane(self.device)
            with torch.cuda.stream(lane.stream):
                values = (value_of(tensor, whole=self.whole) for tensor in tensors)
                return [t if t.is_meta else lane.copy(t) for t in values], lane.stream.record_event()


class _Lane:
    """A stream to a GPU and two pinned buffers: one is filled while the other is read."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.buffers = [torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self.read = [torch.cuda.Event(), torch.cuda.Event()]
        self.readers = ThreadPoolExecutor(_READERS, thread_name_prefix="reader")
        self.turn = 0

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the GPU, for work on the lane's stream."""
        if tensor.device.type != "cpu":
            return tensor.to(self.device)
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        source, target = (t.contiguous().flatten().view(torch.uint8) for t in (tensor, copy))
        for start in range(0, len(source), _BUFFER_BYTES):
            part = source[start : start + _BUFFER_BYTES]
            buffer, read = self.buffers[self.turn][: len(part)], self.read[self.turn]
            self.turn = 1 - self.turn
            read.synchronize()
            share = max(-(-len(part) // _READERS), 1 << 20)
            list(self.readers.map(_read, part.split(share), buffer.split(share)))
            target[start : start + len(part)].copy_(buffer, non_blocking=True)
            read.record(self.stream)
        return copy


def _read(source: torch.Tensor, target: torch.Tensor) -> None:
    populate(source)
    ctypes.memmove(target.data_ptr(), source.data_ptr(), len(source))  # on this thread alone


def _handed_over(copies: list[torch.Tensor], ready: torch.cuda.Event) -> list[torch.Tensor]:
    """The copies, for work on the current stream."""
    for copy in (copy for copy in copies if copy.is_cuda):
        stream = torch.cuda.current_stream(copy.device)
        stream.wait_event(ready)
        copy.record_stream(stream)
    return copies


def brought(
    steps: Sequence[Step],
    tensors_of: Callable[[Step], Sequence[torch.Tensor]],
    device: torch.device | None,
    *,
    whole: bool = True,
) -> Iterator[tuple[Step, list[torch.Tensor]]]:
    """Gives each step with its tensors on `device`, and has those of the next one brought meanwhile.

    `whole` is as of `Carrier`.
    """
    carrier = Carrier(device, whole=whole)
    try:
        coming = [carrier.fetch(tensors_of(step)) for step in steps[:1]]
        for place, step in enumerate(steps, 1):
            tensors = coming.pop()()
            coming += [carrier.fetch(tensors_of(following)) for following in steps[place : place + 1]]
            yield step, tensors
            tensors.clear()  # the caller's name for it lives until the next step, whose tensors are here by then
    finally:
        carrier.close()


def value_of(tensor: torch.Tensor, *, whole: bool = True) -> torch.Tensor:
    """A tensor without its history. A parameter that is still in its files (`stored_weights`) is read here.

    `whole` is as of `Carrier`.
    """
    stored = getattr(tensor, "stored", None)
    if stored is None or (stored.runs_alone and not whole):
        return tensor.detach()
    read: torch.Tensor = stored.tensor()
    return read
