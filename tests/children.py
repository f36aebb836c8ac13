"""This file runs parts of tests in processes of their own, which may be killed."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

# Imports that the tests of ranks need, which take longer than most of them compute.
_IMPORTS = ["quant", "pytest", "torch.distributed.fsdp", "transformers.models.llama.modeling_llama"]


def in_child(action: Callable[[], object], kill_after: float | None = None) -> int:
    """Exit status of a forked process that does `action`: minus the signal that ended it, or 1 for an exception.

    Args:
        action: what it does.
        kill_after: seconds until it gets SIGKILL; None leaves it to its end.
    """
    child = os.fork()
    if not child:
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def free_port() -> int:
    """A port at which nothing listens, below those that systems give to outgoing connections."""
    for port in random.SystemRandom().sample(range(15_000, 32_000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")


def run_ranks(function: Callable[..., None], arguments: tuple[Any, ...] = (), count: int = 1) -> None:
    """Runs `function(rank, *arguments)` in `count` processes; an exception of one ends all, and is raised.

    As `torch.multiprocessing.spawn`, but the processes are forks of a server that imported torch and transformers once.
    The server has no threads. With a GPU the processes are new ones: an import asks for GPUs, and PyTorch then refuses
    CUDA to forks.
    """
    import torch.multiprocessing

    multiprocessing.set_forkserver_preload(_IMPORTS)
    method = "spawn" if torch.cuda.is_available() else "forkserver"
    torch.multiprocessing.start_processes(function, arguments, nprocs=count, start_method=method)
