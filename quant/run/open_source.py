"""The first stage opens the model of a request and makes the session in which the run's steps work."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread
from typing import Any

import torch
from torch import nn

from quant.base.atomic import claimed
from quant.base.errors import UserError
from quant.base.extras import importing
from quant.base.listener import Listener
from quant.calibration.ranks import rank_and_world
from quant.calibration.session import Session
from quant.calibration.texts.mixture import lacks_data
from quant.calibration.texts.sources import check_lengths, short_files
from quant.calibration.walk.solve import check_in_memory
from quant.models.open_model import Source, open_model
from quant.run.announcements import announce_device, announce_source
from quant.run.decide import plan_for
from quant.run.job import Job
from quant.run.request import Request


@dataclass(eq=False, kw_only=True)
class _InMemory(Source):
    """A module of the caller, with the caller's tokenizer; no other is looked for."""

    tokenizer: Any = None

    def load_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise UserError(f"{self.name}: no tokenizer was given; pass tokenizer=")
        return self.tokenizer


@contextmanager
def destination(request: Request) -> Iterator[None]:
    """Claims the destination of a request, which must be writable: no other run can write to it while open."""
    # One rank claims the path for all: the same claim by another rank would be refused as a second run.
    out = request.plan_out or (None if request.dry_run else request.out)
    if out is None or rank_and_world()[0]:
        request.check_destination()
        yield
        return
    with claimed(out):
        request.check_destination()
        yield


def load(request: Request, listener: Listener) -> Job:
    """Opens the model; of one whose shapes are enough, only configs and headers are read."""
    if request.is_in_memory:
        session = Session.on(request.device, seed=request.seed, memory=request.memory_bytes)
        opened = open_model(request.model)
        assert opened.model is not None
        check_in_memory(opened.model)
        in_memory = _InMemory(
            name=opened.name, kind=opened.kind, model=opened.model, state_dict=None, path=opened.path,
            dtype=opened.dtype, tokenizer=request.tokenizer,
        )  # fmt: skip
        return Job(request.for_model(opened.model), in_memory, session, listener, {})
    # A dry run touches no GPU: a CUDA context takes about a second, and some hundred MB of GPU memory.
    session = Session(memory=request.memory_bytes, seed=request.seed)
    if not request.reads_no_weights:
        session = Session.on(request.device, seed=request.seed, memory=request.memory_bytes)
        announce_device(listener, session)
        _create_context(session)
    torch.manual_seed(request.seed)  # a caller's module does not change the caller's random numbers
    started = time.perf_counter()
    with listener.step(f"loading {request.model}"), importing():  # transformers, most of the time
        if not request.reads_no_weights and short_files(request.calibration_rows):
            # Text that is too short is refused before the weights are read: headers and tokenizer suffice.
            shapes = _open(request, meta=True)
            if request.goal is not None or lacks_data(plan_for(request, shapes)):
                check_lengths(shapes, request.calibration_rows)
        source = _open(
            request,
            meta=request.reads_no_weights,
            # An allocation and an evaluation run the whole model, which reads every expert at every row.
            stream=not request.reads_no_weights and request.goal is None and not request.eval_texts,
        )
    announce_source(listener, source)
    sized = request if source.model is None else request.for_model(source.model)
    return Job(sized, source, session, listener, {"load": time.perf_counter() - started})


def _open(request: Request, *, meta: bool, stream: bool = False) -> Source:
    assert not isinstance(request.model, nn.Module)
    factory, unsafe = request.model_factory, request.unsafe_load
    return open_model(request.model, model_factory=factory, unsafe_load=unsafe, meta=meta, stream=stream)


def _create_context(session: Session) -> None:
    """Makes the driver create a GPU's context, which takes about a second, while transformers is imported.

    PyTorch releases the interpreter's lock while it runs. The process waits for the thread when it ends: a daemon that
    comes back from C++ after the interpreter has gone aborts the process ("terminate called without an active
    exception"), which would follow the error message of a run that is refused within the second.
    """
    if session.device is not None and session.device.type == "cuda":
        Thread(target=torch.empty, args=(1,), kwargs={"device": session.device}, name="context").start()
