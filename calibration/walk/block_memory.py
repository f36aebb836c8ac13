"""`block_bytes` estimates the memory that solving one block takes on a CPU.

The memory of a GPU is not estimated, because its allocator and kernels decide how much they keep. Where a GPU has no
room for a block, `reporting_block` says which block it was.
"""

import math
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from quant.base.errors import option
from quant.calibration.ranks import rank_and_world
from quant.calibration.session import Session
from quant.calibration.solvers.registry import get_pipeline
from quant.calibration.walk.shared_moments import slices_that_fit
from quant.recipes.layers import LayerKind
from quant.recipes.plan import LayerPlan

_SHARE = 0.1  # of the memory; larger results go to a file


class Scratch(NamedTuple):
    """Gives large results a file instead of memory until they are written where they belong.

    The codes of all experts of a DeepSeek-V3 layer take 6.3 GB in NVFP4, and none can be written before the layer is
    finished. In a mapped file they belong to the page cache: the system writes their pages to the disk when it needs
    the memory. The file has no name, so that nothing of it is left behind whatever ends the process.
    """

    directory: Path | None = None  # where the files are; None keeps all results in memory
    memory: int | None = None  # bytes that the run may use; None for no limit, and then all results stay in memory

    @classmethod
    def of(cls, session: Session) -> "Scratch":
        """Returns the files of a run that keeps finished steps in a directory; memory for one that keeps none."""
        return cls(session.store.directory, session.usable_memory())

    def takes(self, nbytes: int) -> bool:
        """Returns whether results of `nbytes` go to a file, because they would take much of the memory."""
        return self.directory is not None and self.memory is not None and nbytes > self.memory * _SHARE

    def empty(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        """Returns an uninitialised tensor in a file, with the dtype of `like`; where that is on a GPU, one there."""
        nbytes = math.prod(shape) * like.dtype.itemsize
        if like.device.type != "cpu" or not nbytes:
            return like.new_empty(shape)
        with tempfile.TemporaryFile(dir=self.directory) as file:
            try:
                file.truncate(nbytes)
                if hasattr(os, "posix_fallocate"):  # else a full disk would end the process when a page is touched
                    os.posix_fallocate(file.fileno(), 0, nbytes)
            except OSError as error:
                raise OSError(
                    f"{self.directory}: no room for {nbytes / 1e9:.1f} GB of codes ({error.strerror}); what was "
                    "finished before is kept: make room, or give more --memory, and run the same command again"
                ) from error
            # The mapping outlives the file's name and its descriptor.
            mapped = mmap.mmap(file.fileno(), nbytes)
        return torch.frombuffer(mapped, dtype=torch.uint8).view(like.dtype).view(*shape)


IN_MEMORY = Scratch()

# Matrices [in, in] that exist at once while a second moment is factorized (it, its drift, damped, flipped, two factors,
# the inverse and its parts) and the memory that LAPACK takes besides them: measured, a block of 1024 and 4096 inputs
# took 870 MB.
_SQUARES = 11


def block_bytes(
    block: nn.Module, layers: Sequence[LayerPlan], tokens: int, dtype: torch.dtype, scratch: Scratch = IN_MEMORY
) -> int:
    """Estimates the peak number of bytes that solving a block takes, without the page cache.

    Linear layers are solved first, and then experts, as many together as `slices_that_fit` says.
    """
    weights = sum(p.numel() for p in block.parameters() if not hasattr(p, "stored"))
    linear = [layer for layer in layers if layer.kind == LayerKind.LINEAR]
    experts = [layer for layer in layers if layer.kind == LayerKind.EXPERTS]
    solved = sum(layer.numel for layer in linear)
    inputs = {layer.group or layer.name: layer.shape[-1] for layer in linear}
    hidden = min((layer.shape[-1] for layer in layers), default=0)
    # Original inputs of every group, and three sets of hidden states.
    inputs_kept = tokens * (sum(inputs.values()) + 3 * hidden)
    codes = sum(layer.nbytes for layer in experts if not scratch.takes(layer.nbytes))
    one_expert = max((layer.numel // layer.shape[0] for layer in experts), default=0)
    together = 0  # bytes of the second moments of experts that a rank holds together
    for layer in (layer for layer in experts if get_pipeline(layer.solver).needs_moment):
        part = slices_that_fit(layer.shape[0], layer.shape[-1])[0]
        together = max(together, 4 * layer.shape[-1] ** 2 * -(-(part.stop - part.start) // rank_and_world()[1]))
    scales = any(get_pipeline(layer.solver).transforms for layer in linear)
    # The phases follow each other and free their memory, so the largest counts.
    phases = (
        8 * weights if scales else 0,  # a copy in float64, in which `scaling` looks for modules that absorb a scale
        4 * _SQUARES * _widest(linear),
        codes + together + 2 * one_expert * 4 + 4 * _SQUARES * _widest(experts),
    )
    return dtype.itemsize * (weights + solved + inputs_kept) + max(phases)


def _widest(layers: Sequence[LayerPlan]) -> int:
    return max((layer.shape[-1] ** 2 for layer in layers if get_pipeline(layer.solver).needs_moment), default=0)


class BlockTooLargeError(ValueError):
    """A device had no room for a block; the message names it, the contents of the device, and the way out."""


@contextmanager
def reporting_block(name: Callable[[], str], session: Session) -> Iterator[None]:
    """Raises `BlockTooLargeError` where a device runs out of memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        device = session.device
        where = "its device" if device is None else str(device)
        holds = ""
        if device is not None and device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            holds = (
                f" ({total / 1e9:.1f} GB, {(free + torch.cuda.memory_reserved(device)) / 1e9:.1f} of them for this run)"
            )
        raise BlockTooLargeError(
            f"{name() or 'the model'}: {where}{holds} ran out of memory while it was solved: give fewer or shorter "
            f"calibration rows, a solver that looks at no data, such as rtn, or {option('device', 'cpu')}, which "
            "takes longer"
        ) from error
