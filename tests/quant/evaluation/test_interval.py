"""The interval over rows is scipy's, and holds the true mean as often as it says."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats

from quant.calibration.evaluating import mean_interval, student_point


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 7, 8, 10, 11, 15, 31, 32, 127])
def test_student_s_point_is_scipy_s(freedom: int) -> None:
    assert student_point(freedom) == pytest.approx(scipy.stats.t.ppf(0.975, freedom), rel=5e-6)


def test_an_interval_is_scipy_s() -> None:
    values = np.random.default_rng(0).gamma(2.0, size=9)
    expected = scipy.stats.t.interval(0.95, 8, loc=values.mean(), scale=scipy.stats.sem(values))
    assert mean_interval(values.tolist()) == pytest.approx(expected, rel=1e-5)


def test_a_single_row_says_nothing_about_others() -> None:
    assert mean_interval([0.3]) is None


def test_a_divergence_is_never_negative() -> None:
    assert mean_interval([0.0, 0.001, 0.4], least=0.0)[0] == 0.0
    assert mean_interval([0.2, 0.2, 0.2], least=0.0) == pytest.approx((0.2, 0.2))
