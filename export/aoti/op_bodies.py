"""The bodies of a graph's ops in a package: PyTorch's own ops, which Inductor fuses, or launches of our kernels.

`onnx.trace.replaced_ops` puts them in the place of the ops. On a CPU most linears are no body but a function of C++
(`package.linear_settings`). On a GPU linears and convolutions launch our Triton kernels, which lie compiled inside the
package:

    x ─▶ rounded to its input format ─▶ codes_gemm_kernel, which decodes the weight while it multiplies ─▶ y
         two kernels, or PyTorch's ops where no kernel knows the format

Replaced by PyTorch's ops, a linear is some dozens of nodes, and Inductor traces, fuses and compiles them for every
shape of a layer anew. A launch is one node, and a kernel is compiled once for all layers of a shape. FP8 weights and
inputs are multiplied by PyTorch (`kernels/linear/rounded_products.py`): Inductor fuses that rounding with its producer.

The number of tokens is known only when a package runs, and tiles for few tokens are not those for many. A linear is
therefore two launches, and the grid of one of them is empty; nothing is launched for an empty grid.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn import functional

from quant.export.onnx.attention_nodes import plain_attention
from quant.export.onnx.translate import ConvCall
from quant.formats.format import FORMATS, Format
from quant.formats.rounding import decode_power_of_two, unpack
from quant.formats.tensor import BlockScaledTensor, fake_quantize, round_activation
from quant.kernels.attention.forward import fp8_attention, run_fp8_attention
from quant.kernels.base.hardware import has_fp8_tensor_cores
from quant.kernels.linear.conv import CONV, conv_matrix, conv_parameter
from quant.kernels.linear.quant_linear import LINEAR, LinearCall
from quant.kernels.linear.rounded_products import fp8_linear, round_to_e4m3, takes_fp8
from quant.kernels.linear.tiles import Tiles

FEW = 64
"""Up to this many tokens the tiles for few tokens are launched."""
FEW_TILES, MANY_TILES = Tiles(16, 32, 128, warps=4, stages=4), Tiles(64, 128, 64, warps=4, stages=4)


class TritonLinear:
    """The body of `quant::linear` in a package for a GPU, for all linears of one graph.

    It remembers its last input: neighbours such as q, k and v share one, and Inductor, which merges equal ops, merges
    no launches. An input that was written in place between two layers, or one inside a branch, is another.
    """

    def __init__(self) -> None:
        self._last: tuple[tuple[Tensor | Format | None, ...], Rows] | None = None

    def __call__(self, *arguments: Any) -> Tensor:
        call = LinearCall(*arguments)
        x, weight, rounding = call.x, call.weight, call.rounding
        if (y := fp8_product(call)) is not None:
            return y
        if x.dtype not in (torch.float16, torch.bfloat16):
            # Tensor cores would round FP32 inputs to TF32, so PyTorch multiplies them.
            x = x if rounding is None else round_activation(x, rounding, call.input_scale)
            return functional.linear(x, dequantize(weight, x.dtype), call.bias)
        # A branch has variables of its own for the values of the graph around it, which it cannot name.
        # `x.mul_(2)` keeps the variable of a functional tensor, and not its value.
        value = x.from_functional() if isinstance(x, FunctionalTensor) else x
        key = (x, value, rounding, call.input_scale)
        if self._last is None or any(a is not b for a, b in zip(self._last[0], key, strict=True)):
            self._last = key, Rows.of(x if rounding is None else round_input(x, rounding, call.input_scale))
        return multiply(self._last[1], weight, call.bias).reshape(*x.shape[:-1], weight.shape[0])


def fp8_product(call: LinearCall) -> Tensor | None:
    """Returns a linear's result where tensor cores multiply FP8 codes of input and weight as they are; else None."""
    x, weight, rounding = call.x, call.weight, call.rounding
    if rounding and takes_fp8(weight.format, rounding, weight.shape, x.dtype) and has_fp8_tensor_cores(x):
        return fp8_linear(x, weight, call.bias, call.input_scale, rounding)
    return None


