"""KL divergences of one launch agree with float64, however sharp or shifted the distributions are."""

import pytest
import torch

pytest.importorskip("triton", reason="comes with a CUDA build of torch, or: pip install triton")

from compiler import compiled_for
from interpreter import interpreted

from quant.kernels.base import portable_divergence
from quant.kernels.base.portable_divergence import kl_of_logits


def _check(device: str, positions: int, vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(positions, vocabulary, generator=generator) * torch.logspace(-1, 1, positions)[:, None]
    d = torch.randn(positions, vocabulary, generator=generator) * torch.logspace(-4, 2, positions)[:, None]
    d += torch.linspace(-60, 60, positions)[:, None]  # all logits of a position together change nothing
    z[::3, ::5] = float("-inf")
    d[::3, 5] = float("nan")  # −∞ − (−∞), where the base rules a token out
    d = d.bfloat16()
    found = kl_of_logits(z.to(device), d.to(device)).cpu().double()
    rise = d.double().masked_fill(z.isinf(), 0)
    before, after = z.double().log_softmax(-1), (z.double() + rise).log_softmax(-1)
    exact = (before.exp() * (before - after).masked_fill(z.isinf(), 0)).sum(-1)
    assert exact.min() < 1e-6 and exact.max() > 80  # where the exponential overflows, too
    torch.testing.assert_close(found, exact, rtol=2e-4, atol=1e-10)
    for bad in (z, d):
        bad[0, 1] = float("nan")
        assert bool(kl_of_logits(z.to(device), d.to(device))[0].isnan())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes both sides of `where`
def test_it_agrees_with_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portable_divergence, "_TILE", 64)
    with interpreted():
        _check("cpu", 12, 300)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_compiles_and_keeps_its_sums_in_registers(dtype: torch.dtype) -> None:
    with compiled_for(90) as kernels:
        kl_of_logits(torch.zeros(4, 50_000), torch.zeros(4, 50_000, dtype=dtype))
    assert kernels[0].asm["ptx"].count("st.local") == 0


@pytest.mark.gpu
def test_it_agrees_with_float64_on_a_gpu() -> None:
    _check("cuda", 500, 50_001)
