"""These kernels quantize attention's operands to the values that `quant.kernels.attention.forward` defines.

    grid: (blocks of 128 tokens, heads of Q, then of K, then of V, sequences)

    Q, K   two halves [128, dim / 2] ─▶ signs, H (a dot, exact products) ─▶ amax ─▶ codes, a row each
    V      [128, dim], its rows taken in the order of `order_of_keys` ─▶ amax ─▶ codes, transposed in shared memory

A program reads its tile once and writes it once. Given scales are read; otherwise each tile makes its own.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quant.kernels.attention.attention_operands import SCALE_BLOCK, QuantizedParts, Scales, scale_blocks
from quant.kernels.base.launch import on_its_gpu
from quant.kernels.base.portable_small_floats import amax_of, finite_or_nan, larger
from quant.kernels.rounding.hadamard import hadamard_block, sign_matrices

_INTEGERS = (
    "heads", "kv_heads", "tokens_q", "tokens_kv", "blocks_q", "blocks_kv",
    "q_batch", "q_head", "q_token", "k_batch", "k_head", "k_token", "v_batch", "v_head", "v_token",
)  # fmt: skip


@triton.jit
def order_of_keys(position):
    """Returns the key at each position of a laid-out V: of 16, pairs 0 4, 1 5, 2 6, 3 7 are neighbours."""
    return position // 16 * 16 + position % 4 // 2 * 8 + position % 16 // 4 * 2 + position % 2


@triton.jit
def _step(amax, scale, at_head, at_block, static: tl.constexpr):
    """Returns 1 / scale of a tile: of the given scale, or of the tile's own, which is written."""
    if static:
        step = tl.load(scale + at_head)
    else:
        step = larger(finite_or_nan(tl.div_rn(amax, 448.0)), 1e-30)
        tl.store(scale + at_block, step)
    return tl.div_rn(1.0, step)


@triton.jit
def _codes(x, inverse, static: tl.constexpr):
    # A tile's own scale says that it holds infinity; a given one does not.
    return ((finite_or_nan(x) if static else x) * inverse).to(tl.float8e4nv)  # saturates


@triton.jit
def _value_block(
    v, token_stride, out, scale, at_head, blocks, block, tokens,
    dim: tl.constexpr, width: tl.constexpr, rows: tl.constexpr, static: tl.constexpr, laid_out: tl.constexpr,
):  # fmt: skip
    position = block * rows + tl.arange(0, rows)
    row = order_of_keys(position) if laid_out else position
    d = tl.arange(0, width)
    inside = (row < tokens)[:, None] & (d < dim)[None, :]
    x = tl.load(v + row.to(tl.int64)[:, None] * token_stride + d[None, :], mask=inside, other=0.0)
    # One scale for the whole block of 128 tokens.
    amax = amax_of(amax_of(x.to(tl.float32), 1), 0)
    codes = _codes(x.to(tl.float32), _step(amax, scale, at_head, at_head * blocks + block, static), static)
    if laid_out:
        # [dim, keys]: FP8 operands of wgmma must be contiguous along the sum, which runs over keys.
        at = (at_head * dim + d)[:, None] * (blocks * rows) + position[None, :]
        tl.store(out + at, tl.trans(codes), mask=(d < dim)[:, None])
    else:
        tl.store(out + (at_head * tokens + row)[:, None] * dim + d[None, :], codes, mask=inside)


@triton.jit
def _row_block(
    x, token_stride, turns, out, scale, at_head, blocks, block, tokens,
    dim: tl.constexpr, width: tl.constexpr, rows: tl.constexpr, hadamard: tl.constexpr, root: tl.constexpr,
    static: tl.constexpr,
):  # fmt: skip
    half: tl.constexpr = dim // 2
    row = block * rows + tl.arange(0, rows)
    d = tl.arange(0, width)
    mask = (row < tokens)[:, None] & (d < half)[None, :]
    source = x + row.to(tl.int64)[:, None] * token_stride + d[None, :]
    x1 = tl.load(source, mask=mask, other=0.0)
    x2 = tl.load(source + half, mask=mask, other=0.0)
    if hadamard:
        at = d[:, None] * width + d[None, :]
        # H of twice the size is [[H, H], [H, −H]]. Products with ±1 are exact in the tensor cores.
        u1 = tl.dot(x1, tl.load(turns + at))
        u2 = tl.dot(x2, tl.load(turns + width * width + at))
        y1 = (u1 + u2) * root
        y2 = (u1 - u2) * root
    else:
        y1 = x1.to(tl.float32)
        y2 = x2.to(tl.float32)
    amax = amax_of(tl.ravel(larger(tl.abs(y1), tl.abs(y2))), 0)
    inverse = _step(amax, scale, at_head, at_head * blocks + block, static)
    target = out + (at_head * tokens + row)[:, None] * dim + d[None, :]
    tl.store(target, _codes(y1, inverse, static), mask=mask)
    tl.store(target + half, _codes(y2, inverse, static), mask=mask)


