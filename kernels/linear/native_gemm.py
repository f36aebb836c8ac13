"""Tensor cores multiply codes by codes here: both operands as their formats store them, without dequantizing.

    weight          activation        tensor cores                kernel
    fp8_block       fp8_group         FP8 (Ada, Hopper, …)        kernels/portable/fp8_block_gemm.py
    nvfp4, mxfp4,   the same codes    block scales (Blackwell)    kernels/linear/portable_block_scaled_gemm.py
    mxfp8

A kernel that a GPU has never run is first compared with float64, once in a process. One that is wrong there is not
used, with a warning: the weight is then dequantized, as everywhere else.
"""

from __future__ import annotations

import warnings

import torch

from quant.formats.format import FORMATS, Format
from quant.formats.tensor import BlockScaledTensor, fake_quantize, quantize
from quant.kernels.base import hardware
from quant.kernels.linear import tiles
from quant.kernels.base.weight_layout import is_prepacked

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
    from quant.kernels.rounding import portable_casts
    from quant.kernels.portable import fp8_block_gemm

    if weight.format.has_square_blocks:
        return fp8_block_gemm.fp8_block_gemm(portable_casts.quantize(x, activation), weight, bias, x.dtype)
    codes = portable_casts.quantize(x, activation, global_scale=input_scale if activation.global_scale else None)
    return portable_block_scaled_gemm.block_scaled_gemm(codes, weight, bias, x.dtype)
