"""A training script calls the steps one by one: plan, calibrate, apply, on any module."""

import copy
import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import tiny_models
import torch
from samples import BASE
from torch import nn

from quant.base.errors import UserError
from quant.calibration.session import Session
from quant.calibration.texts.mixture import mixture_rows
from quant.calibration.walk.collect import calibrate
from quant.calibration.walk.solve import apply_plan, solve_state_dict
from quant.formats.format import FORMATS
from quant.formats.tensor import fake_quantize
from quant.formats.tensor import quantize as quantize_tensor
from quant.kernels.linear.experts import QuantExperts
from quant.kernels.linear.quant_linear import QuantLinear
from quant.models.open_model import open_model
from quant.recipes.layers import find_layers
from quant.recipes.plan_check import check_plan_fits, fusion_warnings
from quant.recipes.plan_make import make_plan
from quant.recipes.recipe import get_recipe
from quant.run.api import quantize
from quant.training.qat import prepare_qat

transformers = pytest.importorskip("transformers")

IDS = torch.randint(0, 256, (3, 12), generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Two linears that read one input, one with a bias, and one that reads their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(64, 32), nn.Linear(64, 32, bias=False)
        self.norm, self.out = nn.LayerNorm(32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.left(x) + self.right(x)))


@pytest.fixture(scope="module")
def base() -> nn.Module:
    return open_model(BASE).model


def example(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(2, 64))


@pytest.mark.parametrize("preset", ["nvfp4a16", "mxfp4a16", "mxfp8", "fp8_channel", "int8"])
def test_a_plain_module_computes_what_its_rounded_parts_compute(preset: str) -> None:
    net, x = Net(), torch.randn(5, 64)
    reference = copy.deepcopy(net)
    done = quantize(net, preset, run=example)
    assert [layer.name for layer in done.plan.quantized] == ["left", "right", "out"]
    activation = done.plan.quantized[0].activation
    for name in ("left", "right", "out"):
        module = net.get_submodule(name)
        assert isinstance(module, QuantLinear)
        reference.get_submodule(name).weight.data.copy_(module.dequantize())
        if activation is not None:
            hook = lambda _, args, form=activation: (fake_quantize(args[0], form),)  # noqa: E731
            reference.get_submodule(name).register_forward_pre_hook(hook)
    with torch.no_grad():
        torch.testing.assert_close(net(x), reference(x), rtol=1e-5, atol=1e-5)
    assert net.left.bias is not None and net.right.bias is None


def test_results_measure_the_error_against_the_original() -> None:
    net = Net()
    weight = net.out.weight.detach().double().clone()
    done = quantize(net, "nvfp4a16", run=example)
    error = net.out.dequantize(torch.float64) - weight
    result = next(r for r in done.layers if r.name == "out")
    expected = 10 * float(torch.log10(weight.square().sum() / error.square().sum()))
    assert result.snr_db == pytest.approx(expected, abs=1e-3)
    assert [r.name for r in done.layers] == [layer.name for layer in done.plan.layers]


def test_a_fusion_group_shares_its_global_scales(base: nn.Module) -> None:
    model = copy.deepcopy(base)
    done = quantize(model, "nvfp4", IDS)
    for members in done.plan.groups().values():
        modules = [model.get_submodule(m.name) for m in members]
        weights = [base.get_submodule(m.name).weight.detach().float().abs().max() for m in members]
        assert len({float(m.global_scale) for m in modules}) == len({float(m.input_scale) for m in modules}) == 1
        assert float(modules[0].global_scale) == pytest.approx(float(max(weights)) / 2688, rel=3e-7)


def test_static_scales_come_from_the_original_model(base: nn.Module) -> None:
    plan = make_plan(base, "nvfp4")
    scales = calibrate(base, plan, IDS)
    assert set(scales) == {layer.name for layer in plan.quantized}
    caught = []
    handle = base.model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    with torch.no_grad():
        for row in IDS:
            base(row[None])
    handle.remove()
    amax = torch.cat(caught).abs().max().float()
    found = float(scales["model.layers.1.mlp.down_proj"])
    assert found == pytest.approx(float(amax) / 2688, rel=3e-7)
    # The checkpoint stores the reciprocal, and this scale survives that.
    reciprocal = torch.tensor(1 / found, dtype=torch.float64).float()
    assert float((1 / reciprocal.double()).float()) == found


@pytest.mark.parametrize("solver", ["rtn", "gptq"])
@pytest.mark.parametrize("format", ["nvfp4", "fp8"])
def test_inputs_that_were_all_zero_are_warned_of(format: str, solver: str) -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
    nn.init.constant_(net[0].bias, -100.0)
    with pytest.warns(UserWarning, match=r"^2: its input was zero in all calibration data.*such as fp8_token"):
        quantize(net, format, torch.randn(8, 64), solver=solver)
    assert torch.isfinite(net(torch.full((1, 64), 1e3))).all()


def test_a_static_scale_without_data_is_refused_before_anything_changes() -> None:
    net = Net()
    with pytest.raises(UserError, match="left: nvfp4 inputs have a static scale; pass calibration data: --calib"):
        quantize(net, "nvfp4", run=example)
    assert not any(isinstance(m, QuantLinear) for m in net.modules())


