"""torch-tensorrt compiles quantized modules for a GPU that is not here; the audit finds their precision."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from torch import nn

import quant
from quant.export.tensorrt.torch_tensorrt import compile_engine
from quant.formats.format import FORMATS
from quant.formats.tensor import quantize
from quant.kernels.linear.conv import QuantConv, weight_of_conv


class Block(nn.Module):
    """Two linears with a ReLU between them, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 512), nn.Linear(512, 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))) + x


def quantized(recipe: Any, dtype: torch.dtype) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, 8, 256, dtype=dtype)
    return quant.quantize(Block().to(dtype), recipe, [x], run=lambda model: model(x)), x


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "target", "dtype", "word"),
    [
        ("nvfp4", "sm120", torch.bfloat16, "fp4"),
        ("nvfp4a16", "sm120", torch.float16, "half, fp4 weights"),
        ("fp8", "sm89", torch.float16, "fp8"),
    ],
)
def test_layers_run_as_planned(tmp_path: Path, recipe: str, target: str, dtype: torch.dtype, word: str) -> None:
    # Not imported here: it asks for a GPU while it is imported.
    if find_spec("torch_tensorrt") is None:
        pytest.skip("needs the extra [torch-tensorrt]")
    done, x = quantized(recipe, dtype)
    findings = compile_engine(
        done.model, tmp_path / "model.engine", {"x": x}, target, plan=done.plan, allow_fallback=False
    )
    assert [(finding.name, finding.found) for finding in findings] == [
        ("up", word),
        ("down", word),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "target", "word"), [("fp8", "sm89", "fp8"), ("nvfp4", "sm120", "fp4")])
def test_a_decoder_is_one_pass(tmp_path: Path, recipe: str, target: str, word: str) -> None:
    if find_spec("torch_tensorrt") is None:
        pytest.skip("needs the extra [torch-tensorrt]")
    ids, model = torch.randint(0, 64, (2, 16)), tiny_models.llama(hidden_size=128, intermediate_size=128)
    done = quant.quantize(model.half(), recipe, ids, solver="rtn")
    findings = compile_engine(
        done.model, tmp_path / "model.engine", {"input_ids": ids}, target, plan=done.plan, allow_fallback=False
    )
    assert all(finding.passed for finding in findings)
    assert sum(finding.found == word for finding in findings) == 14


def test_a_layer_that_the_converter_does_not_know(tmp_path: Path) -> None:
    done, x = quantized("int4a16", torch.float16)
    with pytest.raises(ValueError, match=r"up \[512, 256\]: .* no int4 weights with 16-bit inputs; it has fp8"):
        compile_engine(done.model, tmp_path / "model.engine", {"x": x}, "sm120", plan=None, allow_fallback=False)
    assert list(tmp_path.iterdir()) == []


def test_a_convolution_is_refused(tmp_path: Path) -> None:
    conv = nn.Conv2d(8, 16, 3)
    model = nn.Sequential(QuantConv(quantize(weight_of_conv(conv), FORMATS["fp8"]), conv, None, None))
    with pytest.raises(ValueError, match=r"^0: the converter for torch-tensorrt takes no quantized convolution"):
        compile_engine(
            model,
            tmp_path / "model.engine",
            {"input": torch.randn(2, 8, 7, 7)},
            "sm120",
            plan=None,
            allow_fallback=False,
        )
    assert list(tmp_path.iterdir()) == []


def test_an_engine_is_for_a_named_gpu(tmp_path: Path) -> None:
    done, _ = quantized("fp8", torch.float16)
    with pytest.raises(quant.UserError, match="name it with target"):
        quant.export_model(done.model, "torch-tensorrt", out=tmp_path / "model.engine")
