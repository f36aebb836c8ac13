"""This file chooses the kernel that multiplies by a quantized weight on a GPU, and checks its arguments first.

    check ──▶ layout ──▶ architecture ──▶ launch        all but the launch happens once for arguments of the same shapes

The input is rounded to the activation format, if there is one, and a kernel is chosen by format, tokens and shape.
Where tensor cores take both operands as they are stored, fp8_gemm.py, fp8_block_gemm.py or block_scaled_gemm.py
multiplies instead.

The choice is a look-up, in this order: the measurements of `quant tune` on this machine, the table shipped for the GPU,
the guess of `kernels/tiles.py`. Nothing is measured during a call, so the first call is as fast as the others once its
kernel is compiled.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear as dense_linear

from quant.formats.format import FORMATS, Format
from quant.formats.tensor import BlockScaledTensor, fake_quantize, quantize, round_activation
from quant.kernels import hardware, tiles
from quant.kernels.layout import as_computed, is_prepacked
from quant.kernels.linear import fp8_gemm, oracle, tables

_FLOATS = (torch.float16, torch.bfloat16)
# Absent where PyTorch is built without CUDA. The public name is several calls of Python deep, at every call.
_current_device = getattr(torch._C, "_cuda_getDevice", None)


Rounding = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
Product = Callable[[torch.Tensor, BlockScaledTensor, torch.Tensor | None, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Way:
    """How arguments of certain shapes, dtypes and strides are multiplied.

    Attributes:
        format: the format of the codes as they are stored.
        shape: of the weight, `[out, in]`.
        launch: the kernel for 16-bit rows; None where `product` does it all.
        rounds: rounds x to the activation format before the launch, given its input scale.
        plain: the launch for a weight of which `takes` is False.
        takes: whether `launch` takes the codes of a weight, where that depends on them; None where it does not.
        product: of (x `[tokens, in]`, weight, bias, input scale), in place of a launch.
        oracle: whether only the oracle can do it: FP32, or no Triton here.
    """

    format: Format
    shape: tuple[int, int]
    launch: tiles.Launch | None = None
    rounds: Rounding | None = None
    plain: tiles.Launch | None = None
    takes: Callable[[BlockScaledTensor], bool] | None = None
    product: Product | None = None
    oracle: bool = False


_ways: dict[Any, Way] = {}
_MOST_WAYS = 1 << 12


def linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    weight_format: str,
    activation: str,
) -> torch.Tensor:
    """The op `quant::linear` (`kernels/linear/ops.py`) on a GPU; the weight is in either layout.

    Raises:
        ValueError: an argument is on another device, strided, or of a wrong dtype or shape; nothing was launched.
    """
    index, columns = x.get_device(), x.shape[-1]
    if index >= 0 and index != _current_device():  # type: ignore[misc]
        with torch.cuda.device(index):
            return linear(x, codes, scale, global_scale, bias, input_scale, weight_format, activation)
    rows = x if x.dim() == 2 else x.reshape(-1, columns)
    if rows.stride(1) != 1 or rows.stride(0) < columns or (rows.data_ptr() | rows.stride(0) * rows.itemsize) % 16:
        rows = aligned_rows(rows)
    key = (
        weight_format, activation, x.dtype, rows.shape, rows.is_contiguous(), x.device, codes.dtype, codes.shape,
        codes.device, codes.is_contiguous(), codes.data_ptr() % 16, scale.dtype, scale.shape, scale.device,
        scale.is_contiguous(), None if global_scale is None else (global_scale.shape, global_scale.device),
        None if bias is None else (bias.shape, bias.dtype, bias.device, bias.is_contiguous()),
        None if input_scale is None else (input_scale.shape, input_scale.dtype, input_scale.device), tables.edition,
    )  # fmt: skip
    way = _ways.get(key)
    if way is None:
        way = _decide(rows, codes, scale, global_scale, bias, input_scale, weight_format, activation)
        if not (rows.is_cuda and torch.cuda.is_current_stream_capturing()):
            if len(_ways) >= _MOST_WAYS:
                _ways.clear()
            _ways[key] = way
    if way.oracle:
        return oracle.linear(x, codes, scale, global_scale, bias, input_scale, weight_format, activation)
    weight = BlockScaledTensor(codes, scale, way.format, way.shape, global_scale)
    if way.product is not None:
        y = way.product(rows, weight, bias, input_scale)
    else:
        if way.rounds is not None:
            rows = way.rounds(rows, input_scale)
        launch = way.launch
        if way.takes is not None and not way.takes(weight):
            launch = way.plain
        y = launch(rows, weight, bias)  # type: ignore[misc]
    return y if x.dim() == 2 else y.view(*x.shape[:-1], way.shape[0])


def _decide(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    weight_format: str,
    activation: str,
) -> Way:
    """The way for arguments like these."""
    shape, tokens = (codes.shape[0], x.shape[1]), len(x)
    weight = as_computed(BlockScaledTensor(codes, scale, FORMATS[weight_format], shape, global_scale))
    check(x, weight, bias)
    gpu, given = hardware.current(x.device.index or 0), FORMATS[activation] if activation else None
    if x.is_cuda and gpu.has_fp8 and fp8_gemm.takes(weight.format, activation, shape, x.dtype):
        return Way(weight.format, shape, product=fp8_gemm.prepare(x, FORMATS[activation], input_scale))
    if x.dtype not in _FLOATS or not hardware.has_triton():
        return Way(weight.format, shape, oracle=True)
    if takes_prefill(weight, activation, tokens, x.dtype) and gpu.has_wgmma:
        return Way(weight.format, shape, product=partial(prefill_linear, activation=activation))
    if activation and _is_native(weight, activation, tokens, x.device):
        return Way(weight.format, shape, product=_native_linear)
    rounds = None if given is None else prepare_rounding(x, given, input_scale)
    choice = _best(weight, x)
    launch = prepare(x, weight, bias, choice)
    if not _is_stored(choice, weight):
        return Way(weight.format, shape, launch, rounds)
    from quant.kernels.hopper.sm90_decode_codes import numbers_only

    return Way(weight.format, shape, launch, rounds, prepare(x, weight, bias, _without_tma(weight, x)), numbers_only)


def check(x: torch.Tensor, weight: BlockScaledTensor, bias: torch.Tensor | None) -> None:
    """Raises ValueError, naming the argument, where a kernel could not take the arguments."""
    shape, format = weight.shape, weight.format
    codes_shape, scale_shape = format.codes_shape(shape), format.scale_shape(shape)
    if is_prepacked(weight):
        codes_shape, scale_shape = (shape[0], shape[1] // 8), (shape[0], shape[1] // 64)
    expected: dict[str, tuple[torch.Tensor | None, tuple[int, ...]]] = {
        "codes": (weight.codes, codes_shape),
        "scale": (weight.scale, scale_shape),
        "global_scale": (weight.global_scale, ()),
        "bias": (bias, (shape[0],)),
    }
    what = f"linear_{format} with a weight of {list(shape)}"
    for name, (tensor, wanted) in expected.items():
        if tensor is None:
            if name == "global_scale" and format.global_scale:
                raise ValueError(f"{what}: global_scale is missing; {format} has one per matrix")
            continue
        if tuple(tensor.shape) != wanted:
            raise ValueError(f"{what}: {name} has shape {list(tensor.shape)}, expected {list(wanted)}")
        if tensor.device != x.device:
            raise ValueError(f"{what}: {name} is on {tensor.device}, x on {x.device}")
        if not tensor.is_contiguous():
            raise ValueError(f"{what}: {name} is not contiguous (strides {tensor.stride()}); call .contiguous() once")
    if not is_prepacked(weight):
        dtype = format.element.torch_dtype or torch.uint8
        if weight.codes.dtype is not dtype:
            raise ValueError(f"{what}: codes are {weight.codes.dtype}, expected {dtype}")
    if bias is not None and not bias.dtype.is_floating_point:
        raise ValueError(f"{what}: bias is {bias.dtype}, expected the dtype of x, {x.dtype}")


def choose(weight: BlockScaledTensor, x: torch.Tensor) -> tiles.Choice:
    """How to multiply x `[tokens, in]`, in 16 bit with aligned rows, by `weight`."""
    choice = _best(weight, x)
    if _is_stored(choice, weight):
        from quant.kernels.hopper.sm90_decode_codes import numbers_only

        return choice if numbers_only(weight) else _without_tma(weight, x)
    return choice


def _best(weight: BlockScaledTensor, x: torch.Tensor) -> tiles.Choice:
    """`choose`, for a weight whose codes are all numbers."""
    prepacked = is_prepacked(weight)
    if prepacked and x.dtype is not torch.bfloat16:
        return tiles.DENSE
    gpu, shape = hardware.current(x.device.index or 0), (weight.shape[0], weight.shape[1])
    found = tables.look_up(gpu, weight.format, x.shape[0], shape, prepacked)
    choice = found or tiles.guess(weight.format, x.shape[0], shape, gpu, prepacked)
    aligned = x.dtype is torch.bfloat16 and weight.codes.data_ptr() % 16 == 0
    if _is_stored(choice, weight) and not aligned:
        return _without_tma(weight, x)
    return choice


def _without_tma(weight: BlockScaledTensor, x: torch.Tensor) -> tiles.Choice:
    """`choose`, for codes of a checkpoint that Hopper's kernel for many tokens does not take."""
    gpu, shape = hardware.current(x.device.index or 0), (weight.shape[0], weight.shape[1])
    return tiles.guess(weight.format, x.shape[0], shape, gpu, False, stored=False)


