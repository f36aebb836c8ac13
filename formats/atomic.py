"""Files and directories are written whole or not at all, whatever stops the process or the machine.

What is new is built under a temporary name beside its place, brought to the disk (`fsync`), and renamed. A reader sees
the old or the new, never a half and never nothing. Linux can exchange two directories in one step; elsewhere a
directory is moved away first, and comes back when a later run finds that the new one never arrived.

A temporary directory is locked by the process that fills it. One that is not locked was left by a process that died,
and the next process that writes to the same place deletes it.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux's fcntl.h


def write_atomically(path: str | Path, text: str) -> None:
    """Writes a text file; what was under its name stays there until the new one is on the disk.

    Raises:
        OSError: it cannot be written; the old file is as it was.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        sync(beside)
        beside.replace(path)
        sync(path.parent)
    finally:
        beside.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Brings a file, or the names in a directory, to the disk."""
    if sys.platform == "win32" and path.is_dir():
        return  # it opens no directory
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(directory: Path) -> None:
    """Brings a directory and everything in it to the disk."""
    for folder, _, files in os.walk(directory, topdown=False):
        for name in files:
            sync(Path(folder, name))
        sync(Path(folder))


def put_file(made: Path, path: Path) -> None:
    """Puts a finished file under its name."""
    sync(made)
    os.replace(made, path)
    sync(path.parent)


@contextmanager
def temporary_directory(path: Path) -> Iterator[Path]:
    """A directory beside `path`, to be renamed to it or deleted at the end; those that dead processes left go first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in _left_over(path, "new"):
        handle = _lock(left, wait=False)
        if handle is not None:
            shutil.rmtree(left, ignore_errors=True)
            os.close(handle)
    while True:
        made = Path(tempfile.mkdtemp(prefix=f".{path.name}.new.", dir=path.parent))
        handle = _lock(made, wait=True)
        if made.exists():  # otherwise another process took it, before it was locked, for a dead one's
            break
        if handle is not None:
            os.close(handle)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        if handle is not None:
            os.close(handle)


def recover(path: Path) -> None:
    """Brings back a directory that `replace_directory` moved away in a process that died before the new one came."""
    for old in _left_over(path, "old"):
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(path)


def replace_directory(new: Path, path: Path) -> None:
    """Puts the directory `new` at `path`; what was there is then at `new`, or gone.

    Raises:
        OSError: it cannot be put there; `path` is as it was.
    """
    sync_tree(new)
    if not path.exists():
        new.rename(path)
    elif not _exchange(new, path):
        old = Path(tempfile.mkdtemp(prefix=f".{path.name}.old.", dir=path.parent))
        try:
            path.rename(old)
            new.rename(path)
        except BaseException:
            if not path.exists():
                old.rename(path)
            shutil.rmtree(old, ignore_errors=True)
            raise
        shutil.rmtree(old, ignore_errors=True)
    sync(path.parent)


def _exchange(a: Path, b: Path) -> bool:
    """Exchanges two directories in one step; False where the system or the file system cannot."""
    if sys.platform != "linux":
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    failed: int = rename(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE)
    return not failed


def _left_over(path: Path, kind: str) -> list[Path]:
    mark = re.compile(rf"\.{re.escape(path.name)}\.{kind}\.[a-z0-9_]{{8}}")
    return [each for each in path.parent.iterdir() if mark.fullmatch(each.name) and each.is_dir()]


def _lock(directory: Path, *, wait: bool) -> int | None:
    """A handle that holds the lock of a directory until it is closed; None where it cannot be had."""
    if sys.platform == "win32":
        return None
    import fcntl

    handle = None
    try:
        handle = os.open(directory, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:  # another process has it, or the file system has no locks
        if handle is not None:
            os.close(handle)
        return None
    return handle
