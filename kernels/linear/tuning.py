"""Tables of the best launch by shape: shipped with the package, measured by `quant tune`, looked up by `dispatch`.

A table is a JSON file of one GPU: key "format|layout|tokens|out|in", value a `tiles.Choice` with its time. The name
of the file that a search writes holds the versions of Triton and of this package, so that an update of either starts
afresh. Tokens are powers of two up to 64, then multiples of 64, each for the numbers up to it.

A search times every candidate as a serving loop would run it: replayed from a CUDA graph, over copies of the weight
that together do not fit in the L2 cache. A candidate is first compared with the dequantized weight in float64; one
that is wrong is dropped and named, never timed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quant.formats.format import Format
from quant.formats.tensor import BlockScaledTensor
from quant.kernels import tiles
from quant.kernels.hardware import Hardware
from quant.kernels.linear.modules import QuantLinear

# Up to so many tokens the time is that of reading the weight, and a launch for more serves fewer. Beyond, and up to
# `tiles.FEW`, each power of two has its own tile.
_SAME = 16
_SHIPPED = Path(__file__).resolve().parents[1] / "tuned"


@dataclass(frozen=True)
class Timing:
    """A measured candidate: microseconds a call, and its largest error relative to the largest output."""

    choice: tiles.Choice
    microseconds: float
    error: float


def has_triton() -> bool:
    """Whether Triton is installed; it comes with a CUDA build of PyTorch."""
    return _found("triton")


@cache
def _found(module: str) -> bool:
    return find_spec(module) is not None


def look_up(gpu: Hardware, format: Format, tokens: int, shape: tuple[int, int], prepacked: bool) -> tiles.Choice | None:
    """The launch that was measured for a shape and these tokens, or for the next larger number of them, or None."""
    table, count = _table(gpu.name), tiles.bucket(tokens)
    if count <= tiles.FEW:
        most = max(_SAME, count)
    elif prepacked:
        # Tiles that go evenly into the SMs for one number of tokens do not for another; the guess knows.
        most = count
    else:
        most = 8 * count
    while count <= most:
        found = table.get(key(format, count, shape, prepacked))
        if found is not None:
            return found
        count = 1 << count.bit_length()
    return None


def key(format: Format, tokens: int, shape: tuple[int, int], prepacked: bool) -> str:
    """Name of an entry; to the kernel for prepacked weights, MXFP4 is NVFP4."""
    layout = "nvfp4|prepacked" if prepacked else f"{format}|checkpoint"
    return f"{layout}|{tiles.bucket(tokens)}|{shape[0]}|{shape[1]}"


@lru_cache(maxsize=8)
def _table(gpu: str) -> dict[str, tiles.Choice]:
    """Shipped entries, and those measured here on top."""
    found: dict[str, tiles.Choice] = {}
    for path in (_SHIPPED / f"{gpu}.json", cache_file(gpu)):
        if path.exists():
            entries = json.loads(path.read_text())["entries"]
            found.update({name: tiles.from_dict(entry["choice"]) for name, entry in entries.items()})
    return found


def count_entries(gpu: Hardware) -> int:
    """How many shapes have a measured launch."""
    return len(_table(gpu.name))


def cache_file(gpu: str) -> Path:
    """Where a search on this machine is kept: `$BLOCKSCALE_CACHE`, else `~/.cache/blockscale`."""
    folder = Path(os.environ.get("BLOCKSCALE_CACHE") or Path.home() / ".cache" / "blockscale")
    safe = "".join(c if c.isalnum() else "-" for c in gpu.lower())
    return folder / f"tuned-{safe}-triton{_version('triton')}-blockscale{_version('blockscale')}.json"


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "none"


def store(gpu: Hardware, entries: dict[str, Timing]) -> Path:
    """Adds measured entries to this machine's table; the file is replaced as a whole.

    Returns:
        The file.
    """
    path = cache_file(gpu.name)
    known = json.loads(path.read_text())["entries"] if path.exists() else {}
    known.update({name: _entry(timing) for name, timing in entries.items()})
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    partial.write_text(json.dumps({"gpu": gpu.name, "entries": known}, indent=1, sort_keys=True) + "\n")
    partial.replace(path)
    _table.cache_clear()
    return path


def search(
    weight: BlockScaledTensor, tokens: int, gpu: Hardware, *, choices: Iterable[tiles.Choice] | None = None
) -> tuple[list[Timing], dict[tiles.Choice, str]]:
    """Times the candidates for `weight` and `tokens` rows of BF16, fastest first.

    Args:
        weight: on the GPU, in either layout.
        tokens: rows of x.
        gpu: the GPU it is on.
        choices: what to try; by default `tiles.candidates`.

    Returns:
        The correct candidates with their times, and why each of the others was dropped.
    """
    from quant.kernels.layout import is_prepacked
    from quant.kernels.linear import dispatch

    shape = (weight.shape[0], weight.shape[1])
    if choices is None:
        choices = tiles.candidates(weight.format, tokens, shape, gpu, is_prepacked(weight))
    x = torch.randn(tokens, shape[1], device=weight.codes.device, dtype=torch.bfloat16)
    dense = dispatch.dequantize(weight, torch.bfloat16)
    exact = x.double() @ dense.double().T
    largest = float(exact.abs().max())
    weights = list(copies(weight, gpu.l2))
    timings, dropped = [], {}
    for choice in choices:
        try:
            y = dispatch.run(x, weight, None, choice)
            error = float((y.double() - exact).abs().max()) / largest
            # One rounding of the weights in 16 bit and one of the result, both of half a unit in 2^-8.
            if not error < 2**-7:
                dropped[choice] = f"error {error:.1e} of the largest output"
                continue
            calls = [_call(x, copy, choice) for copy in weights]
            timings.append(Timing(choice, graph_microseconds(calls), error))
        except Exception as error_:  # A compiler may refuse a candidate in any way; the search goes on.
            dropped[choice] = f"{type(error_).__name__}: {' '.join(str(error_).split())[:200]}"
    return sorted(timings, key=lambda t: t.microseconds), dropped


def _call(x: torch.Tensor, weight: BlockScaledTensor, choice: tiles.Choice) -> Callable[[], Any]:
    from quant.kernels.linear import dispatch

    return lambda: dispatch.run(x, weight, None, choice)


def copies(weight: BlockScaledTensor, l2: int) -> Iterator[BlockScaledTensor]:
    """The weight, and as many copies as make each replay read it from memory."""
    yield weight
    for _ in range(min(max(3 * l2 // weight.codes.nbytes, 1), 32)):
        yield replace(weight, codes=weight.codes.clone(), scale=weight.scale.clone())


def graph_microseconds(calls: list[Callable[[], Any]], repeats: int = 5, at_least: float = 2e-3) -> float:
    """Microseconds a call: the median over `repeats` replays of one graph that makes all `calls`, several times.

    Args:
        calls: each launches work on the current stream.
        repeats: replays that are timed.
        at_least: seconds that one replay should take, roughly.
    """
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
        times = [_replay_seconds(graph) for _ in range(repeats + 1)][1:]
        seconds = sorted(times)[repeats // 2]
        if seconds > at_least / 2 or rounds >= 64:
            return seconds / (rounds * len(calls)) * 1e6
        rounds = min(rounds * max(int(at_least / max(seconds, 1e-6)), 2), 64)


def _replay_seconds(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3


def shapes_of(model: nn.Module) -> list[BlockScaledTensor]:
    """One quantized weight for each format and shape that `model` has."""
    found: dict[tuple[str, tuple[int, ...]], BlockScaledTensor] = {}
    for module in model.modules():
        if isinstance(module, QuantLinear):
            found.setdefault((module.weight_format.name, module.weight_shape), module.stored_weight)
    return list(found.values())


def tune_shapes(
    weights: list[BlockScaledTensor],
    tokens: list[int],
    gpu: Hardware,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[dict[str, dict[str, Any]], dict[str, str], Path]:
    """Searches for every weight and number of tokens, in both layouts where there are two, and stores what is best.

    Returns:
        The entries, why candidates were dropped, and the file.
    """
    from quant.kernels.layout import as_computed, is_prepacked, prepack, restore, why_not

    best: dict[str, Timing] = {}
    why: dict[str, str] = {}
    jobs = [(weight, count) for weight in weights for count in tokens]
    for done, (weight, count) in enumerate(jobs):
        weight = (restore(weight) if is_prepacked(weight) else weight).to("cuda")
        layouts = [weight]
        if gpu.has_wgmma and not why_not(weight):
            layouts.append(as_computed(prepack(weight)))
        for layout in layouts:
            name = key(layout.format, count, (weight.shape[0], weight.shape[1]), is_prepacked(layout))
            timings, dropped = search(layout, count, gpu)
            why.update({f"{name} {choice}": reason for choice, reason in dropped.items()})
            if timings:
                best[name] = timings[0]
        if progress is not None:
            progress(done + 1, len(jobs))
    return {name: _entry(timing) for name, timing in best.items()}, why, store(gpu, best)


def _entry(timing: Timing) -> dict[str, Any]:
    return {"choice": tiles.to_dict(timing.choice), "microseconds": round(timing.microseconds, 2)}
