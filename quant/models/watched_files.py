"""The files that a model is read from must not change while it is read; `WatchedFiles` notices when one does."""

from __future__ import annotations

import hashlib
from pathlib import Path

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".pt2")
_PIECES, _BYTES = 64, 1 << 20  # of `spot_hash`


class WatchedFiles:
    """The files that a model is read from, as they are at this moment.

    Args:
        path: the model's directory or file; None for a model that is only in memory.
    """

    def __init__(self, path: Path | None) -> None:
        self.files = [path] if path is not None else []
        if path is not None and path.is_dir():
            of_model = (file for file in path.iterdir() if file.name == "config.json" or file.suffix in _WEIGHTS)
            # Only config and weights: other files of the directory may change, and the weights still belong to one
            # model.
            self.files = sorted(of_model)
        self._stamps = {file: _stamp(file) for file in self.files}

    def fingerprints(self) -> dict[str, str]:
        """Returns the size, time of the last change and a hash of the header of each file, by name.

        Raises:
            ValueError: as `check`.
        """
        self.check()
        return {file.name: f"{stamp} {_header(file)}" for file, stamp in self._stamps.items()}

    def changed(self) -> Path | None:
        """Returns the first file that has changed; None where none has."""
        return next((file for file, stamp in self._stamps.items() if _stamp(file) != stamp), None)

    def check(self) -> None:
        """Raises ValueError, which names the file, where one has changed."""
        if (file := self.changed()) is not None:
            what = "changed" if file.exists() else "disappeared"
            raise ValueError(
                f"{file}: this file of the model {what} while it was read; put it back, and run the command again"
            )


def _header(file: Path) -> str:
    with file.open("rb") as opened:
        if file.suffix == ".safetensors":
            # The header lists the names, shapes and offsets of all tensors, so other models differ in it; hashing the
            # weights would read gigabytes. 100 MB is the format's own limit, and stops a damaged length from reading
            # the whole file.
            head = opened.read(8)
            head += opened.read(min(int.from_bytes(head, "little"), 100_000_000))
        else:
            head = opened.read(1 << 16)
    return hashlib.sha256(head).hexdigest()


def _stamp(file: Path) -> str:
    try:
        status = file.stat()
    except OSError:
        return "missing"
    return f"{status.st_size} {status.st_mtime_ns}"


def spot_hash(file: Path) -> str:
    """Returns a hash of a file's size, its beginning, and pieces that are spread evenly over it.

    It notices another model or revision, not a flipped bit.
    """
    size = file.stat().st_size
    # The size first: it already distinguishes most pairs of files, and pieces do not cover it.
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as opened:
        if size <= _PIECES * _BYTES:
            digest.update(opened.read())
        else:
            digest.update(opened.read(_BYTES))  # the header, with the names and shapes
            for piece in range(1, _PIECES):
                # Piece 63 ends with the last byte of the file.
                opened.seek(piece * (size - 4096) // (_PIECES - 1))
                digest.update(opened.read(4096))
    return digest.hexdigest()
