"""A quantized module for torch-tensorrt: a program over its own quantize ops, or an engine that it compiles.

`lower` writes the program, in which each quantized linear and convolution is ops that torch-tensorrt converts:

    QuantLinear                 ->  input_quantizer(x) · weight_quantizer(w)ᵀ + bias
    QuantConv                   ->  convolution of input_quantizer(x) and weight_quantizer(w), + bias

    format   op                                                             its scale, from ours
    fp8      tensorrt::quantize_op(x, amax, 8, 4, …)                        amax = 448 · scale
    nvfp4    tensorrt::dynamic_block_quantize_op(x, 16, amax, 4, 2, 8, 4)   amax = 6 · 448 · global scale

The graph holds weights in 16 bit, and TensorRT quantizes them when it builds the engine. For FP8 per tensor that gives
our codes again. For NVFP4 it computes block scales by the `max` rule, which would change a weight whose scales a solver
searched: such a layer is refused. The ops belong to ModelOpt. The GPU that is to run the file compiles it:

    import modelopt.torch.quantization, torch, torch_tensorrt
    program = torch.export.load("model.pt2")
    engine = torch_tensorrt.dynamo.compile(program, arg_inputs=[…], kwarg_inputs={…})

`compile_engine` compiles with a converter of our own for `quant::linear`, and the engine is audited. The converter puts
codes and scales into TensorRT's network as they are, and needs neither ModelOpt nor a GPU:

    codes ─▶ constant ─▶ dequantize ─┐
    scales ─▶ constant ┘             ├─▶ matrix multiply ─▶ + bias
    x ─▶ quantize ─▶ dequantize ─────┘

Layers are named as in our ONNX files, `<layer>/MatMul`, by which `quant check` finds them. Tried with
torch-tensorrt-rtx 2.13.0, which goes with tensorrt_rtx 1.5.0.114 and builds for a GPU that need not be present; it asks
torch for the GPU's name and memory all the same, and gets the target's here.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

from quant.base.atomic import put_file, temporary_directory
from quant.base.errors import option
from quant.base.extras import install_command
from quant.export.onnx.trace import TRACED, decomposed, trace_for_torch
from quant.export.tensorrt.audit import AuditRow, audit, failures, fallback_message
from quant.export.tensorrt.gpu_targets import GpuTarget, local_capability, resolve_target
from quant.formats.format import FORMATS, Format
from quant.formats.tensor import quantize
from quant.kernels.linear.conv import QuantConv
from quant.kernels.linear.experts import QuantExperts
from quant.kernels.linear.quant_linear import QuantLinear
from quant.recipes.plan import Plan

_INPUTS = {"fp8": ("fp8",), "fp8_channel": ("fp8",), "int8": ("int8_tensor",), "nvfp4": ("nvfp4",)}
"""Formats of weights, and of inputs beside 16 bit, that the converter knows."""
_LOWERED = ("fp8", "nvfp4")
"""The formats that torch-tensorrt has quantize ops for."""
_E4M3, _E2M1 = (8, 4), (4, 2)  # the ops' arguments for a number: its bits, and the bits of its exponent


def compile_engine(
    model: nn.Module,
    out: str | Path,
    inputs: Mapping[str, torch.Tensor],
    target: str,
    *,
    plan: Plan | None = None,
    allow_fallback: bool = False,
) -> list[AuditRow]:
    """Compiles a module with torch-tensorrt, writes TensorRT's engine, and returns the audit."""
    out, gpu = Path(out), resolve_target(target)
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear):
            _check_convertible(name, module)
    offline = nullcontext() if local_capability() == gpu.capability else _as_on(gpu)
    with offline, temporary_directory(out) as folder:
        try:
            torch_tensorrt = importlib.import_module("torch_tensorrt")
        except (ImportError, OSError) as error:
            raise ValueError(
                f"torch-tensorrt cannot be imported ({error}); it needs a CUDA build of torch 2.13: "
                f"{install_command('torch-tensorrt')}"
            ) from error
        trt = importlib.import_module("tensorrt_rtx")
        with _for_target(trt, gpu), torch.no_grad():
            # A transformers model gives its logits, and no cache, which torch-tensorrt could not pass on.
            program = _program(model, inputs)
            arrays: list[Any] = []  # constants: TensorRT's network holds their addresses until it is built

            def convert(ctx: Any, target: Any, args: tuple[Any, ...], kwargs: Any, name: str) -> Any:
                return _Linear(trt, ctx.net, _layer_name(ctx.current_node, name), arrays).convert(*args)

            # A second call replaces the first converter.
            decorate = torch_tensorrt.dynamo.conversion.dynamo_tensorrt_converter
            decorate(torch.ops.quant.linear.default, supports_dynamic_shapes=True)(convert)
            engine = torch_tensorrt.dynamo.convert_exported_program_to_serialized_trt_engine(
                program, arg_inputs=[], kwarg_inputs=dict(inputs), truncate_double=True
            )
        (folder / out.name).write_bytes(engine)
        findings = audit(folder / out.name, plan)
        problems = failures(findings)
        if problems and not allow_fallback:
            raise ValueError(fallback_message(problems))
        put_file(folder / out.name, out)
    return findings


