"""`torch._scaled_mm` multiplies FP8 by FP8 here, after the input is rounded to E4M3.

    y = (x8 · sx) (w8 · sw)ᵀ + bias      x8: [tokens, in] E4M3, sx: [] or [tokens, 1]
                                         w8: [out, in]    E4M3, sw: [] or [1, out]

cuBLASLt multiplies per-tensor and per-row scales in the epilogue, at about 1.8 times the rate of BF16. Rounding the
input is plain PyTorch, written so that a compiler (AOTInductor) fuses it into the kernel that makes the input.

cuBLASLt requires both scales of one kind and dimensions that are multiples of 16, and with per-row scales its output is
BF16. `takes_fp8` checks this; other products go to the general op.

With many tokens a prepacked weight is multiplied here, too (`prefill_linear`), once its codes have become E4M3.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from quant.formats.format import Format
from quant.formats.scaling import finite_or_nan, scale_of
from quant.formats.tensor import BlockScaledTensor, round_activation
from quant.kernels.base.hardware import has_triton
from quant.kernels.base.weight_layout import is_prepacked
from quant.kernels.linear import tiles
from quant.kernels.linear.tiles import Product

# Inputs `[tokens, in]` are aligned for the kernels and rounded to an activation format here, on a GPU.
#
# Rounding is two launches where a kernel knows the format: `casts` turns rows into codes and scales, and `codes_gemm`
# turns these back into values in the dtype of the input. The results equal `round_activation`, bit for bit.


Rounding = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Rounds x `[tokens, in]` under an input scale, for arguments like those that it was prepared for."""


def aligned_rows(rows: torch.Tensor) -> torch.Tensor:
    """Returns `[tokens, in]`, rows contiguous, at multiples of 16 bytes where their length is one.

    A copy only where needed.
    """
    length, stride = rows.shape[1] * rows.itemsize, rows.stride(0) * rows.itemsize
    # Rows of an odd length cannot all start at multiples of 16; kernels then load four bytes at a time.
    unit = 16 if length % 16 == 0 else 4
    aligned = rows.data_ptr() % unit == 0 and (stride % unit == 0 or rows.is_contiguous())
    if rows.stride(1) != 1 or rows.stride(0) < rows.shape[1] or not aligned:
        return rows.clone(memory_format=torch.contiguous_format)
    return rows


def round_rows(x: torch.Tensor, format: Format, input_scale: torch.Tensor | None) -> torch.Tensor:
    """Returns `round_activation` of x `[tokens, in]`, in two passes where there is a kernel: to codes, and back."""
    x = aligned_rows(x)
    return prepare_rounding(x, format, input_scale)(x, input_scale)


def prepare_rounding(x: torch.Tensor, format: Format, input_scale: torch.Tensor | None) -> Rounding:
    """Returns `round_rows` for arguments like these, with everything decided that does not depend on their values."""
    from quant.kernels.linear import portable_codes_gemm
    from quant.kernels.rounding import portable_casts

    columns = x.shape[-1]
    # The kernel takes whole blocks, and whole bytes of 4-bit codes.
    is_whole = columns % max(format.block[1], 2 if format.element.bits == 4 else 1) == 0
    if not (
        format.name in portable_casts.FORMATS_OUT and is_whole and columns <= portable_casts.MAX_COLUMNS and x.numel()
    ):
        return lambda x, input_scale: round_activation(x, format, input_scale)
    has_global = format.global_scale  # an input scale is then the global scale, and block scales are measured
    portable_casts.check_scales(x, format, *((None, input_scale) if has_global else (input_scale, None)))
    cast = portable_casts.prepare_cast(x, format, contiguous=x.is_contiguous())

    def cast_and_decode(x: torch.Tensor, input_scale: torch.Tensor | None) -> torch.Tensor:
        codes = cast(x, None, input_scale) if has_global else cast(x, input_scale)
        return portable_codes_gemm.dequantize_codes(codes, x.dtype)

    return cast_and_decode


_STEP = 16


