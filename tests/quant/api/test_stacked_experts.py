"""Experts that a model holds otherwise than `[experts, out, in]` are quantized along their inputs, saved and loaded."""

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import quant
from quant.base.errors import UserError
from quant.formats.format import FORMATS
from quant.formats.tensor import quantize
from quant.kernels.linear.experts import QuantExperts, experts_forward

transformers = pytest.importorskip("transformers", reason="the extra hf")
pytest.importorskip("compressed_tensors", reason="the extra hf")

from architectures import build  # noqa: E402 -- needs transformers

# For each model a parameter, and the matrix [out, in] that its modeling code multiplies an input of expert 1 by, gate
# above up.
PARAMETERS = {
    "Llama4ForCausalLM": ("model.layers.0.feed_forward.experts.gate_up_proj", lambda p: p[1].t()),
    "GptOssForCausalLM": (
        "model.layers.0.mlp.experts.gate_up_proj", lambda p: torch.cat([p[1][:, ::2], p[1][:, 1::2]], 1).t()
    ),
    "AriaTextForCausalLM": ("model.layers.0.mlp.experts.down_proj", lambda p: p[1].t()),
    "JetMoeForCausalLM": ("model.layers.0.mlp.input_linear.weight", lambda p: p[1]),
    "DbrxForCausalLM": ("transformer.blocks.0.ffn.experts.mlp.w2", lambda p: p.view(4, 32, 64)[1].t()),
}  # fmt: skip
IDS = torch.arange(3, 43).view(2, 20)
# transformers says of each `quantization_config` that the checkpoint's own is used, as here it is.
pytestmark = pytest.mark.filterwarnings("ignore:You passed `quantization_config`")


def model_of(name: str, dtype: torch.dtype = torch.float32) -> Any:
    model = build(name, dtype)
    biases = [p for n, p in model.named_parameters() if n.endswith("_bias")]
    for bias in biases:
        nn.init.normal_(bias, std=0.1)
    return model


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(IDS).logits
    return found


def with_dequantized_weights(model: Any, quantized: nn.Module) -> Any:
    """The original model, its own code and parameters, with the values of another's weights."""
    for name, module in quantized.named_modules():
        if isinstance(module, QuantExperts):
            model.get_parameter(name).data.copy_(module.tensor())
        elif hasattr(module, "quantized_weight"):
            model.get_submodule(name).weight.data.copy_(module.dequantize())
    return model


