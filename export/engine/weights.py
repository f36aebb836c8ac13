"""Compares every tensor of a model with the constants of an engine, layer by layer and where each is read.

A kernel's constants belong to the modules whose nodes were fused into it (`program`). For each module of the model its
tensors must be among the constants that its own kernels read, so that two layers whose weights were exchanged fail as
much as weights of another model:

    codes          the weight operand of the GEMM or of the kernel that unpacks it, element by element
    block scales   a constant of `[in / block, out]`, swizzled for FP4, perhaps repeated for each input, perhaps times
                   the scale of the input, with which the compiler multiplies scales of rows
    single scales  alpha of the GEMM, a constant of one number, or an immediate in a kernel's source
    input scale    likewise, in the kernel that rounds the layer's input
    bias, weights  of layers in 16 bit, norms, embeddings: rounded to the type in which the engine has them

The matrices of layers with one input (q, k and v) are merged along the outputs, in the order in which the kernel's name
lists them. BatchNorm is a factor and an offset of each channel, or has become part of the convolution before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import nn

from quant.export.engine.program import PRODUCTS, Engine, Kernel, Operand
from quant.formats.number import E4M3, INT8
from quant.formats.packing import unpack
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.linear.conv import QuantConv
from quant.kernels.linear.modules import QuantLinear

# How far a number may be from the stored one, relatively: sums and products of a few float32 numbers, or one rounding
# to the type of the constant.
_CLOSE = {"float": 2e-6, "half": 2.0**-10, "bf16": 2.0**-7, "bfloat16": 2.0**-7}
_ROUNDED = {"half": torch.float16, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "float": torch.float32}
# Steps of the codes of inputs that are scaled by token (`onnx_graph.ops`).
_TOKEN_STEP = {E4M3: 2.0**-9, INT8: 2.0**-7}
_WEIGHTLESS = 16  # constants of fewer numbers are literals of the graph
# ONNX ops of which an activation function has one.
_ACTIVATIONS = {
    "SiLU": {"Sigmoid", "Swish"},
    "SiLUActivation": {"Sigmoid", "Swish"},
    "ReLU": {"Relu"},
    "GELU": {"Gelu", "Erf"},
    "GELUActivation": {"Gelu", "Erf"},
    "NewGELUActivation": {"Gelu", "Tanh"},
    "GELUTanh": {"Gelu", "Tanh"},
    "PytorchGELUTanh": {"Gelu", "Tanh"},
}


@dataclass(frozen=True)
class Mismatch:
    """A tensor of a module that the engine lacks where the module's kernels read."""

    module: str
    tensor: str


@dataclass(frozen=True)
class Part:
    """A layer among those whose matrices were merged: its index, their number, and the first of its outputs.

    Matrices of one size may be stacked, `[layers, in, out]`, and others lie side by side, `[in, outputs of all]`.
    Numbers that are not merged have the layer's own size.
    """

    index: int
    count: int
    start: int

    def cut(self, values: np.ndarray, rows: int, columns: int) -> np.ndarray | None:
        """The layer's `[rows, columns]` of a constant; None if it cannot be there."""
        sizes = [size for size in values.shape if size != 1]
        if self.count > 1 and values.ndim >= 3 and values.shape[0] == self.count:
            values = values[self.index]
            sizes = sizes[1:]
        if len(sizes) > 2:
            return None
        if len(sizes) < 2:
            # Of a vector the dim that was dropped is the one of size 1 in the layer's part.
            if rows > 1 and columns > 1:
                return None
            sizes = [values.size, 1] if rows > 1 else [1, values.size]
        values = values.reshape(sizes)
        start = 0 if values.shape[1] == columns else self.start
        if values.shape[0] < rows or values.shape[1] < start + columns:
            return None
        return values[:rows, start : start + columns]


WHOLE = Part(0, 1, 0)


