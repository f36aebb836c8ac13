"""Finds the tensors of a quantized layer among the constants of its kernels.

    codes          the weight operand of the GEMM or of the kernel that unpacks it, element by element
    block scales   a constant of `[in / block, out]`, swizzled for FP4, perhaps repeated for each input, perhaps times
                   the scale of the input, with which the compiler multiplies scales of rows
    single scales  alpha of the GEMM, a constant of one number, or an immediate in a kernel's source
    input scale    likewise, in the kernel that rounds the layer's input
    bias           one number for each output

Codes, and block scales that are stored in 8 bit, must be equal; numbers that the compiler has multiplied may differ by
`TOLERANCES`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from quant.export.engine.contents.batch_norm import holds_folded_scales
from quant.export.tensorrt.engine_constants import (
    TOLERANCES,
    any_close,
    holds_cropped,
    holds_matrix,
    holds_numbers,
    holds_swizzled,
    holds_vector,
    input_factors,
)
from quant.export.engine.contents.program import Kernel, KernelOperand
from quant.export.engine.contents.view import TOKEN_STEP, WHOLE, Part, View
from quant.formats.packing import unpack
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.linear.conv import QuantConv
from quant.kernels.linear.quant_linear import QuantLinear


def quantized_problems(view: View, name: str, module: QuantLinear | QuantConv) -> Iterator[str]:
    """Yields the tensors of a quantized layer that are not where its kernels read."""
    weight, format = module.quantized_weight, module.weight_format
    operands = view.constants(view.of_module[name])
    part = view.part_of(name)
    codes = weight.codes.view(torch.uint8)
    if format.element.bits == 4:
        codes = unpack(codes, 4, weight.shape[1])
    element = {4: ("fp4_e2m1", "int4"), 8: ("fp8_e4m3", "int8")}[format.element.bits]
    stored = [operand for operand in operands if operand.stored in element]
    if isinstance(module, QuantConv):
        shaped = module.codes.view(torch.uint8).numpy()
        is_held = any(holds_cropped(view, operand, shaped) for operand in stored)
    else:
        is_held = any(holds_matrix(view, operand, codes.numpy().T, part) for operand in stored)
    if not is_held:
        yield "codes"
    single = _scalar_scales(module)
    if single and weight.global_scale is not None and _holds_products(view, operands, weight, part):
        single = []
    elif weight.scale.numel() > 1 and not (
        _holds_scales(view, operands, module, part) or holds_folded_scales(view, name, module)
    ):
        yield "scales"
    scalars = view.scalars(name)
    if single and not (
        any_close(single, scalars)
        or any_close(single, _times_attention(view, name, scalars))
        or holds_folded_scales(view, name, module)
    ):
        yield "scale"
    if module.input_scale is not None:
        scale = float(module.input_scale)
        kernels = [*view.of_module[name], *view.feeding(name)]
        is_found = any_close([scale, 1 / scale], view.scalars(name)) or _is_in_norm(view, kernels, scale)
        if not is_found:
            yield "input scale"
    yield from _bias_problems(view, operands, module, part)


def _times_attention(view: View, name: str, scalars: Iterable[float]) -> list[float]:
    """Returns numbers of a layer times the factors of the FP8 attention behind it.

    The compiler divides V's scale by the scale of attention's codes, and attention multiplies by it again: by the
    scales of V and of the probabilities, and by the reciprocal of the latter.
    """
    kernels = [kernel for kernel in view.kernels if kernel.is_attention and name.rpartition(".")[0] in kernel.modules]
    pairs = [pair for kernel in kernels for pair in itertools.combinations(view.engine.scalars(kernel), 2)]
    return [number * a * b for number in scalars for a, b in pairs]


def _is_in_norm(view: View, kernels: Sequence[Kernel], scale: float) -> bool:
    """Returns whether one of these kernels divides by the scale of an input as a part of a norm's weight."""
    for kernel in kernels:
        for name in kernel.modules & view.vectors.keys():
            divided = view.vectors[name] / scale
            if any(holds_vector(view, operand, divided, WHOLE) for operand in view.constants([kernel])):
                return True
    return False


def _bias_problems(view: View, operands: Sequence[KernelOperand], module: Any, part: Part) -> Iterator[str]:
    bias = module.bias
    # Adding zeros is no work, and the compiler drops it.
    if bias is not None and bool(bias.any()):
        values = bias.detach().float().numpy()
        if not any(holds_vector(view, operand, values, part) for operand in operands):
            yield "bias"


def _scalar_scales(module: QuantLinear | QuantConv) -> list[float]:
    """Returns numbers of which one must multiply the GEMM's result: the weight's scale, also times the input's."""
    weight = module.quantized_weight
    if weight.global_scale is not None:
        scale = float(weight.global_scale)
    elif weight.scale.numel() == 1:
        scale = float(weight.scale_values())
    else:
        return []
    if module.activation_format is None:
        return [scale]
    if module.input_scale is not None:
        return [scale * float(module.input_scale)]
    step = TOKEN_STEP.get(module.activation_format.element, 1.0)
    return [scale * step, scale]


def _holds_scales(view: View, operands: Sequence[KernelOperand], module: QuantLinear | QuantConv, part: Part) -> bool:
    """Returns whether one of the constants has the block scales of a layer."""
    weight, format = module.quantized_weight, module.weight_format
    if format.global_scale:
        stored = weight.scale.view(torch.uint8).numpy().T
        return any(
            holds_matrix(view, operand, stored, part) or holds_swizzled(view, operand, stored, part)
            for operand in operands
            if operand.stored == "fp8_e4m3"
        )
    # [blocks of inputs, blocks of outputs], as the transposed weight has them.
    scales = weight.scale_values().numpy().T
    factors = [1.0, *input_factors(module)]
    part = replace(part, start=part.start // format.block_shape(weight.shape)[0])
    return any(
        holds_numbers(view, operand, np.float32(factor) * scales, part, weight.shape[1])
        for operand in operands
        if operand.stored in TOLERANCES
        for factor in factors
    )


def _holds_products(view: View, operands: Sequence[KernelOperand], weight: BlockScaledTensor, part: Part) -> bool:
    """Returns whether a constant has NVFP4's block scales times the global scale, as TensorRT-RTX 1.5 folds them."""
    scales = weight.scale_values().numpy().T
    return any(
        holds_numbers(view, operand, scales, part, weight.shape[1]) for operand in operands if operand.stored == "float"
    )