@triton.jit(do_not_specialize=_INTEGERS)
def qkv_to_fp8_kernel(
    q, k, v, turns, q_out, k_out, v_out, q_scale, k_scale, v_scale,
    heads, kv_heads, tokens_q, tokens_kv, blocks_q, blocks_kv,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token,
    dim: tl.constexpr, width: tl.constexpr, rows: tl.constexpr, hadamard: tl.constexpr, root: tl.constexpr,
    static: tl.constexpr, laid_out: tl.constexpr,
):  # fmt: skip
    """One block of one head; `turns` is H with the signs of each half, and `root` its normalization."""
    # Heads are numbered through: first Q's, then K's, then V's. Strides are in units of eight elements, which lets
    # the compiler know that rows are aligned to 16 bytes.
    block = tl.program_id(0)
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    is_query = head < heads
    tokens = tl.where(is_query, tokens_q, tokens_kv)
    blocks = tl.where(is_query, blocks_q, blocks_kv)
    if block * rows >= tokens:
        return
    if head >= heads + kv_heads:
        kv_head = head - heads - kv_heads
        _value_block(
            v + (batch * v_batch + kv_head * v_head) * 8, v_token * 8, v_out, v_scale, batch * kv_heads + kv_head,
            blocks, block, tokens, dim, 2 * width, rows, static, laid_out,
        )  # fmt: skip
    elif is_query:
        _row_block(
            q + (batch * q_batch + head * q_head) * 8, q_token * 8, turns, q_out, q_scale, batch * heads + head, blocks,
            block, tokens, dim, width, rows, hadamard, root, static,
        )  # fmt: skip
    else:
        key_head = head - heads
        _row_block(
            k + (batch * k_batch + key_head * k_head) * 8, k_token * 8, turns, k_out, k_scale,
            batch * kv_heads + key_head, blocks, block, tokens, dim, width, rows, hadamard, root, static,
        )  # fmt: skip


