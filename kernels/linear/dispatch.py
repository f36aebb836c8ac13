"""This file chooses the kernel that multiplies by a quantized weight on a GPU, and checks its arguments first.

    check ──▶ layout ──▶ architecture ──▶ launch        all but the launch happens once for arguments of the same shapes

The custom op passes codes, scale and global scale apart; below it, one `BlockScaledTensor` carries them. The first call
with arguments of some shapes, dtypes and strides prepares a `Product`, one callable, and later calls look it up:

    FP8 by FP8 in the library          fp8_gemm.py        E4M3 with a scale a tensor or a row, or many tokens
    codes by codes                     native_gemm.py     tensor cores take both operands as they are stored
    16-bit rows by decoded codes       this file          x rounded to its activation format, if there is one
    dequantize, then multiply          oracle.py          FP32 inputs, or no Triton here

The launch for 16-bit rows is a look-up, in this order: the measurements of `quant tune` on this machine, the table
shipped for the GPU, the guess of `kernels/linear/tiles.py`. Nothing is measured during a call, so the first call is as
fast as the others once its kernel is compiled.
"""

from __future__ import annotations

import warnings
from functools import partial

import torch
from torch.nn.functional import linear as dense_linear

from quant.formats.format import FORMATS, INPUT_FORMATS, Format
from quant.formats.tensor import BlockScaledTensor, fake_quantize, quantize
from quant.kernels.base import hardware
from quant.kernels.base.launch import BoundedTable
from quant.kernels.base.weight_layout import as_computed, is_prepacked
from quant.kernels.linear import rounded_products, tiles
from quant.kernels.linear import tiles as launch_table
from quant.kernels.linear.oracle import ReferenceProduct
from quant.kernels.linear.rounded_products import aligned_rows, prepare_rounding
from quant.kernels.linear.tiles import Launch, Product

# Tensor cores multiply codes by codes here: both operands as their formats store them, without dequantizing.
#
#     weight          activation        tensor cores                kernel
#     fp8_block       fp8_group         FP8 (Ada, Hopper, …)        kernels/linear/portable_block_scaled_gemm.py
#     nvfp4, mxfp4,   the same codes    block scales (Blackwell)    kernels/linear/portable_block_scaled_gemm.py
#     mxfp8
#
# A kernel that a GPU has never run is first compared with float64, once in a process. One that is wrong there is not
# used, with a warning: the weight is then dequantized, as everywhere else.


_GROUPS = FORMATS["fp8_group"]  # of activations: 1 × 128, the counterpart of weights in 128 × 128
_verdicts: dict[tuple[str, str, int], bool] = {}
"""By format of the weight, format of the activation and GPU: whether a first product was right."""


def multiplies_natively(x: torch.Tensor, weight: BlockScaledTensor, activation: Format) -> bool:
    """Returns whether tensor cores of this GPU take both sides as they are stored, and got a first product right."""
    from quant.kernels.linear import portable_block_scaled_gemm
    from quant.kernels.rounding import portable_casts

    format, columns = weight.format, weight.shape[1]
    if is_prepacked(weight) or not format.block[1] or columns % format.block[1]:
        return False
    index = x.device.index or 0
    gpu = hardware.current(index)
    if format.has_square_blocks:
        # FP8 squares of 128 × 128 meet groups of 128 inputs, so every product of blocks has one factor.
        # With few tokens reading W takes all the time, and 16-bit products are no slower.
        is_able = gpu.has_fp8 and activation is _GROUPS and len(x) > tiles.FEW
    else:
        is_able = gpu.has_block_scales and portable_block_scaled_gemm.takes(format, activation)
    if not is_able or columns > portable_casts.MAX_COLUMNS:
        return False
    case = (format.name, activation.name, index)
    if case not in _verdicts:
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return False  # a check waits for its result, which a capture cannot
        _verdicts[case] = _multiplies_right(format, activation, index)
    return _verdicts[case]


def _multiplies_right(format: Format, activation: Format, index: int) -> bool:
    """Multiplies two random matrices on GPU `index` and compares with float64; warns where they differ."""
    # 130 rows and 200 outputs are not multiples of a tile, so the masks of the tails are tested too.
    generator = torch.Generator().manual_seed(0)
    x, w = (
        torch.randn(size, 512, generator=generator, dtype=torch.float32, device="cpu").to(f"cuda:{index}")
        for size in (130, 200)
    )
    weight = quantize(w, format)
    y = multiply_codes(x.bfloat16(), weight, None, None, activation=activation)
    rounded = fake_quantize(x.bfloat16().float(), activation)
    exact = rounded.double() @ weight.dequantize(torch.float64).T
    # 2^-7 allows for one rounding of y to BF16 and for sums in FP32; a wrong layout of scales errs by about 1.
    error = float((y.double() - exact).norm() / exact.norm())
    if error < 2**-7:
        return True
    warnings.warn(
        f"the kernel for {format} by {activation} is wrong on this GPU (error {error:.1e}) and is not used: weights "
        "are dequantized instead; please report the GPU, its driver and the version of Triton",
        stacklevel=2,
    )
    return False


