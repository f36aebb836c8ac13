"""An `Observer` turns a stream of batches into `amax`, the magnitude that a format's largest code stands for.

absmax       the largest magnitude seen. Nothing saturates; one outlier sets the scale of everything.
percentile   the magnitude that 99.99% (by default) of the values do not exceed.
mse          the amax with the smallest expected squared error of rounding the histogram to the format's grid.
entropy      the amax whose rounded histogram loses the least information: the smallest KL divergence from it.

The format decides which magnitudes are watched:

one scale a tensor     `fp8`: the values themselves.
a global scale   `nvfp4`: block scales are found at run time, and calibration sets the scale of those scales.
                       So the largest magnitude of each block is watched, and the grid is the block scales' own
                       (E4M3).

Other formats find all their scales at run time and have nothing to observe (`Format.is_static`).
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from quant.formats.format import Format, Number
from quant.recipes.solver_names import check_observer

# Below 2^-100 bins stop getting finer: the factor that maps a value to its bin must stay a float32.
_SMALLEST_EXPONENT = -100


class Histogram:
    """Counts of |x| over a stream of batches; the result does not depend on how the stream was cut.

    The range is always a power of two, [0, 2^exponent), cut into a power of two of equal bins. A batch that goes beyond
    it doubles the range as often as is needed, and each doubling adds neighbouring bins in pairs: the bin of x is
    floor(x / width), and floor(floor(a) / 2) = floor(a / 2), so every value is where it would be had the final range
    been known from the start. The price is that the largest value may sit just above the middle of the range.

    Zeros are counted apart. They are exact in every format, and a rectified or padded tensor has so many of them that
    one bin for them and for its smallest values would say nothing about either.
    """

    def __init__(self, bins: int = 4096) -> None:
        if bins < 2 or bins & (bins - 1):
            raise ValueError(f"bins={bins} must be a power of two, so that bins can be merged in pairs")
        self.bins = bins
        self.exponent = _SMALLEST_EXPONENT
        self.amax = 0.0
        self.counts = torch.zeros(bins, dtype=torch.int64, device="cpu")
        self.zeros = torch.zeros((), dtype=torch.int64, device="cpu")

    @property
    def width(self) -> float:
        """Width of a bin."""
        return math.ldexp(1.0, self.exponent) / self.bins

    @property
    def total(self) -> int:
        """Number of values seen, zeros included."""
        return int(self.counts.sum() + self.zeros)

    @property
    def used(self) -> int:
        """Number of bins up to the one that holds `amax`; 0 where only zeros were seen."""
        return int(self.amax / self.width) + 1 if self.amax > 0 else 0

    def add(self, magnitude: Tensor, amax: float) -> None:
        """Adds the counts of a batch of non-negative finite values of any shape; the maths is in float32."""
        self.counts, self.zeros = self.counts.to(magnitude.device), self.zeros.to(magnitude.device)
        self.amax = max(self.amax, amax)
        doublings = math.frexp(amax)[1] - self.exponent if amax > 0 else 0
        if doublings > 0:
            merged = min(1 << doublings, self.bins)
            grown = torch.zeros_like(self.counts)
            grown[: self.bins // merged] = self.counts.view(-1, merged).sum(dim=1)
            self.counts, self.exponent = grown, self.exponent + doublings
        values = magnitude.reshape(-1).float()
        # The factor is a power of two and the product exact; the cast drops the fraction.
        index = (values * (1 / self.width)).int()
        index.masked_fill_(values == 0, self.bins)
        counts = torch.bincount(index, minlength=self.bins + 1)
        self.counts += counts[: self.bins]
        self.zeros += counts[self.bins]

    def merged(self, bins: int) -> "Histogram":
        """Returns the same histogram in fewer bins, a power of two."""
        merged = Histogram(bins)
        merged.exponent, merged.amax, merged.zeros = self.exponent, self.amax, self.zeros
        merged.counts = self.counts.view(bins, -1).sum(dim=1)
        return merged

    def percentile(self, percent: float) -> float:
        """Returns the magnitude that `percent` of the values do not exceed, right to one bin; 100 gives `amax` itself.

        Between two order statistics the value is interpolated, as `numpy.percentile` does by default.
        """
        if percent == 100:
            return self.amax
        rank = percent / 100 * (self.total - 1)
        low, high = self._order_statistic(math.floor(rank)), self._order_statistic(math.ceil(rank))
        return min(low + (high - low) * (rank % 1), self.amax)

    def _order_statistic(self, rank: int) -> float:
        """Returns the value of the 0-based `rank`, taking a bin's values to be spread evenly over it."""
        nonzero_rank = rank - int(self.zeros)
        if nonzero_rank < 0:
            return 0.0
        cumulative = self.counts.cumsum(0)
        bin_ = int(torch.searchsorted(cumulative, nonzero_rank, right=True))
        count = int(self.counts[bin_])
        # Position among the values of its bin, which are spread evenly over the bin's width.
        within = nonzero_rank - int(cumulative[bin_]) + count
        return (bin_ + (within + 0.5) / count) * self.width


