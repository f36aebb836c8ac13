"""Whole tensors equal a plain reference: numpy, ml_dtypes and a loop over blocks, written without `quant.formats`.

The reference states the arithmetic that is promised (float32 divisions, each rounded once) and finds every element
by comparing its distances to all values of the number, in float64, ties to the even code. Codes and scales must
agree exactly, for any shape, dtype and magnitude.
"""

import itertools
import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quant.formats.format import E4M3, FORMATS, Format
from quant.formats.rounding import unpack
from quant.formats.scaling import SCALE_RULES
from quant.formats.tensor import (
    BlockScaledTensor,
    checked_amax,
    fake_quantize,
    quantize,
    quantize_with_scale,
    round_with_scale,
)

GRIDS = {
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}
DTYPES = {torch.float16: np.float16, torch.bfloat16: ml_dtypes.bfloat16, torch.float32: None, torch.float64: None}
F32 = np.float32


def reference_grid(element: str) -> np.ndarray:
    """Non-negative values of an element, float64, indexed by code; with 8, which INT4 has below zero alone."""
    if element.startswith("int"):
        return np.arange(128.0 if element == "int8" else 9.0)
    dtype = GRIDS[element]
    half = 1 << (ml_dtypes.finfo(dtype).bits - 1)
    values = np.arange(half, dtype=np.uint8).view(dtype).astype(np.float64)
    return values[np.isfinite(values)]


def reference_elements(quotient: np.ndarray, element: str) -> np.ndarray:
    """The nearest values, by exhaustive comparison; a tie goes to the even code."""
    grid = reference_grid(element)
    distance = np.abs(np.minimum(np.abs(quotient.astype(np.float64)), grid[-1])[..., None] - grid)
    nearest = distance == distance.min(axis=-1, keepdims=True)
    even = nearest & (np.arange(len(grid)) % 2 == 0)
    code = np.where(nearest.sum(axis=-1) == 2, even.argmax(axis=-1), nearest.argmax(axis=-1))
    values = np.copysign(grid[code], quotient)
    return np.minimum(values, 7) if element == "int4" else values


def reference_scale(amax: np.float32, format: Format, global_scale: np.float32, dtype: torch.dtype) -> np.float32:
    """The `max` rule for one block."""
    top = {"e2m1": 6, "e2m3": 7.5, "e3m2": 28, "e4m3": 448, "e5m2": 57344, "int4": 7, "int8": 127}[format.element.name]
    if format.scale.name == "e4m3":
        ratio = np.clip(amax / (F32(top) * global_scale), F32(2**-9), F32(448))
        return F32(ratio.astype(ml_dtypes.float8_e4m3fn))
    if format.scale.name == "e8m0":
        fraction, exponent = math.frexp(float(amax) / top)
        return F32(2.0 ** max(-127, min(127, exponent - (fraction == 0.5)))) if amax > 0 else F32(2.0**-127)
    scale = amax / F32(top)
    if format.scale.name == "bf16":
        scale = F32(scale.astype(ml_dtypes.bfloat16))
    if scale == 0:
        scale = F32(1)
    if DTYPES[dtype] is not None:
        scale = max(F32(scale.astype(DTYPES[dtype])), F32(ml_dtypes.finfo(DTYPES[dtype]).smallest_subnormal))
    return scale


