"""`Scratch` gives large results a file instead of memory until they are written where they belong.

The codes of all experts of a DeepSeek-V3 layer take 6.3 GB in NVFP4, and none can be written before the layer is
finished. In a mapped file they belong to the page cache: the system writes their pages to the disk when it needs the
memory. The file has no name, so that nothing of it is left behind whatever ends the process.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from quant.calibration.session import Session

_SHARE = 0.1  # of the memory; larger results go to a file


class Scratch:
    """Tensors in files without names.

    Args:
        directory: the directory where the files are; None keeps all results in memory.
        memory: bytes that the run may use; None for no limit, and then all results are kept in memory.
    """

    def __init__(self, directory: Path | None = None, memory: int | None = None) -> None:
        self.directory, self.memory = directory, memory

    @classmethod
    def of(cls, session: Session) -> Scratch:
        """Returns the files of a run that keeps finished steps in a directory; memory for one that keeps none."""
        return cls(session.store.directory, session.usable_memory())

    def takes(self, nbytes: int) -> bool:
        """Returns whether results of `nbytes` go to a file, because they would take much of the memory."""
        return self.directory is not None and self.memory is not None and nbytes > self.memory * _SHARE

    def empty(self, like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Returns an uninitialised tensor in a file, with the dtype of `like`; where that is on a GPU, one there.

        Raises:
            OSError: the disk has no room for it.
        """
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
