"""q, k and v that are computed as one give what they give one by one, with dx summed once, and only where they may."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models
import torch
from torch import nn

import quant
from quant.kernels.training.fp8_block_layout import Operands
from quant.training.low_precision import native_fusions

ROWS = torch.randint(0, 64, (2, 20), generator=torch.Generator().manual_seed(7))


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quant.kernels.training.fp8_block.runs_on", lambda x: True)


@pytest.fixture
def merged(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of layers of each call of the merged function."""
    calls: list[int] = []
    apply = native_fusions._MergedProducts.apply

    def counted(x: Any, states: Any, origin: Any, *weights: Any) -> Any:
        calls.append(len(weights))
        return apply(x, states, origin, *weights)

    monkeypatch.setattr(native_fusions._MergedProducts, "apply", counted)
    return calls


def llama(merges: bool = True, **options: Any) -> Any:
    """A model whose k and v have 128 outputs, q 256; biases as in Qwen2."""
    sizes = {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "attention_bias": True}
    model = tiny_models.llama(**sizes, intermediate_size=256, gain=2.0, **options).train()
    quant.to_low_precision_training(model, "fp8_block", backend="native")
    for module in model.modules():
        if hasattr(module, "low_precision"):
            module.low_precision.merges = merges
    return model


def step(model: Any) -> list[torch.Tensor]:
    """Loss and gradients."""
    model.zero_grad()
    loss = model(input_ids=ROWS, labels=ROWS).loss
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return [loss.detach(), *(g for g in gradients if g is not None)]


@pytest.mark.parametrize("autocast", [False, True])
def test_losses_and_gradients_are_those_of_single_layers(autocast: bool, merged: list[int]) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        own, single = step(llama()), step(llama(merges=False))
    assert merged == [3, 3]
    assert torch.equal(own[0], single[0])
    for a, b in zip(own, single, strict=True):
        # In float32 the sums differ by their order; in BF16 dx is rounded once instead of three times.
        assert float((a - b).norm()) <= (0.1 if autocast else 1e-6) * float(b.norm())


def attention() -> Any:
    return llama(num_hidden_layers=1).model.layers[0].self_attn


def test_dx_is_the_sum_in_float64_rounded_once(merged: list[int]) -> None:
    layers = attention().bfloat16()
    x = torch.randn(40, 256, dtype=torch.bfloat16, requires_grad=True)
    outputs = [getattr(layers, name)(x) for name in ("q_proj", "k_proj", "v_proj")]
    gradients = [torch.randn_like(y) for y in outputs]
    torch.autograd.backward(outputs, gradients)
    assert merged == [3] and x.grad is not None
    exact = torch.zeros(40, 256, dtype=torch.float64)
    for name, dy in zip(("q_proj", "k_proj", "v_proj"), gradients, strict=True):
        d = Operands(*torch.ops.quant.fp8_block_operands(dy, "power_of_two", False, True, False))
        w = Operands(*torch.ops.quant.fp8_block_operands(
            getattr(layers, name).weight.detach(), "power_of_two", True, True, False
        ))  # fmt: skip
        decoded = d.codes.double() * d.scale.t().repeat_interleave(128, 1)
        squares = w.scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        outs = dy.shape[1]  # without the padding of blocks
        exact += decoded[:40, :outs] @ (w.codes.double() * squares)[:outs, :256]
    # Half a unit in the last of BF16's eight digits, and what FP32 sums add.
    assert bool(((x.grad.double() - exact).abs() <= exact.abs() * 2.0**-8 + 1e-5 * exact.abs().max()).all())


def test_other_inputs_modes_and_weights_are_computed_again(merged: list[int]) -> None:
    layers, x = attention(), torch.randn(40, 256, requires_grad=True)
    q, k, v = (getattr(layers, name) for name in ("q_proj", "k_proj", "v_proj"))

    def alone(layer: Any, x: torch.Tensor) -> torch.Tensor:
        group, layer.low_precision.group = layer.low_precision.group, [layer]
        y: torch.Tensor = layer(x)
        layer.low_precision.group = group
        return y

    q(x)
    other = torch.randn(40, 256, requires_grad=True)
    assert torch.equal(k(other), alone(k, other))
    with torch.no_grad():
        assert not k(x).requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        assert k(x).dtype is torch.bfloat16
    with torch.no_grad():
        k.weight.mul_(2)
    assert torch.equal(k(x), alone(k, x))
    assert k(x).requires_grad and merged == [3]
    assert torch.equal(v(x), alone(v, x))  # the one that is still pending
    # k's output was computed in vain, so the group is taken apart.
    q(x), q(x)
    assert merged == [3] and not q.low_precision.merges
    assert q.low_precision.products.pending is None


def test_frozen_layers_inputs_without_gradient_and_evaluation(merged: list[int]) -> None:
    layers, x = attention(), torch.randn(40, 256, requires_grad=True)
    q, k, v = (getattr(layers, name) for name in ("q_proj", "k_proj", "v_proj"))
    q(x.detach()), k(x.detach()), v(x.detach())
    layers.eval()
    q(x), k(x), v(x)
    layers.train()
    k.weight.requires_grad_(False)
    q(x), k(x), v(x)
    assert not merged
    for layer in (q, k, v):
        layer.weight.requires_grad_(False)
    (q(x).sum() + k(x).sum() + v(x).sum()).backward()
    assert merged == [3] and x.grad is not None and q.weight.grad is None
    # Gradients of the weights alone.
    for layer in (q, k, v):
        layer.weight.requires_grad_(True)
    outputs = [q(x), k(x), v(x)]
    dw = torch.autograd.grad([y.sum() for y in outputs], [layer.weight for layer in (q, k, v)])
    whole = torch.autograd.grad([layer(x).sum() for layer in (q, k, v)], [x, q.weight, k.weight, v.weight])
    assert all(torch.equal(a, b) for a, b in zip(dw, whole[1:], strict=True))


def test_hooks_and_checkpointing_see_what_they_saw(merged: list[int]) -> None:
    model, plain = llama(), step(llama())
    seen: list[nn.Module] = []
    model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda module, *_: seen.append(module))
    model.gradient_checkpointing_enable()
    merged.clear()
    for own, other in zip(step(model), plain, strict=True):
        assert torch.equal(own, other)
    assert merged == [3] * 4 and seen == [model.model.layers[0].self_attn.k_proj] * 2


@pytest.mark.slow
def test_it_compiles_in_one_graph() -> None:
    model = llama(num_hidden_layers=1)
    for own, eager in zip(
        step(torch.compile(model, fullgraph=True, backend="aot_eager")), step(llama(num_hidden_layers=1)), strict=True
    ):
        assert torch.equal(own, eager)
    assert model.model.layers[0].self_attn.q_proj.low_precision.products.pending is None
