"""Scales in two levels, and minima: the formats of llama.cpp's GGUF files that have more than one scale a block.

    w = step · q - minimum        step = d · s,  minimum = d_min · m

A superblock of 256 weights has d and d_min in FP16, and its blocks have s and m in 6 bits (Q4_K, Q5_K: 8 blocks of 32;
q is not negative), or s alone in INT8 (Q6_K: 16 blocks of 16; q is signed, and nothing is subtracted). A block of Q5_1
has step and minimum in FP16 itself. `BlockScaledTensor.scale` has these numbers as llama.cpp stores them, uint8
`[..., out, bytes]`:

    Q4_K, Q5_K   d, d_min (2 bytes each), s and m of 8 blocks (12 bytes: six bits each, of blocks 4 to 7 in two pieces)
    Q6_K         s of 16 blocks (a byte each), d
    Q5_1         step, minimum

Our codes are signed, as those of other integers, and `q` is the code plus half of its range where there is a minimum.

Scales are searched as in llama.cpp: for each of several steps a block is rounded, and step and minimum are then fitted
to the codes by weighted least squares. The weight of an input is its mean square over calibration data, where there are
some: the diagonal of the second moment. Then d and d_min are the largest step and minimum over 63, and the best of the
neighbouring s and m are chosen again for the numbers that are stored.
"""

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from quant.formats.format import Format

_TRIES = 36  # steps that the search tries for each block, from 0.9 fewer levels than there are to 0.9 more


def levels(format: Format) -> int:
    """Returns what is added to a code to get q: half of the range where there is a minimum, else 0."""
    return 1 << (format.element.bits - 1) if format.minimum else 0


def decode_scales(scale: Tensor, format: Format) -> tuple[Tensor, Tensor | None]:
    """Returns step and minimum of every block, float32 `[..., out, in / block]`; each is exact."""
    parts = scale.unflatten(-1, (-1, format.scale_bytes))
    if not format.superblock:
        step, minimum = _halves(parts).unbind(-1)
        return step, minimum.neg()
    unit, codes = _read(parts, format)
    values = [(u[..., None] * c).flatten(-2) for u, c in zip(unit, codes, strict=True)]
    return values[0], values[1] if format.minimum else None


def _read(parts: Tensor, format: Format) -> tuple[list[Tensor], list[Tensor]]:
    """Returns d and, where there is one, d_min `[…]` of superblocks, and the codes s and m of their blocks `[…, n]`."""
    if not format.minimum:
        return [_halves(parts[..., 16:])[..., 0]], [parts[..., :16].contiguous().view(torch.int8).float()]
    low, middle, high = parts[..., 4:].unflatten(-1, (3, 4)).unbind(-2)
    s = torch.cat([low & 63, high & 15 | low >> 6 << 4], dim=-1)
    m = torch.cat([middle & 63, high >> 4 | middle >> 6 << 4], dim=-1)
    return list(_halves(parts[..., :4]).unbind(-1)), [s.float(), m.float()]


def _halves(parts: Tensor) -> Tensor:
    return parts.contiguous().view(torch.float16).float()


def units(scale: Tensor, format: Format) -> list[Tensor]:
    """Returns d and, where there is one, d_min of stored scales, float32 `[out, in / superblock]` each."""
    return _read(scale.unflatten(-1, (-1, format.scale_bytes)), format)[0]


