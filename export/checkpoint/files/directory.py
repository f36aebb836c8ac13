"""Output directories are written whole or not at all.

A directory is built under a temporary name next to its destination and renamed when everything is in it, so that a full
disk, a crash or Ctrl-C never leaves half a checkpoint under the name that a server loads (`quant.base.atomic`).
"""

import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quant.base.atomic import claimed, recover, replace_directory, sync_tree, temporary_directory, write_atomically
from quant.base.errors import UserError, megabytes, option
from quant.base.json_files import read_json, typed
from quant.recipes.plan import PLAN_FILE

DENOISING = "denoising.json"
"""How a pipeline of diffusers was calibrated, and what its denoisers lost; only a quantized one has it."""
OURS = (PLAN_FILE, "receipt.json", DENOISING)
"""Files that mark a directory as one that Blockscale wrote, and may replace."""
NEW, COMPLETE = "new", "complete"
"""In a working directory: the checkpoint that is being built, and the file that says that it is whole.

`complete` holds the inode of `new`. After the exchange with the destination, an older checkpoint is called `new`, and
the inode distinguishes the two.
"""


@contextmanager
def new_directory(
    path: Path, *, overwrite: bool, work: Path | None = None, resumable: Callable[[], Collection[str]] = tuple
) -> Iterator[Path]:
    """Gives a temporary directory that becomes `path` when the block ends without an error.

    It is built in `work`, next to `path`, if that is given: a run that is stopped after the checkpoint is whole and
    before it has its name is completed by `finish_directory`, and the files `resumable` stay for the next run. OSError
    says that another process writes to `path`, or that it is not to be replaced, as `check_destination` does.
    """
    with claimed(path):
        check_destination(path, overwrite=overwrite)
        path = path.resolve()  # a link stays, and its target is replaced
        with temporary_directory(path) if work is None else _working_directory(work, resumable) as temporary:
            yield temporary
            # Only the owner can read temporary directories; the checkpoint gets the usual permissions.
            temporary.chmod(0o777 & ~umask())
            if work is None:
                replace_directory(temporary, path)
            else:
                # The order matters when the machine stops: data on the disk, then the mark, then the exchange.
                sync_tree(temporary)
                write_atomically(work / COMPLETE, str(temporary.stat().st_ino))
                finish_directory(work, path)


@contextmanager
def _working_directory(work: Path, resumable: Callable[[], Collection[str]]) -> Iterator[Path]:
    new = work / NEW
    (work / COMPLETE).unlink(missing_ok=True)
    _remove_all_but(resumable(), new)
    new.mkdir(exist_ok=True)
    try:
        yield new
    except BaseException:
        if not (work / COMPLETE).exists():
            _remove_all_but(resumable(), new)
        raise


def _remove_all_but(names: Collection[str], directory: Path) -> None:
    """Removes the other entries of a directory, and without names the directory itself."""
    if not names:
        shutil.rmtree(directory, ignore_errors=True)
        return
    for entry in directory.iterdir():
        if entry.name not in names:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def finish_directory(work: Path, path: Path) -> None:
    """Puts the directory that is whole in `work` under its name, if it is not there yet."""
    new, path = work / NEW, path.resolve()
    if not (new.exists() and (work / COMPLETE).exists()):
        return
    # Where `path` has the inode already, the exchange was made and only the old checkpoint is left to delete.
    inode = int((work / COMPLETE).read_text(encoding="utf-8") or 0)
    if not path.exists() or path.stat().st_ino != inode:
        replace_directory(new, path)
    shutil.rmtree(new, ignore_errors=True)  # the directory that was at `path` before


def check_destination(path: Path, *, overwrite: bool) -> None:
    """Checks, before any slow work, that a directory can be put at `path`.

    FileExistsError: it is a file, or below one; it holds files and may not be replaced. OSError: it is a mount point,
        holds the current directory, or nothing can be written there.
    """
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"{path} is a file; name a directory for the checkpoint")
    # Of Linux. Two folders of one disk that are bound to each other are no mount point for os.path.ismount.
    table = Path("/proc/self/mountinfo")
    mounts = table.read_bytes().splitlines() if table.is_file() else []
    escaped = str(path.resolve()).translate({ord(each): f"\\{ord(each):03o}" for each in " \t\n\\"})
    if os.path.ismount(path) or os.fsencode(escaped) in (line.split()[4] for line in mounts):
        raise OSError(f"{path} is a mount point, which cannot be replaced whole; name a directory in it")
    whole = path.resolve()
    if whole.parent.is_dir():
        recover(whole)
    if whole in (Path.cwd(), *Path.cwd().parents):
        raise OSError(f"{path} is the current directory or above it; name a directory in it")
    _check_files(path, overwrite)
    check_parents(path, inside=78)  # what the name of a step's file, with its SHA-256, adds


