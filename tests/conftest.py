"""These settings hold for every test: it is offline and repeatable, and says which hardware it misses."""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import os
import re
import sys
from collections import Counter
from typing import Any

# Set before anything imports huggingface_hub: tests read what the repository and installed packages ship.
os.environ["HF_HUB_OFFLINE"] = "1"
# Tests see what a model writes, and leave nothing in the home of who runs them; `test_text_cache.py` turns it on.
os.environ["BLOCKSCALE_CACHE"] = "off"

import hypothesis
import pytest
import torch

from quant.base.errors import PACKAGES

# A shared machine makes single examples slow at random, so time is no failure; CI draws the same examples each run.
hypothesis.settings.register_profile("house", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("house")


_importorskip = pytest.importorskip


def _name_the_package(modname: str, *arguments: Any, **options: Any) -> Any:
    """Skips as `pytest.importorskip` does, and puts the missing package in front, which the last line counts."""
    try:
        return _importorskip(modname, *arguments, **options)
    except pytest.skip.Exception as skipped:
        skipped.msg = f"[{modname.partition('.')[0]}] {skipped.msg}"
        raise


pytest.importorskip = _name_the_package


@pytest.fixture(autouse=True)
def _no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes away the width of the terminal, which pytest-xdist hands to its workers: pipes have none."""
    monkeypatch.delenv("COLUMNS", raising=False)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Says in one line which packages were missing, and how many tests (or files of tests) each has cost."""
    reasons = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])]
    counts = Counter(found[1] for reason in reasons if (found := re.search(r"Skipped: \[(\w+)\] ", reason)))
    if counts:
        extras = ", ".join(
            f"{count} of {name} (extra {PACKAGES[name][0]})" if name in PACKAGES else f"{count} of {name}"
            for name, count in counts.most_common()
        )
        terminalreporter.write_line(f"skipped for want of packages, tests or whole files: {extras}")


# Tests that say how transformers 5.24 behaves, by a part of their names, and how earlier versions differ.
OF_NEW_TRANSFORMERS = {
    "test_experts_of_a_checkpoint_without_a_plan[mixtral-exclude": "16-bit experts beside quantized ones are refused",
    "test_experts_of_a_checkpoint_without_a_plan[qwen3_moe-exclude": "16-bit experts beside quantized ones are refused",
    "test_warnings_about_experts_stand_where_transformers_fails[exclude1": "such experts are refused",
    "test_experts_are_named_one_by_one_and_come_back": "16-bit experts beside quantized ones are refused",
    "test_experts_that_transformers_would_draw_at_random_are_an_error": "it stops at other experts",
    "test_transformers_stops_at_experts_that_it_would_draw_at_random": "it stops at other experts",
    "test_what_transformers_does_not_load_is_told_with_a_way_that_works": "it loads fewer checkpoints dequantized",
    "test_what_transformers_does_with_conv1d_is_told_as_it_is[fp8_channel-include0": "it loads codes as weights",
    "test_ten_architectures[ViTForImageClassification]": "it runs float32 biases in a BF16 model, which stops",
    "AriaTextForCausalLM": "its Aria has experts under other names",
    "test_loading_imports_nothing_that_decides_or_measures": "it imports other modules",
    "test_cache_of_layers_that_differ[Gemma": "its configs do not say which layers share a cache",
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that name no solver round to nearest, in milliseconds; `test_effort.py` tests the users' default."""
    monkeypatch.setattr("quant.recipes.solver_names.DEFAULT_EFFORT", 0)


@pytest.fixture(autouse=True)
def _no_wait_for_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test's files need not outlive a power failure: `os.fsync` returns at once, as on a disk that has written."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture(scope="session", autouse=True)
def _one_table_of_onnx_functions() -> None:
    """torch.onnx reads the source of its 500 functions for every graph, half a second each; here once in a process.

    Each graph gets a copy of the table, because exporting adds the translations of our own operators to it.
    """
    from torch.onnx._internal.exporter import _registration

    registry = _registration.ONNXRegistry
    build = functools.cache(registry.from_torchlib)

    def copied(*arguments: object, **options: object) -> object:
        original, copy = build(*arguments, **options), registry()
        copy._opset_version = original._opset_version
        copy.functions = {name: list(functions) for name, functions in original.functions.items()}
        return copy

    registry.from_torchlib = staticmethod(copied)


@pytest.fixture(params=["fast", "plain"], ids=["fast products", "plain products"])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test as on a processor with BF16 units, and as on one that has only PyTorch's own float32 products.

    BF16 products give the same values on any processor, only slowly. Those of oneDNN are taken where they are exact.
    """
    fast = request.param == "fast"
    monkeypatch.setattr("quant.calibration.fast_matmul._multiplies_bf16", lambda device: fast)
    if not fast:
        monkeypatch.setattr("quant.calibration.fast_matmul._has_exact_products", lambda: False)


def _skip_behaviour_of_new_transformers(items: list[pytest.Item]) -> None:
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return
    if tuple(map(int, version.split(".")[:2])) >= (5, 24):
        return
    for item in items:
        for part, difference in OF_NEW_TRANSFORMERS.items():
            if part in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=f"before transformers 5.24: {difference}"))


class _Libraries:
    """Keeps the garbage collector from looking through what libraries have defined, which nothing ever lets go of.

    They are a million objects. Visiting these again and again took a seventh of the time of all tests.
    """

    seen = 0

    @classmethod
    def freeze(cls) -> None:
        """Looks through everything once more where a hundred modules or more have been imported since the last time."""
        if len(sys.modules) >= cls.seen + 100:
            gc.collect()
            gc.freeze()
            cls.seen = len(sys.modules)


# New objects are looked through after every five thousand, and all that are not frozen after half a million: exporting
# and compiling a model makes as many, of which few are garbage.
gc.set_threshold(5_000)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    _Libraries.freeze()


# Files whose one test takes most of a minute. They begin first, so that no worker waits for another at the end.
LONGEST = ("test_second_device.py", "test_fuzz.py", "test_crash_points.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)  # stable: the others keep their order
    _skip_behaviour_of_new_transformers(items)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
