"""The time that is told before a run is compared with the time that the run takes."""

from __future__ import annotations

import time

import pytest
import tiny_models
import torch

import quant
from quant.calibration.walk.expected_time import expected_time


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["gptq", "kfac", "awq+gptq"])
def test_the_time_that_is_told_is_of_the_size_of_the_time_that_is_taken(solver: str) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        sizes = {"hidden_size": 256, "intermediate_size": 1024, "max_position_embeddings": 128}
        model = tiny_models.llama(**sizes, num_attention_heads=4)
        plan = quant.make_plan(model, "nvfp4a16", solver=solver)
        ids = torch.randint(0, model.config.vocab_size, (8, 128), generator=torch.Generator().manual_seed(0))
        told = expected_time(model, plan, rows=8, seqlen=128).solving
        started = time.thread_time()  # of this thread, which other processes do not lengthen
        quant.quantize(model, plan, ids)
        taken = time.thread_time() - started
    finally:
        torch.set_num_threads(threads)
    assert taken / 2 < told < 2 * taken, (told, taken)
