"""Ranges of shapes: one profile as text, and the sizes of a graph that serves several of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quant.export.onnx.decoder_graph import GraphInput
from quant.export.onnx.dynamic_shapes import Input, dimension_ranges, format_profile, parse_profile

INPUTS = [Input("input_ids", ("batch", "sequence")), Input("mask", ("batch", 1, "sequence"))]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("input_ids=1x2:3x4:5x6", "input_ids=1x2:3x4:5x6,mask=1x1x2:3x1x4:5x1x6"),
        ("batch=2,sequence=8:16:32", "input_ids=2x8:2x16:2x32,mask=2x1x8:2x1x16:2x1x32"),
        ("mask=1x1x7", "input_ids=1x7:1x7:1x7,mask=1x1x7:1x1x7:1x1x7"),
        ("", "input_ids=1x1:1x128:4x1024,mask=1x1x1:1x1x128:4x1x1024"),
    ],
)
def test_profiles(text: str, expected: str) -> None:
    shapes = parse_profile(text, INPUTS, {})
    assert format_profile(shapes) == expected
    assert parse_profile(expected, INPUTS, {}) == shapes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("input_ids=1:2:3", r"input_ids \[batch, sequence\] has 2 dimension"),
        ("input_ids=1x4:1x2:1x8", "sequence is 4:2:8; write it as MIN:OPT:MAX, ascending"),
        ("input_ids=1x1:1x2", "has 2 shapes"),
        ("mask=1x3x4", "is fixed at 1, not 3:3:3"),
        ("input_ids=1x8,mask=1x1x9", "sequence is 8:8:8 in one place and 9:9:9 in another"),
        ("ids=1x8", r"no input or dimension 'ids'; the model's inputs are input_ids \[batch, sequence\]"),
        ("sequence=1x8", "sequence is one dimension"),
        ("input_ids=1xa", "numbers joined by x"),
        ("1x8", "is not NAME=MIN:OPT:MAX, such as input_ids=1x1:1x128:4x1024"),
    ],
)
def test_bad_profiles(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_profile(text, INPUTS, {})


@pytest.mark.parametrize(
    ("shapes", "longest", "expected"),
    [
        # Without a profile, only the sequence ends somewhere.
        (None, None, {}),
        ([], 96, {"sequence": (1, 96)}),
        # A profile of other dimensions takes a default sequence, which ends where the cache or the positions do.
        ("batch=2:2:3", None, {"batch": (2, 3), "sequence": (1, 1024)}),
        ("batch=2:2:3", 96, {"batch": (2, 3), "sequence": (1, 96)}),
        # A sequence that a profile names stays as it is: RoPE has no last position.
        ("mask=1x1x5:1x1x5:4x1x200", 96, {"batch": (1, 4), "sequence": (5, 200)}),
        # Of several profiles, the graph takes every size.
        (["batch=1:8:32,sequence=1:1:1", "batch=2:2:8"], 96, {"batch": (1, 32), "sequence": (1, 96)}),
        (["sequence=7:7:7", "sequence=9:9:12"], 8, {"batch": (1, 4), "sequence": (7, 12)}),
    ],
)
def test_sizes_of_a_graph(shapes: Any, longest: int | None, expected: dict[str, tuple[int, int]]) -> None:
    ids, mask = torch.zeros(2, 4), torch.zeros(2, 1, 4)
    inputs = {item.name: GraphInput(x, item.dims) for item, x in zip(INPUTS, (ids, mask), strict=True)}
    assert dimension_ranges(inputs, shapes, longest) == expected


def test_a_short_cache_ends_the_default_of_an_engine() -> None:
    assert parse_profile("batch=1", INPUTS[:1], {}, longest=96) == {"input_ids": ((1, 1), (1, 96), (1, 96))}
    assert parse_profile("batch=1", INPUTS[:1], {}, longest=512) == {"input_ids": ((1, 1), (1, 128), (1, 512))}
