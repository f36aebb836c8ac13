"""The FP8 block matmul is compared with float64 by the interpreter, and compiled to FP8 tensor-core instructions."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="comes with a CUDA build of torch, or: pip install triton")

from assembler import assemble
from interpreter import interpreted

from quant.formats.format import FORMATS
from quant.formats.tensor import quantize
from quant.kernels.base.ptx import CompiledKernel
from quant.kernels.linear import portable_block_scaled_gemm as kernels


@pytest.mark.parametrize("shape", [(5, 77, 203), (130, 300, 512), (1, 128, 128), (260, 129, 96)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_against_float64(shape: tuple[int, int, int], with_bias: bool) -> None:
    tokens, rows, columns = shape
    # Blocks of very different sizes: a scale taken from the wrong place cannot go unseen.
    sizes = torch.randn(rows, columns).mul(3).exp()
    x = quantize(torch.randn(tokens, columns) * torch.randn(tokens, 1).exp(), FORMATS["fp8_group"])
    weight = quantize(torch.randn(rows, columns) * sizes, FORMATS["fp8_block"])
    bias = torch.randn(rows) if with_bias else None
    with interpreted():
        y = kernels.fp8_block_gemm(x, weight, bias, torch.float32)
    left, right = x.dequantize(torch.float64), weight.dequantize(torch.float64)
    exact, magnitude = left @ right.T, left.abs() @ right.abs().T
    if bias is not None:
        exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
    assert bool(((y.double() - exact).abs() <= magnitude * 1e-6).all())


def test_mistakes_name_both_sides() -> None:
    x, weight = quantize(torch.randn(4, 128), FORMATS["fp8_group"]), quantize(torch.randn(4, 128), FORMATS["fp8_block"])
    with pytest.raises(ValueError, match="fp8_block by fp8_group: expected fp8_group by fp8_block"):
        kernels.fp8_block_gemm(weight, x, None, torch.bfloat16)
    with pytest.raises(ValueError, match=r"x \[4, 128\] by \[4, 256\]: the widths differ"):
        kernels.fp8_block_gemm(x, quantize(torch.randn(4, 256), FORMATS["fp8_block"]), None, torch.bfloat16)


@pytest.mark.parametrize(
    ("tokens", "shape", "dtype", "device"),
    [
        (64, (256, 512), torch.bfloat16, "cpu"),
        (64, (200, 512), torch.bfloat16, "cuda"),
        (64, (256, 384), torch.bfloat16, "cuda"),
        (64, (256, 512), torch.float16, "cuda"),
        (0, (256, 512), torch.bfloat16, "cuda"),
    ],
)
def test_the_library_is_not_asked_for_what_it_gets_wrong(
    tokens: int, shape: tuple[int, int], dtype: torch.dtype, device: str
) -> None:
    x: Any = SimpleNamespace(shape=(tokens, shape[1]), is_cuda=device == "cuda", device=torch.device(device))
    assert not kernels.cublas_takes(x, shape, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 66, 130, 1024])
@pytest.mark.parametrize("shape", [(256, 512), (384, 1024), (1024, 14336), (200, 384)])
def test_on_a_gpu(tokens: int, shape: tuple[int, int]) -> None:
    """Through the library where it takes the shape, and through the kernel: both against float64."""
    rows, columns = shape
    sizes = torch.randn(-(-rows // 128), -(-columns // 128), device="cuda").exp()
    sizes = sizes.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
    weight = quantize(torch.randn(rows, columns, device="cuda") * sizes, FORMATS["fp8_block"])
    x = quantize(torch.randn(tokens, columns, device="cuda"), FORMATS["fp8_group"])
    bias = torch.randn(rows, device="cuda", dtype=torch.bfloat16)
    exact = x.dequantize(torch.float64) @ weight.dequantize(torch.float64).T + bias.double()
    for y in (
        kernels.fp8_block_gemm(x, weight, bias, torch.bfloat16),
        kernels.by_triton(x, weight, bias, torch.bfloat16),
    ):
        assert float((y.double() - exact).norm() / exact.norm()) < 2**-7
    takes = kernels.cublas_takes(x.codes, shape, torch.bfloat16)
    assert not takes or shape[1] % 512 == 0


@pytest.mark.parametrize(("arch", "instruction"), [(90, "f32.e4m3.e4m3"), (100, "tcgen05.mma"), (120, "e4m3.e4m3.f32")])
def test_compiles_to_fp8_instructions_without_spills(arch: int, instruction: str) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = kernels.fp8_block_gemm_kernel
    given = {"x": "*fp8e4nv", "x_scale": "*fp32", "codes": "*fp8e4nv", "scale": "*fp32", "bias": "*bf16", "y": "*bf16"}
    given |= {"M": "i32", "N": "i32", "K": "i32"}
    names = kernel.arg_names
    types = {name: given.get(name, "constexpr") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in given and name != "M"}
    constants = {"has_bias": False, **kernels.TILES}
    source = ASTSource(kernel, types, constexprs={(names.index(n),): v for n, v in constants.items()}, attrs=aligned)
    options = {"num_warps": kernels.WARPS, "num_stages": kernels.pipeline_depth(arch)}
    result = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"enable_fp_fusion": True, **options})
    assert instruction in result.asm["ptx"]
    compiled = CompiledKernel(kernel.__name__, result.asm["ptx"], arch, (), kernels.WARPS, result.metadata.shared)
    assert assemble(compiled).spilled == 0
