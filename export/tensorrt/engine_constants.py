"""Compares one constant of an engine with numbers of a model, in one of the orders in which TensorRT stores them.

    matrix      codes `[in, out]`, several layers merged along the outputs or stacked (`Part`)
    swizzled    FP4's block scales, in tiles of 128 outputs and 4 blocks
    numbers     scales `[blocks, outputs]`, each once, or once for every input of its block
    vector      one number for each output
    cropped     the weight of a convolution, its channels padded
    rounded     a parameter in 16 or 32 bit, rounded to the type of the constant

Codes and rounded parameters must be equal; numbers that the compiler has multiplied may differ by `TOLERANCES`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import nn

from quant.export.tensorrt.engine_file import PRODUCTS, Engine, Kernel, KernelOperand
from quant.formats.format import E4M3, INT8
from quant.kernels.linear.conv import QuantConv
from quant.kernels.linear.quant_linear import QuantLinear

# A `View` tells which kernels of an engine hold a module's nodes, and so which constants may hold its tensors.
#
# The layers of one input share a GEMM over a merged matrix; `Part` is the place of one of them.


_LARGE = 1 << 23  # elements from which on only the latest constant stays in memory: embeddings, output heads

# Steps of the codes of inputs that are scaled by token (`onnx_graph.ops`).
TOKEN_STEP = {E4M3: 2.0**-9, INT8: 2.0**-7}


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
        """Returns the layer's `[rows, columns]` of a constant; None if it cannot be there."""
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
    """The kernels of one optimization profile, by the modules whose nodes they hold.

    Attributes:
        rows: outputs of each linear layer.
        vectors: the factors of norms, and weights of other modules that are vectors.
        input_scales: of each quantized layer that has one.
        norm_after: the BatchNorm after each convolution.
        explained: indices of the constants that a tensor of the model was found in.
        folded: BatchNorms whose factors have become part of the convolution before them.
    """

    def __init__(
        self,
        engine: Engine,
        profile: int,
        modules: Mapping[str, nn.Module],
        norm_after: Mapping[nn.Module, nn.Module],
    ) -> None:
        self.engine = engine
        self.kernels = [kernel for kernel in engine.kernels if kernel.profile == profile]
        self.norm_after = norm_after
        self.explained: set[int] = set()
        self.folded: set[nn.Module] = set()
        self.names = {module: name for name, module in modules.items()}
        self.rows = {name: outputs for name, module in modules.items() if (outputs := _outputs(module))}
        self.vectors: dict[str, np.ndarray] = {}
        self.input_scales: dict[str, float] = {}
        for name, module in modules.items():
            weight = getattr(module, "weight", None)
            if isinstance(module, QuantLinear | QuantConv):
                if module.input_scale is not None:
                    self.input_scales[name] = float(module.input_scale)
            elif isinstance(weight, torch.Tensor) and weight.ndim == 1:
                self.vectors[name] = factors_of(module, weight.detach().float()).numpy()
        self.of_module: dict[str, list[Kernel]] = {}
        self.writer: dict[tuple[int, str], Kernel] = {}
        for kernel in self.kernels:
            for path in kernel.modules:
                self.of_module.setdefault(path, []).append(kernel)
            for tensor in kernel.outputs:
                self.writer.setdefault((kernel.program, tensor), kernel)
        self._small = lru_cache(maxsize=8)(engine.constant)
        self._latest: tuple[KernelOperand, np.ndarray] | None = None

    def values(self, operand: KernelOperand) -> np.ndarray:
        """Returns the elements of a constant, in the order of its dims."""
        if operand.size < _LARGE:
            return self._small(operand)
        if self._latest is None or self._latest[0] != operand:
            self._latest = None  # freed before the next one is read
            self._latest = operand, self.engine.constant(operand)
        return self._latest[1]

    def constants(self, kernels: Iterable[Kernel]) -> list[KernelOperand]:
        """Returns the constants that these kernels read, each once."""
        by_index = {o.index: o for kernel in kernels for o in kernel.inputs if o.index is not None}
        return list(by_index.values())

    def explain(self, operand: KernelOperand, is_equal: bool) -> bool:
        """Notes a constant that equals a tensor of the model, so that it is not surplus; returns `is_equal`."""
        if is_equal and operand.index is not None:
            self.explained.add(operand.index)
        return is_equal

    def feeding(self, module: str) -> list[Kernel]:
        """Returns the kernels that write the operands of the module's GEMM."""
        gemms = [kernel for kernel in self.of_module.get(module, ()) if kernel.is_gemm and _multiplies(kernel, module)]
        written = [self.writer.get((gemm.program, operand.name)) for gemm in gemms for operand in gemm.inputs]
        return [kernel for kernel in written if kernel is not None]

    def part_of(self, module: str) -> Part:
        """Returns where a layer lies in the merged matrix of its GEMM."""
        for kernel in self.of_module.get(module, ()):
            # "v/MatMul [profile 1]+k/MatMul [profile 1]": the order of the rows.
            names = [part.rpartition("/")[0] for part in kernel.name.split("+")]
            if module in names and len(names) > 1:
                index = names.index(module)
                return Part(index, len(names), sum(self.rows.get(name, 0) for name in names[:index]))
        return WHOLE

    def scalars(self, module: str) -> set[float]:
        """Returns every single number in the module's kernels and in the kernels that feed its GEMM."""
        kernels = [*self.of_module.get(module, ()), *self.feeding(module)]
        return {number for kernel in kernels for number in self.engine.scalars(kernel)}


