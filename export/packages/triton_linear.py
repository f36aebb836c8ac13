"""`quant::linear` in packages for GPUs is a launch of our Triton kernels, which lie compiled inside the package.

    x ─▶ rounded to its input format ─▶ codes_gemm_kernel, which decodes the weight while it multiplies ─▶ y
         two kernels, or PyTorch's ops where no kernel knows the format

Replaced by PyTorch's ops, a linear is some dozens of nodes, and Inductor traces, fuses and compiles them for every
shape of a layer anew. A launch is one node, and a kernel is compiled once for all layers of a shape. FP8 weights and
inputs are multiplied by PyTorch (`kernels/linear/fp8_gemm.py`): Inductor fuses that rounding with its producer.

The number of tokens is known only when a package runs, and tiles for few tokens are not those for many. A linear is
therefore two launches, and the grid of one of them is empty; nothing is launched for an empty grid.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn import functional

from quant.formats.format import Format
from quant.formats.tensor import BlockScaledTensor, round_activation
from quant.kernels.hardware import has_fp8_tensor_cores
from quant.kernels.linear.fp8_gemm import fp8_linear, takes_fp8
from quant.kernels.linear.ops import LinearCall
from quant.kernels.matmul_tiles import Tiles

FEW = 32
"""Up to this many tokens the tiles for few tokens are launched."""
MANY_TILES = Tiles(64, 128, 64, warps=4, stages=4)


class TritonLinear:
    """The body of `quant::linear` in a package for a GPU, for all linears of one graph.

    It remembers the last input that it rounded: neighbours such as q, k and v share it, and Inductor, which merges
    equal ops, merges no launches.
    """

    def __init__(self) -> None:
        self._last: tuple[torch.Tensor, Format, torch.Tensor | None, torch.Tensor] | None = None

    def __call__(self, *arguments: Any) -> torch.Tensor:
        call = LinearCall(*arguments)
        x, weight, rounding = call.x, call.weight, call.rounding
        if rounding and takes_fp8(weight.format, rounding, weight.shape, x.dtype) and has_fp8_tensor_cores(x):
            return fp8_linear(x, weight, call.bias, call.input_scale, rounding)
        if rounding is not None:
            x = self._round(x, rounding, call.input_scale)
        if x.dtype not in (torch.float16, torch.bfloat16):
            # Tensor cores would round FP32 inputs to TF32, so that PyTorch multiplies them.
            return functional.linear(x, dequantize(weight, x.dtype), call.bias)
        y = multiply(x.reshape(-1, x.shape[-1]), weight, call.bias)
        return y.reshape(*x.shape[:-1], weight.shape[0])

    def _round(self, x: torch.Tensor, format: Format, scale: torch.Tensor | None) -> torch.Tensor:
        last = self._last
        if last is None or not (last[0] is x and last[1] is format and last[2] is scale):
            last = self._last = (x, format, scale, round_input(x, format, scale))
        return last[3]


def multiply(rows: torch.Tensor, weight: BlockScaledTensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Returns `rows @ weight.T + bias`, `[tokens, out]`; rows `[tokens, in]` in 16 bit."""
    from quant.kernels.portable.codes_gemm import codes_gemm_kernel, layout

    kernel, rows = torch.library.wrap_triton(codes_gemm_kernel), rows.contiguous()
    (tokens, columns), features = rows.shape, weight.shape[0]
    y = rows.new_empty(tokens, features)
    # 1 where there are few tokens, else 0: a number, for a comparison would fix its result in the graph.
    is_few = torch.sym_max(0, torch.sym_min(1, FEW + 1 - tokens))
    codes, scale, second = weight.codes, weight.scale, weight.global_scale
    for tiles, is_on in ((few_tiles(features), is_few), (MANY_TILES, 1 - is_few)):
        tiles_m = (tokens + tiles.block_m - 1) // tiles.block_m
        # Pointers that the kernel does not read, where there is no second scale, no bias, and no part of a sum.
        kernel[-(-features // tiles.block_n) * is_on, tiles_m, 1](
            rows, codes, scale, scale if second is None else second, rows if bias is None else bias, y, y, y,
            tokens, features, columns, columns, codes.stride(0), scale.stride(0), codes.shape[1], 1,
            **layout(weight.format), has_global=second is not None, has_bias=bias is not None, split=False, swap=False,
            block_m=tiles.block_m, block_n=tiles.block_n, block_k=tiles.block_k,
            num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
    return y


def few_tiles(features: int) -> Tiles:
    """Returns tiles for few tokens, narrow enough that a weight of few rows keeps most SMs at work."""
    return Tiles(16, next((size for size in (64, 32) if features // size >= 128), 16), 128, warps=4, stages=4)


def dequantize(weight: BlockScaledTensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns `[rows, columns]` in `dtype`, by one launch."""
    from quant.kernels.portable.codes_gemm import dequantize_codes_kernel, layout

    (rows, columns), codes, scale = weight.shape, weight.codes, weight.scale
    second, block_n, block_k = weight.global_scale, 16, 256 if weight.format.block[1] < 128 else 128
    out = torch.empty(rows, columns, dtype=dtype, device=codes.device)
    torch.library.wrap_triton(dequantize_codes_kernel)[-(-columns // block_k), (rows + block_n - 1) // block_n](
        codes, scale, scale if second is None else second, out, rows, columns, codes.stride(0), scale.stride(0),
        codes.shape[1], **layout(weight.format), has_global=second is not None, block_n=block_n, block_k=block_k,
        num_warps=4,
    )  # fmt: skip
    return out


def round_input(x: torch.Tensor, format: Format, input_scale: torch.Tensor | None) -> torch.Tensor:
    """Returns `round_activation` of x `[..., in]`: to codes, and back, where a kernel knows the format."""
    from quant.kernels.portable import casts

    columns = x.shape[-1]
    if not casts.takes(format, columns, x.dtype):
        return round_activation(x, format, input_scale)
    rows = x.reshape(-1, columns).contiguous()
    codes = casts.quantize_in_graph(rows, format, input_scale)
    return dequantize(codes, x.dtype).reshape(x.shape)


@contextlib.contextmanager
def analysed_once() -> Iterator[None]:
    """Makes PyTorch analyse once a kind of launch which arguments it writes, while open.

    The answer follows from the kernel, its constants and the dtypes. PyTorch compiles the kernel halfway to find it, at
    every launch of a graph and in every pass over it: 50 ms each time, which are minutes for 30 layers.
    """
    from torch._higher_order_ops import triton_kernel_wrap

    # The second name is that of torch 2.11 and before. A version with neither is slow, and right.
    names = ("identify_accessed_tensors", "identify_mutated_tensors")
    name = next((name for name in names if hasattr(triton_kernel_wrap, name)), "")
    analyse, answers = getattr(triton_kernel_wrap, name, None), dict[Any, Any]()

    def remembered(kernel: Any, arguments: Mapping[str, Any], *rest: Any) -> Any:
        key = (_function_of(kernel), repr([config.kwargs for config in getattr(kernel, "configs", ())]), repr(rest))
        key += tuple((name, type(x), x if isinstance(x, _CONSTANT) else _dtype_of(x)) for name, x in arguments.items())
        if key not in answers:
            answers[key] = analyse(kernel, arguments, *rest)  # type: ignore[misc]
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
