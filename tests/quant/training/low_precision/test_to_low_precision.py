"""Which layers train in low precision, which do not and why; histories; the backends on this machine."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import tiny_models
import torch
from torch import nn

import quant
from quant.base.errors import UserError
from quant.training.low_precision.backends import TORCHAO, TorchaoProducts
from quant.training.low_precision.training_recipe import RECIPES


def test_the_report_says_which_layers_stay_and_why() -> None:
    model = tiny_models.llama(num_hidden_layers=3, intermediate_size=72)
    recipe = replace(RECIPES["nvfp4"], first_layers=1)
    report = quant.to_low_precision_training(model, recipe, exclude=["*.2.self_attn.o_proj"])
    assert "model.layers.1.self_attn.q_proj" in report.converted
    reasons = {
        "model.layers.0.self_attn.q_proj": "nvfp4 keeps the first 1 and last 0 blocks",
        "model.layers.1.mlp.gate_proj": "[72, 64]: nvfp4 needs sizes that are multiples of 16",
        "model.layers.2.self_attn.o_proj": "excluded",
    }
    for name, reason in reasons.items():
        assert report.in_16bit[name] == reason
        assert f"{name} first: {reason}" in str(report) or name not in str(report)
    assert report.in_16bit["lm_head"].startswith("the output head")
    assert set(report.converted).isdisjoint(report.in_16bit)
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert linears == {*report.converted, *report.in_16bit}


def test_a_head_that_is_named_trains_too() -> None:
    model = tiny_models.llama()
    report = quant.to_low_precision_training(model, "mxfp8", include=["lm_head", "*.mlp.*"])
    assert "lm_head" in report.converted
    assert report.in_16bit["model.layers.0.self_attn.q_proj"] == "not included"


@pytest.mark.parametrize("argument", ["include", "exclude"])
def test_a_glob_that_matches_nothing_is_refused(argument: str) -> None:
    model = tiny_models.llama()
    with pytest.raises(
        quant.UserError, match=rf"{argument}: glob '\*\.k_prj' matches no layer; .*called model\.layers"
    ):
        quant.to_low_precision_training(model, "nvfp4", **{argument: ["*.k_prj"]})
    assert not any(hasattr(module, "low_precision") for module in model.modules())


def test_an_exact_name_is_no_glob() -> None:
    """Read as a glob, `up[0]` is another layer's name: `up0`."""
    for globs, converted in (
        ({"include": ["up[0]"]}, {"up[0]"}), ({"exclude": "up[0]"}, {"up0", "up1"}),
        ({"include": ["up[01]"], "exclude": ["up1"]}, {"up0"}),
    ):  # fmt: skip
        model = nn.Sequential()
        for name in ("up[0]", "up0", "up1"):
            model.add_module(name, nn.Linear(64, 64))
        assert {*quant.to_low_precision_training(model, "mxfp8", **globs).converted} == converted


def test_layers_at_the_ends_are_kept_for_that_reason_whatever_computes_their_weight() -> None:
    model = tiny_models.llama(num_hidden_layers=2)
    nn.utils.parametrizations.weight_norm(model.get_submodule("model.layers.0.mlp.up_proj"))
    report = quant.to_low_precision_training(model, replace(RECIPES["mxfp8"], first_layers=1))
    assert report.in_16bit["model.layers.0.mlp.up_proj"] == "mxfp8 keeps the first 1 and last 0 blocks"


def test_a_fusion_group_trains_whole_or_not_at_all() -> None:
    model = tiny_models.llama()
    report = quant.to_low_precision_training(model, "nvfp4", exclude=["*.k_proj"])
    assert "q_proj" not in " ".join(report.converted)
    assert "k_proj" in report.in_16bit["model.layers.0.self_attn.q_proj"]


def _quantized() -> nn.Module:
    model = tiny_models.llama()
    quant.quantize(model, "fp8_channel")
    return model


def _in_qat() -> nn.Module:
    model = tiny_models.llama()
    quant.prepare_qat(model, "fp8_channel")
    return model


def _converted() -> nn.Module:
    model = tiny_models.llama()
    quant.to_low_precision_training(model, "mxfp8")
    return model


def _with_adapters() -> nn.Module:
    peft = pytest.importorskip("peft", reason="the extra training")
    return peft.get_peft_model(tiny_models.llama(), peft.LoraConfig(target_modules=["q_proj"]))


def _on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(64, 64))


def _sharded() -> nn.Module:
    net = nn.Sequential(nn.Linear(64, 64))
    net[0].weight.full_tensor = lambda: net[0].weight  # as a DTensor has it
    return net


@pytest.mark.parametrize(
    ("make", "options", "line"),
    [
        (_quantized, {}, "takes the original model, and this layer is quantized already"),
        (_in_qat, {}, "quantized already, by quant.prepare_qat; pack it"),
        (_converted, {}, r"trains in mxfp8 already; call undo\(\)"),
        (_sharded, {}, "0.weight: its weights are sharded.*call it before you shard them"),
        (_on_meta, {}, "0.weight is on the meta device.*load the weights"),
        (lambda: nn.Sequential(nn.Linear(24, 24)), {}, r"0: \[24, 24\]: fp8_rowwise needs sizes .* multiples of 16"),
        (lambda: nn.Sequential(nn.ReLU()), {}, "Sequential has no nn.Linear"),
        (tiny_models.gpt2, {}, "transformer.h.0.attn.c_attn: a Conv1D computes in a way of its own"),
        (_with_adapters, {}, "q_proj: has an adapter of PEFT.*put new ones on afterwards"),
        (tiny_models.llama, {"recipe": "fp7"}, "unknown training recipe 'fp7'; known: fp8_delayed"),
        (tiny_models.llama, {"backend": "fast"}, "unknown backend 'fast'; known: auto"),
        (tiny_models.llama, {"on_nonfinite": "hope"}, "on_nonfinite='hope': unknown; known: stop, skip"),
        (tiny_models.llama, {"recipe": "mxfp8", "all_gather_fp8": True}, "mxfp8: weights can be gathered in FP8 where"),
        (tiny_models.llama, {"recipe": replace(RECIPES["nvfp4"], weight=None)}, "leaves an operand of y in 16 bit"),
    ],
)
def test_bad_input_is_one_line_with_the_way_out(make: Any, options: dict[str, Any], line: str) -> None:
    model = make()
    before = [type(module) for module in model.modules()]
    with pytest.raises(UserError, match=line) as error:
        quant.to_low_precision_training(model, **options)
    assert "\n" not in str(error.value)
    assert [type(module) for module in model.modules()] == before


