"""The support tables of the docs, and `quant plan targets`, say what `tests/support_tables.py` found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from slow_cases import quick_cases

pytest.importorskip("transformers", reason="the extra hf")
pytest.importorskip("compressed_tensors", reason="the extra test")
pytest.importorskip("onnxruntime", reason="the extra onnx")

from support_tables import (
    EXPERTS,
    FORMATS,
    FOUND,
    PRESETS,
    RUNTIMES,
    TABLES,
    VLLM,
    here,
    in_vllm,
    rendered,
    run_cell,
)

from quant.formats.format import get_format, parse_format
from quant.recipes.recipe import KEEP, get_recipe, presets
from quant.recipes.targets import TARGETS

CELLS = json.loads(FOUND.read_text(encoding="utf-8"))
RIGHT = {"equal", "differs by 0.002", "built", "refused", "never run"}
QUICK = {("transformers", "nvfp4a16"), ("onnxruntime", "int8_static"), ("onnxruntime", "mxfp8")}


@pytest.mark.parametrize(("page", "name"), TABLES, ids=lambda value: getattr(value, "stem", value))
def test_pages_hold_what_was_found(page: Path, name: str) -> None:
    assert page.read_text(encoding="utf-8") == rendered(page, name, CELLS), "run tests/support_tables.py --render"


def test_every_cell_is_right() -> None:
    assert set(RUNTIMES) == set(CELLS)
    for runtime, entry in CELLS.items():
        wanted = {*FORMATS, *EXPERTS} - ({*EXPERTS} if runtime == "transformers" else set())
        assert wanted <= set(entry["cells"]), runtime
        assert {cell["verdict"] for cell in entry["cells"].values()} <= RIGHT, runtime


def test_every_preset_has_a_row() -> None:
    assert set(PRESETS) == set(presets())


@pytest.mark.parametrize("preset", PRESETS)
def test_the_targets_say_what_vllm_ran(preset: str) -> None:
    recipe, runs = get_recipe(preset), [json.loads(path.read_text(encoding="utf-8")) for path in VLLM]
    pair = TARGETS["vllm"].pair(get_format(recipe.weight), parse_format(recipe.activation.replace(KEEP, "16bit")))
    told = "–" if pair is None else "storage, inputs in 16 bit" if "from SM100" in pair.note else pair.runs
    assert in_vllm(runs, preset) in (told, "not run")


@pytest.mark.parametrize("runtime", sorted(set(CELLS) & set(TARGETS)))
@pytest.mark.parametrize("format", FORMATS)
def test_plan_targets_agree(runtime: str, format: str) -> None:
    """`quant plan validate --target` accepts what ran, with the word that the run found, and nothing else."""
    cell = CELLS[runtime]["cells"][format]
    recipe = get_recipe(format)
    pair = TARGETS[runtime].pair(get_format(recipe.weight), parse_format(recipe.activation.replace(KEEP, "16bit")))
    if cell["verdict"] == "never run":
        return
    assert (pair is None) == (cell["verdict"] == "refused")
    assert pair is None or cell["runs_in"] in ("", pair.runs)


@pytest.mark.parametrize(
    ("runtime", "format"),
    quick_cases(
        [(runtime, format) for runtime in RUNTIMES if here(runtime) for format in CELLS[runtime]["cells"]],
        lambda runtime, format: (runtime, format) in QUICK,
    ),
)
def test_a_cell_runs_as_written(runtime: str, format: str) -> None:
    cell, written = run_cell(runtime, format), CELLS[runtime]["cells"][format]
    assert (cell.verdict, cell.runs_in) == (written["verdict"], written["runs_in"]), cell
