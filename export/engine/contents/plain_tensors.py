"""Finds the tensors and numbers of a module in 16 or 32 bit among the constants of its kernels.

    parameters     weights of layers in 16 bit, norms and embeddings, rounded to the type in which the engine has them
    numbers        a norm's epsilon, the scale of attention, RoPE's table, the scales of an FP8 cache
    function       the kernels of an activation hold the ONNX ops of that function

A BatchNorm after a convolution becomes a part of the convolution (`batch_norm`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from quant.export.engine.contents.batch_norm import holds_factors, holds_folded_weight
from quant.export.tensorrt.engine_constants import any_close, holds_rounded, holds_vector, is_close
from quant.export.engine.contents.program import Kernel
from quant.export.engine.contents.view import WHOLE, View

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
