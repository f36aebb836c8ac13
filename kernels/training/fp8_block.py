"""Operands and products of FP8 training in blocks, as custom ops that torch.compile leaves whole.

    quant::fp8_block_operands(x, rule, square, rows, columns) -> codes, scale, codes_t, scale_t
    quant::fp8_block_rms_norm(x, rstd, weight, normalized, dtype, rule, columns) -> operands of x · rstd · weight
    quant::fp8_block_swiglu(gate, up, rule, rows, columns) -> operands of silu(gate) · up
    quant::fp8_block_swiglu_gradients(dh, gate, up, rule, columns, product) -> codes, scale of [d gate, d up], and
        codes_t, scale_t of d gate, of d up and of silu(gate) · up
    quant::fp8_block_stacked(parts, rule, rows, columns) -> codes, scale of each part in squares, and
        codes_t, scale_t of all their rows, one part after another
    quant::fp8_block_side_by_side(parts, rule, rows, columns) -> codes, scale of all columns of the parts, one part
        beside another, and codes_t, scale_t of each
    quant::fp8_block_product(a, a_scale, b, b_scale, square, dtype) -> a · bᵀ

On Hopper, kernels make the operands (`kernels/training/sm90_fp8_block.py` and `…_swiglu.py`; how they lie is in
`fp8_block_layout.py`), and cuBLASLt multiplies: it sums 128 products at a time and scales each such sum in FP32. On
other devices plain PyTorch computes the same codes and scales, and the products of their decoded values in FP32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from quant.formats.format import E4M3
from quant.formats.rounding import decode_power_of_two, encode, encode_power_of_two
from quant.formats.scaling import divided
from quant.kernels.base.custom_ops import register, without_autocast
from quant.kernels.base.hardware import current
from quant.kernels.training.fp8_block_layout import (
    BLOCK,
    Operands,
    SwiGLUGradients,
    allocate,
    allocate_side_by_side,
    allocate_stacked,
)

_Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
_LEAST = 2.0**-126
"""The least power-of-two scale: its reciprocal is finite."""


def _blocks(x: torch.Tensor, rule: str, square: bool, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `x` in blocks along its columns, padded to `[rows, columns]`: codes of that shape, and their scales."""
    filled = functional.pad(x.float(), (0, columns - x.shape[1], 0, rows - x.shape[0]))
    height = BLOCK if square else 1
    blocks = filled.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, height))  # [R / height, height, C / 128, 128]
    amax = blocks.abs().amax(dim=(1, 3), keepdim=True)
    if rule == "transformer_engine":
        factor = torch.where(amax == 0, 1.0, torch.div(amax.new_full((), E4M3.max), amax))
        scale, steps = torch.div(amax.new_ones(()), factor), blocks * factor
    else:
        scale = divided(amax, E4M3.max)
        if rule == "power_of_two":
            scale = decode_power_of_two(encode_power_of_two(scale)).clamp(min=_LEAST)
        scale = torch.where(amax == 0, 1.0, scale)
        steps = blocks / scale
    bad = ~amax.isfinite()
    codes = encode(steps.clamp(-E4M3.max, E4M3.max).masked_fill(bad, 0.0), E4M3).view(torch.uint8)
    codes = codes.masked_fill(bad, 0x7F).view(torch.float8_e4m3fn)
    return codes.reshape(rows, columns), scale.masked_fill(bad, torch.nan)[:, 0, :, 0]


def _reference_operands(x: torch.Tensor, rule: str, square: bool, rows: bool, columns: bool) -> _Operands:
    out = allocate(x, square, rows, columns)
    for matrix, codes, scale in ((x, out.codes, out.scale), (x.t(), out.codes_t, out.scale_t)):
        if codes.numel():
            filled, scales = _blocks(matrix, rule, square, *codes.shape)
            codes.copy_(filled)
            scale.copy_(scales if square else scales.t())
    return out


def _operands_on_gpu(x: torch.Tensor, rule: str, square: bool, rows: bool, columns: bool) -> _Operands:
    if not runs_on(x):
        return _reference_operands(x, rule, square, rows, columns)
    from quant.kernels.training.sm90_fp8_block import sm90_fp8_block_operands

    with torch.cuda.device_of(x):
        return sm90_fp8_block_operands(x, rule, square=square, rows=rows, columns=columns)


def _reference_rms_norm(
    x: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor, normalized: torch.dtype, dtype: torch.dtype, rule: str,
    columns: bool,
) -> _Operands:  # fmt: skip
    y = ((x.float() * rstd[:, None]).to(normalized).float() * weight.float()).to(dtype)
    return _reference_operands(y, rule, False, True, columns)


