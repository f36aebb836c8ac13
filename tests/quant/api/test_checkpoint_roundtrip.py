"""A model goes to a directory and back: the goldens' bytes, bit-identical logits, and transformers' own logits."""

import copy
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from safetensors.torch import load_file
from samples import BASE, GOLDENS
from torch import nn

from quant.base.errors import UserError
from quant.calibration.layer_result import Quantized
from quant.export.checkpoint.files import tensors as files
from quant.export.checkpoint.files.names import stored_names
from quant.export.checkpoint.load import load
from quant.export.checkpoint.save import Destination, save, write_model
from quant.formats.format import FORMATS
from quant.models.open_model import open_model
from quant.recipes.layers import LayerKind
from quant.recipes.plan import Plan
from quant.recipes.plan_make import make_plan
from quant.recipes.recipe import Recipe, Rule, presets
from quant.run.api import quantize

transformers = pytest.importorskip("transformers")

IDS = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))


@cache
def original() -> nn.Module:
    model = open_model(BASE).model
    assert model is not None
    return model


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS % model.config.vocab_size).logits


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype is not b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Quantized, Path]]:
    """The golden model quantized by a preset, and where it was saved."""

    @cache
    def make(preset: str) -> tuple[Quantized, Path]:
        done = quantize(copy.deepcopy(original()), preset, IDS)
        out = tmp_path_factory.mktemp("saved") / preset
        save(done.model, done.plan, out)
        return done, out

    return make


# The goldens

GOLDEN_PRESETS = {
    "NVFP4A16": "nvfp4a16",
    "NVFP4": "nvfp4",
    "FP8": "fp8",
    "FP8_DYNAMIC": "fp8_channel",
    "FP8_BLOCK": "fp8_block",
    "MXFP4": "mxfp4",
    "MXFP8": "mxfp8",
}


@pytest.mark.parametrize(("golden", "preset"), GOLDEN_PRESETS.items())
def test_the_whole_path_reproduces_the_golden_checkpoint(golden: str, preset: str, tmp_path: Path) -> None:
    """Names, dtypes, shapes and bytes, and config.json as a dict; static input scales depend on the text they saw."""
    model = copy.deepcopy(original())
    plan = make_plan(model, preset, solver="compressed_tensors")
    save(model, quantize(model, plan, IDS).plan, tmp_path / "out")
    ours = load_file(tmp_path / "out" / "model.safetensors")
    theirs = load_file(GOLDENS / "compressed_tensors" / golden / "model.safetensors")
    # The golden FP8 checkpoint has an FP8 KV cache too, which is not part of the preset.
    theirs = {name: tensor for name, tensor in theirs.items() if not name.endswith((".k_scale", ".v_scale"))}
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape), name
        if not name.endswith((".input_scale", ".input_global_scale")):
            assert same(ours[name], tensor), name
    configs = [
        json.loads((directory / "config.json").read_text())
        for directory in (tmp_path / "out", GOLDENS / "compressed_tensors" / golden)
    ]
    configs[1]["quantization_config"]["kv_cache_scheme"] = None
    for config in configs:
        del config["transformers_version"]  # of the library that wrote it
    assert configs[0] == configs[1]


# Reading back


@pytest.mark.parametrize("preset", presets())
def test_loading_gives_the_same_logits_bit_for_bit(preset: str, saved: Any) -> None:
    done, out = saved(preset)
    loaded = load(out)
    assert same(logits(loaded), logits(done.model))
    assert not torch.equal(logits(done.model), logits(original()))
    ours, theirs = done.model.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys() and all(same(ours[k], theirs[k]) for k in ours)
    assert Plan.load(out / "plan.json") == done.plan
    assert not loaded.training and all(not p.is_meta for p in (*loaded.parameters(), *loaded.buffers()))


