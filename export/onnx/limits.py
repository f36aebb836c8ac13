"""Refuses combinations that TensorRT miscompiles or refuses, or that ONNX cannot express, before anything is built.

The message names the layer and an alternative. A builder's success proves nothing: FP8 weights with one scale per 128
inputs and FP8 inputs compile silently, and only the first scale of each row is read. The combinations in this table
were built and read back, and no others pass.

    weight         inputs                     GEMM in TensorRT
    nvfp4          nvfp4, or 16 bit           FP4; half precision after a dequantizing kernel
    mxfp8          mxfp8, or 16 bit           half precision
    fp8            fp8, fp8_token, or 16 bit  FP8; half precision
    fp8_channel    fp8, fp8_token, or 16 bit  FP8; half precision
    fp8_block      16 bit                     half precision
    int8           int8_token, int8_tensor    INT8
    int8           16 bit                     half precision
    int4           16 bit                     half precision, dequantized inside the GEMM; groups of 64 and 32 likewise

Convolutions take the same pairs of FP8 and INT8, and run in FP8 and INT8 with inputs of the same kind. With inputs in
16 bit they run in half precision, and so do transposed ones with any inputs; the engine holds their codes.
"""

import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quant.base.atomic import destination
from quant.base.errors import UserError, install_command, option, require
from quant.calibration.session import Device, find_device
from quant.export.onnx.expert_nodes import check_experts
from quant.formats.format import Format
from quant.kernels.attention.attention_operands import HEAD_DIMS as PLUGIN_HEAD_DIMS
from quant.kernels.linear.conv import QuantConv
from quant.kernels.linear.experts import QuantExperts
from quant.kernels.linear.quant_linear import QuantLinear, refuse_residual

# Which files onnxruntime loads in its default session; TensorRT loads the others. Tried with onnxruntime 1.32 on a
# processor, by the dtype of the model and the formats of its layers:
#
#     weight                             FP32 and FP16    BF16
#     16 or 32 bit                       loads            no operators in BF16
#     int4*, fp8, fp8_channel, int8      loads            no operators in BF16
#     nvfp4, mxfp8, fp8_block            operators that TensorRT alone has, or no kernel for FP4
#
# Releases before 1.32 stop at FP8 in FP32 on a processor, and have no `query_seqlens` of GroupQueryAttention. That is
# taken out for them: without it the CUDA provider reads the prompts of several rows whole, and not in chunks. Its QMoE
# does not take our scales in FP32, and with those in FP16 the logits of a tiny model were 0.1 off.
_OF_TENSORRT = ("nvfp4", "mxfp8", "fp8_block")
_TRIED = "1.32"
_QUERY_SEQLENS = 16
_CUDA = "CUDAExecutionProvider"


def layer_of_tensorrt(model: nn.Module) -> tuple[str, str] | None:
    """Returns the first layer in a format that only TensorRT runs, and that format; None if there is none."""
    layers = {n: m.weight_format.name for n, m in model.named_modules() if isinstance(m, QuantLinear | QuantConv)}
    return next(((name, format) for name, format in layers.items() if format in _OF_TENSORRT), None)


def narrowest_dtype(model: nn.Module) -> torch.dtype:
    """Returns the dtype of a model's tensors that are not quantized: the narrowest of the parameters."""
    dtypes = {tensor.dtype for tensor in model.parameters() if tensor.dtype.is_floating_point}
    return next((dtype for dtype in (torch.bfloat16, torch.float16) if dtype in dtypes), torch.float32)


def onnxruntime_problem(model: nn.Module, *, fp8_attention: bool = False, kv_cache: Format | None = None) -> str | None:
    """Returns why onnxruntime cannot load the ONNX file of a model, with the way out; None if it can."""
    of_tensorrt = layer_of_tensorrt(model)
    runners = f"TensorRT-RTX and TensorRT run it ({option('to', 'tensorrt')})"
    if kv_cache is not None:
        problem = f"the KV cache is in {kv_cache}, by a node of our TensorRT plugin"
        way_out = f"TensorRT-RTX runs it ({option('to', 'tensorrt')}), or pass {option('kv_cache', '16bit')}"
    elif of_tensorrt is not None:
        layer, format = of_tensorrt
        problem = f"{layer} is in {format}, for which only TensorRT has operators"
        way_out = f"{runners}, and onnxruntime runs int4, fp8, fp8_channel and int8"
    elif fp8_attention:
        problem, way_out = (
            "attention in FP8 is an operator of TensorRT",
            f"{runners}, or pass {option('attention', 'none')}",
        )
    elif narrowest_dtype(model) == torch.bfloat16:
        problem = "the model is in BF16, for which it has no operators on a processor"
        way_out = f"{runners}, or export with {option('dtype', 'fp32')} or fp16"
    else:
        return None
    return f"onnxruntime {_TRIED} does not load this file: {problem}; {way_out}"


