"""Tables hold the best measured launch for each shape: shipped tables, and tables that `quant tune` writes.

A table is a JSON file for one GPU: key "format|layout|tokens|out|in", value a `Choice` with its time. The name of the
file that `quant tune` writes holds the versions of Triton and of this package, so an update of either starts a new
file. Tokens are powers of two up to 64, then multiples of 64; each entry serves the token counts up to its own.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from quant.base.atomic import write_atomically
from quant.formats.format import Format
from quant.base.json_files import read_json
from quant.kernels.linear import tiles
from quant.kernels.base.hardware import Hardware
from quant.kernels.linear.tiles import Choice

# With at most this many tokens, reading the weight takes all the time, and a launch for more tokens serves fewer. From
# there to `matmul_tiles.FEW`, each power of two has its own tile.
_SAME = 16
edition = 0
"""Counts the changes of this machine's tables in this process: a choice from an earlier one is out of date."""
_SHIPPED = Path(__file__).resolve().parent / "tuned"


@dataclass(frozen=True)
class MeasuredChoice:
    """A measured candidate: microseconds a call, and its largest error relative to the largest output."""

    choice: Choice
    microseconds: float
    error: float


def look_up(gpu: Hardware, format: Format, tokens: int, shape: tuple[int, int], prepacked: bool) -> Choice | None:
    """Returns the launch measured for a shape and this number of tokens, or for the next larger one, or None."""
    table, count = _table(gpu.name), tiles.bucket(tokens)
    if count <= tiles.FEW:
        most = max(_SAME, count)
    elif prepacked:
        # Tiles that go evenly into the SMs for one number of tokens do not for another; the guess knows.
        most = count
    else:
        most = 8 * count
    while count <= most:
        choice = table.get(key(format, count, shape, prepacked))
        if choice is not None:
            return choice
        count = 1 << count.bit_length()
    return None


def key(format: Format, tokens: int, shape: tuple[int, int], prepacked: bool) -> str:
    """Returns the name of an entry; to the kernel for prepacked weights, MXFP4 is NVFP4."""
    layout = "nvfp4|prepacked" if prepacked else f"{format}|checkpoint"
    return f"{layout}|{tiles.bucket(tokens)}|{shape[0]}|{shape[1]}"


@lru_cache(maxsize=8)
def _table(gpu: str) -> dict[str, Choice]:
    """Returns shipped entries, and entries measured here on top."""
    entries: dict[str, Choice] = {}
    for path in (_SHIPPED / f"{gpu}.json", cache_file(gpu)):
        if path.exists():
            entries |= read_json(path, "a table of launches; delete it", _choices)
    return entries


def _choices(document: Any) -> dict[str, Choice]:
    try:
        return {name: tiles.from_dict(entry["choice"]) for name, entry in document["entries"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def count_entries(gpu: Hardware) -> int:
    """Returns how many shapes have a measured launch."""
    return len(_table(gpu.name))


def cache_file(gpu: str) -> Path:
    """Returns the file with the launches measured here: `$BLOCKSCALE_CACHE`, else `~/.cache/blockscale`."""
    folder = Path(os.environ.get("BLOCKSCALE_CACHE") or Path.home() / ".cache" / "blockscale")
    safe = "".join(c if c.isalnum() else "-" for c in gpu.lower())
    return folder / f"tuned-{safe}-triton{_version('triton')}-blockscale{_version('blockscale')}.json"


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "none"


def store(gpu: Hardware, entries: dict[str, MeasuredChoice]) -> Path:
    """Adds measured entries to this machine's table; the file is replaced as a whole.

    Returns:
        The file.
    """
    path = cache_file(gpu.name)
    table = {"gpu": gpu.name, "entries": json.loads(path.read_text())["entries"] if path.exists() else {}}
    table["entries"].update({name: to_entry(timing) for name, timing in entries.items()})
    write_atomically(path, json.dumps(table, indent=1, sort_keys=True, allow_nan=False) + "\n")
    _table.cache_clear()
    global edition
    edition += 1
    return path


def to_entry(timing: MeasuredChoice) -> dict[str, Any]:
    """Returns the entry of a table, JSON-ready."""
    return {"choice": tiles.to_dict(timing.choice), "microseconds": round(timing.microseconds, 2)}
