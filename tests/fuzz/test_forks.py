"""Forks share nothing that one of them could take along when it is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_SCRIPT = """
import os, pathlib, signal, sys
from fuzz import forks
from tqdm import tqdm

def die() -> None:
    tqdm.get_lock().acquire()
    os.kill(os.getpid(), signal.SIGKILL)

def show_a_bar() -> None:
    for _ in tqdm(range(2)):
        pass

def sleep() -> None:
    signal.pause()

forks._ASLEEP = 1
folder = pathlib.Path(sys.argv[1])
tqdm.get_lock()  # as any bar in the process that forks
for before in (die, show_a_bar, sleep):
    outcome = forks.run(["--version"], folder, before)
    print(outcome.code, "in sleep" in outcome.stderr)
"""


def test_a_killed_fork_stops_no_other_and_stacks_of_a_hang_are_printed(tmp_path: Path) -> None:
    tests = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tests, tests.parent)))}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(tmp_path)], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.splitlines() == ["-9 False", "0 False", "-24 True"]
