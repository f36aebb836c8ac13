"""Fusion groups of a checkpoint without a plan: layers that runtimes merge, where it has one scale for them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quant.export.checkpoint.files.compressed_tensors import compress, quantization_config
from quant.export.checkpoint.files.layout import LAYOUT_NAMES
from quant.export.checkpoint.files.layouts import LAYOUTS
from quant.export.checkpoint.open_checkpoint import plan_of_checkpoint
from quant.formats.format import FORMATS
from quant.formats.tensor import quantize
from quant.recipes.layers import Layer, LayerKind
from quant.recipes.plan import LayerPlan, Plan

PLAN = Plan((LayerPlan("up", LayerKind.LINEAR, (32, 32), FORMATS["nvfp4"], FORMATS["nvfp4"]),))
NAMES = [f"block.attn.{part}_proj" for part in "qkv"]


def read(formats: list[str | None], scale: float, **fields: object) -> Plan:
    """The plan of q, k and v in `formats`, of which v's weight is larger by `scale`."""
    weight = torch.arange(512.0).reshape(16, 32).sin()
    weights = {name: weight * (scale if name == NAMES[2] else 1) for name in NAMES}
    layers = [
        LayerPlan(name, LayerKind.LINEAR, (16, 32), None if format is None else FORMATS[format])
        for name, format in zip(NAMES, formats, strict=True)
    ]
    tensors = {
        f"{layer.name}.{key}": tensor
        for layer in layers
        if layer.weight is not None
        for key, tensor in compress(quantize(weights[layer.name], layer.weight), None, torch.float32).items()
    }
    found = [Layer(name, LayerKind.LINEAR, (16, 32)) for name in NAMES]
    found = [replace(layer, **fields) for layer in found]  # type: ignore[arg-type]
    return plan_of_checkpoint(Path("out"), found, quantization_config(Plan(tuple(layers))), tensors)


@pytest.mark.parametrize("format", ["nvfp4", "fp8"])
def test_one_tensor_scale_is_one_group(format: str) -> None:
    assert [layer.group for layer in read([format] * 3, 1).layers] == ["block.attn.(q_proj|k_proj|v_proj)"] * 3
    assert [layer.group for layer in read([format] * 3, 2).layers] == [None] * 3


def test_no_group_across_formats_or_16_bit() -> None:
    assert [layer.group for layer in read(["nvfp4", "nvfp4", "mxfp8"], 1).layers] == [None] * 3
    assert [layer.group for layer in read(["nvfp4", None, None], 1).layers] == [None] * 3


def test_groups_that_a_run_has_shown_are_kept() -> None:
    plan = read(["nvfp4"] * 3, 1, group="seen", input_dims=3)
    assert [layer.group for layer in plan.layers] == ["seen"] * 3


def test_a_tied_layer_in_16_bit_stays_tied() -> None:
    plan = read(["nvfp4", "nvfp4", None], 1, tied_to="embed")
    assert [layer.tied_to for layer in plan.layers] == [None, None, "embed"]


def test_names_of_layouts_are_known_without_torch() -> None:
    assert tuple(LAYOUTS) == LAYOUT_NAMES
    assert {name: LAYOUTS[name].quantization_config(PLAN)["quant_method"] for name in LAYOUTS} == {
        name: name for name in LAYOUTS
    }
