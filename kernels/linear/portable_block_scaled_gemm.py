"""Blackwell's block-scaled matmul is y = x · Wᵀ + bias with both sides in NVFP4, MXFP4 or MXFP8 as they are stored.

The tensor cores of compute capability 10.0 and 12.0 take codes and block scales together; nothing is dequantized.

    x  codes [M, K]  scale [M, K / block]       acc += dot_scaled(x tile, its scales, W tile, its scales)
    W  codes [N, K]  scale [N, K / block]       y = acc · global scale of x · global scale of W + bias

x is quantized in the pass before (`kernels/rounding/portable_casts.py`). A program owns a tile of y; tiles are visited in bands
of `_BAND` rows of tiles, so that programs at work at one time share tiles of x and W in the L2 cache. With `offsets`,
rows are sorted by expert and each tile takes the weight of its own (`kernels/linear/portable_grouped_gemm.py`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quant.formats.format import Format
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.base.hardware import current
from quant.kernels.linear import portable_grouped_gemm
from quant.kernels.linear.portable_grouped_gemm import group_of

SCALED_FORMATS = ("nvfp4", "mxfp4", "mxfp8")
"""Formats that both sides may have; both have the same."""
_BAND = tl.constexpr(8)


@triton.jit(do_not_specialize=["experts"])
def block_scaled_gemm_kernel(
    x, x_scale, x_global, codes, scale, w_global, bias, offsets, y, M, N, K, experts,
    element: tl.constexpr, block: tl.constexpr, has_global: tl.constexpr, has_bias: tl.constexpr,
    grouped: tl.constexpr, width: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """See the module docstring. Tails are masked: codes beyond the end are zero."""
    tiles_n = tl.cdiv(N, block_n)
    index = tl.program_id(0)
    if grouped:
        # All tiles of W for each tile of tokens; tiles beyond the last have the expert `experts`.
        tile_n = index % tiles_n
        expert, first, last = group_of(index // tiles_n, offsets, experts, block_m, width)
    else:
        band = index // (_BAND * tiles_n)
        height = tl.minimum(tl.cdiv(M, block_m) - band * _BAND, _BAND)
        within = index % (_BAND * tiles_n)
        tile_n = within // height
        expert, first, last = 0, (band * _BAND + within % height) * block_m, M
    if expert < experts:
        _scaled_tile(x, x_scale, x_global, codes, scale, w_global, bias, y, first, last, tile_n * block_n, expert,
                     N, K, element, block, has_global, has_bias, block_m, block_n, block_k)  # fmt: skip


@triton.jit
def _scaled_tile(
    x, x_scale, x_global, codes, scale, w_global, bias, y, first, last, first_n, expert, N, K,
    element: tl.constexpr, block: tl.constexpr, has_global: tl.constexpr, has_bias: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """Computes rows `first` to `last` at most, columns from `first_n`, by the weight of `expert`."""
    m, n = first + tl.arange(0, block_m), first_n + tl.arange(0, block_n)
    packed: tl.constexpr = 2 if element == "e2m1" else 1
    byte = tl.arange(0, block_k // packed)
    group = tl.arange(0, block_k // block)
    m_row = tl.minimum(m, last - 1).to(tl.int64)[:, None]
    n_row = tl.cast(expert, tl.int64) * N + tl.minimum(n, N - 1)[:, None]
    x_codes, w_codes = x + m_row * (K // packed), codes + n_row * (K // packed)
    x_scales, w_scales = x_scale + m_row * (K // block), scale + n_row * (K // block)
    acc = tl.zeros((block_m, block_n), dtype=tl.float32)
    for step in range(tl.cdiv(K, block_k)):
        at = (step * (block_k // packed) + byte)[None, :]
        of = (step * (block_k // block) + group)[None, :]
        inside, scale_mask = at < K // packed, of < K // block
        a, b = tl.load(x_codes + at, mask=inside, other=0.0), tl.load(w_codes + at, mask=inside, other=0.0)
        sa, sb = tl.load(x_scales + of, mask=scale_mask, other=0.0), tl.load(w_scales + of, mask=scale_mask, other=0.0)
        # Codes and scales as they are stored; on GPUs without such tensor cores Triton would dequantize.
        acc = tl.dot_scaled(a, sa, element, tl.trans(b), sb, element, acc)
    # Global scales are one number a side (W's, one an expert), constant along K.
    if has_global:
        acc *= tl.load(x_global).to(tl.float32) * tl.load(w_global + expert).to(tl.float32)
    if has_bias:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    pointer = y + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(pointer, acc.to(y.dtype.element_ty), mask=(m[:, None] < last) & (n[None, :] < N))


def block_scaled_gemm(
    x: BlockScaledTensor,
    weight: BlockScaledTensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns `x @ weight.T + bias`, nothing dequantized.

    Args:
        x: `[tokens, in]`, one of `SCALED_FORMATS`.
        weight: `[out, in]`, or with offsets `[experts, out, in]`; the same codes, in a multiple of its block.
        bias: `[out]`, or None.
        dtype: the dtype of the result.
        offsets: int32 `[experts + 1]`, where the rows of each expert begin; rows beyond the last are undefined.

    Returns:
        `[tokens, out]`.

    Raises:
        ValueError: formats or widths that do not match, or that the kernel does not take.
    """
    (tokens, columns), rows, form = x.shape, weight.shape[-2], weight.format
    if not takes(form, x.format):
        raise ValueError(f"block-scaled matmul of {x.format} by {form}: expected one of {', '.join(SCALED_FORMATS)}")
    if columns != weight.shape[-1] or columns % form.block[1]:
        raise ValueError(
            f"block-scaled matmul of x {list(x.shape)} by {list(weight.shape)} in {form}: expected one width, "
            f"a multiple of {form.block[1]}"
        )
    if (offsets is None) != (len(weight.shape) == 2):
        raise ValueError(f"block-scaled matmul by {list(weight.shape)}: offsets go with a weight of three axes")
    experts = 1
    if offsets is not None:
        portable_grouped_gemm.check_experts(x.codes, weight, offsets)
        experts = weight.shape[0]
    y = torch.empty(tokens, rows, dtype=dtype, device=x.codes.device)
    if tokens:
        tiles = tile_shape(form.element.bits, current(y.device.index or 0).arch if y.is_cuda else 100)
        count = triton.cdiv(tokens, tiles["block_m"])
        if offsets is not None:
            count = portable_grouped_gemm.most_tiles(tokens, experts, tiles["block_m"])
        block_scaled_gemm_kernel[count * triton.cdiv(rows, tiles["block_n"]),](
            x.codes, x.scale, x.scale if x.global_scale is None else x.global_scale,
            weight.codes, weight.scale, weight.scale if weight.global_scale is None else weight.global_scale,
            y if bias is None else bias, y if offsets is None else offsets, y, tokens, rows, columns, experts,
            element=form.element.name, block=form.block[1], has_global=form.global_scale, has_bias=bias is not None,
            grouped=offsets is not None, width=triton.next_power_of_2(experts), **tiles, num_warps=8, num_stages=3,
        )  # fmt: skip
    return y


def takes(weight: Format, rows: Format) -> bool:
    """Returns whether `block_scaled_gemm` multiplies these formats."""
    return rows.has_codes_of(weight) and weight.name in SCALED_FORMATS


def tile_shape(bits: int, arch: int) -> dict[str, int]:
    """Returns the tile of y and step along K.

    Compute capability 12.0 keeps the sums in registers, which bounds the step.
    """
    return {"block_m": 128, "block_n": 128, "block_k": 256 if bits == 4 and arch < 120 else 128}
