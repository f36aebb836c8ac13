"""The gated matmul keeps the order of rows, and on a GPU its values equal `silu(gate) · up` in float64."""

from __future__ import annotations

import pytest
import torch

from quant.formats.format import FORMATS
from quant.formats.tensor import quantize
from quant.kernels.layout import prepack, why_not
from quant.kernels.linear.gated import gated_linear, rows_in_turns


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 5, 16, 64, 100, 600])
@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "fp8_channel"])
def test_gated_linear_on_a_gpu(name: str, tokens: int) -> None:
    weight = quantize(torch.randn(2 * 448, 1600, device="cuda") / 40, FORMATS[name])
    x = torch.randn(tokens, 1600, device="cuda", dtype=torch.bfloat16)
    stored = rows_in_turns(weight)
    stored = stored if why_not(stored) else prepack(stored)
    y = gated_linear(x, stored)
    gate, up = (x.double() @ weight.dequantize(torch.float64).T).chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up
    assert y.shape == expected.shape
    # Four roundings to BF16: of gate, of its activation, of up, and of their product; and of W where tokens are many.
    error = (y.double() - expected).norm() / expected.norm()
    assert error < (2**-8 if tokens <= 64 else 2**-7)


def test_rows_in_turns() -> None:
    w = torch.randn(6, 64)
    stored = rows_in_turns(quantize(w, FORMATS["nvfp4"], global_scale=torch.tensor(0.01)))
    turned = w.view(2, 3, 64).transpose(0, 1).reshape(6, 64)
    expected = quantize(turned, FORMATS["nvfp4"], global_scale=torch.tensor(0.01))
    assert torch.equal(stored.codes, expected.codes) and torch.equal(
        stored.scale.view(torch.uint8), expected.scale.view(torch.uint8)
    )
