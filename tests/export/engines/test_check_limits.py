"""The limits of `quant check --source` follow the reference's own noise, where inputs are rounded to few bits."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

import quant

pytest.importorskip("onnx", reason="needs the extra onnx")
pytest.importorskip("transformers", reason="needs the extra hf")

import serving_samples

from quant.export.engines.check_engine import LEAST_AGREEMENT, MOST_KL, NOISIEST_KL, compare, noise_limits

PROMPTS, NEW = [[7, 3, 50, 21, 9], [*range(60, 40, -1)]], 8


class UncachedSession:
    """An engine that adds in another order: eager attention over the whole row at every step."""

    backend, plan, capacity, dtype, recurrent = "uncached model", "", 64, "bfloat16", False

    def __init__(self, model: Any) -> None:
        self.model = copy.deepcopy(model)
        self.model.set_attn_implementation("eager")
        self._rows: list[list[int]] = []

    def most_rows(self) -> int:
        return 8

    def begin(self, rows: int) -> None:
        self._rows = [[] for _ in range(rows)]

    def width(self, tokens: int) -> int:
        return tokens

    def step(self, ids: np.ndarray, lengths: np.ndarray, last: np.ndarray) -> np.ndarray:
        logits = []
        for row, new, count in zip(self._rows, ids, last, strict=True):
            row += new[: count + 1].tolist()
            with torch.no_grad():
                logits.append(self.model(torch.tensor([row]), use_cache=False).logits[0, -1].float().numpy())
        return np.stack(logits)


@pytest.fixture(scope="module")
def model() -> Any:
    """A decoder in BF16 with weights and inputs in NVFP4, whose logits are large enough to show every rounding."""
    decoder = serving_samples.decoder("llama-64", num_hidden_layers=2, hidden_size=64).to(torch.bfloat16)
    rows = torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(0))
    quant.quantize(decoder, "nvfp4", rows, solver="rtn")
    with torch.no_grad():
        decoder.model.norm.weight.mul_(2.5)
    return decoder


def test_an_engine_as_near_as_the_reference_to_itself_passes(model: Any) -> None:
    checked = compare(model, UncachedSession(model), PROMPTS, NEW)
    assert checked.kl > MOST_KL  # the plain limit fails it
    assert checked.noise_kl is not None and checked.kl < 3 * checked.noise_kl
    assert checked.passed
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_wrong_scale_fails_in_spite_of_the_noise(model: Any) -> None:
    session = UncachedSession(model)
    for block in session.model.model.layers:
        block.mlp.down_proj.global_scale.mul_(8)
    assert compare(model, session, PROMPTS, NEW).passed is False


class ShiftedSession(UncachedSession):
    """An engine whose likeliest token is the one that is the sixth likeliest of the model, at every third step."""

    rank = 5

    def step(self, ids: np.ndarray, lengths: np.ndarray, last: np.ndarray) -> np.ndarray:
        logits = super().step(ids, lengths, last)
        if len(self._rows[0]) % 3 == 0:
            for row in logits:
                order = row.argsort()[::-1]
                row[order[self.rank]] = row[order[0]] + 1e-3
        return logits


@pytest.mark.parametrize(("rank", "near"), [(4, 16), (5, 10)])
def test_tokens_that_differ_must_be_near_ties(rank: int, near: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShiftedSession, "rank", rank)
    monkeypatch.setattr(ShiftedSession, "dtype", "float32")
    decoder = serving_samples.decoder("llama-64", num_hidden_layers=1)
    checked = compare(decoder, ShiftedSession(decoder), PROMPTS, NEW)
    assert (checked.agreeing, checked.near) == (10, near)


def test_limits() -> None:
    assert noise_limits(0.0, 1.0) == (MOST_KL, LEAST_AGREEMENT)
    assert noise_limits(0.05, 0.95) == pytest.approx((0.15, 0.85))
    assert noise_limits(2.0, 0.1) == (NOISIEST_KL, 0.7)
    assert noise_limits(float("nan"), 1.0)[0] <= MOST_KL
