"""`torch._scaled_mm` multiplies FP8 by FP8 here, after the input is rounded to E4M3.

    y = (x8 · sx) (w8 · sw)ᵀ + bias      x8: [tokens, in] E4M3, sx: [] or [tokens, 1]
                                         w8: [out, in]    E4M3, sw: [] or [1, out]

cuBLASLt multiplies per-tensor and per-row scales in the epilogue, at about 1.8 times the rate of BF16. Rounding the
input is plain PyTorch, written so that a compiler (AOTInductor) fuses it into the kernel that makes the input.

cuBLASLt wants both scales of one kind and dimensions that are multiples of 16, and with per-row scales its output is
BF16. `takes` says what fits; everything else goes to the general op.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from quant.formats.format import FORMATS, Format
from quant.formats.scaling import finite_or_nan, scale_of
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.hardware import has_triton

_STEP = 16


def takes(weight: Format, activation: str, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether `fp8_linear` computes a linear of `shape` `[out, in]` for an input of `dtype`."""
    if not activation or not (_per_row(weight) or _per_tensor(weight)):
        return False
    given = FORMATS[activation]
    if not (_per_row(given) or _per_tensor(given)) or any(size % _STEP for size in shape):
        return False
    by_rows = _per_row(weight) or _per_row(given)
    return dtype is torch.bfloat16 or (dtype in (torch.float16, torch.float32) and not by_rows)


def _is_e4m3(format: Format) -> bool:
    return format.element.torch_dtype is torch.float8_e4m3fn and format.scale.is_wide and not format.global_scale


def _per_tensor(format: Format) -> bool:
    return _is_e4m3(format) and format.per_tensor


def _per_row(format: Format) -> bool:
    return _is_e4m3(format) and format.per_row


def round_input(x: torch.Tensor, activation: Format, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """`[tokens, in]` in E4M3 and its scale, as `fake_quantize` rounds it.

    Args:
        x: `[tokens, in]`.
        activation: a format of one scale a tensor or one a row.
        scale: static scale, float32 scalar; None measures it.
    """
    largest = activation.element.max
    if scale is None:
        amax = x.abs().amax(-1, keepdim=True) if _per_row(activation) else x.abs().amax()
        scale = scale_of(amax, largest)
    else:
        x, scale = finite_or_nan(x), scale.reshape(())
    return (x.float() / scale).clamp(-largest, largest).to(torch.float8_e4m3fn), scale


def fp8_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    activation: str,
) -> torch.Tensor:
    """`[..., in]` to `[..., out]`, where `takes` says so.

    Args:
        x: `[..., in]`; its dtype is the output's.
        codes: E4M3 `[out, in]`.
        scale: float32 `[1, 1]` or `[out, 1]`.
        bias: `[out]`, or None.
        input_scale: static scale of the input, float32 scalar; None measures it.
        activation: name of the input's format.
    """
    x8, sx = round_input(x.reshape(-1, x.shape[-1]), FORMATS[activation], input_scale)
    return _multiply(x8, sx, codes, scale, bias, x.dtype).reshape(*x.shape[:-1], codes.shape[0])


def prepare(x: torch.Tensor, activation: Format, input_scale: torch.Tensor | None) -> Callable[..., torch.Tensor]:
    """`fp8_linear` in two launches, where there is a kernel that rounds x in one pass, for arguments like these.

    Args:
        x: `[tokens, in]`.
        activation: format of the input.
        input_scale: static scale of the input, or None.

    Returns:
        A function of (x, weight, bias, input scale), which cannot be traced.
    """

    def by_torch(
        x: torch.Tensor, weight: BlockScaledTensor, bias: torch.Tensor | None, input_scale: torch.Tensor | None
    ) -> torch.Tensor:
        return fp8_linear(x, weight.codes, weight.scale, bias, input_scale, activation.name)

    if x.dtype not in (torch.float16, torch.bfloat16) or not x.numel() or not has_triton():
        return by_torch
    from quant.kernels.portable import casts

    if x.shape[1] > casts.MAX_COLUMNS or activation.name not in casts.FORMATS_OUT:
        return by_torch
    casts.check_scales(x, activation, input_scale, None)
    cast, per_tensor = casts.prepare(x, activation, contiguous=x.is_contiguous()), activation.per_tensor

    def run(
        x: torch.Tensor, weight: BlockScaledTensor, bias: torch.Tensor | None, input_scale: torch.Tensor | None
    ) -> torch.Tensor:
        rows = cast(x, input_scale)
        sx = rows.scale.reshape(()) if per_tensor else rows.scale
        return _multiply(rows.codes, sx, weight.codes, weight.scale, bias, x.dtype)

    return run


def _multiply(
    x8: torch.Tensor,
    sx: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    tokens, out = x8.shape[0], codes.shape[0]
    if sx.dim() == 0 and scale.numel() == 1:
        sx, sw = sx.reshape(1, 1), scale.reshape(1, 1)
    else:
        sx = sx.reshape(-1, 1).expand(tokens, 1).contiguous()
        sw = scale.reshape(1, -1).expand(1, out).contiguous()
    # Fast accumulation: sums of E4M3 products in the tensor core's own precision, as every serving runtime does.
    if bias is not None and dtype is torch.float32:  # the library adds no bias to a result in FP32
        return torch._scaled_mm(x8, codes.t(), sx, sw, out_dtype=dtype, use_fast_accum=True) + bias
    return torch._scaled_mm(x8, codes.t(), sx, sw, bias, out_dtype=dtype, use_fast_accum=True)
