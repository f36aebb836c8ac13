"""Which library multiplies float32 matrices on a CPU.

PyTorch uses MKL, which leaves AVX-512 unused on CPUs that are not Intel's, and with it half of their speed. It asks
oneDNN only where products may round their inputs to bfloat16, and oneDNN does that only on CPUs with units for it. So
one product is tried: where it loses digits, all stays as it is. Small products are slower in oneDNN, so this is for
forward passes and second moments, and not for the searches between them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch


def quick_products() -> Any:
    """A context: within it, products of float32 on a CPU are oneDNN's where these are exact."""
    return _precision("bf16" if _has_exact_products() else None)


def usual_products() -> Any:
    """A context: within it, products are those outside of `quick_products`."""
    return _precision("none")


@contextmanager
def _precision(wanted: str | None) -> Iterator[None]:
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    if matmul is None or wanted is None or not _has_exact_products():
        yield
        return
    before = matmul.fp32_precision
    matmul.fp32_precision = wanted
    try:
        yield
    finally:
        matmul.fp32_precision = before


@cache
def _has_exact_products() -> bool:
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    if matmul is None or not torch.backends.mkldnn.is_available() or matmul.fp32_precision != "none":
        return False
    x = torch.linspace(1, 2, 256 * 256).view(256, 256)
    matmul.fp32_precision = "bf16"
    try:
        found = x @ x
    finally:
        matmul.fp32_precision = "none"
    exact = x.double() @ x.double()
    return float((found - exact).norm() / exact.norm()) < 1e-6
