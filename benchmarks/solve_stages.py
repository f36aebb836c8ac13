"""This benchmark shows where the time of each block goes while `quantize` solves it, on the host and on the GPU.

It runs the command in this process, on one rank or on several, and notes when a stage begins and ends: on the host by
the clock, on the GPU by events in its stream, which wait for nothing. Where the GPU is behind the host at the begin of
a stage, the GPU sets the pace; where it is not, it waits for Python. Blocks whose kernels are compiled or recorded (the
first two), and the last, are left out.

    python benchmarks/solve_stages.py MODEL --format nvfp4a16 --solver gptq --calib TEXT --out OUT
    torchrun --nproc-per-node 2 benchmarks/solve_stages.py MODEL …       also prints what each rank waits for

`scale.py` writes models of random weights and measures whole processes.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from _table import machine, show, versions

from quant.calibration import ranks
from quant.calibration.solvers import gptq, replay
from quant.calibration.walk import block, finished_layers, round, shared_moments, solve, walk
from quant.cli.quantize import quantize_command

# Owners and names of the functions that are stages, as their callers find them.
STAGES: list[tuple[Any, str]] = [
    (walk.ModelWalk, "find_chains"),
    (walk.ModelWalk, "open_block"),
    (walk, "run_few"),
    (walk, "solve_block"),
    (walk, "observe"),
    (walk, "scale_inputs"),
    (walk, "round_siblings"),
    (round, "_collect"),
    (round, "stats_of"),
    (shared_moments, "_add_up"),
    (round, "solve_group"),
    (gptq, "factorize"),
    (gptq, "inverse_of_upper"),
    (gptq, "corrected_weight"),
    (replay, "run"),
    (gptq, "encoded"),
    (round, "_put_in_place"),
    (block.Block, "run"),
    (walk.ModelWalk, "close_block"),
    (solve, "_result"),
    (solve, "install_weight"),
    (finished_layers.BlockKeeper, "end"),
    (ranks.Exchange, "broadcast"),
    (ranks, "gathered"),
    (block, "gathered"),
    (finished_layers, "gathered"),
]
_FIRST = 2  # blocks that are left out


@dataclass(frozen=True)
class Lap:
    """One run of a stage: the stages that it ran in, itself last, and its block; milliseconds since the begin."""

    path: tuple[str, ...]
    block: int
    host: tuple[float, float]
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None


class Watch:
    """Notes the laps of the stages that this thread runs."""

    def __init__(self) -> None:
        self.laps: list[Lap] = []
        self.path: tuple[str, ...] = ()
        self.block, self.thread, self.on_gpu = -1, threading.get_ident(), torch.cuda.is_available()
        if self.on_gpu:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
            self.begin = torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            self.begin.record()
            torch.cuda.synchronize()
        self.started = time.perf_counter()

    def now(self) -> float:
        return 1000 * (time.perf_counter() - self.started)

    def watch(self, owner: Any, name: str) -> None:
        """Notes the runs of a function from now on."""
        function: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(function)
        def watched(*args: Any, **options: Any) -> Any:
            if threading.get_ident() != self.thread:
                return function(*args, **options)
            self.block += name == "open_block"
            number, before = self.block, self.path
            self.path = (*before, name)
            events = None
            if self.on_gpu and not torch.cuda.is_current_stream_capturing():
                events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                events[0].record()
            began = self.now()
            try:
                return function(*args, **options)
            finally:
                if events is not None:
                    events[1].record()
                self.laps.append(Lap(self.path, number, (began, self.now()), events))
                self.path = before

        setattr(owner, name, watched)

    def table(self) -> list[dict[str, object]]:
        """Returns the stages of a block in the mean over blocks."""
        if self.on_gpu:
            torch.cuda.synchronize()
        blocks = range(_FIRST, self.block)
        laps = sorted((lap for lap in self.laps if lap.block in blocks), key=lambda lap: lap.host[0])
        order = {path: place for place, path in reversed(list(enumerate(lap.path for lap in laps)))}
        rows = []
        # Each stage below the one that it runs in.
        for path in sorted(order, key=lambda path: [order[path[:depth]] for depth in range(1, len(path) + 1)]):
            own = [lap for lap in laps if lap.path == path]
            row: dict[str, object] = {
                "stage": f"{'· ' * (len(path) - 1)}{path[-1]}",
                "calls": len(own) / len(blocks),
                "host ms": sum(lap.host[1] - lap.host[0] for lap in own) / len(blocks),
            }
            timed = [(lap.host[0], lap.events) for lap in own if lap.events is not None]
            if timed:
                row["GPU ms"] = sum(first.elapsed_time(last) for _, (first, last) in timed) / len(blocks)
                behind = sum(self.begin.elapsed_time(first) - began for began, (first, _) in timed)
                row["GPU behind, ms"] = behind / len(timed)
            rows.append(row)
        return rows


def main(arguments: list[str]) -> None:
    watch = Watch()
    for owner, name in STAGES:
        watch.watch(owner, name)
    quantize_command(arguments, standalone_mode=False)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    rows = watch.table()
    if not rows:
        print(f"the model needs more than {_FIRST + 1} blocks", file=sys.stderr)
        return
    header = machine() | versions("transformers")
    show(f"Milliseconds of a block, rank {rank} of {world}, mean of {watch.block - _FIRST} blocks", header, rows)


if __name__ == "__main__":
    main(sys.argv[1:])
