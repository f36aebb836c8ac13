"""LoRA on quantized layers computes what PEFT's own computes on the dequantized ones, trains, and merges back."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from adapter_samples import dequantized
from torch import nn

import quant
from quant.base.errors import UserError
from quant.calibration.layer_result import Quantized
from quant.formats.format import FORMATS
from quant.formats.tensor import quantize
from quant.kernels.linear.quant_linear import QuantLinear
from quant.recipes.layers import find_layers
from quant.recipes.plan_check import check_plan_fits

peft = pytest.importorskip("peft", reason="the extra training")

IDS = torch.arange(24).view(2, 12)
DATA = (torch.arange(128) * 7 % 64).view(8, 16)
WEIGHT_ONLY = ["nvfp4", "mxfp4", "mxfp6", "mxfp8", "fp8", "fp8_channel", "int8", "int4_g32"]


def quantized(format: str, build: Any = tiny_models.llama, **options: Any) -> quant.Quantized:
    """A model with weights in `format` and inputs in 16 bit."""
    model = build(gain=2.0, **options)
    recipe = {"mxfp6": "mxfp6a16", "int4_g32": "int4a16_g32"}.get(format, format)
    plan = quant.make_plan(model, recipe)
    return quant.quantize(model, plan.replace_layers(replace(each, activation=None) for each in plan.quantized))


def config(model: nn.Module, **options: Any) -> Any:
    return quant.lora(peft.LoraConfig(**{"r": 4, "target_modules": "all-linear", **options}), model)


def with_adapters(done: quant.Quantized, **options: Any) -> Any:
    """The model with adapters that do something."""
    torch.manual_seed(0)
    model = peft.get_peft_model(done.model, config(done.model, **options))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits  # type: ignore[no-any-return]


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    model(IDS, labels=IDS).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("format", WEIGHT_ONLY)
def test_outputs_and_gradients_are_those_of_adapters_on_the_dequantized_model(format: str) -> None:
    done = quantized(format)
    twin = peft.get_peft_model(
        dequantized(done.model), peft.LoraConfig(r=4, target_modules="all-linear", use_rslora=True)
    )
    model = with_adapters(done, use_rslora=True)
    adapters = peft.get_peft_model_state_dict(model)
    assert len(adapters) == 2 * 14
    peft.set_peft_model_state_dict(twin, adapters)
    torch.testing.assert_close(logits(model), logits(twin), rtol=1e-4, atol=1e-4)
    ours, theirs = gradients(model), gradients(twin)
    assert ours.keys() == theirs.keys() == {name for name, _ in model.named_parameters() if "lora_" in name}
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_autocast_gives_one_layer_with_its_adapters_to_the_rounding_of_bf16(dropout: float, device: str) -> None:
    """Against float64; dropout draws the same places where the seed is the same."""
    model = with_adapters(quantized("nvfp4"), lora_dropout=dropout, lora_alpha=12).to(device)
    layer = model.get_submodule("base_model.model.model.layers.0.mlp.up_proj")
    x = torch.randn(3, 40, layer.in_features, device=device).bfloat16().requires_grad_()
    torch.manual_seed(1)
    with torch.autocast(device, torch.bfloat16):
        y = layer(x)
    assert y.dtype is torch.bfloat16 and y.shape == (3, 40, layer.out_features)
    y.backward(dy := torch.randn_like(y))
    torch.manual_seed(1)
    dropped, down, up = (
        layer.lora_dropout["default"](x.detach()).double(),
        layer.lora_A["default"],
        layer.lora_B["default"],
    )
    a, b = down.weight.detach().bfloat16().double(), up.weight.detach().bfloat16().double()
    low = dropped @ a.T
    whole = x.detach().double() @ layer.base_layer.dequantize(torch.float64).T + 3 * low @ b.T

    def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
        return bool((found.double() - wanted).norm() < 0.005 * wanted.norm())

    assert close(y.detach(), whole)
    rows, d = dy.double().flatten(0, 1), dropped.flatten(0, 1)
    assert close(up.weight.grad, 3 * rows.T @ low.flatten(0, 1))
    assert close(down.weight.grad, (3 * rows @ b).T @ d)
    if not dropout:
        assert x.grad is not None and x.grad.dtype is torch.bfloat16
        by_adapter = (3 * rows @ b @ a).view(x.shape)
        assert close(x.grad, dy.double() @ layer.base_layer.dequantize(torch.float64) + by_adapter)


def test_an_adapter_that_is_frozen_in_part_gets_the_gradients_that_are_left() -> None:
    model = with_adapters(quantized("nvfp4"), lora_alpha=12)
    layer = model.get_submodule("base_model.model.model.layers.0.mlp.up_proj")
    down, up = layer.lora_A["default"].weight.requires_grad_(False), layer.lora_B["default"].weight
    x = torch.randn(2, 3, layer.in_features)
    y = layer(x)
    y.backward(dy := torch.randn_like(y))
    assert down.grad is None and x.grad is None
    wanted = 3 * dy.double().flatten(0, 1).T @ (x.double().flatten(0, 1) @ down.double().T)
    torch.testing.assert_close(up.grad.double(), wanted, rtol=1e-4, atol=1e-5)


def test_an_output_may_be_changed_in_place_and_an_adapter_between_its_passes_not() -> None:
    layer = with_adapters(quantized("nvfp4")).base_model.model.model.layers[0].mlp.up_proj
    x = torch.randn(2, 3, 64)
    residual = torch.randn_like(layer(x))

    def gradient(add: Any) -> torch.Tensor:
        given = x.clone().requires_grad_()
        add(layer(given)).square().sum().backward()
        assert given.grad is not None
        return given.grad

    torch.testing.assert_close(gradient(lambda y: y.add_(residual)), gradient(lambda y: y + residual))
    y = layer(x.clone().requires_grad_())
    with torch.no_grad():
        layer.lora_B["default"].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified in place between its forward and backward"):
        y.sum().backward()


@pytest.mark.parametrize("part", ["base_layer", "lora_A.default", "lora_B.default"])
def test_hooks_of_the_parts_of_a_layer_are_called(part: str) -> None:
    model = with_adapters(quantized("nvfp4"))
    layer = model.get_submodule("base_model.model.model.layers.0.mlp.up_proj")
    x = torch.randn(2, 3, layer.in_features, requires_grad=True)
    wanted = layer(x)
    seen = []
    layer.get_submodule(part).register_forward_hook(lambda module, inputs, y: seen.append(y.requires_grad))
    torch.testing.assert_close(layer(x), wanted)
    assert seen == [True]


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_bias": True, "bias": "none"}, {"lora_dropout": 0.5}])
def test_variants_of_peft_work(options: Any) -> None:
    done = quantized("nvfp4", tiny_models.opt if "lora_bias" in options else tiny_models.llama)
    base, twin = logits(done.model), dequantized(done.model)
    theirs = peft.get_peft_model(twin, peft.LoraConfig(r=4, target_modules="all-linear", **options)).eval()
    model = with_adapters(done, **options).eval()
    peft.set_peft_model_state_dict(theirs, peft.get_peft_model_state_dict(model))
    torch.testing.assert_close(logits(model), logits(theirs), rtol=1e-4, atol=1e-4)
    with model.disable_adapter():
        assert torch.equal(logits(model), base)


def test_adapters_on_experts_are_peft_s_own_on_the_parameters() -> None:
    """PEFT adapts a stack of experts by adding the product of its factors to the parameter."""
    done = quantized("nvfp4", tiny_models.mixtral)
    done = replace(done, model=dequantized(done.model))  # PEFT's own takes no quantized linear layer
    twin = copy.deepcopy(done.model)
    experts = [m for m in twin.modules() if hasattr(m, "gate_up_proj")]
    for module in experts:
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(module, name).dequantize()
            delattr(module, name)
            module.register_parameter(name, nn.Parameter(weight))
    model = with_adapters(done, target_modules=["gate_up_proj", "down_proj"])
    layers = [m for m in model.modules() if hasattr(m, "gate_up_proj")]
    for ours, theirs in zip(layers, experts, strict=True):
        for name in ("gate_up_proj", "down_proj"):
            module = getattr(ours, name)
            up = module.lora_B["default"].weight.reshape(module.out_features, 4, 4)  # [out, r, experts]
            down = module.lora_A["default"].weight.reshape(4, 4, -1)  # [experts, r, in]
            delta = torch.einsum("ore,eri->eoi", up, down) * module.scaling["default"]
            with torch.no_grad():
                getattr(theirs, name).add_(delta)
    torch.testing.assert_close(logits(model), logits(twin), rtol=1e-4, atol=1e-4)
    x, offsets = torch.randn(9, 64), torch.tensor([0, 4, 4, 7, 9], dtype=torch.int32)
    module = layers[0].gate_up_proj
    one_by_one = [module(x[a:b], e) for e, (a, b) in enumerate(((0, 4), (4, 4), (4, 7), (7, 9)))]
    torch.testing.assert_close(module.grouped(x, offsets), torch.cat(one_by_one))
    assert any("gate_up_proj.lora_A" in name for name in gradients(model))


@pytest.mark.parametrize(
    ("build", "format", "solver", "options"),
    [
        (tiny_models.llama, "nvfp4a16", "awq+gptq", {"use_dora": True}),
        (tiny_models.llama, "nvfp4", "rtn", {}),
        (tiny_models.llama, "int4a16_g32", "lowrank", {"target_modules": ["q_proj", "down_proj"]}),
        (tiny_models.mixtral, "nvfp4a16", "rtn", {"target_modules": ["q_proj", "gate_up_proj"]}),
    ],
)
def test_adapters_are_merged_and_quantized_again(
    build: Any, format: str, solver: str, options: Any, tmp_path: Path
) -> None:
    done = quant.quantize(build(gain=2.0), format, DATA, solver=solver)
    before = logits(done.model)
    model = with_adapters(done, **options)
    trained = logits(model)
    merged = quant.merge_lora(model, DATA)
    changed = {result.name for result in merged.layers}
    adapted = options.get("target_modules", ["_proj"])
    wanted = {each.name for each in done.plan.quantized if each.name.endswith(tuple(adapted))}
    groups = {each.group for each in done.plan.quantized if each.name in wanted and each.weight.global_scale}
    assert changed == wanted | {each.name for each in done.plan.quantized if each.group in groups - {None}}
    errors = {result.name: result.relative_error for result in merged.layers}
    assert all(0 < errors[name] < 0.2 for name in wanted) and max(errors.values()) < 0.2
    after = logits(merged.model)
    assert (after - trained).norm() < 0.6 * (before - trained).norm()
    assert {each.name: each.formats for each in merged.plan.layers} == {e.name: e.formats for e in done.plan.layers}
    quant.save(merged.model, merged.plan, tmp_path / "out")
    assert torch.equal(logits(quant.load(tmp_path / "out")), after)


def test_saved_adapters_are_loaded_onto_the_base(tmp_path: Path) -> None:
    done = quantized("nvfp4")
    model = with_adapters(done)
    model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("model*"))
    fresh = quantized("nvfp4").model
    loaded = peft.PeftModel.from_pretrained(
        fresh, tmp_path, config=quant.lora(peft.LoraConfig.from_pretrained(tmp_path), fresh)
    )
    assert torch.equal(logits(loaded), logits(model))


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    done = quantized("nvfp4")
    with pytest.raises(UserError, match="no quantized linears"):
        config(tiny_models.llama())
    with pytest.raises(UserError, match="init_lora_weights='pissa' subtracts"):
        config(done.model, init_lora_weights="pissa")
    for saved in ("q_proj", "self_attn"):
        with pytest.raises(
            UserError, match=r"modules_to_save holds model\.layers\.0\.\S*q_proj, whose codes do not train: take"
        ):
            config(done.model, modules_to_save=[saved])
    trained = peft.get_peft_model(done.model, config(done.model, target_modules=["q_proj"]))  # as it advises
    assert any("q_proj" in name and each.requires_grad for name, each in trained.named_parameters())
    done = quantized("nvfp4")
    with pytest.raises(UserError, match=r"takes a LoraConfig, IA3Config, .* of PEFT, not a LoHaConfig"):
        quant.lora(peft.LoHaConfig(), done.model)
    with pytest.raises(UserError, match="no quantized layer of the model has an adapter"):
        quant.merge_lora(done.model)
    model = with_adapters(done)
    with pytest.raises(UserError, match=r"merged by quant\.merge_lora"):
        model.merge_and_unload()
    with pytest.raises(UserError, match="q_proj: has an adapter"):
        done.model.save_pretrained(tmp_path)
    experts = quantized("nvfp4", tiny_models.mixtral).model
    with pytest.raises(UserError, match="use_dora=True is not for adapters on experts"):
        peft.get_peft_model(experts, config(experts, target_modules=["gate_up_proj"], use_dora=True))


@pytest.mark.parametrize("target", ["all-linear", ["c_attn", "c_proj"]])
def test_adapters_on_transposed_layers_are_merged(target: Any) -> None:
    """GPT-2 holds `[in, out]`, and so does its plan. Against W + BA in float64, rounded as the format has it.

    PEFT merges in float32: the global scale may be off by its last bit, and a weight half-way between two codes may
    become the other one.
    """
    done = quant.quantize(tiny_models.gpt2(gain=2.0), "nvfp4a16", solver="rtn")
    model = with_adapters(done, target_modules=target)
    wanted = {}
    for name, module in model.get_base_model().named_modules():
        if isinstance(getattr(module, "base_layer", None), QuantLinear):
            down, up = (part["default"].weight.double() for part in (module.lora_A, module.lora_B))
            weight = module.base_layer.quantized_weight.dequantize(torch.float64)
            wanted[name] = weight + up @ down * module.scaling["default"]
    merged = quant.merge_lora(model)
    assert wanted.keys() == {result.name for result in merged.layers}
    for name, weight in wanted.items():
        found = merged.model.get_submodule(name).quantized_weight
        rounded = quantize(weight.detach().float(), FORMATS["nvfp4"])
        assert found.shape == weight.shape
        same = torch.isclose(found.dequantize(), rounded.dequantize(), rtol=1e-6, atol=0)
        assert (~same).double().mean() < 1e-3
    assert [x.transposed for x in merged.plan.layers] == [x.transposed for x in done.plan.layers]
    assert any(layer.transposed for layer in merged.plan.quantized)
    check_plan_fits(merged.plan, find_layers(tiny_models.gpt2()))


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_layers_of_one_scale_keep_it_without_the_plan(layout: str, tmp_path: Path) -> None:
    """A checkpoint that came without plan.json: an adapter on q alone moves k and v with it."""
    done = quant.quantize(tiny_models.llama(gain=3.0, dtype=torch.bfloat16), "nvfp4a16", solver="rtn")
    quant.save(done.model, done.plan, tmp_path / "out")
    directory = tmp_path / "out"
    if layout == "modelopt":
        quant.convert(directory, tmp_path / "modelopt", to="modelopt")
        directory = tmp_path / "modelopt"
    (directory / "plan.json").unlink()
    model = quant.load(directory)
    plan = model.quantization_plan
    planned = {frozenset(x.name for x in members) for members in plan.groups().values()}
    assert planned == {frozenset(x.name for x in members) for members in done.plan.groups().values()}
    adapted = with_adapters(Quantized(model, plan, [], {}), target_modules=["q_proj"])
    merged = quant.merge_lora(adapted).model
    for block in merged.model.layers:
        attention = block.self_attn
        scales = {float(getattr(attention, name).global_scale) for name in ("q_proj", "k_proj", "v_proj")}
        assert len(scales) == 1
