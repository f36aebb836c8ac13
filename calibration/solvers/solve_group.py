"""`solve_group` solves a fusion group, whose members share an input, a format, and the scale of a whole tensor.

Runtimes merge the members into one matrix, which has one global scale (NVFP4) or a single scale (per-tensor FP8).
vLLM gives a merged FP8 matrix the largest scale of its members and rounds the others again: the second rounding costs
up to 1.4 times the error of the first. One scale for all, chosen before rounding, costs nothing.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quant.calibration.ranks import Exchange
from quant.calibration.solvers.interfaces import Solver, shared_global_scale
from quant.calibration.solvers.row_parallel import TOGETHER
from quant.calibration.statistics import LayerStats
from quant.formats.format import BF16, FP16, Format
from quant.formats.tensor import BlockScaledTensor, checked_amax

_STORED_NUMBER = {torch.float16: FP16, torch.bfloat16: BF16}


def solve_group(
    weights: Mapping[str, Tensor], stats: Mapping[str, LayerStats | None], format: Format, solver: Solver,
    stored: torch.dtype | None = None, *, stack: bool = False,
) -> dict[str, BlockScaledTensor]:  # fmt: skip
    """Quantizes the weights of one fusion group, with one global or per-tensor scale where the format has one.

    Weights are `[out, in]` by layer name, or a single `[experts, out, in]`. Members of a group have the same
    statistics, because they read one input, with the outputs of the members one after the other; `stack` solves them as
    one tall weight where the format allows it. Peers share only the global scale, as the toolkits that they reproduce
    do.

    Wide scales (FP8, INT8) are stored in the dtype of the model, `stored`, so they are chosen among its values, and
    elements are rounded against scales that a checkpoint can hold.
    """
    solved_as = _solved_as(format, stored)
    global_scale = _global_scale(weights, solved_as, solver) if format.global_scale else None

    def solve(name: str, weight: Tensor, stats: LayerStats | None) -> BlockScaledTensor:
        return replace(solver(weight, stats, solved_as, global_scale=global_scale, name=name), format=format)

    one_scale = format.per_tensor and not solver.derives_global_scale
    # Rows are independent unless a scale spans them: a tile of 128 rows could straddle two members.
    if len(weights) > 1 and (one_scale or (stack and format.block[0] == 1)):
        tall = solve("|".join(weights), torch.cat(list(weights.values())), next(iter(stats.values()), None))
        solved, start = {}, 0
        for name, weight in weights.items():
            part = tall.rows(start, start + len(weight))
            # Clones, since views would keep the whole tall matrix alive for as long as one member lives.
            solved[name] = replace(part, codes=part.codes.clone(), scale=part.scale.clone())
            start += len(weight)
        return solved
    solved, start = {}, 0
    for name, weight in weights.items():
        own, stop = stats.get(name), start + weight.shape[-2]
        if len(weights) > 1 and own is not None and (own.outputs is not None or own.residual is not None):
            own = own.of_outputs(start, stop)
        solved[name], start = solve(name, weight, own), stop
    return solved


def solve_matrices(
    matrices: Iterable[Tensor], stats: Sequence[LayerStats | None], format: Format, solver: Solver,
    stored: torch.dtype | None, name: str,
) -> Iterator[BlockScaledTensor]:  # fmt: skip
    """Yields the solutions of matrices `[out, in]` of one shape that share nothing, such as experts.

    A GPU solves several small ones in the launches of one; only these are in memory together. Products of several
    matrices may add up in another order than products of one.
    """
    solved_as, waiting = _solved_as(format, stored), list[tuple[Tensor, LayerStats]]()

    def solved() -> Iterator[BlockScaledTensor]:
        weights, seen = zip(*waiting, strict=True)
        seconds = torch.stack([_global_scale({name: weight}, solved_as, solver) for weight in weights])
        waiting.clear()
        yield from (replace(w, format=format) for w in solver.together(weights, seen, solved_as, seconds, name))

    for matrix, of_matrix in zip(matrices, stats, strict=True):
        if of_matrix is None or not solver.batches_small(matrix, solved_as):
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
    if stored in _STORED_NUMBER and format.scale.is_wide and not format.gguf:
        return replace(format, scale=_STORED_NUMBER[stored])
    return format


def _global_scale(weights: Mapping[str, Tensor], format: Format, solver: Solver) -> Tensor:
    """Returns the global scale of all members of a group: s2 = amax / (largest element · largest scale)."""
    amax = torch.stack([checked_amax(weight, name) for name, weight in weights.items()]).amax(dim=0)
    return amax if solver.derives_global_scale else shared_global_scale(amax, format, solver.rule)


def all_solved(
    own: Mapping[int, Mapping[str, BlockScaledTensor]],
    outlines: Sequence[tuple[Mapping[str, tuple[int, ...]], Format]],
    exchange: Exchange,
) -> list[dict[str, BlockScaledTensor]]:
    """Returns the solutions of several groups, of which each rank has some: `own`, by the number of the group.

    `outlines` has for each group the shapes of its weights by layer name, and their format.
    """
    entries: list[tuple[int, list[Tensor | None]]] = []
    for index, solved in own.items():
        weights = [solved[name] for name in outlines[index][0]]
        entries.append((index, [part for w in weights for part in (w.codes, w.scale, w.global_scale)]))
    everywhere = []
    for index, tensors in exchange.in_order(entries):
        shapes, format = outlines[index]
        parts = zip(tensors[::3], tensors[1::3], tensors[2::3], strict=True)
        everywhere.append(
            {
                name: BlockScaledTensor(codes, scale, format, shape, second)  # type: ignore[arg-type]
                for (name, shape), (codes, scale, second) in zip(shapes.items(), parts, strict=True)
            }
        )
    return everywhere
