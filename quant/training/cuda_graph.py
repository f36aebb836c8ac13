"""The forward and the backward pass of a training step, on a GPU recorded once and replayed.

A step of a small model is thousands of kernels that the host launches one by one, and it takes longer to launch most of
them than they run. A CUDA graph holds them all, and one launch replays it:

    step 1     op by op: kernels are compiled and caches filled; random numbers that are drawn are noticed
    step 2     op by op, timed
    step 3     recorded, and replayed for the first time, which takes longer
    step 4..6  replayed, and so is every later step if the fastest of them was faster than step 2

A step that a graph cannot hold runs op by op: one with random numbers, or with experts or a teacher for which the host
looks at the values of a batch. A replay repeats the recorded kernels, so the loss must depend on nothing that changes
except the batch and the parameters.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

_JUDGED = 6  # steps whose seconds are compared before the recording is kept for good

Loss = Callable[[torch.Tensor], torch.Tensor]


class Passes:
    """Computes a loss and its gradients, batch after batch.

    Args:
        loss: the loss of a batch on the device of the parameters, a scalar; on a GPU it runs in BF16 by autocast.
        learned: parameters, whose gradients each call writes anew.
        record: whether passes may be recorded.

    Attributes:
        replays: whether the last call was a replay.
    """

    def __init__(self, loss: Loss, learned: Sequence[nn.Parameter], *, record: bool = True) -> None:
        self._loss, self._learned, self._device = loss, learned, learned[0].device
        self._may_record = record and all(p.is_cuda and p.device == self._device for p in learned)
        self._seconds: list[float] = []
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batch = self._found = torch.empty(0)
        self.replays = False

    def __call__(self, batch: torch.Tensor) -> float:
        """Returns the loss of a batch, token ids int64 `[batch, seqlen]`; parameters have its gradients."""
        if self._may_record and self._graph is None and len(self._seconds) == 2:
            self._record(batch)
        started = time.perf_counter()
        self.replays = self._graph is not None and batch.shape == self._batch.shape
        if self._graph is not None and self.replays:
            self._batch.copy_(batch)
            self._graph.replay()
            value = self._found.item()
        else:
            # A graph would replay the same random numbers; a step that draws any changes the state of a generator.
            before = self._generators() if self._may_record and not self._seconds else None
            value = self._op_by_op(batch)
            self._may_record &= before is None or before == self._generators()
        if len(self._seconds) < _JUDGED:
            self._seconds.append(time.perf_counter() - started)
            # The fastest of three: a single replay may have waited for another process on the same GPU.
            if len(self._seconds) == _JUDGED and self.replays and min(self._seconds[3:]) > self._seconds[1]:
                self._forget({p: p.grad.clone() for p in self._learned if p.grad is not None})
        return value

    def close(self) -> None:
        """Frees the recording, and the gradients, whose memory is a part of it."""
        self._forget({})

    def _forget(self, gradients: Mapping[nn.Parameter, torch.Tensor]) -> None:
        self._graph, self._may_record = None, False
        self._batch = self._found = torch.empty(0)
        for parameter in self._learned:
            parameter.grad = gradients.get(parameter)

    def _op_by_op(self, batch: torch.Tensor) -> float:
        for parameter in self._learned:
            parameter.grad = None
        loss = self._of(batch.to(self._device))
        loss.backward()
        return loss.item()

    def _of(self, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"):
            return self._loss(batch)

    def _record(self, batch: torch.Tensor) -> None:
        """Records both passes, or gives up on it."""
        stream, graph = torch.cuda.current_stream(self._device), torch.cuda.CUDAGraph()
        self._batch = batch.to(self._device, copy=True)  # replays read this memory; each batch is copied into it
        for parameter in self._learned:
            parameter.grad = None  # so that gradients are written to memory of the graph
        try:
            with torch.cuda.graph(graph):
                self._found = self._of(self._batch)
                self._found.backward()
        except RuntimeError:  # of CUDA, at whatever cannot be recorded; the batch has its turn op by op
            torch.cuda.set_stream(stream)  # which a failed recording does not leave
            torch.cuda.synchronize(self._device)
            self.close()
            return
        self._graph = graph

    def _generators(self) -> tuple[object, ...]:
        """Returns the states of the generators of random numbers."""
        states = torch.get_rng_state(), torch.cuda.get_rng_state(self._device)
        return (random.getstate(), *(state.numpy().tobytes() for state in states))
