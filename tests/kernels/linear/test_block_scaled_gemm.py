"""Blackwell's block-scaled matmul is compared with float64 by the interpreter, and compiled to its instructions."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="comes with a CUDA build of torch, or: pip install triton")

from assembler import assemble
from interpreter import interpreted
from slow_cases import quick_cases

from quant.formats.format import FORMATS
from quant.formats.tensor import quantize
from quant.kernels.base.ptx import CompiledKernel
from quant.kernels.linear import portable_block_scaled_gemm


def dot_scaled(self: Any, a: Any, a_scale: Any, _a: Any, b: Any, b_scale: Any, _b: Any, acc: Any, *_: Any) -> Any:
    """What the interpreter lacks, by ml_dtypes: both sides decoded, scaled and multiplied in float64."""
    from triton.language import tensor
    from triton.runtime.interpreter import TensorHandle

    def elements(handle: Any) -> np.ndarray:
        """[rows, K], codes along the last axis."""
        if "fp8" in str(handle.dtype):
            return np.asarray(handle.data).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        byte = np.asarray(handle.data).view(np.uint8)
        nibbles = np.stack([byte & 15, byte >> 4], -1).reshape(byte.shape[0], -1)
        return np.ascontiguousarray(nibbles).view(ml_dtypes.float4_e2m1fn).astype(np.float64)

    def scales(handle: Any, columns: int) -> np.ndarray:
        kind = ml_dtypes.float8_e4m3fn if "fp8" in str(handle.dtype) else ml_dtypes.float8_e8m0fnu
        values = np.ascontiguousarray(handle.data).view(kind).astype(np.float64)
        return np.repeat(values, columns // values.shape[1], 1)

    left = elements(a.handle)
    right = elements(TensorHandle(np.ascontiguousarray(np.asarray(b.handle.data).T), b.handle.dtype))
    left, right = left * scales(a_scale.handle, left.shape[1]), right * scales(b_scale.handle, right.shape[1])
    product = (left @ right.T + acc.handle.data).astype(np.float32)
    return tensor(TensorHandle(product, acc.handle.dtype.scalar), acc.type)


@contextmanager
def with_dot_scaled() -> Iterator[None]:
    from triton.language.semantic import TritonSemantic

    with interpreted(), patch.object(TritonSemantic, "dot_scaled", dot_scaled):
        yield


@pytest.mark.parametrize("format", portable_block_scaled_gemm.SCALED_FORMATS)
@pytest.mark.parametrize("shape", [(5, 77, 160), (130, 140, 512), (1, 300, 96)])
def test_against_float64(format: str, shape: tuple[int, int, int]) -> None:
    tokens, rows, columns = shape
    form = FORMATS[format]
    x, weight = quantize(torch.randn(tokens, columns), form), quantize(torch.randn(rows, columns), form)
    bias = torch.randn(rows)
    with with_dot_scaled():
        y = portable_block_scaled_gemm.block_scaled_gemm(x, weight, bias, torch.float32, offsets=None)
    exact = x.dequantize(torch.float64) @ weight.dequantize(torch.float64).T + bias.double()
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("format", portable_block_scaled_gemm.SCALED_FORMATS)
@pytest.mark.parametrize("counts", [(3, 0, 17), (0, 130, 1), (0, 0, 5)])
def test_grouped_against_float64(format: str, counts: tuple[int, ...]) -> None:
    form, tokens = FORMATS[format], sum(counts)
    # Experts of very different sizes: one taken for another cannot go unseen.
    sizes = torch.tensor([1.0, 50.0, 3000.0])[:, None, None]
    x, weight = quantize(torch.randn(tokens, 160), form), quantize(torch.randn(3, 77, 160) * sizes, form)
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    with with_dot_scaled():
        y = portable_block_scaled_gemm.block_scaled_gemm(x, weight, None, torch.float32, offsets=offsets)
    dense, start = weight.dequantize(torch.float64), 0
    for expert, count in enumerate(counts):
        rows = slice(start, start + count)
        exact = x.dequantize(torch.float64)[rows] @ dense[expert].T
        torch.testing.assert_close(y[rows].double(), exact, rtol=1e-5, atol=1e-5 * float(sizes[expert]))
        start += count


def test_mistakes_name_both_sides() -> None:
    nvfp4, mxfp8 = quantize(torch.randn(4, 64), FORMATS["nvfp4"]), quantize(torch.randn(4, 64), FORMATS["mxfp8"])
    with pytest.raises(ValueError, match="matmul of nvfp4 by mxfp8: expected one of nvfp4, mxfp4, mxfp8"):
        portable_block_scaled_gemm.block_scaled_gemm(nvfp4, mxfp8, None, torch.bfloat16, offsets=None)
    narrow = quantize(torch.randn(4, 40), FORMATS["nvfp4"])
    with pytest.raises(ValueError, match=r"x \[4, 40\] by \[4, 40\] in nvfp4: expected one width, a multiple of 16"):
        portable_block_scaled_gemm.block_scaled_gemm(narrow, narrow, None, torch.bfloat16, offsets=None)


INSTRUCTIONS = {
    ("nvfp4", 100): r"tcgen05\.mma\S*mxf4nvf4\.block_scale",
    ("nvfp4", 120): r"mma\.sync\S*mxf4nvf4\S*block_scale",
    ("mxfp4", 100): r"tcgen05\.mma\S*(mxf4|mxf8f6f4)\S*block_scale",
    ("mxfp8", 100): r"tcgen05\.mma\S*mxf8f6f4\.block_scale",
    ("mxfp8", 120): r"mma\.sync\S*mxf8f6f4\S*block_scale",
}


@pytest.mark.parametrize(
    ("format", "arch", "grouped"),
    quick_cases(
        ((*case, grouped) for case in INSTRUCTIONS for grouped in (False, True)),
        lambda format, arch, grouped: not grouped or (format, arch) in (("nvfp4", 100), ("mxfp8", 120)),
    ),
)
def test_compiles_to_block_scaled_instructions(format: str, arch: int, grouped: bool) -> None:
    import re

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    form, kernel = FORMATS[format], portable_block_scaled_gemm.block_scaled_gemm_kernel
    code = "*u8" if form.element.bits == 4 else "*fp8e4nv"
    scale = "*fp8e4nv" if form.global_scale else "*u8"
    given = {"x": code, "x_scale": scale, "x_global": "*fp32", "codes": code, "scale": scale, "w_global": "*fp32"}
    given |= {"bias": "*bf16", "y": "*bf16", "offsets": "*i32", "M": "i32", "N": "i32", "K": "i32", "experts": "i32"}
    constants = {"element": form.element.name, "block": form.block[1], "has_global": form.global_scale}
    constants |= {
        "has_bias": False,
        "grouped": grouped,
        "width": 64,
        **portable_block_scaled_gemm.tile_shape(form.element.bits, arch),
    }
    names = kernel.arg_names
    types = {name: given.get(name, "constexpr") for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name in given and name not in ("M", "experts")
    }
    source = ASTSource(kernel, types, constexprs={(names.index(n),): v for n, v in constants.items()}, attrs=aligned)
    result = triton.compile(
        source, target=GPUTarget("cuda", arch, 32), options={"num_warps": 8, "num_stages": 3, "enable_fp_fusion": True}
    )
    assert re.search(INSTRUCTIONS[format, arch], result.asm["ptx"])
    assert (
        assemble(CompiledKernel(kernel.__name__, result.asm["ptx"], arch, (), 8, result.metadata.shared)).spilled == 0
    )
