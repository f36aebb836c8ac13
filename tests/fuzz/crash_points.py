"""Every step of the writing commands is a crash point here, and each is tried with SIGKILL, SIGTERM and a full disk.

    python tests/fuzz/crash_points.py --every 40 --jobs 2      # every fortieth step of each command
    python tests/fuzz/crash_points.py --only "export aoti"     # every step of one

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
import hashlib
import importlib.util
import json
import re
import shutil
import signal
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from fuzz import corpus, forks
from fuzz.crashes import KINDS, LOG, Crash
from fuzz.forks import Outcome

from quant.export.tensorrt import build
from quant.export.tensorrt import build as process


@dataclass(frozen=True)
class Job:
    """A command that writes, and the one that made what stands there before, if any.

    Attributes:
        places: what it writes, in the order in which each appears, whole. Most commands write `out` alone.
        long: whether it takes long: it traces the model, or solves it for a second time; `--quick` leaves it out.
    """

    name: str
    command: str
    before: str | None = None
    places: tuple[str, ...] = ("out",)
    long: bool = False


def jobs() -> list[Job]:
    """The commands that are stopped."""
    rows, to = corpus.ROWS, corpus.TO
    quantize = f"quantize in/model --format nvfp4a16 --solver gptq {rows} {to}"
    old = f"quantize in/model --format fp8_channel --effort 0 {to}"
    edit = "plan edit in/plan.json --out out --json"
    changed = f"{edit} --set *.mlp.*=mxfp8 --whole-groups"
    return [
        Job("quantize", quantize),
        Job("quantize --overwrite", f"{quantize} --overwrite", old, long=True),
        Job("quantize state dict", f"quantize in/w.safetensors --format fp8_channel --effort 0 {to}"),
        Job("export compressed-tensors", f"export in/ckpt --to compressed-tensors {to}"),
        Job("export modelopt --overwrite", f"export in/ckpt --to modelopt {to} --overwrite", old),
        Job("export onnx", f"export in/ckpt --to onnx {to}", long=True),
        Job("export aoti", "export in/static --to aoti --out out.pt2 --quiet", places=("out.pt2",), long=True),
        *(_engines() if importlib.util.find_spec("tensorrt_rtx") else ()),
        Job("plan edit", changed),
        Job("plan edit --overwrite", f"{changed} --overwrite", f"{edit} --kv-cache keep"),
        Job("sensitivity", f"sensitivity in/model --calib in/tokens.safetensors {corpus.SHORT} {to}"),
    ]


def _engines() -> list[Job]:
    engine = "export in/static --to tensorrt --target sm89 --out out.engine --quiet --shapes batch=1,sequence="
    in_two = ("out.engine", "out.engine.json")
    found = [
        Job("export tensorrt", f"{engine}8", places=in_two),
        Job("export tensorrt --overwrite", f"{engine}8 --overwrite", f"{engine}16", in_two),
    ]
    return [replace(job, long=True) for job in found]


class StandIns:
    """Compilers, which take long and write elsewhere, give what they gave before: only our own writing is tried.

    Every engine is built once by TensorRT-RTX, in the first run. AOTInductor's package is a file of any bytes: nothing
    looks into it while it is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def __call__(self) -> None:
        """For the fork that runs the command."""
        build.run_worker = self._engine
        torch._inductor.aoti_compile_and_package = self._package

    def _engine(self, request: Any, *rest: Any) -> Any:
        key = hashlib.sha256(json.dumps(request["profiles"]).encode()).hexdigest()
        engine, told = self.folder / f"{key}.engine", self.folder / f"{key}.json"
        if not told.exists():
            found = process.run_worker(request, *rest)
            shutil.copyfile(request["engine"], engine)
            told.write_text(json.dumps(found))
        Path(request["engine"]).write_bytes(engine.read_bytes())
        return json.loads(told.read_text())

    def _package(self, *_: Any, package_path: str, **options: Any) -> str:
        with zipfile.ZipFile(package_path, "w") as file:
            file.writestr(zipfile.ZipInfo("package"), bytes(1 << 16))
        return package_path


Contents = dict[str, bytes] | None


def contents(folder: Path, place: str) -> Contents:
    """What is at a place of a command's folder: the bytes of its files, but for times and the folder's name."""
    out = folder / place
    if not out.exists():
        return None
    files = [out] if out.is_file() else sorted(file for file in out.rglob("*") if file.is_file())
    found = {}
    for file in files:
        data = file.read_bytes()
        if file.name == "plan.json":
            fields = json.loads(data)
            fields["provenance"].pop("command", None)  # perhaps with --overwrite
            data = json.dumps(fields).encode()
        elif file.suffix == ".pt2":
            data = _packed(file)
        elif file.name == "report.html":
            data = b""
        elif file.name == "report.json":
            data = json.dumps(sorted(json.loads(data))).encode()
        elif file.suffix == ".json" or (out.is_file() and b'"seconds"' in data):
            data = json.dumps(_without_times(json.loads(data))).encode()
        found[str(file.relative_to(out))] = re.sub(re.escape(os.fsencode(folder.parent)) + rb"/[\w-]+", b"FOLDER", data)
    return found


