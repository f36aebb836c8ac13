"""Observers are compared with numpy, scipy, brute force over ml_dtypes, and ModelOpt's calibrators."""

import math
from random import Random

import ml_dtypes
import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from quant.calibration.observers import (
    MSE,
    OBSERVERS,
    Entropy,
    Histogram,
    Percentile,
    block_amax,
    divergences,
    get_observer,
    squared_errors,
)
from quant.formats.format import E2M1, E3M2, E4M3, E5M2, FORMATS, FP32, INT8, NUMBERS, Format, Number
from quant.formats.tensor import fake_quantize
from quant.recipes import solver_names

FP8, NVFP4 = FORMATS["fp8"], FORMATS["nvfp4"]
INT8_TENSOR = Format("int8_tensor", INT8, FP32, (0, 0))
FP4_TENSOR = Format("fp4_tensor", E2M1, FP32, (0, 0))


def heavy_tailed(*shape: int) -> torch.Tensor:
    """Values as activations have them: channels of different size, and a few outliers."""
    return torch.randn(*shape) * torch.randn(shape[-1]).exp() + 30 * (torch.rand(*shape) < 1e-4)


def histogram_of(x: torch.Tensor, bins: int = 4096) -> Histogram:
    histogram = Histogram(bins)
    histogram.add(x.abs(), float(x.abs().max()))
    return histogram


def rounded(x: np.ndarray, number: Number, amax: float) -> np.ndarray:
    """Non-negative `x` rounded with scale amax / max, by ml_dtypes or numpy, in float64 around it."""
    steps = np.clip(x / (amax / number.max), 0, number.max)
    if number.is_integer:
        return np.rint(steps) * (amax / number.max)
    peer = {
        "e2m1": ml_dtypes.float4_e2m1fn,
        "e3m2": ml_dtypes.float6_e3m2fn,
        "e4m3": ml_dtypes.float8_e4m3fn,
        "e5m2": ml_dtypes.float8_e5m2,
    }[number.name]
    return steps.astype(np.float32).astype(peer).astype(np.float64) * (amax / number.max)


# The histogram


@given(
    st.lists(st.lists(st.floats(0, 2.0**100, width=32), min_size=1, max_size=20), min_size=1, max_size=6),
    st.sampled_from([2, 64, 4096]),
    st.randoms(),
)
def test_histogram_does_not_depend_on_order_or_split(batches: list[list[float]], bins: int, random: Random) -> None:
    whole = histogram_of(torch.tensor([x for batch in batches for x in batch]), bins)
    parts = Histogram(bins)
    random.shuffle(batches)
    for batch in batches:
        random.shuffle(batch)
        parts.add(torch.tensor(batch), max(torch.tensor(batch).tolist()))
    assert (parts.exponent, parts.amax, parts.zeros) == (whole.exponent, whole.amax, whole.zeros)
    assert torch.equal(parts.counts, whole.counts)


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1.0, 1e30, 1e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_counts_equal_numpys(scale: float, dtype: torch.dtype) -> None:
    x = (torch.rand(5000, dtype=torch.float64) * scale).to(dtype)
    x[:100] = 0
    histogram = Histogram(1024)
    for batch in x.split(617):
        histogram.add(batch, float(batch.max()))
    values = x.double().numpy()
    edges = np.arange(1025) * histogram.width
    expected, _ = np.histogram(values[values > 0], edges)
    np.testing.assert_array_equal(histogram.counts.numpy(), expected)
    assert (int(histogram.zeros), histogram.total) == (int((values == 0).sum()), 5000)
    assert histogram.amax == values.max()
    assert histogram.counts[histogram.used - 1] > 0
    assert histogram.counts[histogram.used :].sum() == 0
    assert scale < 1e-30 or histogram.used > 512


def test_bins_must_merge_in_pairs() -> None:
    with pytest.raises(ValueError, match="bins=1000 must be a power of two"):
        Histogram(1000)


@pytest.mark.parametrize("percent", [0.0, 1.0, 30.0, 50.0, 99.0, 99.9, 99.99, 100.0])
@pytest.mark.parametrize("zeros", [0, 3000])
def test_percentile_equals_numpys_to_one_bin(percent: float, zeros: int) -> None:
    x = torch.cat([heavy_tailed(40, 256).flatten(), torch.zeros(zeros)])
    histogram = Histogram()
    for batch in x[torch.randperm(len(x))].split(1000):
        histogram.add(batch.abs(), float(batch.abs().max()))
    expected = np.percentile(x.abs().double().numpy(), percent)
    assert histogram.percentile(percent) == pytest.approx(expected, abs=histogram.width)


