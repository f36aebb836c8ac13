"""Names on disk are those of the original checkpoint, and transformers loads the same model as we do."""

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import build as build_architecture
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import DECODER, EXPERTS, build, llama, llava, mixtral, qwen3_moe, vit
from torch import nn

import quant
from quant.export.checkpoint.files.names import StoredNames, cut_experts, stored_names
from quant.export.checkpoint.other_runtimes import runtime_warnings
from quant.recipes.layers import LayerKind

transformers = pytest.importorskip("transformers", reason="the extra hf")
pytest.importorskip("compressed_tensors")

SUFFIXES = ("_packed", "_scale", "_global_scale", "_shape")


def names_in(directory: Path) -> set[str]:
    """Names of the tensors in a directory, a quantized weight's parts counted as the weight."""
    found = set()
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                stem, _, last = name.rpartition(".")
                found.add(f"{stem}.weight" if last.startswith("weight") else name)
    return {name for name in found if not name.endswith(("input_scale", "input_global_scale"))}


def randomized(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) / max(parameter.shape[-1], 2) ** 0.5)
    return model.eval()


def assert_same_in_transformers(model: nn.Module, directory: Path) -> None:
    ids = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(1))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        expected, found = theirs(ids).logits, model(ids).logits
    # A value halfway between two codes may fall to either side; the whole is off by far less than one rounding.
    error = float((expected - found).norm() / expected.norm())
    assert error < 1e-2, error


@pytest.mark.parametrize("exclude", [(), ("*experts*", "*layers.0.*")])
@pytest.mark.parametrize("make", [mixtral, qwen3_moe, llava, llama, vit])
def test_a_checkpoint_has_the_names_of_the_original(
    make: Callable[[], nn.Module], exclude: tuple[str, ...], tmp_path: Path
) -> None:
    names: Any = randomized(make())
    names.save_pretrained(tmp_path / "original")
    model = quant.open_model(tmp_path / "original").model
    assert model is not None
    exclude = tuple(glob for glob in exclude if glob != "*experts*" or "experts" in str(dict(model.named_parameters())))
    result = quant.quantize(model, "fp8_channel", exclude=exclude)
    quant.save(result.model, result.plan, tmp_path / "ours")
    assert names_in(tmp_path / "ours") == names_in(tmp_path / "original")
    back = quant.load(tmp_path / "ours")
    there, here = result.model.state_dict(), back.state_dict()
    assert set(there) == set(here) and all(torch.equal(there[n], here[n]) for n in there)


@pytest.mark.parametrize("exclude", [(), ("*experts*",), ("*layers.0.*", "*self_attn*")])
@pytest.mark.parametrize("make", [mixtral, qwen3_moe])
def test_transformers_computes_the_same_with_experts(
    make: Callable[[], nn.Module], exclude: tuple[str, ...], tmp_path: Path
) -> None:
    """FP32, so that transformers' arithmetic, which rounds to the model's dtype in between, is ours."""
    model = randomized(make())
    result = quant.quantize(model, "fp8_channel", exclude=exclude)
    quant.save(result.model, result.plan, tmp_path / "ours")
    assert_same_in_transformers(result.model, tmp_path / "ours")


def test_experts_in_16_bit_are_ignored_by_both_names(tmp_path: Path) -> None:
    """Servers take a group for all linear layers to mean experts too."""
    result = quant.quantize(randomized(mixtral()), "fp8_channel", exclude=["*experts*"])
    quant.save(result.model, result.plan, tmp_path / "ours")
    ignored = transformers.AutoConfig.from_pretrained(tmp_path / "ours").quantization_config["ignore"]
    for name in names_in(tmp_path / "ours"):
        layer = name.removesuffix(".weight")
        matched = any(re.match(entry[3:], layer) if entry.startswith("re:") else entry == layer for entry in ignored)
        assert matched == (".experts." in layer or layer.endswith(".gate") or layer == "lm_head")