def factors_of(module: Any, weight: torch.Tensor) -> torch.Tensor:
    """Returns the factors of a norm, float32: its weight, or weight + 1, as in Gemma.

    Numbers of alternating sign have the mean 0 and the root mean square 1, so a norm gives back its factors.
    """
    if "Norm" not in type(module).__name__ or isinstance(module, nn.modules.batchnorm._BatchNorm):
        return weight
    signs = 1.0 - 2.0 * (torch.arange(len(weight)) % 2)
    try:
        with torch.no_grad():
            outputs = module(signs.to(module.weight.dtype)[None])
    except Exception:  # a module of the user's own, which takes other inputs
        return weight
    bias = getattr(module, "bias", None)
    factors = (outputs[0].float() - (0.0 if bias is None else bias.detach().float())) * signs
    return weight + 1 if (factors - weight - 1).abs().sum() < (factors - weight).abs().sum() else weight


def _outputs(module: nn.Module) -> int:
    """Returns the number of outputs of a linear layer; 0 for other modules."""
    if isinstance(module, QuantLinear | QuantConv):
        return int(module.weight_shape[0])
    weight = getattr(module, "weight", None)
    return int(weight.shape[0]) if isinstance(module, nn.Linear) and weight is not None else 0


def _multiplies(kernel: Kernel, module: str) -> bool:
    return any(node.startswith(f"{module}{kind}") for node in kernel.nodes for kind in PRODUCTS)


# How far a number may be from the stored one, relatively: sums and products of a few float32 numbers, or one rounding
# to the type of the constant.
TOLERANCES = {"float": 2e-6, "half": 2.0**-10, "bf16": 2.0**-7, "bfloat16": 2.0**-7}

_ROUNDED = {"half": torch.float16, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "float": torch.float32}

_SLICE = 1 << 20  # numbers that are rounded at a time


def input_factors(module: QuantLinear | QuantConv) -> list[float]:
    """Returns the factors that the compiler may put into scales of rows: the scale and the step of the input."""
    factors = []
    if module.activation_format is not None:
        factors.append(TOKEN_STEP.get(module.activation_format.element, 1.0))
    if module.input_scale is not None:
        factors.append(float(module.input_scale))
    return factors


def any_close(expected: Iterable[float], numbers: Iterable[float]) -> bool:
    """Returns whether one of the expected numbers is among a kernel's `numbers`."""
    # Immediates are written in full; a constant of one number may have been rounded to half precision.
    return any(abs(number - scale) <= 2e-6 * abs(scale) for scale in expected for number in numbers) or any(
        abs(number - scale) <= 2.0**-10 * abs(scale) and float(np.float16(number)) == number
        for scale in expected
        for number in numbers
    )


def holds_matrix(view: View, operand: KernelOperand, expected: np.ndarray, part: Part) -> bool:
    """Returns whether a constant has these codes `[in, out]` as a layer's part."""
    values = part.cut(view.values(operand), *expected.shape)
    return view.explain(operand, values is not None and bool((values == expected).all()))


