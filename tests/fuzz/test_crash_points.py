"""Wherever a command is stopped, a whole old or new result is under its name; the next run ends with the same bytes.

The runs are those of a process of its own, so that none of them forks the process of the tests, which has threads.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("crash_points.py")


@pytest.mark.parametrize("every", [300, pytest.param(1, marks=pytest.mark.slow)])
def test_stopped_at_every_step(every: int) -> None:
    paths = [str(SCRIPT.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, SCRIPT, "--every", str(every), "--jobs", "2", *(["--quick"] if every > 1 else [])],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert not done.returncode, done.stderr[-2000:]
    *faults, counts = done.stdout.splitlines()
    assert not faults, "\n".join(faults)
    found = json.loads(counts)
    assert found["stopped"] > 400 / every
    print(counts)