def _is_stored(choice: tiles.Choice, weight: BlockScaledTensor) -> bool:
    """Whether Hopper's kernel for many tokens reads codes in the order of a checkpoint."""
    return isinstance(choice, tiles.PrefillTiles) and not is_prepacked(weight)


def run(x: torch.Tensor, weight: BlockScaledTensor, bias: torch.Tensor | None, choice: tiles.Choice) -> torch.Tensor:
    """`x @ weight.T + bias` by `choice`; x `[tokens, in]`, FP16 or BF16, rows contiguous and aligned."""
    return prepare(x, weight, bias, choice)(x, weight, bias)


def prepare(
    x: torch.Tensor, weight: BlockScaledTensor, bias: torch.Tensor | None, choice: tiles.Choice
) -> tiles.Launch:
    """`run` for arguments like these, with everything decided that does not depend on their values."""
    if isinstance(choice, tiles.Tiles):
        from quant.kernels.portable import codes_gemm

        return codes_gemm.prepare_codes_gemm(x, weight, bias, choice)
    if isinstance(choice, tiles.GluonTiles):
        from quant.kernels.hopper import sm90_nvfp4_gemm_few

        return sm90_nvfp4_gemm_few.prepare_gemm_few(x, weight, bias, choice)
    if isinstance(choice, tiles.PrefillTiles):
        from quant.kernels.hopper import sm90_codes_gemm_many

        return sm90_codes_gemm_many.prepare_gemm_many(x, weight, bias, choice)
    return _by_library


