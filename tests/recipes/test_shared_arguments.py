"""Later blocks' calls are derived from the first block's where they hold its own arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quant.recipes.blocks import block_names, calls_of_chain, capture, equal_but_hidden, find_chains, without_hidden


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.runs = 0

    def forward(self, hidden_states: Tensor, temb: Tensor, index: int = 0, mask: Tensor | None = None) -> Tensor:
        self.runs += 1
        return hidden_states + self.linear(hidden_states) * temb


class Denoiser(nn.Module):
    """Three blocks that read an embedding of the time; `own` says what the last of them gets besides."""

    def __init__(self, own: str) -> None:
        super().__init__()
        self.blocks, self.own = nn.ModuleList(Block() for _ in range(3)), own

    def forward(self, x: Tensor, time: float) -> Tensor:
        temb = torch.full((1, 1, 8), time)
        last: dict[str, Any] = {"": {}, "index": {"index": 1}, "mask": {"mask": temb + 1}}[self.own]
        for block in self.blocks[:2]:
            x = block(x, temb=temb)
        return self.blocks[2](x, temb=temb, **last)


def _runs(own: str) -> int:
    torch.manual_seed(0)
    model = Denoiser(own)
    batches = [(torch.randn(1, 4, 8), time) for time in (1.0, 0.5, 0.25)]
    runs = [lambda x=x, time=time: model(x, time) for x, time in batches]
    chain = find_chains(model, block_names(model), runs[0])[0]
    model.blocks[1].runs = 0
    found = calls_of_chain(model, chain, runs)
    passes = model.blocks[1].runs
    for calls, run in zip(found, runs, strict=True):
        whole = capture(model, chain, run)
        assert list(calls) == list(whole) and torch.equal(calls[chain[0]].hidden, whole[chain[0]].hidden)
        for name, call in without_hidden(whole).items():
            assert equal_but_hidden(calls[name].with_hidden(torch.empty(0)), call)
    return passes


def test_blocks_that_share_the_time_run_once() -> None:
    assert _runs("") == 1


def test_a_block_with_an_argument_of_its_own_runs_for_each_batch() -> None:
    assert _runs("index") == 3
    assert _runs("mask") == 3
