"""torch-tensorrt compiles a quantized module to an engine of TensorRT, by a converter of our own for `quant::linear`.

The converter puts codes and scales into TensorRT's network as they are, and needs no GPU:

    codes ─▶ constant ─▶ dequantize ─┐
    scales ─▶ constant ┘             ├─▶ matrix multiply ─▶ + bias
    x ─▶ quantize ─▶ dequantize ─────┘

Layers are named as in our ONNX files, `<layer>/MatMul`, by which `quant check` finds them. Tried with
torch-tensorrt-rtx 2.13.0, which goes with tensorrt_rtx 1.5.0.114 and builds for a GPU that need not be present; it asks
torch for the GPU's name and memory all the same, and gets the target's here.
"""

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from quant.base.atomic import put_file, temporary_directory
from quant.base.errors import install_command, option
from quant.export.onnx.attention_nodes import plain_attention
from quant.export.onnx.trace import TRACED, decomposed, trace_for_torch
from quant.export.tensorrt.audit import AuditRow, audit, failures, fallback_message
from quant.export.tensorrt.gpu_targets import local_capability, resolve_target
from quant.formats.format import FORMATS, Format
from quant.kernels.linear.conv import QuantConv
from quant.kernels.linear.quant_linear import QuantLinear
from quant.recipes.gpus import Hardware
from quant.recipes.plan import Plan

_INPUTS = {"fp8": ("fp8",), "fp8_channel": ("fp8",), "int8": ("int8_tensor",), "nvfp4": ("nvfp4",)}
"""Formats of weights, and of inputs beside 16 bit, that the converter knows."""


def compile_engine(
    model: nn.Module, out: Path, inputs: Mapping[str, Tensor], target: str, *, plan: Plan | None, allow_fallback: bool
) -> list[AuditRow]:
    """Compiles a module with torch-tensorrt, writes TensorRT's engine, and returns the audit."""
    gpu = resolve_target(target)
    for name, module in model.named_modules():
        if isinstance(module, QuantConv):
            raise ValueError(
                f"{name}: the converter for torch-tensorrt takes no quantized convolution; keep it in 16 bit "
                f"({option('exclude')}), or export with {option('to', 'tensorrt')}"
            )
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
            program = decomposed(trace_for_torch(model, inputs), {"quant::onnx_attention": plain_attention})
            arrays: list[Any] = []  # constants: TensorRT's network holds their addresses until it is built

            def convert(ctx: Any, target: Any, args: tuple[Any, ...], kwargs: Any, name: str) -> Any:
                # The second argument is the buffer `model.layers.0.mlp.up_proj.codes`.
                codes = "" if ctx.current_node is None else str(getattr(ctx.current_node.args[1], "target", ""))
                layer = codes.removesuffix(".codes").removeprefix(TRACED) if codes.endswith(".codes") else name
                return _Linear(trt, ctx.net, layer, arrays).convert(*args)

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


def _check_convertible(name: str, linear: QuantLinear) -> None:
    """Raises ValueError for a layer that the converter does not know."""
    weight, activation = linear.weight_format, linear.activation_format
    inputs = _INPUTS.get(weight.name)
    if inputs is None or (activation is not None and activation.name not in inputs):
        raise ValueError(
            f"{name} {list(linear.weight_shape)}: the converter for torch-tensorrt has no {weight} weights with "
            f"{activation or '16-bit'} inputs; it has {', '.join(f'{w}@{i[0]}' for w, i in _INPUTS.items())}, and "
            f"inputs in 16 bit. Export with {option('to', 'tensorrt')}"
        )
    if activation is not None and linear.input_scale is None:
        raise ValueError(f"{name}: {activation} inputs need a calibrated scale in an engine; quantize with --calib")


@contextmanager
def _as_on(target: Hardware) -> Iterator[None]:
    """Answers torch-tensorrt's questions about a GPU that is not here with the target's compute capability."""
    major, minor = target.capability
    memory = 16 << 30
    facts = SimpleNamespace(major=major, minor=minor, name=target.sm, total_memory=memory, multi_processor_count=1)
    answers: Any = {
        "get_device_properties": lambda *_: facts, "get_device_capability": lambda *_: target.capability,
        "get_device_name": lambda *_: target.sm, "current_device": lambda: 0, "device_count": lambda: 1,
        "mem_get_info": lambda *_: (memory, memory), "set_device": lambda *_: None, "synchronize": lambda *_: None,
        "empty_cache": lambda: None, "device": lambda *_: nullcontext(),
    }  # fmt: skip
    with mock.patch.multiple(torch.cuda, **answers):
        # A build without CUDA lacks the class that an annotation names.
        if hasattr(torch._C, "_CudaDeviceProperties"):
            yield
        else:
            with mock.patch.object(torch._C, "_CudaDeviceProperties", object, create=True):
                yield


@contextmanager
def _for_target(trt: Any, target: Hardware) -> Iterator[None]:
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
