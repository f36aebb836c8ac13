"""The packed model is the model that was trained: codes, scales, and the loss that training evaluated."""

from __future__ import annotations

import copy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from slow_cases import quick_cases
from torch import nn
from torch.nn.utils.prune import l1_unstructured

import quant
from quant.base.errors import UserError
from quant.export.onnx.export_onnx import write_onnx
from quant.training.low_precision.fused_experts_training import trained_layers
from quant.training.low_precision.operands import round_operand
from quant.training.low_precision.training_recipe import RECIPES, get_training_recipe

SIZES = {"hidden_size": 128, "intermediate_size": 256}


def _trained(recipe: str, dtype: torch.dtype = torch.float32, steps: int = 3) -> tuple[Any, torch.Tensor]:
    model = tiny_models.llama(**SIZES, gain=4.0, dtype=dtype)
    quant.to_low_precision_training(model.train(), recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 64, (4, 16))
    for _ in range(steps):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, ids


@pytest.mark.parametrize(
    ("name", "dtype"),
    quick_cases(
        product(RECIPES, (torch.float32, torch.bfloat16)),
        lambda name, dtype: name == "nvfp4" or (list(RECIPES).index(name) % 2 == 0) == (dtype is torch.float32),
    ),
    ids=str,
)
def test_the_evaluated_model_is_the_packed_and_the_saved_one(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model, ids = _trained(name, dtype)
    weights = {n: m.weight.detach().clone() for n, m in model.named_modules() if hasattr(m, "low_precision")}
    states = {n: m.low_precision for n, m in model.named_modules() if hasattr(m, "low_precision")}
    amax = {n: None if not s.recipe.weight.is_static else s.weight_amax() for n, s in states.items()}
    amax = {n: states[n].amax["w"].largest(a) if states[n].recipe.history else a for n, a in amax.items()}
    trained = model.eval()(ids).logits
    with torch.no_grad():
        assert torch.equal(model(ids).logits, trained)
    plan = quant.pack(model)
    assert len(plan.quantized) == len(weights) >= 10
    assert {layer.reason for layer in plan.quantized} == {f"codes and scales of training in {name}"}
    recipe = RECIPES[name]
    for layer in plan.quantized:
        packed = model.get_submodule(layer.name).quantized_weight
        # The last forward product multiplied by these values.
        operand = round_operand(weights[layer.name], recipe.weight, recipe, amax=amax[layer.name])
        height, width = operand.format.block_shape(packed.shape)
        scale = operand.scale.repeat_interleave(height, 0).repeat_interleave(width, 1)[: packed.shape[0]]
        assert torch.equal(packed.element_values(), operand.elements)
        second = operand.factor if operand.format.global_scale else torch.ones(())
        assert torch.equal(packed.dequantize(), operand.elements * (scale * second))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, trained)
        quant.save(model, plan, tmp_path / "out")
        assert torch.equal(quant.load(tmp_path / "out")(ids).logits, trained)


def test_merged_layers_have_one_second_level_and_one_input_scale() -> None:
    model, _ = _trained("nvfp4")
    plan = quant.pack(model)
    groups: dict[str, list[Any]] = {}
    for layer in plan.quantized:
        groups.setdefault(layer.group or layer.name, []).append(model.get_submodule(layer.name))
    assert sorted(len(members) for members in groups.values()) == [1, 1, 1, 1, 2, 2, 3, 3]
    for members in groups.values():
        for scale in ("global_scale", "input_scale"):
            assert len({float(getattr(member, scale)) for member in members}) == 1


def test_the_static_input_scale_is_that_of_the_largest_recorded_input() -> None:
    net = nn.Sequential(nn.Linear(64, 32, bias=False))
    quant.to_low_precision_training(net, "nvfp4")
    for largest in (3.0, 11.0, 5.0):
        x = torch.rand(8, 64)
        x[0, 0] = largest
        net(x)
    net.eval()(100 * torch.rand(8, 64))  # evaluation records nothing
    net.train()(torch.full((8, 64), torch.nan))  # and NaN is no magnitude
    quant.pack(net)
    assert float(net[0].input_scale) == pytest.approx(11 / 2688, rel=1e-6)