def _program(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.export.ExportedProgram:
    """Returns the graph of a module, in which attention is PyTorch's own."""

    def attend(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float,
        causal: bool,
        *_: Any,
    ) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(
            q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )

    return decomposed(trace_for_torch(model, inputs), {"quant::onnx_attention": attend})


def _check_convertible(name: str, linear: QuantLinear) -> None:
    """Raises ValueError for a layer that the converter does not know."""
    weight, activation = linear.weight_format, linear.activation_format
    inputs = _INPUTS.get(weight.name)
    if inputs is None or (activation is not None and activation.name not in inputs):
        raise ValueError(
            f"{name} {list(linear.weight_shape)}: the converter for torch-tensorrt has no {weight} weights with "
            f"{activation or '16-bit'} inputs; it has {', '.join(_INPUTS)}. Export with --to tensorrt"
        )
    if activation is not None and linear.input_scale is None:
        raise ValueError(f"{name}: {activation} inputs need a calibrated scale in an engine; quantize with --calib")


@contextmanager
def _as_on(target: GpuTarget) -> Iterator[None]:
    """Answers torch-tensorrt's questions about a GPU that is not here with the target's compute capability."""
    major, minor = target.capability
    memory = 16 << 30
    facts = SimpleNamespace(major=major, minor=minor, name=target.sm, total_memory=memory, multi_processor_count=1)
    answers: Any = {
        "get_device_properties": lambda *_: facts,
        "get_device_capability": lambda *_: target.capability,
        "get_device_name": lambda *_: target.sm,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "mem_get_info": lambda *_: (memory, memory),
        "set_device": lambda *_: None,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "device": lambda *_: nullcontext(),
    }
    with mock.patch.multiple(torch.cuda, **answers):
        # A build without CUDA lacks the class that an annotation names.
        if hasattr(torch._C, "_CudaDeviceProperties"):
            yield
        else:
            with mock.patch.object(torch._C, "_CudaDeviceProperties", object, create=True):
                yield


@contextmanager
def _for_target(trt: Any, target: GpuTarget) -> Iterator[None]:
    """Patches TensorRT while open: builder configs are for the target, and engines name the layers that they run."""
    original, build = trt.Builder.create_builder_config, trt.Builder.build_serialized_network
    # torch-tensorrt loads the engine only to serialize it again, which needs the GPU.
    loaded = SimpleNamespace(deserialize_cuda_engine=lambda engine: SimpleNamespace(serialize=lambda: bytes(engine)))

    def create(builder: Any) -> Any:
        config = original(builder)
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, target.sm.upper()), 0)
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        return config

    def build_named(builder: Any, network: Any, config: Any) -> Any:
        # The engine lists kernels of layers that have metadata: through the others the audit would follow no tensor.
        for index in range(network.num_layers):
            layer = network.get_layer(index)
            layer.metadata = layer.metadata or f"[ONNX Layer: torch_tensorrt.{index}]"
        return build(builder, network, config)

    with (
        mock.patch.object(trt.Builder, "create_builder_config", create),
        mock.patch.object(trt.Builder, "build_serialized_network", build_named),
        mock.patch.object(trt, "Runtime", return_value=loaded),
    ):
        yield


def _layer_name(node: Any, name: str) -> str:
    """Returns the name of the module whose forward a node of `quant::linear` is."""
    # The second argument is the buffer `model.layers.0.mlp.up_proj.codes`.
    codes = str(getattr(node.args[1], "target", "")) if node is not None else ""
    return codes.removesuffix(".codes").removeprefix(TRACED) if codes.endswith(".codes") else name