def reference(w: torch.Tensor, format: Format) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Elements, block scales, global scales and values (float64) of `w` quantized by the `max` rule."""
    x = w.double().numpy().astype(F32).reshape(-1, *w.shape[-2:])
    experts, rows, columns = x.shape
    height, width = format.block[0] or rows, format.block[1] or columns
    elements = np.zeros(x.shape)
    scales = np.zeros((experts, math.ceil(rows / height), math.ceil(columns / width)), F32)
    steps = np.zeros(x.shape, F32)
    globals_ = np.ones(experts, F32)
    for e in range(experts):
        if format.global_scale:
            globals_[e] = np.abs(x[e]).max() / F32(6 * 448) or F32(1)
        for r, c in itertools.product(range(scales.shape[1]), range(scales.shape[2])):
            at = (e, slice(r * height, (r + 1) * height), slice(c * width, (c + 1) * width))
            scales[e, r, c] = reference_scale(np.abs(x[at]).max(), format, globals_[e], w.dtype)
            steps[at] = scales[e, r, c] * globals_[e]
            elements[at] = reference_elements(x[at] / steps[at], format.element.name)
    values = (elements * steps.astype(np.float64)).reshape(w.shape)
    return elements.reshape(w.shape), scales.reshape(*w.shape[:-2], *scales.shape[1:]), globals_, values


def assert_equals_reference(w: torch.Tensor, format: Format) -> BlockScaledTensor:
    quantized = quantize(w, format)
    elements, scales, globals_, values = reference(w, format)
    plain_scale = quantized.scale
    if format.scale.name == "e8m0":
        plain_scale = torch.from_numpy(plain_scale.numpy().view(ml_dtypes.float8_e8m0fnu).astype(F32))
    np.testing.assert_array_equal(plain_scale.float().numpy(), scales)
    np.testing.assert_array_equal(quantized.element_values().double().numpy(), elements)
    if format.global_scale:
        assert quantized.global_scale is not None
        np.testing.assert_array_equal(quantized.global_scale.numpy().reshape(-1), globals_)
    else:
        assert quantized.global_scale is None
    # element · step is one float32 product.
    np.testing.assert_allclose(quantized.dequantize().double().numpy(), values, rtol=2**-24, atol=1e-45)
    return quantized


@st.composite
def weights(draw: st.DrawFn) -> torch.Tensor:
    """Odd shapes, expert stacks and single rows; one magnitude or many; zero blocks; all four dtypes."""
    shape = draw(
        st.one_of(
            st.tuples(st.integers(1, 9), st.integers(1, 70)),
            st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 40)),
            st.tuples(st.just(1), st.integers(100, 300)),
            st.tuples(st.integers(120, 140), st.integers(1, 6)),
        )
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = draw(st.sampled_from(sorted(DTYPES, key=str)))
    limit = 4 if dtype is torch.float16 else 30
    low = draw(st.floats(-30, limit))
    high = draw(st.sampled_from([low, min(low + 3, limit), limit]))
    x = rng.normal(size=shape) * 10.0 ** rng.uniform(low, high, size=shape)
    if draw(st.booleans()):
        x[..., : 3 * shape[-1] // 4] *= rng.random(shape[-1])[: 3 * shape[-1] // 4] < 0.05
    return torch.from_numpy(x).to(dtype)


@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
@settings(max_examples=30)
@given(w=weights())
def test_codes_scales_and_values_equal_the_reference(format: Format, w: torch.Tensor) -> None:
    assert_equals_reference(w, format)


@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_float64_values_are_exact_products(format: Format) -> None:
    """Elements of a float32 weight, multiplied by both scales in float64; float32 rounds the scales' product first."""
    w = torch.randn(3, 24, 160) * torch.tensor([0.013, 1.0, 47.0])[:, None, None]
    quantized = quantize(w, format)
    elements, scales, globals_, _ = reference(w, format)
    height, width = format.block_shape(w.shape)
    exact = scales.astype(np.float64).repeat(height, -2)[:, :24].repeat(width, -1)[..., :160]
    exact *= globals_.astype(np.float64)[:, None, None] * elements
    np.testing.assert_array_equal(quantized.dequantize(torch.float64).numpy(), exact)
    scale = torch.from_numpy(scales)
    np.testing.assert_array_equal(
        round_with_scale(w, format, scale, quantized.global_scale, torch.float64).numpy(), exact
    )


