"""These functions compute the ops of a graph in PyTorch's own ops, or in launches, which a compiler sees and fuses.

`aoti.replaced_ops` puts them in the place of the ops. On a CPU most linears are no body but a function of C++
(`cpp_linear`), on a GPU linears and convolutions launch our kernels (`triton_linear`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from quant.export.aoti.triton_linear import TritonLinear, dequantize, fp8_product
from quant.export.onnx.translate import ConvCall
from quant.formats.format import FORMATS, Format
from quant.formats.rounding import unpack
from quant.formats.rounding import decode_power_of_two
from quant.formats.tensor import BlockScaledTensor, fake_quantize
from quant.kernels.attention.forward import fp8_attention, run_fp8_attention
from quant.kernels.linear.conv import CONV, conv_matrix, conv_parameter
from quant.kernels.linear.rounded_products import round_to_e4m3
from quant.kernels.linear.ops import LINEAR, LinearCall

EXPORTED_ATTENTION = "quant::onnx_attention"


def _linear(*arguments: Any) -> torch.Tensor:
    call = LinearCall(*arguments)
    x, weight, rounding = call.x, call.weight, call.rounding
    if (y := fp8_product(call)) is not None:
        return y
    if rounding is not None:
        x = fake_quantize(x, rounding, **{"global_scale" if rounding.global_scale else "scale": call.input_scale})
    return torch.nn.functional.linear(x, dequantize_in_graph(weight, x.dtype), call.bias)


def _conv(*arguments: Any, decode: Callable[..., torch.Tensor] | None = None) -> torch.Tensor:
    call = ConvCall(*arguments)
    x: torch.Tensor = call.x
    if call.activation:
        x = fake_quantize(x.flatten(1), FORMATS[call.activation], scale=call.input_scale).view(x.shape)
    matrix = conv_matrix(call.codes, call.groups, call.transposed)
    weight = BlockScaledTensor(matrix, call.scale, FORMATS[call.weight_format], (matrix.shape[0], matrix.shape[1]))
    decode = decode or dequantize_in_graph
    dense = conv_parameter(decode(weight, x.dtype), call.codes.shape, call.groups, call.transposed)
    window = (call.stride, call.padding, call.dilation, call.transposed, call.output_padding, call.groups)
    return torch.convolution(x, dense, call.bias, *window)


def dequantize_in_graph(weight: BlockScaledTensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns `weight.dequantize(dtype)` as one expression without tables or loops, for a compiler to fuse."""
    format, (rows, columns) = weight.format, weight.shape
    # weight = element · (block scale · second-level scale), the step rounded to float32 and the product to `dtype`.
    elements = _element_values(weight.codes, format, columns)
    scale = weight.scale if weight.scale.dtype.is_floating_point else decode_power_of_two(weight.scale)
    step = scale.float()
    if weight.global_scale is not None:
        # The oracle multiplies in float64; float32 gives the same product, because it rounds once too. Inductor would
        # cast E4M3 to float64 directly, and Triton compiles no such cast.
        step = step * weight.global_scale.float()
    block_rows, block_columns = format.block_shape(weight.shape)
    step = step.repeat_interleave(block_rows, 0)[:rows].repeat_interleave(block_columns, 1)[:, :columns]
    return (elements * step).to(dtype)


def _element_values(codes: torch.Tensor, format: Format, columns: int) -> torch.Tensor:
    element = format.element
    if element.torch_dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8):
        return codes.float()
    bits = unpack(codes, element.bits, columns).int()
    # Two's complement of few bits: flipping the sign bit and subtracting its value extends the sign.
    if element.is_integer:
        half = 1 << (element.bits - 1)
        return ((bits ^ half) - half).float()
    # E2M1 code s ee m       ->  FP16 bits s 000ee m000000000
    # E2M3 code s ee mmm     ->            s 000ee mmm0000000
    # FP16 reads the exponent with its bias of 15, so the value is 2^(bias - 15) times the code's. Subnormal codes
    # become subnormal numbers of FP16, and so are right too.
    sign = bits >> (element.bits - 1)
    magnitude = (bits & ((1 << (element.bits - 1)) - 1)) << (10 - element.mantissa)
    half_precision = (magnitude | (sign << 15)).to(torch.int16).view(torch.float16)
    return half_precision.float() * 2.0 ** (15 - element.bias)


def exported_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
    scales: list[float],
    kind: str,
) -> torch.Tensor:
    """Computes a traced model's attention op: PyTorch's attention, or ours in FP8 if there are scales."""
    if not scales:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    operand_scales = torch.stack([torch.full((), value, dtype=torch.float32, device=q.device) for value in scales[:3]])
    pairs, fp8 = zip((q, k, v), operand_scales.unbind(), strict=True), FORMATS["fp8"]
    q8, k8, v8 = (round_to_e4m3(x, fp8, operand_scale)[0] for x, operand_scale in pairs)
    dtype = q.dtype if q.dtype in (torch.bfloat16, torch.float16) else torch.bfloat16
    return fp8_attention(q8, k8, v8, operand_scales, causal=causal, softmax_scale=scale, dtype=dtype).to(q.dtype)


BODIES: dict[str, Callable[..., torch.Tensor]] = {
    LINEAR: _linear,
    CONV: _conv,
    EXPORTED_ATTENTION: exported_attention,
}
"""The bodies of quantized layers and of attention, by the names of their ops."""
INNER_BODIES: dict[str, Callable[..., torch.Tensor]] = {
    "quant::fp8_attention": partial(run_fp8_attention, in_graph=True),
}
"""The bodies of ops that other bodies call."""


def launches() -> dict[str, Callable[..., torch.Tensor]]:
    """Returns the bodies of quantized layers in one graph for a GPU: launches of our kernels."""
    return {LINEAR: TritonLinear(), CONV: partial(_conv, decode=dequantize)}
