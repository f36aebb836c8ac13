"""Output directories are written whole or not at all.

A directory is built under a temporary name beside its destination and renamed when everything is in it, so that a
full disk, a crash or Ctrl-C never leaves half a checkpoint under the name a server loads. `quant.formats.atomic` says
how.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from quant.formats.atomic import claimed, recover, replace_directory, sync_tree, temporary_directory, write_atomically
from quant.recipes.plan import PLAN_FILE

OURS = (PLAN_FILE, "receipt.json")
"""Files that mark a directory as one that Blockscale wrote, and may replace."""
NEW, COMPLETE = "new", "complete"
"""In a working directory: the checkpoint that is being built, and the file that says that it is whole.

`complete` holds the inode of `new`, which tells the checkpoint from the one that it has changed places with.
"""


@contextmanager
def new_directory(
    path: Path, *, overwrite: bool, work: Path | None = None, kept: Callable[[], Collection[str]] = tuple
) -> Iterator[Path]:
    """Gives a temporary directory that becomes `path` when the block ends without an error.

    Args:
        path: where it will be.
        overwrite: replaces what is there.
        work: a directory beside `path` in which it is built; `finish_directory` ends what is stopped at the very end.
        kept: names of files that stay in `work` for the next run, where one was stopped.

    Raises:
        OSError: another process writes to `path`, or it is not to be replaced, as `check_destination` says.
    """
    with claimed(path):
        check_destination(path, overwrite=overwrite)
        path = path.resolve()  # what a link points to is replaced, not the link
        with temporary_directory(path) if work is None else _working_directory(work, kept) as temporary:
            yield temporary
            temporary.chmod(0o777 & ~umask())
            if work is None:
                replace_directory(temporary, path)
            else:
                sync_tree(temporary)
                write_atomically(work / COMPLETE, str(temporary.stat().st_ino))
                finish_directory(work, path)


@contextmanager
def _working_directory(work: Path, kept: Callable[[], Collection[str]]) -> Iterator[Path]:
    new = work / NEW
    (work / COMPLETE).unlink(missing_ok=True)
    _empty(new, kept())
    new.mkdir(exist_ok=True)
    try:
        yield new
    except BaseException:
        if not (work / COMPLETE).exists():
            _empty(new, kept())
        raise


def _empty(directory: Path, kept: Collection[str]) -> None:
    """Removes what is in a directory, and the directory itself where nothing is kept."""
    if not kept:
        shutil.rmtree(directory, ignore_errors=True)
        return
    for place in directory.iterdir():
        if place.name not in kept:
            shutil.rmtree(place) if place.is_dir() else place.unlink()


def finish_directory(work: Path, path: Path) -> None:
    """Puts the directory that is whole in `work` under its name, if it is not there yet."""
    new, path = work / NEW, path.resolve()
    if not (new.exists() and (work / COMPLETE).exists()):
        return
    inode = int((work / COMPLETE).read_text() or 0)
    if not path.exists() or path.stat().st_ino != inode:
        replace_directory(new, path)
    shutil.rmtree(new, ignore_errors=True)  # what was at `path`


def check_destination(path: Path, *, overwrite: bool) -> None:
    """Checks, before anything slow, that a directory can be put at `path`.

    Raises:
        FileExistsError: it is a file, or below one; it holds files and `overwrite` is False, or they are not what
            Blockscale writes.
        OSError: it is a mount point or holds the current directory, neither of which can be replaced whole; or
            nothing can be written there.
    """
    for place in (path, *path.parents):
        if place.exists() and not place.is_dir():
            raise FileExistsError(f"{place} is a file; name a directory for the checkpoint")
    if os.path.ismount(path):
        raise OSError(f"{path} is a mount point, which cannot be replaced whole; name a directory in it")
    whole = path.resolve()
    if whole.parent.is_dir():
        recover(whole)
    if whole in (Path.cwd(), *Path.cwd().parents):
        raise OSError(f"{path} is the current directory or above it; name a directory in it")
    _check_files(path, overwrite)
    parent = next(place for place in whole.parents if place.is_dir())
    try:
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise OSError(f"{path}: {parent} cannot be written to ({error.strerror}); choose another directory") from None


def check_apart(out: Path, *sources: str | Path | None) -> None:
    """Checks that writing `out` destroys nothing that a command reads, links resolved.

    Args:
        out: a file or directory that is to be written.
        sources: files or directories that are read; None, and names that are no path, are passed over.

    Raises:
        FileExistsError: `out` is a source, holds one or a file that one links to, or lies in one.
    """
    whole = out.resolve()
    for source in (Path(source).expanduser() for source in sources if source is not None and os.path.exists(source)):
        place = source.resolve()
        links = [each.resolve() for each in place.iterdir() if each.is_symlink()] if place.is_dir() else []
        for read in (place, *links):
            if whole == read or whole in read.parents:
                raise FileExistsError(f"--out {out} is or holds {source}, which it would replace; name another place")
        if place in whole.parents:
            raise FileExistsError(f"--out {out} lies in {source}, which is only read; name a place outside it")


def _check_files(path: Path, overwrite: bool) -> None:
    files = sorted(place.name for place in path.iterdir()) if path.is_dir() else []
    if not files:
        return
    if not overwrite:
        raise FileExistsError(f"{path} is not empty; pass --overwrite to replace it, or choose another directory")
    if not any(name in files for name in OURS):
        raise FileExistsError(
            f"{path} holds {files[0]} and no {' or '.join(OURS)}, so it is not ours to delete: --overwrite replaces "
            "only what Blockscale wrote; choose another directory"
        )


def umask() -> int:
    """The mask that new files get, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
