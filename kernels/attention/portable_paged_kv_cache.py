"""These kernels write a paged KV cache, rounding to its format, and dequantize NVFP4 from it.

    write_kv        program (tokens, KV head, sequence)   K [tokens, dim] ─▶ amax ─▶ scale ─▶ codes in their page; V too
    read_nvfp4_kv   program (tokens, head of a sequence)  codes, scales ─▶ code · block scale · scale ─▶ [tokens, dim]

`write_kv_slots` does the same for a server's batch, where each token has a slot of its own.

The codes are equal to the codes of `quant.kernels.attention.kv_pages.encode_kv`, bit for bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quant.kernels.attention.kv_pages import CANDIDATES, KVPages
from quant.kernels.base.launch import on_its_gpu
from quant.kernels.base.portable_dependent_launch import overlap_options, wait_for_previous
from quant.kernels.base.portable_small_floats import (
    amax_of,
    compilable,
    encode_e2m1,
    encode_scale,
    finite_or_nan,
    from_e4m3,
    nearest_e2m1,
    nonzero,
    to_e4m3,
)

_FIRST, _LAST = (tl.constexpr(offset) for offset in CANDIDATES)


@triton.jit
def _best_scale(value, stored, scale):
    """Returns `quant.kernels.attention.kv_pages.block_scales` of `value` [tokens, blocks, 16]: `max` scales."""
    # The code comes from the value's bits: on an H100 a bitcast of `stored` gave zero for every other token.
    first = from_e4m3(stored)
    bits = first.to(tl.int32, bitcast=True)
    code = tl.where(first < 0.015625, (first * 512).to(tl.int32), (bits >> 20) - 960)
    power = (bits & 0x7F800000).to(tl.float32, bitcast=True)
    magnitude = tl.minimum(tl.abs(value) * tl.div_rn(1.0, scale), 32 * power[:, :, None])
    unit = tl.div_rn(256.0, power)[:, :, None]
    # Errors in whole units, 2^-8 of the power of two below the scale: sums of integers, equal on every machine.
    best, least = code, tl.full(code.shape, 0x7FFFFFFF, tl.int32)
    for offset in tl.static_range(_FIRST, _LAST + 1):
        candidate = tl.minimum(tl.maximum(code + offset, 1), 126)
        step = from_e4m3(candidate.to(tl.uint8).to(stored.dtype, bitcast=True))
        rounded = nearest_e2m1(magnitude * tl.div_rn(1.0, step)[:, :, None]) * step[:, :, None]
        # 1.5 · 2^23 leaves the nearest whole number in the low bits of the sum.
        steps = ((magnitude - rounded) * unit + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
        error = tl.sum(steps * steps, 2)
        best, least = tl.where(error < least, candidate, best), tl.minimum(error, least)
    return tl.where(first == first, best, 0x7F).to(tl.uint8).to(stored.dtype, bitcast=True)


@triton.jit
def _write(
    x, codes, scale, blocks, codes_at, blocks_at, line, inside, kv_head,
    kind: tl.constexpr, per_token: tl.constexpr, dim: tl.constexpr, width: tl.constexpr, tokens: tl.constexpr,
):  # fmt: skip
    """Writes `x` [tokens, width] to the rows of pages that begin at `codes_at` and `blocks_at`; `line` counts rows."""
    x, column = x.to(tl.float32), tl.arange(0, width)
    if kind == "16bit":
        mask = inside[:, None] & (column < dim)[None, :]
        tl.store(codes + codes_at[:, None] + column[None, :], x.to(codes.dtype.element_ty), mask=mask)
    elif kind == "fp8":
        if per_token:
            step = nonzero(tl.div_rn(amax_of(x, 1), 448.0))
            tl.store(scale + line, step, mask=inside)
            step = tl.broadcast_to(step[:, None], (tokens, width))
        else:
            step = tl.broadcast_to(tl.load(scale + kv_head), (tokens, width))
        steps = tl.div_rn(finite_or_nan(x), step)
        steps = tl.clamp(steps, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        steps = to_e4m3(steps, codes.dtype.element_ty)
        mask = inside[:, None] & (column < dim)[None, :]
        tl.store(codes + codes_at[:, None] + column[None, :], steps, mask=mask)
    else:
        value = x.reshape(tokens, width // 16, 16)
        global_scale = tl.load(scale + kv_head)
        stored, step = encode_scale(amax_of(value, 2), global_scale, "e4m3", 6.0, blocks.dtype.element_ty)
        stored = _best_scale(value, stored, global_scale)
        step = from_e4m3(stored) * global_scale
        block = tl.arange(0, width // 16)
        mask = inside[:, None] & (block < dim // 16)[None, :]
        tl.store(blocks + blocks_at[:, None] + block[None, :], stored, mask=mask)
        steps = tl.div_rn(value, tl.broadcast_to(step[:, :, None], (tokens, width // 16, 16)))
        # Two codes a byte, the even column in the low bits.
        low, high = tl.split(encode_e2m1(steps).reshape(tokens, width // 2, 2))
        byte = tl.arange(0, width // 2)
        mask = inside[:, None] & (byte < dim // 2)[None, :]
        tl.store(codes + codes_at[:, None] + byte[None, :], (low | high << 4).to(tl.uint8), mask=mask)


@triton.jit(do_not_specialize=["table_stride", "kv_heads", "new"])
def kv_pages_write_kernel(
    k, v, k_codes, v_codes, k_scale, v_scale, k_blocks, v_blocks, table, first, code_page, block_page,
    k_batch, k_head, k_token, v_batch, v_head, v_token, table_stride, kv_heads, new,
    kind: tl.constexpr, per_token: tl.constexpr, dim: tl.constexpr, width: tl.constexpr, page: tl.constexpr,
    tokens: tl.constexpr,
):  # fmt: skip
    """Writes the new tokens of one KV head and sequence into their pages; see the module docstring."""
    token = tl.program_id(0) * tokens + tl.arange(0, tokens)
    kv_head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    inside = token < new
    column = tl.arange(0, width)
    # Row of the pages: [page of the position, KV head, place in the page].
    position = tl.load(first + batch) + token
    index = tl.load(table + batch * table_stride + position // page, mask=inside, other=0).to(tl.int64)
    row = kv_head * page + position % page
    line = index * kv_heads * page + row
    codes_at = index * code_page + row * (dim // 2 if kind == "nvfp4" else dim)
    blocks_at = index * block_page + row * (dim // 16)
    mask = inside[:, None] & (column < dim)[None, :]
    at, head = token.to(tl.int64)[:, None], kv_head.to(tl.int64)
    x = tl.load(k + batch * k_batch + head * k_head + at * k_token + column[None, :], mask=mask, other=0.0)
    _write(
        x, k_codes, k_scale, k_blocks, codes_at, blocks_at, line, inside, kv_head, kind, per_token, dim, width, tokens
    )
    x = tl.load(v + batch * v_batch + head * v_head + at * v_token + column[None, :], mask=mask, other=0.0)
    _write(
        x, v_codes, v_scale, v_blocks, codes_at, blocks_at, line, inside, kv_head, kind, per_token, dim, width, tokens
    )


@on_its_gpu
def write_kv(pages: KVPages, table: Tensor, first: Tensor, k: Tensor, v: Tensor) -> None:
    """Writes k and v `[batch, kv_heads, new, dim]` at the positions from `first` `[batch]` on."""
    k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (k, v))
    batch, kv_heads, new, dim = k.shape
    scales = [x if x is not None else first for x in (pages.k_scale, pages.v_scale)]
    codes = [compilable(x) for x in (pages.k, pages.v)]
    blocks = [codes[0] if x is None else compilable(x) for x in (pages.k_blocks, pages.v_blocks)]
    # A tile of at most 2,048 values: 16 a thread of four warps.
    tokens = min(2048 // triton.next_power_of_2(dim), triton.next_power_of_2(new))
    kv_pages_write_kernel[triton.cdiv(new, tokens), kv_heads, batch](
        k, v, *codes, *scales, *blocks, table, first, codes[0].stride(0), blocks[0].stride(0),
        *k.stride()[:3], *v.stride()[:3], table.stride(0), kv_heads, new,
        kind=pages.kind, per_token=pages.per_token, dim=dim, width=triton.next_power_of_2(dim), page=pages.page_size,
        tokens=tokens, num_warps=4 if tokens * dim > 1024 else 1, enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit
def _write_slots(
    x, codes, scale, blocks, slot, code_page, block_page, stride, kv_heads,
    kind: tl.constexpr, per_token: tl.constexpr, dim: tl.constexpr, width: tl.constexpr, page: tl.constexpr,
    tokens: tl.constexpr,
):  # fmt: skip
    """Writes one KV head of keys, or of values, `stride` apart from token to token, into the slots `[tokens]`."""
    kv_head = tl.program_id(1)
    token = (tl.program_id(0) * tokens + tl.arange(0, tokens)).to(tl.int64)
    column = tl.arange(0, width)
    inside = slot >= 0
    row = kv_head * page + slot % page
    line = slot // page * kv_heads * page + row
    codes_at = slot // page * code_page + row * (dim // 2 if kind == "nvfp4" else dim)
    blocks_at = slot // page * block_page + row * (dim // 16)
    mask = inside[:, None] & (column < dim)[None, :]
    x = tl.load(x + token[:, None] * stride + column[None, :], mask=mask, other=0.0)
    _write(x, codes, scale, blocks, codes_at, blocks_at, line, inside, kv_head, kind, per_token, dim, width, tokens)


@triton.jit(do_not_specialize=["kv_heads", "count"])
def kv_slots_write_kernel(
    k, v, k_codes, v_codes, k_scale, v_scale, k_blocks, v_blocks, slots, code_page, block_page,
    k_token, k_head, v_token, v_head, kv_heads, count,
    kind: tl.constexpr, per_token: tl.constexpr, dim: tl.constexpr, width: tl.constexpr, page: tl.constexpr,
    tokens: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Writes the tokens of a batch into their slots; a token whose slot is negative is not written."""
    # Grid: (tokens, KV heads, 2), keys and values in programs of their own: a decoding step waits for the slowest one.
    # The kernel starts before the previous one has ended, but the next one only after it: programs of attention that
    # arrive while SMs are still busy are spread unevenly over them, and 32k tokens then took 1.7 times as long (H100).
    token = (tl.program_id(0) * tokens + tl.arange(0, tokens)).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    # No kernel of a step writes the slots.
    slot = tl.load(slots + token, mask=token < count, other=-1).to(tl.int64)
    wait_for_previous(overlap)
    if tl.program_id(2) == 0:
        _write_slots(
            k + head * k_head, k_codes, k_scale, k_blocks, slot, code_page, block_page, k_token, kv_heads, kind,
            per_token, dim, width, page, tokens,
        )  # fmt: skip
    else:
        _write_slots(
            v + head * v_head, v_codes, v_scale, v_blocks, slot, code_page, block_page, v_token, kv_heads, kind,
            per_token, dim, width, page, tokens,
        )  # fmt: skip