@pytest.mark.parametrize("name", ["fp8_rowwise", "nvfp4"])
def test_adapters_train_on_a_converted_model_and_are_merged_before_packing(name: str) -> None:
    peft = pytest.importorskip("peft", reason="the extra training")
    model = tiny_models.llama(**SIZES, gain=3.0)
    quant.to_low_precision_training(model, name)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj"]))
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    ids = torch.randint(0, 64, (4, 16))
    losses = []
    for _ in range(4):
        loss = adapted.train()(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    with pytest.raises(UserError, match=r"an adapter is on this layer; merge it first"):
        quant.pack(adapted)
    merged = adapted.merge_and_unload().eval()
    evaluated = merged(ids).logits
    quant.pack(merged)
    assert torch.equal(merged(ids).logits, evaluated)


@pytest.mark.parametrize("is_loaded", [False, True])
@pytest.mark.parametrize("name", ["fp8_rowwise", "nvfp4"])
def test_adapters_train_over_the_packed_model_and_are_merged_saved_and_served(
    name: str, is_loaded: bool, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft", reason="the extra training")
    model, ids = _trained(name)
    plan = quant.pack(model)
    if is_loaded:
        quant.save(model, plan, tmp_path / "base")
        model = quant.load(tmp_path / "base")
    config = quant.lora(peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]), model)
    adapted = peft.get_peft_model(model, config).train()
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(4):
        loss = adapted(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    with torch.no_grad():
        trained = adapted.eval()(ids).logits
        merged = quant.merge_lora(adapted, ids)
        logits = merged.model(ids).logits
        assert (logits - trained).norm() < (0.1 if name == "fp8_rowwise" else 0.5) * trained.norm()
        quant.save(merged.model, merged.plan, tmp_path / "out")
        served = quant.load(tmp_path / "out")
        assert torch.equal(served(ids).logits, logits)
        tokens = served.generate(ids[:1], max_new_tokens=4, do_sample=False)
        assert torch.equal(tokens, merged.model.generate(ids[:1], max_new_tokens=4, do_sample=False))


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_evaluation_sees_weights_that_are_changed_past_autograd(name: str) -> None:
    model, ids = _trained(name)
    first = model.eval()(ids).logits
    before = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    for parameter in model.parameters():  # as averaged weights are put in for an evaluation
        parameter.data.mul_(1.125)
    assert not torch.equal(model(ids).logits, first)
    for key, parameter in model.named_parameters():
        parameter.data.copy_(before[key])
    assert torch.equal(model(ids).logits, first)
    model.model.layers[0].self_attn.k_proj.weight.data[0, 0] = 9.0  # one value, and a scale that q_proj shares
    changed = model(ids).logits
    assert not torch.equal(changed, first)
    quant.pack(model)
    assert torch.equal(model(ids).logits, changed)


def test_weights_that_fsdp_shows_in_bf16_are_packed_from_bf16() -> None:
    net = nn.Sequential(nn.Linear(64, 32, bias=False))
    quant.to_low_precision_training(net, "fp8_rowwise")
    layer, master = net[0], net[0].weight
    layer.weight = nn.Parameter(master.detach().bfloat16())  # as FSDP2 does with param_dtype=bfloat16
    net(torch.randn(4, 64))
    layer.weight = master
    recipe = RECIPES["fp8_rowwise"]
    expected = round_operand(master.detach().bfloat16(), recipe.weight, recipe).elements
    assert not torch.equal(round_operand(master.detach(), recipe.weight, recipe).elements, expected)
    quant.pack(net)
    assert torch.equal(net[0].quantized_weight.element_values(), expected)


def test_an_onnx_file_has_the_trained_codes(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="the extra onnx")
    pytest.importorskip("onnxscript", reason="the extra onnx")
    model, _ = _trained("nvfp4", torch.bfloat16)
    plan = quant.pack(model.eval())
    file = write_onnx(model, tmp_path / "model.onnx", plan=plan)
    arrays = {tensor.raw_data for tensor in onnx.load(file).graph.initializer}
    for layer in plan.quantized:
        codes = model.get_submodule(layer.name).quantized_weight.codes
        assert codes.numpy().tobytes() in arrays, layer.name


def _model_with_nan() -> nn.Module:
    net = nn.Sequential(nn.Linear(64, 64))
    quant.to_low_precision_training(net, "mxfp8")
    net[0].weight.data[0, 0] = torch.nan
    return net


def _model_without_steps() -> nn.Module:
    net = nn.Sequential(nn.Linear(64, 64))
    quant.to_low_precision_training(net, "nvfp4")
    return net


def _model_with_pruning() -> nn.Module:
    net = _model_without_steps()
    l1_unstructured(net[0], "weight", 0.5)  # type: ignore[no-untyped-call]
    return net


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (
            nn.Sequential(nn.Linear(64, 64)),
            "not in training: call quant.prepare_qat or quant.to_low_precision_training",
        ),
        (_model_with_nan, "^0: training made NaN"),
        (_model_without_steps, "^0: no training step has recorded its input.* run a few steps.* averages"),
        (_model_with_pruning, "^0: its weight is computed from other parameters .*prune.remove"),
        (lambda: _model_without_steps().to("meta"), "^0: its weight is on the meta device and has no values"),
    ],
)
def test_a_model_that_cannot_be_packed_is_refused_and_left_as_it_is(model: Any, line: str) -> None:
    net = model() if not isinstance(model, nn.Module) else model
    before = [type(module) for module in net.modules()]
    with pytest.raises(UserError, match=line):
        quant.pack(net)
    assert [type(module) for module in net.modules()] == before