def multiply_codes(
    x: torch.Tensor,
    weight: BlockScaledTensor,
    bias: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    *,
    activation: Format,
) -> torch.Tensor:
    """Returns `[tokens, out]`: x `[tokens, in]` is rounded to codes, then codes are multiplied by codes."""
    from quant.kernels.linear import portable_block_scaled_gemm
    from quant.kernels.linear import portable_block_scaled_gemm as fp8_block_gemm
    from quant.kernels.rounding import portable_casts

    if weight.format.has_square_blocks:
        return fp8_block_gemm.fp8_block_gemm(portable_casts.quantize(x, activation), weight, bias, x.dtype)
    codes = portable_casts.quantize(x, activation, global_scale=input_scale if activation.global_scale else None)
    return portable_block_scaled_gemm.block_scaled_gemm(codes, weight, bias, x.dtype)


_FLOATS = (torch.float16, torch.bfloat16)
# Absent where PyTorch is built without CUDA. The public name is several calls of Python deep, at every call.
_current_device = getattr(torch._C, "_cuda_getDevice", None)

_products = BoundedTable[Product](1 << 12)
"""Products by the shapes, dtypes, strides and devices of their arguments. None of them holds a tensor."""


def linear_on_gpu(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    weight_format: str,
    activation: str,
) -> torch.Tensor:
    """Computes the op `quant::linear` (`kernels/linear/quant_linear.py`) on a GPU; the weight is in either layout.

    Raises:
        ValueError: an argument is on another device, strided, or of a wrong dtype or shape; nothing was launched.
    """
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
        launch_table.edition,
    )  # fmt: skip
    # As `BlockScaledTensor(…)` does, which takes longer: the constructor of a frozen dataclass sets fields one by one.
    weight = object.__new__(BlockScaledTensor)
    fields = vars(weight)
    fields["codes"], fields["scale"], fields["global_scale"] = codes, scale, global_scale
    fields["format"], fields["shape"] = FORMATS[weight_format], (codes.shape[0], columns)
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
    x: torch.Tensor,
    weight: BlockScaledTensor,
    bias: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    activation: Format | None,
) -> Product:
    """Chooses how such arguments are multiplied, by checks, layout and architecture; x is `[tokens, in]`."""
    weight = as_computed(weight)
    check_operands(x, weight, bias)
    gpu = hardware.current(x.device.index or 0)
    is_fp8 = x.is_cuda and gpu.has_fp8 and rounded_products.takes_fp8(weight.format, activation, weight.shape, x.dtype)
    if is_fp8 and activation is not None:
        return rounded_products.prepare_fp8_linear(x, activation, input_scale)
    # Tensor cores take 16 bit; an FP32 input would lose most of its bits.
    if x.dtype not in _FLOATS or not hardware.has_triton():
        return ReferenceProduct(activation)
    if activation is not None:
        if gpu.has_wgmma and rounded_products.takes_prefill(weight, activation, len(x), x.dtype):
            return partial(rounded_products.prefill_linear, activation=activation)
        if multiplies_natively(x, weight, activation):
            return partial(multiply_codes, activation=activation)
    return _prepare_gemm(x, weight, bias, input_scale, activation)


