"""The arithmetic of other toolkits, reproduced to the byte: for audits, and for migrating a deployment.

Same formats, same `max` rule; the difference is in which dtype the intermediate results are rounded.

ModelOpt divides an FP8 weight by its FP32 scale in the weight's own dtype, so a BF16 quotient is rounded twice.
Its NVFP4 and MX arithmetic is ours.

compressed-tensors (llm-compressor) computes everything in the weight's dtype: scales, quotients, and NVFP4's
global scale, which it keeps as a reciprocal. It picks MX exponents by the `even` rule.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from quant.formats.format import Format
from quant.formats.number import E4M3, E8M0
from quant.formats.rounding import round_to
from quant.formats.scaling import amax_over_blocks, global_scale_of
from quant.formats.tensor import BlockScaledTensor, quantize, quantize_with_scale


def quantize_like_modelopt(weight: torch.Tensor, format: Format, amax: torch.Tensor | None) -> BlockScaledTensor:
    """`weight` as nvidia-modelopt 0.47 quantizes it.

    Args:
        weight: `[..., out, in]`.
        format: the target.
        amax: largest magnitude of the fusion group, for formats with a global scale.
    """
    if format.scale.is_wide:
        return _round_quotient_twice(weight, quantize(weight.float(), format))
    return quantize(weight, format, global_scale=None if amax is None else global_scale_of(amax, format))


def quantize_like_compressed_tensors(
    weight: torch.Tensor, format: Format, amax: torch.Tensor | None
) -> BlockScaledTensor:
    """`weight` as compressed-tensors 0.19 quantizes it. Arguments as for `quantize_like_modelopt`."""
    if format.scale.is_wide:
        return _round_quotient_twice(weight, quantize(weight, format))
    if format.scale is E8M0:
        return quantize(weight, format, rule="even")
    assert amax is not None
    reciprocal = (format.element.max * format.scale.max / amax.to(weight.dtype)).to(weight.dtype).double()
    blocks = weight.unflatten(-1, (-1, format.block[1])).unsqueeze(-3)
    block_amax = amax_over_blocks(blocks)[..., 0, :, 0]
    scale = (block_amax / format.element.max).float() * reciprocal.float()[..., None, None]
    scale = round_to(scale.clamp(min=E4M3.min_subnormal), E4M3)
    return quantize_with_scale(weight, format, scale, 1 / reciprocal)


def _round_quotient_twice(weight: torch.Tensor, ours: BlockScaledTensor) -> BlockScaledTensor:
    """`ours` with the elements of weight / scale where the quotient was rounded to the weight's dtype first."""
    rows, columns = weight.shape[-2:]
    block_rows, block_columns = ours.format.block_shape(weight.shape)
    scale = ours.scale.repeat_interleave(block_rows, -2)[..., :rows, :]
    scale = scale.repeat_interleave(block_columns, -1)[..., :columns]
    quotient = (weight.float() / scale).to(weight.dtype)
    return replace(ours, codes=quantize_with_scale(quotient, ours.format, torch.ones_like(ours.scale)).codes)
