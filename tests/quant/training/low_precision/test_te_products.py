"""Transformer Engine's modules multiply in layers that stay ours: a stand-in for them on a CPU, itself on a GPU."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import quant
from quant.training.low_precision import backends
from quant.training.low_precision.backends import TRANSFORMER_ENGINE
from quant.training.low_precision.conversion import to_plain_layers
from quant.training.low_precision.training_recipe import RECIPES


class _Manager:
    depth, opened = 0, 0

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.depth > 0


@contextmanager
def _autocast(enabled: bool, recipe: Any) -> Iterator[None]:
    _Manager.depth, _Manager.opened = _Manager.depth + 1, _Manager.opened + 1
    try:
        yield
    finally:
        _Manager.depth -= 1


class _Linear(nn.Module):
    """Multiplies twice what a linear layer does, so that its products are told from others."""

    def __init__(self, columns: int, rows: int, bias: bool, params_dtype: torch.dtype, device: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns, dtype=params_dtype, device=device))
        self.fp8_meta: dict[str, Any] = {}

    def init_fp8_metadata(self, num_gemms: int) -> None:
        for direction, tensors in (("scaling_fwd", 3), ("scaling_bwd", 2)):
            meta = SimpleNamespace(amax_history=torch.zeros(1024, tensors), scale=torch.ones(tensors))
            self.fp8_meta[direction] = meta

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert _Manager.depth == 1 and len(x) % 32 == 0
        if self.fp8_meta:  # one step recorded: the newest is last
            history = self.fp8_meta["scaling_fwd"].amax_history
            history.copy_(history.roll(-1, 0))
            history[0], history[-1, :2] = 0, torch.stack([x.abs().amax(), self.weight.abs().amax()]).detach()
        return 2 * nn.functional.linear(x, self.weight)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {
        "transformer_engine": {},
        "transformer_engine.pytorch": {"Linear": _Linear, "autocast": _autocast},
        "transformer_engine.pytorch.quantization": {"FP8GlobalStateManager": _Manager},
        "transformer_engine.common": {},
        "transformer_engine.common.recipe": dict.fromkeys(TRANSFORMER_ENGINE.values(), object),
    }
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(backends, "_no_fp8", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    _Manager.depth = _Manager.opened = 0


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)).train()


@pytest.mark.usefixtures("engine")
def test_products_are_the_engines_and_weights_and_keys_ours() -> None:
    net, plain = _net(), _net()
    weight = net[0].weight
    report = quant.to_low_precision_training(net, "fp8_delayed")
    assert report.backend == "te"
    x = torch.randn(2, 5, 64)
    y = net(x)
    hidden = torch.relu(2 * nn.functional.linear(x, plain[0].weight) + plain[0].bias)
    torch.testing.assert_close(y, 2 * nn.functional.linear(hidden, plain[2].weight) + plain[2].bias)
    y.sum().backward()
    assert net[0].weight is weight and weight.grad is not None
    assert list(net.state_dict()) == list(plain.state_dict())
    assert _Manager.opened == 1 and _Manager.depth == 0  # of the whole forward pass
    to_plain_layers(net)
    net(x)
    assert type(net[0]) is nn.Linear and _Manager.opened == 1
    assert not net._forward_pre_hooks and not net._forward_hooks


@pytest.mark.usefixtures("engine")
def test_histories_are_the_engines_and_go_on_after_a_checkpoint() -> None:
    net, twin = _net(), _net()
    report, again = (quant.to_low_precision_training(each, "fp8_delayed", backend="te") for each in (net, twin))
    for step in range(3):
        net(torch.full((32, 64), step + 1.0))
    assert report.state_dict()["0.amax.x"][:4].tolist() == [3, 2, 1, -1]
    again.load_state_dict(report.state_dict())
    twin(torch.full((32, 64), 7.0))
    assert again.state_dict()["0.amax.x"][:5].tolist() == [7, 3, 2, 1, -1]
    scale = twin[0].low_precision.products._linear.fp8_meta["scaling_fwd"].scale
    assert float(scale[0]) == pytest.approx(448 / 3)  # of the step; the stand-in computes no next one
    quant.pack(twin)
    assert float(twin[0].input_scale) == pytest.approx(7 / 448)


@pytest.mark.usefixtures("engine")
def test_a_context_closes_after_an_error_and_a_layer_alone_opens_its_own() -> None:
    net = _net()
    quant.to_low_precision_training(net, "fp8_tensorwise", backend="te")
    with pytest.raises(RuntimeError):
        net(torch.randn(4, 63))
    assert _Manager.depth == 0
    copied = copy.deepcopy(net)
    copied[0](torch.randn(4, 64))
    assert _Manager.opened == 2 and _Manager.depth == 0
    to_plain_layers(copied)
    assert not copied._forward_hooks and net._forward_hooks


@pytest.mark.usefixtures("engine")
def test_delayed_scaling_refuses_to_run_again_in_the_backward_pass() -> None:
    net = _net()
    quant.to_low_precision_training(net, "fp8_delayed", backend="te")
    x = torch.randn(32, 64, requires_grad=True)
    y = torch.utils.checkpoint.checkpoint(net, x, use_reentrant=False)
    with pytest.raises(quant.UserError, match="0: gradient checkpointing runs it again"):
        y.sum().backward()


@pytest.mark.parametrize(
    ("recipe", "line"),
    [
        ("fp8_rowwise", "Transformer Engine has no recipe like it; it has fp8_delayed, fp8_tensorwise, fp8_block"),
        ("mxfp8", "no GPU before Blackwell"),
        ("nvfp4", "no GPU before Blackwell"),
        ("fp8_delayed", "this needs the package `transformer_engine`, which is not installed"),
    ],
)
def test_recipes_and_gpus_that_it_does_not_run(recipe: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_no_fp8", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(quant.UserError, match=line):
        quant.to_low_precision_training(_net(), recipe, backend="te")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp8_delayed", "fp8_tensorwise", "fp8_block"])
def test_on_a_gpu_outputs_and_gradients_are_the_engines_alone(name: str) -> None:
    te = pytest.importorskip("transformer_engine.pytorch", reason="the extra te")
    from transformer_engine.common import recipe as recipes

    options = {"bias": False, "device": "cuda"}
    net = nn.Sequential(nn.Linear(256, 384, dtype=torch.bfloat16, **options)).train()
    alone = te.Linear(256, 384, params_dtype=torch.bfloat16, **options)
    alone.weight.data.copy_(net[0].weight.data)
    quant.to_low_precision_training(net, name, backend="te")
    engines = getattr(recipes, TRANSFORMER_ENGINE[name])()
    for step in range(3):
        x, dy = (torch.randn(64, size, device="cuda", dtype=torch.bfloat16) * (step + 1) for size in (256, 384))
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        y = net(inputs[0])
        with te.autocast(enabled=True, recipe=engines):
            expected = alone(inputs[1])
        net.zero_grad()
        alone.zero_grad()
        for each in (y, expected):
            each.backward(dy)
        assert torch.equal(y, expected)
        assert torch.equal(inputs[0].grad, inputs[1].grad)
        assert torch.equal(net[0].weight.grad, alone.weight.grad)
        if RECIPES[name].input.is_static:
            recorded = net[0].low_precision.amax["x"].values
            assert float(recorded[0]) == float(x.abs().amax())
    quant.pack(net)
