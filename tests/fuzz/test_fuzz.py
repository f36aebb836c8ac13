"""Hostile files and options end every command in one line, and nothing else happens; see `fuzz/cases.py`.

The cases run in a process of their own, whose forks have limits, and which has no threads when it forks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("cases.py")


def faults_and_counts(*options: str) -> tuple[list[str], dict[str, int]]:
    paths = [str(SCRIPT.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, SCRIPT, *options, "--jobs", "2"], capture_output=True, text=True, env=environment, check=False
    )
    assert not done.returncode, done.stderr[-2000:]
    *faults, slowest, counts = done.stdout.splitlines()
    print(slowest, counts, sep="\n")
    return faults, json.loads(counts)


@pytest.mark.parametrize("count", [40, pytest.param(5000, marks=pytest.mark.slow)])
def test_hostile_files_end_in_one_line(count: int) -> None:
    faults, counts = faults_and_counts("--count", str(count))
    assert not faults, "\n".join(faults)
    assert counts["cases"] == count
    # Most are refused; some changes mean nothing, and the command works.
    assert counts["ended with 2"] > count / 2 and counts["ended with 0"] > count / 20


@pytest.mark.slow
def test_healthy_files_are_taken_by_every_command() -> None:
    faults, counts = faults_and_counts("--healthy")
    assert not faults, "\n".join(faults)
    assert counts["ended with 0"] + counts["ended with 1"] == counts["cases"] > 100