def test_percentile_between_two_distant_values() -> None:
    # The rank 99.5% of 101 values lies half-way between 1 and 1000.
    x = torch.tensor([1.0] * 100 + [1000.0])
    assert np.percentile(x.numpy(), 99.5) == 500.5
    assert histogram_of(x).percentile(99.5) == pytest.approx(500.5, abs=0.25)


# The criteria


@pytest.mark.parametrize("number", [E2M1, E3M2, E4M3, E5M2, INT8], ids=lambda n: n.name)
def test_squared_errors_equal_those_of_values_spread_over_the_bins(number: Number) -> None:
    histogram = histogram_of(torch.randn(3000), bins=64)
    within = (np.arange(20000) + 0.5) / 20000
    values = (np.arange(64)[:, None] + within) * histogram.width
    amax = histogram.amax * torch.tensor([1.3, 1.0, 0.7, 0.31, 0.05, 0.001], dtype=torch.float64)
    expected = [
        ((rounded(values, number, float(a)) - values) ** 2).mean(axis=1) @ histogram.counts.numpy() for a in amax
    ]
    np.testing.assert_allclose(squared_errors(histogram, number, amax).numpy(), expected, rtol=2e-4)


@pytest.mark.parametrize("format", [FP8, INT8_TENSOR, FP4_TENSOR], ids=str)
@pytest.mark.parametrize("draw", ["normal", "laplace", "heavy_tailed", "outlier"])
def test_mse_is_as_good_as_brute_force_on_the_data_itself(format: Format, draw: str) -> None:
    x = {
        "normal": torch.randn(64, 512),
        "laplace": torch.distributions.Laplace(0.0, 1.0).sample((64, 512)),
        "heavy_tailed": heavy_tailed(64, 512),
        "outlier": torch.cat([torch.randn(511, 64), torch.full((1, 64), 20.0)]),
    }[draw]
    observer = MSE(format)
    for batch in x.split(10):
        observer.update(batch)
    values = x.abs().flatten().double().numpy()

    def error(amax: float) -> float:
        return float(((rounded(values, format.element, amax) - values) ** 2).sum())

    best = min(error(amax) for amax in values.max() * np.linspace(0.01, 1, 400))
    # What is left is where in their bins the few largest values lie, which a histogram does not know.
    assert error(float(observer.amax())) <= 1.02 * best


def test_mse_clips_an_outlier_from_integers_and_not_from_floats() -> None:
    x = torch.randn(1 << 20)
    x[0] = 40.0
    integer, floating = MSE(INT8_TENSOR), MSE(FP8)
    integer.update(x)
    floating.update(x)
    assert 4 < float(integer.amax()) < 20
    assert float(floating.amax()) > 30


def brute_force_divergence(histogram: Histogram, number: Number, end: int) -> float:
    """KL divergence when clipped after `end` bins, bin by bin, the distributions written out and left to scipy."""
    counts = histogram.counts.numpy().astype(np.float64)[: histogram.used]
    reference = counts[:end].copy()
    reference[-1] += counts[end:].sum()
    # In units of bins the clipped range is [0, end], so this is the grid point nearest to each bin's centre.
    grid = number.grid().double().numpy() * end / number.max
    cells = np.searchsorted((grid[1:] + grid[:-1]) / 2, np.arange(end) + 0.5, side="right")
    quantized = np.zeros(end)
    for cell in set(cells):
        members = (cells == cell) & (counts[:end] > 0)
        if members.any():
            quantized[members] = counts[:end][cells == cell].sum() / members.sum()
    return float(scipy.stats.entropy(reference, quantized))


