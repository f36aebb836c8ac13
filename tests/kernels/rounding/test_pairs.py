"""Pairs of BF16: the kernel writes the bits of PyTorch's casts."""

from contextlib import nullcontext

import pytest
import torch

pytest.importorskip("triton", reason="comes with a CUDA build of torch, or: pip install triton")

from interpreter import interpreted

from quant.kernels.rounding import portable_solvers
from quant.kernels.rounding.portable_solvers import split_pairs


def check_pairs(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    base = (torch.randn(2, 40, 1300, generator=generator) * torch.logspace(-30, 30, 1300)).to(device)
    base[0, 0, :3] = torch.tensor([0.0, 1.0, -3.5])
    for x in (base[0], base, base[:, 3:20, 16:1100], base[1, ::2, :17]):
        for minus in (None, torch.flip(base, [0])[..., : x.shape[-2], : x.shape[-1]][: len(x)]):
            other = minus if minus is None or x.dim() == 3 else minus[0]
            parts = torch.full((*x.shape[:-2], 3, *x.shape[-2:]), torch.nan, dtype=torch.bfloat16, device=device)
            high, low, again = (parts[..., part, :, :] for part in range(3))
            with interpreted() if device == "cpu" else nullcontext():
                split_pairs(x, high, low, again, other)
            value = x if other is None else x - other
            assert torch.equal(high, value.bfloat16()) and torch.equal(again, high)
            assert torch.equal(low, (value - high).bfloat16())
            assert bool(((value - high - low).abs() <= value.abs() * 2.0**-16).all())


def test_pairs() -> None:
    check_pairs("cpu")


def test_heads_of_large_vocabularies_fit_into_a_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    grids: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        portable_solvers, "cached_launch", lambda _, grid, **__: grids.append(grid) or (lambda *_: None)
    )
    for shape in ((262_144, 1152), (2, 151_936, 896)):  # Gemma 3's head, and experts as high as that of Qwen
        split_pairs(torch.empty(shape, device="meta"), *torch.empty(2, *shape, dtype=torch.bfloat16, device="meta"))
    assert grids == [(262_144, 1), (75_968, 2)]
    assert all(count < 2**16 for grid in grids for count in grid[1:])  # CUDA's limit beyond the first dimension


@pytest.mark.gpu
def test_pairs_on_a_gpu() -> None:
    check_pairs("cuda")
    head = torch.randn(151_936, 64, device="cuda")
    high, low = torch.empty(2, *head.shape, dtype=torch.bfloat16, device="cuda")
    split_pairs(head, high, low)
    assert torch.equal(high, head.bfloat16()) and torch.equal(low, (head - high).bfloat16())