class _Linear:
    """The layers of TensorRT's network for one quantized linear; `arrays` gets its constants."""

    def __init__(self, trt: Any, network: Any, name: str, arrays: list[Any]) -> None:
        self.trt, self.network, self.name, self.arrays = trt, network, name, arrays
        self.count = 0

    def convert(
        self, x: Any, codes: Any, scale: Any, global_scale: Any, bias: Any, input_scale: Any, weight_format: str,
        activation: str,
    ) -> Any:  # fmt: skip
        """Returns the output of the layer; arguments as for `quant::linear`."""
        dtype, format = x.dtype, FORMATS[weight_format]
        weight = self._weight(format, codes, scale, global_scale, dtype)
        if activation:
            x = self._rounded(FORMATS[activation], x, input_scale)
        rank = len(x.shape)
        if rank > 2:
            # A matrix of the same rank as x, its leading dimensions 1.
            shuffle = self._named(self.network.add_shuffle(weight), "Reshape")
            shuffle.reshape_dims = (*[1] * (rank - 2), *tuple(weight.shape))
            weight = shuffle.get_output(0)
        none, turned = self.trt.MatrixOperation.NONE, self.trt.MatrixOperation.TRANSPOSE
        y = self._named(self.network.add_matrix_multiply(x, none, weight, turned), "MatMul").get_output(0)
        if bias is None:
            return y
        row = self._constant(bias.detach().float().numpy(), self.trt.float32, (*[1] * (rank - 1), bias.numel()))
        row = self._cast(row, dtype)
        return self._named(self.network.add_elementwise(y, row, self.trt.ElementWiseOperation.SUM), "Add").get_output(0)

    def _weight(self, format: Format, codes: Any, scale: Any, global_scale: Any, dtype: Any) -> Any:
        """Returns the dequantized weight `[out, in]`."""
        trt = self.trt
        kinds = {4: trt.fp4, 8: trt.int8 if format.element.name.lower() == "int8" else trt.fp8}
        stored = codes.view(torch.uint8)
        columns = stored.shape[1] * 8 // format.element.bits
        values = self._constant(stored.numpy(), kinds[format.element.bits], (stored.shape[0], columns))
        if format.global_scale:
            second = self._constant(np.float32(global_scale), trt.float32, ())
            blocks = self._constant(scale.view(torch.uint8).numpy(), trt.fp8, tuple(scale.shape))
            step = self._dequantized(blocks, second, trt.float32)
            return self._cast(self._dequantized(values, step, trt.float32, axis=1), dtype)
        steps = scale.float().numpy().reshape(-1)
        if len(steps) == 1:
            return self._dequantized(values, self._constant(steps[0], trt.float32, ()), dtype)
        return self._dequantized(values, self._constant(steps, trt.float32, steps.shape), dtype, axis=0)

    def _rounded(self, format: Format, x: Any, input_scale: Any) -> Any:
        """Rounds `x` to its codes and decodes them."""
        trt, dtype = self.trt, x.dtype
        scale = self._constant(np.float32(input_scale), trt.float32, ())
        if not format.global_scale:
            kind = trt.int8 if format.element.name.lower() == "int8" else trt.fp8
            codes = self._named(self.network.add_quantize(x, scale, kind), "QuantizeLinear").get_output(0)
            return self._dequantized(codes, scale, dtype)
        axis = len(x.shape) - 1
        quantized = self._named(
            self.network.add_dynamic_quantize(x, axis, 16, trt.fp4, trt.fp8), "TRT_FP4DynamicQuantize"
        )
        quantized.set_input(1, scale)
        step = self._dequantized(quantized.get_output(1), scale, trt.float32)
        return self._cast(self._dequantized(quantized.get_output(0), step, trt.float32, axis=axis), dtype)

    def _dequantized(self, codes: Any, scale: Any, dtype: Any, axis: int | None = None) -> Any:
        layer = self._named(self.network.add_dequantize(codes, scale, dtype), "DequantizeLinear")
        if axis is not None:
            layer.axis = axis
        return layer.get_output(0)

    def _cast(self, x: Any, dtype: Any) -> Any:
        return self._named(self.network.add_cast(x, dtype), "Cast").get_output(0)

    def _constant(self, values: Any, kind: Any, shape: tuple[int, ...]) -> Any:
        array = np.ascontiguousarray(values)
        self.arrays.append(array)
        count = int(np.prod(shape)) if shape else 1
        weights = self.trt.Weights(kind, array.ctypes.data, count)
        return self._named(self.network.add_constant(shape, weights), "Constant").get_output(0)

    def _named(self, layer: Any, kind: str) -> Any:
        """Names a layer as our ONNX files do; the audit reads the metadata."""
        label = f"{self.name}/{kind}" if kind == "MatMul" else f"{self.name}/{kind}_{self.count}"
        self.count += 1
        layer.name, layer.metadata = label, f"[ONNX Layer: {label}]"
        return layer