def _packed(file: Path) -> bytes:
    """What is in a package, but for the parts in which PyTorch writes numbers of its own run."""
    with zipfile.ZipFile(file) as packed:
        assert packed.testzip() is None
        own = ("models/model.json", "serialization_id")
        return repr(
            [(each.filename, each.CRC) for each in packed.infolist() if not each.filename.endswith(own)]
        ).encode()


def _without_times(fields: Any) -> Any:
    if isinstance(fields, dict):
        return {key: _without_times(value) for key, value in fields.items() if key != "seconds"}
    return [_without_times(each) for each in fields] if isinstance(fields, list) else fields


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
    for each in old.glob("out*") if old is not None else ():
        (shutil.copytree if each.is_dir() else shutil.copy2)(each, folder / each.name)
    return folder


def _all_contents(job: Job, folder: Path) -> list[Contents]:
    return [contents(folder, place) for place in job.places]


def _wrong(case: Case, outcome: Outcome, old: list[Contents], new: list[Contents]) -> Iterator[str]:
    held = _all_contents(case.job, case.folder)
    if held not in ([*new[:count], *old[count:]] for count in range(len(new) + 1)):
        yield f"neither old nor new: {[sorted(found or {}) for found in held]}"
    told = outcome.stderr.splitlines()[-1:] or [""]
    match case.kind:
        case _ if case.step is None:
            right = not outcome.code and held == new
        case "KILL":
            right = outcome.code == -signal.SIGKILL
        case "TERM":
            right = outcome.code == 128 + signal.SIGTERM and told[0].startswith("error: stopped by SIGTERM")
            if right and held in (old, new) and ("before" in told[0]) != (held == old):
                yield f"says {told[0]!r}"
        case _:
            right = (outcome.code == 2 and told[0].startswith("error: ")) or (not outcome.code and held == new)
    if not right:
        yield f"code {outcome.code}: {outcome.stderr[-4000:]!r}"


def run(every: int, workers: int, only: Sequence[str] = (), *, quick: bool = False) -> Counter[str]:
    """Stops every `every`-th step of each command in each way; prints faults, and gives counts."""
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name).resolve()
        os.environ |= {"HOME": str(root), "BLOCKSCALE_CACHE": str(root / "cache")}
        (root / "corpus").mkdir()
        corpus.make_some(root / "corpus")
        stand_ins = StandIns(root / "stand-ins")
        chosen = [job for job in jobs() if (not only or job.name in only) and not (quick and job.long)]
        for number, job in enumerate(chosen):
            old = None
            if job.before is not None:
                old = _folder(root, f"{number}-old", None)
                done = forks.run(job.before.split(), old, stand_ins)
                assert not done.code, done
            clean = Case(job, "KILL", 1 << 60, _folder(root, f"{number}-clean", old))
            done = forks.run(job.command.split(), clean.folder, _both(stand_ins, clean.crash))
            assert not done.code, done
            steps = len((clean.folder / LOG).read_text().splitlines())
            before, new = (_all_contents(job, folder) for folder in (old or root, clean.folder))
            points = [
                Case(job, kind, at, _folder(root, f"{number}-{kind}-{at}", old))
                for kind in KINDS
                for at in range(1 + KINDS.index(kind) % every, steps + 1, every)
            ]
            counts[f"steps of {job.name}"] = steps
            commands = ((case, job.command.split(), case.folder, _both(stand_ins, case.crash)) for case in points)
            for case, outcome in forks.run_all(commands, workers):
                os.close(case.crash.log)
                counts["beyond the end" if case.step is None else "stopped"] += 1
                counts[case.kind] += 1
                for fault in _wrong(case, outcome, before, new):
                    print(f"{case}: {fault}", flush=True)
                    counts["faults"] += 1
            commands = ((case, _again(case), case.folder, stand_ins) for case in points)
            for case, outcome in forks.run_all(commands, workers):
                if outcome.code or _left(case.folder) != _left(clean.folder):
                    left = {name: sorted(found or {}) for name, found in _left(case.folder).items()}
                    print(
                        f"{case}: the next run: code {outcome.code}, left {left}: {outcome.stderr[-300:]!r}", flush=True
                    )
                    counts["faults"] += 1
            for case in points:
                shutil.rmtree(case.folder)
    return counts


def _both(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def both() -> None:
        first()
        second()

    return both


def _left(folder: Path) -> dict[str, Contents]:
    """What a command has left in its folder, by name."""
    return {each.name: contents(folder, each.name) for each in folder.iterdir() if each.name.startswith((".", "out"))}


def _again(case: Case) -> list[str]:
    """The same command once more; one that had ended but for its cleaning up may replace its own result."""
    job = case.job
    taken = (case.folder / job.places[0]).exists()
    may = "--overwrite" in job.command or job.command.startswith("sensitivity") or not taken
    return (job.command if may else f"{job.command} --overwrite").split()


def _main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=(), help="names of commands")
    parser.add_argument("--quick", action="store_true", help="without commands that take long")
    given: Any = parser.parse_args()
    print(json.dumps(run(given.every, given.jobs, given.only, quick=given.quick)))


if __name__ == "__main__":
    _main()
