"""Exported convolutions give in onnxruntime what they give in PyTorch, and a file that differs from them is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from click.testing import CliRunner
from slow_cases import quick_cases
from torch import nn

import quant
from quant.cli.main import main
from quant.kernels.linear.conv import QuantConv

onnx = pytest.importorskip("onnx", reason="needs the extra onnx")
pytest.importorskip("onnxscript", reason="needs the extra onnx")

from quant.export.onnx.compare_with_torch import check_file, verify  # noqa: E402
from quant.export.onnx.decoder_graph import GraphInput  # noqa: E402
from quant.export.onnx.export_onnx import write_onnx  # noqa: E402


class Convs(nn.Module):
    """Convolutions of every dimension, plain and transposed, strided, dilated, grouped, and padded in every way."""

    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        self.one = nn.Conv1d(4, 8, 3, padding="same", dilation=2)
        self.up_one = nn.ConvTranspose1d(8, 8, 4, stride=2, padding=1)
        self.two = nn.Conv2d(1, 4, (3, 1), padding=(1, 0), padding_mode="circular")
        self.grouped = nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False)
        self.up_two = nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, groups=groups)
        self.three = nn.Conv3d(1, 2, 3, stride=(2, 2, 1), padding=1)
        self.up_three = nn.ConvTranspose3d(2, 1, 2, stride=2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up_one(self.one(x))
        y = self.up_two(self.grouped(self.two(y[:, None])))
        return self.up_three(self.three(y[:, None])).flatten(1)


def quantized(format: str, activation: str | None, x: torch.Tensor, **options: Any) -> tuple[nn.Module, quant.Plan]:
    torch.manual_seed(0)
    model = Convs(**options).to(x.dtype)
    recipe = quant.Recipe("x", weight=format, activation=activation or "keep").with_rules(
        quant.Rule("*", format, activation or "keep")  # those that have no FP8 kernel too
    )
    done = quant.quantize(model, recipe, [x], run=lambda m: m(x))
    assert len(done.plan.quantized) == 7
    return done.model, done.plan


def written(model: nn.Module, x: torch.Tensor, path: Path) -> Path:
    inputs = {"x": GraphInput(x, ("batch", *x.shape[1:]))}
    write_onnx(model, path, inputs=inputs)
    check_file(path)
    return path


PAIRS = [
    ("int8", None), ("int8", "int8_token"), ("int8", "int8_tensor"),
    ("fp8_channel", "fp8_token"), ("fp8_channel", "fp8"), ("fp8", "fp8"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("format", "activation"),
    quick_cases(PAIRS, lambda format, activation: (format, activation) not in (("int8", None), ("fp8_channel", "fp8"))),
)
def test_onnxruntime_gives_what_pytorch_gives(tmp_path: Path, format: str, activation: str | None) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1))
    model, _ = quantized(format, activation, x)
    path = written(model, x, tmp_path / "m.onnx")
    options = runtime.SessionOptions()
    # Of two FP8 convolutions in a row, onnxruntime 1.31 makes a QLinearConv, which takes no FP8, and stops.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    session = runtime.InferenceSession(path, options)
    more = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(2))
    for given in (x, more):
        with torch.no_grad():
            expected = model(given).numpy()
        (found,) = session.run(None, {"x": given.numpy()})
        # A sum in another order may round an input of a later layer to the neighbouring code.
        assert np.linalg.norm(found - expected) <= (1e-5 if activation is None else 2e-2) * np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("format", "activation", "dtype"),
    [
        ("int8", None, torch.float32),
        ("int8", "int8_token", torch.bfloat16),
        ("fp8_channel", "fp8", torch.float16),
    ],
)
def test_every_convolution_of_a_file_is_verified(
    tmp_path: Path, format: str, activation: str | None, dtype: torch.dtype
) -> None:
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    model, plan = quantized(format, activation, x)
    path = written(model, x, tmp_path / "m.onnx")
    receipt = verify(model, path, checkpoint=lambda name: model.get_submodule(name).quantized_weight)  # type: ignore[union-attr]
    assert [layer["name"] for layer in receipt["layers"]] == [layer.name for layer in plan.quantized]
    assert receipt["passed"], receipt


@pytest.mark.parametrize("name", ["two", "up_one"])
def test_a_changed_code_is_found(tmp_path: Path, name: str) -> None:
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1))
    model, _ = quantized("int8", "int8_token", x)
    path = written(model, x, tmp_path / "m.onnx")
    codes = model.get_submodule(name).codes
    codes.flatten()[5] += 1  # type: ignore[operator, union-attr]
    receipt = verify(model, path)
    assert [layer["name"] for layer in receipt["layers"] if not layer["passed"]] == [name]


def test_codes_keep_the_shape_of_their_parameter(tmp_path: Path) -> None:
    x = torch.randn(2, 4, 8)
    model, _ = quantized("int8", None, x)
    graph = onnx.load(written(model, x, tmp_path / "m.onnx")).graph
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    assert {name: shapes[f"{name}.codes"] for name, _ in Convs().named_children()} == {
        name: tuple(module.weight.shape) for name, module in Convs().named_children()
    }
    readers = {i: n for n in graph.node for i in n.input}
    for name, module in model.named_modules():  # each weight goes straight from its DequantizeLinear to its Conv
        if isinstance(module, QuantConv):
            dequantize = readers[f"{name}.codes"]
            assert readers[dequantize.output[0]].op_type == ("ConvTranspose" if module.transposed else "Conv")


def test_groups_of_a_transposed_convolution_are_refused_by_name(tmp_path: Path) -> None:
    x = torch.randn(2, 4, 8)
    model, _ = quantized("int8", None, x, groups=2)
    with pytest.raises(ValueError, match=r"^up_two \[6, 18\]: a transposed convolution of 2 groups in int8.*use fp8$"):
        written(model, x, tmp_path / "m.onnx")
    assert not (tmp_path / "m.onnx").exists()
    written(quantized("fp8", None, x, groups=2)[0], x, tmp_path / "m.onnx")


@pytest.mark.filterwarnings("ignore:.*needs? quant.load.*:UserWarning")
def test_a_checkpoint_of_a_resnet_becomes_a_file_for_onnxruntime(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    x = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    done = quant.quantize(tiny_models.resnet(), "fp8", [x])
    quant.save(done.model, done.plan, tmp_path / "checkpoint")
    command = ["export", str(tmp_path / "checkpoint"), "--to", "onnx", "--out", str(tmp_path / "onnx")]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    (found,) = runtime.InferenceSession(tmp_path / "onnx" / "model.onnx").run(None, {"pixel_values": x.numpy()})
    with torch.no_grad():
        expected = done.model(x).logits.numpy()
    assert np.linalg.norm(found - expected) <= 2e-2 * np.linalg.norm(expected)