@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
@pytest.mark.parametrize("exponent", [-30, -7, 0, 30])
def test_error_is_half_a_step_of_the_grid(format: Format, exponent: int) -> None:
    """|dequantize(quantize(w)) - w| in float64 against the widest gap of the grid around each value."""
    w = torch.randn(24, 160, dtype=torch.float64) * 10.0**exponent
    quantized = quantize(w, format)
    step = quantized.scale_values().double()
    rows, columns = format.block_shape(w.shape)
    step = step.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:24, :160].numpy()
    grid = reference_grid(format.element.name)
    above = np.searchsorted(grid, np.abs(w.numpy()) / step).clip(1, len(grid) - 1)
    half_gap = (grid[above] - grid[above - 1]) / 2 * step
    # A rounded scale may be below amax / max: E4M3 by 1/16, BF16 by 1/256; the excess saturates.
    excess = np.maximum(np.abs(w.numpy()) - grid[-1] * step, 0)
    error = np.abs(quantized.dequantize(torch.float64).numpy() - w.numpy())
    assert (error <= np.maximum(half_gap, excess) * (1 + 1e-5)).all()


@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_chunked_rows_equal_the_reference(format: Format) -> None:
    """2^18 elements make a chunk: this weight takes several, of which the last is short."""
    w = torch.randn(300, 2049).bfloat16()
    quantized = quantize(w, format)
    for rows in (slice(0, 3), slice(254, 258), slice(298, 300)):
        step = quantized.scale_values()
        height, width = format.block_shape(w.shape)
        step = step.repeat_interleave(height, 0)[:300].repeat_interleave(width, 1)[:, :2049][rows]
        expected = reference_elements((w[rows].float() / step).numpy(), format.element.name)
        np.testing.assert_array_equal(quantized.element_values()[rows].double().numpy(), expected)
        np.testing.assert_array_equal(
            quantized.dequantize()[rows].numpy(), (expected.astype(F32) * step.numpy()).astype(F32)
        )


def defined_rules() -> list[tuple[Format, str]]:
    only = {"ocp": "e8m0", "even": "e8m0", "four_over_six": "e4m3"}
    pairs = itertools.product(FORMATS.values(), SCALE_RULES)
    return [(format, rule) for format, rule in pairs if only.get(rule, format.scale.name) == format.scale.name]


