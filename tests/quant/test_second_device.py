"""The tests of devices run on a device that is made of the CPU, in a process of its own.

Registering a device changes PyTorch for all that follows, and the autograd engine counts devices only once.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from samples import ROOT
from second_device import ON_SECOND_DEVICE


@pytest.mark.parametrize(
    ("marks", "count"),
    [("not slow and not gpu", 32), pytest.param("slow and not gpu", 38, marks=pytest.mark.slow)],
)
def test_everything_runs_on_another_device(marks: str, count: int) -> None:
    file = ROOT / "tests" / "quant" / "test_devices.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", marks, str(file)]
    environment = {**os.environ, ON_SECOND_DEVICE: "1"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    passed = re.search(r"(\d+) passed", ran.stdout)
    assert ran.returncode == 0 and passed is not None and int(passed[1]) > count, (
        ran.stdout[-4000:] + ran.stderr[-2000:]
    )