def _by_library(x: torch.Tensor, weight: BlockScaledTensor, bias: torch.Tensor | None) -> torch.Tensor:
    return dense_linear(x, dequantize(weight, x.dtype), None if bias is None else bias.to(x.dtype))


def can_dequantize(dtype: torch.dtype) -> bool:
    """Whether `dequantize` gives this dtype here."""
    return dtype in (*_FLOATS, torch.float32) and hardware.has_triton()


def dequantize(weight: BlockScaledTensor, dtype: torch.dtype) -> torch.Tensor:
    """`[out, in]` of `weight`, on a GPU, in `dtype`: FP16, BF16 or FP32."""
    weight = as_computed(weight)
    if is_prepacked(weight):
        from quant.kernels.hopper import sm90_decode_nvfp4

        return sm90_decode_nvfp4.dequantize_prepacked(weight, dtype)
    from quant.kernels.portable import codes_gemm

    return codes_gemm.dequantize_codes(weight, dtype)


def takes_prefill(weight: BlockScaledTensor, activation: str, tokens: int, dtype: torch.dtype) -> bool:
    """Whether `prefill_linear` multiplies: its weight is prepacked, and the plan gave the layer 8-bit activations."""
    from quant.kernels.portable import casts

    allowed = activation in ("fp8", "fp8_token") and dtype is torch.bfloat16
    return allowed and tokens > tiles.PREFILL and is_prepacked(weight) and weight.shape[1] <= casts.MAX_COLUMNS


def prefill_linear(
    x: torch.Tensor,
    weight: BlockScaledTensor,
    bias: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    activation: str,
) -> torch.Tensor:
    """`x @ weight.T + bias` in FP8: NVFP4 codes become E4M3 with a scale a row in one pass, x as its format says.

    The library multiplies FP8 at nearly twice the rate of 16 bit. The price is one more rounding of the weight, of up
    to one part in 16 (`benchmarks/gemm.py` prints the error of the product).
    """
    from quant.kernels.hopper import sm90_decode_nvfp4
    from quant.kernels.portable import casts

    codes, scale = sm90_decode_nvfp4.prepacked_to_e4m3(weight)
    quantized = casts.quantize(x, FORMATS[activation], scale=input_scale)
    by_row = quantized.scale.reshape(-1, 1).expand(x.shape[0], 1).contiguous()
    bias = None if bias is None else bias.to(x.dtype)
    return torch._scaled_mm(
        quantized.codes, codes.t(), by_row, scale[None], bias, out_dtype=x.dtype, use_fast_accum=True
    )