def pack_scales(unit: Sequence[Tensor], codes: Sequence[Tensor], format: Format) -> Tensor:
    """Returns stored scales of d, d_min `[out, in / superblock]` and codes s, m `[out, in / block]`, uint8."""
    d = [u[..., None].half().view(torch.uint8) for u in unit]
    s, *rest = (c.unflatten(-1, (-1, format.superblock // format.block[1])).to(torch.uint8) for c in codes)
    if not rest:
        return torch.cat([s, *d], dim=-1).flatten(-2)
    (m,) = rest
    packed = [s[..., :4] | s[..., 4:] >> 4 << 6, m[..., :4] | m[..., 4:] >> 4 << 6, s[..., 4:] & 15 | m[..., 4:] << 4]
    return torch.cat([*d, *packed], dim=-1).flatten(-2)


def choose_scales(weight: Tensor, format: Format, importance: Tensor | None = None, *, search: bool = True) -> Tensor:
    """Returns the stored scales of `weight` `[out, in]`, uint8 `[out, bytes]`.

    `importance` `[in]` weighs the squared errors of inputs, by default all alike; without `search` the range of a block
    gives its step.
    """
    width = format.block[1]
    blocks = weight.float().unflatten(-1, (-1, width))
    cost = blocks.new_ones(()) if importance is None else importance.float().unflatten(-1, (-1, width))
    # An input that calibration never reached counts a little: its weights are rounded too.
    cost = (cost + 1e-3 * cost.mean() + 1e-30).expand_as(blocks)
    step, minimum = _fitted(blocks, cost, format, _TRIES if search else 0)
    if not format.superblock:
        return torch.stack([step, -minimum], dim=-1).half().view(torch.uint8).flatten(-2)
    per_super = format.superblock // width
    grouped = [x.unflatten(-1, (-1, per_super)) for x in ((step, minimum) if format.minimum else (step,))]
    largest = largest_code(format)
    unit = [(x.amax(-1) / largest).half().float() for x in grouped]
    codes = [_nearest_codes(x, u[..., None], largest) for x, u in zip(grouped, unit, strict=True)]
    if search and format.minimum:
        blocks, cost = (x.unflatten(-2, (-1, per_super)) for x in (blocks, cost))
        codes = _refined(blocks, cost, unit, codes, format)
    return pack_scales(unit, [c.flatten(-2) for c in codes], format)


def largest_code(format: Format) -> int:
    """Returns the largest code of a block's scale under that of its superblock."""
    return int(format.scale.max)


def _nearest_codes(values: Tensor, unit: Tensor, largest: int) -> Tensor:
    """Returns values over their unit as codes from 0 to `largest`, float32; 0 where the unit is."""
    return torch.where(unit == 0, 0, values / unit).round_().clamp_(0, largest)


def candidates(block: Tensor, cost: Tensor, unit: Sequence[Tensor], format: Format) -> list[Tensor]:
    """Returns the codes s, m worth trying for blocks `[rows, n]` under d, d_min `[rows]`: the fitted and around it.

    Each is `[candidates, rows]`. `cost` weighs the squared error of each of the n weights.
    """
    fitted = _fitted(block, cost.expand_as(block), format, _TRIES // 3, _TRIES if block.is_cuda else 1)
    largest, reach = largest_code(format), 1 if format.minimum else 2
    around = torch.arange(-reach, reach + 1, device=block.device)[:, None]
    tried = [(_nearest_codes(x, u, largest) + around).clamp_(0, largest) for x, u in zip(fitted, unit, strict=False)]
    return [tried[0].repeat_interleave(3, 0), tried[1].repeat(3, 1)] if format.minimum else tried


def _fitted(blocks: Tensor, cost: Tensor, format: Format, tries: int, together: int = 1) -> tuple[Tensor, Tensor]:
    """Returns step and minimum of each block `[..., n]` with the smallest weighted squared error that was found.

    `together` steps are tried at once: small blocks take less time so, large ones less memory one by one.
    """
    half = 1 << (format.element.bits - 1)
    low, high = (0, 2 * half - 1) if format.minimum else (-half, half - 1)
    least = blocks.amin(-1).clamp_(max=0) if format.minimum else blocks.new_zeros(blocks.shape[:-1])
    span = blocks.amax(-1).clamp_(min=0) - least if format.minimum else blocks.abs().amax(-1)
    best_step, best_least = span / high, least
    best_error = _error(blocks, cost, best_step, best_least, low, high)
    total, mean = cost.sum(-1), (cost * blocks).sum(-1)
    indices = torch.arange(tries + 1, device=blocks.device, dtype=torch.float64)
    for index in indices.split(together) if tries else ():
        step = span / (high - 0.9 + 1.8 * index / tries).float().view(-1, *[1] * span.dim())
        q = ((blocks - least[..., None]) / _divisor(step)[..., None]).round_().clamp_(low, high)
        weighted = cost * q
        first, second, product = weighted.sum(-1), (weighted * q).sum(-1), (weighted * blocks).sum(-1)
        own_least = least
        if format.minimum:
            determinant = total * second - first * first
            fitted = (total * product - mean * first) / _divisor(determinant)
            own_least = ((second * mean - first * product) / _divisor(determinant)).clamp_(max=0)
            # Where the minimum would be above zero it is zero, and the step alone is fitted.
            fitted = torch.where(own_least == 0, product / _divisor(second), fitted)
            usable = (determinant > 0) & (fitted > 0)
        else:
            fitted = product / _divisor(second)
            usable = fitted > 0
        error = _error(blocks, cost, fitted, own_least, low, high)
        error = torch.where(usable & (error < best_error), error, torch.inf)
        least_error, best = error.min(0, keepdim=True)
        fitted, own_least = (x.expand_as(error).gather(0, best)[0] for x in (fitted, own_least))
        better = least_error[0] < best_error
        best_error = torch.where(better, least_error[0], best_error)
        best_step, best_least = torch.where(better, fitted, best_step), torch.where(better, own_least, best_least)
    return best_step, -best_least


def _error(blocks: Tensor, cost: Tensor, step: Tensor, least: Tensor, low: int, high: int) -> Tensor:
    shifted = blocks - least[..., None]
    q = (shifted / _divisor(step)[..., None]).round_().clamp_(low, high)
    return (cost * (q.mul_(step[..., None]) - shifted).square_()).sum(-1)


def _refined(
    blocks: Tensor, cost: Tensor, unit: Sequence[Tensor], codes: Sequence[Tensor], format: Format
) -> list[Tensor]:
    """Returns the best codes of scales and minima among the neighbours of `codes`, under the stored d and d_min."""
    high, (s, m) = (1 << format.element.bits) - 1, codes
    (d, d_min), best = (u[..., None] for u in unit), [s, m]
    best_error = torch.full_like(s, torch.inf)
    for ds, dm in product((0, -1, 1), (0, -1, 1)):
        own = [(s + ds).clamp(0, 63), (m + dm).clamp(0, 63)]
        error = _error(blocks, cost, d * own[0], -(d_min * own[1]), 0, high)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best = [torch.where(better, new, old) for new, old in zip(own, best, strict=True)]
    return best


def _divisor(x: Tensor) -> Tensor:
    """Returns `x`, with a huge number for zero: a block whose step is zero gets the code for zero."""
    return torch.where(x == 0, 1e30, x)


def grid(scale: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """Returns the grid of every weight: its step, never zero, and what is added to a weight before it is divided.

    Both are float32 `[..., out, in]`; codes are `(w + shift) / step`, rounded.
    """
    step, minimum = decode_scales(scale, format)
    shift = torch.zeros_like(step) if minimum is None else minimum - levels(format) * step
    width = format.block[1]
    return _divisor(step).repeat_interleave(width, dim=-1), shift.repeat_interleave(width, dim=-1)
