"""Compares the tensors of a model with the constants of an engine, module by module and where each is read.

A kernel's constants belong to the modules whose nodes were fused into it. Each tensor of a module must be among the
constants that the module's own kernels read, so that two layers whose weights were exchanged fail as much as weights of
another model. Layers of one input (q, k, v) share a merged matrix, in the order that the kernel's name lists (`Part`).

    codes          the weight of the GEMM, `[in, out]`, or of a convolution, its channels padded; they must be equal
    block scales   `[in / block, out]`; FP4's in tiles of 128 outputs and 4 blocks; others perhaps once for each input,
                   perhaps times the scale of the input
    single scales  alpha of the GEMM, a constant of one number, or an immediate in a kernel's source
    parameters     of layers in 16 bit, norms and embeddings: equal, once rounded to the type of the constant
    numbers        a norm's epsilon, the scale of attention, RoPE's table, the scales of an FP8 cache; an activation's
                   ONNX ops
    BatchNorm      y = x · factor + shift, computed once, or multiplied into the convolution before it

Numbers that the compiler has multiplied may differ by `TOLERANCES`. That layout was found by reading engines of
TensorRT-RTX 1.5 and 1.7; tests/export/tensorrt/test_wrong_engines.py has the wrong engines that each check finds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from quant.export.tensorrt.engine_file import PRODUCTS, Engine, Kernel, KernelOperand
from quant.formats.format import E4M3, INT8
from quant.formats.rounding import unpack
from quant.kernels.linear.conv import QuantConv
from quant.kernels.linear.quant_linear import QuantLinear

BatchNorm, Conv = nn.modules.batchnorm._BatchNorm, nn.modules.conv._ConvNd
# How far a number may be from the stored one, relatively: sums and products of a few float32 numbers, or one rounding
# to the type of the constant.
TOLERANCES = {"float": 2e-6, "half": 2.0**-10, "bf16": 2.0**-7, "bfloat16": 2.0**-7}
_DTYPES = {"half": torch.float16, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "float": torch.float32}
_TOKEN_STEP = {E4M3: 2.0**-9, INT8: 2.0**-7}  # of the codes of inputs that are scaled by token (`onnx.translate`)
_LARGE = 1 << 23  # elements from which on only the latest constant stays in memory: embeddings, output heads
_SLICE = 1 << 20  # numbers that are compared at a time
_FEWEST = 16  # constants of fewer numbers are literals of the graph
# ONNX ops of an activation function, in each way to write it.
_SILU, _EXACT_GELU, _TANH_GELU = [{"Sigmoid", "Mul"}, {"Swish"}], [{"Gelu"}, {"Erf"}], [{"Gelu"}, {"Tanh"}]
_ACTIVATIONS = {
    **dict.fromkeys(("SiLU", "SiLUActivation"), _SILU),
    **dict.fromkeys(("GELU", "GELUActivation"), _EXACT_GELU),
    **dict.fromkeys(("NewGELUActivation", "GELUTanh", "PytorchGELUTanh"), _TANH_GELU),
    "ReLU": [{"Relu"}],
}


class Part(NamedTuple):
    """A layer among those whose matrices were merged: its index, their number, and the first of its outputs.

    Matrices of one size may be stacked, `[layers, in, out]`, and others lie side by side, `[in, outputs of all]`.
    """

    index: int = 0  # type: ignore[assignment]
    count: int = 1  # type: ignore[assignment]
    start: int = 0


WHOLE = Part()


def compare_tensors(engine: Engine, model: nn.Module) -> dict[str, list[str]]:
    """Returns, by module, the tensors that the engine lacks where its kernels read; an empty list if it has all.

    Modules without a kernel of their name are left out: they were not exported, or compute nothing.
    """
    # Of two positions at which the table of constants may begin, the wrong one matches nothing.
    results = [_compare(replace(engine, starts=[start]), model) for start in engine.starts]
    return min(results, key=lambda missing: sum(map(len, missing.values())))


def _compare(engine: Engine, model: nn.Module) -> dict[str, list[str]]:
    modules = {name: module for name, module in model.named_modules() if name}
    missing: dict[str, list[str]] = {}
    for profile in sorted({kernel.profile for kernel in engine.kernels}):
        view = View(engine, profile, modules)
        for name, module in modules.items():
            if name in view.of_module and _has_tensors(module):
                is_quantized = isinstance(module, QuantLinear | QuantConv)
                problems = (_quantized_problems if is_quantized else _plain_problems)(view, name, module)
                missing[name] = list(dict.fromkeys([*missing.get(name, ()), *problems]))
        for name in _surplus(view):
            # A tensor that is missing has another one in its place.
            if not missing.get(name):
                missing[name] = ["surplus constant"]
    return missing


def _has_tensors(module: nn.Module) -> bool:
    return (
        isinstance(module, QuantLinear | QuantConv)
        or any(True for _ in module.parameters(recurse=False))
        or any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False))
        or type(module).__name__ in _ACTIVATIONS
        or hasattr(module, "k_scale")
        or isinstance(getattr(module, "scaling", None), float)
    )


class View:
    """The kernels of one optimization profile, by the modules whose nodes they hold."""

    def __init__(self, engine: Engine, profile: int, modules: Mapping[str, nn.Module]) -> None:
        self.engine = engine
        self.kernels = [kernel for kernel in engine.kernels if kernel.profile == profile]
        self.names = {module: name for name, module in modules.items()}
        self.explained: set[int | None] = set()  # indices of constants that equal a tensor of the model
        self.folded: set[nn.Module] = set()  # BatchNorms that have become part of the convolution before them
        self.norm_after: dict[nn.Module, Any] = {}  # the BatchNorm that is defined right after a convolution
        self.outputs: dict[str, int] = {}  # of each linear layer
        self.vectors: dict[str, torch.Tensor] = {}  # factors of norms, and other weights that are vectors, float32
        self.input_scales: dict[str, float] = {}
        conv: nn.Module | None = None
        for name, module in modules.items():
            weight = getattr(module, "weight", None)
            if isinstance(module, QuantLinear | QuantConv):
                self.outputs[name] = int(module.weight_shape[0])
                if module.input_scale is not None:
                    self.input_scales[name] = float(module.input_scale)
            elif isinstance(weight, torch.Tensor) and weight.ndim == 1:
                self.vectors[name] = _norm_factors(module, weight.detach().float())
            elif isinstance(module, nn.Linear):
                self.outputs[name] = int(module.weight.shape[0])
            if isinstance(module, Conv | QuantConv):
                conv = module
            elif isinstance(module, BatchNorm) and conv is not None:
                self.norm_after[conv], conv = module, None
        self.of_module: dict[str, list[Kernel]] = {}
        self.writer: dict[tuple[int, str], Kernel] = {}
        for kernel in self.kernels:
            for path in kernel.modules:
                self.of_module.setdefault(path, []).append(kernel)
            for tensor in kernel.outputs:
                self.writer.setdefault((kernel.program, tensor), kernel)
        self._small, self._large = lru_cache(maxsize=8)(engine.constant), lru_cache(maxsize=1)(engine.constant)

    def values(self, operand: KernelOperand) -> np.ndarray:
        """Returns the elements of a constant, in the order of its dims."""
        return (self._small if operand.size < _LARGE else self._large)(operand)

    def constants(self, kernels: Iterable[Kernel]) -> list[KernelOperand]:
        """Returns the constants that these kernels read, each once."""
        return list({o.index: o for kernel in kernels for o in kernel.inputs if o.index is not None}.values())

    def holds(
        self,
        operands: Iterable[KernelOperand],
        expected: torch.Tensor,
        part: Part = WHOLE,
        *,
        types: Collection[str] = tuple(TOLERANCES),
        exact: bool = False,
        error: torch.Tensor | None = None,
    ) -> bool:
        """Returns whether one of these constants, of one of `types`, has the expected numbers as a layer's part.

        They are equal once rounded to the constant's type (`exact`), or differ by `error`, or by `TOLERANCES`.
        """
        for operand in operands:
            if operand.stored in types and operand.size >= expected.numel():
                values = _arranged(self.values(operand), expected.shape, part)
                if values is not None and _equal(values, expected, operand.stored, exact=exact, error=error):
                    self.explained.add(operand.index)
                    return True
        return False

    def feeding(self, module: str) -> list[Kernel]:
        """Returns the kernels that write the operands of the module's GEMM."""
        labels = tuple(f"{module}{kind}" for kind in PRODUCTS)
        own = [k for k in self.of_module.get(module, ()) if k.is_gemm and any(n.startswith(labels) for n in k.nodes)]
        written = [self.writer.get((gemm.program, operand.name)) for gemm in own for operand in gemm.inputs]
        return [kernel for kernel in written if kernel is not None]

    def part_of(self, module: str) -> Part:
        """Returns where a layer lies in the merged matrix of its GEMM."""
        for kernel in self.of_module.get(module, ()):
            # "v/MatMul [profile 1]+k/MatMul [profile 1]": the order of the outputs.
            names = [node.rpartition("/")[0] for node in kernel.name.split("+")]
            if module in names and len(names) > 1:
                index = names.index(module)
                return Part(index, len(names), sum(self.outputs.get(name, 0) for name in names[:index]))
        return WHOLE

    def scalars(self, module: str) -> set[float]:
        """Returns every single number in the module's kernels and in the kernels that feed its GEMM."""
        kernels = [*self.of_module.get(module, ()), *self.feeding(module)]
        return {number for kernel in kernels for number in self.engine.scalars(kernel)}


