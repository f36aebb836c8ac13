"""Globs over layer names, against names that a reader can check by eye."""

import pytest

from quant.recipes.recipe import matched

NAMES = ["heads0", "heads[0]", "heads1", "layers.0.up_proj", "layers.10.up_proj", "Layers.0.up_proj", "a*", "ab"]


@pytest.mark.parametrize(
    ("globs", "names"),
    [
        ("heads[0]", ["heads[0]"]),
        ("heads[01]", ["heads0", "heads1"]),
        ("heads[[]0]", ["heads[0]"]),
        ("a*", ["a*"]),
        ("a?", ["a*", "ab"]),
        ("layers.*.up_proj", ["layers.0.up_proj", "layers.10.up_proj"]),
        ("l*proj", ["layers.0.up_proj", "layers.10.up_proj"]),
        ("up_proj", []),
        (["ab", "heads[0]", "heads?"], ["heads0", "heads[0]", "heads1", "ab"]),
        ([], []),
    ],
)
def test_an_exact_name_goes_before_a_glob(globs: str | list[str], names: list[str]) -> None:
    assert list(matched(globs, NAMES)) == names
    assert list(matched(globs, dict.fromkeys(NAMES))) == names