class View:
    """The kernels of one optimization profile, by the modules whose nodes they hold."""

    def __init__(self, engine: Engine, profile: int, rows: Mapping[str, int]) -> None:
        self.engine = engine
        self.kernels = [kernel for kernel in engine.kernels if kernel.profile == profile]
        self.rows = rows
        self.explained: set[int] = set()
        self.folded: set[nn.Module] = set()
        self.norm_after: dict[nn.Module, nn.Module] = {}
        # Weights of norms, and the scales of the inputs that each quantized layer rounds to.
        self.vectors: dict[str, np.ndarray] = {}
        self.names: dict[nn.Module, str] = {}
        self.input_scales: dict[str, float] = {}
        self.of_module: dict[str, list[Kernel]] = {}
        self.writer: dict[tuple[int, str], Kernel] = {}
        for kernel in self.kernels:
            for module in kernel.modules:
                self.of_module.setdefault(module, []).append(kernel)
            for name in kernel.outputs:
                self.writer.setdefault((kernel.program, name), kernel)
        self.values = lru_cache(maxsize=8)(lambda operand: engine.constant(operand))

    def constants(self, kernels: Iterable[Kernel]) -> list[Operand]:
        """The constants that these kernels read, each once."""
        found = {o.index: o for kernel in kernels for o in kernel.inputs if o.index is not None}
        return list(found.values())

    def feeding(self, module: str) -> list[Kernel]:
        """The kernels that write what the module's GEMM reads."""
        gemms = [kernel for kernel in self.of_module.get(module, ()) if kernel.is_gemm and _multiplies(kernel, module)]
        written = [self.writer.get((gemm.program, operand.name)) for gemm in gemms for operand in gemm.inputs]
        return [kernel for kernel in written if kernel is not None]

    def part_of(self, module: str) -> Part:
        """Where a layer lies in the merged matrix of its GEMM."""
        for kernel in self.of_module.get(module, ()):
            # "v/MatMul [profile 1]+k/MatMul [profile 1]": the order of the rows.
            names = [part.rpartition("/")[0] for part in kernel.name.split("+")]
            if module in names and len(names) > 1:
                index = names.index(module)
                return Part(index, len(names), sum(self.rows.get(name, 0) for name in names[:index]))
        return WHOLE

    def scalars(self, module: str) -> set[float]:
        """Every single number in the module's kernels and in those that feed its GEMM."""
        kernels = [*self.of_module.get(module, ()), *self.feeding(module)]
        return {number for kernel in kernels for number in self.engine.scalars(kernel)}


def compare_tensors(engine: Engine, model: nn.Module) -> dict[str, list[str]]:
    """Names of the tensors of each module that the engine has not where the module's kernels read; empty if it has all.

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
    rows = {name: outputs for name, module in modules.items() if (outputs := _outputs(module))}
    missing: dict[str, list[str]] = {}
    for profile in sorted({kernel.profile for kernel in engine.kernels}):
        view = View(engine, profile, rows)
        view.norm_after = _norms_after(modules.values())
        view.names = {module: name for name, module in modules.items()}
        for name, module in modules.items():
            weight = getattr(module, "weight", None)
            if isinstance(module, QuantLinear | QuantConv):
                if module.input_scale is not None:
                    view.input_scales[name] = float(module.input_scale)
            elif isinstance(weight, torch.Tensor) and weight.ndim == 1:
                view.vectors[name] = weight.detach().float().numpy()
        for name, module in modules.items():
            if name not in view.of_module or not _has_tensors(module):
                continue
            if isinstance(module, QuantLinear | QuantConv):
                absent = _quantized_problems(view, name, module)
            else:
                absent = _plain_problems(view, name, module)
            known = missing.setdefault(name, [])
            known += [tensor for tensor in absent if tensor not in known]
        for name in _surplus(view):
            # A tensor that is missing has another one in its place.
            if not missing.get(name):
                missing[name] = ["surplus constant"]
    return missing


def _surplus(view: View) -> Iterator[str]:
    """Layers whose kernels read numbers, one for each output, that no tensor of the model explains: another bias."""
    for name, outputs in view.rows.items():
        # The kernel of the layer's own nodes, and the next one, which adds what the layer has no node for.
        own = view.of_module.get(name, [])
        written = {output for kernel in own if kernel.is_gemm for output in kernel.outputs}
        kernels = [kernel for kernel in view.kernels if any(operand.name in written for operand in kernel.inputs)]
        for operand in view.constants([*own, *kernels]):
            is_row = operand.stored in _CLOSE and _size(operand) == outputs >= _WEIGHTLESS
            if is_row and operand.index not in view.explained:
                values = view.values(operand).reshape(-1)
                if not (values == values[0]).all() and not _is_a_norms(view, values):
                    yield name
                    break


def _is_a_norms(view: View, values: np.ndarray) -> bool:
    """Whether these are a norm's weight times one number, in an engine that does not name its norms."""
    for vector in view.vectors.values():
        for weight in (vector, 1 + vector):
            if weight.shape == values.shape and weight.all():
                ratio = values / weight
                if np.abs(ratio - ratio[0]).max() <= 2.0**-7 * abs(ratio[0]):
                    return True
    return False


