"""`Replays` rounds weights of one shape by replaying a CUDA graph: the blocks of a model repeat the same launches.

GPTQ launches a dozen kernels for every 128 inputs. Of an 8B model's block that is 3,000, which take the host longer
than the GPU. So the first weight of a shape is rounded launch by launch, at the second one the launches are recorded,
and from then on a weight is copied in and one launch replays them all: the same kernels in the same order, so the same
bits.

A graph keeps its operands. Together they may take a part of the GPU's memory; shapes beyond it stay without graphs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor

_SHARE = 8  # of the GPU's memory, one part in so many may be kept

_replays: "ContextVar[Replays | None]" = ContextVar("replays", default=None)


class Work(Protocol):
    """Launches that depend on nothing but shapes, on tensors that one can copy into."""

    @property
    def key(self) -> Any:
        """All that the launches depend on besides the values of tensors."""

    def operands(self) -> list[Tensor]:
        """Returns the tensors that are read."""

    def copy(self) -> Self:
        """Returns the same work on copies of the operands, with results of its own."""

    def run(self) -> None:
        """Launches everything on the current stream; it waits for nothing, and leaves the operands as they are."""


W = TypeVar("W", bound=Work)


@dataclass
class Replays:
    """CUDA graphs of the works of a walk, by `Work.key`."""

    graphs: dict[Any, tuple[Any, torch.cuda.CUDAGraph]] = field(default_factory=dict)
    seen: set[Any] = field(default_factory=set)
    nbytes: int = 0
    pool: Any = None

    def run(self, work: W) -> W:
        """Runs a work; returns one that has its results, which are valid until the next work of its key."""
        key = work.key
        if key in self.graphs:
            kept: W
            kept, graph = self.graphs[key]
            for own, new in zip(kept.operands(), work.operands(), strict=True):
                own.copy_(new)
            graph.replay()
            return kept
        # Operands, results, and what is held between launches.
        nbytes = 3 * sum(operand.nbytes for operand in work.operands())
        device = work.operands()[0].device
        memory = torch.cuda.get_device_properties(device).total_memory
        if key not in self.seen or self.nbytes + nbytes > memory // _SHARE:
            self.seen.add(key)
            work.run()
            return work
        self.nbytes += nbytes
        kept = work.copy()
        graph = torch.cuda.CUDAGraph()
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        current, recording = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        recording.wait_stream(current)
        with torch.cuda.stream(recording):
            # Not `torch.cuda.graph`, which collects garbage and frees the allocator's cache first. Other threads copy
            # weights meanwhile.
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                kept.run()
            finally:
                graph.capture_end()
        current.wait_stream(recording)
        self.graphs[key] = kept, graph
        graph.replay()
        return kept


@contextmanager
def replaying() -> Iterator[None]:
    """Keeps CUDA graphs of `run` while open."""
    token = _replays.set(Replays())
    try:
        yield
    finally:
        _replays.reset(token)


def run(work: W) -> W:
    """Runs a work on a GPU, by a graph within `replaying`; returns the one that has its results."""
    replays = _replays.get()
    if replays is not None:
        return replays.run(work)
    work.run()
    return work
