"""Every translated linear is run from its ONNX file by the reference evaluator and compared with the PyTorch op."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx_samples import relative_error
from slow_cases import quick_cases
from torch import nn
from torch.nn.functional import linear

from quant.formats.format import FORMATS
from quant.formats.scaling import global_scale_of
from quant.formats.tensor import fake_quantize, quantize
from quant.kernels.linear import quantized_module
from quant.kernels.linear.quant_linear import QuantLinear
from quant.recipes.layers import LayerKind

onnx = pytest.importorskip("onnx", reason="needs the extra onnx")
pytest.importorskip("onnxscript", reason="needs the extra onnx")

from quant.export.onnx.compare_with_torch import evaluator, to_numpy  # noqa: E402
from quant.export.onnx.decoder_graph import GraphInput  # noqa: E402
from quant.export.onnx.export_onnx import ATTENTION_KEY, PLAN_KEY, write_onnx  # noqa: E402
from quant.export.onnx.opsets import element_type  # noqa: E402
from quant.export.onnx.translate import LAYER_KEY, MODULE_KEY  # noqa: E402
from quant.recipes.plan import LayerPlan, Plan  # noqa: E402

ROWS, IN, OUT = 5, 256, 128


def layer(
    weight: str, activation: str | None, dtype: torch.dtype, rule: str = "max", *, bias: bool = True
) -> QuantLinear:
    w = torch.randn(OUT, IN).to(dtype)
    scale = None
    if activation is not None:
        format = FORMATS[activation]
        amax = torch.tensor(4.0)
        scale = global_scale_of(amax, format) if format.global_scale else amax / format.element.max
        scale = scale if format.global_scale or format.block == (0, 0) else None
        scale = scale if scale is None or format.global_scale else scale.to(dtype).float()
    return QuantLinear(
        quantize(w, FORMATS[weight], rule=rule),
        torch.randn(OUT).to(dtype) if bias else None,
        FORMATS[activation] if activation else None,
        scale,
    )


def exported(module: nn.Module, x: torch.Tensor, path: Path, **options: Any) -> Path:
    return write_onnx(module, path, inputs={"x": GraphInput(x, ("batch", "rows", IN))}, **options)


def run(path: Path, x: torch.Tensor, wanted: list[str] | None = None) -> list[torch.Tensor]:
    """Outputs of the file, or intermediate values, as float32."""
    model = onnx.load(path)
    for name in wanted or ():
        model.graph.output.append(onnx.ValueInfoProto(name=name))
    return [torch.from_numpy(np.asarray(y, dtype=np.float32)) for y in evaluator(model).run(wanted, {"x": to_numpy(x)})]


PAIRS = [
    ("nvfp4", "nvfp4"),
    ("nvfp4", None),
    ("mxfp8", "mxfp8"),
    ("mxfp8", None),
    ("fp8", "fp8"),
    ("fp8", "fp8_token"),
    ("fp8", None),
    ("fp8_channel", "fp8"),
    ("fp8_channel", "fp8_token"),
    ("fp8_block", None),
    ("int8", "int8_token"),
    ("int8", "int8_tensor"),
    ("int8", None),
    ("int4", None),
]
# Weights and inputs that other pairs have, too.
SLOW_PAIRS = [("mxfp8", None), ("fp8", "fp8_token"), ("fp8_channel", "fp8"), ("int8", None)]


@pytest.mark.parametrize(
    ("weight", "activation"), quick_cases(PAIRS, lambda weight, activation: (weight, activation) not in SLOW_PAIRS)
)
def test_a_linear_in_fp32_equals_the_op(tmp_path: Path, weight: str, activation: str | None) -> None:
    module = nn.Sequential(layer(weight, activation, torch.float32))
    x = torch.randn(2, ROWS, IN)
    x[0, 1] = 0.0  # a token whose scale is found to be zero
    x[1, 1] *= 9.0  # beyond the calibrated range
    (y,) = run(exported(module, x, tmp_path / "m.onnx"), x)
    assert relative_error(y, module(x)) < 1e-6


@pytest.mark.parametrize("activation", ["fp8", "int8_tensor"])
def test_static_inputs_saturate_as_in_onnxruntime_and_compressed_tensors(activation: str) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize as their_rounding

    format, scale = FORMATS[activation], torch.tensor(0.03)
    # Every tie of the codes, from well below the calibrated range to well above it.
    x = torch.arange(-2.5 * format.element.max, 2.5 * format.element.max, 0.5) * scale
    rounded = fake_quantize(x[None], format, scale=scale)[0]
    kind = element_type(format)
    helper, names = onnx.helper, ("x", "s")
    nodes = [
        helper.make_node("QuantizeLinear", names, ["q"], output_dtype=kind),
        helper.make_node("DequantizeLinear", ["q", "s"], ["y"]),
    ]
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in "xsy"]
    graph = helper.make_graph(nodes, "saturate", values[:2], values[2:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    (theirs,) = session.run(None, {"x": x.numpy(), "s": scale.numpy()})
    assert torch.equal(rounded, torch.from_numpy(theirs))
    arguments = QuantizationArgs(num_bits=8, type="float" if activation == "fp8" else "int", strategy="tensor")
    zero = torch.zeros((), dtype=torch.int8)
    assert torch.equal(rounded, their_rounding(x, scale, zero if activation != "fp8" else zero.float(), arguments))


@pytest.mark.parametrize("activation", ["nvfp4", None])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_nvfp4_in_half_precision_multiplies_exactly_the_same_numbers(
    tmp_path: Path, dtype: torch.dtype, activation: str | None
) -> None:
    quantized = layer("nvfp4", activation, dtype, rule="four_over_six", bias=False)
    module = nn.Sequential(quantized)
    x = torch.randn(2, ROWS, IN).to(dtype)
    path = exported(module, x, tmp_path / "m.onnx")
    (matmul,) = (node for node in onnx.load(path).graph.node if node.op_type == "MatMul")
    a, b, y = run(path, x, [*matmul.input, matmul.output[0]])
    rounded = x if activation is None else fake_quantize(x, FORMATS["nvfp4"], global_scale=quantized.input_scale)
    assert torch.equal(a, rounded.float())
    assert torch.equal(b.T, quantized.dequantize(dtype).float())
    assert torch.equal(linear(a.to(dtype), b.T.to(dtype).contiguous()), module(x))
    # Sums in another order may round to the neighbouring number, here and there; BF16 is multiplied in FP32.
    y = y.to(dtype).float()
    assert relative_error(y, module(x)) < 1e-3
    assert (y != module(x).float()).float().mean() < 0.02


def _values(path: Path) -> set[str]:
    return {name for node in onnx.load(path).graph.node for name in node.output}


@pytest.mark.parametrize(
    ("weight", "activation", "dtype"),
    [
        ("fp8", "fp8", torch.bfloat16),
        ("int8", "int8_token", torch.float16),
        ("fp8_channel", "fp8_token", torch.bfloat16),
        ("mxfp8", "mxfp8", torch.float16),
    ],
)
def test_other_formats_in_half_precision(tmp_path: Path, dtype: torch.dtype, weight: str, activation: str) -> None:
    module = nn.Sequential(layer(weight, activation, dtype))
    x = torch.randn(2, ROWS, IN).to(dtype)
    (y,) = run(exported(module, x, tmp_path / "m.onnx"), x)
    # Each of the two roundings of a scaled row is at most half a unit in the last place.
    assert relative_error(y, module(x)) < torch.finfo(dtype).eps


def test_int4_scales_are_exact_in_the_dtype_of_the_model(tmp_path: Path) -> None:
    quantized = layer("int4", None, torch.bfloat16)
    x = torch.randn(2, ROWS, IN).bfloat16()
    path = exported(nn.Sequential(quantized), x, tmp_path / "m.onnx")
    (matmul,) = (node for node in onnx.load(path).graph.node if node.op_type == "MatMul")
    (b,) = run(path, x, [matmul.input[1]])
    assert torch.equal(b.T, quantized.dequantize(torch.bfloat16).float())


@pytest.mark.parametrize(
    ("weight", "rule", "codes", "scales"),
    [("nvfp4", "mse", "FLOAT4E2M1", "FLOAT8E4M3FN"), ("int4", "mse", "INT4", "FLOAT"), ("mxfp8", "max", None, "UINT8")],
)
def test_codes_and_searched_scales_are_written_byte_for_byte(
    tmp_path: Path, weight: str, rule: str, codes: str | None, scales: str
) -> None:
    quantized = layer(weight, None, torch.float32, rule=rule)
    x = torch.randn(2, ROWS, IN)
    graph = onnx.load(exported(nn.Sequential(quantized), x, tmp_path / "m.onnx")).graph
    stored = {tensor.name: tensor for tensor in graph.initializer}
    for name, tensor, kind in (
        ("0.codes", quantized.codes, codes or "FLOAT8E4M3FN"),
        ("0.scale", quantized.scale, scales),
    ):
        assert stored[name].data_type == getattr(onnx.TensorProto, kind)
        assert onnx.numpy_helper.to_array(stored[name]).size == stored[name].dims[0] * stored[name].dims[1]
        assert stored[name].raw_data == tensor.contiguous().view(torch.uint8).numpy().tobytes()


def test_a_shared_input_is_quantized_once(tmp_path: Path) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = (layer("nvfp4", "nvfp4", torch.float32) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.gate(x) * self.up(x)

    module, x = Pair(), torch.randn(2, ROWS, IN)
    path = exported(module, x, tmp_path / "m.onnx")
    assert [node.op_type for node in onnx.load(path).graph.node].count("TRT_FP4DynamicQuantize") == 1
    (y,) = run(path, x)
    assert relative_error(y, module(x)) < 1e-6


def test_run_time_parts_are_in_the_graph(tmp_path: Path) -> None:
    weight = quantize(torch.randn(OUT, IN), FORMATS["fp8"])
    quantized = QuantLinear(
        weight,
        pre_scale=torch.rand(IN) + 0.5,
        hadamard=32,
        lowrank=(torch.randn(4, IN), torch.randn(OUT, 4)),
    )
    module, x = nn.Sequential(quantized), torch.randn(2, ROWS, IN)
    (y,) = run(exported(module, x, tmp_path / "m.onnx"), x)
    assert relative_error(y, module(x)) < 2e-6


def test_onnxruntime_runs_fp8(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    module = nn.Sequential(layer("fp8_channel", "fp8", torch.float32), nn.GELU())
    x = torch.randn(3, ROWS, IN)
    path = exported(module, x, tmp_path / "m.onnx")
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    session = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {"x": x.numpy()})
    assert relative_error(torch.from_numpy(y), module(x)) < 1e-6


def test_a_single_block_has_a_number_for_its_scale(tmp_path: Path) -> None:
    """TensorRT-RTX refuses a matrix of one scale at TRT_BlockDequantize: "ScaleMode is illegal"."""
    module = nn.Sequential(QuantLinear(quantize(torch.randn(128, 128), FORMATS["fp8_block"]), None, None, None))
    x = torch.randn(2, ROWS, 128)
    path = write_onnx(
        module, tmp_path / "m.onnx", inputs={"x": GraphInput(x, ("batch", "rows", 128))}, runtime="tensorrt"
    )
    (y,) = run(path, x)
    assert relative_error(y, module(x)) < 1e-6
    assert "TRT_BlockDequantize" not in {node.op_type for node in onnx.load(path).graph.node}


@pytest.mark.parametrize("activation", ["fp8", "fp8_token"])
def test_inputs_in_onnxruntime_are_the_numbers_of_ml_dtypes(tmp_path: Path, activation: str) -> None:
    """A product with the identity gives the rounded inputs: ties, subnormals, the largest numbers, and zeros."""
    import ml_dtypes

    runtime = pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    scale = torch.tensor(0.37)
    identity = quantize(torch.eye(IN) * 448, FORMATS["fp8"])
    module = nn.Sequential(QuantLinear(identity, None, FORMATS[activation], scale if activation == "fp8" else None))
    grid = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    ties = (grid[:-1] + grid[1:]) / 2
    near = np.concatenate([grid, ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(500))])
    x = np.resize(np.concatenate([near, -near, np.random.default_rng(0).normal(0, 200, 2000)]), (2, 8, IN))
    x[..., 0], x[0, 0] = 448, 0  # all tokens but the first have the largest number
    x = (x * np.float32(0.37)).astype(np.float32)
    path = exported(module, torch.from_numpy(x), tmp_path / "m.onnx")
    (y,) = runtime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"x": x})
    own = np.abs(x).max(-1, keepdims=True) / np.float32(448) if activation == "fp8_token" else np.float32(0.37)
    own = np.where(own > 0, own, np.float32(1))
    codes = np.clip(x / own, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    weight = np.float32(448)
    # A scale of a token multiplies the product, and not the inputs.
    assert np.array_equal(y, (codes * weight) * own if activation == "fp8_token" else (codes * own) * weight)


def test_names_dimensions_and_metadata(tmp_path: Path) -> None:
    plan = Plan((LayerPlan("0", LayerKind.LINEAR, (OUT, IN), FORMATS["nvfp4"], FORMATS["nvfp4"]),))
    module, x = nn.Sequential(layer("nvfp4", "nvfp4", torch.float32), nn.ReLU()), torch.randn(2, ROWS, IN)
    model = onnx.load(exported(module, x, tmp_path / "m.onnx", plan=plan))
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    assert json.loads(metadata.pop("blockscale.export"))["inputs"] == {
        "x": ["float32", [2, ROWS, IN], ["batch", "rows", IN]]
    }
    assert metadata == {PLAN_KEY: plan.digest(), ATTENTION_KEY: "native"}
    for value in (model.graph.input[0], model.graph.output[0]):
        assert [dim.dim_param for dim in value.type.tensor_type.shape.dim][:2] == ["batch", "rows"]
    tagged = {e.value for node in model.graph.node for e in node.metadata_props if e.key == LAYER_KEY}
    assert tagged == {"0"}
    assert {e.key for node in model.graph.node for e in node.metadata_props} <= {LAYER_KEY, MODULE_KEY}
    assert "0.output" in _values(tmp_path / "m.onnx")


@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_big_weights_go_to_a_file_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr("quant.export.onnx.export_onnx.EXTERNAL_BYTES", limit)
    module, x = nn.Sequential(layer("nvfp4", "nvfp4", torch.float32)), torch.randn(2, ROWS, IN)
    path = exported(module, x, tmp_path / "m.onnx")
    names = ["m.onnx", "m.onnx.data"] if limit == 0 else ["m.onnx"]
    assert sorted(file.name for file in tmp_path.iterdir()) == names
    (y,) = run(path, x)
    assert relative_error(y, module(x)) < 1e-6


def test_nothing_is_left_of_a_file_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnx_ir

    def fail(model: Any, path: Path, **options: Any) -> None:
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(onnx_ir, "save", fail)
    (tmp_path / "m.onnx").write_bytes(b"before")
    with pytest.raises(OSError, match="No space"):
        exported(nn.Sequential(layer("fp8", None, torch.float32)), torch.randn(2, ROWS, IN), tmp_path / "m.onnx")
    assert [file.name for file in tmp_path.iterdir()] == ["m.onnx"]
    assert (tmp_path / "m.onnx").read_bytes() == b"before"


def test_a_dimension_that_the_module_fixes_is_an_error(tmp_path: Path) -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = layer("fp8", None, torch.float32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x).reshape(2, ROWS, 2, OUT // 2)

    with pytest.raises(ValueError, match=r"^Fixed computes with one size of batch,.*inputs={\"x\": \"fp32:2,"):
        exported(Fixed(), torch.randn(2, ROWS, IN), tmp_path / "m.onnx")


def test_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    module = nn.Sequential(layer("nvfp4", "nvfp4", torch.float32))
    before = {name: (id(t), t.clone()) for name, t in module.state_dict(keep_vars=True).items()}
    exported(module, torch.randn(2, ROWS, IN), tmp_path / "m.onnx")
    after = module.state_dict(keep_vars=True)
    assert {name: id(t) for name, t in after.items()} == {name: i for name, (i, _) in before.items()}
    assert all(torch.equal(after[name].float(), t.float()) for name, (_, t) in before.items())


def test_weights_in_a_kernels_layout_are_written_as_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that ran on a Hopper GPU has them; this CPU is taken for one."""
    module, x = nn.Sequential(layer("nvfp4", None, torch.bfloat16)), torch.randn(2, ROWS, IN).bfloat16()
    before = exported(module, x, tmp_path / "before.onnx").read_bytes()
    monkeypatch.setattr(quantized_module, "prefers_prepacked", lambda codes: True)
    module(x)
    assert module[0].codes.dtype is torch.int32
    assert exported(module, x, tmp_path / "after.onnx").read_bytes() == before