def _norm_factors(module: Any, weight: torch.Tensor) -> torch.Tensor:
    """Returns the factors of a norm: its weight, or weight + 1, as in Gemma.

    Numbers of alternating sign have the mean 0 and the root mean square 1, so a norm gives back its factors.
    """
    if "Norm" not in type(module).__name__ or isinstance(module, BatchNorm):
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


def _arranged(values: np.ndarray, shape: Sequence[int], part: Part) -> np.ndarray | None:
    """Returns the numbers of a constant that are a layer's tensor of `shape`; None if they cannot be there."""
    if len(shape) > 2:
        # The weight of a convolution: its channels are padded, and dimensions of size 1 may be left out.
        if values.ndim > len(shape):
            values = values.reshape([size for size in values.shape if size != 1])
            values = values.reshape([*values.shape, *[1] * (len(shape) - values.ndim)])
        if values.ndim != len(shape) or any(a < b for a, b in zip(values.shape, shape, strict=True)):
            return None
        return values[tuple(slice(size) for size in shape)]
    (rows, columns), start = shape if len(shape) == 2 else (1, math.prod(shape)), part.start
    if values.ndim >= 5 and values.shape[-4] == 4 and values.shape[-2:] == (4, 32):
        # FP4's block scales: [..., tiles of blocks, 4, tiles of outputs, 4, 32] -> [..., blocks, outputs]
        values = values.reshape(-1, values.shape[-5] * 4, values.shape[-3] * 128)
    if part.count > 1 and values.ndim >= 3 and values.shape[0] == part.count:
        values, start = values[part.index], 0
    sizes = [size for size in values.shape if size != 1]
    if len(sizes) < 2:
        # Of a vector the dim that was dropped is the one of size 1 in the layer's part.
        if rows > 1 and columns > 1:
            return None
        sizes = [values.size, 1] if rows > 1 else [1, values.size]
    if len(sizes) > 2 or sizes[0] < rows:
        return None
    start = 0 if sizes[1] == columns else start  # numbers that are not merged have the layer's own size
    return values.reshape(sizes)[:rows, start : start + columns] if sizes[1] >= start + columns else None


