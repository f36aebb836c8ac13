"""This file defines the parts of a solver; `registry.py` lists them in two dicts.

A rounding solver gives codes and scales for a weight, and says what it needs for that: the walk asks for these
abilities and never for a solver's type. A transform scales input channels before rounding.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from quant.calibration.statistics import LayerStats
from quant.formats.format import Format
from quant.formats.scaling import global_scale_of
from quant.formats.tensor import BlockScaledTensor

# Transforms look at about this many tokens of a group's inputs.
SAMPLED_TOKENS = 1024
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Shares:
    """Shares of the errors of earlier layers that a weight makes up for; 0 for none, 1 for all."""

    drift: float = 0.0  # the moment of the error of its input
    residual: float = 0.0  # the error of the residual stream that its output is added to


class Solver:
    """Quantizes one weight."""

    rule: str  # the scale rule whose headroom a shared global scale needs
    needs_moment: bool = False  # looks at the second moment of the inputs
    looks_in_blocks: bool = False  # looks only at blocks of it, as wide as the format's, over the original inputs
    feeds_back: bool = False  # lets other weights make up for the error of a rounded one
    two_sided: bool = False  # looks at the gradients of outputs
    derives_global_scale: bool = False  # from the largest magnitude, which it gets as `global_scale`

    def supports(self, format: Format) -> bool:
        """Returns whether it can give weights in `format`."""
        return True

    def shares_where(self, inputs_are_rounded: bool) -> Shares:
        """Returns how much of the errors of earlier layers it makes up for."""
        return Shares()

    def batches_small(self, weight: Tensor, format: Format) -> bool:
        """Returns whether weights of this shape are solved in fewer launches together, by `together`."""
        return False

    def together(
        self, weights: Sequence[Tensor], stats: Sequence[LayerStats], format: Format, global_scales: Tensor, name: str
    ) -> list[BlockScaledTensor]:
        """Solves several weights of one shape that share nothing, each with its own statistics."""
        raise NotImplementedError

    @abstractmethod
    def __call__(
        self, weight: Tensor, stats: LayerStats | None, format: Format, *, global_scale: Tensor | None, name: str
    ) -> BlockScaledTensor:
        """Returns codes and scales for `weight`.

        Args:
            weight: `[..., out, in]`.
            global_scale: global scale that the layer's fusion group shares; None for formats without one.
        """


@dataclass(frozen=True)
class GroupInputs:
    """The original inputs of a fusion group, as transforms see them."""

    sample: Tensor  # some tokens, [tokens, in], float32
    mean_abs: Tensor  # mean magnitude of each channel over all tokens, [in]
    amax: Tensor  # largest magnitude of each channel, [in]
    # Diagonal blocks of the second moment of the gradients at the group's outputs, which are as many together; empty
    # where it was not measured.
    output_blocks: Sequence[Tensor] = ()

    def divided(self, divisor: Tensor) -> "GroupInputs":
        """Returns the statistics of the same inputs divided by `divisor` `[in]`."""
        sample, mean_abs, amax = (part / divisor for part in (self.sample, self.mean_abs, self.amax))
        return GroupInputs(sample, mean_abs, amax, self.output_blocks)


class Transform:
    """Chooses an input scale s for a fusion group: its weights become W diag(s) and its inputs x / s."""

    def followed_by(self, rounding: Solver, rank: int) -> "Transform":
        """Returns the transform that suits a rounding solver, and a 16-bit branch of `rank` if that is not 0."""
        return self

    @abstractmethod
    def __call__(
        self, weight: Tensor, inputs: GroupInputs, format: Format, activation: Format | None, owner: Tensor | None
    ) -> Tensor:
        """Returns the scale `[in]`.

        Args:
            weight: the weight of the whole group, `[out, in]`, float32.
            owner: the row of the producer that feeds each channel, int64 `[in]`: channels of one row must share their
                scale. None leaves all free.
        """


def sampled(x: Tensor, every: int, batch: int) -> Tensor:
    """Returns every `every`-th token of the inputs `[tokens, in]` of the `batch`-th batch, at least one.

    The first of them differs from batch to batch. Otherwise a sample of one token in 256 would hold the first token of
    each row of 512, half of all, and first tokens are unlike others: attention parks on them, and some of their
    channels are a thousand times as loud.
    """
    # Multiples of the golden ratio, less their whole parts, cover 0..1 evenly, however many there are.
    return x[int(every * (batch * _GOLDEN_RATIO % 1)) % len(x) :: every]


def required_stats(stats: LayerStats | None, name: str, solver: str) -> LayerStats:
    """Returns `stats`; ValueError, with the way out, where a solver that cannot do without them gets none."""
    if stats is None:
        raise ValueError(
            f"{name}: solver {solver!r} needs calibration data; pass a text, or use 'mse', which needs none"
        )
    return stats


def shared_global_scale(amax: Tensor, format: Format, rule: str) -> Tensor:
    """Returns the global scale of a fusion group whose largest magnitude is `amax`, float32, shaped as `amax`.

    One checkpoint layout stores this scale and the other its reciprocal. Rounding through the reciprocal once (at most
    one unit in the last place) gives a value that survives both, so the scale of the solver is the scale that is
    loaded.
    """
    # compressed-tensors stores 1 / s, ModelOpt s.
    return 1 / (1 / global_scale_of(amax, format, rule))
