"""The low-rank branch equals numpy's SVD of the whitened weight, which is optimal by Eckart and Young."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quant.calibration.solvers.lowrank import lowrank_branch, residual_weight
from quant.formats.format import get_format
from quant.formats.tensor import quantize
from quant.kernels.linear.modules import QuantLinear


def _problem(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight, and the second moment of inputs with a few large channels."""
    x = torch.randn(300, columns, dtype=torch.float64) @ torch.randn(columns, columns, dtype=torch.float64)
    x[:, :3] *= 20
    return torch.randn(rows, columns, dtype=torch.float64), x.t() @ x / len(x)


@pytest.mark.parametrize(("rows", "columns"), [(40, 64), (64, 40), (48, 48)])
@pytest.mark.parametrize("rank", [1, 8, 40])
def test_is_the_optimum(rows: int, columns: int, rank: int) -> None:
    weight, moment = _problem(rows, columns)
    down, up = lowrank_branch(weight, moment, rank, torch.float64)
    whitener = np.linalg.cholesky(moment.numpy())
    u, s, vt = np.linalg.svd(weight.numpy() @ whitener, full_matrices=False)
    best = (u[:, :rank] * s[:rank]) @ vt[:rank] @ np.linalg.inv(whitener)
    np.testing.assert_allclose((up @ down).numpy(), best, atol=1e-8 * np.abs(best).max())
    left = residual_weight(weight, (down, up)) @ torch.from_numpy(whitener)
    np.testing.assert_allclose(float(left.square().sum()), (s[rank:] ** 2).sum(), rtol=1e-8, atol=1e-12 * s[0] ** 2)


@pytest.mark.parametrize(("rows", "columns"), [(40, 64), (64, 40)])
def test_without_statistics_it_is_the_plain_svd(rows: int, columns: int) -> None:
    weight, _ = _problem(rows, columns)
    down, up = lowrank_branch(weight, None, 5, torch.float64)
    u, s, vt = np.linalg.svd(weight.numpy(), full_matrices=False)
    np.testing.assert_allclose((up @ down).numpy(), (u[:, :5] * s[:5]) @ vt[:5], atol=1e-10)


@pytest.mark.parametrize(("rows", "columns"), [(40, 64), (64, 40)])
def test_a_singular_second_moment_does_no_harm(rows: int, columns: int) -> None:
    weight, _ = _problem(rows, columns)
    x = torch.randn(6, columns, dtype=torch.float64)
    branch = lowrank_branch(weight, x.t() @ x / 6, 6, torch.float64)
    assert float((residual_weight(weight, branch) @ x.t()).abs().max()) < 1e-6


def test_the_residual_makes_up_for_the_rounding_of_the_branch() -> None:
    weight, moment = _problem(40, 64)
    branch = lowrank_branch(weight, moment, 8, torch.bfloat16)
    assert {part.dtype for part in branch} == {torch.bfloat16}
    restored = residual_weight(weight, branch) + branch[1].double() @ branch[0].double()
    torch.testing.assert_close(restored, weight, rtol=0, atol=1e-12)


def test_a_linear_with_a_branch_is_closer() -> None:
    weight, moment = _problem(48, 64)
    x = torch.linalg.cholesky(moment) @ torch.randn(64, 500, dtype=torch.float64)
    x, weight = x.t().float(), weight.float()
    wanted, format = x @ weight.t(), get_format("nvfp4")
    plain = QuantLinear(quantize(weight, format), None, format)
    branch = lowrank_branch(weight, moment, 8, torch.float32)
    helped = QuantLinear(quantize(residual_weight(weight, branch), format), None, format, lowrank=branch)
    assert (helped(x) - wanted).norm() < 0.5 * (plain(x) - wanted).norm()


@pytest.mark.parametrize("rank", [0, 41, -1])
def test_an_impossible_rank_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=r"layer \[40, 64\]: low-rank branch of rank .*; it must be 1 to 40"):
        lowrank_branch(torch.randn(40, 64), None, rank, torch.float32, "layer")
