"""`quant::linear` in packages for GPUs is a launch of our Triton kernels, which lie compiled inside the package.

    x ─▶ rounded to its input format ─▶ codes_gemm_kernel, which decodes the weight while it multiplies ─▶ y
         two kernels, or PyTorch's ops where no kernel knows the format

Replaced by PyTorch's ops, a linear is some dozens of nodes, and Inductor traces, fuses and compiles them for every
shape of a layer anew. A launch is one node, and a kernel is compiled once for all layers of a shape. FP8 weights and
inputs are multiplied by PyTorch (`kernels/linear/rounded_products.py`): Inductor fuses that rounding with its producer.

The number of tokens is known only when a package runs, and tiles for few tokens are not those for many. A linear is
therefore two launches, and the grid of one of them is empty; nothing is launched for an empty grid.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn import functional

from quant.formats.format import Format
from quant.formats.tensor import BlockScaledTensor, round_activation
from quant.kernels.base.hardware import has_fp8_tensor_cores
from quant.kernels.linear.rounded_products import fp8_linear, takes_fp8
from quant.kernels.linear.ops import LinearCall
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
        self._last: tuple[tuple[torch.Tensor | Format | None, ...], Rows] | None = None

    def __call__(self, *arguments: Any) -> torch.Tensor:
        call = LinearCall(*arguments)
        x, weight, rounding = call.x, call.weight, call.rounding
        if (y := fp8_product(call)) is not None:
            return y
        if x.dtype not in (torch.float16, torch.bfloat16):
            # Tensor cores would round FP32 inputs to TF32, so PyTorch multiplies them.
            x = x if rounding is None else round_activation(x, rounding, call.input_scale)
            return functional.linear(x, dequantize(weight, x.dtype), call.bias)
        # A branch has variables of its own for the values of the graph around it, which it cannot name.
        key = (x, _value_of(x), rounding, call.input_scale)
        if self._last is None or any(a is not b for a, b in zip(self._last[0], key, strict=True)):
            self._last = key, Rows.of(x if rounding is None else round_input(x, rounding, call.input_scale))
        return multiply(self._last[1], weight, call.bias).reshape(*x.shape[:-1], weight.shape[0])


def fp8_product(call: LinearCall) -> torch.Tensor | None:
    """Returns a linear's result where tensor cores multiply FP8 codes of input and weight as they are; else None."""
    x, weight, rounding = call.x, call.weight, call.rounding
    if rounding and takes_fp8(weight.format, rounding, weight.shape, x.dtype) and has_fp8_tensor_cores(x):
        return fp8_linear(x, weight, call.bias, call.input_scale, rounding)
    return None


def _value_of(x: torch.Tensor) -> torch.Tensor:
    """Returns the tensor of the graph that a variable stands for: `x.mul_(2)` keeps the variable, and not its value."""
    value: torch.Tensor = x.from_functional() if isinstance(x, FunctionalTensor) else x
    return value


class Rows(NamedTuple):
    """An input `[tokens, in]`, contiguous and in 16 bit, and the grids of its launches; sizes may be symbolic.

    Attributes:
        values: the input.
        few: 1 where `FEW_TILES` are launched, 0 where `MANY_TILES` are.
        few_tiles, many_tiles: tiles of tokens.
    """

    values: torch.Tensor
    few: Any
    few_tiles: Any
    many_tiles: Any

    @classmethod
    def of(cls, x: torch.Tensor) -> Rows:
        values = x.reshape(-1, x.shape[-1]).contiguous()
        tokens = values.shape[0]
        # A number, for a comparison would fix its result in the graph.
        few = torch.sym_max(0, 1 - (tokens - 1) // FEW)
        return cls(values, few, -(-tokens // FEW_TILES.block_m), -(-tokens // MANY_TILES.block_m))


def multiply(rows: Rows, weight: BlockScaledTensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Returns `rows @ weight.T + bias`, `[tokens, out]`."""
    from quant.kernels.base.portable_small_floats import compilable
    from quant.kernels.linear.portable_codes_gemm import codes_gemm_kernel, gemm_constants

    kernel = torch.library.wrap_triton(codes_gemm_kernel)
    x, (tokens, columns), features = rows.values, rows.values.shape, weight.shape[0]
    y = x.new_empty(tokens, features)
    codes, scale, second = compilable(weight.codes), compilable(weight.scale), weight.global_scale
    for tiles, tiles_m, is_on in (
        (FEW_TILES, rows.few_tiles, rows.few),
        (MANY_TILES, rows.many_tiles, 1 - rows.few),
    ):
        # Pointers that the kernel does not read, where there is no second scale, no bias, and no part of a sum.
        kernel[-(-features // tiles.block_n) * is_on, tiles_m, 1](
            x, codes, scale, scale if second is None else second, x if bias is None else bias, y, y, y,
            tokens, features, columns, columns, codes.stride(0), scale.stride(0), codes.shape[1], tiles.splits,
            **gemm_constants(weight, bias, tiles),
        )  # fmt: skip
    return y


def dequantize(weight: BlockScaledTensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns `[rows, columns]` in `dtype`, by one launch."""
    from quant.kernels.base.portable_small_floats import compilable
    from quant.kernels.linear.portable_codes_gemm import dequantize_codes_kernel, dequantizing_launch

    (rows, columns), codes, scale = weight.shape, compilable(weight.codes), compilable(weight.scale)
    second = weight.global_scale
    out = torch.empty(rows, columns, dtype=dtype, device=codes.device)
    grid, constants = dequantizing_launch(rows, columns, weight.format, second is not None)
    torch.library.wrap_triton(dequantize_codes_kernel)[grid](
        codes, scale, scale if second is None else second, out, rows, columns, codes.stride(0), scale.stride(0),
        codes.shape[1], **constants,
    )  # fmt: skip
    return out


def round_input(x: torch.Tensor, format: Format, input_scale: torch.Tensor | None) -> torch.Tensor:
    """Returns `round_activation` of x `[..., in]`: to codes, and back, where a kernel knows the format."""
    from quant.kernels.rounding import portable_casts

    columns = x.shape[-1]
    if not portable_casts.takes(format, columns, x.dtype):
        return round_activation(x, format, input_scale)
    rows = x.reshape(-1, columns).contiguous()
    codes = portable_casts.quantize_in_graph(rows, format, input_scale)
    return dequantize(codes, x.dtype).reshape(x.shape)


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
        key = (_function_of(kernel), repr(configs), repr(descriptors))
        key += tuple((name, type(x), x if isinstance(x, _CONSTANT) else _dtype_of(x)) for name, x in arguments.items())
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


_CONSTANT = (bool, int, float, str, type(None))


def _function_of(kernel: Any) -> Any:
    """Returns the Python function of a kernel, which Triton wraps once or twice."""
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    return kernel


def _dtype_of(x: Any) -> Any:
    """Returns the dtype of a tensor or of one of Inductor's buffers; None of a number that is known at run time."""
    return x.get_dtype() if hasattr(x, "get_dtype") else getattr(x, "dtype", None)
