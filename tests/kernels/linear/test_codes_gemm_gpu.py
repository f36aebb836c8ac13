"""The kernels on a GPU are compared with float64 through the ops: odd sizes, CUDA graphs, each argument wrong once."""

import warnings

import pytest
import torch

from quant.formats.format import FORMATS, Format
from quant.formats.tensor import BlockScaledTensor, fake_quantize, quantize
from quant.kernels.base.hardware import current
from quant.kernels.base.weight_layout import prepack, restore
from quant.kernels.linear import dispatch, tiles
from quant.kernels.linear.quant_linear import quantized_linear

pytestmark = pytest.mark.gpu

TOKENS = (1, 5, 33, 100, 700)


def close_to_float64(y: torch.Tensor, x: torch.Tensor, weight: BlockScaledTensor, bias: torch.Tensor | None) -> None:
    """Each product carries one rounding of the weight, the sum those of float32, the result one more."""
    unit = torch.finfo(y.dtype).eps / 2
    dense = weight.dequantize(torch.float64)
    exact, magnitude = x.double() @ dense.T, x.double().abs() @ dense.abs().T
    if bias is not None:
        exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
    bound = magnitude * (unit + x.shape[-1] * 2.0**-23) + exact.abs() * 2 * unit + 1e-30
    worst = float(((y.double() - exact).abs() / bound).max())
    assert worst <= 1, f"error is {worst:.3g} times the bound"


def weight_in(format: Format, rows: int, columns: int) -> BlockScaledTensor:
    return quantize(torch.randn(rows, columns, device="cuda"), format)


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_against_float64(format: str) -> None:
    for rows, columns in ((256, 512), (77, 203)):
        weight = weight_in(FORMATS[format], rows, columns)
        for dtype in (torch.bfloat16, torch.float16):
            bias = torch.randn(rows, device="cuda", dtype=dtype)
            for tokens in TOKENS:
                x = torch.randn(tokens, columns, device="cuda", dtype=dtype)
                y = quantized_linear(x, weight, bias)
                assert y.dtype is dtype
                close_to_float64(y, x, weight, bias)


@pytest.mark.parametrize("tokens", TOKENS)
def test_prepacked_nvfp4_against_float64(tokens: int) -> None:
    if not current().has_wgmma:
        pytest.skip("the prepacked layout is Hopper's")
    for rows, columns in ((256, 512), (4096, 4096), (192, 14336), (576, 1600), (64, 64)):
        weight = weight_in(FORMATS["nvfp4"], rows, columns)
        packed = prepack(weight)
        assert torch.equal(restore(packed).codes, weight.codes)
        x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
        bias = torch.randn(rows, device="cuda", dtype=torch.bfloat16)
        close_to_float64(quantized_linear(x, packed, bias), x, weight, bias)
        half = x.half()
        close_to_float64(quantized_linear(half, packed), half, weight, None)


@pytest.mark.parametrize("format", ["mxfp6", "mxfp6_e3m2"])
def test_widened_mxfp6_against_float64(format: str) -> None:
    for rows, columns in ((256, 512), (77, 224)):
        weight = weight_in(FORMATS[format], rows, columns)
        packed = prepack(weight)
        assert torch.equal(restore(packed).codes, weight.codes)
        for tokens in TOKENS:
            x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
            close_to_float64(quantized_linear(x, packed), x, weight, None)


def test_every_prepacked_code_at_every_scale() -> None:
    """By the identity: y is the weight, exactly, for element times scale fits in BF16."""
    if not current().has_wgmma:
        pytest.skip("the prepacked layout is Hopper's")
    codes = torch.arange(256, dtype=torch.uint8, device="cuda").repeat(128, 1)[:, :64].contiguous()
    codes[64:] = torch.arange(128, 192, dtype=torch.uint8, device="cuda")
    scale = (torch.arange(1024, device="cuda").view(128, 8) % 0x7E + 1).to(torch.uint8).view(torch.float8_e4m3fn)
    weight = BlockScaledTensor(codes, scale, FORMATS["nvfp4"], (128, 128), torch.ones((), device="cuda"))
    packed, exact = prepack(weight), weight.dequantize(torch.bfloat16)
    eye = torch.eye(128, device="cuda", dtype=torch.bfloat16)
    for block_m, launches in tiles.GLUON_LAUNCHES.items():
        for warps, resident, depth in launches:
            choice = tiles.gluon_tiles(block_m, warps, resident, current(), depth)
            assert torch.equal(dispatch.multiply_with(eye, packed, None, choice), exact.T)
    assert torch.equal(dispatch.dequantize(packed, torch.bfloat16), exact)


def test_prefill_in_fp8_is_the_product_of_the_rounded_sides() -> None:
    """Where the plan has 8-bit activations: E4M3 by E4M3 with a scale a row on both sides."""
    if not current().has_wgmma:
        pytest.skip("the prepacked layout is Hopper's")
    from quant.kernels.linear.sm90_decode import prepacked_to_e4m3

    for rows, columns in ((256, 576), (4096, 4096)):
        weight = weight_in(FORMATS["nvfp4"], rows, columns)
        packed = prepack(weight)
        codes, scale = prepacked_to_e4m3(packed)
        dense = weight.dequantize(torch.float64)
        again = codes.double() * scale.double()[:, None]
        # Half a unit in the last of four bits, and that of the smallest subnormal.
        assert bool(((again - dense).abs() <= dense.abs() / 16 + scale.double()[:, None] * 2.0**-10).all())
        x = torch.randn(700, columns, device="cuda", dtype=torch.bfloat16)
        bias = torch.randn(rows, device="cuda", dtype=torch.bfloat16)
        y = quantized_linear(x, packed, bias, activation=FORMATS["fp8_token"])
        exact = fake_quantize(x, FORMATS["fp8_token"]).double() @ again.T + bias.double()
        assert float((y.double() - exact).norm() / exact.norm()) < 2**-8
        oracle = x.double() @ dense.T + bias.double()
        assert float((y.double() - oracle).norm() / oracle.norm()) < 0.05
        # With few tokens the weight keeps its own values.
        few = quantized_linear(x[:9], packed, bias, activation=FORMATS["fp8_token"])
        close_to_float64(few, fake_quantize(x[:9], FORMATS["fp8_token"]), weight, bias)


