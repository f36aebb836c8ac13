"""Solver names are taken apart and put together; expected parts are written out by hand."""

from __future__ import annotations

import pytest

from quant.recipes.solver_names import parse_solver, with_branch


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rtn", "lowrank:8+rtn"),
        ("awq", "awq+lowrank:8+mse"),
        ("awq+lowrank:32+gptq", "awq+lowrank:8+gptq"),
        ("awq+rotation:64+gptq+autoround:5", "awq+rotation:64+lowrank:8+gptq+autoround:5"),
        ("rotation:merge", "rotation:merge+lowrank:8+gptq"),
    ],
)
def test_a_branch_takes_its_place(name: str, expected: str) -> None:
    found = parse_solver(with_branch(name, 8))
    before = parse_solver(name)
    assert (found.name, found.rank) == (expected, 8)
    for part in ("transforms", "rotation", "merge", "rounding", "autoround"):
        assert getattr(found, part) == getattr(before, part)
