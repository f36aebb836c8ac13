"""Names, dtypes and bytes are as compressed-tensors reads them, both ways without loss."""

import dataclasses
import json
import re
from typing import Any

import pytest
import torch
from samples import GOLDENS

from quant.calibration.solvers.registry import get_solver
from quant.calibration.solvers.solve_group import solve_group
from quant.export.checkpoint.files.compressed_tensors import (
    activation_format_of,
    check_plan,
    compress,
    decompress,
    quantization_config,
    weight_format_of,
)
from quant.formats.format import FORMATS
from quant.formats.tensor import quantize
from quant.recipes.layers import LayerKind
from quant.recipes.plan import LayerPlan, Plan

WEIGHTS = ["nvfp4", "mxfp4", "mxfp6", "mxfp8", "fp8", "fp8_channel", "fp8_block", "int8"]
WEIGHTS += ["int4", "int4_g64", "int4_g32"]
PAIRS = {
    "NVFP4": ("nvfp4", "nvfp4"),
    "NVFP4A16": ("nvfp4", None),
    "FP8": ("fp8", "fp8"),
    "FP8_DYNAMIC": ("fp8_channel", "fp8_token"),
    "FP8_BLOCK": ("fp8_block", "fp8_group"),
    "MXFP4": ("mxfp4", "mxfp4"),
    "MXFP8": ("mxfp8", "mxfp8"),
}


def config_of(golden: str) -> dict[str, Any]:
    return json.loads((GOLDENS / "compressed_tensors" / golden / "config.json").read_text())["quantization_config"]


def plan_of(*pairs: tuple[str, str | None], head: bool = True) -> Plan:
    layers = [
        LayerPlan(
            f"model.layers.{i}.mlp.up_proj",
            LayerKind.LINEAR,
            (256, 256),
            FORMATS[w],
            FORMATS[a] if a is not None else None,
        )
        for i, (w, a) in enumerate(pairs)
    ]
    kept = [LayerPlan("model.norm", LayerKind.NORM, (256,)), LayerPlan("lm_head", LayerKind.HEAD, (100, 256))]
    return Plan((*layers, *(kept if head else kept[:1])))


@pytest.mark.parametrize("format", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_compress_and_decompress_are_inverses(format: str, dtype: torch.dtype) -> None:
    # The solver's global scale is one that survives being stored as its reciprocal.
    weight = solve_group({"w": torch.randn(160, 256).to(dtype)}, {}, FORMATS[format], get_solver("rtn"))["w"]
    stored = compress(weight, None, dtype)
    back, input_scale = decompress(stored, FORMATS[format])
    assert input_scale is None and back.shape == weight.shape and back.format is weight.format
    for ours, theirs in ((weight.codes, back.codes), (weight.scale, back.scale)):
        assert ours.dtype is theirs.dtype and ours.shape == theirs.shape
        assert torch.equal(ours.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))
    assert torch.equal(back.dequantize(torch.float64), weight.dequantize(torch.float64))
    again = compress(back, None, dtype)
    assert again.keys() == stored.keys()
    assert all(
        torch.equal(again[k].reshape(-1).view(torch.uint8), stored[k].reshape(-1).view(torch.uint8)) for k in stored
    )


@pytest.mark.parametrize(("format", "activation"), [("nvfp4", "fp8"), ("fp8_channel", "nvfp4")])
def test_the_name_of_an_input_scale_is_that_of_the_inputs_format(format: str, activation: str) -> None:
    weight, scale = quantize(torch.randn(32, 64), FORMATS[format]), 1 / (1 / torch.tensor(0.0123))
    stored = compress(weight, scale, torch.float32, FORMATS[activation])
    assert ("input_global_scale" in stored, "input_scale" in stored) == (activation == "nvfp4", activation == "fp8")
    back = decompress(stored, FORMATS[format])[1]
    assert back is not None and torch.equal(back.double(), scale.double())


def test_any_reciprocal_in_a_file_is_kept() -> None:
    """Also those that no float32 is the inverse of, which another toolkit may have written."""
    weight = quantize(torch.randn(32, 64), FORMATS["nvfp4"])
    stored = compress(weight, None, torch.bfloat16)
    for reciprocal in torch.rand(500) * torch.logspace(-10, 10, 500):
        stored["weight_global_scale"] = reciprocal.reshape(1)
        back, _ = decompress(stored, FORMATS["nvfp4"])
        assert torch.equal(compress(back, None, torch.bfloat16)["weight_global_scale"], reciprocal.reshape(1))
        assert back.global_scale is not None
        assert float(back.global_scale) == pytest.approx(1 / float(reciprocal), rel=1e-7)


