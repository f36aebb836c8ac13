"""Every architecture of the matrix is equal in both loaders, refused with a reason, or warned of."""

from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers", reason="the extra hf")
pytest.importorskip("compressed_tensors", reason="the extra test")

from architectures import ARCHITECTURES, FORMATS, QUICK, check  # noqa: E402 -- needs transformers

RIGHT = {"equal", "refused", "warned"}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", QUICK)
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
