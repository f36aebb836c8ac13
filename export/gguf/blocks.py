"""The blocks of ggml, in which llama.cpp stores weights, made from codes and scales without rounding anything again.

A row of a weight is a row of blocks, each with its scales in front or behind. Two 4-bit codes share a byte, but not as
in checkpoints: byte j of a run of n codes holds code j in its low nibble and code j + n / 2 in its high one.

    Q4_0    32 weights in 18 bytes     FP16 scale, 16 bytes of codes q + 8                       INT4, groups of 32 n
    Q8_0    32 weights in 34 bytes     FP16 scale, 32 codes in INT8                              INT8
    MXFP4   32 weights in 17 bytes     E8M0 scale, 16 bytes of E2M1 codes                        MXFP4
    NVFP4   64 weights in 36 bytes     four E4M3 scales, four runs of 16 E2M1 codes              NVFP4

    Q5_0    32 weights in 22 bytes     FP16 scale, the fifth bits, 16 bytes of the others        q5_0
    Q5_1    32 weights in 24 bytes     FP16 scale and minimum, fifth bits, the others            q5_1
    Q4_K    256 weights in 144 bytes   scales (`formats/superblocks.py`), runs of 64 codes       q4_k
    Q5_K    256 weights in 176 bytes   scales, bit j of byte i the fifth of code 32 j + i        q5_k
    Q6_K    256 weights in 210 bytes   runs of 128 of the low four bits, the others, scales      q6_k

A scale over more than 32 weights is repeated. NVFP4's global scale, one a matrix, is a tensor of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from quant.formats.format import E2M1, E8M0, FP16, INT4, INT8, Format
from quant.formats.rounding import unpack
from quant.formats.tensor import BlockScaledTensor


def block_type(format: Format) -> str | None:
    """Returns the name that ggml has for blocks that hold the numbers of `format`, or None."""
    if format.gguf:
        return format.gguf
    if format.is_nvfp4:
        return "NVFP4"
    if format.element is E2M1 and format.scale is E8M0 and format.block == (1, 32):
        return "MXFP4"
    rows, columns = format.block
    if rows == 1 and columns % 32 == 0 and format.scale.is_wide and format.element in (INT4, INT8):
        return "Q4_0" if format.element is INT4 else "Q8_0"
    return None


def block_width(kind: str) -> int:
    """Returns how many weights of a row a block holds."""
    return 256 if kind.endswith("_K") else 64 if kind == "NVFP4" else 32


def to_blocks(weight: BlockScaledTensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Returns the bytes of a weight `[..., out, in]`, uint8 `[..., out, bytes]`; its global scale is left out.

    Raises:
        ValueError: ggml has no blocks for its format, its rows are no whole blocks, or FP16 does not hold a scale.
    """
    kind = block_type(weight.format)
    if kind is None:
        raise ValueError(f"llama.cpp has no {weight.format}")
    columns, width = weight.shape[-1], block_width(kind)
    if columns % width:
        raise ValueError(f"in = {columns} is no multiple of {width}, the weights of a block of {kind}")
    return _PACKERS[kind](weight).contiguous().numpy()


def _nibbles(codes: Tensor, run: int) -> Tensor:
    """Returns 4-bit codes `[..., in]` by runs, two to a byte: `[..., in / run, run / 2]`."""
    low, high = codes.unflatten(-1, (-1, run)).chunk(2, dim=-1)
    return torch.bitwise_or(low, high << 4)


def _q4_0(weight: BlockScaledTensor) -> Tensor:
    # Two's complement plus 8 is the same bits with the highest one flipped.
    codes = unpack(weight.codes, 4, weight.shape[-1]) ^ 8
    return torch.cat([_half_scales(weight), _nibbles(codes, 32)], dim=-1).flatten(-2)


def _q8_0(weight: BlockScaledTensor) -> Tensor:
    codes = weight.codes.view(torch.uint8).unflatten(-1, (-1, 32))
    return torch.cat([_half_scales(weight), codes], dim=-1).flatten(-2)


