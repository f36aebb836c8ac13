"""A gated MLP that trains as one function computes what its layers compute one by one, and steps aside for hooks."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import tiny_models
import torch
from torch import nn

import quant
from quant.training.low_precision import native_fusions
from quant.training.low_precision.conversion import to_plain_layers
from quant.training.low_precision.native import NativeProducts

ROWS = torch.randint(0, 64, (2, 20), generator=torch.Generator().manual_seed(7))


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quant.kernels.training.fp8_block.runs_on", lambda x: True)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of each call of the fused function."""
    calls: list[int] = []
    apply = native_fusions._GatedMLP.apply
    monkeypatch.setattr(
        native_fusions._GatedMLP, "apply", lambda x, *rest: (calls.append(x.numel() // x.shape[-1]), apply(x, *rest))[1]
    )
    return calls


def llama(backend: str = "native", **options: Any) -> Any:
    model = tiny_models.llama(hidden_size=128, intermediate_size=256, gain=2.0, **options).train()
    quant.to_low_precision_training(model, "fp8_block", backend=backend)
    return model


def step(model: Any) -> list[torch.Tensor]:
    """Loss and gradients."""
    loss = model(input_ids=ROWS, labels=ROWS).loss
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return [loss.detach(), *(g for g in gradients if g is not None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_losses_and_gradients_are_those_of_single_layers(dtype: torch.dtype, fused: list[int]) -> None:
    one = step(llama(dtype=dtype))
    assert fused == [40, 40]
    single = llama(dtype=dtype)
    native_fusions.restore_forwards(single)
    for module in single.modules():
        if hasattr(module, "low_precision"):
            module.low_precision.merges = False
    # Rounded once, a sum of two products of dx has other last bits, and E4M3 may round some values before it otherwise.
    bound = 1e-6 if dtype is torch.float32 else 0.1
    for own, layers, emulated in zip(one, step(single), step(llama("emulated", dtype=dtype)), strict=True):
        assert float((own - layers).norm()) <= bound * float(layers.norm())
        torch.testing.assert_close(layers, emulated, rtol=2.0**-6, atol=float(emulated.abs().max()) * 2.0**-8)
    assert torch.equal(one[0], step(single)[0])


@pytest.mark.slow
def test_it_compiles_in_one_graph() -> None:
    compiled = torch.compile(llama(), fullgraph=True, backend="aot_eager")
    for own, eager in zip(step(compiled), step(llama()), strict=True):
        assert torch.equal(own, eager)


def test_hooks_and_frozen_weights(fused: list[int]) -> None:
    model = llama()
    seen: list[nn.Module] = []
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda module, *_: seen.append(module))
    model.model.layers[1].mlp.gate_proj.weight.requires_grad_(False)
    step(model)
    assert len(fused) == 1 and seen == [model.model.layers[0].mlp.up_proj]
    assert model.model.layers[1].mlp.gate_proj.weight.grad is None
    assert model.model.layers[1].mlp.up_proj.weight.grad is not None


@pytest.mark.parametrize("trained", ["down", "gate", "x", "x, down", "gate, up, down"])
def test_operands_are_made_for_trained_weights_only(trained: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of the transposed operands that a step makes, by whose gradients are needed."""
    mlp = llama().model.layers[0].mlp
    for name in ("gate", "up", "down"):
        getattr(mlp, f"{name}_proj").weight.requires_grad_(name in trained)
    x = torch.randn(2, 160, 128, requires_grad="x" in trained)
    transposed: list[tuple[int, ...]] = []

    def spy(name: str) -> None:
        make = getattr(NativeProducts, name)

        def spied(self: Any, x: Any, **options: Any) -> Any:
            operands = make(self, x, **options)
            matrices = [x] if isinstance(x, torch.Tensor) else x
            transposed.extend(tuple(matrix.shape) for matrix in matrices if operands[-1].numel())
            return operands

        monkeypatch.setattr(NativeProducts, name, spied)

    spy("quantize")
    spy("quantize_stacked")
    dy, both = torch.randn(2, 160, 128, generator=torch.Generator().manual_seed(1)), []
    for restore in (False, True):
        if restore:
            of_one = sorted(transposed)
            native_fusions.restore_forwards(mlp)
        leaves = [tensor for tensor in (x, *mlp.parameters()) if tensor.requires_grad]
        both.append(torch.autograd.grad(mlp(x), leaves, dy))
    for own, single in zip(*both, strict=True):
        # dx is a sum of two products, which are added in another order.
        torch.testing.assert_close(own, single, rtol=0, atol=1e-6 * float(single.abs().max()) if own.dim() == 3 else 0)
    gate, down, outer = (256, 128), (128, 256), (320, 128)
    # x for dw of gate and up, dy for that of down, weights for the gradients of what is before them.
    assert (
        of_one
        == {
            "down": [outer],
            "gate": [down, outer],
            "x": [down, gate, gate],
            "x, down": [down, gate, gate, outer],
            "gate, up, down": [down, outer, outer],
        }[trained]
    )


def test_copies_are_fused_and_the_way_back_is_plain(fused: list[int]) -> None:
    model = llama()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        fused.clear()
        step(twin)
        assert len(fused) == 2
        assert vars(twin.model.layers[0].mlp)["forward"].args[0] is twin.model.layers[0].mlp
    to_plain_layers(model)
    assert all("forward" not in vars(module) for module in model.modules())


def _with_infinite_weight(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.weight.data[0, 0] = torch.inf


def _with_infinite_input(model: Any) -> None:
    model.model.layers[1].post_attention_layernorm.weight.data[5] = torch.inf


def _with_infinite_gradient(model: Any) -> None:
    def spoil(module: nn.Module, args: Any) -> None:
        args[0].register_hook(lambda gradient: gradient * torch.inf)

    model.model.norm.register_forward_pre_hook(spoil)


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        (_with_infinite_weight, "layers.1.mlp.down_proj: its weight holds NaN or infinity"),
        (_with_infinite_input, "layers.1.mlp.gate_proj: its input held NaN or infinity in the forward pass"),
        (_with_infinite_gradient, "layers.1.mlp.down_proj: its gradient holds NaN or infinity in fp8_block"),
    ],
)
def test_the_layer_where_infinity_came_from_is_named(spoil: Callable[[Any], None], line: str) -> None:
    model = llama()
    spoil(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step(model)
    with pytest.raises(quant.UserError, match=f"^model.{line}"):
        optimizer.step()


def test_other_activations_and_other_ways_are_left_alone(fused: list[int]) -> None:
    gelu = tiny_models.llama(hidden_size=128, intermediate_size=256, hidden_act="gelu").train()
    quant.to_low_precision_training(gelu, "fp8_block", backend="native")
    step(gelu)
    assert not fused

    class Scaled(type(gelu.model.layers[0].mlp)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 0.5 * super().forward(x)

    scaled = tiny_models.llama(hidden_size=128, intermediate_size=256).train()
    for layer in scaled.model.layers:
        layer.mlp.__class__ = Scaled
    quant.to_low_precision_training(scaled, "fp8_block", backend="native")
    step(scaled)
    assert not fused
