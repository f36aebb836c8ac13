"""Solvers round weights on a GPU in one launch each, where PyTorch needs a dozen or thousands.

    solve_nvfp4_window, search_nvfp4_blocks    GPTQ's windows and `local_hessian`'s blocks, with a search for scales
    feed_back_block                            a block's columns under a few grids, of integers and K-quants too
    fake_quantize_nvfp4                        `formats.tensor.fake_quantize` of inputs
    split_pairs                                float32 matrices as pairs of BF16, for products on tensor cores
    learned_values, learned_gradient           the weight of `autoround` and its straight-through gradient, graph-free

The rows of a weight are independent in GPTQ, so a program takes a few of them through the whole window:

    for each block b:   target  = targets[b] - Σ C[a, b]ᵀ move[a]      over the blocks a before it
                        sixteen scales are tried at once, each with feedback inside the block:
                            q[j]    = nearest(left[j] / step) · step,      e[j] = (left[j] - q[j]) / U[j, j]
                            left[i] -= U[j, i] · e[j]     for i > j,       loss = Σ e[j]²
                        the scale with the least loss stays

A lane of the program is one row with one of its scales, and holds the sixteen inputs in registers. Moves go to later
blocks through memory that only this program reads. All sixteen scales are tried, because a trial is cheap here. The
other kernels take tiles of blocks of sixteen values. `solve_fixed_window` is the same kernel without the search, for
scales that are fixed beforehand (FP8 and INT8 by tensor, row or square): a lane has one row of the weight.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from quant.formats.format import FORMATS, Format, Number
from quant.formats.scaling import global_scale_of
from quant.kernels.base.launch import CachedLaunch, cached_launch, on_its_gpu
from quant.kernels.base.portable_small_floats import amax_of, nearest_e2m1

FIXED_WIDTH = 32  # inputs of a block
# Rows of the weight per program of one warp: a lane holds the 32 inputs of its row, so that no lanes exchange data.
_FIXED_ROWS = 32


@triton.jit
def _nearest(x, mantissa: tl.constexpr, min_normal: tl.constexpr, lowest: tl.constexpr, largest: tl.constexpr):
    """Returns the nearest value of a small float or integer, to even, saturating."""
    x = tl.clamp(x, lowest, largest)
    power = tl.maximum((x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True), min_normal)
    if mantissa == 0:
        power = tl.full(x.shape, min_normal, tl.float32)  # the grid of integers is even
    # 1.5 · 2^(23 - mantissa) powers of two leave room for only the digits of the grid.
    magic = power * (1.5 * 2 ** (23 - mantissa))
    return (x + magic) - magic


@triton.jit
def fixed_scale_solve_kernel(
    targets, coupling, inverses, steps, values, moves, n, blocks, targets_stride, coupling_row, coupling_column,
    improve: tl.constexpr, mantissa: tl.constexpr, min_normal: tl.constexpr, lowest: tl.constexpr,
    largest: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Takes `ROWS` rows of the weight through one window; see the module docstring. Grid: (groups of rows,)."""
    column = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = (column < n)[None, :]
    row = tl.arange(0, WIDTH)
    for b in range(0, blocks):
        offset = (b * WIDTH + row)[:, None] * n + column[None, :]
        target = tl.load(targets + (b * WIDTH + row)[:, None] * targets_stride + column[None, :], valid, 0.0)
        # Feedback of the blocks before this one, with their final moves.
        for a in range(0, b):
            for j in range(0, WIDTH):
                move = tl.load(moves + (a * WIDTH + j) * n + column[None, :], valid, 0.0)
                weight = tl.load(
                    coupling + (a * WIDTH + j) * coupling_row + (b * WIDTH + row)[:, None] * coupling_column
                )
                target -= weight * move
        step = tl.load(steps + offset, valid, 1.0)
        old = tl.load(values + offset, valid, 0.0)
        left, old_left = target, target
        rounded = tl.zeros([WIDTH, ROWS], tl.float32)
        errors = tl.zeros([WIDTH, ROWS], tl.float32)
        loss = tl.zeros([ROWS], tl.float32)
        old_loss = tl.zeros([ROWS], tl.float32)
        for j in tl.static_range(WIDTH):
            # Registers cannot be indexed: input j is selected by a sum over a mask, in every lane at once.
            own = (row == j)[:, None]
            current = tl.sum(tl.where(own, left, 0.0), axis=0)
            own_step = tl.sum(tl.where(own, step, 0.0), axis=0)
            value = _nearest(tl.div_rn(current, own_step), mantissa, min_normal, lowest, largest) * own_step
            upper = tl.load(inverses + b * WIDTH * WIDTH + j * WIDTH + row)
            pivot = tl.load(inverses + b * WIDTH * WIDTH + j * WIDTH + j)
            error = tl.div_rn(current - value, pivot)
            loss += error * error
            left -= upper[:, None] * error[None, :]
            rounded = tl.where(own, value[None, :], rounded)
            errors = tl.where(own, error[None, :], errors)
            if improve:
                # The loss of the previous values, under the same feedback.
                old_error = tl.div_rn(tl.sum(tl.where(own, old_left - old, 0.0), axis=0), pivot)
                old_loss += old_error * old_error
                old_left -= upper[:, None] * old_error[None, :]
        if improve:
            rounded = tl.where((loss < old_loss)[None, :], rounded, old)
            errors = rounded - old
        tl.store(values + offset, rounded, valid)
        tl.store(moves + offset, errors, valid)
        tl.debug_barrier()  # the next block reads values that other threads of this program wrote