def test_an_unknown_recipe_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"known: fp8_delayed, .*nvfp4"):
        get_training_recipe("nvfp5")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_float64_model_evaluates_as_it_is_packed(recipe: str) -> None:
    net = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128)).double()
    quant.to_low_precision_training(net, recipe)
    x = torch.randn(32, 128, dtype=torch.float64)
    net(x).square().mean().backward()
    torch.optim.SGD(net.parameters(), 0.1).step()
    net.eval()
    with torch.no_grad():
        outputs = net(x)
        quant.pack(net)
        assert torch.equal(net(x), outputs)


@pytest.mark.parametrize("recipe", ["fp8_tensorwise", "fp8_rowwise", "nvfp4"])
def test_weights_that_trained_as_bf16_copies_are_packed_from_a_checkpoint(recipe: str) -> None:
    """As under FSDP2 with `param_dtype`: the state says so, and states without it are read as before."""
    net = nn.Sequential(nn.Linear(64, 64))
    report = quant.to_low_precision_training(net, recipe)
    net(torch.randn(32, 64))
    state = report.state_dict()
    net[0].low_precision.weight_dtype = torch.bfloat16
    narrow = report.state_dict()
    assert {k: v.shape for k, v in narrow.items()} == {k: v.shape for k, v in state.items()}  # for DCP
    codes = {}
    for name, saved in {
        "bf16": narrow,
        "fp32": state,
        "old": {k: v for k, v in state.items() if "dtypes" not in k},
    }.items():
        again = nn.Sequential(nn.Linear(64, 64))
        loaded = quant.to_low_precision_training(again, recipe)
        again.load_state_dict(net.state_dict())
        loaded.load_state_dict(saved)
        quant.pack(again)
        codes[name] = again[0].codes.view(torch.uint8)
    assert torch.equal(codes["old"], codes["fp32"]) and not torch.equal(codes["bf16"], codes["fp32"])
    rounded = nn.Sequential(nn.Linear(64, 64))
    loaded = quant.to_low_precision_training(rounded, recipe)
    rounded.load_state_dict({name: value.bfloat16() for name, value in net.state_dict().items()})
    loaded.load_state_dict(state)
    quant.pack(rounded)
    assert torch.equal(rounded[0].codes.view(torch.uint8), codes["bf16"])


