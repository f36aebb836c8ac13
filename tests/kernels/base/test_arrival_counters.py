"""Streams and captured graphs that run at the same time never share the counters of a kernel's tiles."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from quant.formats.format import FORMATS
from quant.formats.tensor import quantize
from quant.kernels.base import launch
from quant.kernels.base.hardware import current
from quant.kernels.base.launch import arrival_counters, reserve
from quant.kernels.base.weight_layout import prepack
from quant.kernels.linear import dispatch, tiles
from quant.kernels.linear.quant_linear import QuantLinear

Call = Callable[[], torch.Tensor]


def test_a_buffer_is_kept_and_grows() -> None:
    x = torch.zeros(3)
    first = arrival_counters(x, 5)
    assert first.dtype is torch.int32 and first.numel() >= 5 and not first.any()
    assert arrival_counters(x, 7) is first
    wider = arrival_counters(x, first.numel() + 1)
    assert wider.numel() > first.numel() and not wider.any()
    assert arrival_counters(x, 1) is wider


class OnGpu:
    """Stands for a tensor on a GPU that this machine need not have."""

    is_cuda, device = True, torch.device("cpu")

    def get_device(self) -> int:
        return 77


def test_a_module_that_arrives_leaves_the_counts_of_kernels_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel whose tile was counted anew would never be finished, nor the first tile of the next one."""
    waits: list[int] = []
    tables: dict[int, torch.Tensor] = {}
    monkeypatch.setattr(launch, "_tables", tables)
    monkeypatch.setattr(launch, "_free", {})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: waits.append(int(tables[77].sum()) if tables else -1))
    x: Any = OnGpu()
    reserve(x)
    tables[77][3, 5] = 2  # two programs of a tile have arrived
    reserve(x)
    assert int(tables[77][3, 5]) == 2
    reserve(x, again=True)  # after all kernels have ended
    assert not tables[77].any() and waits == [-1, 2, 0]


def test_a_launch_that_is_only_noted_leaves_no_counters() -> None:
    """Its arguments are on the device "meta", which has the same number as the CPU."""
    arrival_counters(torch.zeros(3, device="meta"), 9_000)
    assert arrival_counters(torch.zeros(3), 9_000).device.type == "cpu"


def calls() -> list[Call]:
    """Matmuls by one weight whose tiles are shared by programs, portable and Hopper's own, for few tokens and many."""
    stored = quantize(torch.randn(512, 4096, device="cuda"), FORMATS["nvfp4"])
    cases = [(stored, 5, tiles.Tiles(16, 64, 128, splits=8))]
    if current().has_wgmma:
        laid_out = prepack(stored)
        cases += [(laid_out, 5, tiles.gluon_tiles(8, 4, 4, current(), 4))]
        cases += [(laid_out, 300, tiles.prefill_tiles(128, 1, current()))]
    found = []
    for weight, tokens, choice in cases:
        x = torch.randn(tokens, 4096, device="cuda").bfloat16()
        found.append(lambda x=x, w=weight, c=choice: dispatch.multiply_with(x, w, None, c))
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [(False, False), (True, False), (True, True)], ids=["eager", "one", "both"])
def test_two_streams_over_one_weight(captured: tuple[bool, bool]) -> None:
    """Each side runs a thousand launches while the other does; results are those of one that runs by itself."""
    for call in calls():
        expected = call()
        torch.cuda.synchronize()
        sides = [_captured(call) if capture else _eager(call) for capture in captured]
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        results: list[list[torch.Tensor]] = [[], []]
        for _ in range(20):
            for stream, side, found in zip(streams, sides, results, strict=True):
                with torch.cuda.stream(stream):
                    found.append(side())
        torch.cuda.synchronize()
        for found in results:
            assert all(torch.equal(y, expected) for y in found)


def _eager(call: Call) -> Call:
    return lambda: torch.stack([call() for _ in range(50)])[-1]


def _captured(call: Call) -> Call:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = torch.stack([call() for _ in range(50)])

    def replay() -> torch.Tensor:
        graph.replay()
        return y[-1].clone()

    return replay


@pytest.mark.gpu
def test_branches_of_one_capture() -> None:
    for call in calls():
        expected = call()
        torch.cuda.synchronize()
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                there = torch.stack([call() for _ in range(50)])
            here = torch.stack([call() for _ in range(50)])
            torch.cuda.current_stream().wait_stream(side)
        for _ in range(20):
            graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(here, expected.expand_as(here)) and torch.equal(there, expected.expand_as(there))


@pytest.mark.gpu
def test_a_compiled_model_with_cuda_graphs() -> None:
    """torch.compile refuses memory of a graph that outlives it."""
    torch._dynamo.reset()
    weights = [quantize(torch.randn(512, 512, device="cuda"), FORMATS[name]) for name in ("nvfp4", "int4", "fp8")]
    model = nn.Sequential(*(QuantLinear(weight) for weight in weights))
    run = torch.compile(model, mode="reduce-overhead")
    with torch.no_grad():
        for tokens in (1, 5):
            x = torch.randn(tokens, 512, device="cuda").bfloat16()
            found = [run(x).clone() for _ in range(4)]
            expected = model(x)
            for y in found:
                assert float((y.double() - expected.double()).norm() / expected.double().norm()) < 2**-6


@pytest.mark.gpu
def test_a_server_that_slept_counts_from_zero_again() -> None:
    """While vLLM sleeps, its memory of weights is given away, and that of the counters with it."""
    x = torch.zeros(1, device="cuda")
    reserve(x)
    counters = arrival_counters(x, 4)
    counters.fill_(7)  # whatever was in that memory meanwhile
    reserve(x, again=True)
    assert arrival_counters(x, 4) is counters and not counters.any()
