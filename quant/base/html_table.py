"""`html_table` writes a small table for notebooks, with every cell escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table as HTML.

    Args:
        head: the names of the columns.
        rows: the cells of each row, as text.
    """

    def row(cells: Sequence[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"

    return f"<table>{row(head, 'th')}{''.join(row(cells, 'td') for cells in rows)}</table>"
