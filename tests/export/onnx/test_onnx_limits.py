"""A layer that ONNX cannot hold is refused with its name and a way out, and no other layer is."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import tiny_models
import torch
from torch import nn

from quant.export.export_model import export_model
from quant.export.onnx.limits import check_attention, check_model, layer_problem
from quant.formats.format import FORMATS
from quant.formats.tensor import quantize
from quant.kernels.linear.experts import QuantExperts
from quant.kernels.linear.quant_linear import QuantLinear
from quant.recipes.targets import TARGETS
from quant.run.api import quantize as quantize_model


@pytest.mark.parametrize(
    ("weight", "activation", "shape", "words"),
    [
        ("mxfp4", None, (64, 64), "no E2M1 weights with E8M0 scales; use nvfp4"),
        ("mxfp6", None, (64, 64), "no 6-bit numbers at this opset; use fp8"),
        ("mxfp8_e5m2", None, (64, 64), "does not import E5M2 weights; use mxfp8"),
        ("fp8_block", "fp8_group", (128, 128), "miscompiles FP8 weights in blocks with FP8 inputs; use 16-bit inputs"),
        ("fp8_group", None, (128, 128), "reads only the first scale of each row"),
        ("nvfp4", "fp8", (64, 64), "no GEMM of nvfp4 weights and fp8 inputs; use nvfp4 or 16-bit inputs"),
        ("fp8", "nvfp4", (64, 64), "use fp8 or fp8_token"),
        ("int4", "int8_token", (64, 128), "use 16-bit inputs"),
        ("nvfp4", None, (64, 72), "72 inputs are not a multiple of the nvfp4 block of 16"),
        ("int4", None, (64, 192), "192 inputs are not a multiple of the int4 block of 128"),
    ],
)
def test_refused(weight: str, activation: str | None, shape: tuple[int, int], words: str) -> None:
    problem = layer_problem(FORMATS[weight], FORMATS[activation] if activation else None, shape)
    assert problem is not None and words in problem


@pytest.mark.parametrize(
    ("weight", "activation"),
    [
        ("nvfp4", "nvfp4"),
        ("nvfp4", None),
        ("mxfp8", "mxfp8"),
        ("fp8", "fp8"),
        ("fp8_channel", "fp8_token"),
        ("fp8_block", None),
        ("int8", "int8_token"),
        ("int8", "int8"),
        ("int8", "int8_tensor"),
        ("int4", None),
        ("int4_g64", None),
        ("int4_g32", None),
    ],
)
def test_accepted(weight: str, activation: str | None) -> None:
    assert layer_problem(FORMATS[weight], FORMATS[activation] if activation else None, (128, 256)) is None


def test_targets_list_the_pairs_that_are_exported() -> None:
    taken = {
        (weight, activation)
        for weight, activation in product(FORMATS, (*FORMATS, None))
        if layer_problem(FORMATS[weight], FORMATS.get(activation or ""), (128, 256)) is None
        and activation not in ("fp8_channel", "int8")  # of inputs, other names of fp8_token and int8_token
    }
    of_blackwell = {pair for pair in taken if pair[0] == "nvfp4"}
    of_tensorrt = {pair for pair in taken if pair[0] in ("nvfp4", "mxfp8", "fp8_block")}
    expected = {
        "tensorrt-rtx-sm120": taken,
        "tensorrt-rtx-sm89": taken - of_blackwell,
        "onnxruntime": taken - of_tensorrt,
        "onnxruntime-genai": taken - of_tensorrt | {("nvfp4", "nvfp4")},
    }
    for name, pairs in expected.items():
        assert {(pair.weight, pair.activation) for pair in TARGETS[name].pairs} == pairs, name


def test_a_scale_that_was_not_calibrated() -> None:
    model = nn.Sequential(QuantLinear(quantize(torch.randn(64, 64), FORMATS["nvfp4"]), activation=FORMATS["nvfp4"]))
    with pytest.raises(ValueError, match=r"^0 \[64, 64\]: nvfp4 inputs need a calibrated scale .*data="):
        check_model(model)


def test_the_layer_is_named() -> None:
    model = nn.ModuleDict(
        {
            "good": QuantLinear(quantize(torch.randn(64, 64), FORMATS["fp8"])),
            "bad": QuantLinear(quantize(torch.randn(64, 64), FORMATS["mxfp4"])),
        }
    )
    with pytest.raises(ValueError, match=r"^bad \[64, 64\]: mxfp4 weights cannot be exported"):
        check_model(model)


def test_experts_are_refused() -> None:
    model = nn.ModuleDict({"experts": QuantExperts(quantize(torch.randn(2, 64, 64), FORMATS["fp8"]))})
    with pytest.raises(ValueError, match=r"^experts \[2, 64, 64\]: fused experts choose their tokens at run time"):
        check_model(model)


def test_experts_in_16_bit_are_refused() -> None:
    """The export ended in "transformers fails in its own _grouped_mm"."""
    model = tiny_models.mixtral()
    with pytest.raises(ValueError, match=r"layers.0.mlp.experts \[4, 256, 64\]: fused experts choose their tokens"):
        check_model(model)


def test_quantized_experts_below_a_class_of_transformers_are_named() -> None:
    """The export ended in StopIteration: the class that transformers marks has no parameter of its own."""
    model = tiny_models.mixtral()
    quantize_model(model, "fp8a16", effort=0)
    with pytest.raises(ValueError, match=r"experts.gate_up_proj \[4, 256, 64\]: fused experts choose their tokens"):
        check_model(model)


@pytest.mark.parametrize("kind", ["onnx", "tensorrt", "aoti", "torch-tensorrt"])
def test_every_export_of_experts_ends_in_a_line_with_a_road_that_works(kind: str, tmp_path: Path) -> None:
    """AOTInductor ended in `_unique2`, and NVFP4 experts were sent to `--to tensorrt`, which refuses them."""
    model = tiny_models.mixtral(dtype=torch.bfloat16)
    done = quantize_model(model, "nvfp4a16", effort=0)
    options = {"target": "sm120"} if "tensorrt" in kind else {}
    pytest.importorskip("tensorrt_rtx" if kind == "tensorrt" else "onnx", reason="needs an extra")
    with pytest.raises(ValueError, match=r"experts.gate_up_proj \[4, 256, 64\]: fused experts .*vLLM") as refused:
        export_model(done, kind, tmp_path / "out.pt2", **options)
    assert "tensorrt" not in str(refused.value) and not (tmp_path / "out.pt2").exists()


@pytest.mark.parametrize(
    ("kind", "dim", "heads", "dtype", "mask", "words"),
    [
        ("native", 80, 4, torch.bfloat16, None, "native FP8 attention takes heads of 64, 128, these are of 80"),
        ("plugin", 96, 4, torch.bfloat16, None, "takes heads of 64, 128, 256, these are of 96"),
        ("native", 64, 3, torch.bfloat16, None, "3 heads are not a multiple of 2 KV heads"),
        ("native", 64, 4, torch.float32, None, "the model is in torch.float32"),
        ("plugin", 64, 4, torch.float16, torch.bool, "no mask besides the causal one"),
        ("native", 64, 4, torch.float16, torch.float16, "FP8 attention takes no bias of positions"),
    ],
)
def test_attention_without_a_kernel(
    kind: str, dim: int, heads: int, dtype: torch.dtype, mask: torch.dtype | None, words: str
) -> None:
    q, k = torch.empty(1, heads, 8, dim, dtype=dtype), torch.empty(1, 2, 8, dim, dtype=dtype)
    with pytest.raises(ValueError, match=rf"^layer: .*{words}.*attention=\"none\""):
        check_attention("layer", kind, q, k, None if mask is None else torch.ones(1, 1, 8, 8, dtype=mask))


def test_four_dimensional_nvfp4_inputs(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="needs the extra onnx")
    from quant.export.onnx.decoder_graph import GraphInput
    from quant.export.onnx.export_onnx import write_onnx

    class Convolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = quantize(torch.randn(32, 64), FORMATS["nvfp4"])
            self.point = QuantLinear(weight, activation=FORMATS["nvfp4"], input_scale=torch.tensor(0.01))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.point(x)

    x = torch.randn(2, 4, 4, 64)
    with pytest.raises(ValueError, match=r"^point: NVFP4 inputs of 4 dimensions.*flatten"):
        write_onnx(Convolution(), tmp_path / "m.onnx", inputs={"x": GraphInput(x, ("batch", 4, 4, 64))})
    assert list(tmp_path.iterdir()) == []
