"""NaN and infinity are found wherever they are, in tensors that several threads look through too."""

from __future__ import annotations

import pytest
import torch

from quant.formats import finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("position", [0, 5_000, 65_535, 65_536, 99_998])
def test_one_value_among_many_runs(dtype: torch.dtype, position: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finite, "_PIECE", 1 << 10)
    monkeypatch.setattr(finite, "_RUN", 3)
    x = torch.linspace(-400, 400, 99_999).to(dtype)
    assert finite.is_finite(x) and finite.is_finite(x, is_mask=True)
    for value in (float("nan"), -float("nan"), float("inf"), -float("inf")):
        broken = x.clone()
        broken[position] = value
        is_finite = bool(broken.float().isfinite().all())
        is_mask = bool((broken.float().isfinite() | (broken.float() == -torch.inf)).all())
        assert finite.is_finite(broken) == is_finite and finite.is_finite(broken, is_mask=True) == is_mask
