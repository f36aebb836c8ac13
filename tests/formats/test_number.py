"""Every code of every number equals that of ml_dtypes, and derived fields equal the formats' own tables."""

import ml_dtypes
import numpy as np
import pytest
import torch

from quant.formats.format import BF16, E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, FP16, FP32, INT4, INT8, NUMBERS, Number
from quant.formats.rounding import decode

ML_DTYPES = {
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e8m0": ml_dtypes.float8_e8m0fnu,
    "int4": ml_dtypes.int4,
    "int8": np.int8,
}
CODED = [number for number in NUMBERS.values() if not number.is_wide]


def peer_values(number: Number) -> np.ndarray:
    """The value of every code as ml_dtypes reads it."""
    codes = np.arange(1 << number.bits, dtype=np.uint8)
    return codes.view(ML_DTYPES[number.name]).astype(np.float64)


def test_registry_is_keyed_by_name_and_holds_every_number_of_the_specification() -> None:
    assert all(number.name == name for name, number in NUMBERS.items())
    assert list(NUMBERS) == ["e2m1", "e2m3", "e3m2", "e4m3", "e5m2", "e8m0", "int4", "int8", "fp16", "bf16", "fp32"]


@pytest.mark.parametrize("number", CODED, ids=lambda n: n.name)
def test_values_of_every_code(number: Number) -> None:
    np.testing.assert_array_equal(number.values().double().numpy(), peer_values(number))


@pytest.mark.parametrize("number", CODED, ids=lambda n: n.name)
def test_decode_of_every_code(number: Number) -> None:
    codes = torch.arange(1 << number.bits, dtype=torch.uint8)
    if number.torch_dtype not in (None, torch.uint8):
        codes = codes.view(number.torch_dtype)
    value = decode(codes, number)
    np.testing.assert_array_equal(value.double().numpy(), peer_values(number))
    # Zeros keep their sign, which assert_array_equal does not see.
    finite = ~value.isnan()
    np.testing.assert_array_equal(value.signbit()[finite].numpy(), np.signbit(peer_values(number))[finite.numpy()])


@pytest.mark.parametrize("number", [n for n in CODED if not n.is_integer and n.signed], ids=lambda n: n.name)
def test_fields_of_small_floats_against_finfo(number: Number) -> None:
    info = ml_dtypes.finfo(ML_DTYPES[number.name])
    assert number.bits == info.bits
    assert number.max == float(info.max)
    assert number.min_normal == float(info.smallest_normal)
    assert number.min_subnormal == float(info.smallest_subnormal)
    assert number.mantissa == info.nmant
    assert number.max_exponent == np.floor(np.log2(float(info.max)))


def test_fields_of_e8m0_and_integers() -> None:
    info = ml_dtypes.finfo(ml_dtypes.float8_e8m0fnu)
    assert (E8M0.max, E8M0.min_subnormal, E8M0.max_code) == (float(info.max), float(info.smallest_normal), 254)
    assert (INT4.max_code, INT4.min_normal, INT4.min_subnormal, INT4.bits) == (7, 1.0, 1.0, 4)
    assert (INT8.max_code, INT8.min_normal, INT8.min_subnormal, INT8.bits) == (127, 1.0, 1.0, 8)
    info = ml_dtypes.iinfo(ml_dtypes.int4)
    assert (INT4.min, INT4.max) == (float(info.min), float(info.max)) and (INT8.min, INT8.max) == (-127.0, 127.0)


def test_largest_codes_as_the_specifications_write_them() -> None:
    assert (E2M1.max_code, E2M3.max_code, E3M2.max_code) == (0b0_11_1, 0b0_11_111, 0b0_111_11)
    assert (E4M3.max_code, E5M2.max_code) == (0b0_1111_110, 0b0_11110_11)


@pytest.mark.parametrize("number", CODED, ids=lambda n: n.name)
def test_grid_is_every_non_negative_finite_value_once_in_order(number: Number) -> None:
    values = peer_values(number)
    expected = np.unique(values[np.isfinite(values) & ~np.signbit(values)])
    np.testing.assert_array_equal(number.grid().double().numpy(), expected)


@pytest.mark.parametrize(("number", "dtype"), [(FP16, torch.float16), (BF16, torch.bfloat16), (FP32, torch.float32)])
def test_wide_numbers_against_torch(number: Number, dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    assert (number.bits, number.max, number.min_normal) == (info.bits, info.max, info.tiny)
    assert number.min_subnormal == info.tiny * info.eps
    with pytest.raises(ValueError, match=f"{number.name} has 2.{info.bits} codes"):
        number.values()
