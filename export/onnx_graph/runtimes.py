"""Which runtimes load an exported file: onnxruntime's default session, or only TensorRT.

Tried with onnxruntime 1.32 on a processor, by the dtype of the model and the formats of its layers:

    weight                             FP32 and FP16    BF16
    16 or 32 bit                       loads            no operators in BF16
    int4*, fp8, fp8_channel, int8      loads            no operators in BF16
    nvfp4, mxfp8, fp8_block            operators that TensorRT alone has, or no kernel for FP4

Releases before 1.32 rewrite DequantizeLinear and MatMul of FP8 in FP32 as MatMulIntegerToFloat, which takes no FP8, and
stop there (1.29 to 1.31; 1.24 to 1.27 stop at QuantizeLinear, also of INT8). Their optimizations leave FP16 alone.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quant.formats.format import Format
from quant.formats.install_command import install_command
from quant.kernels.linear.conv import QuantConv
from quant.kernels.linear.quant_linear import QuantLinear

_OF_TENSORRT = ("nvfp4", "mxfp8", "fp8_block")
_TRIED = "1.32"
_LOADS_FP8_IN_FP32 = (1, 32)


def layer_of_tensorrt(model: nn.Module) -> tuple[str, str] | None:
    """Returns the first layer in a format that only TensorRT runs, and that format.

    None if onnxruntime runs all of them.
    """
    layers = {n: m.weight_format.name for n, m in model.named_modules() if isinstance(m, QuantLinear | QuantConv)}
    return next(((name, format) for name, format in layers.items() if format in _OF_TENSORRT), None)


def narrowest_dtype(model: nn.Module) -> torch.dtype:
    """Returns the dtype of a model's tensors that are not quantized: the narrowest of the parameters."""
    dtypes = {tensor.dtype for tensor in model.parameters() if tensor.dtype.is_floating_point}
    return next((dtype for dtype in (torch.bfloat16, torch.float16) if dtype in dtypes), torch.float32)


def onnxruntime_problem(model: nn.Module, *, fp8_attention: bool = False, kv_cache: Format | None = None) -> str | None:
    """Returns why onnxruntime cannot load the ONNX file of a model, with the way out, in one sentence.

    None if it can.
    """
    of_tensorrt = layer_of_tensorrt(model)
    runners = "TensorRT-RTX and TensorRT run it (--to tensorrt)"
    if kv_cache is not None:
        problem = f"the KV cache is in {kv_cache}, by a node of our TensorRT plugin"
        way_out = "TensorRT-RTX runs it (--to tensorrt), or pass --kv-cache 16bit"
    elif of_tensorrt is not None:
        layer, format = of_tensorrt
        problem = f"{layer} is in {format}, for which only TensorRT has operators"
        way_out = f"{runners}, and onnxruntime runs int4, fp8, fp8_channel and int8"
    elif fp8_attention:
        problem, way_out = "attention in FP8 is an operator of TensorRT", f"{runners}, or pass --attention none"
    elif narrowest_dtype(model) == torch.bfloat16:
        problem = "the model is in BF16, for which it has no operators on a processor"
        way_out = f"{runners}, or export with --dtype fp32 or fp16"
    else:
        return None
    return f"onnxruntime {_TRIED} does not load this file: {problem}; {way_out}"


def loaded(path: Path) -> Any:
    """Returns the onnxruntime session of a file with default options, on the processor.

    Raises:
        ValueError: onnxruntime is not installed, or refuses the file; the message is its own.
    """
    if importlib.util.find_spec("onnxruntime") is None:
        raise ValueError(f"running {path} needs the package `onnxruntime`: {install_command('onnx')}")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors; warnings are about constants that it folds
    try:
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has a class for each of its status codes, and no base of them
        text = " ".join(str(error).split())
        hint = "NVFP4, MXFP8, BF16 and --kv-cache files are for TensorRT"
        if tuple(map(int, onnxruntime.__version__.split(".")[:2])) < _LOADS_FP8_IN_FP32:
            hint = f"1.32 is the first that loads FP8 and INT8 in FP32: {install_command('onnx')}, or --dtype fp16"
        raise ValueError(
            f"{path}: onnxruntime {onnxruntime.__version__} does not load it: {text[:300]}; {hint}"
        ) from error
