"""A kernel can start before the previous one has ended, on Hopper and later ("programmatic dependent launch").

    kernel N     ├─ start_next ──────────── work ────────┤
    kernel N+1      ├─ start_next, independent loads ──── ┊ wait_for_previous ── work ──┤

A decoding step launches hundreds of kernels of a few microseconds. Without overlap the GPU idles for a microsecond
between two of them, while a matmul that waits for a norm could already fetch its weight. Each kernel here lets the
next one start at once, prefetches data that no overlapped kernel writes (weights, block tables), waits for the
previous kernel, and then reads everything else. Waiting lasts until the previous kernel has ended, which itself waited
for its own: so all earlier kernels have ended too, and memory can be reused in launch order, as always.

A kernel that does neither, such as PyTorch's own, is not overlapped: the next one starts when it has ended.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from quant.kernels.base import hardware


@triton.jit
def start_next(overlap: tl.constexpr):
    """Lets the next kernel start once every program of this one has reached this point; nothing without `overlap`."""
    if overlap:
        cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(overlap: tl.constexpr):
    """Waits until the previous kernel has ended and its writes are visible; nothing without `overlap`."""
    if overlap:
        cuda.gdc_wait()


def overlap_options(x: Tensor) -> dict[str, bool]:
    """Returns the kernel's `overlap` argument and the matching launch option, for operands on the device of x."""
    # Only Hopper and later have the instructions; on a CPU the interpreter runs one kernel after another.
    able = x.is_cuda and hardware.current(x.device.index or 0).arch >= 90
    return {"overlap": True, "launch_pdl": True} if able else {"overlap": False}
