"""Scale rules are compared with brute force over every scale code, and with formulas written independently of them."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from quant.formats.format import E4M3, FORMATS, NUMBERS, Format
from quant.formats.scaling import HEADROOM, SCALE_RULES, global_scale_of, scale_of
from quant.formats.tensor import BlockScaledTensor, quantize

MX = [format for format in FORMATS.values() if format.scale.name == "e8m0"]
NVFP4 = FORMATS["nvfp4"]
OTHERS = [format for format in FORMATS.values() if format.scale.is_wide]
# w4a8nvfp4 of ModelOpt: NVFP4 over blocks of 32.
NVFP4_32 = replace(NVFP4, block=(1, 32))


def awkward_weight(columns: int, magnitude: float) -> torch.Tensor:
    """Blocks in which the best scale is hard to guess: heavy tails, plateaus between grid points, one spike, zeros."""
    generator = torch.Generator().manual_seed(columns)
    normal = torch.randn(12, columns, generator=generator)
    heavy = torch.randn(12, columns, generator=generator) ** 5
    plateaus = torch.linspace(0.3, 6, 24)[:, None] * (1 + 0.02 * torch.randn(24, columns, generator=generator))
    spike = 0.4 * torch.randn(6, columns, generator=generator)
    spike[:, ::16] = 6
    zeros = torch.zeros(1, columns)
    return torch.cat([normal, heavy, plateaus, spike, zeros]) * magnitude


def blocks_of(w: torch.Tensor, format: Format) -> np.ndarray:
    """[blocks, block size] in float64."""
    return w.double().numpy().reshape(-1, format.block[1])


def block_errors(blocks: np.ndarray, step: np.ndarray, element: str) -> np.ndarray:
    """Squared error of each block, float64, with each value at its nearest grid point by exhaustive comparison."""
    grid = NUMBERS[element].grid().double().numpy()
    grid = np.concatenate([[-8] if element == "int4" else [], -grid[:0:-1], grid])
    scaled = blocks / step[:, None]
    above = np.searchsorted(grid, scaled).clip(1, len(grid) - 1)
    distance = np.minimum(np.abs(scaled - grid[above]), np.abs(scaled - grid[above - 1]))
    return ((distance * step[:, None]) ** 2).sum(axis=1)


def chosen_errors(quantized: BlockScaledTensor, w: torch.Tensor) -> np.ndarray:
    step = quantized.scale_values().double().numpy().reshape(-1)
    return block_errors(blocks_of(w, quantized.format), step, quantized.format.element.name)


@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("format", [NVFP4, NVFP4_32], ids=["16", "32"])
def test_nvfp4_mse_equals_brute_force_over_every_e4m3_code(format: Format, magnitude: float) -> None:
    w = awkward_weight(64, magnitude)
    quantized = quantize(w, format, rule="mse")
    assert quantized.global_scale is not None
    blocks = blocks_of(w, format)
    steps = E4M3.grid()[1:].double().numpy() * float(quantized.global_scale)
    assert len(steps) == 126
    best = np.min([block_errors(blocks, np.full(len(blocks), step), "e2m1") for step in steps], axis=0)
    np.testing.assert_allclose(chosen_errors(quantized, w), best, rtol=1e-5, atol=1e-12 * magnitude**2)


def test_nvfp4_mse_is_exact_in_the_subnormal_scales_too() -> None:
    """One huge weight pushes the other blocks' scales to the first E4M3 codes, which are spaced evenly."""
    generator = torch.Generator().manual_seed(1)
    levels = torch.linspace(0.2, 40, 400)[:, None] * (1 + 0.03 * torch.randn(400, 16, generator=generator))
    w = torch.cat([torch.full((1, 16), 6 * 256.0), levels * 2**-9])
    quantized = quantize(w, NVFP4, rule="mse")
    assert quantized.global_scale is not None
    assert quantized.global_scale == 1
    assert int((quantized.scale[1:].view(torch.uint8) < 16).sum()) > 200
    blocks = blocks_of(w, NVFP4)
    best = np.min(
        [block_errors(blocks, np.full(len(blocks), s), "e2m1") for s in E4M3.grid()[1:].double().numpy()], axis=0
    )
    np.testing.assert_allclose(chosen_errors(quantized, w), best, rtol=1e-5)