def provider_device(device: Device) -> torch.device | None:
    """Returns the GPU on which onnxruntime runs a file, None for the processor; "auto" is a GPU that both can use."""
    import onnxruntime

    found = find_device(device)
    if found is None or found.type != "cuda":
        return None
    if _CUDA in onnxruntime.get_available_providers():
        return found
    if device == "auto":
        return None
    raise UserError(
        f"{option('device', str(device))}: onnxruntime {onnxruntime.__version__} here runs on processors; install "
        "onnxruntime-gpu in its place (`pip uninstall onnxruntime`, then `pip install onnxruntime-gpu`), or leave "
        f"{option('device')} out"
    )


def loaded(path: Path, threads: int = 0, gpu: torch.device | None = None) -> Any:
    """Returns the onnxruntime session of a file, with default options; 0 threads are its default.

    It runs on the processor, or by the CUDA provider on `gpu`, where products in FP32 are not rounded to TF32.
    """
    if importlib.util.find_spec("onnxruntime") is None:
        raise ValueError(f"running {path} needs the package `onnxruntime`: {install_command('onnx')}")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # errors; warnings are about constants that it folds
    providers: list[Any] = ["CPUExecutionProvider"]
    hint = f"NVFP4, MXFP8, BF16 and {option('kv_cache')} files are for TensorRT"
    if gpu is not None:
        providers.insert(0, (_CUDA, {"device_id": gpu.index, "use_tf32": 0}))
        onnxruntime.set_default_logger_severity(3)  # it warns of plug-ins that nobody asked for
        hint = f"{option('device', 'cpu')} runs it on the processor"
    elif is_older():
        hint = f"{_TRIED} is the first that loads these files: {install_command('onnx')}"
    try:
        model = _for_older(path, options, gpu) if is_older() else path
        session = onnxruntime.InferenceSession(model, options, providers=providers)
    except UserError:
        raise
    except Exception as error:  # onnxruntime has a class for each of its status codes, and no base of them
        if importlib.util.find_spec("onnx") is not None:
            load_graph(path)  # damage is named as such
        text, name = " ".join(str(error).split()), destination(path)
        said = f"onnxruntime {onnxruntime.__version__} does not load it: {text[:300]}; {hint}"
        raise ValueError(f"{name}: {said}") from error
    if gpu is not None and session.get_providers()[0] != _CUDA:
        raise ValueError(
            f"{path.name}: onnxruntime {onnxruntime.__version__} does not find the CUDA libraries that it needs; "
            f"`python -c 'import onnxruntime; onnxruntime.preload_dlls()'` names them, and {hint}"
        )
    return session


def load_graph(path: Path) -> Any:
    """Loads the ONNX model in a file, its external data left on disk; ValueError for a file that is damaged."""
    onnx = require("onnx", "onnx")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such ONNX file")
    try:
        model = onnx.load(path, load_external_data=False)
    except OSError:
        raise
    except Exception as error:  # protobuf's own exception class, which is in no fixed module
        raise ValueError(f"{path}: not an ONNX file, or a damaged one ({error}); copy or export it again") from error
    if not model.graph.node:
        raise ValueError(f"{path}: not an ONNX file, or one without a graph; copy or export it again")
    for tensor in (tensor for tensor in model.graph.initializer if tensor.data_location == tensor.EXTERNAL):
        file, offset, size = external_part(tensor, path.parent)
        if not file.is_file():
            raise ValueError(f"{path}: its weights {file.name} are missing; the two files belong together")
        if offset + size > file.stat().st_size:
            raise ValueError(f"{file}: ends before {tensor.name}: it was cut off; copy or export it again")
    return model


def external_part(tensor: Any, folder: Path) -> tuple[Path, int, int]:
    """Returns the file that holds an initializer's numbers, and their offset and length there, in bytes."""
    where = {entry.key: entry.value for entry in tensor.external_data}
    size = math.ceil(math.prod(tensor.dims) * require("onnx_ir", "onnx").DataType(tensor.data_type).itemsize)
    offset, length = where.get("offset", "0"), where.get("length", str(size))
    if not where.get("location") or not offset.isdecimal() or length != str(size):
        said = ", ".join(f"{key} {value}" for key, value in where.items()) or "nothing"
        raise ValueError(f"{folder}: {tensor.name} of {size} bytes is said to lie at {said}; export the file again")
    return folder / where["location"], int(offset), size


def is_older() -> bool:
    """Returns whether the installed onnxruntime is older than the one that files are written for."""
    import onnxruntime

    return tuple(map(int, onnxruntime.__version__.split(".")[:2])) < tuple(map(int, _TRIED.split(".")))


