"""This file divides the cases of a test between `make test` and `make slow-test`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def quick_cases(values: Iterable[Any], quick: Callable[..., bool]) -> list[Any]:
    """All of `values` for `parametrize`; those that are not `quick` are marked `slow`.

    For kernels that are compiled for each GPU, and for models of many kinds: the quick cases run every line once, the
    others run the same lines on other values.

    Args:
        values: the cases; a tuple holds the arguments of one case.
        quick: from the arguments of a case, whether `make test` runs it.
    """
    cases = [value if isinstance(value, tuple) else (value,) for value in values]
    chosen = [quick(*case) for case in cases]
    assert any(chosen), "no case is quick"
    return [pytest.param(*case, marks=[] if now else pytest.mark.slow) for case, now in zip(cases, chosen, strict=True)]
