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

On Hopper, kernels make the operands (`kernels/training/sm90_fp8_block.py`; how they lie is in `fp8_block_layout.py`),
and cuBLASLt multiplies: it sums 128 products at a time and scales each such sum in FP32. On other devices plain PyTorch
computes the same codes and scales, and the products of their decoded values in FP32.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from quant.formats.format import E4M3
from quant.formats.rounding import decode_power_of_two, encode, encode_power_of_two
from quant.formats.scaling import divided
from quant.kernels.base.custom_ops import register, without_autocast
from quant.kernels.base.hardware import current, multiplies_fp8_blocks
from quant.kernels.training.fp8_block_layout import BLOCK, Operands, SwiGLUGradients, allocate

_Operands = tuple[Tensor, Tensor, Tensor, Tensor]
_LEAST = 2.0**-126  # the least power-of-two scale: its reciprocal is finite


def runs_on(x: Tensor) -> bool:
    """Returns whether FP8 blocks are multiplied where `x` is."""
    return x.is_cuda and multiplies_fp8_blocks(current(x.device.index))


def _kernels() -> Any:
    from quant.kernels.training import sm90_fp8_block

    return sm90_fp8_block


def _blocks(x: Tensor, rule: str, square: bool, rows: int, columns: int) -> tuple[Tensor, Tensor]:
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


def _reference_operands(x: Tensor, rule: str, square: bool, rows: bool, columns: bool) -> _Operands:
    out = allocate(x, square, rows, columns)
    for matrix, codes, scale in ((x, out.codes, out.scale), (x.t(), out.codes_t, out.scale_t)):
        if codes.numel():
            filled, scales = _blocks(matrix, rule, square, *codes.shape)
            codes.copy_(filled)
            scale.copy_(scales if square else scales.t())
    return out


register(
    "quant::fp8_block_operands",
    "(Tensor x, str rule, bool square, bool rows, bool columns) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda x, rule, *directions: allocate(x, *directions),
    default=_reference_operands,
    cuda=lambda x, rule, square, rows, columns: _kernels().sm90_fp8_block_operands(
        x, rule, square=square, rows=rows, columns=columns
    ),
    where=runs_on,
)


def _reference_rms_norm(
    x: Tensor, rstd: Tensor, weight: Tensor, normalized: torch.dtype, dtype: torch.dtype, rule: str, columns: bool
) -> _Operands:
    y = ((x.float() * rstd[:, None]).to(normalized).float() * weight.float()).to(dtype)
    return _reference_operands(y, rule, False, True, columns)


register(
    "quant::fp8_block_rms_norm",
    "(Tensor x, Tensor rstd, Tensor weight, ScalarType normalized, ScalarType dtype, str rule, bool columns) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    lambda x, *arguments: allocate(x, False, True, arguments[-1]),
    default=_reference_rms_norm,
    cuda=lambda x, rstd, weight, normalized, dtype, rule, columns: _kernels().sm90_fp8_block_operands(
        x, rule, columns=columns, norm=_kernels().RMSNorm(rstd, weight, normalized, dtype)
    ),
    where=runs_on,
)


register(
    "quant::fp8_block_swiglu",
    "(Tensor gate, Tensor up, str rule, bool rows, bool columns) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda gate, up, rule, rows, columns: allocate(gate, False, rows, columns),
    default=lambda gate, up, rule, rows, columns: _reference_operands(
        functional.silu(gate) * up, rule, False, rows, columns
    ),
    cuda=lambda gate, up, rule, rows, columns: _kernels().sm90_fp8_block_operands(
        gate, rule, rows=rows, columns=columns, up=up
    ),
    where=runs_on,
)


def _swiglu_gradients(dh: Tensor, gate: Tensor, up: Tensor, rule: str, columns: bool, product: bool) -> SwiGLUGradients:
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


def _fake_swiglu_gradients(
    dh: Tensor, gate: Tensor, up: Tensor, rule: str, columns: bool, product: bool
) -> SwiGLUGradients:
    codes, scale, *_ = allocate(dh, False, True, False, width=2 * dh.shape[1])
    of_gate, of_up, of_product = (allocate(dh, False, False, each) for each in (columns, columns, product))
    return (codes, scale, *of_gate[2:], *of_up[2:], *of_product[2:])


