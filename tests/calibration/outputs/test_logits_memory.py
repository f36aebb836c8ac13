"""A vocabulary of 50,000 takes a few slices of logits of memory, and gives the results of all logits at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny_models
import torch
from torch import nn

from quant.calibration.outputs import logits
from quant.calibration.outputs.gradients import output_moments
from quant.calibration.sensitivity import switchable_model
from quant.calibration.sensitivity.divergence import divergence_of
from quant.calibration.sensitivity.scores import Scoring, score_groups
from quant.calibration.sensitivity.switchable_model import CachedRun, SwitchableModel
from quant.calibration.sensitivity.table import parse_candidates
from quant.calibration.session import Session
from quant.calibration.walk.collect import collect_input_amax
from quant.evaluation.evaluate import evaluate
from quant.recipes.plan import groups_of
from quant.recipes.plan_make import make_plan

VOCABULARY, ROWS, TOKENS, POSITIONS = 50_000, 2, 60, 4
WHOLE = 4 * ROWS * (TOKENS - 1) * VOCABULARY  # bytes of all logits in FP32
SLICE = 4 * POSITIONS * VOCABULARY


def _model() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 1, "num_key_value_heads": 1}
    model: nn.Module = tiny_models.llama(**sizes, vocab_size=VOCABULARY, num_hidden_layers=1, gain=3)
    return model


def _rows() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))


def _scores(model: nn.Module, rows: torch.Tensor) -> list[float]:
    groups = groups_of(make_plan(model, "fp8").quantized)
    allowed = dict.fromkeys(groups, parse_candidates("nvfp4,fp8a16"))
    table = score_groups(model, groups, allowed, rows, Scoring("fisher"), Session())
    return [score for group in table.groups for score in group.scores.values()]


def _joint_loss(model: nn.Module, rows: torch.Tensor) -> list[float]:
    groups = groups_of(make_plan(model, "nvfp4a16").quantized)
    candidates = {c.name: c for c in parse_candidates("nvfp4a16")}
    switchable = SwitchableModel(model, groups, candidates, {}, dtype=torch.float32)
    with switchable.ready():
        return [CachedRun(switchable, divergence_of(model, rows), rows).loss(dict.fromkeys(groups, "nvfp4a16"))]


def _gradients(model: nn.Module, rows: torch.Tensor) -> list[float]:
    groups = list(groups_of(make_plan(model, "nvfp4a16").quantized).values())
    outputs = output_moments(model, groups, rows.split(1), Session())
    assert not outputs.missing
    return [float(stats.matrix.double().norm()) for stats in outputs.moments.values()]


def _evaluation(model: nn.Module, rows: torch.Tensor) -> list[float]:
    evaluation = evaluate(model, rows, model)
    assert evaluation.perplexity is not None
    return [evaluation.perplexity]


@pytest.mark.parametrize("measure", [_scores, _joint_loss, _gradients, _evaluation])
def test_slices_bound_the_memory_and_change_nothing(
    measure: Callable[[nn.Module, torch.Tensor], list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rows = _model(), _rows()
    monkeypatch.setattr(switchable_model, "_DISTRIBUTIONS", {"cpu": 0})
    monkeypatch.setitem(logits._SLICE_ELEMENTS, "cpu", POSITIONS * VOCABULARY)
    values: list[float] = []
    peak = _peak_bytes(lambda: values.extend(measure(model, rows)))
    # The head itself in two dtypes, and at most ten tensors of a slice; all logits would take 24 MB each.
    assert peak < 2 * model.lm_head.weight.nbytes + 10 * SLICE < WHOLE  # type: ignore[union-attr, operator]
    monkeypatch.setitem(logits._SLICE_ELEMENTS, "cpu", WHOLE)
    assert measure(model, rows) == pytest.approx(values, rel=1e-5)


def test_ranges_of_inputs_need_logits_of_one_row_at_most() -> None:
    model, rows = _model(), _rows()
    calls: list[int] = []
    model.lm_head.register_forward_hook(lambda module, args, out: calls.append(len(out)))  # type: ignore[union-attr, operator]
    names = ["model.layers.0.mlp.down_proj", "lm_head"]
    amax = collect_input_amax(model, names, rows)
    assert calls == [1]
    inputs: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        model.get_submodule(name).register_forward_pre_hook(
            lambda module, args, name=name: inputs[name].append(float(args[0].abs().max()))
        )
    with torch.no_grad():
        for row in rows.split(1):
            model(row)
    assert {name: float(value) for name, value in amax.items()} == {n: max(v) for n, v in inputs.items()}


def _peak_bytes(run: Callable[[], Any]) -> int:
    """The most bytes that tensors made by `run` take together."""
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        run()
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most
