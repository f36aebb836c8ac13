"""A `Histogram` counts a stream of magnitudes; its result does not depend on how the stream was cut.

The range is always a power of two, [0, 2^exponent), cut into a power of two of equal bins. A batch that goes
beyond it doubles the range as often as is needed, and each doubling adds neighbouring bins in pairs: the bin of x
is floor(x / width), and floor(floor(a) / 2) = floor(a / 2), so every value is where it would be had the final
range been known from the start. Batches can come in any order and any size and the counts are the same integers.
The price is that the largest value may sit just above the middle of the range, so at least 2048 of 4096 bins are
in use.

Zeros are counted apart. They are exact in every format, and a rectified or padded tensor has so many of them that
one bin for them and for its smallest values would say nothing about either.
"""

from __future__ import annotations

import math

import torch

# Below 2^-100 bins stop getting finer: the factor that maps a value to its bin must stay a float32.
_SMALLEST_EXPONENT = -100


class Histogram:
    """Counts of |x| over a stream of batches.

    Attributes:
        bins: number of bins, a power of two.
        exponent: the range is [0, 2^exponent).
        amax: largest magnitude seen, exact.
        counts: int64 `[bins]`, zeros left out; on the device of the data.
        zeros: int64 scalar, number of zeros.
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

    def add(self, magnitude: torch.Tensor, amax: float) -> None:
        """Adds the counts of a batch.

        Args:
            magnitude: non-negative finite values of any shape; the maths is in float32.
            amax: the largest value, which the caller knows from checking that all are finite.
        """
        self.counts, self.zeros = self.counts.to(magnitude.device), self.zeros.to(magnitude.device)
        self.amax = max(self.amax, amax)
        if amax > 0:
            self._grow(math.frexp(amax)[1])
        values = magnitude.reshape(-1).float()
        # The factor is a power of two and the product exact; the cast drops the fraction.
        index = (values * (1 / self.width)).int()
        index.masked_fill_(values == 0, self.bins)
        counts = torch.bincount(index, minlength=self.bins + 1)
        self.counts += counts[: self.bins]
        self.zeros += counts[self.bins]

    def _grow(self, exponent: int) -> None:
        doublings = exponent - self.exponent
        if doublings <= 0:
            return
        merged = min(1 << doublings, self.bins)
        grown = torch.zeros_like(self.counts)
        grown[: self.bins // merged] = self.counts.view(-1, merged).sum(dim=1)
        self.counts, self.exponent = grown, exponent

    def merged(self, bins: int) -> Histogram:
        """Returns the same histogram in fewer bins, a power of two."""
        merged = Histogram(bins)
        merged.exponent, merged.amax, merged.zeros = self.exponent, self.amax, self.zeros
        merged.counts = self.counts.view(bins, -1).sum(dim=1)
        return merged

    def percentile(self, percent: float) -> float:
        """Returns the magnitude that `percent` of the values do not exceed, right to one bin; 100 gives `amax` itself.

        Between two order statistics the value is interpolated, as `numpy.percentile` does by default.

        Args:
            percent: a number from 0 to 100.
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
