"""transformers' `from_pretrained` quantizes with a `QuantConfig`, and runs quantized checkpoints on our modules."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from packaging import version

import quant
from quant.base.errors import UserError
from quant.export.checkpoint.convert import convert
from quant.kernels.linear.quant_linear import QuantLinear

transformers = pytest.importorskip("transformers", reason="the extra hf")
pytest.importorskip("compressed_tensors", reason="the extra hf")

IDS = torch.arange(24).view(2, 12)
DATA = (torch.arange(128) * 7 % 64).view(8, 16)
# transformers says of each `quantization_config` that the checkpoint's own is used, as here it is.
pytestmark = pytest.mark.filterwarnings("ignore:You passed `quantization_config`")


def from_pretrained(path: Path, config: Any = None, **options: Any) -> Any:
    config = {} if config is None else {"quantization_config": config}
    return transformers.AutoModelForCausalLM.from_pretrained(path, **config, **options)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits  # type: ignore[no-any-return]


def files(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


MIXTRAL = pytest.mark.skipif(
    version.parse(transformers.__version__) < version.parse("5.23"),
    reason="transformers 5.17 would run Mixtral's experts with random numbers, so such checkpoints are refused there",
)


@pytest.mark.parametrize(
    ("build", "format", "options"),
    [
        (tiny_models.llama, "nvfp4a16", {"solver": "gptq"}),
        (tiny_models.llama, "nvfp4", {"solver": "rotation+gptq", "exclude": ["*.0.*"]}),
        (tiny_models.llama, "int4a16_g32", {"solver": "lowrank"}),
        (tiny_models.llama, "fp8", {}),
        pytest.param(tiny_models.mixtral, "nvfp4", {}, marks=MIXTRAL),
        (tiny_models.qwen3_moe, "fp8", {}),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # what transformers does not run on its own
def test_models_are_quantized_and_checkpoints_run(build: Any, format: str, options: Any, tmp_path: Path) -> None:
    """The model is that of `quant.quantize`, what it saves is what `quant.save` writes, and it loads to the bit."""
    build(dtype=torch.bfloat16, gain=2.0).save_pretrained(tmp_path / "model")
    made = from_pretrained(tmp_path / "model", quant.QuantConfig(format, DATA, **options))
    done = quant.quantize(from_pretrained(tmp_path / "model"), format, DATA, **options)
    assert torch.equal(logits(made), logits(done.model))

    made.save_pretrained(tmp_path / "made")
    quant.save(done.model, done.plan, tmp_path / "done")
    assert files(tmp_path / "made") == files(tmp_path / "done")

    loaded, info = from_pretrained(
        tmp_path / "made", quant.QuantConfig(), output_loading_info=True, device_map={"": "cpu"}
    )
    assert not any(info.values())
    assert torch.equal(logits(loaded), logits(made))
    loaded.save_pretrained(tmp_path / "again")
    assert files(tmp_path / "again") == files(tmp_path / "done")


def test_layers_of_a_class_of_their_own_are_known_where_transformers_builds_on_the_meta_device(tmp_path: Path) -> None:
    """Falcon's `FalconLinear` is tried on values, which tensors made within `torch.device("meta")` do not have."""
    sizes = {k: v for k, v in tiny_models.DECODER.items() if k != "intermediate_size"}
    model = tiny_models.build("Falcon", "ForCausalLM", {**sizes, "new_decoder_architecture": True})
    done = quant.quantize(model.bfloat16(), "int8", effort=0)
    quant.save(done.model, done.plan, tmp_path / "out")
    theirs = transformers.FalconForCausalLM.from_pretrained(tmp_path / "out", quantization_config=quant.QuantConfig())
    assert torch.equal(logits(theirs), logits(quant.load(tmp_path / "out")))


