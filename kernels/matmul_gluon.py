"""NVFP4 weight-only matmul for Hopper's tensor cores, in Gluon: y = x · Wᵀ for few tokens, as fast as W can be read.

    program (64, 128 or 256 rows of W, part of K)       W : int32 in the order of `kernels/prepack.py`
      x [block_m, part of K]  ──cp.async──▶ shared      x : [tokens, in] BF16
      for each 64 columns:                              acc: [rows, block_m] FP32
        codes, scales  ──16 bytes a thread──▶ registers ─ 13 instructions for 8 codes ─▶ BF16, A operand of wgmma
        acc += W [rows, 64] · xᵀ [64, block_m]

The left operand of a wgmma may come from registers, so W never passes through shared memory: a thread reads the
codes that it will multiply, two steps ahead, and decodes them in place. Elements times block scales are exact in
BF16; what the bits are off by, 2^7, and the global scale multiply the finished sum.

K is split among programs until the GPU is full. Each leaves its FP32 sum in `partial`; the one that arrives last adds
them in order. Gluon has no interpreter: `tests/kernels/test_matmul_gluon.py` repeats the arithmetic in PyTorch and
reads the PTX; the values are tested on a GPU.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from quant.formats.tensor import BlockScaledTensor
from quant.kernels.matmul import arrival_counters
from quant.kernels.tiles import GluonTiles

# One word to four words of two bfloat16 each, codes 0 to 3 of both halves.
# Triton 3.6 calls it thread_barrier.
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
_CODES = gl.constexpr("""{
.reg .b32 t,u,v;
and.b32 $0,$4,0x81C081C0;
shl.b32 t,$4,3; and.b32 $1,t,0x81C081C0;
shl.b32 t,$4,6; and.b32 $2,t,0x81C081C0;
shl.b32 t,$4,1; shr.b32 u,$4,3; shr.b32 v,$4,7;
and.b32 t,t,0x80008000; lop3.b32 t,u,0x01800180,t,0xEA; lop3.b32 $3,v,0x00400040,t,0xEA;
}""")
# Four scale bytes to four bfloat16, in the order of the bytes 0, 2, 1, 3.
_SCALES = gl.constexpr("""{
.reg .b32 t,u;
shl.b32 t,$4,4; lop3.b32 u,t,0x0FF00FF0,0x70007000,0xEA; mov.b32 {$0,$1},u;
shr.b32 t,$4,4; lop3.b32 u,t,0x0FF00FF0,0x70007000,0xEA; mov.b32 {$2,$3},u;
}""")
_HALVES = gl.constexpr("mov.b32 {$0,$1},$2;")


@gluon.jit
def _codes_of(words, K, layout: gl.constexpr, warps: gl.constexpr):
    """Where each thread finds its four words of a tile; a warpgroup has a row of tiles to itself."""
    thread = gl.arange(0, 32 * warps, gl.SliceLayout(1, layout))
    word = gl.arange(0, 4, gl.SliceLayout(0, layout))
    return words + ((thread // 128 * (K // 64) * 512 + thread % 128 * 4)[:, None] + word[None, :])


@gluon.jit
def _scales_of(scales, K, layout: gl.constexpr, warps: gl.constexpr):
    thread = gl.arange(0, 32 * warps, gl.SliceLayout(1, layout))
    word = gl.arange(0, 2, gl.SliceLayout(0, layout))
    return scales + ((thread // 128 * (K // 64) * 64 + thread % 128 // 4 * 2)[:, None] + word[None, :])


@gluon.jit
def _halves(pair):
    low, high = gl.inline_asm_elementwise(
        _HALVES, "=h,=h,r", [pair], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1
    )
    return gl.join(low, high)


@gluon.jit
def _decode(words, scales, warps: gl.constexpr):
    """int32 [threads, 4] and [threads, 2] to BF16 values · 2^-7, [16 · warps, 64], each in the thread that holds it."""
    c0, c1, c2, c3 = gl.inline_asm_elementwise(
        _CODES, "=r,=r,=r,=r,r", [words], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1
    )
    value = gl.join(gl.join(_halves(c0), _halves(c1)), gl.join(_halves(c2), _halves(c3)))  # thread s h a b
    s0, s1, s2, s3 = gl.inline_asm_elementwise(
        _SCALES,
        "=h,=h,=h,=h,r",
        [scales],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=1,
    )
    scale = gl.join(gl.join(s0, s2), gl.join(s1, s3)).reshape([32 * warps, 2, 4])  # thread b s
    scale = gl.join(gl.join(scale, scale), gl.join(scale, scale)).permute([0, 2, 3, 4, 1])
    scale = gl.convert_layout(scale, value.type.layout, assert_trivial=True)
    product = (value * scale).reshape([warps, 8, 4, 4, 2, 2, 2])  # warp g q s h a b
    return product.permute([0, 6, 1, 3, 5, 2, 4]).reshape([16 * warps, 64])


@gluon.jit(do_not_specialize=["M", "splits"])
def linear_kernel(
    x, words, scales, global_scale, bias, y, partial, counter,
    M, N, K, x_stride, splits,
    has_bias: gl.constexpr, block_m: gl.constexpr, steps: gl.constexpr, split: gl.constexpr,
):  # fmt: skip
    """One tile of `rows` outputs and `block_m` tokens; `steps`, a power of two, tiles of K."""
    warps: gl.constexpr = gl.num_warps()
    rows: gl.constexpr = 16 * warps
    accumulator: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, block_m, 16]
    )
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=accumulator, k_width=2)
    word_layout: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [warps, 1], [1, 0])
    scale_layout: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [warps, 1], [1, 0])
    x_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([block_m, 64], gl.bfloat16)
    x_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [warps, 1], [1, 0])
    tile_n, tile_m, part = gl.program_id(0), gl.program_id(1), gl.program_id(2)

    first = part * steps
    tile = tile_n * (rows // 64) * (K // 64) + first
    codes = _codes_of(words + tile.to(gl.int64) * 512, K, word_layout, warps)
    factors = _scales_of(scales + tile.to(gl.int64) * 64, K, scale_layout, warps)
    w0 = gl.load(codes)
    s0 = gl.load(factors)
    w1 = gl.load(codes + 512)
    s1 = gl.load(factors + 64)

    # All of x in one copy, step by step: one below the other as [steps · block_m, 64].
    stack = gl.allocate_shared_memory(gl.bfloat16, [steps * block_m, 64], x_shared)
    line = gl.arange(0, steps * block_m, gl.SliceLayout(1, x_layout))
    # Rows beyond the last token read that one; their results are never stored.
    token = gl.minimum(tile_m * block_m + line % block_m, M - 1)
    column = (first + line // block_m)[:, None] * 64 + gl.arange(0, 64, gl.SliceLayout(0, x_layout))[None, :]
    async_copy.async_copy_global_to_shared(stack, x + token.to(gl.int64)[:, None] * x_stride + column)
    async_copy.commit_group()
    shared = stack._reinterpret(gl.bfloat16, [steps, block_m, 64], x_shared)
    async_copy.wait_group(0)
    fence_async_shared()
    _barrier()

    acc = gl.zeros((rows, block_m), gl.float32, accumulator)
    for step in range(0, steps, 2):
        ahead = gl.minimum(step + 2, steps - 2)
        w2 = gl.load(codes + ahead * 512)
        s2 = gl.load(factors + ahead * 64)
        w3 = gl.load(codes + ahead * 512 + 512)
        s3 = gl.load(factors + ahead * 64 + 64)
        a = gl.convert_layout(_decode(w0, s0, warps), operand, assert_trivial=True)
        acc = warpgroup_mma(a, shared.index(step).permute((1, 0)), acc, is_async=True)
        b = gl.convert_layout(_decode(w1, s1, warps), operand, assert_trivial=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        acc = warpgroup_mma(b, shared.index(step + 1).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        w0 = w2
        s0 = s2
        w1 = w3
        s1 = s3

    n = gl.arange(0, rows, gl.SliceLayout(1, accumulator))
    m = gl.arange(0, block_m, gl.SliceLayout(0, accumulator))
    if split:
        tiles = gl.num_programs(0) * gl.num_programs(1)
        index = tile_m * gl.num_programs(0) + tile_n
        inside = n[:, None] * block_m + m[None, :]
        gl.store(partial + (part * tiles + index).to(gl.int64) * (rows * block_m) + inside, acc)
        _barrier()
        if gl.atomic_add(counter + index, 1, sem="acq_rel") == splits - 1:
            total = gl.zeros((rows, block_m), gl.float32, accumulator)
            for other in range(splits):
                source = partial + (other * tiles + index).to(gl.int64) * (rows * block_m) + inside
                total += gl.load(source, cache_modifier=".cg")
            _finish(total, global_scale, bias, y, tile_n * rows + n, tile_m * block_m + m, M, N, has_bias)
            gl.store(counter + index, 0)
    else:
        _finish(acc, global_scale, bias, y, tile_n * rows + n, tile_m * block_m + m, M, N, has_bias)


@gluon.jit
def _finish(acc, global_scale, bias, y, n, m, M, N, has_bias: gl.constexpr):
    acc = acc * (gl.load(global_scale).to(gl.float32) * 128.0)
    if has_bias:
        acc += gl.load(bias + n).to(gl.float32)[:, None]
    gl.store(y + (m.to(gl.int64)[None, :] * N + n[:, None]), acc.to(gl.bfloat16), mask=(m < M)[None, :])


@gluon.jit
def dequantize_kernel(words, scales, global_scale, out, K):
    """One tile of 64 × 64 of W in BF16."""
    word_layout: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0])
    scale_layout: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [4, 1], [1, 0])
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    tile_k, tile_n = gl.program_id(0), gl.program_id(1)
    tile = (tile_n * (K // 64) + tile_k).to(gl.int64)
    codes = gl.load(_codes_of(words + tile * 512, K, word_layout, 4))
    value = _decode(codes, gl.load(_scales_of(scales + tile * 64, K, scale_layout, 4)), 4)
    value = gl.convert_layout(value, rows).to(gl.float32) * (gl.load(global_scale).to(gl.float32) * 128.0)
    n = tile_n * 64 + gl.arange(0, 64, gl.SliceLayout(1, rows))
    k = tile_k * 64 + gl.arange(0, 64, gl.SliceLayout(0, rows))
    gl.store(out + (n.to(gl.int64)[:, None] * K + k[None, :]), value.to(gl.bfloat16))


def linear(x: torch.Tensor, weight: BlockScaledTensor, bias: torch.Tensor | None, tiles: GluonTiles) -> torch.Tensor:
    """`x @ weight.T + bias`; the arguments have been checked.

    Args:
        x: `[tokens, in]`, BF16, rows contiguous and 16-byte aligned.
        weight: prepacked NVFP4, `[out, in]`.
        bias: `[out]`, or None.
        tiles: how to cut it up; in / 64 / splits is a power of two.

    Returns:
        `[tokens, out]`, BF16.
    """
    M, K = x.shape
    N = weight.shape[0]
    y = x.new_empty(M, N)
    if not M:
        return y
    rows = 16 * tiles.warps
    grid = (N // rows, triton.cdiv(M, tiles.block_m), tiles.splits)
    partial = counter = y
    if tiles.splits > 1:
        parts = (tiles.splits, grid[0] * grid[1] * rows * tiles.block_m)
        partial = torch.empty(parts, dtype=torch.float32, device=x.device)
        counter = arrival_counters(weight.codes, grid[0] * grid[1])
    linear_kernel[grid](
        x, weight.codes, weight.scale, weight.global_scale, x if bias is None else bias, y, partial, counter,
        M, N, K, x.stride(0), tiles.splits,
        has_bias=bias is not None, block_m=tiles.block_m, steps=K // 64 // tiles.splits, split=tiles.splits > 1,
        num_warps=tiles.warps,
    )  # fmt: skip
    return y


def dequantize(weight: BlockScaledTensor) -> torch.Tensor:
    """`[out, in]` of a prepacked weight in BF16."""
    N, K = weight.shape
    out = torch.empty(N, K, dtype=torch.bfloat16, device=weight.codes.device)
    dequantize_kernel[K // 64, N // 64](weight.codes, weight.scale, weight.global_scale, out, K, num_warps=4)
    return out