def write_kv_slots(pages: KVPages, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Writes k and v `[tokens, kv_heads, dim]` to slots `[tokens]`: page · page_size + place, below 0 for nowhere."""
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    count, kv_heads, dim = k.shape
    scales = [x if x is not None else slots for x in (pages.k_scale, pages.v_scale)]
    codes = [compilable(x) for x in (pages.k, pages.v)]
    blocks = [codes[0] if x is None else compilable(x) for x in (pages.k_blocks, pages.v_blocks)]
    width = triton.next_power_of_2(dim)
    # The search for block scales is unrolled eight times: a warp with more values than these would not fit registers.
    tokens = 1 if count <= 128 else max(256 // width, 1)
    if count:
        kv_slots_write_kernel[triton.cdiv(count, tokens), kv_heads, 2](
            k, v, *codes, *scales, *blocks, slots, codes[0].stride(0), blocks[0].stride(0),
            *k.stride()[:2], *v.stride()[:2], kv_heads, count,
            kind=pages.kind, per_token=pages.per_token, dim=dim, width=width, page=pages.page_size, tokens=tokens,
            num_warps=1, **overlap_options(k), enable_fp_fusion=True,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def nvfp4_kv_read_kernel(codes, blocks, scale, out, tokens, dim: tl.constexpr, width: tl.constexpr, rows: tl.constexpr):
    """NVFP4 to values; codes `[heads, tokens, dim / 2]`, `width`: `dim` as a power of two."""
    token = tl.program_id(0) * rows + tl.arange(0, rows)
    head = tl.program_id(1)
    line = head.to(tl.int64) * tokens + token
    inside = (token < tokens)[:, None]
    byte = tl.arange(0, width // 2)
    mask = inside & (byte < dim // 2)[None, :]
    code = tl.load(codes + line[:, None] * (dim // 2) + byte[None, :], mask=mask, other=0).to(tl.int32)
    block = tl.arange(0, width // 16)
    mask = inside & (block < dim // 16)[None, :]
    step = tl.load(blocks + line[:, None] * (dim // 16) + block[None, :], mask=mask, other=0.0)
    step = from_e4m3(step) * tl.load(scale + head)
    code = tl.join(code, code >> 4).reshape(rows, width // 16, 16)
    # FP16 of sign, exponent and mantissa is the value · 2⁻¹⁴.
    bits = ((code & 8) << 12) | ((code & 7) << 9)
    element = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    value = (element * step[:, :, None]).reshape(rows, width)
    column = tl.arange(0, width)
    mask = inside & (column < dim)[None, :]
    tl.store(out + line[:, None] * dim + column[None, :], value.to(out.dtype.element_ty), mask=mask)


def read_nvfp4_kv(codes: Tensor, blocks: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the values of NVFP4 codes `[batch, kv_heads, tokens, dim / 2]` under scales `[batch, kv_heads]`."""
    batch, heads, tokens, half = codes.shape
    out = torch.empty((batch, heads, tokens, 2 * half), dtype=dtype, device=codes.device)
    width = triton.next_power_of_2(2 * half)
    rows = 4096 // width
    nvfp4_kv_read_kernel[triton.cdiv(tokens, rows), batch * heads](
        codes, compilable(blocks), scale, out, tokens, 2 * half, width, rows, num_warps=4, enable_fp_fusion=True
    )
    return out
