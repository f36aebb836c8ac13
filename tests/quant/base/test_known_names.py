"""Ends of messages about unknown names."""

from __future__ import annotations

import pytest

from quant.base.errors import known_names

NAMES = ("nvfp4", "nvfp4a16", "fp8", "mxfp8")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("nvfp", "nvfp4"),  # the shortest of those that begin with it
        ("NVFP4A", "nvfp4a16"),
        ("mfxp8", "mxfp8"),  # letters exchanged
    ],
)
def test_the_nearest_name_is_suggested(name: str, meant: str) -> None:
    assert known_names(name, NAMES) == f"known: nvfp4, nvfp4a16, fp8, mxfp8; did you mean {meant}?"


@pytest.mark.parametrize("name", ["", "magic", None, 16, ["fp8"]])
def test_names_that_are_like_none_get_no_suggestion(name: object) -> None:
    assert known_names(name, NAMES, "formats", more=", keep") == "known formats: nvfp4, nvfp4a16, fp8, mxfp8, keep"
