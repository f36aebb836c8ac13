"""`onnxruntime_problem` says why the default session of onnxruntime does not load a file; TensorRT loads all of them.

Tried with onnxruntime 1.32 on a processor, by the dtype of the model and the formats of its layers:

    weight                         FP32     FP16     BF16
    16 or 32 bit                   loads    loads    no operators in BF16
    int4                           loads    loads    no operators in BF16
    fp8, fp8_channel, int8         loads    no DequantizeLinear to a 16-bit type
    nvfp4, mxfp8, fp8_block        operators that TensorRT alone has, or no kernel for FP4
"""

from __future__ import annotations

import torch
from torch import nn

from quant.kernels.linear.conv import QuantConv
from quant.kernels.linear.modules import QuantLinear

_OF_TENSORRT = ("nvfp4", "mxfp8", "fp8_block")
_TO_FP32_ALONE = ("fp8", "fp8_channel", "int8")


def onnxruntime_problem(model: nn.Module) -> str | None:
    """Why onnxruntime cannot load the ONNX file of a model, with the way out, in one sentence; None if it can."""
    layers = {n: m.weight_format.name for n, m in model.named_modules() if isinstance(m, QuantLinear | QuantConv)}
    dtypes = {tensor.dtype for tensor in model.parameters() if tensor.dtype.is_floating_point}
    dtype = torch.bfloat16 if torch.bfloat16 in dtypes else torch.float16 if torch.float16 in dtypes else torch.float32
    in_float32 = 'quantize quant.open_model(MODEL, dtype="float32").model'
    of_tensorrt = next((name for name, format in layers.items() if format in _OF_TENSORRT), None)
    to_float32 = next((name for name, format in layers.items() if format in _TO_FP32_ALONE), None)
    if of_tensorrt is not None:
        problem = f"{of_tensorrt} is in {layers[of_tensorrt]}, for which TensorRT alone has operators"
        way_out = "int4 or, in float32, fp8, fp8_channel and int8 run there"
    elif dtype == torch.bfloat16:
        problem, way_out = "the model is in BF16, for which it has no operators on a processor", f"or {in_float32}"
    elif dtype == torch.float16 and to_float32 is not None:
        format = layers[to_float32]
        problem = f"{to_float32} is in {format}, which it dequantizes to FP32 alone, and the model is in FP16"
        way_out = f"or {in_float32}"
    else:
        return None
    return f"onnxruntime 1.32 does not load this file: {problem}; build an engine of it (--to tensorrt), {way_out}"
