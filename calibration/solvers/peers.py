"""This file reproduces the arithmetic of other toolkits to the byte, for audits and for migrating a deployment.

Same formats, same `max` rule; the difference is in how intermediate results are rounded.

ModelOpt divides by the FP32 scale of a per-tensor FP8 weight in the weight's own dtype, so that a BF16 quotient is
rounded twice, and rounds the ties of MXFP4 toward zero. In NVFP4 a block of zeros has the scale 1, and integers use
their lowest code, -8 or -128. Everything else of NVFP4, MXFP8 and FP8 in channels is as in `quant.formats`.

compressed-tensors (llm-compressor) computes everything in the weight's dtype: scales, quotients, and NVFP4's
global scale, which it keeps as a reciprocal. It picks MX exponents by the `even` rule.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quant.calibration.solvers.interfaces import Solver
from quant.calibration.statistics import LayerStats
from quant.formats.format import E2M1, E4M3, FP32, Format
from quant.formats.rounding import pack, round_to
from quant.formats.scaling import amax_over_blocks, global_scale_of
from quant.formats.tensor import BlockScaledTensor, checked_amax, choose_scale, quantize, quantize_with_scale


@dataclass(frozen=True)
class Peer(Solver):
    """A solver that gives the codes and scales of another toolkit for the same weight, byte for byte."""

    quantize: Callable[[Tensor, Format, Tensor | None], BlockScaledTensor]
    rule: str = "max"

    derives_global_scale = True  # in its own arithmetic

    def supports(self, format: Format) -> bool:
        return not format.gguf

    def __call__(
        self, weight: Tensor, stats: LayerStats | None, format: Format, *, global_scale: Tensor | None, name: str
    ) -> BlockScaledTensor:
        checked_amax(weight, name)
        return self.quantize(weight, format, global_scale)


def quantize_like_modelopt(weight: Tensor, format: Format, amax: Tensor | None) -> BlockScaledTensor:
    """Returns a weight `[..., out, in]` as nvidia-modelopt 0.47 quantizes it."""
    second = None
    if format.global_scale:
        second = global_scale_of(checked_amax(weight, "weight") if amax is None else amax, format)
    scale = choose_scale(weight.float(), format, "max", checked_amax(weight, "weight"), second)
    if second is not None:
        blocks = weight.unflatten(-1, (-1, format.block[1]))
        scale = torch.where(blocks.abs().amax(-1) == 0, 1.0, scale)
    return round_like_modelopt(weight, format, scale, second)


def round_like_modelopt(
    weight: Tensor, format: Format, scale: Tensor, global_scale: Tensor | None = None
) -> BlockScaledTensor:
    """Returns a weight `[..., out, in]` as nvidia-modelopt 0.47 rounds it under scales that are chosen."""
    values = weight.float()
    if format.element is E2M1:
        # A zero has the sign + in NVFP4, whatever it was, and - in MXFP4.
        values = torch.where(values == 0, 0.0 if format.global_scale else -0.0, values)
    ours = quantize_with_scale(values, format, scale, global_scale)
    if format.element.is_integer:
        # The lowest code of two's complement is used: -8 and -128.
        lowest = -format.element.max - 1
        codes = _quotient(weight, ours).round_().clamp_(lowest, format.element.max).to(torch.int8)
        return replace(ours, codes=codes if format.element.bits == 8 else pack(codes.view(torch.uint8) & 0x0F, 4))
    if format.per_tensor:
        return _requantize(ours, _quotient(weight, ours).to(weight.dtype))
    if format.element is E2M1 and format.has_power_of_two_scales:
        quotient = _quotient(values, ours)
        # One step toward zero turns every tie and nothing else: block scales are powers of two, quotients exact.
        towards = torch.nextafter(quotient, torch.zeros_like(quotient))
        return _requantize(ours, torch.where(quotient == 0, quotient, towards))
    return ours


def quantize_like_compressed_tensors(weight: Tensor, format: Format, amax: Tensor | None) -> BlockScaledTensor:
    """Returns `weight` as compressed-tensors 0.19 quantizes it. Arguments as for `quantize_like_modelopt`."""
    if format.scale.is_wide:
        ours = quantize(weight, format)
        return _requantize(ours, _quotient(weight, ours).to(weight.dtype))
    if format.has_power_of_two_scales:
        return quantize(weight, format, rule="even")
    assert amax is not None
    # 1 where the quotient is beyond the dtype, as for a weight of zeros.
    reciprocal = (format.element.max * format.scale.max / amax.to(weight.dtype)).to(weight.dtype).double()
    reciprocal = torch.where(reciprocal.isinf(), 1.0, reciprocal)
    blocks = weight.unflatten(-1, (-1, format.block[1])).unsqueeze(-3)
    block_amax = amax_over_blocks(blocks)[..., 0, :, 0]
    # Its order of operations: amax / 6 in the weight's dtype, then times the reciprocal in float32.
    scale = (block_amax / format.element.max).float() * reciprocal.float()[..., None, None]
    scale = round_to(scale.clamp(min=E4M3.min_subnormal), E4M3)
    return quantize_with_scale(weight, format, scale, 1 / reciprocal)


def _quotient(weight: Tensor, ours: BlockScaledTensor) -> Tensor:
    """Returns weight over block scale, float32 of the shape of `weight`."""
    rows, columns = weight.shape[-2:]
    block_rows, block_columns = ours.format.block_shape(weight.shape)
    scale = ours.scale_values().repeat_interleave(block_rows, -2)[..., :rows, :]
    return weight.float() / scale.repeat_interleave(block_columns, -1)[..., :columns]


def _requantize(ours: BlockScaledTensor, quotient: Tensor) -> BlockScaledTensor:
    """Returns `ours` with the elements that rounding `quotient` gives; scales as they are."""
    ones = torch.ones_like(ours.scale, dtype=torch.float32)
    return replace(ours, codes=quantize_with_scale(quotient, replace(ours.format, scale=FP32), ones).codes)
