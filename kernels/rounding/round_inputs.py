"""Inputs `[tokens, in]` are aligned for the kernels and rounded to an activation format here, on a GPU.

Rounding is two launches where a kernel knows the format: `casts` turns rows into codes and scales, and `codes_gemm`
turns these back into values in the dtype of the input. The results equal `round_activation`, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from quant.formats.format import Format
from quant.formats.tensor import round_activation

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
