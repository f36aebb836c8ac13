"""These kernels attend to a paged cache: keys are split over programs, and codes are decoded in registers.

    q [batch, heads, new, dim]         a tile: the query heads of one KV head, for one or several new tokens
    pages [page, kv_head, 16…64, D]    read through the block table, a token a row

    program (split of the keys, KV head · tile of queries, sequence)
        for each tile of tokens:   S = K Qᵀ            [tokens, queries], FP16 dots, FP32 sums, times all scales of K
                                   P = 2^(S − max)     rounded to FP16 (BF16 over a cache in BF16)
                                   O = O · decay + Vᵀ P
        writes O / Σ P · V scale and the log-sum-exp of its split
    reduction: the splits, weighted by their log-sum-exps, always in the same order

Queries are columns, because a tensor core's product has at least 16 rows and 8 columns: eight query heads of a KV head
fill the columns, and would fill only half of the rows. Decoding has few queries and many keys: small tiles, and splits
until the GPU is full. A chunk of a prompt has many queries: larger tiles and one split. Only the launch differs.

Codes are loaded as 16-bit units, the granularity in which a tensor core's operands move: two E4M3 or four E2M1 of
neighbouring columns. A unit is decoded to as many FP16 values, so K and V fall into that many pieces (even and odd
columns, or the columns modulo four), Q is read in the same pieces, and nothing is shuffled:

    E4M3   the GPU's own conversion, or: sign, and the other seven bits one place to the right   value · 2⁻⁸
    E2M1   by E4M3 whose sign is at bit 7, exponent and mantissa at bits 4 to 2                  value · 2⁻⁶
           or: sign at bit 15, exponent and mantissa at bits 11 to 9                             value · 2⁻¹⁴

NVFP4's block scale multiplies the decoded codes, which is exact: a code is a multiple of 2⁻¹, a scale of 2⁻⁹, their
product has six significant bits, and times 2⁻¹⁴ it is a multiple of FP16's smallest step, 2⁻²⁴. The powers of two are
folded into the softmax scale and the V scale.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quant.kernels.attention.attention_operands import AttentionOptions, DecodeTiles
from quant.kernels.attention.kv_pages import KVPages
from quant.kernels.base import hardware
from quant.kernels.base.launch import on_its_gpu
from quant.kernels.base.portable_dependent_launch import overlap_options, start_next, wait_for_previous
from quant.kernels.base.portable_small_floats import compilable, decode_e4m3

# Assembly has one output here: of several, Triton 3.8 computes the first in one layout and the others in another, and
# then fetches the block scales of K no longer ahead.
# Two units of two E4M3 each to the FP16 pair of the even columns, or of the odd ones.
_E4M3 = tl.constexpr(
    tuple(
        "{ .reg .b32 t; .reg .b16 a,b; prmt.b32 t, $1, $1, " + bytes_of_pair + "; mov.b32 {a,b}, t; "
        "cvt.rn.f16x2.e4m3x2 $0, a; }"
        for bytes_of_pair in ("0x20", "0x31")
    )
)
# Two units of four E2M1 each, and their block scales, to the FP16 pair of one of the four columns. Codes become E4M3 in
# place, a word's four even or four odd columns at once, and the GPU converts them: 12 instructions for eight codes,
# where shifts to FP16 took 15. Issuing instructions, and not memory, is what limits NVFP4 on an H200.
_ODD = "shr.b32 t,v,2; and.b32 t,t,0x1C1C1C1C; lop3.b32 t,v,0x80808080,t,0xEA; "
_EVEN = "shl.b32 t,v,2; and.b32 t,t,0x1C1C1C1C; shl.b32 s,v,4; lop3.b32 t,s,0x80808080,t,0xEA; "
_E2M1 = tl.constexpr(
    tuple(
        "{ .reg .b32 s,t,v; .reg .b16 a,b; prmt.b32 v, $1, $1, 0x3120; " + four_columns + "mov.b32 {a,b}, t; "
        "cvt.rn.f16x2.e4m3x2 t, " + pair + "; mul.rn.f16x2 $0,t,$2; }"
        for pair in "ab"
        for four_columns in (_EVEN, _ODD)
    )
)


@triton.jit
def _pair(unit, asm: tl.constexpr):
    """Decodes units of two E4M3 to their even and odd columns, FP16: the values, or values · 2⁻⁸ without `asm`."""
    if asm:
        even = tl.inline_asm_elementwise(_E4M3[0], "=r,r", [unit], dtype=tl.float16, is_pure=True, pack=2)
        odd = tl.inline_asm_elementwise(_E4M3[1], "=r,r", [unit], dtype=tl.float16, is_pure=True, pack=2)
        return even, odd
    else:
        low, high = (unit & 0xFF) << 8, unit & -256
        low = (low & -32768) | ((low & 0x7F00) >> 1)
        high = (high & -32768) | ((high & 0x7F00) >> 1)
        return low.to(tl.int16).to(tl.float16, bitcast=True), high.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _nibble(unit, index: tl.constexpr, scale):
    bits = (unit.to(tl.int32) << (12 - 4 * index)) & 0xF000
    bits = (bits & 0x8000) | ((bits & 0x7000) >> 3)
    return bits.to(tl.int16).to(tl.float16, bitcast=True) * scale


@triton.jit
def _column(unit, scale, index: tl.constexpr):
    return tl.inline_asm_elementwise(_E2M1[index], "=r,r,r", [unit, scale], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def _quad(unit, scale, asm: tl.constexpr):
    """Decodes units of four E2M1 to their columns modulo four, times the block scale: FP16, · 2⁻⁶ or 2⁻¹⁴."""
    if asm:
        return _column(unit, scale, 0), _column(unit, scale, 1), _column(unit, scale, 2), _column(unit, scale, 3)
    else:
        return _nibble(unit, 0, scale), _nibble(unit, 1, scale), _nibble(unit, 2, scale), _nibble(unit, 3, scale)


@triton.jit
def _in_16_bit(blocks):
    """Converts block scales, E4M3 or its bytes, to FP16, exactly."""
    if blocks.dtype == tl.uint8:
        return decode_e4m3(blocks).to(tl.float16)
    else:
        return blocks.to(tl.float16)


@triton.jit
def _query(q, row, inside, unit, pieces: tl.constexpr, piece: tl.constexpr, dim: tl.constexpr, dtype: tl.constexpr):
    """Returns one piece of Qᵀ, [units, rows]."""
    column = unit * pieces + piece
    mask = (column < dim)[:, None] & inside[None, :]
    return tl.load(q + column[:, None] + row[None, :], mask=mask, other=0.0).to(dtype)


@triton.jit
def _fetch_to_l2(pointers):
    """Prefetches cache lines into L2, where, unlike in L1, they can never be stale."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _pages(table, start, length, page: tl.constexpr, block_n: tl.constexpr):
    """Returns the page of a tile of tokens, or of each token where a tile spans several pages."""
    if page >= block_n:
        return tl.load(table + tl.minimum(start, length - 1) // page)
    else:
        return tl.load(table + tl.minimum(start + tl.arange(0, block_n), length - 1) // page)


@triton.jit(do_not_specialize=["table_stride", "kv_heads", "new", "splits", "window"])
def paged_attention_kernel(
    q, k, v, k_scale, v_scale, k_blocks, v_blocks, table, lengths, out, lse, code_page, block_page,
    q_batch, q_head, q_new, table_stride, kv_heads, new, splits, softmax_scale, softcap, window,
    kind: tl.constexpr, per_token: tl.constexpr, capped: tl.constexpr, windowed: tl.constexpr, asm: tl.constexpr,
    dim: tl.constexpr, width: tl.constexpr, group: tl.constexpr, page: tl.constexpr,
    head_units: tl.constexpr, token_units: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, stages: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """A tile of queries against one split of the keys; grid: (splits · KV heads · tiles of queries, sequences)."""
    #     first key ─▶ │ begin … end of split 0 │ of split 1 │ … │ ◀─ last key that the tile's last query sees
    #
    # Splits are whole tiles of `block_n` keys. A tile of `block_m` queries is `group` heads of each new token, in
    # turns. `width` is the units of a token's row, as a power of two; `out` is FP32 where `splits` > 1. From a page to
    # the next are `code_page` units of K or V, and `block_page` block scales; within a page, `head_units` from a KV
    # head to the next and `token_units` from a token to the next.
    start_next(overlap)
    pieces: tl.constexpr = 1 if kind == "16bit" else 2 if kind == "fp8" else 4
    units: tl.constexpr = dim // pieces
    padded: tl.constexpr = width != units
    dtype: tl.constexpr = k.dtype.element_ty if kind == "16bit" else tl.float16
    with_asm: tl.constexpr = 64.0 if kind == "nvfp4" else 1.0
    without: tl.constexpr = 16384.0 if kind == "nvfp4" else 256.0 if kind == "fp8" else 1.0
    unscale: tl.constexpr = with_asm if asm else without
    # All but the batch share the first axis of the grid, because the other axes end at 65,535.
    part = tl.program_id(0) % splits
    kv_head = tl.program_id(0) // splits % kv_heads
    first = tl.program_id(0) // splits // kv_heads * block_m
    batch = tl.program_id(1)

    row = first + tl.arange(0, block_m)
    inside = row < new * group
    head = kv_head * group + row % group
    token_of_row = row // group
    unit = tl.arange(0, width)
    length = tl.load(lengths + batch)
    # The last key that each row sees; a tile ends where its last row does.
    last = length - new + token_of_row
    end = tl.minimum(length - new + (first + block_m - 1) // group + 1, length)
    begin = 0
    if windowed:
        begin = tl.maximum(length - new + first // group - window + 1, 0) // block_n * block_n
    # Tiles of keys for each split; the last split may have none.
    tiles = tl.cdiv(tl.cdiv(end - begin, block_n), splits)
    begin += part * tiles * block_n
    end = tl.minimum(end, begin + tiles * block_n)
    table += batch.to(tl.int64) * table_stride
    # The block table is read a tile ahead, because loads of K and V depend on it.
    pages = _pages(table, begin, length, page, block_n)
    if overlap:
        # No kernel of a step writes lengths, the block table or any key but the last one.
        ahead: tl.constexpr = 4
        for start in range(begin, tl.minimum(end, begin + ahead * block_n), block_n):
            read = tl.minimum(start + tl.arange(0, block_n), length - 1)
            ahead_pages = _pages(table, start, length, page, block_n).to(tl.int64)
            lines = (ahead_pages * code_page + kv_head * head_units + read % page * token_units)[:, None]
            piece_of_line = tl.minimum(tl.arange(0, (width + 63) // 64) * 64, units - 1)[None, :]
            _fetch_to_l2(k + lines + piece_of_line)
            _fetch_to_l2(v + lines + piece_of_line)
    wait_for_previous(overlap)

    q_row = batch.to(tl.int64) * q_batch + head.to(tl.int64) * q_head + token_of_row.to(tl.int64) * q_new
    # Q in the same pieces as the columns of a unit: even and odd ones, or columns modulo four.
    q0 = _query(q, q_row, inside, unit, pieces, 0, dim, dtype)
    if pieces > 1:
        q1 = _query(q, q_row, inside, unit, pieces, 1, dim, dtype)
    if pieces == 4:
        q2 = _query(q, q_row, inside, unit, pieces, 2, dim, dtype)
        q3 = _query(q, q_row, inside, unit, pieces, 3, dim, dtype)

    # Decoded codes are 2⁻⁶, 2⁻⁸ or 2⁻¹⁴ of their values: K's power goes into the scores, V's into the output.
    log2_scale = softmax_scale * unscale
    v_factor = unscale
    if not per_token and kind != "16bit":
        log2_scale *= tl.load(k_scale + kv_head)
        v_factor *= tl.load(v_scale + kv_head)
    if not capped:
        log2_scale *= 1.4426950408889634

    row_max = tl.full([block_m], float("-inf"), tl.float32)
    row_sum = tl.zeros([block_m], tl.float32)
    v_ref = 1.0
    # One sum for each piece; sums that the format does not need are never updated.
    o0 = tl.zeros([width, block_m], tl.float32)
    o1 = o0
    o2 = o0
    o3 = o0
    for start in tl.range(begin, end, block_n, num_stages=stages):
        token = start + tl.arange(0, block_n)
        # Tokens beyond the end read the last one: no load needs a mask, and nothing unwritten is read.
        read = tl.minimum(token, length - 1)
        this_page = pages.to(tl.int64)
        row_of_page = kv_head * page + read % page
        codes_at = this_page * code_page + kv_head * head_units + read % page * token_units
        pages = _pages(table, start + block_n, length, page, block_n)
        k_at = k + codes_at[:, None] + unit[None, :]
        v_at = v + codes_at[None, :] + unit[:, None]
        if padded:
            k_unit = tl.load(k_at, mask=(unit < units)[None, :], other=0)
            v_unit = tl.load(v_at, mask=(unit < units)[:, None], other=0)
        else:
            k_unit = tl.load(k_at)
            v_unit = tl.load(v_at)
        if kind == "16bit":
            scores = tl.dot(k_unit, q0)
        elif kind == "fp8":
            k0, k1 = _pair(k_unit, asm)
            scores = tl.dot(k1, q1, tl.dot(k0, q0))
        else:
            block = tl.arange(0, width // 4)
            blocks_at = this_page * block_page + row_of_page * (dim // 16)
            ks = tl.load(k_blocks + blocks_at[:, None] + block[None, :], mask=(block < dim // 16)[None, :], other=0.0)
            ks = tl.broadcast_to(_in_16_bit(ks)[:, :, None], (block_n, width // 4, 4)).reshape(block_n, width)
            k0, k1, k2, k3 = _quad(k_unit, ks, asm)
            scores = tl.dot(k1, q1, tl.dot(k0, q0))
            scores = tl.dot(k3, q3, tl.dot(k2, q2, scores))
        scores *= log2_scale
        if per_token:
            line = this_page * kv_heads * page + row_of_page
            scores *= tl.load(k_scale + line)[:, None]
        if capped:
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0)) * 1.4426950408889634
        visible = (token[:, None] <= last[None, :]) & (token[:, None] < end)
        if windowed:
            visible &= token[:, None] > last[None, :] - window
        scores = tl.where(visible, scores, float("-inf"))
        # A query that has seen no key yet has no maximum: −inf − (−inf) would be NaN.
        new_max = tl.maximum(row_max, tl.max(scores, 0))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.math.exp2(scores - shift[None, :])
        decay = tl.math.exp2(row_max - shift)
        row_sum = row_sum * decay + tl.sum(p, 0)
        row_max = new_max
        if per_token:
            # P · V scale in units of the largest V scale so far, so that FP16 holds it.
            vs = tl.load(v_scale + line)
            new_ref = tl.maximum(v_ref, tl.max(vs, 0))
            p *= (vs / new_ref)[:, None]
            decay *= v_ref / new_ref
            v_ref = new_ref
        p = p.to(dtype)
        o0 = o0 * decay[None, :]
        if pieces > 1:
            o1 = o1 * decay[None, :]
        if pieces == 4:
            o2 = o2 * decay[None, :]
            o3 = o3 * decay[None, :]
        if kind == "16bit":
            o0 = tl.dot(v_unit, p, o0)
        elif kind == "fp8":
            v0, v1 = _pair(v_unit, asm)
            o0 = tl.dot(v0, p, o0)
            o1 = tl.dot(v1, p, o1)
        else:
            vb = tl.load(v_blocks + blocks_at[None, :] + block[:, None], mask=(block < dim // 16)[:, None], other=0.0)
            vb = tl.broadcast_to(_in_16_bit(vb)[:, None, :], (width // 4, 4, block_n)).reshape(width, block_n)
            v0, v1, v2, v3 = _quad(v_unit, vb, asm)
            o0 = tl.dot(v0, p, o0)
            o1 = tl.dot(v1, p, o1)
            o2 = tl.dot(v2, p, o2)
            o3 = tl.dot(v3, p, o3)

    seen = row_sum != 0
    factor = v_factor * v_ref / tl.where(seen, row_sum, 1.0)
    # out [batch, splits, heads, new, dim], lse [batch, splits, heads, new]
    line = ((batch * splits + part).to(tl.int64) * (kv_heads * group) + head) * new + token_of_row
    at = out + line[None, :] * dim + unit[:, None] * pieces
    mask = inside[None, :] & (unit < units)[:, None]
    dtype_out: tl.constexpr = out.dtype.element_ty
    tl.store(at, (o0 * factor[None, :]).to(dtype_out), mask=mask)
    if pieces > 1:
        tl.store(at + 1, (o1 * factor[None, :]).to(dtype_out), mask=mask)
    if pieces == 4:
        tl.store(at + 2, (o2 * factor[None, :]).to(dtype_out), mask=mask)
        tl.store(at + 3, (o3 * factor[None, :]).to(dtype_out), mask=mask)
    if lse is not None:
        value = (row_max + tl.math.log2(tl.where(seen, row_sum, 1.0))) * 0.6931471805599453
        tl.store(lse + line, tl.where(seen, value, float("-inf")), mask=inside)


@triton.jit(do_not_specialize=["rows", "splits"])
def paged_attention_reduce_kernel(
    parts, lses, out, rows, splits, dim: tl.constexpr, width: tl.constexpr, most: tl.constexpr, overlap: tl.constexpr
):
    """Merges the splits `[batch, splits, rows, dim]` of one row; `rows` is heads times new tokens."""
    # `most` is `splits` rounded up to a power of two. Many splits are read at once: latency dominates this kernel.
    start_next(overlap)
    wait_for_previous(overlap)
    # O = Σ w O_i / Σ w with w = 2^(lse_i − largest lse), over the splits in order.
    at_once: tl.constexpr = most if most < 32 else 32
    row = tl.program_id(0)
    batch = tl.program_id(1)
    column = tl.arange(0, width)
    line = batch.to(tl.int64) * splits * rows + row
    part = tl.arange(0, most)
    top = tl.max(tl.load(lses + line + part * rows, mask=part < splits, other=float("-inf")), 0)
    total = 0.0
    value = tl.zeros([width], tl.float32)
    for first in tl.static_range(0, most, at_once):
        part = first + tl.arange(0, at_once)
        valid = part < splits
        lse = tl.load(lses + line + part * rows, mask=valid, other=float("-inf"))
        # A sequence without tokens has seen nothing in any split: its output is 0, not NaN.
        weight = tl.math.exp2((lse - tl.maximum(top, -3.0e38)) * 1.4426950408889634)
        total += tl.sum(weight, 0)
        at = (line + part * rows)[:, None] * dim + column[None, :]
        values = tl.load(parts + at, mask=valid[:, None] & (column < dim)[None, :], other=0.0)
        value += tl.sum(weight[:, None] * values, 0)
    at = (batch.to(tl.int64) * rows + row) * dim + column
    tl.store(out + at, (value / tl.where(total > 0, total, 1.0)).to(out.dtype.element_ty), mask=column < dim)


@on_its_gpu
def attend_pages(
    q: Tensor, pages: KVPages, table: Tensor, lengths: Tensor, options: AttentionOptions, tiles: DecodeTiles,
    asm: bool = True, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Runs the kernels and returns their output, in `out` where it is given: shaped as q, contiguous."""
    # `asm=False` decodes without inline assembly, which the interpreter does not know.
    q = q if q.stride(3) == 1 else q.contiguous()
    table, lengths = table.contiguous(), lengths.contiguous()
    batch, heads, new, dim = q.shape
    pieces = {"16bit": 1, "fp8": 2, "nvfp4": 4}[pages.kind]
    k, v = (pages.k, pages.v) if pieces == 1 else (pages.k.view(torch.int16), pages.v.view(torch.int16))
    splits, group = tiles.splits, heads // pages.kv_heads
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    parts, lses = out, None
    if splits > 1:
        parts = torch.empty((batch, splits, heads, new, dim), dtype=torch.float32, device=q.device)
        lses = torch.empty((batch, splits, heads, new), dtype=torch.float32, device=q.device)
    overlap = overlap_options(q)
    scales = [x if x is not None else lengths for x in (pages.k_scale, pages.v_scale)]
    blocks = [compilable(x) if x is not None else k for x in (pages.k_blocks, pages.v_blocks)]
    # The instruction that converts E4M3 came with the type; for codes of E2M1 it is a step on the way.
    asm = asm and not hardware.lacks_e4m3(q)
    paged_attention_kernel[splits * pages.kv_heads * triton.cdiv(new * group, tiles.block_m), batch](
        q, k, v, *scales, *blocks, table, lengths, parts, lses, k.stride(0), blocks[0].stride(0),
        q.stride(0), q.stride(1), q.stride(2), table.stride(0), pages.kv_heads, new, splits,
        options.scale_of(dim), options.softcap or 0.0, options.reach, kind=pages.kind, per_token=pages.per_token,
        capped=options.softcap is not None, windowed=options.window is not None, asm=asm,
        dim=dim, width=max(16, triton.next_power_of_2(dim // pieces)), group=group, page=pages.page_size,
        head_units=k.stride(1), token_units=k.stride(2),
        block_m=tiles.block_m, block_n=tiles.block_n, stages=tiles.stages, num_warps=tiles.warps,
        **(overlap if tiles.overlap else {"overlap": False}), enable_fp_fusion=True,
    )  # fmt: skip
    if splits > 1:
        # The sum of the splits may always overlap: the kernel after it starts while only its small programs run.
        width, most = triton.next_power_of_2(dim), triton.next_power_of_2(splits)
        paged_attention_reduce_kernel[heads * new, batch](
            parts, lses, out, heads * new, splits,
            dim=dim, width=width, most=most, num_warps=min(max(min(most, 32) * width // 1024, 1), 4), **overlap,
            enable_fp_fusion=True,
        )  # fmt: skip
    return out