def _norms_after(modules: Iterable[nn.Module]) -> dict[nn.Module, nn.Module]:
    """The BatchNorm that is defined right after each convolution."""
    after: dict[nn.Module, nn.Module] = {}
    conv = None
    for module in modules:
        if isinstance(module, nn.modules.conv._ConvNd | QuantConv):
            conv = module
        elif isinstance(module, nn.modules.batchnorm._BatchNorm) and conv is not None:
            after[conv], conv = module, None
    return after


def _has_tensors(module: nn.Module) -> bool:
    return any(
        (
            isinstance(module, QuantLinear | QuantConv),
            any(True for _ in module.parameters(recurse=False)),
            any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False)),
            type(module).__name__ in _ACTIVATIONS,
            hasattr(module, "k_scale"),
            isinstance(getattr(module, "scaling", None), float),
        )
    )


def _outputs(module: nn.Module) -> int:
    """Outputs of a linear layer; 0 for other modules."""
    if isinstance(module, QuantLinear | QuantConv):
        return int(module.weight_shape[0])
    weight = getattr(module, "weight", None)
    return int(weight.shape[0]) if isinstance(module, nn.Linear) and weight is not None else 0


def _multiplies(kernel: Kernel, module: str) -> bool:
    return any(node.startswith(f"{module}{kind}") for node in kernel.nodes for kind in PRODUCTS)


def _quantized_problems(view: View, name: str, module: QuantLinear | QuantConv) -> Iterator[str]:
    """The tensors of a quantized layer that are not where its kernels read."""
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
        is_held = any(_holds_conv(view, operand, shaped) for operand in stored)
    else:
        is_held = any(_holds(view, operand, codes.numpy().T, part) for operand in stored)
    if not is_held:
        yield "codes"
    single = _scalar_scales(module)
    if single and weight.global_scale is not None and _holds_products(view, operands, weight, part):
        single = []
    elif weight.scale.numel() > 1 and not (
        _holds_scales(view, operands, module, part) or _is_in_batch_norm(view, name, module)
    ):
        yield "scales"
    if single and not _any_close(single, view.scalars(name)) and not _is_in_batch_norm(view, name, module):
        yield "scale"
    if module.input_scale is not None:
        scale = float(module.input_scale)
        kernels = [*view.of_module[name], *view.feeding(name)]
        is_found = _any_close([scale, 1 / scale], view.scalars(name)) or _is_in_norm(view, kernels, scale)
        if not is_found:
            yield "input scale"
    yield from _bias_problems(view, operands, module, part)


def _is_in_batch_norm(view: View, name: str, module: QuantLinear | QuantConv) -> bool:
    """Whether a constant has a convolution's scales times the factors of the BatchNorm that follows it."""
    norm: Any = view.norm_after.get(module)
    weight = module.quantized_weight
    if norm is None or norm.num_features != weight.shape[0]:
        return False
    (factor, shift, size), rounding = _factors(norm), _rounding(norm)
    operands = view.constants([*view.of_module[name], *view.of_module.get(view.names[norm], ())])
    scales = weight.scale_values().numpy().reshape(-1) * factor
    steps = [1.0, *_input_factors(module)]
    is_held = any(
        _holds_vector(view, operand, np.float32(step) * scales, WHOLE, rounding * np.abs(step * scales))
        for operand in operands
        for step in steps
    )
    bias = shift if module.bias is None else module.bias.detach().float().numpy() * factor + shift
    if is_held and (
        not bias.any() or any(_holds_vector(view, other, bias, WHOLE, rounding * size) for other in operands)
    ):
        view.folded.add(norm)
        return True
    return False


def _input_factors(module: QuantLinear | QuantConv) -> list[float]:
    """Numbers by which the compiler may multiply scales of rows: those of the input's codes."""
    factors = []
    if module.activation_format is not None:
        factors.append(_TOKEN_STEP.get(module.activation_format.element, 1.0))
    if module.input_scale is not None:
        factors.append(float(module.input_scale))
    return factors


