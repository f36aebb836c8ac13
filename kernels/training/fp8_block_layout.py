"""How operands of FP8 training in blocks lie in memory, where kernels write them and cuBLASLt reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 128
_SUMMED = 512  # a multiple of which are sums with squares: cuBLASLt reads four of their scales at a time
RULES = ("power_of_two", "transformer_engine", "divided")
"""Scales are powers of two, rounded up; FP32 as Transformer Engine computes them; or amax / 448."""


SwiGLUGradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""Codes and scale of `[d gate, d up]`, and codes_t and scale_t of d gate, of d up and of silu(gate) · up."""


class Operands(NamedTuple):
    """A matrix `[R, C]` in both directions; tensors of a direction that is left out are empty."""

    # The axis of a sum with squares (C of codes, R of a square's codes_t) is padded with zeros to a multiple of 512,
    # all other axes to 128.

    codes: Tensor  # E4M3 `[R, C]`
    scale: Tensor  # float32 `[C / 128, R]`; of squares `[R / 128, C / 128]`
    codes_t: Tensor  # E4M3 `[C, R]`
    scale_t: Tensor  # float32 `[R / 128, C]`; of squares `[C / 128, R / 128]`


def allocate(
    x: Tensor, square: bool, rows: bool, columns: bool, *, height: int | None = None, width: int | None = None
) -> Operands:
    """Returns the operands of a matrix `[R, C]`, not filled; `height` and `width` are its size where x is a part."""
    height, width = height or x.shape[0], width or x.shape[1]

    def direction(lines: int, summed: int, multiple: int, is_wanted: bool) -> tuple[Tensor, Tensor]:
        shape = (padded(lines, BLOCK), padded(summed, multiple)) if is_wanted else (0, 0)
        blocks = shape[1] // BLOCK
        scales = (shape[0] // BLOCK, blocks) if square else (blocks, shape[0])
        return x.new_empty(shape, dtype=torch.float8_e4m3fn), x.new_empty(scales, dtype=torch.float32)

    # The weight gradient sums over rows of two matrices without squares.
    return Operands(
        *direction(height, width, _SUMMED, rows), *direction(width, height, _SUMMED if square else BLOCK, columns)
    )


def padded(size: int, multiple: int) -> int:
    """Returns `size` rounded up to a multiple."""
    return -(-size // multiple) * multiple


def allocate_side_by_side(parts: Sequence[Tensor], rows: bool, columns: bool) -> tuple[list[Operands], Operands]:
    """Returns operands, not filled, of matrices `[R, C]` of one height, each C a multiple of 128."""
    # Each has `codes_t` and `scale_t` of its own. Their `codes` and `scale` are slices of the second result's, which
    # hold all columns, one part beside another: one product sums over the columns of all parts.
    whole = allocate(parts[0], False, rows, False, width=sum(part.shape[1] for part in parts))
    operands, first = [], 0
    for index, part in enumerate(parts):
        # The last part fills the padding, too.
        end = first + part.shape[1] if index + 1 < len(parts) else whole.codes.shape[1]
        slices = whole.codes[:, first:end], whole.scale[first // BLOCK : end // BLOCK]
        operands.append(Operands(*slices, *allocate(part, False, False, columns)[2:]))
        first = end
    return operands, whole


def allocate_stacked(parts: Sequence[Tensor], rows: bool, columns: bool) -> tuple[list[Operands], Operands]:
    """Returns operands in squares, not filled, of matrices `[R, C]` of one width, each R a multiple of 128."""
    # Each has `codes` and `scale` of its own. Their `codes_t` and `scale_t` are slices of the second result's, which
    # hold all rows, one part after another: one product sums over the rows of all parts.
    whole = allocate(parts[0], True, False, columns, height=sum(map(len, parts)))
    operands, first = [], 0
    for index, part in enumerate(parts):
        # The last part fills the padding, too.
        end = first + len(part) if index + 1 < len(parts) else whole.codes_t.shape[1]
        slices = whole.codes_t[:, first:end], whole.scale_t[:, first // BLOCK : end // BLOCK]
        operands.append(Operands(*allocate(part, True, rows, False)[:2], *slices))
        first = end
    return operands, whole