@pytest.mark.parametrize("number", [E2M1, E4M3, INT8], ids=lambda n: n.name)
@pytest.mark.parametrize("samples", [300, 50000])
def test_divergences_equal_scipys(number: Number, samples: int) -> None:
    histogram = histogram_of(torch.randn(samples) * torch.rand(samples).exp(), bins=512)
    ends, found = divergences(histogram, number)
    assert ends[0] >= min(number.max_code + 1, histogram.used)
    assert ends.tolist() == list(range(int(ends[0]), histogram.used + 1))
    counts = histogram.counts.double()
    assert counts[: ends[0]].sum() >= counts.sum() / 2
    expected = [brute_force_divergence(histogram, number, int(end)) for end in ends]
    assert samples > 300 or np.isinf(expected).any()
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("format", [FP8, INT8_TENSOR, FP4_TENSOR], ids=str)
def test_entropy_takes_the_smallest_divergence(format: Format) -> None:
    observer = Entropy(format, bins=1024)
    observer.update(heavy_tailed(1024, 128))
    histogram = observer.histogram
    start = format.element.max_code + 1
    expected = [brute_force_divergence(histogram, format.element, end) for end in range(start, histogram.used + 1)]
    end = start + int(np.argmin(expected))
    assert float(observer.amax()) == pytest.approx(min(end * histogram.width, histogram.amax), rel=1e-6)


@pytest.mark.parametrize("format", [FP8, INT8_TENSOR], ids=str)
def test_entropy_of_few_values_does_not_clip_their_bulk(format: Format) -> None:
    # Block maxima after a rotation look like this: far from zero, close together, and few of them.
    x = 1 + 0.2 * torch.randn(9000).clamp(-4, 4)
    observer = Entropy(format)
    observer.update(x)
    assert float(observer.amax()) > np.percentile(x.abs().numpy(), 99)


def test_merging_bins_equals_counting_in_fewer() -> None:
    x = heavy_tailed(64, 64)
    merged, direct = histogram_of(x, 4096).merged(256), histogram_of(x, 256)
    assert torch.equal(merged.counts, direct.counts)
    assert (merged.width, merged.amax, merged.total) == (direct.width, direct.amax, direct.total)


# Global scales: what is watched are the blocks, and what is rounded are their scales


def test_nvfp4_watches_the_blocks() -> None:
    x = heavy_tailed(64, 160)
    blocks = np.abs(x.numpy()).reshape(64, 10, 16).max(-1)
    np.testing.assert_array_equal(block_amax(x, NVFP4).numpy(), blocks)
    observer = Percentile(NVFP4, percentile=90)
    observer.update(x)
    assert float(observer.amax()) == pytest.approx(np.percentile(blocks, 90), abs=observer.histogram.width)


def test_nvfp4_mse_rounds_no_worse_than_absmax() -> None:
    # E4M3 holds block scales over 17 octaves, so there is little to win; the search must not lose it either.
    x = heavy_tailed(128, 256)
    observer = MSE(NVFP4)
    observer.update(x)

    def error(amax: float) -> float:
        return float((fake_quantize(x, NVFP4, global_scale=torch.tensor(amax / 2688)) - x).square().sum())

    candidates = float(x.abs().max()) * np.linspace(0.2, 1, 25)
    best = min(error(amax) for amax in candidates)
    assert error(float(observer.amax())) <= 1.02 * best


# absmax and shapes


