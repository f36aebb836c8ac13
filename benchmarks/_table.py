"""This file prints what every benchmark prints: the machine, the versions and a table, in Markdown or as JSON.

A row is a dict from column title to value. Numbers are rounded for the table and left alone in the JSON.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import torch

from quant.base.json_files import json_text
from quant.base.processor import describe_processor

Row = Mapping[str, object]


def machine(threads: int | None = None) -> dict[str, str]:
    """The processor and its vector units, the threads in use, the memory and, where there is one, the GPU."""
    threads = threads or torch.get_num_threads()
    cpu = f"{describe_processor()}, {threads} of {os.cpu_count()} cores"
    facts = {"cpu": cpu, "memory": f"{_memory_gib():.0f} GiB"}
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def versions(*distributions: str) -> dict[str, str]:
    """Versions of Python, torch, blockscale and the named distributions, `not installed` where one is missing."""
    found = {"python": platform.python_version()}
    for name in ("torch", "blockscale", *distributions):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def show(
    title: str,
    header: Mapping[str, str],
    rows: Sequence[Row],
    notes: Sequence[str] = (),
    json_path: Path | None = None,
) -> None:
    """Prints the title, the header facts, the rows as a Markdown table and the notes below it.

    Where a `json_path` is given, the same facts are written there.
    """
    print(f"## {title}\n")
    print("; ".join(f"{key} {value}" for key, value in header.items()), end="\n\n")
    print(markdown(rows))
    for note in notes:
        print(f"\n{note}")
    if json_path:
        write_json(json_path, title, header, rows, notes)


def show_all(
    title: str, header: Mapping[str, str], tables: Mapping[str, Sequence[Row]], json_path: Path | None = None
) -> None:
    """Shows each table under its own title, and writes the rows of all to `json_path` where one is given."""
    for name, rows in tables.items():
        show(name, header, rows)
    if json_path:
        write_json(json_path, title, header, [row for rows in tables.values() for row in rows])


def markdown(rows: Sequence[Row]) -> str:
    """A Markdown table with the columns of the first row, numbers to the right."""
    columns = list(rows[0])
    cells = [[_text(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in [columns, *cells]) for i in range(len(columns))]
    right = [all(isinstance(row.get(column), int | float | None) for row in rows) for column in columns]
    rule = ["-" * (width - 1) + (":" if to_right else "-") for width, to_right in zip(widths, right, strict=True)]
    lines = [columns, rule, *cells]
    return "\n".join(
        "| " + " | ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True)) + " |"
        for line in lines
    )


def write_json(
    path: Path, title: str, header: Mapping[str, str], rows: Sequence[Row], notes: Sequence[str] = ()
) -> None:
    """Writes the same facts as JSON, numbers unrounded."""
    report = {"title": title, "header": dict(header), "rows": [dict(row) for row in rows], "notes": list(notes)}
    path.write_text(json_text(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _text(value: object) -> str:
    if value is None:
        return "–"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
