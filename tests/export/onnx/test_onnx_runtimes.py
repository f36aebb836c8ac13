"""What is said of onnxruntime is what onnxruntime does with the file."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from slow_cases import quick_cases
from torch import nn

import quant
from quant.formats.format import parse_format

pytest.importorskip("onnxscript", reason="needs the extra onnx")
pytest.importorskip("onnxruntime", minversion="1.32", reason="needs the extra onnx")

from quant.export.onnx.decoder_graph import GraphInput
from quant.export.onnx.export_onnx import write_onnx
from quant.export.onnx.limits import loaded, onnxruntime_problem

FORMATS = [
    ("16bit", "16bit"),
    ("int4", "16bit"),
    ("fp8", "fp8"),
    ("fp8_channel", "fp8_token"),
    ("int8", "16bit"),
    ("nvfp4", "16bit"),
]


@pytest.mark.parametrize(
    ("weight", "inputs", "dtype"),
    quick_cases(
        [(*formats, dtype) for formats in FORMATS for dtype in (torch.float32, torch.float16, torch.bfloat16)],
        lambda weight, inputs, dtype: dtype is torch.float32 or weight in ("16bit", "nvfp4"),
    ),
)
def test_a_file_that_onnxruntime_does_not_load_is_told(
    weight: str, inputs: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(128, 128), nn.ReLU()).to(dtype)
    x = torch.randn(2, 4, 128, dtype=dtype)
    if weight != "16bit":
        plan = quant.make_plan(model, "fp8_channel", run=lambda module: module(x))
        formats = {"weight": parse_format(weight), "activation": parse_format(inputs)}
        quant.quantize(model, plan.replace_layers([replace(layer, **formats) for layer in plan.layers]), x)
    problem = onnxruntime_problem(model)
    write_onnx(model, tmp_path / "m.onnx", inputs={"x": GraphInput(x[0], ("batch", 128))})
    try:
        loaded(tmp_path / "m.onnx")
        loads = True
    except ValueError:
        loads = False
    assert loads == (problem is None), problem
    if problem is not None:
        assert 'to="tensorrt"' in problem


def test_an_older_onnxruntime_is_told_as_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.onnx").write_bytes(b"no graph")
    with pytest.raises(ValueError, match=r"files are for TensorRT$"):
        loaded(tmp_path / "m.onnx")
    monkeypatch.setattr("onnxruntime.__version__", "1.30.0")
    with pytest.raises(ValueError, match=r"onnxruntime 1\.30\.0 .* 1\.32 is the first that loads these files: pip "):
        loaded(tmp_path / "m.onnx")
