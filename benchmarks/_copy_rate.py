"""The bandwidth of the GPU's memory, which kernels are compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from quant.kernels.linear.tuning import graph_microseconds

_BYTES = 1 << 30


def copy_rate() -> float:
    """Returns the bytes a second of the faster of two copies of a gibibyte on the current GPU, reads and writes."""
    source = torch.ones(_BYTES // 4, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    ways: list[Callable[[], Any]] = [lambda: target.copy_(source), lambda: torch.neg(source, out=target)]
    return 2 * _BYTES / min(graph_microseconds([way]) for way in ways) * 1e6
