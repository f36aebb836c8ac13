"""A Hugging Face directory may be hostile: its code does not run, and its names stay inside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_models
from click.testing import CliRunner
from safetensors.torch import save_file

from quant.cli.main import main
from quant.errors import UserError
from quant.models.open import open_model

transformers = pytest.importorskip("transformers", reason="needs the extra hf")


def edit(file: Path, **fields: object) -> None:
    held = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**held, **fields}))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    tiny_models.llama(num_hidden_layers=1).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def flag(directory: Path) -> Path:
    """Appears as soon as `evil.py` of the directory runs."""
    code = f"""
import pathlib
pathlib.Path({str(directory / "flag")!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast as EvilTokenizer
class EvilConfig(LlamaConfig):
    model_type = "evil"
class EvilModel(LlamaForCausalLM):
    config_class = EvilConfig
"""
    (directory / "evil.py").write_text(code)
    return directory / "flag"


def test_python_files_of_a_model_run_only_on_request(directory: Path, flag: Path) -> None:
    """transformers asks "run the custom code? [y/N]" unless it is told, and runs it."""
    auto_map = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel"}
    edit(directory / "config.json", model_type="evil", auto_map=auto_map, architectures=["EvilModel"])
    for command in (
        ["quantize", directory, "--format", "fp8_channel", "--out", directory.parent / "out"],
        ["quantize", directory, "--format", "fp8_channel", "--dry-run"],
        ["evaluate", directory, "--text", directory / "config.json"],
        ["generate", directory, "--prompt", "x"],
    ):
        result = CliRunner().invoke(main, list(map(str, command)), input="y\n" * 9)
        assert result.exit_code == 2 and result.stderr.count("\n") == 1, result.output
        assert "Python files" in result.stderr and "--trust-remote-code" in result.stderr
        assert not flag.exists(), command
    trusted = ["quantize", directory, "--format", "fp8_channel", "--dry-run", "--trust-remote-code", "--quiet"]
    result = CliRunner().invoke(main, list(map(str, trusted)))
    assert result.exit_code == 0 and flag.exists(), result.output
    flag.unlink()
    with pytest.raises(UserError, match="--trust-remote-code"):  # the trust ended with the command
        open_model(directory)


def test_python_files_of_a_quantized_checkpoint_run_only_on_request(directory: Path, flag: Path) -> None:
    (directory / "plan.json").write_text("{}")
    edit(directory / "config.json", model_type="evil", auto_map={"AutoConfig": "evil.EvilConfig"})
    for command in (["export", directory, "--to", "onnx"], ["generate", directory, "--prompt", "x"]):
        result = CliRunner().invoke(main, list(map(str, command)), input="y\n" * 9)
        assert result.exit_code == 2 and "--trust-remote-code" in result.stderr, result.output
        assert not flag.exists(), command


def test_python_files_of_a_tokenizer_run_only_on_request(directory: Path, flag: Path) -> None:
    auto_map = {"AutoTokenizer": ["evil.EvilTokenizer", "evil.EvilTokenizer"]}
    edit(directory / "tokenizer_config.json", tokenizer_class="EvilTokenizer", auto_map=auto_map)
    result = CliRunner().invoke(main, ["generate", str(directory), "--prompt", "x"], input="y\n" * 9)
    assert result.exit_code == 2 and result.stderr.count("error:") == 1 and not flag.exists(), result.output


@pytest.mark.parametrize("name", ["Trainer", "pipeline", "AutoModelForCausalLM", "LlamaConfig", "utils", 7])
def test_only_model_classes_are_architectures(directory: Path, name: object) -> None:
    edit(directory / "config.json", architectures=[name])
    with pytest.raises(UserError, match=r"has no class for|config\.json"):
        open_model(directory)


@pytest.mark.parametrize(
    "outside", ["../secret.safetensors", "/secret.safetensors", "a/../../secret.safetensors", ".."]
)
@pytest.mark.parametrize("meta", [False, True])
def test_an_index_names_files_of_its_directory(directory: Path, outside: str, meta: bool) -> None:
    model = transformers.LlamaForCausalLM.from_pretrained(directory)
    save_file({n: t.contiguous() for n, t in model.state_dict().items()}, directory.parent / "secret.safetensors")
    (directory / "model.safetensors").unlink()
    (directory / "a").mkdir()
    names = {
        name: outside.replace("/secret", f"{directory.parent}/secret") if outside[0] == "/" else outside
        for name in model.state_dict()
    }
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    with pytest.raises(UserError, match=r"index\.json: names the file .* outside its directory"):
        open_model(directory, meta=meta)
