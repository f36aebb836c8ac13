"""A scale rule computes from a block of values the scale that it is stored with.

All rules read a tensor cut into blocks, `[..., R, rows, C, columns]`, and give scales `[..., R, 1, C, 1]` in
float32 that are exactly representable in the format's scale number. They differ in the choice:

max            the block's largest magnitude maps to the largest element. MX rounds the exponent up, so
               nothing saturates; NVFP4 rounds the scale to E4M3.
ocp            MX only: floor(log2(amax)) - emax, the text of the OCP MX 1.0 specification. Saturates.
even           MX only: as ocp, after amax is rounded to the element's own mantissa, so that an amax that would
               round up into the next binade gets the next exponent (torchao's EVEN, compressed-tensors).
four_over_six  NVFP4 only: map amax to 6 or to 4, whichever gives the smaller squared error ("Four Over Six").
mse            the scale with the smallest squared error, by search; for E4M3 and E8M0 scales the search is
               exact over all codes (see `candidate_scales`).

A block that holds NaN or infinity gets a scale that is NaN, and so decodes to NaN as a whole: elements of four bits and
integers have no code that could say it.

NVFP4's global scale maps the tensor's amax to 6 · 448. Rules that may raise a block's scale above amax / 6
leave headroom by normalising to 256 instead of 448; `HEADROOM` says which do.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from quant.formats.format import E2M1, E4M3, E8M0, Format
from quant.formats.rounding import decode_power_of_two, encode_power_of_two, round_to

ScaleRule = Callable[[Tensor, Format, Tensor], Tensor]

# Largest block scale, before the global scale, that amax itself is mapped to.
HEADROOM = {"max": 448.0, "four_over_six": 256.0, "mse": 256.0}

_MIN_E4M3 = E4M3.min_subnormal
_TRIES = 65  # fractions of amax / max that `mse` tries where scales are not coded: 1 down to 0.36


def amax_over_blocks(blocks: Tensor) -> Tensor:
    """Returns the largest magnitude of each block, NaN if not finite: float32 `[..., R, 1, C, 1]`."""
    return finite_or_nan(blocks.abs().amax(dim=(-3, -1), keepdim=True))


def finite_or_nan(x: Tensor) -> Tensor:
    """Returns `x` with NaN in place of infinity."""
    return x.masked_fill(x.isinf(), torch.nan)


def divided(x: Tensor, number: float) -> Tensor:
    """Returns `x / number`, correctly rounded on every device.

    On CUDA, PyTorch turns a division by a Python number into a product with its reciprocal, which can be one unit in
    the last place off; a division by a tensor on the device is a division.
    """
    return x / x.new_full((), number)


def scale_of(amax: Tensor, largest: float) -> Tensor:
    """Returns the float32 scale that maps magnitudes `amax` to `largest`; 1 for zero, NaN for infinity."""
    return nonzero(finite_or_nan(divided(amax.float(), largest)))


def nonzero(scale: Tensor) -> Tensor:
    """Returns `scale`, which is not negative, with 1 in place of zero, so that a division by it changes nothing."""
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def global_scale_of(amax: Tensor, format: Format, rule: str | None = None) -> Tensor:
    """Returns the FP32 global scale of a matrix with the magnitude `amax`, its blocks by `rule` or that for inputs."""
    return scale_of(amax, format.element.max * HEADROOM.get(rule or format.input_rule, E4M3.max))


def max_rule(blocks: Tensor, format: Format, global_scale: Tensor) -> Tensor:
    """Returns scales by the rule `max`, see the module docstring."""
    return _nearest_scale(amax_over_blocks(blocks), format, global_scale)


def _nearest_scale(amax: Tensor, format: Format, global_scale: Tensor) -> Tensor:
    if format.scale is E8M0:
        return decode_power_of_two(encode_power_of_two(divided(amax, format.element.max)))
    if format.scale is E4M3:
        # A block that is zero, or tiny compared with its matrix, would get the E4M3 code of zero, and be divided by it.
        return round_to((amax / (format.element.max * global_scale)).clamp_(min=_MIN_E4M3), E4M3)
    return nonzero(round_to(divided(amax, format.element.max), format.scale))


def even_rule(blocks: Tensor, format: Format, global_scale: Tensor) -> Tensor:
    """Returns scales by the rule `even`, see the module docstring."""
    _require(format, E8M0, "even")
    # Eight-bit elements too round at one mantissa bit, as in torchao and llm-compressor.
    mantissa = format.element.mantissa if format.element.bits == 6 else E2M1.mantissa
    # Half a unit of the element's last mantissa bit, added to the bits of a float32: where amax would round up to the
    # next power of two, the sum carries into the exponent field, of which `_floor_scale` takes the floor.
    bits = amax_over_blocks(blocks).view(torch.int32) + (1 << (22 - mantissa))
    return _floor_scale(bits.view(torch.float32), format)


def _floor_scale(amax: Tensor, format: Format) -> Tensor:
    _require(format, E8M0, "ocp")
    # The exponent field of a float32; it also names 2^128, to which an amax near the largest float32 rounds.
    exponent = (amax.view(torch.int32) >> 23) - 127 - format.element.max_exponent
    return decode_power_of_two((exponent.clamp_(-127, 127) + 127).to(torch.uint8))


def four_over_six_rule(blocks: Tensor, format: Format, global_scale: Tensor) -> Tensor:
    """Returns scales by the rule `four_over_six`, see the module docstring."""
    _require(format, E4M3, "four_over_six")
    amax = amax_over_blocks(blocks)
    six = _nearest_scale(amax, format, global_scale)
    # amax / 4 = 1.5 · amax / 6: the largest value becomes the element 4. Between 4 and 6 E2M1 has no value, so a
    # block whose second largest values lie at 5/6 of amax loses less this way.
    four = _nearest_scale(amax * 1.5, format, global_scale)
    error_of_four = _squared_error(blocks, format, four * global_scale, amax)
    better = error_of_four < _squared_error(blocks, format, six * global_scale, amax)
    return torch.where(better, four, six)


def mse_rule(blocks: Tensor, format: Format, global_scale: Tensor) -> Tensor:
    """Returns scales by the rule `mse`, see the module docstring."""
    amax = amax_over_blocks(blocks)
    best = _nearest_scale(amax, format, global_scale)
    best_error = _squared_error(blocks, format, best * global_scale, amax)
    for scale in candidate_scales(amax, format, global_scale):
        error = _squared_error(blocks, format, scale * global_scale, amax)
        best = torch.where(error < best_error, scale, best)
        best_error = torch.minimum(error, best_error)
    return best


def candidate_scales(amax: Tensor, format: Format, global_scale: Tensor) -> list[Tensor]:
    """Returns the scales worth trying for blocks of largest magnitude `amax`, each of the shape of `amax`.

    For coded scales the list, with the scale nearest to amax / max, contains the optimum of the squared error.
    Let s be the first scale at which nothing saturates. A scale t of 2s or more has only every other point of
    the grid of t / 2, at which nothing saturates either. A scale t at which amax is 2 · max · t or more gains
    by doubling: within the range of t only odd multiples of the smallest step are lost, at most (t / 2)² an element of
    E2M1, while the largest element comes nearer by max · t, which outweighs a block of 144. Doubling and halving stay
    on the grid of scales, except for halves of the subnormal E4M3 codes below 16, which are all tried. So the optimum
    is one of sixteen neighbouring E4M3 codes, or of two E8M0 exponents.
    """
    if format.scale is E4M3:
        # Codes from eight below the first scale at which nothing saturates to seven above it.
        grid = E4M3.grid().to(amax.device)
        ideal = (amax / (format.element.max * global_scale)).clamp_(max=E4M3.max)
        first = (torch.searchsorted(grid, ideal) - 8).clamp_(1, E4M3.max_code - 15)
        return [grid[first + k] for k in range(16)]
    nearest = _nearest_scale(amax, format, global_scale)
    if format.scale is E8M0:
        return [(nearest / 2).clamp(min=2.0**-127)]
    # All at once, and made on the device: GPTQ asks block by block.
    shrink = 1 - 0.01 * torch.arange(_TRIES, device=amax.device, dtype=torch.float64)
    if format.gguf:
        # The largest weight may have either sign, and integers have one code more below zero than above: under a
        # negative scale, which these files may hold, it is the code of a positive weight.
        shrink = torch.stack([shrink[::2], -shrink[::2]], dim=1).flatten()
    scales = round_to(nearest * shrink.float().view(-1, *[1] * nearest.dim()), format.scale)
    return list(scales.masked_fill_(scales == 0, 1))


def _squared_error(blocks: Tensor, format: Format, step: Tensor, amax: Tensor) -> Tensor:
    """Returns the squared error of each block in units of its amax: 1e-30 and 1e30 squared are beyond float32."""
    steps = blocks / step
    error = round_to(steps, format.element).sub_(steps).square_().sum(dim=(-3, -1), keepdim=True)
    return error.mul_((step / nonzero(amax)).square_())


def _require(format: Format, scale: object, rule: str) -> None:
    if format.scale is not scale:
        kind = "MX formats (E8M0 scales)" if scale is E8M0 else "NVFP4 (E4M3 scales)"
        raise ValueError(f"scale rule {rule!r} is defined for {kind}, not for {format.name}; use 'max' or 'mse'")


SCALE_RULES: dict[str, ScaleRule] = {
    "max": max_rule,
    "ocp": lambda blocks, format, _: _floor_scale(amax_over_blocks(blocks), format),
    "even": even_rule,
    "four_over_six": four_over_six_rule,
    "mse": mse_rule,
}
