"""Prints where the time of a `quantize` process goes: imports, the way to the first weight, stages, and the end.

    python benchmarks/startup.py [MODEL] [--device cuda] [--solver rtn] [--calib TEXT] [--repeat 3] [--imports]
    python benchmarks/startup.py MODEL --solver gptq --calib mix --eval prose        as most people run it

Works on any checkout: `--tree DIR` measures that one with the Python that runs this script, so that two trees can be
compared in one call. Every figure is of processes of their own; the best of the repetitions is printed. The weight
files are watched from outside: `/proc/PID/smaps` tells when their first pages are in the process. So the moments of a
run need Linux; without it the other figures are printed alone.

    start        the process begins
    first weight pages of a weight file, beyond its header, are in memory
    stages       seconds of the stages, as report.json has them
    written      the destination appears under its name
    end          the process has ended
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

_IMPORTED = re.compile(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)")
_LIMIT = 600  # seconds of one process
_HELP = "from quant.cli.quantize import quantize_command; quantize_command.main(prog_name='quantize')"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="model directory, whose weights are in safetensors")
    parser.add_argument("--tree", action="append", type=Path, help="checkout to measure; repeatable")
    parser.add_argument("--format", default="nvfp4a16")
    parser.add_argument("--solver", default="rtn")
    parser.add_argument("--calib", help="text that the solver calibrates on, as for quantize")
    parser.add_argument("--eval", help="text on which the result is measured, as for quantize")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--imports", action="store_true", help="list the packages whose import takes longest")
    options = parser.parse_args()
    print(f"Python {platform.python_version()} on {platform.node()}, {os.cpu_count()} cores, best of {options.repeat}")
    for tree in options.tree or [Path(__file__).parents[1]]:
        measure(tree.resolve(), options)


def measure(tree: Path, options: argparse.Namespace) -> None:
    """Prints all figures of one checkout."""
    # Packages may be found by the variable too, so the tree comes before them and does not replace them.
    environment = os.environ | {"PYTHONPATH": f"{tree}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    print(f"\n{tree}")
    bare = best(["-c", "pass"], environment, options.repeat)
    for label, program in (
        ("import quant", ["-c", "import quant"]),
        ("quantize --help", ["-c", _HELP, "--help"]),
        ("import torch", ["-c", "import torch"]),
        ("import torch, AutoModelForCausalLM", ["-c", "import torch; from transformers import AutoModelForCausalLM"]),
    ):
        print(f"  {label:36} {best(program, environment, options.repeat) - bare:7.2f} s beyond {bare:.2f} s of Python")
    if options.model is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        runs = [run(options, environment, Path(folder) / str(number)) for number in range(options.repeat)]
        print_run(min(runs, key=lambda moments: moments["end"]))
        if options.imports:
            print_imports(command(options, Path(folder) / "imports"), environment)


def best(program: Sequence[str], environment: Mapping[str, str], repeat: int) -> float:
    """Seconds of the fastest of some processes."""
    seconds = []
    for _ in range(repeat):
        started = time.perf_counter()
        subprocess.run(
            [sys.executable, *program], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            cwd=tempfile.gettempdir(), check=True, timeout=_LIMIT,
        )  # fmt: skip
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def command(options: argparse.Namespace, out: Path) -> list[str]:
    """Arguments of Python for one run of `quantize`."""
    model = str(Path(options.model).resolve())
    arguments = [model, "--format", options.format, "--solver", options.solver, "--device", options.device]
    for name in ("calib", "eval"):
        arguments += [f"--{name}", getattr(options, name)] if getattr(options, name) else []
    return ["-c", _HELP, *arguments, "--out", str(out), "--quiet"]


def run(options: argparse.Namespace, environment: Mapping[str, str], out: Path) -> dict[str, float]:
    """Seconds after the start at which each moment of one run came, and of each stage under `stage NAME`."""
    weights = sorted(Path(options.model).glob("*.safetensors"))
    moments: dict[str, float] = {}
    started = time.perf_counter()
    # `python -c` looks for packages in the working directory first, which may be another checkout.
    process = subprocess.Popen(
        [sys.executable, *command(options, out)], env=environment, stdin=subprocess.DEVNULL, cwd=out.parent
    )
    while process.poll() is None:
        now = time.perf_counter() - started
        if now > _LIMIT:
            process.kill()
            raise SystemExit(f"quantize did not end within {_LIMIT} s")
        if "first weight" not in moments and weights and holds_weights(process.pid, weights):
            moments["first weight"] = now
        if "written" not in moments and (out / "report.json").exists():
            moments["written"] = now
        # Each look at the pages stops the process for a moment, the longer the more of the files it has mapped.
        time.sleep(0.02 if "first weight" in moments else 0.1)
    moments["end"] = time.perf_counter() - started
    if process.returncode:
        raise SystemExit(f"quantize ended with code {process.returncode}")
    seconds = json.loads((out / "report.json").read_text())["seconds"]
    return moments | {f"stage {name}": value for name, value in seconds.items()}


def holds_weights(pid: int, weights: Sequence[Path]) -> bool:
    """Whether a process has pages of weight files in memory beyond their headers."""
    names = {str(file.resolve()): header_bytes(file) for file in weights}
    try:
        text = Path(f"/proc/{pid}/smaps").read_text()
    except OSError:
        return False
    file = ""
    for line in text.splitlines():
        if re.match(r"^[0-9a-f]+-[0-9a-f]+ ", line):
            file = line.split(maxsplit=5)[5] if len(line.split(maxsplit=5)) == 6 else ""
        elif line.startswith("Rss:") and file in names and 1024 * int(line.split()[1]) > names[file] + (1 << 16):
            return True  # a page fault maps up to 64 kB around the header
    return False


def header_bytes(file: Path) -> int:
    """Bytes before the first tensor of a safetensors file."""
    with file.open("rb") as opened:
        return 8 + int.from_bytes(opened.read(8), "little")


def print_run(moments: Mapping[str, float]) -> None:
    """Prints the moments of a run, and how much of it no stage accounts for."""
    stages = {name.removeprefix("stage "): value for name, value in moments.items() if name.startswith("stage ")}
    for name in ("first weight", "written", "end"):
        print(f"  {name:36} {moments[name]:7.2f} s after the start" if name in moments else f"  {name}: not seen")
    listed = ", ".join(f"{name} {value:.2f}" for name, value in stages.items())
    print(f"  {'stages':36} {sum(stages.values()):7.2f} s: {listed}")
    print(f"  {'outside of the stages':36} {moments['end'] - sum(stages.values()):7.2f} s")
    if "written" in moments:
        print(f"  {'from written to the end':36} {moments['end'] - moments['written']:7.2f} s")


def print_imports(program: Sequence[str], environment: Mapping[str, str], count: int = 25) -> None:
    """Prints the packages whose own modules take longest to import in a run, from `-X importtime`."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *program], env=environment, stdin=subprocess.DEVNULL, capture_output=True,
        cwd=tempfile.gettempdir(), text=True, check=True, timeout=_LIMIT,
    )  # fmt: skip
    seconds: Counter[str] = Counter()
    for line in done.stderr.splitlines():
        if found := _IMPORTED.match(line):
            seconds[".".join(found[2].split(".")[:2])] += int(found[1])
    print(f"  imports take {sum(seconds.values()) / 1e6:.2f} s, measured with an overhead of a tenth or so:")
    for name, microseconds in seconds.most_common(count):
        print(f"    {name:34} {microseconds / 1e6:7.2f} s")


if __name__ == "__main__":
    main()
