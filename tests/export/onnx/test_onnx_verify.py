"""A good file passes its check; a file in which one byte differs does not, and the layer is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from quant.formats.format import FORMATS
from quant.formats.tensor import BlockScaledTensor, quantize
from quant.kernels.linear.quant_linear import QuantLinear
from quant.report.report import Receipt

onnx = pytest.importorskip("onnx", reason="needs the extra onnx")
pytest.importorskip("onnxscript", reason="needs the extra onnx")

from quant.export.onnx import compare_with_torch as verify_module  # noqa: E402
from quant.export.onnx.compare_with_torch import (  # noqa: E402
    LayerGraphs,
    check_file,
    evaluator,
    verify,
    worst_layer,
)
from quant.export.onnx.decoder_graph import GraphInput  # noqa: E402
from quant.export.onnx.export_onnx import write_onnx  # noqa: E402


@pytest.fixture(scope="module")
def model() -> nn.Module:
    """Three layers in a row: the second reads what the first gives, with nothing in between."""
    torch.manual_seed(0)
    scale = torch.tensor(4.0 / 2688)
    nvfp4, fp8 = FORMATS["nvfp4"], FORMATS["fp8_channel"]
    return nn.Sequential(
        QuantLinear(quantize(torch.randn(96, 64), nvfp4), torch.randn(96), nvfp4, scale),
        QuantLinear(quantize(torch.randn(80, 96), fp8), torch.randn(80), FORMATS["fp8_token"]),
        nn.GELU(),
        QuantLinear(quantize(torch.randn(32, 80), FORMATS["int8"]), None),
    ).eval()


@pytest.fixture(scope="module")
def path(model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("onnx") / "m.onnx"
    return write_onnx(model, made, inputs={"x": GraphInput(torch.randn(4, 64), ("rows", 64))})


def weight_of(model: nn.Module, name: str) -> BlockScaledTensor:
    module = model.get_submodule(name)
    assert isinstance(module, QuantLinear)
    return module.quantized_weight


def test_a_good_file_passes(model: nn.Module, path: Path) -> None:
    check_file(path)
    seen = []
    receipt = verify(model, path, checkpoint=lambda name: weight_of(model, name), progress=lambda *at: seen.append(at))
    assert receipt["passed"]
    assert [layer["name"] for layer in receipt["layers"]] == ["0", "1", "3"]
    assert all(layer["onnx"] <= 1e-6 and layer["checkpoint"] == 0.0 for layer in receipt["layers"])
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert Receipt.from_dict(receipt).passed


def test_each_layer_is_cut_out_with_one_input(model: nn.Module, path: Path) -> None:
    graph = LayerGraphs(path)
    assert [graph.linear(name)[1] for name in ("0", "1")] == ["x", "0.output"]
    for name in ("0", "1", "3"):
        expected = weight_of(model, name).dequantize()
        (found,) = evaluator(graph.weight(name)).run(None, {})
        torch.testing.assert_close(torch.from_numpy(np.asarray(found, np.float32)), expected, rtol=1e-7, atol=0)


LAYOUTS = [(format, "", "tensorrt") for format in ("fp8", "fp8_channel", "fp8_block", "nvfp4", "int4", "int8", "mxfp8")]
# Codes of other shapes and types: `[in, out]`, and uint8.
LAYOUTS += [("int4", "", "onnxruntime"), ("int8", "int8_token", "onnxruntime"), ("fp8_channel", "", "onnxruntime")]


@pytest.mark.parametrize(("format", "activation", "runtime"), LAYOUTS)
def test_a_wide_layer_is_compared_in_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str, activation: str, runtime: str
) -> None:
    """The same receipt as of the whole, and a bit in the last row is found."""
    torch.manual_seed(0)
    weight = quantize(torch.randn(300, 128), FORMATS[format])
    model = nn.Sequential(QuantLinear(weight, torch.randn(300), FORMATS[activation] if activation else None)).eval()
    inputs = {"x": GraphInput(torch.randn(4, 128), ("rows", 128))}
    path = write_onnx(model, tmp_path / "m.onnx", inputs=inputs, runtime=runtime)
    whole = verify(model, path)["layers"][0]
    monkeypatch.setattr(verify_module, "_WEIGHTS_AT_ONCE", 128 * 40)
    assert len(list(weight.row_chunks(128 * 40))) == (3 if format == "fp8_block" else 8)
    sliced = verify(model, path)["layers"][0]
    assert whole["passed"] and sliced["passed"]
    for key in ("fake_quant", "onnx"):
        # Products of another shape may be summed in another order, which moves the last bits of float32.
        assert sliced[key] == pytest.approx(whole[key], rel=0.2, abs=1e-6)
    damaged = onnx.load(path)
    (codes,) = (tensor for tensor in damaged.graph.initializer if tensor.name == "0.codes")
    data = bytearray(codes.raw_data)
    data[-3] ^= 0x04
    codes.raw_data = bytes(data)
    onnx.save(damaged, path)
    assert not verify(model, path)["passed"]


@pytest.mark.parametrize("format", ["fp8", "fp8_channel", "fp8_block", "nvfp4", "int4", "int8", "mxfp8"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_of_half_precision_models_are_compared_in_float32(
    tmp_path: Path, format: str, dtype: torch.dtype
) -> None:
    """fp8_block was refused in FP16 and BF16: its operator rounds to the dtype of the layer."""
    torch.manual_seed(0)
    weight = quantize(torch.randn(256, 256, dtype=dtype), FORMATS[format])
    model = nn.Sequential(QuantLinear(weight, torch.randn(256, dtype=dtype), dtype=dtype)).eval()
    inputs = {"x": GraphInput(torch.randn(4, 256, dtype=dtype), ("rows", 256))}
    (layer,) = verify(model, write_onnx(model, tmp_path / "m.onnx", inputs=inputs))["layers"]
    assert layer["passed"], layer


@pytest.mark.parametrize("changed", [False, True])
def test_products_of_saturated_inputs_may_overflow(tmp_path: Path, changed: bool) -> None:
    """SmolLM2's block 11 reads inputs up to 3,584 in FP8: its products are infinite in FP16, on both sides alike."""
    torch.manual_seed(0)
    weight, scale = quantize(torch.randn(64, 512, dtype=torch.float16), FORMATS["fp8"]), torch.tensor(8.0)
    bias = torch.randn(64, dtype=torch.float16)
    model = nn.Sequential(QuantLinear(weight, bias, FORMATS["fp8"], scale, dtype=torch.float16)).eval()
    inputs = {"x": GraphInput(torch.randn(4, 512, dtype=torch.float16), ("rows", 512))}
    path = write_onnx(model, tmp_path / "m.onnx", inputs=inputs)
    if changed:
        damaged = onnx.load(path)
        (stored,) = (tensor for tensor in damaged.graph.initializer if tensor.name == "0.input_scale")
        stored.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(stored) * 1.5, stored.name))
        onnx.save(damaged, path)
    (layer,) = verify(model, path)["layers"]
    assert layer["passed"] is not changed, layer


