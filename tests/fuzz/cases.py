"""A fuzz run gives hostile files and options to every command, and lists each case that ended otherwise than it should.

    python tests/fuzz/cases.py --first 0 --count 5000 --jobs 2      # prints the faults, and counts at the end
    python tests/fuzz/cases.py --only 1234 --keep folder            # one case again, its files kept
    python tests/fuzz/cases.py --healthy                            # every command with nothing changed

A case may succeed, or end in one line that says what is wrong. It may not raise, hang, take a gigabyte, be killed,
write outside its output, leave half an output, run code of the file, write numbers that are not finite, print
characters that command the terminal, or say that Blockscale has a bug.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # before torch and transformers are imported
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    os.environ |= {"HF_DATASETS_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}

import argparse
import hashlib
import json
import random
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from fuzz import corpus, forks, mutations
from fuzz.corpus import ChangedFile
from fuzz.forks import Outcome
from safetensors import safe_open

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_OPTIONS = (
    "0", "-1", "1", "2", "3", "7", "1e3", str(2**31), str(2**63), str(2**70), "1" * 400, "nan", "inf", "-inf", "1e308",
    "1e-320", "", " ", "x", "*", "[", "../..", "/", "\x1b[31m", "\u202e", "fp8", "nvfp4", "keep", "fp8 keep", "0.1",
    "batch=0:0:0", "batch=1:1:99999999999999999999", "a=b=c", "*=fp8:rtn@fp8", "*=nvfp4:gptq+awq", "1GB", "1e400GB",
)  # fmt: skip


class Case:
    """A command and a folder with its inputs, one of them changed.

    Args:
        number: of the case.
        target: what is changed.
        command: one of the target's.
        home: of the healthy inputs.
        folder: for the case.
        rng: draws the change; None changes nothing.
    """

    def __init__(
        self, number: int, target: ChangedFile, command: str, home: Path, folder: Path, rng: random.Random | None
    ) -> None:
        self.number, self.target, self.folder, self.is_healthy = number, target, folder, rng is None
        self.argv = [word.replace("\u00a0", " ") for word in command.split(" ")]
        self.inputs = self.target.inputs(command)
        (folder / "in").mkdir(parents=True)
        for name in self.inputs:
            (shutil.copytree if (home / name).is_dir() else shutil.copy2)(home / name, self._place(name))
        if rng is not None and self.target.file:
            place = self._place(self.target.file)
            stamp = place.stat().st_mtime_ns
            place.write_bytes(mutations.mutate(self.target.kind, place.read_bytes(), rng, folder / "CANARY"))
            os.utime(place, ns=(stamp, stamp))
            if self.target.kind == "step":
                place.rename(place.with_name(mutations.forged_name(place)))
        elif rng is not None:
            options = [i for i, word in enumerate(self.argv[:-1]) if word.startswith("--") and word != "--out"]
            values = [i + 1 for i in options if not self.argv[i + 1].startswith("-")]
            self.argv[rng.choice(values)] = rng.choice(_OPTIONS)
        self.before = self._seen()

    def _place(self, name: str) -> Path:
        return self.folder / name if name.startswith(".") else self.folder / "in" / name

    def _seen(self) -> dict[str, str]:
        """What may not change: every file but the output and what stands beside it."""
        found = {}
        for file in sorted(self.folder.rglob("*")):
            name = str(file.relative_to(self.folder))
            mine = name.startswith(("out", ".out")) or name in ("stdout", "stderr")
            if file.is_file() and not mine and name.removeprefix("in/") not in corpus.WRITTEN:
                found[name] = hashlib.sha1(file.read_bytes()).hexdigest()
        return found

    def faults(self, outcome: Outcome) -> Iterator[str]:
        """What is wrong with an outcome, in a word each."""
        told = [line for line in outcome.stderr.splitlines() if line.startswith("error: ")]
        if outcome.code < 0:
            yield "hang" if outcome.code in (-24, -9) else f"signal {-outcome.code}"
        elif outcome.code == 70 or re.search("Traceback .most recent|a bug in Blockscale", outcome.stderr):
            yield "traceback"
        elif outcome.code == 2 and "Usage:" not in outcome.stderr and len(told) != 1 and "check" not in self.argv:
            yield "not one line"
        elif outcome.code not in (0, 1, 2):
            yield f"code {outcome.code}"
        if outcome.grown > forks.MEMORY or re.search("out of memory|can.t allocate memory", outcome.stderr):
            yield "memory"
        if _CONTROL.search(outcome.stdout + outcome.stderr):
            yield "controls"
        if (self.folder / "CANARY").exists():
            yield "executed"
        after = self._seen()
        if after != self.before:
            yield f"wrote {sorted({*after.items()} ^ {*self.before.items()})[0][0]}"
        out = self.folder / "out"
        if outcome.code and out.exists():
            yield "output of a failure"
        if outcome.code == 2 and told and self.target.file and not self._names_the_input(told[0]):
            yield "unnamed"
        if outcome.code > 1 and self.is_healthy and self.target.kind != "torch" and "check" not in self.argv:
            yield "refused"
        if not outcome.code:
            copied = {file.read_bytes() for file in (self.folder / "in" / "model").rglob("*.json")}
            yield from _strange(out, outcome.stdout if "--json" in self.argv else "", copied)

    def _names_the_input(self, line: str) -> bool:
        """Whether an error names a file or directory that it is about."""
        names = [Path(name).name for name in (*self.inputs, self.target.file)]
        return (
            any(name in line for name in names)
            or "--" in line
            or re.search(r"model\.(layers|norm)|lm_head|embed", line) is not None
            or re.match(r"error: ([ab](\.bias)? \[|(calibration )?rows: |row \d+, position)", line) is not None
        )


def _strange(out: Path, text: str, copied: Collection[bytes]) -> Iterator[str]:
    """What is wrong with a result: numbers that are not finite, or no JSON.

    Files that are `copied` as they are, and numbers that config.json had in the source, are the model's own.
    """
    texts = [text] if text else []
    files = sorted(out.rglob("*")) if out.is_dir() else [out] if out.exists() else []
    for file in files:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    if not _is_finite(name, opened.get_tensor(name)):
                        yield f"not finite: {name}"
                        return
        elif file.suffix == ".json" and file.read_bytes() in copied:
            continue
        elif file.name == "config.json":
            texts.append(re.sub(r"\b-?(Infinity|NaN)\b", "0", file.read_text(encoding="utf-8")))
        elif file.suffix == ".json" or file == out:
            texts.append(file.read_text(encoding="utf-8"))
    for each in texts:
        try:
            found = json.loads(each, parse_constant=_refuse)
        except ValueError:
            yield "no JSON"
            return
        if isinstance(found, dict) and "perplexity" in found and found["perplexity"] is None and "tokens" in found:
            yield "not finite: perplexity"


def _is_finite(name: str, tensor: torch.Tensor) -> bool:
    if tensor.dtype is torch.uint8 and name.endswith("scale"):
        return not bool((tensor == 255).any())  # NaN in E8M0
    return not tensor.dtype.is_floating_point or bool(tensor.float().isfinite().all())


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def run(numbers: Sequence[int] | None, jobs: int, keep: Path | None = None) -> Counter[str]:
    """Runs cases, prints each fault in a line, and gives the number of cases by how they ended.

    Args:
        numbers: of the cases; None runs every command with healthy inputs.
        jobs: how many run at a time.
        keep: a folder for the files of all cases.
    """
    with tempfile.TemporaryDirectory() as name:
        root = Path(name).resolve()
        os.environ |= {"HOME": str(root / "home"), "BLOCKSCALE_CACHE": str(root / "cache")}
        for each in ("home", "corpus", "cases"):
            (root / each).mkdir()
        targets = corpus.make(root / "corpus")
        at_rest = set(_elsewhere(root))
        found: Counter[str] = Counter()
        slowest: list[tuple[float, int]] = []

        def cases() -> Iterator[tuple[Case, Sequence[str], Path, None]]:
            for case in _cases(numbers, targets, root):
                yield case, case.argv, case.folder, None

        for case, outcome in forks.run_all(cases(), jobs):
            faults = list(case.faults(outcome))
            for place in set(_elsewhere(root)) - at_rest:
                faults.append(f"wrote {place}")
                at_rest.add(place)
            for fault in faults:
                told = (outcome.stderr or outcome.stdout).strip().splitlines() or [""]
                what = f"{case.target.file or 'options'}: quant {' '.join(case.argv)[:200]!r}"
                print(f"{case.number}: {fault}: {what}: {told[-1][:300]!r}", flush=True)
            found.update(fault.partition(":")[0] for fault in faults)
            found["cases"] += 1
            found[f"ended with {outcome.code}"] += 1
            slowest = sorted([*slowest, (outcome.seconds, case.number)])[-5:]
            if keep is not None:
                shutil.copytree(case.folder, keep / str(case.number), symlinks=True, dirs_exist_ok=True)
                (keep / str(case.number) / "command").write_text(" ".join(case.argv))
            shutil.rmtree(case.folder)
        print("slowest: " + ", ".join(f"case {number} {seconds:.1f} s" for seconds, number in reversed(slowest)))
    return found


def _cases(numbers: Sequence[int] | None, targets: Sequence[ChangedFile], root: Path) -> Iterator[Case]:
    home, folders = root / "corpus", root / "cases"
    if numbers is None:
        pairs = [(target, command) for target in targets for command in target.commands]
        for number, (target, command) in enumerate(pairs):
            yield Case(number, target, command, home, folders / str(number), None)
        return
    for number in numbers:
        rng = random.Random(number)
        target = rng.choices(targets, [target.weight for target in targets])[0]
        yield Case(number, target, rng.choice(target.commands), home, folders / str(number), rng)


def _elsewhere(root: Path) -> Iterator[str]:
    """Files that no case should make: those outside the cases' folders, but for tokens of texts, which are cached."""
    for place in ("home", "cache", "corpus"):
        for file in (root / place).rglob("*"):
            if file.is_file() and not re.search(r"\.cache/huggingface|cache/texts/", str(file)):
                yield str(file.relative_to(root))


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--only", type=int, nargs="*")
    parser.add_argument("--healthy", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--keep", type=Path)
    given: Any = parser.parse_args()
    numbers = None if given.healthy else given.only or range(given.first, given.first + given.count)
    found = run(numbers, given.jobs, given.keep)
    print(json.dumps(found, sort_keys=True))


if __name__ == "__main__":
    _main()