def check_room(path: Path, nbytes: int) -> None:
    """Raises UserError where the disk of `path`, which a command writes in the end, has not that many bytes left."""
    free = shutil.disk_usage(next(each for each in path.resolve().parents if each.exists())).free
    if nbytes > free:
        raise UserError(
            f"{path} takes at least {megabytes(nbytes)}, and its disk has {megabytes(free)} left; make room, or name a "
            f"place on another disk with {option('out')}"
        )


def check_parents(path: Path, inside: int = 0) -> None:
    """Raises FileExistsError or OSError where no file or directory can be made at `path`, with its parents.

    `inside` is the number of characters that paths of files in the directory have more. Windows limits whole paths.
    """
    for ancestor in path.parents:
        if ancestor.exists() and not ancestor.is_dir():
            raise FileExistsError(f"{ancestor} is a file; name a directory that is there or can be made")
    whole = path.resolve()
    parent = next(ancestor for ancestor in whole.parents if ancestor.is_dir())
    # A name as long as that of a temporary directory at `path`, and on Windows a path as long as the longest in it.
    more = len(str(whole.parent)) - len(str(parent)) + inside if sys.platform == "win32" else 0
    try:
        with tempfile.NamedTemporaryFile(dir=parent, prefix=f".{whole.name}.new.", suffix="x" * more):
            pass
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG or (sys.platform == "win32" and error.errno == errno.ENOENT):
            raise OSError(
                f"{path}: {parent} takes no name that is as long as those of its temporary files; give a shorter one"
            ) from None
        raise OSError(f"{path}: {parent} cannot be written to ({error.strerror}); choose another directory") from None


def check_apart(out: Path, *sources: str | Path | None, named: str = "out") -> None:
    """Raises FileExistsError where writing `out` would replace, or add to, a path that is read, links resolved."""
    whole = out.resolve()
    for source in (Path(source).expanduser() for source in sources if source is not None and os.path.exists(source)):
        # Files in the cache of the Hugging Face hub are links to blobs in another folder.
        target = source.resolve()
        links = [entry.resolve() for entry in target.iterdir() if entry.is_symlink()] if target.is_dir() else []
        for read in (target, *links):
            if whole == read or whole in read.parents:
                raise FileExistsError(
                    f"{option(named, out)} is or holds {source}, which it would replace; name another place"
                )
        if target in whole.parents:
            raise FileExistsError(f"{option(named, out)} lies in {source}, which is only read; name a place outside it")


def _check_files(path: Path, overwrite: bool) -> None:
    files = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
    if files and not any(name in files for name in OURS):
        raise FileExistsError(
            f"{path} holds {files[0]} and no {' or '.join(OURS[:2])}, so it is not ours to delete: "
            f"{option('overwrite', True)} replaces only what Blockscale wrote; choose another directory"
        )
    if files and not overwrite:
        raise FileExistsError(
            f"{path} is not empty; pass {option('overwrite', True)} to replace it, or choose another directory"
        )


def umask() -> int:
    """Returns the mask that new files get, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def saved_report(directory: Path) -> dict[str, Any] | None:
    """Returns the fields of report.json in `directory`; None without one.

    Raises:
        ValueError: not JSON, or its layers have no name and SNR, which `quant inspect` shows.
    """
    file = directory / "report.json"
    return read_json(file, "a valid report", _checked) if file.is_file() else None


def _checked(document: Any) -> dict[str, Any]:
    fields: dict[str, Any] = typed(dict[str, Any], document, "report")
    for index, layer in enumerate(typed(list[dict[str, Any]], fields.get("layers"), "layers")):
        typed(str, layer.get("name"), f"layers[{index}].name")
        typed(float | None, layer.get("snr_db"), f"layers[{index}].snr_db")
    return fields
