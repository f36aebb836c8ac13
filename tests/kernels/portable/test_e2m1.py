"""Quotients by a reciprocal in two parts round to the right E2M1 code; this part of it runs without a GPU."""

import pytest
import torch

pytest.importorskip("triton", reason="comes with a CUDA build of torch, or: pip install triton")

import triton
import triton.language as tl
from interpreter import interpreted

from quant.kernels.portable.e2m1 import in_two_parts


@triton.jit
def _divide(x, step, near, out, n: tl.constexpr):
    i = tl.arange(0, n)
    value = tl.load(x + i)
    inverse, rest = in_two_parts(tl.load(step + i), tl.load(near + i))
    tl.store(out + i, tl.fma(value, inverse, value * rest))


@pytest.mark.parametrize("tie", [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
@pytest.mark.parametrize("units", [-2, -1, 0, 1, 2])
def test_quotients_beside_a_tie_are_on_its_side(tie: float, units: int) -> None:
    """Of the numbers of 8 bits, the two beside a tie, with a first reciprocal that is some units off as a GPU's may be.

    Steps are next to those that make a tie of a number of 8 bits, which come closest, and of many other mantissas.
    """
    count = 1 << 15
    numbers = torch.arange(128, 256, dtype=torch.float64)[:, None]
    step = (numbers / tie).float().view(torch.int32) + torch.arange(-64, 64, dtype=torch.int32)
    step = torch.cat([step.view(torch.float32).flatten(), 1 + torch.rand(count // 2)]).double()
    unit = torch.exp2((step * tie).log2().floor() - 7)
    for x in ((step * tie / unit).floor() * unit, ((step * tie / unit).floor() + 1) * unit):
        near = ((1 / step).float().view(torch.int32) + units).view(torch.float32)
        out = torch.empty(count)
        with interpreted():
            _divide[(1,)](x.float(), step.float(), near, out, count)
        expected = (x / step).float()
        assert torch.equal((out - tie).sign(), (expected - tie).sign())
        assert torch.equal(x.float(), x.bfloat16().float())
