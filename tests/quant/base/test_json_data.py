"""Dataclasses through JSON and back: nested ones, tuples, lists and fields that may be None."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import StrEnum

import pytest

from quant.base.json_files import JsonData


class Colour(StrEnum):
    RED = "red"
    GREEN = "green"


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
    colour: Colour = Colour.GREEN


TREE = Tree(Leaf("a", (1, 2)), (Leaf("b"), Leaf("c", (3,))), {"x": 0.5}, Leaf("d"), ["n"], Colour.RED)


def test_what_is_written_is_read() -> None:
    for tree in (TREE, Tree(Leaf("a"), (), {})):
        assert Tree.from_dict(tree.to_dict()) == tree
        assert Tree.from_dict(json.loads(json.dumps(tree.to_dict()))) == tree
    assert Tree.from_dict(TREE.to_dict()).colour is Colour.RED
    assert json.loads(json.dumps(TREE.to_dict()))["rest"] == [{"name": "b", "shape": []}, {"name": "c", "shape": [3]}]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": 1}, r"^Tree: unknown field\(s\) extra; known fields: first, rest, scores, best, notes, colour$"),
        ({"first": {}}, r"^first: Leaf: missing field\(s\) name$"),
        ({"rest": [{"name": "b", "size": 1}]}, r"^rest\[0\]: Leaf: unknown field\(s\) size; known"),
        ({"rest": 3}, "^rest: expected a list, not 3$"),
        ({"best": 3}, "^best: Leaf: expected an object with fields, not 3$"),
        ({"first": {"name": 3}}, "^first: name: expected text, not 3$"),
        ({"first": {"name": "a", "shape": [1, True]}}, r"^first: shape\[1\]: expected a whole number, not True$"),
        ({"first": {"name": "a", "shape": [2**63]}}, r"^first: shape\[0\]: 9223372036854775808 does not fit 64 bits$"),
        ({"scores": [1]}, r"^scores: expected an object, not \[1\]$"),
        ({"scores": {"x": None}}, r"^scores\['x'\]: expected a number, not None$"),
        ({"notes": ["n", []]}, r"^notes\[1\]: expected text, not \[\]$"),
        ({"colour": "blue"}, "^colour: expected one of red, green, not 'blue'$"),
        ({"colour": ["red"]}, r"^colour: expected one of red, green, not \['red'\]$"),
    ],
)
def test_bad_fields_are_refused_by_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tree.from_dict({**TREE.to_dict(), **change})
