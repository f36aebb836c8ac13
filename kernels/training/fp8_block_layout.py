"""How operands of FP8 training in blocks lie in memory, where kernels write them and cuBLASLt reads them."""

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
