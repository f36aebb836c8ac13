"""Files and config of a checkpoint are held against those of the model that it was made from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_models
import torch
from click.testing import CliRunner

import quant
from quant.cli.quantize import quantize_command
from quant.export.checkpoint.load import load
from quant.models.files import companion_files

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

FILES = (
    "modules.json", "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors", "tokenizer.model",
    "special_tokens_map.json", "LICENSE", "reasoning_parser.py", "tekken.json", "images/logo.png",
    "speech-lora/adapter_config.json", "speech-lora/adapter_model.safetensors",
)  # fmt: skip
LEFT_OUT = (
    "onnx/model.onnx", "onnx/config.json", "checkpoint-5/optimizer.pt", "checkpoint-5/trainer_state.json", ".git/HEAD",
    "consolidated.00.pth", "quantize_config.json", "model.gguf",
)  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with files of many kinds beside the weights."""
    directory = tmp_path / "model"
    tiny_models.llama(num_hidden_layers=1, dtype=torch.bfloat16).save_pretrained(directory)
    for name in (*FILES, *LEFT_OUT):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(name)
    modules = [{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}]
    (directory / "modules.json").write_text(json.dumps(modules))
    return directory


def quantized(model: Path, out: Path, *options: object) -> Path:
    result = CliRunner().invoke(
        quantize_command, list(map(str, (model, "--format", "fp8_channel", "--out", out, *options)))
    )
    assert result.exit_code == 0, result.output
    return out


def test_every_file_that_holds_no_weights_goes_along(model: Path, tmp_path: Path) -> None:
    out = quantized(model, tmp_path / "out")
    for name in FILES:
        assert (out / name).read_bytes() == (model / name).read_bytes(), name
    assert not [name for name in LEFT_OUT if (out / name).exists()]
    assert {file.relative_to(model).as_posix() for file in companion_files(model)} == {*FILES, "generation_config.json"}


def test_a_model_in_memory_is_saved_with_the_files_of_its_directory(model: Path, tmp_path: Path) -> None:
    made = transformers.AutoModelForCausalLM.from_pretrained(model)
    made.generation_config.max_length = 77  # changed in memory: saved as it is there
    done = quant.quantize(made, "fp8_channel", effort=0)
    quant.save(done.model, done.plan, tmp_path / "saved")
    occupied = tmp_path / "pretrained"
    occupied.mkdir()
    (occupied / "LICENSE").write_text("another")
    done.model.save_pretrained(occupied)  # type: ignore[operator]
    for out in (tmp_path / "saved", occupied):
        assert all((out / name).is_file() for name in FILES), out
        assert json.loads((out / "generation_config.json").read_text())["max_length"] == 77
    assert (occupied / "LICENSE").read_text() == "another" and (tmp_path / "saved/LICENSE").read_text() == "LICENSE"
    # The files outlive a load and another save.
    load(tmp_path / "saved").save_pretrained(tmp_path / "again")  # type: ignore[operator]
    assert all((tmp_path / "again" / name).is_file() for name in FILES)


def test_a_source_of_another_class_is_refused(model: Path, tmp_path: Path) -> None:
    done = quant.quantize(tiny_models.mistral(num_hidden_layers=1), "fp8_channel", effort=0)
    with pytest.raises(quant.UserError, match="is of a llama, and the model a mistral"):
        quant.save(done.model, done.plan, tmp_path / "out", source=model)


def test_a_link_out_of_the_directory_stops_before_any_work(model: Path, tmp_path: Path) -> None:
    (tmp_path / "private").write_text("secret")
    (model / "NOTICE").symlink_to(tmp_path / "private")
    result = CliRunner().invoke(
        quantize_command, [str(model), "--format", "fp8_channel", "--out", str(tmp_path / "out")]
    )
    assert result.exit_code == 2 and "NOTICE: a link to " in result.stderr, result.output


def test_a_config_keeps_the_keys_of_an_older_transformers(model: Path, tmp_path: Path) -> None:
    """As Llama 3.1 was released: rope_theta and rope_scaling, which transformers 5 turns into rope_parameters."""
    file = model / "config.json"
    fields = json.loads(file.read_text())
    fields.pop("rope_parameters")
    fields |= {
        "rope_theta": 5e5, "torch_dtype": fields.pop("dtype"), "transformers_version": "4.45.0", "own_field": [1.0],
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 32},
    }  # fmt: skip
    file.write_text(json.dumps(fields))
    written = json.loads((quantized(model, tmp_path / "out") / "config.json").read_text())
    assert written.pop("quantization_config")["format"] == "float-quantized"
    assert written == fields and list(written) == list(fields)
    # A value that was changed in memory is the new one, and the older form of it goes.
    made = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    made.config.rope_parameters = {"rope_type": "default", "rope_theta": 7e4}
    done = quant.quantize(made, "fp8_channel", effort=0)
    quant.save(done.model, done.plan, tmp_path / "changed")
    changed = json.loads((tmp_path / "changed/config.json").read_text())
    assert changed["rope_parameters"]["rope_theta"] == 7e4 and "rope_scaling" not in changed
    assert changed["torch_dtype"] == "float32" and changed["own_field"] == [1.0]


@pytest.mark.parametrize("infinity", ["Infinity", '{"__float__": "Infinity"}'])
def test_infinity_in_a_config_stays_as_the_source_has_it(model: Path, tmp_path: Path, infinity: str) -> None:
    file = model / "config.json"
    file.write_text(file.read_text().rstrip("\n}") + f',\n "time_step_limit": [0.0, {infinity}]}}')
    expected = json.loads(file.read_text())["time_step_limit"]
    out = quantized(model, tmp_path / "out")
    assert json.loads((out / "config.json").read_text())["time_step_limit"] == expected
    quant.convert(out, tmp_path / "modelopt", to="modelopt")
    assert json.loads((tmp_path / "modelopt/config.json").read_text())["time_step_limit"] == expected


@pytest.mark.parametrize("has_source", [False, True])
def test_a_generation_config_that_transformers_does_not_save_goes_along(has_source: bool, tmp_path: Path) -> None:
    made = tiny_models.llama(num_hidden_layers=1, dtype=torch.bfloat16)
    fields = {"temperature": 0.5, "do_sample": False}
    if has_source:
        made.save_pretrained(tmp_path / "model")
        (tmp_path / "model" / "generation_config.json").write_text(json.dumps(fields))
        made = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    made.generation_config.temperature = 0.5
    done = quant.quantize(made, "fp8_channel", effort=0)
    quant.save(done.model, done.plan, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert written["temperature"] == 0.5 and not written.get("do_sample")
    assert load(tmp_path / "out").generation_config.temperature == 0.5


def test_a_tokenizer_that_cannot_be_saved_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    done = quant.quantize(tiny_models.llama(num_hidden_layers=1), "fp8_channel", effort=0)
    with pytest.raises(ValueError, match="tokenizer: a dict has no save_pretrained; leave it out"):
        quant.save(done.model, done.plan, tmp_path / "out", tokenizer={})
    assert not (tmp_path / "out").exists()
