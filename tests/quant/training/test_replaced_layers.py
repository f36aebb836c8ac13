"""Whatever users and libraries put on a layer is there after another takes its place: quantized, in QAT, packed."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models
import torch
from torch import nn
from torch.nn.utils import prune

import quant

ROWS = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(7))


ADDED = torch.ones(1)


def _layer(model: Any) -> Any:
    return model.model.layers[0].mlp.up_proj


def _with_everything() -> tuple[Any, list[str]]:
    """A model with something of each kind on one of its layers, and the calls of its hooks."""
    model = tiny_models.llama(num_hidden_layers=1, gain=2.0).requires_grad_(True)
    layer, calls = _layer(model), []
    layer.mark, layer._is_hf_initialized, layer.weight.mark = "of the layer", True, "of the weight"
    layer.register_buffer("count", torch.arange(3.0))
    layer.register_buffer("scratch", torch.ones(2), persistent=False)
    layer.register_parameter("gain", nn.Parameter(torch.tensor(2.0)))
    layer.add_module("probe", nn.Identity())
    layer.register_forward_pre_hook(lambda *_: calls.append("before"))
    layer.register_forward_hook(lambda module, _, y: y * module.gain)
    layer.register_full_backward_hook(lambda *_: calls.append("backward"))
    layer.register_state_dict_pre_hook(lambda module, *_: calls.append(f"writes {module.mark}"))
    layer.register_state_dict_post_hook(lambda module, state, prefix, _: state.update({f"{prefix}added": ADDED}))
    layer.register_load_state_dict_pre_hook(lambda module, state, prefix, *_: state.pop(f"{prefix}added"))
    layer.register_load_state_dict_post_hook(lambda module, _: calls.append(f"loaded {module.mark}"))
    model.train()
    layer.eval()
    return model, calls


def _check(model: Any, calls: list[str], gain: nn.Parameter) -> None:
    layer = _layer(model)
    assert (layer.mark, layer._is_hf_initialized) == ("of the layer", True)
    assert torch.equal(layer.count, torch.arange(3.0)) and torch.equal(layer.scratch, torch.ones(2))
    calls.clear()
    state = model.state_dict()
    assert "model.layers.0.mlp.up_proj.count" in state and "model.layers.0.mlp.up_proj.scratch" not in state
    assert torch.equal(state["model.layers.0.mlp.up_proj.added"], ADDED)
    model.load_state_dict(state)
    assert calls == ["writes of the layer", "loaded of the layer"]
    assert layer.gain is gain and isinstance(layer.probe, nn.Identity)
    # Neither modes nor names of other layers are touched.
    assert not layer.training and model.model.layers[0].mlp.gate_proj.training
    assert not hasattr(model.model.layers[0].mlp.gate_proj, "mark")
    calls.clear()
    gain.grad = None
    model(ROWS, labels=ROWS).loss.backward()
    assert calls == ["before", "backward"] and gain.grad


@pytest.mark.parametrize("is_quantized_first", [False, True])
def test_everything_on_a_layer_survives_preparation_and_packing(is_quantized_first: bool) -> None:
    model, calls = _with_everything()
    gain = _layer(model).gain
    if is_quantized_first:
        plan = quant.quantize(model, "nvfp4", ROWS, solver="rtn").plan
        _check(model, calls, gain)
        _layer(model).later = 1  # put on the quantized layer
        quant.prepare_qat(model, plan)
    else:
        quant.prepare_qat(model, "nvfp4", ROWS)
        assert _layer(model).weight.mark == "of the weight"
        _layer(model).later = 1
    _check(model, calls, gain)
    quant.pack(model)
    _check(model, calls, gain)
    assert _layer(model).later == 1
    assert "fusion" not in vars(_layer(model))  # of the layer in training alone


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_everything_on_a_layer_survives_training_in_low_precision(recipe: str) -> None:
    model, calls = _with_everything()
    gain = _layer(model).gain
    quant.to_low_precision_training(model, recipe)
    _check(model, calls, gain)
    quant.pack(model)
    _check(model, calls, gain)
    assert "low_precision" not in vars(_layer(model))


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize("prepare", [quant.prepare_qat, quant.to_low_precision_training])
@pytest.mark.parametrize("norm", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
def test_a_weight_that_is_computed_from_others_stays_in_16_bit(prepare: Any, norm: Any) -> None:
    net = nn.Sequential(norm(nn.Linear(64, 64)), nn.ReLU(), nn.Linear(64, 64))
    x = torch.randn(4, 64)
    kind, computed = type(net[0]), net[0](x)
    prepare(net, "mxfp8")
    assert type(net[0]) is kind and torch.equal(net[0](x), computed)
    assert type(net[2]) is not nn.Linear


@pytest.mark.parametrize("prepare", [quant.prepare_qat, quant.to_low_precision_training])
def test_a_pruned_layer_is_packed_when_its_weight_is_a_parameter(prepare: Any) -> None:
    """In QAT `pack` ended in an AttributeError. The way out of its message keeps the zeros."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.randn(4, 64)
    prepare(net, "mxfp8")
    prune.l1_unstructured(net[0], "weight", 0.5)
    net(x).sum().backward()
    types = [type(module) for module in net]
    with pytest.raises(quant.UserError, match=r"^0: its weight is computed .*torch\.nn\.utils\.prune\.remove"):
        quant.pack(net)
    assert [type(module) for module in net] == types
    prune.remove(net[0], "weight")
    expected = net.eval()(x)
    quant.pack(net)
    assert torch.equal(net(x), expected) and int((net[0].weight == 0).sum()) >= 2048


@pytest.mark.parametrize("prepare", [quant.prepare_qat, quant.to_low_precision_training])
def test_layers_that_share_one_weight_go_on_sharing_it(prepare: Any) -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    net[2].weight = net[0].weight
    prepare(net, "mxfp8")
    assert net[2].weight is net[0].weight and type(net[1]) is not nn.Linear
