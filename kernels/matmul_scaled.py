"""Block-scaled matmul for Blackwell: y = x · Wᵀ + bias with both sides in NVFP4, MXFP4 or MXFP8, as they are stored.

The tensor cores of compute capability 10.0 and 12.0 take codes and block scales together; nothing is dequantized.

    x  codes [M, K]  scale [M, K / block]       acc += dot_scaled(x tile, its scales, W tile, its scales)
    W  codes [N, K]  scale [N, K / block]       y = acc · global scale of x · global scale of W + bias

x is quantized in the pass before (`kernels/cast.py`). A program owns a tile of y; tiles are visited in bands of
`_BAND` rows of tiles, so that those at work at one time share what they read through the L2 cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quant.formats.tensor import BlockScaledTensor
from quant.kernels.hardware import current

SCALED_FORMATS = ("nvfp4", "mxfp4", "mxfp8")
"""Formats that both sides may have; both have the same."""
_BAND = tl.constexpr(8)


@triton.jit
def scaled_linear_kernel(
    x, x_scale, x_global, codes, scale, w_global, bias, y, M, N, K,
    element: tl.constexpr, block: tl.constexpr, has_global: tl.constexpr, has_bias: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """See the module docstring. Tails are masked: codes beyond the end are zero."""
    tiles_m, tiles_n = tl.cdiv(M, block_m), tl.cdiv(N, block_n)
    index = tl.program_id(0)
    band = index // (_BAND * tiles_n)
    height = tl.minimum(tiles_m - band * _BAND, _BAND)
    within = index % (_BAND * tiles_n)
    m = (band * _BAND + within % height) * block_m + tl.arange(0, block_m)
    n = within // height * block_n + tl.arange(0, block_n)
    packed: tl.constexpr = 2 if element == "e2m1" else 1
    byte = tl.arange(0, block_k // packed)
    group = tl.arange(0, block_k // block)
    m_row, n_row = tl.minimum(m, M - 1).to(tl.int64)[:, None], tl.minimum(n, N - 1).to(tl.int64)[:, None]
    x_codes, w_codes = x + m_row * (K // packed), codes + n_row * (K // packed)
    x_scales, w_scales = x_scale + m_row * (K // block), scale + n_row * (K // block)
    acc = tl.zeros((block_m, block_n), dtype=tl.float32)
    for step in range(tl.cdiv(K, block_k)):
        at = (step * (block_k // packed) + byte)[None, :]
        of = (step * (block_k // block) + group)[None, :]
        inside, known = at < K // packed, of < K // block
        a, b = tl.load(x_codes + at, mask=inside, other=0.0), tl.load(w_codes + at, mask=inside, other=0.0)
        sa, sb = tl.load(x_scales + of, mask=known, other=0.0), tl.load(w_scales + of, mask=known, other=0.0)
        acc = tl.dot_scaled(a, sa, element, tl.trans(b), sb, element, acc)
    if has_global:
        acc *= tl.load(x_global).to(tl.float32) * tl.load(w_global).to(tl.float32)
    if has_bias:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    place = y + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(place, acc.to(y.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


def scaled_linear(
    x: BlockScaledTensor, weight: BlockScaledTensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """`x @ weight.T + bias`, nothing dequantized.

    Args:
        x: `[tokens, in]`, one of `SCALED_FORMATS`.
        weight: `[out, in]`, the same format, in a multiple of its block.
        bias: `[out]`, or None.
        dtype: of the result.

    Returns:
        `[tokens, out]`.

    Raises:
        ValueError: formats or widths that do not match, or that the kernel does not take.
    """
    (tokens, columns), rows, form = x.shape, weight.shape[0], weight.format
    if x.format is not form or form.name not in SCALED_FORMATS:
        raise ValueError(f"block-scaled matmul of {x.format} by {form}: expected one of {', '.join(SCALED_FORMATS)}")
    if columns != weight.shape[1] or columns % form.block[1]:
        raise ValueError(
            f"block-scaled matmul of x {list(x.shape)} by {list(weight.shape)} in {form}: expected one width, "
            f"a multiple of {form.block[1]}"
        )
    y = torch.empty(tokens, rows, dtype=dtype, device=x.codes.device)
    if tokens:
        tiles = tile_shape(form.element.bits, current(y.device.index or 0).arch if y.is_cuda else 100)
        grid = (triton.cdiv(tokens, tiles["block_m"]) * triton.cdiv(rows, tiles["block_n"]),)
        scaled_linear_kernel[grid](
            x.codes, x.scale, x.scale if x.global_scale is None else x.global_scale,
            weight.codes, weight.scale, weight.scale if weight.global_scale is None else weight.global_scale,
            y if bias is None else bias, y, tokens, rows, columns,
            element=form.element.name, block=form.block[1], has_global=form.global_scale, has_bias=bias is not None,
            **tiles, num_warps=8, num_stages=3,
        )  # fmt: skip
    return y


def tile_shape(bits: int, arch: int) -> dict[str, int]:
    """Tile of y and step along K. Compute capability 12.0 keeps the sums in registers, which bounds the step."""
    return {"block_m": 128, "block_n": 128, "block_k": 256 if bits == 4 and arch < 120 else 128}
