"""Replicas of nn.DataParallel, on other devices than the original layers, compute and train what these do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tiny_models
import torch
from children import run_ranks
from second_device import second_device
from torch import nn

import quant
from quant.training.qat_layers import RoundedWeight

ROWS = torch.randint(0, 64, (4, 24), generator=torch.Generator().manual_seed(7))
CASES = [("nvfp4", "recomputed"), ("nvfp4", "learned"), ("fp8", "recomputed"), ("fp8", "frozen"), ("fp8", "learned")]


def prepared(recipe: str, scales: str) -> Any:
    model = tiny_models.llama(gain=2.0, num_hidden_layers=1).requires_grad_(True)
    quant.prepare_qat(model, recipe, ROWS, solver="rtn", scales=scales)
    return model


def replica_of(layer: RoundedWeight, device: torch.device) -> Any:
    """As nn.DataParallel makes it."""
    replica: Any = layer._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
    for name, tensor in (*layer._parameters.items(), *layer._buffers.items()):
        setattr(replica, name, None if tensor is None else tensor.detach().to(device))
    return replica


def on_a_second_device(_: int) -> None:
    """It changes PyTorch for good, so this is the work of a process of its own."""
    device = second_device()
    for recipe, scales in CASES:
        layers = [m for m in prepared(recipe, scales).modules() if isinstance(m, RoundedWeight)]
        x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
        for layer in layers:
            if layer.weight.shape[1] != x.shape[1]:
                continue
            with torch.no_grad():
                expected, found = layer(x), replica_of(layer, device)(x.to(device))
            assert found.device == device and torch.equal(found.cpu(), expected), (recipe, scales)


def test_a_replica_on_another_device_computes_what_its_layer_does() -> None:
    """It knows the fused layers that are on the first device alone."""
    run_ranks(on_a_second_device)


def test_the_model_inside_of_data_parallel_is_packed() -> None:
    model = prepared("nvfp4", "recomputed")
    with torch.no_grad():
        expected = model(ROWS).logits
    quant.pack(nn.DataParallel(model))
    assert torch.equal(model(ROWS).logits, expected)


def test_replicas_share_nothing() -> None:
    """They run at the same time, and would find each other's inputs."""
    mlp: Any = prepared("nvfp4", "recomputed").model.layers[0].mlp
    for layer in (mlp.gate_proj, mlp.up_proj):
        replica_of(layer, torch.device("cpu"))(torch.randn(5, 64))
        assert layer.fusion._pass is None


@pytest.mark.gpu
def test_two_gpus_are_distilled_as_one_is() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    student, teacher = tiny_models.llama(gain=2.0).cuda(), tiny_models.llama(seed=1, gain=2.0).cuda()
    batch = {"input_ids": ROWS.cuda(), "attention_mask": torch.ones_like(ROWS).cuda()}
    batch["attention_mask"][:2, :8] = 0
    expected = quant.distill(student, teacher, batch)
    assert quant.distill(nn.DataParallel(student, [0, 1]), teacher, batch).item() == pytest.approx(
        expected.item(), rel=1e-4
    )


@pytest.mark.gpu
@pytest.mark.parametrize(("recipe", "scales"), CASES)
def test_two_gpus_train_as_one_does(recipe: str, scales: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    model = prepared(recipe, scales).cuda()
    twin = copy.deepcopy(model)
    rows = ROWS.cuda()
    spread = nn.DataParallel(twin, [0, 1])
    expected, found = model(rows).logits, spread(rows).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    expected.square().mean().backward()
    found.square().mean().backward()
    for (name, one), other in zip(twin.named_parameters(), model.parameters(), strict=True):
        assert float((one.grad - other.grad).norm() / other.grad.norm()) < 1e-3, name
