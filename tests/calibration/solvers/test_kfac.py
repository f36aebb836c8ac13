"""`kfac` is compared with brute force over all codes, and with GPTQ by the loss of both sides, tr(A E M Eᵀ)."""

from __future__ import annotations

import itertools

import pytest
import torch
from slow_cases import quick_cases

from quant.calibration.solvers.gptq import Gptq
from quant.calibration.solvers.interfaces import shared_global_scale
from quant.calibration.solvers.kfac import Kfac
from quant.calibration.solvers.solve_group import solve_group
from quant.calibration.statistics import LayerStats
from quant.formats.format import FORMATS, Format

FORMAT_NAMES = ("nvfp4", "mxfp4", "int4_g32", "fp8_channel", "fp8", "fp8_block")


def _moment(size: int, samples: int = 400, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, size, generator=generator) @ torch.randn(size, size, generator=generator) / size**0.5
    x = x + 0.3 * torch.randn(samples, size, generator=generator)
    return x.t() @ x / samples


def _stats(rows: int, columns: int, width: int | None = None, seed: int = 0) -> tuple[LayerStats, torch.Tensor]:
    """Statistics with A in blocks of `width`, and A as one matrix `[rows, rows]`."""
    outer = _moment(rows, seed=seed + 1)
    if width is None:
        outputs = LayerStats(400, outer)
    else:
        parts = [outer[start : start + width, start : start + width] for start in range(0, rows, width)]
        padded = [torch.nn.functional.pad(p, (0, width - len(p), 0, width - len(p))) for p in parts]
        outputs = LayerStats(400, block_moments=torch.stack(padded))
        outer = torch.block_diag(*parts)
    return LayerStats(400, _moment(columns, seed=seed), outputs=outputs), outer


def _loss(
    values: torch.Tensor, weight: torch.Tensor, inner: torch.Tensor, outer: torch.Tensor, damping: float
) -> float:
    error = (weight - values).double()
    outer = outer.double() + damping * outer.diagonal().mean() * torch.eye(len(outer))
    inner = inner.double() + 0.01 * inner.diagonal().mean() * torch.eye(len(inner))
    return float(torch.trace(outer @ error @ inner @ error.t()))


def _solved(solver: Gptq, weight: torch.Tensor, stats: LayerStats, format: Format) -> torch.Tensor:
    scale = shared_global_scale(weight.abs().amax(), format, "mse") if format.global_scale else None
    return solver(weight, stats, format, global_scale=scale, name="layer").dequantize()


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("width", [None, 40])
def test_the_loss_of_both_sides_is_far_below_that_of_gptq(name: str, width: int | None) -> None:
    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(3))
    stats, outer = _stats(96, 128, width)
    assert stats.second_moment is not None
    one, two = (_solved(solver, weight, stats, FORMATS[name]) for solver in (Gptq(), Kfac()))
    losses = [_loss(values, weight, stats.second_moment, outer, Kfac.output_damping) for values in (one, two)]
    assert losses[1] < (0.9 if width is None else 0.95) * losses[0]


@pytest.mark.parametrize("seed", quick_cases(range(40), lambda seed: seed < 20))
def test_small_matrices_never_lose_more_than_gptq(seed: int) -> None:
    """Few rows in few pieces, where the coupling that pieces leave out is strongest."""
    torch.manual_seed(seed)
    rows, columns = 2 + seed % 5, 16
    weight = torch.randn(rows, columns)
    stats, outer = _stats(rows, columns, seed=seed)
    assert stats.second_moment is not None
    format = FORMATS[("nvfp4", "int4")[seed % 2]]
    for solver in (Kfac(pieces=1), Kfac(pieces=2), Kfac()):
        losses = [
            _loss(_solved(each, weight, stats, format), weight, stats.second_moment, outer, Kfac.output_damping)
            for each in (Gptq(), solver)
        ]
        assert losses[1] <= losses[0] * (1 + 1e-5)


def test_it_comes_near_the_best_of_all_codes() -> None:
    format = FORMATS["int4"]  # one scale a row, fixed beforehand, so that the codes are all there is to choose
    ratios = []
    for seed in range(8):
        torch.manual_seed(seed)
        weight = torch.randn(2, 2)
        stats, outer = _stats(2, 2, seed=seed)
        assert stats.second_moment is not None
        quantized = Kfac()(weight, stats, format, global_scale=None, name="layer")
        codes = torch.tensor(list(itertools.product(range(-8, 8), repeat=4)), dtype=torch.float64).view(-1, 2, 2)
        errors = weight.double() - codes * quantized.scale.double().view(2, 1)
        damped = outer.double() + Kfac.output_damping * outer.diagonal().mean() * torch.eye(2)
        moment = stats.second_moment.double() + 0.01 * stats.second_moment.diagonal().mean() * torch.eye(2)
        best = float(((damped @ errors @ moment) * errors).sum((1, 2)).min())
        own = _loss(quantized.dequantize(), weight, stats.second_moment, outer, Kfac.output_damping)
        assert own >= best * (1 - 1e-5)
        ratios.append(own / best)
    assert sum(ratios) / len(ratios) < 1.3


def test_without_gradients_it_is_gptq() -> None:
    weight = torch.randn(32, 64)
    stats = LayerStats(400, _moment(64))
    for name in FORMAT_NAMES:
        one, two = (_solved(solver, weight, stats, FORMATS[name]) for solver in (Gptq(), Kfac()))
        assert torch.equal(one, two)


def test_white_gradients_change_little() -> None:
    """With A = 1 the rows are independent, and what is left of the difference is more sweeps of descent."""
    weight = torch.randn(48, 64)
    stats, _ = _stats(48, 64)
    stats.outputs = LayerStats(400, torch.eye(48))
    assert stats.second_moment is not None
    one, two = (_solved(solver, weight, stats, FORMATS["nvfp4"]) for solver in (Gptq(), Kfac()))
    losses = [_loss(values, weight, stats.second_moment, torch.eye(48), 0.0) for values in (one, two)]
    assert 0.9 * losses[0] < losses[1] <= losses[0] * 1.0001


def test_members_that_are_solved_one_by_one_get_their_own_gradients() -> None:
    """Tiles of FP8 blocks are not stacked, so that A of the group is cut for each member."""
    weights = {"q": torch.randn(96, 128), "k": torch.randn(64, 128)}
    stats, outer = _stats(160, 128)
    assert stats.second_moment is not None
    solved = solve_group(weights, dict.fromkeys(weights, stats), FORMATS["fp8_block"], Kfac(), stack=True)
    for name, part in {"q": slice(0, 96), "k": slice(96, 160)}.items():
        one = _solved(Gptq(), weights[name], stats, FORMATS["fp8_block"])
        losses = [
            _loss(values, weights[name], stats.second_moment, outer[part, part], Kfac.output_damping)
            for values in (one, solved[name].dequantize())
        ]
        assert losses[1] < 0.9 * losses[0]
