"""Kernels that start before the one before them has ended, on Hopper and later ("programmatic dependent launch").

    kernel N     ├─ start_next ──────────── work ────────┤
    kernel N+1      ├─ start_next, what depends on nobody ┊ wait_for_previous ── work ──┤

A step of decoding is hundreds of launches of a few microseconds. Between two of them lies a microsecond in which the
GPU does nothing, and a matmul that waits for a norm could fetch its weight meanwhile. Each kernel here lets the next
one start at once, reads what no kernel that does so writes (weights, block tables), waits, and only then the rest.
Waiting means until the kernel before it has ended, which itself waited: so everything earlier has ended too, and
memory may be used again in the order of launches, as ever.

A kernel that does neither, PyTorch's own for example, is not overlapped: the next one starts when it has ended.
"""

from __future__ import annotations

import torch
import triton
from triton.language.extra import cuda

from quant.kernels import hardware


@triton.jit
def start_next():
    """Lets the next kernel start as soon as every program of this one has got here."""
    cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous():
    """Waits until the kernel before this one has ended and what it wrote is seen."""
    cuda.gdc_wait()


def overlap_options(x: torch.Tensor) -> dict[str, bool]:
    """The kernel's `overlap` and the launch's option for it, for operands that lie where x does."""
    able = x.is_cuda and hardware.current(x.device.index or 0).arch >= 90
    return {"overlap": True, "launch_pdl": True} if able else {"overlap": False}
