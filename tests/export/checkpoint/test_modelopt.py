"""ModelOpt's own files are read and written to the bit, and what its layout cannot say is refused by name."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from samples import BASE, GOLDENS

import quant
from quant.base.errors import UserError
from quant.cli.main import main
from quant.export.checkpoint.convert import convert
from quant.export.checkpoint.files import compressed_tensors, modelopt
from quant.export.checkpoint.files.tensors import SECOND_LEVEL, TensorFiles, write_tensors
from quant.export.checkpoint.other_runtimes import runtime_warnings
from quant.formats.format import FORMATS
from quant.formats.tensor import quantize
from quant.kernels.linear.quant_linear import QuantLinear
from quant.recipes.layers import LayerKind
from quant.recipes.plan import LayerPlan, Parts, Plan
from quant.recipes.recipe import get_recipe

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

# The golden NVFP4 has an NVFP4 KV cache too, which compressed-tensors cannot say; W4A8 has blocks of 32.
MODELOPT = ["fp8", "fp8blk", "fp8pcpt", "mixed", "mxfp4", "mxfp8", "w4a16"]
COMPRESSED = ["FP8", "FP8_BLOCK", "FP8_DYNAMIC", "MXFP4", "MXFP8", "NVFP4", "NVFP4A16"]
PRESETS = {"nvfp4": "nvfp4", "w4a16": "nvfp4a16", "fp8": "fp8", "fp8pcpt": "fp8_channel", "mxfp8": "mxfp8"}
# Warnings are errors here.
ROUNDED = pytest.mark.filterwarnings("ignore:.*in float32, for bfloat16 would round them")
REFUSED = pytest.mark.filterwarnings("ignore:.*deploy the compressed-tensors checkpoint in vLLM")
IDS = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype is not b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def differing(one: Path, other: Path) -> list[str]:
    ours, theirs = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    return [n for n in ours.keys() | theirs.keys() if n not in ours or n not in theirs or not same(ours[n], theirs[n])]


def fields(directory: Path, file: str = "config.json") -> Any:
    return json.loads((directory / file).read_text())


def export(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["export", *map(str, arguments)])


@pytest.fixture
def quantized(tmp_path: Path) -> Callable[..., Path]:
    """The golden model quantized, in our own layout."""

    def make(recipe: Any, **options: Any) -> Path:
        model = quant.open_model(BASE).model
        plan = quant.make_plan(model, recipe, **options)
        done = quant.quantize(model, plan, IDS)
        quant.save(done.model, done.plan, tmp_path / "ours")
        return tmp_path / "ours"

    return make


# The goldens


@pytest.mark.parametrize(("golden", "preset"), PRESETS.items())
def test_the_whole_path_reproduces_the_golden_checkpoint(
    golden: str, preset: str, quantized: Callable[..., Path], tmp_path: Path
) -> None:
    """Quantized here, saved as compressed-tensors, converted: the peer's bytes but for what its text calibrated."""
    convert(quantized(preset, solver="modelopt"), tmp_path / "out", "modelopt")
    theirs = load_file(GOLDENS / "modelopt" / golden / "model.safetensors")
    ours = load_file(tmp_path / "out" / "model.safetensors")
    caches = (".k_scale", ".v_scale")  # the presets have no KV cache
    assert ours.keys() == {name for name in theirs if not name.endswith(caches)}
    for name, tensor in ours.items():
        assert (tensor.dtype, tensor.shape) == (theirs[name].dtype, theirs[name].shape), name
        assert name.endswith(".input_scale") or same(tensor, theirs[name]), name
    config, whole = fields(GOLDENS / "modelopt" / golden), fields(GOLDENS / "modelopt" / golden, modelopt.CONFIG_FILE)
    config["quantization_config"].pop("kv_cache_scheme", None)
    whole["quantization"]["kv_cache_quant_algo"] = None
    assert fields(tmp_path / "out", modelopt.CONFIG_FILE) == whole
    found = fields(tmp_path / "out")
    del found["transformers_version"], config["transformers_version"]  # of the library that wrote it
    assert found == config


