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

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from quant.export.engine.contents.program import KernelOperand
from quant.export.engine.contents.view import TOKEN_STEP, WHOLE, Part, View
from quant.kernels.linear.conv import QuantConv
from quant.kernels.linear.quant_linear import QuantLinear

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