@on_its_gpu
def solve_fixed_window(
    element: Number, steps: Tensor, targets: Tensor, coupling: Tensor, inverses: Tensor, values: Tensor,
    scales: Tensor | None, start: int, improve: bool,
) -> Tensor:  # fmt: skip
    """Solves a window as GPTQ does, in blocks of 32 inputs; returns the moves `[inputs, n]`, and fills `values`."""
    # `steps` holds the grid step of every weight of the matrix, `[in, n]`. The window, of which `start` is the first
    # input, has targets `[inputs, n]`, a coupling `[inputs, inputs]` and inverses `[blocks, 32, 32]`. `scales` is not
    # used.
    inputs, n = targets.shape
    moves = torch.empty(inputs, n, device=targets.device, dtype=torch.float32)
    targets = targets if targets.stride(1) == 1 else targets.contiguous()
    fixed_scale_solve_kernel[(triton.cdiv(n, _FIXED_ROWS),)](
        targets, coupling, inverses.contiguous(), steps[start : start + inputs].contiguous(), values, moves, n,
        inputs // FIXED_WIDTH, targets.stride(0), coupling.stride(0), coupling.stride(1), improve=improve,
        mantissa=0 if element.is_integer else element.mantissa, min_normal=element.min_normal, lowest=element.min,
        largest=element.max, WIDTH=FIXED_WIDTH, ROWS=_FIXED_ROWS, num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip
    return moves


_LANES = 64


@triton.jit
def feedback_kernel(
    block, U, steps, shifts, values, errors, n, lanes, inputs, U_row, U_column, mantissa: tl.constexpr,
    min_normal: tl.constexpr, lowest: tl.constexpr, largest: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Rounds all inputs of a block in turn; a lane is a row of the weight on one of its grids. Grid: (lanes,)."""
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    valid = lane < lanes
    step, shift = tl.load(steps + lane, valid, 1.0), 0.0
    if shifts is not None:
        shift = tl.load(shifts + lane, valid, 0.0)
    for j in range(0, inputs):
        target = tl.load(block + j * n + lane % n, valid, 0.0)
        for i in range(0, j):
            target -= tl.load(U + i * U_row + j * U_column) * tl.load(errors + i * lanes + lane, valid, 0.0)
        value = _nearest(tl.div_rn(target + shift, step), mantissa, min_normal, lowest, largest) * step - shift
        tl.store(values + j * lanes + lane, value, valid)
        error = tl.div_rn(target - value, tl.load(U + j * (U_row + U_column)))
        tl.store(errors + j * lanes + lane, error, valid)
        tl.debug_barrier()  # the next input may read errors by other threads


def feed_back_block(
    block: Tensor, U: Tensor, step: Tensor, element: Number, shift: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns values and errors `[k, grids, n]` of a block `[k, n]` under steps and shifts `[grids, n]`, as GPTQ's."""
    inputs, n = block.shape
    values = torch.empty(inputs, *step.shape, device=block.device, dtype=torch.float32)
    errors = torch.empty_like(values)
    launch = cached_launch(
        feedback_kernel, (triton.cdiv(step.numel(), _LANES),), LANES=_LANES, num_warps=2, lowest=element.min,
        mantissa=0 if element.is_integer else element.mantissa, min_normal=element.min_normal, largest=element.max,
    )  # fmt: skip
    shift = None if shift is None else shift.contiguous()
    launch(block.contiguous(), U, step.contiguous(), shift, values, errors, n, step.numel(), inputs, *U.stride())
    return values, errors


WIDTH = 16
_CANDIDATES = 16
# Rows of the weight per program of one warp: with their scales they fill its lanes, so no lanes exchange data.
_ROWS = 2
_BLOCKS = 64


@triton.jit
def _decode_e4m3(code):
    """Returns the values of codes 0 to 126."""
    normal = ((code + (120 << 3)) << 20).to(tl.float32, bitcast=True)
    return tl.where(code < 8, code.to(tl.float32) * 0.001953125, normal)


@triton.jit
def _encode_e4m3_up(x):
    """Returns the least code whose value is not below x, for 0 <= x <= 448."""
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + ((1 << 20) - 1)) >> 20) - (120 << 3)
    return tl.where(x < 0.015625, tl.ceil(x * 512.0).to(tl.int32), normal)