@pytest.mark.parametrize(("format", "activation"), [("nvfp4", "nvfp4"), ("fp8", "fp8")])
def test_a_static_input_scale_comes_back(format: str, activation: str) -> None:
    weight = quantize(torch.randn(32, 64), FORMATS[format])
    for value in (torch.tensor(0.03125), 1 / (1 / torch.tensor(0.0123))):
        scale = value if format == "nvfp4" else value.bfloat16().float()
        stored = compress(weight, scale, torch.bfloat16)
        name = "input_global_scale" if format == "nvfp4" else "input_scale"
        assert stored[name].shape == (1,)
        assert stored[name].dtype is (torch.float32 if format == "nvfp4" else torch.bfloat16)
        expected = 1 / float(scale) if format == "nvfp4" else float(scale)
        assert float(stored[name]) == pytest.approx(expected, rel=1e-7)
        back = decompress(stored, FORMATS[format])[1]
        assert back is not None and torch.equal(back.double(), scale.double())


@pytest.mark.parametrize("format", WEIGHTS)
def test_the_library_decompresses_our_tensors_to_our_values(format: str) -> None:
    """compressed-tensors' own decompressor over our bytes, against our dequantization rounded to the same dtype."""
    library = pytest.importorskip("compressed_tensors")
    schemes = pytest.importorskip("compressed_tensors.quantization")
    weight = quantize(torch.randn(256, 256).bfloat16(), FORMATS[format])
    config = quantization_config(plan_of((format, None)))
    scheme = schemes.QuantizationScheme(**config["config_groups"]["group_0"])
    compressor = library.compressors.base.BaseCompressor.get_value_from_registry(config["format"])
    values = compressor.decompress(compress(weight, None, torch.bfloat16), scheme)["weight"]
    assert torch.equal(values.float(), weight.dequantize(values.dtype).float())


@pytest.mark.parametrize("cut", ["weight_packed", "weight_scale", "weight_global_scale"])
def test_a_missing_tensor_is_a_key_error_that_names_it(cut: str) -> None:
    stored = compress(quantize(torch.randn(32, 64), FORMATS["nvfp4"]), None, torch.bfloat16)
    del stored[cut]
    with pytest.raises(KeyError, match=cut):
        decompress(stored, FORMATS["nvfp4"])


@pytest.mark.parametrize(("golden", "pair"), PAIRS.items())
def test_the_config_is_the_golden_one(golden: str, pair: tuple[str, str | None]) -> None:
    theirs = config_of(golden)
    plan = plan_of(pair)
    if theirs["kv_cache_scheme"]:
        plan = dataclasses.replace(plan, kv_cache=FORMATS["fp8"])
    assert quantization_config(plan) == theirs


@pytest.mark.parametrize(("golden", "pair"), PAIRS.items())
def test_formats_are_read_off_the_golden_config(golden: str, pair: tuple[str, str | None]) -> None:
    group = config_of(golden)["config_groups"]["group_0"]
    assert weight_format_of(group["weights"]) is FORMATS[pair[0]]
    assert activation_format_of(group["input_activations"]) is (FORMATS[pair[1]] if pair[1] else None)


@pytest.mark.parametrize("format", WEIGHTS)
def test_every_weight_format_is_read_off_its_own_config(format: str) -> None:
    group = quantization_config(plan_of((format, None)))["config_groups"]["group_0"]
    assert weight_format_of(json.loads(json.dumps(group["weights"]))) is FORMATS[format]


@pytest.mark.parametrize(
    "format", ["nvfp4", "mxfp4", "mxfp8", "fp8", "fp8_token", "fp8_group", "int8_token", "int8_tensor"]
)
def test_every_input_format_is_read_off_its_own_config(format: str) -> None:
    group = quantization_config(plan_of(("fp8", format)))["config_groups"]["group_0"]
    assert activation_format_of(json.loads(json.dumps(group["input_activations"]))) is FORMATS[format]


def test_mixed_formats_list_their_layers() -> None:
    config = quantization_config(plan_of(("nvfp4", None), ("fp8_channel", "fp8_token"), ("nvfp4", None)))
    assert config["format"] == "mixed-precision" and config["ignore"] == ["lm_head"]
    first, second = config["config_groups"].values()
    assert first["targets"] == ["model.layers.0.mlp.up_proj", "model.layers.2.mlp.up_proj"]
    assert second["targets"] == ["model.layers.1.mlp.up_proj"]
    assert (first["format"], second["format"]) == ("nvfp4-pack-quantized", "float-quantized")
    same = quantization_config(plan_of(("fp8_channel", "fp8_token"), ("fp8", "fp8")))
    assert same["format"] == "float-quantized" and len(same["config_groups"]) == 2