def _equal(
    values: np.ndarray, expected: torch.Tensor, stored: str, *, exact: bool = True, error: torch.Tensor | None = None
) -> bool:
    """Returns whether numbers are the expected ones, as `View.holds` says.

    Rows are compared a few megabytes at a time: an embedding need not be in memory once more, in float32.
    """
    if expected.ndim < 2:
        expected, error = expected.reshape(1, -1), None if error is None else error.reshape(1, -1)
    step = max(_SLICE // max(expected[0].numel(), 1), 1)
    for rows in (slice(start, start + step) for start in range(0, len(expected), step)):
        piece = expected[rows].to(_DTYPES[stored]) if exact and stored in _DTYPES else expected[rows]
        numbers = piece.float().numpy()
        if exact:
            is_equal = values[rows] == numbers
        else:
            bound = TOLERANCES[stored] * np.abs(numbers) if error is None else error[rows].numpy()
            is_equal = np.abs(values[rows] - numbers) <= bound + 1e-12
        if not is_equal.all():
            return False
    return True


def _any_close(expected: Iterable[float], numbers: Collection[float]) -> bool:
    """Returns whether one of the expected numbers is among a kernel's `numbers`."""
    # Immediates are written in full; a constant of one number may have been rounded to half precision.
    return any(
        abs(number - scale) <= (2.0**-10 if float(np.float16(number)) == number else 2e-6) * abs(scale)
        for scale in expected
        for number in numbers
    )


def _quantized_problems(view: View, name: str, module: QuantLinear | QuantConv) -> Iterator[str]:
    """Yields the tensors of a quantized layer that are not where its kernels read."""
    weight, format, activation = module.quantized_weight, module.weight_format, module.activation_format
    operands, part = view.constants(view.of_module[name]), view.part_of(name)
    codes = weight.codes.view(torch.uint8)
    if isinstance(module, QuantConv):
        codes = module.codes.view(torch.uint8)
    else:
        codes = (unpack(codes, 4, weight.shape[1]) if format.element.bits == 4 else codes).T
    types = ("fp4_e2m1", "int4") if format.element.bits == 4 else ("fp8_e4m3", "int8")
    if not view.holds(operands, codes, part, types=types, exact=True):
        yield "codes"

    # Scales of the input may be multiplied into scales of rows: the scale itself, or the step of its codes.
    step = 1.0 if activation is None else _TOKEN_STEP.get(activation.element, 1.0)
    scale = None if module.input_scale is None else float(module.input_scale)
    factors = [1.0, *([] if activation is None else [step]), *([] if scale is None else [scale])]
    blocks = part._replace(start=part.start // format.block_shape(weight.shape)[0])
    steps = weight.scale_values().float().T

    def holds_blocks(types: Collection[str], factors: Sequence[float]) -> bool:
        """Says whether a constant has scales `[blocks, outputs]` times a factor, each once, or once for every input."""
        repeated = steps.repeat_interleave(-(-weight.shape[1] // steps.shape[0]), 0)[: weight.shape[1]]
        small = [operand for operand in operands if operand.size < repeated.numel()]
        pairs = itertools.product(((small, steps), (operands, repeated)), factors)
        return any(view.holds(some, factor * scales, blocks, types=types) for (some, scales), factor in pairs)

    # TensorRT-RTX 1.5 multiplies NVFP4's block scales by the global scale; 1.7 leaves that to the GEMM.
    if weight.global_scale is None or not holds_blocks(["float"], [1.0]):
        numbers = view.scalars(name)
        if weight.scale.numel() > 1:
            if format.global_scale:
                stored = weight.scale.view(torch.uint8).T
                is_held = view.holds(operands, stored, part, types=["fp8_e4m3"], exact=True)
            else:
                is_held = holds_blocks(tuple(TOLERANCES), factors)
            if not is_held and not _holds_folded_scales(view, name, module, factors):
                yield "scales"
        single = _single_scales(module, step)
        if single and not (
            _any_close(single, numbers)
            or _any_close(single, _times_attention(view, name, numbers))
            or _holds_folded_scales(view, name, module, factors)
        ):
            yield "scale"
    if scale is not None:
        near = [*view.of_module[name], *view.feeding(name)]
        # A norm before the layer may divide by it as a part of its weight.
        if not _any_close([scale, 1 / scale], view.scalars(name)) and not any(
            view.holds(view.constants([kernel]), view.vectors[norm] / scale)
            for kernel in near
            for norm in kernel.modules & view.vectors.keys()
        ):
            yield "input scale"
    # Adding zeros is no work, and the compiler drops it.
    if module.bias is not None and module.bias.any() and not view.holds(operands, module.bias.detach().float(), part):
        yield "bias"


def _single_scales(module: QuantLinear | QuantConv, step: float) -> list[float]:
    """Returns numbers of which one must multiply the GEMM's result: the weight's scale, also times the input's."""
    weight = module.quantized_weight
    if weight.global_scale is None and weight.scale.numel() > 1:
        return []
    scale = float(weight.scale_values() if weight.global_scale is None else weight.global_scale)
    if module.activation_format is None:
        return [scale]
    return [scale * step, scale] if module.input_scale is None else [scale * float(module.input_scale)]


def _times_attention(view: View, name: str, numbers: Iterable[float]) -> list[float]:
    """Returns numbers of a layer times the factors of the FP8 attention behind it.

    The compiler divides V's scale by the scale of attention's codes, and attention multiplies by it again: by the
    scales of V and of the probabilities, and by the reciprocal of the latter.
    """
    kernels = [kernel for kernel in view.kernels if kernel.is_attention and name.rpartition(".")[0] in kernel.modules]
    pairs = [pair for kernel in kernels for pair in itertools.combinations(view.engine.scalars(kernel), 2)]
    return [number * a * b for number in numbers for a, b in pairs]


def _plain_problems(view: View, name: str, module: nn.Module) -> Iterator[str]:
    """Yields the parameters and numbers of a module in 16 or 32 bit that are not where its kernels read."""
    kernels, part = view.of_module[name], view.part_of(name)
    operands = view.constants(kernels)
    if isinstance(module, BatchNorm):
        if module not in view.folded and not _holds_batch_norm(view, operands, module):
            yield "factors"
        return
    yield from _number_problems(view, name, module)
    for parameter, tensor in module.named_parameters(recurse=False):
        # Adding zeros is no work.
        if tensor.ndim < 2 and not bool(tensor.any()):
            continue
        expected = view.vectors.get(name, tensor.detach()) if parameter == "weight" else tensor.detach()
        if isinstance(module, nn.Linear) and parameter == "weight":
            expected = expected.T
        if view.holds(operands, expected, part, exact=True):
            continue
        # The weight of a norm may be divided by the scale of a layer whose input the kernel rounds.
        if "Norm" in type(module).__name__ and any(
            view.holds(view.constants([kernel]), expected.float() / view.input_scales[layer])
            for kernel in kernels
            for layer in kernel.modules & view.input_scales.keys()
        ):
            continue
        if isinstance(module, Conv) and parameter == "weight" and _holds_folded_weight(view, operands, module):
            break  # with its bias
        yield parameter


def _number_problems(view: View, name: str, module: Any) -> Iterator[str]:
    """Yields single numbers of a module that its kernels lack, and its function if they compute another."""
    numbers, kernels = view.scalars(name), view.of_module[name]
    for buffer, table in module.named_buffers(recurse=False):
        # Some models keep the table of each kind of block, and the first one under another name.
        is_table = buffer.endswith("inv_freq") and "original" not in buffer
        if is_table and not view.holds(view.constants(view.kernels), table, exact=True):
            yield buffer
    kinds = {node.rpartition("/")[2].partition("_")[0] for kernel in kernels for node in kernel.nodes
             if node.rpartition("/")[0] == name}  # fmt: skip
    if not any(function <= kinds for function in _ACTIVATIONS.get(type(module).__name__, [kinds])):
        yield "function"
    # RoPE's table is multiplied by it in YaRN and its kin.
    factor = getattr(module, "attention_scaling", 1.0)
    if isinstance(factor, float) and factor != 1.0 and not _any_close([factor], numbers):
        yield "attention scaling"
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if "Norm" in type(module).__name__ and isinstance(epsilon, float) and not _any_close([epsilon], numbers):
        yield "epsilon"
    scaling = getattr(module, "scaling", None)
    fused = [operand.type for kernel in kernels if kernel.is_attention for operand in kernel.inputs]
    # Fused attention takes q and k scaled by the root each, rounded to BF16 or FP16, or q alone by the whole. In FP8
    # the scale is one of many factors.
    roots = [scaling, math.sqrt(scaling)] if isinstance(scaling, float) and fused and "fp8" not in fused else []
    if roots and not any(abs(x - y) <= 2.0**-7 * y for x in numbers for y in roots):
        yield "scaling"
    for kernel in kernels:
        # An FP8 cache's attention has the scales of K, then those of V, one for each KV head, or their reciprocals.
        constants = [o for o in kernel.inputs if o.index is not None and o.stored == "float"]
        if not any(o.stored == "fp8_e4m3" and len(o.dims) == 4 for o in kernel.inputs) or not constants:
            continue
        for index, key in enumerate(("k_scale", "v_scale")):
            scale = getattr(module, key, None)
            near = constants[index : index + 1] if len(constants) == 2 else constants
            if isinstance(scale, torch.Tensor) and not any(
                view.holds([operand], value.expand(operand.size))
                for operand in near
                for value in (scale.detach().float().reshape(-1), 1 / scale.detach().float().reshape(-1))
                if value.numel() in (1, operand.size)
            ):
                yield key


def _surplus(view: View) -> Iterator[str]:
    """Yields layers whose kernels read numbers, one for each output, that no tensor explains: another bias."""
    for name, outputs in view.outputs.items():
        # The kernel of the layer's own nodes, and the next kernel, where a surplus bias would be added.
        own = view.of_module.get(name, [])
        written = {output for kernel in own if kernel.is_gemm for output in kernel.outputs}
        following = [kernel for kernel in view.kernels if any(operand.name in written for operand in kernel.inputs)]
        for operand in view.constants([*own, *following]):
            is_row = operand.stored in TOLERANCES and operand.size == outputs >= _FEWEST
            if is_row and operand.index not in view.explained:
                values = view.values(operand).reshape(-1)
                # A norm's weight times one number, in an engine that does not name its norms, is no bias.
                ratios = [values / w.numpy() for w in view.vectors.values() if w.shape == values.shape and w.all()]
                is_norm = any(np.abs(ratio - ratio[0]).max() <= 2.0**-7 * abs(ratio[0]) for ratio in ratios)
                if not (values == values[0]).all() and not is_norm:
                    yield name
                    break


class _Affine(NamedTuple):
    """A BatchNorm in evaluation: y = x · factor + shift, of each channel; with bounds of their rounding errors."""

    factor: torch.Tensor
    shift: torch.Tensor
    size: torch.Tensor  # the sum of the sizes of the shift's terms
    rounding: float  # the relative error of numbers that were computed from the BatchNorm in its own dtype

    @classmethod
    def of(cls, norm: Any) -> _Affine:
        factor = 1 / torch.sqrt(norm.running_var.double() + norm.eps)
        factor = factor if norm.weight is None else norm.weight.detach().double() * factor
        bias = torch.zeros_like(factor) if norm.bias is None else norm.bias.detach().double()
        mean = norm.running_mean.double() * factor
        rounding = {torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}.get(norm.running_var.dtype, 1e-5)
        return cls(factor.float(), (bias - mean).float(), (bias.abs() + mean.abs()).float(), rounding)


def _holds_batch_norm(view: View, operands: Sequence[KernelOperand], norm: Any) -> bool:
    """Returns whether constants have the factor and the offset of each channel that a BatchNorm is in evaluation."""
    factor, shift, size, rounding = _Affine.of(norm)
    return all(
        # One times x, and x plus zero, are no work.
        bool((vector == neutral).all()) or view.holds(operands, vector, error=rounding * terms.abs())
        for vector, neutral, terms in ((factor, 1.0, factor), (shift, 0.0, size))
    )


def _holds_folded_scales(view: View, name: str, module: QuantLinear | QuantConv, factors: Sequence[float]) -> bool:
    """Returns whether a constant has a convolution's scales times the factors of the BatchNorm that follows it."""
    norm, weight = view.norm_after.get(module), module.quantized_weight
    if norm is None or norm.num_features != weight.shape[0]:
        return False
    affine = _Affine.of(norm)
    operands = view.constants([*view.of_module[name], *view.of_module.get(view.names[norm], ())])
    scales = weight.scale_values().float().reshape(-1) * affine.factor
    is_held = any(
        view.holds(operands, step * scales, error=affine.rounding * (step * scales).abs()) for step in factors
    )
    if is_held and _holds_folded_bias(view, operands, module, affine):
        view.folded.add(norm)
        return True
    return False


def _holds_folded_weight(view: View, operands: Sequence[KernelOperand], conv: Any) -> bool:
    """Returns whether constants have a convolution's weight times the factors of the BatchNorm that follows it."""
    norm = view.norm_after.get(conv)
    if norm is None or norm.num_features != conv.out_channels or conv.transposed:
        return False
    affine = _Affine.of(norm)
    weight = conv.weight.detach().float() * affine.factor.reshape(-1, *[1] * (conv.weight.ndim - 1))
    if not view.holds(operands, weight, error=affine.rounding * weight.abs()):
        return False
    view.folded.add(norm)
    return _holds_folded_bias(view, operands, conv, affine)


def _holds_folded_bias(view: View, operands: Sequence[KernelOperand], conv: Any, norm: _Affine) -> bool:
    """Returns whether a constant has a convolution's bias after the BatchNorm; one of zeros needs none."""
    bias = norm.shift if conv.bias is None else conv.bias.detach().float() * norm.factor + norm.shift
    return not bias.any() or view.holds(operands, bias, error=norm.rounding * norm.size)
