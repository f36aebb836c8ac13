"""A plan's config for ModelOpt quantizes the plan's layers, in the formats of ModelOpt's own presets, and no others."""

import sys
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import pytest
import tiny_models
import torch
from samples import ROOT
from torch import nn

import quant
from quant.adapters.modelopt_names import modelopt_config
from quant.formats.format import FORMATS
from quant.recipes.plan import Parts

NVFP4 = {"num_bits": (2, 1), "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}}
MXFP8 = {"num_bits": (4, 3), "block_sizes": {-1: 32, "type": "dynamic", "scale_bits": (8, 0)}}
MXFP4 = {"num_bits": (2, 1), "block_sizes": {-1: 32, "type": "dynamic", "scale_bits": (8, 0)}}
FP8 = {"num_bits": (4, 3), "axis": None}
# Weight and inputs, as nvidia-modelopt 0.47 has them: NVFP4_DEFAULT_CFG, FP8_PER_CHANNEL_PER_TOKEN_CFG and so on.
PRESETS: dict[str, tuple[Any, Any]] = {
    "nvfp4": (NVFP4, NVFP4),
    "nvfp4a16": (NVFP4, None),
    "mxfp8": (MXFP8, MXFP8),
    "mxfp4": (MXFP4, MXFP4),
    "fp8": (FP8, FP8),
    "fp8_channel": (
        {"num_bits": (4, 3), "axis": 0},
        {"num_bits": (4, 3), "type": "dynamic", "block_sizes": {-1: None}},
    ),
    "int8_static": ({"num_bits": 8, "axis": 0}, {"num_bits": 8, "axis": None}),
    "int4a16_g32": ({"num_bits": 4, "block_sizes": {-1: 32}}, None),
}


def applied(config: dict[str, Any], quantizer: str) -> Any:
    """What `mtq.quantize` gives a quantizer: the last entry whose pattern matches its name counts."""
    found = None
    for entry in config["quant_cfg"]:
        if fnmatchcase(quantizer, entry["quantizer_name"]):
            found = entry.get("cfg")
    return found


@pytest.mark.parametrize("recipe", PRESETS)
def test_layers_get_the_formats_of_modelopts_presets(recipe: str) -> None:
    plan = quant.make_plan(tiny_models.llama(), recipe, exclude=["*.1.self_attn.o_proj"])
    config = modelopt_config(plan)
    assert config["algorithm"] == "max" and config["quant_cfg"][0] == {"quantizer_name": "*", "enable": False}
    weight, inputs = PRESETS[recipe]
    for layer in plan.layers:
        wanted = (weight, inputs) if layer.weight is not None else (None, None)
        found = [applied(config, f"{layer.name}.{role}_quantizer") for role in ("weight", "input")]
        assert found == list(wanted), layer.name
    assert applied(config, "model.layers.0.self_attn.k_bmm_quantizer") is None


def test_equal_layers_share_an_entry() -> None:
    plan = quant.make_plan(tiny_models.llama(), "nvfp4a16")
    names = [entry["quantizer_name"] for entry in modelopt_config(plan)["quant_cfg"]]
    assert "model.layers.*.mlp.up_proj.weight_quantizer" in names and len(names) == 8


def test_a_mixed_plan_with_a_kv_cache() -> None:
    plan = quant.make_plan(tiny_models.llama(), "nvfp4", exclude=["*.0.mlp.down_proj"])
    plan = replace(plan, kv_cache=FORMATS["fp8"])
    config = modelopt_config(plan)
    assert applied(config, "model.layers.0.mlp.down_proj.weight_quantizer") is None
    assert applied(config, "model.layers.1.mlp.down_proj.weight_quantizer") == NVFP4
    assert applied(config, "model.layers.1.self_attn.v_bmm_quantizer") == FP8
    assert applied(config, "model.layers.1.self_attn.q_bmm_quantizer") is None


def test_experts_have_quantizers_named_after_their_parameter() -> None:
    plan = quant.make_plan(tiny_models.mixtral(), "nvfp4")
    config = modelopt_config(plan)
    assert applied(config, "model.layers.1.mlp.experts.gate_up_proj_weight_quantizer") == NVFP4
    assert applied(config, "model.layers.1.mlp.experts.down_proj_input_quantizer") == NVFP4
    assert applied(config, "model.layers.1.mlp.gate.weight_quantizer") is None


def test_names_with_glob_characters_match_themselves_alone() -> None:
    model = nn.ModuleDict({"a[1]": nn.Linear(32, 4), "a1": nn.Linear(32, 4)})
    plan = quant.make_plan(model, "mxfp8", exclude=["a1"], run=lambda model: model["a1"](torch.zeros(1, 32)))
    config = modelopt_config(plan)
    assert applied(config, "a[1].weight_quantizer") == MXFP8
    assert applied(config, "a1.weight_quantizer") is None


def test_what_modelopt_has_no_entry_for() -> None:
    model = nn.ModuleDict({"q": nn.Linear(128, 16), "o": nn.Linear(128, 16)})

    def run(model: Any) -> Any:
        return model["q"](torch.zeros(1, 128))

    plan = quant.make_plan(model, "fp8_block", run=run)
    with pytest.raises(quant.UserError, match="q: ModelOpt has no inputs in fp8_group; plan it in fp8_block with"):
        modelopt_config(plan)
    plan = quant.make_plan(model, "nvfp4", run=run)
    rotated = plan.replace_layers([replace(plan.by_name["q"], parts=Parts(hadamard=32, rank=4))])
    with pytest.raises(quant.UserError, match="q: has hadamard=32, rank=4 in the plan"):
        modelopt_config(rotated)
    with pytest.raises(quant.UserError, match="attention in fp8"):
        modelopt_config(replace(plan, attention=FORMATS["fp8"]))


# Models, and a layer of each that stays in 16 bit.
KEPT = {"llama": "*.1.*o_proj", "mixtral": "*.1.*o_proj", "gpt2": "*.1.mlp.c_proj", "opt": "*.1.fc2"}


@pytest.mark.parametrize("family", KEPT)
@pytest.mark.parametrize("recipe", [*PRESETS, "mxfp4a16", "mxfp6a16", "int8"])
def test_modelopt_turns_on_the_quantizers_of_the_plan(recipe: str, family: str) -> None:
    """The real package: weights and inputs are rounded where the plan says so, and the KV cache."""
    mtq = pytest.importorskip("modelopt.torch.quantization", reason="the extra modelopt")
    sys.path.append(str(ROOT / "benchmarks"))
    from _peers import modelopt_on_cpu

    modelopt_on_cpu()
    model = getattr(tiny_models, family)(dtype=torch.bfloat16)
    plan = replace(quant.make_plan(model, recipe, exclude=[KEPT[family]]), kv_cache=FORMATS["fp8"])
    config, ids = modelopt_config(plan), torch.arange(32).view(2, 16)
    mtq.quantize(model, config, lambda model: model(ids))
    enabled = {name for name, module in model.named_modules() if getattr(module, "is_enabled", False)}
    for layer in plan.layers:
        before = f"{layer.name}_" if layer.kind.is_named_by_parameter else f"{layer.name}."
        for role, format in (("weight", layer.weight), ("input", layer.activation)):
            assert any(name.startswith(f"{before}{role}_quantizer") for name in enabled) == (format is not None)
    assert any(name.endswith("k_bmm_quantizer") for name in enabled)
