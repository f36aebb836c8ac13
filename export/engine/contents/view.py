"""A `View` tells which kernels of an engine hold a module's nodes, and so which constants may hold its tensors.

The layers of one input share a GEMM over a merged matrix; `Part` is the place of one of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import nn

from quant.export.tensorrt.engine_file import Engine
from quant.export.engine.contents.program import PRODUCTS, Kernel, KernelOperand
from quant.formats.number import E4M3, INT8
from quant.kernels.linear.conv import QuantConv
from quant.kernels.linear.quant_linear import QuantLinear

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
