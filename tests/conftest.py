"""These settings hold for every test: it is offline and repeatable, and says which hardware it misses."""

from __future__ import annotations

import os

# Set before anything imports huggingface_hub: tests read what the repository and installed packages ship.
os.environ["HF_HUB_OFFLINE"] = "1"

import hypothesis
import pytest
import torch

# A shared machine makes single examples slow at random, so time is no failure; CI draws the same examples each run.
hypothesis.settings.register_profile("house", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("house")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that name no solver round to nearest, in milliseconds; `test_effort.py` tests the users' default."""
    monkeypatch.setattr("quant.recipes.effort.DEFAULT", 0)


@pytest.fixture(params=["fast products", "plain products"])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test as on a processor with BF16 units, and as on one that has only PyTorch's own float32 products.

    BF16 products give the same values on any processor, only slowly. Those of oneDNN are taken where they are exact.
    """
    fast = request.param == "fast products"
    monkeypatch.setattr("quant.calibration.fast_matmul._multiplies_bf16", lambda device: fast)
    if not fast:
        monkeypatch.setattr("quant.calibration.fast_matmul._has_exact_products", lambda: False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
