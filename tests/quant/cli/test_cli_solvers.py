"""`quant solvers` has every part of a solver, and its facts are those of runs."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

import quant
from quant.calibration.solvers.registry import SOLVERS, TRANSFORMS
from quant.cli import console as tables
from quant.cli.main import main
from quant.recipes.solver_names import STEPS


def listed() -> dict[str, dict[str, object]]:
    result = CliRunner().invoke(main, ["solvers", "--json"])
    assert result.exit_code == 0, result.output
    rows: dict[str, dict[str, object]] = json.loads(result.stdout)
    return rows


def test_the_list_is_the_registries() -> None:
    rows = listed()
    assert rows.keys() == {*SOLVERS, *TRANSFORMS, *STEPS} and all(row["method"] for row in rows.values())
    # The table of docs/calibration.md.
    efforts = {name: row["effort"] for name, row in rows.items() if row["effort"]}
    assert efforts == {"rtn": [0], "mse": [1], "gptq": [2], "kfac": [3], "awq": [2, 3]}
    assert [rows[name]["needs"] for name in ("mse", "gptq", "kfac")] == ["nothing", "text", "text, gradients"]
    assert rows["rtn"]["work"] == 1 and (rows["mse"]["passes"], rows["gptq"]["passes"]) == (0, 4)
    # MX exponents are powers of two, and NVFP4's are not.
    assert "nvfp4" not in str(rows["ocp"]["formats"]) and rows["four_over_six"]["formats"] == ["nvfp4"]


@pytest.mark.parametrize("name", ["rtn", "mse", "modelopt", "local_hessian", "gptq", "awq", "rotation", "lowrank"])
def test_a_solver_that_needs_nothing_runs_without_text(name: str) -> None:
    """A bare module in weights alone: whatever needs text stops and asks for it."""
    model = torch.nn.Sequential(torch.nn.Linear(32, 32))
    recipe = quant.Recipe(name="own", weight="nvfp4", solver=name)
    if listed()[name]["needs"] == "nothing":
        assert quant.quantize(model, recipe).plan.quantized
    else:
        with pytest.raises(quant.UserError, match="calibration data"):
            quant.quantize(model, recipe)


def test_figures_and_names_are_whole_at_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(width=80, record=True)
    monkeypatch.setattr(tables, "page", lambda: console)
    CliRunner().invoke(main, ["solvers"])
    text = console.export_text()
    assert all(len(line) <= 80 for line in text.splitlines())
    for name, row in listed().items():
        assert any(line.split()[:1] == [name] and f" {row['work']:g} " in line for line in text.splitlines()), name
