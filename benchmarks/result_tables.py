"""Writes tables of README.md and docs/benchmarks*.md, and README's figure, from measured runs.

    python benchmarks/result_tables.py

Losses are those that `accuracy.py --only bars --json` wrote to data/accuracy_h100.json, and of a larger model to
data/accuracy_coder_h200.json; `_accuracy_tables.py` says which rows a table has. Times of low-precision training are
what `training_lowprecision.py PART --json` wrote to data/training_PART_h100.json. In a page a table stands between two
comments that name it; everything else in the page stays.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import _table
from _accuracy_tables import (
    DOMAINS,
    TABLES,
    Measured,
    headline,
    headline_table,
    loss_table,
    ratio_table,
    size_table,
    spelled,
)
from _svg import GREY, rectangle, text, write

ROOT = Path(__file__).parents[1]
RUN = Path(__file__).parent / "data" / "accuracy_h100.json"
LARGER = RUN.with_name("accuracy_coder_h200.json")
TRAINING = ("layers", "sizes", "experts", "attention", "operands")  # parts of training_lowprecision.py
OURS, PEER = "#0b7a75", "#b8c4ce"


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


def draw(measured: Measured, peers: str, path: Path) -> None:
    """Draws README's figure: KL on WikiText-2 as bars, ours above the best peer at the same bits."""
    pairs, left, unit = headline(measured), 250, 1000  # pixels a nat: the longest bar leaves room for its label
    parts = [text(24, 30, "Loss at the same bits: KL to the original on WikiText-2, in nats (less is better)",
                  size=15, bold=True)]  # fmt: skip
    for index, (setting, ours, peer) in enumerate(pairs):
        y = 52 + 52 * index
        parts.append(text(left - 12, y + 25, setting, anchor="end"))
        bars = ((0, ours, "Blockscale", OURS, OURS), (19, peer, spelled(peer, measured.kfac_rows), PEER, GREY))
        for offset, row, name, colour, ink in bars:
            loss = measured.loss(row, DOMAINS[0])
            parts.append(rectangle(left, y + offset, loss * unit, 17, colour))
            parts.append(text(left + loss * unit + 6, y + offset + 13, f"{loss:.3f} {name}", size=12, fill=ink))
    foot = 52 + 52 * len(pairs) + 14
    source = f"SmolLM2-135M from a Q4_1 file, calibrated on one mixture of texts, on an H100. Peers: {peers}."
    parts.append(text(24, foot, source, size=12, fill=GREY))
    write(path, 800, foot + 18, "KL divergence of Blockscale and of the best peer, at the same bits", parts)


def put(page: Path, tables: Mapping[str, str]) -> None:
    """Replaces the tables of a page, each between `<!-- table: NAME -->` and `<!-- end of table -->`.

    Blank lines keep the comments from being part of the table in Python-Markdown, which builds the site.
    """
    content = page.read_text(encoding="utf-8")
    for name, lines in tables.items():
        pattern = rf"(<!-- table: {re.escape(name)} -->\n\n)(?:(?!<!-- table).)*?(\n<!-- end of table -->)"
        content, count = re.subn(
            pattern, lambda match, lines=lines: match[1] + lines + match[2], content, flags=re.DOTALL
        )
        if count != 1:
            raise SystemExit(f"{page}: {count} places for the table {name!r}, expected one between its two comments")
    page.write_text(content, encoding="utf-8")


def main(root: Path = ROOT) -> None:
    """Writes README's table and figure, and the tables of docs/benchmarks.md and docs/benchmarks-training.md."""
    run = json.loads(RUN.read_text(encoding="utf-8"))
    measured, versions = Measured(run), run["header"]
    losses = {title: markdown(loss_table(title, measured)) for title in TABLES}
    losses["loss relative to the best peer"] = markdown(ratio_table(measured))
    larger = Measured(json.loads(LARGER.read_text(encoding="utf-8")))
    losses["at both sizes"] = markdown(size_table({"135M": measured, "0.5B": larger}))
    put(root / "docs" / "benchmarks.md", losses)
    put(root / "docs" / "benchmarks-training.md", training_tables())
    put(root / "README.md", {"headline": markdown(headline_table(measured))})
    peers = f"ModelOpt {versions['nvidia-modelopt']}, llm-compressor {versions['llmcompressor']}"
    draw(measured, peers, root / "docs" / "figures" / "results.svg")
    for name in measured.missing():
        print(f"not measured, so no table has it: {name}")
    print("README.md, docs/benchmarks.md, docs/benchmarks-training.md and docs/figures/results.svg are written")


if __name__ == "__main__":
    main()
