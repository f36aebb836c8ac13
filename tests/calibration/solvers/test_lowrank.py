"""The low-rank branch equals numpy's SVD of the weighted weight, which is optimal by Eckart and Young."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quant.calibration.solvers.lowrank import lowrank_branch, residual_weight
from quant.formats.format import get_format
from quant.formats.tensor import quantize
from quant.kernels.linear.modules import QuantLinear


def _problem(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight, and the power of noise that a few inputs have most of."""
    noise = torch.rand(columns, dtype=torch.float64) + 0.1
    noise[:3] *= 400
    return torch.randn(rows, columns, dtype=torch.float64), noise


@pytest.mark.parametrize(("rows", "columns"), [(40, 64), (64, 40), (48, 48)])
@pytest.mark.parametrize("rank", [1, 8, 40])
def test_is_the_optimum(rows: int, columns: int, rank: int) -> None:
    weight, noise = _problem(rows, columns)
    down, up = lowrank_branch(weight, noise, rank, torch.float64)
    size = noise.sqrt().numpy()
    u, s, vt = np.linalg.svd(weight.numpy() * size, full_matrices=False)
    best = (u[:, :rank] * s[:rank]) @ vt[:rank] / size
    np.testing.assert_allclose((up @ down).numpy(), best, atol=1e-8 * np.abs(best).max())
    left = residual_weight(weight, (down, up)).square() @ noise
    np.testing.assert_allclose(float(left.sum()), (s[rank:] ** 2).sum(), rtol=1e-8, atol=1e-12 * s[0] ** 2)


@pytest.mark.parametrize(("rows", "columns"), [(40, 64), (64, 40)])
def test_inputs_without_noise_do_no_harm(rows: int, columns: int) -> None:
    weight, noise = _problem(rows, columns)
    noise[6:] = 0
    branch = lowrank_branch(weight, noise, 6, torch.float64)
    assert float(residual_weight(weight, branch)[:, :6].abs().max()) < 1e-6


def test_the_residual_makes_up_for_the_rounding_of_the_branch() -> None:
    weight, noise = _problem(40, 64)
    branch = lowrank_branch(weight, noise, 8, torch.bfloat16)
    assert {part.dtype for part in branch} == {torch.bfloat16}
    restored = residual_weight(weight, branch) + branch[1].double() @ branch[0].double()
    torch.testing.assert_close(restored, weight, rtol=0, atol=1e-12)


def test_a_linear_with_a_branch_is_closer() -> None:
    weight, power = _problem(48, 64)
    x, weight = (torch.randn(500, 64, dtype=torch.float64) * power.sqrt()).float(), weight.float()
    wanted, format = x @ weight.t(), get_format("nvfp4")
    plain = QuantLinear(quantize(weight, format), None, format)
    branch = lowrank_branch(weight, power, 8, torch.float32)
    helped = QuantLinear(quantize(residual_weight(weight, branch), format), None, format, lowrank=branch)
    assert (helped(x) - wanted).norm() < 0.5 * (plain(x) - wanted).norm()


@pytest.mark.parametrize("rank", [0, 41, -1])
def test_an_impossible_rank_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=r"layer \[40, 64\]: low-rank branch of rank .*; it must be 1 to 40"):
        lowrank_branch(torch.randn(40, 64), torch.ones(64), rank, torch.float32, "layer")
