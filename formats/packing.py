"""`pack` and `unpack` convert 4- and 6-bit codes to and from bytes, along the last axis.

4 bit: two codes a byte, the even index in the low nibble.
6 bit: four codes in three bytes, little-endian: the bytes hold a 24-bit word with code j at bit 6·j.

A row whose length does not fill the last byte (or the last three bytes) is padded with zero codes; only the
bytes that hold at least one bit of a real code are kept, so `n` codes take ceil(n · bits / 8) bytes.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Packs codes `[..., n]`, uint8, into bytes `[..., ceil(n · bits / 8)]`, uint8.

    Args:
        codes: codes in the low `bits` bits, the bits above them clear.
        bits: 4 or 6.
    """
    n = codes.shape[-1]
    if bits == 4:
        if n % 2:
            codes = pad(codes, (0, 1))
        # Two neighbouring codes are one little-endian 16-bit word: 0x0h0l becomes 0xhl in its low byte.
        pairs = codes.contiguous().view(torch.int16)
        return (pairs >> 4).bitwise_or_(pairs).to(torch.uint8)
    _require_six(bits)
    four = pad(codes, (0, -n % 4)).unflatten(-1, (-1, 4)).int()
    word = four[..., 0] | four[..., 1] << 6 | four[..., 2] << 12 | four[..., 3] << 18
    packed = torch.stack([word & 0xFF, word >> 8 & 0xFF, word >> 16], dim=-1).to(torch.uint8)
    return packed.flatten(-2)[..., : -(-n * 6 // 8)].contiguous()


def unpack(packed: torch.Tensor, bits: int, n: int) -> torch.Tensor:
    """Returns codes `[..., n]`, uint8, from the bytes that `pack` made."""
    if bits == 4:
        return torch.stack([packed & 0x0F, packed >> 4], dim=-1).flatten(-2)[..., :n]
    _require_six(bits)
    three = pad(packed, (0, -packed.shape[-1] % 3)).unflatten(-1, (-1, 3)).int()
    word = three[..., 0] | three[..., 1] << 8 | three[..., 2] << 16
    codes = torch.stack([word & 0x3F, word >> 6 & 0x3F, word >> 12 & 0x3F, word >> 18], dim=-1).to(torch.uint8)
    return codes.flatten(-2)[..., :n]


def _require_six(bits: int) -> None:
    if bits != 6:
        raise ValueError(f"codes of {bits} bits are stored one to a byte; only 4- and 6-bit codes are packed")
