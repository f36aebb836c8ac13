"""`SHA256SUMS` holds the SHA-256 of the files of a checkpoint without a report, in the form of `sha256sum --check`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

CHECKSUMS = "SHA256SUMS"
# The star says that the file was read as bytes; names of weight files have no backslash, which would be escaped.
_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")


def sha256_of(path: Path) -> str:
    """Returns SHA-256 of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_checksums(directory: Path, hashes: Mapping[str, str], *unhashed: str) -> None:
    """Writes `hashes`, SHA-256 by the name of each file, and hashes the files `unhashed` itself."""
    sums = {**hashes, **{name: sha256_of(directory / name) for name in unhashed}}
    lines = [f"{digest}  {name}\n" for name, digest in sorted(sums.items())]
    (directory / CHECKSUMS).write_text("".join(lines), encoding="utf-8")


def read_checksums(file: Path) -> dict[str, str]:
    """Returns the SHA-256 of each file by its name; ValueError for a file of another form."""
    hashes = {}
    for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        fields = _LINE.fullmatch(line)
        if fields is None:
            raise ValueError(f"{file}: line {number} is no SHA-256 with a file's name; restore it, or delete the file")
        hashes[fields[2]] = fields[1]
    return hashes