class Rows(NamedTuple):
    """An input `[tokens, in]`, contiguous and in 16 bit, and the grids of its launches; sizes may be symbolic."""

    values: Tensor
    few: Any  # 1 where `FEW_TILES` are launched, 0 where `MANY_TILES` are
    few_tiles: Any  # tiles of tokens
    many_tiles: Any  # likewise

    @classmethod
    def of(cls, x: Tensor) -> Self:
        values = x.reshape(-1, x.shape[-1]).contiguous()
        tokens = values.shape[0]
        # A number, for a comparison would fix its result in the graph.
        few = torch.sym_max(0, 1 - (tokens - 1) // FEW)
        return cls(values, few, -(-tokens // FEW_TILES.block_m), -(-tokens // MANY_TILES.block_m))


def multiply(rows: Rows, weight: BlockScaledTensor, bias: Tensor | None) -> Tensor:
    """Returns `rows @ weight.T + bias`, `[tokens, out]`."""
    from quant.kernels.base.portable_small_floats import compilable
    from quant.kernels.linear.portable_codes_gemm import codes_gemm_kernel, gemm_constants

    kernel = torch.library.wrap_triton(codes_gemm_kernel)
    x, (tokens, columns), features = rows.values, rows.values.shape, weight.shape[0]
    y = x.new_empty(tokens, features)
    codes, scale, second = compilable(weight.codes), compilable(weight.scale), weight.global_scale
    for tiles, tiles_m, is_on in ((FEW_TILES, rows.few_tiles, rows.few), (MANY_TILES, rows.many_tiles, 1 - rows.few)):
        # Pointers that the kernel does not read, where there is no second scale, no bias, and no part of a sum.
        kernel[-(-features // tiles.block_n) * is_on, tiles_m, 1](
            x, codes, scale, scale if second is None else second, x if bias is None else bias, y, y, y,
            tokens, features, columns, columns, codes.stride(0), scale.stride(0), codes.shape[1], tiles.splits,
            **gemm_constants(weight, bias, tiles),
        )  # fmt: skip
    return y


def dequantize(weight: BlockScaledTensor, dtype: torch.dtype) -> Tensor:
    """Returns `[rows, columns]` in `dtype`, by one launch."""
    from quant.kernels.base.portable_small_floats import compilable
    from quant.kernels.linear.portable_codes_gemm import dequantize_codes_kernel, dequantizing_launch

    (rows, columns), codes, scale = weight.shape, compilable(weight.codes), compilable(weight.scale)
    second = scale if weight.global_scale is None else weight.global_scale
    out = torch.empty(rows, columns, dtype=dtype, device=codes.device)
    grid, constants = dequantizing_launch(rows, columns, weight.format, weight.global_scale is not None)
    torch.library.wrap_triton(dequantize_codes_kernel)[grid](
        codes, scale, second, out, rows, columns, codes.stride(0), scale.stride(0), codes.shape[1], **constants
    )
    return out


def round_input(x: Tensor, format: Format, input_scale: Tensor | None) -> Tensor:
    """Returns `round_activation` of x `[..., in]`: to codes, and back, where a kernel knows the format."""
    from quant.kernels.rounding import portable_casts

    columns = x.shape[-1]
    if not portable_casts.takes(format, columns, x.dtype):
        return round_activation(x, format, input_scale)
    rows = x.reshape(-1, columns).contiguous()
    return dequantize(portable_casts.quantize_in_graph(rows, format, input_scale), x.dtype).reshape(x.shape)


@contextlib.contextmanager
def analysed_once() -> Iterator[None]:
    """Makes PyTorch analyse once a kind of launch which arguments it writes, while open.

    The answer follows from the kernel, its constants and the dtypes. PyTorch compiles the kernel halfway to find it, at
    every launch of a graph and in every pass over it: 50 ms each time, which are minutes for 30 layers.
    """
    from torch._higher_order_ops import triton_kernel_wrap

    # torch up to 2.11 has the second name. A version with neither is slow, and right.
    names = ("identify_accessed_tensors", "identify_mutated_tensors")
    name = next((name for name in names if hasattr(triton_kernel_wrap, name)), "")
    analyse, answers = getattr(triton_kernel_wrap, name, None), dict[Any, Any]()

    def remembered(kernel: Any, arguments: Mapping[str, Any], *descriptors: Any) -> Any:
        configs = [config.kwargs for config in getattr(kernel, "configs", ())]
        function = kernel
        while hasattr(function, "fn"):  # Triton wraps the Python function once or twice
            function = function.fn
        facts: list[Any] = [function, repr(configs), repr(descriptors)]
        for name, x in arguments.items():
            # The dtype of a tensor or of one of Inductor's buffers; None of a number that is known at run time.
            dtype = x.get_dtype() if hasattr(x, "get_dtype") else getattr(x, "dtype", None)
            facts.append((name, type(x), x if isinstance(x, bool | int | float | str | None) else dtype))
        key = tuple(facts)
        if key not in answers:
            answers[key] = analyse(kernel, arguments, *descriptors)  # type: ignore[misc]
        return answers[key]

    if analyse is None:
        yield
        return
    setattr(triton_kernel_wrap, name, remembered)
    try:
        yield
    finally:
        setattr(triton_kernel_wrap, name, analyse)


EXPORTED_ATTENTION = "quant::onnx_attention"


def _linear(*arguments: Any) -> Tensor:
    call = LinearCall(*arguments)
    x, weight, rounding = call.x, call.weight, call.rounding
    if (y := fp8_product(call)) is not None:
        return y
    if rounding is not None:
        x = fake_quantize(x, rounding, **{"global_scale" if rounding.global_scale else "scale": call.input_scale})
    return torch.nn.functional.linear(x, dequantize_in_graph(weight, x.dtype), call.bias)


def _conv(*arguments: Any, decode: Callable[..., Tensor] | None = None) -> Tensor:
    call = ConvCall(*arguments)
    x: Tensor = call.x
    if call.activation:
        x = fake_quantize(x.flatten(1), FORMATS[call.activation], scale=call.input_scale).view(x.shape)
    matrix = conv_matrix(call.codes, call.groups, call.transposed)
    weight = BlockScaledTensor(matrix, call.scale, FORMATS[call.weight_format], (matrix.shape[0], matrix.shape[1]))
    decode = decode or dequantize_in_graph
    dense = conv_parameter(decode(weight, x.dtype), call.codes.shape, call.groups, call.transposed)
    window = (call.stride, call.padding, call.dilation, call.transposed, call.output_padding, call.groups)
    return torch.convolution(x, dense, call.bias, *window)


def dequantize_in_graph(weight: BlockScaledTensor, dtype: torch.dtype) -> Tensor:
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


def _element_values(codes: Tensor, format: Format, columns: int) -> Tensor:
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
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool, scales: list[float], kind: str
) -> Tensor:
    """Computes a traced model's attention op: PyTorch's attention, or ours in FP8 if there are scales."""
    if not scales:
        return plain_attention(q, k, v, mask, scale, causal)
    operand_scales = torch.stack([torch.full((), value, dtype=torch.float32, device=q.device) for value in scales[:3]])
    pairs, fp8 = zip((q, k, v), operand_scales.unbind(), strict=True), FORMATS["fp8"]
    q8, k8, v8 = (round_to_e4m3(x, fp8, operand_scale)[0] for x, operand_scale in pairs)
    dtype = q.dtype if q.dtype in (torch.bfloat16, torch.float16) else torch.bfloat16
    return fp8_attention(q8, k8, v8, operand_scales, causal=causal, softmax_scale=scale, dtype=dtype).to(q.dtype)


BODIES: dict[str, Callable[..., Tensor]] = {LINEAR: _linear, CONV: _conv, EXPORTED_ATTENTION: exported_attention}
"""The bodies of quantized layers and of attention, by the names of their ops."""
INNER_BODIES: dict[str, Callable[..., Tensor]] = {"quant::fp8_attention": partial(run_fp8_attention, in_graph=True)}
"""The bodies of ops that other bodies call."""


def launches() -> dict[str, Callable[..., Tensor]]:
    """Returns the bodies of quantized layers in one graph for a GPU: launches of our kernels."""
    return {LINEAR: TritonLinear(), CONV: partial(_conv, decode=dequantize)}
