"""Look-ups in quantized tables equal rows of the dequantized table exactly, interpreted and on a GPU."""

import pytest
import torch
from torch import nn

from quant.formats.format import FORMATS, GGUF_FORMATS
from quant.formats.tensor import BlockScaledTensor, quantize
from quant.kernels.linear.embedding import QuantEmbedding, embedding_refusal, quantized_embedding
from quant.kernels.linear.quant_linear import quantized_linear

IDS = torch.tensor([[0, 299, 7], [7, 128, 127]])


def table(format: str, device: str = "cpu", columns: int = 160) -> BlockScaledTensor:
    """Rows of very different sizes: a scale taken from another row cannot go unseen."""
    values = torch.randn(300, columns, device=device) * torch.randn(300, 1, device=device).exp()
    return quantize(values.bfloat16(), FORMATS[format])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("columns", [160, 203])
def test_rows_are_those_of_the_dequantized_table(format: str, columns: int) -> None:
    weight = table(format, columns=columns)
    for dtype in (torch.float32, torch.bfloat16):
        module = QuantEmbedding(weight).to(dtype)
        y = module(IDS)
        assert y.dtype is dtype and torch.equal(y, weight.dequantize(dtype)[IDS])
        assert torch.equal(module(IDS[0, 0]), y[0, 0])
    assert QuantEmbedding(weight)(IDS[:0]).shape == (0, 3, columns)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("columns", [160, 203])
def test_the_kernel_interpreted(format: str, columns: int) -> None:
    pytest.importorskip("triton", reason="comes with a CUDA build of torch, or: pip install triton")
    from interpreter import interpreted

    from quant.kernels.linear.portable_codes_gemm import look_up

    weight = table(format, columns=columns)
    with interpreted():
        assert torch.equal(look_up(IDS, weight, torch.bfloat16), weight.dequantize(torch.bfloat16)[IDS])


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
def test_on_a_gpu(format: str) -> None:
    for columns in (160, 203, 4096):
        weight = table(format, "cuda", columns)
        for dtype in (torch.bfloat16, torch.float16):
            y = QuantEmbedding(weight, dtype)(IDS.cuda())
            assert torch.equal(y, weight.dequantize(dtype)[IDS.cuda()])


@pytest.mark.gpu
@pytest.mark.parametrize("format", GGUF_FORMATS)
def test_formats_of_llama_cpp_on_a_gpu(format: str) -> None:
    weight = quantize(torch.randn(300, 512, device="cuda"), GGUF_FORMATS[format])
    for dtype in (torch.bfloat16, torch.float16):
        y = quantized_embedding(IDS.cuda(), weight, dtype)
        assert torch.equal(y, weight.dequantize(dtype)[IDS.cuda()])
    x = torch.randn(5, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    quantized_linear(x, weight).float().sum().backward()
    torch.testing.assert_close(x.grad.float(), weight.dequantize().sum(0).expand(5, -1), rtol=2e-2, atol=0.5)


def test_codes_survive_casts_and_the_op_is_traced() -> None:
    module = QuantEmbedding(table("nvfp4"), torch.bfloat16)
    codes = module.codes.clone()
    module.half()
    assert torch.equal(module.codes, codes) and module(IDS).dtype is torch.float16
    weight = module.stored_weight
    arguments = (IDS, weight.codes, weight.scale, weight.global_scale, "nvfp4", 160, torch.float16)
    torch.library.opcheck(torch.ops.quant.embedding.default, arguments, test_utils="test_faketensor")


def test_mistakes_name_the_argument() -> None:
    with pytest.raises(ValueError, match=r"embedding of \[300, 160\]: ids are torch\.float32, expected int32 or int64"):
        quantized_embedding(torch.zeros(2), table("fp8"), torch.float32)
    with pytest.raises(ValueError, match="ids are on meta, codes on cpu"):
        quantized_embedding(IDS.to("meta"), table("fp8"), torch.float32)
    for beyond in (300, -1):  # as nn.Embedding does
        with pytest.raises(IndexError):
            quantized_embedding(torch.tensor([7, beyond]), table("fp8"), torch.float32)


def test_only_a_plain_look_up_is_replaced() -> None:
    class Scaled(nn.Embedding):
        pass

    assert embedding_refusal(nn.Embedding(3, 4)) == ""
    assert embedding_refusal(Scaled(3, 4)) == "it is a Scaled, which does more than look up"
    assert embedding_refusal(nn.Embedding(3, 4, max_norm=1.0)) == "it renormalizes rows as they are read"


@pytest.mark.parametrize("arch", [90, 120])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp6", "fp8_block"])
def test_compiles_without_spills(arch: int, format: str) -> None:
    pytest.importorskip("triton", reason="comes with a CUDA build of torch, or: pip install triton")
    from assembler import assemble

    from quant.kernels.base.ptx import compile_kernel
    from quant.kernels.linear.portable_codes_gemm import codes_embedding_kernel, format_constants

    form = FORMATS[format]
    constants = {**format_constants(form), "has_global": form.global_scale, "width": 1024}
    types = {"ids": "*i64", "codes": "*u8" if form.element.bits < 8 else "*fp8e4nv", "global_scale": "*fp32"}
    types |= {"scale": {"E4M3": "*fp8e4nv", "FP32": "*fp32"}.get(form.scale.name.upper(), "*u8"), "out": "*bf16"}
    signature = {name: types.get(name, "i32") for name in codes_embedding_kernel.arg_names if name not in constants}
    compiled = compile_kernel(codes_embedding_kernel, signature, constants, arch=arch, num_warps=4, num_stages=1)
    assert assemble(compiled).spilled == 0
