"""A `StepWriter` writes finished steps in threads, while the next step is worked on.

Each thread hashes and writes one step. A step's tensors are released as soon as its file is whole, and its callback
then gets the file. At most two steps wait at a time, which bounds their memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from quant.execution.steps.step_file import StepFile
from quant.formats.memory import trim_heap

_IN_FLIGHT = 2  # steps that are written at a time, each by a thread: SHA-256 is slower than a GPU solves


class StepWriter:
    """The threads that write the steps of one store."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_IN_FLIGHT, thread_name_prefix="writer")
        self._writing: list[Future[None]] = []
        # A guess, 500 MB/s, until the first large step has been timed.
        self._bytes_per_second = 5e8

    def put(
        self,
        start: Path,
        step: str,
        tensors: Mapping[str, torch.Tensor],
        record: Any,
        done: Callable[[StepFile], None],
    ) -> None:
        """Writes a step in a thread, which then calls `done` with its file. Waits while two others are written.

        Args:
            start, step, tensors, record: as in `StepFile.write`.
            done: called when the file is whole, and the tensors are released unless the caller holds them.

        Raises:
            OSError: an earlier step could not be written.
        """
        while len(self._writing) >= _IN_FLIGHT:
            self._writing.pop(0).result()
        own = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        devices = {tensor.device for tensor in own.values() if tensor.is_cuda}
        # A writer thread has a stream of its own: without the events it could copy a tensor before its kernel has run.
        computed = [torch.cuda.current_stream(device).record_event() for device in devices]
        self._writing.append(self._threads.submit(self._write, start, step, own, record, computed, done))

    def _write(
        self,
        start: Path,
        step: str,
        own: dict[str, torch.Tensor],
        record: Any,
        computed: Sequence[torch.cuda.Event],
        done: Callable[[StepFile], None],
    ) -> None:
        for event in computed:
            event.synchronize()
        started = time.perf_counter()
        file = StepFile.write(start, step, own, record)
        nbytes = sum(tensor.nbytes for tensor in own.values())
        # Small files time the file system's latency instead of its bandwidth.
        if nbytes > 1 << 24:
            self._bytes_per_second = nbytes / (time.perf_counter() - started)
        # Drops the originals before their maps take over, so that `trim_heap` finds their memory free.
        own.clear()
        done(file)
        # The heap is locked meanwhile; a run on a GPU has left nothing there.
        if not computed:
            trim_heap()

    def seconds(self, nbytes: int) -> float:
        """Returns the seconds that `nbytes` take to write at the speed that was last measured."""
        return nbytes / self._bytes_per_second

    def flush(self) -> None:
        """Waits until everything is written; OSError if a step could not be."""
        while self._writing:
            self._writing.pop(0).result()

    def close(self, *, unfinished: bool) -> None:
        """Ends the threads after the steps that they write, and with `unfinished` after those that wait too."""
        self._threads.shutdown(wait=True, cancel_futures=not unfinished)
