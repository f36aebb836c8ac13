"""Products in pairs of BF16 are as good as float32's own."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from quant.calibration import fast_matmul
from quant.calibration.statistics import MomentSum, round_activation
from quant.formats.format import INPUT_FORMATS

LIMIT = 2.0**-15


def inputs(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs with a few large channels, as language models have, and a drift."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(600, 160, generator=generator) * torch.logspace(-2, 2, 160)
    return x.to(device), (torch.randn(600, 160, generator=generator) * x.abs() / 30).to(device)


def error(found: torch.Tensor | None, x: torch.Tensor, y: torch.Tensor) -> float:
    """Largest error of `xᵀ y`, in units of the norms of the two columns."""
    assert found is not None
    x, y = x.double(), y.double()
    return float(((found - x.t() @ y).abs() / (x.norm(dim=0)[:, None] * y.norm(dim=0))).max())


def in_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a CPU multiply as a GPU does."""

    def of_columns(
        x: torch.Tensor, y: torch.Tensor, total: torch.Tensor | None = None, factor: float = 1.0
    ) -> torch.Tensor:
        product = factor * (x.float().mT @ y.float())
        return product if total is None else total.add_(product)

    monkeypatch.setattr(fast_matmul, "_of_columns", of_columns)
    monkeypatch.setattr(fast_matmul, "has_pairs", lambda x: True)
    monkeypatch.setattr("quant.calibration.statistics.has_pairs", lambda x: True)


def check_sums(device: str) -> None:
    x, drift = inputs(device)
    sums = MomentSum()
    for part in (slice(0, 250), slice(250, 600)):
        sums.add(x[part], drift[part])
    assert sums.second is not None
    above = sums.second.triu()
    assert error(above + above.triu(1).t(), x, x) < LIMIT
    assert error(sums.cross, drift, x) < 2.0**-10  # a difference


def test_pairs_lose_no_digits_that_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    in_pairs(monkeypatch)
    check_sums("cpu")


def check_rounded_inputs(device: str) -> None:
    """NVFP4, FP8 and INT8 of one scale: exact products, whose sums in float32 are all that is left of an error."""
    x, drift = inputs(device)
    x = x / torch.logspace(-2, 2, 160, device=device)  # else small channels would be zeros
    for name, scale in (("nvfp4", 0.00123), ("fp8", 0.0123), ("int8_tensor", 0.03)):
        unit = torch.tensor(scale, device=device)
        rounded = round_activation(x, INPUT_FORMATS[name], unit)
        exact, pairs = MomentSum(unit=unit), MomentSum()
        for sums in (exact, pairs):
            sums.add(rounded, drift, residual=drift[:, :130])
        found, expected = exact.stats(), pairs.stats()
        assert found is not None and expected is not None
        assert exact.second is not None
        above = (exact.second * unit**2).triu()
        assert error(above + above.triu(1).t(), rounded, rounded) < 2.0**-20
        for part in ("second_moment", "drift", "residual"):
            ours, theirs = getattr(found, part), getattr(expected, part)
            assert (ours - theirs).norm() < 2.0**-9 * theirs.norm()
        weight = drift[:40] / drift.abs().amax()
        for stored in (weight, weight.bfloat16()):
            y = fast_matmul.PairedWeight(stored).linear(rounded, unit=unit)
            assert error(y, rounded.t(), stored.float().t()) < (LIMIT if stored is weight else 2.0**-20)


def test_rounded_inputs_are_multiplied_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    in_pairs(monkeypatch)
    check_rounded_inputs("cpu")


