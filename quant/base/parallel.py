"""`in_parts` shares work that is independent row by row among threads, with one thread of PyTorch's in each.

Rounding is a long series of small operations. PyTorch would split each of them among its threads, which then wait for
each other ten thousand times a second. Measured on two cores, that makes the search for scales 1.1 times as fast, and
next to another busy process 30 times as slow. Here every thread takes some rows through all operations, and they wait
for each other once, at the end. Python runs in one thread at a time, so parts must be large enough for operations that
take long compared with the microseconds that Python spends on each.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

# Rows of a part are a multiple of this, so that only the last part can end in a partly filled vector: the elements of
# one are computed by other instructions, which may round differently.
_ROWS = 64


def in_parts(work: Callable[[int, int], object], x: Tensor, size: int, parts: float) -> None:
    """Calls `work(start, stop)`, which fills its own rows of a result, for `parts` consecutive parts of `range(size)`.

    The parts, and so every bit of the result, are the same for any number of threads. Where `x`, a tensor of the work,
    is not on the CPU, all rows are one part.
    """
    if x.device.type != "cpu":
        work(0, size)
    else:
        run_parts(work, bounds_of(size, parts))


def bounds_of(size: int, parts: float) -> list[tuple[int, int]]:
    """Returns the starts and stops of consecutive parts of `range(size)`."""
    step = -(-size // max(int(parts), 1) // _ROWS) * _ROWS or 1
    return [(start, min(start + step, size)) for start in range(0, size, step)]


def run_parts(work: Callable[[int, int], object], bounds: Sequence[tuple[int, int]]) -> None:
    """Calls `work(start, stop)` for parts of rows on the CPU, which share the threads that PyTorch may use."""
    threads = min(torch.get_num_threads(), len(bounds))
    with _one_thread():
        if threads <= 1:
            for part in bounds:
                work(*part)
            return
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

        def run(part: tuple[int, int]) -> None:
            with torch.inference_mode(modes[1]), torch.set_grad_enabled(modes[0]):
                work(*part)

        # PyTorch holds its number of threads, and its modes, separately for each of Python's threads.
        with ThreadPoolExecutor(threads, "rows", torch.set_num_threads, (1,)) as pool:
            list(pool.map(run, bounds))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limits PyTorch to one thread while open, in this thread of Python's and in threads that start now."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
