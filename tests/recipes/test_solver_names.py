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
        ("awq:merge+gptq", "awq:merge+lowrank:8+gptq"),
    ],
)
def test_a_branch_takes_its_place(name: str, expected: str) -> None:
    found = parse_solver(with_branch(name, 8))
    before = parse_solver(name)
    assert (found.name, found.rank) == (expected, 8)
    for part in ("transforms", "merged", "rotation", "rounding", "autoround"):
        assert getattr(found, part) == getattr(before, part)


def test_parts_that_are_only_merged_are_told_from_the_others() -> None:
    spec = parse_solver("smoothquant+awq:merge+rotation:merge")
    assert spec.transforms == ("smoothquant", "awq") and spec.merged == {"awq", "rotation"}
    assert spec.merges_rotations and spec.rotation == 0 and spec.rounding == "gptq"
    for wrong in ("awq:3", "lowrank:merge", "gptq:merge", "autoround:merge"):
        with pytest.raises(
            ValueError, match=r"only rotation, .* residual, autoround take a number, a whole one from 1"
        ):
            parse_solver(wrong)
