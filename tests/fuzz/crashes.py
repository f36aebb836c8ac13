"""A command is stopped at its n-th step that changes the disk: killed, terminated, or told that the disk is full.

A step is a file opened to be written, a write, an fsync, a rename, a directory made or a file deleted, below the
folder of the command. A write that is struck has written half of its bytes.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quant.base import atomic

KINDS = ("KILL", "TERM", "ENOSPC")
LOG = "steps"
_PATHS = ("rename", "replace", "mkdir", "rmdir", "unlink", "remove", "truncate", "chmod", "link", "symlink")
_HANDLES = ("fsync", "write", "ftruncate")
_NEED_ROOM = ("open", "write", "fsync", "mkdir", "rename", "replace")  # may fail on a full disk


class Crash:
    """Counts steps below a folder, and strikes at one of them.

    Args:
        kind: one of `KINDS`.
        at: the number of the step; none is struck where that is beyond the last.
        folder: what lies elsewhere is not counted. The names of all steps are written to `LOG` in it.
    """

    def __init__(self, kind: str, at: int, folder: Path) -> None:
        self.kind, self.at, self.folder, self.count, self.full = kind, at, str(folder.resolve()), 0, False
        self.log = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self.write = os.write
        self.lock = threading.Lock()  # files are written in several threads

    def __call__(self) -> None:
        """Patches what changes the disk; for the fork that runs the command."""
        for name in _PATHS:
            setattr(os, name, self._counted(name, getattr(os, name), lambda path, *_: self._is_ours(path)))
        for name in _HANDLES:
            setattr(os, name, self._counted(name, getattr(os, name), lambda handle, *_: self._is_ours(handle)))
        plain = io.open

        def opened(file: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
            if not set(mode) & set("wax+") or not self._is_ours(file):
                return plain(file, mode, *rest, **options)
            self.step("open")
            return _File(plain(file, mode, *rest, **options), self)

        builtins.open = io.open = opened  # type: ignore[assignment]
        atomic._exchange = self._counted("exchange", atomic._exchange, lambda *_: True)

    def step(self, name: str, halve: Callable[[], None] | None = None) -> None:
        """Notes a step, and strikes if it is the one; `halve` leaves half of its work first."""
        with self.lock:
            self.count += 1
            self.write(self.log, f"{name}\n".encode())
            struck = self.count == self.at
        if self.kind == "ENOSPC":
            self.full |= struck
            if self.full and name in _NEED_ROOM:
                if halve is not None:
                    halve()
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        elif struck:
            # The handler of SIGTERM runs in the main thread and cuts off what happens there, not other threads' writes.
            if halve is not None and (self.kind == "KILL" or threading.current_thread() is threading.main_thread()):
                halve()
            os.kill(os.getpid(), getattr(signal, f"SIG{self.kind}"))

    def _is_ours(self, file: Any) -> bool:
        """Whether a path or handle is below the folder, standard output and the log not counted."""
        if isinstance(file, int):
            if file <= 2 or file == self.log:
                return False
            file = os.readlink(f"/proc/self/fd/{file}")
        return os.path.abspath(os.fspath(file)).startswith(self.folder)

    def _counted(self, name: str, original: Callable[..., Any], ours: Callable[..., bool]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if ours(*arguments):
                self.step(name)
            return original(*arguments, **options)

        return call


class _File:
    """An open file whose writes are steps; what is struck has half of its text in it."""

    def __init__(self, file: Any, crash: Crash) -> None:
        self._file, self._crash = file, crash

    def write(self, content: Any) -> Any:
        """Writes."""

        def halve() -> None:
            self._file.write(content[: len(content) // 2])
            self._file.flush()

        self._crash.step("write", halve)
        return self._file.write(content)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __iter__(self) -> Any:
        return iter(self._file)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
