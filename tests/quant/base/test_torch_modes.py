"""A caller's autocast or inference mode changes nothing, and what is made in it can be trained."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from torch import nn

import quant
from tests.tiny_models import llama

IDS = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(1))
MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
}


def bits(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone().flatten().view(torch.uint8) for name, tensor in model.state_dict().items()}


def assert_equal(model: nn.Module, other: nn.Module) -> None:
    found, wanted = bits(model), bits(other)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("recipe", "options"),
    [("nvfp4a16", {}), ("nvfp4", {"solver": "awq:merge+kfac"}), ("fp8", {"kv_cache": "fp8"})],
    ids=["gptq", "kfac", "static"],
)
def test_quantizing(mode: str, recipe: str, options: dict[str, str]) -> None:
    wanted, model = (llama().eval() for _ in range(2))
    quant.quantize(wanted, recipe, IDS, **options)
    with MODES[mode]():
        quant.quantize(model, recipe, IDS, **options)
    assert_equal(model, wanted)
    model(IDS, labels=IDS).loss.backward()


def test_a_model_made_in_inference_mode_is_quantized_in_it_and_outside() -> None:
    wanted = quant.quantize(llama().eval(), "nvfp4a16", IDS).model
    with torch.inference_mode():
        models = [llama().eval() for _ in range(2)]
        quant.quantize(models[0], "nvfp4a16", IDS)
    quant.quantize(models[1], "nvfp4a16", IDS)
    for model in models:
        assert_equal(model, wanted)


@pytest.mark.parametrize("mode", MODES)
def test_loaded_measured_and_trained(mode: str, tmp_path: Path) -> None:
    result = quant.quantize(llama().eval(), "nvfp4a16", IDS)
    quant.save(result.model, result.plan, tmp_path / "saved")
    measured = quant.evaluate(result.model, IDS, llama().eval()).kl
    trained = llama()
    with MODES[mode]():
        loaded = quant.load(tmp_path / "saved")
        assert_equal(loaded, result.model)
        assert quant.evaluate(loaded, IDS, llama().eval()).kl == measured
        quant.prepare_qat(trained, "nvfp4a16")
    trained(IDS, labels=IDS).loss.backward()
    with MODES[mode]():
        quant.pack(trained)
    trained(IDS, labels=IDS).loss.backward()