@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("format", MX, ids=str)
def test_mx_mse_equals_brute_force_over_every_exponent(format: Format, magnitude: float) -> None:
    w = awkward_weight(64, magnitude)
    quantized = quantize(w, format, rule="mse")
    blocks = blocks_of(w, format)
    best = np.min(
        [block_errors(blocks, np.full(len(blocks), 2.0**e), format.element.name) for e in range(-127, 128)], axis=0
    )
    np.testing.assert_allclose(chosen_errors(quantized, w), best, rtol=1e-5, atol=1e-12 * magnitude**2)


@pytest.mark.parametrize("format", OTHERS, ids=str)
def test_mse_of_float_scales_against_a_dense_search(format: Format) -> None:
    """The search is a grid of 1% steps: never worse than `max`, and within 2% of steps ten times finer."""
    w = awkward_weight(128, 1.0)
    columns = format.block_shape(w.shape)[1]
    if format.block[0] == 1:
        quantized, plain = quantize(w, format, rule="mse"), quantize(w, format)
        rows = replace(format, block=(1, columns))
        found = chosen_errors(replace(quantized, format=rows), w)
        shrinks = np.linspace(0.36, 1, 641)
        steps = plain.scale.double().numpy().reshape(-1)
        name = format.element.name
        dense = np.min([block_errors(blocks_of(w, rows), steps * shrink, name) for shrink in shrinks], axis=0)
        assert (found <= chosen_errors(replace(plain, format=rows), w) * (1 + 1e-6)).all()
        assert found.sum() <= 1.02 * dense.sum()
    else:
        errors = {rule: (quantize(w, format, rule=rule).dequantize() - w).square().sum() for rule in ("max", "mse")}
        assert errors["mse"] <= errors["max"]


@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 1e30])
def test_four_over_six_keeps_the_better_of_the_two_grids(magnitude: float) -> None:
    w = awkward_weight(64, magnitude)
    global_scale = global_scale_of(w.abs().amax(), NVFP4, "four_over_six")
    assert float(global_scale) == float(w.abs().amax() / np.float32(6 * 256))
    chosen = chosen_errors(quantize(w, NVFP4, rule="four_over_six"), w)
    amax = np.abs(blocks_of(w, NVFP4)).max(axis=1)
    errors = []
    for top in (6, 4):
        ratio = torch.from_numpy(amax / top / float(global_scale)).float().clamp(2**-9, 448)
        step = ratio.to(torch.float8_e4m3fn).double().numpy() * float(global_scale)
        errors.append(block_errors(blocks_of(w, NVFP4), step, "e2m1"))
    np.testing.assert_allclose(chosen, np.minimum(*errors), rtol=1e-5, atol=1e-12 * magnitude**2)
    assert 0.1 < np.mean(errors[1] < errors[0]) < 0.9  # both grids are needed
    by_max = chosen_errors(quantize(w, NVFP4, rule="max", global_scale=global_scale), w)
    assert (chosen <= by_max * (1 + 1e-5)).all()


def test_four_over_six_by_hand() -> None:
    """Fives are a tie between 4 and 6 on the grid of six; 4 / 6 of the way up they lie near 3.33: 3 is nearer."""
    w = torch.full((1, 32), 5.0)
    w[0, 0] = w[0, 16] = 6.0
    w[0, 17:] = 3.0
    w = torch.cat([w, torch.full((1, 32), 6 * 256.0)])
    quantized = quantize(w, NVFP4, rule="four_over_six")
    assert quantized.scale[0].float().tolist() == [1.5, 1.0]
    assert quantized.element_values()[0, :2].tolist() == [4.0, 3.0]
    assert quantized.element_values()[0, 16:18].tolist() == [6.0, 3.0]


def test_headroom_of_the_global_scale() -> None:
    assert HEADROOM == {"max": 448.0, "four_over_six": 256.0, "mse": 256.0}
    amax = torch.tensor([3.0, 0.0])
    assert global_scale_of(amax, NVFP4).tolist() == [float(np.float32(3) / np.float32(2688)), 1.0]
    assert global_scale_of(amax, NVFP4, "mse").tolist() == [float(np.float32(3) / np.float32(1536)), 1.0]