def _is_native(weight: BlockScaledTensor, activation: str, tokens: int, device: torch.device) -> bool:
    """Whether tensor cores of this GPU take both sides as they are stored, and got a first product right."""
    from quant.kernels.portable import block_scaled_gemm, casts

    form, columns = weight.format, weight.shape[1]
    gpu = hardware.current(device.index or 0)
    if is_prepacked(weight) or not form.block[1] or columns % form.block[1]:
        return False
    if form.name == "fp8_block":
        # With few tokens reading W takes all the time, and 16-bit products are no slower.
        able = gpu.has_fp8 and activation == "fp8_group" and tokens > tiles.FEW
    else:
        able = gpu.has_block_scales and activation == form.name and form.name in block_scaled_gemm.SCALED_FORMATS
    if not able or columns > casts.MAX_COLUMNS:
        return False
    case = (form.name, activation, device.index or 0)
    if case not in _checked:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False  # a check waits for its result, which a capture cannot
        _checked[case] = _multiplies_right(*case)
    return _checked[case]


_checked: dict[tuple[str, str, int], bool] = {}


def _multiplies_right(format: str, activation: str, index: int) -> bool:
    """Multiplies two random matrices and compares with float64; says so where they differ. Once in a process."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(size, 512, generator=generator).to(f"cuda:{index}") for size in (130, 200))
    weight = quantize(w, FORMATS[format])
    y = _native_linear(x.bfloat16(), weight, None, None)
    rounded = fake_quantize(x.bfloat16().float(), FORMATS[activation])
    exact = rounded.double() @ weight.dequantize(torch.float64).T
    error = float((y.double() - exact).norm() / exact.norm())
    if error < 2**-7:
        return True
    warnings.warn(
        f"the kernel for {format} by {activation} is wrong on this GPU (error {error:.1e}) and is not used: weights "
        "are dequantized instead; please report the GPU, its driver and the version of Triton",
        stacklevel=2,
    )
    return False


def _native_linear(
    x: torch.Tensor,
    weight: BlockScaledTensor,
    bias: torch.Tensor | None,
    input_scale: torch.Tensor | None,
) -> torch.Tensor:
    """`[tokens, out]`: x to codes, then codes by codes."""
    from quant.kernels.portable import block_scaled_gemm, casts, fp8_block_gemm

    if weight.format.name == "fp8_block":
        return fp8_block_gemm.fp8_block_gemm(casts.quantize(x, FORMATS["fp8_group"]), weight, bias, x.dtype)
    quantized = casts.quantize(x, weight.format, global_scale=input_scale if weight.format.global_scale else None)
    return block_scaled_gemm.block_scaled_gemm(quantized, weight, bias, x.dtype)


def aligned_rows(rows: torch.Tensor) -> torch.Tensor:
    """`[tokens, in]`, rows contiguous, at multiples of 16 bytes where their length is one; a copy only where needed."""
    length, stride = rows.shape[1] * rows.itemsize, rows.stride(0) * rows.itemsize
    unit = 16 if length % 16 == 0 else 4
    aligned = rows.data_ptr() % unit == 0 and (stride % unit == 0 or rows.is_contiguous())
    if rows.stride(1) != 1 or rows.stride(0) < rows.shape[1] or not aligned:
        return rows.clone(memory_format=torch.contiguous_format)
    return rows


def round_rows(x: torch.Tensor, format: Format, input_scale: torch.Tensor | None) -> torch.Tensor:
    """`round_activation` of x `[tokens, in]`, in two passes where there is a kernel: to codes, and back."""
    x = aligned_rows(x)
    return prepare_rounding(x, format, input_scale)(x, input_scale)


def prepare_rounding(x: torch.Tensor, format: Format, input_scale: torch.Tensor | None) -> Rounding:
    """`round_rows` for arguments like these, with everything decided that does not depend on their values."""
    from quant.kernels.portable import casts, codes_gemm

    columns = x.shape[-1]
    whole = columns % max(format.block[1], 2 if format.element.bits == 4 else 1) == 0
    if not (format.name in casts.FORMATS_OUT and whole and columns <= casts.MAX_COLUMNS and x.numel()):
        return lambda x, input_scale: round_activation(x, format, input_scale)
    second = format.global_scale
    casts.check_scales(x, format, *((None, input_scale) if second else (input_scale, None)))
    cast = casts.prepare(x, format, contiguous=x.is_contiguous())

    def run(x: torch.Tensor, input_scale: torch.Tensor | None) -> torch.Tensor:
        codes = cast(x, None, input_scale) if second else cast(x, input_scale)
        return codes_gemm.dequantize_codes(codes, x.dtype)

    return run
