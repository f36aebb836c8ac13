"""Which kernel multiplies by a quantized weight on a GPU, and the checks that come before any launch.

    x ──checks──▶ rounded to the activation format ──▶ choose(format, tokens, shape) ──▶ kernel
         both sides in a format of the tensor cores ──▶ fp8_gemm.py, matmul_fp8_block.py, matmul_scaled.py

The choice is a look-up: first what `quant tune` measured on this machine, then the table that is shipped for the
GPU, then the guess of `kernels/tiles.py`. Nothing is measured during a call, so the first one is as fast as the rest
once its kernel is compiled.
"""

from __future__ import annotations

import warnings

import torch
from torch.nn.functional import linear as dense_linear

from quant.formats.format import FORMATS, Format
from quant.formats.tensor import BlockScaledTensor, fake_quantize, quantize, round_activation
from quant.kernels import hardware, tiles
from quant.kernels.layout import as_computed, is_prepacked, restore
from quant.kernels.linear import tables

_FLOATS = (torch.float16, torch.bfloat16)


def linear(
    x: torch.Tensor,
    weight: BlockScaledTensor,
    bias: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    activation: str,
) -> torch.Tensor | None:
    """`x @ weight.T + bias` on a GPU, or None where only the oracle can do it (FP32, or no Triton here).

    Args:
        x: `[..., in]`.
        weight: `[out, in]`, in the layout of a checkpoint or prepacked.
        bias: `[out]`, or None.
        input_scale: static scale of the activation format, or None.
        activation: name of the format that x is rounded to first, or "".

    Raises:
        ValueError: an argument is on another device, strided, or of a wrong dtype or shape; nothing was launched.
    """
    weight = as_computed(weight)
    check(x, weight, bias)
    if x.dtype not in _FLOATS or not hardware.has_triton():
        return None
    tokens = x.numel() // x.shape[-1]
    if takes_prefill(weight, activation, tokens, x.dtype) and hardware.current(x.device.index or 0).has_wgmma:
        rows = _rows(x)
        return prefill_linear(rows, weight, bias, input_scale, activation).view(*x.shape[:-1], weight.shape[0])
    if activation and _is_native(weight, activation, tokens, x.device):
        return _native_linear(x, weight, bias, input_scale).view(*x.shape[:-1], weight.shape[0])
    if activation:
        x = _round(x, FORMATS[activation], input_scale)
    rows = _rows(x)
    return run(rows, weight, bias, choose(weight, rows)).view(*x.shape[:-1], weight.shape[0])


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
    """How to multiply x `[tokens, in]`, as `_rows` gives it, by `weight`."""
    prepacked = is_prepacked(weight)
    if prepacked and x.dtype is not torch.bfloat16:
        return tiles.DENSE
    gpu = hardware.current(x.device.index or 0)
    shape = (weight.shape[0], weight.shape[1])
    found = tables.look_up(gpu, weight.format, x.shape[0], shape, prepacked)
    choice = found or tiles.guess(weight.format, x.shape[0], shape, gpu, prepacked)
    if isinstance(choice, tiles.PrefillTiles) and not prepacked and not _takes_stored(weight, x):
        return tiles.guess(weight.format, x.shape[0], shape, gpu, prepacked, stored=False)
    return choice


def _takes_stored(weight: BlockScaledTensor, x: torch.Tensor) -> bool:
    """Whether Hopper's kernel multiplies by codes in the order of a checkpoint: BF16, aligned, and numbers only."""
    from quant.kernels.hopper.decode_codes import numbers_only

    return x.dtype is torch.bfloat16 and weight.codes.data_ptr() % 16 == 0 and numbers_only(weight)


def run(x: torch.Tensor, weight: BlockScaledTensor, bias: torch.Tensor | None, choice: tiles.Choice) -> torch.Tensor:
    """`x @ weight.T + bias` by `choice`; x `[tokens, in]`, FP16 or BF16, rows contiguous and aligned."""
    if isinstance(choice, tiles.Tiles):
        from quant.kernels.portable import matmul

        return matmul.linear(x, weight, bias, choice)
    if isinstance(choice, tiles.GluonTiles):
        from quant.kernels.hopper import matmul_few

        return matmul_few.linear(x, weight, bias, choice)
    if isinstance(choice, tiles.PrefillTiles):
        from quant.kernels.hopper import matmul_many

        return matmul_many.linear(x, weight, bias, choice)
    return dense_linear(x, dequantize(weight, x.dtype), None if bias is None else bias.to(x.dtype))