def test_recipes_by_layer_train_evaluate_and_pack_as_those_layers_alone(tmp_path: Path) -> None:
    recipes = {"*": "nvfp4", "*.layers.0.*": "mxfp8", "*.layers.1.mlp.*": "16bit"}
    rows = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    model = tiny_models.llama().train()
    report = quant.to_low_precision_training(model, recipes)
    names = {name: layer.low_precision.recipe.name for name, layer in trained_layers(model).items()}
    assert set(names.values()) == {"nvfp4", "mxfp8"} and len(names) == len(report.converted) == 11
    assert {name for name, recipe in names.items() if recipe == "mxfp8"} == {n for n in names if ".layers.0." in n}
    assert report.in_16bit["model.layers.1.mlp.up_proj"] == "16 bit by its recipe"
    assert "7 layers in mxfp8" in str(report) and "4 layers in nvfp4" in str(report)
    # One forward pass of the first block is one in MXFP8 alone.
    alone = tiny_models.llama().train()
    quant.to_low_precision_training(alone, "mxfp8")
    x = torch.randn(2, 16, model.config.hidden_size)
    assert torch.equal(model.model.layers[0].mlp(x), alone.model.layers[0].mlp(x))
    model(rows, labels=rows).loss.backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    other = tiny_models.llama().train()
    with pytest.raises(UserError, match="trained in other recipes by layer"):
        quant.to_low_precision_training(other, "nvfp4").load_state_dict(report.state_dict())
    assert str(quant.training_report(model)) == str(report)
    with torch.no_grad():
        logits = model.eval()(rows).logits
        quant.save(model, quant.pack(model), tmp_path / "out")
        assert torch.equal(quant.load(tmp_path / "out", device="cpu")(rows).logits, logits)
    with pytest.raises(UserError, match="the model does not train in low precision"):
        quant.training_report(model)


def test_merged_layers_need_one_recipe_and_globs_a_layer() -> None:
    with pytest.raises(UserError, match=r"mixes formats .*q_proj=nvfp4.*give its members one"):
        quant.to_low_precision_training(tiny_models.llama(), {"*": "mxfp8", "*q_proj": "nvfp4"})
    with pytest.raises(UserError, match=r"recipe: glob '\*nope' matches no layer"):
        quant.to_low_precision_training(tiny_models.llama(), {"*": "mxfp8", "*nope": "nvfp4"})


def test_a_lost_report_is_the_same_one_also_of_a_copy() -> None:
    net = nn.Sequential(nn.Linear(64, 64))
    report = quant.to_low_precision_training(net, "nvfp4")
    twin = copy.deepcopy(net)
    net(torch.randn(8, 64))
    again = quant.training_report(net)
    assert all(torch.equal(values, report.state_dict()[key]) for key, values in again.state_dict().items())
    assert (
        float(again.state_dict()["0.amax.x"].max())
        > 0
        > float(quant.training_report(twin).state_dict()["0.amax.x"].max())
    )
    again.undo()
    assert type(net[0]) is nn.Linear and type(twin[0]) is not nn.Linear


def test_the_report_says_what_share_trains_and_what_was_not_looked_at() -> None:
    net = nn.ModuleDict({
        "linear": nn.Linear(64, 64, bias=False),
        "conv": nn.Conv1d(64, 64, 1, bias=False),
        "attention": nn.MultiheadAttention(64, 4, bias=False),
    })  # fmt: skip
    text = str(quant.to_low_precision_training(net, "mxfp8"))
    assert f"{1 / 6:.1%} of {6 * 64 * 64:,} parameters are in these layers" in text
    assert "not looked at, and in 16 bit: 1 Conv1d (conv), 1 MultiheadAttention (attention)" in text