def _rms_norm_on_gpu(
    x: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor, normalized: torch.dtype, dtype: torch.dtype, rule: str,
    columns: bool,
) -> _Operands:  # fmt: skip
    if not runs_on(x):
        return _reference_rms_norm(x, rstd, weight, normalized, dtype, rule, columns)
    from quant.kernels.training.sm90_fp8_block import RMSNorm, sm90_fp8_block_operands

    with torch.cuda.device_of(x):
        norm = RMSNorm(rstd, weight, normalized, dtype)
        return sm90_fp8_block_operands(x, rule, columns=columns, norm=norm)


def _reference_swiglu(gate: torch.Tensor, up: torch.Tensor, rule: str, rows: bool, columns: bool) -> _Operands:
    return _reference_operands(functional.silu(gate) * up, rule, False, rows, columns)


def _swiglu_on_gpu(gate: torch.Tensor, up: torch.Tensor, rule: str, rows: bool, columns: bool) -> _Operands:
    if not runs_on(gate):
        return _reference_swiglu(gate, up, rule, rows, columns)
    from quant.kernels.training.sm90_fp8_block import sm90_fp8_block_operands

    with torch.cuda.device_of(gate):
        return sm90_fp8_block_operands(gate, rule, rows=rows, columns=columns, up=up)


def _swiglu_gradients(
    dh: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, rule: str, columns: bool, product: bool
) -> SwiGLUGradients:
    """Computes the gradients of silu(gate) · up by PyTorch, and quantizes them where they are."""
    ops = torch.ops.quant
    both = torch.ops.aten.silu_backward(dh * up, gate), dh * functional.silu(gate)
    codes, scale, *_ = ops.fp8_block_operands(torch.cat(both, 1), rule, False, True, False)
    of_gate, of_up = (
        ops.fp8_block_operands(d, rule, False, False, True) if columns else allocate(d, False, False, False)
        for d in both
    )
    of_product = allocate(dh, False, False, False)
    if product:
        of_product = ops.fp8_block_swiglu(gate, up, rule, False, True)
    return (codes, scale, *of_gate[2:], *of_up[2:], *of_product[2:])


def _swiglu_gradients_on_gpu(
    dh: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, rule: str, columns: bool, product: bool
) -> SwiGLUGradients:
    if not runs_on(dh):
        return _swiglu_gradients(dh, gate, up, rule, columns, product)
    from quant.kernels.training.sm90_fp8_block import sm90_fp8_block_swiglu_gradients, takes

    if not takes(dh):
        return _swiglu_gradients(dh, gate, up, rule, columns, product)
    with torch.cuda.device_of(dh):
        return sm90_fp8_block_swiglu_gradients(dh, gate, up, rule, columns=columns, product=product)


def _reference_stacked(parts: list[torch.Tensor], rule: str, rows: bool, columns: bool) -> list[torch.Tensor]:
    own = [x for part in parts for x in _reference_operands(part, rule, True, rows, False)[:2]]
    return [*own, *_reference_operands(torch.cat(parts), rule, True, False, columns)[2:]]


def _stacked_on_gpu(parts: list[torch.Tensor], rule: str, rows: bool, columns: bool) -> list[torch.Tensor]:
    if not runs_on(parts[0]):
        return _reference_stacked(parts, rule, rows, columns)
    operands, whole = allocate_stacked(parts, rows, columns)
    _fill(operands, parts, rule, square=True, rows=rows, columns=columns)
    return [*(x for each in operands for x in each[:2]), *whole[2:]]


def _reference_side_by_side(parts: list[torch.Tensor], rule: str, rows: bool, columns: bool) -> list[torch.Tensor]:
    whole = _reference_operands(torch.cat(parts, 1), rule, False, rows, False)[:2]
    return [*whole, *(x for part in parts for x in _reference_operands(part, rule, False, False, columns)[2:])]


def _side_by_side_on_gpu(parts: list[torch.Tensor], rule: str, rows: bool, columns: bool) -> list[torch.Tensor]:
    if not runs_on(parts[0]):
        return _reference_side_by_side(parts, rule, rows, columns)
    operands, whole = allocate_side_by_side(parts, rows, columns)
    _fill(operands, parts, rule, square=False, rows=rows, columns=columns)
    return [*whole[:2], *(x for each in operands for x in each[2:])]


def _fill(
    operands: Sequence[Operands], parts: Sequence[torch.Tensor], rule: str, *, square: bool, rows: bool, columns: bool
) -> None:
    """Writes the operands of each part on Hopper."""
    from quant.kernels.training.sm90_fp8_block import sm90_fp8_block_operands

    with torch.cuda.device_of(parts[0]):
        for part, out in zip(parts, operands, strict=True):
            sm90_fp8_block_operands(part, rule, square=square, rows=rows, columns=columns, out=out)


