"""Quantizing activations on a GPU in one pass: BF16 or FP16 rows to codes and scales.

A program owns a row, and finds it in one of four ways, so that what produced the row costs no trip through memory:

    plain      x
    rms        x / rms(x) · weight
    add_rms    h = x + residual, which is written too; then as rms
    swiglu     silu(x) · second

then, with the row in registers:

    [columns] ─▶ blocks ─▶ amax ─▶ scale (the `max` rule) ─▶ x / scale ─▶ codes

The values are those of the modules that are replaced, each intermediate rounded to the dtype of x where they round
it, and the codes those of `formats/`: to nearest even, against the decoded scale. The optional Hadamard rotation is a
dot with a matrix of signs, exact in FP32 accumulation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quant.formats.format import FORMATS, Format
from quant.formats.scaling import divided, global_scale_of
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.hardware import current
from quant.kernels.matmul import decode_scale

FORMATS_OUT = ("nvfp4", "mxfp8", "mxfp4", "fp8", "fp8_token", "fp8_group", "int8_token")
"""Activation formats that can be written."""
MAX_COLUMNS = 32768


@triton.jit
def reciprocal(step):
    """1 / step, correctly rounded: the quick division, and one step of Newton's method."""
    near = 1.0 / step
    return tl.fma(tl.fma(-step, near, 1.0), near, near)


@triton.jit
def quotient(x, step, inverse):
    """x / step, correctly rounded where x is 0 or above 1e-30: what is left of less underflows (Markstein, 1990).

    The product with the rounded reciprocal is off by less than one unit; what it leaves of x is exact in one FMA, and
    the second adds the quotient of that. A division costs three times as much.
    """
    near = x * inverse
    return tl.fma(tl.fma(-near, step, x), inverse, near)


@triton.jit
def encode_e2m1(x):
    """Codes, int32, of float32: to nearest even, saturating."""
    return encode_e2m1_of(tl.abs(x), x)


