"""A checkpoint that lies is refused in one line, which names the tensor and the file; a sound one is not."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from samples import BASE, GOLDENS

import quant
from quant.cli.main import main
from quant.export.checkpoint.files.compressed_tensors import compress
from quant.export.checkpoint.files.layouts import matrix_problems
from quant.formats.format import FORMATS
from quant.formats.tensor import quantize
from quant.kernels.linear.quantized_module import restore_layout

Tensors = dict[str, torch.Tensor]
Q = "model.layers.1.self_attn.q_proj"


def spoilt(golden: str, folder: Path, change: Callable[[Tensors], object]) -> Path:
    out = shutil.copytree(GOLDENS / golden, folder / "spoilt")
    tensors = load_file(out / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def put(name: str, value: float, at: int = -1) -> Callable[[Tensors], object]:
    """Sets one value, in the dtype of the tensor."""

    def change(tensors: Tensors) -> None:
        flat = tensors[name].flatten()
        flat[at] = torch.tensor(value).to(flat.dtype)
        tensors[name] = flat.view(tensors[name].shape)

    return change


def cast(name: str, dtype: torch.dtype, *, bits: bool = False) -> Callable[[Tensors], object]:
    return lambda t: t.update({name: t[name].view(dtype) if bits else t[name].to(dtype)})


def shaped(name: str, *shape: int) -> Callable[[Tensors], object]:
    return lambda t: t.update({name: t[name].new_ones(shape) if t[name].dtype.itemsize > 1 else t[name].view(*shape)})


def without(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def added(name: str, *shape: int) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: torch.ones(shape)})


CT, MO = "compressed_tensors/", "modelopt/"
NAN, INF = torch.nan, torch.inf
LIES: list[tuple[str, Callable[[Tensors], object], str, str]] = [
    (CT + "NVFP4", without(f"{Q}.input_global_scale"), f"{Q}.input_global_scale", "is missing"),
    (CT + "NVFP4", without(f"{Q}.weight_scale"), f"{Q}.weight_scale", "is missing"),
    (CT + "NVFP4", without(f"{Q}.weight_packed"), f"{Q}.weight_packed", "is missing"),
    (CT + "NVFP4", put(f"{Q}.input_global_scale", INF), f"{Q}.input_global_scale", "is inf"),
    (CT + "NVFP4", put(f"{Q}.input_global_scale", 0.0), f"{Q}.input_global_scale", "is 0"),
    (CT + "NVFP4", put(f"{Q}.weight_global_scale", NAN), f"{Q}.weight_global_scale", "is nan"),
    (CT + "NVFP4", put(f"{Q}.weight_global_scale", -5.0), f"{Q}.weight_global_scale", "is -5"),
    (CT + "NVFP4", put(f"{Q}.weight_scale", -2.0, 7), f"{Q}.weight_scale", "0 scales that are NaN and 1 below zero"),
    (CT + "NVFP4", put(f"{Q}.weight_scale", NAN, 0), f"{Q}.weight_scale", "1 scales that are NaN and 0 below zero"),
    (CT + "NVFP4", cast(f"{Q}.weight_scale", torch.uint8, bits=True), f"{Q}.weight_scale", "is uint8"),
    (CT + "NVFP4", cast(f"{Q}.weight_packed", torch.bool), f"{Q}.weight_packed", "is bool; nvfp4 has uint8"),
    (CT + "NVFP4", cast(f"{Q}.weight_packed", torch.int8), f"{Q}.weight_packed", "is int8"),
    (CT + "NVFP4", shaped(f"{Q}.weight_packed", 64, 128), f"{Q}.weight_packed", "is [64, 128], expected [128, 64]"),
    (
        CT + "NVFP4",
        shaped(f"{Q}.weight_packed", 1, 128, 64),
        f"{Q}.weight_packed",
        "is [1, 128, 64], expected [128, 64]",
    ),
    (CT + "NVFP4", shaped(f"{Q}.weight_scale", 8, 128), f"{Q}.weight_scale", "is [8, 128], expected [128, 8]"),
    (CT + "NVFP4", shaped(f"{Q}.weight_global_scale", 2), f"{Q}.weight_global_scale", "is [2], expected one number"),
    (CT + "NVFP4", added(f"{Q}.weight_zero_point", 128, 8), f"{Q}.weight_zero_point", "is left over"),
    (CT + "NVFP4A16", added(f"{Q}.input_global_scale", 1), f"{Q}.input_global_scale", "is left over"),
    (CT + "MXFP8", cast(f"{Q}.weight_scale", torch.float8_e4m3fn, bits=True), f"{Q}.weight_scale", "is float8_e4m3fn"),
    (CT + "MXFP8", put(f"{Q}.weight_scale", 255, 3), f"{Q}.weight_scale", "holds 1 scales that are NaN"),
    (CT + "MXFP8", put(f"{Q}.weight", NAN, 3), f"{Q}.weight", "holds 1 codes that are NaN or infinite"),
    (CT + "FP8", put(f"{Q}.weight_scale", 0.0), f"{Q}.weight_scale", "is 0"),
    (CT + "FP8", put(f"{Q}.input_scale", INF), f"{Q}.input_scale", "is inf"),
    (CT + "FP8", cast(f"{Q}.weight", torch.int8, bits=True), f"{Q}.weight", "is int8; fp8 has float8_e4m3fn"),
    (CT + "FP8", put("model.layers.0.self_attn.k_scale", NAN), "model.layers.0.self_attn.k_scale", "is nan"),
    (CT + "FP8", put("model.layers.0.self_attn.v_scale", 0.0), "model.layers.0.self_attn.v_scale", "is 0"),
    (CT + "FP8", put("model.layers.0.self_attn.v_scale", -1.0), "model.layers.0.self_attn.v_scale", "is -1"),
    (CT + "FP8", without("model.layers.1.self_attn.v_scale"), "model.layers.1.self_attn.v_scale", "is missing"),
    (CT + "FP8_DYNAMIC", put(f"{Q}.weight_scale", -1.0, 9), f"{Q}.weight_scale", "1 scales that are not finite"),
    (CT + "FP8_BLOCK", put(f"{Q}.weight_scale", INF, 0), f"{Q}.weight_scale", "is inf"),
    (MO + "nvfp4", put(f"{Q}.weight_scale_2", INF), f"{Q}.weight_scale_2", "is inf"),
    (MO + "nvfp4", without(f"{Q}.input_scale"), f"{Q}.input_scale", "is missing"),
    (MO + "nvfp4", added(f"{Q}.pre_quant_scale", 128), f"{Q}.pre_quant_scale", "is left over"),
    (MO + "fp8", put("model.layers.0.self_attn.k_proj.k_scale", NAN), "self_attn.k_proj.k_scale", "is nan"),
    (MO + "mxfp4", put(f"{Q}.weight_scale", 255, 3), f"{Q}.weight_scale", "holds 1 scales that are NaN"),
    (CT + "NVFP4", put("model.norm.weight", NAN, 5), "model.norm.weight", "holds 1 values that are NaN"),
    (CT + "NVFP4", put("model.embed_tokens.weight", -INF, 5), "model.embed_tokens.weight", "1 that are infinite"),
    (CT + "NVFP4", put("lm_head.weight", -NAN, 5), "lm_head.weight", "holds 1 values that are NaN"),
    (
        CT + "NVFP4",
        cast("model.norm.weight", torch.int16),
        "model.norm.weight",
        "is int16, and the model holds bfloat16",
    ),
    (CT + "NVFP4", added("model.layers.0.extra", 3), "model.layers.0.extra", "has, and the model has no use for"),
]


@pytest.mark.parametrize(("golden", "change", "tensor", "words"), LIES, ids=[f"{g}-{t}-{w}" for g, _, t, w in LIES])
def test_a_checkpoint_that_lies(
    golden: str, change: Callable[[Tensors], object], tensor: str, words: str, tmp_path: Path
) -> None:
    source = spoilt(golden, tmp_path, change)
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        quant.load(source)(torch.arange(8)[None])
    message = str(caught.value)
    assert tensor in message and str(source) in message and "\n" not in message


@pytest.mark.parametrize(
    "use",
    [
        lambda model: model(torch.arange(8)[None]),
        lambda model: copy.deepcopy(model)(torch.arange(8)[None]),
        lambda model: model.state_dict(),
        lambda model: restore_layout(model),
        lambda model: model.get_submodule(Q).weight,
        lambda model: model.get_submodule(Q).quantized_weight,
    ],
    ids=["forward", "copy", "state_dict", "export", "weight", "quantized_weight"],
)
def test_codes_in_fp8_are_looked_at_before_they_are_used(use: Callable[[Any], object], tmp_path: Path) -> None:
    model = quant.load(spoilt(CT + "FP8", tmp_path, put(f"{Q}.weight", -NAN, 3)))  # reads no codes
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"model\.safetensors: {Q}\.weight holds 1 codes that are NaN"):
            use(model)
    use(quant.load(GOLDENS / CT / "FP8"))


@pytest.mark.parametrize("arguments", [["--to", "modelopt"], ["--to", "onnx"], ["--to", "aoti"]], ids=lambda a: a[1])
def test_codes_in_fp8_are_looked_at_before_they_are_exported(arguments: list[str], tmp_path: Path) -> None:
    source, out = spoilt(CT + "FP8", tmp_path, put(f"{Q}.weight", NAN)), tmp_path / "out.pt2"
    result = CliRunner().invoke(main, ["export", str(source), *arguments, "--out", str(out)])
    assert result.exit_code == 2
    assert f"model.safetensors: {Q}.weight holds 1 codes that are NaN" in result.stderr
    assert not out.exists()


def test_scales_may_have_more_axes_of_length_one(tmp_path: Path) -> None:
    rows = torch.arange(8)[None]
    plain = quant.load(spoilt(CT + "NVFP4", tmp_path / "plain", lambda tensors: None))
    more = quant.load(spoilt(CT + "NVFP4", tmp_path / "more", shaped(f"{Q}.weight_scale", 1, 128, 8)))
    with torch.no_grad():
        assert torch.equal(more(rows).logits, plain(rows).logits)


@pytest.mark.parametrize("arguments", [["--to", "modelopt"], ["--to", "onnx"]], ids=lambda a: a[1])
def test_nothing_is_written_of_it(arguments: list[str], tmp_path: Path) -> None:
    source = spoilt(CT + "NVFP4", tmp_path, put(f"{Q}.weight_scale", NAN))
    result = CliRunner().invoke(main, ["export", str(source), *arguments, "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert f"model.safetensors: {Q}.weight_scale holds 1 scales that are NaN" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "format", ["nvfp4", "mxfp4", "mxfp6", "mxfp8", "fp8", "fp8_channel", "fp8_block", "int8", "int4"]
)
def test_blocks_of_zeros_are_sound(format: str) -> None:
    """Our rules give zeros a scale of one, or the smallest; of E4M3's scales zero is what other tools write."""
    weight = torch.randn(128, 256).bfloat16()
    weight[3] = 0
    stored = compress(quantize(weight, FORMATS[format]), None, torch.bfloat16)
    assert list(matrix_problems(stored, FORMATS[format], None, (128, 256))) == []
    stored = compress(quantize(torch.zeros(128, 256).bfloat16(), FORMATS[format]), None, torch.bfloat16)
    assert list(matrix_problems(stored, FORMATS[format], None, (128, 256))) == []
    if format == "nvfp4":
        stored["weight_scale"] = torch.zeros_like(stored["weight_scale"].float()).to(torch.float8_e4m3fn)
        assert list(matrix_problems(stored, FORMATS[format], None, (128, 256))) == []


