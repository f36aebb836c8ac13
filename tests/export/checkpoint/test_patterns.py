"""Patterns match as Python's `re` does, and none takes long."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quant.export.checkpoint.files.compressed_tensors import matches

PATTERNS = st.recursive(
    st.sampled_from(["a", "b", ".", r"\.", r"\d", "[ab]", "[^a]", "^", "$", r"\b", ""]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map("({0[0]}|{0[1]})".format),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "*?", "{2}", "{1,3}", "{0,2}"])).map(
            "(?:{0[0]}){0[1]}".format
        ),
        inner.map("(?={})".format),
        inner.map("(?!{})".format),
    ),
    max_leaves=6,
)


@settings(max_examples=400, deadline=None)
@given(PATTERNS, st.text("ab.1\n", max_size=6))
def test_as_the_library_matches(pattern: str, name: str) -> None:
    expected = re.match(pattern, name) is not None
    assert matches(pattern, name) == expected


@pytest.mark.parametrize(
    "pattern",
    [
        "^(?!.*experts).*$",  # of published checkpoints
        r"^(?!.*\.mlp\.experts(?:\.|$)).*$",
        r"^(?!.*(?:self_attn\.(?:q_proj|k_proj|in_proj)|vision_tower\..*|mm_projector\..*)$).*$",
        r".*mlp\.gate$",
        ".*lm_head",
        r"model\.layers\.(?P<index>[0-9]+)\.mlp(?#any part)\.",
        r"[^]a-z]|[]m-o]+?\x6f",
        r"model.{1,}\d{1,2}.{,40}(?:gate|up)_proj$",
        r"model{\.|\w+[\w.]*\bq_proj\Z",
        "\\A(model|lm_head)?(?=$)",
        "",
    ],
)
@pytest.mark.parametrize(
    "name",
    [
        "",
        "lm_head",
        "model.layers.0.mlp.gate",
        "model.layers.12.mlp.experts.3.up_proj",
        "model.layers.1.self_attn.q_proj",
        "model{.vision_tower.blocks",
        "Model.mm_projector.0",
    ],
)
def test_names_of_layers(pattern: str, name: str) -> None:
    assert matches(pattern, name) == (re.match(pattern, name) is not None)


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+b",
        "(a|a)*b",
        "(.*)*(.*)*(.*)*b",
        "a?" * 60 + "a" * 60 + "b",
        "(ab|ab|aa|a)" * 30 + "b",
        ".*" * 20 + "b",
        "((((((a*)*)*)*)*)*)*b",
        "(a{0,60}){0,60}b",
        "(?:){1000000000}(a+)+b",
        "(?=(a+)+b)a",
    ],
)
def test_no_pattern_hangs(pattern: str) -> None:
    started = time.process_time()
    assert not matches(pattern, "a" * 80)
    assert time.process_time() - started < 5


@pytest.mark.parametrize("pattern", ["(", "a" * 1001, r"(a)\1", "(?i)a+", "(?i:a)", "(?<=a)b", "(?>a)", "a*+"])
def test_what_is_not_read(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"^config\.json: the pattern"):
        matches(pattern, "aa")
