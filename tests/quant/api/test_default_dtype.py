"""A user's `torch.set_default_dtype` changes no bit of a result: our own tensors name their dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tiny_models
import torch
from torch import nn

import quant

ROWS = torch.randint(0, 64, (16, 64), generator=torch.Generator().manual_seed(1))


def quantized(recipe: str, **options: Any) -> Callable[[nn.Module], nn.Module]:
    return lambda model: quant.quantize(model, recipe, ROWS, **options).model


def within_budget(model: nn.Module) -> nn.Module:
    return quant.quantize(model, data=ROWS, bits=6.0, formats=["nvfp4a16", "fp8a16"]).model


def trained(model: nn.Module) -> nn.Module:
    quant.prepare_qat(model, "nvfp4", ROWS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(ROWS, labels=ROWS).loss.backward()
    optimizer.step()
    quant.pack(model)
    return model


@pytest.fixture(params=[torch.bfloat16, torch.float64], ids=str)
def default_dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    yield request.param
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "work",
    [
        quantized("nvfp4"),
        quantized("nvfp4a16", solver="kfac"),
        quantized("nvfp4", solver="local_hessian"),
        quantized("fp8", observer="entropy", kv_cache="fp8"),
        quantized("nvfp4a16", solver="awq+lowrank:8+gptq"),
        within_budget,
        trained,
    ],
    ids=["gptq", "kfac", "local_hessian", "entropy", "lowrank", "budget", "qat"],
)
def test_the_default_dtype_changes_no_bit(default_dtype: torch.dtype, work: Callable[[nn.Module], nn.Module]) -> None:
    expected = work(tiny_models.llama(gain=3.0)).state_dict()
    model = tiny_models.llama(gain=3.0)
    torch.set_default_dtype(default_dtype)
    result = work(model).state_dict()
    assert list(result) == list(expected)
    for name, tensor in expected.items():
        assert result[name].dtype == tensor.dtype, name
        assert torch.equal(result[name].double(), tensor.double()), name
