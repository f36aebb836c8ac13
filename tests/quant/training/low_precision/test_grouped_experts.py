"""Grouped products of fused experts are those of one expert after another; here they run on a CPU."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models
import torch
from rounding_bounds import bounds_of_products
from torch import nn
from torch.utils.checkpoint import checkpoint

import quant
from quant.training.low_precision import backends, fused_experts_training
from quant.training.low_precision.backends import has_rows, takes_recipe
from quant.training.low_precision.conversion import to_plain_layers
from quant.training.low_precision.fused_experts_training import (
    Groups,
    SpreadRows,
    group_by_expert,
    takes,
    trained_layers,
)
from quant.training.low_precision.training_recipe import RECIPES, TrainingRecipe

BLOCK, MX, ROWS = RECIPES["fp8_block"], RECIPES["mxfp8"], RECIPES["fp8_rowwise"]
ROWS_DW_BF16 = RECIPES["fp8_rowwise_wgrad_bf16"]
WAYS = {
    "native": (BLOCK, "native"),
    "fp8_block": (BLOCK, "emulated"),
    "mxfp8": (MX, "emulated"),
    "fp8_rowwise": (ROWS, "emulated"),
    "fp8_rowwise_wgrad_bf16": (ROWS_DW_BF16, "emulated"),
}
SIZES = {"num_hidden_layers": 1, "hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 5}


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quant.kernels.training.fp8_block.runs_on", lambda x: True)
    monkeypatch.setattr(fused_experts_training, "_DEVICES", {"cpu"})


def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_experts_training, "_DEVICES", set())


def converted(recipe: TrainingRecipe, backend: str, **sizes: int) -> Any:
    model = tiny_models.qwen3_moe(gain=3.0, **{**SIZES, **sizes}).train()
    quant.to_low_precision_training(model, recipe, backend=backend, include=["*.experts.*"])
    return model


def routed(tokens: int, experts: int, slots: int = 2) -> torch.Tensor:
    """Experts of each token, of unequal numbers of tokens; the third has none."""
    likelihood = torch.arange(1.0, experts + 1)
    likelihood[2] = 0
    draws = torch.Generator().manual_seed(7)
    return torch.multinomial(likelihood.expand(tokens, -1), slots, generator=draws)


def results(
    experts: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, run: Any = None
) -> dict[str, torch.Tensor]:
    """Output and gradients of the input, the router's weights and the matrices; `run` runs the module."""
    experts.zero_grad()
    hidden, weights = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
    y = (experts if run is None else run)(hidden, index, weights)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y) * 1e-3)
    gradients = {name: parameter.grad for name, parameter in experts.named_parameters()}
    return {"y": y.detach(), "dx": hidden.grad, "router": weights.grad, **gradients}


def assert_near(got: torch.Tensor, expected: torch.Tensor, error: float, name: str = "") -> None:
    assert got.dtype is expected.dtype and got.shape == expected.shape, name
    off = (got.double() - expected.double()).norm() / expected.double().norm()
    assert bool(off <= error), (name, float(off))


