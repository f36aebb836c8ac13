"""Every step of the writing commands is a crash point here, and each is tried with SIGKILL, SIGTERM and a full disk.

    python tests/fuzz/crash_points.py --every 40 --jobs 2      # every fortieth step of each command

A fault is a result that is neither the old nor the new one, an exit code that says something else, a run afterwards
that ends with other bytes, or anything that it leaves beside its result.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # before torch and transformers are imported
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}

import argparse
import json
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuzz import corpus, forks
from fuzz.crashes import KINDS, LOG, Crash
from fuzz.forks import Outcome

_TIMED = ("report.json", "report.html", "receipt.json")  # they hold seconds


@dataclass(frozen=True)
class Job:
    """A command that writes `out`, and the one that made what stands there before, if any."""

    name: str
    command: str
    before: str | None = None


def jobs() -> list[Job]:
    """The commands that are stopped."""
    rows, to = corpus.ROWS, corpus.TO
    quantize = f"quantize in/model --format nvfp4a16 --solver gptq {rows} {to}"
    old = f"quantize in/model --format fp8_channel {to}"
    edit = "plan edit in/plan.json --out out --json"
    changed = f"{edit} --set *.mlp.*=mxfp8 --whole-groups"
    return [
        Job("quantize", quantize),
        Job("quantize --overwrite", f"{quantize} --overwrite", old),
        Job("quantize state dict", f"quantize in/w.safetensors --format fp8_channel {to}"),
        Job("export compressed-tensors", f"export in/ckpt --to compressed-tensors {to}"),
        Job("export modelopt --overwrite", f"export in/ckpt --to modelopt {to} --overwrite", old),
        Job("export onnx", f"export in/ckpt --to onnx {to}"),
        Job("plan edit", changed),
        Job("plan edit --overwrite", f"{changed} --overwrite", f"{edit} --kv-cache keep"),
        Job("sensitivity", f"sensitivity in/model --calib in/tokens.safetensors {corpus.SHORT} {to}"),
    ]


Contents = dict[str, bytes] | None


def contents(out: Path) -> Contents:
    """What is at a path: the bytes of its files, but of those that hold times only that they can be read."""
    if not out.exists():
        return None
    files = [out] if out.is_file() else sorted(file for file in out.rglob("*") if file.is_file())
    found = {}
    for file in files:
        data = file.read_bytes()
        if file.name.endswith(".json") and file.name in _TIMED:
            json.loads(data)
        if file.name == "plan.json":
            fields = json.loads(data)
            fields["provenance"].pop("command", None)  # perhaps with --overwrite
            data = json.dumps(fields).encode()
        timed = file.name in _TIMED or (out.is_file() and b'"seconds"' in data)
        if timed and out.is_file():
            data = json.dumps({**json.loads(data), "seconds": 0}).encode()
        found[str(file.relative_to(out))] = b"" if timed and out.is_dir() else data
    return found


class Case:
    """A command, stopped at a step of it in one way."""

    def __init__(self, job: Job, kind: str, at: int, folder: Path) -> None:
        self.job, self.kind, self.at, self.folder = job, kind, at, folder
        self.crash = Crash(kind, at, folder)

    @property
    def step(self) -> str | None:
        """The name of the step that was struck; None where this run had fewer: threads flush as the disk lets them."""
        return dict(enumerate((self.folder / LOG).read_text().splitlines(), 1)).get(self.at)

    def __str__(self) -> str:
        return f"{self.job.name}: {self.kind} at step {self.at} ({self.step or 'beyond the end'})"


def _folder(root: Path, name: str, old: Path | None) -> Path:
    folder = root / name
    folder.mkdir()
    (folder / "in").symlink_to(root / "corpus")
    if old is not None:
        (shutil.copytree if old.is_dir() else shutil.copy2)(old, folder / "out")
    return folder


def _wrong(case: Case, outcome: Outcome, old: Contents, new: Contents) -> Iterator[str]:
    held = contents(case.folder / "out")
    if held not in (old, new):
        yield f"neither old nor new: {sorted(held or {})}"
    told = outcome.stderr.splitlines()[-1:] or [""]
    match case.kind:
        case _ if case.step is None:
            right = not outcome.code and held == new
        case "KILL":
            right = outcome.code == -signal.SIGKILL
        case "TERM":
            right = outcome.code == 128 + signal.SIGTERM and told[0].startswith("error: stopped by SIGTERM")
            if right and ("before" in told[0]) != (held == old):
                yield f"says {told[0]!r}"
        case _:
            right = (outcome.code == 2 and told[0].startswith("error: ")) or (not outcome.code and held == new)
    if not right:
        yield f"code {outcome.code}: {outcome.stderr[-600:]!r}"


def run(every: int, workers: int, only: str | None = None) -> Counter[str]:
    """Stops every `every`-th step of each command in each way; prints faults, and gives counts."""
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name).resolve()
        os.environ |= {"HOME": str(root), "BLOCKSCALE_CACHE": str(root / "cache")}
        (root / "corpus").mkdir()
        corpus.make_some(root / "corpus")
        for number, job in enumerate(job for job in jobs() if only in (None, job.name)):
            old = None
            if job.before is not None:
                made = _folder(root, f"{number}-old", None)
                assert not forks.run(job.before.split(), made).code
                old = made / "out"
            clean = Case(job, "KILL", 1 << 60, _folder(root, f"{number}-clean", old))
            done = forks.run(job.command.split(), clean.folder, clean.crash)
            assert not done.code, done
            steps = len((clean.folder / LOG).read_text().splitlines())
            before, new = contents(old) if old else None, contents(clean.folder / "out")
            points = [
                Case(job, kind, at, _folder(root, f"{number}-{kind}-{at}", old))
                for kind in KINDS
                for at in range(1 + KINDS.index(kind) % every, steps + 1, every)
            ]
            counts[f"steps of {job.name}"] = steps
            stopped = forks.run_all(((case, job.command.split(), case.folder, case.crash) for case in points), workers)
            for case, outcome in stopped:
                os.close(case.crash.log)
                counts["beyond the end" if case.step is None else "stopped"] += 1
                counts[case.kind] += 1
                for fault in _wrong(case, outcome, before, new):
                    print(f"{case}: {fault}", flush=True)
                    counts["faults"] += 1
            for case, outcome in forks.run_all(((case, _again(case), case.folder, None) for case in points), workers):
                left = sorted(each.name for each in case.folder.iterdir() if each.name.startswith((".", "out")))
                if outcome.code or contents(case.folder / "out") != new or left != ["out"]:
                    print(
                        f"{case}: the next run: code {outcome.code}, left {left}: {outcome.stderr[-300:]!r}", flush=True
                    )
                    counts["faults"] += 1
                shutil.rmtree(case.folder)
    return counts


def _again(case: Case) -> list[str]:
    """The same command once more; one that had ended but for its cleaning up may replace its own result."""
    command = case.job.command
    may = "--overwrite" in command or command.startswith("sensitivity") or not (case.folder / "out").exists()
    return (command if may else f"{command} --overwrite").split()


def _main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only")
    given: Any = parser.parse_args()
    print(json.dumps(run(given.every, given.jobs, given.only)))


if __name__ == "__main__":
    _main()