@triton.jit
def fp8_lay_out_v_kernel(
    v, cu, out, tokens, padded, packed: tl.constexpr, dim: tl.constexpr, width: tl.constexpr, block: tl.constexpr
):
    """One block of keys of one head of one sequence; grid: (blocks of the longest, heads · batch, sequences)."""
    sequence = tl.program_id(2)
    first = tl.program_id(0) * block
    start = 0
    column = first
    length = tokens
    if packed:
        start = tl.load(cu + sequence)
        length = tl.load(cu + sequence + 1) - start
        # A packed sequence begins at a multiple of the scale block, where its scales begin.
        column = (start // block + sequence) * block + first
    if first < length:
        position = tl.arange(0, block)
        key = first + order_of_keys(position)
        d = tl.arange(0, width)
        head = tl.program_id(1).to(tl.int64)
        inside = (key < length)[:, None] & (d < dim)[None, :]
        tile = tl.load(v + (head * tokens + start + key)[:, None] * dim + d[None, :], mask=inside, other=0.0)
        at = (head * dim + d)[:, None] * padded + (column + position)[None, :]
        tl.store(out + at, tl.trans(tile), mask=(d < dim)[:, None])


def lay_out_v(v: Tensor, cu_seqlens: Tensor | None = None, longest: int | None = None) -> Tensor:
    """Returns E4M3 V `[batch, kv_heads, tokens, dim]`, contiguous, as `attention_operands.lay_out_v` does."""
    # `longest` is the number of tokens of the longest packed sequence; None is all tokens.
    batch, heads, tokens, dim = v.shape
    sequences = 1 if cu_seqlens is None else len(cu_seqlens) - 1
    padded = scale_blocks(tokens, None if cu_seqlens is None else sequences) * SCALE_BLOCK
    make = torch.empty if cu_seqlens is None else torch.zeros
    out = make(batch, heads, dim, padded, dtype=torch.uint8, device=v.device)
    grid = (triton.cdiv(longest or tokens, SCALE_BLOCK), batch * heads, sequences)
    fp8_lay_out_v_kernel[grid](
        v.view(torch.uint8), cu_seqlens, out, tokens, padded, packed=cu_seqlens is not None, dim=dim,
        width=triton.next_power_of_2(dim), block=SCALE_BLOCK, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return out.view(v.dtype)


@triton.jit(do_not_specialize=["tokens"])
def fp8_blocks_decode_kernel(codes, scale, out, tokens, dim: tl.constexpr, width: tl.constexpr, rows: tl.constexpr):
    """One block of tokens of one head; grid: (blocks, heads · batch)."""
    block = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    row = block * rows + tl.arange(0, rows)
    d = tl.arange(0, width)
    inside = (row < tokens)[:, None] & (d < dim)[None, :]
    at = (head * tokens + row)[:, None] * dim + d[None, :]
    step = tl.load(scale + head * tl.num_programs(0) + block)
    values = tl.load(codes + at, mask=inside).to(tl.float32) * step
    tl.store(out + at, values.to(out.dtype.element_ty), mask=inside)


def decode_blocks(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the values of E4M3 `[batch, heads, tokens, dim]`, contiguous, with a scale for 128 tokens of a head."""
    batch, heads, tokens, dim = codes.shape
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    width = triton.next_power_of_2(dim)
    fp8_blocks_decode_kernel[scale_blocks(tokens), batch * heads](
        codes, scale.contiguous(), out, tokens, dim, width, SCALE_BLOCK, num_warps=8, enable_fp_fusion=True
    )
    return out


@on_its_gpu
def quantize_qkv(
    q: Tensor, k: Tensor, v: Tensor, scales: Scales | None, hadamard: bool, laid_out: bool
) -> QuantizedParts:
    """Returns the codes and scales of Q, K and V."""
    (batch, kv_heads, tokens_kv, dim), heads, tokens_q = v.shape, q.shape[1], q.shape[2]
    blocks_q, blocks_kv = scale_blocks(tokens_q), scale_blocks(tokens_kv)
    v_shape = (batch, kv_heads, dim, blocks_kv * SCALE_BLOCK) if laid_out else v.shape
    codes = [torch.empty(shape, dtype=torch.float8_e4m3fn, device=q.device) for shape in (q.shape, k.shape, v_shape)]
    steps: list[Tensor] = []
    for index, x in enumerate((q, k, v)):
        if scales is None:
            steps.append(torch.empty(*x.shape[:2], scale_blocks(x.shape[2]), dtype=torch.float32, device=x.device))
        else:
            scale = scales[index]
            steps.append((scale if scale.dim() == 2 else scale.reshape(1, 1)).expand(x.shape[:2]).contiguous())
    q, k, v = (_aligned(x) for x in (q, k, v))
    # Strides of batch, head and token in units of eight elements, which shows the compiler their alignment.
    strides = [n // 8 for x in (q, k, v) for n in x.stride()[:3]]
    half = dim // 2
    qkv_to_fp8_kernel[triton.cdiv(max(tokens_q, tokens_kv), SCALE_BLOCK), heads + 2 * kv_heads, batch](
        q, k, v, sign_matrices(q) if hadamard else q, *codes, *steps, heads, kv_heads, tokens_q, tokens_kv,
        blocks_q, blocks_kv, *strides, dim=dim, width=triton.next_power_of_2(half), rows=SCALE_BLOCK, hadamard=hadamard,
        root=(2 * hadamard_block(half)) ** -0.5, static=scales is not None, laid_out=laid_out, num_warps=8,
        enable_fp_fusion=False,  # the oracle rounds every product
        maxnreg=128 if dim <= 128 else None,  # two programs on an SM
    )  # fmt: skip
    return codes, steps if scales is None else scales


def _aligned(x: Tensor) -> Tensor:
    """Returns `x` so that the kernel reads rows in pieces of 16 bytes."""
    fits = x.stride(3) == 1 and all(n % 8 == 0 for n in x.stride()[:3]) and x.data_ptr() % 16 == 0
    return x if fits else x.contiguous()
