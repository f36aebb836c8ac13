"""The scales of a planned KV cache are measured, saved as llm-compressor saves them, and loaded back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from samples import BASE, GOLDENS

import quant
from quant.export.checkpoint.files.compressed_tensors import read_config
from quant.export.checkpoint.files.names import StoredNames
from quant.generate.quantized_attention import quantized_attention
from quant.recipes.blocks import cache_of
from quant.recipes.recipe import get_recipe

ROWS = torch.randint(0, 256, (4, 32), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[quant.Quantized, Path]:
    model = quant.open_model(BASE).model
    assert model is not None
    result = quant.quantize(model, replace(get_recipe("fp8"), kv_cache="fp8"), ROWS)
    out = tmp_path_factory.mktemp("kv") / "out"
    quant.save(result.model, result.plan, out)
    return result, out


def test_names_dtypes_shapes_and_config_are_the_golden_ones(saved: tuple[quant.Quantized, Path]) -> None:
    golden = GOLDENS / "compressed_tensors" / "FP8"
    ours, theirs = load_file(saved[1] / "model.safetensors"), load_file(golden / "model.safetensors")
    assert {n: (t.dtype, t.shape) for n, t in ours.items()} == {n: (t.dtype, t.shape) for n, t in theirs.items()}
    configs = [json.loads((d / "config.json").read_text())["quantization_config"] for d in (saved[1], golden)]
    assert configs[0] == configs[1]


def test_scales_are_the_amax_of_what_the_quantized_model_caches(saved: tuple[quant.Quantized, Path]) -> None:
    model = saved[0].model
    largest = torch.zeros(2, 2)
    for row in ROWS:
        with torch.no_grad():
            cache = cache_of(model(row[None], use_cache=True))
        for i, layer in enumerate(cache.layers):
            found = torch.tensor([float(layer.keys.abs().max()), float(layer.values.abs().max())])
            largest[i] = torch.maximum(largest[i], found)
    tensors = load_file(saved[1] / "model.safetensors")
    for i in range(2):
        for j, operand in enumerate("kv"):
            scale = tensors[f"model.layers.{i}.self_attn.{operand}_scale"]
            assert torch.equal(scale, (largest[i, j] / 448).to(torch.bfloat16).view(1))


@pytest.mark.parametrize("own", [True, False])
def test_loads(saved: tuple[quant.Quantized, Path], own: bool) -> None:
    directory = saved[1] if own else GOLDENS / "compressed_tensors" / "FP8"
    model, tensors = quant.load(directory), load_file(directory / "model.safetensors")
    assert torch.equal(model.model.layers[1].self_attn.v_scale, tensors["model.layers.1.self_attn.v_scale"])


def test_each_kv_head_has_a_scale_of_its_own(tmp_path: Path) -> None:
    """As llm-compressor writes them, `[kv_heads, 1, 1]`, under the strategy that vLLM calls `attn_head`."""
    model = quant.open_model(BASE).model
    assert model is not None
    result = quant.quantize(model, "fp8", ROWS, kv_cache="fp8_head")
    with pytest.warns(UserWarning, match="a scale for each KV head: vLLM reads these with FlashAttention 3"):
        quant.save(result.model, result.plan, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["kv_cache_scheme"]["strategy"] == "attn_head" and config["kv_cache_scheme"]["num_bits"] == 8
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    largest: dict[str, torch.Tensor] = {}
    for row in ROWS:
        with torch.no_grad():
            cache = cache_of(result.model(row[None], use_cache=True))
        for i, layer in enumerate(cache.layers):
            for operand, values in (("k", layer.keys), ("v", layer.values)):
                name, amax = f"model.layers.{i}.self_attn.{operand}_scale", values.abs().amax((0, 2, 3)).float()
                largest[name] = torch.maximum(largest.get(name, amax), amax)
    for name, amax in largest.items():
        assert len(amax) > 1 and torch.equal(tensors[name], (amax / 448).to(torch.bfloat16).view(-1, 1, 1))
    # The plan in the files and the config say the same, and a loaded model computes what the quantized one does.
    assert quant.Plan.load(tmp_path / "out" / "plan.json").kv_cache is result.plan.kv_cache
    assert read_config(config, StoredNames())[1] is result.plan.kv_cache
    loaded = quant.load(tmp_path / "out")
    with torch.no_grad(), quantized_attention(loaded, **result.plan.run_time):
        logits = loaded(ROWS[:1]).logits
    with torch.no_grad(), quantized_attention(result.model, **result.plan.run_time):
        assert torch.equal(logits, result.model(ROWS[:1]).logits)


def test_a_format_that_cannot_be_stored(tmp_path: Path) -> None:
    model = quant.open_model(BASE).model
    plan = replace(quant.make_plan(model, "nvfp4a16"), kv_cache=quant.FORMATS["nvfp4"])
    with pytest.raises(ValueError, match="cannot store a KV cache in nvfp4"):
        quant.save(model, plan, tmp_path / "out")
    assert not (tmp_path / "out").exists()
