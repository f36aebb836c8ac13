"""The transform of inputs in four bits is chosen on the model: what each loses, what is taken, and what is told."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import bert_classifier, llama, qwen3_moe

import quant
from quant.base.listener import Listener
from quant.calibration.session import Session
from quant.calibration.walk import choose_transform as choice
from quant.recipes.plan import Plan
from quant.recipes.recipe import get_recipe
from quant.run.request import Request
from quant.run.run import run

ROWS = torch.randint(0, 64, (13, 16), generator=torch.Generator().manual_seed(0))
SOLVERS = ("gptq", "awq:merge+gptq", "rotation:merge+gptq")


class Sentences(Listener):
    is_silent = False

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def message(self, text: str) -> None:
        self.said.append(text)


def kl(original: Any, model: Any, rows: torch.Tensor) -> float:
    """In float64, from whole logits."""
    with torch.no_grad():
        p, q = (each(rows).logits[:, :-1].double().log_softmax(-1) for each in (original, model))
    return float((p.exp() * (p - q)).sum(-1).mean())


def test_losses_are_those_of_the_first_blocks_solved_by_hand() -> None:
    model = llama(num_hidden_layers=3)
    plan = quant.make_plan(model, "nvfp4", effort=2)
    before = copy.deepcopy(model)
    chosen = choice.choose_transform(model, plan, ROWS, Session())
    # The model is whole again, bit for bit, with all of its blocks.
    after = model.state_dict()
    assert after.keys() == before.state_dict().keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.state_dict().items())
    assert vars(model.config) == vars(before.config)
    # Four held-out rows of thirteen; eight others solve a model that has only two blocks.
    order = torch.randperm(13, generator=torch.Generator().manual_seed(0))
    held_out, rows = ROWS[order[:4]], ROWS[order[4:12].sort()[0]]
    short = copy.deepcopy(before)
    short.model.layers = short.model.layers[:2]
    expected = {
        solver: kl(short, quant.quantize(copy.deepcopy(short), "nvfp4", rows, solver=solver).model, held_out)
        for solver in SOLVERS
    }
    record = chosen.provenance["transform"]
    assert record["lost"] == pytest.approx(expected, rel=0.006)  # three digits are kept
    best = min(expected, key=expected.__getitem__)
    assert expected[best] < 0.98 * expected["awq:merge+gptq"]  # a model on which the default is not the best
    assert record["solver"] == chosen.provenance["effort"]["solver"] == best
    assert {layer.solver for layer in chosen.quantized} == {best}


@pytest.mark.parametrize(
    ("none", "scaling", "rotation", "taken"),
    [
        (0.30, 0.20, 0.25, "awq:merge+kfac"),
        (0.20, 0.30, 0.25, "kfac"),  # every transform loses
        (0.199, 0.20, 0.30, "awq:merge+kfac"),  # less than the margin
        (0.20, 0.20, 0.25, "kfac"),  # no module takes a scale up
        (0.30, 0.20, 0.10, "rotation:merge+kfac"),
    ],
)
def test_the_default_gives_way_to_what_loses_less(
    monkeypatch: pytest.MonkeyPatch, none: float, scaling: float, rotation: float, taken: str
) -> None:
    losses = dict(zip(choice.TRIED, (none, scaling, rotation), strict=True))
    monkeypatch.setattr(choice, "_losses", lambda *_: losses)
    plan = quant.make_plan(llama(), "nvfp4", effort=3)
    assert {layer.solver for layer in plan.quantized} == {"awq:merge+kfac"}
    chosen = choice.choose_transform(llama(), plan, ROWS, Session())
    assert {layer.solver for layer in chosen.quantized} == {taken}
    assert chosen.provenance["transform"]["lost"] == {
        "gptq": none, "awq:merge+gptq": scaling, "rotation:merge+gptq": rotation
    }  # fmt: skip


def request(model: Any, **options: Any) -> tuple[Plan, list[str]]:
    listener = Sentences()
    outcome = run(Request(model, **{"recipe": "nvfp4", "data": ROWS, "effort": 2, **options}), listener)
    assert outcome.quantized is not None
    return outcome.quantized.plan, listener.said


def test_a_run_tells_its_choice_and_counts_its_time() -> None:
    plan, said = request(llama(num_hidden_layers=1))
    record = plan.provenance["transform"]
    assert any(f"takes {record['solver']}: gptq lost {record['lost']['gptq']:g}, awq:merge" in line for line in said)
    assert any("to choose a transform, " in line for line in said)
    assert {layer.solver for layer in plan.quantized} == {record["solver"]}


def test_trials_are_reported_from_the_start() -> None:
    reports = list[tuple[str, int, int]]()
    model = llama(num_hidden_layers=1)
    plan = quant.make_plan(model, "nvfp4", effort=2)
    choice.choose_transform(model, plan, ROWS, Session(progress=lambda *report: reports.append(report)))
    assert reports == [("choose", done, 3) for done in range(4)]


def test_the_time_of_a_run_names_its_choice(tmp_path: Path) -> None:
    llama(num_hidden_layers=1).save_pretrained(tmp_path / "model")
    outcome = run(Request(tmp_path / "model", recipe="nvfp4", data=ROWS, effort=2, out=tmp_path / "out"), Sentences())
    assert outcome.report is not None
    assert list(outcome.report.seconds) == ["load", "transform", "solve", "write"]


def test_what_is_named_is_taken_as_it_is() -> None:
    rule = get_recipe("nvfp4").with_rules(quant.Rule("*.down_proj", solver="awq:merge+gptq"))
    for options in ({"solver": "awq:merge+gptq", "effort": None}, {"recipe": rule}, {"recipe": "nvfp4a16"}):
        plan, said = request(llama(), **options)
        assert "transform" not in plan.provenance
        assert not any("lost" in line for line in said)
    plan, _ = request(llama(), recipe=quant.make_plan(llama(), "nvfp4", effort=2), effort=None)
    assert {layer.solver for layer in plan.quantized} == {"awq:merge+gptq"}


@pytest.mark.parametrize(
    ("make", "rows", "why"),
    [
        (llama, ROWS[:11], "11 calibration rows, and it takes 12 or more"),
        (bert_classifier, ROWS, "the model has no blocks with a language model's head behind them"),
    ],
)
def test_without_a_comparison_the_default_stays_and_says_why(make: Any, rows: torch.Tensor, why: str) -> None:
    plan, said = request(make(), data=rows)
    assert plan.provenance["transform"] == {"solver": "awq:merge+gptq", "why": why}
    assert f"awq:merge+gptq, without a comparison of transforms: {why}" in said


def test_blocks_that_do_not_run_alone_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama(num_hidden_layers=3)
    last = model.model.layers[2]
    forward = type(model).forward

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        if last not in self.model.layers:
            raise IndexError("layer 4")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", counting)
    plan, _ = request(model)
    assert plan.provenance["transform"]["why"] == "its first blocks do not run alone (layer 4)"
    assert last.self_attn.q_proj.weight_format.name == "nvfp4"


def test_experts_take_no_transform() -> None:
    plan = quant.make_plan(qwen3_moe(), "nvfp4", effort=2)
    assert choice.choose_transform(qwen3_moe(), plan, ROWS, Session()) is plan


def test_a_resumed_run_takes_the_losses_that_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[str, Any] = {}

    class Kept(type(Session().store)):  # type: ignore[misc]
        def get(self, step: str) -> Any:
            return kept.get(step)

        def put(self, step: str, tensors: Any, record: Any, then: Any = None, *, alone: bool = False) -> None:
            kept[step] = type("Step", (), {"record": record})

    small = llama(num_hidden_layers=1)
    session, plan = Session(store=Kept()), quant.make_plan(small, "nvfp4", effort=2)
    first = choice.choose_transform(small, plan, ROWS, session)
    monkeypatch.setattr(choice, "_losses", None)
    assert choice.choose_transform(small, plan, ROWS, session) == first
