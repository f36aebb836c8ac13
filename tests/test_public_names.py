"""Every public name of `quant` leads to the definition of that name, and no file or folder takes its place."""

from pathlib import Path

import pytest

import quant


def test_no_module_hides_a_public_name() -> None:
    """An imported submodule becomes an attribute of its package, which comes before `__getattr__`."""
    submodules = {path.stem for path in Path(quant.__path__[0]).iterdir()}
    assert submodules.isdisjoint(quant.__all__)


@pytest.mark.parametrize("name", sorted(set(quant.__all__) - {"__version__", "FORMATS"}))
def test_a_public_name_is_a_definition_of_the_file_that_the_table_names(name: str) -> None:
    if name == "QATCallback":
        pytest.importorskip("lightning", reason="the extra lightning")
    found = getattr(quant, name)
    assert (found.__name__, found.__module__) == (name, quant._HOME[name])


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        _ = quant.quantise
