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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