# The search for the smallest squared error: a geometric ladder down to amax / 2^10, then steps between its rungs.
_LADDER, _OCTAVES, _STEPS = 160, 10, 33
_VALUES_A_BIN = 64


def block_amax(x: Tensor, format: Format) -> Tensor:
    """Returns the largest magnitude of each block of `x` `[..., rows, columns]`, shaped as the block scales."""
    rows, columns = format.block_shape(x.shape)
    blocks = pad(x.abs(), (0, -x.shape[-1] % columns, 0, -x.shape[-2] % rows))
    return blocks.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows)).amax(dim=(-3, -1))


class Observer:
    """Watches a stream of batches and gives the amax to calibrate to."""

    def __init__(self, format: Format, *, name: str = "tensor") -> None:
        self.format, self.name, self._batch = format, name, -1

    def update(self, x: Tensor) -> None:
        """Adds a batch `[..., rows, columns]`, floating point, on any device; an empty one changes nothing."""
        self._batch += 1
        if x.numel() == 0:
            return
        x = x.detach()
        amax = x.abs().amax().float()
        if not bool(torch.isfinite(amax)):
            bad = int((~torch.isfinite(x.float())).sum())
            raise ValueError(
                f"{self.name}: {bad} NaN or infinite value(s) of {x.numel()} in calibration batch {self._batch}; "
                "look at the model's dtype and at that batch"
            )
        self._add(x, amax)

    def _add(self, x: Tensor, amax: Tensor) -> None:
        raise NotImplementedError

    def amax(self) -> Tensor:
        """Returns the largest magnitude, a float32 scalar on the device of the data."""
        chosen = self._chosen()
        if chosen is None:
            raise ValueError(f"{self.name}: the observer saw no values; run calibration data through the layer first")
        return chosen

    def _chosen(self) -> Tensor | None:
        raise NotImplementedError


class AbsMax(Observer):
    """The largest magnitude seen."""

    _amax: Tensor | None = None

    def _add(self, x: Tensor, amax: Tensor) -> None:
        self._amax = amax if self._amax is None else torch.maximum(self._amax, amax)

    def _chosen(self) -> Tensor | None:
        return self._amax


class _HistogramObserver(Observer):
    """The base of observers that choose amax from a histogram, each by its own `_choose`."""

    def __init__(self, format: Format, *, name: str = "tensor", bins: int = 4096) -> None:
        super().__init__(format, name=name)
        self.histogram = Histogram(bins)

    @property
    def number(self) -> Number:
        """The number on whose grid the watched magnitudes are rounded."""
        return self.format.scale if self.format.global_scale else self.format.element

    def _add(self, x: Tensor, amax: Tensor) -> None:
        # The magnitudes that the static scale of a per-tensor format has to cover.
        watched = block_amax(x, self.format) if self.format.global_scale else x.abs()
        self.histogram.add(watched.float(), float(amax))

    def _chosen(self) -> Tensor | None:
        if not self.histogram.total:
            return None
        chosen = self._choose() if self.histogram.amax > 0 else 0.0
        return torch.tensor(chosen, dtype=torch.float32, device=self.histogram.counts.device)

    def _choose(self) -> float:
        raise NotImplementedError


class Percentile(_HistogramObserver):
    """The magnitude that `percentile` percent of the values do not exceed."""

    def __init__(self, format: Format, *, name: str = "tensor", bins: int = 4096, percentile: float = 99.99) -> None:
        super().__init__(format, name=name, bins=bins)
        if not 0 < percentile <= 100:
            raise ValueError(f"{name}: percentile={percentile} must be above 0 and at most 100")
        self.percentile = percentile

    def _choose(self) -> float:
        return self.histogram.percentile(self.percentile)


class MSE(_HistogramObserver):
    """The amax with the smallest expected squared error. See `squared_errors`."""

    def _choose(self) -> float:
        ladder = self.histogram.amax * torch.logspace(0, -_OCTAVES, _LADDER, base=2, dtype=torch.float64)
        best = int(squared_errors(self.histogram, self.number, ladder).argmin())
        # The coarse ladder brackets the minimum; the fine steps lie between its two neighbours.
        low, high = float(ladder[min(best + 1, _LADDER - 1)]), float(ladder[max(best - 1, 0)])
        steps = torch.linspace(high, low, _STEPS, dtype=torch.float64, device="cpu")
        return float(steps[squared_errors(self.histogram, self.number, steps).argmin()])


