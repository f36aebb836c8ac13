"""Rotations of weights and inputs are exact in float64 before anything is rounded."""

from __future__ import annotations

import pytest
import scipy.linalg
import torch

from quant.calibration.solvers.rotation import matrix_of, rotate_weight, rotation_block
from quant.kernels.linear.quant_linear import RunTimeParts


@pytest.mark.parametrize(("columns", "block"), [(576, 64), (1536, 128), (4096, 128), (80, 16), (30, 2), (33, 0)])
def test_block_that_fits(columns: int, block: int) -> None:
    assert rotation_block(columns) == block


def _matrix(columns: int, block: int) -> torch.Tensor:
    one = torch.from_numpy(scipy.linalg.hadamard(block)).double() / block**0.5
    return torch.block_diag(*[one] * (columns // block))


def test_weight_and_input_rotated_give_the_same_output() -> None:
    weight, x = torch.randn(40, 96, dtype=torch.float64), torch.randn(50, 96, dtype=torch.float64)
    block = rotation_block(96)
    turned = rotate_weight(weight, block)
    torch.testing.assert_close(turned, weight @ _matrix(96, 32).T, rtol=0, atol=1e-12)
    seen = RunTimeParts(hadamard=block).input(x)
    torch.testing.assert_close(seen @ turned.T, x @ weight.T, rtol=0, atol=1e-12)
    assert rotate_weight(weight, 0) is weight


def test_the_matrix_of_a_layer_does_what_its_parts_do() -> None:
    weight, x = torch.randn(40, 96, dtype=torch.float64), torch.randn(50, 96, dtype=torch.float64)
    branch = (torch.randn(3, 96, dtype=torch.float64), torch.randn(40, 3, dtype=torch.float64))
    parts = RunTimeParts(torch.rand(96, dtype=torch.float64) + 0.5, 32, branch)
    turned = (x * parts.pre_scale) @ _matrix(96, 32).T
    expected = turned @ weight.T + turned @ branch[0].T @ branch[1].T
    torch.testing.assert_close(x @ matrix_of(weight, parts).T, expected, rtol=0, atol=1e-11)
    assert matrix_of(weight, RunTimeParts()) is weight