def _is_in_norm(view: View, kernels: Sequence[Kernel], scale: float) -> bool:
    """Whether one of these kernels divides by the scale of an input as a part of a norm's weight."""
    for kernel in kernels:
        for name in kernel.modules & view.vectors.keys():
            for divided in (view.vectors[name] / scale, (1 + view.vectors[name]) / scale):
                if any(_holds_vector(view, operand, divided, WHOLE) for operand in view.constants([kernel])):
                    return True
    return False


def _bias_problems(view: View, operands: Sequence[Operand], module: Any, part: Part) -> Iterator[str]:
    bias = module.bias
    # Adding zeros is no work, and the compiler drops it.
    if bias is not None and bool(bias.any()):
        values = bias.detach().float().numpy()
        if not any(_holds_vector(view, operand, values, part) for operand in operands):
            yield "bias"


def _scalar_scales(module: QuantLinear | QuantConv) -> list[float]:
    """The numbers of which one must multiply the GEMM's result: the weight's single scale, and with it the input's."""
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
    step = _TOKEN_STEP.get(module.activation_format.element, 1.0)
    return [scale * step, scale]


def _any_close(expected: Iterable[float], numbers: Iterable[float]) -> bool:
    # Immediates are written in full; a constant of one number may have been rounded to half precision.
    return any(abs(number - scale) <= 2e-6 * abs(scale) for scale in expected for number in numbers) or any(
        abs(number - scale) <= 2.0**-10 * abs(scale) and float(np.float16(number)) == number
        for scale in expected
        for number in numbers
    )


def _holds(view: View, operand: Operand, expected: np.ndarray, part: Part) -> bool:
    """Whether a constant has these codes `[in, out]` as a layer's part."""
    values = part.cut(view.values(operand), *expected.shape)
    return _mark(view, operand, values is not None and bool((values == expected).all()))


def _holds_conv(view: View, operand: Operand, expected: np.ndarray) -> bool:
    """Whether a constant has the weight of a convolution; channels may be padded."""
    values = _cropped(view.values(operand), expected.shape)
    return _mark(view, operand, values is not None and bool((values == expected).all()))


def _cropped(values: np.ndarray, shape: Sequence[int]) -> np.ndarray | None:
    """The first of each dimension of a constant; a convolution over one dimension has a second one of size 1."""
    if values.ndim > len(shape):
        values = values.reshape([size for size in values.shape if size != 1])
        values = values.reshape([*values.shape, *[1] * (len(shape) - values.ndim)])
    if values.ndim != len(shape) or any(a < b for a, b in zip(values.shape, shape, strict=True)):
        return None
    return values[tuple(slice(size) for size in shape)]


