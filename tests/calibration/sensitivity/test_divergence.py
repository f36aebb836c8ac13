"""Classifiers are compared by their classes, and solvers are tried on whole inputs of theirs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import tiny_models
import torch
from torch import nn

import quant
from quant.calibration.sensitivity.candidates import groups_of, parse_candidates
from quant.calibration.sensitivity.divergence import Classes, Embeddings, NextToken, divergence_of
from quant.calibration.sensitivity.scores import score_groups
from quant.calibration.texts.rows import few_of
from quant.planning import make_plan


def vectors() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = (nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 10))
    return nn.Sequential(*layers).eval(), torch.randn(24, 64)


def images() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    front = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten())
    return nn.Sequential(*front, nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)).eval(), torch.randn(24, 3, 12, 12)


def texts() -> tuple[nn.Module, torch.Tensor]:
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50, "num_labels": 5}
    model = tiny_models.bert_classifier(**sizes, gain=4)
    return model, torch.randint(0, 50, (24, 12))


def logits(model: Any, rows: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        result = model(rows)
    return (result.logits if hasattr(result, "logits") else result).double()


def kl(base: torch.Tensor, found: torch.Tensor) -> float:
    """Mean over rows, straight from the definition."""
    p, q = base.softmax(-1), found.softmax(-1)
    return float((p * (p / q).log()).sum(-1).mean())


def scores(model: nn.Module, rows: torch.Tensor, method: str) -> dict[str, float]:
    groups = groups_of(make_plan(model, "fp8_channel", run=lambda m: m(rows[:1])).quantized)
    candidates = parse_candidates("fp8_channel")
    table = score_groups(model, groups, dict.fromkeys(groups, candidates), rows, method=method)
    assert "class" in table.unit
    return {group.name: group.scores["fp8_channel"] for group in table.groups}


@pytest.mark.parametrize("make", [vectors, images, texts])
def test_kl_of_the_classes_is_that_of_quantizing_for_real(
    make: Callable[[], tuple[nn.Module, torch.Tensor]],
) -> None:
    model, rows = make()
    base = logits(model, rows)
    for name, score in scores(model, rows, "kl").items():
        only = copy.deepcopy(model)
        quant.quantize(only, "fp8_channel", include=_members(name))
        # Some are as small as 1e-6, where logits in FP32 have a few digits left.
        assert score == pytest.approx(kl(base, logits(only, rows)), rel=1e-2, abs=1e-8)


def _members(group: str) -> list[str]:
    """`a.(k|q)` -> `a.k`, `a.q`."""
    stem, bracket, tails = group.partition("(")
    return [f"{stem}{tail}" for tail in tails.rstrip(")").split("|")] if bracket else [group]


@pytest.mark.parametrize("make", [vectors, images, texts])
def test_fisher_estimates_it(make: Callable[[], tuple[nn.Module, torch.Tensor]]) -> None:
    model, rows = make()
    guessed, found = scores(model, rows, "fisher"), scores(model, rows, "kl")
    assert 0.6 < sum(guessed.values()) / sum(found.values()) < 1.6
    assert min(found.values()) > 0


def test_formats_for_a_budget_spend_bits_where_the_classes_need_them() -> None:
    """The allocation's measured loss is the KL of the classes of what it made."""
    model, rows = vectors()
    base = logits(model, rows)
    found = quant.allocate(model, rows, quant.Goal(max_kl=2e-4), formats="nvfp4a16,fp8_channel")
    quant.quantize(model, found.plan, rows)
    assert kl(base, logits(model, rows)) < 3e-4
    assert found.record.unit == Classes.unit


def test_which_divergence() -> None:
    model, rows = texts()
    assert isinstance(divergence_of(model, rows), Classes)
    assert isinstance(divergence_of(model.bert, rows), Embeddings)  # type: ignore[arg-type]
    assert type(divergence_of(tiny_models.llama(), rows)) is NextToken


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((5, 40), torch.int64, list(range(16))),  # token ids: the first of the first row
        ((50, 3), torch.float32, list(range(48))),  # vectors: whole ones
        ((5, 2, 2, 3), torch.float32, list(range(12))),  # images: the first
    ],
)
def test_few_are_tokens_or_whole_inputs(shape: tuple[int, ...], dtype: torch.dtype, expected: list[int]) -> None:
    rows = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
    assert few_of(rows).flatten().tolist() == expected


@pytest.mark.parametrize("solver", ["awq+gptq", "smoothquant+rtn", "local_hessian"])
@pytest.mark.parametrize("make", [vectors, images])
def test_solvers_work_on_inputs_of_any_kind(make: Callable[[], tuple[nn.Module, torch.Tensor]], solver: str) -> None:
    """No worse than rounding to nearest, on the model's own output for its inputs."""
    model, rows = make()
    base = logits(model, rows)
    errors = {}
    for name in ("rtn", solver):
        copied = copy.deepcopy(model)
        quant.quantize(copied, "nvfp4a16", rows, solver=name)
        errors[name] = float((logits(copied, rows) - base).norm())
    assert errors[solver] < 1.1 * errors["rtn"]
