"""Files and directories are written whole or not at all, whatever stops the process or the machine.

New content is built under a temporary name in the same directory, brought to the disk (`fsync`), and renamed. A reader
sees the old or the new, never a half and never nothing. Linux can exchange two directories in one step; elsewhere a
directory is moved away first, and comes back when a later run finds that the new one never arrived.

A temporary file or directory is locked by the process that fills it. One that is not locked was left by a process that
died, and the next process that writes to the same place deletes it. `claimed` locks the destination itself while a
command works on its result.
"""

import ctypes
import errno
import os
import re
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_CLAIMED: set[Path] = set()  # by this process
# Directories beside a destination: one that becomes it, and one for the finished steps of a run.
_TEMPORARY = re.compile(r"\.(.+)\.(new\.[a-z0-9_]{8}|partial)")
_FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux's fcntl.h


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Writes a file; an old file of its name stays until the new one is on the disk."""
    path = Path(path)
    try:
        with _temporary(path, Path.touch) as beside:
            beside.write_bytes(content.encode() if isinstance(content, str) else content)
            put_file(beside, path)
    except OSError as error:
        raise not_written(path, error) from error  # with the name that the user knows, not the temporary one's


def destination(path: Path) -> Path:
    """Returns the place that a temporary file is for: `out` for `.out.new.1a2b3c4d/model.safetensors`."""
    for depth, part in enumerate(path.parts):
        if match := _TEMPORARY.fullmatch(part):
            return Path(*path.parts[:depth], match[1])
    return path


def not_written(path: Path, error: OSError) -> OSError:
    """Returns the error that names the destination, why it could not be written and, if the disk is full, a way out."""
    way_out = "; make room, and run the same command again" if error.errno in _FULL else ""
    return OSError(f"{destination(path)} cannot be written: {error.strerror or error}{way_out}")


def sync(path: Path) -> None:
    """Brings a file, or the names in a directory, to the disk."""
    if sys.platform == "win32" and path.is_dir():
        return  # it opens no directory
    # Windows brings only what was opened for writing to the disk.
    handle = os.open(path, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)
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


def put_file(temporary: Path, path: Path) -> None:
    """Puts a finished file under its name."""
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)


@contextmanager
def temporary_directory(path: Path) -> Iterator[Path]:
    """Makes a directory next to `path`, to be renamed to it or deleted at the end; dead processes' go first."""
    with _temporary(path, lambda directory: directory.mkdir(mode=0o700)) as directory:
        yield directory


@contextmanager
def _temporary(path: Path, make: Callable[[Path], None]) -> Iterator[Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in _left_over(path, "new"):
        handle = _lock(left, wait=False)
        if handle is not None:
            _remove(left)
            os.close(handle)
    while True:
        temporary = path.with_name(f".{path.name}.new.{secrets.token_hex(4)}")
        make(temporary)
        handle = _lock(temporary, wait=True)
        if temporary.exists():  # otherwise another process took it, before it was locked, for a dead one's
            break
        if handle is not None:
            os.close(handle)
    try:
        yield temporary
    finally:
        _remove(temporary)
        if handle is not None:
            os.close(handle)


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Claims `path` while open: no other process can, and this one may claim it again.

    The lock is on a file beside `path`, and ends with the process: a file that a dead process left is no obstacle.
    """
    path = path.resolve()
    if sys.platform == "win32" or path in _CLAIMED:
        yield
        return
    new_parents = [parent for parent in path.parents if not parent.exists()]
    file = path.parent / f".{path.name}.lock"
    _CLAIMED.add(path)
    handle = None
    try:
        handle = _claim(file, path)
        yield
    except OSError as error:
        # A full disk is no news about any file; the message says which destination did not fit.
        if error.errno in _FULL:
            raise not_written(path, error) from error
        raise
    finally:
        _CLAIMED.discard(path)
        if handle is not None:
            file.unlink(missing_ok=True)
            os.close(handle)
        for parent in new_parents:
            with suppress(OSError):  # there is something in it now
                parent.rmdir()


def _claim(file: Path, path: Path) -> int | None:
    import fcntl

    while True:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:  # nothing can be written there, and who tries says why
            return None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(handle, 20).decode(errors="replace").strip()
            os.close(handle)
            who = f"process {owner}" if owner.isdecimal() else "another process"
            raise OSError(f"{path}: {who} is writing to it; wait for it, or stop it") from None
        except OSError:  # the file system has no locks
            return handle
        if file.exists() and os.path.samestat(os.fstat(handle), file.stat()):
            os.ftruncate(handle, 0)
            os.write(handle, str(os.getpid()).encode())
            return handle
        os.close(handle)  # its owner has just ended, and deleted it


def recover(path: Path) -> None:
    """Brings back a directory that `replace_directory` moved away in a process that died before the new one came."""
    for old in _left_over(path, "old"):
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(path)


def replace_directory(new: Path, path: Path) -> None:
    """Puts the directory `new` at `path`; an old directory there moves to `new`, or is deleted."""
    sync_tree(new)
    if not path.exists():
        new.rename(path)
    elif not _exchange(new, path):
        old = Path(tempfile.mkdtemp(prefix=f".{path.name}.old.", dir=path.parent))
        try:
            old.rmdir()  # Windows renames over no directory, not even an empty one
            path.rename(old)
            new.rename(path)
        except BaseException as error:
            if not path.exists():
                old.rename(path)
            shutil.rmtree(old, ignore_errors=True)
            if isinstance(error, PermissionError):  # Windows renames no directory of which a program maps a file
                raise OSError(f"{path} cannot be replaced: close what has its files open, and try again") from error
            raise
        shutil.rmtree(old, ignore_errors=True)
    sync(path.parent)


def _exchange(a: Path, b: Path) -> bool:
    """Exchanges two directories in one step; False where the system or the file system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    return rename is not None and not rename(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE)


def _left_over(path: Path, kind: str) -> list[Path]:
    mark = re.compile(rf"\.{re.escape(path.name)}\.{kind}\.[a-z0-9_]{{8}}")
    return [each for each in path.parent.iterdir() if mark.fullmatch(each.name) and not each.is_symlink()]


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _lock(path: Path, *, wait: bool) -> int | None:
    """Returns a handle that holds the lock of a file or directory until it is closed; None where it cannot be had."""
    if sys.platform == "win32":
        return None
    import fcntl

    handle = None
    try:
        handle = os.open(path, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:  # another process has it, or the file system has no locks
        if handle is not None:
            os.close(handle)
        return None
    return handle