@pytest.mark.parametrize("format", ["int8", "fp8_channel"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_convolutions_run_however_a_checkpoint_is_loaded(format: str, tmp_path: Path) -> None:
    """Files hold their codes as matrices, modules in the shape of the parameter."""
    safetensors = pytest.importorskip("safetensors.torch")
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    done = quant.quantize(tiny_models.resnet(), format, images, solver="rtn")
    quant.save(done.model, done.plan, tmp_path / "out")
    loaded, other = quant.load(tmp_path / "out"), tiny_models.resnet(seed=5)
    theirs = transformers.AutoModelForImageClassification.from_pretrained(
        tmp_path / "out", quantization_config=quant.QuantConfig()
    )
    other = quant.quantize(other, done.plan, images).model
    quant.save(other, done.plan, tmp_path / "other")
    other = quant.load(tmp_path / "other")
    other.load_state_dict(safetensors.load_file(tmp_path / "out/model.safetensors"))
    with torch.no_grad():
        y = done.model(images).logits
        assert all(torch.equal(model(images).logits, y) for model in (loaded, theirs, other))


def test_without_a_config_a_checkpoint_is_for_transformers_own_quantizer(tmp_path: Path) -> None:
    done = quant.quantize(tiny_models.llama(dtype=torch.bfloat16), "nvfp4a16")
    quant.save(done.model, done.plan, tmp_path / "out")
    theirs, ours = from_pretrained(tmp_path / "out"), from_pretrained(tmp_path / "out", quant.QuantConfig())
    assert not isinstance(theirs.model.layers[0].mlp.up_proj, QuantLinear)
    assert isinstance(ours.model.layers[0].mlp.up_proj, QuantLinear)


@pytest.mark.parametrize("format", ["nvfp4a16", "fp8"])
def test_modelopt_checkpoints_run_with_or_without_a_config(format: str, tmp_path: Path) -> None:
    done = quant.quantize(tiny_models.llama(dtype=torch.bfloat16, gain=2.0), format, DATA)
    quant.save(done.model, done.plan, tmp_path / "out")
    convert(tmp_path / "out", tmp_path / "modelopt", "modelopt")
    for config in (quant.QuantConfig(), None):
        loaded, info = from_pretrained(tmp_path / "modelopt", config, output_loading_info=True)
        assert not any(info.values()) and torch.equal(logits(loaded), logits(done.model))


def test_scales_of_the_kv_cache_are_there(tmp_path: Path) -> None:
    plan = quant.make_plan(model := tiny_models.llama(dtype=torch.bfloat16, gain=2.0), "fp8")
    plan = dataclasses.replace(plan, kv_cache=quant.FORMATS["fp8"])
    done = quant.quantize(model, plan, DATA)
    quant.save(done.model, done.plan, tmp_path / "out")
    loaded, info = from_pretrained(tmp_path / "out", quant.QuantConfig(), output_loading_info=True)
    assert not any(info.values())
    for ours, theirs in zip(done.model.model.layers, loaded.model.layers, strict=True):
        assert torch.equal(ours.self_attn.k_scale, theirs.self_attn.k_scale)
        assert torch.equal(ours.self_attn.v_scale, theirs.self_attn.v_scale)


@pytest.mark.parametrize("buffers", [True, False])
def test_layers_may_be_offloaded(buffers: bool, tmp_path: Path) -> None:
    done = quant.quantize(tiny_models.llama(dtype=torch.bfloat16, gain=2.0), "nvfp4a16")
    quant.save(done.model, done.plan, tmp_path / "out")
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu"}
    loaded = from_pretrained(
        tmp_path / "out", quant.QuantConfig(), device_map={**places, "model.rotary_emb": "cpu", "lm_head": "cpu"},
        offload_folder=tmp_path / "disk", offload_buffers=buffers,
    )  # fmt: skip
    assert loaded.model.layers[1].input_layernorm.weight.is_meta
    assert loaded.model.layers[1].mlp.up_proj.codes.is_meta == buffers
    assert torch.equal(logits(loaded), logits(done.model))
    with pytest.raises(UserError, match="is not in memory"):
        loaded.save_pretrained(tmp_path / "again")


def test_a_device_map_counts_quantized_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The map that transformers asks accelerate for is that of a model whose layers take a fourth."""
    sizes = {}
    import transformers.integrations.accelerate as theirs

    def infer(model: torch.nn.Module, **options: Any) -> dict[str, str]:
        sizes.update({n: b.nbytes for n, b in model.named_buffers() if n.endswith(".codes")})
        return {"": "cpu"}

    monkeypatch.setattr(theirs, "infer_auto_device_map", infer)
    done = quant.quantize(tiny_models.llama(dtype=torch.bfloat16), "nvfp4a16")
    quant.save(done.model, done.plan, tmp_path / "out")
    from_pretrained(tmp_path / "out", quant.QuantConfig(), device_map="auto")
    assert sizes == {f"{layer.name}.codes": layer.numel // 2 for layer in done.plan.quantized}


def test_what_contradicts_the_checkpoint_is_refused(tmp_path: Path) -> None:
    done = quant.quantize(tiny_models.llama(dtype=torch.bfloat16), "nvfp4a16")
    quant.save(done.model, done.plan, tmp_path / "out")
    with pytest.raises(
        UserError, match=r"QuantConfig\(recipe=…, solver=…\): the checkpoint is quantized.*QuantConfig\(\)"
    ):
        from_pretrained(tmp_path / "out", quant.QuantConfig("fp8", solver="rtn"))
    tiny_models.llama().save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="unknown"):
        from_pretrained(tmp_path / "model", quant.QuantConfig("nvfp5"))
