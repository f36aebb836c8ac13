"""Rotations: exact in float64 before anything is rounded, for weights, statistics and whole models."""

from __future__ import annotations

import pytest
import scipy.linalg
import torch

from quant.calibration.solvers.rotation import rotate_stats, rotate_weight, rotation_block
from quant.calibration.statistics import LayerStats, MomentSum
from quant.kernels.linear.modules import RunTimeParts


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


def test_statistics_are_those_of_the_rotated_input() -> None:
    x, r = torch.randn(2, 200, 96, dtype=torch.float64)
    matrix = _matrix(96, 32)
    before, after = MomentSum(dtype=torch.float64), MomentSum(dtype=torch.float64)
    before.add(x, r - x)
    after.add(x @ matrix, (r - x) @ matrix)
    stats, expected = before.stats(), after.stats()
    assert stats is not None and expected is not None
    found = rotate_stats(stats, 32)
    torch.testing.assert_close(found.second_moment, expected.second_moment, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.drift, expected.drift, rtol=0, atol=1e-12)
    assert found.tokens == 200 and rotate_stats(stats, 0) is stats


def test_moments_kept_in_smaller_blocks_are_refused() -> None:
    moments = torch.eye(16).expand(6, 16, 16)
    with pytest.raises(ValueError, match="blocks of 16 inputs do not give the second moment"):
        rotate_stats(LayerStats(10, block_moments=moments), 32)
    x = torch.randn(20, 6, 16, dtype=torch.float64).transpose(0, 1)
    turned = x @ _matrix(16, 8)
    found = rotate_stats(LayerStats(20, block_moments=x.mT @ x), 8)
    torch.testing.assert_close(found.block_moments, turned.mT @ turned, rtol=0, atol=1e-12)
