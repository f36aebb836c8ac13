"""Products of inputs that are rounded first: in FP8 by the library, codes by codes, or back in 16 bit.

    x rounded to E4M3, W in E4M3         `torch._scaled_mm`, one scale a tensor or a row (`fp8_linear`)
    many tokens, W prepacked             the same, once its codes have become E4M3 (`prefill_linear`)
    fp8_group by fp8_block               FP8 tensor cores (Ada, Hopper, …), codes as they are stored (`multiply_codes`)
    nvfp4, mxfp4, mxfp8 by their like    block scales (Blackwell), likewise: `portable_block_scaled_gemm.py`
    other formats                        `round_rows`: to codes and back, in the dtype of x

    y = (x8 · sx) (w8 · sw)ᵀ + bias      x8: [tokens, in] E4M3, sx: [] or [tokens, 1]
                                         w8: [out, in]    E4M3, sw: [] or [1, out]

cuBLASLt multiplies per-tensor and per-row scales in the epilogue, at about 1.8 times the rate of BF16. It requires both
scales of one kind and dimensions that are multiples of 16, and with per-row scales its output is BF16 (`takes_fp8`).
`fp8_linear` is plain PyTorch, written so that a compiler (AOTInductor) fuses the rounding into the kernel that makes x.

A kernel that a GPU has never run is first compared with float64, once in a process. One that is wrong there is not
used, with a warning: the weight is then dequantized, as everywhere else.
"""

import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from quant.formats.format import FORMATS, Format
from quant.formats.scaling import finite_or_nan, scale_of
from quant.formats.tensor import BlockScaledTensor, fake_quantize, quantize, round_activation
from quant.kernels.base import hardware
from quant.kernels.base.hardware import has_triton
from quant.kernels.base.weight_layout import is_prepacked
from quant.kernels.linear import tiles
from quant.kernels.linear.tiles import Product

Rounding = Callable[[Tensor, Tensor | None], Tensor]
"""Rounds x `[tokens, in]` under an input scale, for arguments like those that it was prepared for."""


def aligned_rows(rows: Tensor) -> Tensor:
    """Returns `[tokens, in]`, rows contiguous, at multiples of 16 bytes where their length is one."""
    # A copy only where needed.
    length, stride = rows.shape[1] * rows.itemsize, rows.stride(0) * rows.itemsize
    # Rows of an odd length cannot all start at multiples of 16; kernels then load four bytes at a time.
    unit = 16 if length % 16 == 0 else 4
    aligned = rows.data_ptr() % unit == 0 and (stride % unit == 0 or stride == length)
    if rows.stride(1) != 1 or rows.stride(0) < rows.shape[1] or not aligned:
        return rows.clone(memory_format=torch.contiguous_format)
    return rows


def round_rows(x: Tensor, format: Format, input_scale: Tensor | None) -> Tensor:
    """Returns `round_activation` of x `[tokens, in]`, in two passes where there is a kernel: to codes, and back."""
    x = aligned_rows(x)
    return prepare_rounding(x, format, input_scale)(x, input_scale)


def prepare_rounding(x: Tensor, format: Format, input_scale: Tensor | None) -> Rounding:
    """Returns `round_rows` for arguments like these, with everything decided that does not depend on their values."""
    from quant.kernels.linear import portable_codes_gemm
    from quant.kernels.rounding import portable_casts

    if not (x.numel() and portable_casts.takes(format, x.shape[-1], x.dtype)):
        return lambda x, input_scale: round_activation(x, format, input_scale)
    has_global = format.global_scale  # an input scale is then the global scale, and block scales are measured
    portable_casts.check_scales(x, format, *((None, input_scale) if has_global else (input_scale, None)))
    cast = portable_casts.prepare_cast(x, format, contiguous=x.is_contiguous())

    def cast_and_decode(x: Tensor, input_scale: Tensor | None) -> Tensor:
        codes = cast(x, None, input_scale) if has_global else cast(x, input_scale)
        return portable_codes_gemm.dequantize_codes(codes, x.dtype)

    return cast_and_decode


_STEP = 16