def check_operands(x: torch.Tensor, weight: BlockScaledTensor, bias: torch.Tensor | None) -> None:
    """Raises ValueError, naming the argument, where a kernel could not take the arguments."""
    shape, format = weight.shape, weight.format
    codes_shape, scale_shape = format.codes_shape(shape), format.scale_shape(shape)
    if is_prepacked(weight):
        # A word of 32 bits holds eight codes, or the scales of four blocks of 16.
        codes_shape, scale_shape = (shape[0], shape[1] // 8), (shape[0], shape[1] // 64)
    expected: dict[str, tuple[torch.Tensor | None, tuple[int, ...]]] = {
        "codes": (weight.codes, codes_shape),
        "scale": (weight.scale, scale_shape),
        "global_scale": (weight.global_scale, ()),
        "bias": (bias, (shape[0],)),
    }
    where = f"linear_{format} with a weight of {list(shape)}"
    for name, (tensor, expected_shape) in expected.items():
        if tensor is None:
            if name == "global_scale" and format.global_scale:
                raise ValueError(f"{where}: global_scale is missing; {format} has one per matrix")
            continue
        if tuple(tensor.shape) != expected_shape:
            raise ValueError(f"{where}: {name} has shape {list(tensor.shape)}, expected {list(expected_shape)}")
        if tensor.device != x.device:
            raise ValueError(f"{where}: {name} is on {tensor.device}, x on {x.device}")
        if not tensor.is_contiguous():
            raise ValueError(f"{where}: {name} is not contiguous (strides {tensor.stride()}); call .contiguous() once")
    if not is_prepacked(weight):
        dtype = format.element.torch_dtype or torch.uint8
        if weight.codes.dtype is not dtype:
            raise ValueError(f"{where}: codes are {weight.codes.dtype}, expected {dtype}")
    if bias is not None and not bias.dtype.is_floating_point:
        raise ValueError(f"{where}: bias is {bias.dtype}, expected the dtype of x, {x.dtype}")


def _prepare_gemm(
    x: torch.Tensor,
    weight: BlockScaledTensor,
    bias: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    activation: Format | None,
) -> Product:
    """Prepares a product in which x is rounded to its format, if any, and a kernel for 16-bit rows multiplies it."""
    # The order matters: rounding checks the input scale, and its error should come before a kernel is prepared.
    rounding = None if activation is None else prepare_rounding(x, activation, input_scale)
    choice = choose_for_numbers(weight, x)
    launch, launch_for_any_code = prepare_launch(x, weight, bias, choice), None
    if _reads_stored_codes(choice, weight):
        from quant.kernels.linear.sm90_decode import numbers_only

        launch_for_any_code = prepare_launch(x, weight, bias, _choose_without_tma(weight, x))

    def multiply(
        x: torch.Tensor, weight: BlockScaledTensor, bias: torch.Tensor | None, input_scale: torch.Tensor | None
    ) -> torch.Tensor:
        if rounding is not None:
            x = rounding(x, input_scale)
        # Whether codes are NaN is a property of each weight, so it is asked at each call; the answer is kept.
        if launch_for_any_code is not None and not numbers_only(weight):
            return launch_for_any_code(x, weight, bias)
        return launch(x, weight, bias)

    return multiply


def choose_launch(weight: BlockScaledTensor, x: torch.Tensor) -> tiles.Choice:
    """Returns how to multiply x `[tokens, in]`, in 16 bit with aligned rows, by `weight`."""
    choice = choose_for_numbers(weight, x)
    if _reads_stored_codes(choice, weight):
        from quant.kernels.linear.sm90_decode import numbers_only

        return choice if numbers_only(weight) else _choose_without_tma(weight, x)
    return choice


def choose_for_numbers(weight: BlockScaledTensor, x: torch.Tensor) -> tiles.Choice:
    """Returns `choose_launch`, for a weight whose codes are all numbers."""
    prepacked = is_prepacked(weight)
    # Hopper's decoder makes only BF16: a code in FP16 would need other shifts.
    if prepacked and x.dtype is not torch.bfloat16:
        return tiles.DENSE
    gpu, shape = hardware.current(x.device.index or 0), (weight.shape[0], weight.shape[1])
    measured = launch_table.look_up(gpu, weight.format, x.shape[0], shape, prepacked)
    choice = measured or tiles.guess(weight.format, x.shape[0], shape, gpu, prepacked)
    aligned = x.dtype is torch.bfloat16 and weight.codes.data_ptr() % 16 == 0
    if _reads_stored_codes(choice, weight) and not aligned:
        return _choose_without_tma(weight, x)
    return choice


def _choose_without_tma(weight: BlockScaledTensor, x: torch.Tensor) -> tiles.Choice:
    """Returns `choose_launch`, for codes of a checkpoint that Hopper's kernel for many tokens does not take."""
    gpu, shape = hardware.current(x.device.index or 0), (weight.shape[0], weight.shape[1])
    return tiles.guess(weight.format, x.shape[0], shape, gpu, False, stored=False)


def _reads_stored_codes(choice: tiles.Choice, weight: BlockScaledTensor) -> bool:
    """Returns whether Hopper's kernel for many tokens reads codes in the order of a checkpoint."""
    return isinstance(choice, tiles.PrefillTiles) and not is_prepacked(weight)


def multiply_with(
    x: torch.Tensor, weight: BlockScaledTensor, bias: torch.Tensor | None, choice: tiles.Choice
) -> torch.Tensor:
    """Returns `x @ weight.T + bias` by `choice`; x `[tokens, in]`, FP16 or BF16, rows contiguous and aligned."""
    return prepare_launch(x, weight, bias, choice)(x, weight, bias)


def prepare_launch(
    x: torch.Tensor, weight: BlockScaledTensor, bias: torch.Tensor | None, choice: tiles.Choice
) -> Launch:
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
    return _multiply_dequantized


def _multiply_dequantized(x: torch.Tensor, weight: BlockScaledTensor, bias: torch.Tensor | None) -> torch.Tensor:
    return dense_linear(x, dequantize(weight, x.dtype), None if bias is None else bias.to(x.dtype))


def can_dequantize(dtype: torch.dtype) -> bool:
    """Returns whether `dequantize` gives this dtype here."""
    return dtype in (*_FLOATS, torch.float32) and hardware.has_triton()


def dequantize(weight: BlockScaledTensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns `[out, in]` of `weight`, on a GPU, in `dtype`: FP16, BF16 or FP32."""
    weight = as_computed(weight)
    if is_prepacked(weight):
        from quant.kernels.linear import sm90_decode

        return sm90_decode.dequantize_prepacked(weight, dtype)
    from quant.kernels.linear import portable_codes_gemm

    return portable_codes_gemm.dequantize_codes(weight, dtype)
