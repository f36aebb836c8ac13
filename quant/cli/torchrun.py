"""`--devices N` starts a command as N ranks of this machine by torchrun's agent, which ends all when one fails.

`torchrun --nproc-per-node N -m quant …` does the same, on any number of machines; only the exit code and the last line
are torchrun's then. Here they are those of the rank that failed first. Tried with PyTorch 2.13, whose launcher is
`torch.distributed.launcher.api`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from quant.base.errors import UserError, counted
from quant.base.processor import cores


def launch(command: Sequence[str], count: int) -> int:
    """Runs a command of the toolbox, with its arguments, as `count` ranks of this machine; gives its exit code."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    threads = int(os.environ.get("OMP_NUM_THREADS", cores()))  # of one rank; `cores` obeys a container's quota
    os.environ["OMP_NUM_THREADS"] = str(max(threads // count, 1))
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # the ranks and the line below say it in plain words
    config = LaunchConfig(
        1, 1, count, run_id=str(os.getpid()), rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1", max_restarts=0,
    )  # fmt: skip
    try:
        # The same interpreter; a console script of another environment could be first on PATH.
        elastic_launch(config, sys.executable)("-m", "quant", *command)
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            return int(failure.exitcode)
        sys.stderr.write(f"error: rank {rank} was killed by signal {-failure.exitcode}; run the same command again\n")
        return 128 - int(failure.exitcode)  # as shells do
    return 0


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
