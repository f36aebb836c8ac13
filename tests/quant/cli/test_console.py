"""Tables of plans fit the terminal: numbers are never cut, and columns without room are named."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
import tiny_models
from click.testing import CliRunner

import quant
from quant.cli import console
from quant.cli import console as tables
from quant.cli.main import main
from quant.cli.quantize import quantize_command
from quant.recipes.plan import Plan
from quant.recipes.plan_make import make_plan


def plan() -> Plan:
    return make_plan(tiny_models.llama(num_hidden_layers=1, hidden_size=128, intermediate_size=256), "fp8_block")


def printed(width: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> str:
    text = io.StringIO()
    shown = console._Console(markup=False, width=width, file=text)
    monkeypatch.setattr(tables, "page", lambda: shown)
    report = {"layers": [{"name": layer.name, "snr_db": 31.25} for layer in plan().quantized]}
    tables.print_plan(plan(), report=report, **options)
    return text.getvalue()


@pytest.mark.parametrize("width", [60, 80, 100, 240])
@pytest.mark.parametrize("costs", [False, True])
def test_a_narrow_terminal_goes_without_columns_and_cuts_no_cell(
    width: int, costs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = printed(width, monkeypatch, costs=costs)
    assert all(len(line) <= width for line in text.splitlines())
    header = next(line for line in text.splitlines() if line.split()[:1] == ["layer"])
    for layer in plan().quantized:
        row = next(line for line in text.splitlines() if layer.name in line.split())
        cells = {"bits": f"{layer.bits_per_weight:.3f}", "bytes": f"{layer.nbytes:,}",
                 "shape": "×".join(map(str, layer.shape)), "dB": "31.2", "weight": "fp8_block"}  # fmt: skip
        for column, cell in cells.items():
            assert (cell in row.split()) == (column in header.split()), (column, row)
    assert {"layer", "weight", "bits"} <= set(header.split())
    left_out = re.search(rf"no room in {width} columns for: (.*?);", " ".join(text.split()))
    missing = {"shape", "weight", "input", "solver", "bits"} - set(header.split())
    assert missing == (set(left_out[1].split(", ")) - {"group", "SNR dB"} if left_out else set())
    # Without their column, reasons are counted.
    assert "recipe fp8_block" in " ".join(text.split())
    if "why" not in header.split():
        assert "7 layers, model.layers.0.self_attn.q_proj first: recipe" in " ".join(text.split())


def test_names_longer_than_the_terminal_are_broken_and_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed(40, monkeypatch)
    first = text[text.index("model.layers.0.self_") :].splitlines()[:2]
    assert [line.split() for line in first] == [["model.layers.0.self_", "fp8_block", "8.002"], ["attn.q_proj"]]


def test_formats_are_shown_in_words() -> None:
    text = CliRunner().invoke(main, ["formats"]).output
    assert not re.search(r"\b(None|keep|True|False)\b|\[\d", text)
    rows = {
        cells[0].strip(): cells[1:] for line in text.splitlines() if len(cells := re.split(r" {2,}", line.strip())) > 4
    }
    assert rows["fp8_block"][2:5] == ["128×128", "no", "8.00195"] and rows["fp8_channel"][2] == "row"
    assert rows["int4a16"][1:3] == ["16 bit", "by --effort"] and rows["int8_static"][2] == "rtn"


def test_help_has_a_short_option_and_the_program_a_version() -> None:
    for command, arguments in ((main, []), (main, ["plan"]), (main, ["plan", "show"]), (quantize_command, [])):
        short, long = (CliRunner().invoke(command, [*arguments, option]) for option in ("-h", "--help"))
        assert short.exit_code == 0 and short.output == long.output and "-h, --help" in long.output
    for command in (main, quantize_command):
        result = CliRunner().invoke(command, ["--version"])
        # Of the code that runs, and not of the metadata of an older editable installation.
        assert result.exit_code == 0 and result.output.endswith(f"version {quant.__version__}\n")


def test_an_option_of_one_value_is_given_once() -> None:
    result = CliRunner().invoke(quantize_command, ["m", "--format", "nvfp4", "--dry-run", "--format", "fp8"])
    assert result.exit_code == 2 and "--format takes one value, and 2 are given" in result.output
    # Options that may be repeated, and flags, still may.
    fine = ["m", "--format", "nvfp4", "--exclude", "a", "--exclude", "b", "--quiet", "--quiet", "--dry-run"]
    assert "takes one value" not in CliRunner().invoke(quantize_command, fine).output
