"""Widths that are no multiple of 128: INT4 in groups of 32 and 64, FP8 in squares with short last ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_models
import torch
from safetensors.torch import load_file

import quant
from quant.kernels.linear.quant_linear import QuantLinear
from quant.models.open_model import open_model
from quant.recipes.layers import LayerKind
from quant.recipes.recipe import Recipe, get_recipe

transformers = pytest.importorskip("transformers", reason="the extra hf")

WEIGHT_ONLY = Recipe("squares", weight="fp8_block", activation="keep", solver="rtn")
CASES = [("int4a16_g32", 32), ("int4a16_g64", 64), (WEIGHT_ONLY, 8)]


@pytest.mark.parametrize(("recipe", "unit"), CASES, ids=["g32", "g64", "squares"])
def test_a_checkpoint_is_read_by_the_other_package_as_by_ours(recipe: str | Recipe, unit: int, tmp_path: Path) -> None:
    """Its weights are those that compressed-tensors unpacks, and logits those of the model that was saved."""
    width = 128 + unit
    model = tiny_models.llama(dtype=torch.bfloat16, gain=2.0, hidden_size=width, intermediate_size=width + 2 * unit)
    original = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    made = quant.quantize(model, recipe)
    assert len(made.plan.quantized) == 14
    quant.save(made.model, made.plan, tmp_path / "out")
    again, ids = quant.load(tmp_path / "out"), torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, made.model(ids).logits)
    config = transformers.CompressedTensorsConfig(run_compressed=False)
    peer = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16, quantization_config=config
    )
    source = open_model(_without_plan(tmp_path / "out")).model
    assert source is not None
    for name, module in again.named_modules():
        if not isinstance(module, QuantLinear):
            continue
        ours = module.quantized_weight.dequantize(torch.bfloat16)
        torch.testing.assert_close(peer.get_submodule(name).weight, ours, rtol=2**-7, atol=0)
        assert torch.equal(source.get_submodule(name).weight, ours)
        error = (ours.float() - original[f"{name}.weight"].float()).norm() / original[f"{name}.weight"].float().norm()
        assert error < (0.14 if "int4" in module.weight_format.name else 0.03)


def _without_plan(directory: Path) -> Path:
    """What another tool would have written."""
    (directory / "plan.json").unlink()
    return directory


def test_short_squares_take_inputs_in_16_bit_alone() -> None:
    """Runtimes count squares upwards, and refuse to round inputs in groups of 128 where one would be short."""
    model = tiny_models.llama(hidden_size=160, intermediate_size=256)
    plan = quant.make_plan(model, "fp8_block")
    linear = [layer for layer in plan.layers if layer.kind == LayerKind.LINEAR]
    kept = {layer.name: layer.reason for layer in linear if layer.weight is None}
    assert set(kept) == {layer.name for layer in linear if layer.shape[1] == 160}
    assert all("in = 160 is not a multiple of fp8_group's block of 128" in reason for reason in kept.values())


def test_small_groups_lose_less(tmp_path: Path) -> None:
    errors = []
    weight = load_file(_stored(tmp_path))["model.layers.0.mlp.up_proj.weight"]
    for name in ("int4a16", "int4a16_g64", "int4a16_g32"):
        format = get_recipe(name).weight
        assert format is not None
        found = quant.quantize(_linear(weight), name, run=lambda m: m(torch.ones(1, 256).bfloat16())).layers
        errors.append(next(layer.relative_error for layer in found if layer.format == format))
    assert errors == sorted(errors, reverse=True) and errors[0] > 1.05 * errors[2]


def _stored(folder: Path) -> Path:
    tiny_models.llama(dtype=torch.bfloat16, hidden_size=256).save_pretrained(folder)
    return folder / "model.safetensors"


def _linear(weight: torch.Tensor) -> torch.nn.Module:
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    layer.weight.data.copy_(weight)
    return torch.nn.Sequential(layer)
