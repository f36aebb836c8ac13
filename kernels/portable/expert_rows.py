"""Rows are sorted by expert before a grouped matmul, and weighted and added up again after it.

    index [tokens, k]   the experts of each token; a slot is one of its k choices

    place_rows   program a slot    slots before it in the order of experts ─▶ its row; the token's x is copied there
    weigh        program a piece of a token      Σ over its slots of weight · y[row of the slot]

This takes two launches, for servers, where a decoding step of a few tokens leaves no time for the dozen small kernels
of PyTorch's sort. Every program of `place_rows` reads all of `index`. With more than `FEW_SLOTS` slots, as in a
prompt, that would take longer than a launch, so two kernels share the work:

    count_rows   one program       slots of each expert ─▶ offsets [experts + 1], cursor [experts]
    move_rows    program a slot    atomic add on the expert's cursor ─▶ its row; the token's x is copied there

There a program takes the next free row of its expert, so the order within an expert differs from call to call; the
product of a row does not. Each kernel waits for the previous one (`dependent_launch.py`), whose results it reads.

Where experts are spread over several GPUs, `index` has numbers among all of them. A table `local` has the number of
each among this GPU's experts, or -1 for an expert that another GPU holds: its slots have no row here.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quant.kernels.base.portable_dependent_launch import overlap_options, start_next, wait_for_previous
from quant.kernels.linear.portable_grouped_gemm import MAX_EXPERTS

FEW_SLOTS = 1024
"""Up to this many slots one kernel routes them all."""


@triton.jit
def _copy_row(x, rows, token, row, K, x_stride, width: tl.constexpr):
    """Copies row `token` of x to `row` of `rows`."""
    source, target = x + token.to(tl.int64) * x_stride, rows + row.to(tl.int64) * K
    for start in range(0, K, width):
        column = start + tl.arange(0, width)
        tl.store(target + column, tl.load(source + column, mask=column < K), mask=column < K)


@triton.jit
def _load_experts(index, local, slot, inside, mapped: tl.constexpr):
    """Loads the experts of slots as numbers among this GPU's experts; -1 where `inside` is false."""
    chosen = tl.load(index + slot, mask=inside, other=-1).to(tl.int32)
    if mapped:
        chosen = tl.load(local + chosen, mask=chosen >= 0, other=-1).to(tl.int32)
    return chosen


