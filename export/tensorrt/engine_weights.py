"""Compares every tensor of a model with the constants of an engine, layer by layer and where each is read.

A kernel's constants belong to the modules whose nodes were fused into it (`program`). For each module of the model its
tensors must be among the constants that its own kernels read, so that two layers whose weights were exchanged fail as
much as weights of another model. `quantized_tensors` and `plain_tensors` list the tensors of a module; `constants`
compares one constant, and `batch_norm` the constants of a BatchNorm after a convolution.

The matrices of layers with one input (q, k and v) are merged along the outputs, in the order in which the kernel's name
lists them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from quant.export.tensorrt.engine_constants import (
    TOKEN_STEP,
    TOLERANCES,
    WHOLE,
    Part,
    View,
    any_close,
    holds_cropped,
    holds_factors,
    holds_folded_scales,
    holds_folded_weight,
    holds_matrix,
    holds_numbers,
    holds_rounded,
    holds_swizzled,
    holds_vector,
    input_factors,
    is_close,
    norms_after,
)
from quant.export.tensorrt.engine_file import Engine, Kernel, KernelOperand
from quant.formats.rounding import unpack
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.linear.conv import QuantConv
from quant.kernels.linear.quant_linear import QuantLinear

# Finds the tensors and numbers of a module in 16 or 32 bit among the constants of its kernels.
#
#     parameters     weights of layers in 16 bit, norms and embeddings, rounded to the type in which the engine has them
#     numbers        a norm's epsilon, the scale of attention, RoPE's table, the scales of an FP8 cache
#     function       the kernels of an activation hold the ONNX ops of that function
#
# A BatchNorm after a convolution becomes a part of the convolution (`batch_norm`).


# ONNX ops of an activation function, in each way to write it.
_SILU, _EXACT_GELU, _TANH_GELU = [{"Sigmoid", "Mul"}, {"Swish"}], [{"Gelu"}, {"Erf"}], [{"Gelu"}, {"Tanh"}]
ACTIVATIONS = {
    "SiLU": _SILU,
    "SiLUActivation": _SILU,
    "ReLU": [{"Relu"}],
    "GELU": _EXACT_GELU,
    "GELUActivation": _EXACT_GELU,
    "NewGELUActivation": _TANH_GELU,
    "GELUTanh": _TANH_GELU,
    "PytorchGELUTanh": _TANH_GELU,
}


def plain_problems(view: View, name: str, module: nn.Module) -> Iterator[str]:
    """Yields the parameters of a module in 16 or 32 bit that are not where its kernels read."""
    operands = view.constants(view.of_module[name])
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        if module not in view.folded and not holds_factors(view, operands, module):
            yield "factors"
        return
    yield from _number_problems(view, name, module)
    is_conv = isinstance(module, nn.modules.conv._ConvNd)
    for parameter, tensor in module.named_parameters(recurse=False):
        # Adding zeros is no work.
        if tensor.ndim < 2 and not bool(tensor.any()):
            continue
        expected = tensor.detach().T if _is_turned(module, parameter) else tensor.detach()
        if parameter == "weight" and name in view.vectors:
            expected = torch.from_numpy(view.vectors[name])
        if _holds_parameter(view, name, module, expected):
            continue
        if is_conv and parameter == "weight" and holds_folded_weight(view, operands, module):
            break  # with its bias
        yield parameter


def _is_turned(module: nn.Module, parameter: str) -> bool:
    """Returns whether a constant has the parameter `[out, in]` as `[in, out]`."""
    return isinstance(module, nn.Linear) and parameter == "weight"


def _holds_parameter(view: View, name: str, module: nn.Module, expected: torch.Tensor) -> bool:
    """Returns whether the module's kernels read these numbers, rounded to the type of a constant."""
    part, kernels = view.part_of(name), view.of_module[name]
    if any(holds_rounded(view, operand, expected, part) for operand in view.constants(kernels)):
        return True
    return "Norm" in type(module).__name__ and any(_holds_divided(view, kernel, expected) for kernel in kernels)


def _holds_divided(view: View, kernel: Kernel, expected: torch.Tensor) -> bool:
    """Returns whether a kernel has a norm's weight divided by the scale of a layer whose input it rounds."""
    values = expected.float().numpy()
    return any(
        holds_vector(view, operand, values / view.input_scales[layer], WHOLE)
        for layer in kernel.modules & view.input_scales.keys()
        for operand in view.constants([kernel])
    )


def _number_problems(view: View, name: str, module: Any) -> Iterator[str]:
    """Yields single numbers of a module that its kernels lack: a norm's epsilon, attention's scales, RoPE's table."""
    numbers = view.scalars(name)
    for buffer, table in module.named_buffers(recurse=False):
        # Some models keep the table of each kind of block, and the first one under another name.
        if (
            buffer.endswith("inv_freq")
            and "original" not in buffer
            and not any(holds_rounded(view, operand, table, WHOLE) for operand in view.constants(view.kernels))
        ):
            yield buffer
    kinds = {node.rpartition("/")[2].partition("_")[0] for k in view.of_module[name] for node in k.nodes
             if node.rpartition("/")[0] == name}  # fmt: skip
    if not any(function <= kinds for function in ACTIVATIONS.get(type(module).__name__, [kinds])):
        yield "function"
    # RoPE's table is multiplied by it in YaRN and its kin.
    factor = getattr(module, "attention_scaling", 1.0)
    if isinstance(factor, float) and factor != 1.0 and not any_close([factor], numbers):
        yield "attention scaling"
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if "Norm" in type(module).__name__ and isinstance(epsilon, float) and not any_close([epsilon], numbers):
        yield "epsilon"
    kernels = view.of_module[name]
    scaling = getattr(module, "scaling", None)
    fused = [kernel for kernel in kernels if kernel.is_attention]
    # Fused attention takes q and k scaled by the root each, rounded to BF16 or FP16, or q alone by the whole. In FP8
    # the scale is one of many factors.
    if (
        isinstance(scaling, float)
        and fused
        and not any(operand.type == "fp8" for kernel in fused for operand in kernel.inputs)
        and not any(abs(x - y) <= 2.0**-7 * y for x in numbers for y in (scaling, math.sqrt(scaling)))
    ):
        yield "scaling"
    for kernel in kernels:
        yield from _cache_problems(view, kernel, module)