def holds_cropped(view: View, operand: KernelOperand, expected: np.ndarray) -> bool:
    """Returns whether a constant has the weight of a convolution; channels may be padded."""
    values = cropped(view.values(operand), expected.shape)
    return view.explain(operand, values is not None and bool((values == expected).all()))


def cropped(values: np.ndarray, shape: Sequence[int]) -> np.ndarray | None:
    """Returns a constant cut to `shape`, its dimensions of size 1 adapted; None if it is smaller."""
    if values.ndim > len(shape):
        values = values.reshape([size for size in values.shape if size != 1])
        values = values.reshape([*values.shape, *[1] * (len(shape) - values.ndim)])
    if values.ndim != len(shape) or any(a < b for a, b in zip(values.shape, shape, strict=True)):
        return None
    return values[tuple(slice(size) for size in shape)]


def holds_swizzled(view: View, operand: KernelOperand, expected: np.ndarray, part: Part) -> bool:
    """Returns whether a constant has FP4's block scales, swizzled to `[…, tiles, 4, tiles, 4, 32]`."""
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
    return view.explain(operand, bool(held.all()))


def holds_numbers(view: View, operand: KernelOperand, expected: np.ndarray, part: Part, inputs: int) -> bool:
    """Returns whether a constant has these scales `[blocks, outputs]`, each once, or once for every input."""
    values = part.cut(view.values(operand), *expected.shape) if operand.size < inputs * expected.shape[1] else None
    if values is None:
        expected = np.repeat(expected, -(-inputs // expected.shape[0]), axis=0)[:inputs]
        values = part.cut(view.values(operand), *expected.shape)
    return view.explain(operand, values is not None and is_close(values, expected, operand.stored))


def holds_vector(
    view: View, operand: KernelOperand, expected: np.ndarray, part: Part, error: np.ndarray | None = None
) -> bool:
    """Returns whether a constant has these numbers, one for each output, up to `error` or the rounding to its type."""
    if operand.stored not in TOLERANCES or sum(dim != 1 for dim in operand.dims) > 2 or operand.size < expected.size:
        return False
    values = part.cut(view.values(operand), 1, expected.size)
    return view.explain(operand, values is not None and is_close(values[0], expected, operand.stored, error))


def holds_rounded(view: View, operand: KernelOperand, expected: torch.Tensor, part: Part) -> bool:
    """Returns whether a constant has these numbers, rounded to its type."""
    if operand.stored not in _ROUNDED or operand.size < expected.numel():
        return False
    sizes = [size for size in expected.shape if size != 1]
    if len(sizes) > 2:
        matrix, values = expected, cropped(view.values(operand), expected.shape)
    else:
        matrix = expected.reshape(sizes if len(sizes) == 2 else (1, -1))
        values = part.cut(view.values(operand), *matrix.shape)
    return view.explain(operand, values is not None and _is_rounded(values, matrix, _ROUNDED[operand.stored]))


def _is_rounded(values: np.ndarray, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    """Returns whether numbers are the expected ones, rounded to a dtype.

    Rows are rounded a few megabytes at a time: an embedding need not be in memory once more, in float32.
    """
    rows = max(_SLICE // max(expected[0].numel(), 1), 1) if expected.ndim else 1
    return all(
        bool((values[start : start + rows] == expected[start : start + rows].to(dtype).float().numpy()).all())
        for start in range(0, len(expected), rows)
    )


def is_close(values: np.ndarray, expected: np.ndarray, stored: str, error: np.ndarray | None = None) -> bool:
    """Returns whether numbers are the expected ones, up to the rounding to the constant's type, or up to `error`."""
    bound = TOLERANCES[stored] * np.abs(expected) if error is None else error
    return bool((np.abs(values - expected) <= bound + 1e-12).all())


# BatchNorm in an engine: a factor and an offset of each channel, or part of the convolution before it.
#
# In evaluation a BatchNorm is y = x · factor + shift, with factor = weight / √(variance + eps) and
# shift = bias − mean · factor. The compiler computes both once. If the BatchNorm follows a convolution, the factor may
# also be multiplied into the convolution's weight, or into the scales of a quantized weight, and the convolution's bias
# becomes bias · factor + shift.


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
