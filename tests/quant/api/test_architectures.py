"""Every architecture of the matrix is equal in both loaders, refused with a reason, or warned of."""

from itertools import product
from pathlib import Path

import pytest
from slow_cases import quick_cases

transformers = pytest.importorskip("transformers", reason="the extra hf")
pytest.importorskip("compressed_tensors", reason="the extra test")

from architectures import ARCHITECTURES, FORMATS, QUICK, check  # noqa: E402 -- needs transformers

RIGHT = {"equal", "refused", "warned"}


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


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", sorted(set(ARCHITECTURES) - set(QUICK)))
def test_all_others(name: str, format: str, tmp_path: Path) -> None:
    for cell in check(name, format, tmp_path):
        assert cell.verdict in RIGHT, cell
        assert cell.verdict == "equal" or cell.detail
