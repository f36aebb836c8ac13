"""AWQ and SmoothQuant scale input channels before rounding.

W x = (W diag(s)) (x / s) for any positive s. Large s on a channel makes its weights large within their block, so
their rounding errors grow less than the channel's inputs shrink; and it takes outliers out of the activations. Both
methods take s from the channel's typical magnitude, s = mean|x|^p / max|w|^q:

SmoothQuant  moves the difficulty from activations to weights by a fixed split, p = q = 1/2 of channel maxima.
AWQ          tries several powers and keeps the one whose rounded layer comes closest to the original, p in 0..1 and
             q = 0; for the loss of the whole model also larger p, and q up to 1/2.

The division by s costs no time where it can be folded into the module that produces x (see `fold`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quant.calibration.solvers.interfaces import GroupInputs, Solver, Transform, shared_global_scale
from quant.calibration.solvers.lowrank import LossMetric, lowrank_branch, residual_weight
from quant.calibration.statistics import round_activation
from quant.formats.format import Format

# Powers of the activation's magnitude that AWQ tries.
POWERS = tuple(k / 10 for k in range(10))
_OF_INPUTS = tuple((power, 0.0) for power in POWERS)
# Pairs of powers, of the activation's magnitude and of the weight's, that are tried in the loss of the whole model.
_PAIRS = tuple((k / 10, weight_power) for weight_power in (0.0, 0.25, 0.5) for k in range(13))


@dataclass(frozen=True)
class Awq(Transform):
    """Activation-aware scaling: the power of the channel magnitudes that leaves the smallest output error."""

    # Where inputs are rounded too, only their rounding counts and the weights' does not. This suits GPTQ, which
    # compensates most of the weights' error; it was chosen on held-out rows of SmolLM2-135M.
    inputs_alone: bool = False
    rows: int = 512  # the largest number of output rows that take part in the search
    # The rank of the 16-bit branch that will be taken off the scaled weight; 0 for none. The branch takes the inputs
    # that matter most out of the rounding, so the remaining residual needs a higher power.
    rank: int = 0

    def followed_by(self, rounding: Solver, rank: int) -> "Awq":
        return replace(self, inputs_alone=rounding.feeds_back, rank=rank)

    def __call__(
        self, weight: Tensor, inputs: GroupInputs, format: Format, activation: Format | None, owner: Tensor | None
    ) -> Tensor:
        def round_weight(scaled: Tensor) -> Tensor:
            if self.inputs_alone and activation:
                return scaled
            second = shared_global_scale(scaled.abs().amax(), format, "max") if format.global_scale else None
            return round_activation(scaled, format, second)  # the same values, without codes in between

        pairs = _OF_INPUTS
        if inputs.output_blocks and not self.rank:
            part, pairs = LossMetric(inputs.output_blocks).enter(weight), _PAIRS
        else:
            # Every n-th output row: neighbouring rows belong to one head.
            part = weight[:: -(-len(weight) // self.rows)]
        round_input = (lambda x: round_activation(x, activation, None)) if activation else None
        return search_scale(part, inputs.sample, inputs.mean_abs, round_weight, round_input, owner, self.rank, pairs)


@dataclass(frozen=True)
class SmoothQuant(Transform):
    """Moves half of each channel's range from the activations to the weights (Xiao et al., 2022)."""

    power: float = 0.5

    def __call__(
        self, weight: Tensor, inputs: GroupInputs, format: Format, activation: Format | None, owner: Tensor | None
    ) -> Tensor:
        return channel_scale(_floored(inputs.amax, inputs.sample), weight, self.power, 1 - self.power, owner)


def channel_scale(magnitude: Tensor, weight: Tensor, power: float, weight_power: float, owner: Tensor | None) -> Tensor:
    """Returns s = magnitude^power / max|w|^weight_power `[in]`, centred on 1; owners are as in `Transform`."""
    # Centred on 1, so that scaled weights and inputs stay in the range of 16 bit.
    log = power * _log(magnitude) - weight_power * _log(weight.abs().amax(0))
    if owner is not None:
        total = torch.zeros(int(owner.max()) + 1, dtype=log.dtype, device=log.device)
        count = total.clone().index_add_(0, owner, torch.ones_like(log))
        log = (total.index_add_(0, owner, log) / count.clamp(min=1))[owner]
    return torch.exp(log - (log.amax() + log.amin()) / 2)


def _floored(magnitude: Tensor, sample: Tensor) -> Tensor:
    # One more token of the mean magnitude in every channel: weights of a silent one would be lost, were they scaled
    # away, and the inverse of its scale, folded into the producer, would take the range of the producer's other rows.
    return magnitude.clamp(min=float(magnitude.mean()) / (len(sample) + 1))


def _log(x: Tensor) -> Tensor:
    """Returns logarithms with a floor far below the median, so that a dead channel does not stretch the range."""
    return x.clamp(min=float(x.median()) * 1e-4 + 1e-20).log()


def search_scale(
    weight: Tensor, inputs: Tensor, magnitude: Tensor, round_weight: Callable[[Tensor], Tensor],
    round_input: Callable[[Tensor], Tensor] | None, owner: Tensor | None = None, rank: int = 0,
    pairs: Sequence[tuple[float, float]] = _OF_INPUTS,
) -> Tensor:  # fmt: skip
    """Returns the scale `[in]` that AWQ's search finds for a stacked weight `[out, in]` and a sample `[tokens, in]`.

    `pairs` are powers of the inputs' mean magnitude `[in]` and of the weight's that are tried, see `channel_scale`.
    """
    reference, magnitude = inputs @ weight.t(), _floored(magnitude, inputs)
    best, least = torch.ones_like(magnitude), float("inf")
    for power, weight_power in pairs:
        scale = channel_scale(magnitude, weight, power, weight_power, owner)
        unrounded, values = inputs / scale, weight * scale
        scaled = unrounded if round_input is None else round_input(unrounded)
        target = reference
        if rank:
            noise = (unrounded if round_input is None else scaled - unrounded).square().mean(0)
            down, up = branch = lowrank_branch(values, noise, min(rank, *values.shape), values.dtype)
            values, target = residual_weight(values, branch), reference - unrounded @ down.t() @ up.t()
        # ‖Q(W diag(s)) (x / s) - W x‖² over the sample, eq. 4 of AWQ (Lin et al., 2023).
        error = float((scaled @ round_weight(values).t() - target).square().mean(1).mean())
        if error < least:
            best, least = scale, error
    return best
