"""Writes tables of README.md and docs/benchmarks.md, and README's figure, from measured runs.

    python benchmarks/result_tables.py

Losses are those of data/accuracy_h100.json. Its `tables` have the rows that accuracy.py printed, and its `headline`
names pairs of them: a setting of ours and the best peer at the same bits. Times of low-precision training are what
`training_lowprecision.py PART --json` wrote to data/training_PART_h100.json. In a page a table stands between two
comments that name it; everything else in the page stays.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import _table
from _svg import GREY, rectangle, text, write

ROOT = Path(__file__).parents[1]
RUN = Path(__file__).parent / "data" / "accuracy_h100.json"
TRAINING = ("layers", "sizes", "experts", "attention", "operands")  # parts of training_lowprecision.py
TEXTS = ("WikiText-2", "Python", "prose about Python")
OURS, PEER = "#0b7a75", "#b8c4ce"
Row = Mapping[str, Any]


def cell(value: object) -> str:
    """A cell as the run printed it: losses with three digits behind the point."""
    return f"{value:.3f}" if isinstance(value, float) and value < 1 else str(value)


def table(name: str, rows: Sequence[Row]) -> str:
    """A table of docs/benchmarks.md, whose name heads the first column."""
    columns = ["method", *(column for column in rows[0] if column not in ("method", "bold"))]
    lines = [[name, *columns[1:]], ["---", *("---:" for _ in columns[1:])]]
    for row in rows:
        bold = {"row": {"method", *TEXTS}, "losses": set(TEXTS)}.get(row.get("bold", ""), set())
        lines.append([f"**{cell(row[column])}**" if column in bold else cell(row[column]) for column in columns])
    return markdown(lines)


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Lines of cells as Markdown; the second line, of dashes, has no spaces."""
    body = ["| " + " | ".join(line) + " |" for line in lines]
    body[1] = body[1].replace(" ", "")
    return "\n".join(body) + "\n"


def training_tables() -> dict[str, str]:
    """The tables of low-precision training, by their names in the page."""
    runs = {part: RUN.with_name(f"training_{part}_h100.json") for part in TRAINING}
    return {
        f"training, {part}": _table.markdown(json.loads(path.read_text(encoding="utf-8"))["rows"]) + "\n"
        for part, path in runs.items()
    }


def headline(run: Row) -> list[dict[str, Any]]:
    """The pairs of README: a setting, our solver, our row, the best peer's row."""

    def row(name: str, method: str) -> Row:
        return next(row for row in run["tables"][name] if row["method"] == method)

    return [{**pair, "ours": row(*pair["ours"]), "peer": row(*pair["peer"])} for pair in run["headline"]]


def headline_table(run: Row) -> str:
    """README's table."""
    lines = [["", "Blockscale", "KL", f"best peer: ModelOpt {run['header']['nvidia-modelopt']}", "KL"]]
    lines.append(["---", "---", "---:", "---", "---:"])
    for pair in headline(run):
        ours, peer = (" / ".join(cell(pair[side][column]) for column in TEXTS) for side in ("ours", "peer"))
        lines.append([pair["setting"], pair["solver"], f"**{ours}**", pair["peer_name"], peer])
    return markdown(lines)


def draw(run: Row, path: Path) -> None:
    """Draws README's figure: KL on WikiText-2 as bars, ours above the best peer at the same bits."""
    pairs, left, unit = headline(run), 250, 1300  # pixels a nat
    parts = [text(24, 30, "Loss at the same bits: KL to the original on WikiText-2, in nats (less is better)",
                  size=15, bold=True)]  # fmt: skip
    for index, pair in enumerate(pairs):
        y = 52 + 52 * index
        parts.append(text(left - 12, y + 25, pair["setting"], anchor="end"))
        for offset, colour, side in ((0, OURS, "ours"), (19, PEER, "peer")):
            loss = pair[side][TEXTS[0]]
            name, ink = ("Blockscale", OURS) if side == "ours" else (pair["peer_name"], GREY)
            parts.append(rectangle(left, y + offset, loss * unit, 17, colour))
            parts.append(text(left + loss * unit + 6, y + offset + 13, f"{loss:.3f} {name}", size=12, fill=ink))
    foot = 52 + 52 * len(pairs) + 14
    source = (
        "SmolLM2-135M from a Q4_1 file, calibrated on one mixture of texts, on an H100. "
        f"Peer: ModelOpt {run['header']['nvidia-modelopt']}."
    )
    parts.append(text(24, foot, source, size=12, fill=GREY))
    write(path, 800, foot + 18, "KL divergence of Blockscale and of ModelOpt, at the same bits", parts)


def put(page: Path, tables: Mapping[str, str]) -> None:
    """Replaces the tables of a page, each between `<!-- table: NAME -->` and `<!-- end of table -->`.

    Blank lines keep the comments from being part of the table in Python-Markdown, which builds the site.
    """
    content = page.read_text(encoding="utf-8")
    for name, lines in tables.items():
        pattern = rf"(<!-- table: {re.escape(name)} -->\n\n).*?(\n<!-- end of table -->)"
        content, count = re.subn(
            pattern, lambda match, lines=lines: match[1] + lines + match[2], content, flags=re.DOTALL
        )
        if count != 1:
            raise SystemExit(f"{page}: {count} places for the table {name!r}, expected one between its two comments")
    page.write_text(content, encoding="utf-8")


def main(root: Path = ROOT) -> None:
    """Writes README's table and figure, and the tables of docs/benchmarks.md."""
    run = json.loads(RUN.read_text(encoding="utf-8"))
    losses = {name: table(name, rows) for name, rows in run["tables"].items()}
    put(root / "docs" / "benchmarks.md", losses | training_tables())
    put(root / "README.md", {"headline": headline_table(run)})
    draw(run, root / "docs" / "figures" / "results.svg")
    print("README.md, docs/benchmarks.md and docs/figures/results.svg are written")


if __name__ == "__main__":
    main()
