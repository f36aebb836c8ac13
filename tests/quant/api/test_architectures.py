"""Every architecture of the matrix is equal in both loaders, refused with a reason, or warned of."""

from itertools import product
from pathlib import Path

import pytest
from slow_cases import quick_cases

transformers = pytest.importorskip("transformers", reason="the extra hf")
pytest.importorskip("compressed_tensors", reason="the extra test")

from architectures import ARCHITECTURES, DOCS, FORMATS, LAYOUTS, QUICK, check  # noqa: E402 -- needs transformers

RIGHT = {"equal", "refused", "warned"}
COLUMNS = [(layout, format) for layout in LAYOUTS for format in FORMATS]
ROWS = {
    cells[0]: dict(zip(COLUMNS, cells[1:], strict=True))
    for line in DOCS.read_text(encoding="utf-8").splitlines()
    if len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 1 + len(COLUMNS)
}
IS_OF_DOCS = transformers.__version__ in DOCS.read_text(encoding="utf-8")


# Every other pair of a kind and a format, so that each kind and each format has its turn.
@pytest.mark.parametrize(
    ("name", "format"),
    quick_cases(
        product(QUICK, FORMATS), lambda name, format: (QUICK.index(name) + FORMATS.index(format)) % len(FORMATS) == 0
    ),
)
def test_kinds_that_once_went_wrong(name: str, format: str, tmp_path: Path) -> None:
    for cell in check(name, format, tmp_path):
        assert cell.verdict in RIGHT, cell
        assert cell.verdict == "equal" or cell.detail
        written = ROWS[name][cell.layout, format].partition(" ")[0]
        assert cell.verdict == written or not IS_OF_DOCS, f"docs/architectures.md has {written} for {cell}"


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", sorted(set(ARCHITECTURES) - set(QUICK)))
def test_all_others(name: str, format: str, tmp_path: Path) -> None:
    for cell in check(name, format, tmp_path):
        assert cell.verdict in RIGHT, cell
        assert cell.verdict == "equal" or cell.detail