def takes_fp8(weight: Format, activation: Format | None, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Returns whether `fp8_linear` computes a linear of `shape` `[out, in]` for an input of `dtype`."""
    if activation is None or any(size % _STEP for size in shape):
        return False
    axes = _scale_axis(weight), _scale_axis(activation)
    # cuBLASLt writes FP16 and FP32 with per-tensor scales only.
    takes_dtype = dtype is torch.bfloat16 or (dtype in (torch.float16, torch.float32) and "row" not in axes)
    return all(axes) and takes_dtype


def _scale_axis(format: Format) -> str:
    """Returns what of an E4M3 operand shares a float scale: "tensor" or "row", and "" for other formats."""
    is_e4m3 = format.element.torch_dtype is torch.float8_e4m3fn and format.scale.is_wide and not format.global_scale
    return "" if not is_e4m3 else "tensor" if format.per_tensor else "row" if format.per_row else ""


def round_to_e4m3(x: Tensor, activation: Format, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns `[tokens, in]` in E4M3 and its scale, as `fake_quantize` rounds it; `scale` is static, a scalar."""
    largest = activation.element.max
    if scale is None:
        amax = x.abs().amax(-1, keepdim=True) if _scale_axis(activation) == "row" else x.abs().amax()
        scale = scale_of(amax, largest)
    else:
        # Under a static scale, clamping would turn infinity into the largest number; it must stay visible as NaN.
        x, scale = finite_or_nan(x), scale.reshape(())
    return (x.float() / scale).clamp(-largest, largest).to(torch.float8_e4m3fn), scale


def fp8_linear(
    x: Tensor, weight: BlockScaledTensor, bias: Tensor | None, input_scale: Tensor | None, activation: Format
) -> Tensor:
    """Maps `[..., in]` to `[..., out]`, in the dtype of x, where `takes_fp8` is true: PyTorch without own kernels."""
    x8, sx = round_to_e4m3(x.reshape(-1, x.shape[-1]), activation, input_scale)
    return _scaled_mm(x8, sx, weight, bias, x.dtype).reshape(*x.shape[:-1], weight.shape[0])


def prepare_fp8_linear(x: Tensor, activation: Format, input_scale: Tensor | None) -> Product:
    """Returns `fp8_linear` in two launches, where a kernel rounds x `[tokens, in]` in one pass; it cannot be traced."""
    by_torch = partial(fp8_linear, activation=activation)
    if not x.numel() or not has_triton():
        return by_torch
    from quant.kernels.rounding import portable_casts

    if not portable_casts.takes(activation, x.shape[1], x.dtype):
        return by_torch
    portable_casts.check_scales(x, activation, input_scale, None)
    cast, per_tensor = portable_casts.prepare_cast(x, activation, contiguous=x.is_contiguous()), activation.per_tensor

    def by_cast(x: Tensor, weight: BlockScaledTensor, bias: Tensor | None, input_scale: Tensor | None) -> Tensor:
        rows = cast(x, input_scale)
        sx = rows.scale.reshape(()) if per_tensor else rows.scale
        return _scaled_mm(rows.codes, sx, weight, bias, x.dtype)

    return by_cast


def _scaled_mm(x8: Tensor, sx: Tensor, weight: BlockScaledTensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns `[tokens, out]` in `dtype`, from E4M3 `[tokens, in]` under scales `[]` or `[tokens, 1]`."""
    tokens, out = x8.shape[0], weight.codes.shape[0]
    if sx.dim() == 0 and weight.scale.numel() == 1:
        sx, sw = sx.reshape(1, 1), weight.scale.reshape(1, 1)
    else:  # both sides need scales of one kind
        sx = sx.reshape(-1, 1).expand(tokens, 1).contiguous()
        sw = weight.scale.reshape(1, -1).expand(1, out).contiguous()
    w8, bias = weight.codes.t(), None if bias is None else bias.to(dtype)
    # Fast accumulation: sums of E4M3 products in the tensor core's own precision, as every serving runtime does.
    if bias is not None and dtype is torch.float32:  # the library adds no bias to a result in FP32
        return torch._scaled_mm(x8, w8, sx, sw, out_dtype=dtype, use_fast_accum=True) + bias
    return torch._scaled_mm(x8, w8, sx, sw, bias, out_dtype=dtype, use_fast_accum=True)


def takes_prefill(weight: BlockScaledTensor, activation: Format, tokens: int, dtype: torch.dtype) -> bool:
    """Returns whether `prefill_linear` multiplies: the weight is prepacked, and its input format is FP8."""
    from quant.kernels.rounding import portable_casts

    is_many = tokens > tiles.PREFILL and dtype is torch.bfloat16 and is_prepacked(weight)
    return is_many and _scale_axis(activation) != "" and portable_casts.takes(activation, weight.shape[1], dtype)


def prefill_linear(
    x: Tensor, weight: BlockScaledTensor, bias: Tensor | None, input_scale: Tensor | None, *, activation: Format
) -> Tensor:
    """Returns `x @ weight.T + bias` in FP8: NVFP4 codes become E4M3 with a scale for each row in one pass."""
    # The library multiplies FP8 at nearly twice the rate of 16 bit. The price is one more rounding of the weight, of up
    # to one part in 16 (`benchmarks/gemm.py` prints the error of the product).
    from quant.kernels.linear import sm90_decode
    from quant.kernels.rounding import portable_casts

    codes, scale = sm90_decode.prepacked_to_e4m3(weight)
    rows = portable_casts.quantize(x, activation, scale=input_scale)
    # Requantized rows of W have a scale each, so scales of x must be per row too, perhaps the same one for all rows.
    sx = rows.scale.reshape(-1, 1).expand(x.shape[0], 1).contiguous()
    bias = None if bias is None else bias.to(x.dtype)
    return torch._scaled_mm(rows.codes, codes.t(), sx, scale[None], bias, out_dtype=x.dtype, use_fast_accum=True)


_GROUPS = FORMATS["fp8_group"]  # of activations: 1 × 128, the counterpart of weights in 128 × 128
_verdicts: dict[tuple[str, str, int], bool] = {}
"""By format of the weight, format of the activation and GPU: whether a first product was right."""


def multiplies_natively(x: Tensor, weight: BlockScaledTensor, activation: Format) -> bool:
    """Returns whether tensor cores of this GPU take both sides as they are stored, and got a first product right."""
    from quant.kernels.linear import portable_block_scaled_gemm
    from quant.kernels.rounding import portable_casts

    format, columns = weight.format, weight.shape[1]
    if is_prepacked(weight) or not format.block[1] or columns % format.block[1]:
        return False
    index = x.device.index or 0
    gpu = hardware.current(index)
    if format.has_square_blocks:
        # FP8 squares of 128 × 128 meet groups of 128 inputs, so every product of blocks has one factor.
        # With few tokens reading W takes all the time, and 16-bit products are no slower.
        is_able = gpu.has_fp8 and activation is _GROUPS and len(x) > tiles.FEW
    else:
        is_able = gpu.has_block_scales and portable_block_scaled_gemm.takes(format, activation)
    if not is_able or columns > portable_casts.MAX_COLUMNS:
        return False
    case = (format.name, activation.name, index)
    if case not in _verdicts:
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return False  # a check waits for its result, which a capture cannot
        _verdicts[case] = _multiplies_right(format, activation, index)
    return _verdicts[case]


def _multiplies_right(format: Format, activation: Format, index: int) -> bool:
    """Multiplies two random matrices on GPU `index` and compares with float64; warns where they differ."""
    # 130 rows and 200 outputs are not multiples of a tile, so the masks of the tails are tested too.
    generator = torch.Generator().manual_seed(0)
    x, w = (
        torch.randn(size, 512, generator=generator, dtype=torch.float32, device="cpu").to(f"cuda:{index}")
        for size in (130, 200)
    )
    weight = quantize(w, format)
    y = multiply_codes(x.bfloat16(), weight, None, None, activation=activation)
    rounded = fake_quantize(x.bfloat16().float(), activation)
    exact = rounded.double() @ weight.dequantize(torch.float64).T
    # 2^-7 allows for one rounding of y to BF16 and for sums in FP32; a wrong layout of scales errs by about 1.
    error = float((y.double() - exact).norm() / exact.norm())
    if error < 2**-7:
        return True
    warnings.warn(
        f"the kernel for {format} by {activation} is wrong on this GPU (error {error:.1e}) and is not used: weights "
        "are dequantized instead; please report the GPU, its driver and the version of Triton",
        stacklevel=2,
    )
    return False


def multiply_codes(
    x: Tensor, weight: BlockScaledTensor, bias: Tensor | None, input_scale: Tensor | None, *, activation: Format
) -> Tensor:
    """Returns `[tokens, out]`: x `[tokens, in]` is rounded to codes, then codes are multiplied by codes."""
    from quant.kernels.linear import portable_block_scaled_gemm
    from quant.kernels.rounding import portable_casts

    if weight.format.has_square_blocks:
        return portable_block_scaled_gemm.fp8_block_gemm(portable_casts.quantize(x, activation), weight, bias, x.dtype)
    codes = portable_casts.quantize(x, activation, global_scale=input_scale if activation.global_scale else None)
    return portable_block_scaled_gemm.block_scaled_gemm(codes, weight, bias, x.dtype, offsets=None)
