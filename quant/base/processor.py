"""How much of the machine's processors and memory this process may use, and what of its memory is in use.

A machine may have 64 cores and 500 GB while the container around this process has a quota of 2 CPUs and 8 GB. The
kernel enforces both without telling: a process that starts 64 threads is stopped for most of every tenth of a second,
and one that takes 9 GB is killed. The limits of a process are in its affinity mask and in the files of its control
groups, of which every one that encloses it counts (cgroup v1 and v2).

Tensors may be mapped from files. `in_memory` brings their pages from the disk before they are touched: a page beyond
the end of a file that has become shorter would end the process with SIGBUS; asked to bring such a page, Linux says that
it cannot.

Nothing here imports torch at its top, because the number of threads and how they wait is fixed when torch loads its
OpenMP.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


_ROOT = Path("/")
# cgroup v1 has no word for "no limit": it shows the largest multiple of a page.
_NO_LIMIT = 1 << 60
# Seconds for which a thread may keep the interpreter when another wants it; Python's own number is 0.005.
_TURN = 0.0003
# How threads wait for each other, by the variable that says it: they sleep, after 5,000 polls where the OpenMP is
# libgomp. The polls take less than a tenth of a millisecond; libgomp's own number is 300,000.
_WAITING = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "5000"}


def cores() -> int:
    """Returns the number of cores that the scheduler may put this process on."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux has it
    return len(affinity(0)) if affinity else os.cpu_count() or 1


@contextmanager
def short_turns() -> Iterator[None]:
    """Lets threads take turns with the interpreter more often while open.

    A thread that launches kernels gives the interpreter up at every one, and threads that copy, write and read beside
    it would keep it for 5 ms each time: a block of Llama-3-8B's shape took two GPUs 335 ms, and 305 ms with this.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(_TURN, before))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def quota(root: Path = _ROOT) -> float | None:
    """Returns how many CPUs' time the process's control groups allow, such as 1.5; None for no limit."""
    allowances = []
    for group in _groups("cpu", root):
        # cgroup v2 has one file with both numbers, v1 has two.
        spent, period = (*_words(group / "cpu.max"), "", "")[:2]  # "150000 100000", or "max 100000"
        spent = spent or " ".join(_words(group / "cpu.cfs_quota_us"))  # -1 for no limit
        period = period or " ".join(_words(group / "cpu.cfs_period_us"))
        if spent.isdigit() and period.isdigit() and int(period):
            allowances.append(int(spent) / int(period))
    return min(allowances, default=None)


def memory_limit(root: Path = _ROOT) -> int | None:
    """Returns the bytes that the process's control groups may hold, the tightest of them; None for no limit."""
    return min((limit for _, limit in _memory_groups(root)), default=None)


def memory_left(root: Path = _ROOT) -> int | None:
    """Returns the bytes that the process may still take, of the machine's and each control group's; None if unknown."""
    remaining = []
    for group, limit in _memory_groups(root):
        used = next((int(w) for name in ("memory.current", "memory.usage_in_bytes") for w in _words(group / name)), 0)
        # The page cache is not counted as taken: the kernel drops it when memory is needed. In version 1 a plain number
        # leaves out the groups within, and `total_` includes them.
        sizes = dict(line.split() for line in _lines(group / "memory.stat"))
        cached = sum(int(sizes.get(f"total_{k}", sizes.get(k, 0))) for k in ("inactive_file", "active_file"))
        remaining.append(max(limit - used + cached, 0))
    available = [line.split()[1] for line in _lines(root / "proc/meminfo") if line.startswith("MemAvailable:")]
    remaining += [1024 * int(kilobytes) for kilobytes in available]
    return min(remaining, default=None)


def memory_taken(root: Path = _ROOT) -> int | None:
    """Returns the bytes of memory that this process holds, mapped files not counted; None if unknown."""
    anonymous = [line.split()[1] for line in _lines(root / "proc/self/status") if line.startswith("RssAnon:")]
    return 1024 * int(anonymous[0]) if anonymous else None


