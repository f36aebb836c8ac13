"""Tests of the shrinkage of second moments, against its definition in float64 and the best λ of a simulation."""

import pytest
import torch

from quant.calibration import statistics
from quant.calibration.statistics import MomentSpread, MomentSum, shrink


@pytest.fixture(autouse=True)
def _plain_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "STRENGTH", 1.0)


def _texts(pieces: int, length: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Pieces of text `[pieces, length, columns]`: each has a direction of its own beside those that all share."""
    random = torch.Generator().manual_seed(seed)
    shared = torch.randn(4, columns, generator=random)
    own = torch.randn(pieces, 2, columns, generator=random)
    draw = torch.randn(pieces, length, 6, generator=random)
    noise = torch.randn(pieces, length, columns, generator=random)
    mixed = draw[..., :4] @ shared + draw[..., 4:] @ own + noise
    return mixed * torch.logspace(-1, 1, columns)


def _shrinkage(texts: torch.Tensor) -> float:
    spread = MomentSpread(texts)
    for text in texts:
        spread.add(text, 1)
    return float(spread.shrinkage())


@pytest.mark.parametrize("lengths", [[96] * 6, [40, 200, 7, 130]])
def test_shrinkage_is_its_definition_in_float64(lengths: list[int]) -> None:
    texts = _texts(len(lengths), max(lengths), 48, seed=len(lengths))
    spread = MomentSpread(texts)
    for text, length in zip(texts, lengths, strict=True):
        spread.add(text[:length], 1)
    moments = [
        text[:length].double().t() @ text[:length].double() / length
        for text, length in zip(texts, lengths, strict=True)
    ]
    weights = [length / sum(lengths) for length in lengths]
    mean = sum(weight * moment for weight, moment in zip(weights, moments, strict=True))
    scale = mean.diagonal().sqrt() * mean.diagonal().sqrt()[:, None]
    off = ~torch.eye(48, dtype=torch.bool)
    variance = sum(w**2 * ((m - mean) / scale)[off].square().sum() for w, m in zip(weights, moments, strict=True))
    variance /= 1 - sum(weight**2 for weight in weights)
    assert float(spread.shrinkage()) == pytest.approx(float(variance / (mean / scale)[off].square().sum()), rel=1e-4)


def test_shrinkage_is_close_to_the_best_of_a_simulation() -> None:
    # The true moment is that of very many texts; the best λ is found by trying, over draws of eight texts.
    columns, draws = 64, 24
    every = _texts(1000, 64, columns)
    everything = every.flatten(0, 1).double()
    scale = everything.square().mean(0).sqrt()
    truth = (everything / scale).t() @ (everything / scale) / len(everything)
    grid = torch.linspace(0, 1, 41)
    losses, chosen = torch.zeros(len(grid), dtype=torch.float64), 0.0
    for draw in range(draws):
        texts = every[8 * draw : 8 * draw + 8]
        found = texts.flatten(0, 1).double() / scale
        moment = found.t() @ found / len(found)
        losses += torch.stack([(shrink(moment.clone(), value) - truth).square().sum() for value in grid.double()])
        chosen += _shrinkage(texts) / draws
    best = float(grid[losses.argmin()])
    assert 0.05 < best < 0.9
    assert chosen == pytest.approx(best, abs=0.06)


def test_batches_do_not_matter() -> None:
    texts = _texts(6, 96, 32)
    apart, together = MomentSpread(texts), MomentSpread(texts)
    for text in texts:
        apart.add(text, 1)
    together.add(texts[:4].flatten(0, 1), 4)
    together.add(texts[4:].flatten(0, 1), 2)
    assert float(apart.shrinkage()) == pytest.approx(float(together.shrinkage()), rel=1e-4)


def test_a_sample_of_channels_stands_for_all() -> None:
    texts = _texts(12, 128, 1024)
    moments = texts.mT @ texts / texts.shape[1]
    scaled = moments / (moments.mean(0).diagonal().sqrt() * moments.mean(0).diagonal().sqrt()[:, None])
    off = ~torch.eye(1024, dtype=torch.bool)
    everywhere = scaled.var(0)[off].sum() / len(texts) / scaled.mean(0)[off].square().sum()
    assert _shrinkage(texts) == pytest.approx(float(everywhere), rel=0.3)


def test_a_single_piece_counts_tokens_against_columns() -> None:
    assert _shrinkage(_texts(1, 96, 32)) == pytest.approx(32 / (32 + 96))


def test_channels_that_are_never_active_do_not_count() -> None:
    texts = _texts(6, 64, 48)
    dead = texts.clone()
    dead[..., 7] = 0
    assert _shrinkage(dead) == pytest.approx(_shrinkage(texts), abs=0.03)
    assert _shrinkage(torch.zeros(4, 64, 48)) == 1.0


@pytest.mark.parametrize("shape", [(48, 48), (3, 16, 16)])
def test_shrink_keeps_the_diagonal(shape: tuple[int, ...]) -> None:
    moment = torch.randn(shape, dtype=torch.float64)
    diagonal = torch.diag_embed(moment.diagonal(dim1=-2, dim2=-1))
    torch.testing.assert_close(shrink(moment.clone(), torch.tensor(0.3)), 0.7 * moment + 0.3 * diagonal)


def test_statistics_are_shrunk_whole_or_as_blocks() -> None:
    texts = _texts(5, 128, 48)
    whole, blocks = MomentSum(), MomentSum(16)
    for text in texts:
        whole.add(text)
        blocks.add(text)
    x = texts.flatten(0, 1)
    strength = whole.spread.shrinkage()
    assert 0 < float(strength) < 1
    torch.testing.assert_close(whole.stats().second_moment, shrink(x.t() @ x / len(x), strength), rtol=1e-4, atol=1e-5)
    expected = shrink(
        (x.t() @ x / len(x)).reshape(3, 16, 3, 16).diagonal(dim1=0, dim2=2).permute(2, 0, 1).clone(),
        strength,
    )
    torch.testing.assert_close(blocks.stats().block_moments, expected, rtol=1e-4, atol=1e-5)
