"""NaN and infinity stop an optimizer's step or have it left out, and the message names where they came from."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import quant
from quant.base.errors import UserError
from quant.training.low_precision.conversion import to_plain_layers
from quant.training.low_precision.training_recipe import RECIPES

SKIPPED = "layers.1: its gradient holds NaN or infinity in mxfp8; this step is skipped"


class Deep(nn.Module):
    """Three layers and a norm; `broken` makes the gradient of the second layer's output infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.norm = nn.LayerNorm(64)
        self.broken = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[1](self.layers[0](x))
        if self.broken:
            x.register_hook(lambda gradient: gradient * torch.inf)
        return self.norm(self.layers[2](x))


@pytest.fixture
def model() -> Iterator[Deep]:
    """In training in MXFP8, and watched until the test ends."""
    net = Deep()
    quant.to_low_precision_training(net, "mxfp8")
    yield net
    to_plain_layers(net)


def _loss(model: nn.Module, broken: bool = False) -> torch.Tensor:
    model.broken = broken
    return model(torch.randn(8, 64)).square().sum()


def _unchanged(model: nn.Module, before: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def _copied(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("batches", [(True,), (True, False), (False, True)])
def test_a_gradient_that_is_not_finite_stops_and_names_the_layer(
    model: Deep, batches: tuple[bool, ...], clips: bool
) -> None:
    """In any of the micro-batches whose gradients are added up."""
    optimizer, before = torch.optim.SGD(model.parameters(), lr=0.1), _copied(model)
    for broken in batches:
        _loss(model, broken).backward()
    if clips:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(UserError, match=r"^layers.1: its gradient holds NaN or infinity in mxfp8; no weight was"):
        optimizer.step()
    assert _unchanged(model, before)


def test_a_skipped_step_changes_no_weight_and_the_next_one_does() -> None:
    model = Deep()
    quant.to_low_precision_training(model, "mxfp8", on_nonfinite="skip")
    optimizer, before = torch.optim.AdamW(model.parameters(), lr=0.1), _copied(model)
    _loss(model, broken=True).backward()
    with pytest.warns(UserWarning, match=SKIPPED):
        optimizer.step()
    assert _unchanged(model, before)
    optimizer.zero_grad()
    _loss(model).backward()
    optimizer.step()
    assert not torch.equal(model.layers[0].weight, before["layers.0.weight"])
    to_plain_layers(model)


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS])
def test_gradients_of_a_closure_are_looked_at_too(kind: type[torch.optim.Optimizer], by_name: bool) -> None:
    """As Lightning steps: the gradients come about within the optimizer's step."""
    model = Deep()
    quant.to_low_precision_training(model, "mxfp8", on_nonfinite="skip")
    optimizer, before = kind(model.parameters(), lr=0.1), _copied(model)

    def closure(broken: bool = True) -> torch.Tensor:
        optimizer.zero_grad()
        loss = _loss(model, broken)
        loss.backward()
        return loss

    with pytest.warns(UserWarning, match=SKIPPED):
        optimizer.step(closure=closure) if by_name else optimizer.step(closure)
    assert _unchanged(model, before)
    assert optimizer.step(lambda: closure(False)).item() > 0
    assert not torch.equal(model.layers[0].weight, before["layers.0.weight"])
    to_plain_layers(model)


