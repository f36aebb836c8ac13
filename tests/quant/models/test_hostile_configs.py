"""Configs that no model has: each ends in one line that names the file, or is the model that it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import quant
from quant.cli.main import main

pytest.importorskip("transformers", reason="the extra hf")
gguf = pytest.importorskip("gguf", reason="comes with the extra [dev]")

from quant.models.gguf import OWN_CONFIG, read_config  # noqa: E402 -- as above


def saved(folder: Path, **changes: Any) -> Path:
    tiny_models.llama(num_hidden_layers=1).bfloat16().save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return folder


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_config_without_a_dtype(key: str, tmp_path: Path) -> None:
    """The run ended after solving: "this is our bug". The dtype is that of the files, as transformers takes it."""
    folder = saved(tmp_path / "model")
    fields = json.loads((folder / "config.json").read_text())
    fields.pop("dtype", None)
    (folder / "config.json").write_text(json.dumps({**fields, key: None}))
    arguments = ["quantize", str(folder), "--format", "int8", "--effort", "0", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert quant.load(tmp_path / "out").model.norm.weight.dtype == torch.bfloat16
    result = CliRunner().invoke(main, ["check", str(tmp_path / "out"), "--source", str(folder)])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["MistralForCausalLM"]},
         "architectures names MistralForCausalLM, no class of model_type llama; correct one of them in config.json"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1, which the weights in the files do not have"),
        ({"hidden_act": "nope"}, "KeyError: 'nope': a name that is missing, or that its code does not know"),
    ],
)  # fmt: skip
def test_a_config_that_is_no_models(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    """The first was quantized, and generated with an error of transformers; the second said "__len__()"."""
    folder = saved(tmp_path / "model", **changes)
    for command in (["quantize", "--format", "int8", "--out", str(tmp_path / "out")], ["generate", "--prompt", "3"]):
        result = CliRunner().invoke(main, [*command, str(folder)])
        assert result.exit_code == 2 and len(result.output.splitlines()) == 1, result.output
        assert str(folder) in result.output and says in result.output, result.output


def test_a_model_type_that_borrows_a_class(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "InternLM3Config"):
        pytest.skip("this transformers has no InternLM3")
    config = transformers.InternLM3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    made = transformers.AutoModelForCausalLM.from_config(config)
    made.save_pretrained(tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == "internlm3"
    assert type(quant.open_model(tmp_path / "model").model) is type(made) is transformers.LlamaForCausalLM


@pytest.mark.parametrize(
    "fields",
    [
        *({"architectures": wrong} for wrong in (True, 5, "LlamaForCausalLM", [5], {})),
        {"eos_token_id": "x"}, {"rms_norm_eps": float("nan")}, {"use_cache": "no"},
    ],
)  # fmt: skip
def test_the_config_in_a_gguf_file(fields: dict[str, Any], tmp_path: Path) -> None:
    """`"architectures": true` ended in a TypeError."""
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_string(
        OWN_CONFIG, json.dumps({**tiny_models.llama(num_hidden_layers=1).config.to_dict(), **fields}, default=str)
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(quant.UserError, match=rf"{file}: .*{next(iter(fields))}") as caught:
        read_config(file)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint16, torch.int64, torch.bool])
@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"])
def test_weights_that_are_whole_numbers(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """They were taken for weights: a linear layer's was quantized, and the norm's ended a run as "our bug"."""
    folder = saved(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = (tensors[name].float() * 100).to(torch.int64).to(dtype)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(quant.UserError, match=rf"model\.safetensors: {name} holds integers \((I16|U16|I64|BOOL)\)"):
        quant.open_model(folder)
