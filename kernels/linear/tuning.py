"""`quant tune` searches for the fastest launch of a matmul by measuring, and stores it in this machine's table.

A candidate is timed as a serving loop would run it: replayed from a CUDA graph, over copies of the weight that
together do not fit in the L2 cache. Before that it is compared with the dequantized weight in float64; a candidate
with wrong results is dropped and named, never timed.

`quant bench` times matmuls in the same way, as a model calls them: with the launch that `dispatch` chooses.

`graph_microseconds` times calls in a CUDA graph, which is recorded once and replayed without the host's time. Values
are random: products of zeros draw less power and run faster.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quant.formats.tensor import BlockScaledTensor
from quant.kernels.base.hardware import current
from quant.kernels.base.weight_layout import as_computed, is_prepacked, prepack, prepack_refusal, restore
from quant.kernels.linear import dispatch, tiles
from quant.kernels.linear.quant_linear import QuantLinear
from quant.kernels.linear.tiles import MeasuredChoice, key, store, to_entry
from quant.recipes.gpus import Hardware


def graph_microseconds(calls: list[Callable[[], Any]], repeats: int = 5, at_least: float = 2e-3) -> float:
    """Returns the microseconds per call: the median over `repeats` replays of a graph that makes `calls` repeatedly."""
    # A replay takes `at_least` so many seconds, roughly. Compiles kernels and fills caches outside the graph.
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


def warm_up(seconds: float = 0.3) -> None:
    """Keeps the GPU busy until its clocks have risen; an idle GPU starts slow."""
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    end = time.monotonic() + seconds
    # Twenty products of 4096³ between two looks at the clock: a few milliseconds.
    while time.monotonic() < end:
        for _ in range(20):
            x @ x
        torch.cuda.synchronize()


def search(
    weight: BlockScaledTensor, tokens: int, gpu: Hardware, *, choices: Iterable[tiles.Choice] | None = None
) -> tuple[list[MeasuredChoice], dict[tiles.Choice, str]]:
    """Times the candidates for a weight on the GPU, in either layout, and `tokens` rows of BF16; fastest first."""
    # `choices` are by default `tiles.candidates`. Returned are the correct candidates, and why each of the others was
    # dropped.
    shape = (weight.shape[0], weight.shape[1])
    if choices is None:
        choices = tiles.candidates(weight.format, tokens, shape, gpu, is_prepacked(weight))
    x = torch.randn(tokens, shape[1], device=weight.codes.device, dtype=torch.bfloat16)
    exact = x.double() @ dispatch.dequantize(weight, torch.bfloat16).double().T
    largest = float(exact.abs().max())
    # Repeated on one weight, the search would prefer launches that are fast from L2, where a model never finds it.
    weights = list(copies(weight, gpu.l2))
    timings, dropped = [], {}
    for choice in choices:
        try:
            # Freed at once, so that y gets memory that holds no result of the candidate before.
            torch.full((tokens, shape[0]), torch.nan, dtype=x.dtype, device=x.device)
            y = dispatch.multiply_with(x, weight, None, choice)
            error = float((y.double() - exact).abs().max()) / largest
            # One rounding of the weights in 16 bit and one of the result, both of half a unit in 2^-8.
            if not error < 2**-7:
                dropped[choice] = f"error {error:.1e} of the largest output"
                continue
            calls = [call_of(x, copy, choice) for copy in weights]
            timings.append(MeasuredChoice(choice, graph_microseconds(calls), error))
        except Exception as exception:  # A compiler may refuse a candidate in any way; the search goes on.
            dropped[choice] = f"{type(exception).__name__}: {' '.join(str(exception).split())[:200]}"
    return sorted(timings, key=lambda t: t.microseconds), dropped


def call_of(x: Tensor, weight: BlockScaledTensor, choice: tiles.Choice) -> Callable[[], Any]:
    """Returns the matmul by `choice`, to be timed."""
    return lambda: dispatch.multiply_with(x, weight, None, choice)


def copies(weight: BlockScaledTensor, l2: int) -> Iterator[BlockScaledTensor]:
    """Yields the weight, and as many copies as make each replay read it from memory."""
    yield weight
    for _ in range(extra_copies(l2, weight.codes.nbytes)):
        yield replace(weight, codes=weight.codes.clone(), scale=weight.scale.clone())


def extra_copies(l2: int, nbytes: int) -> int:
    """Returns how many more copies of `nbytes` are needed so that together they do not fit in the L2 cache."""
    return min(max(3 * l2 // nbytes, 1), 32)


def shapes_of(model: nn.Module) -> list[BlockScaledTensor]:
    """Returns one quantized weight for each format and shape that `model` has."""
    weights: dict[tuple[str, tuple[int, ...]], BlockScaledTensor] = {}
    for module in model.modules():
        if isinstance(module, QuantLinear):
            weights.setdefault((module.weight_format.name, module.weight_shape), module.stored_weight)
    return list(weights.values())


def tune_shapes(
    weights: list[BlockScaledTensor], tokens: list[int], gpu: Hardware, *, progress: Callable[[int, int], None]
) -> tuple[dict[str, dict[str, Any]], dict[str, str], Path]:
    """Searches for every weight and number of tokens, in both layouts where there are two, and stores the best."""
    # Returns the entries, why candidates were dropped, and the file.
    best: dict[str, MeasuredChoice] = {}
    reasons: dict[str, str] = {}
    jobs = [(weight, count) for weight in weights for count in tokens]
    for done, (weight, count) in enumerate(jobs):
        weight = (restore(weight) if is_prepacked(weight) else weight).to("cuda")
        layouts = [weight]
        # On Hopper the same weight is run in both layouts: modules with other inputs than BF16 keep the checkpoint's.
        if gpu.has_wgmma and not prepack_refusal(weight):
            layouts.append(as_computed(prepack(weight)))
        for layout in layouts:
            name = key(layout.format, count, (weight.shape[0], weight.shape[1]), is_prepacked(layout))
            timings, dropped = search(layout, count, gpu)
            reasons.update({f"{name} {choice}": reason for choice, reason in dropped.items()})
            if timings:
                best[name] = timings[0]
        progress(done + 1, len(jobs))
    return {name: to_entry(timing) for name, timing in best.items()}, reasons, store(gpu, best)


def time_as_called(
    weights: Sequence[BlockScaledTensor], tokens: Sequence[int], *, progress: Callable[[int, int], None] | None = None
) -> list[dict[str, Any]]:
    """Times each weight `[out, in]` with each number of rows of BF16, and the 16-bit matmul of the same shape."""
    # Every call of a replayed graph reads another copy of its weight, so that none is in the L2 cache. Rows are
    # JSON-ready.
    gpu, rows = current(), []
    for done, weight in enumerate(weights):
        weight = (restore(weight) if is_prepacked(weight) else weight).to("cuda:0")
        out, columns = weight.shape
        format = weight.format.name
        if gpu.has_wgmma and not prepack_refusal(weight):
            weight = as_computed(prepack(weight))
        held, device = list(copies(weight, gpu.l2)), weight.codes.device
        count_dense = 1 + extra_copies(gpu.l2, 2 * out * columns)
        dense = [torch.randn(out, columns, device=device, dtype=torch.bfloat16) for _ in range(count_dense)]
        # x is the same for all copies: in a model its rows have just been written and are in L2.
        for count in tokens:
            x = torch.randn(count, columns, device=device, dtype=torch.bfloat16)
            choice = dispatch.choose_launch(weight, x)
            microseconds_per_call = graph_microseconds([call_of(x, copy, choice) for copy in held])
            baseline = graph_microseconds([lambda w=w, x=x: x @ w.T for w in dense])  # type: ignore[misc]
            rows.append(
                {
                    "format": format,
                    "out": out,
                    "in": columns,
                    "tokens": count,
                    "choice": " ".join(str(value) for value in tiles.to_dict(choice).values()),
                    "microseconds": microseconds_per_call,
                    "bytes_per_second": weight.nbytes / microseconds_per_call * 1e6,
                    "flops": 2 * count * math.prod(weight.shape) / microseconds_per_call * 1e6,
                    "times_16_bit": baseline / microseconds_per_call,
                }
            )
        if progress is not None:
            progress(done + 1, len(weights))
    return rows
