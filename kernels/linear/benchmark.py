"""`time_as_called` times matmuls as a model calls them: with the launch that `dispatch` chooses, without a search."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from quant.formats.tensor import BlockScaledTensor
from quant.kernels.hardware import current
from quant.kernels.layout import as_computed, is_prepacked, prepack, prepack_refusal, restore
from quant.kernels.linear import dispatch
from quant.kernels.linear.tuning import call_of, copies, extra_copies
from quant.kernels.matmul_tiles import to_dict
from quant.kernels.timing import graph_microseconds


def time_as_called(
    weights: Sequence[BlockScaledTensor],
    tokens: Sequence[int],
    *,
    index: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """Times each weight with each number of rows of BF16, and the 16-bit matmul of the same shape.

    Every call of a replayed graph reads another copy of its weight, so that none is in the L2 cache.

    Args:
        weights: `[out, in]`, on any device.
        tokens: numbers of rows.
        index: the index of the GPU.
        progress: a function that is called as `progress(done, total)`.

    Returns:
        JSON-ready rows: format, out, in, tokens, choice, microseconds, bytes_per_second, flops, times_16_bit.
    """
    gpu, rows = current(index), []
    for done, weight in enumerate(weights):
        weight = (restore(weight) if is_prepacked(weight) else weight).to(f"cuda:{index}")
        out, columns = weight.shape
        format = weight.format.name
        if gpu.has_wgmma and not prepack_refusal(weight):
            weight = as_computed(prepack(weight))
        weights = list(copies(weight, gpu.l2))
        dense = [
            torch.randn(out, columns, device=weight.codes.device, dtype=torch.bfloat16)
            for _ in range(1 + extra_copies(gpu.l2, 2 * out * columns))
        ]
        # x is the same for all copies: in a model its rows have just been written and are in L2.
        for count in tokens:
            x = torch.randn(count, columns, device=weight.codes.device, dtype=torch.bfloat16)
            choice = dispatch.choose_launch(weight, x)
            microseconds_per_call = graph_microseconds([call_of(x, copy, choice) for copy in weights])
            baseline = graph_microseconds([lambda w=w, x=x: x @ w.T for w in dense])  # type: ignore[misc]
            rows.append(
                {
                    "format": format,
                    "out": out,
                    "in": columns,
                    "tokens": count,
                    "choice": " ".join(str(value) for value in to_dict(choice).values()),
                    "microseconds": microseconds_per_call,
                    "bytes_per_second": weight.nbytes / microseconds_per_call * 1e6,
                    "flops": 2 * count * math.prod(weight.shape) / microseconds_per_call * 1e6,
                    "times_16_bit": baseline / microseconds_per_call,
                }
            )
        if progress is not None:
            progress(done + 1, len(weights))
    return rows
