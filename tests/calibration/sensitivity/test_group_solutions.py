"""Groups that are solved alone are compared with quantizing one group through the public functions."""

from __future__ import annotations

import copy

import pytest
import tiny_models
import torch
from torch import nn

from quant.calibration.sensitivity import group_solutions
from quant.calibration.sensitivity.group_solutions import GroupSolution, Key, digest_of, solve_each_group
from quant.calibration.sensitivity.scores import Scoring, score_groups
from quant.calibration.sensitivity.switchable_model import SwitchableModel
from quant.calibration.sensitivity.table import parse_candidates
from quant.calibration.session import Session
from quant.evaluation.evaluate import evaluate
from quant.recipes.plan import LayerPlan, groups_of
from quant.recipes.plan_make import make_plan
from quant.run.api import quantize

VOCABULARY, SEQLEN, ROWS = 61, 24, 8


def _llama(dtype: torch.dtype = torch.float32) -> nn.Module:
    model: nn.Module = tiny_models.llama(vocab_size=VOCABULARY, gain=5)
    return model.to(dtype)


def _rows() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (ROWS, SEQLEN), generator=torch.Generator().manual_seed(3))


def _groups(model: nn.Module) -> dict[str, list[LayerPlan]]:
    return groups_of(make_plan(model, "fp8").quantized)


def _solutions(model: nn.Module, formats: str, solver: str) -> dict[Key, GroupSolution]:
    groups = _groups(model)
    return solve_each_group(
        model, groups, dict.fromkeys(groups, parse_candidates(formats)), _rows(), solver, torch.float32, Session()
    )


def _loss_for_real(model: nn.Module, members: list[LayerPlan], preset: str, solver: str) -> float:
    """KL of a copy in which `quantize` solved these layers and no other."""
    quantized = copy.deepcopy(model)
    plan = make_plan(model, "fp8", solver=solver)
    chosen, kept = parse_candidates(preset)
    only = {layer.name for layer in members}
    layers = [(chosen if m.name in only else kept).applied(m) for m in plan.quantized]
    quantize(quantized, plan.replace_layers(layers), _rows())
    return evaluate(quantized, _rows(), model).kl


@pytest.mark.parametrize(
    ("solver", "formats"),
    [
        ("gptq", "nvfp4,fp8a16"),
        pytest.param("awq+gptq", "nvfp4,mxfp4a16", marks=pytest.mark.slow),
        pytest.param("awq", "nvfp4a16,mxfp8", marks=pytest.mark.slow),
        ("local_hessian", "nvfp4"),
        ("awq+gptq", "nvfp4+lowrank:8"),
        pytest.param("awq+gptq", "nvfp4+lowrank:8,nvfp4a16+lowrank:8", marks=pytest.mark.slow),
        pytest.param("rtn", "nvfp4+lowrank:8,mxfp4+lowrank:4", marks=pytest.mark.slow),
    ],
)
def test_a_group_alone_loses_what_it_loses_for_real(solver: str, formats: str) -> None:
    model = _llama()
    groups = _groups(model)
    candidates = parse_candidates(formats)
    table = score_groups(
        model,
        groups,
        dict.fromkeys(groups, candidates),
        _rows(),
        Scoring("kl", solutions=_solutions(model, formats, solver)),
        Session(),
    )
    plain = score_groups(model, groups, dict.fromkeys(groups, candidates), _rows(), Scoring("kl", "mse"), Session())
    better = 0
    for group in (g for g in groups if "o_proj" not in g):  # whose scale is tied to rows of v_proj, for real
        for name in (c.name for c in candidates[:-1]):
            found = table.by_name[group].scores[name]
            assert found == pytest.approx(_loss_for_real(model, groups[group], name, solver), rel=0.03)
            better += found < plain.by_name[group].scores[name]
    assert better >= 4  # of 6 or 12: the solver's own weights, and no others


@pytest.mark.usefixtures("products")
def test_parts_give_what_one_pass_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _llama()
    seen: list[tuple[int, int]] = []
    whole = _solutions(model, "nvfp4,fp8a16", "gptq")
    monkeypatch.setitem(group_solutions._MOMENTS, "cpu", 3 * 4 * 64**2)
    groups = _groups(model)
    parts = solve_each_group(
        model, groups, dict.fromkeys(groups, parse_candidates("nvfp4,fp8a16")), _rows(), "gptq", torch.float32,
        Session(progress=lambda stage, done, all_: seen.append((done, all_))),
    )  # fmt: skip
    assert digest_of(parts) == digest_of(whole) and len(whole) == 2 * len(groups)
    for key, solution in whole.items():
        for name, weight in solution.weights.items():
            assert torch.equal(weight.codes, parts[key].weights[name].codes)
    assert seen == [(i + 1, len(groups)) for i in range(len(groups))]
    other = _solutions(model, "nvfp4,fp8a16", "local_hessian")
    assert digest_of(other) != digest_of(whole)


@pytest.mark.usefixtures("products")
def test_products_are_those_of_the_scaled_layer() -> None:
    """Q(x / s) s times Q(W s) / s, as a switchable model has it, against Q(x / s) times Q(W s)."""
    model = _llama()
    groups = _groups(model)
    solutions = _solutions(model, "nvfp4", "awq+gptq")
    (candidate, _) = parse_candidates("nvfp4")
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)) * torch.logspace(-2, 1, 64)
    with SwitchableModel(model, groups, {"nvfp4": candidate}, {}, "mse", torch.float32, solutions) as switchable:
        for group, members in groups.items():
            solution = solutions[group, "nvfp4"]
            assert solution.divisor is not None and solution.input_scale is not None
            if members[0].shape[-1] != 64:
                continue
            switchable.formats.set({group: "nvfp4"})
            divided = api_round(x / solution.divisor, solution.input_scale)
            for m in members:
                with torch.no_grad():
                    found = switchable.layers[m.name].compute(x, None)
                expected = divided.double() @ solution.weights[m.name].dequantize().double().T
                torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


def api_round(x: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """NVFP4 by the oracle: codes and scales, and back."""
    from quant.formats.format import get_format
    from quant.formats.tensor import quantize

    return quantize(x, get_format("nvfp4"), global_scale=global_scale).dequantize()


def test_what_cannot_be_solved_alone_is_left_out() -> None:
    """Experts, and formats that the solver's rounding does not know, are the stand-in's; a key says so."""
    model = tiny_models.qwen3_moe(vocab_size=VOCABULARY, num_hidden_layers=1)
    solutions = _solutions(model, "nvfp4,fp8", "local_hessian")
    assert {name for _, name in solutions} == {"nvfp4"}
    assert not any("experts" in group for group, _ in solutions) and any("self_attn" in group for group, _ in solutions)


def test_a_sample_keeps_no_more_than_itself() -> None:
    """As a view it kept all inputs of all layers: 6 GB of SmolLM2-135M's."""
    inputs = group_solutions._Inputs(keep=True, every=16)
    inputs.add("group", torch.ones(64, 8), 1)
    (sample,) = inputs.sample["group"]
    assert sample.shape == (4, 8) and sample.untyped_storage().nbytes() == sample.nbytes
