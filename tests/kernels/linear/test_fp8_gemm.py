"""The library's FP8 matmul takes what `takes_fp8` says, inputs are rounded as by the oracle, and values fit float64."""

import pytest
import torch
from torch import nn

import quant
from quant.formats.format import FORMATS
from quant.formats.tensor import fake_quantize, quantize
from quant.kernels.linear.quant_linear import quantized_linear
from quant.kernels.linear.rounded_products import round_to_e4m3, takes_fp8


@pytest.mark.parametrize(("activation", "static"), [("fp8", False), ("fp8", True), ("fp8_token", False)])
def test_inputs_are_rounded_as_the_oracle_rounds(activation: str, static: bool) -> None:
    x = torch.randn(33, 64) * torch.randn(33, 1).exp()
    x[4] = 0
    form, scale = FORMATS[activation], torch.tensor(0.01) if static else None
    x8, sx = round_to_e4m3(x, form, scale)
    assert torch.equal(x8.float() * sx, fake_quantize(x, form, scale=scale))


def test_what_the_library_takes() -> None:
    row, tensor, block = FORMATS["fp8_channel"], FORMATS["fp8"], FORMATS["fp8_block"]
    token, group = FORMATS["fp8_token"], FORMATS["fp8_group"]
    assert takes_fp8(row, token, (32, 64), torch.bfloat16) and takes_fp8(tensor, tensor, (32, 64), torch.float16)
    assert not takes_fp8(row, token, (32, 64), torch.float16)
    assert not takes_fp8(row, token, (33, 64), torch.bfloat16)
    assert not takes_fp8(block, group, (128, 128), torch.bfloat16)
    assert not takes_fp8(row, None, (32, 64), torch.bfloat16)


def test_a_compiler_sees_one_op_a_layer() -> None:
    """Left to inductor, the rounding of wide rows takes longer."""
    model = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 64)).bfloat16()
    quant.quantize(model, "fp8_channel", solver="rtn")
    x, graphs = torch.randn(3, 5, 64, dtype=torch.bfloat16), []
    compiled = torch.compile(model, fullgraph=True, backend=lambda graph, _: graphs.append(graph.code) or graph)
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x)) and graphs[-1].count("ops.quant.linear") == 2


@pytest.mark.gpu
@pytest.mark.parametrize("weight_format", ["fp8", "fp8_channel"])
@pytest.mark.parametrize("activation", ["fp8", "fp8_token"])
@pytest.mark.parametrize("static", [False, True])
def test_on_a_gpu(weight_format: str, activation: str, static: bool) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 tensor cores start with compute capability 8.9")
    scale = torch.tensor(0.01, device="cuda") if static and activation == "fp8" else None
    weight = quantize(torch.randn(272, 512, device="cuda"), FORMATS[weight_format])
    bias = torch.randn(272, device="cuda", dtype=torch.bfloat16)
    for shape in ((1, 512), (7, 512), (3, 50, 512), (1000, 512)):
        x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        y = quantized_linear(x, weight, bias, scale, FORMATS[activation])
        rounded = fake_quantize(x.float().cpu(), FORMATS[activation], scale=None if scale is None else scale.cpu())
        exact = rounded.cuda().double() @ weight.dequantize(torch.float64).T + bias.double()
        assert y.shape == (*shape[:-1], 272)
        assert float((y.double() - exact).norm() / exact.norm()) < 2**-7
