"""Dataclasses through JSON and back: nested ones, tuples, lists and fields that may be None."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest

from quant.recipes.json_data import JsonData


@dataclass(frozen=True)
class Leaf(JsonData):
    name: str
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Tree(JsonData):
    first: Leaf
    rest: tuple[Leaf, ...]
    scores: dict[str, float]
    best: Leaf | None = None
    notes: list[str] = field(default_factory=list)


TREE = Tree(Leaf("a", (1, 2)), (Leaf("b"), Leaf("c", (3,))), {"x": 0.5}, Leaf("d"), ["n"])


def test_what_is_written_is_read() -> None:
    for tree in (TREE, Tree(Leaf("a"), (), {})):
        assert Tree.from_dict(tree.to_dict()) == tree
        assert Tree.from_dict(json.loads(json.dumps(tree.to_dict()))) == tree
    assert json.loads(json.dumps(TREE.to_dict()))["rest"] == [{"name": "b", "shape": []}, {"name": "c", "shape": [3]}]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": 1}, "Tree: .*'extra'"),
        ({"first": {}}, "Leaf: .*missing .*'name'"),
        ({"rest": [{"name": "b", "size": 1}]}, "Leaf: .*'size'"),
        ({"rest": 3}, "Tree: .*not iterable"),
        ({"best": 3}, "Leaf: 'int' object has no attribute 'items'"),
    ],
)
def test_bad_fields_are_refused_with_their_class(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tree.from_dict({**TREE.to_dict(), **change})