@ROUNDED
@REFUSED
@pytest.mark.parametrize(
    ("layout", "golden"),
    [*(("modelopt", name) for name in MODELOPT), *(("compressed_tensors", name) for name in COMPRESSED)],
)
def test_a_peers_checkpoint_comes_back_to_the_bit(layout: str, golden: str, tmp_path: Path) -> None:
    source = GOLDENS / layout / golden
    kinds = [layout.replace("_", "-"), "modelopt" if layout == "compressed_tensors" else "compressed-tensors"]
    assert export(source, "--to", kinds[1], "--out", tmp_path / "other", "--quiet").exit_code == 0
    assert fields(tmp_path / "other")["quantization_config"]["quant_method"] == kinds[1]
    assert export(tmp_path / "other", "--to", kinds[0], "--out", tmp_path / "back", "--quiet").exit_code == 0
    assert differing(source, tmp_path / "back") == []
    assert fields(tmp_path / "back") == fields(source)
    if layout == "modelopt":
        assert fields(tmp_path / "back", modelopt.CONFIG_FILE) == fields(source, modelopt.CONFIG_FILE)
    for file in (tmp_path / "other", tmp_path / "back"):
        wide = [n for n, t in load_file(file / "model.safetensors").items() if t.dtype is torch.float64]
        assert not wide  # runtimes read float32


def test_an_nvfp4_kv_cache_is_read_and_written_in_its_own_layout_only(tmp_path: Path) -> None:
    source = GOLDENS / "modelopt" / "nvfp4"
    convert(source, tmp_path / "again", "modelopt")
    assert differing(source, tmp_path / "again") == []
    assert fields(tmp_path / "again", modelopt.CONFIG_FILE) == fields(source, modelopt.CONFIG_FILE)
    with pytest.raises(ValueError, match="compressed-tensors layout cannot store a KV cache in nvfp4"):
        convert(source, tmp_path / "other", "compressed-tensors")
    assert [place.name for place in tmp_path.iterdir()] == ["again"]


@ROUNDED
@pytest.mark.parametrize("planned", [False, True])
def test_a_model_that_was_read_from_this_layout_saves_itself_in_the_other(planned: bool, tmp_path: Path) -> None:
    """Scales of the KV cache have a name each, also where the source has them under ModelOpt's."""
    source = GOLDENS / "modelopt" / "fp8"
    if planned:
        convert(source, tmp_path / "planned", "modelopt")
    quant.load(tmp_path / "planned" if planned else source).save_pretrained(tmp_path / "out")
    convert(source, tmp_path / "other", "compressed-tensors")
    saved, converted = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "other"))
    assert saved.keys() == converted.keys() and any(name.endswith(".k_scale") for name in saved)
    assert all(torch.equal(tensor.view(-1), converted[name].view(-1)) for name, tensor in saved.items())


