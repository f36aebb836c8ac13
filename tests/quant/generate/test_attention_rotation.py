"""Turned queries and keys have the same scores, equal second moments, and less error after rounding."""

from __future__ import annotations

import math

import pytest
import torch

from quant.formats.format import FORMATS
from quant.generate.key_rotation import _by_products, turning
from quant.kernels.attention.kv_pages import first_scale, round_kv


def operands(batch: int, group: int, kv_heads: int, tokens: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Correlated channels of very different sizes, one of them always zero in q and another in k."""
    made = torch.Generator().manual_seed(tokens + dim)
    mix = torch.randn(2, dim, dim, generator=made)
    q = torch.randn(batch, group * kv_heads, tokens, dim, generator=made) @ mix[0] * torch.logspace(-2, 1, dim)
    k = torch.randn(batch, kv_heads, tokens, dim, generator=made) @ mix[1] * torch.logspace(1, -2, dim)
    q[..., 7], k[..., 9] = 0, 0
    return q, k


@pytest.mark.parametrize(("batch", "group", "tokens", "dim"), [(1, 1, 1, 16), (2, 3, 40, 48), (1, 2, 5000, 64)])
def test_scores_stay(batch: int, group: int, tokens: int, dim: int) -> None:
    q, k = operands(batch, group, 2, tokens, dim)
    turn = turning(q, k)
    scores = [
        a[:, :, -50:].double() @ b.double().repeat_interleave(group, 1).mT
        for a, b in ((q, k - turn.center), (turn.q(q), turn.k(k)))
    ]
    torch.testing.assert_close(scores[1], scores[0], rtol=0, atol=3e-6 * float(scores[0].abs().max()))
    assert not turning(q, k, softcap=30.0).center.any()
    torch.testing.assert_close(turn.back(turn.k(k)), k, rtol=1e-4, atol=1e-5 * float(k.abs().max()))


@pytest.mark.parametrize("tokens", [300, 3000])
def test_keys_are_centered_where_attention_is(tokens: int) -> None:
    """Heads that look at the first token take its key for the center; of long texts, samples show that, too."""
    made = torch.Generator().manual_seed(tokens)
    first = torch.randn(2, 1, 64, generator=made)
    q = first.repeat_interleave(3, 0) + 0.5 * torch.randn(1, 6, tokens, 64, generator=made)
    k = 0.5 * torch.randn(1, 2, tokens, 64, generator=made)
    k[:, :, 0] = 3 * first[:, 0]
    turn = turning(q, k)
    assert float((turn.center - k[0, :, :1]).norm() / k[0, :, :1].norm()) < 0.01
    assert float(turn.k(k)[:, :, 0].norm() / turn.k(k).norm(dim=-1).mean()) < 0.2
    spread = turning(q, k, softmax_scale=1e-9).center
    if tokens == 300:  # all keys that a query sees count alike
        weight = (1 / torch.arange(1, tokens + 1, dtype=torch.float64)).flip(0).cumsum(0).flip(0)
        torch.testing.assert_close(
            spread[:, 0].double(), (weight[:, None] * k[0].double()).sum(1) / tokens, rtol=0, atol=1e-5
        )


def test_second_moments_become_equal() -> None:
    """So many tokens leave little of the prior. The size of q times that of k is then the least there is."""
    q, k = operands(1, 1, 1, 2000, 32)
    turn = turning(q, k)
    moments = [x[0, 0].double().T @ x[0, 0].double() for x in (turn.q(q), turn.k(k))]
    torch.testing.assert_close(moments[0], moments[1], rtol=0, atol=0.1 * float(moments[0].abs().max()))
    before = [x[0, 0].double().T @ x[0, 0].double() for x in (q, k)]
    # The sum of the singular values of Q Kᵀ's core, the nuclear norm, bounds |Q| |K| over all changes of basis.
    product = torch.linalg.eigvals(before[0] @ before[1]).real.clamp(min=0).sqrt().sum()
    sizes = [float(m.trace()) ** 0.5 for m in moments]
    assert float(product) <= sizes[0] * sizes[1] * (1 + 1e-6) < 1.05 * float(product)


def test_other_sums_turn_hardly_otherwise() -> None:
    """What differs between devices, 1e-6 of each value, is no more after turning: both round the same numbers."""
    q, k = operands(1, 3, 3, 400, 64)
    noisy = [x * (1 + 1e-6 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))) for x in (q, k)]
    one, other = turning(q, k), turning(*noisy)
    for a, b in ((one.q(q), other.q(q)), (one.k(k), other.k(k))):
        assert float((a - b).norm() / a.norm()) < 3e-6


@pytest.mark.parametrize(("ratio", "error"), [(1e3, 1e-12), (1e9, 1e-6), (1e14, 1.0)])
def test_powers_by_products_are_those_by_eigenvalues(ratio: float, error: float) -> None:
    """And inverse to each other whatever the eigenvalues are, so that scores stay."""
    vectors = torch.linalg.qr(torch.randn(2, 64, 64, dtype=torch.float64)).Q
    values = torch.logspace(0, -math.log10(ratio), 64, dtype=torch.float64)
    x = 7e3 * (vectors * values) @ vectors.mT
    x = (x + x.mT) / 2
    inverse, root = _by_products(x)
    for got, exponent in ((inverse, -0.25), (root, 0.25)):
        expected = (vectors * (7e3 * values) ** exponent) @ vectors.mT
        assert float((got - expected).norm() / expected.norm()) < error
    torch.testing.assert_close(inverse @ root, torch.eye(64).double().expand_as(x), rtol=0, atol=1e-9)


@pytest.mark.gpu
def test_gpu_turns_as_the_cpu_does() -> None:
    q, k = operands(1, 3, 3, 400, 64)
    here, there = turning(q, k), turning(q.cuda(), k.cuda())
    for a, b in ((here.q(q), there.q(q.cuda())), (here.k(k), there.k(k.cuda()))):
        assert float((a - b.cpu()).norm() / a.norm()) < 1e-5


@pytest.mark.parametrize(("name", "most"), [("fp8", 0.75), ("nvfp4", 0.6)])
def test_rounded_keys_give_better_scores(name: str, most: float) -> None:
    q, k = operands(1, 2, 2, 300, 64)
    turn = turning(q, k)
    errors = []
    for query, key in ((q, k), (turn.q(q), turn.k(k))):
        rounded = round_kv(key, FORMATS[name], first_scale(key, FORMATS[name]))
        scores = [query.double() @ each.double().repeat_interleave(2, 1).mT for each in (key, rounded)]
        errors.append(float((scores[1] - scores[0]).norm()))
    assert errors[1] < most * errors[0]


def test_what_is_not_finite_stays_visible() -> None:
    """A model that overflows gives NaN as it would without us, and no error of a decomposition."""
    q, k = operands(1, 1, 1, 20, 16)
    k[0, 0, 3, 5] = torch.inf
    turn = turning(q, k)
    assert bool(turn.of_k.isfinite().all()) and not bool(turn.k(k).isfinite().all())
