"""This file defines the interfaces of a solver's parts; `solver.py` lists the parts in two dicts.

A rounding solver gives codes and scales for a weight. A transform scales input channels before that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from quant.calibration.statistics import LayerStats
from quant.formats.format import Format
from quant.formats.scaling import global_scale_of
from quant.formats.tensor import BlockScaledTensor

# Transforms look at about this many tokens of a group's inputs.
SAMPLED_TOKENS = 1024
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


class Solver(Protocol):
    """Quantizes one weight.

    Attributes:
        rule: the scale rule whose headroom a shared global scale needs.
    """

    @property
    def rule(self) -> str: ...

    def __call__(
        self, weight: Tensor, stats: LayerStats | None, format: Format, *, global_scale: Tensor | None, name: str
    ) -> BlockScaledTensor:
        """Returns codes and scales for `weight`.

        Args:
            weight: `[..., out, in]`.
            stats: statistics of the layer's inputs, or None.
            format: the target.
            global_scale: global scale that the layer's fusion group shares; None for formats without one.
            name: how errors call the layer.
        """
        ...


@dataclass(frozen=True)
class GroupInputs:
    """The original inputs of a fusion group, as transforms see them.

    Attributes:
        sample: some tokens, `[tokens, in]`, float32.
        mean_abs: mean magnitude of each channel over all tokens, `[in]`.
        amax: largest magnitude of each channel, `[in]`.
        output_blocks: diagonal blocks of the second moment of the gradients at the group's outputs, which are as many
            together; empty where it was not measured.
    """

    sample: Tensor
    mean_abs: Tensor
    amax: Tensor
    output_blocks: Sequence[Tensor] = ()

    def divided(self, divisor: Tensor) -> GroupInputs:
        """Returns the statistics of the same inputs divided by `divisor` `[in]`."""
        sample, mean_abs, amax = (part / divisor for part in (self.sample, self.mean_abs, self.amax))
        return GroupInputs(sample, mean_abs, amax, self.output_blocks)


class Transform(Protocol):
    """Chooses an input scale s for a fusion group: its weights become W diag(s) and its inputs x / s."""

    def __call__(
        self, weight: Tensor, inputs: GroupInputs, format: Format, activation: Format | None, owner: Tensor | None
    ) -> Tensor:
        """Returns the scale `[in]`.

        Args:
            weight: the weight of the whole group, `[out, in]`, float32.
            inputs: the inputs of the group.
            format, activation: the formats of weights and inputs.
            owner: the row of the producer that feeds each channel, int64 `[in]`: channels of one row must share their
                scale. None leaves all free.
        """
        ...


def sampled(x: Tensor, every: int, batch: int) -> Tensor:
    """Returns every `every`-th token of a batch of inputs `[tokens, in]`, at least one.

    The first of them differs from batch to batch. Otherwise a sample of one token in 256 would hold the first token of
    each row of 512, half of all, and first tokens are unlike others: attention parks on them, and some of their
    channels are a thousand times as loud.

    Args:
        x: the inputs.
        every: the distance of the tokens.
        batch: the number of the batch.
    """
    # Multiples of the golden ratio, less their whole parts, cover 0..1 evenly, however many there are.
    start = int(every * (batch * _GOLDEN_RATIO % 1))
    return x[start % len(x) :: every]


def required_stats(stats: LayerStats | None, name: str, solver: str) -> LayerStats:
    """Returns `stats`, which a solver cannot do without.

    Raises:
        ValueError: there are none; the message names the way out.
    """
    if stats is None:
        raise ValueError(
            f"{name}: solver {solver!r} needs calibration data; pass a text, or use 'mse', which needs none"
        )
    return stats


def shared_global_scale(amax: Tensor, format: Format, rule: str) -> Tensor:
    """Returns the global scale of a fusion group whose largest magnitude is `amax`, float32, shaped as `amax`.

    One checkpoint layout stores this scale and the other its reciprocal. Rounding through the reciprocal once
    (at most one unit in the last place) gives a value that survives both, so the scale of the solver is the scale that
    is loaded.
    """
    # compressed-tensors stores 1 / s, ModelOpt s.
    scale = global_scale_of(amax, format, rule)
    return 1 / (1 / scale)
