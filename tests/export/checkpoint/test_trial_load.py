"""A checkpoint is loaded before it appears: what transformers would miss is an error, what it does not load is told."""

import copy
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import parametrize, prune

import quant
from quant.base.errors import UserError, in_command
from quant.export.checkpoint import other_runtimes as module
from quant.export.checkpoint.other_runtimes import Trial, check_read_back, trial_load
from quant.run.request import Request
from quant.run.run import run

transformers = pytest.importorskip("transformers", reason="the extra hf")
pytest.importorskip("compressed_tensors", reason="the extra test")

from architectures import build  # noqa: E402 -- needs transformers


@pytest.fixture
def saved(tmp_path: Path) -> tuple[quant.Quantized, Path]:
    done = quant.quantize(tiny_models.llama(dtype=torch.bfloat16), "nvfp4a16")
    quant.save(done.model, done.plan, tmp_path / "out")
    return done, tmp_path / "out"


def rename(directory: Path, old: str, new: str) -> None:
    file = directory / "model.safetensors"
    save_file({name.replace(old, new): t for name, t in load_file(file).items()}, file, metadata={"format": "pt"})


def test_a_good_checkpoint_has_nothing_to_tell(saved: tuple[quant.Quantized, Path]) -> None:
    done, out = saved
    check_read_back(out, done.model)
    assert trial_load(out, done.model, done.plan, load_file(out / "model.safetensors")) == Trial()


def test_a_cast_of_what_is_not_stored_is_told(tmp_path: Path) -> None:
    """`.bfloat16()` casts RoPE's frequencies, which a loaded model computes in FP32; the advised way does not."""
    config, rows = tiny_models.llama().config, torch.arange(3, 35)[None]

    def apart(model: Any) -> bool:
        done, out = quant.quantize(model.eval(), "fp8_channel"), tmp_path / str(model.model.rotary_emb.inv_freq.dtype)
        quant.save(done.model, done.plan, out)
        with torch.no_grad():
            return not torch.equal(quant.load(out)(rows).logits, done.model(rows).logits)

    cast = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).bfloat16()
    with pytest.warns(
        UserWarning, match=r"inv_freq is torch\.bfloat16 in this.*or from_config\(…, dtype=torch\.bfloat16"
    ):
        assert apart(cast)
    with warnings.catch_warnings(action="error"):
        assert not apart(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))


def test_a_tensor_under_another_name_is_an_error(saved: tuple[quant.Quantized, Path]) -> None:
    done, out = saved
    rename(out, "layers.1.mlp.up_proj", "layers.1.mlp.other_proj")
    with pytest.raises(UserError, match=r"could not be read back.*layers\.1\.mlp\.up_proj"):
        check_read_back(out, done.model)
    with pytest.raises(UserError, match=r"finds no tensor for .*layers\.1\.mlp\.up_proj"):
        trial_load(out, done.model, done.plan, load_file(out / "model.safetensors"))


@pytest.mark.parametrize("part", ["input", "output"])
def test_sizes_that_the_config_does_not_have_are_named(part: str, tmp_path: Path) -> None:
    model = tiny_models.llama(dtype=torch.bfloat16)
    if part == "input":
        model.set_input_embeddings(nn.Embedding(80, 64, dtype=torch.bfloat16))
    else:
        model.set_output_embeddings(nn.Linear(64, 80, bias=False, dtype=torch.bfloat16))
    done = quant.quantize(model, "fp8_channel", effort=0)
    name = "model.embed_tokens" if part == "input" else "lm_head"
    says = (
        rf"^{name}.weight is \[80, 64\] in this model, and \[64, 64\] where its config builds it again \(change sizes "
    )
    with pytest.raises(UserError, match=says):
        quant.save(done.model, done.plan, tmp_path / "out")
    model = tiny_models.llama(dtype=torch.bfloat16)
    model.resize_token_embeddings(80)
    done = quant.quantize(model, "fp8_channel", effort=0)
    quant.save(done.model, done.plan, tmp_path / "out")
    ids = torch.tensor([[3, 79, 5]])
    assert torch.equal(quant.load(tmp_path / "out")(ids).logits, done.model(ids).logits)


