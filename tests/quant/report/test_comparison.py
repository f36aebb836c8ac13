"""Two runs side by side: totals and layers are those of the reports, and names stay text."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from click.testing import CliRunner

from quant.cli.main import main
from quant.evaluation.evaluation import Evaluation
from quant.recipes.plan import Plan
from quant.report.comparison import compare_html, read_runs, totals
from quant.report.report import Report

Make = Callable[..., tuple[Report, Plan]]


@pytest.fixture
def directories(make_report: Make, tmp_path: Path) -> tuple[Path, Path]:
    """A run, and another one with three layers less precise, measured on the same text."""
    report, plan = make_report()
    evaluation = Evaluation(20.0, 0.10, 0.9, 1000, 1.0, 19.0, rows=4, interval=(0.08, 0.12), text="/home/me/own.txt")
    first = replace(report, evaluation=evaluation)
    changed = [i for i, layer in enumerate(report.layers) if layer.format == "fp8_channel"][:3]
    layers = [
        replace(m, format="nvfp4", bits=4.5, nbytes=m.nbytes // 2, relative_error=0.1) if i in changed else m
        for i, m in enumerate(report.layers)
    ]
    second = replace(
        report,
        layers=layers,
        bytes_after=report.bytes_after - 1000,
        evaluation=replace(evaluation, kl=0.15, top1=0.85, interval=(0.12, 0.18)),
    )
    for name, each in (("a", first), ("b", second)):
        (tmp_path / name).mkdir()
        each.save(tmp_path / name / "report.json")
        plan.save(tmp_path / name / "plan.json")
    return tmp_path / "a", tmp_path / "b"


def test_totals_and_layers_are_those_of_the_runs(directories: tuple[Path, Path]) -> None:
    a, b = read_runs(*directories)
    rows = {label: cells for label, *cells in totals(a, b)}
    assert rows["KL on own.txt"] == ["0.1", "0.15", "+50.0%"] and rows["95% interval"][:2] == ["0.08–0.12", "0.12–0.18"]
    assert rows["top-1 agreement on own.txt"] == ["90.0%", "85.0%", "-5.0 points"]
    assert rows["perplexity on own.txt"][2] == "+0.0%"
    html = compare_html(a, b)
    table = html[html.index("Layers whose formats differ: 3 of") :].partition("</section>")[0]
    rows_of_layers = re.findall(r"<tr id=.*?</tr>", table, re.DOTALL)
    changed = [m for m in a.report.layers if {o.name: o for o in b.report.layers}[m.name].format != m.format]
    assert len(rows_of_layers) == len(changed) == 3
    for row, layer in zip(rows_of_layers, changed, strict=True):
        cells = [unescape(re.sub("<[^>]*>", "", cell)) for cell in re.findall(r"<td.*?</td>", row)]
        assert cells[0] == layer.name and cells[3:5] == [f"{layer.bits:.3f}", "4.500"]
        assert cells[1].startswith("fp8_channel@") and cells[2].startswith("nvfp4@")
        assert cells[7:] == [f"{layer.relative_error:.2%}", "10.00%"]
    assert "/home/me" not in html and "<u>mind" not in html and "default-src 'none'" in html


def test_figures_on_other_rows_are_not_subtracted(directories: tuple[Path, Path]) -> None:
    a, b = read_runs(*directories)
    assert b.report.evaluation is not None
    b.report.evaluation = replace(b.report.evaluation, tokens=500)
    rows = {label: cells for label, *cells in totals(a, b)}
    assert rows["KL on own.txt"] == ["0.1", "0.15", "on other rows"]
    b.report.evaluation = None
    assert {label: cells for label, *cells in totals(a, b)}["KL on own.txt"] == ["0.1", "–", "–"]


def test_the_command_writes_the_page_and_prints_the_totals(
    directories: tuple[Path, Path], make_report: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = map(str, directories)
    result = CliRunner().invoke(main, ["report", first, second])
    assert result.exit_code == 0, result.output
    assert "+50.0%" in result.stdout and "written to comparison.html" in result.stderr
    assert "Comparison of two runs" in (tmp_path / "comparison.html").read_text(encoding="utf-8")
    # A page does not go into a checkpoint, and a directory without a run is named.
    inside = CliRunner().invoke(main, ["report", first, second, "--out", f"{second}/x.html"])
    assert inside.exit_code == 2 and "lies in" in inside.output
    (tmp_path / "empty").mkdir()
    missing = CliRunner().invoke(main, ["report", first, f"{tmp_path}/empty"])
    assert missing.exit_code == 2 and "no report.json" in missing.output
    report, plan = make_report()
    other = replace(report, layers=[replace(layer, name=f"other.{layer.name}") for layer in report.layers])
    other.save(tmp_path / "empty" / "report.json")
    plan.save(tmp_path / "empty" / "plan.json")
    strangers = CliRunner().invoke(main, ["report", first, f"{tmp_path}/empty"])
    assert strangers.exit_code == 2 and "no layer in common" in strangers.output
