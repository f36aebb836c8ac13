"""These normalisation and activation functions end in quantized rows, which the next quantized linear reads.

Between its matmuls, a decoder layer runs RMSNorm (with the residual added first) and SwiGLU. If a row is written in
16 bit and read again to be quantized, it passes through memory three times. Here it is read once and leaves as codes.
The kernel and the formats come from `kernels/portable/casts.py`. Formats with one scale for the whole tensor take a
static scale.
"""

from __future__ import annotations

import torch

from quant.formats.format import Format
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.portable.casts import quantize_rows


def rmsnorm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    format: Format,
    *,
    scale: torch.Tensor | None = None,
    global_scale: torch.Tensor | None = None,
    hadamard: int = 0,
) -> BlockScaledTensor:
    """`x / rms(x) · weight` in `format`.

    Args:
        x: `[..., hidden]`, FP16 or BF16.
        weight: `[hidden]`.
        eps: added to the mean square.
        format, scale, global_scale, hadamard: as `quant.kernels.portable.casts.quantize` takes them.
    """
    return quantize_rows(
        x, format, "rms", norm_weight=weight, eps=eps, scale=scale, global_scale=global_scale, hadamard=hadamard
    )


def add_rmsnorm_quantize(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    format: Format,
    *,
    scale: torch.Tensor | None = None,
    global_scale: torch.Tensor | None = None,
    hadamard: int = 0,
) -> tuple[BlockScaledTensor, torch.Tensor]:
    """`h = x + residual`, then `h / rms(h) · weight` in `format`.

    Args:
        x, residual: `[..., hidden]`, FP16 or BF16.
        weight: `[hidden]`.
        eps: added to the mean square.
        format, scale, global_scale, hadamard: as `quant.kernels.portable.casts.quantize` takes them.

    Returns:
        The quantized rows, and `h` in the shape and dtype of `x`.
    """
    hidden = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    quantized = quantize_rows(
        x, format, "add_rms", second=residual, norm_weight=weight, hidden=hidden, eps=eps, scale=scale,
        global_scale=global_scale, hadamard=hadamard,
    )  # fmt: skip
    return quantized, hidden


def swiglu_quantize(
    gate: torch.Tensor,
    up: torch.Tensor,
    format: Format,
    *,
    scale: torch.Tensor | None = None,
    global_scale: torch.Tensor | None = None,
    hadamard: int = 0,
) -> BlockScaledTensor:
    """`silu(gate) · up` in `format`.

    Args:
        gate, up: `[..., intermediate]`, FP16 or BF16; both may be slices of one matmul's output.
        format, scale, global_scale, hadamard: as `quant.kernels.portable.casts.quantize` takes them.
    """
    return quantize_rows(gate, format, "swiglu", second=up, scale=scale, global_scale=global_scale, hadamard=hadamard)
