"""A CUDA graph of a weight's rounding gives the bits of its launches one by one."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quant.calibration.solvers import replay
from quant.calibration.solvers.gptq import Gptq, Rounding, by_input, fixed_scales, superblocks
from quant.calibration.solvers.solve_group import solve_group, solve_matrices
from quant.calibration.statistics import LayerStats
from quant.formats.format import FORMATS, WEIGHT_FORMATS


class Doubling:
    """A work on a CPU, for the order of what `Replays` does."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.key = x, x.shape

    def operands(self) -> list[torch.Tensor]:
        return [self.x]

    def run(self) -> None:
        self.result = 2 * self.x


def test_without_a_walk_a_work_runs_by_itself() -> None:
    work = Doubling(torch.ones(3))
    assert replay.run(work) is work and work.result.tolist() == [2, 2, 2]


class NeverWaiting(TorchDispatchMode):
    """Refuses what a GPU would be waited for, or copied to: a graph cannot record it."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert operator is not torch.ops.aten._local_scalar_dense.default
        assert operator is not torch.ops.aten.lift_fresh.default, "a tensor from numbers of Python"
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["int4_g32", "mxfp4", "q4_0", "q5_1", "q4_k", "q6_k"])
def test_a_copied_rounding_gives_the_result_of_what_is_copied_into_it(name: str) -> None:
    format, random = WEIGHT_FORMATS[name], torch.Generator().manual_seed(0)
    roundings = []
    for _ in range(2):
        x = torch.randn(600, 512, generator=random) * (2 * torch.rand(512, generator=random)).exp()
        weight = torch.randn(24, 512, generator=random)
        factor = Gptq().factor(LayerStats(600, x.T @ x / 600), format, "layer")
        fixed, target = fixed_scales(weight, format, None, factor), by_input(weight, factor)
        step = None if fixed is None else fixed.step
        roundings.append(Rounding(target, factor, format, None, 4, step, supers=superblocks(weight, format, factor)))
    first, second = roundings
    assert first.key == second.key
    first.operands()
    kept = first.copy()
    for own, new in zip(kept.operands(), second.operands(), strict=True):
        own.copy_(new)
    with NeverWaiting():
        kept.run()
    second.run()
    assert torch.equal(kept.values, second.values)
    if second.scales is not None:
        assert kept.scales is not None and torch.equal(kept.scales, second.scales)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["nvfp4", "fp8_channel", "int4", "mxfp4", "q4_0", "q4_k", "q6_k"])
def test_graphs_give_the_bits_of_launches(name: str) -> None:
    random = torch.Generator("cuda").manual_seed(0)
    problems = []
    for rows, inputs in [(96, 256)] * 4 + [(4096, 512)] * 3:
        x = torch.randn(600, inputs, generator=random, device="cuda") * torch.logspace(-1, 1, inputs, device="cuda")
        drift = 0.01 * torch.randn(inputs, inputs, generator=random, device="cuda")
        weight = torch.randn(rows, inputs, generator=random, device="cuda")
        problems.append((weight, LayerStats(600, x.T @ x / 600, drift)))

    def solved() -> list[torch.Tensor]:
        each = [solve_group({"a": w}, {"a": s}, WEIGHT_FORMATS[name], Gptq())["a"] for w, s in problems]
        if name == "nvfp4":
            for _ in range(3):
                few = [problems[index] for index in (0, 1, 2)]
                weights, stats = zip(*few, strict=True)
                each += solve_matrices(weights, stats, FORMATS[name], Gptq(), torch.bfloat16, "experts")
        return [tensor for weight in each for tensor in (weight.codes.view(torch.uint8), weight.scale.float())]

    by_launches = solved()
    for graphs in (replay.replaying(), nullcontext()):
        with graphs:
            again = solved()
            kept = replay._replays.get()
            assert kept is None or len(kept.graphs) == (3 if name == "nvfp4" else 2)
        assert all(map(torch.equal, again, by_launches))


@pytest.mark.gpu
def test_graphs_keep_within_their_share_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_SHARE", torch.cuda.get_device_properties(0).total_memory)
    weight, stats = torch.randn(96, 256, device="cuda"), LayerStats(600, torch.eye(256, device="cuda"))
    with replay.replaying():
        for _ in range(3):
            solve_group({"a": weight}, {"a": stats}, FORMATS["nvfp4"], Gptq())
        kept = replay._replays.get()
        assert kept is not None and not kept.graphs and len(kept.seen) == 1
