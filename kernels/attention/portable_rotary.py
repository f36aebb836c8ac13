"""Between a server's matmul of q, k, v and its attention, queries and keys are rotated and keys and values stored.

    rotate       q, k ─▶ each head turned by the angles of its token's position
    store_rows   k, v ─▶ the slots of a paged cache in 16 bit

Both read columns of the matmul's output where they lie. `rotate_and_store` (`decoder_step.py`) does both at once where
one function sees q, k, v and the cache; vLLM hides the cache from its graph, where the rotation is a step of its own.
Each is launched before the previous kernel has ended (`dependent_launch.py`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quant.kernels.base.portable_dependent_launch import overlap_options, start_next, wait_for_previous

_HEADS = 8
"""Heads of one program: enough for a coalesced access, few enough that one token occupies several SMs."""


@triton.jit
def _rotate_heads(source, target, c, s, first, heads, half: tl.constexpr, width: tl.constexpr, block: tl.constexpr):
    """Rotates `block` heads from `first` on, but none beyond `heads`, by angles of the cosines c and sines s."""
    dtype: tl.constexpr = target.dtype.element_ty
    column = tl.arange(0, width)
    head = first + tl.arange(0, block)
    inside = (head < heads)[:, None] & (column < half)[None, :]
    offset = head[:, None] * (2 * half) + column[None, :]
    low = tl.load(source + offset, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + offset + half, mask=inside, other=0.0).to(tl.float32)
    # One rounding at the end, as torch.compile makes of vLLM's own lines.
    tl.store(target + offset, (low * c - high * s).to(dtype), mask=inside)
    tl.store(target + offset + half, (high * c + low * s).to(dtype), mask=inside)


@triton.jit
def rotate_kernel(
    q, k, positions, cache, q_out, k_out, q_stride, k_stride, heads, kv_heads,
    half: tl.constexpr, width: tl.constexpr, block: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Rotates `block` heads of one token: programs of q come first, then programs of k."""
    if overlap:
        start_next()
    token = tl.program_id(0).to(tl.int64)
    of_queries = tl.cdiv(heads, block)
    index = tl.program_id(1)
    # No kernel of a step writes positions or angles, so they are read while the matmul of q, k, v still runs. The sines
    # follow the cosines.
    column = tl.arange(0, width)
    cosines = cache + tl.load(positions + token).to(tl.int64) * (2 * half) + column
    c = tl.load(cosines, mask=column < half, other=0.0).to(tl.float32)[None, :]
    s = tl.load(cosines + half, mask=column < half, other=0.0).to(tl.float32)[None, :]
    if overlap:
        wait_for_previous()
    if index < of_queries:
        target = q_out + token * heads * (2 * half)
        _rotate_heads(q + token * q_stride, target, c, s, index * block, heads, half, width, block)
    else:
        target = k_out + token * kv_heads * (2 * half)
        first = (index - of_queries) * block
        _rotate_heads(k + token * k_stride, target, c, s, first, kv_heads, half, width, block)


@triton.jit
def store_rows_kernel(
    k, v, k_cache, v_cache, slots, k_stride, v_stride, page_stride, slot_stride, head_stride, page_size, heads,
    dim: tl.constexpr, width: tl.constexpr, block: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """All heads of one token, unless its slot is negative."""
    if overlap:
        start_next()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if overlap:
        wait_for_previous()
    column = tl.arange(0, width)[None, :]
    head = tl.arange(0, block)[:, None]
    inside = (head < heads) & (column < dim) & (slot >= 0)
    source = head * dim + column
    target = slot // page_size * page_stride + slot % page_size * slot_stride + head * head_stride + column
    tl.store(k_cache + target, tl.load(k + token * k_stride + source, mask=inside), mask=inside)
    tl.store(v_cache + target, tl.load(v + token * v_stride + source, mask=inside), mask=inside)


def rotate(
    positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, cache: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns q and k rotated, contiguous: column i of a head pairs with column i + dim / 2.

    Args:
        positions: `[tokens]`, of an integer dtype.
        q, k: `[tokens, heads · dim]`, 16 bit, columns contiguous.
        cache: `[most positions, dim]`, cosines and then sines, in the dtype of q.
        dim: the number of columns of a head.
    """
    heads, kv_heads, half = q.shape[1] // dim, k.shape[1] // dim, dim // 2
    turned = q.new_empty(q.shape), k.new_empty(k.shape)
    if len(q):
        rotate_kernel[len(q), triton.cdiv(heads, _HEADS) + triton.cdiv(kv_heads, _HEADS)](
            q, k, positions, cache, *turned, q.stride(0), k.stride(0), heads, kv_heads, half=half,
            width=triton.next_power_of_2(half), block=_HEADS, num_warps=4, **overlap_options(q),
        )  # fmt: skip
    return turned


def store_rows(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Writes the keys and values of tokens to their slots of a paged cache.

    Args:
        k, v: `[tokens, heads, dim]`, heads contiguous; tokens beyond the slots are not written.
        k_cache, v_cache: `[pages, page size, heads, dim]` in the dtype of k, with equal strides, 1 along `dim`.
        slots: `[tokens]`, of an integer dtype: page · page size + offset in the page; negative writes nothing.
    """
    heads, dim = k.shape[1:]
    if len(slots):
        page_stride, slot_stride, head_stride, _ = k_cache.stride()
        store_rows_kernel[(len(slots),)](
            k, v, k_cache, v_cache, slots, k.stride(0), v.stride(0), page_stride, slot_stride, head_stride,
            k_cache.shape[1], heads, dim=dim, width=triton.next_power_of_2(dim), block=triton.next_power_of_2(heads),
            num_warps=4, **overlap_options(k),
        )  # fmt: skip
