"""Activations are quantized on a GPU in one pass: rows in BF16 or FP16 become codes and scales.

    x [tokens, in] ─▶ blocks ─▶ amax ─▶ scale (the format's rule, `max` for nearly all) ─▶ x / scale ─▶ codes, scales

The codes equal `formats/`' codes, rounded to nearest even against the decoded scale. With `flat`, a program owns
`width` elements as they lie in memory, whole blocks of one or several rows, so that short rows leave no lane idle. Else
it owns a row, and there are two kernels:

    rows_to_codes          the compiler places the elements of a row: formats with one scale for a row or tensor, and
                           blocks of FP8, where each reduction goes across threads anyway
    nvfp4_rows_to_codes    a thread owns whole blocks of sixteen, and reads 16 bytes at a time; reshapes split and join
                           registers of one thread, and no element moves to another

A block that holds NaN or infinity gets a scale that is NaN. Under a static scale, which is not the block's own, the
single code of E4M3 is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quant.formats.format import INPUT_FORMATS, Format
from quant.formats.scaling import global_scale_of, scale_of
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.base import hardware
from quant.kernels.base.launch import CachedLaunch
from quant.kernels.base.portable_small_floats import (
    amax_of,
    code_bits,
    columns,
    compilable,
    encode_scale,
    encode_scale_for_four_or_six,
    finite_or_nan,
    quotient_to_code,
    reciprocal,
    to_e4m3,
)


@triton.jit
def rows_to_codes_kernel(
    x, codes, scale, global_scale, x_stride, K,
    element: tl.constexpr, largest: tl.constexpr, kind: tl.constexpr, block: tl.constexpr,
    static: tl.constexpr, flat: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """A row of K a program, or `width` elements where `flat`. With `block` 0 the row has one scale."""
    # `static` divides by `global_scale`, a scale that was measured before, and writes none.
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, width)
    dtype: tl.constexpr = x.dtype.element_ty
    start = row * K
    inside = column < (width if flat else K)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)

    if static:
        steps = tl.div_rn(finite_or_nan(value), tl.load(global_scale).to(tl.float32))
    elif block == 0:
        # The row waits here for the slowest of its threads. It waits in 16 bit, which takes half of the registers, so
        # that more rows fit on an SM. Bits of magnitudes sort like their values, NaN above infinity.
        half = value.to(dtype)
        bits = half.to(tl.int16, bitcast=True) & 0x7FFF
        amax = tl.max(bits, axis=0).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        stored, step = encode_scale(amax, 1.0, kind, largest, scale.dtype.element_ty)
        tl.store(scale + row, stored)
        if (amax > 1e-20) & (amax < 1e30):
            steps = quotient_to_code(half.to(tl.float32), step, reciprocal(step))
        else:
            steps = tl.div_rn(half.to(tl.float32), step)
    else:
        blocks = value.reshape(width // block, block)
        stored, step = encode_scale(amax_of(blocks, 1), 1.0, kind, largest, scale.dtype.element_ty)
        index = tl.arange(0, width // block)
        tl.store(scale + start // block + index, stored, mask=index < (width if flat else K) // block)
        if kind == "wide":
            steps = tl.div_rn(blocks, tl.broadcast_to(step[:, None], (width // block, block))).reshape(width)
        else:
            # The reciprocal of a power of two is exact.
            steps = (blocks * tl.div_rn(1.0, step)[:, None]).reshape(width)

    if element == "e2m1":
        word = e2m1_words(steps.reshape(width // 8, 8), value.reshape(width // 8, 8))
        index = tl.arange(0, width // 8)
        words = (codes + start // 2).to(tl.pointer_type(tl.int32))
        tl.store(words + index, word, mask=index < (width if flat else K) // 8)
    else:
        tl.store(codes + start + column, byte_code(steps, element, codes.dtype.element_ty), mask=inside)


@triton.jit
def byte_code(steps, element: tl.constexpr, dtype: tl.constexpr):
    """Rounds float32 to INT8 or E4M3 (or its bytes): to nearest even, saturating, as a cast to E4M3 does by itself."""
    if element == "int8":
        # 1.5 · 2^23: the sum has no bits below one.
        return tl.clamp((steps + 12582912.0) - 12582912.0, -127.0, 127.0).to(tl.int8)
    else:
        return to_e4m3(steps, dtype)


@triton.jit
def e2m1_words(steps, signed):
    """Packs rows of eight E2M1 codes into one int32 each, the first in the lowest bits, with the signs of `signed`."""
    s0, s1, s2, s3, s4, s5, s6, s7 = columns(signed.to(tl.uint32, bitcast=True))
    signs = s7 >> 28
    signs = (signs << 4) | (s6 >> 28)
    signs = (signs << 4) | (s5 >> 28)
    signs = (signs << 4) | (s4 >> 28)
    signs = (signs << 4) | (s3 >> 28)
    signs = (signs << 4) | (s2 >> 28)
    signs = (signs << 4) | (s1 >> 28)
    signs = (signs << 4) | (s0 >> 28)
    # Subtract 0x4B400000 eight times, each time four bits further left: the sum of these wraps to 0x3F400000.
    words = tl.sum(code_bits(tl.abs(steps)) << (tl.arange(0, 8) * 4)[None, :], axis=1) - 0x3F400000
    return (words & 0x77777777) | (signs.to(tl.int32, bitcast=True) & -0x77777778)


BLOCK = 16
_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def nvfp4_rows_to_codes_kernel(
    x, codes, scale, global_scale, x_stride, K,
    largest: tl.constexpr, flat: tl.constexpr, width: tl.constexpr, whole: tl.constexpr, four_or_six: tl.constexpr,
):  # fmt: skip
    """See the module docstring; `whole` says that rows of K are whole numbers of blocks."""
    # With `four_or_six`, the largest value of a block becomes 4 or 6, whichever has the smaller error.
    row = tl.program_id(0).to(tl.int64)
    threads: tl.constexpr = width // _BLOCK
    start, end = row * K, K
    if flat:
        start, end = row * width, width
    elif whole:
        # The same numbers, so written that the compiler sees that they are multiples of a block.
        start, end = row * (K // _BLOCK) * _BLOCK, K // _BLOCK * _BLOCK
    value = _floats(_load_row(x + row * x_stride, end, threads))
    blocks = value.reshape(threads, 1, _BLOCK)
    second_level = tl.load(global_scale).to(tl.float32)
    dtype: tl.constexpr = scale.dtype.element_ty
    if four_or_six:
        stored, step = encode_scale_for_four_or_six(blocks, amax_of(blocks, 2), second_level, dtype)
    else:
        stored, step = encode_scale(amax_of(blocks, 2), second_level, "e4m3", largest, dtype)
    index = tl.arange(0, threads)[:, None]
    tl.store(scale + start // _BLOCK + index, stored, mask=index < end // _BLOCK)
    step = step[:, :, None]
    steps = quotient_to_code(blocks, step, reciprocal(step))
    words = e2m1_words(steps.reshape(width // 8, 8), value.reshape(width // 8, 8)).reshape(threads, 2)
    word = tl.arange(0, threads)[:, None] * 2 + tl.arange(0, 2)[None, :]
    tl.store((codes + start // 2).to(tl.pointer_type(tl.int32)) + word, words, mask=word < end // 8)


@triton.jit
def _load_row(pointer, end, threads: tl.constexpr):
    """Returns a row as `[threads, 16]`, zeros beyond `end`; BF16 as words of two, `[threads, 8]`."""
    # A word is taken apart by a shift and an AND; where the compiler takes two BF16 apart, it needs three instructions.
    # The row begins at a multiple of four bytes.
    if pointer.dtype.element_ty == tl.bfloat16:
        return _load_halves(pointer.to(tl.pointer_type(tl.int32)), end // 2, threads, 4)
    else:
        return _load_halves(pointer, end, threads, 8)


@triton.jit
def _load_halves(pointer, end, threads: tl.constexpr, at_once: tl.constexpr):
    """Returns `[threads, 2 at_once]` by two loads of `at_once` elements, 16 bytes each, joined in registers."""
    offset = tl.arange(0, threads)[:, None] * (2 * at_once) + tl.arange(0, at_once)[None, :]
    first = tl.load(pointer + offset, mask=offset < end, other=0)
    second = tl.load(pointer + offset + at_once, mask=offset + at_once < end, other=0)
    return tl.join(first, second).permute(0, 2, 1).reshape(threads, 2 * at_once)


@triton.jit
def _floats(x):
    """Converts `x` to float32: int32 holds two BF16 values (`_load_row` returns such words), FP16 is cast."""
    if x.dtype == tl.int32:
        low, high = (x << 16).to(tl.float32, bitcast=True), (x & -65536).to(tl.float32, bitcast=True)
        return tl.join(low, high).reshape(x.shape[0], 2 * x.shape[1])
    else:
        return x.to(tl.float32)


FORMATS_OUT = ("nvfp4", "nvfp4_four_over_six", "mxfp8", "mxfp4", "fp8", "fp8_token", "fp8_group", "int8_token")
"""Activation formats that can be written."""
MAX_COLUMNS = 32768


def quantize(
    x: Tensor, format: Format, *, scale: Tensor | None = None, global_scale: Tensor | None = None
) -> BlockScaledTensor:
    """Returns `x` in `format`, block scales by its rule for inputs: the codes of the values of `fake_quantize`."""
    # x is `[..., in]`, FP16 or BF16; leading axes are flattened. The static scale of `fp8` and the static global scale
    # of `nvfp4` are float32 scalars, and are measured where None.
    if (problem := _problem_of(format, x.shape[-1], x.dtype)) is not None:
        raise ValueError(f"x {list(x.shape)} to {format}: {problem}")
    check_scales(x, format, scale, global_scale)
    rows = x.reshape(-1, x.shape[-1])
    # Elements of a row lie side by side, and rows at multiples of four bytes.
    aligned = rows.data_ptr() % 4 == 0 and (rows.stride(0) % 2 == 0 or rows.shape[0] == 1)
    if rows.stride(1) != 1 or not aligned:
        rows = rows.clone(memory_format=torch.contiguous_format)
    cast = prepare_cast(rows, format, contiguous=rows.is_contiguous())
    return cast(rows, scale, global_scale)


Cast = Callable[..., BlockScaledTensor]  # from (rows `[tokens, in]`, scale, global scale) to the quantized rows


def prepare_cast(rows: Tensor, format: Format, *, contiguous: bool = True) -> Cast:
    """Returns `quantize` for rows like these, checked, with everything decided that does not depend on their values."""
    (tokens, columns), device = rows.shape, rows.device
    codes_shape, codes_dtype = format.codes_shape(rows.shape), format.element.torch_dtype or torch.uint8
    scale_shape = format.scale_shape(rows.shape)
    scale_dtype = torch.float32 if format.scale.is_wide else format.scale.torch_dtype
    per_tensor, has_global, largest = format.per_tensor, format.global_scale, format.element.max
    kernel, width, in_bytes = None, 0, hardware.lacks_e4m3(rows)
    if tokens:
        launch = _launch(tokens, columns, format, contiguous)
        width = launch.width if launch.flat else 0
        kernel = CachedLaunch(_kernel_of(format), (launch.programs,), _constants(format, columns, launch))

    def run(rows: Tensor, scale: Tensor | None, global_scale: Tensor | None = None) -> BlockScaledTensor:
        if per_tensor and scale is None:
            amax = rows.abs().amax().float() if tokens else rows.new_zeros((), dtype=torch.float32)
            scale = scale_of(amax, largest)
        if has_global and global_scale is None:
            global_scale = global_scale_of(rows.abs().amax() if tokens else rows.new_zeros(()), format)
        # Allocated at each call: the caller may keep them while the next rows are quantized.
        codes = torch.empty(codes_shape, dtype=codes_dtype, device=device)
        if per_tensor:
            assert scale is not None
            scales = scale.reshape(1, 1).float()
        else:
            scales = torch.empty(scale_shape, dtype=scale_dtype, device=device)
        if kernel is not None:
            filled = (compilable(codes), compilable(scales)) if in_bytes else (codes, scales)
            second_level = filled[1] if global_scale is None else global_scale
            kernel(rows, *filled, second_level, width or rows.stride(0), width or columns)
        return BlockScaledTensor(codes, scales, format, (tokens, columns), global_scale)

    return run


def takes(format: Format, columns: int, dtype: torch.dtype) -> bool:
    """Returns whether a kernel quantizes rows of `columns` elements to an input format."""
    return _problem_of(format, columns, dtype) is None


def quantize_in_graph(rows: Tensor, format: Format, static: Tensor | None) -> BlockScaledTensor:
    """Returns `quantize` as ops and a launch that `torch.export` and AOTInductor see; arguments are checked."""
    # Rows are contiguous; their number may be symbolic. `static` is the scale of a tensor, or the global scale where
    # the format has one; None measures it.
    tokens, columns = rows.shape
    if static is None and format.per_tensor:
        static = scale_of(rows.abs().amax().float(), format.element.max)
    if static is None and format.global_scale:
        static = global_scale_of(rows.abs().amax(), format)
    codes = rows.new_empty(format.codes_shape(rows.shape), dtype=format.element.torch_dtype or torch.uint8)
    if format.per_tensor:
        assert static is not None
        scales = stored = second_level = static.reshape(1, 1).float()
    else:
        dtype = torch.float32 if format.scale.is_wide else format.scale.torch_dtype
        scales = rows.new_empty(tokens, format.scale_shape((1, columns))[1], dtype=dtype)
        stored = compilable(scales)
        second_level = stored if static is None else static
    # A row a program, whatever the number of rows: pieces of all elements need a number that is known.
    constants = _constants(format, columns, _launch(1, columns, format, contiguous=False))
    kernel = torch.library.wrap_triton(_kernel_of(format))
    kernel[tokens,](rows, compilable(codes), stored, second_level, columns, columns, **constants, enable_fp_fusion=True)
    return BlockScaledTensor(codes, scales, format, (tokens, columns), static if format.global_scale else None)


def _kernel_of(format: Format) -> Any:
    return nvfp4_rows_to_codes_kernel if format.is_nvfp4 else rows_to_codes_kernel


def _constants(format: Format, columns: int, launch: _Launch) -> dict[str, Any]:
    constants = {
        "largest": format.element.max,
        "flat": launch.flat or columns == launch.width,
        "width": launch.width,
        "num_warps": launch.warps,
    }
    if format.is_nvfp4:
        return constants | {"whole": columns % BLOCK == 0, "four_or_six": format.input_rule == "four_over_six"}
    kind = "wide" if format.scale.is_wide else format.scale.name
    block = {"block": format.block[1], "static": format.per_tensor}
    return constants | {"element": format.element.name, "kind": kind, **block}


@dataclass(frozen=True)
class _Launch:
    """How rows are given to programs."""

    programs: int  # how many
    width: int  # elements of one, a power of two
    flat: bool  # whether pieces are cut from all elements as they lie in memory, and not one from each row
    warps: int  # the number of warps of a program


def _launch(tokens: int, columns: int, format: Format, contiguous: bool) -> _Launch:
    """Launches over blocks of all elements in memory where possible, so that short rows leave no lane idle."""
    # The largest power of two that divides the number of elements: pieces of it have no tail.
    width = min(tokens * columns & -(tokens * columns), 4096)
    flat = contiguous and format.block[1] > 0 and width >= 1024
    if flat:
        programs = tokens * columns // width
    else:
        # A block of NVFP4 for each thread of a warp, at the least.
        width, programs = max(triton.next_power_of_2(columns), 32 * BLOCK if format.is_nvfp4 else 64), tokens
    # At most 64 values a thread.
    warps = 4 if width <= 8192 and (flat or width <= 4096) else 8 if width <= 16384 else 16
    return _Launch(programs, width, flat, warps)


def _problem_of(format: Format, columns: int, dtype: torch.dtype) -> str | None:
    """Returns why no kernel quantizes rows of `columns` elements to a format; None where one does."""
    if format.name not in FORMATS_OUT or format is not INPUT_FORMATS.get(format.name):
        return f"no such kernel; activation formats: {', '.join(FORMATS_OUT)}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"x is {dtype}, expected float16 or bfloat16"
    multiple = max(format.block[1], 2 if format.element.bits == 4 else 1, 1)
    if columns % multiple or not 0 < columns <= MAX_COLUMNS:
        return f"the last axis must be a multiple of {multiple}, at most {MAX_COLUMNS}"
    return None


def check_scales(x: Tensor, format: Format, scale: Tensor | None, global_scale: Tensor | None) -> None:
    """Raises ValueError for a static scale that does not fit x and its format."""
    task = f"x {list(x.shape)} to {format}"
    for name, tensor in (("scale", scale), ("global_scale", global_scale)):
        if tensor is None:
            continue
        if tensor.numel() != 1 or not tensor.dtype.is_floating_point:
            raise ValueError(
                f"{task}: {name} is {list(tensor.shape)} {tensor.dtype}, expected one floating-point number"
            )
        if tensor.device != x.device:
            raise ValueError(f"{task}: {name} is on {tensor.device}, x on {x.device}")
    if scale is not None and not format.per_tensor:
        raise ValueError(f"{task}: a static scale is for formats of one scale a tensor; {format} measures its own")
    if global_scale is not None and not format.global_scale:
        raise ValueError(f"{task}: {format} has no global scale")