@pytest.mark.parametrize("part", ["mlp", "mlp.up_proj", "mlp.up_proj.weight", "input_layernorm", ""])
def test_what_a_model_shares_against_its_class_is_named(part: str, tmp_path: Path) -> None:
    model = tiny_models.llama(dtype=torch.bfloat16)
    first, second = (f"model.layers.{n}.{part}".rstrip(".") for n in (0, 1))
    holder, _, name = second.rpartition(".")
    shared = model.get_parameter(first) if part.endswith("weight") else model.get_submodule(first)
    setattr(model.get_submodule(holder), name, shared)
    done = quant.quantize(model, "fp8_channel", effort=0)
    message = rf"^{re.escape(first)} and {re.escape(second)} are one object in this model, and two where Llama"
    with pytest.raises(UserError, match=message):
        quant.save(done.model, done.plan, tmp_path / "out")
    assert not (tmp_path / "out").exists()


COMPUTED_WEIGHTS: dict[str, tuple[Callable[[Any], object], Callable[[Any], object]]] = {
    "parametrizations.weight.original0": (
        nn.utils.parametrizations.weight_norm, lambda layer: parametrize.remove_parametrizations(layer, "weight")
    ),
    "weight_g": (nn.utils.weight_norm, nn.utils.remove_weight_norm),
    "weight_orig": (
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
        lambda layer: prune.remove(layer, "weight"),
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize("layer", ["model.layers.0.mlp.up_proj", "lm_head"])
@pytest.mark.parametrize("parameter", COMPUTED_WEIGHTS)
def test_a_weight_that_a_module_computes_is_saved_once_it_is_permanent(
    parameter: str, layer: str, tmp_path: Path
) -> None:
    """The model that config.json builds has the plain layer: its weight would be missing."""
    begin, make_permanent = COMPUTED_WEIGHTS[parameter]
    model = tiny_models.llama(dtype=torch.bfloat16)
    begin(model.get_submodule(layer))
    done = quant.quantize(model, "fp8_channel", effort=0)
    message = (
        rf"^{re.escape(layer)}\.{re.escape(parameter)}: its module computes its weight .*, and does not where "
        r"LlamaForCausalLM builds it again \(make the weight permanent before you quantize, with remove_param"
    )
    with pytest.raises(UserError, match=message):
        quant.save(done.model, done.plan, tmp_path / "out")
    model = tiny_models.llama(dtype=torch.bfloat16)
    begin(model.get_submodule(layer))
    make_permanent(model.get_submodule(layer))
    done = quant.quantize(model, "fp8_channel", effort=0)
    quant.save(done.model, done.plan, tmp_path / "out")
    ids = torch.tensor([[3, 9, 5]])
    assert torch.equal(quant.load(tmp_path / "out")(ids).logits, done.model(ids).logits)


def test_scales_of_the_kv_cache_that_transformers_leaves_out_are_told(
    saved: tuple[quant.Quantized, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """compressed-tensors 0.20 does not find the attention of transformers 5.24."""
    done, out = saved
    unexpected = ["model.layers.0.self_attn.k_scale", "model.layers.0.self_attn.v_scale"]
    info = {"missing_keys": [], "unexpected_keys": unexpected}
    monkeypatch.setattr("quant.export.checkpoint.other_runtimes._load", lambda *args, **options: info)
    tensors = load_file(out / "model.safetensors")
    trial = trial_load(out, done.model, done.plan, tensors)
    assert trial is not None and trial.problem is None
    (note,) = trial.warnings
    assert "keeps the KV cache of this checkpoint in 16 bit" in note and "quant.load and servers use" in note
    info["missing_keys"] = ["model.norm.weight"]
    with pytest.raises(UserError, match=r"finds no tensor for model\.norm\.weight, and would run with random numbers"):
        trial_load(out, done.model, done.plan, tensors)


def test_a_trial_in_a_thread_names_options_as_its_caller_takes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = {"missing_keys": ["model.norm.weight"], "unexpected_keys": []}
    monkeypatch.setattr("quant.export.checkpoint.other_runtimes._load", lambda *args, **options: info)
    done = quant.quantize(tiny_models.llama(dtype=torch.bfloat16), "fp8_channel", effort=0)
    with pytest.raises(UserError, match=r"with exclude=, or pass allow_missing=True"):
        quant.save(done.model, done.plan, tmp_path / "out")
    with in_command(), pytest.raises(UserError, match=r"with --exclude, or pass --allow-missing"):
        quant.save(done.model, done.plan, tmp_path / "out")


def test_of_blocks_that_are_alike_one_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial finds the same names as a load of all tensors, and decompresses the experts of one block."""
    from compressed_tensors.compressors import BaseCompressor

    sizes = {**tiny_models.DECODER, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    model = tiny_models.build("Qwen3Moe", "ForCausalLM", {**sizes, "num_hidden_layers": 4}, dtype=torch.bfloat16)
    done = quant.quantize(model, "nvfp4a16", exclude=["*.layers.2.self_attn.*"])
    quant.save(done.model, done.plan, tmp_path / "out")
    tensors = {name: t.to("meta") for name, t in load_file(tmp_path / "out" / "model.safetensors").items()}
    calls = []
    cls = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    plain = vars(cls)["decompress"]

    def counted(cls: type, state_dict: dict[str, torch.Tensor], scheme: object) -> object:
        calls.append(state_dict)
        return plain.__func__(cls, state_dict, scheme)

    monkeypatch.setattr(cls, "decompress", classmethod(counted))
    norms = [f"model.layers.{block}.input_layernorm.weight" for block in range(4)]
    for missing in ((), norms[1:2], norms, ["model.norm.weight"]):
        names = {name: tensor for name, tensor in tensors.items() if name not in missing}
        if missing is norms:
            names |= {f"model.layers.{block}.other": torch.empty(4, device="meta") for block in range(4)}
        found, numbers = [], []
        for pattern in (module._BLOCK, re.compile("(?!)")):  # the other one matches nothing: all blocks are tried
            monkeypatch.setattr(module, "_BLOCK", pattern)
            calls.clear()
            info = module._load(tmp_path / "out", type(model), names)
            found.append((info["missing_keys"], set(info["unexpected_keys"])))
            numbers.append(len(calls))
            monkeypatch.undo()
            monkeypatch.setattr(cls, "decompress", classmethod(counted))
        assert found[0] == found[1] and found[0][0] == set(missing)
        assert numbers[0] <= numbers[1] / 2 + 8 * 3


def granite() -> torch.nn.Module:
    sizes = {**tiny_models.DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}
    return tiny_models.build("GraniteMoe", "ForCausalLM", sizes, dtype=torch.bfloat16)  # type: ignore[no-any-return]


def test_transformers_stops_at_experts_that_it_would_draw_at_random(tmp_path: Path) -> None:
    """Its experts are stored fused, no rule of transformers joins them, and servers read them one by one."""
    done = quant.quantize(granite(), "nvfp4a16")
    with pytest.warns(UserWarning, match=r"experts\.gate_up_proj first, need quant\.load or a server"):
        quant.save(done.model, done.plan, tmp_path / "out")
    with pytest.raises(RuntimeError, match=r"ignore_mismatched_sizes"):
        transformers.GraniteMoeForCausalLM.from_pretrained(tmp_path / "out")
    names = load_file(tmp_path / "out" / "model.safetensors")
    assert "model.layers.0.block_sparse_moe.experts.3.up_proj.weight_packed" in names  # as vLLM reads them
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(quant.load(tmp_path / "out")(ids).logits, done.model(ids).logits)


def test_experts_that_transformers_would_draw_at_random_are_an_error(tmp_path: Path) -> None:
    """Its experts have the names that servers read, one by one, and no rule of transformers joins them."""
    done = quant.quantize(build("HYV4ForCausalLM", torch.bfloat16), "fp8_channel")
    with pytest.raises(
        UserError, match=r"experts\.gate_up_proj first: .*no rule of it joins.*pass allow_missing=True"
    ) as caught:
        quant.save(done.model, done.plan, tmp_path / "out")
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()
    with pytest.warns(UserWarning, match="random numbers: load this checkpoint with quant.load"):
        quant.save(done.model, done.plan, tmp_path / "out", allow_missing=True)
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(quant.load(tmp_path / "out")(ids).logits, done.model(ids).logits)


def test_experts_in_16_bit_have_the_names_of_the_original(tmp_path: Path) -> None:
    done = quant.quantize(granite(), "fp8_channel", exclude=["*experts*"])
    quant.save(done.model, done.plan, tmp_path / "out")
    _, info = transformers.GraniteMoeForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]


def test_what_transformers_does_not_load_is_unpacked_as_it_reads_or_told(tmp_path: Path) -> None:
    """Its weight initialisation reads `.weight` of layers that hold packed codes."""
    sizes = {k: v for k, v in tiny_models.DECODER.items() if k != "intermediate_size"}
    options = {"gain": 3, "dtype": torch.bfloat16}
    model = tiny_models.build("Falcon", "ForCausalLM", {**sizes, "new_decoder_architecture": True}, **options)
    twin, ids = copy.deepcopy(model), torch.arange(8)[None]
    done = quant.quantize(model, "nvfp4a16")
    with warnings.catch_warnings(action="error", category=UserWarning):
        quant.save(done.model, done.plan, tmp_path / "unpacked")
    with torch.no_grad():
        theirs = transformers.FalconForCausalLM.from_pretrained(tmp_path / "unpacked")(ids).logits
        assert torch.equal(theirs, quant.load(tmp_path / "unpacked")(ids).logits)
    # With rounded inputs that would leave them in 16 bit without a word.
    done = quant.quantize(twin, "mxfp4")
    with warnings.catch_warnings(record=True, action="always") as caught:
        quant.save(done.model, done.plan, tmp_path / "out")
    (told,) = [str(each.message) for each in caught if "does not load" in str(each.message)]
    assert "no attribute 'weight'" in told and "CompressedTensorsConfig(dequantize=True)" in told
    with pytest.raises(AttributeError, match="weight"):
        transformers.FalconForCausalLM.from_pretrained(tmp_path / "out")
    config = transformers.CompressedTensorsConfig(dequantize=True)
    theirs = transformers.FalconForCausalLM.from_pretrained(tmp_path / "out", quantization_config=config)
    ours = quant.load(tmp_path / "out")
    for layer in done.plan.quantized:
        setattr(ours.get_submodule(layer.name), "activation_format", None)  # noqa: B010 -- no field of nn.Module
    with torch.no_grad():
        assert torch.equal(theirs(ids).logits, ours(ids).logits)


@pytest.mark.parametrize(
    ("format", "include", "does"),
    [
        ("fp8_channel", (), "does not load this checkpoint"),
        ("nvfp4a16", (), "loads this checkpoint with random numbers in the place of their weights"),
        ("fp8_channel", ("*attn.c_proj",), "loads this checkpoint with codes in the place of their weights"),
    ],
)
def test_what_transformers_does_with_conv1d_is_told_as_it_is(
    format: str, include: tuple[str, ...], does: str, tmp_path: Path
) -> None:
    """Against what `from_pretrained` does with the checkpoint."""
    done = quant.quantize(tiny_models.gpt2(dtype=torch.bfloat16), format, include=include, effort=0)
    with pytest.warns(UserWarning, match=rf"layers, .* first, need quant.load: .* a Conv1D in 16 bit only, and {does}"):
        quant.save(done.model, done.plan, tmp_path / "out")
    if does.startswith("does not"):
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
            transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out")
        return
    theirs, info = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert bool(info["missing_keys"]) is ("random" in does)
    layer = done.plan.quantized[0].name
    ours = done.model.get_submodule(layer).dequantize().t().float()
    found = theirs.get_submodule(layer).weight.detach().float()
    assert float((found - ours).norm() / ours.norm()) > 0.5


def test_the_command_refuses_such_experts_before_any_work(tmp_path: Path) -> None:
    build("HYV4ForCausalLM", torch.bfloat16).save_pretrained(tmp_path / "model")
    job = Request(str(tmp_path / "model"), "fp8_channel", solver="gptq", out=tmp_path / "out")  # which would need data
    with pytest.raises(UserError, match="no rule of it joins quantized ones"):
        run(job)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_tensors_of_experts_that_a_warning_names_are_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.17 reports them as unexpected, and 5.24 does not."""
    done = quant.quantize(tiny_models.qwen3_moe(dtype=torch.bfloat16), "nvfp4a16", solver="rtn")

    def reported(name: str) -> None:
        info = {"missing_keys": set(), "unexpected_keys": {name}}
        monkeypatch.setattr("quant.export.checkpoint.other_runtimes._load", lambda *_: info)

    reported("model.layers.0.mlp.experts.0.down_proj.weight_global_scale")
    with pytest.warns(UserWarning, match="fused experts in NVFP4 without their global scale"):
        quant.save(done.model, done.plan, tmp_path / "out")
    reported("model.layers.0.self_attn.o_proj.weight_global_scale")
    with pytest.raises(UserError, match=r"has no use for model\.layers\.0\.self_attn\.o_proj"):
        quant.save(done.model, done.plan, tmp_path / "other")