register(
    "quant::fp8_block_swiglu_gradients",
    "(Tensor dh, Tensor gate, Tensor up, str rule, bool columns, bool product) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_swiglu_gradients,
    default=_swiglu_gradients,
    cuda=lambda dh, gate, up, rule, columns, product: _kernels().sm90_fp8_block_swiglu_gradients(
        dh, gate, up, rule, columns=columns, product=product
    ),
    where=lambda dh: runs_on(dh) and _kernels().takes(dh),
)


def _reference_stacked(parts: list[Tensor], rule: str, rows: bool, columns: bool) -> list[Tensor]:
    own = [x for part in parts for x in _reference_operands(part, rule, True, rows, False)[:2]]
    return [*own, *_reference_operands(torch.cat(parts), rule, True, False, columns)[2:]]


def _stacked(parts: list[Tensor], rule: str, rows: bool, columns: bool, *, fills: bool = False) -> list[Tensor]:
    # Matrices `[R, C]` of one width, each R a multiple of 128, with `codes` and `scale` of their own. `codes_t` and
    # `scale_t` are slices of those of `whole`, one part after another: one product sums over the rows of all parts.
    whole = allocate(parts[0], True, False, columns, height=sum(map(len, parts)))
    own, first = list[Tensor](), 0
    for index, part in enumerate(parts):
        # The last part fills the padding, too.
        end = first + len(part) if index + 1 < len(parts) else whole.codes_t.shape[1]
        slices = whole.codes_t[:, first:end], whole.scale_t[:, first // BLOCK : end // BLOCK]
        out = Operands(*allocate(part, True, rows, False)[:2], *slices)
        if fills:
            _kernels().sm90_fp8_block_operands(part, rule, out=out, square=True, rows=rows, columns=columns)
        own += out[:2]
        first = end
    return [*own, *whole[2:]]


register(
    "quant::fp8_block_stacked",
    "(Tensor[] parts, str rule, bool rows, bool columns) -> Tensor[]",
    _stacked,
    default=_reference_stacked,
    cuda=partial(_stacked, fills=True),
    where=runs_on,
)


def _reference_side_by_side(parts: list[Tensor], rule: str, rows: bool, columns: bool) -> list[Tensor]:
    whole = _reference_operands(torch.cat(parts, 1), rule, False, rows, False)[:2]
    return [*whole, *(x for part in parts for x in _reference_operands(part, rule, False, False, columns)[2:])]


def _side_by_side(parts: list[Tensor], rule: str, rows: bool, columns: bool, *, fills: bool = False) -> list[Tensor]:
    # Matrices `[R, C]` of one height, each C a multiple of 128, with `codes_t` and `scale_t` of their own. `codes` and
    # `scale` are slices of those of `whole`, one part beside another: one product sums over the columns of all parts.
    whole = allocate(parts[0], False, rows, False, width=sum(part.shape[1] for part in parts))
    own, first = list[Tensor](), 0
    for index, part in enumerate(parts):
        # The last part fills the padding, too.
        end = first + part.shape[1] if index + 1 < len(parts) else whole.codes.shape[1]
        slices = whole.codes[:, first:end], whole.scale[first // BLOCK : end // BLOCK]
        out = Operands(*slices, *allocate(part, False, False, columns)[2:])
        if fills:
            _kernels().sm90_fp8_block_operands(part, rule, out=out, square=False, rows=rows, columns=columns)
        own += out[2:]
        first = end
    return [*whole[:2], *own]


register(
    "quant::fp8_block_side_by_side",
    "(Tensor[] parts, str rule, bool rows, bool columns) -> Tensor[]",
    _side_by_side,
    default=_reference_side_by_side,
    cuda=partial(_side_by_side, fills=True),
    where=runs_on,
)


def _reference_product(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, square: bool, dtype: torch.dtype
) -> Tensor:
    left = a.float() * a_scale.t().repeat_interleave(BLOCK, 1)
    if square:
        spread = b_scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    else:
        spread = b_scale.t().repeat_interleave(BLOCK, 1)
    with without_autocast(a):
        return (left @ (b.float() * spread).t()).to(dtype)


register(
    "quant::fp8_block_product",
    "(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, bool square, ScalarType dtype) -> Tensor",
    lambda a, a_scale, b, b_scale, square, dtype: a.new_empty(a.shape[0], b.shape[0], dtype=dtype),
    default=_reference_product,
    cuda=lambda a, a_scale, b, b_scale, square, dtype: torch._scaled_mm(
        a, b.t(), a_scale.t(), b_scale.t() if square else b_scale, out_dtype=dtype
    ),
    where=runs_on,
)
