"""Packing is tested on every code pattern, hand-written bytes, odd widths, and the bytes of compressed-tensors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quant.formats.format import E2M1, E2M3
from quant.formats.rounding import decode, pack, unpack


def test_four_bit_bytes_even_index_in_the_low_nibble() -> None:
    codes = torch.tensor([[0x1, 0x2, 0xF, 0x0], [0x8, 0x7, 0xA, 0x5]], dtype=torch.uint8)
    assert pack(codes, 4).tolist() == [[0x21, 0x0F], [0x78, 0x5A]]


def test_six_bit_bytes_are_little_endian_words_of_24_bits() -> None:
    codes = torch.tensor([[0b000001, 0b000010, 0b000011, 0b000100]], dtype=torch.uint8)
    # 000100 000011 000010 000001, from the top bit down, cut into bytes from the bottom.
    assert pack(codes, 6).tolist() == [[0b10000001, 0b00110000, 0b00010000]]


@pytest.mark.parametrize(
    ("bits", "codes", "expected"),
    [
        (4, [0xF], [0x0F]),
        (4, [0x1, 0x2, 0x3], [0x21, 0x03]),
        (6, [0x3F], [0x3F]),
        (6, [0x3F, 0x3F], [0xFF, 0x0F]),
        (6, [0x3F, 0x3F, 0x3F], [0xFF, 0xFF, 0x03]),
        (6, [0x01, 0, 0, 0, 0x20], [0x01, 0, 0, 0x20]),
    ],
)
def test_odd_widths_keep_only_the_bytes_that_hold_a_code(bits: int, codes: list[int], expected: list[int]) -> None:
    packed = pack(torch.tensor(codes, dtype=torch.uint8), bits)
    assert packed.tolist() == expected
    assert unpack(packed, bits, len(codes)).tolist() == codes


def test_every_pair_of_four_bit_codes_makes_every_byte_once() -> None:
    pairs = torch.cartesian_prod(torch.arange(16), torch.arange(16)).to(torch.uint8)
    packed = pack(pairs, 4)
    assert torch.equal(packed[:, 0].int(), pairs[:, 0].int() + 16 * pairs[:, 1].int())
    assert torch.equal(unpack(packed, 4, 2), pairs)


@pytest.mark.parametrize("position", range(3))
def test_every_neighbouring_pair_of_six_bit_codes(position: int) -> None:
    pairs = torch.cartesian_prod(torch.arange(64), torch.arange(64))
    codes = torch.full((len(pairs), 4), 0b101010)
    codes[:, position : position + 2] = pairs
    word = (codes << torch.tensor([0, 6, 12, 18])).sum(dim=-1)
    packed = pack(codes.to(torch.uint8), 6)
    assert packed.tolist() == [list(int(w).to_bytes(3, "little")) for w in word]
    assert torch.equal(unpack(packed, 6, 4), codes.to(torch.uint8))


@given(bits=st.sampled_from([4, 6]), rows=st.integers(1, 5), width=st.integers(1, 67), seed=st.integers(0, 2**31))
def test_round_trip_of_any_width(bits: int, rows: int, width: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (2, rows, width), dtype=torch.uint8, generator=generator)
    packed = pack(codes, bits)
    assert packed.shape == (2, rows, (width * bits + 7) // 8)
    # One long little-endian integer a row holds code j at bit bits · j, whatever the word size.
    for row, stored in zip(codes.view(-1, width).tolist(), packed.view(2 * rows, -1).tolist(), strict=True):
        assert int.from_bytes(bytes(stored), "little") == sum(code << (bits * j) for j, code in enumerate(row))
    assert torch.equal(unpack(packed, bits, width), codes)


def test_strided_codes_pack_like_contiguous_ones() -> None:
    for bits in (4, 6):
        codes = torch.randint(0, 1 << bits, (12, 8), dtype=torch.uint8)
        assert torch.equal(pack(codes.t(), bits), pack(codes.t().contiguous(), bits))


def test_other_widths_are_refused() -> None:
    codes = torch.zeros(4, dtype=torch.uint8)
    with pytest.raises(ValueError, match="codes of 8 bits are stored one to a byte"):
        pack(codes, 8)
    with pytest.raises(ValueError, match="codes of 5 bits"):
        unpack(codes, 5, 4)


def test_four_bit_bytes_equal_compressed_tensors() -> None:
    helpers = pytest.importorskip(
        "compressed_tensors.compressors.nvfp4.helpers", reason="compressed-tensors writes these bytes"
    )
    codes = torch.randint(0, 16, (16, 64), dtype=torch.uint8)
    assert torch.equal(pack(codes, 4), helpers.pack_fp4_to_uint8(decode(codes, E2M1)))


def test_six_bit_bytes_equal_compressed_tensors() -> None:
    helpers = pytest.importorskip(
        "compressed_tensors.compressors.mxfp6.helpers", reason="compressed-tensors from 0.20 writes these bytes"
    )
    codes = torch.randint(0, 64, (16, 64), dtype=torch.uint8)
    assert torch.equal(pack(codes, 6), helpers.pack_fp6_to_uint8(decode(codes, E2M3)))
