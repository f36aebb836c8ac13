"""The kernels that find the second-level scale of fused weights, interpreted, give the oracle's, bit for bit."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="comes with a CUDA build of torch, or: pip install triton")

from assembler import assemble
from interpreter import interpreted

from quant.formats.format import FORMATS
from quant.formats.tensor import quantize
from quant.kernels.base.ptx import compile_kernel
from quant.kernels.training import portable_fake_rounding

NVFP4 = FORMATS["nvfp4"]


def weights(dtype: torch.dtype) -> list[torch.Tensor]:
    """Of several sizes, one of them no whole number of runs, the largest value in the last place of all."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(rows, 320, generator=generator) * size for rows, size in ((37, 1.0), (64, 3e-4), (26, 0.5))]
    made[2][-1, -1] = -7.7
    return [weight.to(dtype) for weight in made]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("count", [1, 3])
def test_it_is_that_of_all_weights_together(dtype: torch.dtype, count: int) -> None:
    given = weights(dtype)[-count:]
    with interpreted():
        found = portable_fake_rounding.global_scale(given, NVFP4)
    expected = quantize(torch.cat(given), NVFP4).global_scale
    assert expected is not None and torch.equal(found, 1 / (1 / expected))


@pytest.mark.parametrize(("value", "expected"), [(0.0, 1.0), (torch.nan, torch.nan), (torch.inf, torch.nan)])
def test_zeros_have_scale_one_and_what_is_not_finite_none(value: float, expected: float) -> None:
    first, second = torch.zeros(4, 64), torch.zeros(4, 64)
    second[1, 2] = value
    with interpreted():
        found = portable_fake_rounding.global_scale([first, second], NVFP4)
    torch.testing.assert_close(found, torch.tensor(expected), equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("arch", [89, 90, 120])
def test_compiles_without_scratch_memory(arch: int) -> None:
    kernels = (
        (
            portable_fake_rounding.amax_kernel,
            {"weight": "*bf16", "largest": "*i32", "count": "i32"},
            {"block": 8192},
            8,
        ),
        (portable_fake_rounding.global_scale_kernel, {"largest": "*i32", "out": "*fp32"}, {"unit": 2688.0}, 1),
    )
    for kernel, signature, constants, warps in kernels:
        compiled = compile_kernel(kernel, signature, constants, arch=arch, num_warps=warps, num_stages=1)
        assert assemble(compiled).spilled == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_on_a_gpu_it_is_the_one_of_the_cpu(dtype: torch.dtype) -> None:
    from quant.kernels.training.fake_rounding import measured_global_scale

    given = [*weights(dtype), torch.full((300, 4096), 2.5, dtype=dtype).t()]
    assert torch.equal(
        measured_global_scale([w.cuda() for w in given], NVFP4).cpu(), measured_global_scale(given, NVFP4)
    )