def _for_older(path: Path, options: Any, gpu: torch.device | None) -> bytes:
    import onnx

    model = onnx.load(path, load_external_data=False)
    for node in model.graph.node:
        if node.op_type == "QMoE" and gpu is not None:
            raise UserError(
                f"{path.name}: the CUDA provider of onnxruntime before {_TRIED} does not run experts in INT4 or INT8; "
                f"pass {option('device', 'cpu')}, or quantize them in fp8@16bit"
            )
        if node.op_type == "GroupQueryAttention" and len(node.input) > _QUERY_SEQLENS:
            del node.input[7:]  # the inputs between are not given
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
    return model.SerializeToString()


# Activation formats by weight format; as activations, fp8_channel is fp8_token and int8 is int8_token.
_TOKEN_FP8 = ("fp8", "fp8_token", "fp8_channel")
_INPUTS: dict[str, tuple[str, ...]] = {
    "nvfp4": ("nvfp4",), "mxfp8": ("mxfp8",), "fp8": _TOKEN_FP8, "fp8_channel": _TOKEN_FP8, "fp8_block": (),
    "int8": ("int8_token", "int8", "int8_tensor"), "int4": (), "int4_g64": (), "int4_g32": (), "q8_0": (),
}  # fmt: skip
# Formats that cannot be exported: the format to use in its place, and the reason; without one it is a format of inputs.
_INSTEAD = {
    "mxfp4": ("nvfp4", "TensorRT has no E2M1 weights with E8M0 scales"),
    "mxfp6": ("fp8", "ONNX has no 6-bit numbers at this opset"),
    "mxfp6_e3m2": ("fp8", "ONNX has no 6-bit numbers at this opset"),
    "mxfp8_e5m2": ("mxfp8", "TensorRT does not import E5M2 weights"),
    "fp8_token": ("fp8_channel", ""),
    "fp8_group": (
        "fp8_block with 16-bit inputs",
        "TensorRT reads only the first scale of each row of FP8 weights blocked along their inputs",
    ),
    "int8_token": ("int8", ""),
    "int8_tensor": ("int8", ""),
}
# Of TensorRT's fused FP8 attention.
_NATIVE_HEAD_DIMS = (64, 128)


def layer_problem(
    weight: Format, activation: Format | None, shape: tuple[int, ...], *, static_scale: bool = True
) -> str | None:
    """Returns the reason why a linear `[out, in]` cannot be exported and an alternative, in one clause; None if it can.

    `static_scale` says whether the layer has a calibrated input scale; `activation` is None for 16-bit inputs.
    """
    if weight.name not in _INPUTS:
        instead, reason = _INSTEAD.get(weight.name, ("fp8", ""))
        return f"{weight} weights cannot be exported: {reason or f'{weight} is a format of inputs'}; use {instead}"
    if len(shape) == 2 and not weight.divides(shape):
        block = weight.block_shape(shape)[1]
        return (
            f"{shape[1]} inputs are not a multiple of the {weight} block of {block}, and neither ONNX nor TensorRT has "
            f"a short last block; keep the layer in 16 bit ({option('exclude')}) or use fp8"
        )
    if activation is None:
        return None
    if activation.name not in _INPUTS[weight.name]:
        choices = " or ".join((*_INPUTS[weight.name], "16-bit inputs (activation null)"))
        reason = f"TensorRT has no GEMM of {weight} weights and {activation} inputs"
        if weight.has_square_blocks:
            reason = "TensorRT miscompiles FP8 weights in blocks with FP8 inputs"
        return f"{reason}; use {choices} in the plan"
    if activation.is_static and not static_scale:
        return (
            f"{activation} inputs need a calibrated scale in an engine; quantize with calibration text "
            f"({option('calib')})"
        )
    return None


def check_model(model: nn.Module, runtime: str = "tensorrt") -> None:
    """Raises ValueError for the first layer that no translation can express, with an alternative."""
    refuse_residual(model, "ONNX, and so TensorRT,")
    check_experts(model, runtime)
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear | QuantConv):
            weight, has_scale = module.weight_format, module.input_scale is not None
            problem = layer_problem(weight, module.activation_format, module.weight_shape, static_scale=has_scale)
            is_grouped = isinstance(module, QuantConv) and module.transposed and module.groups > 1
            if problem is None and is_grouped and not weight.per_tensor:
                problem = (
                    f"a transposed convolution of {module.groups} groups in {weight}: ONNX has one scale for each "
                    "index of an axis, and its groups share that of their output channels; keep it in 16 bit "
                    f"({option('exclude')}) or use fp8"
                )
            if problem:
                raise ValueError(f"{name} {list(module.weight_shape)}: {problem}")


