"""The thread that creates a GPU's context is no daemon: Python aborts where one comes back from C++ too late."""

from __future__ import annotations

import threading

import pytest
import torch

from quant.calibration.session import Session
from quant.run.run import _create_context


def test_a_process_waits_for_the_context_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    created, devices = threading.Event(), []

    def create(size: int, device: torch.device) -> None:
        devices.append(device)
        created.wait(30)

    monkeypatch.setattr(torch, "empty", create)
    _create_context(Session())
    assert not devices  # nothing to create on a CPU
    _create_context(Session(device=torch.device("cuda", 0)))
    (thread,) = (each for each in threading.enumerate() if each.name == "context")
    assert not thread.daemon
    created.set()
    thread.join()
    assert devices == [torch.device("cuda", 0)]