def _fake_operands(x: torch.Tensor, rule: str, square: bool, rows: bool, columns: bool) -> _Operands:
    return allocate(x, square, rows, columns)


def _fake_rms_norm(
    x: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor, normalized: torch.dtype, dtype: torch.dtype, rule: str,
    columns: bool,
) -> _Operands:  # fmt: skip
    return _fake_operands(x, rule, False, True, columns)


def _fake_swiglu(gate: torch.Tensor, up: torch.Tensor, rule: str, rows: bool, columns: bool) -> _Operands:
    return _fake_operands(gate, rule, False, rows, columns)


def _fake_swiglu_gradients(
    dh: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, rule: str, columns: bool, product: bool
) -> SwiGLUGradients:
    codes, scale, *_ = allocate(dh, False, True, False, width=2 * dh.shape[1])
    of_gate, of_up, of_product = (allocate(dh, False, False, each) for each in (columns, columns, product))
    return (codes, scale, *of_gate[2:], *of_up[2:], *of_product[2:])


def _fake_stacked(parts: list[torch.Tensor], rule: str, rows: bool, columns: bool) -> list[torch.Tensor]:
    operands, whole = allocate_stacked(parts, rows, columns)
    return [*(x for each in operands for x in each[:2]), *whole[2:]]


def _fake_side_by_side(parts: list[torch.Tensor], rule: str, rows: bool, columns: bool) -> list[torch.Tensor]:
    operands, whole = allocate_side_by_side(parts, rows, columns)
    return [*whole[:2], *(x for each in operands for x in each[2:])]


def _reference_product(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, square: bool, dtype: torch.dtype
) -> torch.Tensor:
    left = a.float() * a_scale.t().repeat_interleave(BLOCK, 1)
    if square:
        spread = b_scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    else:
        spread = b_scale.t().repeat_interleave(BLOCK, 1)
    with without_autocast(a):
        return (left @ (b.float() * spread).t()).to(dtype)


def _product_on_gpu(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, square: bool, dtype: torch.dtype
) -> torch.Tensor:
    if not runs_on(a):
        return _reference_product(a, a_scale, b, b_scale, square, dtype)
    return torch._scaled_mm(a, b.t(), a_scale.t(), b_scale.t() if square else b_scale, out_dtype=dtype)


def _fake_product(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, square: bool, dtype: torch.dtype
) -> torch.Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=dtype)


def runs_on(x: torch.Tensor) -> bool:
    """Returns whether FP8 blocks are multiplied where `x` is."""
    return x.is_cuda and current(x.device.index).multiplies_fp8_blocks


register(
    "quant::fp8_block_operands",
    "(Tensor x, str rule, bool square, bool rows, bool columns) -> (Tensor, Tensor, Tensor, Tensor)",
    _fake_operands,
    default=_reference_operands,
    cuda=_operands_on_gpu,
)
register(
    "quant::fp8_block_rms_norm",
    "(Tensor x, Tensor rstd, Tensor weight, ScalarType normalized, ScalarType dtype, str rule, bool columns) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    _fake_rms_norm,
    default=_reference_rms_norm,
    cuda=_rms_norm_on_gpu,
)
register(
    "quant::fp8_block_swiglu",
    "(Tensor gate, Tensor up, str rule, bool rows, bool columns) -> (Tensor, Tensor, Tensor, Tensor)",
    _fake_swiglu,
    default=_reference_swiglu,
    cuda=_swiglu_on_gpu,
)
register(
    "quant::fp8_block_swiglu_gradients",
    "(Tensor dh, Tensor gate, Tensor up, str rule, bool columns, bool product) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_swiglu_gradients,
    default=_swiglu_gradients,
    cuda=_swiglu_gradients_on_gpu,
)
register(
    "quant::fp8_block_stacked",
    "(Tensor[] parts, str rule, bool rows, bool columns) -> Tensor[]",
    _fake_stacked,
    default=_reference_stacked,
    cuda=_stacked_on_gpu,
)
register(
    "quant::fp8_block_side_by_side",
    "(Tensor[] parts, str rule, bool rows, bool columns) -> Tensor[]",
    _fake_side_by_side,
    default=_reference_side_by_side,
    cuda=_side_by_side_on_gpu,
)
register(
    "quant::fp8_block_product",
    "(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, bool square, ScalarType dtype) -> Tensor",
    _fake_product,
    default=_reference_product,
    cuda=_product_on_gpu,
)
