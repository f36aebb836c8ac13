"""The comparison with PyTorch passes right layers in half precision, and no wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from quant.export.onnx.compare_with_torch import verify
from quant.export.onnx.decoder_graph import GraphInput
from quant.export.onnx.export_onnx import write_onnx
from quant.formats.format import FORMATS
from quant.formats.tensor import quantize
from quant.kernels.linear.quant_linear import QuantLinear


@pytest.mark.parametrize(("scale_in_the_file", "passes"), [(1.0, True), (1.003, False)])
def test_a_static_scale_that_half_precision_rounds(tmp_path: Path, scale_in_the_file: float, passes: bool) -> None:
    """Codes times this scale lie between two FP16 numbers: PyTorch rounds them, the file multiplies codes before it.

    They were 1.15 · 2^-11 apart and refused; a scale that is off by 0.3 % still is.
    """
    torch.manual_seed(0)
    weight = quantize(torch.randn(192, 576) * 0.02, FORMATS["int8"], name="layer")
    scale = torch.tensor((1 + 5 * 2.0**-11) / 32)
    layer = QuantLinear(weight, None, FORMATS["int8_tensor"], scale, dtype=torch.float16)
    model = nn.Sequential(layer, nn.LayerNorm(192, dtype=torch.float16))
    example = GraphInput(torch.randn(4, 576).half(), ("batch", 576))
    path = write_onnx(model, tmp_path / "m.onnx", inputs={"x": example}, runtime="onnxruntime")
    layer.input_scale = scale * scale_in_the_file
    (entry,) = verify(model, path)["layers"]
    assert entry["passed"] == passes
