"""JSON that every reader takes: floats against a strict parser, and every place that writes JSON."""

from __future__ import annotations

import ast
import json
import math
from pathlib import Path
from typing import Any

import pytest
from samples import ROOT

from quant.base.json_files import json_text, write_json
from quant.recipes.layers import LayerKind
from quant.recipes.plan import LayerPlan, Plan

FOLDERS = ("formats", "kernels", "recipes", "calibration", "export", "quant", "benchmarks")


def strict(text: str) -> Any:
    """What a reader gives that keeps to the standard."""

    def refuse(word: str) -> Any:
        raise ValueError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_what_is_not_finite_is_null() -> None:
    value = {"a": [1.5, math.nan, (math.inf, -math.inf, 3)], "b": {"c": math.nan, "d": "NaN", "e": True}, "f": None}
    expected = {"a": [1.5, None, [None, None, 3]], "b": {"c": None, "d": "NaN", "e": True}, "f": None}
    assert strict(json_text(value)) == expected
    assert math.isnan(value["a"][1])


def test_finite_values_are_written_as_python_writes_them() -> None:
    value = {"ä": [0.1, -0.0, 1e300, 5e-324, 2**70, True, None, "<é>"], "b": {}, "c": []}
    for options in ({}, {"indent": 1}, {"ensure_ascii": False, "sort_keys": True}):
        assert json_text(value, **options) == json.dumps(value, **options)


def test_a_plan_is_json_and_holds_no_score_that_is_no_number(tmp_path: Path) -> None:
    plan = Plan((LayerPlan("a", LayerKind.LINEAR, (32, 64), score=0.5),), provenance={"seconds": math.inf})
    plan.save(tmp_path / "plan.json")
    assert strict((tmp_path / "plan.json").read_text())["provenance"] == {"seconds": None}
    assert Plan.load(tmp_path / "plan.json").digest() == plan.digest()
    for score in (math.nan, math.inf):
        with pytest.raises(ValueError, match=f"^plan layer 'a': its score is {score}"):
            LayerPlan("a", LayerKind.LINEAR, (32, 64), score=score)


def bare_writers(source: str) -> list[int]:
    """Lines that call json.dump or json.dumps without allow_nan=False."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    writers = [c for c in calls if ast.unparse(c.func) in ("json.dump", "json.dumps", "dump", "dumps", "JSONEncoder")]
    return [c.lineno for c in writers if not any(ast.unparse(k) == "allow_nan=False" for k in c.keywords)]


def test_nothing_is_written_that_no_reader_takes() -> None:
    files = {f.resolve() for folder in FOLDERS for f in (ROOT / folder).rglob("*.py")}
    assert len(files) > 150
    # One writer keeps the bare words of a model's own files; nothing else does.
    home = ROOT / "quant" / "base" / "json_files.py"
    lines = home.read_text().splitlines()
    assert [
        f"{f.relative_to(ROOT)}:{line}"
        for f in sorted(files - {home.resolve()})
        for line in bare_writers(f.read_text())
    ] == []
    assert [lines[line - 1].strip() for line in bare_writers(home.read_text())] == [
        "return json.dumps(value, allow_nan=True, **options)"
    ]


@pytest.mark.parametrize("call", ["json.dumps(x)", "json.dump(x, f, indent=1)", "json.dumps(x, allow_nan=True)"])
def test_a_planted_writer_is_caught(call: str) -> None:
    assert bare_writers(f"import json\n{call}\n") == [2]


def test_a_file_ends_with_a_line_feed_and_has_no_bare_words(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"loss": math.nan, "name": "é"})
    assert (tmp_path / "a.json").read_bytes() == b'{\n "loss": null,\n "name": "\\u00e9"\n}\n'
