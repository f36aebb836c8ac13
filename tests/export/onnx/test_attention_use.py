"""A graph keeps the masks of attention: models that lose them are refused, the others compute as PyTorch does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import architectures
import pytest
import torch

from quant.export.onnx.decoder_graph import check_attends

onnx = pytest.importorskip("onnx", reason="needs the extra onnx")
pytest.importorskip("onnxscript", reason="needs the extra onnx")
transformers = pytest.importorskip("transformers", reason="needs the extra hf")

from quant.export.onnx.export_onnx import write_onnx  # noqa: E402
from quant.export.onnx.serving import check_decoder  # noqa: E402
from quant.export.onnx.trace import trace_for_torch  # noqa: E402

IDS = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))
OWN = ("BloomForCausalLM", "XGLMForCausalLM", "FalconForCausalLM", "MptForCausalLM", "ConvBertForMaskedLM")


@pytest.mark.parametrize("name", OWN)
def test_attention_in_code_of_its_own_is_refused(name: str, tmp_path: Path) -> None:
    """Graphs of BLOOM and XGLM looked at later tokens, those of ConvBERT at padding: half of the logits was wrong."""
    model = architectures.build(name, torch.float32)
    with pytest.raises(ValueError, match=rf"{name} computes attention in code of its own.*inputs=.*input_ids"):
        write_onnx(model, tmp_path / "model.onnx")
    with pytest.raises(ValueError, match=rf"{name} computes attention in code of its own"):
        trace_for_torch(model, {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)})
    if name == "FalconForCausalLM":
        with pytest.raises(ValueError, match=rf"{name} computes attention in code of its own"):
            check_decoder(model, 64)


def test_a_module_that_is_causal_by_its_mask_alone(tmp_path: Path) -> None:
    """The graph of BigBird-Pegasus looked at later tokens: its log-probabilities differed by 2.9."""
    runtime = pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    from quant.export.onnx.decoder_graph import GraphInput

    model = architectures.build("BigBirdPegasusForCausalLM", torch.float32)
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn is causal by its mask alone.*inputs={\"input_ids"):
        write_onnx(model, tmp_path / "model.onnx")
    inputs = {"input_ids": GraphInput(IDS, ("batch", "sequence"))}
    session = runtime.InferenceSession(write_onnx(model, tmp_path / "model.onnx", inputs=inputs))
    logits = session.run(None, {"input_ids": IDS.numpy()})[0]
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(logits), model(IDS).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        "LlamaForCausalLM", "BertModel", "T5ForConditionalGeneration", "MambaForCausalLM",
        "PaliGemmaForConditionalGeneration",
    ],
)  # fmt: skip
def test_attention_by_the_function_of_the_config_and_no_attention_pass(name: str) -> None:
    model = architectures.build(name, torch.float32)
    before = [config._attn_implementation for config in _configs(model)]
    inputs = {"input_ids": IDS}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = IDS[:, :4]
    with torch.no_grad():
        expected = model(**inputs)[0]
        check_attends(model, inputs)
        assert torch.equal(model(**inputs)[0], expected)
    assert [config._attn_implementation for config in _configs(model)] == before


def _configs(model: Any) -> list[Any]:
    return [module.config for module in model.modules() if hasattr(module, "config")]


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "BloomForCausalLM"])
def test_later_tokens_change_nothing(name: str, tmp_path: Path) -> None:
    """With inputs by name a graph has the masks of the model, where the model attends by itself, too."""
    from quant.export.onnx.decoder_graph import GraphInput

    runtime = pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    model = architectures.build(name, torch.float32)
    inputs = {"input_ids": GraphInput(IDS, ("batch", "sequence"))} if name in OWN else None
    path = write_onnx(model, tmp_path / "model.onnx", inputs=inputs)
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    logits = session.run(None, {"input_ids": IDS.numpy()})[0]
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(logits), model(IDS).logits, rtol=1e-4, atol=1e-4)


def test_an_output_that_the_model_views(tmp_path: Path) -> None:
    """AFMoE calls `view` on what attention returns, which has to be contiguous."""
    runtime = pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    torch.manual_seed(0)
    config = architectures.config_of("AfmoeForCausalLM")
    config.num_dense_layers, config.layer_types = 2, ["full_attention"] * 2
    model = transformers.AfmoeForCausalLM(config).eval()
    path = write_onnx(model, tmp_path / "model.onnx")
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    logits = session.run(None, {"input_ids": IDS.numpy()})[0]
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(logits), model(IDS).logits, rtol=1e-4, atol=1e-4)
