"""Matmuls of codes by codes: Blackwell's y = x · Wᵀ + bias with both sides in NVFP4, MXFP4 or MXFP8 as stored.

The tensor cores of compute capability 10.0 and 12.0 take codes and block scales together; nothing is dequantized.

    x  codes [M, K]  scale [M, K / block]       acc += dot_scaled(x tile, its scales, W tile, its scales)
    W  codes [N, K]  scale [N, K / block]       y = acc · global scale of x · global scale of W + bias

x is quantized in the pass before (`kernels/rounding/portable_casts.py`). A program owns a tile of y; tiles are visited
in bands of `_BAND` rows of tiles, so that programs at work at one time share tiles of x and W in the L2 cache. With
`offsets`, rows are sorted by expert and each tile takes the weight of its own
(`kernels/linear/portable_grouped_gemm.py`).

`fp8_block_gemm` multiplies FP8 by FP8, x in groups of 1×128 and W in squares of 128×128:

    acc = Σ over steps of 128 columns:  (x8 [block_m, 128] · w8 [block_n, 128]ᵀ) · sx [block_m] · sw [block_n / 128]

The tensor core sums one step's products from zero; the step is then scaled and added in FP32 registers, which also
keeps the sum exact: Hopper adds FP8 products with few bits beyond FP16's. On Hopper, cuBLASLt of CUDA 12.9 and later
has the same product, 1.6 times as fast. It requires the scales of x by columns, and squares in multiples of four along
K: otherwise it reads them from wrong addresses and gives no error. So `cublas_takes` accepts few shapes, and the first
product in a process is compared with the kernel's.
"""

import warnings

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from quant.formats.format import FORMATS, Format
from quant.formats.tensor import BlockScaledTensor, quantize
from quant.kernels.base.hardware import current, multiplies_fp8_blocks
from quant.kernels.linear import portable_grouped_gemm
from quant.kernels.linear.portable_grouped_gemm import group_of

TILES = {"block_m": 128, "block_n": 128}
WARPS = 8
_BAND = tl.constexpr(8)


