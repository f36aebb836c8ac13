"""The low-rank branch equals numpy's SVD of the weighted weight, which is optimal by Eckart and Young."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quant.calibration.solvers.lowrank import (
    LossMetric,
    blocks_between,
    lowrank_branch,
    refit_branches,
    residual_weight,
    take_branches,
)
from quant.calibration.statistics import LayerStats
from quant.formats.format import get_format
from quant.formats.tensor import quantize
from quant.kernels.linear.quant_linear import QuantLinear


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


def _second_moment(size: int) -> torch.Tensor:
    samples = torch.randn(4 * size, size, dtype=torch.float64) * torch.rand(size, dtype=torch.float64)
    return samples.t() @ samples / len(samples)


def test_is_the_optimum_for_the_loss_of_the_model() -> None:
    weight, noise = _problem(48, 40)
    blocks = [_second_moment(32), _second_moment(16)]
    down, up = lowrank_branch(weight, noise, 6, torch.float64, metric=LossMetric(blocks))
    # LossMetric damps A, and factors it in float32.
    outputs = torch.block_diag(*(b + 0.001 * b.diagonal().mean() * torch.eye(len(b)) for b in blocks)).numpy()
    weighted = np.linalg.cholesky(outputs).T @ weight.numpy() * noise.sqrt().numpy()
    left = residual_weight(weight, (down, up)).numpy()
    loss = np.einsum("ij,ik,kj,j->", left, outputs, left, noise.numpy())
    np.testing.assert_allclose(loss, (np.linalg.svd(weighted, compute_uv=False)[6:] ** 2).sum(), rtol=1e-4)


def test_blocks_of_gradients_are_cut_where_a_layer_ends() -> None:
    blocks = list(_second_moment(48).view(3, 16, 48))
    blocks = [block[:, 16 * i : 16 * i + 16] for i, block in enumerate(blocks)]
    whole = torch.block_diag(*blocks)
    for start, stop in ((0, 48), (0, 16), (10, 40), (16, 33)):
        cut = blocks_between(blocks, start, stop)
        torch.testing.assert_close(torch.block_diag(*cut), whole[start:stop, start:stop])
    assert blocks_between([], 3, 9) == []


def test_a_branch_takes_up_errors_of_the_rounded_weight() -> None:
    outputs, inputs = _second_moment(64), _second_moment(40)
    stats = LayerStats(99, inputs, outputs=LayerStats(99, outputs))
    weights = {name: torch.randn(32, 40, dtype=torch.float64) for name in ("first", "second")}
    residuals, branches, _ = take_branches(weights, stats, 4, torch.float64)
    rounded = {name: (4 * residual).round() / 4 for name, residual in residuals.items()}
    targets, refitted = refit_branches(residuals, rounded, branches, stats)
    for index, (name, weight) in enumerate(weights.items()):
        metric = outputs[32 * index : 32 * index + 32, 32 * index : 32 * index + 32]

        def loss(branch: tuple[torch.Tensor, torch.Tensor], name: str, metric: torch.Tensor) -> float:
            error = weights[name] - rounded[name] - branch[1] @ branch[0]
            return float(torch.einsum("ij,ik,kl,jl->", error, metric, error, inputs))

        torch.testing.assert_close(targets[name] + refitted[name][1] @ refitted[name][0], weight)
        before, after = loss(branches[name], name, metric), loss(refitted[name], name, metric)
        # The optimum of rank 4 is that of the weighted error, by Eckart and Young.
        left, right = np.linalg.cholesky(metric.numpy()).T, np.linalg.cholesky(inputs.numpy())
        best = (np.linalg.svd(left @ (weight - rounded[name]).numpy() @ right, compute_uv=False)[4:] ** 2).sum()
        assert best * 0.999 <= after <= best * 1.05 < 0.9 * before


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
