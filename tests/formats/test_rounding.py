"""Encoding equals ml_dtypes for every value, tie and float32 neighbour, at saturation, subnormals and zeros."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quant.formats.format import BF16, E8M0, FP16, FP32, INT4, INT8, NUMBERS, Number
from quant.formats.rounding import decode, encode, round_to

ML_DTYPES = {
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}
FLOATS = [NUMBERS[name] for name in ML_DTYPES]
LARGEST = np.finfo(np.float32).max


def codes_of(x: np.ndarray, number: Number) -> np.ndarray:
    return encode(torch.from_numpy(x), number).view(torch.uint8).numpy()


def peer_codes(x: np.ndarray, number: Number) -> np.ndarray:
    """Codes by ml_dtypes, which rounds to nearest even; saturation by clipping first, as ±max is on the grid."""
    return np.clip(x, -number.max, number.max).astype(ML_DTYPES[number.name]).view(np.uint8)


def probes(number: Number) -> np.ndarray:
    """Every value, every midpoint, the float32 neighbours of both, values beyond the range, tiny ones; both signs."""
    grid = number.grid().numpy().astype(np.float64)
    # Two values beyond the largest, so that the ties there (which saturation must win) are probed as well.
    grid = np.append(grid, [2 * grid[-1] - grid[-2], 4 * grid[-1]])
    points = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2]).astype(np.float32)
    up, down = np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(-np.inf))
    tiny = np.array([1e-45, 1e-40, np.finfo(np.float32).tiny], np.float32)
    huge = np.array([1e30, LARGEST, np.inf], np.float32)
    x = np.concatenate([points, up, np.abs(down), tiny, huge])
    return np.concatenate([x, -x])


@pytest.mark.parametrize("number", FLOATS, ids=lambda n: n.name)
def test_every_representable_value_encodes_to_its_code(number: Number) -> None:
    codes = np.arange(1 << number.bits, dtype=np.uint8)
    values = codes.view(ML_DTYPES[number.name]).astype(np.float32)
    finite = np.isfinite(values)
    np.testing.assert_array_equal(codes_of(values[finite], number), codes[finite])


@pytest.mark.parametrize("number", FLOATS, ids=lambda n: n.name)
def test_values_ties_neighbours_and_saturation(number: Number) -> None:
    x = probes(number)
    np.testing.assert_array_equal(codes_of(x, number), peer_codes(x, number))


@pytest.mark.parametrize("number", FLOATS, ids=lambda n: n.name)
def test_every_tie_goes_to_the_even_code(number: Number) -> None:
    grid = number.grid().double().numpy()
    ties = ((grid[1:] + grid[:-1]) / 2).astype(np.float32)
    lower = np.arange(len(ties))
    np.testing.assert_array_equal(codes_of(ties, number), lower + lower % 2)
    sign = 1 << (number.bits - 1)
    np.testing.assert_array_equal(codes_of(-ties, number), lower + lower % 2 + sign)


@pytest.mark.parametrize("number", FLOATS, ids=lambda n: n.name)
def test_every_bfloat16_and_float16_value(number: Number) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    for dtype in (ml_dtypes.bfloat16, np.float16):
        x = bits.view(dtype).astype(np.float32)
        x = x[~np.isnan(x)]
        np.testing.assert_array_equal(codes_of(x, number), peer_codes(x, number))


@pytest.mark.parametrize("number", FLOATS, ids=lambda n: n.name)
@given(exponent=st.integers(-149, 127), seed=st.integers(0, 2**32 - 1))
def test_random_float32_bits(number: Number, exponent: int, seed: int) -> None:
    x = np.random.default_rng(seed).uniform(-2, 2, 64).astype(np.float32) * np.float32(2.0**exponent)
    np.testing.assert_array_equal(codes_of(x, number), peer_codes(x, number))


@pytest.mark.parametrize("number", FLOATS, ids=lambda n: n.name)
def test_infinity_saturates_and_negative_zero_keeps_its_sign(number: Number) -> None:
    sign = 1 << (number.bits - 1)
    x = np.array([np.inf, -np.inf, LARGEST, -LARGEST, 0.0, -0.0, -1e-45], np.float32)
    top = number.max_code
    np.testing.assert_array_equal(codes_of(x, number), [top, top + sign, top, top + sign, 0, sign, sign])


@pytest.mark.parametrize("number", [INT4, INT8], ids=lambda n: n.name)
def test_integers_against_numpy_rint(number: Number) -> None:
    x = np.concatenate([np.arange(-150, 150.25, 0.25), [np.inf, -np.inf, LARGEST, -LARGEST, -0.0, 1e-45]])
    x = np.concatenate([x, np.nextafter(x.astype(np.float32), np.float32(0))]).astype(np.float32)
    lowest = {"int4": -8, "int8": -127}[number.name]
    expected = np.clip(np.rint(x), lowest, number.max).astype(np.int8)
    np.testing.assert_array_equal(codes_of(x, number), expected.view(np.uint8) & ((1 << number.bits) - 1))


def test_int4_codes_are_two_s_complement_nibbles() -> None:
    x = torch.tensor([0.0, 1, 7, 9, -1, -7, -8, -9, 2.5, 3.5])
    assert encode(x, INT4).tolist() == [0, 1, 7, 7, 15, 9, 8, 8, 2, 4]


def test_e8m0_encodes_every_power_of_two_to_its_code() -> None:
    codes = np.arange(255, dtype=np.uint8)
    values = codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    np.testing.assert_array_equal(codes_of(values, E8M0), codes)


def test_e8m0_rounds_up_and_clamps() -> None:
    powers = np.exp2(np.arange(-126, 128, dtype=np.float64)).astype(np.float32)
    above, below = np.nextafter(powers, np.float32(np.inf)), np.nextafter(powers, np.float32(0))
    expected = np.arange(1, 255)
    np.testing.assert_array_equal(codes_of(powers, E8M0), expected)
    np.testing.assert_array_equal(codes_of(above, E8M0), np.minimum(expected + 1, 254))
    np.testing.assert_array_equal(codes_of(below, E8M0), expected)
    extremes = np.array([0.0, 1e-45, 2.0**-127, np.nextafter(np.float32(2.0**-127), 1), LARGEST], np.float32)
    np.testing.assert_array_equal(codes_of(extremes, E8M0), [0, 0, 0, 1, 254])


def test_e8m0_says_nan_for_what_is_not_finite() -> None:
    values = np.array([np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(codes_of(values, E8M0), values.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8))


@pytest.mark.parametrize("number", [*FLOATS, INT4, INT8], ids=lambda n: n.name)
def test_round_to_is_decode_of_encode(number: Number) -> None:
    # The integers' -0.0 is the one difference in bits: their codes have a single zero. The values are equal.
    x = torch.from_numpy(np.concatenate([probes(number), np.random.default_rng(0).normal(0, 5, 4096)])).float()
    direct, through = round_to(x, number), decode(encode(x, number), number)
    np.testing.assert_array_equal(direct.numpy(), through.numpy())
    if not number.is_integer:
        assert torch.equal(direct.signbit(), through.signbit())


def test_round_to_e8m0_is_decode_of_encode() -> None:
    x = torch.from_numpy(np.exp2(np.linspace(-149, 127.99, 4001)).astype(np.float32))
    assert torch.equal(round_to(x, E8M0), decode(encode(x, E8M0), E8M0))


@pytest.mark.parametrize(("number", "dtype"), [(FP16, np.float16), (BF16, ml_dtypes.bfloat16), (FP32, np.float32)])
def test_round_to_wide_numbers(number: Number, dtype: type) -> None:
    x = np.random.default_rng(0).normal(0, 1, 4096).astype(np.float32) * np.exp2(np.linspace(-30, 15, 4096))
    x = x.astype(np.float32)
    np.testing.assert_array_equal(round_to(torch.from_numpy(x), number).numpy(), x.astype(dtype).astype(np.float32))


@pytest.mark.parametrize("number", [*FLOATS, E8M0, INT4, INT8], ids=lambda n: n.name)
def test_input_is_left_alone_and_may_be_strided(number: Number) -> None:
    x = torch.rand(6, 8).mul_(number.max)
    before = x.clone()
    strided = encode(x.t(), number), round_to(x.t(), number)
    assert torch.equal(x, before)
    assert torch.equal(strided[0].view(torch.uint8), encode(before.t().contiguous(), number).view(torch.uint8))
    assert torch.equal(strided[1], round_to(before.t().contiguous(), number))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("number", FLOATS, ids=lambda n: n.name)
def test_other_input_dtypes_are_read_as_float32(number: Number, dtype: torch.dtype) -> None:
    x = torch.randn(512).mul_(number.max / 3).to(dtype)
    np.testing.assert_array_equal(encode(x, number).view(torch.uint8).numpy(), peer_codes(x.float().numpy(), number))
