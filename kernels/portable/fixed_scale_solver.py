"""A window of GPTQ takes one launch where scales are fixed beforehand: FP8 and INT8 by tensor, row or square.

PyTorch needs a dozen small kernels for each of the 128 inputs of a window, which is nearly all of its time. Here a lane
of a program has one row of the weight, and takes it through the whole window:

    for each block b of 32 inputs:   target  = targets[b] - Σ C[a, b]ᵀ move[a]          over the blocks a before it
        for each input j:            q[j] = nearest(left[j] / step[j]) · step[j],    e[j] = (left[j] - q[j]) / U[j, j]
                                     left[i] -= U[j, i] · e[j]                            for i > j

It is the kernel of `nvfp4_solvers.py` without the search for scales. Moves go to later blocks through memory that only
this program reads.
"""

import torch
import triton
import triton.language as tl

from quant.formats.number import Number

WIDTH = 32
"""Inputs of a block."""
# Rows of the weight per program of one warp: a lane holds the 32 inputs of its row, so that no lanes exchange data.
_ROWS = 32


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


def solve_fixed_window(
    element: Number,
    steps: torch.Tensor,
    targets: torch.Tensor,
    coupling: torch.Tensor,
    inverses: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor | None,
    start: int,
    improve: bool,
) -> torch.Tensor:
    """Solves a window as `gptq._solve_window` does, in whole blocks of 32 inputs.

    Args:
        element: the grid.
        steps: the grid step of every weight of the matrix, `[in, n]`.
        targets: `[inputs, n]`, rows contiguous.
        coupling: `[inputs, inputs]`.
        inverses: `[blocks, 32, 32]`.
        values: contiguous, filled here.
        scales: not used.
        start: first input of the window.
        improve: as in `gptq._solve_window`.

    Returns:
        The moves, `[inputs, n]`.
    """
    inputs, n = targets.shape
    moves = torch.empty(inputs, n, device=targets.device, dtype=torch.float32)
    targets = targets if targets.stride(1) == 1 else targets.contiguous()
    fixed_scale_solve_kernel[(triton.cdiv(n, _ROWS),)](
        targets, coupling, inverses.contiguous(), steps[start : start + inputs].contiguous(), values, moves, n,
        inputs // WIDTH, targets.stride(0), coupling.stride(0), coupling.stride(1), improve=improve,
        mantissa=0 if element.is_integer else element.mantissa, min_normal=element.min_normal, lowest=element.min,
        largest=element.max, WIDTH=WIDTH, ROWS=_ROWS, num_warps=1,
    )  # fmt: skip
    return moves
