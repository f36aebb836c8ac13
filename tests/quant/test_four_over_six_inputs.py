"""Inputs whose blocks choose between 4 and 6: what they gain, where they run, and who refuses them."""

import json
from pathlib import Path

import pytest
import tiny_models
import torch

import quant
from quant.formats.format import FORMATS, INPUT_FORMATS, get_format
from quant.formats.scaling import global_scale_of
from quant.formats.tensor import fake_quantize, quantize
from quant.recipes.targets import TARGETS

NVFP4, CHOOSES = FORMATS["nvfp4"], INPUT_FORMATS["nvfp4_four_over_six"]
RECIPE = quant.Recipe("mine", "nvfp4", "nvfp4_four_over_six")
ROWS = torch.arange(96).remainder(60).view(4, 24)


def small() -> torch.nn.Module:
    return tiny_models.llama(num_hidden_layers=1, hidden_size=64, intermediate_size=64, gain=2.0, dtype=torch.bfloat16)


def test_inputs_are_rounded_as_weights_by_that_rule() -> None:
    x = torch.randn(64, 256, dtype=torch.float64).exp().float()
    expected = quantize(x, NVFP4, rule="four_over_six").dequantize()
    assert torch.equal(fake_quantize(x, CHOOSES), expected)
    errors = [float((fake_quantize(x, format) - x).square().mean()) for format in (CHOOSES, NVFP4)]
    assert errors[0] < 0.95 * errors[1]
    # Room for blocks whose largest value becomes 4, as `HEADROOM` says.
    assert torch.equal(global_scale_of(torch.tensor(6.0), CHOOSES), torch.tensor(1 / 256))


def test_a_checkpoint_has_the_rule_and_others_refuse_it(tmp_path: Path) -> None:
    model = small()
    result = quant.quantize(model, RECIPE, ROWS, solver="gptq")
    with pytest.warns(UserWarning, match=r"inputs of 7 layers are in nvfp4_four_over_six.*load.*quant\.load"):
        quant.save(model, result.plan, tmp_path / "saved")
    loaded = quant.load(tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(loaded(ROWS).logits, model(ROWS).logits)
    config = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    arguments = config["config_groups"]["group_0"]["input_activations"]
    assert arguments["scale_rule"] == "four_over_six"
    peer = pytest.importorskip("compressed_tensors.quantization")
    with pytest.raises(ValueError, match="scale_rule"):
        peer.QuantizationArgs(**arguments)
    peer.QuantizationArgs(**{k: v for k, v in arguments.items() if k != "scale_rule"})
    assert quant.Plan.load(tmp_path / "saved" / "plan.json").quantized[0].activation is CHOOSES
    for target in TARGETS.values():
        assert target.problems(result.plan.quantized[0]), target.name


def test_gradients_pass_through_the_rounding() -> None:
    model = small().float()
    quant.prepare_qat(model, RECIPE, ROWS, solver="rtn")
    loss = model(ROWS, labels=ROWS).loss
    loss.backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
    with torch.no_grad():
        trained = model.eval()(ROWS).logits
        quant.pack(model)
        torch.testing.assert_close(model(ROWS).logits, trained, rtol=0, atol=1e-3)


def test_weights_have_no_such_format() -> None:
    with pytest.raises(ValueError, match=r"nvfp4_four_over_six is a format of inputs.*weights have nvfp4"):
        quant.make_plan(small(), quant.Recipe("mine", "nvfp4_four_over_six"))
    assert get_format("nvfp4_four_over_six") is CHOOSES
