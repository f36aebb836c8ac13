"""Decoding for Hopper is tested without a GPU: its PTX is run by instruction, its layout by brute force."""

import re
from collections.abc import Callable
from itertools import product

import ml_dtypes
import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="comes with a CUDA build of torch, or: pip install triton")

from quant.formats.format import FORMATS
from quant.formats.tensor import quantize
from quant.kernels.linear import sm90_decode
from quant.kernels.linear.tiles import STORED_FORMATS

DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "int8": ml_dtypes.bfloat16,
    "int4": ml_dtypes.int4,
}


def halves(word: int) -> np.ndarray:
    return np.array([word & 0xFFFF, word >> 16], dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)


def word(values: np.ndarray) -> int:
    low, high = (int(bits) for bits in values.astype(ml_dtypes.bfloat16).view(np.uint16))
    return low | high << 16


def prmt(a: int, b: int, selector: int) -> int:
    found = 0
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = (a | b << 32) >> 8 * (nibble & 7) & 0xFF
        found |= ((0xFF if byte & 0x80 else 0) if nibble & 8 else byte) << 8 * i
    return found


INSTRUCTIONS: dict[str, Callable[..., int]] = {
    "prmt.b32": prmt,
    "shl.b32": lambda a, n: a << n,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "mov.b32": lambda a: a,
    "mul.rn.bf16x2": lambda a, b: word(halves(a) * halves(b)),
    "sub.rn.bf16x2": lambda a, b: word(halves(a) - halves(b)),
    # In float64 the product of two and the sum with a third are exact for all that is met here.
    "abs.bf16x2": lambda a: word(np.abs(halves(a))),
    "set.gt.u32.bf16x2": lambda a, b: sum(
        0xFFFF << 16 * i for i, is_greater in enumerate(halves(a) > halves(b)) if is_greater
    ),
    "fma.rn.bf16x2": lambda a, b, c: word(halves(a).astype(np.float64) * halves(b) + halves(c)),
}


def run(text: str, codes: int, *scales: int) -> np.ndarray:
    """What the assembly makes of two codes and scales, each given as its 32 bits."""
    registers = {"$1": codes, **{f"${i}": scale for i, scale in enumerate(scales, 2)}}
    for line in re.findall(r"[^;{}\n]+", text):
        name, rest = line.split(maxsplit=1)
        if name == ".reg":
            continue
        to, *arguments = rest.split(",")
        values = [registers[a] if a in registers else int(a, 0) for a in arguments]
        with np.errstate(invalid="ignore"):  # products of NaN
            registers[to] = INSTRUCTIONS[name](*values) & 0xFFFFFFFF
    return halves(registers["$0"])


def values_of(element: str, codes: np.ndarray) -> np.ndarray:
    """By ml_dtypes; of INT4, codes are nibbles."""
    if element == "int4":
        return np.where(codes < 8, codes, codes - 16.0).astype(np.float32)
    if element == "int8":
        return codes.astype(np.uint8).view(np.int8).astype(np.float32)
    return codes.astype(np.uint8).view(DTYPES[element]).astype(np.float32)


def pairs(element: str) -> list[tuple[int, np.ndarray]]:
    """Every code beside some others, in both places: a pair's bits, and its two codes."""
    count = 16 if element == "int4" else 256
    every = np.arange(count)
    both = [np.stack([every, (every * 7 + 3) % count], 1), np.stack([(every * 5 + 1) % count, every], 1)]
    return [(int(a | b << (4 if element == "int4" else 8)), np.array([a, b])) for a, b in np.concatenate(both)]


@pytest.mark.parametrize("form", STORED_FORMATS)
def test_every_number_is_decoded_exactly(form: str) -> None:
    """By the scale 1 and, so that nothing hides behind it, others."""
    kind, element = sm90_decode.scaling(form), FORMATS[form].element.name
    scales = {"sum": [1.0], "one": [1.0, 2.0**-100, 2.0**90], "two": [1.0, 0.3, 1e-30]}[kind]
    for scale in scales:
        high = np.float32(scale).astype(ml_dtypes.bfloat16).astype(np.float32)
        low = np.float32(scale) - high
        for given, codes in pairs(element):
            exact = values_of(element, codes)
            if not np.isfinite(exact).all():
                continue
            found = run(sm90_decode.assembly(form), given, word(np.stack([high, high])), word(np.stack([low, low])))
            wanted = exact.astype(np.float64) * np.float32(scale)
            if kind == "two":
                # Half a unit in the last place, and 2^-8 of one for the second rounding.
                np.testing.assert_array_less(np.abs(found - wanted), np.abs(wanted) * 2.0**-8 * 1.004 + 1e-45)
            else:
                np.testing.assert_array_equal(found, wanted.astype(np.float32).astype(ml_dtypes.bfloat16))
            assert scale != 1.0 or np.array_equal(found, exact)


