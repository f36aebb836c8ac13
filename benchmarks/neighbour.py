"""This benchmark quantizes a small model alone on the machine and next to busy processes, and compares the seconds.

Where another process wants the same cores, a thread sometimes has none. Threads that wait for it by spinning, as
libgomp's do for milliseconds unless it is told otherwise, then use up the time that it is waiting for. Commands tell
libgomp to sleep soon, and take rows of a weight through a whole solver in one thread. The two ways of waiting
alternate, and so do runs alone and runs with neighbours. What counts is the ratio, so the machine should have nothing
else to do; the CPU seconds show what the waiting itself costs.

    python benchmarks/neighbour.py                 GPTQ of a Llama of 8 layers, one neighbour, a thread for each core
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from _table import machine, show, versions
from safetensors.torch import save_file
from scale import write_model

TITLE = "Quantizing next to a busy process"
# libgomp's own default is to poll this often before it sleeps.
WAITING = {"libgomp's default": {"GOMP_SPINCOUNT": "300000"}, "as commands set it": {}}


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Busy loops that run meanwhile."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def run(model: Path, solver: str, rows: tuple[int, int], waiting: dict[str, str]) -> dict[str, float]:
    """One process: its seconds, those of solving, and its CPU seconds."""
    out, text = model.parent / "out", model.parent / "rows.safetensors"
    vocabulary = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    save_file({"input_ids": torch.randint(2, vocabulary, rows, generator=torch.Generator().manual_seed(1))}, text)
    command = [sys.executable, "-c", "from quant.cli.quantize import quantize_command as q; q()", str(model)]
    command += ["--format=nvfp4a16", f"--solver={solver}", f"--out={out}", "--restart", "--overwrite", "--quiet"]
    command += ["--device=cpu", f"--calib={text}", f"--calib-samples={rows[0]}", f"--seqlen={rows[1]}"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_WAIT", "GOMP", "KMP"))}
    started = time.perf_counter()
    before = os.times()
    subprocess.run(command, env=clean | waiting, check=True)
    seconds, after = time.perf_counter() - started, os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    return {"seconds": seconds, "solve": report["seconds"]["solve"], "cpu": cpu}


def row(name: str, quiet: list[dict[str, float]], busy: list[dict[str, float]]) -> dict[str, Any]:
    def middle(runs: list[dict[str, float]], key: str) -> float:
        return median(found[key] for found in runs)

    return {
        "threads wait": name,
        "alone, s": middle(quiet, "solve"),
        "with neighbours, s": middle(busy, "solve"),
        "ratio": middle(busy, "solve") / middle(quiet, "solve"),
        "whole process, ratio": middle(busy, "seconds") / middle(quiet, "seconds"),
        "CPU s alone": middle(quiet, "cpu"),
        "CPU s with neighbours": middle(busy, "cpu"),
    }


@click.command(help=__doc__)
@click.option("--layers", default=8, show_default=True, help="Decoder layers.")
@click.option("--hidden", default=512, show_default=True, help="Width, a multiple of 512.")
@click.option("--solver", default="gptq", show_default=True, help="Solver.")
@click.option("--rows", default="8x512", show_default=True, help="Calibration rows and tokens.")
@click.option("--count", default=1, show_default=True, help="Busy processes.")
@click.option("--repeats", default=3, show_default=True, help="Runs of each kind, of which the median counts.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the table here.")
def main(layers: int, hidden: int, solver: str, rows: str, count: int, repeats: int, json_path: Path | None) -> None:
    samples, seqlen = map(int, rows.split("x"))
    quiet: dict[str, list[dict[str, float]]] = {name: [] for name in WAITING}
    busy: dict[str, list[dict[str, float]]] = {name: [] for name in WAITING}
    with tempfile.TemporaryDirectory() as home:
        model = Path(home) / "model"
        write_model(model, layers, hidden, 1)
        for _ in range(repeats):
            for name, waiting in WAITING.items():
                quiet[name].append(run(model, solver, (samples, seqlen), waiting))
                with neighbours(count):
                    busy[name].append(run(model, solver, (samples, seqlen), waiting))
    table = [row(name, quiet[name], busy[name]) for name in WAITING]
    notes = [f"{solver} of {layers} layers {hidden} wide on {rows} tokens; {count} neighbour(s); seconds of solving."]
    header = machine() | versions()
    show(TITLE, header, table, notes, json_path=json_path)


if __name__ == "__main__":
    main()