EXPERT_SIZES = {**DECODER, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DEEPSEEK = {**EXPERT_SIZES, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "q_lora_rank": 32}
LFM2 = {**EXPERTS, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"], "pad_token_id": 0}
GPT_OSS = {**EXPERTS, "num_local_experts": 4, "layer_types": ["full_attention"] * 2}


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize(
    ("family", "sizes", "routers"),
    [
        # Names that vLLM's ReplicatedLinear routers have, by model_executor/models/FAMILY.py.
        ("Qwen3Moe", EXPERTS, ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]),
        ("Qwen2Moe", EXPERTS, ["model.layers.1.mlp.gate", "model.layers.1.mlp.shared_expert_gate"]),
        ("Mixtral", {**DECODER, "num_local_experts": 4}, ["model.layers.1.block_sparse_moe.gate"]),
        ("Lfm2Moe", LFM2, ["model.layers.0.conv.conv", "model.layers.1.feed_forward.gate"]),
        ("DeepseekV3", DEEPSEEK, ["model.layers.1.mlp.gate"]),
        ("GptOss", GPT_OSS, ["model.layers.0.mlp.router", "model.layers.1.mlp.router"]),
    ],
)
def test_runtimes_leave_routers_in_16_bit(
    family: str, sizes: dict[str, Any], routers: list[str], layout: str, tmp_path: Path
) -> None:
    """A runtime's linear is quantized unless `ignore` has its name: with one group, the target is the class."""
    result = quant.quantize(build(family, "ForCausalLM", sizes), "fp8_channel")
    with warnings.catch_warnings():
        # Experts in this format do not run in vLLM, and those of gpt-oss do not load in transformers.
        warnings.filterwarnings("ignore", message=r".*(vllm-modelopt runs fp8_channel|server that reads experts)")
        quant.save(result.model, result.plan, tmp_path / "ours")
        if layout == "modelopt":
            quant.convert(tmp_path / "ours", tmp_path / "theirs", "modelopt")
    config = json.loads((tmp_path / ("theirs" if layout == "modelopt" else "ours") / "config.json").read_text())
    quantization = config["quantization_config"]
    assert set(routers) <= set(quantization["ignore"])
    # vLLM reads an excluded name of ModelOpt as a part of a longer one.
    quantized = [layer.name for layer in result.plan.quantized if layer.kind == LayerKind.LINEAR]
    assert not any(entry in name for entry in quantization["ignore"] for name in quantized)


def test_layers_in_several_formats_are_targeted_by_both_names(tmp_path: Path) -> None:
    model = randomized(mixtral())
    recipe = quant.Recipe(
        "mixed",
        "fp8_channel",
        "fp8_token",
        rules=(quant.Rule("*layers.0.mlp*", "fp8", "fp8_token"), quant.Rule("*layers.1.self_attn.*", "keep")),
    )
    result = quant.quantize(model, recipe)
    quant.save(result.model, result.plan, tmp_path / "ours")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "ours").quantization_config
    targets = config["config_groups"]["group_1"]["targets"]
    assert_same_in_transformers(result.model, tmp_path / "ours")
    assert targets == [r"re:model\.layers\.0\.mlp\.experts\..*", r"re:model\.layers\.0\.block_sparse_moe\.experts\..*"]


@pytest.mark.parametrize("format", ["fp8_channel", "mxfp8", "mxfp4a16", "nvfp4a16", "int8"])
@pytest.mark.parametrize("exclude", [(), ("*experts*",)])
def test_warnings_about_experts_stand_where_transformers_fails(
    exclude: tuple[str, ...], format: str, tmp_path: Path
) -> None:
    model = randomized(mixtral()).bfloat16()
    names = stored_names(model)
    result = quant.quantize(model, format, exclude=exclude)
    quant.save(result.model, result.plan, tmp_path / "ours")
    told = [line for line in runtime_warnings(result.plan, names=names) if "experts" in line]
    rounded = [line for line in told if "for their inputs to be rounded" in line]
    assert bool(rounded) == (format in ("fp8_channel", "mxfp8", "int8") and not exclude)
    warned = len(told) > len(rounded)
    path = "model.layers.1.mlp.experts.down_proj"
    module = result.model.get_submodule("model.layers.1.mlp.experts").down_proj
    expected = module if exclude else module.quantized_weight.dequantize()
    try:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
        found = loaded.get_parameter(path).float()
    except RuntimeError:
        assert warned
        return
    # Codes times scales are rounded to BF16 there.
    right = bool(((found - expected.float()).abs() <= 2**-8 * expected.float().abs()).all())
    assert right != warned


@pytest.mark.parametrize(("dtype", "fails"), [(torch.bfloat16, False), (torch.float16, True), (torch.float32, True)])
@pytest.mark.parametrize("format", ["nvfp4a16", "mxfp8", "int4a16"])
def test_what_transformers_unpacks_to_bfloat16_is_told(
    format: str, dtype: torch.dtype, fails: bool, tmp_path: Path
) -> None:
    """The warning stands where transformers really fails, and its way out works.

    Where inputs stay in 16 bit, the checkpoint's config has transformers unpack to the model's dtype.
    """
    model = randomized(llama(hidden_size=128, intermediate_size=128))
    result = quant.quantize(model.to(dtype), format)
    quant.save(result.model, result.plan, tmp_path / "ours")
    warnings = runtime_warnings(result.plan, dtype)
    ids = torch.arange(8)[None]
    load = transformers.AutoModelForCausalLM.from_pretrained
    if not fails or format != "mxfp8":
        with torch.no_grad():
            off = load(tmp_path / "ours")(ids).logits - (right := quant.load(tmp_path / "ours")(ids).logits)
        assert off.norm() < 0.02 * right.norm()
        return
    assert "unpacks" in warnings[0] and "dtype=torch.bfloat16" in warnings[0]
    with pytest.raises(RuntimeError, match="same dtype"):
        load(tmp_path / "ours")(ids)
    assert load(tmp_path / "ours", dtype=torch.bfloat16)(ids).logits.isfinite().all()