def _half_scales(weight: BlockScaledTensor) -> Tensor:
    """Returns the bytes of the FP16 scale of every 32 weights, `[..., in / 32, 2]`."""
    half = weight.scale.to(torch.float16)
    if not torch.equal(half.float(), weight.scale.float()):
        wrong = int((half.float() != weight.scale.float()).sum())
        low, high = float(weight.scale.min()), float(weight.scale.max())
        raise ValueError(
            f"{wrong:,} of its scales, which are between {low:.2g} and {high:.2g}, are no numbers of {FP16.name}, in "
            f"which llama.cpp has them"
        )
    blocks = weight.shape[-1] // 32
    half = half.repeat_interleave(blocks // half.shape[-1], dim=-1)
    stored: Tensor = half.contiguous().view(torch.uint8).unflatten(-1, (-1, 2))
    return stored


def _five_bits(weight: BlockScaledTensor) -> tuple[Tensor, Tensor]:
    """Returns codes of five bits plus 16: the low four of them, and the fifth, uint8 `[..., in]`."""
    codes = (weight.codes + 16).view(torch.uint8)
    return codes & 15, codes >> 4


def _bits(bits: Tensor) -> Tensor:
    """Returns bytes of bits `[..., 8]`, the first the lowest."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits << places).sum(-1, dtype=torch.uint8)


def _q5(weight: BlockScaledTensor) -> Tensor:
    low, fifth = _five_bits(weight)
    scales = weight.scale.unflatten(-1, (-1, 4)) if weight.format.minimum else _half_scales(weight)
    return torch.cat([scales, _bits(fifth.unflatten(-1, (-1, 4, 8))), _nibbles(low, 32)], dim=-1).flatten(-2)


def _q4_k(weight: BlockScaledTensor) -> Tensor:
    codes = _nibbles(unpack(weight.codes, 4, weight.shape[-1]) ^ 8, 64)
    return torch.cat([weight.scale.unflatten(-1, (-1, 16)), codes.unflatten(-2, (-1, 4)).flatten(-2)], -1).flatten(-2)


def _q5_k(weight: BlockScaledTensor) -> Tensor:
    low, fifth = _five_bits(weight)
    codes = _nibbles(low, 64).unflatten(-2, (-1, 4)).flatten(-2)
    fifth = _bits(fifth.unflatten(-1, (-1, 8, 32)).transpose(-1, -2))
    return torch.cat([weight.scale.unflatten(-1, (-1, 16)), fifth, codes], dim=-1).flatten(-2)


def _q6_k(weight: BlockScaledTensor) -> Tensor:
    codes = (weight.codes + 32).view(torch.uint8)
    low = _nibbles(codes & 15, 128).unflatten(-2, (-1, 2)).flatten(-2)
    # Two bits each of codes i, i + 32, i + 64 and i + 96 of a run of 128.
    places = torch.arange(0, 8, 2, dtype=torch.uint8, device=codes.device)[:, None]
    high = ((codes >> 4).unflatten(-1, (-1, 2, 4, 32)) << places).sum(-2, dtype=torch.uint8).flatten(-2)
    return torch.cat([low, high, weight.scale.unflatten(-1, (-1, 18))], dim=-1).flatten(-2)


def _mxfp4(weight: BlockScaledTensor) -> Tensor:
    codes = unpack(weight.codes, 4, weight.shape[-1])
    return torch.cat([weight.scale[..., None], _nibbles(codes, 32)], dim=-1).flatten(-2)


def _nvfp4(weight: BlockScaledTensor) -> Tensor:
    codes = _nibbles(unpack(weight.codes, 4, weight.shape[-1]), 16)
    scales = weight.scale.view(torch.uint8).unflatten(-1, (-1, 4))
    return torch.cat([scales, codes.unflatten(-2, (-1, 4)).flatten(-2)], dim=-1).flatten(-2)


_PACKERS: dict[str, Callable[[BlockScaledTensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q5_0": _q5,
    "Q5_1": _q5,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
}