@triton.jit
def encode_e2m1_of(magnitude, signed):
    """Codes, int32, of float32 magnitudes with the signs of `signed`: to nearest even, saturating, NaN as well.

    A step of the grid is half the power of two below the value, and at least a half. Adding 1.5 · 2^23 steps leaves
    the number of steps in the low bits of the sum, rounded as the hardware rounds; each doubling of the power adds
    two codes. The constant's 2 makes up for the exponent's bias, modulo 8.
    """
    magnitude = tl.minimum(magnitude, 6.0)
    power = tl.maximum(magnitude, 1.0).to(tl.int32, bitcast=True) & 0x7F800000
    magic = power + ((22 << 23) + 0x400002)
    steps = (magnitude + magic.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    code = steps + (power >> 22)
    sign = (signed.to(tl.uint32, bitcast=True) >> 28).to(tl.int32, bitcast=True)
    return (code & 7) | (sign & -8)


@triton.jit
def encode_scale(amax, global_scale, kind: tl.constexpr, largest: tl.constexpr):
    """Block scales by the `max` rule: what is stored, and the step it stands for."""
    if kind == "e4m3":
        unit = largest * global_scale
        ideal = quotient(amax, unit, tl.div_rn(1.0, unit))
        stored = tl.minimum(tl.maximum(ideal, 0.001953125), 448.0).to(tl.float8e4nv)
        return stored, stored.to(tl.float32) * global_scale
    elif kind == "e8m0":
        bits = tl.div_rn(amax, largest).to(tl.int32, bitcast=True)
        code = (bits >> 23) + tl.where((bits & 0x7FFFFF) != 0, 1, 0)
        code = tl.where(bits <= 0x400000, 0, code)
        return code.to(tl.uint8), decode_scale(code, "e8m0")
    else:
        scale = tl.div_rn(amax, largest)
        scale = tl.where(scale > 0, scale, 1.0)
        return scale, scale


@triton.jit
def _signs(n: tl.constexpr):
    """The Sylvester-Hadamard matrix, [n, n]: minus where row and column share an odd number of bits."""
    common = tl.arange(0, n)[:, None] & tl.arange(0, n)[None, :]
    common ^= common >> 8
    common ^= common >> 4
    common ^= common >> 2
    common ^= common >> 1
    return tl.where((common & 1) == 1, -1.0, 1.0)


@triton.jit
def quantize_rows_kernel(
    x, second, norm_weight, hidden, codes, scale, global_scale, x_stride, second_stride, K, rows, eps,
    source: tl.constexpr, element: tl.constexpr, largest: tl.constexpr, kind: tl.constexpr, block: tl.constexpr,
    static: tl.constexpr, hadamard: tl.constexpr, root: tl.constexpr, flat: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """A row a program; with a rotation, several rows, for the matrix of signs is dear. See the module docstring."""
    if hadamard > 0:
        signs = _signs(hadamard).to(x.dtype.element_ty)
        for row in range(tl.program_id(0), rows, tl.num_programs(0)):
            _quantize_row(tl.cast(row, tl.int64), signs, x, second, norm_weight, hidden, codes, scale, global_scale,
                          x_stride, second_stride, K, eps, source, element, largest, kind, block, static,
                          hadamard, root, flat, width)  # fmt: skip
    else:
        _quantize_row(tl.program_id(0).to(tl.int64), 0, x, second, norm_weight, hidden, codes, scale, global_scale,
                      x_stride, second_stride, K, eps, source, element, largest, kind, block, static,
                      hadamard, root, flat, width)  # fmt: skip


@triton.jit
def _read(x, second, hidden, row, start, column, inside, x_stride, second_stride, source: tl.constexpr):
    """float32 of x, or of x + residual as it is written to `hidden`."""
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if source == "add_rms":
        value += tl.load(second + row * second_stride + column, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(x.dtype.element_ty)
        tl.store(hidden + start + column, rounded, mask=inside)
        value = rounded.to(tl.float32)
    return value


@triton.jit
def _finish(
    value, scaling, second, norm_weight, row, column, inside, second_stride, dtype: tl.constexpr, source: tl.constexpr
):
    """What is quantized, float32, every step rounded to `dtype`."""
    if source == "rms" or source == "add_rms":
        weight = tl.load(norm_weight + column, mask=inside, other=0.0)
        value = ((value * scaling).to(dtype) * weight).to(dtype).to(tl.float32)
    if source == "swiglu":
        other = tl.load(second + row * second_stride + column, mask=inside, other=0.0).to(tl.float32)
        gate = (value / (1.0 + tl.exp(-value))).to(dtype).to(tl.float32)
        value = (gate * other).to(dtype).to(tl.float32)
    return value


@triton.jit
def quantize_nvfp4_kernel(
    x, second, norm_weight, hidden, codes, scale, global_scale, x_stride, second_stride, K, eps,
    source: tl.constexpr, flat: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """As `quantize_rows_kernel`, for NVFP4 without a rotation: a thread has both halves of a block.

    With one row as one vector, a block would be shared by two threads, and each would find its scale.
    """
    row = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = x.dtype.element_ty
    start = row * K
    low = tl.arange(0, width // 16)[:, None] * 16 + tl.arange(0, 8)[None, :]
    high = low + 8
    end = width if flat else K
    inside = low < end
    a = _read(x, second, hidden, row, start, low, inside, x_stride, second_stride, source)
    b = _read(x, second, hidden, row, start, high, inside, x_stride, second_stride, source)
    normed: tl.constexpr = source == "rms" or source == "add_rms"
    scaling = tl.rsqrt(tl.sum(tl.sum(a * a + b * b, axis=1), axis=0) / K + eps) if normed else 1.0
    a = _finish(a, scaling, second, norm_weight, row, low, inside, second_stride, dtype, source)
    b = _finish(b, scaling, second, norm_weight, row, high, inside, second_stride, dtype, source)
    amax = tl.max(tl.maximum(tl.abs(a), tl.abs(b)), axis=1)
    stored, step = encode_scale(amax, tl.load(global_scale).to(tl.float32), "e4m3", 6.0)
    index = tl.arange(0, width // 16)
    tl.store(scale + start // 16 + index, stored, mask=index < end // 16)
    inverse = reciprocal(step)[:, None]
    shift = (tl.arange(0, 8) * 4)[None, :]
    first = tl.sum(encode_e2m1_of(tl.abs(quotient(a, step[:, None], inverse)), a) << shift, axis=1)
    other = tl.sum(encode_e2m1_of(tl.abs(quotient(b, step[:, None], inverse)), b) << shift, axis=1)
    words = (codes + start // 2).to(tl.pointer_type(tl.int32)) + index[:, None] * 2 + tl.arange(0, 2)[None, :]
    tl.store(words, tl.join(first, other), mask=(index < end // 16)[:, None])


@triton.jit
def _quantize_row(
    row, signs, x, second, norm_weight, hidden, codes, scale, global_scale, x_stride, second_stride, K, eps,
    source: tl.constexpr, element: tl.constexpr, largest: tl.constexpr, kind: tl.constexpr, block: tl.constexpr,
    static: tl.constexpr, hadamard: tl.constexpr, root: tl.constexpr, flat: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """One row of K, which is `width` where `flat`. With `block` 0 the row has one scale."""
    column = tl.arange(0, width)
    dtype: tl.constexpr = x.dtype.element_ty
    start = row * K
    inside = column < (width if flat else K)
    value = _read(x, second, hidden, row, start, column, inside, x_stride, second_stride, source)
    normed: tl.constexpr = source == "rms" or source == "add_rms"
    scaling = tl.rsqrt(tl.sum(value * value, axis=0) / K + eps) if normed else 1.0
    value = _finish(value, scaling, second, norm_weight, row, column, inside, second_stride, dtype, source)
    if hadamard > 0:
        turned = tl.dot(value.to(dtype).reshape(width // hadamard, hadamard), signs)
        value = (turned * root).to(dtype).to(tl.float32).reshape(width)

    if static:
        steps = tl.div_rn(value, tl.load(global_scale).to(tl.float32))
    elif block == 0:
        # A row waits here for all its threads, in 16 bit: with fewer registers, an SM has more rows at a time.
        kept = value.to(dtype)
        bits = kept.to(tl.int16, bitcast=True) & 0x7FFF
        amax = tl.max(bits, axis=0).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        stored, step = encode_scale(amax, 1.0, kind, largest)
        tl.store(scale + row, stored)
        if (amax > 1e-20) & (amax < 1e30):
            steps = quotient(kept.to(tl.float32), step, reciprocal(step))
        else:
            steps = tl.div_rn(kept.to(tl.float32), step)
    else:
        blocks = value.reshape(width // block, block)
        second_level = tl.load(global_scale).to(tl.float32) if kind == "e4m3" else 1.0
        stored, step = encode_scale(tl.max(tl.abs(blocks), axis=1), second_level, kind, largest)
        index = tl.arange(0, width // block)
        tl.store(scale + start // block + index, stored, mask=index < (width if flat else K) // block)
        if kind == "wide":
            steps = tl.div_rn(blocks, tl.broadcast_to(step[:, None], (width // block, block))).reshape(width)
        elif kind == "e8m0":
            steps = (blocks * tl.div_rn(1.0, step)[:, None]).reshape(width)
        else:
            steps = quotient(blocks, step[:, None], reciprocal(step)[:, None]).reshape(width)

    if element == "e2m1":
        code = encode_e2m1_of(tl.abs(steps), value)
        word = tl.sum(code.reshape(width // 8, 8) << (tl.arange(0, 8) * 4)[None, :], axis=1)
        index = tl.arange(0, width // 8)
        words = (codes + start // 2).to(tl.pointer_type(tl.int32))
        tl.store(words + index, word, mask=index < (width if flat else K) // 8)
    elif element == "int8":
        nearest = (steps + 12582912.0) - 12582912.0
        tl.store(codes + start + column, tl.clamp(nearest, -127.0, 127.0).to(tl.int8), mask=inside)
    else:
        tl.store(codes + start + column, tl.clamp(steps, -448.0, 448.0).to(tl.float8e4nv), mask=inside)


def quantize(
    x: torch.Tensor,
    format: Format,
    *,
    scale: torch.Tensor | None = None,
    global_scale: torch.Tensor | None = None,
    hadamard: int = 0,
) -> BlockScaledTensor:
    """`x` in `format`, block scales by the `max` rule: what `fake_quantize` rounds to, as codes.

    Args:
        x: `[..., in]`, FP16 or BF16.
        format: one of `FORMATS_OUT`.
        scale: static scale of `fp8`, float32 scalar; measured where None.
        global_scale: static second-level scale of `nvfp4`, float32 scalar; measured where None.
        hadamard: block of a rotation to apply first, a power of two from 16 to 256; 0 for none.

    Returns:
        Codes and scales of `[tokens, in]`, leading axes flattened.

    Raises:
        ValueError: a format, dtype, width or rotation that the kernel does not take.
    """
    return quantize_rows(x, format, "plain", scale=scale, global_scale=global_scale, hadamard=hadamard)


def quantize_rows(
    x: torch.Tensor,
    format: Format,
    source: str,
    *,
    second: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    hidden: torch.Tensor | None = None,
    eps: float = 0.0,
    scale: torch.Tensor | None = None,
    global_scale: torch.Tensor | None = None,
    hadamard: int = 0,
) -> BlockScaledTensor:
    """One launch of the kernel for any `source`; `kernels/fused.py` names its arguments."""
    _check(x, format, source, second, norm_weight, hadamard)
    _check_scales(x, format, scale, global_scale)
    rows = _contiguous_rows(x)
    other = rows if second is None else _contiguous_rows(second)
    tokens, columns = rows.shape
    per_tensor = format.block == (0, 0)
    unmeasured = scale is None if per_tensor else format.global_scale and global_scale is None
    if unmeasured and (source != "plain" or hadamard):
        raise ValueError(f"{source} to {format}: needs a static scale, for the tensor's amax is not known in one pass")
    if per_tensor and scale is None:
        amax = rows.abs().amax().float() if rows.numel() else rows.new_zeros((), dtype=torch.float32)
        scale = divided(amax, format.element.max)
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    if format.global_scale and global_scale is None:
        amax = rows.abs().amax() if rows.numel() else rows.new_zeros(())
        global_scale = global_scale_of(amax, format)
    codes = torch.empty(
        format.codes_shape(rows.shape), dtype=format.element.torch_dtype or torch.uint8, device=x.device
    )
    if per_tensor:
        assert scale is not None
        scales = scale.reshape(1, 1).float()
    else:
        scale_dtype = torch.float32 if format.scale.is_wide else format.scale.torch_dtype
        scales = torch.empty(format.scale_shape(rows.shape), dtype=scale_dtype, device=x.device)
    if tokens:
        launch = _launch(tokens, columns, format, source, hadamard, rows.is_contiguous() and other.is_contiguous())
        tensors = (
            rows, other, rows if norm_weight is None else norm_weight, rows if hidden is None else hidden,
            codes, scales, scales if global_scale is None else global_scale,
            launch.width if launch.flat else rows.stride(0), launch.width if launch.flat else other.stride(0),
            launch.width if launch.flat else columns,
        )  # fmt: skip
        flat = launch.flat or columns == launch.width
        if format is FORMATS["nvfp4"] and not hadamard:
            quantize_nvfp4_kernel[launch.programs,](
                *tensors, eps, source=source, flat=flat, width=launch.width, num_warps=launch.warps
            )
        else:
            quantize_rows_kernel[launch.programs,](
                *tensors, launch.rows, eps,
                source=source, element=format.element.name, largest=format.element.max,
                kind="wide" if format.scale.is_wide else format.scale.name, block=format.block[1],
                static=per_tensor, hadamard=hadamard, root=hadamard**-0.5 if hadamard else 1.0,
                flat=flat, width=launch.width, num_warps=launch.warps,
            )  # fmt: skip
    return BlockScaledTensor(codes, scales, format, (tokens, columns), global_scale)


@dataclass(frozen=True)
class _Launch:
    """How rows are given to programs.

    Attributes:
        programs: how many.
        rows: pieces that they share.
        width: elements of a piece, a power of two.
        flat: whether pieces are cut from all elements as they lie in memory, and not one from each row.
        warps: of a program.
    """

    programs: int
    rows: int
    width: int
    flat: bool
    warps: int


def _launch(tokens: int, columns: int, format: Format, source: str, hadamard: int, contiguous: bool) -> _Launch:
    """Blocks know nothing of rows, so that where no norm does either, no lane is spent on what a row lacks."""
    # 64 blocks of the rotation are one instruction of Hopper's tensor cores.
    width = min(tokens * columns & -(tokens * columns), 64 * hadamard or 4096)
    flat = contiguous and format.block[1] > 0 and source in ("plain", "swiglu") and width >= max(1024, 16 * hadamard)
    if flat:
        rows = tokens * columns // width
    else:
        width, rows = max(triton.next_power_of_2(columns), 64, 16 * hadamard), tokens
    warps = 4 if width <= 8192 and (flat or width <= 4096) else 8 if width <= 16384 else 16
    return _Launch(min(rows, 1024) if hadamard else rows, rows, width, flat, warps)


def _check(
    x: torch.Tensor,
    format: Format,
    source: str,
    second: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    hadamard: int,
) -> None:
    what = f"{source} of x {list(x.shape)} to {format}"
    if format.name not in FORMATS_OUT or format is not FORMATS.get(format.name):
        raise ValueError(f"{what}: no such kernel; activation formats: {', '.join(FORMATS_OUT)}")
    if x.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"{what}: x is {x.dtype}, expected float16 or bfloat16")
    columns = x.shape[-1]
    multiple = max(format.block[1], 2 if format.element.bits == 4 else 1, hadamard, 1)
    if columns % multiple or not 0 < columns <= MAX_COLUMNS:
        raise ValueError(f"{what}: the last axis must be a multiple of {multiple}, at most {MAX_COLUMNS}")
    if hadamard and (hadamard & (hadamard - 1) or not 16 <= hadamard <= 256):
        raise ValueError(f"{what}: hadamard is {hadamard}, expected a power of two from 16 to 256, or 0")
    if second is not None and (second.shape != x.shape or second.dtype != x.dtype or second.device != x.device):
        raise ValueError(
            f"{what}: the second input is {list(second.shape)} {second.dtype} on {second.device}, expected "
            f"{list(x.shape)} {x.dtype} on {x.device}"
        )
    if norm_weight is not None and (norm_weight.shape != (columns,) or norm_weight.device != x.device):
        raise ValueError(f"{what}: weight is {list(norm_weight.shape)} on {norm_weight.device}, expected [{columns}]")
    if norm_weight is not None and not norm_weight.is_contiguous():
        raise ValueError(f"{what}: weight is not contiguous")


def _check_scales(
    x: torch.Tensor, format: Format, scale: torch.Tensor | None, global_scale: torch.Tensor | None
) -> None:
    """The static scales, and whether the GPU can convert to E4M3."""
    what = f"x {list(x.shape)} to {format}"
    for name, tensor in (("scale", scale), ("global_scale", global_scale)):
        if tensor is None:
            continue
        if tensor.numel() != 1 or not tensor.dtype.is_floating_point:
            raise ValueError(
                f"{what}: {name} is {list(tensor.shape)} {tensor.dtype}, expected one floating-point number"
            )
        if tensor.device != x.device:
            raise ValueError(f"{what}: {name} is on {tensor.device}, x on {x.device}")
    if scale is not None and format.block != (0, 0):
        raise ValueError(f"{what}: a static scale is for formats of one scale a tensor; {format} measures its own")
    if global_scale is not None and not format.global_scale:
        raise ValueError(f"{what}: {format} has no global scale")
    needs_fp8 = torch.float8_e4m3fn in (format.element.torch_dtype, format.scale.torch_dtype)
    if x.is_cuda and needs_fp8 and not current(x.device.index or 0).has_fp8:
        raise ValueError(f"{what}: {torch.cuda.get_device_name(x.device)} has no FP8, which starts with capability 8.9")


def _contiguous_rows(x: torch.Tensor) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
