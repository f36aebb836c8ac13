"""`mean_interval` bounds how far the mean over rows of text may be from the mean over all text of that kind.

Tokens of one row share a subject and are far from independent, so a row is one observation. With n rows of mean m and
standard deviation s, the interval of 95 % is Student's

    m ± t · s / √n        t the 97.5 % point of the t distribution with n − 1 degrees of freedom

It assumes that rows are independent draws. Rows cut one after the other from one document are not independent, and the
interval is then too narrow.

The quantile is computed here, to 1e-9 of scipy's (tests compare them): scipy belongs to the extra `allocate`, and
`quantize --eval` prints intervals with only the core packages.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

LEVEL = 0.95


def mean_interval(values: Sequence[float], *, least: float = -math.inf) -> tuple[float, float] | None:
    """Returns the interval of 95 % around the mean of `values`, one a row.

    Args:
        values: one for each row.
        least: lower bound of any mean; 0 for a divergence.

    Returns:
        Low and high end; None for a single row, whose spread is unknown.
    """
    if len(values) < 2:
        return None
    mean = statistics.fmean(values)
    half_width = student_point(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return max(mean - half_width, least), mean + half_width


def student_point(freedom: int) -> float:
    """Returns the t for which a share of `LEVEL` of Student's distribution lies between −t and t, by bisection."""
    # t = √freedom · tan(angle) maps all t ≥ 0 onto angles below π/2; 60 halvings exhaust a double's digits.
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _share_within(middle, freedom) < LEVEL else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _share_within(angle: float, freedom: int) -> float:
    """Returns the share between −t and t, t = √freedom · tan(angle) (Abramowitz and Stegun 26.7.3–4)."""
    cosine, total = math.cos(angle), 0.0
    odd = freedom % 2
    term = cosine if odd else 1.0
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= cosine * cosine * k / (k + 1)
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total
