"""`lower` writes a program for torch-tensorrt, in which every quantized linear and convolution is ops that it converts.

    QuantLinear                 ->  input_quantizer(x) · weight_quantizer(w)ᵀ + bias
    QuantConv                   ->  convolution of input_quantizer(x) and weight_quantizer(w), + bias

    format   op                                                             its scale, from ours
    fp8      tensorrt::quantize_op(x, amax, 8, 4, …)                        amax = 448 · scale
    nvfp4    tensorrt::dynamic_block_quantize_op(x, 16, amax, 4, 2, 8, 4)   amax = 6 · 448 · global scale

The graph holds weights in 16 bit, and TensorRT quantizes them when it builds the engine. For FP8 per tensor that gives
our codes again. For NVFP4 it computes block scales by the `max` rule, which would change a weight whose scales a solver
searched: such a layer is refused. torch-tensorrt tells weights from inputs by the name of the module that calls the op,
so each quantizer is a module of that name. The ops belong to ModelOpt. The GPU that is to run the file compiles it:

    import modelopt.torch.quantization, torch, torch_tensorrt
    program = torch.export.load("model.pt2")
    engine = torch_tensorrt.dynamo.compile(program, arg_inputs=[…], kwarg_inputs={…})
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from quant.export.aoti.package import decomposed, traced
from quant.export.aoti.op_bodies import EXPORTED_ATTENTION, exported_attention
from quant.base.atomic import put_file, temporary_directory
from quant.formats.format import Format
from quant.formats.install_command import install_command
from quant.formats.tensor import BlockScaledTensor, quantize
from quant.kernels.linear.conv import QuantConv
from quant.kernels.linear.expert_modules import QuantExperts
from quant.kernels.linear.quant_linear import QuantLinear

# The formats that torch-tensorrt converts.
_FORMATS = ("fp8", "nvfp4")
# The ops' arguments for a number: its bits, and the bits of its exponent.
_E4M3 = (8, 4)
_E2M1 = (4, 2)


def lower(model: nn.Module, path: str | Path, inputs: Mapping[str, torch.Tensor]) -> Path:
    """Writes `model` as an exported program over torch-tensorrt's quantize ops and returns its path.

    Args:
        model: quantized; it is not changed.
        path: the path of the program, which ends in `.pt2`.
        inputs: an example of each input by the name of `forward`'s parameter; their shapes are fixed.

    Raises:
        ValueError: the ops are not installed, or cannot hold a layer; nothing is written.
    """
    path = Path(path)
    program = lowered_program(model, inputs)
    with temporary_directory(path) as folder:
        torch.export.save(program, folder / path.name)
        put_file(folder / path.name, path)
    return path


def lowered_program(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.export.ExportedProgram:
    """Returns the program that `lower` writes."""
    require_ops()
    with _lowered(model):
        return decomposed(traced(model, inputs), {EXPORTED_ATTENTION: exported_attention})


def require_ops() -> None:
    """Makes torch-tensorrt's two quantize ops known, or raises ValueError if they are not installed."""
    if _has_ops():
        return
    try:
        importlib.import_module("modelopt.torch.quantization")
    except ImportError as error:
        raise ValueError(
            f"torch-tensorrt's quantize ops come with nvidia-modelopt, which cannot be imported ({error}): "
            f"{install_command('modelopt')}, and torch-tensorrt on the GPU that compiles the program"
        ) from error
    if not _has_ops():
        raise ValueError("this nvidia-modelopt has no tensorrt::quantize_op; install 0.47 or later")


def _has_ops() -> bool:
    return all(hasattr(torch.ops.tensorrt, name) for name in ("quantize_op", "dynamic_block_quantize_op"))


class _Quantizer(nn.Module):
    """Rounds to a format and back: FP8, or NVFP4 in blocks; without a static `scale`, the graph measures amax."""

    amax: torch.Tensor | None

    def __init__(self, format: Format, scale: torch.Tensor | None) -> None:
        super().__init__()
        # The ops take amax, the largest representable value: 448 · scale for FP8, 6 · 448 · global scale for NVFP4.
        largest = format.element.max * (format.scale.max if format.global_scale else 1.0)
        self.register_buffer("amax", None if scale is None else scale * largest)
        self.block = format.block[1] if format.global_scale else 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        amax = x.abs().amax().float() if self.amax is None else self.amax
        ops = torch.ops.tensorrt
        if self.block:
            return ops.dynamic_block_quantize_op(x, self.block, amax, *_E2M1, *_E4M3)  # type: ignore[no-any-return]
        return ops.quantize_op(x, amax, *_E4M3, False, False)  # type: ignore[no-any-return]