def dequantize(weight: BlockScaledTensor, dtype: torch.dtype) -> torch.Tensor:
    """`[out, in]` of `weight`, on a GPU, in `dtype`."""
    from quant.kernels.portable import matmul

    weight = as_computed(weight)
    if not is_prepacked(weight):
        return matmul.dequantize(weight, dtype)
    if dtype is torch.bfloat16:
        from quant.kernels.hopper import decode_nvfp4

        return decode_nvfp4.dequantize(weight)
    return matmul.dequantize(restore(weight), dtype)


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

    The library multiplies FP8 at nearly twice the rate of 16 bit, which is what many tokens wait for. The price is one
    more rounding of the weight, of up to one part in 16 (`benchmarks/gemm.py` prints the error of the product).
    """
    from quant.kernels.hopper import decode_nvfp4
    from quant.kernels.portable import casts

    codes, scale = decode_nvfp4.requantize(weight)
    quantized = casts.quantize(x, FORMATS[activation], scale=input_scale)
    by_row = quantized.scale.reshape(-1, 1).expand(x.shape[0], 1).contiguous()
    bias = None if bias is None else bias.to(x.dtype)
    return torch._scaled_mm(
        quantized.codes, codes.t(), by_row, scale[None], bias, out_dtype=x.dtype, use_fast_accum=True
    )


def _is_native(weight: BlockScaledTensor, activation: str, tokens: int, device: torch.device) -> bool:
    """Whether tensor cores of this GPU take both sides as they are stored, and got a first product right."""
    from quant.kernels.portable import casts, matmul_scaled

    form, columns = weight.format, weight.shape[1]
    gpu = hardware.current(device.index or 0)
    if is_prepacked(weight) or not form.block[1] or columns % form.block[1]:
        return False
    if form.name == "fp8_block":
        # With few tokens the time is that of reading W, and 16-bit products cost nothing.
        able = gpu.has_fp8 and activation == "fp8_group" and tokens > tiles.FEW
    else:
        able = gpu.has_block_scales and activation == form.name and form.name in matmul_scaled.SCALED_FORMATS
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
    x: torch.Tensor, weight: BlockScaledTensor, bias: torch.Tensor | None, input_scale: torch.Tensor | None
) -> torch.Tensor:
    """`[tokens, out]`: x to codes, then codes by codes."""
    from quant.kernels.portable import casts, matmul_fp8_block, matmul_scaled

    if weight.format.name == "fp8_block":
        return matmul_fp8_block.block_linear(casts.quantize(x, FORMATS["fp8_group"]), weight, bias, x.dtype)
    quantized = casts.quantize(x, weight.format, global_scale=input_scale if weight.format.global_scale else None)
    return matmul_scaled.scaled_linear(quantized, weight, bias, x.dtype)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """`[tokens, in]`, rows contiguous, and 16-byte aligned where their length allows it; a copy only where needed."""
    rows = x.reshape(-1, x.shape[-1])
    aligned = rows.data_ptr() % 16 == 0 and rows.stride(0) * rows.itemsize % 16 == 0
    whole = rows.shape[1] * rows.itemsize % 16 == 0
    if rows.stride(1) != 1 or rows.stride(0) < rows.shape[1] or (whole and not aligned):
        return rows.clone(memory_format=torch.contiguous_format)
    return rows


def _round(x: torch.Tensor, format: Format, input_scale: torch.Tensor | None) -> torch.Tensor:
    """`round_activation`, in two passes where there is a kernel: to codes, and back."""
    from quant.kernels.portable import casts, matmul

    columns = x.shape[-1]
    whole = columns % max(format.block[1], 2 if format.element.bits == 4 else 1) == 0
    if format.name in casts.FORMATS_OUT and whole and columns <= casts.MAX_COLUMNS and x.numel():
        first, second = (None, input_scale) if format.global_scale else (input_scale, None)
        codes = casts.quantize(x, format, scale=first, global_scale=second)
        return matmul.dequantize(codes, x.dtype).view(x.shape)
    return round_activation(x, format, input_scale)
