"""The lines after a run: a large loss has advice, and each command that is named is one that works."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from samples import BASE

from quant.cli.main import main
from quant.evaluation.evaluation import Evaluation
from quant.formats.format import get_format
from quant.recipes.plan import Plan
from quant.report.report import Report
from quant.report.summary import next_steps

Make = Callable[..., tuple[Report, Plan]]


def verdict(rich: tuple[Report, Plan], kl: float, directory: Path, solver: str = "rtn", inputs: str = "") -> list[str]:
    """The lines of a report with another KL, whose layers had another solver and input format."""
    report, plan = rich
    activation = get_format(inputs) if inputs else None
    layers = (replace(layer, solver=solver, activation=activation) for layer in plan.quantized)
    plan = plan.replace_layers(layers)
    results = [replace(r, activation=inputs or None) if r.format else r for r in report.layers]
    evaluation = Evaluation(9.0, kl, 0.9, 8, 1.0, interval=(kl / 2, 2 * kl))
    *lines, opened = next_steps(replace(report, layers=results, evaluation=evaluation), plan, directory)
    assert opened == f"report:   {directory}/report.html in a browser"
    return lines


def test_a_large_loss_has_advice_and_a_usual_one_none(make_report: Make, tmp_path: Path) -> None:
    four = make_report(4, ("nvfp4",))
    (line,) = verdict(four, 0.3, tmp_path)
    assert (
        line.startswith("KL 0.3000 (95%: 0.1500 to 0.6000) is large")
        and "--effort 2" in line
        and f"--bits {four[1].effective_bits + 0.5:.1f}" in line
    )
    (line,) = verdict(four, 0.3, tmp_path, "gptq")
    assert "--effort 3" in line and "--effort 2" not in line
    assert "--effort" not in verdict(four, 0.3, tmp_path, "kfac")[0]
    (line,) = verdict(four, 0.4, tmp_path, "awq:merge+gptq", "nvfp4")
    assert "nvfp4a16" in line
    # The same loss is usual where inputs have 4 bits too, and large where weights have 8.
    assert "within twice the usual loss" in verdict(four, 0.2, tmp_path, "gptq", "nvfp4")[0]
    assert "no more than the usual loss of these formats (about 0.06 on" in verdict(four, 0.05, tmp_path, "gptq")[0]
    assert "within twice" in verdict(four, 0.1, tmp_path, "gptq")[0]
    assert "is large" in verdict(four, 0.13, tmp_path, "gptq")[0]
    assert "is large" in verdict(make_report(4, ("fp8_channel",)), 0.1, tmp_path, "gptq", "fp8_token")[0]
    assert next_steps(replace(four[0], evaluation=None), four[1], tmp_path)[:-1] == []
    # The usual losses are of next tokens; the classes of a classifier have another KL.
    of_classes = Evaluation(None, 0.3, 0.9, 8, 1.0)
    assert next_steps(replace(four[0], evaluation=of_classes), four[1], tmp_path)[:-1] == []


@pytest.mark.parametrize(("preset", "served"), [("nvfp4a16", True), ("mxfp6a16", False)])
def test_the_command_ends_with_lines_that_work(tmp_path: Path, preset: str, served: bool) -> None:
    out = tmp_path / "with blank"
    command = ["quantize", str(BASE), "--format", preset, "--effort", "0", "--out", str(out)]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stderr.splitlines() if re.match(r"KL|the loss|try it:|measure:|serve:", line)]
    assert len(lines) == 3 + served and lines[0].startswith("the loss was not measured: give --eval FILE")
    assert f"quant generate '{out}'" in lines[1] and f"--baseline {BASE}" in lines[2]
    assert lines[-1].startswith("serve:") == served
    shown = CliRunner().invoke(main, ["generate", str(out), "--prompt", "The capital of France is", "--json"])
    assert shown.exit_code == 0, shown.output
    # Without a tokenizer there is nothing to write text with.
    for file in out.glob("tokenizer*"):
        file.unlink()
    report, plan = Report.from_dict(json.loads((out / "report.json").read_text())), Plan.load(out / "plan.json")
    assert next_steps(report, plan, out) == [f"report:   '{out}/report.html' in a browser"]
