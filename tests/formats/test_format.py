"""The registry is complete, and `Format` counts the bytes of what `quantize` returns."""

import copy
import math
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quant.formats.format import (
    BF16,
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    E8M0,
    FORMATS,
    FP32,
    INT4,
    INT8,
    Format,
    get_format,
    packed_width,
    parse_format,
)
from quant.formats.tensor import quantize

# element, block, block scale, global scale, and bits a weight in the limit of a large matrix, scales counted.
TABLE = {
    "fp8": (E4M3, (0, 0), FP32, False, 8),
    "fp8_channel": (E4M3, (1, 0), FP32, False, 8),
    "fp8_block": (E4M3, (128, 128), FP32, False, 8 + 32 / 128**2),
    "mxfp8": (E4M3, (1, 32), E8M0, False, 8.25),
    "mxfp8_e5m2": (E5M2, (1, 32), E8M0, False, 8.25),
    "mxfp6": (E2M3, (1, 32), E8M0, False, 6.25),
    "mxfp6_e3m2": (E3M2, (1, 32), E8M0, False, 6.25),
    "mxfp4": (E2M1, (1, 32), E8M0, False, 4.25),
    "nvfp4": (E2M1, (1, 16), E4M3, True, 4.5),
    "int8": (INT8, (1, 0), FP32, False, 8),
    "int4": (INT4, (1, 128), BF16, False, 4.125),
    "int4_g64": (INT4, (1, 64), BF16, False, 4.25),
    "int4_g32": (INT4, (1, 32), BF16, False, 4.5),
}
SHAPES = [(1, 1), (1, 16), (3, 17), (4, 32), (128, 128), (130, 257), (64, 1030), (2, 5, 33), (3, 2, 4, 40)]


@pytest.mark.parametrize("name", TABLE)
def test_table_of_the_specification(name: str) -> None:
    format = get_format(name)
    element, block, scale, global_scale, bits = TABLE[name]
    assert (format.element, format.block, format.scale, format.global_scale) == (element, block, scale, global_scale)
    assert format.bits_per_weight() == bits
    assert str(format) == name


def test_registry_is_keyed_by_name_and_unknown_names_list_the_known() -> None:
    assert all(format.name == name and get_format(name) is format for name, format in FORMATS.items())
    with pytest.raises(ValueError, match="unknown format 'fp5'; known formats: ") as error:
        get_format("fp5")
    assert all(f" {name}" in str(error.value) for name in FORMATS)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_bytes_are_those_of_the_tensors(format: Format, shape: tuple[int, ...]) -> None:
    quantized = quantize(torch.randn(shape), format)
    # An INT4 scale is a BF16 value, held as float32 in memory and counted as the two bytes that are written.
    scale_bytes = quantized.scale.numel() * 2 if format.scale is BF16 else quantized.scale.nbytes
    stored = quantized.codes.nbytes + scale_bytes
    if quantized.global_scale is not None:
        stored += quantized.global_scale.nbytes
    assert quantized.nbytes == format.nbytes(shape) == stored
    assert format.bits_per_weight(shape) == 8 * stored / math.prod(shape)
    assert quantized.codes.shape == format.codes_shape(shape)
    assert quantized.scale.shape == format.scale_shape(shape)


@pytest.mark.parametrize(
    ("name", "shape", "bits"),
    [
        ("fp8", (64, 256), 8 + 32 / (64 * 256)),
        ("fp8_channel", (64, 256), 8 + 32 / 256),
        ("int8", (64, 256), 8 + 32 / 256),
        ("nvfp4", (64, 256), 4.5 + 32 / (64 * 256)),
        ("nvfp4", (8, 64, 256), 4.5 + 32 / (64 * 256)),
        ("mxfp4", (64, 33), (17 + 2) * 8 / 33),
        ("mxfp6", (64, 33), (25 + 2) * 8 / 33),
        ("fp8_block", (129, 1), (129 + 2 * 4) * 8 / 129),
        ("int4", (1, 129), (65 + 2 * 2) * 8 / 129),
    ],
)
def test_bits_per_weight_of_a_shape_by_hand(name: str, shape: tuple[int, ...], bits: float) -> None:
    assert get_format(name).bits_per_weight(shape) == bits