@pytest.mark.parametrize("name", ["0", "1", "3"])
def test_one_flipped_bit_in_a_weight_fails(model: nn.Module, path: Path, tmp_path: Path, name: str) -> None:
    damaged = onnx.load(path)
    (codes,) = (tensor for tensor in damaged.graph.initializer if tensor.name == f"{name}.codes")
    data = bytearray(codes.raw_data)
    data[7] ^= 0x04
    codes.raw_data = bytes(data)
    onnx.save(damaged, tmp_path / "m.onnx")
    receipt = verify(model, tmp_path / "m.onnx")
    assert not receipt["passed"]
    assert [layer["name"] for layer in receipt["layers"] if not layer["passed"]] == [name]
    worst = worst_layer(receipt)
    assert worst is not None and worst["name"] == name


def test_a_changed_input_scale_fails(model: nn.Module, path: Path, tmp_path: Path) -> None:
    damaged = onnx.load(path)
    (scale,) = (tensor for tensor in damaged.graph.initializer if tensor.name == "0.input_scale")
    scale.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(scale) * 1.5, scale.name))
    onnx.save(damaged, tmp_path / "m.onnx")
    assert [layer["passed"] for layer in verify(model, tmp_path / "m.onnx")["layers"]] == [False, True, True]


def test_another_checkpoint_fails(model: nn.Module, path: Path) -> None:
    other = quantize(weight_of(model, "0").dequantize() * 1.1, FORMATS["nvfp4"])
    receipt = verify(model, path, checkpoint=lambda name: other if name == "0" else weight_of(model, name))
    assert [layer["passed"] for layer in receipt["layers"]] == [False, True, True]


def test_a_layer_that_is_not_in_the_file(model: nn.Module, path: Path) -> None:
    more = nn.Sequential(*model, QuantLinear(quantize(torch.randn(32, 32), FORMATS["fp8"])))
    with pytest.raises(ValueError, match="no nodes of layer 4"):
        verify(more, path)


def test_a_file_that_is_no_valid_onnx(path: Path, tmp_path: Path) -> None:
    damaged = onnx.load(path)
    damaged.graph.node[0].input[0] = "nowhere"
    onnx.save(damaged, tmp_path / "m.onnx")
    with pytest.raises(ValueError, match=r"m\.onnx: not a valid ONNX file: .*nowhere"):
        check_file(tmp_path / "m.onnx")


def test_shapes_are_inferred_without_weights(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Inference copies what it gets several times; it still finds a wrong shape of a large constant."""
    infer, sizes = onnx.shape_inference.infer_shapes, []
    monkeypatch.setattr(
        onnx.shape_inference, "infer_shapes", lambda m, **o: (sizes.append(m.ByteSize()), infer(m, **o))
    )
    wrong = onnx.load(path)
    weight = max(wrong.graph.initializer, key=lambda tensor: len(tensor.raw_data))
    assert len(weight.raw_data) > 4096
    check_file(path)
    assert sizes[0] < path.stat().st_size - len(weight.raw_data) + 64
    weight.dims[:] = [weight.dims[0] * weight.dims[1]]
    onnx.save(wrong, tmp_path / "m.onnx")
    with pytest.raises(ValueError, match=r"m\.onnx: not a valid ONNX file: "):
        check_file(tmp_path / "m.onnx")


def test_dtypes_that_do_not_meet_have_a_way_out(tmp_path: Path) -> None:
    pairs = (("a", onnx.TensorProto.FLOAT), ("b", onnx.TensorProto.FLOAT16))
    values = [onnx.helper.make_tensor_value_info(name, kind, [2]) for name, kind in pairs]
    out = onnx.helper.make_tensor_value_info("c", onnx.TensorProto.FLOAT, [2])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Add", ["a", "b"], ["c"])], "g", values, [out])
    onnx.save(onnx.helper.make_model(graph), tmp_path / "m.onnx")
    with pytest.raises(ValueError, match=r"inconsistent type .*; a model and inputs of several .* by dtype=.fp16."):
        check_file(tmp_path / "m.onnx")
