"""Rows of a benchmark are measured side by side by processes that share the GPUs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from samples import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
from _workers import Result, measure_all

WORKER = f"""
import os, sys
sys.path[:0] = {[str(ROOT), str(ROOT / "benchmarks")]!r}
from _workers import serve

def measure(name):
    print("a toolkit prints")
    if "broken" in name:
        raise ValueError("no such format\\nand more")
    if "dead" in name:
        print("Segmentation fault", file=sys.stderr)
        os._exit(1)
    return {{"pid": os.getpid(), "gpu": os.environ.get("CUDA_VISIBLE_DEVICES")}}

serve(measure)
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    return [sys.executable, str(script)]


def measured(
    names: list[str], command: list[str], jobs: int, gpus: tuple[str, ...] = (), one_row: bool = False
) -> dict[str, Result]:
    return dict(measure_all(names, command, jobs=jobs, gpus=gpus, one_row=one_row))


def test_a_process_measures_all_rows_of_a_toolkit(command: list[str]) -> None:
    names = ["nvfp4 Ours a", "nvfp4 Theirs a", "fp8 Ours b", "fp8 Theirs b"]
    results = measured(names, command, jobs=1)
    assert list(results) == ["nvfp4 Ours a", "fp8 Ours b", "nvfp4 Theirs a", "fp8 Theirs b"]
    pids = [results[name]["pid"] for name in results]
    assert pids[0] == pids[1] != pids[2] == pids[3]
    assert os.getpid() not in pids


def test_processes_share_the_gpus_or_have_one_row_each(command: list[str]) -> None:
    names = [f"nvfp4 Ours {index}" for index in range(8)]
    results = measured(names, command, jobs=4, gpus=("2", "5"))
    assert set(results) == set(names)
    assert {result["gpu"] for result in results.values()} <= {"2", "5"}
    results = measured(names, command, jobs=2, one_row=True)
    assert len({result["pid"] for result in results.values()}) == 8


def test_a_row_that_fails_leaves_the_others(command: list[str]) -> None:
    results = measured(["nvfp4 Ours broken", "nvfp4 Ours dead", "nvfp4 Ours a"], command, jobs=1)
    assert results["nvfp4 Ours broken"] == {"error": "ValueError: no such format"}
    assert results["nvfp4 Ours dead"] == {"error": "Segmentation fault"}
    assert "pid" in results["nvfp4 Ours a"]
