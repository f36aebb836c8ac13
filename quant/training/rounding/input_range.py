"""Static input scales in training: they may follow the first inputs, and inputs beyond them are counted.

A static scale comes from calibration, and training changes the inputs of every layer. Inputs beyond the range are
clipped and get no gradient, so a range that is too small is a lasting error. In the first passes that
`prepare_qat(track_inputs=)` sets, the scale grows to the largest input so far:

    scale <- max(scale, amax(x) / (largest code * largest block scale))

It never shrinks: floating-point codes lose nothing by a range twice as large. In the same passes, and in every 16th
pass after them, inputs beyond the range are counted, and `convert_qat` warns of layers that clipped many. Compiled
layers do neither, because a graph has no Python counter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from quant.kernels.linear.ops import is_in_backward, is_traced

if TYPE_CHECKING:
    from quant.training.rounding.rounded_weight import RoundedWeight

MANY = 1e-3
"""The share of clipped inputs from which `convert_qat` warns."""
_EVERY = 16


@dataclass(eq=False)
class InputRange:
    """The inputs of a layer in training, as far as they concern its static scale.

    Attributes:
        follows: training passes in which the scale grows with the inputs.
        passes: training passes so far.
        seen: inputs that were looked at.
        clipped: how many of them were beyond the range, a scalar on their device; None before the first.
    """

    follows: int = 0
    passes: int = 0
    seen: int = 0
    clipped: torch.Tensor | None = None

    @property
    def share(self) -> float:
        """The share of inputs beyond the range."""
        return float(self.clipped) / self.seen if self.clipped is not None else 0.0


@torch.no_grad()
def watch_input(layers: Sequence[RoundedWeight], x: torch.Tensor) -> None:
    """Lets the static input scales of layers follow an input that they share, and counts the values beyond them.

    Args:
        layers: they have equal scales; the first of them counts.
        x: the input as it is rounded, `[..., in]`.
    """
    first = layers[0]
    # A pass inside of a backward pass is a repetition by gradient checkpointing, which must round as the first one did.
    if not first.training or first.input_scale is None or not x.numel() or is_traced() or is_in_backward():
        return
    format = first.activation_format
    assert format is not None
    inputs = first.inputs
    passes = inputs.passes + 1
    for layer in layers:
        layer.inputs.passes = passes
    if passes > inputs.follows and passes % _EVERY != 1:
        return
    largest = format.element.max * (format.scale.max if format.global_scale else 1)
    magnitude = x.abs()
    if passes <= inputs.follows:
        reached = magnitude.amax().float() / largest
        for layer in layers:
            # A new tensor: the backward pass of an earlier forward may still need the old one as it was.
            scale = layer.input_scale
            assert scale is not None
            layer.input_scale = torch.maximum(scale, reached.to(scale.device))
    beyond = (magnitude > largest * first.input_scale).sum()
    inputs.seen += x.numel()
    inputs.clipped = beyond if inputs.clipped is None else inputs.clipped.to(beyond.device) + beyond
