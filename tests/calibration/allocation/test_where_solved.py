"""Changes of a solved model are measured as replacing its layers by hand shows them."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch

from quant.calibration.allocation.allocate import allocate, rows_where_solved
from quant.calibration.allocation.goal import Goal
from quant.calibration.allocation.measure_choices import Counts, Search
from quant.calibration.sensitivity.table import parse_candidates
from quant.evaluation.evaluate import evaluate
from quant.recipes.plan_make import make_plan
from quant.run.api import quantize

ROWS = torch.randint(0, 61, (16, 24), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("formats", "solver", "plain"),
    [("nvfp4a16,fp8a16", "gptq", "gptq_plain"), ("nvfp4,fp8", "kfac", "gptq_plain")],
)
def test_gains_are_those_of_the_solved_model(
    formats: str, solver: str, plain: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"intermediate_size": 128, "vocab_size": 61, "num_hidden_layers": 2}
    model: Any = tiny_models.llama(**sizes, gain=5)
    tables: list[np.ndarray] = []
    gains = Search.gains

    def spied(search: Search, choice: np.ndarray) -> np.ndarray:
        tables.append(gains(search, choice))
        assert (choice == 0).all()
        return tables[-1]

    monkeypatch.setattr(Search, "gains", spied)
    found = allocate(model, ROWS, Goal(bits=6.0), formats=formats, solver=solver, counts=Counts(measurements=60))
    (table,) = tables
    # Rows 0, 4, 8 and 12 measure, and the others solve.
    measured = torch.arange(16) % 4 == 0
    solved = quantize(
        copy.deepcopy(model), make_plan(model, formats.split(",")[0], solver=plain), ROWS[~measured]
    ).model
    before = evaluate(solved, ROWS[measured], model).kl
    assert before is not None
    groups = [group.layers for group in found.sensitivity.groups]
    assert len(groups) == len(table) == 8
    for members, changes in list(zip(groups, table, strict=True))[::3]:
        changed = copy.deepcopy(solved)
        for name in members:
            changed.set_submodule(name, copy.deepcopy(model.get_submodule(name)))
        after = evaluate(changed, ROWS[measured], model).kl
        assert after is not None
        # The first format is the one that was solved, the last is 16 bit.
        assert changes[0] == 0 and changes[-1] == pytest.approx(after - before, abs=0.02 * before)
    assert found.record.chosen.bits <= 6.0
    kl = evaluate(quantize(copy.deepcopy(model), found.plan, ROWS).model, ROWS[8:], model).kl
    assert found.record.chosen.kl_measured == pytest.approx(kl, rel=2e-3)


def test_changes_are_measured_for_budgets_on_a_quarter_of_the_rows_and_at_most_32() -> None:
    plan, counts = make_plan(tiny_models.llama(), "nvfp4a16"), Counts()
    cuda, cpu, budget = torch.device("cuda"), torch.device("cpu"), Goal(bits=5)
    formats = parse_candidates("nvfp4a16,fp8a16")

    def count(solver: str = "gptq", goal: Goal = budget, rows: int = 100, device: torch.device = cuda) -> int:
        return rows_where_solved(plan.quantized, formats, goal, solver, rows, counts, device)

    assert count() == 25 and count("kfac", rows=400) == 32 and count(rows=15) == 0
    assert count("rtn") == count("awq+gptq") == count(goal=Goal(max_kl=1)) == count(device=cpu) == 0
    branches = parse_candidates("nvfp4a16+lowrank:4,fp8a16")
    assert rows_where_solved(plan.quantized, branches, budget, "gptq", 100, counts, cuda) == 0


def test_a_limit_few_rows_and_experts_are_decided_without() -> None:
    for model, goal, rows in (
        (tiny_models.llama(gain=5), Goal(max_kl=0.1), ROWS),
        (tiny_models.llama(gain=5), Goal(bits=6.0), ROWS[:8]),
        (tiny_models.mixtral(gain=5), Goal(bits=6.0), ROWS),
    ):
        found = allocate(model, rows, goal, formats="nvfp4a16,fp8a16", solver="gptq", counts=Counts(measurements=8))
        assert "in a solved model" not in " ".join(layer.reason for layer in found.plan.quantized)