@pytest.mark.parametrize("tokens", [3, 64, 130])
@pytest.mark.parametrize("prepacked", [False, True], ids=["as stored", "prepacked"])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_all_candidates_agree(format: str, prepacked: bool, tokens: int) -> None:
    if prepacked and not current().has_wgmma:
        pytest.skip("weights are prepacked for Hopper's wgmma only")
    weight = weight_in(FORMATS[format], 1024, 2048)
    layout = prepack(weight) if prepacked else weight
    x = torch.randn(tokens, 2048, device="cuda", dtype=torch.bfloat16)
    for choice in tiles.candidates(weight.format, tokens, (1024, 2048), current(), prepacked):
        close_to_float64(dispatch.multiply_with(x, layout, None, choice), x, weight, None)


def test_a_graph_replays_with_new_values() -> None:
    weight = weight_in(FORMATS["mxfp8"], 512, 1024)
    x = torch.randn(2, 1024, device="cuda", dtype=torch.bfloat16)
    quantized_linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = quantized_linear(x, weight)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        close_to_float64(y, x, weight, None)


def test_strided_and_misaligned_inputs() -> None:
    weight = weight_in(FORMATS["nvfp4"], 256, 512)
    wide = torch.randn(40, 1100, device="cuda", dtype=torch.bfloat16)
    for x in (wide[:, 3:515], wide[::2, 8:520], wide.T[:512].T, wide[:1, :512].expand(9, 512)):
        close_to_float64(quantized_linear(x, weight), x, weight, None)
    assert quantized_linear(wide[:0, :512], weight).shape == (0, 256)


def test_an_activation_format_rounds_the_input() -> None:
    weight = weight_in(FORMATS["nvfp4"], 256, 512)
    x = torch.randn(9, 512, device="cuda", dtype=torch.bfloat16)
    form = FORMATS["nvfp4"]
    y = quantized_linear(x, weight, activation=form)
    close_to_float64(y, fake_quantize(x, form), weight, None)


def test_fp8_blocks_by_fp8_groups() -> None:
    weight = weight_in(FORMATS["fp8_block"], 1024, 2048)
    for tokens in (100, 513):
        x = torch.randn(tokens, 2048, device="cuda", dtype=torch.bfloat16)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a kernel that is not trusted says so
            y = quantized_linear(x, weight, activation=FORMATS["fp8_group"])
        exact = fake_quantize(x.float(), FORMATS["fp8_group"]).double() @ weight.dequantize(torch.float64).T
        assert float((y.double() - exact).norm() / exact.norm()) < 2**-8


def test_wrong_arguments_are_named_before_a_launch() -> None:
    weight = weight_in(FORMATS["nvfp4"], 256, 512)
    x = torch.randn(4, 512, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"bias has shape \[255\], expected \[256\]"):
        quantized_linear(x, weight, torch.zeros(255, device="cuda", dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="scale is on cpu, x on cuda"):
        quantized_linear(
            x, BlockScaledTensor(weight.codes, weight.scale.cpu(), weight.format, weight.shape, weight.global_scale)
        )
    wide = torch.zeros(256, 512, dtype=torch.uint8, device="cuda")[:, ::2]
    with pytest.raises(ValueError, match="codes is not contiguous"):
        quantized_linear(x, BlockScaledTensor(wide, weight.scale, weight.format, weight.shape, weight.global_scale))
    short = weight.codes[:, :255].contiguous()
    with pytest.raises(ValueError, match=r"codes has shape \[256, 255\]"):
        quantized_linear(x, BlockScaledTensor(short, weight.scale, weight.format, weight.shape, weight.global_scale))
    with pytest.raises(ValueError, match="global_scale is missing"):
        quantized_linear(x, BlockScaledTensor(weight.codes, weight.scale, weight.format, weight.shape))


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8", "mxfp4", "fp8", "fp8_token", "fp8_group", "int8_token"])
def test_quantized_rows_are_those_of_the_oracle(format: str) -> None:
    from quant.kernels.rounding import portable_casts

    form = FORMATS[format]
    x = (torch.randn(300, 4096, device="cuda") * torch.randn(300, 1, device="cuda").exp()).bfloat16()
    x[7] = 0
    # The oracle on the CPU: on a GPU, PyTorch divides by a number by multiplying with its rounded reciprocal.
    assert torch.equal(portable_casts.quantize(x, form).dequantize().cpu(), fake_quantize(x.float().cpu(), form))
    static = torch.tensor(0.01, device="cuda")
    known = {"scale": static} if form.block == (0, 0) else {"global_scale": static} if form.global_scale else {}
    got = portable_casts.quantize(x, form, **known).dequantize().cpu()
    expected = fake_quantize(x.float().cpu(), form, **{name: value.cpu() for name, value in known.items()})
    assert torch.equal(got, expected)