def check_graph(exported: torch.export.ExportedProgram, model: nn.Module, prefix: str = "") -> None:
    """Raises ValueError for a graph that a file cannot hold; the message names the module and the way out."""
    buffers: Mapping[str, str] = exported.graph_signature.inputs_to_buffers
    multiplied = set()
    for node in exported.graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, Tensor) and value.is_complex():
            # Such as Llama 4's attention. Paths and classes of the modules around a node, the innermost last.
            path, kind = list(node.meta.get("nn_module_stack", {"": ("", "")}).values())[-1]
            raise ValueError(
                f"{path.removeprefix(prefix)} ({str(kind).rpartition('.')[2]}) computes with complex numbers, which "
                "ONNX graphs do not hold; serve this model from its checkpoint (vLLM, TensorRT-LLM)"
            )
        is_linear = node.op == "call_function" and node.target is torch.ops.quant.linear.default
        if node.op == "call_function" and node.target is torch.ops.quant.onnx_experts.default:
            # quant::onnx_experts(x, index, weight, up, up_scale, up_bias, down, down_scale, down_bias, …)
            read = (buffers.get(node.args[index].name, "") for index in (3, 6))
            multiplied |= {name.removesuffix(".codes").removeprefix(prefix) for name in read}
        if is_linear or (node.op == "call_function" and node.target is torch.ops.quant.conv.default):
            layer = buffers[node.args[1].name].removesuffix(".codes").removeprefix(prefix)
            multiplied.add(layer)
            rank = node.args[0].meta["val"].dim()
            # quant::linear(x, codes, scale, global_scale, bias, input_scale, weight_format, activation)
            if is_linear and node.args[7] == "nvfp4" and rank > 3:
                raise ValueError(
                    f"{layer}: NVFP4 inputs of {rank} dimensions, and TensorRT quantizes at most three; flatten the "
                    "leading dimensions before the layer, or use fp8"
                )
    for layer, codes in _codes(exported, model, prefix).items():
        if codes.users and layer not in multiplied:
            raise ValueError(
                f"{layer}: the model multiplies by this layer's weight in code of its own, where a graph has no "
                f"quantized layer; quantize again with {option('exclude', repr(layer))}"
            )


def unreached_layers(exported: torch.export.ExportedProgram, model: nn.Module, prefix: str = "") -> list[str]:
    """Returns the quantized layers on which no output of a graph depends; arguments as for `check_graph`."""
    return [layer for layer, codes in _codes(exported, model, prefix).items() if not codes.users]


def _codes(exported: torch.export.ExportedProgram, model: nn.Module, prefix: str) -> dict[str, Any]:
    """Returns the node that gives the codes of each layer, projections of experts too, by the layer's name."""
    names = {buffer: node for node, buffer in exported.graph_signature.inputs_to_buffers.items()}
    nodes = {node.name: node for node in exported.graph.nodes if node.op == "placeholder"}
    kinds = QuantLinear | QuantConv | QuantExperts
    layers = [name for name, module in model.named_modules() if isinstance(module, kinds)]
    return {name: nodes[names[f"{prefix}{name}.codes"]] for name in layers if f"{prefix}{name}.codes" in names}


def check_attention(name: str, kind: str, query: Tensor, key: Tensor, mask: Tensor | None) -> None:
    """Raises ValueError for FP8 attention without a fused kernel; the message names the module and the way out.

    Args:
        query: `[batch, heads, seq_q, dim]`.
        key: `[batch, kv_heads, seq_kv, dim]`.
    """
    head_dims = PLUGIN_HEAD_DIMS if kind == "plugin" else _NATIVE_HEAD_DIMS
    way_out = f"pass {option('attention', 'none')} to keep attention in 16 bit"
    heads, kv_heads, head_dim = query.shape[1], key.shape[1], query.shape[3]
    if head_dim not in head_dims:
        listed = ", ".join(map(str, head_dims))
        raise ValueError(f"{name}: {kind} FP8 attention takes heads of {listed}, these are of {head_dim}; {way_out}")
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"{name}: FP8 attention gives FP16 or BF16, and the model is in {query.dtype}; {way_out}")
    if heads % kv_heads:
        raise ValueError(f"{name}: {heads} heads are not a multiple of {kv_heads} KV heads; {way_out}")
    if mask is not None and mask.dtype is not torch.bool:
        raise ValueError(f"{name}: FP8 attention takes no bias of positions, and no sinks; {way_out}")
    if mask is not None and kind == "plugin":
        raise ValueError(
            f"{name}: the plugin takes no mask besides the causal one; {way_out}, or {option('attention', 'native')}"
        )
