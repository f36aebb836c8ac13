"""GPTQ is compared with brute force over all codes, with closed forms in float64, and with itself without its parts."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch

from quant.calibration.solvers.gptq import (
    Gptq,
    block_factors,
    block_order,
    corrected_weight,
    factorize,
    gptq,
    inverse_of_upper,
    round_with_feedback,
    search_block,
)
from quant.calibration.solvers.registry import get_solver
from quant.calibration.solvers.solve_group import solve_group
from quant.calibration.statistics import LayerStats, MomentSum, diagonal_blocks, shrink
from quant.formats.format import E2M1, E4M3, FORMATS, INT4, Format
from quant.formats.tensor import quantize, quantize_with_scale

NVFP4 = FORMATS["nvfp4"]


def _moment(columns: int, tokens: int = 64, outlier: float = 4.0) -> torch.Tensor:
    x = torch.randn(tokens, columns) @ torch.randn(columns, columns)
    x[:, 0] *= outlier
    return x.t() @ x / tokens


def _loss(values: torch.Tensor, weight: torch.Tensor, moment: torch.Tensor) -> torch.Tensor:
    """The output error of each row, in float64."""
    error = values.double() - weight.double()
    return ((error @ moment.double()) * error).sum(1)


@pytest.mark.parametrize("seed", range(5))
def test_feedback_is_no_worse_than_nearest_and_near_the_optimum_of_all_codes(seed: int) -> None:
    torch.manual_seed(seed)
    columns, rows = 4, 6
    moment = _moment(columns)
    weight = torch.randn(rows, columns)
    grid = torch.unique(torch.cat([E2M1.grid(), -E2M1.grid()]))
    every = torch.tensor(list(itertools.product(grid.tolist(), repeat=columns)))
    best = torch.stack([_loss(every, row.expand_as(every), moment).min() for row in weight])
    factor = factorize(moment, 0.0)
    values, errors = round_with_feedback(weight.t(), factor.U, torch.ones(1, 1, rows), E2M1)
    found = _loss(values[:, 0].t(), weight, moment)
    nearest = _loss(weight.round(), weight, moment)
    # The loss that the errors claim is the loss there is.
    torch.testing.assert_close(errors[:, 0].square().sum(0).double(), found, rtol=1e-3, atol=1e-6)
    assert bool((found >= best - 1e-6).all())
    assert found.sum() <= 1.5 * best.sum() < 1.5 * nearest.sum()


def test_feedback_is_the_closed_form_of_optimal_brain_surgery() -> None:
    """Rounding a column by d moves the free ones by d · C⁻¹[j, free] / C⁻¹[j, j], C the inverse of what is free."""
    columns = 6
    moment = _moment(columns).double()
    weight = torch.randn(3, columns, dtype=torch.float64)
    factor = factorize(moment, 0.0)
    values, _ = round_with_feedback(weight.t(), factor.U, torch.full((1, 1, 3), 0.25, dtype=torch.float64), INT4)
    left = weight.clone()
    for j in range(columns):
        rounded = (left[:, j] / 0.25).round().clamp(-7, 7) * 0.25
        torch.testing.assert_close(values[j, 0], rounded, rtol=0, atol=1e-6)
        inverse = torch.linalg.inv(moment[j:, j:])
        left[:, j:] -= torch.outer(left[:, j] - rounded, inverse[0] / inverse[0, 0])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_inverse_of_a_triangular_matrix_is_found_by_halves(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the products of halves are in float32, on a GPU in pairs of BF16."""
    for name in ("_LEAF", "_SLAB"):
        monkeypatch.setattr(f"quant.calibration.solvers.gptq.{name}", 16)
    for size in (7, 16, 17, 50, 129, 600):
        upper = torch.randn(size, size, device=device).triu() + 2 * size**0.5 * torch.eye(size, device=device)
        for stored in (upper, upper.t().contiguous().t()):
            found = inverse_of_upper(stored)
            exact = torch.linalg.inv(upper.double())
            assert (found - exact).norm() < (1e-6 if device == "cpu" else 3e-5) * exact.norm()
            assert torch.equal(found, found.triu())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_large_second_moment_is_factorized_by_blocks(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As exactly as by LAPACK, though a few inputs are a thousand times as loud; and damped where it is singular."""
    if device == "cpu":

        def of_columns(x: torch.Tensor, y: torch.Tensor, total: torch.Tensor | None = None, factor: float = 1.0) -> Any:
            product = factor * (x.float().mT @ y.float())
            return product if total is None else total.add_(product)

        monkeypatch.setattr("quant.calibration.fast_matmul._of_columns", of_columns)
        for module in ("fast_matmul", "solvers.gptq"):
            monkeypatch.setattr(f"quant.calibration.{module}.has_pairs", lambda x: True)
    monkeypatch.setattr("quant.calibration.solvers.gptq._LEAF", 16)
    for size in (40, 64, 150):
        x = torch.randn(2000, size, device=device) @ torch.randn(size, size, device=device)
        x[:, ::20] *= 1000
        moment, errors = x.t() @ x / len(x), []
        for whole in (16, 1000):
            monkeypatch.setattr("quant.calibration.solvers.gptq._WHOLE", whole)
            U = factorize(moment, 1e-9).U.double()
            assert torch.equal(U, U.triu())
            off = U @ moment.double() @ U.t() - torch.eye(size, device=device)
            errors.append(float(off.norm()))
        assert errors[0] < 1.5 * errors[1] + 1e-4
        monkeypatch.setattr("quant.calibration.solvers.gptq._WHOLE", 16)
        singular = x[: size // 2].t() @ x[: size // 2]
        factor = factorize(singular - 1e-5 * torch.diag(singular.diagonal()), 0.0)
        assert factor.damping > 0 and bool(torch.isfinite(factor.U).all())


@pytest.mark.parametrize("slab", [256, 3])
def test_corrected_weight_is_the_least_squares_answer(slab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quant.calibration.solvers.gptq._SLAB", slab)
    x, r = torch.randn(200, 8, dtype=torch.float64), torch.randn(200, 8, dtype=torch.float64)
    weight = torch.randn(5, 8, dtype=torch.float64)
    factor = factorize(x.t() @ x / 200, 0.0)
    found = corrected_weight(weight, (r - x).t() @ x / 200, factor)
    expected = torch.linalg.lstsq(x, r @ weight.t()).solution.t()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("ordered", [False, True])
def test_drift_and_residual_are_least_squares_together(ordered: bool) -> None:
    """The corrected weight maps x closest to W r + s, with r the original input and s the error to make up for."""
    x, r = torch.randn(200, 8, dtype=torch.float64), torch.randn(200, 8, dtype=torch.float64)
    s, weight = torch.randn(200, 5, dtype=torch.float64), torch.randn(5, 8, dtype=torch.float64)
    factor = factorize(x.t() @ x / 200, 0.0, torch.randperm(8) if ordered else None)
    both = corrected_weight(weight, (r - x).t() @ x / 200, factor, s.t() @ x / 200)
    torch.testing.assert_close(both, torch.linalg.lstsq(x, r @ weight.t() + s).solution.t(), rtol=1e-9, atol=1e-9)
    alone = corrected_weight(weight, None, factor, s.t() @ x / 200)
    torch.testing.assert_close(alone, torch.linalg.lstsq(x, x @ weight.t() + s).solution.t(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "format", [FORMATS[name] for name in ("nvfp4", "mxfp4", "mxfp8", "int4", "fp8", "fp8_channel")]
)
def test_every_format_gains_over_its_searched_scales_and_stays_on_its_grid(format: Format) -> None:
    columns = 256
    moment = _moment(columns, 1024)
    weight = torch.randn(24, columns) * 0.02
    plain = solve_group({"w": weight}, {}, format, get_solver("mse"))["w"]
    ours = solve_group({"w": weight}, {"w": LayerStats(1024, moment)}, format, get_solver("gptq"))["w"]
    before, after = (_loss(q.dequantize(), weight, moment).sum() for q in (plain, ours))
    assert after < 0.5 * before
    again = quantize_with_scale(
        ours.dequantize(), format, ours.scale.float() if format.scale is E4M3 else _scale(ours), ours.global_scale
    )
    assert torch.equal(again.dequantize(), ours.dequantize())


def _scale(tensor: object) -> torch.Tensor:
    from quant.formats.rounding import decode

    return decode(tensor.scale, tensor.format.scale)


def test_loud_blocks_come_first_and_stay_whole() -> None:
    power = torch.tensor([1.0, 2, 3, 9, 1, 1, 4, 4, 4, 100])
    # Sums of the blocks of three: 6, 11, 12, and a short one, which stays at the end.
    assert block_order(power, 3).tolist() == [6, 7, 8, 3, 4, 5, 2, 1, 0, 9]
    assert block_order(power, 20).tolist() == [9, 3, 6, 7, 8, 2, 1, 0, 4, 5]


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "int4_g32", "fp8_channel", "fp8_block"])
def test_an_order_is_that_of_a_permuted_problem(name: str) -> None:
    """The weight is permuted by hand, solved as it then stands, and put back."""
    torch.manual_seed(1)
    columns, format = 144, FORMATS[name]
    moment, weight = _moment(columns, 1024), torch.randn(8, columns) * 0.02
    width = 16 if name == "nvfp4" else 32
    order = torch.cat([block_order(moment.diagonal()[:128], width), torch.arange(128, columns)])
    scale = weight.abs().amax() / (6 * 256) if format.global_scale else None
    found = gptq(weight, factorize(moment, order=order), format, scale).dequantize()
    if format.block[0] == 1 and format.block[1] > 0:
        there = gptq(weight[:, order].contiguous(), factorize(moment[order][:, order]), format, scale).dequantize()
        assert torch.equal(found, torch.empty_like(there).index_copy_(1, order, there))
    plain = gptq(weight, factorize(moment), format, scale).dequantize()
    assert not torch.equal(found, plain)
    assert _loss(found, weight, moment).sum() < 1.3 * _loss(plain, weight, moment).sum()


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "int4_g32"])
def test_the_loud_first_lose_less(name: str) -> None:
    columns, losses = 128, torch.zeros(2)
    for seed in range(4):
        torch.manual_seed(seed)
        x = torch.randn(2048, columns) @ torch.randn(columns, columns) * torch.linspace(0.1, 3, columns)
        moment, weight = x.t() @ x / 2048, torch.randn(64, columns) * 0.02
        scale = weight.abs().amax() / (6 * 256) if FORMATS[name].global_scale else None
        order = block_order(moment.diagonal(), FORMATS[name].block[1])
        for i, given in enumerate((None, order)):
            found = gptq(weight, factorize(moment, order=given), FORMATS[name], scale, sweeps=0).dequantize()
            losses[i] += _loss(found, weight, moment).sum()
    assert losses[1] < 0.9 * losses[0]


def test_a_corrected_weight_does_not_depend_on_the_order() -> None:
    moment, drift = _moment(48).double(), torch.randn(48, 48, dtype=torch.float64)
    weight = torch.randn(5, 48, dtype=torch.float64)
    order = torch.randperm(48)
    plain, ordered = (corrected_weight(weight, drift, factorize(moment, order=o)) for o in (None, order))
    torch.testing.assert_close(ordered, plain, rtol=1e-8, atol=1e-8)


def test_descent_never_raises_the_loss() -> None:
    moment = _moment(64, 256)
    weight = torch.randn(32, 64) * 0.02
    factor = factorize(moment)
    scale = weight.abs().amax() / (6 * 256)
    losses = [
        _loss(gptq(weight, factor, NVFP4, scale, sweeps=sweeps).dequantize(), weight, factor.H).sum()
        for sweeps in (0, 1, 2, 5)
    ]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.95 * losses[0]


def test_search_with_feedback_is_the_best_single_scale_tried_with_feedback() -> None:
    block = torch.randn(16, 20) * 0.02
    _, uppers = block_factors(_moment(16, 100)[None])
    second = block.abs().amax() / (6 * 256)
    _, _, scales = search_block(block, uppers[0], NVFP4, second, shortlist=16)
    losses = []
    for s in E4M3.grid()[1:]:
        _, errors = round_with_feedback(block, uppers[0], (s * second).expand(1, 1, 20), E2M1)
        losses.append(errors[:, 0].square().sum(0))
    _, mine = round_with_feedback(block, uppers[0], (scales * second)[None, None], E2M1)
    reached = mine[:, 0].square().sum(0)
    # Sixteen neighbouring codes are searched; greedy feedback leaves no proof that a far one cannot win by luck.
    assert (reached <= torch.stack(losses).min(0).values * 1.0001).float().mean() > 0.9


def test_a_singular_moment_is_damped_and_says_so() -> None:
    x = torch.randn(3, 16)
    factor = factorize(x.t() @ x / 3, 0.0)
    assert factor.damping > 0
    eye = factor.U.t() @ factor.U @ factor.H
    torch.testing.assert_close(eye, torch.eye(16), atol=0.05, rtol=0)
    with pytest.raises(ValueError, match=r"layer\.x: .*NaN"):
        Gptq()(
            torch.ones(2, 16),
            LayerStats(1, torch.full((16, 16), torch.nan)),
            NVFP4,
            global_scale=torch.ones(()),
            name="layer.x",
        )


def test_a_channel_that_is_never_active_keeps_its_nearest_value() -> None:
    moment = _moment(32, 64)
    moment[5], moment[:, 5] = 0, 0
    weight = torch.randn(8, 32) * 0.02
    found = gptq(weight, factorize(moment), NVFP4, weight.abs().amax() / (6 * 256)).dequantize()
    assert bool(torch.isfinite(found).all())
    assert float((found - weight)[:, 5].abs().max()) < 0.02


def test_the_same_twice() -> None:
    moment, weight = _moment(64), torch.randn(16, 64)
    a, b = (solve_group({"w": weight}, {"w": LayerStats(64, moment)}, NVFP4, get_solver("gptq"))["w"] for _ in range(2))
    assert torch.equal(a.codes, b.codes) and torch.equal(a.scale.view(torch.uint8), b.scale.view(torch.uint8))


def test_solvers_say_what_they_need() -> None:
    weight = torch.randn(8, 64)
    with pytest.raises(ValueError, match=r"w: solver 'gptq' needs calibration data.*'mse'"):
        solve_group({"w": weight}, {}, NVFP4, get_solver("gptq"))
    with pytest.raises(ValueError, match=r"unknown solver 'awk'.*gptq.*awq"):
        get_solver("awk+gptq")
    with pytest.raises(ValueError, match=r"'awq' comes too late; the order is scaling"):
        get_solver("gptq+awq")


@pytest.mark.parametrize("columns", [40, 600])
def test_moments_in_float64(columns: int) -> None:
    x = torch.randn(300, columns)
    r = x + 0.1 * torch.randn_like(x)
    total, blocks = MomentSum(), MomentSum(width=16)
    for start in range(0, 300, 100):
        total.add(x[start : start + 100], (r - x)[start : start + 100])
        blocks.add(x[start : start + 100])
    stats = total.stats()
    assert stats is not None and stats.second_moment is not None and stats.drift is not None
    exact = x.double().t() @ x.double() / 300
    assert total.spread is not None and blocks.spread is not None
    whole, apart = (shrink(exact.clone(), spread.shrinkage().double()) for spread in (total.spread, blocks.spread))
    torch.testing.assert_close(stats.second_moment.double(), whole, rtol=0, atol=1e-5)
    drift = shrink((r - x).double().t() @ x.double() / 300, total.spread.shrinkage().double())
    torch.testing.assert_close(stats.drift.double(), drift, rtol=0, atol=1e-5)
    found = blocks.stats()
    assert found is not None
    torch.testing.assert_close(found.blocks(16)[1].double(), apart[16:32, 16:32], rtol=0, atol=1e-5)
    if columns % 16 == 0:
        torch.testing.assert_close(stats.blocks(16).double(), diagonal_blocks(whole, 16), rtol=0, atol=1e-5)
        torch.testing.assert_close(found.blocks(16).double(), diagonal_blocks(apart, 16), rtol=0, atol=1e-5)


def test_rounding_to_nearest_is_unchanged_by_the_registry() -> None:
    weight = torch.randn(8, 64)
    ours = solve_group({"w": weight}, {}, FORMATS["mxfp4"], get_solver("rtn"))["w"]
    assert torch.equal(ours.codes, quantize(weight, FORMATS["mxfp4"]).codes)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_parts_are_solved_together_as_apart(device: str) -> None:
    """So that ranks which solve some parts of a weight each come to the bits of one rank."""
    torch.manual_seed(0)
    moment, drift = _moment(256, tokens=600).to(device), 0.01 * torch.randn(256, 256, device=device)
    weight, residual = (torch.randn(3 * 96, 256, device=device) for _ in range(2))
    factor, global_scale = factorize(moment), torch.tensor(0.002, device=device)
    parts = [slice(0, 96), slice(96, 192), slice(192, 288)]
    solve = partial(gptq, factor=factor, format=NVFP4, global_scale=global_scale, drift=drift)
    together = solve(weight, residual=residual, parts=parts)
    for part in parts:
        apart = solve(weight[part], residual=residual[part])
        assert torch.equal(together.codes[part], apart.codes)
        assert torch.equal(together.rows(part.start, part.stop).scale, apart.scale)


def test_blocks_that_are_not_positive_definite_are_refused() -> None:
    blocks = torch.stack([torch.eye(4), torch.diag(torch.tensor([1.0, -1.0, 1.0, 1.0]))])
    with pytest.raises(torch.linalg.LinAlgError):
        block_factors(blocks)
