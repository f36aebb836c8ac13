"""`trim_heap` gives memory that a process has freed back to the system."""

from __future__ import annotations

import ctypes
from contextlib import suppress


def trim_heap() -> None:
    """Gives freed memory back to the system. glibc keeps free memory between small blocks that are still in use."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