def test_a_head_in_the_format_of_the_others_is_targeted_by_name() -> None:
    """vLLM's head is no `Linear`: under the class alone it stays in 16 bit, and its codes have no parameter there."""
    plan = plan_of(("nvfp4", None))
    head = LayerPlan("lm_head", LayerKind.HEAD, (100, 256), FORMATS["nvfp4"])
    config = quantization_config(Plan((*plan.layers[:-1], head)))
    assert config["config_groups"]["group_0"]["targets"] == ["Linear", "lm_head"] and config["ignore"] == []


def test_experts_are_targeted_by_their_module_as_a_pattern() -> None:
    experts = LayerPlan("model.layers.1.mlp.experts.down_proj", LayerKind.EXPERTS, (4, 256, 256), FORMATS["nvfp4"])
    plan = Plan((*plan_of(("fp8_channel", "fp8_token")).layers, experts))
    target = quantization_config(plan)["config_groups"]["group_1"]["targets"][0]
    assert target.startswith("re:")
    assert re.match(target[3:], "model.layers.1.mlp.experts.3.down_proj")
    assert not re.match(target[3:], "model.layers.10.mlp.experts.3.down_proj")
    assert not re.match(target[3:], "model.layers.1xmlp.experts.3.down_proj")


def test_vllm_finds_the_experts_of_a_model_for_images() -> None:
    """It renames entries to the names of its modules, and leaves patterns as they are."""
    experts = LayerPlan("model.language_model.layers.1.mlp.experts.down_proj", LayerKind.EXPERTS, (4, 64, 64))
    for layer in (experts, dataclasses.replace(experts, weight=FORMATS["nvfp4"])):
        config = quantization_config(Plan((*plan_of(("fp8_channel", "fp8_token")).layers, layer)))
        entries = config["config_groups"]["group_1"]["targets"] if layer.weight else config["ignore"]
        renamed = [entry.replace("model.language_model.", "language_model.model.", 1) for entry in entries]
        for part in ("gate_proj", "up_proj", "down_proj"):
            assert f"language_model.model.layers.1.mlp.experts.0.{part}" in renamed


@pytest.mark.parametrize("format", ["mxfp6_e3m2", "mxfp8_e5m2", "fp8_token", "fp8_group", "int8_token", "int8_tensor"])
def test_what_the_layout_cannot_store_is_refused_by_layer(format: str) -> None:
    with pytest.raises(ValueError, match=rf"model\.layers\.0\.mlp\.up_proj: .* cannot store {format}; it has nvfp4"):
        check_plan(plan_of((format, None)))


@pytest.mark.parametrize(
    ("change", "kind"),
    [({"num_bits": 3}, "weights"), ({"symmetric": False}, "weights"), ({"group_size": 8}, "weights")],
)
def test_a_config_that_is_none_of_ours_is_quoted(change: dict[str, Any], kind: str) -> None:
    group = config_of("NVFP4")["config_groups"]["group_0"]
    with pytest.raises(ValueError, match=f"quantization_config has {kind}.*{next(iter(change))}.*not supported"):
        weight_format_of({**group["weights"], **change})


def test_inputs_that_are_none_of_ours_are_quoted() -> None:
    group = config_of("NVFP4")["config_groups"]["group_0"]
    with pytest.raises(ValueError, match=r"quantization_config has inputs.*'num_bits': 3.*not supported"):
        activation_format_of({**group["input_activations"], "num_bits": 3})


@pytest.mark.parametrize("activation", [name for name in FORMATS if name != "nvfp4"])
def test_inputs_that_others_would_round_otherwise_are_refused(activation: str) -> None:
    """What is written is read back as the same rounding, or is not written; brute force over the values of a format."""
    plan = plan_of(("fp8_channel", activation))
    x = torch.linspace(-3, 3, 1024).reshape(4, 256)
    if activation in ("mxfp6_e3m2", "mxfp8_e5m2", "fp8_block") or activation.startswith("int4"):
        with pytest.raises(ValueError, match=f"cannot name inputs in {activation}"):
            check_plan(plan)
        return
    group = quantization_config(plan)["config_groups"]["group_0"]
    read = activation_format_of(group["input_activations"])
    assert read is not None
    assert torch.equal(quantize(x, read).dequantize(), quantize(x, FORMATS[activation]).dequantize())
