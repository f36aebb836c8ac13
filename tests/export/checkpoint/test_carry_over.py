"""Tensors of a source that transformers ignores or casts are in the checkpoint with their dtype and bytes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import tiny_models
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import quant
from quant.cli.quantize import quantize_command
from quant.export.checkpoint.verify import verify

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

pytestmark = pytest.mark.filterwarnings("ignore:.*LlamaForCausalLM has no use for:UserWarning")
IDS = torch.arange(12)[None] + 3


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A Llama of one layer whose files hold a second one, a head for multi-token prediction, and float32 tensors."""
    directory = tmp_path / "model"
    torch.manual_seed(0)
    tiny_models.llama(num_hidden_layers=1, dtype=torch.bfloat16).save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    extra = {n.replace("layers.0", "layers.1"): t.clone() for n, t in tensors.items() if "layers.0." in n}
    extra |= {"mtp.fc.weight": torch.randn(64, 128).bfloat16(), "mtp.norm.weight": torch.randn(64)}
    extra["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.rand(8)
    wide = {n: t.float() * (1 + 2**-12) for n, t in tensors.items() if "norm" in n}
    save_file({**tensors, **extra, **wide}, directory / "model.safetensors", {"format": "pt"})
    return directory


def quantized(model: Path, out: Path, *options: object) -> Path:
    arguments = (model, *(options or ("--format", "fp8_channel")), "--out", out)
    result = CliRunner().invoke(quantize_command, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return out


def check(source: Path, out: Path) -> None:
    """Every tensor of the source is quantized, or in the checkpoint bit for bit; carried modules are ignored."""
    tensors, written = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    codes = {name for name in tensors if f"{name.removesuffix('.weight')}.weight_scale" in written}
    assert len(codes) == 7 and all("layers.0." in name for name in codes)
    for name, tensor in tensors.items():
        if name not in codes:
            assert written[name].dtype == tensor.dtype and torch.equal(written[name], tensor), name
    ignored = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    matrices = {
        n.removesuffix(".weight") for n, t in tensors.items() if t.dim() == 2 and ("layers.1" in n or "mtp" in n)
    }
    assert len(matrices) == 8 and matrices <= set(ignored)


def test_every_tensor_of_the_source_is_in_the_checkpoint(model: Path, tmp_path: Path) -> None:
    out = quantized(model, tmp_path / "out")
    check(model, out)
    report = json.loads((out / "report.json").read_text())
    assert any("does not run" in warning and "layers.1" in warning for warning in report["warnings"])
    assert verify(out).findings == ()
    loaded, peer = quant.load(out), transformers.AutoModelForCausalLM.from_pretrained(out)
    assert loaded.get_parameter("model.norm.weight").dtype is torch.bfloat16  # as transformers runs it
    for key, tensor in peer.state_dict().items():
        if key.endswith("norm.weight"):
            assert torch.equal(tensor, loaded.get_parameter(key))
    with torch.no_grad():
        assert torch.allclose(loaded(IDS).logits.float(), peer(IDS).logits.float(), atol=0.05)


def test_a_plan_and_modelopts_layout_and_another_save_keep_them(model: Path, tmp_path: Path) -> None:
    first = quantized(model, tmp_path / "first")
    check(model, quantized(model, tmp_path / "planned", "--plan", first / "plan.json"))
    quant.convert(first, tmp_path / "modelopt", to="modelopt")
    check(model, tmp_path / "modelopt")
    assert verify(tmp_path / "modelopt").findings == ()
    quant.convert(tmp_path / "modelopt", tmp_path / "back", to="compressed-tensors")
    check(model, tmp_path / "back")
    quant.load(first).save_pretrained(tmp_path / "again")  # type: ignore[operator]
    check(model, tmp_path / "again")


def test_a_model_in_memory_keeps_what_was_trained(model: Path, tmp_path: Path) -> None:
    trained = transformers.AutoModelForCausalLM.from_pretrained(model)
    trained.model.norm.weight.data += 1
    done = quant.quantize(trained, "fp8_channel")
    with pytest.warns(UserWarning, match="does not run"):
        quant.save(done.model, done.plan, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written["model.norm.weight"], trained.model.norm.weight)  # bfloat16, as it was trained
    assert written["model.layers.0.input_layernorm.weight"].dtype is torch.float32
    assert "mtp.fc.weight" in written


def test_a_model_that_was_cast_as_a_whole_is_saved_so(model: Path, tmp_path: Path) -> None:
    cast = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float16)
    done = quant.quantize(cast, "fp8_channel")
    with pytest.warns(UserWarning, match="does not run"):
        quant.save(done.model, done.plan, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written["model.norm.weight"].dtype is torch.float16
    assert written["mtp.fc.weight"].dtype is torch.bfloat16


def test_tensors_of_every_dtype_and_shape_are_carried_over_from_shards(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    tiny_models.llama(dtype=torch.bfloat16).save_pretrained(directory, max_shard_size="60KB")
    shard = sorted(directory.glob("*.safetensors"))[1]
    extra = {
        "mtp.scale": torch.tensor(3.5), "mtp.ids": torch.arange(5), "mtp.mask": torch.tensor([True, False]),
        "mtp.wide": torch.randn(3, dtype=torch.float64), "mtp.codes": torch.arange(4, dtype=torch.int8),
        "mtp.none": torch.empty(0), "mtp.phase": torch.randn(2, dtype=torch.complex64),
    }  # fmt: skip
    save_file({**load_file(shard), **extra}, shard, {"format": "pt"})
    file = directory / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"] |= dict.fromkeys(extra, shard.name)
    file.write_text(json.dumps(index))
    out = quantized(directory, tmp_path / "out", "--format", "nvfp4a16")
    written = load_file(out / "model.safetensors")
    for name, tensor in extra.items():
        assert written[name].dtype == tensor.dtype and torch.equal(written[name], tensor), name
    assert verify(out, source=directory).findings == ()


def test_servers_find_the_modules_that_they_make_of_a_head(model: Path, tmp_path: Path) -> None:
    """vLLM drops plain entries of `mtp.` and asks for the matrices of a stack's first expert, SGLang for `qkv_proj`."""
    tensors = load_file(model / "model.safetensors")
    head = {
        n.replace("model.layers.0", "mtp.layers.0"): t.clone()
        for n, t in tensors.items()
        if "layers.0.self_attn.q" in n
    }
    head |= {f"mtp.layers.0.mlp.experts.{part}": torch.randn(2, 64, 64).bfloat16() for part in ("up_proj", "down_proj")}
    save_file({**tensors, **head}, model / "model.safetensors", {"format": "pt"})
    out = quantized(model, tmp_path / "out")
    modules = ["mtp.layers.0.self_attn.qkv_proj", "mtp.layers.0.mlp.experts.0.up_proj", "mtp.fc", "model.layers.1.mlp"]
    ignored = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    patterns = [entry.removeprefix("re:") for entry in ignored if entry.startswith("re:")]
    for name in [f"{module}.x" for module in modules]:
        assert any(re.match(pattern, name) for pattern in patterns), name
    assert not any(re.match(pattern, "model.layers.0.mlp.up_proj") for pattern in patterns)
    quant.convert(out, tmp_path / "modelopt", to="modelopt")
    excluded = json.loads((tmp_path / "modelopt" / "hf_quant_config.json").read_text())["quantization"]
    assert {"mtp.*", "model.layers.1.*"} <= set(excluded["exclude_modules"])
    assert verify(tmp_path / "modelopt").findings == ()
