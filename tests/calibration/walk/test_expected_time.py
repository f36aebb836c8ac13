"""The time that is told before a run is compared with the time that the run takes."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import tiny_models
import torch

import quant
from quant.calibration.solvers.registry import get_pipeline
from quant.calibration.walk import expected_time
from quant.formats.format import FORMATS


@pytest.fixture
def own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processor time of one thread, which other processes do not lengthen."""
    monkeypatch.setattr(expected_time, "time", SimpleNamespace(perf_counter=time.thread_time))


@pytest.mark.usefixtures("own_time")
def test_a_solver_is_timed_once_for_each_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected_time, "_MEASURED", 0.01)
    speed, pipeline = expected_time.Speed(torch.device("cpu")), get_pipeline("gptq")
    state = torch.get_rng_state()
    column = speed.of_rounding(pipeline.rounding, FORMATS["nvfp4"], 64)
    assert 0 < column < speed.of_rounding(pipeline.rounding, FORMATS["nvfp4"], 1024)
    assert column == speed.of_rounding(pipeline.rounding, FORMATS["nvfp4"], 64)
    # From some rows on, time is in proportion to them.
    most = expected_time._ROWS[False]
    monkeypatch.setitem(speed._roundings, (repr(pipeline.rounding), "nvfp4", most, False), 1.0)
    assert speed.of_rounding(pipeline.rounding, FORMATS["nvfp4"], 3 * most) == 3 / expected_time._INPUTS
    assert torch.equal(torch.get_rng_state(), state)  # the run draws the same numbers with and without


@pytest.mark.slow
@pytest.mark.usefixtures("own_time")
@pytest.mark.parametrize("solver", ["gptq", "kfac", "awq+gptq"])
def test_the_time_that_is_told_is_the_time_that_is_taken(solver: str) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = tiny_models.llama(hidden_size=256, intermediate_size=1024, num_attention_heads=4)
        plan = quant.make_plan(model, "nvfp4a16", solver=solver)
        ids = torch.randint(0, model.config.vocab_size, (8, 128), generator=torch.Generator().manual_seed(0))
        told = expected_time.expected_time(model, plan, rows=8, seqlen=128).solving
        started = time.thread_time()
        quant.quantize(model, plan, ids)
        taken = time.thread_time() - started
    finally:
        torch.set_num_threads(threads)
    assert taken / 2 < told < 2 * taken
