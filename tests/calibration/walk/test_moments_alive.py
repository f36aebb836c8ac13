"""However many experts a block has, a few second moments are in memory at a time, and the bytes are the same."""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from torch import nn

from quant.calibration.session import Session, Store
from quant.calibration.solvers.gptq import Gptq
from quant.calibration.statistics import LayerStats, MomentSum
from quant.calibration.walk import shared_moments
from quant.calibration.walk.block import Settings, Solved
from quant.calibration.walk.block_memory import IN_MEMORY, Scratch, block_bytes
from quant.calibration.walk.walk import solve_sequentially
from quant.formats.format import FORMATS
from quant.recipes.layers import LayerKind, find_layers
from quant.recipes.plan import LayerPlan, Plan

NVFP4 = FORMATS["nvfp4"]
EXPERTS, HIDDEN = 8, 48
ROWS = torch.randint(0, 50, (4, 24), generator=torch.Generator().manual_seed(1))


class _Mixture(nn.Module):
    """Experts that are linear layers; no token is sent to the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS - 1, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, HIDDEN, bias=False), nn.SiLU(), nn.Linear(HIDDEN, HIDDEN, bias=False))
            for _ in range(EXPERTS)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        x = hidden.flatten(0, 1)
        chosen = self.gate(x).topk(2).indices
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            token, _ = torch.where(chosen == index)
            if len(token):
                out = out.index_add(0, token, expert(x[token]))
        return hidden + out.view_as(hidden)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, HIDDEN)
        self.layers = nn.ModuleList(_Mixture() for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def _of_linears() -> nn.Module:
    torch.manual_seed(0)
    return _Model()


def _fused() -> nn.Module:
    sizes = {"hidden_size": HIDDEN, "intermediate_size": HIDDEN, "num_local_experts": EXPERTS, "vocab_size": 50}
    model: nn.Module = tiny_models.mixtral(num_hidden_layers=1, head_dim=16, gain=3, **sizes)
    return model


def _plan(model: nn.Module) -> Plan:
    return Plan(
        tuple(
            LayerPlan(layer.name, layer.kind, layer.shape, NVFP4 if "experts" in layer.name else None, None, "gptq")
            for layer in find_layers(model)
        )
    )


def _solve(model: nn.Module, session: Session | None = None) -> dict[str, Solved]:
    solved: dict[str, Solved] = {}
    solve_sequentially(
        model, _plan(model), ROWS, apply=lambda layer, s, _: solved.__setitem__(layer.name, s), session=session,
        settings=Settings(batch=2),
    )  # fmt: skip
    return solved


def _equal(one: dict[str, Solved], other: dict[str, Solved]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[n].weight.codes, other[n].weight.codes)
        and torch.equal(one[n].weight.scale.view(torch.uint8), other[n].weight.scale.view(torch.uint8))
        and (one[n].tokens, one[n].notes) == (other[n].tokens, other[n].notes)
        for n in one
    )


@pytest.mark.parametrize("make", [_of_linears, _fused])
def test_few_moments_are_alive(make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    sums, means = weakref.WeakSet[MomentSum](), weakref.WeakSet[LayerStats]()
    alive = []
    begin, mean, solve = MomentSum.__init__, MomentSum.stats, Gptq.__call__

    def count() -> None:
        alive.append(sum(each.second is not None for each in sums) + len(means))

    def begun(self: MomentSum, *given: Any) -> None:
        begin(self, *given)
        sums.add(self)
        count()

    def taken(self: MomentSum) -> LayerStats | None:
        found = mean(self)
        if found is not None:
            means.add(found)
        return found

    def counted(self: Gptq, *given: Any, **more: Any) -> Any:
        count()
        return solve(self, *given, **more)

    monkeypatch.setattr(MomentSum, "__init__", begun)
    monkeypatch.setattr(MomentSum, "stats", taken)
    monkeypatch.setattr(Gptq, "__call__", counted)
    together = _solve(make())
    assert max(alive) >= EXPERTS - 1
    alive.clear()
    monkeypatch.setattr(shared_moments, "_BUDGET", 2 * 4 * HIDDEN**2)
    assert _equal(_solve(make()), together)
    assert max(alive) == 3, alive  # two, and the mean that one is about to become


def test_codes_in_a_file_are_those_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_memory = _solve(_fused())
    store = Store()
    store.directory = tmp_path
    session = Session(memory=20_000, store=store)
    scratch = Scratch.of(session)
    in_file = _solve(_fused(), session)
    assert _equal(in_file, in_memory)
    weights = [solved.weight for solved in in_file.values()]
    assert [scratch.takes(weight.codes.nbytes + weight.scale.nbytes) for weight in weights] == [True] * len(weights)
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert sum(str(tmp_path) in line and line.endswith("(deleted)") for line in maps) >= 2 * len(weights)
    assert not any(tmp_path.iterdir())

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"no room for 0\.0 GB of codes \(No space left on device\).*make room"):
        _solve(_fused(), session)


def test_the_estimate_is_flat_in_the_number_of_experts(tmp_path: Path) -> None:
    def estimate(experts: int, scratch: Scratch) -> int:
        shapes = {"gate_up_proj": (4096, 7168), "down_proj": (7168, 2048)}
        layers = [
            LayerPlan(f"block.experts.{name}", LayerKind.EXPERTS, (experts, *shape), NVFP4, None, "gptq")
            for name, shape in shapes.items()
        ]
        layers.append(LayerPlan("block.o_proj", LayerKind.LINEAR, (7168, 16384), NVFP4, None, "gptq"))
        block = nn.ParameterList([nn.Parameter(torch.empty(7168, 16384, device="meta"))])
        return block_bytes(block, layers, 1024, torch.float32, scratch)

    scratch = Scratch(tmp_path, memory=16 * 10**9)
    assert estimate(8, scratch) == estimate(256, scratch) < 16e9
    codes = 256 * 3 * 2048 * 7168 * (4.5 / 8)
    with_all = replace(LayerPlan("e", LayerKind.EXPERTS, (256, 6144, 7168), NVFP4, None, "rtn")).nbytes
    assert with_all == pytest.approx(codes, rel=0.001)
    assert estimate(2560, IN_MEMORY) > 10 * codes