class Entropy(_HistogramObserver):
    """The amax with the smallest KL divergence. See `divergences`.

    With few values in a bin, the divergence measures the noise of the counts, which falls as the range narrows, so
    that less data would mean more clipping. So bins are merged until they hold 64 values each on average (the noise is
    then below 0.01 nats), or until there are at most 4 for each value of the grid.
    """

    def _choose(self) -> float:
        histogram, levels = self.histogram, self.number.max_code + 1
        values = int(histogram.counts.sum())
        while values < _VALUES_A_BIN * histogram.used and histogram.used > 4 * levels:
            histogram = histogram.merged(histogram.bins // 2)
        ends, divergence = divergences(histogram, self.number)
        # Among equals, which differ by rounding only, the one that clips least.
        return min(int(ends[divergence <= divergence.min() + 1e-12].max()) * histogram.width, histogram.amax)


def squared_errors(histogram: Histogram, number: Number, amax: Tensor) -> Tensor:
    """Returns the expected squared error of a histogram's values, rounded to `number`, for each amax, float64 `[n]`.

    The values of a bin are taken to be spread evenly over it, and the error over a bin is an integral in closed form:
    between two midpoints of the grid the error is (t - g)². Sampling bin centres instead would go wrong where the grid
    of a float, fine near zero, is finer than the bins.
    """
    grid = number.grid().double()
    middle = (grid[1:] + grid[:-1]) / 2
    start = torch.cat([grid[:1], middle])
    # The integral of (t - g)² from 0 to the start of each cell of the grid.
    ends = ((middle - grid[:-1]) ** 3 - (start[:-1] - grid[:-1]) ** 3) / 3
    before = torch.cat([grid[:1], ends.cumsum(0)])
    offset = before - (start - grid) ** 3 / 3

    def integral(t: Tensor) -> Tensor:
        cell = torch.searchsorted(middle, t)
        return offset[cell] + (t - grid[cell]) ** 3 / 3

    counts = histogram.counts[: histogram.used].cpu().double()
    step = (amax.double() / number.max)[:, None]
    edges = torch.arange(histogram.used + 1, device="cpu") * histogram.width / step
    mean = integral(edges).diff(dim=1) * step**3 / histogram.width
    return mean @ counts


def divergences(histogram: Histogram, number: Number) -> tuple[Tensor, Tensor]:
    """Returns the KL divergence between a histogram and the rounded one, for every bin at which it can be clipped.

    The method of TensorRT's calibrator (S. Migacz, "8-bit Inference with TensorRT", GTC 2017). Clipped after bin
    i, the reference P is the first i bins, with the counts of all later bins added to the last one. Q is the first i
    bins without these counts, and the counts in one cell of the grid are spread evenly over the cell's non-empty bins.
    TensorRT has 128 equal cells; here they are the cells of rounding to a number's grid, and a bin belongs to the cell
    of its centre. Where P has mass and Q has none, the divergence is infinite. Clips below the median are left out,
    because a single remaining bin would match itself perfectly.

    Every sum over the bins of a cell is a difference of two prefix sums, so the cost is candidates × cells, not
    candidates × bins.

    Returns:
        int64 `[n]`, the number of bins kept, and float64 `[n]`, the divergence in nats; both on the CPU.
    """
    used = histogram.used
    counts = histogram.counts[:used].cpu().double()
    grid = number.grid().double()
    middle = (grid[1:] + grid[:-1]) / 2
    median = int(torch.searchsorted(counts.cumsum(0), counts.sum() / 2)) + 1
    ends = torch.arange(min(max(len(grid), median), used), used + 1, device="cpu")

    # First bin of each cell, [n, cells + 1]: the bins whose centre, in steps, is not below the cell's start.
    first = torch.ceil(middle * ends[:, None] / number.max - 0.5).long()
    first = torch.cat([torch.zeros_like(ends)[:, None], torch.minimum(first, ends[:, None]), ends[:, None]], dim=1)
    mass = _prefix(counts)[first].diff(dim=1)
    occupied = _prefix((counts > 0).double())[first].diff(dim=1)
    # Where a cell is empty, so is its mass; the ones only keep the logarithms finite.
    level = torch.where(mass > 0, mass / occupied.clamp(min=1), torch.ones_like(mass))

    inside = _prefix(counts)[ends]
    beyond = counts.sum() - inside
    last = counts[ends - 1]
    last_cell = torch.searchsorted(first, ends[:, None] - 1, right=True)[:, 0] - 1
    last_level = level[torch.arange(len(ends), device="cpu"), last_cell]

    p_log_p = _prefix(torch.xlogy(counts, counts))[ends] - torch.xlogy(last, last)
    p_log_p = p_log_p + torch.xlogy(last + beyond, last + beyond)
    p_log_q = (mass * level.log()).sum(dim=1) + beyond * last_level.log()
    divergence = (p_log_p - p_log_q) / counts.sum() - counts.sum().log() + inside.log()
    return ends, divergence.masked_fill_((last == 0) & (beyond > 0), torch.inf)


def _prefix(x: Tensor) -> Tensor:
    """Returns the sums of the first 0, 1, … elements."""
    return pad(x.cumsum(0), (1, 0))


OBSERVERS: dict[str, type[Observer]] = {"absmax": AbsMax, "percentile": Percentile, "mse": MSE, "entropy": Entropy}


def get_observer(name: str) -> type[Observer]:
    """Returns the observer called `name`."""
    check_observer(name)
    return OBSERVERS[name]