@pytest.mark.parametrize("name", PARAMETERS)
def test_blocks_lie_along_the_inputs_and_the_code_computes_with_them(name: str) -> None:
    original = model_of(name)
    done = quant.quantize(model_of(name), "nvfp4a16", solver="rtn")
    path, matrix = PARAMETERS[name]
    found = done.model.get_submodule(path).quantized_weight.matrix(1)
    assert tuple(done.plan.by_name[path].shape[1:]) == found.shape
    assert torch.equal(found.codes, quantize(matrix(original.get_parameter(path).detach()), FORMATS["nvfp4"]).codes)
    with torch.no_grad():
        wanted = with_dequantized_weights(original, done.model)(IDS).logits
        torch.testing.assert_close(done.model(IDS).logits, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("format", ["nvfp4", "fp8_channel"])
@pytest.mark.parametrize("name", PARAMETERS)
def test_loaded_as_saved(name: str, format: str, tmp_path: Path) -> None:
    """NVFP4 inputs have a static scale, so calibration sees what each expert is called with."""
    done = quant.quantize(model_of(name, torch.bfloat16), format, IDS, solver="rtn")
    with warnings.catch_warnings(record=True, action="always") as caught:
        quant.save(done.model, done.plan, tmp_path / "out")
    told = [str(each.message) for each in caught if "stops" in str(each.message)]
    assert bool(told) == (name != "Llama4ForCausalLM"), told
    wanted = logits(done.model)
    assert torch.equal(logits(quant.load(tmp_path / "out")), wanted)
    theirs = getattr(transformers, name).from_pretrained(tmp_path / "out", quantization_config=quant.QuantConfig())
    assert torch.equal(logits(theirs), wanted)


@pytest.mark.parametrize("name", ["Llama4ForCausalLM", "GptOssForCausalLM", "JetMoeForCausalLM", "DbrxForCausalLM"])
def test_inputs_are_rounded_as_planned(name: str) -> None:
    """The product of an expert in FP8 is that of the rounded input, which another format of inputs changes."""
    with torch.no_grad():
        plain, rounded = (
            quant.quantize(model_of(name), recipe, solver="rtn").model(IDS).logits
            for recipe in (quant.Recipe("w", "fp8_channel"), "fp8_channel")
        )
    path, _ = PARAMETERS[name]
    assert not torch.equal(plain, rounded)
    stack = quant.quantize(model_of(name), "fp8_channel", solver="rtn").model.get_submodule(path)
    x = torch.randn(3, stack.weight_shape[2])
    weight = stack[1]
    y = x @ weight if stack.stacking.transposed else nn.functional.linear(x, weight)
    scale = x.abs().amax(1, keepdim=True) / 448
    wanted = ((x / scale).to(torch.float8_e4m3fn).float() * scale) @ stack.dense(1).T
    torch.testing.assert_close(y, stack.stacking.outputs(wanted), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["Llama4ForCausalLM", "GptOssForCausalLM", "JetMoeForCausalLM"])
def test_gptq_sees_the_inputs_of_each_expert(name: str) -> None:
    """With the second moment of its inputs, the outputs of the quantized model are nearer to the original's."""
    torch.manual_seed(0)
    ids = torch.randint(3, 60, (16, 32))
    with torch.no_grad():
        wanted = model_of(name)(ids).logits
        off = {
            solver: float(
                (quant.quantize(model_of(name), "nvfp4a16", ids, solver=solver).model(ids).logits - wanted).norm()
            )
            for solver in ("rtn", "gptq")
        }
    assert off["gptq"] < 0.97 * off["rtn"], off


def test_transformers_loads_the_experts_of_llama_4(tmp_path: Path) -> None:
    done = quant.quantize(model_of("Llama4ForCausalLM", torch.bfloat16), "nvfp4a16")
    quant.save(done.model, done.plan, tmp_path / "out")
    theirs, info = transformers.Llama4ForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with torch.no_grad():
        torch.testing.assert_close(theirs(IDS).logits, done.model(IDS).logits, rtol=0.05, atol=0.05)


def test_experts_of_llama_4_in_16_bit_are_stored_as_transformers_wants_them(tmp_path: Path) -> None:
    original = model_of("Llama4ForCausalLM", torch.bfloat16)
    done = quant.quantize(model_of("Llama4ForCausalLM", torch.bfloat16), "fp8_channel", exclude=["*.experts.*"])
    quant.save(done.model, done.plan, tmp_path / "out")
    name = "model.layers.1.feed_forward.experts.gate_up_proj"
    stored = load_file(tmp_path / "out" / "model.safetensors")["model.layers.1.feed_forward.experts.2.up_proj.weight"]
    assert torch.equal(stored, original.get_parameter(name)[2].t().chunk(2)[1])
    assert torch.equal(quant.load(tmp_path / "out").get_parameter(name), original.get_parameter(name))
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert any("layers\\.1\\.feed_forward\\.experts" in target for target in ignored)
    theirs = transformers.Llama4ForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert torch.equal(theirs.model.layers[1].feed_forward.experts[2].up_proj.weight, stored)


def test_experts_in_16_bit_beside_quantized_ones_are_refused(tmp_path: Path) -> None:
    """The file has an empty tensor under the name of the parameter; one with values is another model's."""
    done = quant.quantize(model_of("GptOssForCausalLM", torch.bfloat16), "nvfp4a16")
    with pytest.warns(UserWarning, match="server that reads experts"):
        quant.save(done.model, done.plan, tmp_path / "out")
    file, name = tmp_path / "out" / "model.safetensors", "model.layers.1.mlp.experts.down_proj"
    tensors = load_file(file)
    assert tensors[name].shape == (0,)
    save_file({**tensors, name: torch.zeros(4, 128, 64)}, file, {"format": "pt"})
    with pytest.raises(UserError, match=rf"model\.safetensors: {re.escape(name)} is left over"):
        quant.load(tmp_path / "out")


def test_experts_with_a_norm_behind_them() -> None:
    """Muse Spark's: `experts_forward` does what the class itself does."""
    modeling = pytest.importorskip("transformers.models.muse_spark.modeling_muse_spark", reason="transformers 5.23")
    sizes = {"moe_hidden_size": 32, "moe_intermediate_size": 16, "num_local_experts": 4}
    config = modeling.MuseSparkTextConfig(**sizes)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    experts = modeling.MuseSparkExperts(config).float()
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.3)
    x, index, weights = torch.randn(6, 32), torch.randint(0, 4, (6, 2)), torch.rand(6, 2)
    with torch.no_grad():
        wanted = experts(x, index, weights)
        torch.testing.assert_close(experts_forward(experts, x, index, weights), wanted)