@pytest.mark.parametrize("format", [FP8, NVFP4], ids=str)
@pytest.mark.parametrize("name", OBSERVERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_batches_may_differ_in_shape_order_and_dtype(name: str, format: Format, dtype: torch.dtype) -> None:
    batches = [heavy_tailed(rows, 64).to(dtype) for rows in (100, 3, 57)]
    one, two, three = (OBSERVERS[name](format) for _ in range(3))
    for batch in batches:
        one.update(batch)
    for batch in reversed(batches):
        two.update(batch[None].float())
    three.update(torch.cat([batches[2], batches[0], batches[1]]))
    assert one.amax() == two.amax() == three.amax()
    assert one.amax().dtype is torch.float32
    assert one.amax().shape == ()
    assert 0 < one.amax() <= max(float(batch.abs().max()) for batch in batches)


@pytest.mark.parametrize("name", OBSERVERS)
def test_zeros_and_empty_batches(name: str) -> None:
    observer = OBSERVERS[name](FP8, name="layer.3")
    observer.update(torch.empty(0, 16))
    with pytest.raises(ValueError, match=r"layer\.3: the observer saw no values"):
        observer.amax()
    observer.update(torch.zeros(4, 16))
    assert observer.amax() == 0
    observer.update(torch.full((4, 16), -2.0))
    assert float(observer.amax()) == pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize("format", [FP8, NVFP4], ids=str)
@pytest.mark.parametrize("name", OBSERVERS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_name_the_layer_and_the_batch(name: str, format: Format, bad: float) -> None:
    observer = OBSERVERS[name](format, name="model.layers.3.mlp.up_proj")
    observer.update(torch.ones(2, 16))
    x = torch.ones(2, 16)
    x[1, 3:5] = bad
    with pytest.raises(ValueError, match=r"^model\.layers\.3\.mlp\.up_proj: 2 NaN or infinite value\(s\) of 32 in .*1"):
        observer.update(x)
    assert float(observer.amax()) == pytest.approx(1.0, rel=1e-3)


def test_bad_options_are_refused() -> None:
    with pytest.raises(ValueError, match=r"percentile=0 must be above 0 and at most 100"):
        Percentile(FP8, percentile=0)
    with pytest.raises(ValueError, match="unknown observer 'max'; known observers: absmax, percentile, mse, entropy"):
        get_observer("max")
    assert {name: get_observer(name) for name in OBSERVERS} == OBSERVERS
    assert tuple(OBSERVERS) == solver_names.OBSERVERS
    assert NUMBERS["e4m3"] is MSE(NVFP4).number


# ModelOpt's calibrators. Its HistogramCalibrator passes the bits of "mse" as a bias (0.47), so that criterion is
# compared with its MseCalibrator, which tries candidates on the data themselves.


@pytest.fixture
def laplace() -> torch.Tensor:
    """Values with the largest just below a power of two, so that ModelOpt's 1024 bins of [0, amax] are ours."""
    x = torch.distributions.Laplace(0.0, 1.0).sample((1 << 16,))
    return x / x.abs().max() * (16 - 2**-16)


def test_percentile_agrees_with_modelopts(laplace: torch.Tensor) -> None:
    calib = pytest.importorskip("modelopt.torch.quantization.calib")
    peer, ours = calib.HistogramCalibrator(num_bins=1024), Percentile(INT8_TENSOR, bins=1024, percentile=99)
    peer.collect(laplace)
    ours.update(laplace)
    assert float(ours.amax()) == pytest.approx(float(peer.compute_amax("percentile", percentile=99)), abs=16 / 1024)


def test_entropy_agrees_with_modelopts(laplace: torch.Tensor) -> None:
    calib = pytest.importorskip("modelopt.torch.quantization.calib")
    peer, ours = calib.HistogramCalibrator(num_bits=8, num_bins=1024), Entropy(INT8_TENSOR, bins=1024)
    peer.collect(laplace)
    ours.update(laplace)
    # Its 128 cells are equal, ours those of nearest rounding, and the minimum is flat: the places differ by some
    # percent, and at its place our divergence, which is a hundred times larger at the left, is nearly the smallest.
    chosen = float(peer.compute_amax("entropy"))
    ends, divergence = divergences(ours.histogram, INT8)
    assert float(divergence[round(chosen * 1024 / 16) - int(ends[0])]) <= 1.1 * float(divergence.min())
    assert float(divergence[0]) > 100 * float(divergence.min())
    assert float(ours.amax()) == pytest.approx(chosen, rel=0.15)


@pytest.mark.parametrize("format", [INT8_TENSOR, FP8], ids=str)
def test_agrees_with_modelopts_mse(format: Format) -> None:
    calib = pytest.importorskip("modelopt.torch.quantization.calib")
    tensor_quant = pytest.importorskip("modelopt.torch.quantization.tensor_quant")
    batches = torch.distributions.Laplace(0.0, 1.0).sample((4, 1 << 14))

    def quantize(x: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
        if format is FP8:
            return tensor_quant.scaled_e4m3(x, amax, None, 4, 3)
        return tensor_quant.fake_tensor_quant(x, amax, None, 8)

    peer = calib.MseCalibrator(
        batches.abs().amax(), step_size=0.01, start_multiplier=0.1, stop_multiplier=1.0, quant_func=quantize
    )
    ours = MSE(format)
    for batch in batches:
        peer.collect(batch)
        ours.update(batch)
    assert float(ours.amax()) == pytest.approx(float(peer.compute_amax()), rel=0.03)