def lower(model: nn.Module, path: str | Path, inputs: Mapping[str, torch.Tensor]) -> Path:
    """Writes `model` as an exported program over torch-tensorrt's quantize ops and returns its path.

    `inputs` are examples by the names of `forward`'s parameters; their shapes are fixed. Raises ValueError if the ops
    are not installed, or cannot hold a layer; nothing is written.
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
        return _program(model, inputs)


def require_ops() -> None:
    """Makes torch-tensorrt's two quantize ops known, or raises ValueError if they are not installed."""
    ops = ("quantize_op", "dynamic_block_quantize_op")
    if all(hasattr(torch.ops.tensorrt, name) for name in ops):
        return
    try:
        importlib.import_module("modelopt.torch.quantization")
    except ImportError as error:
        raise ValueError(
            f"torch-tensorrt's quantize ops come with nvidia-modelopt, which cannot be imported ({error}): "
            f"{install_command('modelopt')}, and torch-tensorrt on the GPU that compiles the program"
        ) from error
    if not all(hasattr(torch.ops.tensorrt, name) for name in ops):
        raise ValueError("this nvidia-modelopt has no tensorrt::quantize_op; install 0.47 or later")


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


class _Lowered(nn.Module):
    """A quantized layer over a dense weight and two quantizers.

    torch-tensorrt tells weights from inputs by the name of the module that calls the op.
    """

    weight: torch.Tensor

    def __init__(self, layer: QuantLinear | QuantConv, dtype: torch.dtype) -> None:
        super().__init__()
        weight, activation = layer.quantized_weight, layer.activation_format
        dense = layer.weight_in(dtype) if isinstance(layer, QuantConv) else weight.dequantize(dtype)
        self.register_buffer("weight", dense)
        self.bias, self.original = layer.bias, (layer,)  # in a tuple, or its codes would be in the program
        scale = weight.global_scale if weight.format.global_scale else weight.scale
        assert scale is not None
        self.weight_quantizer = _Quantizer(weight.format, scale.float().reshape(()))
        self.input_quantizer = _Quantizer(activation, layer.input_scale) if activation else nn.Identity()


class _LoweredLinear(_Lowered):
    def __init__(self, layer: QuantLinear, dtype: torch.dtype) -> None:
        super().__init__(layer, dtype)
        self.parts = layer.parts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.parts.input(x)
        y = nn.functional.linear(self.input_quantizer(x), self.weight_quantizer(self.weight), self.bias)
        branch = self.parts.branch(x)
        return y if branch is None else y + branch


class _LoweredConv(_Lowered):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        conv: Any = self.original[0]
        x, weight = conv.padded(self.input_quantizer(x)), self.weight_quantizer(self.weight)
        geometry = (conv.stride, conv.op_padding, conv.dilation, conv.transposed, conv.output_padding, conv.groups)
        return torch.convolution(x, weight, self.bias, *geometry)


def _check_lowerable(name: str, linear: QuantLinear | QuantConv) -> None:
    """Raises ValueError where torch-tensorrt has no op for a layer, or would change its weight."""
    weight = linear.quantized_weight
    where = f"{name} {list(weight.shape)}"
    used = [weight.format, *([linear.activation_format] if linear.activation_format else [])]
    unknown = [format.name for format in used if format.name not in _LOWERED]
    if unknown:
        raise ValueError(
            f"{where}: torch-tensorrt has no op for {', '.join(unknown)}, only for {' and '.join(_LOWERED)} "
            f"(one scale a tensor); quantize with one of these, or export with {option('to', 'tensorrt')}"
        )
    if weight.format.global_scale:
        dense = weight.dequantize()
        again = quantize(dense, weight.format, global_scale=weight.global_scale, name=name).dequantize()
        changed = int((again != dense).sum())
        if changed:
            raise ValueError(
                f"{where}: torch-tensorrt finds NVFP4 block scales anew, and {changed} of {dense.numel()} weights "
                f"would change; quantize it with solver rtn, or export with {option('to', 'tensorrt')}, which keeps "
                "searched scales"
            )


@contextmanager
def _lowered(model: nn.Module) -> Iterator[None]:
    """Puts `_LoweredLinear` and `_LoweredConv` in the places of `QuantLinear` and `QuantConv` while open."""
    kinds = QuantLinear | QuantConv | QuantExperts
    modules = {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
    for name, module in modules.items():
        if isinstance(module, QuantExperts):
            raise ValueError(
                f"{name}: torch-tensorrt has no op for fused experts; keep them in 16 bit ({option('exclude')})"
            )
        _check_lowerable(name, module)
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
