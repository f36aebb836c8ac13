"""The kernels of silu(gate) · up in training, interpreted, compute PyTorch's values and gradients."""

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton", reason="comes with a CUDA build of torch, or: pip install triton")

from interpreter import interpreted

from quant.kernels.training import grouped_fp8 as ops_of_swiglu
from quant.kernels.training.portable_grouped_fp8 import swiglu, swiglu_backward


def expected(dy: torch.Tensor, both: torch.Tensor) -> list[torch.Tensor]:
    """The product and its gradients, in float64 by autograd."""
    both = both.double().requires_grad_()
    gate, up = both.chunk(2, 1)
    y = functional.silu(gate) * up
    y.backward(dy.double())
    return [y.detach(), both.grad]  # type: ignore[list-item]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_and_gradients_are_those_of_autograd(dtype: torch.dtype) -> None:
    both, dy = (torch.randn(5, 2 * 1100) * 3).to(dtype), torch.randn(5, 1100).to(dtype)
    with interpreted():
        got = [swiglu(both), swiglu_backward(dy, both)]
    ops = torch.ops.quant
    for way in (got, [ops.swiglu(both), ops.swiglu_backward(dy, both)]):
        for tensor, exact in zip(way, expected(dy, both), strict=True):
            # Each value is rounded three times.
            error = 3 * 2.0**-8 if dtype is torch.bfloat16 else 1e-5
            assert tensor.dtype is dtype and torch.allclose(tensor.double(), exact, rtol=error, atol=error / 8)


def test_the_ops_are_what_compilers_are_told() -> None:
    assert ops_of_swiglu is not None
    both = torch.randn(4, 32)
    torch.library.opcheck(torch.ops.quant.swiglu.default, (both,))
    torch.library.opcheck(torch.ops.quant.swiglu_backward.default, (torch.randn(4, 16), both))


@pytest.mark.gpu
def test_on_a_gpu_values_are_those_of_pytorch() -> None:
    both, dy = (torch.randn(300, 2 * 3000) * 3).bfloat16().cuda(), torch.randn(300, 3000).bfloat16().cuda()
    ops = torch.ops.quant
    for got, exact in zip([ops.swiglu(both), ops.swiglu_backward(dy, both)], expected(dy, both), strict=True):
        assert torch.allclose(got.double(), exact, rtol=3 * 2.0**-8, atol=2e-3)
