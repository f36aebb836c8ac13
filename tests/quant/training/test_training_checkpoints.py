"""A Trainer's checkpoints of a model in training resume to the bit; the converted model saves as `quant.save` does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as safetensors_torch
import tiny_models
import torch
from slow_cases import quick_cases

import quant

transformers = pytest.importorskip("transformers", reason="the extra hf")
pytest.importorskip("accelerate", reason="the extra hf")
pytestmark = [
    pytest.mark.filterwarnings("ignore:You passed `quantization_config`"),
    pytest.mark.filterwarnings("ignore:transformers will not:UserWarning"),
]

ROWS = torch.randint(0, 64, (8, 24), generator=torch.Generator().manual_seed(7))


def files(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir() if file.name != "training_args.bin"}


def trainer(model: Any, out: Path) -> Any:
    arguments = transformers.TrainingArguments(
        str(out), max_steps=4, save_steps=2, per_device_train_batch_size=2, learning_rate=1e-3, report_to=[],
        use_cpu=True, disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    return transformers.Trainer(model, arguments, train_dataset=[{"input_ids": r, "labels": r} for r in ROWS])


def from_sixteen_bit(folder: Path) -> Any:
    tiny_models.llama(dtype=torch.bfloat16, gain=2.0).save_pretrained(folder / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model").requires_grad_(True)
    quant.prepare_qat(model, "nvfp4", ROWS, solver="mse")
    return model


def from_learned_scales(folder: Path) -> Any:
    """Fused layers have one scale in FP8, which is trained."""
    tiny_models.llama(dtype=torch.bfloat16, gain=2.0).save_pretrained(folder / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model").requires_grad_(True)
    quant.prepare_qat(model, "fp8", ROWS, solver="mse", scales="learned")
    return model


def from_experts(folder: Path) -> Any:
    """Whose names in files are others than in the model."""
    tiny_models.qwen3_moe(dtype=torch.bfloat16, gain=2.0).save_pretrained(folder / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model").requires_grad_(True)
    quant.prepare_qat(model, "mxfp8", ROWS)
    return model


def from_a_checkpoint(folder: Path) -> Any:
    """As transformers loads it, which marks it as quantized."""
    done = quant.quantize(tiny_models.llama(dtype=torch.bfloat16, gain=2.0), "nvfp4", ROWS, solver="mse")
    quant.save(done.model, done.plan, folder / "ptq", overwrite=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "ptq", quantization_config=quant.QuantConfig())
    quant.prepare_qat(model)
    return model


@pytest.mark.parametrize(
    "start",
    quick_cases(
        (from_sixteen_bit, from_learned_scales, from_experts, from_a_checkpoint),
        lambda start: start in (from_learned_scales, from_a_checkpoint),
    ),
)
def test_a_trainer_resumes_and_the_result_saves_as_quant_save_does(start: Any, tmp_path: Path) -> None:
    model, again = start(tmp_path), start(tmp_path)
    trainer(model, tmp_path / "out").train()
    assert not torch.equal(model.lm_head.weight, again.lm_head.weight)
    trainer(again, tmp_path / "out").train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    for (name, one), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other), name
    config = json.loads((tmp_path / "out" / "checkpoint-4" / "config.json").read_text())
    assert config["quantization_config"]["activation_scheme"].startswith("blockscale-qat: ")
    plan = quant.pack(model)
    quant.save(model, plan, tmp_path / "saved")
    model.save_pretrained(tmp_path / "pretrained")
    trainer(model, tmp_path / "out").save_model(str(tmp_path / "by_trainer"))
    expected = files(tmp_path / "saved")
    assert files(tmp_path / "pretrained") == expected and files(tmp_path / "by_trainer") == expected
    with torch.no_grad():
        assert torch.equal(quant.load(tmp_path / "saved")(ROWS).logits, model(ROWS).logits)


def test_what_a_model_in_training_was_saved_to_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaded as one, its rotated weights would be taken for those of the model in 16 bit."""
    # transformers alone has to refuse it, in a process that has registered nothing of ours.
    registered = transformers.quantizers.auto.AUTO_QUANTIZATION_CONFIG_MAPPING
    for name in [name for name in registered if name.startswith("blockscale")]:
        monkeypatch.delitem(registered, name)
    model = tiny_models.llama(gain=2.0).requires_grad_(True)
    quant.prepare_qat(model, "fp8_channel", ROWS, solver="rotation:16+gptq")
    model.save_pretrained(tmp_path / "d")
    assert not hasattr(model.config, "quantization_config")
    automatic = transformers.AutoModelForCausalLM
    for load in (
        lambda: automatic.from_pretrained(tmp_path / "d", quantization_config=quant.QuantConfig()),
        lambda: automatic.from_pretrained(tmp_path / "d"),
        lambda: quant.open_model(tmp_path / "d"),
        lambda: quant.load(tmp_path / "d"),
    ):
        with pytest.raises(ValueError, match=r"the weights of a model in training.*pack it with quant\.pack"):
            load()
    twin = tiny_models.llama(gain=2.0).requires_grad_(True)
    quant.prepare_qat(twin, "fp8_channel", ROWS, solver="rotation:16+gptq")
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    safetensors_torch.load_model(twin, tmp_path / "d" / "model.safetensors")  # the way out
    quant.pack(model)
    quant.pack(twin)
    assert torch.equal(model(ROWS).logits, twin(ROWS).logits)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("nvfp4a16", "rtn", None), ("mxfp4a16", "rtn", None)),
        (("nvfp4a16", "rtn", None), ("nvfp4", "rtn", None)),
        (("nvfp4a16", "gptq", "frozen"), ("nvfp4a16", "rtn", "recomputed")),
        (("nvfp4a16", "rotation:16", "frozen"), ("nvfp4a16", "gptq", "frozen")),
        (("nvfp4a16", "lowrank:4+gptq", "frozen"), ("nvfp4a16", "gptq", "frozen")),
    ],
)
def test_weights_of_a_model_that_was_prepared_otherwise_are_refused(one: Any, other: Any) -> None:
    """By load_state_dict, which Trainers resume by, without its strictness."""
    models = []
    for preset, solver, scales in (one, other):
        models.append(tiny_models.llama(gain=2.0, num_hidden_layers=1).requires_grad_(True))
        quant.prepare_qat(models[-1], preset, ROWS, solver=solver, scales=scales)
    with pytest.raises(
        quant.UserError, match=r"prepared differently: a layer in training has \(.*\) there and \(.*\) here"
    ):
        models[1].load_state_dict(models[0].state_dict(), strict=False)


