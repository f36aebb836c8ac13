"""This file draws rectangles and lines of text as SVG, for figures that must come out the same byte for byte.

A figure is a white card with dark ink, so that it reads on light and on dark pages alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

INK, GREY = "#1b2733", "#5b6b7a"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


def rectangle(x: float, y: float, width: float, height: float, fill: str, stroke: str = "none") -> str:
    """A rectangle with its upper left corner at (x, y)."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" stroke="{stroke}"/>'


def text(x: float, y: float, words: str, *, size: int = 13, anchor: str = "start", fill: str = INK,
         bold: bool = False) -> str:  # fmt: skip
    """A line of text whose baseline begins, is centred (`middle`) or ends (`end`) at (x, y)."""
    weight = ' font-weight="600"' if bold else ""
    position = f'x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text {position} fill="{fill}"{weight}>{escape(words)}</text>'


def write(path: Path, width: float, height: float, title: str, parts: Sequence[str]) -> None:
    """Writes the figure. `title` is read by screen readers and shown by browsers."""
    size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="{escape(FONT, quote=True)}">'
    card = f'<rect width="{width:g}" height="{height:g}" rx="8" fill="#ffffff"/>'
    path.write_text("\n".join([head, f"<title>{escape(title)}</title>", card, *parts, "</svg>", ""]), encoding="utf-8")
