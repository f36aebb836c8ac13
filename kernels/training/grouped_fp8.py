"""FP8 products with one power of two for each row of an operand, as custom ops that torch.compile leaves whole.

    quant::e4m3_rows(x) -> codes [R, C], scale [R]
    quant::e4m3_columns(x, offsets, is_stack, scale) -> codes [C, R] or [experts, C, R / experts], scale [experts, C]
    quant::e4m3_product(a, a_scale, b, b_scale, fast, dtype) -> a · bᵀ, rounded to BF16, by PyTorch's FP8 product
    quant::e4m3_grouped_product(a, a_scale, b, b_scale, offsets, exact, dtype) -> a · bᵀ of each expert

Two kernels round (`kernels/training/portable_grouped_fp8.py`), and Hopper multiplies by CUTLASS's grouped product,
which PyTorch has. Sums have fewer bits there, which is an error of 0.2 % where the rounding of operands is one of 4 %;
the same product with more bits is three times slower where experts are small, and slower than BF16. With `exact`, and
on other devices, BF16 (on a CPU, FP32) multiplies element · scale, which it holds exactly, and sums in FP32.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from quant.formats.number import E4M3
from quant.formats.rounding import decode_power_of_two, encode, encode_power_of_two
from quant.formats.scaling import divided
from quant.kernels.base.hardware import has_triton
from quant.kernels.linear.ops import register
from quant.kernels.training.e4m3_blocks import has_e4m3

_Rounded = tuple[torch.Tensor, torch.Tensor]  # codes and their scales
_LEAST = 2.0**-126
"""The least scale: its reciprocal is finite."""


def _reference_rows(x: torch.Tensor, scale: torch.Tensor | None = None) -> _Rounded:
    x = x.float()
    amax = x.abs().amax(1)
    if scale is None:
        scale = decode_power_of_two(encode_power_of_two(divided(amax, E4M3.max))).clamp(min=_LEAST)
        scale = torch.where(amax == 0, 1.0, scale)
    bad = ~(amax * scale).isfinite()
    codes = encode((x / scale[:, None]).masked_fill(bad[:, None], 0.0), E4M3).view(torch.uint8)
    codes = codes.masked_fill(bad[:, None], 0x7F).view(torch.float8_e4m3fn)
    return codes, scale.masked_fill(bad, torch.nan)


def _reference_columns(x: torch.Tensor, offsets: torch.Tensor, is_stack: bool, scale: torch.Tensor | None) -> _Rounded:
    codes, scales = _fake_columns(x, offsets, is_stack)
    begin = 0
    for expert, end in enumerate(offsets.tolist()):
        turned, scales[expert] = _reference_rows(x[begin:end].t(), None if scale is None else scale[expert])
        if is_stack:
            codes[expert] = turned
        else:
            codes[:, begin:end] = turned
        begin = end
    return codes, scales


def _rows_on_gpu(x: torch.Tensor) -> _Rounded:
    if not _has_kernels(x):
        return _reference_rows(x)
    from quant.kernels.training.portable_grouped_fp8 import e4m3_rows

    with torch.cuda.device_of(x):
        return e4m3_rows(x)


def _columns_on_gpu(x: torch.Tensor, offsets: torch.Tensor, is_stack: bool, scale: torch.Tensor | None) -> _Rounded:
    if not _has_kernels(x):
        return _reference_columns(x, offsets, is_stack, scale)
    from quant.kernels.training.portable_grouped_fp8 import e4m3_columns

    with torch.cuda.device_of(x):
        return e4m3_columns(x, offsets, is_stack, scale)


def _has_kernels(x: torch.Tensor) -> bool:
    return has_triton() and has_e4m3(x)


def _decoded_product(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, offsets: torch.Tensor, exact: bool,
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    values = torch.bfloat16 if a.is_cuda else torch.float32
    if b.dim() == 3:
        matrices = (b.to(values) * b_scale[:, :, None].to(values)).transpose(1, 2)
        return functional.grouped_mm(a.to(values) * a_scale[:, None].to(values), matrices, offs=offsets).to(dtype)
    # Each expert has scales of its own here, and they are factors of its whole product: FP32 keeps a power of two.
    product = functional.grouped_mm(a.to(values), b.to(values).t(), offs=offsets)
    return (product * a_scale[:, :, None] * b_scale[:, None, :]).to(dtype)


def _product_on_gpu(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, offsets: torch.Tensor, exact: bool,
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    if exact or dtype is not torch.bfloat16 or not has_grouped_fp8(a):
        return _decoded_product(a, a_scale, b, b_scale, offsets, exact, dtype)
    if b.dim() == 2:
        a_scale, b_scale = a_scale.flatten(), b_scale.flatten()
    return torch._scaled_grouped_mm(
        a, b.transpose(-2, -1), a_scale, b_scale, offs=offsets, out_dtype=dtype, use_fast_accum=True
    )


def _reference_product(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, fast: bool, dtype: torch.dtype
) -> torch.Tensor:
    product = (a.float() * a_scale[:, None]) @ (b.float() * b_scale[:, None]).t()
    return product.to(torch.bfloat16).to(dtype)


def _product_of_rows(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, fast: bool, dtype: torch.dtype
) -> torch.Tensor:
    scales = {"scale_a": a_scale[:, None], "scale_b": b_scale[None, :]}
    y = torch._scaled_mm(a, b.t(), **scales, out_dtype=torch.bfloat16, use_fast_accum=fast)
    return y.to(dtype)


def has_grouped_fp8(x: torch.Tensor) -> bool:
    """Returns whether PyTorch has a grouped FP8 product with a scale for each row on the device of `x`."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device) == (9, 0)


def _fake_product_of_rows(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, fast: bool, dtype: torch.dtype
) -> torch.Tensor:
    return a.new_empty(len(a), len(b), dtype=dtype)


def _fake_rows(x: torch.Tensor) -> _Rounded:
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty(len(x), dtype=torch.float32)


def _fake_columns(
    x: torch.Tensor, offsets: torch.Tensor, is_stack: bool, scale: torch.Tensor | None = None
) -> _Rounded:
    (rows, columns), experts = x.shape, len(offsets)
    shape = (experts, columns, rows // experts) if is_stack else (columns, rows)
    return x.new_empty(shape, dtype=torch.float8_e4m3fn), x.new_empty(experts, columns, dtype=torch.float32)


def _fake_product(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, offsets: torch.Tensor, exact: bool,
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    shape = (len(a), b.shape[1]) if b.dim() == 3 else (len(offsets), len(a), len(b))
    return a.new_empty(shape, dtype=dtype)


register("quant::e4m3_rows", "(Tensor x) -> (Tensor, Tensor)", _fake_rows, default=_reference_rows, cuda=_rows_on_gpu)
register(
    "quant::e4m3_columns",
    "(Tensor x, Tensor offsets, bool is_stack, Tensor? scale) -> (Tensor, Tensor)",
    _fake_columns,
    default=_reference_columns,
    cuda=_columns_on_gpu,
)
register(
    "quant::e4m3_product",
    "(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, bool fast, ScalarType dtype) -> Tensor",
    _fake_product_of_rows,
    default=_reference_product,
    cuda=_product_of_rows,
)
register(
    "quant::e4m3_grouped_product",
    "(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor offsets, bool exact, ScalarType dtype) -> Tensor",
    _fake_product,
    default=_decoded_product,
    cuda=_product_on_gpu,
)