def test_a_language_model_without_data_calibrates_on_what_it_writes(base: nn.Module) -> None:
    stages: dict[str, int] = {}
    alone, given = copy.deepcopy(base), copy.deepcopy(base)
    done = quantize(alone, "nvfp4", progress=lambda stage, done, total: stages.update({stage: total}))
    # This model has 128 positions.
    rows, record = mixture_rows(base, None, Session(), samples=32, seqlen=128)
    quantize(given, "nvfp4", rows)
    assert stages["generate"] >= 32 * 127 and done.plan.provenance["calibration"] == [{"source": "mix", **record}]
    for layer in done.plan.quantized:
        ours, theirs = (m.get_submodule(layer.name) for m in (alone, given))
        assert torch.equal(ours.input_scale, theirs.input_scale)


def test_an_edited_plan_is_followed_layer_by_layer() -> None:
    net = Net()
    plan = make_plan(net, "nvfp4a16", run=example)
    edited = plan.replace_layers([replace(plan.by_name["out"], weight=FORMATS["mxfp8"], solver="ocp")])
    weight = net.out.weight.detach().clone()
    done = quantize(net, edited)
    assert done.plan == edited
    assert net.left.weight_format is FORMATS["nvfp4"] and net.out.weight_format is FORMATS["mxfp8"]
    assert torch.equal(net.out.dequantize(), quantize_tensor(weight, FORMATS["mxfp8"], rule="ocp").dequantize())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda p: replace(p, layers=p.layers[1:]),
            "1 problem: left: is in the model and not in the plan (add it,",
        ),
        (
            lambda p: replace(p, layers=(*p.layers, replace(p.layers[0], name="x"))),
            "x: is not in the model (remove it, or name the model the plan is for)",
        ),
        (
            lambda p: p.replace_layers([replace(p.layers[0], shape=(32, 128))]),
            "1 problem: left: is [32, 64] in the model and [32, 128] in the plan (name the model the plan is for)",
        ),
    ],
)
def test_a_plan_that_does_not_fit(change, message: str) -> None:
    net = Net()
    plan = change(make_plan(net, "nvfp4a16", run=example))
    with pytest.raises(UserError, match=re.escape(message)):
        check_plan_fits(plan, find_layers(net))
    with pytest.raises(UserError, match=re.escape(message)):
        quantize(net, plan)


def test_a_plan_and_globs_contradict_each_other() -> None:
    plan = make_plan(Net(), "nvfp4a16", run=example)
    for option in ({"include": ["*"]}, {"exclude": ["out"]}, {"solver": "mse"}):
        with pytest.raises(UserError, match="a plan says everything already: edit it instead"):
            quantize(Net(), plan, **option)


def test_a_single_layer_has_no_place_to_be_replaced_in() -> None:
    with pytest.raises(UserError, match="the model is a single Linear: put it in a module"):
        quantize(nn.Linear(64, 64), "nvfp4a16")


def test_a_model_that_fails_on_the_example_is_an_error_with_its_reason() -> None:
    with pytest.raises(UserError, match=r"given example input: .*shapes cannot be multiplied.*; its forward takes "):
        make_plan(Net(), "nvfp4a16", run=lambda m: m(torch.zeros(1, 3)))


def test_a_loader_of_pairs_is_an_error_that_names_its_arguments() -> None:
    """Batches of inputs and labels call the model with both."""

    class Labelled(Net):
        def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x) @ label

    pairs = [[torch.zeros(1, 64), torch.zeros(1)], [torch.zeros(1, 64), torch.zeros(1)]]
    with pytest.raises(UserError, match=r"calls it with x \[1, 64\] and label \[1\]: of pairs \(x, y\) pass only x"):
        quantize(Labelled(), "nvfp4", pairs)


def test_without_an_example_a_module_that_takes_no_token_ids_has_no_groups() -> None:
    plan = make_plan(Net(), "nvfp4a16")
    assert plan.groups() == {} and len(plan.quantized) == 3


def test_planning_reads_no_weight() -> None:
    model = open_model(BASE, meta=True).model
    assert all(p.is_meta for p in model.parameters())
    assert make_plan(model, "nvfp4").layers == make_plan(open_model(BASE).model, "nvfp4").layers


def test_progress_counts_layers_and_rows(base: nn.Module) -> None:
    calls: list[tuple[str, int, int]] = []
    quantize(copy.deepcopy(base), "fp8", IDS, progress=lambda *call: calls.append(call))
    # After each fusion group of two decoder layers: q, k and v; o; gate and up; down.
    done = (3, 4, 6, 7, 10, 11, 13, 14)
    assert calls == [*(("calibrate", i + 1, 3) for i in range(3)), *(("solve", i, 14) for i in done)]


def test_nan_weights_leave_a_clear_error(base: nn.Module) -> None:
    model = copy.deepcopy(base)
    model.model.layers[0].mlp.up_proj.weight.data[0, :2] = torch.inf
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.up_proj \[256, 128\]: 2 NaN or infinite value"):
        quantize(model, "nvfp4a16")


