"""The notebooks of examples/: `PYTHONPATH=. python tests/notebook_outputs.py [NAME …]` writes their outputs again.

`test_documented_commands.py` compares: the same words, and numbers within a tenth, because processors add in their own
orders and a choice of formats may turn on the last digit.
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e-?\d+)?")
_FRACTION = re.compile(r"\d+\.\d+")
_TOLERANCE = 0.1


def run(notebook: Path, shown: dict[int, list[Any]] | None = None) -> list[str]:
    """Returns what each code cell prints; they run in the folder of the examples, as Jupyter runs them.

    Images that a cell displays go to `shown`, by the number of the cell.
    """
    printed: list[str] = []

    def display(image: Any) -> None:
        if shown is not None:
            shown.setdefault(len(printed), []).append(image)

    names: dict[str, Any] = {"display": display}
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
    """Returns the lines that differ in a word, or in a number by more than a tenth, in whichever order they stand.

    Bars are drawn from numbers, and a list of the largest is in another order where two differ in the last digit.
    """
    lines = [
        sorted((line.replace("█", "") for line in text.splitlines()), key=lambda line: _FRACTION.sub("#", line))
        for text in (before, after)
    ]
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


def _png(image: Any) -> dict[str, Any]:
    """Returns an image of PIL as the output of a cell."""
    image.save(file := io.BytesIO(), "PNG")
    data = {"image/png": base64.b64encode(file.getvalue()).decode(), "text/plain": ["<image>"]}
    return {"data": data, "metadata": {}, "output_type": "display_data"}


def main() -> None:
    """Writes the outputs of all notebooks again, or of those that are named."""
    for path in NOTEBOOKS:
        if sys.argv[1:] and path.stem not in sys.argv[1:]:
            continue
        notebook = json.loads(path.read_text())
        shown: dict[int, list[Any]] = {}
        for index, (cell, text) in enumerate(zip(_code_cells(notebook), run(path, shown), strict=True)):
            lines = text.splitlines(keepends=True)
            cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
            cell["outputs"] += map(_png, shown.get(index, ()))
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
        print(f"{path.name} is written")


if __name__ == "__main__":
    main()
