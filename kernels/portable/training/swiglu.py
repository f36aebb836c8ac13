"""This kernel computes the gradients of silu(gate) · up, which lie in one matrix, in one pass.

    dy [rows, width], both [rows, 2 · width] ─▶ [d gate, d up]

The forward kernel is the decoder's (`decoder_step.py`). Values are rounded where PyTorch's separate operations round
them; these write the halves apart, and then copy them into one matrix.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from quant.kernels.base.launch_cache import CachedLaunch
from quant.kernels.linear.portable_decoder_step import swiglu_kernel

_WIDTH = 1024


@triton.jit
def swiglu_backward_kernel(dy, both, out, K, width: tl.constexpr):
    """`width` columns of one row of both halves of `out`."""
    pieces = tl.cdiv(K, width)
    row = (tl.program_id(0) // pieces).to(tl.int64)
    column = tl.program_id(0) % pieces * width + tl.arange(0, width)
    inside = column < K
    dtype: tl.constexpr = both.dtype.element_ty
    start = row * 2 * K + column
    gate = tl.load(both + start, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + start + K, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(dy + row * K + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    silu = (gate * sigmoid).to(dtype).to(tl.float32)
    d_silu = (d * up).to(dtype).to(tl.float32)
    tl.store(out + start, (d_silu * sigmoid * (1.0 + gate * (1.0 - sigmoid))).to(dtype), mask=inside)
    tl.store(out + start + K, (d * silu).to(dtype), mask=inside)


def swiglu(both: torch.Tensor) -> torch.Tensor:
    """Returns silu(gate) · up, `[rows, width]`, of `[rows, 2 · width]`, gate first."""
    both, (rows, columns) = both.contiguous(), both.shape
    out = both.new_empty(rows, columns // 2)
    if out.numel():
        _launch(rows, columns // 2)(both, out, columns // 2)
    return out


def swiglu_backward(dy: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
    """Returns the gradients `[rows, 2 · width]`."""
    dy, both = dy.contiguous(), both.contiguous()
    out = torch.empty_like(both)
    if out.numel():
        _launch_backward(*dy.shape)(dy, both, out, dy.shape[1])
    return out


@lru_cache(maxsize=1024)
def _launch(rows: int, K: int) -> CachedLaunch:
    constants = {"gelu": False, "width": _WIDTH, "overlap": False, "num_warps": 4}
    return CachedLaunch(swiglu_kernel, (rows * triton.cdiv(K, _WIDTH),), constants)


@lru_cache(maxsize=1024)
def _launch_backward(rows: int, K: int) -> CachedLaunch:
    constants = {"width": _WIDTH, "num_warps": 4}
    return CachedLaunch(swiglu_backward_kernel, (rows * triton.cdiv(K, _WIDTH),), constants)
