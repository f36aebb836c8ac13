"""A model that does not export is refused in one line that names it, the module and a way out that works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import architectures
import pytest
import torch

onnx = pytest.importorskip("onnx", reason="needs the extra onnx")
pytest.importorskip("onnxscript", reason="needs the extra onnx")
pytest.importorskip("transformers", reason="needs the extra hf")

from quant.export.onnx.decoder_graph import GraphInput  # noqa: E402
from quant.export.onnx.export_onnx import write_onnx  # noqa: E402

IDS = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))


def assert_agrees(model: Any, path: Path, ids: torch.Tensor) -> None:
    """The file gives PyTorch's log-probabilities in onnxruntime."""
    runtime = pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    logits = torch.from_numpy(session.run(None, {"input_ids": ids.numpy()})[0])
    with torch.no_grad():
        torch.testing.assert_close(logits.log_softmax(-1), model(ids).logits.log_softmax(-1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "mixer"), [("MambaForCausalLM", "mixer"), ("RwkvForCausalLM", "attention")])
def test_a_loop_over_tokens(name: str, mixer: str, tmp_path: Path) -> None:
    model = architectures.build(name, torch.float32)
    with pytest.raises(ValueError, match=rf"{name}: \S+\.0\.{mixer} computes with one .*int64:batch,64"):
        write_onnx(model, tmp_path / "model.onnx")
    path = write_onnx(model, tmp_path / "model.onnx", inputs={"input_ids": GraphInput(IDS, ("batch", 9))})
    assert_agrees(model, path, IDS.repeat(2, 1))


@pytest.mark.parametrize(
    ("name", "line", "shapes"),
    [
        ("OpenAIGPTLMHeadModel", "takes a sequence of 1 to 127: pass shapes", "sequence=1:64:127"),
        ("MobileBertForMaskedLM", "embeddings takes a sequence of 3 to 128: pass shapes", "sequence=3:64:128"),
    ],
)
def test_sizes_at_the_end_of_a_range(name: str, line: str, shapes: str, tmp_path: Path) -> None:
    model = architectures.build(name, torch.float32)
    with pytest.raises(ValueError, match=rf'{name}.* ?{line}="{shapes}"$'):
        write_onnx(model, tmp_path / "model.onnx")
    path = write_onnx(model, tmp_path / "model.onnx", shapes=shapes)
    if name == "OpenAIGPTLMHeadModel":
        assert_agrees(model, path, IDS)
        assert_agrees(model, path, IDS.repeat(1, 20)[:, :127])


def test_complex_numbers(tmp_path: Path) -> None:
    """Llama 4 rotates by them; its experts in 16 bit are plain products, and are not what stops it."""
    model = architectures.build("Llama4ForCausalLM", torch.float32)
    with pytest.raises(ValueError, match=r"model\.\S+ \(Llama4\w+\) computes with complex numbers.*vLLM"):
        write_onnx(model, tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_model_names_its_module(tmp_path: Path) -> None:
    model = architectures.build("LlamaForSequenceClassification", torch.float32)
    with pytest.raises(ValueError, match=r"LlamaForSequenceClassification does not export: .*no padding token"):
        write_onnx(model, tmp_path / "model.onnx")


def test_images_and_texts_are_asked_for(tmp_path: Path) -> None:
    model = architectures.build("BlipForConditionalGeneration", torch.float32)
    with pytest.raises(ValueError, match=r"Blip\w+ takes input_ids and pixel_values: name each of its inputs"):
        write_onnx(model, tmp_path / "model.onnx")


def test_positions_that_are_no_number_of_tokens(tmp_path: Path) -> None:
    """Music Flamingo's config has 1,200.0 seconds of sound under the name that others have for positions of text."""
    model = architectures.build("MusicFlamingoForConditionalGeneration", torch.float32)
    assert_agrees(model, write_onnx(model, tmp_path / "model.onnx"), IDS)
