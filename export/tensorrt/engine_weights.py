"""Compares every tensor of a model with the constants of an engine, layer by layer and where each is read.

A kernel's constants belong to the modules whose nodes were fused into it (`program`). For each module of the model its
tensors must be among the constants that its own kernels read, so that two layers whose weights were exchanged fail as
much as weights of another model. `quantized_tensors` and `plain_tensors` list the tensors of a module; `constants`
compares one constant, and `batch_norm` the constants of a BatchNorm after a convolution.

The matrices of layers with one input (q, k and v) are merged along the outputs, in the order in which the kernel's name
lists them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch import nn

from quant.export.engine.contents.batch_norm import norms_after
from quant.export.tensorrt.engine_constants import TOLERANCES
from quant.export.tensorrt.engine_file import Engine
from quant.export.engine.contents.plain_tensors import ACTIVATIONS, plain_problems
from quant.export.engine.contents.quantized_tensors import quantized_problems
from quant.export.engine.contents.view import View
from quant.kernels.linear.conv import QuantConv
from quant.kernels.linear.quant_linear import QuantLinear

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