def every_bfloat16_amax(element: str) -> torch.Tensor:
    """A row a positive bfloat16 value whose scale exponent lies inside E8M0's range: [values, 32], the amax first."""
    values = torch.arange(1, 0x7F80, dtype=torch.int16).view(torch.bfloat16)
    values = values[values.float() >= 2.0 ** (NUMBERS[element].max_exponent - 126)]
    w = torch.zeros(len(values), 32, dtype=torch.bfloat16)
    w[:, 5] = values
    return w


def floor_log2(x: float) -> int:
    return math.frexp(x)[1] - 1


@pytest.mark.parametrize("format", MX, ids=str)
def test_max_ocp_and_even_for_every_bfloat16_amax(format: Format) -> None:
    w = every_bfloat16_amax(format.element.name)
    amax = w[:, 5].double().tolist()
    emax = floor_log2(format.element.max)
    # The smallest exponent at which amax does not exceed the largest element.
    expected = [127 + math.ceil(math.log2(a / format.element.max)) for a in amax]
    assert quantize(w, format, rule="max").scale.flatten().tolist() == expected
    expected = [127 + floor_log2(a) - emax for a in amax]
    assert quantize(w, format, rule="ocp").scale.flatten().tolist() == expected
    points = 2 ** (format.element.mantissa if format.element.bits == 6 else 1)
    mantissa = [math.floor(a / 2.0 ** floor_log2(a) * points + 0.5) / points for a in amax]
    expected = [127 + floor_log2(a) - emax + (m == 2) for a, m in zip(amax, mantissa, strict=True)]
    assert quantize(w, format, rule="even").scale.flatten().tolist() == expected


@pytest.mark.parametrize("name", ["mxfp4", "mxfp6", "mxfp8"])
def test_even_equals_compressed_tensors(name: str) -> None:
    pytest.importorskip("compressed_tensors", "0.20", reason="defines these scales for elements of 4, 6 and 8 bits")
    from compressed_tensors.quantization.utils import mxfp_utils

    format = FORMATS[name]
    w = every_bfloat16_amax(format.element.name)
    # An amax that rounds up to 2^128 becomes infinite there; the formula above covers those for ours.
    w = w[w[:, 5] < 1.5 * 2.0**127]
    expected = mxfp_utils.generate_mx_scales(w[:, 5].clone(), num_bits=format.element.bits)
    assert torch.equal(quantize(w, format, rule="even").scale.flatten(), expected.to(torch.uint8))


def test_mx_rules_saturate_as_they_should() -> None:
    """amax 7 in E2M1: `max` doubles the scale, `ocp` saturates 7 to 6, `even` rounds 7 to 8 and doubles too."""
    w = torch.zeros(1, 32)
    w[0, :3] = torch.tensor([7.0, -3.0, 0.25])
    for rule, scale, values in [("max", 2, [8, -3, 0]), ("ocp", 1, [6, -3, 0]), ("even", 2, [8, -3, 0])]:
        quantized = quantize(w, FORMATS["mxfp4"], rule=rule)
        assert quantized.scale_values().item() == scale
        assert quantized.dequantize()[0, :3].tolist() == values


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_rules_are_refused_where_they_are_not_defined(format: Format, rule: str) -> None:
    defined = {"ocp": format in MX, "even": format in MX, "four_over_six": format is NVFP4}.get(rule, True)
    w = torch.randn(4, 64)
    if defined:
        # Whatever the choice of scale, no value ends further off than the widest step, or the loss of saturation.
        error = (quantize(w, format, rule=rule).dequantize() - w).abs().amax()
        assert error <= w.abs().amax() / 2
        return
    with pytest.raises(ValueError, match=rf"'{rule}' is defined for .*, not for {format}; use 'max' or 'mse'"):
        quantize(w, format, rule=rule)


def test_unknown_rule_lists_the_known() -> None:
    with pytest.raises(ValueError, match="unknown scale rule 'best'; known rules: max, ocp, even, four_over_six, mse"):
        quantize(torch.ones(1, 16), NVFP4, rule="best")


def test_scale_of_is_the_quotient_rounded_once_and_one_for_zero() -> None:
    amax = torch.tensor([0.0, 3e-45, 1.0, 100.1, 3e38])
    quotients = (amax.double() / 448).float().tolist()
    assert scale_of(amax, 448.0).tolist() == [1.0, 1.0, *quotients[2:]]  # 3e-45 / 448 is no float32 but zero
