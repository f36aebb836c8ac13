"""`launch` starts a command as several ranks of this machine, as torchrun does; `local_device` gives each its GPU.

`--devices N` starts N processes of the same command with the environment variables that torchrun sets. Under torchrun
itself they are set already. Only the first rank prints.

PyTorch's own launchers (`torch.distributed.run`, its `LocalElasticAgent`, `torch.multiprocessing.spawn`) start ranks
too, and they end all ranks when one dies. They are not used here, as of PyTorch 2.13, for three reasons:

    exit code    theirs is 1 for every failure; a command's 2, 70 and 128 + signal would be lost
    messages     they print a report of several lines with a traceback; a command's error is one line of its first rank
    start        they import torch in the launching process, which takes seconds before any rank starts
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress

from quant.base.errors import UserError, counted, printable
from quant.base.processor import cores

_FAREWELL = 10.0  # seconds that ranks have to end by themselves


def is_rank() -> bool:
    """Returns whether a launcher has started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def local_device(option: str) -> str:
    """Returns the device of this rank, which takes the GPU of its number on its machine.

    Raises:
        UserError: a single GPU is named for all ranks, or there are fewer than ranks.
    """
    import torch

    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if option.startswith("cuda:"):
        raise UserError(f"--device {option} is one GPU, and there are several ranks; pass cuda, and each takes its own")
    if option not in ("auto", "cuda") or (option == "auto" and not gpus):
        return option
    if gpus < ranks:
        fewer = f"--devices {gpus}, or " if gpus > 1 else ""
        raise UserError(
            f"{ranks} ranks on a machine where PyTorch sees {counted(gpus, 'GPU')}: pass {fewer}--device cpu"
        )
    # Set as the current device too: NCCL and Triton work on the current one, and rank 3 would otherwise fill GPU 0.
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return f"cuda:{torch.cuda.current_device()}"


def free_port() -> int:
    """Returns a port of this machine at which nothing listens, where ranks can meet.

    It is below the ports that systems give to outgoing connections, one of which might take it before the ranks have
    met.
    """
    # Linux gives ports from 32768 on to outgoing connections, macOS and Windows from 49152 on.
    for port in random.SystemRandom().sample(range(15_000, 32_000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise UserError("no port from 15000 to 31999 is free for ranks to meet at: close what listens there")


def launch(command: str, arguments: Sequence[str], count: int) -> int:
    """Runs a command of the toolbox as `count` ranks of this machine, and gives its exit code.

    The output of the first rank is shown. Standard error of the others is kept, and shown where the command fails.
    """
    threads = int(os.environ.get("OMP_NUM_THREADS", cores()))  # of one rank; `cores` obeys a container's quota
    common = os.environ | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count), "OMP_NUM_THREADS": str(max(threads // count, 1)),
    }  # fmt: skip
    # The same interpreter; a console script of another environment could be first on PATH.
    program = [sys.executable, "-m", "quant", command, *arguments]
    error_files = [tempfile.TemporaryFile() for _ in range(count)]  # noqa: SIM115 -- closed below
    ranks: list[subprocess.Popen[bytes]] = []
    before = signal.getsignal(signal.SIGINT)
    try:
        for rank, errors in enumerate(error_files):
            # Temporary files and not pipes: a full pipe that nobody reads would block its rank.
            out, err = (subprocess.DEVNULL, errors) if rank else (None, None)
            environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(subprocess.Popen(program, env=environment, stdout=out, stderr=err))
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to the ranks, too
        code = _exit_code(ranks)
    except KeyboardInterrupt:  # SIGTERM, which the ranks get here
        _end(ranks)
        code = 128 + signal.SIGTERM
    finally:
        _end(ranks)
        signal.signal(signal.SIGINT, before)
    for rank, file in enumerate(error_files):
        with file:
            file.seek(0)
            text = file.read().decode(errors="replace").rstrip()
        if text and code:
            sys.stderr.write(f"rank {rank}: {printable(text)}\n")
    return code


def _exit_code(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    """Waits for the first rank, or for one that fails while the first goes on; gives the exit code of shells."""
    deadline: float | None = None
    while ranks[0].poll() is None and (deadline is None or time.monotonic() < deadline):
        # A nonzero code of any rank; the first one then has time to print the reason and end.
        if deadline is None and any(rank.poll() for rank in ranks):
            deadline = time.monotonic() + _FAREWELL
        time.sleep(0.02)
    ended = [(rank, process.returncode) for rank, process in enumerate(ranks) if process.poll()]
    if ranks[0].returncode in (None, -signal.SIGKILL) and ended:
        rank, code = ended[0]
        ending = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        sys.stderr.write(f"error: rank {rank} {ending}; run the same command again\n")
    # The first rank's code counts if it failed, since `ended` is in the order of ranks.
    code = next((code for _, code in ended), 0)
    # subprocess gives −N for signal N, shells 128 + N.
    return 128 - code if code < 0 else code


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends ranks that still run, gently at first."""
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
    deadline = time.monotonic() + _FAREWELL
    for rank in ranks:
        try:
            rank.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()