def test_the_shape_in_an_int4_checkpoint() -> None:
    stored = compress(quantize(torch.randn(128, 256).bfloat16(), FORMATS["int4"]), None, torch.bfloat16)
    stored["weight_shape"] = torch.tensor([256, 128])
    (problem,) = matrix_problems(stored, FORMATS["int4"], None, (128, 256))
    assert problem == ("weight_shape", "says [256, 128], expected [128, 256]")


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    source = shutil.copytree(GOLDENS / CT / "NVFP4", tmp_path / "two")
    save_file({"model.norm.weight": torch.ones(128).bfloat16()}, source / "other.safetensors")
    with pytest.raises(ValueError, match=r"other\.safetensors: model\.norm\.weight is in model\.safetensors too"):
        quant.load(source)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = quant.open_model(BASE).model
    assert model is not None
    result = quant.quantize(model, "nvfp4", torch.randint(0, 256, (2, 32)))
    out = tmp_path_factory.mktemp("saved") / "out"
    quant.save(result.model, result.plan, out)
    return out


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"activation": None}, r"q_proj: nvfp4, and the config says nvfp4@nvfp4"),
        ({"hadamard": 16}, r"q_proj: a Hadamard rotation of 16, and the config says 0"),
        ({"weight": "mxfp4", "activation": "mxfp4"}, r"q_proj: mxfp4@mxfp4, and the config says nvfp4@nvfp4"),
        ({"weight": None, "activation": None}, r"q_proj: 16bit, and the config says nvfp4@nvfp4"),
        ({"pre_scale": True}, r"no tensor model\.layers\.0\.self_attn\.q_proj\.pre_scale, which the plan names"),
        ("kv_cache", r"kv_cache: fp8, and the config says 16 bit"),
    ],
    ids=str,
)
def test_a_plan_that_was_edited(
    layout: str, change: dict[str, Any] | str, words: str, saved: Path, tmp_path: Path
) -> None:
    out = tmp_path / "edited"
    if layout == "modelopt":
        quant.convert(saved, out, "modelopt")
    else:
        shutil.copytree(saved, out)
    quant.load(out)
    fields = json.loads((out / "plan.json").read_text())
    if isinstance(change, str):
        fields[change] = "fp8"
    else:
        for layer in fields["layers"]:
            if ".0.self_attn." in layer["name"] and layer["weight"] is not None:
                layer.update(change)
    (out / "plan.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=words) as caught:
        quant.load(out)
    assert "\n" not in str(caught.value)


def test_transforms_that_are_not_ours_are_refused(tmp_path: Path) -> None:
    out = shutil.copytree(GOLDENS / CT / "NVFP4A16", tmp_path / "transformed")
    fields = json.loads((out / "config.json").read_text())
    place = {"targets": ["Linear"], "location": "output", "inverse": True, "ignore": []}
    scheme = {"type": "hadamard", "apply": [place], "head_dim": None, "randomize": False}
    fields["quantization_config"]["transform_config"] = {"config_groups": {"v": scheme}}
    (out / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"transform_config has .* at 'output': not supported"):
        quant.load(out)
    place |= {"location": "input", "inverse": False}
    scheme |= {"head_dim": 32}
    (out / "config.json").write_text(json.dumps(fields))
    assert quant.load(out).get_submodule(Q).hadamard == 32
