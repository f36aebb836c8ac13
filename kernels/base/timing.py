"""`graph_microseconds` times calls in a CUDA graph, which is recorded once and replayed without the host's time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def graph_microseconds(calls: list[Callable[[], Any]], repeats: int = 5, at_least: float = 2e-3) -> float:
    """Returns the microseconds per call: the median over `repeats` replays of a graph that makes `calls` several times.

    Args:
        calls: each launches work on the current stream.
        repeats: replays that are timed.
        at_least: seconds that one replay should take, roughly.
    """
    # Compiles kernels and fills caches outside the graph.
    for call in calls:
        call()
    torch.cuda.synchronize()
    rounds = 1
    while True:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(rounds):
                for call in calls:
                    call()
        # The first replay uploads the graph, so it is not counted.
        times = [_replay_seconds(graph) for _ in range(repeats + 1)][1:]
        seconds = sorted(times)[repeats // 2]
        # Short graphs would measure the events' own resolution of about half a microsecond.
        if seconds > at_least / 2 or rounds >= 64:
            return seconds / (rounds * len(calls)) * 1e6
        rounds = min(rounds * max(int(at_least / max(seconds, 1e-6)), 2), 64)


def _replay_seconds(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3