@triton.jit(do_not_specialize=["slots", "experts"])
def place_rows_kernel(
    x, index, local, offsets, rows, places, slots, experts, K, x_stride, mapped: tl.constexpr, per_token: tl.constexpr,
    most: tl.constexpr, width: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """One slot, and one expert: the slot's token is copied to its row, and the expert's first row is counted.

    Rows are in the order of their experts, and of their slots within an expert; `most` is at least the slots.
    """
    if overlap:
        start_next()
        wait_for_previous()
    program = tl.program_id(0)
    slot = tl.arange(0, most)
    chosen = _load_experts(index, local, slot, slot < slots, mapped)
    valid = (chosen >= 0) & (chosen < experts)
    if program <= experts:
        tl.store(offsets + program, tl.sum((valid & (chosen < program)).to(tl.int32), axis=0))
    if program < slots:
        expert = _load_experts(index, local, program, program < slots, mapped)
        target_row = -1
        if (expert >= 0) & (expert < experts):
            before = valid & ((chosen < expert) | ((chosen == expert) & (slot < program)))
            target_row = tl.sum(before.to(tl.int32), axis=0)
            _copy_row(x, rows, program // per_token, target_row, K, x_stride, width)
        tl.store(places + program, target_row)


@triton.jit(do_not_specialize=["slots", "experts"])
def count_rows_kernel(
    index, local, offsets, cursor, slots, experts, mapped: tl.constexpr, width: tl.constexpr, block: tl.constexpr,
    overlap: tl.constexpr,
):  # fmt: skip
    """One program: the slots of each expert are counted. Cursors begin at the first row of each expert."""
    if overlap:
        start_next()
        wait_for_previous()
    expert = tl.arange(0, width)
    counts = tl.zeros((width,), dtype=tl.int32)
    for start in range(0, slots, block):
        slot = start + tl.arange(0, block)
        chosen = _load_experts(index, local, slot, slot < slots, mapped)
        valid = (chosen >= 0) & (chosen < experts)
        counts += tl.histogram(tl.where(valid, chosen, 0), width, mask=valid)
    # Experts follow one another without gaps; the last offset is the number of slots that have an expert.
    ends = tl.cumsum(counts, 0)
    tl.store(cursor + expert, ends - counts, mask=expert < experts)
    tl.store(offsets + expert, ends - counts, mask=expert < experts)
    tl.store(offsets + experts, tl.sum(counts, 0))


@triton.jit(do_not_specialize=["slots", "experts"])
def move_rows_kernel(
    x, index, local, cursor, rows, places, slots, experts, K, x_stride, mapped: tl.constexpr, per_token: tl.constexpr,
    width: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """One slot: its token is copied to the next free row of the slot's expert. A slot of no expert has the row -1."""
    if overlap:
        start_next()
        wait_for_previous()
    slot = tl.program_id(0)
    chosen = _load_experts(index, local, slot, slot < slots, mapped)
    target_row = -1
    if (chosen >= 0) & (chosen < experts):
        # The next free row of the expert, in whichever order programs arrive.
        target_row = tl.atomic_add(cursor + chosen, 1)
        _copy_row(x, rows, slot // per_token, target_row, K, x_stride, width)
    tl.store(places + slot, target_row)


@triton.jit
def weigh_kernel(
    y, places, weights, out, K, weighted: tl.constexpr, per_token: tl.constexpr, width: tl.constexpr,
    overlap: tl.constexpr,
):  # fmt: skip
    """One piece of a token: the rows of its slots, weighted and added in FP32 in the order of the slots."""
    if overlap:
        start_next()
        wait_for_previous()
    pieces = tl.cdiv(K, width)
    token = (tl.program_id(0) // pieces).to(tl.int64)
    column = tl.program_id(0) % pieces * width + tl.arange(0, width)
    total = tl.zeros((width,), dtype=tl.float32)
    # In the order of the slots, so that the sum does not depend on the order of rows.
    for slot in tl.static_range(per_token):
        row = tl.load(places + token * per_token + slot).to(tl.int64)
        value = tl.load(y + row * K + column, mask=(column < K) & (row >= 0), other=0.0).to(tl.float32)
        if weighted:
            value *= tl.load(weights + token * per_token + slot).to(tl.float32)
        total += value
    tl.store(out + token * K + column, total.to(out.dtype.element_ty), mask=column < K)


def route(
    x: torch.Tensor, index: torch.Tensor, experts: int, local: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the rows of x sorted by expert, the first row of each expert, and the place of each slot among the rows.

    Args:
        x: `[tokens, in]`, rows contiguous.
        index: expert of each token and slot, `[tokens, k]`, contiguous; a slot with no such expert has no row.
        experts: the number of experts, at most `MAX_EXPERTS`.
        local: for each number that `index` may have, the expert that it stands for, or -1 for none; contiguous
            integers, on the device of `index`. None: each stands for itself.

    Returns:
        Rows `[tokens · k, in]`, undefined beyond the last offset; offsets, int32 `[experts + 1]`;
        places, int32 `[tokens, k]`, -1 for a slot without a row.

    Raises:
        ValueError: arguments that do not fit each other.
    """
    tokens, per_token = index.shape
    if x.dim() != 2 or len(x) != tokens or x.stride(1) != 1 or not index.is_contiguous() or experts > MAX_EXPERTS:
        raise ValueError(f"route: x {list(x.shape)} and index {list(index.shape)} of {experts} experts do not fit")
    slots, columns = tokens * per_token, x.shape[1]
    rows, places = x.new_empty(slots, columns), torch.empty_like(index, dtype=torch.int32)
    offsets = places.new_empty(experts + 1)
    copy = {"per_token": per_token, "width": min(triton.next_power_of_2(columns), 4096), "num_warps": 4}
    numbers, options = index if local is None else local, {"mapped": local is not None, **overlap_options(x)}
    if slots <= FEW_SLOTS:
        # Sizes four times apart, so that few variants are compiled.
        most = next(size for size in (64, 256, FEW_SLOTS) if slots <= size)
        place_rows_kernel[max(slots, experts + 1),](
            x, index, numbers, offsets, rows, places, slots, experts, columns, x.stride(0), most=most, **copy, **options
        )  # fmt: skip
        return rows, offsets, places
    cursor, width = places.new_empty(experts), max(triton.next_power_of_2(experts), 32)
    count_rows_kernel[1,](
        index, numbers, offsets, cursor, slots, experts, width=width, block=2048, num_warps=8, **options
    )  # fmt: skip
    move_rows_kernel[slots,](
        x, index, numbers, cursor, rows, places, slots, experts, columns, x.stride(0), **copy, **options
    )  # fmt: skip
    return rows, offsets, places


def weigh(y: torch.Tensor, places: torch.Tensor, weights: torch.Tensor | None, out: torch.Tensor) -> None:
    """Sums each token's slots: `out[token]` = Σ weight · y, or Σ y without weights, in FP32.

    Args:
        y: `[tokens · k, out]`, contiguous, in the order that `route` gave the rows.
        places: int32 `[tokens, k]`, of `route`.
        weights: `[tokens, k]`, contiguous, or None.
        out: `[tokens, out]`, contiguous.

    Raises:
        ValueError: arguments that do not fit each other.
    """
    tokens, per_token = places.shape
    fits = y.shape == (tokens * per_token, out.shape[-1]) and out.shape == (tokens, y.shape[-1])
    contiguous = all(tensor.is_contiguous() for tensor in (y, places, out) + (() if weights is None else (weights,)))
    if not fits or not contiguous or (weights is not None and weights.shape != places.shape):
        raise ValueError(f"weigh: y {list(y.shape)}, places {list(places.shape)} and out {list(out.shape)} do not fit")
    if out.numel():
        weigh_kernel[tokens * triton.cdiv(y.shape[1], 1024),](
            y, places, y if weights is None else weights, out, y.shape[1], weighted=weights is not None,
            per_token=per_token, width=1024, num_warps=4, **overlap_options(y),
        )  # fmt: skip