def peak_rss() -> int | None:
    """Returns the peak resident memory of this process in bytes; None where the system does not report it."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS counts bytes, Linux KiB.
    return peak if sys.platform == "darwin" else peak * 1024


def set_up_threads(environment: MutableMapping[str, str]) -> str | None:
    """Says in the environment how many threads torch starts and how they wait, where the user has not said it.

    Threads that wait by spinning take the time that the others need as soon as anything else runs on the machine: of
    two threads on two cores with a busy neighbour one waits, spinning, for the one that has no core. Sleeping at once
    costs an eighth on a quiet machine, where the other thread is nearly always there within microseconds. Returns a
    sentence for the user where the quota is less than the cores; None otherwise.
    """
    if not any(name in environment for name in (*_WAITING, "KMP_BLOCKTIME")):
        environment.update(_WAITING)
    allowed, available = quota(), cores()
    threads = available if allowed is None else math.ceil(allowed)
    # Above the quota, threads only wait for each other: see the module docstring.
    if threads >= available or "OMP_NUM_THREADS" in environment:
        return None
    environment["OMP_NUM_THREADS"] = str(threads)
    return f"{threads} thread{'s' * (threads > 1)}: the quota of this container is {allowed:g} of {available} CPUs"


def describe_processor(root: Path = _ROOT) -> str:
    """Returns the name of the processor and its widest vector units: "AMD EPYC, AVX-512 BF16"."""
    fields = dict(line.partition(":")[::2] for line in reversed(_lines(root / "proc/cpuinfo")) if ":" in line)
    facts = {name.strip(): value.strip() for name, value in fields.items()}
    flags = set(facts.get("flags", facts.get("Features", "")).split())
    units = {"amx_tile": "AMX", "avx512_bf16": "AVX-512 BF16", "avx512f": "AVX-512", "avx2": "AVX2", "asimd": "NEON"}
    widest = next((unit for flag, unit in units.items() if flag in flags), None)
    return ", ".join(fact for fact in (facts.get("model name", "unknown processor"), widest) if fact)


def _memory_groups(root: Path) -> Iterator[tuple[Path, int]]:
    for group in _groups("memory", root):
        for name in ("memory.max", "memory.high", "memory.limit_in_bytes"):
            for word in _words(group / name):
                if word.isdigit() and int(word) < _NO_LIMIT:
                    yield group, int(word)


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Yields the folders of the control groups that enclose the process, as far as it sees them, innermost first."""
    paths = {}
    for line in _lines(root / "proc/self/cgroup"):  # "4:memory:/a/b" in v1, "0::/a/b" in v2
        _, names, path = line.split(":", 2)
        paths.update(dict.fromkeys(names.split(","), path))
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, system = line.partition(" - ")
        shown, mounted_at = mount.split()[3:5]
        kind, _, options = system.split(" ", 2)
        name = {"cgroup2": "", "cgroup": controller}.get(kind)
        if name not in paths or (name and name not in options.split(",")):
            continue
        top = root / mounted_at.lstrip("/")
        # A container sees its own group at the root of the mount, and a path that may lie outside it.
        own = PurePosixPath(paths[name])
        # A container may see only its own part of the tree, under another name than the machine's.
        below = own.relative_to(shown) if own.is_relative_to(shown) and ".." not in own.parts else PurePosixPath()
        yield from (top / part for part in (below, *below.parents))


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _words(file: Path) -> list[str]:
    return " ".join(_lines(file)).split()


def trim_heap() -> None:
    """Gives freed memory back to the system. glibc keeps free memory between small blocks that are still in use."""
    with suppress(OSError, AttributeError, TypeError):  # another C library, or Windows
        ctypes.CDLL(None).malloc_trim(0)


_POPULATE_READ = 22  # of Linux's mman.h


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, its pages in memory where they are contiguous; ValueError as `populate`."""
    import torch

    if type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.is_contiguous():
        populate(tensor.flatten().view(torch.uint8))
    return tensor


def populate(part: torch.Tensor) -> None:
    """Brings the pages of contiguous bytes, uint8, into memory; ValueError for a file that has become shorter."""
    start, end = part.data_ptr(), part.data_ptr() + part.nbytes
    start -= start % mmap.PAGESIZE
    advise = _madvise()
    if advise is None or advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _POPULATE_READ):
        if advise is not None and ctypes.get_errno() == errno.EFAULT:
            raise ValueError("a file of weights became shorter while it was read; put it back, and run this again")
        part[:: mmap.PAGESIZE].sum()


@cache
def _madvise() -> Callable[..., int] | None:
    try:
        return ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError, TypeError):
        return None


def value_of(tensor: torch.Tensor, *, whole: bool = True) -> torch.Tensor:
    """Returns a tensor without its autograd history; a parameter that is still in its files is read (`stored_weights`).

    With `whole` false, experts that could be run one by one from their files stay there.
    """
    stored = getattr(tensor, "stored", None)
    return tensor.detach() if stored is None or (stored.runs_alone and not whole) else stored.tensor()