@pytest.mark.parametrize(("format", "rule"), defined_rules(), ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_stay_zeros(format: Format, rule: str, dtype: torch.dtype) -> None:
    w = torch.zeros(2, 6, 70, dtype=dtype)
    w[1, 3:, 64:] = -1.5
    quantized = quantize(w, format, rule=rule)
    scale = quantized.scale_values()
    assert bool(torch.isfinite(scale).all())
    assert bool((scale > 0).all())
    values = quantized.dequantize()
    assert bool((values[w == 0] == 0).all())
    np.testing.assert_allclose(values[w != 0].numpy(), -1.5, rtol=0.15)


@pytest.mark.parametrize("name", ["fp8", "fp8_channel", "fp8_block", "int8", "int4"])
def test_a_tiny_float16_weight_keeps_a_scale(name: str) -> None:
    """amax / max is zero in FP16, whose smallest value, 2^-24, is then the scale; these weights are multiples of it."""
    w = torch.tensor([[1.0, -2.0], [0.0, 3.0]], dtype=torch.float16) * 2.0**-24
    quantized = quantize(w, FORMATS[name])
    assert bool((quantized.scale == 2.0**-24).all())
    assert torch.equal(quantized.dequantize(), w.float())


@pytest.mark.parametrize("rule", ["max", "mse"])
@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_pads_never_change_a_scale(format: Format, rule: str) -> None:
    """A short last block against the same tensor with its zeros written out."""
    w = torch.randn(130, 137) + 3
    height, width = format.block
    padded = torch.nn.functional.pad(w, (0, -137 % width if width else 0, 0, -130 % height if height else 0))
    short, full = quantize(w, format, rule=rule), quantize(padded, format, rule=rule)
    assert torch.equal(short.scale.view(torch.uint8), full.scale.view(torch.uint8))
    assert torch.equal(short.element_values(), full.element_values()[:130, :137])
    assert torch.equal(short.dequantize(), full.dequantize()[:130, :137])


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp6", "int4"])
def test_bits_beyond_an_odd_row_are_clear(name: str) -> None:
    format = FORMATS[name]
    codes = quantize(-torch.ones(3, 5), format).codes
    per_row = codes.shape[-1] * 8 // format.element.bits
    assert unpack(codes, format.element.bits, per_row)[:, 5:].sum() == 0


@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_experts_are_independent_matrices(format: Format) -> None:
    w = torch.randn(3, 9, 50) * torch.tensor([1e-3, 1.0, 1e3])[:, None, None]
    stack = quantize(w, format)
    for e in range(3):
        one = quantize(w[e], format)
        assert torch.equal(stack.codes[e].view(torch.uint8), one.codes.view(torch.uint8))
        assert torch.equal(stack.scale[e].view(torch.uint8), one.scale.view(torch.uint8))
        assert torch.equal(stack.dequantize()[e], one.dequantize())
        if one.global_scale is not None and stack.global_scale is not None:
            assert stack.global_scale[e] == one.global_scale


@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_strided_weights_quantize_like_contiguous_ones(format: Format) -> None:
    w = torch.randn(48, 40)
    strided, plain = quantize(w.t(), format), quantize(w.t().contiguous(), format)
    assert torch.equal(strided.codes.view(torch.uint8), plain.codes.view(torch.uint8))
    assert torch.equal(strided.scale.view(torch.uint8), plain.scale.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["nvfp4", "mxfp6", "fp8_block", "int8"])
def test_dequantize_rounds_once_to_the_dtype(name: str, dtype: torch.dtype) -> None:
    quantized = quantize(torch.randn(33, 70), FORMATS[name])
    expected = quantized.dequantize().numpy().astype(DTYPES[dtype]).astype(F32)
    np.testing.assert_array_equal(quantized.dequantize(dtype).float().numpy(), expected)


def test_a_shared_global_scale_is_used_and_kept() -> None:
    w, shared = torch.randn(8, 32), torch.tensor(0.01)
    quantized = quantize(w, FORMATS["nvfp4"], global_scale=shared)
    assert quantized.global_scale is shared
    amax = w.view(8, 2, 16).abs().amax(-1).numpy()
    expected = (amax / (F32(6) * F32(0.01))).astype(ml_dtypes.float8_e4m3fn).astype(F32)
    np.testing.assert_array_equal(quantized.scale.float().numpy(), expected)


@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_chosen_scales_are_stored_as_given(format: Format) -> None:
    """`quantize_with_scale` rounds against the scales of the caller, here twice too large, and keeps them."""
    w = torch.randn(5, 70)
    first = quantize(w, format)
    doubled = reference(w, format)[1] * F32(2)
    if format.scale is E4M3:
        doubled = np.minimum(doubled, F32(448))
    second = quantize_with_scale(w, format, torch.from_numpy(doubled), first.global_scale)
    global_scale = F32(1) if first.global_scale is None else first.global_scale.numpy()
    height, width = format.block_shape(w.shape)
    step = np.repeat(np.repeat(doubled * global_scale, height, 0), width, 1)[:5, :70]
    expected = reference_elements(w.numpy() / step, format.element.name)
    np.testing.assert_array_equal(second.element_values().double().numpy(), expected)
    np.testing.assert_array_equal(second.dequantize().numpy(), expected.astype(F32) * step)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(4, 33), (2, 3, 16)])
