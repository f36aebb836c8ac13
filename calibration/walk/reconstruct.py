"""`reconstruct` refines a finished block against the output of the original one, by AutoRound.

Steps of gradient descent follow each other, so one rank takes them all, on the calibration rows of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter

import torch

from quant.calibration.ranks import at_first, from_first, number_of, rank_and_world
from quant.calibration.solvers.autoround import BlockLayer, Reconstructed, Reconstruction, reconstruct_block
from quant.calibration.solvers.solve_group import all_solved
from quant.calibration.walk.block import Block
from quant.formats.tensor import moved
from quant.recipes.blocks import Call


def reconstruct(block: Block, outputs: Sequence[torch.Tensor]) -> None:
    """Refines the roundings of a block, where a group's solver includes it.

    Args:
        block: all of its groups are solved.
        outputs: the hidden states that the original block gave, for each of this rank's batches.

    Raises:
        ValueError: the block holds fused experts, or its output is not finite.
    """
    # One setting for the block, whose layers are learned together.
    settings = next((g.pipeline.reconstruction for g in block.groups if g.pipeline.reconstruction), None)
    if settings is None:
        return
    # Remembered outputs have no gradient, and would come from the earlier weights.
    block.remembered.forget()
    if block.experts:
        raise ValueError(
            f"{block.experts[0].name}: solver autoround learns linear layers, and these are fused experts; "
            "use 'gptq' for the model, or exclude them"
        )
    layers = {}
    for name, target in block.learned.items():
        member, solved = block.solutions[name]
        assert solved is not None
        layers[name] = BlockLayer(target, solved.weight, member.activation, solved.input_scale, solved.parts)
    for stand_in in block.stand_ins.values():
        # Stand-ins next to the learned layers must no longer remember their outputs.
        stand_in.keeps = False
        stand_in.outputs.clear()
    calls = moved(block.calls.quantized, block.device)
    refined = _on_first_rank(block, calls, moved(outputs, block.device), layers, settings)
    if not math.isfinite(refined.before):
        first = block.groups[0].members[0].name
        raise ValueError(f"{first}: NaN or infinity in the output of its block, which autoround would refine")
    note = f"block error {refined.before:.3g} before autoround, {refined.after:.3g} after"
    for name, weight in refined.weights.items():
        member, solved = block.solutions[name]
        assert solved is not None
        block.solutions[name] = (member, replace(solved, weight=weight, notes=(*solved.notes, note)))
        stand_in = block.stand_ins[name]
        stand_in.dense = weight.dequantize(stand_in.dense.dtype)


def _on_first_rank(
    block: Block,
    calls: Sequence[Call],
    outputs: Sequence[torch.Tensor],
    layers: Mapping[str, BlockLayer],
    settings: Reconstruction,
) -> Reconstructed:
    """Returns the weights that the first rank learns from the rows of all ranks, on every rank."""
    if rank_and_world()[1] == 1:
        return reconstruct_block(block.module, calls, outputs, layers, settings)
    cpu = torch.device("cpu")
    own = [
        (number_of(index), moved(call, cpu), output.to(cpu))
        for index, (call, output) in enumerate(zip(calls, outputs, strict=True))
    ]
    # Ranks exchange Python objects through the CPU, whatever their devices.
    everywhere = at_first(own)
    learned: list[Reconstructed] = []

    def learn() -> tuple[float, float]:
        assert everywhere is not None
        batches = sorted((batch for part in everywhere for batch in part), key=itemgetter(0))
        all_calls = [moved(call, block.device) for _, call, _ in batches]
        all_outputs = [output.to(block.device) for _, _, output in batches]
        learned.append(reconstruct_block(block.module, all_calls, all_outputs, layers, settings))
        return learned[0].before, learned[0].after

    before, after = from_first(learn)
    solved = {index: {name: each.weights[name]} for each in learned for index, name in enumerate(layers)}
    outlines = [({name: layer.quantized.shape}, layer.quantized.format) for name, layer in layers.items()]
    # Codes and scales as they are: decoding and rounding again could differ by a bit.
    parts = all_solved(solved, outlines, block.exchange)
    return Reconstructed({name: weight for part in parts for name, weight in part.items()}, before, after)