@pytest.mark.parametrize("fused", [False, True])
def test_a_loss_scaler_skips_steps_itself(fused: bool) -> None:
    """It finds its scale by steps that overflow, so none of them stops training; the report names the layer."""
    model = Deep()
    report = quant.to_low_precision_training(model, "mxfp8")
    assert report.nonfinite() is None
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused), torch.amp.GradScaler("cpu")
    before = _copied(model)
    scaler.scale(_loss(model, broken=True)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**15
    assert _unchanged(model, before)
    assert report.nonfinite() == "layers.1: its gradient holds NaN or infinity in mxfp8"
    to_plain_layers(model)


def _two_optimizers(model: Deep, first: int) -> list[torch.optim.Optimizer]:
    matrices = [layer.weight for layer in model.layers]
    rest = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    return [torch.optim.Muon(matrices, lr=0.1), torch.optim.AdamW(rest, lr=0.1)][:: 1 - 2 * first]


@pytest.mark.parametrize("action", ["stop", "skip"])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("where", ["norm.weight", "layers.0.weight"])
def test_two_optimizers_make_a_step_together_or_none(action: str, first: int, where: str) -> None:
    model = Deep()
    quant.to_low_precision_training(model, "mxfp8", on_nonfinite=action)
    optimizers, before = _two_optimizers(model, first), _copied(model)
    _loss(model).backward()
    model.get_parameter(where).grad[3] = torch.inf
    for index, optimizer in enumerate(optimizers):
        name = type(optimizer).__name__
        if action == "stop":
            with pytest.raises(UserError, match=f"^{where[:-7]}.*changed by this step of {name}"):
                optimizer.step()
        elif index == 0:
            with pytest.warns(UserWarning, match="this step is skipped"):
                optimizer.step()
        else:
            optimizer.step()
    assert _unchanged(model, before)
    for optimizer in optimizers:
        optimizer.zero_grad()
    _loss(model).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert not any(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    to_plain_layers(model)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("first", [0, 1])
def test_a_loss_scaler_skips_the_step_of_both_optimizers(first: int, fused: bool) -> None:
    model = Deep()
    quant.to_low_precision_training(model, "mxfp8")
    rest = [p for name, p in model.named_parameters() if "0" not in name]
    optimizers = [
        torch.optim.SGD(model.layers[0].parameters(), lr=0.1, fused=fused),
        torch.optim.AdamW(rest, lr=0.1, fused=fused),
    ][:: 1 - 2 * first]
    scaler, before = torch.amp.GradScaler("cpu"), _copied(model)
    scaler.scale(_loss(model)).backward()
    model.norm.weight.grad[3] = torch.inf
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**15 and _unchanged(model, before)
    to_plain_layers(model)


def test_gradients_that_no_optimizer_takes_stop_no_step(model: Deep) -> None:
    """Of a parameter that is left out of training they may grow without end."""
    optimizer, before = torch.optim.SGD(model.layers.parameters(), lr=0.1), _copied(model)
    _loss(model).backward()
    model.norm.weight.grad[3] = torch.inf
    optimizer.step()
    assert not torch.equal(model.layers[0].weight, before["layers.0.weight"])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_an_input_that_is_not_finite_is_named_before_the_layers_that_it_reaches(recipe: str, value: float) -> None:
    net = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128), nn.Linear(128, 128))
    quant.to_low_precision_training(net, recipe)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(8, 128)
    x[3, 5] = value
    net[1:](x).square().sum().backward()
    with pytest.raises(UserError, match=r"^1: its input held NaN or infinity in the forward pass; no weight was"):
        optimizer.step()
    optimizer.zero_grad()  # what was noted belongs to the step that was refused
    net(torch.randn(8, 128)).square().sum().backward()
    net[2].weight.grad[0, 0] = value
    with pytest.raises(UserError, match=f"^2: its gradient holds NaN or infinity in {recipe}"):
        optimizer.step()
    to_plain_layers(net)


def test_a_weight_that_is_not_finite_is_the_first_cause(model: Deep) -> None:
    model.layers[1].weight.data[0, 0] = torch.nan
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _loss(model).backward()
    with pytest.raises(UserError, match=r"^layers.1: its weight holds NaN or infinity; no weight was changed"):
        optimizer.step()


def test_parameters_in_16_bit_are_watched_too(model: Deep) -> None:
    optimizer, before = torch.optim.SGD(model.parameters(), lr=0.1), _copied(model)
    _loss(model).backward()
    model.norm.weight.grad[0] = torch.nan
    with pytest.raises(UserError, match=r"^norm.weight: its gradient holds NaN or infinity; no weight was changed"):
        optimizer.step()
    assert _unchanged(model, before)


def test_optimizers_of_other_models_and_of_plain_models_are_left_alone(model: Deep) -> None:
    other = Deep()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, other)]
    _loss(other, broken=True).backward()
    optimizers[1].step()  # not watched
    to_plain_layers(model)
    _loss(model, broken=True).backward()
    optimizers[0].step()  # no longer watched


def test_gradients_of_gradients_are_refused(model: Deep) -> None:
    x = torch.randn(8, 64).requires_grad_()
    with pytest.raises(UserError, match=r"layers.2: create_graph=True asks for gradients of gradients.* mxfp8 do not"):
        torch.autograd.grad(model(x).square().sum(), x, create_graph=True)


def test_a_model_that_trains_in_eval_mode_is_told_once(model: Deep) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    _loss(model.eval()).backward()
    with pytest.warns(UserWarning, match=r"layers.0: the model trains in eval mode.* call model.train\(\)"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
