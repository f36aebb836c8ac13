"""Whether a tensor holds NaN or infinity is decided by its bits: one or two integer maxima, and nothing is converted.

The bits of a float without its sign sort like its magnitude, infinity above all numbers and NaN above infinity. The
maximum of the bits as signed integers finds NaN and infinity among positive values, the maximum as unsigned integers
among negative values. A tensor is read once, in pieces that stay in the cache between both.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

_PIECE = 1 << 20  # bytes
_RUN = 64  # pieces that a thread takes in one go
# Of each dtype, the bits of its largest finite number.
_LARGEST = {
    torch.float64: 0x7FEFFFFFFFFFFFFF, torch.float32: 0x7F7FFFFF, torch.bfloat16: 0x7F7F, torch.float16: 0x7BFF,
    torch.float8_e4m3fn: 0x7E, torch.float8_e5m2: 0x7B,
}  # fmt: skip
_SIGNED = {8: (np.int64, torch.int64), 4: (np.int32, torch.int32), 2: (np.int16, torch.int16), 1: (np.int8, torch.int8)}


def is_finite(x: Tensor, *, is_mask: bool = False) -> bool:
    """Returns whether `x` holds neither NaN nor infinity; a mask, which is added to scores, may hold -infinity.

    Integers and meta tensors hold neither.
    """
    return not _exceeds(x, *_limits(x.dtype, is_mask=is_mask))


def are_finite(data: np.ndarray, dtype: torch.dtype, *, is_mask: bool = False) -> bool:
    """Checks the contiguous bytes of a tensor, uint8 `[bytes]`, as `is_finite` checks it."""
    positive, negative = _limits(dtype, is_mask=is_mask)
    if positive is None or negative is None:
        return True
    return not _bits_exceed(data.view(_SIGNED[dtype.itemsize][0]), positive, negative)


def _limits(dtype: torch.dtype, *, is_mask: bool) -> tuple[int | None, int | None]:
    """Returns the largest bits of positive values, and of negative ones without their sign; None for integers."""
    largest = _LARGEST.get(dtype)
    # E4M3 has no infinity.
    if largest is None or not is_mask or dtype is torch.float8_e4m3fn:
        return largest, largest
    return largest, largest + 1


def is_positive(x: Tensor) -> bool:
    """Returns whether every value of a float tensor is a finite number above zero."""
    if x.device.type != "cpu" or x.is_meta:
        return x.is_meta or bool(((x > 0) & x.isfinite()).all())
    bits = _bits(x)
    return not bits.size or (int(bits.min()) > 0 and int(bits.max()) <= _LARGEST[x.dtype])


def _exceeds(x: Tensor, positive: int | None, negative: int | None) -> bool:
    """Returns whether the bits of a value are above `positive`, or without its sign above `negative`."""
    if positive is None or negative is None or x.is_meta:
        return False
    if x.device.type != "cpu":
        if x.dtype.itemsize == 1:
            return bool(((x.view(torch.uint8) & 0x7F) > positive).any())
        return bool((~x.isfinite() if positive == negative else x.isnan() | (x == torch.inf)).any())
    return _bits_exceed(_bits(x), positive, negative)


def _bits_exceed(bits: np.ndarray, positive: int, negative: int) -> bool:
    """Returns the same of signed integers `[values]`."""
    unsigned, top = bits.view(f"u{bits.dtype.itemsize}"), 1 << (8 * bits.dtype.itemsize - 1)
    step = _PIECE // bits.dtype.itemsize

    def run_exceeds(first: int) -> bool:
        for start in range(first, min(first + _RUN * step, bits.size), step):
            piece = slice(start, start + step)
            if int(bits[piece].max()) > positive or int(unsigned[piece].max()) > negative + top:
                return True
        return False

    runs = range(0, bits.size, _RUN * step)
    threads = min(len(runs), torch.get_num_threads())
    if threads <= 1:
        return any(map(run_exceeds, runs))
    # NumPy gives the interpreter's lock back; a head of 1 GB, mapped from a file, takes a second in one thread.
    with ThreadPoolExecutor(threads, thread_name_prefix="finite") as pool:
        return any(pool.map(run_exceeds, runs))


def _bits(x: Tensor) -> np.ndarray:
    """Returns the bits of `x` as signed integers, flat, sharing its memory where it is contiguous."""
    return x.detach().contiguous().view(_SIGNED[x.dtype.itemsize][1]).flatten().numpy()


def is_wide_float(tensor: Tensor) -> bool:
    """Returns whether a tensor holds floating-point values of 16 bit or more; FP8 tensors are codes or scales."""
    return tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1
