"""BatchNorm in an engine: a factor and an offset of each channel, or part of the convolution before it.

In evaluation a BatchNorm is y = x · factor + shift, with factor = weight / √(variance + eps) and
shift = bias − mean · factor. The compiler computes both once. If the BatchNorm follows a convolution, the factor may
also be multiplied into the convolution's weight, or into the scales of a quantized weight, and the convolution's bias
becomes bias · factor + shift.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from quant.export.tensorrt.engine_constants import TOLERANCES, cropped, holds_vector, input_factors, is_close
from quant.export.engine.contents.program import KernelOperand
from quant.export.engine.contents.view import WHOLE, View
from quant.kernels.linear.conv import QuantConv
from quant.kernels.linear.quant_linear import QuantLinear


def norms_after(modules: Iterable[nn.Module]) -> dict[nn.Module, nn.Module]:
    """Returns the BatchNorm that is defined right after each convolution, by convolution."""
    after: dict[nn.Module, nn.Module] = {}
    conv = None
    for module in modules:
        if isinstance(module, nn.modules.conv._ConvNd | QuantConv):
            conv = module
        elif isinstance(module, nn.modules.batchnorm._BatchNorm) and conv is not None:
            after[conv], conv = module, None
    return after


def holds_factors(view: View, operands: Sequence[KernelOperand], norm: Any) -> bool:
    """Returns whether constants have the factor and the offset of each channel that a BatchNorm is in evaluation."""
    (factor, shift, size), rounding = _factors(norm), _rounding(norm)
    return all(
        # One times x, and x plus zero, are no work.
        bool((vector == neutral).all())
        or any(holds_vector(view, operand, vector, WHOLE, rounding * np.abs(terms)) for operand in operands)
        for vector, neutral, terms in ((factor, 1.0, factor), (shift, 0.0, size))
    )


def holds_folded_scales(view: View, name: str, module: QuantLinear | QuantConv) -> bool:
    """Returns whether a constant has a convolution's scales times the factors of the BatchNorm that follows it."""
    norm: Any = view.norm_after.get(module)
    weight = module.quantized_weight
    if norm is None or norm.num_features != weight.shape[0]:
        return False
    (factor, _, _), rounding = _factors(norm), _rounding(norm)
    operands = view.constants([*view.of_module[name], *view.of_module.get(view.names[norm], ())])
    scales = weight.scale_values().numpy().reshape(-1) * factor
    steps = [1.0, *input_factors(module)]
    is_held = any(
        holds_vector(view, operand, np.float32(step) * scales, WHOLE, rounding * np.abs(step * scales))
        for operand in operands
        for step in steps
    )
    if is_held and _holds_bias(view, operands, module, norm):
        view.folded.add(norm)
        return True
    return False


def holds_folded_weight(view: View, operands: Sequence[KernelOperand], conv: Any) -> bool:
    """Returns whether constants have a convolution's weight times the factors of the BatchNorm that follows it."""
    after = view.norm_after.get(conv)
    if after is None or after.num_features != conv.out_channels or conv.transposed:
        return False
    (factor, _, _), rounding = _factors(after), _rounding(after)
    weight = conv.weight.detach().float().numpy() * factor.reshape(-1, *[1] * (conv.weight.ndim - 1))
    for operand in operands:
        values = cropped(view.values(operand), weight.shape) if operand.stored in TOLERANCES else None
        if values is not None and view.explain(
            operand, is_close(values, weight, operand.stored, rounding * np.abs(weight))
        ):
            view.folded.add(after)
            return _holds_bias(view, operands, conv, after)
    return False


def _holds_bias(view: View, operands: Sequence[KernelOperand], conv: Any, norm: Any) -> bool:
    """Returns whether a constant has a convolution's bias after the BatchNorm; one of zeros needs none."""
    (factor, shift, size), rounding = _factors(norm), _rounding(norm)
    bias = shift if conv.bias is None else conv.bias.detach().float().numpy() * factor + shift
    return not bias.any() or any(holds_vector(view, operand, bias, WHOLE, rounding * size) for operand in operands)


def _factors(norm: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns factor and shift of a BatchNorm, y = x · factor + shift, and the sum of the shift terms' sizes."""
    deviation = torch.sqrt(norm.running_var.double() + norm.eps)
    factor = (1.0 if norm.weight is None else norm.weight.detach().double()) / deviation
    bias = torch.zeros_like(factor) if norm.bias is None else norm.bias.detach().double()
    mean = norm.running_mean.double() * factor
    return factor.float().numpy(), (bias - mean).float().numpy(), (bias.abs() + mean.abs()).float().numpy()


def _rounding(norm: Any) -> float:
    """Returns the relative error of numbers that were computed from a BatchNorm in its own dtype."""
    return {torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}.get(norm.running_var.dtype, 1e-5)