def plain_trainer(model: Any, out: Path) -> Any:
    arguments = transformers.TrainingArguments(
        str(out), max_steps=2, per_device_train_batch_size=2, learning_rate=1e-2, report_to=[], use_cpu=True,
        disable_tqdm=True, logging_strategy="no", save_strategy="no",
    )  # fmt: skip
    return transformers.Trainer(model, arguments, train_dataset=[{"input_ids": r, "labels": r} for r in ROWS])


def test_a_trainer_of_a_packed_model_says_that_its_codes_stay(tmp_path: Path) -> None:
    """Norms and embeddings alone were trained without a word; both ways out train what the model computes by."""
    name = "model.layers.0.mlp.up_proj"
    done = quant.quantize(tiny_models.llama(dtype=torch.float32, gain=2.0), "nvfp4a16", effort=0)
    codes = done.model.get_submodule(name).codes.clone()
    says = (
        r"^this optimizer trains model\.embed_tokens\.weight, .* and \d+ more, and not the 14 layers in codes, "
        r"which have no gradient: to train them, call quant\.prepare_qat\(model, plan\) before the optimizer is made "
        r"and quant\.pack\(model\) at the end; or train an adapter, see quant\.lora$"
    )
    with pytest.warns(UserWarning, match=says) as told:
        plain_trainer(done.model, tmp_path).train()
    assert sum("in codes" in str(each.message) for each in told) == 1
    assert torch.equal(done.model.get_submodule(name).codes, codes)
    # QAT, as the message says it.
    done = quant.quantize(tiny_models.llama(dtype=torch.float32, gain=2.0), "nvfp4a16", effort=0)
    quant.prepare_qat(done.model, done.plan)
    plain_trainer(done.model, tmp_path).train()
    quant.pack(done.model)
    assert not torch.equal(done.model.get_submodule(name).codes, codes)


def test_a_trainer_of_an_adapter_says_nothing_of_codes(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="the extra training")
    model = quant.quantize(tiny_models.llama(dtype=torch.float32, gain=2.0), "nvfp4a16", effort=0).model
    adapted = peft.get_peft_model(model, quant.lora(peft.LoraConfig(r=4, target_modules="all-linear"), model))
    before = {n: p.detach().clone() for n, p in adapted.named_parameters() if "lora_B" in n}
    plain_trainer(adapted, tmp_path).train()  # a warning of ours would be an error
    assert before and all(not torch.equal(adapted.get_parameter(n), p) for n, p in before.items())