@pytest.mark.parametrize("pairs", [False, True])
def test_strips_that_ranks_add_up_make_the_sum_of_one(pairs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if pairs:
        in_pairs(monkeypatch)
    monkeypatch.setattr("quant.calibration.statistics._STRIP", 48)
    whole, parts = MomentSum(), [MomentSum() for _ in range(3)]
    for start in (0, 200, 400):
        x, drift = (part[start : start + 200] for part in inputs("cpu"))
        whole.add_products(x, drift, drift[:, :130])
        for rank, part in enumerate(parts):
            monkeypatch.setattr("quant.calibration.statistics.rank_and_world", lambda rank=rank: (rank, 3))
            monkeypatch.setattr("quant.calibration.statistics.dealt", lambda sizes: [i % 3 for i in range(len(sizes))])
            part.add_products(x, drift, drift[:, :130], shared=True)
    for name in ("second", "cross", "residual"):
        assert torch.equal(sum(getattr(part, name) for part in parts), getattr(whole, name))
        assert all(0 < int(getattr(part, name).count_nonzero()) < getattr(whole, name).numel() for part in parts)


def check_operands(device: str) -> None:
    """Compares products of rows and columns of matrices that change, as GPTQ takes them, with float64."""
    x, y = inputs(device)
    now = torch.cat([y[:32], y[200:232], y[64:160]])
    changing = fast_matmul.RightOperand(y[:160].clone())
    changing.set(slice(32, 64), 3 * y[200:232], minus=2 * y[200:232])
    for left in (x[32:64, :160], x[32:64, :160].t().contiguous().t(), x[:160, 32:64].t()):
        for columns in (slice(None), slice(48, 128)):
            total = torch.ones(len(left), 160, device=device)[:, columns]
            fast_matmul.add_product(total, fast_matmul.left_operand(left), changing.stacked[:, columns], factor=-2)
            assert error((1 - total) / 2, left.t(), now[:, columns]) < LIMIT
    several = torch.zeros(2, 300, 40, device=device)
    pairs = x[:, :40].unflatten(0, (2, 300)), y[:80].unflatten(0, (2, 40))
    fast_matmul.add_product(
        several[..., :40], fast_matmul.left_operand(pairs[0]), fast_matmul.RightOperand(pairs[1]).stacked[..., :40]
    )
    for total, left, right in zip(several, *pairs, strict=True):
        assert error(total, left.t(), right[:, :40]) < LIMIT
    moment, other = fast_matmul.SplitMatrix(x[:160]), fast_matmul.SplitMatrix(y[:32])
    assert error(moment[32:64, 60:].t() @ other, x[32:64, 60:], y[:32]) < LIMIT


@pytest.mark.parametrize("pairs", [False, True])
def test_operands_follow_their_rows(pairs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if pairs:
        in_pairs(monkeypatch)
    check_operands("cpu")


def test_differences_cost_little() -> None:
    """A drift is rounded to BF16 once: its product loses less than the mean over these few tokens does."""
    x, drift = inputs("cpu")
    whole, half = drift.double().t() @ x.double(), drift[::2].double().t() @ x[::2].double() * 2
    rounded = drift.bfloat16().double().t() @ x.bfloat16().double()
    assert (rounded - whole).norm() < (half - whole).norm() / 300


def test_bf16_alone_would_lose_them() -> None:
    x, _ = inputs("cpu")
    rounded = x.bfloat16().float()
    assert error(rounded.t() @ rounded, x, x) > 4 * LIMIT


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_paired_linears_lose_no_digits_that_matter(stored: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    in_pairs(monkeypatch)
    check_linears("cpu", stored)


def check_linears(device: str, stored: torch.dtype) -> None:
    """Compares two batches through two layers, of which one changes in between, with float64."""
    x, _ = inputs(device)
    layers = [torch.nn.Linear(160, 40).to(device, stored).float() for _ in range(2)]
    with torch.no_grad(), fast_matmul._PairedLinears() as pairs:
        for _ in range(2):
            for layer in layers:
                y = layer(x.view(2, 300, 160))
                exact = x.double() @ layer.weight.double().t()
                found = y.flatten(0, 1) - layer.bias
                size = x.double().norm(dim=1)[:, None] * layer.weight.double().norm(dim=1)
                assert float(((found - exact).abs() / size).max()) < LIMIT
            layers[1].weight.mul_(-3)
            if device == "cuda":
                torch.cuda.synchronize()
        assert len(pairs.weights) == 3
        first, changed, _ = (parts for _, parts in pairs.weights.values())
        assert bool(first._some) == bool(changed._some) == (stored is torch.float32)
        assert (first.low is None) == (stored is torch.bfloat16)
        assert layers[0](x[:8]).shape == (8, 40) and len(pairs.weights) == 3  # too few tokens to split for


def test_paired_linears_leave_gradients_and_other_dtypes() -> None:
    layer = torch.nn.Linear(160, 40)
    x, _ = inputs("cpu")
    with fast_matmul._PairedLinears() as pairs:
        layer(x).sum().backward()
        with torch.no_grad():
            expected = layer.double()(x.double())
        assert not pairs.weights and layer.weight.grad is not None and expected.dtype is torch.float64


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("tokens", "mask", "limit"), [(1024, False, 1e-2), (1024, True, 1e-6), (64, False, 1e-6)])
def test_only_long_attention_without_a_mask_is_in_bf16(
    groups: int, tokens: int, mask: bool, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_pairs(monkeypatch)
    check_attention("cpu", groups, tokens, mask, limit)


def check_attention(device: str, groups: int, tokens: int, mask: bool, limit: float) -> None:
    """Compares attention of `groups` heads of queries for each of keys with float64; BF16's must be seen, too."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, tokens, 32, generator=generator).to(device) for heads in (2 * groups, 2, 2))
    seen = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril() if mask else None
    call = {"query": q, "key": k, "value": v, "attn_mask": seen, "enable_gqa": groups > 1}
    exact = scaled_dot_product_attention(q.double(), k.double(), v.double(), seen, enable_gqa=groups > 1)
    with torch.no_grad(), fast_matmul._PairedLinears():
        found = scaled_dot_product_attention(**call)
        again = scaled_dot_product_attention(q, k, v, seen, enable_gqa=groups > 1)
    error = float((found - exact).norm() / exact.norm())
    assert limit / 10 < error < limit if limit > 1e-5 else error < limit
    assert found.dtype is torch.float32 and torch.equal(found, again)


@pytest.mark.gpu
def test_pairs_on_a_gpu() -> None:
    check_attention("cuda", 2, 2048, False, 1e-2)
    check_sums("cuda")
    check_linears("cuda", torch.float32)
    check_linears("cuda", torch.bfloat16)
    check_operands("cuda")
