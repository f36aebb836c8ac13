"""The portable matmul computes y = x · Wᵀ + bias in Triton, with W in codes and scales as a checkpoint stores them.

One kernel serves every format of `INPUT_FORMATS`. A program owns a tile of y and walks along K; a tile of W is read as
codes, decoded in registers, rounded to the dtype of x as the oracle rounds it, and multiplied:

                 K, in `splits` parts                 codes  [N, K · bits / 8]
           ┌───────────────┬───────────────┐          scale  [N / rows, K / columns]
        N  │ block_n × block_k  →  →  →    │
           └───────────────┴───────────────┘          x      [M, K]
                  × xᵀ [block_k, block_m]             y      [M, N]

Where a scale goes: one that is constant along K (tensor, channel) multiplies the finished sum; one that is constant
over a tile (128 columns) multiplies the tile's product; a finer one multiplies the decoded weights. A byte of 4-bit
codes holds an even and an odd column, so x is split the same way, each half has its own dot, and no code moves.

With few rows (decoding) there are fewer tiles than the GPU has room for, so K is split: each part leaves its float32
sum in `partial`, and the program that arrives last adds the parts, always in the same order, and finishes the tile.

`swap` computes yᵀ = W · xᵀ: the tensor core's side of 64 rows is then W's, and x needs only as many columns as there
are tokens. Every tail is masked: M, N and K may be anything.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quant.formats.format import INPUT_FORMATS, Format
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.base import hardware
from quant.kernels.base.launch import CachedLaunch, arrival_counters
from quant.kernels.base.portable_small_floats import compilable, decode_scale, from_e4m3
from quant.kernels.linear.tiles import Launch, Tiles


@triton.jit
def decode_element(code, element: tl.constexpr):
    """Converts codes (int32, the element's own dtype, or bytes of E4M3) to float32, exactly."""
    if element == "e2m1":
        # Sign, exponent and mantissa moved to their places in a float32 whose exponent is 126 too small.
        bits = ((code & 8) << 28) | ((code & 7) << 22)
        return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37
    elif element == "e2m3":
        bits = ((code & 32) << 26) | ((code & 31) << 20)
        return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37
    elif element == "e3m2":
        bits = ((code & 32) << 26) | ((code & 31) << 21)
        return bits.to(tl.float32, bitcast=True) * 2.1267647932558654e37
    elif element == "int4":
        return ((code << 28) >> 28).to(tl.float32)
    elif element == "e4m3":
        return from_e4m3(code)
    else:
        return code.to(tl.float32)


@triton.jit
def _scales(scale, n, first, N, K, stride, kind: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
            width: tl.constexpr, repeat: tl.constexpr):  # fmt: skip
    """Loads the block scales of `width` blocks from block `first` on, each repeated: [block_n, width · repeat]."""
    block = first + tl.arange(0, width)
    pointer = scale + (n[:, None] // rows).to(tl.int64) * stride + block[None, :]
    inside = (n[:, None] < N) & (block[None, :] * columns < K)
    value = decode_scale(tl.load(pointer, mask=inside, other=0.0), kind)
    # Repeated in registers: each scale is loaded once.
    value = tl.broadcast_to(value[:, :, None], (value.shape[0], width, repeat))
    return value.reshape(value.shape[0], width * repeat)


@triton.jit
def _multiply(acc, x, w, swap: tl.constexpr):
    if swap:
        return tl.dot(w, tl.trans(x), acc)
    else:
        return tl.dot(x, tl.trans(w), acc)


@triton.jit
def add_products(
    acc, tokens, code_row, scale, n, step, N, K, scale_stride, codes_width,
    element: tl.constexpr, bits: tl.constexpr, kind: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
    swap: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """Returns acc + tokens · wᵀ of the `step`-th `block_k` columns, with every scale that is not constant along K."""
    # `code_row` points at the codes of the rows n, `scale` at the scales of the matrix.
    per_weight: tl.constexpr = columns > 0 and columns < block_k
    per_tile: tl.constexpr = columns >= block_k
    start = step * block_k
    product = tl.zeros_like(acc) if per_tile else acc
    if bits == 4:
        byte = step * (block_k // 2) + tl.arange(0, block_k // 2)
        pair = tl.load(code_row + byte[None, :], mask=byte[None, :] < codes_width, other=0).to(tl.int32)
        low, high = decode_element(pair & 15, element), decode_element(pair >> 4, element)
        if per_weight:
            s = _scales(
                scale, n, start // columns, N, K, scale_stride, kind, rows, columns, block_k // columns, columns // 2
            )
            low, high = low * s, high * s
        # The order of a sum over K is free: even columns first, then odd ones, as the codes lie in their bytes.
        even, odd = tl.split(tokens.reshape(tokens.shape[0], block_k // 2, 2))
        product = _multiply(product, even, low.to(tokens.dtype), swap)
        product = _multiply(product, odd, high.to(tokens.dtype), swap)
    else:
        k = start + tl.arange(0, block_k)
        if bits == 6:
            # Six bits from bit 6k of the row: they begin in one byte and may end in the next.
            byte = k * 6 // 8
            near = tl.load(code_row + byte[None, :], mask=byte[None, :] < codes_width, other=0).to(tl.int32)
            inside = byte[None, :] + 1 < codes_width
            far = tl.load(code_row + byte[None, :] + 1, mask=inside, other=0).to(tl.int32)
            w = decode_element(((near | far << 8) >> (k * 6 % 8)[None, :]) & 63, element)
        else:
            w = decode_element(tl.load(code_row + k[None, :], mask=k[None, :] < K, other=0.0), element)
        if per_weight:
            w = w * _scales(
                scale, n, start // columns, N, K, scale_stride, kind, rows, columns, block_k // columns, columns
            )
        product = _multiply(product, tokens, w.to(tokens.dtype), swap)
    if per_tile:
        pointer = scale + (tl.minimum(n, N - 1) // rows).to(tl.int64) * scale_stride + start // columns
        s = decode_scale(tl.load(pointer), kind)
        return acc + product * (s[:, None] if swap else s[None, :])
    else:
        return product


@triton.jit(do_not_specialize=["M", "splits"])
def codes_gemm_kernel(
    x, codes, scale, global_scale, bias, y, partial, counter,
    M, N, K, x_stride, codes_stride, scale_stride, codes_width, splits,
    element: tl.constexpr, bits: tl.constexpr, kind: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
    has_global: tl.constexpr, has_bias: tl.constexpr, split: tl.constexpr, swap: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """See the module docstring. `rows` and `columns` of a block are 0 where it spans the axis."""
    tile_n, tile_m, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m = tile_m * block_m + tl.arange(0, block_m)
    n = tile_n * block_n + tl.arange(0, block_n)
    # No row of x beyond the last is read: each would be one more request to the same lines of L2, from every program.
    x_row = x + m.to(tl.int64)[:, None] * x_stride
    row_mask = (m < M)[:, None]
    # Rows of W beyond the end read the last row: these loads need no mask, and their results are never stored.
    code_row = codes + tl.minimum(n, N - 1).to(tl.int64)[:, None] * codes_stride
    acc = tl.zeros((block_n, block_m) if swap else (block_m, block_n), dtype=tl.float32)
    # This part's steps along K; the last part may have fewer.
    steps = tl.cdiv(tl.cdiv(K, block_k), splits)
    for step in range(part * steps, tl.minimum((part + 1) * steps, tl.cdiv(K, block_k))):
        k = step * block_k + tl.arange(0, block_k)
        tokens = tl.load(x_row + k[None, :], mask=row_mask & (k[None, :] < K), other=0.0)
        acc = add_products(acc, tokens, code_row, scale, n, step, N, K, scale_stride, codes_width,
                           element, bits, kind, rows, columns, swap, block_k)  # fmt: skip
    if swap:
        acc = tl.trans(acc)
    inside = (m[:, None] < M) & (n[None, :] < N)
    offset = m.to(tl.int64)[:, None] * N + n[None, :]
    if split:
        size = M.to(tl.int64) * N
        tl.store(partial + part * size + offset, acc, mask=inside)
        # All threads have written their part of the sum before one of them counts it as arrived.
        tl.debug_barrier()
        arrival = counter + tile_m * tl.num_programs(0) + tile_n
        if tl.atomic_add(arrival, 1, sem="acq_rel") == splits - 1:
            total = tl.zeros((block_m, block_n), dtype=tl.float32)
            for split_part in range(splits):
                # Bypass L1, which is not coherent with the writes of other programs.
                total += tl.load(partial + split_part * size + offset, mask=inside, other=0.0, cache_modifier=".cg")
            finish_tile(total, scale, global_scale, bias, y, offset, inside, n, N, scale_stride, kind, rows, columns,
                   has_global, has_bias)  # fmt: skip
            # Ready for the next launch, which may reuse the counters.
            tl.store(arrival, 0)
    else:
        finish_tile(acc, scale, global_scale, bias, y, offset, inside, n, N, scale_stride, kind, rows, columns,
               has_global, has_bias)  # fmt: skip


@triton.jit
def finish_tile(acc, scale, global_scale, bias, y, offset, inside, n, N, scale_stride, kind: tl.constexpr,
           rows: tl.constexpr, columns: tl.constexpr, has_global: tl.constexpr, has_bias: tl.constexpr):  # fmt: skip
    """Applies the scales that are constant along K and the bias, and rounds to the dtype of y."""
    if columns == 0:
        row = tl.minimum(n, N - 1)
        index = row // rows if rows > 0 else row * 0
        acc *= decode_scale(tl.load(scale + index.to(tl.int64) * scale_stride), kind)[None, :]
    if has_global:
        acc *= tl.load(global_scale).to(tl.float32)
    if has_bias:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    tl.store(y + offset, acc.to(y.dtype.element_ty), mask=inside)


@triton.jit
def dequantize_codes_kernel(
    codes, scale, global_scale, out, N, K, codes_stride, scale_stride, codes_width,
    element: tl.constexpr, bits: tl.constexpr, kind: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
    has_global: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """A tile of W in the dtype of `out`, [N, K]: equal to the oracle's except for one rounding of the global scale."""
    # One axis of programs: others end at 65,535.
    across = tl.cdiv(K, block_k)
    tile = tl.program_id(0) % across
    n = tl.program_id(0) // across * block_n + tl.arange(0, block_n)
    k = tile * block_k + tl.arange(0, block_k)
    inside = (n[:, None] < N) & (k[None, :] < K)
    row = codes + n.to(tl.int64)[:, None] * codes_stride
    if bits == 4:
        byte = tile * (block_k // 2) + tl.arange(0, block_k // 2)
        mask = (n[:, None] < N) & (byte[None, :] < codes_width)
        pair = tl.load(row + byte[None, :], mask=mask, other=0).to(tl.int32)
        w = tl.join(decode_element(pair & 15, element), decode_element(pair >> 4, element)).reshape(block_n, block_k)
    elif bits == 6:
        byte = k * 6 // 8
        near = tl.load(row + byte[None, :], mask=inside & (byte[None, :] < codes_width), other=0).to(tl.int32)
        far = tl.load(row + byte[None, :] + 1, mask=inside & (byte[None, :] + 1 < codes_width), other=0).to(tl.int32)
        w = decode_element(((near | far << 8) >> (k * 6 % 8)[None, :]) & 63, element)
    else:
        w = decode_element(tl.load(row + k[None, :], mask=inside, other=0.0), element)
    second_level = tl.load(global_scale).to(tl.float32) if has_global else 1.0
    if columns > 0 and columns <= block_k:
        first = tile * block_k // columns
        s = _scales(scale, n, first, N, K, scale_stride, kind, rows, columns, block_k // columns, columns)
    else:
        first_row = n // rows if rows > 0 else n * 0
        block = tile * block_k // columns if columns > 0 else 0
        pointer = scale + first_row.to(tl.int64) * scale_stride + block
        s = decode_scale(tl.load(pointer, mask=n < N, other=0.0), kind)[:, None]
    w *= s * second_level
    tl.store(out + n.to(tl.int64)[:, None] * K + k[None, :], w.to(out.dtype.element_ty), mask=inside)


def prepare_codes_gemm(x: Tensor, weight: BlockScaledTensor, bias: Tensor | None, tiles: Tiles) -> Launch:
    """Returns `x @ weight.T + bias` for arguments like these, with all decided that does not depend on their values.

    x, FP16 or BF16, and the weight have contiguous rows, and have been checked.
    """
    (M, K), N = x.shape, weight.shape[0]
    if not M * N:
        return lambda x, weight, bias: x.new_empty(M, N)
    tiles_n, tiles_m, splits = triton.cdiv(N, tiles.block_n), triton.cdiv(M, tiles.block_m), tiles.splits
    codes_stride, scale_stride, codes_width = weight.codes.stride(0), weight.scale.stride(0), weight.codes.shape[1]
    constants = gemm_constants(weight, bias, tiles)
    launch, in_bytes = CachedLaunch(codes_gemm_kernel, (tiles_n, tiles_m, splits), constants), hardware.lacks_e4m3(x)

    def run(x: Tensor, weight: BlockScaledTensor, bias: Tensor | None) -> Tensor:
        y = x.new_empty(M, N)
        partial = counter = y
        codes, scale = weight.codes, weight.scale
        if in_bytes:
            codes, scale = compilable(codes), compilable(scale)
        if splits > 1:
            partial = torch.empty(splits, M, N, dtype=torch.float32, device=x.device)
            counter = arrival_counters(x, tiles_n * tiles_m)
        launch(
            x, codes, scale, scale if weight.global_scale is None else weight.global_scale,
            x if bias is None else bias, y, partial, counter, M, N, K, x.stride(0), codes_stride, scale_stride,
            codes_width, splits,
        )  # fmt: skip
        return y

    return run


def gemm_constants(weight: BlockScaledTensor, bias: Tensor | None, tiles: Tiles) -> dict[str, Any]:
    """Returns the compile-time constants and the options of `codes_gemm_kernel` for arguments like these."""
    return {
        **format_constants(weight.format), "has_global": weight.global_scale is not None, "has_bias": bias is not None,
        "split": tiles.splits > 1, "swap": tiles.swap, "block_m": tiles.block_m, "block_n": tiles.block_n,
        "block_k": tiles.block_k, "num_warps": tiles.warps, "num_stages": tiles.stages,
    }  # fmt: skip


def dequantize_codes(weight: BlockScaledTensor, dtype: torch.dtype) -> Tensor:
    """Returns `[out, in]` of `weight` in `dtype`, in one pass; the arguments have been checked."""
    (N, K), codes, scale = weight.shape, compilable(weight.codes), compilable(weight.scale)
    out = torch.empty(N, K, dtype=dtype, device=codes.device)
    has_global = weight.global_scale is not None
    launch = _dequantizer(N, K, weight.format.name, has_global)
    # A pointer that the kernel never reads, where there is no global scale.
    second = weight.global_scale if has_global else scale
    launch(codes, scale, second, out, N, K, codes.stride(0), scale.stride(0), codes.shape[1])
    return out


@lru_cache(maxsize=256)
def _dequantizer(N: int, K: int, format: str, has_global: bool) -> CachedLaunch:
    return CachedLaunch(dequantize_codes_kernel, *dequantizing_launch(N, K, INPUT_FORMATS[format], has_global))


def dequantizing_launch(N: int, K: int, format: Format, has_global: bool) -> tuple[tuple[int], dict[str, Any]]:
    """Returns the grid of `dequantize_codes_kernel` for `[N, K]`, N perhaps symbolic, and its constants and options."""
    block_n, block_k = 16, 256 if format.block[1] < 128 else 128
    tile = {"block_n": block_n, "block_k": block_k, "num_warps": 4}
    programs = -(-K // block_k) * ((N + block_n - 1) // block_n)
    return (programs,), {**format_constants(format), "has_global": has_global, **tile}


def format_constants(format: Format) -> dict[str, object]:
    """Returns the compile-time constants by which a kernel decodes the codes and scales of a format."""
    kind = "wide" if format.scale.is_wide else format.scale.name
    numbers = {"element": format.element.name, "bits": format.element.bits, "kind": kind}
    return {**numbers, "rows": format.block[0], "columns": format.block[1]}


@triton.jit
def codes_embedding_kernel(
    ids, codes, scale, global_scale, out, N, K, codes_width, scale_stride,
    element: tl.constexpr, bits: tl.constexpr, kind: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
    has_global: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """A piece of one row of a table; `rows` and `columns` of a block are 0 where it spans the axis."""
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


def look_up(ids: Tensor, weight: BlockScaledTensor, dtype: torch.dtype) -> Tensor:
    """Returns the rows `ids` of `weight` in `dtype`, `[..., dim]`."""
    shape = weight.shape
    for name, tensor in (("codes", weight.codes), ("scale", weight.scale)):
        if not tensor.is_contiguous() or tensor.device != ids.device:
            where = f"on {tensor.device} with strides {tensor.stride()}"
            raise ValueError(f"embedding of {list(shape)}: {name} is {where}, expected contiguous, on {ids.device}")
    flat, width = ids.contiguous().view(-1), 1024
    codes, scale = compilable(weight.codes), compilable(weight.scale)
    out = torch.empty(*ids.shape, shape[1], dtype=dtype, device=ids.device)
    codes_embedding_kernel[len(flat) * triton.cdiv(shape[1], width),](
        flat, codes, scale, scale if weight.global_scale is None else weight.global_scale, out,
        shape[0], shape[1], codes.shape[1], scale.shape[1], **format_constants(weight.format),
        has_global=weight.global_scale is not None, width=width, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return out
