"""This kernel looks rows up in a quantized table in one launch: a program dequantizes a piece of one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quant.formats.tensor import BlockScaledTensor
from quant.kernels.base.portable_small_floats import compilable
from quant.kernels.linear.portable_codes_gemm import decode_element, decode_scale, layout


@triton.jit
def codes_embedding_kernel(
    ids, codes, scale, global_scale, out, N, K, codes_width, scale_stride,
    element: tl.constexpr, bits: tl.constexpr, kind: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
    has_global: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """`rows` and `columns` of a block are 0 where it spans the axis."""
    # Pieces of a row are neighbours along the only axis of the grid, which may be as long as 2^31.
    pieces = tl.cdiv(K, width)
    position = (tl.program_id(0) // pieces).to(tl.int64)
    row = tl.load(ids + position).to(tl.int64)
    tl.device_assert((row >= 0) & (row < N), "an id is beyond the last row of the embedding")
    valid = (row >= 0) & (row < N)
    k = tl.program_id(0) % pieces * width + tl.arange(0, width)
    inside = (k < K) & valid
    # Codes of 4 and 6 bits are packed from the lowest bit on; one of 6 bits may reach into the next byte.
    byte = k * bits // 8 if bits < 8 else k
    first = tl.load(codes + row * codes_width + byte, mask=inside, other=0.0)
    if bits == 4:
        value = decode_element((first.to(tl.int32) >> (k % 2 * 4)) & 15, element)
    elif bits == 6:
        more = inside & (byte + 1 < codes_width)
        second = tl.load(codes + row * codes_width + byte + 1, mask=more, other=0).to(tl.int32)
        value = decode_element(((first.to(tl.int32) | second << 8) >> (k * 6 % 8)) & 63, element)
    else:
        value = decode_element(first, element)
    block_row = row // rows if rows > 0 else row * 0
    block = k // columns if columns > 0 else k * 0
    step = decode_scale(tl.load(scale + block_row * scale_stride + block, mask=inside, other=0.0), kind)
    if has_global:
        step *= tl.load(global_scale).to(tl.float32)
    # An id beyond the table gives NaN, and reads nothing behind the table.
    value = tl.where(valid, value * step, float("nan"))
    tl.store(out + position * K + k, value.to(out.dtype.element_ty), mask=k < K)


def look_up(ids: torch.Tensor, weight: BlockScaledTensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the rows `ids` of `weight` in `dtype`, `[..., dim]`.

    Raises:
        ValueError: codes or scales that are not contiguous or not on one device; nothing was launched.
    """
    shape = weight.shape
    for name, tensor in (("codes", weight.codes), ("scale", weight.scale)):
        if not tensor.is_contiguous() or tensor.device != ids.device:
            where = f"on {tensor.device} with strides {tensor.stride()}"
            raise ValueError(f"embedding of {list(shape)}: {name} is {where}, expected contiguous, on {ids.device}")
    flat = ids.contiguous().view(-1)
    codes, scale = compilable(weight.codes), compilable(weight.scale)
    out = torch.empty(*ids.shape, shape[1], dtype=dtype, device=ids.device)
    width = 1024
    codes_embedding_kernel[len(flat) * triton.cdiv(shape[1], width),](
        flat, codes, scale, scale if weight.global_scale is None else weight.global_scale, out,
        shape[0], shape[1], codes.shape[1], scale.shape[1], **layout(weight.format),
        has_global=weight.global_scale is not None, width=width, num_warps=4,
    )  # fmt: skip
    return out
