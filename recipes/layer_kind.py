"""`LayerKind` is the purpose of a weight; plans and files hold it by its value, such as `linear`."""

from __future__ import annotations

import math
from enum import StrEnum


class LayerKind(StrEnum):
    """The use that a layer makes of its weight.

    A member equals its value, so `"linear"` may stand for `LayerKind.LINEAR` wherever users write plans.
    """

    LINEAR = "linear"  # y = x Wᵀ + b
    EXPERTS = "experts"  # the matrices of all experts in one parameter [experts, out, in]
    EMBEDDING = "embedding"  # a table whose rows are looked up
    HEAD = "head"  # a linear layer that turns the last hidden states into the result
    NORM = "norm"  # one dimension
    CONV = "conv"
    PARAMETER = "parameter"  # two dimensions or more, in a module of an unknown kind
    OTHER = "other"  # the weight of a module of an unknown class

    @property
    def is_named_by_parameter(self) -> bool:
        """Whether a layer is named by the path of its parameter, and not by the path of the owner of `weight`."""
        return self in (LayerKind.EXPERTS, LayerKind.PARAMETER)

    def matrix(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape `[..., out, in]` that formats divide into blocks.

        Args:
            shape: the shape of the weight; a convolution's `[out, in / groups, kernel...]` becomes `[out, in / groups *
                kernel]`, with one row for each output channel.
        """
        return (shape[0], math.prod(shape[1:])) if self is LayerKind.CONV else shape
