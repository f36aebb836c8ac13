"""A Hugging Face directory may be hostile: its code does not run, and its names stay inside it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from samples import BASE, GOLDENS

import quant
from quant.base.errors import UserError
from quant.cli.main import main
from quant.models.huggingface import load_processor, load_tokenizer
from quant.models.open_model import open_model

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
        ["evaluate", directory, "--text", __file__],
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
    with pytest.raises(UserError, match="trust_remote_code=True"):  # the trust ended with the command
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


def test_a_config_with_nan(directory: Path) -> None:
    """The model would give NaN, and a format that needs no data would not notice."""
    edit(directory / "config.json", rms_norm_eps=float("nan"))
    with pytest.raises(UserError, match=r"config\.json: rms_norm_eps is NaN; correct it"):
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


@pytest.mark.parametrize("name", ["chat_template.jinja", "preprocessor_config.json", "tokenizer_config.json"])
def test_a_private_file_does_not_end_in_the_output(directory: Path, name: str) -> None:
    """A template that is a link to a private file was read, and written beside the quantized model."""
    tokenizers = pytest.importorskip("tokenizers", reason="comes with the extra hf")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    private = directory.parent / "private"
    private.write_text('{"secret": 7}')
    (directory / name).unlink(missing_ok=True)
    (directory / name).symlink_to(private)
    arguments = ["quantize", str(directory), "--format", "fp8_channel", "--out", str(directory.parent / "out")]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2 and f"{name}: a link to {private}, outside" in result.stderr, result.output
    assert not (directory.parent / "out").exists()


def test_conversion_copies_no_private_file(directory: Path) -> None:
    source = shutil.copytree(GOLDENS / "modelopt" / "w4a16", directory.parent / "source")
    private = directory.parent / "private"
    private.mkdir()
    secret = private / "notes.txt"
    secret.write_text("secret")
    out = directory.parent / "out"
    (source / "folder").mkdir()
    for link, target in (
        ("notes.txt", private / "notes.txt"),
        ("link", private),
        ("folder/deep", private / "notes.txt"),
    ):
        (source / link).symlink_to(target)
        with pytest.raises(UserError, match="outside its directory"):
            quant.convert(source, out, "compressed-tensors")
        assert not out.exists()
        (source / link).unlink()
    os.mkfifo(source / "folder" / "pipe")
    with pytest.raises(UserError, match="no regular file"):
        quant.convert(source, out, "compressed-tensors")
    (source / "folder" / "pipe").unlink()
    (source / "folder" / "own.txt").write_text("mine")
    (source / "own.txt").symlink_to("folder/own.txt")
    quant.convert(source, out, "compressed-tensors")
    assert (out / "own.txt").read_text() == (out / "folder" / "own.txt").read_text() == "mine"
    assert not (out / "own.txt").is_symlink()


def test_the_cache_of_the_hub_is_made_of_links(directory: Path) -> None:
    blobs, snapshot = directory.parent / "hub" / "blobs", directory.parent / "hub" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(directory.iterdir()):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert open_model(snapshot).model is not None


def test_names_do_not_command_the_terminal(tmp_path: Path) -> None:
    """Tensor and layer names went to the screen as they are: `ESC ]` sets a clipboard, `ESC [` hides lines."""
    evil = "\x1b]0;owned\x07\x1b[2J\x9b1m\r\u202elayer"
    save_file({f"{evil}.weight": torch.zeros(64, 64)}, tmp_path / "m.safetensors")
    plan = str(tmp_path / "plan.json")
    quant.make_plan({f"{evil}.weight": (64, 64)}, "fp8_channel").save(plan)
    for arguments in (
        ["quantize", str(tmp_path / "m.safetensors"), "--format", "fp8_channel", "--dry-run"],
        ["quantize", str(tmp_path / "m.safetensors"), "--format", "fp8_channel", "--out", str(tmp_path / "out")],
        ["plan", "show", plan],
        ["plan", "show", plan, "--json"],
        ["plan", "validate", plan, "--target", "tensorrt-rtx-sm89"],
        ["plan", "edit", plan, "--set", "*=nvfp4", "--out", str(tmp_path / "other.json")],
        ["plan", "edit", plan, "--set", f"{evil}=keep=", "--out", str(tmp_path / "other.json")],
        ["inspect", str(tmp_path / "out")],
    ):
        shown = CliRunner().invoke(main, arguments).output
        assert shown and not set(shown) & {"\x1b", "\x07", "\x9b", "\r", "\u202e"}, arguments
        assert "x1b" in shown or "u001b" in shown or "owned" not in shown


@pytest.fixture
def ends_in_time() -> Iterator[None]:
    """Python's regular expressions and this toolkit's loops end when a signal raises an exception."""

    def late(*_: object) -> None:
        pytest.fail("it does not end within a minute")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("ends_in_time")
def test_no_pattern_of_a_checkpoint_hangs(tmp_path: Path) -> None:
    source = shutil.copytree(GOLDENS / "compressed_tensors" / "NVFP4", tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"]["ignore"].append(r"re:(model.*)*(\w+|\w)*(.+)+!")
    (source / "config.json").write_text(json.dumps(config))
    done = CliRunner().invoke(main, ["inspect", str(source)])
    assert done.exit_code == 0 and "model.layers" in done.output, done


def test_nesting_and_packed_archives_are_one_line(tmp_path: Path) -> None:
    deep = tmp_path / "plan.json"
    deep.write_text("[" * 100_000)
    torch.save({"w": torch.zeros(4, 4)}, tmp_path / "plain.pt")
    with (
        zipfile.ZipFile(tmp_path / "plain.pt") as plain,
        zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as bomb,
    ):
        for name in plain.namelist():
            bomb.writestr(name, plain.read(name) + (b"\0" * 10_000_000 if name.endswith("data/0") else b""))
    for arguments in (
        ["plan", "show", str(deep)],
        ["inspect", str(tmp_path)],
        ["quantize", str(tmp_path / "bomb.pt"), "--format", "fp8_channel", "--dry-run"],
    ):
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 2 and result.stderr.count("\n") == 1, result.output


def test_a_header_that_points_outside_its_file_is_refused_at_once(tmp_path: Path) -> None:
    source = shutil.copytree(GOLDENS / "compressed_tensors" / "NVFP4", tmp_path / "source")
    file = source / "model.safetensors"
    length = int.from_bytes(file.read_bytes()[:8], "little")
    header = json.loads(file.read_bytes()[8 : 8 + length])
    next(v for k, v in header.items() if v.get("dtype") == "F8_E4M3")["data_offsets"] = [0, 2**63]
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + file.read_bytes()[8 + length :])
    with pytest.raises(ValueError, match=r"model\.safetensors: truncated or damaged"):
        quant.load(source)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    source = shutil.copytree(GOLDENS / "compressed_tensors" / "FP8_BLOCK", tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].T.contiguous()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"source: lm_head\.weight is \[128, 256\], and \[256, 128\] in the model"):
        quant.load(source)


def test_a_tokenizer_config_with_infinity_is_refused(tmp_path: Path) -> None:
    source = shutil.copytree(BASE, tmp_path / "source")
    (source / "tokenizer_config.json").write_text('{"model_max_length": 1e999}')
    with pytest.raises(UserError, match=r"tokenizer_config\.json: Out of range float values are not JSON compliant"):
        load_tokenizer(source)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"feature_extractor_type": "WhisperFeatureExtractor", "n_fft": 10**9}, "n_fft is 1000000000"),
        ({"feature_extractor_type": "WhisperFeatureExtractor", "chunk_length": 1e5}, "chunk_length is 100000.0"),
        ({"image_processor_type": "ViTImageProcessor", "size": {"height": 32, "width": 10**7}}, "width is 10000000"),
    ],
)
def test_a_processor_that_takes_all_memory_is_refused(tmp_path: Path, fields: dict[str, Any], named: str) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields))
    with pytest.raises(
        UserError, match=rf"preprocessor_config\.json: {named}; more than \d+ is assumed to be a mistake"
    ):
        load_processor(tmp_path)


def test_processors_as_transformers_writes_them_are_taken(tmp_path: Path) -> None:
    transformers.WhisperFeatureExtractor().save_pretrained(tmp_path)
    assert load_processor(tmp_path).n_fft == 400