@triton.jit
def fp8_block_gemm_kernel(
    x, x_scale, codes, scale, bias, y, M, N, K, has_bias: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr
):
    """One tile of y; `block_n` divides 128, so that a tile has one row of squares. Tails are masked."""
    tiles_m, tiles_n = tl.cdiv(M, block_m), tl.cdiv(N, block_n)
    index = tl.program_id(0)
    # Bands of `_BAND` rows of tiles, column by column: programs at work at one time share tiles of x and W in L2.
    band = index // (_BAND * tiles_n)
    height = tl.minimum(tiles_m - band * _BAND, _BAND)
    within = index % (_BAND * tiles_n)
    tile_n = within // height
    m = (band * _BAND + within % height) * block_m + tl.arange(0, block_m)
    n = tile_n * block_n + tl.arange(0, block_n)
    k = tl.arange(0, 128)
    # Rows beyond the end read the last one; their results are not stored.
    m_row, n_row = tl.minimum(m, M - 1).to(tl.int64), tl.minimum(n, N - 1).to(tl.int64)
    steps = tl.cdiv(K, 128)
    acc = tl.zeros((block_m, block_n), dtype=tl.float32)
    for step in range(steps):
        inside = (step * 128 + k)[None, :] < K
        a = tl.load(x + m_row[:, None] * K + (step * 128 + k)[None, :], mask=inside, other=0.0)
        b = tl.load(codes + n_row[:, None] * K + (step * 128 + k)[None, :], mask=inside, other=0.0)
        rows = tl.load(x_scale + m_row * steps + step)
        square = tl.load(scale + (tile_n * block_n // 128) * steps + step)
        acc += tl.dot(a, tl.trans(b)) * (rows * square)[:, None]
    if has_bias:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    pointer = y + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(pointer, acc.to(y.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


def fp8_block_gemm(x: BlockScaledTensor, weight: BlockScaledTensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns `x @ weight.T + bias` in `dtype`, of x `[tokens, in]` in `fp8_group` and a weight in `fp8_block`."""
    if x.format is not FORMATS["fp8_group"] or weight.format is not FORMATS["fp8_block"]:
        raise ValueError(f"FP8 block matmul of {x.format} by {weight.format}: expected fp8_group by fp8_block")
    if x.shape[1] != weight.shape[1]:
        raise ValueError(f"FP8 block matmul of x {list(x.shape)} by {list(weight.shape)}: the widths differ")
    if cublas_takes(x.codes, weight.shape, dtype):
        return by_cublas(x, weight, bias)
    return by_triton(x, weight, bias, dtype)


def by_triton(x: BlockScaledTensor, weight: BlockScaledTensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns `fp8_block_gemm` by the Triton kernel."""
    (tokens, columns), rows = x.shape, weight.shape[0]
    y = torch.empty(tokens, rows, dtype=dtype, device=x.codes.device)
    if tokens:
        depth = pipeline_depth(current(y.device.index or 0).arch if y.is_cuda else 90)
        grid = (triton.cdiv(tokens, TILES["block_m"]) * triton.cdiv(rows, TILES["block_n"]),)
        fp8_block_gemm_kernel[grid](
            x.codes, x.scale, weight.codes, weight.scale, y if bias is None else bias, y, tokens, rows, columns,
            has_bias=bias is not None, **TILES, num_warps=WARPS, num_stages=depth, enable_fp_fusion=True,
        )  # fmt: skip
    return y


def by_cublas(x: BlockScaledTensor, weight: BlockScaledTensor, bias: Tensor | None) -> Tensor:
    """Returns `fp8_block_gemm` by cuBLASLt, BF16; `cublas_takes` tells where."""
    tokens = x.shape[0]
    # cuBLASLt reads the scales of x, by columns, at multiples of 16 bytes.
    missing = -tokens % 4
    codes, scale = x.codes, x.scale
    if missing:
        codes = pad(codes.view(torch.uint8), (0, 0, 0, missing)).view(codes.dtype)
        scale = pad(scale, (0, 0, 0, missing))
    by_columns = scale.t().contiguous().t()
    y = torch._scaled_mm(codes, weight.codes.t(), by_columns, weight.scale.t(), out_dtype=torch.bfloat16)[:tokens]
    return y if bias is None else y + bias.to(y.dtype)


def cublas_takes(x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Returns whether cuBLASLt multiplies `x` by a weight of `shape` on this GPU, and got a first product right."""
    rows, columns = shape
    if not x.shape[0] or rows % 128 or columns % 512 or dtype is not torch.bfloat16 or not x.is_cuda:
        return False
    index = x.device.index or 0
    if not multiplies_fp8_blocks(current(index)):
        return False
    if index not in _checked:
        if torch.cuda.is_current_stream_capturing():
            return False  # a check waits for its result, which a capture cannot
        _checked[index] = _cublas_is_right(index)
    return _checked[index]


_checked: dict[int, bool] = {}


def _cublas_is_right(index: int) -> bool:
    """Compares two products of random matrices on GPU `index`, with blocks of many sizes; says where they differ."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(size, 1024, generator=generator, dtype=torch.float32, device="cpu") for size in (130, 384))
    sizes = torch.randn(3, 1, 8, 1, generator=generator, dtype=torch.float32, device="cpu").mul(2).exp()
    w = (w.view(3, 128, 8, 128) * sizes).view(384, 1024)
    gpu = f"cuda:{index}"
    rows, weight = quantize(x, FORMATS["fp8_group"]).to(gpu), quantize(w, FORMATS["fp8_block"]).to(gpu)
    try:
        y = by_cublas(rows, weight, None).double()
    except RuntimeError as error:
        why = " ".join(str(error).split())[:200]
    else:
        exact = by_triton(rows, weight, None, torch.float32).double()
        error_ = float((y - exact).norm() / exact.norm())
        if error_ < 2**-7:
            return True
        why = f"error {error_:.1e}"
    warnings.warn(f"cuBLASLt's FP8 product with block scales is not used on this GPU: {why}", stacklevel=2)
    return False


def pipeline_depth(arch: int) -> int:
    """Returns the depth of the pipeline: four steps of both tiles fit in 228 KB of shared memory, two in 100 KB."""
    return 4 if arch in (90, 100, 103) else 2


SCALED_FORMATS = ("nvfp4", "mxfp4", "mxfp8")  # formats that both sides may have; both have the same


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
    x: BlockScaledTensor, weight: BlockScaledTensor, bias: Tensor | None, dtype: torch.dtype, *, offsets: Tensor | None
) -> Tensor:
    """Returns `x @ weight.T + bias`, `[tokens, out]` in `dtype`, nothing dequantized."""
    # x and the weight have the same codes, of `SCALED_FORMATS`. With `offsets`, int32 `[experts + 1]`, where the rows
    # of each expert begin, the weight is `[experts, out, in]`; rows beyond the last offset are undefined.
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
            enable_fp_fusion=True,
        )  # fmt: skip
    return y


def takes(weight: Format, rows: Format) -> bool:
    """Returns whether `block_scaled_gemm` multiplies these formats."""
    return rows.has_codes_of(weight) and weight.name in SCALED_FORMATS


def tile_shape(bits: int, arch: int) -> dict[str, int]:
    """Returns the tile of y and step along K."""
    # Compute capability 12.0 keeps the sums in registers, which bounds the step.
    return {"block_m": 128, "block_n": 128, "block_k": 256 if bits == 4 and arch < 120 else 128}
