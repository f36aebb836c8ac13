"""A `Prefetcher` copies the next step's tensors in a thread while the present step is worked on.

On the way to a GPU the bytes pass through pinned buffers and a stream of their own, so that the step waits for neither
the disk, nor the page cache, nor the bus:

    reader threads     file -> buffer 0    file -> buffer 1    file -> buffer 2    …   wait until its last copy is read
    stream                                 buffer 0 -> GPU     buffer 1 -> GPU     …

Readers begin with a buffer before the one before it is full: they are never idle while Python hands out work.

Where tensors are worked on where they are, the thread reads the pages of mapped files into memory.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch

from quant.base.mapped import in_memory, populate

Step = TypeVar("Step")

_BUFFERS, _BUFFER_BYTES = 4, 1 << 25
_BEING_FILLED = 2  # buffers at a time
_READERS = 8  # threads that fill a buffer: one brings about 3 GB/s from the page cache, a GPU takes 40


@dataclass(eq=False)
class Prefetcher:
    """Copies tensors to a device in a thread, until it is closed."""

    device: torch.device | None  # the device with its index; None leaves each tensor on its device
    whole: bool = True

    def __post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._copying: _CopyStream | None = None

    def steps(
        self, steps: Sequence[Step], tensors_of: Callable[[Step], Sequence[torch.Tensor]]
    ) -> Iterator[tuple[Step, list[torch.Tensor]]]:
        """Yields each step with its tensors on the device, while the next step's tensors are copied; then closes."""
        try:
            waiting = [self.fetch(tensors_of(step)) for step in steps[:1]]
            for following, step in enumerate(steps, 1):
                tensors = waiting.pop()()
                waiting += [self.fetch(tensors_of(next_step)) for next_step in steps[following : following + 1]]
                yield step, tensors
                tensors.clear()  # the caller's name for it lives until the next step, whose tensors have come by then
        finally:
            self.close()

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """Begins to copy tensors.

        Returns:
            A function that waits for the copies and returns them in order, to be called on the thread that uses them.
            A tensor that is on the device already is returned as it is, and so is a parameter that stays in its file.
        """
        if self.device is not None and self.device.type == "cuda":
            copies = self._thread.submit(self._to_gpu, tensors)
            return lambda: _for_current_stream(*copies.result())
        values = self._thread.submit(lambda: [in_memory(value_of(tensor, whole=self.whole)) for tensor in tensors])
        return lambda: [t if t.is_meta else t.to(self.device) for t in values.result()]

    def close(self) -> None:
        """Ends the threads."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._copying is not None:
            self._copying.readers.shutdown()

    def _to_gpu(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], torch.cuda.Event]:
        assert self.device is not None
        with torch.cuda.device(self.device):
            self._copying = copying = self._copying or _CopyStream(self.device)
            with torch.cuda.stream(copying.stream):
                values = (value_of(tensor, whole=self.whole) for tensor in tensors)
                copies = [t if t.is_meta else copying.copy(t) for t in values]
                copying.flush()
                return copies, copying.stream.record_event()


@dataclass(eq=False)
class _CopyStream:
    """A stream to a GPU and pinned buffers: some are filled while others are read."""

    device: torch.device

    def __post_init__(self) -> None:
        self.stream = torch.cuda.Stream(self.device)
        self.buffers = [
            torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=True, device="cpu") for _ in range(_BUFFERS)
        ]
        self.read = [torch.cuda.Event() for _ in range(_BUFFERS)]
        self.readers = ThreadPoolExecutor(_READERS, thread_name_prefix="reader")
        # Index of the buffer that is filled next.
        self.next_buffer = 0
        # Of each buffer that is being filled: its index, its place on the GPU, and the work of the readers.
        self.filling: deque[tuple[int, torch.Tensor, list[Future[None]]]] = deque()

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy on the GPU, for work on `stream` after `flush`."""
        if tensor.device.type != "cpu":
            return tensor.to(self.device)
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        source, target = (t.contiguous().flatten().view(torch.uint8) for t in (tensor, copy))
        for start in range(0, len(source), _BUFFER_BYTES):
            part = source[start : start + _BUFFER_BYTES]
            index, self.next_buffer = self.next_buffer, (self.next_buffer + 1) % _BUFFERS
            # The copy that last read this buffer must be over before it is filled again.
            self.read[index].synchronize()
            share = max(-(-len(part) // _READERS), 1 << 20)
            pieces = zip(part.split(share), self.buffers[index][: len(part)].split(share), strict=True)
            work = [self.readers.submit(_read, *pair) for pair in pieces]
            self.filling.append((index, target[start : start + len(part)], work))
            if len(self.filling) >= _BEING_FILLED:
                self._send()
        return copy

    def flush(self) -> None:
        """Queues the copies of all buffers that are still being filled."""
        while self.filling:
            self._send()

    def _send(self) -> None:
        """Waits until the first of the buffers is full, and queues its copy."""
        index, target, work = self.filling.popleft()
        for piece in work:
            piece.result()
        target.copy_(self.buffers[index][: len(target)], non_blocking=True)
        self.read[index].record(self.stream)


def _read(source: torch.Tensor, target: torch.Tensor) -> None:
    populate(source)
    ctypes.memmove(target.data_ptr(), source.data_ptr(), len(source))  # only on this thread


def _for_current_stream(copies: list[torch.Tensor], copied: torch.cuda.Event) -> list[torch.Tensor]:
    """Returns the copies, for work on the current stream, which waits for `copied` first."""
    for copy in (copy for copy in copies if copy.is_cuda):
        stream = torch.cuda.current_stream(copy.device)
        stream.wait_event(copied)
        copy.record_stream(stream)  # or the allocator would reuse its memory as soon as the copying stream is done
    return copies


def value_of(tensor: torch.Tensor, *, whole: bool = True) -> torch.Tensor:
    """Returns a tensor without its autograd history; a parameter that is still in its files is read (`stored_weights`).

    `whole` is as in `Prefetcher`.
    """
    stored = getattr(tensor, "stored", None)
    if stored is None or (stored.runs_alone and not whole):
        return tensor.detach()
    read: torch.Tensor = stored.tensor()
    return read
