"""The notebooks of examples/ run on SmolLM2-135M: `python tests/notebook_outputs.py` writes their outputs again.

`test_documented_commands.py` compares: the same words, and numbers within a tenth, because processors add in their own
orders and a choice of formats may turn on the last digit.
"""

from __future__ import annotations

import io
import json
import os
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e-?\d+)?")
_TOLERANCE = 0.1


def run(notebook: Path) -> list[str]:
    """Returns what each code cell prints; they run in the folder of the examples, as Jupyter runs them."""
    names: dict[str, Any] = {}
    printed = []
    before = Path.cwd()
    os.chdir(EXAMPLES)
    try:
        for cell in _code_cells(json.loads(notebook.read_text())):
            with redirect_stdout(io.StringIO()) as text:
                exec(compile("".join(cell["source"]), notebook.name, "exec"), names)
            printed.append(text.getvalue())
    finally:
        os.chdir(before)
    return printed


def stored(notebook: Path) -> list[str]:
    """Returns the outputs in a notebook, cell by cell."""
    cells = _code_cells(json.loads(notebook.read_text()))
    return ["".join(line for output in cell["outputs"] for line in output.get("text", ())) for cell in cells]


def differences(before: str, after: str) -> list[str]:
    """Returns the lines that differ in a word, or in a number by more than a tenth; bars are drawn from numbers."""
    lines = [[line.replace("█", "") for line in text.splitlines()] for text in (before, after)]
    if len(lines[0]) != len(lines[1]):
        return [f"{len(lines[0])} lines, now {len(lines[1])}"]
    return [f"{old!r}, now {new!r}" for old, new in zip(*lines, strict=True) if not _alike(old, new)]


def _alike(old: str, new: str) -> bool:
    numbers = [list(map(float, _NUMBER.findall(line))) for line in (old, new)]
    # A tenth of a loss, one layer of a count.
    close = all(
        abs(a - b) <= max(_TOLERANCE * abs(a), 1.0 if a == int(a) else 0.0) for a, b in zip(*numbers, strict=False)
    )
    return close and _NUMBER.sub("#", old).split() == _NUMBER.sub("#", new).split()


def _code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def main() -> None:
    """Writes the outputs of all notebooks again."""
    for path in NOTEBOOKS:
        notebook = json.loads(path.read_text())
        for cell, text in zip(_code_cells(notebook), run(path), strict=True):
            lines = text.splitlines(keepends=True)
            cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
        print(f"{path.name} is written")


if __name__ == "__main__":
    main()