def test_rows_of_an_expert_are_whole_blocks_in_the_order_of_tokens() -> None:
    index = torch.cat([routed(90, 6), torch.tensor([[6, 1], [0, 6]])])  # 6 is an expert of another rank
    groups = group_by_expert(index, 6, 32)
    flat, begin = index.flatten().tolist(), 0
    for expert in range(6):
        members = [slot for slot, chosen in enumerate(flat) if chosen == expert]
        end = begin + max(-(-len(members) // 32), 1) * 32
        if expert == 5:  # all rows that remain are the last one's
            assert int(groups.offsets[expert]) == len(groups.slots)
            end = len(groups.slots)
        assert int(groups.offsets[expert]) == end
        zeros = [len(flat)] * (end - begin - len(members))
        assert groups.slots[begin:end].tolist() == members + zeros
        begin = end
    assert torch.equal(groups.is_empty[:, 0], groups.slots == len(flat))
    elsewhere = [slot for slot, chosen in enumerate(flat) if chosen == 6]
    assert groups.is_empty[groups.positions[elsewhere]].all()
    assert len(groups.positions.unique()) == len(flat) and int(groups.positions.max()) < len(groups.slots)
    hidden = torch.randn(len(index), 8, requires_grad=True)
    rows = SpreadRows.apply(hidden, groups.positions, groups.slots)
    assert not rows[groups.is_empty[:, 0]].any()
    here = [slot for slot in range(len(flat)) if flat[slot] < 6]
    assert torch.equal(rows[groups.positions[here]], hidden[[slot // 2 for slot in here]])


@pytest.mark.parametrize(("recipe", "backend"), WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("projection", ["gate_up_proj", "down_proj"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_grouped_products_are_those_of_each_expert(
    recipe: TrainingRecipe, backend: str, projection: str, dtype: torch.dtype
) -> None:
    """Within the bounds of float64, and equal to the products of one expert but for the order of sums."""
    stack: Any = trained_layers(converted(recipe, backend).to(dtype))[f"model.layers.0.mlp.experts.{projection}"]
    index = routed(150, 5)
    groups = group_by_expert(index, 5, backends.block_of_tokens(recipe))
    weight = stack.weight.detach().clone()
    x = (torch.randn(150, weight.shape[2]) * torch.logspace(-1, 1, 150)[:, None]).to(dtype)
    dy = (torch.randn(300, weight.shape[1]) * 1e-3).to(dtype)
    rows = SpreadRows.apply(x, groups.positions, groups.slots).requires_grad_()
    y = stack.grouped(rows, groups.offsets)
    y.backward(torch.zeros_like(y).index_copy(0, groups.positions, dy))
    grouped_dw, dx = stack.held.grad.clone(), rows.grad
    stack.held.grad = None
    empty = groups.is_empty[:, 0]
    assert not y[empty].any() and not dx[empty].any() and not grouped_dw[2].any()
    error = 1e-6 if dtype is torch.float32 else 2.0**-8
    for expert in (0, 1, 3, 4):
        slots = (index.flatten() == expert).nonzero().flatten()
        own = x[slots // 2].clone().requires_grad_()
        with stack.opened():
            alone = stack.product(own, expert)
            alone.backward(dy[slots])
        products = {"y": y[groups.positions[slots]], "dx": dx[groups.positions[slots]], "dw": grouped_dw[expert]}
        for name, single in (("y", alone), ("dx", own.grad), ("dw", stack.held.grad[expert])):
            assert_near(products[name], single, error, f"{name} of {expert}")
        blocks = [nn.functional.pad(rows, (0, 0, 0, -len(rows) % 128)).float() for rows in (own.detach(), dy[slots])]
        bounds = bounds_of_products(recipe, blocks[0], weight[expert].float(), blocks[1])
        for name, product in products.items():
            exact, bound = (each[: len(product)] for each in (bounds[name].values, bounds[name].error))
            of_dtype = 0.0 if dtype is torch.float32 else 2.0**-8
            off = (product.double() - exact).abs()
            assert bool((off <= bound + of_dtype * product.double().abs()).all()), (expert, name)


@pytest.mark.parametrize(("recipe", "backend"), WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("tokens", [1, 200])
def test_a_module_trains_as_by_one_expert_after_another(
    recipe: TrainingRecipe, backend: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = converted(recipe, backend).model.layers[0].mlp.experts
    hidden, weights = torch.randn(tokens, 256), torch.rand(tokens, 2)
    index = routed(tokens, 5)
    index[-1, 1] = 5  # an expert of another rank
    grouped = results(experts, hidden, index, weights)
    one_by_one(monkeypatch)
    expected = results(experts, hidden, index, weights)
    assert grouped["router"][-1, 1] == 0
    for name, tensor in grouped.items():
        # Sums in another order may move the input of the second product over a tie of its rounding, here and there.
        assert_near(tensor, expected[name], 2e-3, name)


def test_other_sizes_and_recipes_with_products_in_16_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weights, index = torch.randn(60, 128), torch.rand(60, 2), routed(60, 5)
    for recipe in (BLOCK, replace(BLOCK, rounds_dw=False), replace(BLOCK, rounds_dx=False)):
        experts = converted(recipe, "emulated", hidden_size=128, moe_intermediate_size=384).model.layers[0].mlp.experts
        with monkeypatch.context() as patch:
            one_by_one(patch)
            expected = results(experts, hidden, index, weights)
        for name, tensor in results(experts, hidden, index, weights).items():
            assert_near(tensor, expected[name], 2e-3, name)


def test_only_tensors_that_need_gradients_have_them_and_a_schedule_ends_the_rounding() -> None:
    model = converted(BLOCK, "native")
    experts = model.model.layers[0].mlp.experts
    hidden, index, weights = torch.randn(40, 256), routed(40, 5), torch.rand(40, 2)
    experts.gate_up_proj.requires_grad_(False)
    experts(hidden, index, weights).sum().backward()
    assert experts.gate_up_proj.grad is None and experts.down_proj.grad is not None
    for layer in trained_layers(model).values():
        layer.low_precision.rounds_forward = False
    with torch.no_grad():
        y = experts(hidden, index, weights)
        to_plain_layers(model)
        assert_near(y, experts(hidden, index, weights), 1e-6)


@pytest.mark.slow
def test_autocast_checkpointing_and_compiling_give_the_same_step() -> None:
    experts = converted(BLOCK, "native").model.layers[0].mlp.experts
    inputs = torch.randn(40, 256), routed(40, 5), torch.rand(40, 2)
    with torch.autocast("cpu", torch.bfloat16):
        first = results(experts, *inputs)
        repeated = results(experts, *inputs, lambda *inputs: checkpoint(experts, *inputs, use_reentrant=False))
        torch.compiler.reset()
        compiled = results(experts, *inputs, torch.compile(experts, backend="aot_eager"))
    # Autocast keeps the dtype of the tokens, and FP32 weights have FP32 gradients.
    assert first["y"].dtype is first["gate_up_proj"].dtype is torch.float32
    for name, tensor in first.items():
        assert torch.equal(tensor, repeated[name]), name
        assert_near(compiled[name], tensor, 1e-6, name)


def test_which_experts_and_recipes_have_grouped_products() -> None:
    assert [name for name, recipe in RECIPES.items() if takes_recipe(recipe)] == [
        "fp8_rowwise",
        "fp8_rowwise_wgrad_bf16",
        "fp8_block",
        "mxfp8",
    ]
    assert not takes_recipe(replace(ROWS, power_of_two_scales=False))
    assert not takes_recipe(replace(ROWS, gradient=BLOCK.gradient))
    assert not takes_recipe(replace(BLOCK, power_of_two_scales=False))
    assert not takes_recipe(replace(MX, stochastic_gradients=True)) and not takes_recipe(replace(MX, hadamard=16))
    x, plain = torch.zeros(4, 256), SimpleNamespace(has_bias=False, parameters=lambda: [])
    assert takes(plain, x, BLOCK) and takes(plain, x.bfloat16(), BLOCK)
    assert not takes(plain, x.half(), BLOCK) and not takes(plain, x[:0], BLOCK)
    assert not takes(SimpleNamespace(has_bias=True), x, BLOCK)
    assert not takes(SimpleNamespace(has_post_expert_norm=True), x, BLOCK)


def test_adapters_on_fused_experts_train_inside_of_the_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft", reason="the extra training")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])
    adapted = peft.get_peft_model(converted(BLOCK, "native"), config).train()
    adapters = {name: p for name, p in adapted.named_parameters() if p.requires_grad and "experts" in name}
    for parameter in adapters.values():
        nn.init.normal_(parameter, std=0.1)
    ids, gradients = torch.randint(0, 64, (2, 16)), []
    for devices in ({"cpu"}, set()):
        monkeypatch.setattr(fused_experts_training, "_DEVICES", devices)
        adapted.zero_grad()
        adapted(input_ids=ids, labels=ids).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in adapters.items()})
    assert len(adapters) == 2
    for name, gradient in gradients[0].items():
        assert_near(gradient, gradients[1][name], 5e-3, name)


def test_a_model_evaluates_as_packed_and_names_its_nonfinite_input(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Groups] = []
    group = fused_experts_training.group_by_expert
    monkeypatch.setattr(fused_experts_training, "group_by_expert", lambda *a: calls.append(group(*a)) or calls[-1])
    model, ids = converted(BLOCK, "native"), torch.randint(0, 64, (2, 16))
    model(ids, labels=ids).loss.backward()
    assert len(calls) == 1
    experts = model.model.layers[0].mlp.experts
    hidden = torch.randn(8, 256)
    hidden[3, 5] = torch.nan
    experts(hidden, torch.arange(8)[:, None] % 4, torch.ones(8, 1)).sum().backward()
    assert len(calls) == 2
    with pytest.raises(quant.UserError, match=r"experts.gate_up_proj: its input held NaN"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    evaluated = model.eval()(ids).logits.detach()
    quant.pack(model)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, evaluated)


@pytest.mark.gpu
@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize(("recipe", "backend"), WAYS.values(), ids=WAYS)
def test_on_a_gpu_a_module_trains_as_by_one_expert_after_another(
    recipe: TrainingRecipe, backend: str, in_fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_fp8 and not has_rows(recipe):
        pytest.skip("no grouped FP8 products of blocks")
    monkeypatch.undo()  # of the functions that are other ones on a CPU
    model = tiny_models.qwen3_moe(gain=3.0, **SIZES).bfloat16().cuda().train()
    backend = "native" if in_fp8 else backend
    report = quant.to_low_precision_training(model, recipe, backend=backend, include=["*.experts.*"])
    assert f"fused experts by grouped {'FP8' if in_fp8 else 'BF16'} products" in str(report)
    experts = model.model.layers[0].mlp.experts
    hidden, weights = torch.randn(700, 256).bfloat16().cuda(), torch.rand(700, 2).bfloat16().cuda()
    for index in (routed(700, 5).cuda(), torch.zeros(700, 2, dtype=torch.int64, device="cuda")):
        grouped = results(experts, hidden, index, weights)
        again = results(experts, hidden, index, weights)
        with monkeypatch.context() as patch:
            patch.setattr(fused_experts_training, "_DEVICES", set())
            expected = results(experts, hidden, index, weights)
        for name, tensor in grouped.items():
            assert torch.equal(tensor, again[name]), name
            assert_near(tensor, expected[name], 2e-2, name)