@pytest.mark.parametrize("preset", ["nvfp4", "fp8_block", "mxfp6a16"])
def test_what_is_loaded_can_be_saved_again_byte_for_byte(preset: str, saved: Any, tmp_path: Path) -> None:
    _, out = saved(preset)
    save(load(out), Plan.load(out / "plan.json"), tmp_path / "again")
    for name in ("model.safetensors", "config.json", "plan.json", "generation_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (out / name).read_bytes(), name


# Largest relative error (Frobenius) of transformers' logits. Weights are bit-identical in every case. 16-bit inputs
# and MXFP8 give the very same logits. The others differ in the arithmetic of input scales, which compressed-tensors
# does in the model's dtype and we do in float32, so that codes become their neighbours; its MXFP4 inputs also take
# their exponents by another rule (`even`). The model is tiny and random: its logits are small and errors large.
# INT8 differs in float32 too, because the library divides a token's amax by 127.5 and we by 127, as vLLM does.
BFLOAT16_LIMIT = {
    "nvfp4": 0.15, "mxfp4": 0.2, "fp8": 0.05, "fp8_channel": 0.05, "fp8_block": 0.05, "int8": 0.02, "int8_static": 0.05
}  # fmt: skip
FLOAT32_LIMIT = {"fp8": 0.0, "fp8_channel": 0.0, "fp8_block": 0.0, "int4a16": 0.0, "int8": 0.02, "int8_static": 0.0}


@pytest.mark.parametrize("preset", presets())
def test_transformers_gives_the_same_logits(preset: str, saved: Any) -> None:
    pytest.importorskip("compressed_tensors")
    _, out = saved(preset)
    ours = load(out)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    found = logits(theirs)  # the library unpacks the weights at the first call
    for name, module in ours.named_modules():
        if hasattr(module, "quantized_weight"):
            assert same(module.dequantize(torch.bfloat16), theirs.get_submodule(name).weight), name
    assert relative(found, logits(ours)) <= BFLOAT16_LIMIT.get(preset, 0.0)


@pytest.mark.parametrize("preset", FLOAT32_LIMIT)
def test_transformers_gives_the_same_logits_in_float32(preset: str, saved: Any) -> None:
    """Packed formats are not here: the library unpacks them to BF16 whatever the dtype asked for, and then fails."""
    pytest.importorskip("compressed_tensors")
    _, out = saved(preset)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert relative(logits(theirs), logits(load(out).float())) <= FLOAT32_LIMIT[preset]


@pytest.mark.parametrize("golden", GOLDEN_PRESETS)
def test_a_foreign_checkpoint_loads_without_a_plan(golden: str) -> None:
    """What llm-compressor wrote, its own logits through transformers and ours; limits as above."""
    pytest.importorskip("compressed_tensors")
    directory = GOLDENS / "compressed_tensors" / golden
    ours = load(directory)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    quantized = [n for n, m in ours.named_modules() if hasattr(m, "quantized_weight")]
    assert len(quantized) == 14
    assert relative(logits(theirs), logits(ours)) <= BFLOAT16_LIMIT.get(GOLDEN_PRESETS[golden], 0.0)


# Shards, ties, mixed plans


def test_a_sharded_checkpoint_loads(saved: Any, tmp_path: Path) -> None:
    done, _ = saved("nvfp4a16")
    destination = Destination(tmp_path / "out", shard_bytes=50_000)
    hashes = write_model(done.model, done.plan, destination, stored_names(done.model))
    assert len(hashes) > 3 and set(hashes) == {p.name for p in (tmp_path / "out").glob("*.safetensors")}
    assert same(logits(load(tmp_path / "out")), logits(done.model))
    pytest.importorskip("compressed_tensors")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert same(logits(theirs), logits(done.model))


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    config = copy.deepcopy(original().config)
    config.tie_word_embeddings = True
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    done = quantize(model, "mxfp8")
    save(model, done.plan, tmp_path / "out")
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    loaded = load(tmp_path / "out")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert same(logits(loaded), logits(model))


def test_a_mixed_plan_of_all_kinds(tmp_path: Path) -> None:
    recipe = Recipe("mixed", weight="nvfp4", activation="nvfp4").with_rules(
        Rule("*mlp.down_proj", "mxfp8", "mxfp8"),
        Rule("*.1.self_attn.*", "fp8_channel", "fp8_token"),
        Rule("lm_head", "int8"),
    )
    model = copy.deepcopy(original())
    done = quantize(model, recipe, IDS)
    save(model, done.plan, tmp_path / "out")
    loaded = load(tmp_path / "out")
    assert same(logits(loaded), logits(model))
    assert loaded.lm_head.weight_format is FORMATS["int8"]
    # Without the plan, the config alone gives the same model.
    (tmp_path / "out" / "plan.json").unlink()
    assert same(logits(load(tmp_path / "out")), logits(model))
    pytest.importorskip("compressed_tensors")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert relative(logits(theirs), logits(model)) < 0.15


def test_the_saved_config_names_class_and_dtype(tmp_path: Path) -> None:
    model = tiny_models.bert_classifier(num_hidden_layers=1, num_labels=3, dtype=torch.float16)
    done = quantize(model, "nvfp4a16")
    save(model, done.plan, tmp_path / "out")
    loaded = load(tmp_path / "out")
    assert type(loaded) is transformers.BertForSequenceClassification
    with torch.no_grad():
        assert same(loaded(IDS % 64).logits, model(IDS % 64).logits)


# Mixture of experts


@cache
def moe() -> nn.Module:
    model = tiny_models.qwen3_moe(dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize("preset", ["nvfp4", "nvfp4a16", "mxfp4", "mxfp6a16", "mxfp8", "fp8", "fp8_channel", "int8"])
def test_experts_are_saved_one_by_one_and_load_bit_for_bit(preset: str, tmp_path: Path) -> None:
    model = copy.deepcopy(moe())
    done = quantize(model, preset, torch.randint(0, 64, (8, 16)))
    assert sum(layer.kind == LayerKind.EXPERTS for layer in done.plan.quantized) == 4
    save(model, done.plan, tmp_path / "out")
    names = load_file(tmp_path / "out" / "model.safetensors").keys()
    parts = {n.rpartition(".")[0] for n in names if ".experts." in n}
    assert parts == {
        f"model.layers.{i}.mlp.experts.{e}.{p}_proj" for i in (0, 1) for e in range(4) for p in ("gate", "up", "down")
    }
    loaded = load(tmp_path / "out")
    assert same(logits(loaded), logits(model))
    assert relative(logits(loaded), logits(moe())) < 0.5


@pytest.mark.skipif(
    tuple(int(n) for n in transformers.__version__.split(".")[:2]) < (5, 23), reason="older releases cannot load these"
)
@pytest.mark.parametrize(("preset", "limit"), [("mxfp4a16", 0.0), ("fp8_channel", 0.06)])
def test_transformers_loads_experts(preset: str, limit: float, tmp_path: Path) -> None:
    """Formats whose experts transformers can unpack. It drops the global scale of NVFP4's and refuses MXFP8's."""
    pytest.importorskip("compressed_tensors")
    model = copy.deepcopy(moe())
    save(model, quantize(model, preset).plan, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert relative(logits(theirs), logits(model)) <= limit


# Without transformers, and what cannot be loaded


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 32), nn.Linear(32, 48, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


@pytest.mark.parametrize("preset", ["nvfp4a16", "mxfp8", "fp8_channel", "int8"])
def test_a_plain_module(preset: str, tmp_path: Path) -> None:
    model, x = Plain(), torch.randn(5, 64)
    done = quantize(model, preset, run=lambda m: m(x))
    save(model, done.plan, tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["SHA256SUMS", "model.safetensors", "plan.json"]
    blank = Plain()
    assert load(tmp_path / "out", model=blank) is blank
    assert torch.equal(blank(x), model(x))
    with pytest.raises(UserError, match=r"no config\.json; build the module and pass it"):
        load(tmp_path / "out")


@pytest.mark.parametrize(("preset", "solver"), [("fp8", "gptq"), ("nvfp4", "awq+gptq")])
def test_what_a_group_shares_is_saved_for_each_member(preset: str, solver: str, tmp_path: Path) -> None:
    """In float32 nothing is converted on the way to the file, so one scale of three layers was one tensor there."""
    model = tiny_models.bert(num_attention_heads=2, vocab_size=61)
    rows = torch.randint(0, 61, (8, 16), generator=torch.Generator().manual_seed(1))
    quantized = quantize(model, preset, rows, solver=solver)
    save(quantized.model, quantized.plan, tmp_path / "out")
    with torch.no_grad():
        again = load(tmp_path / "out")(rows).last_hidden_state
        assert torch.equal(again, quantized.model(rows).last_hidden_state)


def test_a_directory_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no quantized checkpoint \(no plan\.json, no quantization_config\)"):
        load(tmp_path)
    with pytest.raises(UserError, match="no quantized checkpoint"):
        load(BASE)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json: not valid JSON"):
        load(tmp_path)


def test_a_checkpoint_of_another_model_is_refused(saved: Any) -> None:
    _, out = saved("nvfp4a16")
    with pytest.raises(UserError, match="the plan does not fit this model"):
        load(out, model=Plain())


def test_a_lost_tensor_is_named(saved: Any, tmp_path: Path) -> None:
    done, _ = saved("nvfp4a16")
    for lost in ("model.norm.weight", "model.layers.1.mlp.up_proj.weight_scale"):
        out = tmp_path / lost
        save(done.model, done.plan, out)
        tensors = load_file(out / "model.safetensors")
        del tensors[lost]
        files.write_tensors(out, tensors)
        with pytest.raises(ValueError, match=lost.replace(".", r"\.")):
            load(out)


def test_an_unwritable_disk_leaves_nothing(saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done, _ = saved("nvfp4a16")

    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_tensor_file", full)
    with pytest.raises(OSError, match="No space left on device"):
        save(done.model, done.plan, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_format_that_the_layout_lacks_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    model = copy.deepcopy(original())
    done = quantize(model, Recipe("odd", weight="mxfp8_e5m2"))
    with pytest.raises(ValueError, match="cannot store mxfp8_e5m2"):
        save(model, done.plan, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_what_is_made_when_it_is_written_is_the_same(
    saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, _ = saved("int4a16")
    save(done.model, done.plan, tmp_path / "at once")
    monkeypatch.setattr(files, "_DEFERRED_BYTES", 0)
    deferred, initialize = 0, files.DeferredTensor.__init__

    def counted(*arguments: Any) -> None:
        nonlocal deferred
        deferred += 1
        initialize(*arguments)

    monkeypatch.setattr(files.DeferredTensor, "__init__", counted)
    save(done.model, done.plan, tmp_path / "late")
    assert deferred >= 2  # codes and scales
    late, at_once = (tmp_path / name / "model.safetensors" for name in ("late", "at once"))
    assert late.read_bytes() == at_once.read_bytes()


class Buffers(nn.Module):
    """A layer, and buffers of dtypes that a checkpoint has for codes and scales, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        values = torch.rand(8, generator=torch.Generator().manual_seed(0))
        for dtype in (torch.float8_e4m3fn, torch.uint8, torch.bool, torch.complex64, torch.float64, torch.uint16):
            self.register_buffer(str(dtype).removeprefix("torch."), values.mul(3).to(dtype))
        self.register_buffer("empty", torch.empty(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


def test_buffers_of_every_dtype_come_back(tmp_path: Path) -> None:
    done = quantize(Buffers(), "nvfp4a16")
    save(done.model, done.plan, tmp_path / "out")
    loaded = load(tmp_path / "out", Buffers())
    for name, buffer in done.model.named_buffers():
        assert same(loaded.get_buffer(name), buffer), name


def test_a_block_in_two_places_is_stored_once(tmp_path: Path) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64))
        return nn.Sequential(block, block, nn.Linear(64, 64)).eval()

    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    done = quantize(make(), "nvfp4", x)
    save(done.model, done.plan, tmp_path / "out")
    assert {name.split(".")[0] for name in load_file(tmp_path / "out" / "model.safetensors")} == {"0", "2"}
    assert same(load(tmp_path / "out", make())(x), done.model(x))


def test_state_that_is_no_tensor_is_refused_by_name(tmp_path: Path) -> None:
    class Counting(Buffers):
        def get_extra_state(self) -> Any:
            return {"steps": 3}

        def set_extra_state(self, state: Any) -> None:
            raise AssertionError

    done = quantize(nn.Sequential(Counting()), "nvfp4a16")
    with pytest.raises(ValueError, match=r"0\._extra_state: a dict, and files of weights hold tensors alone"):
        save(done.model, done.plan, tmp_path / "out")
    assert not (tmp_path / "out").exists()
