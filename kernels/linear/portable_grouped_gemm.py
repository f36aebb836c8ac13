"""The grouped matmul multiplies rows of x, sorted by expert, by the weights of their experts in one launch.

    x        [T, K]           expert 0 0 0 1 1 3 3 3 3        offsets  0 3 5 5 9   (expert 2 has no row)
    weights  [experts, N, K]                                   y[i] = x[i] · W[expert of i]ᵀ

How many tiles each expert has is known only on the GPU, where the router left its choice, and waiting for it would
cost more than a small matmul. So as many programs start as there can be tiles, `T // block_m + experts` at most, and
each finds its tile by counting the tiles of the experts before it; a program that finds none returns.

One kernel multiplies 16-bit rows by codes of any format, decoded as in `kernels/linear/portable_codes_gemm.py`. Another
multiplies FP8 by FP8 with scales a tensor, a row or 128 columns; its sums of 128 products are scaled and added in
FP32 registers.

Rows are sorted by expert before a grouped matmul, and weighted and added up again after it; `index` `[tokens, k]` has
the experts of each token, and a slot is one of its k choices:

    place_rows   program a slot    slots before it in the order of experts ─▶ its row; the token's x is copied there
    weigh        program a piece of a token      Σ over its slots of weight · y[row of the slot]

This takes two launches, where a decoding step leaves no time for the dozen small kernels of PyTorch's sort. Every
program of `place_rows` reads all of `index`. With more than `FEW_SLOTS` slots two kernels share the work:

    count_rows   one program       slots of each expert ─▶ offsets [experts + 1], cursor [experts]
    move_rows    program a slot    atomic add on the expert's cursor ─▶ its row; the token's x is copied there

There the order within an expert differs from call to call; the product of a row does not. Where experts are spread over
several GPUs, a table `local` has the number of each among this GPU's experts, or -1: its slots have no row here.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quant.formats.format import FORMATS, Format
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.base.launch import check_tensors
from quant.kernels.base.portable_dependent_launch import overlap_options, start_next, wait_for_previous
from quant.kernels.base.portable_small_floats import compilable
from quant.kernels.base.weight_layout import is_prepacked
from quant.kernels.linear.portable_codes_gemm import add_products, finish_tile, format_constants

MAX_EXPERTS = 1024
FP8_WEIGHTS = ("fp8", "fp8_channel", "fp8_block")
FP8_ROWS = ("fp8", "fp8_token", "fp8_group")


@triton.jit
def group_of(tile, offsets, experts, block_m: tl.constexpr, width: tl.constexpr):
    """Returns (expert, first row, row after the last of its group) of a tile; expert is `experts` without a tile."""
    index = tl.arange(0, width)
    start = tl.load(offsets + index, mask=index < experts, other=0)
    stop = tl.load(offsets + index + 1, mask=index < experts, other=0)
    tiles = tl.cdiv(stop - start, block_m)
    # Tiles up to the end of each expert; as many ends lie at or before `tile` as experts come before its own.
    before = tl.cumsum(tiles, 0)
    expert = tl.sum(((before <= tile) & (index < experts)).to(tl.int32), 0)
    mine = index == expert
    first = tl.sum(tl.where(mine, start + (tile - before + tiles) * block_m, 0), 0)
    return expert, first, tl.sum(tl.where(mine, stop, 0), 0)


@triton.jit(do_not_specialize=["experts"])
def grouped_codes_gemm_kernel(
    x, codes, scale, global_scale, bias, offsets, y, experts, N, K, x_stride, scale_rows, scale_stride, codes_width,
    element: tl.constexpr, bits: tl.constexpr, kind: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
    has_global: tl.constexpr, has_bias: tl.constexpr, width: tl.constexpr, block_m: tl.constexpr,
    block_n: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """16-bit rows times codes. `rows` and `columns` of a block are 0 where it spans the axis."""
    expert, first, last = group_of(tl.program_id(1), offsets, experts, block_m, width)
    if expert < experts:
        m = first + tl.arange(0, block_m)
        n = tl.program_id(0) * block_n + tl.arange(0, block_n)
        of = expert.to(tl.int64)
        # Rows beyond the group's last are not read: each would be one more request for a line of another row.
        x_row, row_mask = x + m.to(tl.int64)[:, None] * x_stride, (m < last)[:, None]
        # Experts follow one another as one tall matrix. Rows of W beyond the end read the last one, unmasked.
        code_row = codes + (of * N + tl.minimum(n, N - 1))[:, None] * codes_width
        scale += of * scale_rows * scale_stride
        acc = tl.zeros((block_m, block_n), dtype=tl.float32)
        for step in range(tl.cdiv(K, block_k)):
            k = step * block_k + tl.arange(0, block_k)
            tokens = tl.load(x_row + k[None, :], mask=row_mask & (k[None, :] < K), other=0.0)
            acc = add_products(acc, tokens, code_row, scale, n, step, N, K, scale_stride, codes_width,
                               element, bits, kind, rows, columns, False, block_k)  # fmt: skip
        offset = m.to(tl.int64)[:, None] * N + n[None, :]
        inside = row_mask & (n[None, :] < N)
        finish_tile(acc, scale, global_scale + expert, bias + of * N, y, offset, inside, n, N, scale_stride, kind,
                    rows, columns, has_global, has_bias)  # fmt: skip


@triton.jit(do_not_specialize=["experts"])
def grouped_fp8_gemm_kernel(
    x, x_scale, codes, scale, offsets, y, experts, N, K,
    x_rows: tl.constexpr, x_columns: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
    width: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr,
):  # fmt: skip
    """E4M3 rows times E4M3 weights, float32 scales: a block's rows and columns, 0 where it spans the axis."""
    expert, first, last = group_of(tl.program_id(1), offsets, experts, block_m, width)
    if expert < experts:
        m = first + tl.arange(0, block_m)
        n = tl.program_id(0) * block_n + tl.arange(0, block_n)
        k = tl.arange(0, 128)
        of = expert.to(tl.int64)
        row_mask, m_row, n_row = m < last, m.to(tl.int64), tl.minimum(n, N - 1)
        x_row, code_row = x + m_row[:, None] * K, codes + (of * N + n_row)[:, None] * K
        steps = tl.cdiv(K, 128)
        # Scales in a row: one for each 128 columns, or one.
        x_width = steps if x_columns > 0 else 1
        w_width = steps if columns > 0 else 1
        tl.static_assert(columns == 0 or rows % block_n == 0)
        # Rows beyond the last take its scale, without a mask: their products are not stored.
        scale_row = tl.minimum(m, last - 1).to(tl.int64)
        x_line = x_scale + (scale_row * x_width if x_rows > 0 else scale_row * 0)
        w_height = tl.cdiv(N, rows) if rows > 0 else 1
        squares = scale + of * w_height * w_width + (tl.program_id(0) * block_n // rows * w_width if rows > 0 else 0)
        w_line = scale + of * w_height * w_width + (n_row // rows if rows > 0 else n_row * 0)
        acc = tl.zeros((block_m, block_n), dtype=tl.float32)
        for step in range(steps):
            inside = (step * 128 + k)[None, :] < K
            a = tl.load(x_row + (step * 128 + k)[None, :], mask=row_mask[:, None] & inside, other=0.0)
            b = tl.load(code_row + (step * 128 + k)[None, :], mask=inside, other=0.0)
            # From zero for each step: Hopper adds FP8 products with few bits beyond FP16's.
            product = tl.dot(a, tl.trans(b))
            # A tile has one row of squares; where rows of x have a scale for each step, the two are multiplied first.
            square = tl.load(squares + step) if columns > 0 else 1.0
            if x_columns > 0:
                acc += product * (tl.load(x_line + step) * square)[:, None]
            else:
                acc += product * square
        if x_columns == 0:
            acc *= tl.load(x_line)[:, None]
        if columns == 0:
            acc *= tl.load(w_line)[None, :]
        out = y + m.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(out, acc.to(y.dtype.element_ty), mask=row_mask[:, None] & (n[None, :] < N))


def grouped_codes_gemm(x: Tensor, weight: BlockScaledTensor, offsets: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns `y[i] = x[i] · W[expert of i]ᵀ + bias[expert of i]`; rows beyond the last offset stay as they are."""
    # x is `[T, in]`, FP16 or BF16, sorted by expert; the weight `[experts, out, in]`, in the layout of a checkpoint;
    # offsets int32 `[experts + 1]`: the first row of each expert, and the row after the last; the bias `[experts,
    # out]`.
    check(x, weight, offsets)
    if x.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"{_task(weight)}: x is {x.dtype}, expected float16 or bfloat16")
    experts, N, K = weight.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    y = x.new_empty(len(x), N)
    block_m = block_rows(len(x), experts)
    tiles = most_tiles(len(x), experts, block_m)
    if tiles:
        scale_shape = weight.format.scale_shape(weight.shape)
        codes, scale = compilable(weight.codes), compilable(weight.scale)
        second = scale if weight.global_scale is None else weight.global_scale
        block_n, block_k, warps = weight_tile(block_m)
        grouped_codes_gemm_kernel[triton.cdiv(N, block_n), tiles](
            x, codes, scale, second, y if bias is None else bias, offsets, y, experts, N, K, x.stride(0),
            scale_shape[-2], scale_shape[-1], codes.shape[-1], **format_constants(weight.format),
            has_global=weight.global_scale is not None, has_bias=bias is not None,
            width=triton.next_power_of_2(experts), block_m=block_m, block_n=block_n, block_k=block_k, num_warps=warps,
            num_stages=3, enable_fp_fusion=True,
        )  # fmt: skip
    return y


def grouped_fp8_gemm(x: BlockScaledTensor, weight: BlockScaledTensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    """Computes `grouped_codes_gemm` for rows in one of `FP8_ROWS`, with a weight in one of `FP8_WEIGHTS`."""
    if not takes_fp8(weight.format, x.format):
        raise ValueError(
            f"{_task(weight)}: rows in {x.format}; FP8 rows are {', '.join(FP8_ROWS)}, weights {', '.join(FP8_WEIGHTS)}"
        )
    check(x.codes, weight, offsets)
    experts, N, K = weight.shape
    y = torch.empty(len(x.codes), N, dtype=dtype, device=x.codes.device)
    block_m = max(block_rows(len(y), experts), 16)
    tiles = most_tiles(len(y), experts, block_m)
    if tiles:
        grouped_fp8_gemm_kernel[triton.cdiv(N, 128), tiles](
            x.codes, x.scale, weight.codes, weight.scale, offsets, y, experts, N, K,
            x_rows=x.format.block[0], x_columns=x.format.block[1], rows=weight.format.block[0],
            columns=weight.format.block[1], width=triton.next_power_of_2(experts), block_m=block_m, block_n=128,
            num_warps=4 if block_m <= 64 else 8, num_stages=3, enable_fp_fusion=True,
        )  # fmt: skip
    return y


def takes_fp8(weight: Format, rows: Format) -> bool:
    """Returns whether `grouped_fp8_gemm` multiplies these formats."""
    return weight.name in FP8_WEIGHTS and rows.name in FP8_ROWS and weight is FORMATS[weight.name]


def block_rows(tokens: int, experts: int) -> int:
    """Returns the number of rows in a tile: the average of an expert, so that little of a tile is empty."""
    mean = -(-tokens // max(experts, 1))
    # 16 is the least that tensor cores take, 128 the most whose sums fit registers.
    return min(max(triton.next_power_of_2(mean), 16), 128)


def weight_tile(block_m: int) -> tuple[int, int, int]:
    """Returns features and step along K of a tile of 16-bit rows, and its warps: as much as registers hold."""
    return 32 if block_m == 16 else 64, 128 if block_m <= 32 else 64, 4 if block_m <= 64 else 8


def most_tiles(tokens: int, experts: int, block_m: int) -> int:
    """Returns the largest possible number of tiles: each expert may have one that is not full."""
    return min(tokens, tokens // block_m + min(experts, tokens))


def check(x: Tensor, weight: BlockScaledTensor, offsets: Tensor) -> None:
    """Raises ValueError, naming the argument, where a kernel could not take the arguments; either layout may do."""
    task, shape = _task(weight), weight.shape
    if len(shape) != 3 or x.dim() != 2 or x.shape[1] != shape[2]:
        raise ValueError(f"{task}: x is {list(x.shape)}, expected [tokens, {shape[-1]}] and a weight of three axes")
    check_experts(x, weight, offsets)


def check_experts(x: Tensor, weight: BlockScaledTensor, offsets: Tensor) -> None:
    """Checks the same as `check`, for rows `x` whose shape has been checked before."""
    task, shape, format = _task(weight), weight.shape, weight.format
    codes = (format.codes_shape(shape), format.element.torch_dtype or torch.uint8)
    scale_shape = format.scale_shape(shape)
    if is_prepacked(weight):
        codes = ((*shape[:2], shape[2] // 8), torch.int32)
        scale_shape = (*shape[:2], shape[2] // 64)
    if shape[0] > MAX_EXPERTS:
        raise ValueError(f"{task}: {shape[0]} experts, at most {MAX_EXPERTS}")
    if format.global_scale and weight.global_scale is None:
        raise ValueError(f"{task}: global_scale is missing; {format} has one per expert")
    check_tensors(task, x, {
        "codes": (weight.codes, *codes), "scale": (weight.scale, scale_shape, None),
        "global_scale": (weight.global_scale, shape[:1], torch.float32),
        "offsets": (offsets, (shape[0] + 1,), torch.int32),
    })  # fmt: skip


def _task(weight: BlockScaledTensor) -> str:
    return f"grouped matmul with {list(weight.shape)} in {weight.format}"


FEW_SLOTS = 1024  # up to this many slots one kernel routes them all


@triton.jit
def _copy_row(x, rows, token, row, K, x_stride, width: tl.constexpr):
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
    """One slot, and one expert: the slot's token is copied to its row, and the expert's first row is counted."""
    # Rows are in the order of their experts, and of their slots within an expert; `most` is at least the slots.
    start_next(overlap)
    wait_for_previous(overlap)
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
    start_next(overlap)
    wait_for_previous(overlap)
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
    start_next(overlap)
    wait_for_previous(overlap)
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
    y, places, weights, out, K, weigh: tl.constexpr, per_token: tl.constexpr, width: tl.constexpr, overlap: tl.constexpr
):
    """One piece of a token: the rows of its slots, weighted and added in FP32 in the order of the slots."""
    start_next(overlap)
    wait_for_previous(overlap)
    pieces = tl.cdiv(K, width)
    token = (tl.program_id(0) // pieces).to(tl.int64)
    column = tl.program_id(0) % pieces * width + tl.arange(0, width)
    total = tl.zeros((width,), dtype=tl.float32)
    # In the order of the slots, so that the sum does not depend on the order of rows.
    for slot in tl.static_range(per_token):
        row = tl.load(places + token * per_token + slot).to(tl.int64)
        value = tl.load(y + row * K + column, mask=(column < K) & (row >= 0), other=0.0).to(tl.float32)
        if weigh:
            value *= tl.load(weights + token * per_token + slot).to(tl.float32)
        total += value
    tl.store(out + token * K + column, total.to(out.dtype.element_ty), mask=column < K)


def route(x: Tensor, index: Tensor, experts: int, local: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the rows of x sorted by expert, the first row of each expert, and the place of each slot among the rows.

    Args:
        x: `[tokens, in]`, rows contiguous.
        index: expert of each token and slot, `[tokens, k]`, contiguous; a slot with no such expert has no row.
        local: for each number that `index` may have, the expert that it stands for, or -1 for none. None: itself.

    Returns:
        Rows `[tokens · k, in]`, undefined beyond the last offset; offsets, int32 `[experts + 1]`;
        places, int32 `[tokens, k]`, -1 for a slot without a row.
    """
    tokens, per_token = index.shape
    if x.dim() != 2 or len(x) != tokens or x.stride(1) != 1 or not index.is_contiguous() or experts > MAX_EXPERTS:
        raise ValueError(f"route: x {list(x.shape)} and index {list(index.shape)} of {experts} experts do not fit")
    slots, columns = tokens * per_token, x.shape[1]
    rows, places = x.new_empty(slots, columns), torch.empty_like(index, dtype=torch.int32)
    offsets = places.new_empty(experts + 1)
    copy = {"per_token": per_token, "width": min(triton.next_power_of_2(columns), 4096), "num_warps": 4}
    numbers = index if local is None else local
    options = {"mapped": local is not None, "enable_fp_fusion": True, **overlap_options(x)}
    if slots <= FEW_SLOTS:
        # Sizes four times apart, so that few variants are compiled.
        most = next(size for size in (64, 256, FEW_SLOTS) if slots <= size)
        place_rows_kernel[max(slots, experts + 1),](
            x, index, numbers, offsets, rows, places, slots, experts, columns, x.stride(0), most=most, **copy, **options
        )
        return rows, offsets, places
    cursor, width = places.new_empty(experts), max(triton.next_power_of_2(experts), 32)
    count_rows_kernel[1,](
        index, numbers, offsets, cursor, slots, experts, width=width, block=2048, num_warps=8, **options
    )
    move_rows_kernel[slots,](
        x, index, numbers, cursor, rows, places, slots, experts, columns, x.stride(0), **copy, **options
    )
    return rows, offsets, places


def weigh(y: Tensor, places: Tensor, weights: Tensor | None, out: Tensor) -> None:
    """Sums each token's slots: `out[token]` = Σ weight · y, or Σ y without weights, in FP32."""
    # y is `[tokens · k, out]` in the order that `route` gave the rows; places and weights are `[tokens, k]`. All
    # contiguous.
    tokens, per_token = places.shape
    fits = y.shape == (tokens * per_token, out.shape[-1]) and out.shape == (tokens, y.shape[-1])
    contiguous = all(tensor.is_contiguous() for tensor in (y, places, out) + (() if weights is None else (weights,)))
    if not fits or not contiguous or (weights is not None and weights.shape != places.shape):
        raise ValueError(f"weigh: y {list(y.shape)}, places {list(places.shape)} and out {list(out.shape)} do not fit")
    if out.numel():
        weigh_kernel[tokens * triton.cdiv(y.shape[1], 1024),](
            y, places, y if weights is None else weights, out, y.shape[1], weigh=weights is not None,
            per_token=per_token, width=1024, num_warps=4, **overlap_options(y), enable_fp_fusion=True,
        )  # fmt: skip