@pytest.mark.parametrize("golden", [*MODELOPT, "nvfp4"])
def test_loading_gives_the_values_of_the_peers_tensors(golden: str) -> None:
    """Dequantized here in float64 from the file's tensors as ModelOpt defines them."""
    tensors = load_file(GOLDENS / "modelopt" / golden / "model.safetensors")
    fp4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
    model = quant.load(GOLDENS / "modelopt" / golden)
    layers = [(n, m) for n, m in model.named_modules() if hasattr(m, "quantized_weight")]
    assert len(layers) == 14
    for name, module in layers:
        codes, scale = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"]
        if codes.dtype is torch.uint8:
            values = fp4[torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1).int()]
        else:
            values = codes.double()
        step = torch.exp2(scale.double() - 127) if scale.dtype is torch.uint8 else scale.double()
        if f"{name}.weight_scale_2" in tensors:
            step = step * tensors[f"{name}.weight_scale_2"].double()
        if step.dim() == 1:
            step = step[:, None]
        elif step.dim() == 4:
            step = step[:, 0, :, 0].repeat_interleave(128, 0).repeat_interleave(128, 1)
        elif step.dim() == 2:
            step = step.repeat_interleave(values.shape[1] // step.shape[1], 1)
        expected = values * step.float().double()
        assert torch.equal(module.dequantize(torch.float32), expected.float()), name
        if f"{name}.input_scale" in tensors:
            assert torch.equal(module.input_scale, tensors[f"{name}.input_scale"])
    with torch.no_grad():
        assert bool(torch.isfinite(model(IDS).logits).all())
    if golden in ("fp8", "nvfp4"):
        k_scale = tensors["model.layers.1.self_attn.k_proj.k_scale"]
        assert torch.equal(model.model.layers[1].self_attn.k_scale, k_scale)


# Layers that are more than a matrix


@pytest.mark.filterwarnings("ignore:.*transformers up to 5.24")
@pytest.mark.parametrize("mixed", [False, True])
def test_experts_are_named_one_by_one_and_come_back(mixed: bool, tmp_path: Path) -> None:
    model = tiny_models.mixtral(vocab_size=256, intermediate_size=32, dtype=torch.bfloat16)
    plan = quant.make_plan(model, "nvfp4")
    kept = dataclasses.replace(plan.by_name["model.layers.1.mlp.experts.down_proj"], weight=None, activation=None)
    fused = dataclasses.replace(plan.by_name["model.layers.1.mlp.experts.gate_up_proj"], weight=None, activation=None)
    fp8 = {"weight": FORMATS["fp8"], "activation": FORMATS["fp8"]}
    attention = [dataclasses.replace(m, **fp8) for m in plan.quantized if mixed and "self_attn" in m.name]
    done = quant.quantize(model, plan.replace_layers([kept, fused, *attention]), IDS)
    quant.save(done.model, done.plan, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "out", "modelopt")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    # Mixtral's names on disk, not those of transformers' modules.
    stem = "model.layers.0.block_sparse_moe.experts"
    packed = {n for n, t in tensors.items() if t.dtype is torch.uint8 and ".experts." in n}
    assert packed == {f"{stem}.{e}.{w}.weight" for e in range(4) for w in ("w1", "w2", "w3")}
    assert {tensors[f"{stem}.{e}.{w}.weight_scale_2"].shape for e in range(4) for w in ("w1", "w3")} == {torch.Size([])}
    assert torch.equal(tensors[f"{stem}.2.w1.weight_scale_2"], tensors[f"{stem}.2.w3.weight_scale_2"])
    config = fields(tmp_path / "out", modelopt.CONFIG_FILE)["quantization"]
    if mixed:
        layers = {f"{stem}.{e}.{w}": {"quant_algo": "NVFP4", "group_size": 16} for e in range(4) for w in ("w1", "w3")}
        assert layers.items() <= config["quantized_layers"].items() and "exclude_modules" not in config
        assert config["quantized_layers"]["model.layers.1.self_attn.v_proj"] == {"quant_algo": "FP8"}
    else:
        excluded = ["model.layers.1.block_sparse_moe.experts*", "model.layers.0.block_sparse_moe.gate"]
        assert set(excluded) <= set(config["exclude_modules"])
    with torch.no_grad():
        expected = done.model(IDS).logits
        assert torch.equal(quant.load(tmp_path / "out")(IDS).logits, expected)
        (tmp_path / "out" / "plan.json").unlink()
        assert torch.equal(quant.load(tmp_path / "out")(IDS).logits, expected)
    convert(tmp_path / "out", tmp_path / "back", "compressed-tensors")
    assert differing(tmp_path / "ours", tmp_path / "back") == []


def test_an_fp8_kv_cache_is_named_as_in_the_golden_checkpoint(quantized: Callable[..., Path], tmp_path: Path) -> None:
    recipe = dataclasses.replace(get_recipe("fp8"), kv_cache="fp8")
    convert(quantized(recipe, solver="modelopt"), tmp_path / "out", "modelopt")
    golden = GOLDENS / "modelopt" / "fp8"
    ours, theirs = (load_file(d / "model.safetensors") for d in (tmp_path / "out", golden))
    assert {n: (t.dtype, t.shape) for n, t in ours.items()} == {n: (t.dtype, t.shape) for n, t in theirs.items()}
    assert fields(tmp_path / "out", modelopt.CONFIG_FILE) == fields(golden, modelopt.CONFIG_FILE)
    stored = load_file(tmp_path / "ours" / "model.safetensors")
    for layer, operand in ((0, "k"), (1, "v")):
        stem = f"model.layers.{layer}.self_attn"
        found = ours[f"{stem}.{operand}_proj.{operand}_scale"]
        assert float(found) == float(stored[f"{stem}.{operand}_scale"])


@ROUNDED
def test_an_infinity_in_the_config_stays_as_its_readers_know_it(tmp_path: Path) -> None:
    """The bare word is no JSON; transformers 4 and servers read it, and not the table that transformers 5 writes."""
    source = shutil.copytree(GOLDENS / "modelopt" / "fp8", tmp_path / "source")
    config = {**fields(source), "time_step_limit": [0.0, math.inf]}
    (source / "config.json").write_text(json.dumps(config))
    convert(source, tmp_path / "out", "compressed-tensors")
    assert fields(tmp_path / "out")["time_step_limit"] == [0.0, math.inf]
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").time_step_limit == [0.0, math.inf]


def test_a_layout_that_is_not_known(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no layout 'compressed_tensors'; known: modelopt, compressed-tensors"):
        quant.convert(GOLDENS / "modelopt" / "fp8", tmp_path / "out", "compressed_tensors")
    assert not any(tmp_path.iterdir())


def test_scales_of_a_kv_cache_a_head_are_refused(tmp_path: Path) -> None:
    source = shutil.copytree(GOLDENS / "compressed_tensors" / "FP8", tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.self_attn.v_scale"] = torch.ones(2, 1, 1, dtype=torch.bfloat16)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"model\.layers\.1\.self_attn\.v_scale: 2 scales of the KV cache, one a head"):
        convert(source, tmp_path / "out", "modelopt")
    assert [place.name for place in tmp_path.iterdir()] == ["source"]


def test_a_mixed_plan_is_written_as_the_peer_writes_it(quantized: Callable[..., Path], tmp_path: Path) -> None:
    plan = quant.make_plan(quant.open_model(BASE).model, "nvfp4", solver="modelopt")
    fp8 = [
        dataclasses.replace(m, weight=FORMATS["fp8"], activation=FORMATS["fp8"])
        for m in plan.quantized
        if "self_attn" in m.name
    ]
    model = quant.open_model(BASE).model
    done = quant.quantize(model, plan.replace_layers(fp8), IDS)
    quant.save(done.model, done.plan, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "out", "modelopt")
    golden = GOLDENS / "modelopt" / "mixed"
    assert all(name.endswith(".input_scale") for name in differing(tmp_path / "out", golden))
    assert fields(tmp_path / "out")["quantization_config"] == fields(golden)["quantization_config"]
    assert fields(tmp_path / "out", modelopt.CONFIG_FILE) == fields(golden, modelopt.CONFIG_FILE)


# What others make of the files


@ROUNDED
@pytest.mark.parametrize(("golden", "dtype"), [("fp8", torch.float32), ("fp8blk", torch.float32), ("w4a16", None)])
def test_transformers_unpacks_a_converted_checkpoint_to_the_same_weights(
    golden: str, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors")
    convert(GOLDENS / "modelopt" / golden, tmp_path / "out", "compressed-tensors")
    dtype = dtype or torch.bfloat16
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype)
    with torch.no_grad():
        theirs(IDS)  # the library unpacks the weights at the first call
    ours = {n: m for n, m in quant.load(GOLDENS / "modelopt" / golden).named_modules() if isinstance(m, QuantLinear)}
    assert len(ours) == 14
    for name, module in ours.items():
        assert torch.equal(module.dequantize(dtype), theirs.get_submodule(name).weight), name


@pytest.mark.filterwarnings("default")
def test_scales_that_transformers_would_round_are_said(tmp_path: Path) -> None:
    result = export(GOLDENS / "modelopt" / "fp8", "--to", "compressed-tensors", "--out", tmp_path / "out")
    assert result.exit_code == 0
    assert "13 weight scales, model.layers.0.self_attn.q_proj.weight_scale first, in float32" in result.stderr


@pytest.mark.slow  # the import takes ten seconds
def test_modelopt_unpacks_what_is_written_to_the_same_weights(quantized: Callable[..., Path], tmp_path: Path) -> None:
    library = pytest.importorskip("modelopt.torch.quantization.qtensor", reason="needs the extra modelopt")
    convert(quantized("nvfp4a16"), tmp_path / "out", "modelopt")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    ours = {n: m for n, m in quant.load(tmp_path / "ours").named_modules() if isinstance(m, QuantLinear)}
    assert len(ours) == 14
    for name, module in ours.items():
        packed = library.NVFP4QTensor(module.quantized_weight.shape, torch.float32, tensors[f"{name}.weight"])
        scales = {
            "scale": tensors[f"{name}.weight_scale"],
            "double_scale": tensors[f"{name}.weight_scale_2"],
            "block_sizes": {-1: 16},
        }
        assert torch.equal(packed.dequantize(torch.float32, **scales), module.dequantize(torch.float32)), name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Unsupported quantization algorithm")  # mxfp4 and fp8_pb_wo in a mixed plan
def test_modelopt_makes_the_same_config_of_every_mixture() -> None:
    """`config.json` as ModelOpt derives it from `hf_quant_config.json`."""
    name = "modelopt.torch.export.convert_hf_config"
    library = pytest.importorskip(name, reason="needs the extra modelopt")
    pairs = [
        ("nvfp4", "nvfp4"), ("nvfp4", None), ("fp8", "fp8"), ("fp8_channel", "fp8_token"), ("fp8_block", "fp8_group"),
        ("mxfp8", "mxfp8"), ("mxfp4", "mxfp4"), ("int4", None), ("int4_g32", None),
    ]  # fmt: skip
    for first, second in itertools.product(pairs, pairs):
        chosen = [[None if name is None else FORMATS[name] for name in pair] for pair in (second, first, second)]
        layers = [LayerPlan(f"layers.{i}.up", LayerKind.LINEAR, (256, 256), w, a) for i, (w, a) in enumerate(chosen)]
        plan = Plan((*layers, LayerPlan("lm_head", LayerKind.HEAD, (256, 256))), kv_cache=FORMATS["fp8"])
        config, (whole,) = modelopt.quantization_config(plan), modelopt.own_files(plan).values()
        assert config == library.convert_hf_quant_config_format(whole), (first, second)


def test_the_command_line_takes_it_as_any_checkpoint(tmp_path: Path) -> None:
    source = shutil.copytree(GOLDENS / "modelopt" / "nvfp4", tmp_path / "source")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BASE / file, source / file)
    inspected = CliRunner().invoke(main, ["inspect", str(source), "--json"])
    assert inspected.exit_code == 0, inspected.output
    plan = Plan.from_dict(json.loads(inspected.stdout)["plan"])
    assert {f"{m.weight}+{m.activation}" for m in plan.quantized} == {"nvfp4+nvfp4"} and len(plan.quantized) == 14
    assert plan.kv_cache is FORMATS["nvfp4"] and plan.by_name["lm_head"].weight is None
    arguments = ["generate", str(source), "--prompt", "a b c", "--max-new-tokens", "4", "--device", "cpu", "--json"]
    generated = CliRunner().invoke(main, arguments)
    assert generated.exit_code == 0, generated.output
    done = export(source, "--to", "modelopt", "--out", tmp_path / "out", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert sorted(found["files"]) == sorted(p.name for p in (tmp_path / "out").iterdir())
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (BASE / "tokenizer.json").read_bytes()


def test_an_older_export_says_everything_in_its_own_file(tmp_path: Path) -> None:
    source = shutil.copytree(GOLDENS / "modelopt" / "mixed", tmp_path / "old")
    config = fields(source)
    del config["quantization_config"]
    (source / "config.json").write_text(json.dumps(config))
    old, new = (quant.load(d).state_dict() for d in (source, GOLDENS / "modelopt" / "mixed"))
    assert old.keys() == new.keys() and all(same(old[name], new[name]) for name in old)


# Numbers


def test_any_second_level_scale_survives_the_other_layout(tmp_path: Path) -> None:
    """Also those that share their float32 reciprocal with a neighbour, and reciprocals that are no float32's."""
    weight = quantize(torch.randn(32, 64), FORMATS["nvfp4"])
    values = torch.rand(400) * torch.logspace(-10, 10, 400)
    there = [(compressed_tensors, modelopt, "weight_scale_2"), (modelopt, compressed_tensors, "weight_global_scale")]
    for other, own, suffix in there:
        stored, notes = {}, 0
        for index, value in enumerate(values):
            first = own.compress(weight, None, torch.float32) | {suffix: value.reshape(1)}
            back, _ = own.decompress(first, FORMATS["nvfp4"])
            for name, tensor in other.compress(back, None, torch.float32).items():
                stored[f"{index}.{name}"] = tensor.clone()
        notes = sum(tensor.dtype is torch.float64 for tensor in stored.values())
        assert 20 < notes < 200  # about one in seven
        folder = tmp_path / suffix
        folder.mkdir()
        write_tensors(folder, stored)
        raw, read = load_file(folder / "model.safetensors"), TensorFiles(folder)
        assert all(tensor.dtype is not torch.float64 for tensor in raw.values())
        for index, value in enumerate(values):
            local = {n.partition(".")[2]: read[n] for n in read if n.startswith(f"{index}.")}
            again = own.compress(other.decompress(local, FORMATS["nvfp4"])[0], None, torch.float32)[suffix]
            assert again.dtype is torch.float32 and float(again) == float(value)
            nearest = next(float(raw[n]) for n in raw if n.startswith(f"{index}.") and n.endswith(SECOND_LEVEL))
            assert nearest * float(value) == pytest.approx(1, rel=1.2e-7) or nearest == pytest.approx(
                float(value), rel=6e-8
            )


# INT4, of which there is no golden checkpoint


def int4_as_modelopt_packs_it(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """From `pack_int4_in_uint8` in ModelOpt 0.47's `torch/export/quant_utils.py`, in words of our own."""
    integers = (weight / scale.repeat_interleave(weight.shape[1] // scale.shape[1], 1)).round().clamp(-8, 7).long()
    pairs = integers.T.reshape(weight.shape[1], weight.shape[0] // 2, 2) % 16
    return (pairs[..., 0] + 16 * pairs[..., 1]).T.to(torch.uint8)


@REFUSED
@pytest.mark.parametrize(("recipe", "size"), [("int4a16", 128), ("int4a16_g64", 64), ("int4a16_g32", 32)])
def test_int4_in_groups_of_every_size(recipe: str, size: int, quantized: Callable[..., Path], tmp_path: Path) -> None:
    convert(quantized(recipe), tmp_path / "out", "modelopt")
    ours, stored = quant.load(tmp_path / "ours"), load_file(tmp_path / "out" / "model.safetensors")
    for name, module in ours.named_modules():
        if isinstance(module, QuantLinear):
            scale = stored[f"{name}.weight_scale"]
            assert scale.dtype is torch.float32 and scale.shape == (module.out_features, module.in_features // size)
            assert torch.equal(stored[f"{name}.weight"], int4_as_modelopt_packs_it(module.dequantize(), scale)), name
    said = fields(tmp_path / "out", modelopt.CONFIG_FILE)["quantization"]
    assert said == {
        "quant_algo": "W4A16_AWQ", "kv_cache_quant_algo": None, "group_size": size, "has_zero_point": False,
        "pre_quant_scale": True, "exclude_modules": said["exclude_modules"],
    }  # fmt: skip
    (tmp_path / "out" / "plan.json").unlink()
    theirs = quant.load(tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(theirs(IDS).logits, ours(IDS).logits)
    again = quant.open_model(tmp_path / "out").model  # as a source, which is dequantized
    assert same(again.model.layers[1].mlp.up_proj.weight, ours.model.layers[1].mlp.up_proj.dequantize(torch.bfloat16))
    convert(tmp_path / "out", tmp_path / "back", "compressed-tensors")
    for name, tensor in load_file(tmp_path / "back" / "model.safetensors").items():
        assert same(tensor, load_file(tmp_path / "ours" / "model.safetensors")[name]), name


# What the layout cannot say, and bad input


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight": "int4", "activation": "fp8"}, "no name for int4 with fp8 inputs; it has nvfp4 with nvfp4 inputs"),
        ({"weight": "int4_g32", "shape": (255, 256)}, "packs INT4 in pairs of rows, and 255 is odd"),
        ({"weight": "mxfp6"}, "no name for mxfp6 with 16-bit inputs"),
        ({"weight": "mxfp4"}, "no name for mxfp4 with 16-bit inputs"),
        ({"weight": "nvfp4", "activation": "fp8"}, "no name for nvfp4 with fp8 inputs"),
        ({"parts": Parts(hadamard=32)}, "cannot hold a Hadamard rotation of its input with nvfp4"),
        ({"parts": Parts(rank=8)}, "cannot hold a low-rank branch with nvfp4"),
        ({"parts": Parts(pre_scale=True)}, "cannot hold a pre_scale that no layer took up with nvfp4"),
        ({"kind": "embedding"}, "has no embedding in nvfp4; keep it in 16 bit"),
    ],
)
def test_what_the_layout_cannot_say_is_refused_by_layer(change: dict[str, Any], words: str) -> None:
    formats = {k: FORMATS[v] for k, v in change.items() if k in ("weight", "activation")}
    layer = LayerPlan("model.layers.0.mlp.up_proj", LayerKind.LINEAR, (256, 256), FORMATS["nvfp4"])
    layer = dataclasses.replace(layer, **{**change, **formats})
    with pytest.raises(ValueError, match=rf"^model\.layers\.0\.mlp\.up_proj: .*{re.escape(words)}") as error:
        modelopt.check_plan(Plan((layer,)))
    assert "deploy the compressed-tensors checkpoint" in str(error.value) and "\n" not in str(error.value)


def test_an_excluded_name_that_vllm_takes_for_a_part_of_others_is_told() -> None:
    """vLLM asks whether an excluded name is in the layer's."""
    layer = LayerPlan("layers.0.output.dense", LayerKind.LINEAR, (64, 64), FORMATS["nvfp4"], FORMATS["nvfp4"])
    other = dataclasses.replace(layer, name="layers.0.up")
    assert runtime_warnings(Plan((other, LayerPlan("output", LayerKind.HEAD, (64, 64)))), layout="modelopt") == []
    (told,) = runtime_warnings(Plan((layer, other, LayerPlan("output", LayerKind.HEAD, (64, 64)))), layout="modelopt")
    assert told.startswith("layers.0.output.dense: vLLM takes 'output', which is excluded")


def test_a_refused_plan_writes_nothing(quantized: Callable[..., Path], tmp_path: Path) -> None:
    result = export(quantized("int8"), "--to", "modelopt", "--out", tmp_path / "out")
    assert result.exit_code == 2
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: model.layers.0.self_attn.q_proj: ModelOpt's layout has no name for int8")
    assert [place.name for place in tmp_path.iterdir()] == ["ours"]


def _without(directory: Path, name: str) -> None:
    tensors = load_file(directory / "model.safetensors")
    del tensors[name]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _with_config(directory: Path, **changes: Any) -> None:
    config = fields(directory)
    config["quantization_config"] |= changes
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("golden", "spoil", "words"),
    [
        ("w4a8nvfp4", lambda d: None, "'W4A8_NVFP4_FP8' with groups of 32 is not supported; known: NVFP4, W4A16_NVFP4"),
        ("nvfp4", lambda d: _with_config(d, kv_cache_scheme="INT8"), "a KV cache in INT8 is not supported; known: FP8"),
        (
            "w4a16",
            lambda d: _with_config(d, config_groups={"group_0": {"weights": {"group_size": 32}}}),
            "'W4A16_NVFP4' with groups of 32 is not supported",
        ),
        (
            "w4a16",
            lambda d: _without(d, "model.layers.1.mlp.up_proj.weight_scale_2"),
            "model.layers.1.mlp.up_proj.weight_scale_2 is missing; nvfp4 with inputs in 16 bit has it",
        ),
        (
            "mixed",
            lambda d: _with_config(d, quantized_layers={"model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4"}}),
            "model.layers.0.self_attn.q_proj has a weight_scale, and quantized_layers does not name it",
        ),
        ("fp8", lambda d: (d / "config.json").unlink(), "no config.json"),
        ("fp8", lambda d: (d / "model.safetensors").write_bytes(b"x" * 100), "truncated or damaged"),
    ],
)
def test_bad_checkpoints(golden: str, spoil: Callable[[Path], None], words: str, tmp_path: Path) -> None:
    source = shutil.copytree(GOLDENS / "modelopt" / golden, tmp_path / "source")
    spoil(source)
    result = export(source, "--to", "compressed-tensors", "--out", tmp_path / "out")
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert words in result.stderr and len(result.stderr.strip().splitlines()) == 1
    assert [place.name for place in tmp_path.iterdir()] == ["source"]


def test_the_destination(tmp_path: Path) -> None:
    source = shutil.copytree(GOLDENS / "modelopt" / "w4a16", tmp_path / "runs" / "source")
    for out in (tmp_path / "runs", source):
        with pytest.raises(FileExistsError, match="which it would replace; name another place"):
            convert(source, out, "compressed-tensors", overwrite=True)
    out = tmp_path / "out"
    assert export(source, "--to", "compressed-tensors", "--out", out, "--quiet").exit_code == 0
    before = {file: file.read_bytes() for file in out.iterdir()}
    taken = export(source, "--to", "compressed-tensors", "--out", out)
    assert taken.exit_code == 2 and "is not empty; pass --overwrite" in taken.stderr
    assert {file: file.read_bytes() for file in out.iterdir()} == before
    assert export(source, "--to", "modelopt", "--out", out, "--overwrite", "--quiet").exit_code == 0
    assert differing(source, out) == []
    unused = export(source, "--to", "modelopt", "--out", out, "--shapes", "batch=1:1:2")
    assert unused.exit_code == 2 and "--to modelopt has no use for --shapes" in unused.stderr


def test_shards_are_read_and_the_index_is_written_anew(tmp_path: Path) -> None:
    source = shutil.copytree(GOLDENS / "modelopt" / "w4a16", tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    write_tensors(source, tensors, shard_bytes=60_000)
    assert len(list(source.glob("*.safetensors"))) > 3
    convert(source, tmp_path / "out", "modelopt")
    assert sorted(p.name for p in (tmp_path / "out").glob("model*")) == ["model.safetensors"]
    assert differing(tmp_path / "out", GOLDENS / "modelopt" / "w4a16") == []
