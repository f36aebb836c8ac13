"""Layers that read the same input round it once and find their scale once; each computes what it would alone."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from quant.formats.format import FORMATS
from quant.formats.tensor import quantize
from quant.kernels.linear.quant_linear import QuantLinear
from quant.training import qat_layers
from quant.training import qat_layers as fusion
from quant.training.qat_layers import Fusion, QATLinear

NVFP4 = FORMATS["nvfp4"]


def layers(scales: str = "recomputed", input_scale: float = 2e-3, **parts: Any) -> list[QATLinear]:
    """q, k and v with a second level that is q's own, for q has the largest weight."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for rows, size in ((64, 3.0), (32, 1.0), (32, 0.5)):
        weight = size * torch.randn(rows, 128, generator=generator)
        packed = QuantLinear(quantize(weight, NVFP4), None, NVFP4, torch.tensor(input_scale), **parts)
        made.append(QATLinear(nn.Parameter(weight), packed, None, scales, torch.float32))
    fused(made)
    return made


def fused(members: list[QATLinear]) -> None:
    shared = Fusion(members)
    for member in members:
        member.fusion = shared


def alone(members: list[QATLinear], x: torch.Tensor) -> list[torch.Tensor]:
    """What the members give where none takes anything from another: a member that is called twice starts anew."""
    outputs = []
    for member in members:
        member(x)
        outputs.append(member(x))
        member.fusion.forget()
    return outputs


@pytest.fixture
def rounded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was rounded and measured, in order."""
    calls: list[str] = []
    for owner, name in ((qat_layers, "round_input"), (qat_layers, "measured_global_scale")):
        plain = getattr(owner, name)

        def counted(*args: Any, _plain: Any = plain, _name: str = name) -> Any:
            calls.append(_name)
            return _plain(*args)

        monkeypatch.setattr(owner, name, counted)
    return calls


def inputs(seed: int = 1) -> torch.Tensor:
    return torch.randn(5, 128, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@pytest.mark.parametrize("parts", [{}, {"hadamard": 32, "pre_scale": torch.linspace(0.5, 2, 128)}], ids=["", "parts"])
@pytest.mark.parametrize("scales", ["recomputed", "frozen", "learned"])
def test_values_and_gradients_are_those_of_layers_alone(scales: str, parts: Any, rounded: list[str]) -> None:
    members, x = layers(scales, **parts), inputs()
    expected = alone(members, x)
    sum(y.square().sum() for y in expected).backward()
    wanted = [x.grad.clone(), *(member.weight.grad.clone() for member in members)]
    for tensor in (x, *(member.weight for member in members)):
        tensor.grad = None
    rounded.clear()
    found = [member(x) for member in members]
    assert rounded == ["round_input", *(["measured_global_scale"] if scales == "recomputed" else [])]
    assert all(map(torch.equal, found, expected))
    sum(y.square().sum() for y in found).backward()
    for gradient, exact in zip([x.grad, *(member.weight.grad for member in members)], wanted, strict=True):
        assert float((gradient - exact).norm() / exact.norm()) < 1e-6  # sums in another order


def test_a_pass_ends_with_its_last_layer(rounded: list[str]) -> None:
    members, x = layers(), inputs()
    for _ in range(2):
        for member in members:
            member(x)
        assert members[0].fusion._pass is None
    assert rounded.count("round_input") == 2


def test_what_changed_within_a_pass_is_worked_out_anew() -> None:
    q, k, v = members = layers()
    x = inputs().detach()
    q(x)
    with torch.no_grad():
        q.weight.mul_(2)  # the second level of all three
    assert torch.equal(k(x), alone(members, x)[1])
    q(x)
    x.mul_(3)
    assert torch.equal(k(x), alone(members, x)[1])
    q(x)
    assert torch.equal(v(x.clone()), alone(members, x)[2])
    with torch.no_grad():
        q(x)
    y = k(x.requires_grad_())
    assert y.requires_grad
    q(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert k(x).dtype is torch.bfloat16


def test_in_inference_mode_nothing_is_shared() -> None:
    members, x = layers(), inputs().detach()
    expected = alone(members, x)
    with torch.inference_mode():
        assert all(map(torch.equal, [member(x.clone()) for member in members], expected))


def gradients(outputs: list[torch.Tensor], x: torch.Tensor, members: list[QATLinear]) -> list[Any]:
    """Of x and of the weights."""
    tensors = [x, *(member.weight for member in members)]
    for tensor in tensors:
        tensor.grad = None
    torch.stack([y.square().sum() for y in outputs]).sum().backward()
    return [tensor.grad for tensor in tensors]


PARTS = {"block": [(0, 1, 2)], "each": [(0,), (1,), (2,)], "two": [(0, 1), (2,)], "one": [(0,)]}


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_checkpointing_changes_no_gradient(parts: list[tuple[int, ...]], reentrant: bool, rounded: list[str]) -> None:
    """Within one part layers share what they work out, and in parts of their own each is alone."""
    members, x = layers(), inputs()
    exact = gradients(alone(members, x), x, members)
    for _ in range(2):
        rounded.clear()
        found: list[torch.Tensor] = []
        for part in parts:
            few = [members[index] for index in part]

            def run(given: torch.Tensor, few: list[QATLinear] = few) -> tuple[torch.Tensor, ...]:
                return tuple(member(given) for member in few)

            found += checkpoint(run, x, use_reentrant=reentrant)
        found += [member(x) for member in members[len(found) :]]
        apart = gradients(found, x, members)
        for one, other in zip(apart, exact, strict=True):
            assert float((one - other).norm() / other.norm()) < 1e-6
        if len(parts[0]) == 3:
            assert rounded.count("round_input") == 2  # forward, and again in the backward pass


def test_one_pass_at_most_keeps_its_tensors() -> None:
    """Each layer is checkpointed by itself, so no pass is ended by its last layer."""
    first, second, x = layers(), layers(), inputs()
    for members in (first, second):
        for member in members:
            checkpoint(member, x, use_reentrant=False)
    assert first[0].fusion._pass is None


def test_under_hooks_of_the_whole_pass_layers_share(rounded: list[str]) -> None:
    members, x = layers(), inputs()
    exact = gradients(alone(members, x), x, members)
    rounded.clear()
    with torch.autograd.graph.save_on_cpu():
        found = [member(x) for member in members]
    assert rounded.count("round_input") == 1
    for one, other in zip(gradients(found, x, members), exact, strict=True):
        assert float((one - other).norm() / other.norm()) < 1e-6


def test_where_hooks_cannot_be_seen_nothing_is_shared(rounded: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion, "_top_hooks", None)
    members, x = layers(), inputs()
    for member in members:
        member(x)
    assert rounded.count("round_input") == 3


def test_layers_that_round_otherwise_share_nothing(rounded: list[str]) -> None:
    members, x = layers(), inputs()
    assert members[0].fusion.is_alike
    other = copy.deepcopy(members[1]).state_dict()
    other["input_scale"] = torch.tensor(1e-3)
    members[1].load_state_dict(other)
    found = [member(x) for member in members]
    assert not members[0].fusion.is_alike and rounded.count("round_input") == 3
    assert all(map(torch.equal, found, alone(members, x)))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_a_copy_within_a_pass_is_whole(copied: Any) -> None:
    members, x = nn.ModuleList(layers()), inputs()
    members[0](x * 1)
    twin = copied(members)
    assert twin[1].fusion.members == tuple(twin) and twin[1].fusion is twin[0].fusion
    assert all(map(torch.equal, [member(x) for member in twin], [member(x) for member in members]))