def test_nan_and_infinity_are_refused_with_name_and_count(bad: float, dtype: torch.dtype, shape: tuple[int]) -> None:
    w = torch.randn(shape, dtype=dtype)
    w.view(-1)[[0, 7, -1]] = bad
    for format in FORMATS.values():
        with pytest.raises(ValueError, match=r"^layers\.3\.down_proj \[.*\]: 3 NaN or infinite value"):
            quantize(w, format, name="layers.3.down_proj")


def test_float64_beyond_float32_is_refused() -> None:
    with pytest.raises(ValueError, match="1 NaN or infinite"):
        quantize(torch.tensor([[1.0, 1e39]], dtype=torch.float64), FORMATS["fp8"])


@pytest.mark.parametrize(
    ("w", "message"),
    [
        (torch.ones(4, 4, dtype=torch.int32), r"w \[4, 4\]: dtype torch.int32 cannot be quantized"),
        (torch.ones(4, 4).to(torch.float8_e4m3fn), r"w \[4, 4\]: dtype torch.float8_e4m3fn cannot be quantized"),
        (torch.ones(0, 4), r"w \[0, 4\]: expected a non-empty"),
        (torch.ones(4), r"w \[4\]: expected a non-empty"),
    ],
)
def test_what_is_no_weight_is_refused(w: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantize(w, FORMATS["nvfp4"], name="w")


def test_checked_amax_of_every_matrix() -> None:
    w = torch.randn(3, 2, 5, 7).bfloat16()
    np.testing.assert_array_equal(checked_amax(w, "w").numpy(), np.abs(w.float().numpy()).max(axis=(2, 3)))


@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_fake_quantize_is_quantize_and_dequantize(format: Format) -> None:
    x = torch.randn(2, 5, 70) * torch.logspace(-3, 3, 5)[:, None]
    values = reference(x.view(10, 70), format)[3].reshape(x.shape)
    np.testing.assert_allclose(fake_quantize(x, format).double().numpy(), values, rtol=2**-23)
    half = x.bfloat16()
    out = fake_quantize(half, format)
    assert out.dtype is torch.bfloat16
    expected = reference(half.float().view(10, 70), format)[3].astype(F32).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(out.float().numpy().reshape(10, 70), expected.astype(F32))


def test_fake_quantize_with_static_scales() -> None:
    x = torch.randn(3, 48) * 4
    scale = torch.tensor(0.004)
    expected = np.clip(x.numpy() / F32(0.004), -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(F32) * F32(0.004)
    np.testing.assert_array_equal(fake_quantize(x, FORMATS["fp8"], scale=scale).numpy(), expected)
    second = torch.tensor(0.002)
    expected = quantize(x, FORMATS["nvfp4"], global_scale=second).dequantize().numpy()
    np.testing.assert_array_equal(fake_quantize(x, FORMATS["nvfp4"], global_scale=second).numpy(), expected)


def test_fake_quantize_of_no_tokens_and_of_zeros() -> None:
    for format in FORMATS.values():
        assert fake_quantize(torch.ones(0, 32), format).shape == (0, 32)
        assert torch.equal(fake_quantize(torch.zeros(2, 40), format), torch.zeros(2, 40))


def test_to_moves_every_tensor() -> None:
    quantized = quantize(torch.randn(4, 32), FORMATS["nvfp4"]).to("meta")
    assert quantized.global_scale is not None
    assert {t.device.type for t in (quantized.codes, quantized.scale, quantized.global_scale)} == {"meta"}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("elements", [1, 64 * 50, 10**6])
def test_runs_of_rows_are_the_whole(name: str, elements: int) -> None:
    weight = torch.randn(300, 256, generator=torch.Generator().manual_seed(0))
    whole = quantize(weight, FORMATS[name])
    values = whole.dequantize()
    seen = 0
    for rows, part in whole.row_chunks(elements):
        assert rows.start == seen and part.shape == (rows.stop - rows.start, 256)
        assert torch.equal(part.dequantize(), values[rows])
        seen = rows.stop
    assert seen == 300
