"""`graph_microseconds` times calls in a CUDA graph, which is recorded once and replayed without the host's time.

`measure_ceilings` measures the rates that a GPU reaches, the limits that kernels are compared with:

    copy      bytes read and written a second, by the faster of the driver's copy and an elementwise kernel
    read      bytes read a second, by a sum: the limit of a matmul with few tokens
    bf16      the library's matmul of 8192 × 8192 × 8192, in TFLOP/s
    fp8       the same by `torch._scaled_mm`, with a scale a tensor (`fp8`) and a scale a row (`fp8_row`)

Values are random: products of zeros draw less power and run faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from quant.kernels.base.hardware import Hardware, current


def graph_microseconds(calls: list[Callable[[], Any]], repeats: int = 5, at_least: float = 2e-3) -> float:
    """Returns the microseconds per call: the median over `repeats` replays of a graph that makes `calls` repeatedly."""
    # A replay takes `at_least` so many seconds, roughly.
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
        times = []
        for _ in range(repeats + 1):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(float(begin.elapsed_time(end)) * 1e-3)
        seconds = sorted(times[1:])[repeats // 2]
        # Short graphs would measure the events' own resolution of about half a microsecond.
        if seconds > at_least / 2 or rounds >= 64:
            return seconds / (rounds * len(calls)) * 1e6
        rounds = min(rounds * max(int(at_least / max(seconds, 1e-6)), 2), 64)


_BYTES = 1 << 30
_SIZE = 8192


@dataclass(frozen=True)
class Ceiling:
    """One measured rate."""

    name: str  # as in the module docstring
    rate: float  # bytes a second, or operations a second, by `unit`
    unit: str  # "TB/s" or "TFLOP/s"
    sheet: float | None  # the vendor's figure in the same unit as `rate`, or None where it is not known

    @property
    def share(self) -> float | None:
        """The measured rate as a fraction of the vendor's figure."""
        return None if self.sheet is None else self.rate / self.sheet


def measure_ceilings(index: int = 0) -> list[Ceiling]:
    """Measures GPU `index`; a few seconds, and about 2 GiB of its memory."""
    gpu = current(index)
    with torch.cuda.device(index):
        warm_up()
        return [*_bandwidths(gpu), *_matmuls(gpu)]


def copy_rate() -> float:
    """Returns the bytes a second of the faster of two copies of a gibibyte on the current GPU, reads and writes."""
    source = torch.ones(_BYTES // 4, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    ways: list[Callable[[], Any]] = [lambda: target.copy_(source), lambda: torch.neg(source, out=target)]
    return 2 * _BYTES / min(graph_microseconds([way]) for way in ways) * 1e6


def _bandwidths(gpu: Hardware) -> list[Ceiling]:
    copy = copy_rate()
    # A sum reads everything and writes four bytes.
    source, total = torch.ones(_BYTES // 4, device="cuda"), torch.empty((), device="cuda")
    read = graph_microseconds([lambda: torch.sum(source, dim=None, out=total)])
    sheet = gpu.bandwidth if gpu.known else None
    return [Ceiling("copy", copy, "TB/s", sheet), Ceiling("read", _BYTES / read * 1e6, "TB/s", sheet)]


def _matmuls(gpu: Hardware) -> list[Ceiling]:
    x, w = (torch.randn(_SIZE, _SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    calls: dict[str, Callable[[], Any]] = {"bf16": lambda: x @ w.T}
    if gpu.has_fp8:
        # `_scaled_mm` requires the right operand column-major: the transpose of a row-major matrix.
        x8, w8 = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)
        one, rows = torch.ones((), device="cuda"), torch.ones(_SIZE, 1, device="cuda")
        calls["fp8"] = lambda: torch._scaled_mm(x8, w8.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
        calls["fp8_row"] = lambda: torch._scaled_mm(
            x8, w8.T, rows, rows.T, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    rates = []
    for name, call in calls.items():
        sheet = gpu.tflops.get(name.removesuffix("_row")) if gpu.known else None
        rate = 2 * _SIZE**3 / graph_microseconds([call], at_least=20e-3) * 1e6
        rates.append(Ceiling(name, rate, "TFLOP/s", None if sheet is None else sheet * 1e12))
    return rates


def warm_up(seconds: float = 0.3) -> None:
    """Keeps the GPU busy until its clocks have risen; an idle GPU starts slow."""
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    end = time.monotonic() + seconds
    # Twenty products of 4096³ between two looks at the clock: a few milliseconds.
    while time.monotonic() < end:
        for _ in range(20):
            x @ x
        torch.cuda.synchronize()
