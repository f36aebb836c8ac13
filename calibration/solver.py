"""Solvers: from a weight, and what is known of its inputs, to codes and scales.

A solver is any callable of the `Solver` shape; `SOLVERS` maps the names that recipes and `--solver` use to them.
The ones here need no data: they round to nearest and differ in the scale rule alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from quant.calibration.peers import quantize_like_compressed_tensors, quantize_like_modelopt
from quant.formats.format import Format
from quant.formats.scaling import global_scale_of
from quant.formats.tensor import BlockScaledTensor, checked_amax, quantize


class Solver(Protocol):
    """Quantizes one weight.

    Attributes:
        rule: the scale rule whose headroom a shared global scale needs.
    """

    @property
    def rule(self) -> str: ...

    def __call__(
        self, weight: torch.Tensor, stats: Any, format: Format, *, global_scale: torch.Tensor | None, name: str
    ) -> BlockScaledTensor:
        """Codes and scales for `weight`.

        Args:
            weight: `[..., out, in]`.
            stats: statistics of the layer's inputs, or None.
            format: the target.
            global_scale: second-level scale that the layer's fusion group shares; None for formats without one.
            name: how errors call the layer.
        """
        ...


@dataclass(frozen=True)
class Rounding:
    """Round to nearest, with block scales by one rule."""

    rule: str

    def __call__(
        self, weight: torch.Tensor, stats: Any, format: Format, *, global_scale: torch.Tensor | None, name: str
    ) -> BlockScaledTensor:
        return quantize(weight, format, rule=self.rule, global_scale=global_scale, name=name)


@dataclass(frozen=True)
class Peer:
    """What another toolkit writes for the same weight, byte for byte."""

    quantize: Any
    rule: str = "max"

    def __call__(
        self, weight: torch.Tensor, stats: Any, format: Format, *, global_scale: torch.Tensor | None, name: str
    ) -> BlockScaledTensor:
        checked_amax(weight, name)
        return self.quantize(weight, format, global_scale)  # type: ignore[no-any-return]


SOLVERS: dict[str, Solver] = {
    "rtn": Rounding("max"),
    "mse": Rounding("mse"),
    "four_over_six": Rounding("four_over_six"),
    "ocp": Rounding("ocp"),
    "even": Rounding("even"),
    "modelopt": Peer(quantize_like_modelopt),
    "compressed_tensors": Peer(quantize_like_compressed_tensors),
}


def get_solver(name: str) -> Solver:
    """The solver called `name`.

    Raises:
        ValueError: unknown name; the message lists the known ones.
    """
    try:
        return SOLVERS[name]
    except KeyError:
        raise ValueError(f"unknown solver {name!r}; known solvers: {', '.join(SOLVERS)}") from None


def shared_global_scale(amax: torch.Tensor, format: Format, rule: str) -> torch.Tensor:
    """Second-level scale of a fusion group whose largest magnitude is `amax`, float32 of the shape of `amax`.

    One checkpoint layout stores this scale and the other its reciprocal. Rounding through the reciprocal once
    (at most one unit in the last place) gives a value that survives both, so what is solved is what is loaded.
    """
    scale = global_scale_of(amax, format, rule)
    return 1 / (1 / scale)


def solve_group(
    weights: Mapping[str, torch.Tensor], stats: Mapping[str, Any], format: Format, solver: Solver
) -> dict[str, BlockScaledTensor]:
    """Quantizes the weights of one fusion group, with one global scale where the format has one.

    Args:
        weights: `[out, in]` by layer name; or a single `[experts, out, in]`.
        stats: input statistics by layer name.
        format: shared by the group.
        solver: from `SOLVERS`.
    """
    global_scale = None
    if format.global_scale:
        amax = torch.stack([checked_amax(weight, name) for name, weight in weights.items()]).amax(dim=0)
        if isinstance(solver, Peer):
            global_scale = amax  # a peer derives its own scale, in its own arithmetic
        else:
            global_scale = shared_global_scale(amax, format, solver.rule)
    return {
        name: solver(weight, stats.get(name), format, global_scale=global_scale, name=name)
        for name, weight in weights.items()
    }
