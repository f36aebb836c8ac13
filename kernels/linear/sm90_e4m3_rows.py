"""Rows of x in E4M3 multiply NVFP4 weights on Hopper's FP8 tensor cores here, each with the scale of its token.

    x [tokens, in] ─▶ E4M3 with a scale a token ─▶ wgmma in FP8 ─▶ · scale of the token · global scale ─▶ y
    words          ─▶ decoded to E4M3 in registers ─▶ ┘

FP8 has twice the rate of 16 bit, and W stays in four bits. A thread of the product takes four neighbouring columns of
each row where a word has pairs of columns eight apart; so the columns of x lie in another order, which changes no sum:

    position 4 q + 2 a + h of sixteen   holds column 8 a + 2 q + h      q < 4; a, h < 2

The price is a second rounding of W, of up to one part in 16, and the rounding of x.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from quant.formats.format import E4M3
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.base.hardware import current
from quant.kernels.base.launch import BoundedTable, cached_launch
from quant.kernels.base.portable_dependent_launch import overlap_options, start_next, wait_for_previous
from quant.kernels.base.portable_small_floats import encode_scale, larger, quotient_to_code, reciprocal
from quant.kernels.linear import sm90_codes_gemm_many
from quant.kernels.linear.tiles import PrefillTiles, quickest_in_e4m3

_launches = BoundedTable[Callable[..., Tensor]](1 << 10)
"""Launches by the shapes of their arguments, since preparing one takes longer than a small product."""


@triton.jit
def _code(value, step):
    """Returns the byte of `value / step` in E4M3, as int32."""
    if (step > 1e-20) & (step < 1e30):
        quotient = quotient_to_code(value, step, reciprocal(step))
    else:
        quotient = tl.div_rn(value, step)
    return quotient.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)


@triton.jit
def rows_to_e4m3_kernel(
    x, codes, scale, x_stride, K, largest: tl.constexpr, width: tl.constexpr, overlap: tl.constexpr
):
    """A program rounds one row. Four codes, a word, are two pairs of neighbours, the second eight columns on."""
    # x and codes are read and written as int32, so that a thread loads and stores 16 bytes in the order above.
    start_next(overlap)
    wait_for_previous(overlap)
    row = tl.program_id(0).to(tl.int64)
    word = tl.arange(0, width)
    inside = word < K // 4
    pair = row * x_stride // 2 + word // 4 * 8 + word % 4
    near = tl.load(x + pair, mask=inside, other=0)
    far = tl.load(x + pair + 4, mask=inside, other=0)
    # The bits of a bfloat16 are the upper half of a float32's; the first of a pair is in the lower half of its word.
    a, b = (near << 16).to(tl.float32, bitcast=True), (near & -65536).to(tl.float32, bitcast=True)
    c, d = (far << 16).to(tl.float32, bitcast=True), (far & -65536).to(tl.float32, bitcast=True)
    magnitude = larger(larger(tl.abs(a), tl.abs(b)), larger(tl.abs(c), tl.abs(d)))
    stored, step = encode_scale(tl.reduce(magnitude, 0, larger), 1.0, "wide", largest, tl.float32)
    tl.store(scale + row, stored)
    four = _code(a, step) | (_code(b, step) << 8) | (_code(c, step) << 16) | (_code(d, step) << 24)
    tl.store(codes + row * (K // 4) + word, four, mask=inside)


def rows_to_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the codes of x `[tokens, in]`, columns in the order above, and the scales, float32 `[tokens]`."""
    # x is in BF16, rows contiguous; their length and distance are multiples of 16.
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(len(x), dtype=torch.float32, device=x.device)
    pairs = x.view(torch.int32)
    # At least four words a thread: with two, 192 and 256 columns came out wrong on an H100 (Triton 3.6 and 3.7).
    width = max(triton.next_power_of_2(x.shape[1] // 4), 128)
    options = {"largest": E4M3.max, "width": width, "num_warps": min(width // 128, 16), **overlap_options(x)}
    launch = cached_launch(rows_to_e4m3_kernel, (len(x),), **options)
    launch(pairs, codes.view(torch.int32), scale, x.stride(0), x.shape[1])
    return codes, scale


def multiply_in_e4m3(
    x: Tensor, weight: BlockScaledTensor, bias: Tensor | None, tiles: PrefillTiles | None = None
) -> Tensor:
    """Returns `x @ weight.T + bias` with x and W, prepacked NVFP4, rounded to E4M3; `[tokens, out]` in BF16."""
    codes, scale = rows_to_e4m3(x)
    key = (x.shape, weight.shape, None if bias is None else bias.dtype, tiles, x.device)
    launch = _launches.get(key)
    if launch is None:
        if tiles is None:
            shape = (weight.shape[0], weight.shape[1])
            tiles = quickest_in_e4m3(len(x), shape, current(x.device.index or 0))
        launch = sm90_codes_gemm_many.prepare_gemm_many(codes, weight, bias, tiles)
        _launches[key] = launch
    return launch(codes, weight, bias, scale)