@given(shape=st.lists(st.integers(1, 300), min_size=2, max_size=4), name=st.sampled_from(sorted(FORMATS)))
def test_bits_per_weight_tends_to_its_limit_from_above(shape: list[int], name: str) -> None:
    format = FORMATS[name]
    assert format.bits_per_weight(shape) >= format.bits_per_weight()
    large = (1 << 14, 1 << 14)
    assert format.bits_per_weight(large) == pytest.approx(format.bits_per_weight(), abs=0.002)


@given(width=st.integers(1, 4096))
def test_packed_width_is_the_smallest_number_of_whole_bytes(width: int) -> None:
    assert packed_width(width, E2M1) == (width + 1) // 2
    assert packed_width(width, E2M3) == (6 * width + 7) // 8
    assert packed_width(width, E4M3) == packed_width(width, INT8) == packed_width(width, E8M0) == width


@pytest.mark.parametrize(
    ("name", "shape", "divides"),
    [
        ("nvfp4", (3, 48), True),
        ("nvfp4", (3, 40), False),
        ("mxfp6", (1, 96), True),
        ("mxfp6", (1, 80), False),
        ("fp8_block", (130, 256), True),
        ("fp8_block", (128, 200), False),
        ("fp8", (3, 7), True),
        ("int4", (5, 128), True),
        ("int4", (5, 129), False),
    ],
)
def test_divides_looks_at_the_reduction_axis(name: str, shape: tuple[int, int], divides: bool) -> None:
    assert get_format(name).divides(shape) is divides


def test_a_row_is_a_matrix_of_one_row() -> None:
    assert FORMATS["nvfp4"].scale_shape((33,)) == (1, 3)
    assert FORMATS["fp8"].block_shape((33,)) == (1, 33)


@pytest.mark.parametrize("name", [None, "keep", "16bit", "bf16", "fp16"])
def test_16_bit_has_several_names_and_is_no_format(name: str | None) -> None:
    assert parse_format(name) is None
    assert parse_format("fp8") is FORMATS["fp8"]
    with pytest.raises(ValueError, match=r"unknown format 'int16'; known formats: nvfp4, .*, keep; did you mean int8"):
        parse_format("int16")


@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_a_format_of_a_copied_model_is_the_same_object(format: Format) -> None:
    """Its numbers are told apart by identity."""
    assert copy.deepcopy(format) is pickle.loads(pickle.dumps(format)) is format
    other = replace(format, block=(3, 5))
    assert copy.deepcopy(other) is other and pickle.loads(pickle.dumps(other)) == other


@pytest.mark.parametrize(
    ("ask", "names"),
    [
        ("per_tensor", "fp8 int8_tensor"),
        ("per_row", "fp8_channel fp8_token int8 int8_token"),
        ("has_square_blocks", "fp8_block"),
        ("is_static", "nvfp4 fp8 int8_tensor"),
        ("is_nvfp4", "nvfp4"),
        ("has_power_of_two_scales", "mxfp4 mxfp6 mxfp6_e3m2 mxfp8 mxfp8_e5m2"),
        ("is_fp8", "fp8 fp8_channel fp8_block fp8_token fp8_group"),
    ],
)
def test_formats_answer_by_what_they_are_made_of(ask: str, names: str) -> None:
    assert [format.name for format in FORMATS.values() if getattr(format, ask)] == names.split()
    renamed = [replace(format, name="x") for format in FORMATS.values()]
    assert [getattr(format, ask) for format in renamed] == [getattr(format, ask) for format in FORMATS.values()]