def test_training_mode_and_device_of_neighbours_are_kept() -> None:
    net = Net().train()
    quantize(net, "nvfp4a16", run=example)
    assert net.left.training
    net.eval()
    assert not net.left.training


def test_a_state_dict_is_solved_layer_by_layer() -> None:
    tensors = {"a.weight": torch.randn(32, 64), "a.bias": torch.randn(32), "e.down_proj": torch.randn(2, 16, 32)}
    plan = make_plan({n: tuple(t.shape) for n, t in tensors.items()}, "mxfp4a16")
    solved, results = solve_state_dict(tensors, plan)
    assert set(solved) == {"a", "e.down_proj"} == {r.name for r in results}
    for name, key in (("a", "a.weight"), ("e.down_proj", "e.down_proj")):
        assert torch.equal(solved[name].dequantize(), quantize_tensor(tensors[key], FORMATS["mxfp4"]).dequantize())


def test_experts_become_modules_that_transformers_calls() -> None:
    model = tiny_models.qwen3_moe(num_hidden_layers=1)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            nn.init.normal_(parameter, std=0.2)
    values = copy.deepcopy(model)
    plan = make_plan(model, "fp8_channel", include=["*experts*"])
    plan = plan.replace_layers(replace(layer, activation=None) for layer in plan.quantized)
    apply_plan(model, plan)
    experts = model.model.layers[0].mlp.experts
    assert isinstance(experts.gate_up_proj, QuantExperts) and isinstance(experts.down_proj, QuantExperts)
    for name in ("gate_up_proj", "down_proj"):
        getattr(values.model.layers[0].mlp.experts, name).data.copy_(getattr(experts, name).dequantize())
    with torch.no_grad():
        torch.testing.assert_close(model(IDS % 32).logits, values(IDS % 32).logits, rtol=0, atol=1e-4)
        rounded = copy.deepcopy(model)
        rounded.model.layers[0].mlp.experts.down_proj.activation_format = FORMATS["fp8_token"]
        assert float((rounded(IDS % 32).logits - model(IDS % 32).logits).abs().max()) > 1e-4


def test_unknown_fusion_groups_are_said() -> None:
    net = Net()
    plan = make_plan(net, "nvfp4a16")
    assert "Net does not run on token ids" in plan.provenance["fusion_groups"]
    assert "expects them to share one" in fusion_warnings(plan)[0]
    assert fusion_warnings(make_plan(net, "nvfp4a16", run=example)) == []
    assert fusion_warnings(make_plan(net, "mxfp8")) == []  # no global scale, nothing to share


def test_the_head_and_the_kv_cache_get_formats_of_their_own() -> None:
    """As the same recipe with `kv_cache`, and the same plan with `lm_head`."""
    done = quantize(tiny_models.llama(), "mxfp8", IDS % 32, lm_head="fp8_channel", kv_cache="fp8", effort=0)
    recipe = replace(get_recipe("mxfp8"), kv_cache="fp8")
    expected = make_plan(tiny_models.llama(), recipe, lm_head="fp8_channel")
    assert done.plan.kv_cache == FORMATS["fp8"]
    assert [layer.weight for layer in done.plan.layers] == [layer.weight for layer in expected.layers]
    assert done.plan.by_name["lm_head"].weight == FORMATS["fp8_channel"]
    allocated = quantize(tiny_models.llama(), data=IDS % 32, bits=12.0, formats="fp8", kv_cache="fp8")
    assert allocated.plan.kv_cache == FORMATS["fp8"]
    assert quantize(tiny_models.llama(), recipe, effort=0, kv_cache="16bit").plan.kv_cache is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache": "fp4"}, 'kv_cache="fp4": checkpoints hold a KV cache in fp8'),
        ({"lm_head": "fp4"}, "unknown format 'fp4'"),
        ({"bits": 6, "lm_head": "fp8"}, 'lm_head="fp8": a budget counts the layers inside the model; leave it out'),
        ({"recipe": make_plan(Net(), "mxfp8", run=example), "kv_cache": "fp8"}, "a plan says everything"),
        ({"recipe": make_plan(Net(), "mxfp8", run=example), "lm_head": "fp8"}, "a plan says everything"),
    ],
)
def test_formats_of_head_and_cache_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        quantize(tiny_models.llama(), data=IDS % 32, **options)


def test_what_is_no_module_is_refused_with_the_way_to_one() -> None:
    for path, function in product((BASE, str(BASE)), (quantize, make_plan, prepare_qat)):
        told = rf"{function.__name__} takes a module; open it with quant.open_model\('.*'\).model"
        with pytest.raises(UserError, match=told):
            function(path, "nvfp4")  # type: ignore[operator]
    with pytest.raises(UserError, match=r"this is a Source: pass its \.model"):
        quantize(open_model(BASE), "nvfp4", IDS)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"this is a dict: pass a torch.nn.Module"):
        quantize({}, "nvfp4", IDS)  # type: ignore[arg-type]
