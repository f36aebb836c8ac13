"""The files that a model is read from must not change while it is read; `WatchedFiles` notices when one does."""

from __future__ import annotations

import hashlib
from pathlib import Path

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".pt2")


class WatchedFiles:
    """The files that a model is read from, as they are at this moment.

    Args:
        path: the model's directory or file; None for a model that is only in memory.
    """

    def __init__(self, path: Path | None) -> None:
        self.files = [path] if path is not None else []
        if path is not None and path.is_dir():
            of_model = (file for file in path.iterdir() if file.name == "config.json" or file.suffix in _WEIGHTS)
            # Only config and weights: other files of the directory may change, and the weights are still those of one
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
