"""These kernels sum the rows of each token's experts, weighted by the router, and compute the gradients of that.

    rows [rows, H], positions [tokens · k] ─▶ a program for a piece of a token ─▶ Σ weight · rows[position]
    dy [tokens, H], rows, slots [rows]     ─▶ a program for each row ─▶ weight · dy[token], and Σ dy[token] · row

Each row is read once, and once written in the backward pass. PyTorch's operations copy all rows for the gather, the
product and the scatter.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from quant.kernels.base.launch_cache import CachedLaunch
from quant.kernels.portable.expert_rows import weigh_kernel


@triton.jit
def weigh_backward_kernel(
    dy, rows, slots, weights, d_rows, d_weights, count, H, per_token: tl.constexpr, width: tl.constexpr
):
    """Computes the gradients of one row and of its weight; a row with the slot `count` belongs to no token."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    has_token = slot < count
    token = slot // per_token
    weight = tl.load(weights + slot, mask=has_token, other=0.0).to(tl.float32)
    products = tl.zeros((width,), tl.float32)
    for start in range(0, H, width):
        column = start + tl.arange(0, width)
        inside = (column < H) & has_token
        gradient = tl.load(dy + token * H + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(d_rows + row * H + column, (weight * gradient).to(d_rows.dtype.element_ty), mask=column < H)
        products += tl.load(rows + row * H + column, mask=inside, other=0.0).to(tl.float32) * gradient
    tl.store(d_weights + slot, tl.sum(products, 0).to(d_weights.dtype.element_ty), mask=has_token)


def weigh_rows(
    rows: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor | None, tokens: int, dtype: torch.dtype
) -> torch.Tensor:
    """Returns the sums `[tokens, H]`, in FP32 until the end; without weights, plain ones."""
    rows, H = rows.contiguous(), rows.shape[1]
    out = torch.empty(tokens, H, dtype=dtype, device=rows.device)
    if out.numel():
        factors = rows if weights is None else weights.contiguous()
        _launch(tokens, H, len(positions) // tokens, weights is not None)(rows, positions, factors, out, H)
    return out


def weigh_rows_backward(
    dy: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the gradients of the rows and of the weights `[tokens, k]`."""
    dy, weights, rows = dy.contiguous(), weights.contiguous(), rows.contiguous()
    d_rows, d_weights = torch.empty_like(rows), torch.zeros_like(weights)
    if rows.numel():
        launch = _launch_backward(*rows.shape, weights.shape[1])
        launch(dy, rows, slots, weights, d_rows, d_weights, weights.numel(), rows.shape[1])
    return d_rows, d_weights


@lru_cache(maxsize=1024)
def _launch(tokens: int, H: int, per_token: int, weighted: bool) -> CachedLaunch:
    constants = {"weighted": weighted, "per_token": per_token, "width": 1024, "overlap": False, "num_warps": 4}
    return CachedLaunch(weigh_kernel, (tokens * triton.cdiv(H, 1024),), constants)


@lru_cache(maxsize=1024)
def _launch_backward(rows: int, H: int, per_token: int) -> CachedLaunch:
    width = min(triton.next_power_of_2(H), 2048)
    constants = {"per_token": per_token, "width": width, "num_warps": 4}
    return CachedLaunch(weigh_backward_kernel, (rows,), constants)
