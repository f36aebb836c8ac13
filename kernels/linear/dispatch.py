"""This file chooses the kernel that multiplies by a quantized weight on a GPU, and checks its arguments first.

    check ──▶ layout ──▶ architecture ──▶ launch        all but the launch happens once for arguments of the same shapes

The custom op passes codes, scale and global scale apart; below it, one `BlockScaledTensor` carries them. The first call
with arguments of some shapes, dtypes and strides prepares a `Product`, one callable, and later calls look it up:

    FP8 by FP8 in the library        rounded_products.py   E4M3 with a scale a tensor or a row, or many tokens
    codes by codes                   rounded_products.py   tensor cores take both operands as they are stored
    16-bit rows by decoded codes     this file             x rounded to its activation format, if there is one
    dequantize, then multiply        oracle.py             FP32 inputs, or no Triton here

The launch for 16-bit rows is a look-up, in this order: the measurements of `quant tune` on this machine, the table
shipped for the GPU, the guess of `kernels/linear/tiles.py`. Nothing is measured during a call, so the first call is as
fast as the others once its kernel is compiled.
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear as dense_linear

from quant.formats.format import INPUT_FORMATS, WEIGHT_FORMATS, Format
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.base import hardware
from quant.kernels.base.launch import BoundedTable, check_tensors
from quant.kernels.base.weight_layout import as_computed, is_prepacked
from quant.kernels.linear import rounded_products, tiles
from quant.kernels.linear.oracle import ReferenceProduct
from quant.kernels.linear.rounded_products import aligned_rows, prepare_rounding
from quant.kernels.linear.tiles import Launch, Product

_FLOATS = (torch.float16, torch.bfloat16)
# Absent where PyTorch is built without CUDA. The public name is several calls of Python deep, at every call.
_current_device = getattr(torch._C, "_cuda_getDevice", None)

_products = BoundedTable[Product](1 << 12)
"""Products by the shapes, dtypes, strides and devices of their arguments. None of them holds a tensor."""


def linear_on_gpu(
    x: Tensor, codes: Tensor, scale: Tensor, global_scale: Tensor | None, bias: Tensor | None,
    input_scale: Tensor | None, weight_format: str, activation: str,
) -> Tensor:  # fmt: skip
    """Computes the op `quant::linear` (`quant_linear.py`) on a GPU; the weight is in either layout."""
    # ValueError names an argument on another device, strided, or of a wrong dtype or shape; nothing was launched then.
    # Every line up to the call of the product runs at each launch, and a small matmul takes a GPU no longer than them.
    index, columns = x.get_device(), x.shape[-1]
    if index >= 0 and index != _current_device():  # type: ignore[misc]
        with torch.cuda.device(index):
            return linear_on_gpu(x, codes, scale, global_scale, bias, input_scale, weight_format, activation)
    # TMA and vector loads need rows that start at multiples of 16 bytes.
    rows = x if x.dim() == 2 else x.reshape(-1, columns)
    if rows.stride(1) != 1 or rows.stride(0) < columns or (rows.data_ptr() | rows.stride(0) * rows.itemsize) % 16:
        rows = aligned_rows(rows)
    # The key holds everything that a product depends on except values: a product is compiled for dtypes, sizes, strides
    # and alignment. The edition makes products of earlier tuning tables unreachable.
    key = (
        weight_format, activation, x.dtype, rows.shape, rows.is_contiguous(), x.device, codes.dtype, codes.shape,
        codes.device, codes.is_contiguous(), codes.data_ptr() % 16, scale.dtype, scale.shape, scale.device,
        scale.is_contiguous(), None if global_scale is None else (global_scale.shape, global_scale.device),
        None if bias is None else (bias.shape, bias.dtype, bias.device, bias.is_contiguous()),
        None if input_scale is None else (input_scale.shape, input_scale.dtype, input_scale.device),
        tiles.edition,
    )  # fmt: skip
    # As `BlockScaledTensor(…)` does, which takes longer: the constructor of a frozen dataclass sets fields one by one.
    weight = object.__new__(BlockScaledTensor)
    fields = vars(weight)
    fields["codes"], fields["scale"], fields["global_scale"] = codes, scale, global_scale
    fields["format"], fields["shape"] = WEIGHT_FORMATS[weight_format], (codes.shape[0], columns)
    product = _products.get(key)
    if product is None:
        product = _prepare_product(rows, weight, bias, input_scale, INPUT_FORMATS[activation] if activation else None)
        # While a graph is captured, checks that wait for the GPU are skipped, so such a choice serves only this call.
        if not (rows.is_cuda and torch.cuda.is_current_stream_capturing()):
            _products[key] = product
    # The oracle takes x in its own shape: cuBLAS may sum in another order for two dimensions than for three.
    y = product(x if type(product) is ReferenceProduct else rows, weight, bias, input_scale)
    return y if y.dim() == x.dim() else y.view(*x.shape[:-1], y.shape[-1])


def _prepare_product(
    x: Tensor, weight: BlockScaledTensor, bias: Tensor | None, input_scale: Tensor | None, activation: Format | None
) -> Product:
    """Chooses how such arguments are multiplied, by checks, layout and architecture; x is `[tokens, in]`."""
    weight = as_computed(weight)
    check_operands(x, weight, bias)
    gpu = hardware.current(x.device.index or 0)
    is_fp8 = x.is_cuda and gpu.has_fp8 and rounded_products.takes_fp8(weight.format, activation, weight.shape, x.dtype)
    if is_fp8 and activation is not None:
        return rounded_products.prepare_fp8_linear(x, activation, input_scale)
    # Tensor cores take 16 bit; an FP32 input would lose most of its bits.
    if x.dtype not in _FLOATS or not hardware.has_triton() or weight.format.gguf:
        return ReferenceProduct(activation)
    if activation is not None:
        if gpu.has_wgmma and rounded_products.takes_prefill(weight, activation, len(x), x.dtype):
            return partial(rounded_products.prefill_linear, activation=activation)
        if rounded_products.multiplies_natively(x, weight, activation):
            return partial(rounded_products.multiply_codes, activation=activation)
    # The order matters: rounding checks the input scale, and its error should come before a kernel is prepared.
    rounding = None if activation is None else prepare_rounding(x, activation, input_scale)
    launch = prepare_launch(x, weight, bias, choose_launch(weight, x))

    def multiply(x: Tensor, weight: BlockScaledTensor, bias: Tensor | None, input_scale: Tensor | None) -> Tensor:
        return launch(x if rounding is None else rounding(x, input_scale), weight, bias)

    return multiply


def check_operands(x: Tensor, weight: BlockScaledTensor, bias: Tensor | None) -> None:
    """Raises ValueError, naming the argument, where a kernel could not take the arguments."""
    shape, format = weight.shape, weight.format
    codes_shape, scale_shape = format.codes_shape(shape), format.scale_shape(shape)
    dtype = None if is_prepacked(weight) else format.element.torch_dtype or torch.uint8
    if is_prepacked(weight):
        # A word of 32 bits holds eight codes, or the scales of four blocks of 16.
        codes_shape, scale_shape = (shape[0], shape[1] // 8), (shape[0], shape[1] // 64)
    where = f"linear_{format} with a weight of {list(shape)}"
    if format.global_scale and weight.global_scale is None:
        raise ValueError(f"{where}: global_scale is missing; {format} has one per matrix")
    check_tensors(where, x, {
        "codes": (weight.codes, codes_shape, dtype), "scale": (weight.scale, scale_shape, None),
        "global_scale": (weight.global_scale, (), None), "bias": (bias, shape[:1], None),
    })  # fmt: skip
    if bias is not None and not bias.dtype.is_floating_point:
        raise ValueError(f"{where}: bias is {bias.dtype}, expected the dtype of x, {x.dtype}")


def choose_launch(weight: BlockScaledTensor, x: Tensor) -> tiles.Choice:
    """Returns how to multiply x `[tokens, in]`, in 16 bit with aligned rows, by `weight`."""
    prepacked = is_prepacked(weight)
    # Hopper's decoder makes only BF16: a code in FP16 would need other shifts.
    if prepacked and x.dtype is not torch.bfloat16:
        return tiles.DENSE
    gpu, shape = hardware.current(x.device.index or 0), (weight.shape[0], weight.shape[1])
    measured = tiles.look_up(gpu, weight.format, x.shape[0], shape, prepacked)
    choice = measured or tiles.guess(weight.format, x.shape[0], shape, gpu, prepacked)
    aligned = x.dtype is torch.bfloat16 and weight.codes.data_ptr() % 16 == 0
    # Hopper's kernel for many tokens would read codes in the order of a checkpoint by TMA.
    if isinstance(choice, tiles.PrefillTiles) and not prepacked and not aligned:
        return tiles.guess(weight.format, x.shape[0], shape, gpu, False, stored=False)
    return choice


def multiply_with(x: Tensor, weight: BlockScaledTensor, bias: Tensor | None, choice: tiles.Choice) -> Tensor:
    """Returns `x @ weight.T + bias` by `choice`; x `[tokens, in]`, FP16 or BF16, rows contiguous and aligned."""
    return prepare_launch(x, weight, bias, choice)(x, weight, bias)


def prepare_launch(x: Tensor, weight: BlockScaledTensor, bias: Tensor | None, choice: tiles.Choice) -> Launch:
    """Returns `multiply_with` for such arguments, with everything decided that does not depend on values."""
    if isinstance(choice, tiles.Tiles):
        from quant.kernels.linear import portable_codes_gemm

        return portable_codes_gemm.prepare_codes_gemm(x, weight, bias, choice)
    if isinstance(choice, tiles.GluonTiles):
        from quant.kernels.linear import sm90_nvfp4_gemm_few

        return sm90_nvfp4_gemm_few.prepare_gemm_few(x, weight, bias, choice)
    if isinstance(choice, tiles.PrefillTiles):
        from quant.kernels.linear import sm90_codes_gemm_many

        return sm90_codes_gemm_many.prepare_gemm_many(x, weight, bias, choice)
    return lambda x, w, bias: dense_linear(x, dequantize(w, x.dtype), None if bias is None else bias.to(x.dtype))


def dequantize(weight: BlockScaledTensor, dtype: torch.dtype) -> Tensor:
    """Returns `[out, in]` of `weight`, on a GPU, in `dtype`: FP16, BF16 or FP32."""
    weight = as_computed(weight)
    if is_prepacked(weight):
        from quant.kernels.linear import sm90_decode

        return sm90_decode.dequantize_prepacked(weight, dtype)
    from quant.kernels.linear import portable_codes_gemm

    return portable_codes_gemm.dequantize_codes(weight, dtype)