@triton.jit
def nvfp4_solve_kernel(
    targets, coupling, inverses, values, scales, moves, global_scale, n, blocks, targets_stride, coupling_row,
    coupling_column, targets_matrix, coupling_matrix, inverses_matrix, values_matrix, scales_matrix, moves_matrix,
    improve: tl.constexpr, WIDTH: tl.constexpr, CANDIDATES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Takes `ROWS` rows of a weight through one window; see the module docstring."""
    # Grid: (groups of rows, windows, weights).
    matrix = tl.program_id(2).to(tl.int64)
    targets += matrix * targets_matrix
    coupling += matrix * coupling_matrix
    inverses += matrix * inverses_matrix
    values += matrix * values_matrix
    scales += matrix * scales_matrix
    moves += matrix * moves_matrix
    column = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = column < n
    row = tl.arange(0, WIDTH)
    candidate = tl.arange(0, CANDIDATES)
    second = tl.load(global_scale + matrix)
    start = tl.program_id(1) * blocks
    for b in range(start, start + blocks):
        offset = (b * WIDTH + row)[:, None] * n + column[None, :]
        target = tl.load(
            targets + (b * WIDTH + row)[:, None] * targets_stride + column[None, :], mask=valid[None, :], other=0.0
        )
        # Feedback of the blocks before this one, with their final moves.
        for a in range(start, b):
            move = tl.load(moves + (a * WIDTH + row)[:, None] * n + column[None, :], mask=valid[None, :], other=0.0)
            weight = tl.load(
                coupling
                + ((a - start) * WIDTH + row)[:, None] * coupling_row
                + ((b - start) * WIDTH + row)[None, :] * coupling_column
            )
            target -= tl.sum(weight[:, :, None] * move[:, None, :], axis=0)
        amax = tl.max(tl.abs(target), axis=0)
        ideal = tl.minimum(tl.div_rn(amax, 6.0 * second), 448.0)
        # Sixteen neighbouring codes of E4M3: eight below the `max` rule's, that one, and seven above.
        first = tl.minimum(tl.maximum(_encode_e4m3_up(ideal) - 8, 1), 111)
        scale = _decode_e4m3(first[None, :] + candidate[:, None])
        step = scale * second
        left = tl.broadcast_to(target[:, None, :], [WIDTH, CANDIDATES, ROWS])
        rounded = tl.zeros([WIDTH, CANDIDATES, ROWS], tl.float32)
        errors = tl.zeros([WIDTH, CANDIDATES, ROWS], tl.float32)
        loss = tl.zeros([CANDIDATES, ROWS], tl.float32)
        old = tl.load(values + offset, mask=valid[None, :], other=0.0)
        old_left = target
        old_loss = tl.zeros([ROWS], tl.float32)
        for j in tl.static_range(WIDTH):
            # Registers cannot be indexed: input j is selected by a sum over a mask, in every lane at once.
            own = (row == j)[:, None, None]
            current = tl.sum(tl.where(own, left, 0.0), axis=0)
            value = nearest_e2m1(tl.div_rn(current, step)) * step
            upper = tl.load(inverses + b * WIDTH * WIDTH + j * WIDTH + row)
            pivot = tl.load(inverses + b * WIDTH * WIDTH + j * WIDTH + j)
            error = tl.div_rn(current - value, pivot)
            loss += error * error
            left -= upper[:, None, None] * error[None, :, :]
            rounded = tl.where(own, value[None, :, :], rounded)
            errors = tl.where(own, error[None, :, :], errors)
            if improve:
                # The loss of the previous values, under the same feedback.
                old_error = tl.div_rn(tl.sum(tl.where((row == j)[:, None], old_left - old, 0.0), axis=0), pivot)
                old_loss += old_error * old_error
                old_left -= upper[:, None] * old_error[None, :]
        # The first of equal losses, the smallest scale.
        best = tl.argmin(loss, axis=0)
        chosen = candidate[:, None] == best[None, :]
        new = tl.sum(tl.where(chosen[None, :, :], rounded, 0.0), axis=1)
        new_scale = tl.sum(tl.where(chosen, scale, 0.0), axis=0)
        scale_offset = b * n + column
        if improve:
            better = tl.min(loss, axis=0) < old_loss
            new = tl.where(better[None, :], new, old)
            new_scale = tl.where(better, new_scale, tl.load(scales + scale_offset, mask=valid, other=0.0))
            move = new - old
        else:
            move = tl.sum(tl.where(chosen[None, :, :], errors, 0.0), axis=1)
        tl.store(values + offset, new, mask=valid[None, :])
        tl.store(scales + scale_offset, new_scale, mask=valid)
        tl.store(moves + offset, move, mask=valid[None, :])
        tl.debug_barrier()  # the next block reads values that other threads of this program wrote


def solve_nvfp4_window(
    global_scale: Tensor, targets: Tensor, coupling: Tensor, inverses: Tensor, values: Tensor, scales: Tensor | None,
    start: int, improve: bool,
) -> Tensor:  # fmt: skip
    """Solves a window as GPTQ does, in whole blocks of sixteen, trying every scale with feedback; returns the moves."""
    # Targets are `[inputs, n]`, the coupling `[inputs, inputs]`, inverses `[blocks, 16, 16]`; `values` and `scales` are
    # filled, and `start` is not used. Several weights are solved in one launch where all of these have one more
    # dimension in front; `global_scale` is then float32 `[weights]`, contiguous.
    assert scales is not None
    return _launch_solver(global_scale, targets, coupling, inverses, values, scales, windows=1, improve=improve)


def search_nvfp4_blocks(blocks: Tensor, inverses: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the best values `[16 · blocks, n]` and scales `[blocks, n]` of independent blocks, all in one launch."""
    # Blocks are `[16 · blocks, n]`, float32, contiguous; inverses are U of each, `[blocks, 16, 16]`.
    values = torch.empty_like(blocks)
    scales = torch.empty(len(inverses), blocks.shape[1], device=blocks.device, dtype=torch.float32)
    _launch_solver(global_scale, blocks, inverses, inverses, values, scales, windows=len(inverses), improve=False)
    return values, scales


def _launch_solver(
    global_scale: Tensor, targets: Tensor, coupling: Tensor, inverses: Tensor, values: Tensor, scales: Tensor, *,
    windows: int, improve: bool,
) -> Tensor:  # fmt: skip
    *weights, inputs, n = targets.shape
    moves = torch.empty(targets.shape, device=targets.device, dtype=torch.float32)
    targets = targets if targets.stride(-1) == 1 else targets.contiguous()
    inverses = inverses.contiguous()
    several = (targets, coupling, inverses, values, scales, moves)
    strides = [tensor.stride(0) if weights else 0 for tensor in several]
    _solver(triton.cdiv(n, _ROWS), windows, weights[0] if weights else 1, improve)(
        *several, global_scale, n, inputs // WIDTH // windows, targets.stride(-2), *coupling.stride()[-2:], *strides
    )
    return moves


@cache
def _solver(programs: int, windows: int, weights: int, improve: bool) -> CachedLaunch:
    """Returns the launch of a grid of programs; a layer has hundreds of windows of one shape."""
    constants = {"improve": improve, "WIDTH": WIDTH, "CANDIDATES": _CANDIDATES, "ROWS": _ROWS, "num_warps": 1}
    return CachedLaunch(nvfp4_solve_kernel, (programs, windows, weights), constants)


@triton.jit
def _nearest_e4m3(x):
    """Returns the value of E4M3 nearest to 0 < x, to even, saturating at 448 and at the least above zero."""
    x = tl.minimum(tl.maximum(x, 0.001953125), 448.0)
    power = tl.maximum((x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True), 0.015625)
    magic = power * 1572864.0  # 1.5 · 2^20 powers
    return (x + magic) - magic


@triton.jit
def nvfp4_fake_quantize_kernel(
    x, out, global_scale, blocks, four_or_six: tl.constexpr, WIDTH: tl.constexpr, BLOCKS: tl.constexpr
):
    """Rounds and dequantizes `BLOCKS` blocks of sixteen values; grid: (groups of blocks,)."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    offset = block[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    valid = (block < blocks)[:, None]
    value = tl.load(x + offset, mask=valid, other=0.0).to(tl.float32)
    second = tl.load(global_scale)
    amax = amax_of(value, 1)
    step = tl.fma(amax, 0.0, _nearest_e4m3(tl.div_rn(amax, 6.0 * second))) * second
    if four_or_six:
        four = tl.fma(amax, 0.0, _nearest_e4m3(tl.div_rn(amax * 1.5, 6.0 * second))) * second
        # The two errors, both in units of `step`.
        ratio = tl.div_rn(four, step)
        step = tl.where(_squared_error(value, four) * ratio * ratio < _squared_error(value, step), four, step)
    step = tl.broadcast_to(step[:, None], [BLOCKS, WIDTH])
    rounded = nearest_e2m1(tl.div_rn(value, step)) * step
    tl.store(out + offset, rounded.to(out.dtype.element_ty), mask=valid)


@triton.jit
def _squared_error(x, step):
    """Returns the squared error of blocks `[blocks, values]` on a grid of `step` `[blocks]`, in units of it."""
    steps = tl.div_rn(x, step[:, None])
    error = nearest_e2m1(steps) - steps
    return tl.sum(error * error, axis=1)


@triton.jit
def nvfp4_learned_kernel(
    latent, first_step, step, gradient, values, scale_gradient, blocks,
    backward: tl.constexpr, WIDTH: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Computes `BLOCKS` blocks of the learned weight; with `backward`, gradients of its latent values and scales."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    offset = block[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = block < blocks
    valid = inside[:, None]
    first = tl.broadcast_to(tl.load(first_step + block, mask=inside, other=1.0)[:, None], [BLOCKS, WIDTH])
    now = tl.broadcast_to(tl.load(step + block, mask=inside, other=1.0)[:, None], [BLOCKS, WIDTH])
    quotient = tl.div_rn(tl.load(latent + offset, mask=valid, other=0.0) * first, now)
    nearest = nearest_e2m1(quotient)
    if backward:
        error = tl.load(gradient + offset, mask=valid, other=0.0).to(tl.float32)
        # Straight through: within the range the latent value gets the gradient, beyond it only the scale does.
        free = tl.abs(quotient) <= 6.0
        tl.store(values + offset, tl.where(free, error * first, 0.0), mask=valid)
        total = tl.sum(error * (nearest - tl.where(free, quotient, 0.0)), axis=1)
        tl.store(scale_gradient + block, total, mask=inside)
    else:
        tl.store(values + offset, nearest * now, mask=valid)


@on_its_gpu
def fake_quantize_nvfp4(x: Tensor, global_scale: Tensor | None, format: Format = FORMATS["nvfp4"]) -> Tensor:
    """Returns `fake_quantize(x, format, global_scale=global_scale)`, the same to the bit but for the sign of zeros."""
    # x is `[..., in]` on a GPU, `in` a multiple of sixteen, of any float dtype up to float32. Under the rule
    # `four_over_six`, scales of equal errors may differ, because these add up in another order.
    x = x.contiguous()
    if global_scale is None:
        global_scale = global_scale_of(x.abs().amax(), format)
    out = torch.empty_like(x)
    blocks = x.numel() // WIDTH
    four_or_six = format.input_rule == "four_over_six"
    nvfp4_fake_quantize_kernel[(triton.cdiv(blocks, _BLOCKS),)](
        x, out, global_scale, blocks, four_or_six, WIDTH, _BLOCKS, enable_fp_fusion=True
    )
    return out


def learned_values(latent: Tensor, first_step: Tensor, step: Tensor) -> Tensor:
    """Returns step · nearest(latent · first_step / step), float32 `[out, in]`; steps are `[out, in / 16]`."""
    values = torch.empty_like(latent)
    _launch_learned(latent, first_step, step, latent, values, values, backward=False)
    return values


def learned_gradient(latent: Tensor, first_step: Tensor, step: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of `latent` `[out, in]` and of `step` `[out, in / 16]`."""
    of_latent, of_step = torch.empty_like(latent), torch.empty_like(step)
    _launch_learned(latent, first_step, step, gradient.contiguous(), of_latent, of_step, backward=True)
    return of_latent, of_step


@on_its_gpu
def _launch_learned(*tensors: Tensor, backward: bool) -> None:
    blocks = tensors[0].numel() // WIDTH
    nvfp4_learned_kernel[(triton.cdiv(blocks, _BLOCKS),)](
        *tensors, blocks, backward=backward, WIDTH=WIDTH, BLOCKS=_BLOCKS, enable_fp_fusion=True
    )


# ---- float32 values as pairs of BF16, h + l, in one pass over memory, where PyTorch takes three
#
# Products of matrices in pairs are sums of products of BF16 matrices (`quant.calibration.fast_matmul`). Where the parts
# lie one below the other, one product with three times the inner dimension gives that sum; h is then written twice.

_PAIR_ROWS, _PAIR_COLUMNS = 2, 1024


@triton.jit
def split_pairs_kernel(
    x, minus, high, low, again, rows, columns, x_row, minus_row, out_row, x_matrix, minus_matrix, out_matrix,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Splits a tile of `x`, or of `x - minus`; grid: (tiles, matrices), of which CUDA bounds all but the first."""
    across = tl.cdiv(columns, COLUMNS)
    row = (tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    matrix = tl.program_id(1).to(tl.int64)
    valid = (row < rows) & (column < columns)
    value = tl.load(x + matrix * x_matrix + row * x_row + column, valid, 0.0)
    if minus is not None:
        value -= tl.load(minus + matrix * minus_matrix + row * minus_row + column, valid, 0.0)
    first = value.to(tl.bfloat16)
    place = matrix * out_matrix + row * out_row + column
    tl.store(high + place, first, valid)
    tl.store(low + place, (value - first.to(tl.float32)).to(tl.bfloat16), valid)
    if again is not None:
        tl.store(again + place, first, valid)


def split_pairs(x: Tensor, high: Tensor, low: Tensor, again: Tensor | None = None, minus: Tensor | None = None) -> None:
    """Writes `x`, or `x - minus`, as BF16 values `high` and what is left of it as `low`.

    All are `[..., rows, columns]` with neighbouring columns, `x` and `minus` float32, and have at most one dimension in
    front; the BF16 outputs are alike in their strides. `again` is a second place for `high`.
    """
    rows, columns, several = *x.shape[-2:], x.dim() > 2
    grid = (triton.cdiv(columns, _PAIR_COLUMNS) * triton.cdiv(rows, _PAIR_ROWS), len(x) if several else 1)
    launch = cached_launch(split_pairs_kernel, grid, ROWS=_PAIR_ROWS, COLUMNS=_PAIR_COLUMNS, num_warps=4)
    matrices = [tensor.stride(0) if several and tensor is not None else 0 for tensor in (x, minus, high)]
    minus_row = 0 if minus is None else minus.stride(-2)
    launch(x, minus, high, low, again, rows, columns, x.stride(-2), minus_row, high.stride(-2), *matrices)