def _holds_scales(view: View, operands: Sequence[Operand], module: QuantLinear | QuantConv, part: Part) -> bool:
    """Whether one of the constants has the block scales of a layer."""
    weight, format = module.quantized_weight, module.weight_format
    if format.global_scale:
        stored = weight.scale.view(torch.uint8).numpy().T
        return any(
            _holds(view, operand, stored, part) or _holds_swizzled(view, operand, stored, part)
            for operand in operands
            if operand.stored == "fp8_e4m3"
        )
    # [blocks of inputs, blocks of outputs], as the transposed weight has them.
    scales = weight.scale_values().numpy().T
    factors = [1.0, *_input_factors(module)]
    part = replace(part, start=part.start // format.block_shape(weight.shape)[0])
    return any(
        _holds_numbers(view, operand, np.float32(factor) * scales, part, weight.shape[1])
        for operand in operands
        if operand.stored in _CLOSE
        for factor in factors
    )


def _holds_products(view: View, operands: Sequence[Operand], weight: BlockScaledTensor, part: Part) -> bool:
    """Whether a constant has NVFP4's block scales times the global scale, as TensorRT-RTX 1.5 folds them."""
    scales = weight.scale_values().numpy().T
    return any(
        _holds_numbers(view, operand, scales, part, weight.shape[1])
        for operand in operands
        if operand.stored == "float"
    )


def _holds_swizzled(view: View, operand: Operand, expected: np.ndarray, part: Part) -> bool:
    """Whether a constant has FP4's block scales in tiles of 128 outputs and 4 blocks: `[…, tiles, 4, tiles, 4, 32]`."""
    values = view.values(operand)
    if values.ndim < 5 or values.shape[-4] != 4 or values.shape[-2:] != (4, 32):
        return False
    rows, columns = values.shape[-5] * 4, values.shape[-3] * 128
    values = values.reshape(-1, rows, columns)
    if part.count > 1 and len(values) == part.count:
        part, values = WHOLE, values[part.index : part.index + 1]
    if len(values) > 1 or rows < expected.shape[0] or columns < part.start + expected.shape[1]:
        return False
    held = values[0, : expected.shape[0], part.start : part.start + expected.shape[1]] == expected
    return _mark(view, operand, bool(held.all()))


def _holds_numbers(view: View, operand: Operand, expected: np.ndarray, part: Part, inputs: int) -> bool:
    """Whether a constant has these scales `[blocks, outputs]`, each once or once for every input of its block."""
    values = part.cut(view.values(operand), *expected.shape) if _size(operand) < inputs * expected.shape[1] else None
    if values is None:
        expected = np.repeat(expected, -(-inputs // expected.shape[0]), axis=0)[:inputs]
        values = part.cut(view.values(operand), *expected.shape)
    return _mark(view, operand, values is not None and _close(values, expected, operand.stored))


def _holds_vector(
    view: View, operand: Operand, expected: np.ndarray, part: Part, error: np.ndarray | None = None
) -> bool:
    """Whether a constant has these numbers, one for each output, up to `error` or the rounding to its type."""
    if operand.stored not in _CLOSE or sum(dim != 1 for dim in operand.dims) > 2 or _size(operand) < expected.size:
        return False
    values = part.cut(view.values(operand), 1, expected.size)
    return _mark(view, operand, values is not None and _close(values[0], expected, operand.stored, error))


def _close(values: np.ndarray, expected: np.ndarray, stored: str, error: np.ndarray | None = None) -> bool:
    """Whether numbers are the expected ones, up to the rounding to the constant's type, or up to `error`."""
    bound = _CLOSE[stored] * np.abs(expected) if error is None else error
    return bool((np.abs(values - expected) <= bound + 1e-12).all())


def _mark(view: View, operand: Operand, held: bool) -> bool:
    if held and operand.index is not None:
        view.explained.add(operand.index)
    return held


def _size(operand: Operand) -> int:
    count = 1
    for dim in operand.dims:
        count *= dim or 1
    return count


def _plain_problems(view: View, name: str, module: nn.Module) -> Iterator[str]:
    """The parameters of a module in 16 or 32 bit that are not where its kernels read."""
    operands = view.constants(view.of_module[name])
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        if module not in view.folded and not _holds_norm(view, operands, module):
            yield "factors"
        return
    yield from _number_problems(view, name, module)
    is_conv = isinstance(module, nn.modules.conv._ConvNd)
    for parameter, tensor in module.named_parameters(recurse=False):
        # Adding zeros is no work.
        if tensor.ndim < 2 and not bool(tensor.any()):
            continue
        if _holds_parameter(
            view, name, module, tensor.detach().T if _is_turned(module, parameter) else tensor.detach()
        ):
            continue
        if is_conv and parameter == "weight" and _is_folded(view, operands, module):
            break  # with its bias
        yield parameter


def _is_turned(module: nn.Module, parameter: str) -> bool:
    """Whether a constant has the parameter `[out, in]` as `[in, out]`."""
    return isinstance(module, nn.Linear) and parameter == "weight"


def _holds_parameter(view: View, name: str, module: nn.Module, expected: torch.Tensor) -> bool:
    """Whether the module's kernels read these numbers, rounded to the type of a constant."""
    part, kernels = view.part_of(name), view.of_module[name]
    operands = view.constants(kernels)
    if any(_holds_rounded(view, operand, expected, part) for operand in operands):
        return True
    if "Norm" not in type(module).__name__:
        return False
    # Gemma's norms multiply by one more than they store.
    more = 1 + expected.float()
    return any(_holds_rounded(view, operand, more, part) for operand in operands) or any(
        _holds_divided(view, kernel, expected) for kernel in kernels
    )


def _holds_divided(view: View, kernel: Kernel, expected: torch.Tensor) -> bool:
    """Whether a kernel has a norm's weight divided by the scale of a layer whose input it rounds."""
    values = expected.float().numpy()
    return any(
        _holds_vector(view, operand, vector / view.input_scales[layer], WHOLE)
        for vector in (values, 1 + values)
        for layer in kernel.modules & view.input_scales.keys()
        for operand in view.constants([kernel])
    )


def _number_problems(view: View, name: str, module: Any) -> Iterator[str]:
    """Single numbers of a module that its kernels do not have: a norm's epsilon, attention's scales, RoPE's table."""
    numbers = view.scalars(name)
    for buffer, table in module.named_buffers(recurse=False):
        # Some models keep the table of each kind of block, and the first one under another name.
        if (
            buffer.endswith("inv_freq")
            and "original" not in buffer
            and not any(_holds_rounded(view, operand, table, WHOLE) for operand in view.constants(view.kernels))
        ):
            yield buffer
    kinds = {node.rpartition("/")[2].partition("_")[0] for k in view.of_module[name] for node in k.nodes
             if node.rpartition("/")[0] == name}  # fmt: skip
    if not kinds & _ACTIVATIONS.get(type(module).__name__, kinds):
        yield "function"
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if "Norm" in type(module).__name__ and isinstance(epsilon, float) and not _any_close([epsilon], numbers):
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
    # A cache in 16 bit has no scales.
    if any(operand.stored == "fp8_e4m3" and len(operand.dims) == 4 for k in kernels for operand in k.inputs):
        for scale in ("k_scale", "v_scale"):
            value = getattr(module, scale, None)
            if isinstance(value, torch.Tensor) and not _any_close([float(value), 1 / float(value)], numbers):
                yield scale


def _holds_rounded(view: View, operand: Operand, expected: torch.Tensor, part: Part) -> bool:
    """Whether a constant has these numbers, rounded to its type."""
    if operand.stored not in _ROUNDED or _size(operand) < expected.numel():
        return False
    sizes = [size for size in expected.shape if size != 1]
    rounded = expected.to(_ROUNDED[operand.stored]).float()
    if len(sizes) > 2:
        values = _cropped(view.values(operand), expected.shape)
        return _mark(view, operand, values is not None and bool((values == rounded.numpy()).all()))
    matrix = rounded.reshape(sizes if len(sizes) == 2 else (1, -1)).numpy()
    values = part.cut(view.values(operand), *matrix.shape)
    return _mark(view, operand, values is not None and bool((values == matrix).all()))


def _holds_norm(view: View, operands: Sequence[Operand], norm: Any) -> bool:
    """Whether constants have the factor and the offset of each channel that a BatchNorm is in evaluation."""
    (factor, shift, size), rounding = _factors(norm), _rounding(norm)
    return all(
        # One times x, and x plus zero, are no work.
        bool((vector == neutral).all())
        or any(_holds_vector(view, operand, vector, WHOLE, rounding * np.abs(terms)) for operand in operands)
        for vector, neutral, terms in ((factor, 1.0, factor), (shift, 0.0, size))
    )


def _factors(norm: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """y = x · factor + shift of a BatchNorm in evaluation, and the sum of the sizes of the shift's terms."""
    deviation = torch.sqrt(norm.running_var.double() + norm.eps)
    factor = (1.0 if norm.weight is None else norm.weight.detach().double()) / deviation
    bias = torch.zeros_like(factor) if norm.bias is None else norm.bias.detach().double()
    mean = norm.running_mean.double() * factor
    return factor.float().numpy(), (bias - mean).float().numpy(), (bias.abs() + mean.abs()).float().numpy()


def _rounding(norm: Any) -> float:
    """The relative error of numbers that were computed from a BatchNorm in its own dtype."""
    return {torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}.get(norm.running_var.dtype, 1e-5)


def _is_folded(view: View, operands: Sequence[Operand], conv: Any) -> bool:
    """Whether constants have a convolution's weight times the factors of the BatchNorm that follows it."""
    after = view.norm_after.get(conv)
    if after is None or after.num_features != conv.out_channels or conv.transposed:
        return False
    (factor, shift, size), rounding = _factors(after), _rounding(after)
    weight = conv.weight.detach().float().numpy() * factor.reshape(-1, *[1] * (conv.weight.ndim - 1))
    bias = shift if conv.bias is None else conv.bias.detach().float().numpy() * factor + shift
    for operand in operands:
        values = _cropped(view.values(operand), weight.shape) if operand.stored in _CLOSE else None
        if values is not None and _mark(
            view, operand, _close(values, weight, operand.stored, rounding * np.abs(weight))
        ):
            view.folded.add(after)
            return not bias.any() or any(_holds_vector(view, other, bias, WHOLE, rounding * size) for other in operands)
    return False