def takes_fp8(weight: Format, activation: Format | None, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Returns whether `fp8_linear` computes a linear of `shape` `[out, in]` for an input of `dtype`."""
    if activation is None or not (_is_per_row(weight) or _is_per_tensor(weight)):
        return False
    if not (_is_per_row(activation) or _is_per_tensor(activation)) or any(size % _STEP for size in shape):
        return False
    # cuBLASLt writes FP16 and FP32 with per-tensor scales only.
    by_rows = _is_per_row(weight) or _is_per_row(activation)
    return dtype is torch.bfloat16 or (dtype in (torch.float16, torch.float32) and not by_rows)


def _is_e4m3(format: Format) -> bool:
    return format.element.torch_dtype is torch.float8_e4m3fn and format.scale.is_wide and not format.global_scale


def _is_per_tensor(format: Format) -> bool:
    return _is_e4m3(format) and format.per_tensor


def _is_per_row(format: Format) -> bool:
    return _is_e4m3(format) and format.per_row


def round_to_e4m3(x: torch.Tensor, activation: Format, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `[tokens, in]` in E4M3 and its scale, as `fake_quantize` rounds it.

    Args:
        x: `[tokens, in]`.
        activation: a format of one scale a tensor or one a row.
        scale: static scale, float32 scalar; None measures it.
    """
    largest = activation.element.max
    if scale is None:
        amax = x.abs().amax(-1, keepdim=True) if _is_per_row(activation) else x.abs().amax()
        scale = scale_of(amax, largest)
    else:
        # Under a static scale, clamping would turn infinity into the largest number; it must stay visible as NaN.
        x, scale = finite_or_nan(x), scale.reshape(())
    return (x.float() / scale).clamp(-largest, largest).to(torch.float8_e4m3fn), scale


def fp8_linear(
    x: torch.Tensor,
    weight: BlockScaledTensor,
    bias: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    activation: Format,
) -> torch.Tensor:
    """Maps `[..., in]` to `[..., out]`, where `takes_fp8` is true, in PyTorch without own kernels.

    Args:
        x: `[..., in]`; its dtype is the output's.
        weight: E4M3 `[out, in]`, with a scale `[1, 1]` or `[out, 1]`.
        bias: `[out]`, or None.
        input_scale: static scale of the input, float32 scalar; None measures it.
        activation: the input's format.
    """
    x8, sx = round_to_e4m3(x.reshape(-1, x.shape[-1]), activation, input_scale)
    return _scaled_mm(x8, sx, weight, bias, x.dtype).reshape(*x.shape[:-1], weight.shape[0])


def prepare_fp8_linear(x: torch.Tensor, activation: Format, input_scale: torch.Tensor | None) -> Product:
    """Returns `fp8_linear` in two launches, where a kernel rounds x in one pass.

    Args:
        x: `[tokens, in]`.
        activation: format of the input.
        input_scale: static scale of the input, or None.

    Returns:
        A product that cannot be traced.
    """

    def by_torch(
        x: torch.Tensor, weight: BlockScaledTensor, bias: torch.Tensor | None, input_scale: torch.Tensor | None
    ) -> torch.Tensor:
        return fp8_linear(x, weight, bias, input_scale, activation)

    if x.dtype not in (torch.float16, torch.bfloat16) or not x.numel() or not has_triton():
        return by_torch
    from quant.kernels.rounding import portable_casts

    if x.shape[1] > portable_casts.MAX_COLUMNS or activation.name not in portable_casts.FORMATS_OUT:
        return by_torch
    portable_casts.check_scales(x, activation, input_scale, None)
    cast, per_tensor = portable_casts.prepare_cast(x, activation, contiguous=x.is_contiguous()), activation.per_tensor

    def by_cast(
        x: torch.Tensor, weight: BlockScaledTensor, bias: torch.Tensor | None, input_scale: torch.Tensor | None
    ) -> torch.Tensor:
        rows = cast(x, input_scale)
        sx = rows.scale.reshape(()) if per_tensor else rows.scale
        return _scaled_mm(rows.codes, sx, weight, bias, x.dtype)

    return by_cast


def _scaled_mm(
    x8: torch.Tensor, sx: torch.Tensor, weight: BlockScaledTensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Returns `[tokens, out]` in `dtype`, from E4M3 `[tokens, in]` under scales `[]` or `[tokens, 1]`."""
    tokens, out = x8.shape[0], weight.codes.shape[0]
    if sx.dim() == 0 and weight.scale.numel() == 1:
        sx, sw = sx.reshape(1, 1), weight.scale.reshape(1, 1)
    else:  # both sides need scales of one kind
        sx = sx.reshape(-1, 1).expand(tokens, 1).contiguous()
        sw = weight.scale.reshape(1, -1).expand(1, out).contiguous()
    w8 = weight.codes.t()
    # Fast accumulation: sums of E4M3 products in the tensor core's own precision, as every serving runtime does.
    if bias is not None and dtype is torch.float32:  # the library adds no bias to a result in FP32
        return torch._scaled_mm(x8, w8, sx, sw, out_dtype=dtype, use_fast_accum=True) + bias
    return torch._scaled_mm(x8, w8, sx, sw, bias, out_dtype=dtype, use_fast_accum=True)


def takes_prefill(weight: BlockScaledTensor, activation: Format, tokens: int, dtype: torch.dtype) -> bool:
    """Returns whether `prefill_linear` multiplies: the weight is prepacked, and its input format is FP8."""
    from quant.kernels.rounding import portable_casts

    is_fp8 = activation.name in portable_casts.FORMATS_OUT and (_is_per_tensor(activation) or _is_per_row(activation))
    is_many = tokens > tiles.PREFILL and dtype is torch.bfloat16
    return is_fp8 and is_many and is_prepacked(weight) and weight.shape[1] <= portable_casts.MAX_COLUMNS


def prefill_linear(
    x: torch.Tensor,
    weight: BlockScaledTensor,
    bias: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    *,
    activation: Format,
) -> torch.Tensor:
    """Returns `x @ weight.T + bias` in FP8: NVFP4 codes become E4M3 with a scale for each row in one pass.

    The library multiplies FP8 at nearly twice the rate of 16 bit. The price is one more rounding of the weight, of up
    to one part in 16 (`benchmarks/gemm.py` prints the error of the product).
    """
    from quant.kernels.linear import sm90_decode
    from quant.kernels.rounding import portable_casts

    codes, scale = sm90_decode.prepacked_to_e4m3(weight)
    rows = portable_casts.quantize(x, activation, scale=input_scale)
    # Requantized rows of W have a scale each, so scales of x must be per row too, perhaps the same one for all rows.
    sx = rows.scale.reshape(-1, 1).expand(x.shape[0], 1).contiguous()
    bias = None if bias is None else bias.to(x.dtype)
    return torch._scaled_mm(rows.codes, codes.t(), sx, scale[None], bias, out_dtype=x.dtype, use_fast_accum=True)
