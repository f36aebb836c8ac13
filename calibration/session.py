"""A `Session` is everything that the steps of one run share, as one object that they hand on.

    device     where blocks are worked on and models run
    memory     bytes that the run may use
    progress   the listener that is called as steps get on
    store      the finished steps of the run, kept for the next run of the same command
    seed       of everything that is drawn
    rank       this process, of `world` that share the work

Public functions take `device=` and `progress=` and make a session of them:

    session = Session.on("cuda", progress=print)

Below them a function takes the session. It runs models `placed(model, session.device)`, says how far it is with
`session.report("solve", done, total)`, and keeps a finished step with `session.store.put(...)`; a session without a
listener or a store takes these calls and does nothing. Functions on tensors, and those that move them, take a device.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import nn

from quant.calibration.placement import Device, elsewhere, find_device
from quant.calibration.progress import Progress
from quant.calibration.ranks import rank_and_world
from quant.calibration.store import Store
from quant.kernels.processor import memory_left, memory_limit


@dataclass(frozen=True, eq=False)
class Session:
    """What the steps of one run share.

    Attributes:
        device: where blocks are worked on, with its index; None is where the model is.
        memory: bytes that the user allows the run, the page cache not counted; None allows what is left.
        progress: called as `progress(stage, done, total)`; None tells nobody.
        store: keeps finished steps.
        seed: of everything that is drawn.
    """

    device: torch.device | None = None
    memory: int | None = None
    progress: Progress | None = None
    store: Store = field(default_factory=Store)
    seed: int = 0

    @classmethod
    def on(
        cls,
        device: Device = None,
        *,
        progress: Progress | None = None,
        memory: int | None = None,
        store: Store | None = None,
        seed: int = 0,
    ) -> Session:
        """A session from the arguments of a public function.

        Args:
            device: "auto", "cpu", "cuda", "cuda:N", or a device; None is where the model is.
            progress, memory, store, seed: see `Session`.

        Raises:
            ValueError: there is no such device; the message names those that are there.
        """
        return cls(find_device(device), memory, progress, store or Store(), seed)

    @property
    def rank(self) -> int:
        """The number of this process among those that share the work."""
        return rank_and_world()[0]

    @property
    def world(self) -> int:
        """How many processes share the work."""
        return rank_and_world()[1]

    def for_model(self, model: nn.Module) -> Session:
        """The same session; its device is None where the model is there already, and so need not be copied."""
        return self if elsewhere(model, self.device) else replace(self, device=None)

    def usable_memory(self) -> int | None:
        """Bytes of memory that the run may use now; None where the system does not tell.

        A container's limit holds whatever the user allows: beyond it the kernel ends the process.
        """
        if self.memory is None:
            return memory_left()
        limit = memory_limit()
        return self.memory if limit is None else min(self.memory, limit)

    def report(self, stage: str, done: int, total: int) -> None:
        """Tells the listener that `done` of `total` parts of a stage are done."""
        if self.progress is not None:
            self.progress(stage, done, total)
