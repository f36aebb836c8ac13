"""The Hadamard rotation spreads an outlier over a whole row, costs n·log2(n) additions, and is its own inverse.

    H1 = [1],    H2n = [[Hn, Hn], [Hn, -Hn]],    y = x · Hn / √n

H/√n is orthonormal and symmetric, so x·y = (xH)·(yH): rotating q and k leaves every attention score as it was, and
rotating a layer's input together with its weight leaves its output, while both have become easier to quantize.

The fast transform adds and subtracts pairs at distance 1, 2, 4, …: log2(n) passes, no matrix. A length that is not a
power of two is rotated in blocks of one that divides it (a head of 96 in three blocks of 32).
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Concatenate, ParamSpec

import torch
from torch import Tensor

P = ParamSpec("P")


def on_each_device(make: Callable[P, Tensor]) -> Callable[Concatenate[Tensor, P], Tensor]:
    """Decorates a function that makes a constant on the CPU, to keep the constant on each device that needs it."""
    # The new function takes a tensor that is on the device, then the arguments of `make`.

    @lru_cache(maxsize=32)
    def kept_on(device: torch.device, *args: P.args, **kwargs: P.kwargs) -> Tensor:
        with torch.inference_mode(False):  # a gradient may need the constant later
            return make(*args, **kwargs).to(device)

    def constant(x: Tensor, /, *args: P.args, **kwargs: P.kwargs) -> Tensor:
        return kept_on(x.device, *args, **kwargs)  # type: ignore[arg-type]

    return constant


def hadamard_transform(x: Tensor, block: int | None = None) -> Tensor:
    """Returns `x` `[..., n]` times the orthonormal Sylvester-Hadamard matrix along the last axis, block by block."""
    # A block is a power of two that divides n; None takes the largest. float64 is computed in float64, all else in
    # float32.
    n = x.shape[-1]
    block = hadamard_block(n) if block is None else block
    if block < 1 or block & (block - 1) or n % block:
        raise ValueError(
            f"Hadamard block {block} must be a power of two that divides the last axis, which is {n}; "
            f"the largest is {hadamard_block(n)}"
        )
    y = x if x.dtype is torch.float64 else x.float()
    distance = 1
    while distance < block:
        # Butterfly: elements `distance` apart become their sum and their difference.
        pairs = y.unflatten(-1, (-1, 2, distance))
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        y = torch.stack([low + high, low - high], dim=-2).flatten(-3)
        distance *= 2
    scaled: Tensor = y * block**-0.5
    return scaled.to(x.dtype)


def hadamard_block(n: int) -> int:
    """Returns the largest power of two that divides `n`."""
    return n & -n


def random_sign_rotation(x: Tensor) -> Tensor:
    """Returns the random-sign Hadamard rotation of a head of attention, in float32; orthonormal."""
    # It acts on pairs of halves, so that it and the rotary embedding need the same two registers:
    #
    #     [u1 u2] = [x1·s1 · H   x2·s2 · H],    y = [u1 + u2   u1 − u2] / √n
    #
    # with H block-diagonal where half the head dimension is not a power of two.
    half = x.shape[-1] // 2
    signed = x.float() * _signs(x, x.shape[-1])
    block = hadamard_block(half)
    u1, u2 = (hadamard_transform(part, block) for part in (signed[..., :half], signed[..., half:]))
    return torch.cat([u1 + u2, u1 - u2], -1) * math.sqrt(0.5)


def sign_matrices(q: Tensor) -> Tensor:
    """Returns the same rotation as kernels multiply queries `[..., dim]` by it: H with the signs of each half."""
    # `[2, width, width]` in the dtype of `q`. Entries are 1 and −1, and zeros from half of dim to width, the next power
    # of two.
    return _sign_matrices(q, q.shape[-1], q.dtype)


@on_each_device
def _sign_matrices(dim: int, dtype: torch.dtype) -> Tensor:
    half = dim // 2
    # Rows and columns beyond half of the head are zeros: tensor cores need a power of two.
    block = hadamard_block(half)
    width = 1 << (half - 1).bit_length()
    out = torch.zeros(2, width, width, dtype=dtype, device="cpu")
    signed = _signs(out, dim).view(2, half, 1) * hadamard_transform(
        torch.eye(half, device="cpu", dtype=torch.float32), block
    )
    out[:, :half, :half] = signed.mul(block**0.5).round()
    return out


@on_each_device
def _signs(dim: int) -> Tensor:
    """Returns the random signs, float32 `[dim]`: the same for every model."""
    generator = torch.Generator().manual_seed(dim)
    return (torch.randint(0, 2, (dim,), generator=generator, device="cpu") * 2 - 1).float()
