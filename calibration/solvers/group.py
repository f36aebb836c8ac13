"""`solve_group` solves a fusion group, whose members share an input, a format and the second-level scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from quant.calibration.solvers.base import Solver, shared_global_scale
from quant.calibration.solvers.peers import Peer
from quant.calibration.statistics import LayerStats
from quant.formats.format import Format
from quant.formats.number import BF16, FP16
from quant.formats.tensor import BlockScaledTensor, checked_amax

_STORED_NUMBER = {torch.float16: FP16, torch.bfloat16: BF16}


def solve_group(
    weights: Mapping[str, torch.Tensor],
    stats: Mapping[str, LayerStats | None],
    format: Format,
    solver: Solver,
    stored: torch.dtype | None = None,
) -> dict[str, BlockScaledTensor]:
    """Quantizes the weights of one fusion group, with one global scale where the format has one.

    Args:
        weights: `[out, in]` by layer name; or a single `[experts, out, in]`.
        stats: input statistics by layer name.
        format: shared by the group.
        solver: from `SOLVERS`.
        stored: dtype of the model, where the weights come in a wider one. Wide scales (FP8, INT8) are stored in it,
            so they are chosen among its values, and elements are rounded against what a checkpoint can hold.
    """
    if stored in _STORED_NUMBER and format.scale.is_wide:
        solved = solve_group(weights, stats, replace(format, scale=_STORED_NUMBER[stored]), solver)
        return {name: replace(weight, format=format) for name, weight in solved.items()}
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


def solve_stacked(
    weights: Mapping[str, torch.Tensor],
    stats: LayerStats | None,
    format: Format,
    solver: Solver,
    stored: torch.dtype | None = None,
) -> dict[str, BlockScaledTensor]:
    """`solve_group` for layers with one input: where the format allows it, as one tall weight, solved once."""
    if format.block[0] != 1 or len(weights) == 1:
        return solve_group(weights, dict.fromkeys(weights, stats), format, solver, stored)
    name = "|".join(weights)
    tall = solve_group({name: torch.cat(list(weights.values()))}, {name: stats}, format, solver, stored)[name]
    parts, start = {}, 0
    for member, weight in weights.items():
        rows = slice(start, start + len(weight))
        start = rows.stop
        parts[member] = replace(
            tall, codes=tall.codes[rows].clone(), scale=tall.scale[rows].clone(), shape=tuple(weight.shape)
        )
    return parts