@pytest.mark.parametrize("form", [form for form in STORED_FORMATS if form not in ("int8", "int4")])
def test_codes_that_are_no_numbers_are_decoded_as_such(form: str) -> None:
    """Infinities keep their sign, and their neighbour in the pair keeps its value: weights are not looked through."""
    kind, element = sm90_decode.scaling(form), FORMATS[form].element.name
    seen = 0
    for scale in {"sum": [1.0], "one": [1.0, 2.0**-100, 2.0**90], "two": [1.0, 0.3]}[kind]:
        high = np.float32(scale).astype(ml_dtypes.bfloat16).astype(np.float32)
        low = np.float32(scale) - high
        for given, codes in pairs(element):
            exact = values_of(element, codes)
            if np.isfinite(exact).all():
                continue
            found = run(sm90_decode.assembly(form), given, word(np.stack([high, high])), word(np.stack([low, low])))
            numbers = np.isfinite(exact)
            np.testing.assert_array_equal(found[~numbers], exact[~numbers])
            np.testing.assert_allclose(found[numbers], exact[numbers] * scale, rtol=2**-8 if kind == "two" else 0)
            seen += 1
    assert seen


def places(warps: int) -> dict[tuple[int, int], list[tuple[int, int, int]]]:
    """(warp, lane) to its (parity, row, pair) in the tile, register by register."""
    layout = sm90_decode.tile_layout(warps)

    def at(*terms: tuple[list[list[int]], int]) -> tuple[int, int, int]:
        found = np.zeros(3, dtype=int)
        for bases, index in terms:
            for bit, basis in enumerate(bases):
                found ^= np.array(basis) * (index >> bit & 1)
        return int(found[0]), int(found[1]), int(found[2])

    return {
        (warp, lane): [
            at((layout.reg_bases, r), (layout.lane_bases, lane), (layout.warp_bases, warp)) for r in range(16)
        ]
        for warp, lane in product(range(warps), range(32))
    }


def test_each_thread_reads_what_the_instruction_wants_of_it() -> None:
    """wgmma's left operand in registers, as the PTX manual has it; row 8·b + g of a warp is 2·g + b of W."""
    for (warp, lane), found in places(8).items():
        g, q = lane // 4, lane % 4
        wanted = [(b, 8 * warp + g, 8 * s + 4 * a + q) for s in range(4) for a in range(2) for b in range(2)]
        assert found == wanted


@pytest.mark.parametrize("nbytes", [1, 2])
def test_a_read_meets_every_bank_once(nbytes: int) -> None:
    """Under TMA's swizzle of 32 or 64 bytes, which repeats every 512 or 1024."""
    width = 32 * nbytes
    threads = places(8)
    for register in range(16):
        words = set()
        for lane in range(32):
            b, row, pair = threads[0, lane][register]
            address = (b * 64 + row) * width + pair * nbytes
            # 16-byte chunks are exchanged by the bits of the 128-byte line.
            address ^= (address >> 7 & (width // 16 - 1)) << 4
            words.add(address // 4)
        banks = [w % 32 for w in words]
        assert len(banks) == len(set(banks)) == 8 * nbytes


def test_scales_of_threads_are_those_of_their_columns() -> None:
    """A thread's pair p of 32 is in group p · groups / 32, in both layouts the same."""
    flat, grouped = sm90_decode.tile_layout(8), sm90_decode.pairs_layout(8, 2)
    for name in ("reg_bases", "lane_bases", "warp_bases"):
        for (b, row, pair), (b2, row2, group, rest) in zip(getattr(flat, name), getattr(grouped, name), strict=True):
            assert (b, row, pair) == (b2, row2, group * 16 + rest)


def test_descriptors_cover_the_codes() -> None:
    """Even rows, then odd ones: what strides and shape reach is each byte once."""
    for form, width in (("fp8_channel", 64), ("int4", 32)):
        weight = quantize(torch.randn(16, 128), FORMATS[form])
        found = sm90_decode.codes_descriptor(weight, 128)
        assert found.block_shape == [2, 64, 32] and found.layout.swizzle_byte_width == width
        seen = found.base.as_strided(found.shape, found.strides)
        pairs = weight.codes.view(torch.uint8).view(found.base.dtype)
        assert torch.equal(seen.permute(1, 0, 2).reshape(16, -1), pairs)
