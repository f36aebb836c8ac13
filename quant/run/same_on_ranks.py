"""The ranks of a command must work on the same files: `check_same` compares them before anything is computed.

Machines that do not share a file system may hold different copies. Of a large file, pieces that are spread evenly over
it are compared: enough to notice another model or revision, not a flipped bit.
"""

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from quant.base.errors import UserError
from quant.base.extras import versions
from quant.calibration.ranks import gathered, rank_and_world, wait_for_all
from quant.calibration.session import Session
from quant.models.files import spot_hash


def check_same(values: Mapping[str, str], session: Session, files: Sequence[Path] = ()) -> None:
    """Checks that all ranks have the same values, files, versions and kind of device.

    `values` are hashes or names that the result depends on, by their names in the error message.

    Raises:
        UserError: ranks differ; the message names the first rank that does, and the value.
    """
    if rank_and_world()[1] == 1:
        return
    own = {f"the file {file.name}": spot_hash(file) for file in files}
    # cuBLAS chooses kernels, and so the order of sums, by the GPU: equal inputs give other last bits on another one.
    own["the kind of device"] = kind_of(session)
    own |= {f"the version of {name}": version for name, version in versions().items()} | dict(values)
    everywhere = gathered((platform.node(), own))
    first = everywhere[0][1]
    for rank, (machine, theirs) in enumerate(everywhere):
        for name in dict.fromkeys((*first, *theirs)):
            if theirs.get(name) != first.get(name):
                own_value, first_value = (each.get(name, "none") for each in (theirs, first))
                if rank_and_world()[0]:
                    wait_for_all()  # the first rank reports the error, and this process is ended
                detail = "" if len(own_value + first_value) > 80 else f" ({own_value}; rank 0 has {first_value})"
                raise UserError(
                    f"rank {rank} on {machine} differs from rank 0 in {name}{detail}; all ranks need the same files, "
                    "options, versions and GPUs"
                )


def kind_of(session: Session) -> str:
    """Returns the kind of device that a session computes on."""
    device = session.device
    return torch.cuda.get_device_name(device) if device is not None and device.type == "cuda" else "cpu"
