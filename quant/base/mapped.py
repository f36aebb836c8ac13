"""Tensors that are mapped from files: `in_memory` brings their pages from the disk before they are touched.

A page beyond the end of a file that has become shorter ends the process with SIGBUS when it is touched. Asked to bring
such a page, Linux says that it cannot.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
from collections.abc import Callable
from contextlib import suppress
from functools import cache

import torch

# `trim_heap` gives memory that a process has freed back to the system.


def trim_heap() -> None:
    """Gives freed memory back to the system. glibc keeps free memory between small blocks that are still in use."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


_POPULATE_READ = 22  # of Linux's mman.h


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, its pages in memory where they are contiguous.

    Raises:
        ValueError: as `populate`.
    """
    if type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.is_contiguous():
        populate(tensor.flatten().view(torch.uint8))
    return tensor


def populate(part: torch.Tensor) -> None:
    """Brings the pages of contiguous bytes, uint8, into memory; one fault a page would take longer.

    Raises:
        ValueError: they are mapped from a file that has become shorter; touching them would end the process.
    """
    start, end = part.data_ptr(), part.data_ptr() + part.nbytes
    start -= start % mmap.PAGESIZE
    advise = _madvise()
    if advise is None or advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _POPULATE_READ):
        if advise is not None and ctypes.get_errno() == errno.EFAULT:
            raise ValueError("a file of weights became shorter while it was read; put it back, and run this again")
        part[:: mmap.PAGESIZE].sum()


@cache
def _madvise() -> Callable[..., int] | None:
    """Returns the system's call; None where there is none."""
    try:
        return ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError, TypeError):
        return None


def value_of(tensor: torch.Tensor, *, whole: bool = True) -> torch.Tensor:
    """Returns a tensor without its autograd history; a parameter that is still in its files is read (`stored_weights`).

    With `whole` false, experts that could be run one by one from their files stay there.
    """
    stored = getattr(tensor, "stored", None)
    if stored is None or (stored.runs_alone and not whole):
        return tensor.detach()
    read: torch.Tensor = stored.tensor()
    return read