def test_anything_but_a_module_is_refused_and_so_is_other_work_on_a_model_in_training() -> None:
    with pytest.raises(UserError, match=r"org/name: to_low_precision_training takes a module; open it with"):
        quant.to_low_precision_training("org/name", "mxfp8")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"pack takes a module, and this is a NoneType"):
        quant.pack(None)  # type: ignore[arg-type]
    model = tiny_models.llama()
    quant.to_low_precision_training(model, "mxfp8")
    for other in (quant.prepare_qat, quant.quantize):
        with pytest.raises(UserError, match=r"q_proj: .* by quant.to_low_precision_training; pack it with quant.pack"):
            other(model, "mxfp8")
    with pytest.raises(UserError, match=r"one in training is packed first, by quant.pack"):
        quant.save(model, None, "nowhere")


class Deep(nn.Module):
    """Three layers, one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[2](self.layers[1](self.layers[0](x)))


def test_histories_go_through_a_checkpoint() -> None:
    model, twin = Deep(), Deep()
    report, again = (quant.to_low_precision_training(each, "fp8_delayed") for each in (model, twin))
    twin.load_state_dict(model.state_dict())
    for step in range(3):
        model(torch.randn(8, 64) * (step + 1)).sum().backward()
    again.load_state_dict(report.state_dict())
    x = torch.randn(8, 64)
    assert torch.equal(model(x), twin(x))
    other = quant.to_low_precision_training(Deep(), "fp8_delayed", exclude=["layers.0"])
    with pytest.raises(UserError, match="disagree on the layers"):
        other.load_state_dict(report.state_dict())
    another = quant.to_low_precision_training(Deep(), "nvfp4")
    with pytest.raises(UserError, match=r'trained in fp8_delayed, and this model trains in nvfp4: .*"fp8_delayed"'):
        another.load_state_dict(report.state_dict())
    plain = {name: values for name, values in report.state_dict().items() if name != "recipe"}
    another.load_state_dict(plain)  # of an earlier version
    shorter = quant.to_low_precision_training(Deep(), replace(RECIPES["fp8_delayed"], history=16))
    with pytest.raises(UserError, match="remember 1024 steps, and fp8_delayed 16"):
        shorter.load_state_dict(report.state_dict())


def test_an_optimizer_of_weights_that_are_replaced_is_refused() -> None:
    net = nn.Sequential(nn.Linear(128, 128))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(
        UserError, match=r"an optimizer \(SGD\) holds parameters that all_gather_fp8 replaces.*make it af"
    ):
        quant.to_low_precision_training(net, "fp8_block", all_gather_fp8=True)
    assert type(net[0]) is nn.Linear
    del optimizer


@pytest.mark.parametrize(
    ("recipe", "line"),
    [
        ("fp8_rowwise", "a cpu has no FP8 products; an H100 or newer has"),
        ("nvfp4", r"no GPU before Blackwell \(compute capability 10.0\) has the products of nvfp4"),
        ("fp8_block", "torchao has no recipe like it; it has fp8_tensorwise, fp8_rowwise, fp8_rowwise_wgrad_bf16"),
    ],
)
def test_a_backend_that_does_not_run_here_says_which_machine_would(recipe: str, line: str) -> None:
    report = quant.to_low_precision_training(
        Deep() if recipe != "fp8_block" else nn.Sequential(nn.Linear(128, 128)), recipe
    )
    assert report.backend == "emulated"
    # Left to itself, the choice names the machine of the backend that has the recipe.
    assert re.search(line if recipe != "fp8_block" else "a cpu has no FP8 products", report.note)
    with pytest.raises(
        UserError, match=f'backend "torchao" does not run {recipe} here: {line}; backend="emulated" does'
    ):
        quant.to_low_precision_training(Deep(), recipe, backend="torchao")


@pytest.mark.parametrize("name", TORCHAO)
def test_torchaos_products_are_the_emulated_ones(name: str) -> None:
    pytest.importorskip("torchao", reason="the extra torchao")
    net = nn.Sequential(nn.Linear(256, 128, bias=False))
    quant.to_low_precision_training(net, name)
    x, dy = torch.randn(64, 256, dtype=torch.bfloat16), torch.randn(64, 128, dtype=torch.bfloat16)
    results = []
    for products in (None, TorchaoProducts(name, emulate=True)):
        net[0].low_precision.products = products
        net.zero_grad()
        inputs = x.clone().requires_grad_()
        y = net(inputs)
        y.backward(dy)
        results.append((y.detach(), inputs.grad, net[0].weight.grad.bfloat16()))
    for own, theirs in zip(*results, strict=True):
        # Operands are equal; products are summed in another order, and rounded to BF16.
        assert float((own.double() - theirs.double()).norm() / own.double().norm()) < 2.0**-10
