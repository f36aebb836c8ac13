"""`solve_group` solves a fusion group, whose members share an input, a format, and the scale of a whole tensor.

Runtimes merge the members into one matrix, which has one global scale (NVFP4) or a single scale (per-tensor FP8).
vLLM gives a merged FP8 matrix the largest scale of its members and rounds the others again: the second rounding costs
up to 1.4 times the error of the first. One scale for all, chosen before rounding, costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from quant.calibration.ranks import Exchange
from quant.calibration.solvers.gptq import Gptq
from quant.calibration.solvers.interfaces import Solver, shared_global_scale
from quant.calibration.solvers.peers import Peer
from quant.calibration.solvers.row_parallel import TOGETHER
from quant.calibration.statistics import LayerStats
from quant.formats.format import BF16, FP16, Format
from quant.formats.tensor import BlockScaledTensor, checked_amax

_STORED_NUMBER = {torch.float16: FP16, torch.bfloat16: BF16}


def solve_group(
    weights: Mapping[str, torch.Tensor],
    stats: Mapping[str, LayerStats | None],
    format: Format,
    solver: Solver,
    stored: torch.dtype | None = None,
    *,
    stack: bool = False,
) -> dict[str, BlockScaledTensor]:
    """Quantizes the weights of one fusion group, with one global or per-tensor scale where the format has one.

    Peers share only the global scale, as the toolkits that they reproduce do.

    Args:
        weights: `[out, in]` by layer name; or a single `[experts, out, in]`.
        stats: input statistics by layer name; members of a group have the same, because they read one input.
        format: shared by the group.
        solver: a solver from `SOLVERS`.
        stored: dtype of the model, where the weights come in a wider one. Wide scales (FP8, INT8) are stored in it,
            so they are chosen among its values, and elements are rounded against scales that a checkpoint can hold.
        stack: solves the members as one tall weight where the format allows it; all of them read one input.
    """
    solved_as = _solved_as(format, stored)
    members = weights
    one_scale = format.per_tensor and not isinstance(solver, Peer)
    # Rows are independent unless a scale spans them: a tile of 128 rows could straddle two members.
    as_one = len(weights) > 1 and (one_scale or (stack and format.block[0] == 1))
    if as_one:
        weights = {"|".join(members): torch.cat(list(members.values()))}
        stats = dict.fromkeys(weights, next(iter(stats.values()), None))
    elif len(weights) > 1:
        stats = _cut(stats, weights)
    global_scale = _global_scale(weights, solved_as, solver) if format.global_scale else None
    solved = {}
    for name, weight in weights.items():
        rounded = solver(weight, stats.get(name), solved_as, global_scale=global_scale, name=name)
        solved[name] = replace(rounded, format=format)
    return _split(next(iter(solved.values())), members) if as_one else solved


def solve_matrices(
    matrices: Iterable[torch.Tensor],
    stats: Sequence[LayerStats | None],
    format: Format,
    solver: Solver,
    stored: torch.dtype | None,
    name: str,
) -> Iterator[BlockScaledTensor]:
    """Yields the solutions of matrices of one shape that share nothing, such as experts.

    A GPU solves several small ones in the launches of one. Products of several matrices may add up in another order
    than products of one.

    Args:
        matrices: `[out, in]` each; only matrices that are solved together are in memory.
        stats: the statistics of each.
        format, solver, stored: as for `solve_group`.
        name: the name of the layer, for errors.
    """
    solved_as, waiting = _solved_as(format, stored), list[tuple[torch.Tensor, LayerStats]]()

    def solved() -> Iterator[BlockScaledTensor]:
        assert isinstance(solver, Gptq)
        weights, seen = zip(*waiting, strict=True)
        seconds = torch.stack([_global_scale({name: weight}, solved_as, solver) for weight in weights])
        waiting.clear()
        yield from (replace(w, format=format) for w in solver.together(weights, seen, solved_as, seconds, name))

    for matrix, of_matrix in zip(matrices, stats, strict=True):
        if of_matrix is None or not isinstance(solver, Gptq) or not solver.takes_several(matrix, solved_as):
            yield from solved() if waiting else ()
            yield solve_group({name: matrix}, {name: of_matrix}, format, solver, stored)[name]
            continue
        waiting.append((matrix, of_matrix))
        if (len(waiting) + 1) * max(matrix.numel(), matrix.shape[1] ** 2) > TOGETHER:
            yield from solved()
    if waiting:
        yield from solved()


def _solved_as(format: Format, stored: torch.dtype | None) -> Format:
    """Returns the format with a scale that a checkpoint of dtype `stored` can hold."""
    if stored in _STORED_NUMBER and format.scale.is_wide:
        return replace(format, scale=_STORED_NUMBER[stored])
    return format


def _cut(stats: Mapping[str, LayerStats | None], weights: Mapping[str, torch.Tensor]) -> dict[str, LayerStats | None]:
    """Returns the statistics of each member of a group whose members are solved one by one.

    The group's statistics hold the outputs of its members one after the other.
    """
    parts: dict[str, LayerStats | None] = {}
    start = 0
    for name, weight in weights.items():
        whole = stats.get(name)
        stop = start + weight.shape[-2]
        speaks = whole is not None and (whole.outputs is not None or whole.residual is not None)
        parts[name] = whole.of_outputs(start, stop) if speaks and whole is not None else whole
        start = stop
    return parts


def _global_scale(weights: Mapping[str, torch.Tensor], format: Format, solver: Solver) -> torch.Tensor:
    """Returns the global scale of all members of a group: s2 = amax / (largest element · largest scale)."""
    amax = torch.stack([checked_amax(weight, name) for name, weight in weights.items()]).amax(dim=0)
    if isinstance(solver, Peer):
        return amax  # a peer derives its own scale, in its own arithmetic
    return shared_global_scale(amax, format, solver.rule)


def _split(tall: BlockScaledTensor, members: Mapping[str, torch.Tensor]) -> dict[str, BlockScaledTensor]:
    """Returns the members of a group that was solved as one tall weight."""
    parts, start = {}, 0
    for name, weight in members.items():
        part = tall.rows(start, start + len(weight))
        # Clones, since views would keep the whole tall matrix alive for as long as one member lives.
        parts[name] = replace(part, codes=part.codes.clone(), scale=part.scale.clone())
        start += len(weight)
    return parts


def all_solved(
    own: Mapping[int, Mapping[str, BlockScaledTensor]],
    outlines: Sequence[tuple[Mapping[str, tuple[int, ...]], Format]],
    exchange: Exchange,
) -> list[dict[str, BlockScaledTensor]]:
    """Returns the solutions of several groups, of which each rank has some.

    Args:
        own: this rank's solutions, by number of the group.
        outlines: shapes of the members by name, and the format, of every group.
        exchange: the exchange with the other ranks, on the device of the solutions.
    """
    entries = [
        (index, [tensor for name in outlines[index][0] for tensor in _tensors(solved[name])])
        for index, solved in own.items()
    ]
    everywhere = []
    for index, tensors in exchange.in_order(entries):
        shapes, format = outlines[index]
        # Codes, scale and global scale in turn, as `_tensors` lists them.
        parts = zip(tensors[::3], tensors[1::3], tensors[2::3], strict=True)
        everywhere.append(
            {
                name: BlockScaledTensor(codes, scale, format, shape, second)  # type: ignore[arg-type]
                for (name, shape), (codes, scale, second) in zip(shapes.items(), parts, strict=True)
            }
        )
    return everywhere


def _tensors(weight: BlockScaledTensor) -> list[torch.Tensor | None]:
    return [weight.codes, weight.scale, weight.global_scale]
