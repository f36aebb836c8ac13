"""Refusals of models, recipes and factories that no other test causes, and the way out that each one names."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_models
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

import quant
from quant.base.errors import UserError
from quant.calibration.texts.media_inputs import Preparer, Sample
from quant.cli.main import main

IDS = torch.arange(3, 35).reshape(2, 16)


def test_rules_are_a_list_of_tables(tmp_path: Path) -> None:
    recipe, rule = tmp_path / "own.toml", 'match = "*"\nweight = "int8"\n'
    recipe.write_text(f'name = "own"\n[rules]\n{rule}')
    with pytest.raises(ValueError, match=r"own\.toml: `rules` is a list of tables, each headed \[\[rules\]\]"):
        quant.make_plan(tiny_models.llama(), str(recipe))
    recipe.write_text(f'name = "own"\n[[rules]]\n{rule}')
    assert {layer.weight.name for layer in quant.make_plan(tiny_models.llama(), str(recipe)).quantized} == {"int8"}


def test_a_prompt_of_peft_has_a_base_model() -> None:
    peft = pytest.importorskip("peft", reason="the extra peft")
    model = tiny_models.llama(gain=2).eval()
    with torch.no_grad():
        before = model(IDS).logits
    wrapped = peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(UserError, match=r"inside of a PeftModelForCausalLM: pass model\.get_base_model\(\)"):
        quant.quantize(wrapped, "int8", IDS, effort=0)
    with torch.no_grad():
        after = quant.quantize(wrapped.get_base_model(), "int8", IDS, effort=0).model(IDS).logits
    assert 0 < (after - before).norm() / before.norm() < 0.1


def test_a_backend_that_does_not_run_a_recipe() -> None:
    model = tiny_models.llama().train()
    with pytest.raises(UserError, match=r'"torchao" does not run mxfp8 here: .*; backend="emulated" does$'):
        quant.to_low_precision_training(model, "mxfp8", backend="torchao")
    assert "14 layers in mxfp8: emulated" in str(quant.to_low_precision_training(model, "mxfp8", backend="emulated"))


def test_a_checkpoint_is_no_state_dict(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra hf")
    result = quant.quantize(tiny_models.llama(gain=2).eval(), "int8", IDS, effort=0)
    quant.save(result.model, result.plan, tmp_path / "out")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    options = {"quantization_config": quant.QuantConfig()}
    with pytest.raises(UserError, match="from its directory of safetensors; give from_pretrained it"):
        transformers.LlamaForCausalLM.from_pretrained(
            None, config=config, state_dict=result.model.state_dict(), **options
        )
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out", **options)
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, result.model(IDS).logits)


def test_a_factory_matches_its_file(tmp_path: Path) -> None:
    save_file({"0.weight": torch.randn(64, 64), "9.weight": torch.randn(64, 64)}, tmp_path / "state.safetensors")
    layer = "nn.Linear(64, 64, bias=False)"
    (tmp_path / "nets.py").write_text(
        "from collections import OrderedDict\nfrom torch import nn\n"
        f"def other(): return nn.Sequential({layer}, {layer})\n"
        f"def right(): return nn.Sequential(OrderedDict([('0', {layer}), ('9', {layer})]))\n"
    )
    command = f"quantize {tmp_path}/state.safetensors --format int8 --effort 0 --out {tmp_path}/out --model-factory "
    refused = CliRunner().invoke(main, f"{command}{tmp_path}/nets.py:other".split())
    assert refused.exit_code == 2 and "1.weight" in refused.output
    assert "make the factory's module match the file" in refused.output
    assert CliRunner().invoke(main, f"{command}{tmp_path}/nets.py:right".split()).exit_code == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_components_of_a_pipeline_are_checkpoints(tmp_path: Path) -> None:
    result = quant.quantize(tiny_models.llama(gain=2).eval(), "int8", IDS, effort=0)
    quant.save(result.model, result.plan, tmp_path / "transformer")
    (tmp_path / "model_index.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match=r"quant\.load_pipeline loads; give one of its components: .*transformer$"):
        quant.load(tmp_path)
    with torch.no_grad():
        assert torch.equal(quant.load(tmp_path / "transformer")(IDS).logits, result.model(IDS).logits)


def test_a_processor_that_fails_is_named(tmp_path: Path) -> None:
    """Its inputs, prepared by other means, need no processor."""

    class Processor:
        image_mean = (0.5, 0.5, 0.5)

        def __call__(self, *args: object, **options: object) -> None:
            raise KeyError("height\nand width")

    vit, image = tiny_models.vit(gain=2), tmp_path / "a.png"
    pytest.importorskip("PIL", reason="the extra vision").Image.new("RGB", (32, 32)).save(image)
    with pytest.raises(ValueError, match=r"a\.png: Processor cannot prepare it \(KeyError: .*\); prepare inputs"):
        Preparer(vit, Processor(), 16).inputs([Sample("a.png", image.read_bytes())])
    vit.save_pretrained(tmp_path / "vit")
    save_file({"pixel_values": torch.randn(4, 3, 32, 32)}, tmp_path / "images.safetensors")
    command = f"quantize {tmp_path}/vit --format fp8 --effort 0 --calib-samples 2 --out {tmp_path}/out --calib "
    done = CliRunner().invoke(main, f"{command}{tmp_path}/images.safetensors".split())
    assert done.exit_code == 0, done.output
