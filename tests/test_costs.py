"""`docs/costs.md` has the table that `benchmarks/costs.py` computes, from models that have their publishers' sizes."""

from __future__ import annotations

import sys

import pytest
from samples import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import costs

TOKENS = 32 * 512


def test_the_table_in_the_document() -> None:
    lines = (ROOT / "docs" / "costs.md").read_text(encoding="utf-8").splitlines()
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    computed = costs.table(costs.DATA / "scale_h100.json", costs.DATA / "scale_cpu.json", TOKENS)
    at = found.index(list(computed[0]))
    assert found[at + 2 : at + 2 + len(computed)] == [list(row.values()) for row in computed]
    assert found[at + 2 + len(computed)] == [""]


@pytest.mark.parametrize(("index", "billions"), [(0, 8.03), (1, 70.55), (2, 671.0)])
def test_the_models_have_their_size(index: int, billions: float) -> None:
    """As their publishers count them; norms and routers, which are left out here, are less than a hundredth."""
    assert costs.MODELS[index].nbytes / 2e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize("file", ["scale_h100.json", "scale_cpu.json"])
def test_a_measured_run_costs_what_was_measured(file: str) -> None:
    rtn, gptq = costs.read_runs(costs.DATA / file)
    for solver, run in (("rtn", rtn), ("gptq", gptq)):
        seconds, memory = costs.cost(run.model, rtn, gptq, solver, run.tokens)
        assert seconds == pytest.approx(run.start + sum(run.stages.values())) and memory == run.memory


def test_operations_of_a_small_layer() -> None:
    """Counted by hand: 6·8·2·4 of three passes, 8·16 of moments, 4/3·64 and 3·2·16 of the solver; an expert's share."""
    layer = 384 + 128 + 256 / 3 + 96
    assert costs.Group(2, 4).operations(8) == pytest.approx(layer)
    assert costs.Group(2, 4, 3, 0.5).operations(16) == pytest.approx(3 * layer)


@pytest.mark.parametrize(
    ("seconds", "text"), [(23.7, "24 s"), (99.4, "99 s"), (150, "2 min"), (12240, "3.4 h"), (1e5, "28 h")]
)
def test_durations(seconds: float, text: str) -> None:
    assert costs.duration(seconds) == text