def _cache_problems(view: View, kernel: Kernel, module: Any) -> Iterator[str]:
    """Yields the scales of an FP8 cache that an attention does not have; a cache in 16 bit has none.

    Our plugin takes the scales of K, then the scales of V, one for each KV head.
    """
    caches = [o for o in kernel.inputs if o.stored == "fp8_e4m3" and len(o.dims) == 4]
    constants = [o for o in kernel.inputs if o.index is not None and o.stored == "float"]
    if not caches or not constants:
        return
    for index, scale in enumerate(("k_scale", "v_scale")):
        value = getattr(module, scale, None)
        if isinstance(value, torch.Tensor):
            expected = value.detach().float().numpy().reshape(-1)
            near = constants[index : index + 1] if len(constants) == 2 else constants
            if not any(
                is_close(held, np.broadcast_to(expected, held.shape), "float")
                or is_close(held, np.broadcast_to(1 / expected, held.shape), "float")
                for held in (view.values(operand).reshape(-1) for operand in near)
                if expected.size in (1, held.size)
            ):
                yield scale


# Finds the tensors of a quantized layer among the constants of its kernels.
#
#     codes          the weight operand of the GEMM or of the kernel that unpacks it, element by element
#     block scales   a constant of `[in / block, out]`, swizzled for FP4, perhaps repeated for each input, perhaps times
#                    the scale of the input, with which the compiler multiplies scales of rows
#     single scales  alpha of the GEMM, a constant of one number, or an immediate in a kernel's source
#     input scale    likewise, in the kernel that rounds the layer's input
#     bias           one number for each output
#
# Codes, and block scales that are stored in 8 bit, must be equal; numbers that the compiler has multiplied may differ
# by `TOLERANCES`.


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


_WEIGHTLESS = 16  # constants of fewer numbers are literals of the graph


def compare_tensors(engine: Engine, model: nn.Module) -> dict[str, list[str]]:
    """Returns, by module, the tensors that the engine lacks where its kernels read; an empty list if it has all.

    Modules without a kernel of their name are left out: they were not exported, or compute nothing.
    """
    results = []
    for start in engine.starts:
        engine.starts = [start]
        results.append(_compare(engine, model))
    # Of two positions at which the table may begin, the wrong one matches nothing.
    return min(results, key=lambda missing: sum(map(len, missing.values())))


def _compare(engine: Engine, model: nn.Module) -> dict[str, list[str]]:
    modules = {name: module for name, module in model.named_modules() if name}
    norm_after = norms_after(modules.values())
    missing: dict[str, list[str]] = {}
    for profile in sorted({kernel.profile for kernel in engine.kernels}):
        view = View(engine, profile, modules, norm_after)
        for name, module in modules.items():
            if name not in view.of_module or not _has_tensors(module):
                continue
            if isinstance(module, QuantLinear | QuantConv):
                absent = quantized_problems(view, name, module)
            else:
                absent = plain_problems(view, name, module)
            tensors = missing.setdefault(name, [])
            tensors += [tensor for tensor in absent if tensor not in tensors]
        for name in _surplus(view):
            # A tensor that is missing has another one in its place.
            if not missing.get(name):
                missing[name] = ["surplus constant"]
    return missing


def _surplus(view: View) -> Iterator[str]:
    """Yields layers whose kernels read numbers, one for each output, that no tensor explains: another bias."""
    for name, outputs in view.rows.items():
        # The kernel of the layer's own nodes, and the next kernel, where a surplus bias would be added.
        own = view.of_module.get(name, [])
        written = {output for kernel in own if kernel.is_gemm for output in kernel.outputs}
        kernels = [kernel for kernel in view.kernels if any(operand.name in written for operand in kernel.inputs)]
        for operand in view.constants([*own, *kernels]):
            is_row = operand.stored in TOLERANCES and operand.size == outputs >= _WEIGHTLESS
            if is_row and operand.index not in view.explained:
                values = view.values(operand).reshape(-1)
                if not (values == values[0]).all() and not _is_norm_weight(view, values):
                    yield name
                    break


def _is_norm_weight(view: View, values: np.ndarray) -> bool:
    """Returns whether these are a norm's weight times one number, in an engine that does not name its norms."""
    for weight in view.vectors.values():
        if weight.shape == values.shape and weight.all():
            ratio = values / weight
            if np.abs(ratio - ratio[0]).max() <= 2.0**-7 * abs(ratio[0]):
                return True
    return False


def _has_tensors(module: nn.Module) -> bool:
    return any(
        (
            isinstance(module, QuantLinear | QuantConv),
            any(True for _ in module.parameters(recurse=False)),
            any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False)),
            type(module).__name__ in ACTIVATIONS,
            hasattr(module, "k_scale"),
            isinstance(getattr(module, "scaling", None), float),
        )
    )