@pytest.mark.parametrize("name", ["Kimi_K25ForConditionalGeneration", "KimiLinearForCausalLM"])
def test_tensors_that_transformers_renames_splits_and_joins_are_those_of_the_source(name: str, tmp_path: Path) -> None:
    """Kimi-K2.5 numbers layers of its vision tower from fc0, and has `wqkv` there; Kimi-Linear has three `conv1d`."""
    if not hasattr(transformers, name):
        pytest.skip(f"transformers without {name}")
    build_architecture(name, torch.bfloat16).save_pretrained(tmp_path / "original")
    file = tmp_path / "original" / "model.safetensors"
    # transformers saves `language_model.model.blocks`, and the released files have `language_model.model.layers`.
    released = {
        n.replace("language_model.model.blocks", "language_model.model.layers"): t for n, t in load_file(file).items()
    }
    save_file(released, file, {"format": "pt"})
    model = quant.open_model(tmp_path / "original").model
    assert model is not None
    result = quant.quantize(model, "fp8_channel", effort=0)
    with pytest.warns(UserWarning, match="experts"):
        quant.save(result.model, result.plan, tmp_path / "ours")
    assert names_in(tmp_path / "ours") == set(released)
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    assert all(torch.equal(ours[n], t) for n, t in released.items() if n in ours and ours[n].dtype == t.dtype)
    back = quant.load(tmp_path / "ours")
    there, here = result.model.state_dict(), back.state_dict()
    assert set(there) == set(here) and all(torch.equal(there[n], here[n]) for n in there)
    loaded = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(loaded[1].values())
    with pytest.warns(UserWarning, match="experts"):
        quant.convert(tmp_path / "ours", tmp_path / "modelopt", to="modelopt")
    configs = [json.loads((tmp_path / layout / "config.json").read_text()) for layout in ("ours", "modelopt")]
    joined = {n.removesuffix(".weight") for n in released if re.search(r"wqkv\.weight|_conv1d\.weight", n)}
    assert joined and all(joined <= set(config["quantization_config"]["ignore"]) for config in configs)


def test_names_of_models_that_are_not_transformers_stay() -> None:
    names = stored_names(nn.Linear(2, 2))
    for name in ("a.0.gate_proj.weight_packed", "model.layers.0.mlp.experts.gate_up_proj", "x"):
        assert names.stored(name) == name == names.of_model(name)
    assert StoredNames(experts={"gate_proj": "w1"}).stored("a.3.gate_proj.weight_scale") == "a.3.w1.weight_scale"


def test_experts_are_cut_by_rows() -> None:
    weight = torch.arange(2 * 4 * 3).reshape(2, 4, 3)
    found = cut_experts("e.gate_up_proj", weight)
    assert list(found) == ["e.0.gate_proj.weight", "e.0.up_proj.weight", "e.1.gate_proj.weight", "e.1.up_proj.weight"]
    assert torch.equal(found["e.1.up_proj.weight"], weight[1, 2:])


@pytest.mark.parametrize("exclude", [(), ("*experts*",), ("*layers.0.*", "*self_attn*")])
@pytest.mark.parametrize("make", [mixtral, qwen3_moe])
def test_experts_of_a_checkpoint_without_a_plan(
    make: Callable[[], nn.Module], exclude: tuple[str, ...], tmp_path: Path
) -> None:
    """As another tool would have written it: only the config says what is quantized."""
    result = quant.quantize(randomized(make()), "nvfp4a16", exclude=exclude)
    quant.save(result.model, result.plan, tmp_path / "ours")
    (tmp_path / "ours" / "plan.json").unlink()
    there, here = result.model.state_dict(), quant.load(tmp_path / "ours").state_dict()
    assert set(there) == set(here) and all(torch.equal(there[n], here[n]) for n in there)


def test_experts_with_input_scales_of_their_own_are_refused(tmp_path: Path) -> None:
    ids = torch.randint(0, 64, (2, 16))
    result = quant.quantize(randomized(mixtral()), "nvfp4", ids)
    quant.save(result.model, result.plan, tmp_path / "ours")
    file = tmp_path / "ours" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.block_sparse_moe.experts.2.w2.input_global_scale"] *= 2
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"layers.1.mlp.experts.2.down_proj: its input scale is .* and share one"):
        quant.load(tmp_path / "ours")
