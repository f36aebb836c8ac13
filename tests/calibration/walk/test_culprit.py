"""NaN in a weight is seen in the input of a layer behind it; the error names the weight."""

from __future__ import annotations

import re

import pytest
import tiny_models
import torch

from quant.run.api import quantize

ROWS = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("solver", ["rtn", "gptq", "awq:merge+gptq"])
@pytest.mark.parametrize(
    ("name", "value", "seen"),
    [
        ("model.layers.1.mlp.up_proj.weight", torch.nan, "model.layers.1.mlp.down_proj"),
        ("model.layers.0.self_attn.v_proj.weight", -torch.inf, "model.layers.0.self_attn.o_proj"),
    ],
)
def test_of_a_linear(name: str, value: float, seen: str, solver: str) -> None:
    model = tiny_models.llama()
    model.get_parameter(name).data[3, 5] = value
    shape = list(model.get_parameter(name).shape)
    with pytest.raises(ValueError, match=re.escape(f"{name} {shape} holds 1 value(s) that are NaN")) as caught:
        quantize(model, "nvfp4", ROWS, solver=solver)
    assert f"first seen in the input of {seen}" in str(caught.value) and "repair the model" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_of_an_expert() -> None:
    model = tiny_models.qwen3_moe()
    path = "model.layers.0.mlp.experts"
    model.get_parameter(f"{path}.gate_up_proj").data[2, 3] = torch.nan
    with pytest.raises(ValueError, match=re.escape(f"{path}.gate_up_proj [4, 64, 64] holds 64 value(s)")):
        quantize(model, "nvfp4", ROWS, solver="gptq")


def test_data_are_blamed_where_all_weights_are_finite() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32))
    rows = torch.randn(3, 64)
    rows[2, 1] = torch.inf
    with pytest.raises(
        ValueError, match=r"^0: the input holds NaN or infinity on calibration row 2, and no weight does"
    ):
        quantize(model, "fp8", rows, solver="rtn")


@pytest.mark.parametrize("solver", ["rtn", "gptq"])
@pytest.mark.parametrize("kind", ["vectors", "texts"])
def test_the_row_is_named_whatever_the_shapes_of_the_rows(kind: str, solver: str) -> None:
    """Row 5 of texts of several lengths, which share a batch only with their like, or of vectors."""
    layers = (torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32))
    rows = list(torch.randn(7, 1, 64, generator=torch.Generator().manual_seed(0)))
    if kind == "texts":
        rows = [row.expand(length, 64)[None].clone() for row, length in zip(rows, (9, 9, 4, 6, 6, 6, 6), strict=True)]
    rows[5][..., -1, 1] = torch.inf
    with pytest.raises(ValueError, match=r"^0: the input holds NaN or infinity on calibration row 5, and no weight"):
        quantize(torch.nn.Sequential(*layers), "fp8", rows, solver=solver)
