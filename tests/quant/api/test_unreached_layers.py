"""A quantized layer on which no output depends is left out of a graph and named; other missing layers are errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import architectures
import pytest
import torch
from torch import nn

import quant

onnx = pytest.importorskip("onnx", reason="needs the extra onnx")
pytest.importorskip("onnxscript", reason="needs the extra onnx")
runtime = pytest.importorskip("onnxruntime", reason="needs the extra onnx")


class Branches(nn.Module):
    """Two layers, of which a call uses one or both, or reads the weight of the second."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.first, self.second, self.use = nn.Linear(64, 64), nn.Linear(64, 64), use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.use == "weight":
            return self.first(x) @ self.second.weight.t()
        return x + 1 if self.use == "none" else self.first(x)


def exported(use: str, out: Path) -> Any:
    torch.manual_seed(0)
    done = quant.quantize(Branches(use), "fp8a16", effort=0)
    return quant.export_model(done, "onnx", out, inputs={"x": "fp32:batch,64"}), done.model


def test_a_layer_that_is_off_is_left_out_and_named(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="no output of the graph depends on 1 quantized layer, left out of it: second"):
        result, model = exported("first", tmp_path / "onnx")
    assert [layer["name"] for layer in result.layers] == ["first"] and result.record["unreached"] == ["second"]
    assert any("second" in line for line in result.warnings)
    assert json.loads((tmp_path / "onnx" / "receipt.json").read_text())["unreached"] == ["second"]
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    session = runtime.InferenceSession(tmp_path / "onnx" / "model.onnx", providers=["CPUExecutionProvider"])
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(session.run(None, {"x": x.numpy()})[0]), model(x))


def test_a_weight_that_the_model_reads_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^second: the model multiplies by this layer's weight .*exclude='second'"):
        exported("weight", tmp_path / "onnx")


def test_a_graph_without_any_quantized_layer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="outputs depend on none of the 2 quantized layers, first first"):
        exported("none", tmp_path / "onnx")
    assert not (tmp_path / "onnx").exists()


def test_cross_attention_of_a_decoder_alone(tmp_path: Path) -> None:
    """BART's decoder as a causal model has cross attention without an encoder to attend to."""
    model = architectures.build("BartForCausalLM", torch.float32)
    done = quant.quantize(model, "fp8a16", effort=0)
    with pytest.warns(UserWarning, match="no output of the graph depends on 8 quantized layers"):
        result = quant.export_model(done, "onnx", tmp_path / "onnx", capacity=0)
    assert len(result.record["unreached"]) == 8 and all(".encoder_attn." in name for name in result.record["unreached"])
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))
    session = runtime.InferenceSession(tmp_path / "onnx" / "model.onnx", providers=["CPUExecutionProvider"])
    logits = torch.from_numpy(session.run(None, {"input_ids": ids.numpy()})[0])
    with torch.no_grad():
        torch.testing.assert_close(logits, done.model(ids).logits, rtol=1e-4, atol=1e-4)


def test_answers_to_questions_have_two_outputs(tmp_path: Path) -> None:
    """Their graph had no output at all, and so no layer."""
    model = architectures.build("DistilBertForQuestionAnswering", torch.float32)
    done = quant.quantize(model, "fp8a16", effort=0)
    quant.export_model(done, "onnx", tmp_path / "onnx")
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    session = runtime.InferenceSession(tmp_path / "onnx" / "model.onnx", providers=["CPUExecutionProvider"])
    start, end = session.run(["start_logits", "end_logits"], {name: x.numpy() for name, x in inputs.items()})
    with torch.no_grad():
        out = done.model(**inputs)
    torch.testing.assert_close(torch.from_numpy(start), out.start_logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.from_numpy(end), out.end_logits, rtol=1e-4, atol=1e-4)


def test_the_way_out_is_spelled_as_in_python(tmp_path: Path) -> None:
    model = architectures.build("MambaForCausalLM", torch.float32)
    done = quant.quantize(model, "fp8a16", effort=0, exclude=["*.dt_proj"])
    with pytest.raises(ValueError, match=r'as in inputs=\{"input_ids": "int64:batch,64"\}, or serve its checkpoint'):
        quant.export_model(done, "onnx", tmp_path / "onnx", capacity=0)
    inputs = {"input_ids": "int64:batch,8"}
    assert quant.export_model(done, "onnx", tmp_path / "onnx", inputs=inputs).layers
