"""A command runs in a fork of a process that has everything imported, so that a case costs milliseconds, not seconds.

Every fork has limits: processor time, memory beyond what it started with, bytes in a file, and time asleep. Its stacks
are printed when it runs out of either time, which shows where a hang is.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm.std import TqdmDefaultWriteLock

# tqdm's lock for several processes is a semaphore that all forks share. One that is killed while it holds it would
# stop the others wherever transformers shows a bar. Each fork has its own lock for threads.
TqdmDefaultWriteLock.mp_lock = None

SECONDS = 10
MEMORY = 1 << 30
_FILE = 200 << 20
_ASLEEP = 30  # seconds; one that waits for a processor is not asleep


@dataclass(frozen=True)
class Outcome:
    """What a command did: `code` is negative for the signal that ended it, `grown` bytes of memory at its peak."""

    code: int
    stdout: str
    stderr: str
    seconds: float
    grown: int


@dataclass
class _Running:
    key: Any
    folder: Path
    resident: int
    used: str = ""
    since: float = 0.0

    def is_stuck(self, pid: int) -> bool:
        """Whether it has slept for long, without computing anything."""
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        used, now = " ".join(fields[11:13]), time.monotonic()
        if used != self.used or fields[0] == "R":
            self.used, self.since = used, now
        return now - self.since > _ASLEEP


def run(argv: Sequence[str], folder: Path, before: Callable[[], None] | None = None) -> Outcome:
    """Runs one command in `folder`; `before` is called in the fork first."""
    return next(run_all([(None, argv, folder, before)], 1))[1]


def run_all(
    commands: Iterable[tuple[Any, Sequence[str], Path, Callable[[], None] | None]], jobs: int
) -> Iterator[tuple[Any, Outcome]]:
    """Runs many, `jobs` at a time; gives the key of each command and its outcome as they end."""
    gc.collect()
    gc.freeze()  # what ends in a fork would else be what was begun here, perhaps with threads that are not there
    waiting = iter(commands)
    running: dict[int, _Running] = {}
    exhausted = False
    while running or not exhausted:
        while len(running) < jobs and not exhausted:
            command = next(waiting, None)
            if command is None:
                exhausted = True
                break
            key, argv, folder, before = command
            running[_start(argv, folder, before)] = _Running(key, folder, _resident())
        for pid, each in list(running.items()):
            found, status, used = os.wait4(pid, os.WNOHANG)
            if not found:
                if each.is_stuck(pid):
                    os.killpg(pid, signal.SIGXCPU)  # prints the stacks, see `_limit`
                continue
            del running[pid]
            texts = ((each.folder / name).read_bytes().decode(errors="replace") for name in ("stdout", "stderr"))
            seconds = used.ru_utime + used.ru_stime
            yield (
                each.key,
                Outcome(os.waitstatus_to_exitcode(status), *texts, seconds, used.ru_maxrss * 1024 - each.resident),
            )
        time.sleep(0.005)


def _start(argv: Sequence[str], folder: Path, before: Callable[[], None] | None) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.setpgid(0, 0)
        for name, handle in (("stdout", 1), ("stderr", 2)):
            opened = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(opened, handle)
            os.close(opened)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(folder)
        # A folder of its own: the temporary files of commands that run beside it are none of its faults.
        (folder / "tmp").mkdir(exist_ok=True)
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder / "tmp")
        _limit()
        code = _command(argv, before)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _command(argv: Sequence[str], before: Callable[[], None] | None) -> int:
    from quant.cli.main import main

    sys.argv = ["quant", *argv]
    # The machine outlives the command, so what is written needs no disk to wait for.
    os.fsync = lambda fd: None
    if before is not None:
        before()
    try:
        main(list(argv), prog_name="quant")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


def _limit() -> None:
    faulthandler.register(signal.SIGXCPU, file=2, chain=True)
    status = Path("/proc/self/status").read_text().splitlines()
    taken = next(int(line.split()[1]) for line in status if line.startswith("VmData")) * 1024
    for limit, value in (
        (resource.RLIMIT_DATA, taken + MEMORY),
        (resource.RLIMIT_CPU, SECONDS),
        (resource.RLIMIT_FSIZE, _FILE),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, resource.getrlimit(limit)[1]))


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