class _LoweredLinear(nn.Module):
    """A quantized linear over dense weights and the quantizers that torch-tensorrt looks for."""

    weight: torch.Tensor

    def __init__(self, linear: QuantLinear, dtype: torch.dtype) -> None:
        super().__init__()
        weight = linear.quantized_weight
        self.register_buffer("weight", weight.dequantize(dtype))
        self.bias, self.parts = linear.bias, linear.parts
        self.weight_quantizer = _Quantizer(weight.format, _per_tensor_scale(weight))
        activation = linear.activation_format
        self.input_quantizer = _Quantizer(activation, linear.input_scale) if activation else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.parts.input(x)
        y = nn.functional.linear(self.input_quantizer(x), self.weight_quantizer(self.weight), self.bias)
        branch = self.parts.branch(x)
        return y if branch is None else y + branch


class _LoweredConv(nn.Module):
    """A quantized convolution over a dense weight and the quantizers that torch-tensorrt looks for."""

    weight: torch.Tensor

    def __init__(self, conv: QuantConv, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("weight", conv.weight_in(dtype))
        self.bias, self.original = conv.bias, (conv,)  # in a tuple, or its codes would be in the program
        self.weight_quantizer = _Quantizer(conv.weight_format, _per_tensor_scale(conv.quantized_weight))
        activation = conv.activation_format
        self.input_quantizer = _Quantizer(activation, conv.input_scale) if activation else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (conv,) = self.original
        x, weight = conv.padded(self.input_quantizer(x)), self.weight_quantizer(self.weight)
        geometry = (conv.stride, conv.op_padding, conv.dilation, conv.transposed, conv.output_padding, conv.groups)
        return torch.convolution(x, weight, self.bias, *geometry)


def _per_tensor_scale(weight: BlockScaledTensor) -> torch.Tensor:
    scale = weight.global_scale if weight.format.global_scale else weight.scale
    assert scale is not None
    return scale.float().reshape(())


def _check(name: str, linear: QuantLinear | QuantConv) -> None:
    """Raises ValueError where torch-tensorrt has no op for a layer, or would change its weight."""
    weight = linear.quantized_weight
    where = f"{name} {list(weight.shape)}"
    used = [weight.format, *([linear.activation_format] if linear.activation_format else [])]
    unknown = [format.name for format in used if format.name not in _FORMATS]
    if unknown:
        raise ValueError(
            f"{where}: torch-tensorrt has no op for {', '.join(unknown)}, only for {' and '.join(_FORMATS)} "
            "(one scale a tensor); quantize with one of these, or export with --to tensorrt"
        )
    if weight.format.global_scale:
        dense = weight.dequantize()
        again = quantize(dense, weight.format, global_scale=weight.global_scale, name=name).dequantize()
        changed = int((again != dense).sum())
        if changed:
            raise ValueError(
                f"{where}: torch-tensorrt finds NVFP4 block scales anew, and {changed} of {dense.numel()} weights "
                "would change; quantize it with solver rtn, or export with --to tensorrt, which keeps searched scales"
            )


@contextmanager
def _lowered(model: nn.Module) -> Iterator[None]:
    """Puts `_LoweredLinear` and `_LoweredConv` in the places of `QuantLinear` and `QuantConv` while open."""
    kinds = QuantLinear | QuantConv | QuantExperts
    modules = {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
    for name, module in modules.items():
        if isinstance(module, QuantExperts):
            raise ValueError(f"{name}: torch-tensorrt has no op for fused experts; keep them in 16 bit (--exclude)")
        _check(name, module)
    dtype = next((p.dtype for p in model.parameters() if p.dtype.is_floating_point), torch.float32)
    try:
        for name, module in modules.items():
            if isinstance(module, QuantConv):
                model.set_submodule(name, _LoweredConv(module, dtype))
            elif isinstance(module, QuantLinear):
                model.set_submodule(name, _LoweredLinear(module, dtype))
        yield
    finally:
        for name, module in modules.items():
            model.set_submodule(name, module)
