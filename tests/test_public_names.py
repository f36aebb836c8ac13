"""Every public name of `quant` is what it says, also after all modules are imported."""

import importlib
import pkgutil

import pytest

import quant


def test_no_module_hides_a_public_name() -> None:
    modules = {module.name for module in pkgutil.iter_modules(quant.__path__)}
    assert modules.isdisjoint(quant.__all__)


@pytest.mark.parametrize("name", [n for n in quant.__all__ if n != "__version__"])
def test_public_name(name: str) -> None:
    home = next(module for module, names in quant._PUBLIC.items() if name in names)
    assert getattr(quant, name) is vars(importlib.import_module(home))[name]


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        _ = quant.quantise
